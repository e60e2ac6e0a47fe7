//! Files that are opened with care: regular ones only, and never longer than expected.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Whether the last part of a path may be a symbolic link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// The caller chose the path.
    Follow,
    /// The path lies in a folder that a stranger made.
    Refuse,
}

/// Opens a regular file for reading; a pipe or a device neither blocks nor is read.
pub(crate) fn open_regular(path: &Path, links: Links) -> io::Result<File> {
    let mut flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    if links == Links::Refuse {
        flags |= OFlags::NOFOLLOW;
    }
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    Ok(file)
}

/// Reads all, if that is not more than the limit; `None` if it is.
pub(crate) fn read_bounded(source: impl Read, limit_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    source.take(limit_bytes + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit_bytes).then_some(bytes))
}

/// Makes a folder's entries last.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
