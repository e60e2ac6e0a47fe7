//! Looking at files without reading them.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, OFlags, fstat, statat};
use rustix::io::Errno;
use viv_core::file::{DirEntry, DirListing, FileKind, FileStat};

use crate::agent::Agent;
use crate::error::{Result, invalid, refused};
use crate::files;
use crate::files::resolve::open_beneath;

/// Longest listing as JSON: half a frame, and some ten thousand entries.
const LISTING_BYTES_MAX: usize = 4 << 20;

/// What an entry takes beside its names, rounded up.
const ENTRY_BYTES: usize = 192;

/// Deepest listing.
const DEPTH_MAX: u32 = 256;

/// Directories that wait to be looked into; each is only a path.
const WAITING_MAX: usize = 100_000;

/// What stands at a path; a link is itself.
pub(crate) fn stat(agent: &Agent, path: &str) -> Result<FileStat> {
    let fd = files::open(agent, path, OFlags::PATH | OFlags::NOFOLLOW)?;
    let stat = fstat(&fd).map_err(|errno| refused(path, errno))?;
    let is_link = files::kind_of(&stat) == FileKind::Symlink;
    Ok(files::describe(&stat, if is_link { files::link_target(&fd, OsStr::new("")) } else { None }))
}

/// What is in a directory, `depth` levels down.
pub(crate) fn list(agent: &Agent, path: &str, depth: u32) -> Result<DirListing> {
    if depth == 0 {
        return Err(invalid("a depth of 0 lists nothing: 1 is the directory itself"));
    }
    let (asked, depth) = (depth, depth.min(DEPTH_MAX));
    let base = files::open(agent, path, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let home = files::home(agent);
    let mut listing = DirListing { entries: Vec::new(), complete: true };
    let mut bytes = 0;
    let mut waiting = vec![(PathBuf::new(), 1)];
    while let Some((below, level)) = waiting.pop() {
        let dir = match open_below(&base, &below) {
            Ok(dir) => dir,
            Err(errno) if level == 1 => return Err(refused(path, errno)),
            // It went away, or was replaced by a link, since it was seen.
            Err(_) => continue,
        };
        for entry in Dir::read_from(&dir).map_err(|errno| refused(path, errno))? {
            let entry = entry.map_err(|errno| refused(path, errno))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let Ok(stat) = statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let entry = describe(&dir, &below.join(name), name, &stat);
            bytes += ENTRY_BYTES + json_bytes(&entry.path) + entry.stat.link_target.as_deref().map_or(0, json_bytes);
            if bytes > LISTING_BYTES_MAX || waiting.len() > WAITING_MAX {
                listing.complete = false;
                sort(&mut listing);
                return Ok(listing);
            }
            let is_ours = home == Some((stat.st_dev, stat.st_ino));
            if entry.stat.kind == FileKind::Dir && level < depth && !is_ours {
                waiting.push((below.join(name), level + 1));
            } else if entry.stat.kind == FileKind::Dir && level < asked && !is_ours {
                listing.complete = false;
            }
            listing.entries.push(entry);
        }
    }
    sort(&mut listing);
    Ok(listing)
}

fn sort(listing: &mut DirListing) {
    listing.entries.sort_unstable_by(|a, b| a.path.cmp(&b.path));
}

fn open_below(base: &OwnedFd, below: &Path) -> rustix::io::Result<OwnedFd> {
    let path = if below.as_os_str().is_empty() { Path::new(".") } else { below };
    loop {
        match open_beneath(base, path, OFlags::RDONLY | OFlags::DIRECTORY) {
            // A rename somewhere raced with the lookup.
            Err(Errno::AGAIN) => {}
            opened => return opened,
        }
    }
}

fn describe(dir: &OwnedFd, below: &Path, name: &OsStr, stat: &rustix::fs::Stat) -> DirEntry {
    let is_link = files::kind_of(stat) == FileKind::Symlink;
    let target = if is_link { files::link_target(dir, name) } else { None };
    let (path, lossy) = match below.to_str() {
        Some(path) => (path.to_owned(), false),
        None => (below.to_string_lossy().into_owned(), true),
    };
    DirEntry { path, lossy, stat: files::describe(stat, target) }
}

/// Length of a text once it is JSON.
fn json_bytes(text: &str) -> usize {
    text.bytes()
        .map(|byte| match byte {
            b'"' | b'\\' => 2,
            0..0x20 => 6,
            _ => 1,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_length_as_json_is_never_underestimated(text in any::<String>()) {
            prop_assert!(json_bytes(&text) + 2 >= serde_json::to_string(&text).unwrap().len());
        }
    }
}
