//! Which pages of a process are not there yet, and where they are in its dump.
//!
//! ```text
//!   pagemap-7.img        pages of number 1: 3 from 0x1000 on, 2 from 0x9000 on, …
//!   pages-1.img          0x1000 │ 0x2000 │ 0x3000 │ 0x9000 │ 0xa000 │ …
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::super::wire::{Value, bad, fields, messages};

pub(super) const PAGE_BYTES: u64 = 4096;

/// Largest list that is read, of more entries than a process may have mappings.
const IMAGE_BYTES_MAX: u64 = 16 << 20;

/// The numbers of the fields: of the first message, which names the pages, and of the others.
const PAGES_ID: usize = 1;
const ADDRESS: usize = 1;
const COUNT_BEFORE: usize = 2;
const IN_PARENT: usize = 3;
const FLAGS: usize = 4;
const COUNT: usize = 5;

/// What flags say: that pages are in another dump, that they may come late, and that they are in this dump.
const FLAG_PARENT: u64 = 1;
const FLAG_LAZY: u64 = 2;
const FLAG_PRESENT: u64 = 4;

/// Pages in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Where they are in the file.
    pub(super) offset: u64,
}

/// What is missing, by address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Missing(BTreeMap<u64, (u64, u64)>);

impl Missing {
    /// Of the process with this pid inside, and the file that has it.
    pub(super) fn read(images: &Path, pid: i32) -> io::Result<(Self, File)> {
        let path = images.join(format!("pagemap-{pid}.img"));
        if fs::metadata(&path)?.len() > IMAGE_BYTES_MAX {
            return Err(bad("an image is too large"));
        }
        let (missing, pages, bytes) = Self::parse(&fs::read(path)?)?;
        let file = File::open(images.join(format!("pages-{pages}.img")))?;
        if file.metadata()?.len() < bytes {
            return Err(bad("there are fewer pages than are listed"));
        }
        Ok((missing, file))
    }

    fn parse(image: &[u8]) -> io::Result<(Self, u64, u64)> {
        let mut pages = None;
        let (mut missing, mut last, mut offset) = (Self::default(), 0, 0_u64);
        messages(image, |message| {
            let mut known = [None; 6];
            fields(message, |field| {
                if let (Some(known), Value::Number(number)) = (known.get_mut(field.number as usize), field.value) {
                    *known = Some(number);
                }
                Ok(())
            })?;
            if pages.is_none() {
                pages = Some(known[PAGES_ID].ok_or_else(|| bad("pages without a number"))?);
                return Ok(());
            }
            let flags = known[FLAGS].ok_or_else(|| bad("pages without flags"))?;
            if flags & FLAG_PARENT != 0 || known[IN_PARENT].is_some_and(|is| is != 0) {
                return Err(bad("pages of another dump"));
            }
            if flags & FLAG_PRESENT == 0 {
                return if flags & FLAG_LAZY == 0 { Ok(()) } else { Err(bad("pages that are nowhere")) };
            }
            let address = known[ADDRESS].filter(|address| address % PAGE_BYTES == 0 && *address >= last);
            let count = known[COUNT].or(known[COUNT_BEFORE]);
            let bytes = count.and_then(|count| count.checked_mul(PAGE_BYTES));
            let known = address.zip(bytes).filter(|(address, bytes)| address.checked_add(*bytes).is_some());
            let (address, bytes) = known.ok_or_else(|| bad("pages that are not in their order"))?;
            if flags & FLAG_LAZY != 0 && bytes > 0 {
                missing.put(Piece { address, bytes, offset });
            }
            (last, offset) = (address + bytes, offset.checked_add(bytes).ok_or_else(|| bad("too many pages"))?);
            Ok(())
        })?;
        Ok((missing, pages.ok_or_else(|| bad("an empty list of pages"))?, offset))
    }

    /// What is missing at the lowest address, up to so much.
    pub(super) fn first(&self, bytes_max: u64) -> Option<Piece> {
        let (&address, &(bytes, offset)) = self.0.first_key_value()?;
        Some(Piece { address, bytes: bytes.min(bytes_max), offset })
    }

    /// How many pieces there are, which is what it takes of memory.
    pub(super) fn pieces(&self) -> usize {
        self.0.len()
    }

    /// Whether anything is missing between two addresses.
    pub(super) fn has_any(&self, start: u64, end: u64) -> bool {
        let last = self.0.range(..end).next_back();
        start < end && last.is_some_and(|(&address, &(bytes, _))| address + bytes > start)
    }

    /// The page at an address, if it is missing.
    pub(super) fn page(&self, address: u64) -> Option<Piece> {
        let (&start, &(bytes, offset)) = self.0.range(..=address).next_back()?;
        let within = address - start;
        (within < bytes).then_some(Piece { address, bytes: PAGE_BYTES, offset: offset + within })
    }

    #[cfg(test)]
    pub(super) fn put_all(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        pieces.into_iter().for_each(|piece| self.put(piece));
    }

    fn put(&mut self, piece: Piece) {
        self.0.insert(piece.address, (piece.bytes, piece.offset));
    }

    /// Takes out what is missing between two addresses.
    pub(super) fn take(&mut self, start: u64, end: u64) -> Vec<Piece> {
        let before = self.0.range(..start).next_back().map(|(&address, _)| address);
        let within = self.0.range(start..end.max(start)).map(|(&address, _)| address);
        let touched: Vec<u64> = before.into_iter().chain(within).collect();
        let mut taken = Vec::new();
        for address in touched {
            let Some((bytes, offset)) = self.0.remove(&address) else { continue };
            // Each part of it that is outside stays.
            let ends = address + bytes;
            let (from, to) = (start.clamp(address, ends), end.clamp(address, ends));
            for (kept, first, last) in [(true, address, from), (false, from, to), (true, to, ends)] {
                if first < last {
                    let piece = Piece { address: first, bytes: last - first, offset: offset + (first - address) };
                    if kept { self.put(piece) } else { taken.push(piece) }
                }
            }
        }
        taken
    }

    /// What was missing at one address is missing at another.
    pub(super) fn shift(&mut self, from: u64, to: u64, bytes: u64) {
        let taken = self.take(from, from.saturating_add(bytes));
        // Whatever was there is covered.
        drop(self.take(to, to.saturating_add(bytes)));
        for piece in taken {
            self.put(Piece { address: piece.address - from + to, ..piece });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::wire::write_number;
    use super::*;

    const LAZY: u64 = FLAG_LAZY | FLAG_PRESENT;

    /// A list as CRIU writes it: `(address in pages, count, flags)`.
    fn image(rows: &[(u64, u64, u64)]) -> Vec<u8> {
        let mut image = b"magicsof".to_vec();
        let mut add = |fields: &[(usize, u64)]| {
            let mut message = Vec::new();
            for (number, value) in fields {
                write_number(&mut message, (*number as u64) << 3);
                write_number(&mut message, *value);
            }
            image.extend((message.len() as u32).to_le_bytes());
            image.extend(message);
        };
        add(&[(PAGES_ID, 3)]);
        for (address, count, flags) in rows {
            add(&[(ADDRESS, address * PAGE_BYTES), (FLAGS, *flags), (COUNT, *count)]);
        }
        image
    }

    fn piece(address: u64, count: u64, offset: u64) -> Piece {
        Piece { address: address * PAGE_BYTES, bytes: count * PAGE_BYTES, offset: offset * PAGE_BYTES }
    }

    fn all(missing: &Missing) -> Vec<Piece> {
        missing.clone().take(0, u64::MAX)
    }

    #[test]
    fn what_may_come_late_is_missing_and_where_it_is_counts_what_may_not() {
        let listed =
            image(&[(16, 3, FLAG_PRESENT), (100, 2, LAZY), (102, 4, LAZY), (200, 1, FLAG_PRESENT), (300, 1, LAZY)]);
        let (missing, pages, bytes) = Missing::parse(&listed).unwrap();
        assert_eq!((pages, bytes), (3, 11 * PAGE_BYTES));
        assert_eq!(all(&missing), [piece(100, 2, 3), piece(102, 4, 5), piece(300, 1, 10)]);
    }

    #[test]
    fn lists_that_are_not_understood_are_refused() {
        let whole = image(&[(16, 3, LAZY)]);
        assert!(Missing::parse(&whole).is_ok());
        assert!(Missing::parse(&whole[..whole.len() - 1]).is_err(), "torn");
        assert!(Missing::parse(b"magicsof").is_err(), "nothing at all");
        assert!(Missing::parse(&image(&[(16, 3, LAZY), (18, 1, LAZY)])).is_err(), "one page twice");
        assert!(Missing::parse(&image(&[(16, 3, LAZY | FLAG_PARENT)])).is_err(), "elsewhere");
        assert!(Missing::parse(&image(&[(16, 3, FLAG_LAZY)])).is_err(), "nowhere");
        assert!(Missing::parse(&image(&[(16, u64::MAX / 2, LAZY)])).is_err(), "more than there are");
    }

    #[test]
    fn fewer_pages_than_are_listed_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("pagemap-7.img"), image(&[(16, 2, LAZY)])).unwrap();
        fs::write(folder.path().join("pages-3.img"), [0; 4096]).unwrap();
        assert!(Missing::read(folder.path(), 7).is_err());
        fs::write(folder.path().join("pages-3.img"), [0; 8192]).unwrap();
        assert!(Missing::read(folder.path(), 7).is_ok());
    }

    #[test]
    fn pieces_are_cut_where_they_are_taken_and_keep_their_place_in_the_file() {
        let mut missing = Missing::default();
        missing.put(piece(10, 10, 0));
        missing.put(piece(30, 5, 10));
        assert_eq!(missing.take(15 * PAGE_BYTES, 16 * PAGE_BYTES), [piece(15, 1, 5)]);
        assert_eq!(all(&missing), [piece(10, 5, 0), piece(16, 4, 6), piece(30, 5, 10)]);
        assert_eq!(missing.take(18 * PAGE_BYTES, 32 * PAGE_BYTES), [piece(18, 2, 8), piece(30, 2, 10)]);
        assert_eq!(missing.take(18 * PAGE_BYTES, 32 * PAGE_BYTES), []);
        assert_eq!(missing.take(0, 10 * PAGE_BYTES), []);
        assert_eq!(all(&missing), [piece(10, 5, 0), piece(16, 2, 6), piece(32, 3, 12)]);
        assert_eq!(missing.first(2 * PAGE_BYTES), Some(piece(10, 2, 0)));
        let page = |number: u64| missing.page(number * PAGE_BYTES);
        assert_eq!(
            [9, 10, 14, 15, 17, 34, 35].map(page).map(|page| page.map(|page| page.offset / PAGE_BYTES)),
            [None, Some(0), Some(4), None, Some(7), Some(14), None]
        );
        let has_any = |first: u64, end: u64| missing.has_any(first * PAGE_BYTES, end * PAGE_BYTES);
        assert!(has_any(14, 15) && has_any(0, 11) && has_any(15, 17) && has_any(0, 100));
        assert!(!has_any(15, 16) && !has_any(0, 10) && !has_any(18, 32) && !has_any(35, 100) && !has_any(14, 14));
        // Moved, also onto where it was.
        missing.shift(11 * PAGE_BYTES, 12 * PAGE_BYTES, 2 * PAGE_BYTES);
        assert_eq!(
            all(&missing),
            [piece(10, 1, 0), piece(12, 2, 1), piece(14, 1, 4), piece(16, 2, 6), piece(32, 3, 12)]
        );
    }
}
