//! Reading entries from a stream, believing nothing.

use std::ffi::CString;
use std::io::{self, Read};

use crate::faults::shown;
use crate::meta::Time;
use crate::tar::header::{self, BadField, Header};
use crate::tar::sparse::{self, Map, Records};
use crate::tar::{BLOCK_BYTES, EXTENTS_MAX, Extent, PATH_BYTES_MAX, RECORDS_BYTES_MAX, padding, pax};
use crate::unpack::{Bound, UnpackError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    File,
    Folder,
    SymbolicLink,
    HardLink,
    Char,
    Block,
    Fifo,
    Socket,
}

/// What an archive says about an entry.
pub(crate) struct Member {
    pub(crate) kind: Type,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Time,
    pub(crate) device: (u32, u32),
    /// Of a file, its size with holes.
    pub(crate) true_bytes: u64,
    /// Where the data goes that follows; checked to be possible.
    pub(crate) extents: Vec<Extent>,
    pub(crate) attributes: Vec<(CString, Vec<u8>)>,
}

/// What comes before the header of an entry.
#[derive(Default)]
struct Before {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    records: Option<Vec<u8>>,
}

/// What the PAX records of an entry say.
#[derive(Default)]
struct Said {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<Time>,
    socket: bool,
    attributes: Vec<(CString, Vec<u8>)>,
    sparse: Records,
}

pub(crate) struct Reader<R> {
    source: R,
    /// Content of the entry that was not read yet.
    left: u64,
    /// Padding after it.
    padding: u64,
    entries: u64,
    entries_max: u64,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(source: R, entries_max: u64) -> Self {
        Self { source, left: 0, padding: 0, entries: 0, entries_max }
    }

    /// The next entry; none at the end of the archive.
    pub(crate) fn member(&mut self) -> Result<Option<Member>, UnpackError> {
        self.skip()?;
        let mut before = Before::default();
        loop {
            let Some(header) = self.header()? else {
                let nothing = before.path.is_none() && before.link.is_none() && before.records.is_none();
                return if nothing { Ok(None) } else { Err(UnpackError::Truncated) };
            };
            let size = header.size().map_err(|BadField| refused(&header.path(), "has a size that cannot be"))?;
            let slot = match header.kind() {
                // Said about all entries that follow: nothing that we would want to hear.
                b'g' => {
                    self.count()?;
                    (self.left, self.padding) = (size, padding(size));
                    self.skip()?;
                    continue;
                }
                b'x' => (&mut before.records, RECORDS_BYTES_MAX, Bound::RecordBytes),
                b'L' => (&mut before.path, PATH_BYTES_MAX, Bound::PathBytes),
                b'K' => (&mut before.link, PATH_BYTES_MAX, Bound::PathBytes),
                _ => {
                    self.count()?;
                    return self.entry(&header, size, before).map(Some);
                }
            };
            let (place, max, which) = slot;
            if place.is_some() {
                return Err(UnpackError::NotAnArchive { why: "two headers of a kind for one entry" });
            }
            *place = Some(self.whole(size, max as u64, which)?);
        }
    }

    /// Reads on in the content of the entry; nothing at its end.
    pub(crate) fn content(&mut self, buffer: &mut [u8]) -> Result<usize, UnpackError> {
        let want = (buffer.len() as u64).min(self.left) as usize;
        if want == 0 {
            return Ok(0);
        }
        let count = read(&mut self.source, &mut buffer[..want])?;
        if count == 0 {
            return Err(UnpackError::Truncated);
        }
        self.left -= count as u64;
        Ok(count)
    }

    fn count(&mut self) -> Result<(), UnpackError> {
        self.entries += 1;
        if self.entries > self.entries_max {
            return Err(UnpackError::Bound { which: Bound::Entries, max: self.entries_max });
        }
        Ok(())
    }

    fn skip(&mut self) -> Result<(), UnpackError> {
        let mut left = self.left + self.padding;
        (self.left, self.padding) = (0, 0);
        let mut buffer = [0; 8192];
        while left > 0 {
            let want = left.min(buffer.len() as u64) as usize;
            match read(&mut self.source, &mut buffer[..want])? {
                0 => return Err(UnpackError::Truncated),
                count => left -= count as u64,
            }
        }
        Ok(())
    }

    /// A block; none if the stream ends before it.
    fn block(&mut self) -> Result<Option<[u8; BLOCK_BYTES]>, UnpackError> {
        let mut block = [0; BLOCK_BYTES];
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match read(&mut self.source, &mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(UnpackError::Truncated),
                count => filled += count,
            }
        }
        Ok(Some(block))
    }

    /// A header; none at the end mark. A stream that just ends may have lost entries.
    fn header(&mut self) -> Result<Option<Header>, UnpackError> {
        let block = self.block()?.ok_or(UnpackError::Truncated)?;
        if block != [0; BLOCK_BYTES] {
            let why = "a header has the wrong sum";
            return Header::read(&block).map(Some).ok_or(UnpackError::NotAnArchive { why });
        }
        // The mark is two such blocks. Everything is there if the second is missing; data after just one is no mark.
        match self.block()? {
            Some(second) if second != [0; BLOCK_BYTES] => {
                Err(UnpackError::NotAnArchive { why: "it goes on after an empty header" })
            }
            _ => Ok(None),
        }
    }

    /// All content of a header that is about another. Memory grows with what arrives, not with what was promised.
    fn whole(&mut self, size: u64, max: u64, which: Bound) -> Result<Vec<u8>, UnpackError> {
        if size > max {
            return Err(UnpackError::Bound { which, max });
        }
        let mut bytes = Vec::new();
        let count = (&mut self.source).take(size).read_to_end(&mut bytes).map_err(reading)?;
        if (count as u64) < size {
            return Err(UnpackError::Truncated);
        }
        self.padding = padding(size);
        self.skip()?;
        Ok(bytes)
    }

    fn entry(&mut self, header: &Header, size: u64, before: Before) -> Result<Member, UnpackError> {
        let said = match &before.records {
            Some(records) => said(records).ok_or_else(|| refused(&header.path(), "has records that cannot be read"))?,
            None => Said::default(),
        };
        let Said { path, link, size: said_size, uid, gid, mtime, socket, attributes, mut sparse } = said;
        let plain = |text: Vec<u8>| text.split(|&byte| byte == 0).next().unwrap_or_default().to_vec();
        let path = sparse.name().or(path).or(before.path.map(plain)).unwrap_or_else(|| header.path());
        let link = link.or(before.link.map(plain)).unwrap_or_else(|| header.link());
        let refuse = |why: &str| refused(&path, why);
        if path.contains(&0) || link.contains(&0) {
            return Err(refuse("has a name with a NUL"));
        }
        let kind = match header.kind() {
            // Before there was a type for folders, a slash told them.
            0 if path.ends_with(b"/") => Type::Folder,
            b'0' if socket => Type::Socket,
            0 | b'0' | b'7' | b'S' => Type::File,
            b'1' => Type::HardLink,
            b'2' => Type::SymbolicLink,
            b'3' => Type::Char,
            b'4' => Type::Block,
            b'5' => Type::Folder,
            b'6' => Type::Fifo,
            other => return Err(refuse(&format!("is of a type that is not known: {}", other.escape_ascii()))),
        };
        let mut stored = said_size.unwrap_or(size);
        if kind == Type::HardLink {
            // Some writers repeat the size of what is linked to, and none of the content.
            stored = 0;
        } else if kind != Type::File && stored != 0 {
            return Err(refuse("has content, though it is no file"));
        }
        let (own_user, own_group) = header.owner();
        let owner = || refuse("has an owner that cannot be");
        let mut member = Member {
            kind,
            link,
            mode: header.mode().map_err(|BadField| refuse("has a mode that cannot be"))?,
            uid: uid.map_or(own_user, Ok).map_err(|BadField| owner())?,
            gid: gid.map_or(own_group, Ok).map_err(|BadField| owner())?,
            mtime: mtime.map_or_else(|| header.mtime(), Ok).map_err(|BadField| refuse("has a time that cannot be"))?,
            device: (0, 0),
            true_bytes: stored,
            extents: vec![(0, stored)],
            attributes,
            path: Vec::new(),
        };
        if matches!(kind, Type::Char | Type::Block) {
            member.device = header.device().map_err(|BadField| refuse("has a device number that cannot be"))?;
        }
        (self.left, self.padding) = (stored, padding(stored));
        if kind == Type::File {
            if header.kind() == b'S' {
                (member.true_bytes, member.extents) = self.old_map(header, &path)?;
            } else if let Some((true_bytes, map)) = sparse.resolve().map_err(refuse)? {
                member.true_bytes = true_bytes;
                member.extents = match map {
                    Map::Known(extents) => extents,
                    Map::InContent => self.map_in_content(&path)?,
                };
            }
            sparse::check(&member.extents, member.true_bytes, self.left).map_err(refuse)?;
        }
        member.path = path;
        Ok(member)
    }

    /// Size and map of a sparse file of old GNU tar, which go on in blocks that no size counts.
    fn old_map(&mut self, header: &Header, path: &[u8]) -> Result<(u64, Vec<Extent>), UnpackError> {
        let bad = |BadField| refused(path, "has a map of holes that cannot be read");
        let (true_bytes, mut extents, mut more) = header.sparse().map_err(bad)?;
        while more {
            let block = self.block()?.ok_or(UnpackError::Truncated)?;
            extents.extend(header::extents(&block[..504]).map_err(bad)?);
            more = block[504] != 0;
            if extents.len() > EXTENTS_MAX {
                return Err(UnpackError::Bound { which: Bound::Extents, max: EXTENTS_MAX as u64 });
            }
        }
        Ok((true_bytes, extents))
    }

    fn map_in_content(&mut self, path: &[u8]) -> Result<Vec<Extent>, UnpackError> {
        let mut lines = sparse::Lines::default();
        let bad = || refused(path, "has a map of holes that cannot be read");
        loop {
            self.left = self.left.checked_sub(BLOCK_BYTES as u64).ok_or_else(bad)?;
            let block = self.block()?.ok_or(UnpackError::Truncated)?;
            if lines.take(&block).ok_or_else(bad)? {
                return Ok(lines.finish());
            }
        }
    }
}

/// Reads the PAX records of an entry. None if one that matters cannot be read.
fn said(records: &[u8]) -> Option<Said> {
    let mut said = Said::default();
    for (key, value) in pax::parse(records)? {
        if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
            said.sparse.take(key, value)?;
            continue;
        }
        if let Some(key) = key.strip_prefix(pax::XATTR) {
            let name = CString::new(pax::unescape(key)).ok()?;
            said.attributes.push((name, value.to_vec()));
            continue;
        }
        let id = |value| pax::decimal(value).and_then(|id| header::id(i64::try_from(id).ok()?).ok());
        // An empty value takes back what was said before.
        let given = !value.is_empty();
        match key {
            b"path" => said.path = given.then(|| value.to_vec()),
            b"linkpath" => said.link = given.then(|| value.to_vec()),
            b"size" if given => said.size = Some(pax::decimal(value).filter(|&size| i64::try_from(size).is_ok())?),
            b"uid" if given => said.uid = Some(id(value)?),
            b"gid" if given => said.gid = Some(id(value)?),
            b"mtime" if given => said.mtime = Some(pax::read_time(value)?),
            pax::KIND => {
                if value != pax::SOCKET {
                    return None;
                }
                said.socket = true;
            }
            _ => {}
        }
    }
    Some(said)
}

fn refused(path: &[u8], why: &str) -> UnpackError {
    UnpackError::Refused { entry: shown(path), why: why.into() }
}

fn reading(source: io::Error) -> UnpackError {
    UnpackError::Read { source }
}

fn read(source: &mut impl Read, buffer: &mut [u8]) -> Result<usize, UnpackError> {
    loop {
        match source.read(buffer) {
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map_err(reading),
        }
    }
}
