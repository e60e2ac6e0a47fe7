//! What is in a layer, as numbers, as a digest and as lines.
//!
//! The digest covers a stream of records in the order of the walk, each with its
//! depth: names, not paths, so that it takes time in proportion to the entries
//! however deep they are. Hard links are told by the number of the entry they
//! repeat. Extended attributes come sorted, their values after their lengths.
//!
//! A content digest has, after each file, those of its blocks that are not all
//! zeros, each with its offset: a file with holes and its dense copy are the
//! same, and a hole costs nothing.

use std::ffi::CStr;
use std::fmt::Write as _;
use std::io;
use std::path::Path;

use rustix::fs::{Mode, fstat, openat, readlinkat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::extents::{Extents, FILE, is_zero, read_at};
use crate::faults::at;
use crate::links::Links;
use crate::meta::{Kind, Meta};
use crate::walk::{Step, Walk};
use crate::xattr::{Attributes, Holder};

/// The unit of content digests: large enough to be fast, and to make offsets a small part.
const BLOCK_BYTES: u64 = 64 * 1024;

/// What [`lines`] may come to. It is for reading, and the paths of a deep tree grow with the square of its depth.
const LINES_BYTES_MAX: usize = 256 << 20;

/// What is in a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// Entries below the top folder.
    pub entries: u64,
    /// What files hold, holes included, each inode once.
    pub apparent_bytes: u64,
    /// What everything takes on disk, each inode once. Depends on the filesystem.
    pub disk_bytes: u64,
    /// Names, kinds, owners, permissions, times, sizes, targets, devices, hard links and extended attributes.
    pub structure: Digest,
}

impl Survey {
    /// Whether two layers are the same as far as a survey sees: everything but the content of files.
    pub fn same_structure(&self, other: &Self) -> bool {
        (self.entries, self.apparent_bytes, self.structure) == (other.entries, other.apparent_bytes, other.structure)
    }
}

/// Takes in the entries of a layer, in the order of the walk.
pub(crate) struct Surveyor {
    hasher: blake3::Hasher,
    entries: u64,
    apparent_bytes: u64,
    disk_bytes: u64,
    links: Links<u64>,
    record: Vec<u8>,
}

impl Surveyor {
    pub(crate) fn new() -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"viv-layer 1\n");
        let links = Links::default();
        Self { hasher, entries: 0, apparent_bytes: 0, disk_bytes: 0, links, record: Vec::new() }
    }

    /// The top folder: no entry, but its attributes count.
    pub(crate) fn top(&mut self, meta: &Meta, attributes: &Attributes<'_>) -> io::Result<()> {
        // Sparse files of a sandbox may add up to more than there are numbers.
        self.disk_bytes = self.disk_bytes.saturating_add(meta.disk_bytes);
        self.write(0, c"", meta, None, attributes)
    }

    /// One entry, of some layer. True if it is another name of one before, and so has nothing of its own.
    pub(crate) fn entry(
        &mut self,
        (depth, name, layer): (usize, &CStr, usize),
        meta: &Meta,
        target: Option<&CStr>,
        attributes: &Attributes<'_>,
    ) -> io::Result<bool> {
        let number = self.entries;
        self.entries += 1;
        if let Some(first) = self.links.meet(layer, meta, || number) {
            self.head(depth, name, b'=');
            self.record.extend_from_slice(&first.to_le_bytes());
            self.hasher.update(&self.record);
            return Ok(true);
        }
        self.disk_bytes = self.disk_bytes.saturating_add(meta.disk_bytes);
        if meta.kind == Kind::File {
            self.apparent_bytes = self.apparent_bytes.saturating_add(meta.size);
        }
        self.write(depth, name, meta, target, attributes)?;
        Ok(false)
    }

    fn head(&mut self, depth: usize, name: &CStr, kind: u8) {
        self.record.clear();
        self.record.extend_from_slice(&(depth as u32).to_le_bytes());
        self.record.extend_from_slice(name.to_bytes_with_nul());
        self.record.push(kind);
    }

    fn write(
        &mut self,
        depth: usize,
        name: &CStr,
        meta: &Meta,
        target: Option<&CStr>,
        attributes: &Attributes<'_>,
    ) -> io::Result<()> {
        self.head(depth, name, meta.kind.letter() as u8);
        let record = &mut self.record;
        // A whiteout is its name; what else it has depends on who made it.
        if meta.kind != Kind::Whiteout {
            for number in [meta.mode, meta.uid, meta.gid, meta.mtime.nanos] {
                record.extend_from_slice(&number.to_le_bytes());
            }
            record.extend_from_slice(&meta.mtime.seconds.to_le_bytes());
            match meta.kind {
                Kind::File => record.extend_from_slice(&meta.size.to_le_bytes()),
                Kind::Char | Kind::Block => record.extend_from_slice(&meta.device.to_le_bytes()),
                Kind::Link => record.extend_from_slice(target.unwrap_or_default().to_bytes_with_nul()),
                Kind::Folder | Kind::Whiteout | Kind::Fifo | Kind::Socket => {}
            }
            self.hasher.update(record);
            record.clear();
            attributes.each(|name, value| {
                self.hasher.update(name.to_bytes_with_nul());
                self.hasher.update(&(value.len() as u64).to_le_bytes());
                self.hasher.update(value);
                Ok(())
            })?;
            // No attribute has an empty name: this ends them.
            record.push(0);
        }
        self.hasher.update(record);
        Ok(())
    }

    /// The content of the file that was the last entry.
    fn content(&mut self, walk: &Walk, size: u64, buffer: &mut [u8]) -> io::Result<()> {
        let file = openat(walk.folder(), walk.name(), FILE, Mode::empty())?;
        let mut next = 0;
        for extent in Extents::new(&file, size) {
            let (start, end) = extent?;
            next = u64::max(next, start / BLOCK_BYTES * BLOCK_BYTES);
            while next < end {
                let block = &mut buffer[..(size - next).min(BLOCK_BYTES) as usize];
                read_at(&file, block, next)?;
                if !is_zero(block) {
                    self.hasher.update(&next.to_le_bytes());
                    self.hasher.update(block);
                }
                next += BLOCK_BYTES;
            }
        }
        // No block starts there: this ends them.
        self.hasher.update(&u64::MAX.to_le_bytes());
        Ok(())
    }

    pub(crate) fn finish(self) -> Survey {
        Survey {
            entries: self.entries,
            apparent_bytes: self.apparent_bytes,
            disk_bytes: self.disk_bytes,
            structure: self.hasher.finalize().into(),
        }
    }
}

/// Surveys a layer.
pub fn survey(folder: &Path) -> io::Result<Survey> {
    let mut surveyor = Surveyor::new();
    visit(folder, |walk, meta, target, attributes| match walk {
        None => surveyor.top(meta, attributes),
        Some(walk) => surveyor.entry((walk.depth(), walk.name(), 0), meta, target, attributes).map(drop),
    })?;
    Ok(surveyor.finish())
}

/// A digest of a layer with all contents: equal for layers that nothing inside a sandbox could tell apart.
pub fn content(folder: &Path) -> io::Result<Digest> {
    let mut surveyor = Surveyor::new();
    let mut buffer = vec![0; BLOCK_BYTES as usize];
    visit(folder, |walk, meta, target, attributes| {
        let Some(walk) = walk else { return surveyor.top(meta, attributes) };
        let again = surveyor.entry((walk.depth(), walk.name(), 0), meta, target, attributes)?;
        if meta.kind == Kind::File && !again {
            surveyor.content(walk, meta.size, &mut buffer)?;
        }
        Ok(())
    })?;
    Ok(surveyor.finish().structure)
}

/// A survey to read: one line per entry, escaped and sorted.
///
/// For messages and tests. A tree whose lines would come to more than 256 MiB is refused.
pub fn lines(folder: &Path) -> io::Result<Vec<String>> {
    let mut met = Links::default();
    let mut lines = Vec::new();
    let mut length = 0;
    visit(folder, |walk, meta, target, attributes| {
        let path = walk.map_or(&b"."[..], Walk::path);
        let mut line = path.escape_ascii().to_string();
        if let Some(first) = met.meet(0, meta, || line.clone()) {
            let _ = write!(line, " = {first}");
        } else {
            describe(&mut line, meta, target, attributes)?;
        }
        length += line.len();
        if length > LINES_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too much to be listed"));
        }
        lines.push(line);
        Ok(())
    })?;
    lines.sort_unstable();
    Ok(lines)
}

fn describe(line: &mut String, meta: &Meta, target: Option<&CStr>, attributes: &Attributes<'_>) -> io::Result<()> {
    let _ = write!(line, " {}", meta.kind.letter());
    if meta.kind == Kind::Whiteout {
        return Ok(());
    }
    let (seconds, nanos) = (meta.mtime.seconds, meta.mtime.nanos);
    let _ = write!(line, " {:04o} {}:{} {seconds}s+{nanos:09}", meta.mode, meta.uid, meta.gid);
    match meta.kind {
        Kind::File => {
            let _ = write!(line, " {}", meta.size);
        }
        Kind::Char | Kind::Block => {
            let (major, minor) = meta.numbers();
            let _ = write!(line, " {major}/{minor}");
        }
        Kind::Link => {
            let _ = write!(line, " -> {}", target.unwrap_or_default().to_bytes().escape_ascii());
        }
        Kind::Folder | Kind::Whiteout | Kind::Fifo | Kind::Socket => {}
    }
    attributes.each(|name, value| {
        let _ = write!(line, " {}={}", name.to_bytes().escape_ascii(), value.escape_ascii());
        Ok(())
    })
}

type Look<'a> = dyn FnMut(Option<&Walk>, &Meta, Option<&CStr>, &Attributes<'_>) -> io::Result<()> + 'a;

/// Shows the top of a layer, which is at no point of a walk, and then all of its entries.
fn visit(
    folder: &Path,
    mut look: impl FnMut(Option<&Walk>, &Meta, Option<&CStr>, &Attributes<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let mut walk = Walk::new(&[folder])?;
    let top = walk.folder();
    look(None, &Meta::new(&fstat(top)?), None, &Attributes::list(Holder::Open(top))?)?;
    loop {
        match walk.step() {
            Step::Entry => visit_entry(&mut walk, &mut look)?,
            Step::Exhausted => {
                if !walk.leave()? {
                    return Ok(());
                }
            }
        }
    }
}

fn visit_entry(walk: &mut Walk, look: &mut Look<'_>) -> io::Result<()> {
    let looked = visit_one(walk, look);
    match looked {
        Ok(None) => Ok(()),
        Ok(Some(members)) => walk.enter(members),
        // It has gone since it was listed, which is as if it had gone before.
        Err(cause) if cause.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => Ok(()),
        Err(cause) => Err(at(walk.path(), cause)),
    }
}

/// Shows the entry, and opens it if it is a folder.
fn visit_one(walk: &Walk, look: &mut Look<'_>) -> io::Result<Option<Vec<(usize, std::os::fd::OwnedFd)>>> {
    let Some(found) = walk.find()? else { return Ok(None) };
    let named = Holder::Named(walk.folder(), walk.name());
    if found.meta.kind == Kind::Folder {
        let folder = openat(walk.folder(), walk.name(), crate::trail::FOLDER, Mode::empty())?;
        let meta = Meta::new(&fstat(&folder)?);
        look(Some(walk), &meta, None, &Attributes::list(Holder::Open(std::os::fd::AsFd::as_fd(&folder)))?)?;
        return Ok(Some(vec![(0, folder)]));
    }
    let target = match found.meta.kind {
        Kind::Link => Some(readlinkat(walk.folder(), walk.name(), Vec::new())?),
        _ => None,
    };
    look(Some(walk), &found.meta, target.as_deref(), &Attributes::list(named)?)?;
    Ok(None)
}
