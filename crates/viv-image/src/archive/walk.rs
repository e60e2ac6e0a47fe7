//! The entries of a tar, without reading what is in them.
//!
//! The `tar` crate's own iterator reads names of any length into memory and trusts the input to end; here both are
//! bounded, and what is not needed is skipped by seeking where the source can.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::ops::ControlFlow;

use tar::{EntryType, Header, PaxExtensions};

use super::ArchiveError;
use crate::decode::BoundedDecoder;
use crate::limits::{ARCHIVE_ENTRIES_MAX, ARCHIVE_NAME_BYTES_MAX};

const BLOCK: u64 = 512;

/// One entry. Its name is a key and nothing else.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) content: Content,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    File {
        offset: u64,
        size: u64,
    },
    /// To another name, as it stands in the archive.
    Link(String),
    Other,
}

/// Something that can be read and passed over.
pub(super) trait Forward: Read {
    /// Passes over bytes. One that seeks may end up behind the end, which the next read shows.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

impl Forward for BufReader<&File> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = i64::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::UnexpectedEof))?;
        if bytes < self.buffer().len() as i64 {
            return self.seek_relative(bytes);
        }
        self.seek(SeekFrom::Current(bytes)).map(drop)
    }
}

impl<R: Read> Forward for BoundedDecoder<R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let passed = io::copy(&mut self.take(bytes), &mut io::sink())?;
        if passed < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

/// What the entries before one say about it.
#[derive(Default)]
struct Said {
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
}

/// Calls for each entry until told to stop.
pub(super) fn walk<S: Forward>(
    source: &mut S,
    mut visit: impl FnMut(&mut S, Entry) -> ControlFlow<()>,
) -> Result<(), ArchiveError> {
    let mut position = 0;
    let mut said = Said::default();
    let mut first = true;
    for _ in 0..ARCHIVE_ENTRIES_MAX {
        let Some(header) = read_header(source, first)? else { return Ok(()) };
        first = false;
        position += BLOCK;
        let kind = header.entry_type();
        let own_size = header.entry_size().map_err(|_| ArchiveError::NotTar)?;
        if is_extension(kind) {
            position += read_extension(source, kind, own_size, &mut said)?;
            continue;
        }
        if kind.is_gnu_sparse() {
            return Err(ArchiveError::Sparse);
        }
        let Said { name, link, size } = std::mem::take(&mut said);
        // Links and folders have no content, whatever their headers say of size.
        let has_content = kind.is_file() || kind == EntryType::Continuous || !is_known(kind);
        let size = if has_content { size.unwrap_or(own_size) } else { 0 };
        let name = name.unwrap_or_else(|| header.path_bytes().into_owned());
        let content = if kind.is_symlink() || kind.is_hard_link() {
            let target = link.or_else(|| header.link_name_bytes().map(std::borrow::Cow::into_owned));
            Content::Link(text(&target.unwrap_or_default()))
        } else if kind.is_file() || kind == EntryType::Continuous {
            Content::File { offset: position, size }
        } else {
            Content::Other
        };
        if visit(source, Entry { name: text(&name), content }).is_break() {
            return Ok(());
        }
        let passed = padded(size)?;
        source.skip(passed)?;
        position = position.checked_add(passed).ok_or(ArchiveError::NotTar)?;
    }
    Err(ArchiveError::TooManyEntries)
}

/// The next header, or `None` at the end.
fn read_header(source: &mut impl Read, first: bool) -> Result<Option<Header>, ArchiveError> {
    let mut header = Header::new_old();
    let bytes = header.as_mut_bytes();
    let mut filled = 0;
    while filled < bytes.len() {
        match source.read(&mut bytes[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    match filled {
        // Some writers leave out the blocks of zeros that mark the end.
        0 if !first => return Ok(None),
        filled if filled < bytes.len() => return Err(ArchiveError::NotTar),
        _ => {}
    }
    if bytes.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let sum: u32 = bytes.iter().enumerate().map(|(at, byte)| u32::from(checksum_byte(at, *byte))).sum();
    if header.cksum().ok() != Some(sum) {
        return Err(ArchiveError::NotTar);
    }
    Ok(Some(header))
}

/// The sum counts its own field as spaces.
fn checksum_byte(at: usize, byte: u8) -> u8 {
    if (148..156).contains(&at) { b' ' } else { byte }
}

fn is_extension(kind: EntryType) -> bool {
    kind.is_gnu_longname()
        || kind.is_gnu_longlink()
        || kind.is_pax_local_extensions()
        || kind.is_pax_global_extensions()
}

fn is_known(kind: EntryType) -> bool {
    kind.is_file()
        || kind.is_dir()
        || kind.is_symlink()
        || kind.is_hard_link()
        || kind.is_fifo()
        || kind.is_character_special()
        || kind.is_block_special()
}

fn read_extension(source: &mut impl Forward, kind: EntryType, size: u64, said: &mut Said) -> Result<u64, ArchiveError> {
    if size > ARCHIVE_NAME_BYTES_MAX {
        return Err(ArchiveError::LongName);
    }
    let mut bytes = vec![0; size as usize];
    source.read_exact(&mut bytes)?;
    let passed = padded(size)?;
    source.skip(passed - size)?;
    if kind.is_gnu_longname() {
        said.name = Some(until_nul(bytes));
    } else if kind.is_gnu_longlink() {
        said.link = Some(until_nul(bytes));
    } else if kind.is_pax_local_extensions() {
        for extension in PaxExtensions::new(&bytes) {
            let extension = extension.map_err(|_| ArchiveError::NotTar)?;
            match extension.key_bytes() {
                b"path" => said.name = Some(extension.value_bytes().to_vec()),
                b"linkpath" => said.link = Some(extension.value_bytes().to_vec()),
                b"size" => {
                    let size = extension.value().ok().and_then(|value| value.parse().ok());
                    said.size = Some(size.ok_or(ArchiveError::NotTar)?);
                }
                key if key.starts_with(b"GNU.sparse.") => return Err(ArchiveError::Sparse),
                _ => {}
            }
        }
    }
    Ok(passed)
}

fn padded(size: u64) -> Result<u64, ArchiveError> {
    size.checked_next_multiple_of(BLOCK).ok_or(ArchiveError::NotTar)
}

fn until_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(end);
    }
    bytes
}

/// Names of images are plain; others only have to stay different from those.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A name without the `./` that some writers put first, nor slashes at the end; `None` if it leads out of the archive.
pub(super) fn normal_name(name: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}
