//! Maps of files with holes, in the four ways there are to write them.
//!
//! ```text
//!   type S       true size and extents in the header and the blocks after it (old GNU)
//!   PAX 0.0      GNU.sparse.offset and GNU.sparse.numbytes, again and again
//!   PAX 0.1      GNU.sparse.map: all of them in one record
//!   PAX 1.0      GNU.sparse.major and .minor; the map is the start of the content
//! ```

use crate::tar::EXTENTS_MAX;
use crate::tar::pax::decimal;

/// What the PAX records of an entry say about holes.
#[derive(Default)]
pub(crate) struct Records {
    major: Option<u64>,
    minor: Option<u64>,
    true_bytes: Option<u64>,
    name: Option<Vec<u8>>,
    offsets: Vec<u64>,
    lengths: Vec<u64>,
    map: Option<Vec<(u64, u64)>>,
    met: bool,
}

/// How the map of a file is found.
pub(crate) enum Map {
    Known(Vec<(u64, u64)>),
    InContent,
}

impl Records {
    /// Takes a record whose key starts with `GNU.sparse.`. None if it makes no sense.
    pub(crate) fn take(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        self.met = true;
        match key {
            b"major" => self.major = Some(decimal(value)?),
            b"minor" => self.minor = Some(decimal(value)?),
            b"size" | b"realsize" => self.true_bytes = Some(decimal(value)?),
            b"name" => self.name = Some(value.to_vec()),
            // The number of extents, which are there to be counted.
            b"numblocks" => {}
            b"offset" => self.offsets.push(decimal(value)?),
            b"numbytes" => self.lengths.push(decimal(value)?),
            b"map" => {
                let numbers = if value.is_empty() {
                    Vec::new()
                } else {
                    value.split(|&byte| byte == b',').map(decimal).collect::<Option<Vec<_>>>()?
                };
                let (pairs, rest) = numbers.as_chunks::<2>();
                if !rest.is_empty() {
                    return None;
                }
                self.map = Some(pairs.iter().map(|&[offset, length]| (offset, length)).collect());
            }
            _ => return None,
        }
        Some(())
    }

    pub(crate) fn name(&mut self) -> Option<Vec<u8>> {
        self.name.take()
    }

    /// True size and map, if the file is said to have holes. An error if what is said makes no sense.
    pub(crate) fn resolve(self) -> Result<Option<(u64, Map)>, &'static str> {
        if !self.met {
            return Ok(None);
        }
        let true_bytes = self.true_bytes.ok_or("has holes, but no size")?;
        let map = match (self.major, self.minor) {
            (Some(1), Some(0)) => Map::InContent,
            (None | Some(0), _) => {
                if self.offsets.len() != self.lengths.len() {
                    return Err("has holes that are only half described");
                }
                Map::Known(self.map.unwrap_or_else(|| self.offsets.into_iter().zip(self.lengths).collect()))
            }
            _ => return Err("has holes in a form that is not known"),
        };
        Ok(Some((true_bytes, map)))
    }
}

/// Reads the lines of a map that is the start of some content.
#[derive(Default)]
pub(crate) struct Lines {
    number: Option<u64>,
    count: Option<u64>,
    offset: Option<u64>,
    extents: Vec<(u64, u64)>,
}

impl Lines {
    /// Takes a block. True once the map is complete; the rest of the block is padding. None if this is no map.
    pub(crate) fn take(&mut self, block: &[u8]) -> Option<bool> {
        for &byte in block {
            if byte != b'\n' {
                let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
                self.number = Some(self.number.unwrap_or(0).checked_mul(10)?.checked_add(digit)?);
                continue;
            }
            let number = self.number.take()?;
            let Some(count) = self.count else {
                self.count = Some(number).filter(|&count| count <= EXTENTS_MAX as u64);
                self.count?;
                if number == 0 {
                    return Some(true);
                }
                continue;
            };
            match self.offset.take() {
                None => self.offset = Some(number),
                Some(offset) => self.extents.push((offset, number)),
            }
            if self.extents.len() as u64 == count {
                return Some(true);
            }
        }
        Some(false)
    }

    pub(crate) fn finish(self) -> Vec<(u64, u64)> {
        self.extents
    }
}

/// Checks that a map is one: in order, without overlaps, inside the file, and as long as the data that follows.
pub(crate) fn check(extents: &[(u64, u64)], true_bytes: u64, data_bytes: u64) -> Result<(), &'static str> {
    if extents.len() > EXTENTS_MAX {
        return Err("has too many holes");
    }
    let mut end = 0;
    let mut data = 0;
    for &(offset, length) in extents {
        if offset < end {
            return Err("has data in the same place twice");
        }
        end = offset.checked_add(length).filter(|&end| end <= true_bytes).ok_or("has data beyond its end")?;
        data += length;
    }
    if data == data_bytes { Ok(()) } else { Err("has more or less data than its map of holes says") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_must_be_possible() {
        assert!(check(&[(0, 5), (5, 5), (20, 0)], 20, 10).is_ok());
        assert!(check(&[], 1 << 40, 0).is_ok());
        for (extents, size, data) in [
            (&[(5, 5), (0, 5)][..], 20, 10),
            (&[(0, 6), (5, 5)], 20, 11),
            (&[(15, 6)], 20, 6),
            (&[(u64::MAX, 2)], 20, 2),
            (&[(0, 5)], 20, 6),
        ] {
            assert!(check(extents, size, data).is_err(), "{extents:?}");
        }
    }

    #[test]
    fn a_map_is_read_however_its_blocks_are_cut() {
        let map = b"2\n0\n512\n1048576\n0\n\0\0\0";
        for cut in 0..map.len() {
            let mut lines = Lines::default();
            if lines.take(&map[..cut]) == Some(false) {
                assert_eq!(lines.take(&map[cut..]), Some(true));
            }
            assert_eq!(lines.finish(), [(0, 512), (1_048_576, 0)]);
        }
        for bad in [&b"x\n"[..], b"\n", b"99999999999\n", b"1\n-1\n1\n"] {
            assert_eq!(Lines::default().take(bad), None);
        }
    }
}
