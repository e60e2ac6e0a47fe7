//! One block that starts an entry.
//!
//! ```text
//!   0 name  100 mode 108 uid 116 gid 124 size 136 mtime 148 sum 156 type 157 link
//!   257 magic  265 user 297 group  329 major 337 minor  345 prefix (ustar), or
//!   345 times, 386 four extents, 482 "more extents follow", 483 true size (GNU)
//! ```

use std::ops::Range;

use crate::meta::Time;
use crate::tar::{BLOCK_BYTES, Extent};

const NAME: Range<usize> = 0..100;
const MODE: Range<usize> = 100..108;
const UID: Range<usize> = 108..116;
const GID: Range<usize> = 116..124;
const SIZE: Range<usize> = 124..136;
const MTIME: Range<usize> = 136..148;
const SUM: Range<usize> = 148..156;
const TYPE: usize = 156;
const LINK: Range<usize> = 157..257;
const MAGIC: Range<usize> = 257..265;
const MAJOR: Range<usize> = 329..337;
const MINOR: Range<usize> = 337..345;
const PREFIX: Range<usize> = 345..500;
const SPARSE: Range<usize> = 386..482;
const MORE: usize = 482;
const TRUE_SIZE: Range<usize> = 483..495;

const USTAR: &[u8] = b"ustar\x0000";
const GNU: &[u8] = b"ustar  \0";

/// A header that was read. Its fields are as they came.
pub(crate) struct Header([u8; BLOCK_BYTES]);

/// A field that is no number, or none that makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadField;

impl Header {
    /// None if its sum is wrong: then this is no header at all.
    pub(crate) fn read(block: &[u8; BLOCK_BYTES]) -> Option<Self> {
        let header = Self(*block);
        let expected = octal(&header.0[SUM]).ok()?;
        // Some old writers summed up signed bytes.
        let signed = || sum(&header.0, |byte| i64::from(byte.cast_signed()));
        (expected == sum(&header.0, i64::from) || expected == signed()).then_some(header)
    }

    pub(crate) fn kind(&self) -> u8 {
        self.0[TYPE]
    }

    pub(crate) fn path(&self) -> Vec<u8> {
        let name = text(&self.0[NAME]);
        let prefix = if self.0[MAGIC].starts_with(b"ustar\0") { text(&self.0[PREFIX]) } else { &[] };
        if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
    }

    pub(crate) fn link(&self) -> Vec<u8> {
        text(&self.0[LINK]).to_vec()
    }

    pub(crate) fn mode(&self) -> Result<u32, BadField> {
        Ok(number(&self.0[MODE])? as u32 & 0o7777)
    }

    pub(crate) fn owner(&self) -> (Result<u32, BadField>, Result<u32, BadField>) {
        (number(&self.0[UID]).and_then(id), number(&self.0[GID]).and_then(id))
    }

    pub(crate) fn size(&self) -> Result<u64, BadField> {
        length(number(&self.0[SIZE])?)
    }

    pub(crate) fn mtime(&self) -> Result<Time, BadField> {
        Ok(Time { seconds: number(&self.0[MTIME])?, nanos: 0 })
    }

    pub(crate) fn device(&self) -> Result<(u32, u32), BadField> {
        let part = |range: Range<usize>| u32::try_from(number(&self.0[range])?).map_err(|_| BadField);
        Ok((part(MAJOR)?, part(MINOR)?))
    }

    /// Of a GNU sparse file: its true size, its first extents, and whether more follow.
    pub(crate) fn sparse(&self) -> Result<(u64, Vec<Extent>, bool), BadField> {
        if !self.0[MAGIC].starts_with(GNU) {
            return Err(BadField);
        }
        Ok((length(number(&self.0[TRUE_SIZE])?)?, extents(&self.0[SPARSE])?, self.0[MORE] != 0))
    }
}

/// Extents as old GNU headers and the blocks after them have them: offset and length, until one is empty.
pub(crate) fn extents(field: &[u8]) -> Result<Vec<Extent>, BadField> {
    let mut extents = Vec::new();
    for pair in field.chunks_exact(24) {
        if pair[0] == 0 {
            break;
        }
        extents.push((length(number(&pair[..12])?)?, length(number(&pair[12..])?)?));
    }
    Ok(extents)
}

pub(crate) fn id(number: i64) -> Result<u32, BadField> {
    // The highest means "leave as it is" to the kernel.
    u32::try_from(number).ok().filter(|&id| id != u32::MAX).ok_or(BadField)
}

fn length(number: i64) -> Result<u64, BadField> {
    u64::try_from(number).map_err(|_| BadField)
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// A number in octal digits or, where those do not reach, in binary with the first bit set.
fn number(field: &[u8]) -> Result<i64, BadField> {
    if field[0] & 0x80 == 0 {
        return octal(field);
    }
    // Two's complement in all bits but the first.
    let start = if field[0] & 0x40 == 0 { i128::from(field[0] & 0x3f) } else { i128::from(field[0]) - 0x100 };
    let value = field[1..].iter().try_fold(start, |value, &byte| value.checked_mul(256)?.checked_add(byte.into()));
    value.and_then(|value| i64::try_from(value).ok()).ok_or(BadField)
}

fn octal(field: &[u8]) -> Result<i64, BadField> {
    let padding = |byte: &u8| matches!(byte, b' ' | 0);
    let start = field.iter().position(|byte| !padding(byte)).unwrap_or(field.len());
    let digits = &field[start..];
    let end = digits.iter().position(padding).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if !rest.iter().all(padding) || !digits.iter().all(|digit| (b'0'..=b'7').contains(digit)) {
        return Err(BadField);
    }
    // At most twelve digits: no more than 36 bits. Who leaves a field empty means zero, as every tar takes it.
    Ok(digits.iter().fold(0, |value, digit| value << 3 | i64::from(digit - b'0')))
}

fn sum(block: &[u8; BLOCK_BYTES], value: impl Fn(u8) -> i64) -> i64 {
    let all = |bytes: &[u8]| bytes.iter().map(|&byte| value(byte)).sum::<i64>();
    // The sum itself counts as spaces.
    all(block) - all(&block[SUM]) + all(&[b' '; SUM.end - SUM.start])
}

/// A header to be written. What does not fit is cut short: the caller says it in a PAX record too.
pub(crate) struct Draft([u8; BLOCK_BYTES]);

impl Draft {
    pub(crate) fn new(kind: u8) -> Self {
        let mut block = [0; BLOCK_BYTES];
        block[TYPE] = kind;
        block[MAGIC].copy_from_slice(USTAR);
        Self(block)
    }

    /// Whether the whole text fits; so do the other setters.
    pub(crate) fn path(&mut self, path: &[u8]) -> bool {
        self.text(NAME, path)
    }

    pub(crate) fn link(&mut self, target: &[u8]) -> bool {
        self.text(LINK, target)
    }

    pub(crate) fn mode(&mut self, mode: u32) -> bool {
        self.octal(MODE, mode.into())
    }

    pub(crate) fn uid(&mut self, uid: u32) -> bool {
        self.octal(UID, uid.into())
    }

    pub(crate) fn gid(&mut self, gid: u32) -> bool {
        self.octal(GID, gid.into())
    }

    pub(crate) fn size(&mut self, size: u64) -> bool {
        self.octal(SIZE, size)
    }

    pub(crate) fn mtime(&mut self, mtime: Time) -> bool {
        let seconds = u64::try_from(mtime.seconds);
        self.octal(MTIME, seconds.unwrap_or(0)) && seconds.is_ok() && mtime.nanos == 0
    }

    pub(crate) fn device(&mut self, (major, minor): (u32, u32)) -> bool {
        self.octal(MAJOR, major.into()) & self.octal(MINOR, minor.into())
    }

    pub(crate) fn finish(mut self) -> [u8; BLOCK_BYTES] {
        let sum = sum(&self.0, i64::from);
        self.0[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0
    }

    fn text(&mut self, range: Range<usize>, text: &[u8]) -> bool {
        let length = text.len().min(range.len());
        self.0[range][..length].copy_from_slice(&text[..length]);
        length == text.len()
    }

    fn octal(&mut self, range: Range<usize>, value: u64) -> bool {
        let digits = range.len() - 1;
        let fits = value >> (3 * digits) == 0;
        let written = format!("{:0digits$o}\0", if fits { value } else { 0 });
        self.0[range].copy_from_slice(written.as_bytes());
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_both_ways() {
        assert_eq!(number(b"0000644\0"), Ok(0o644));
        assert_eq!(number(b"   644 \0"), Ok(0o644));
        assert_eq!(number(b"77777777"), Ok(0o7777_7777));
        assert_eq!(number(&[0; 8]), Ok(0));
        assert_eq!(number(b"\x80\0\0\0\0\0\x01\0"), Ok(256));
        assert_eq!(number(b"\xff\xff\xff\xff\xff\xff\xff\xfe"), Ok(-2));
        for bad in [
            &b"0000648\0"[..],
            b"12 34 \0\0",
            b"-000001\0",
            b"\x80\x01\0\0\0\0\0\0\0\0\0\0",
            b"\xff\0\0\0\0\0\0\0\0\0\0\0",
        ] {
            assert_eq!(number(bad), Err(BadField), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn a_draft_is_read_as_it_was_written() {
        let mut draft = Draft::new(b'3');
        assert!(draft.path(b"dev/odd\xff") && draft.mode(0o4755) && draft.uid(12) && draft.gid(0o777_7777));
        assert!(draft.size(0o77_777_777_777) && draft.device((259, 1_048_575)) && draft.link(&[b'x'; 100]));
        assert!(draft.mtime(Time { seconds: 1, nanos: 0 }));
        let header = Header::read(&draft.finish()).unwrap();
        assert_eq!((header.kind(), header.path(), header.link()), (b'3', b"dev/odd\xff".to_vec(), vec![b'x'; 100]));
        assert_eq!((header.mode(), header.owner()), (Ok(0o4755), (Ok(12), Ok(0o777_7777))));
        assert_eq!((header.size(), header.device()), (Ok(0o77_777_777_777), Ok((259, 1_048_575))));
        let mut draft = Draft::new(b'0');
        assert!(
            !draft.uid(0o1000_0000) && !draft.size(1 << 33) && !draft.path(&[b'x'; 101]) && !draft.link(&[b'x'; 101])
        );
        assert!(!draft.mtime(Time { seconds: -1, nanos: 0 }) && !draft.mtime(Time { seconds: 1, nanos: 1 }));
    }
}
