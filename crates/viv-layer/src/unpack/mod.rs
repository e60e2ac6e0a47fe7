//! Unpacking a tar stream, however hostile (S4).
//!
//! ```text
//!   tar::read ──► one entry, checked in itself
//!     ways    ──► the folder it goes into, inside the tree
//!     make    ──► made there by name, over what had the name before
//!   at last   ──► times and default access lists of folders, which what is made in them would change or inherit
//! ```
//!
//! Nothing is written outside of the folder: names lead downwards, links on the
//! way are refused or resolved inside it, and the last name is never followed.

mod error;
mod make;
mod ways;

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::fstat;

pub use self::error::{Bound, UnpackError};
use self::ways::Ways;
use crate::faults::shown;
use crate::meta::Time;
use crate::pack::Form;
use crate::settle::set_time;
use crate::tar::read::Reader;
use crate::walk::{Step, Walk};
use crate::xattr::{DEFAULT_ACL, Holder};

/// What an archive may come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bounds {
    /// Entries.
    pub entries_max: u64,
    /// Bytes of data in all files together: what is written. Holes are not
    /// counted, since they take no room; see the next.
    pub bytes_max: u64,
    /// Bytes of one file, holes included.
    pub file_bytes_max: u64,
    /// How many folders an entry may be in.
    pub depth_max: u32,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            // The largest images that are in use have some hundred thousand files.
            entries_max: 2_000_000,
            // They come to some ten gigabytes; who lets more in says how much.
            bytes_max: 64 << 30,
            // What ext4 allows; a file of a terabyte that is mostly hole is nothing unusual for a disk image.
            file_bytes_max: 16 << 40,
            // Twice what the kernel can reach with one path, so that what it could make can be unpacked.
            depth_max: 4096,
        }
    }
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Unpacked {
    /// Entries of the archive that were taken.
    pub entries: u64,
    /// Bytes of data that were written.
    pub bytes: u64,
}

/// Unpacks an archive into a folder that is there.
///
/// A name that comes twice is the later entry, except that folders keep what is
/// in them. Folders that no entry names are root's, and from the epoch, so that
/// an archive always gives the same tree. If this fails, what was made so far stays.
pub fn unpack(archive: impl Read, to: &Path, form: Form, bounds: &Bounds) -> Result<Unpacked, UnpackError> {
    let fault = |source| UnpackError::Io { entry: shown(to.as_os_str().as_encoded_bytes()), source };
    let mut unpacking = Unpacking {
        ways: Ways::new(to, form).map_err(fault)?,
        folders: Folders::default(),
        left_out: LeftOut::default(),
        form,
        bounds: bounds.clone(),
        done: Unpacked::default(),
        buffer: vec![0; make::PIECE_BYTES],
    };
    unpacking.folders.note(unpacking.ways.here(), Time::default(), None).map_err(fault)?;
    let mut reader = Reader::new(archive, bounds.entries_max);
    while let Some(member) = reader.member()? {
        unpacking.take(member, &mut reader)?;
    }
    unpacking.folders.finish(to).map_err(fault)?;
    Ok(unpacking.done)
}

struct Unpacking {
    ways: Ways,
    folders: Folders,
    left_out: LeftOut,
    form: Form,
    bounds: Bounds,
    done: Unpacked,
    buffer: Vec<u8>,
}

/// The devices that were not made, so that links to them are not made either. By the inode of the folder and a digest of
/// the name, so that each takes the same room, however long its path is.
#[derive(Default)]
struct LeftOut {
    names: HashSet<(u64, u64, u64)>,
}

impl LeftOut {
    fn key(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<(u64, u64, u64)> {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let stat = fstat(folder)?;
        Ok((stat.st_dev, stat.st_ino, hasher.finish()))
    }

    fn note(&mut self, folder: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        self.names.insert(Self::key(folder, name)?);
        Ok(())
    }

    fn has(&self, folder: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        // Nearly always, and then nothing has to be looked at.
        Ok(!self.names.is_empty() && self.names.contains(&Self::key(folder, name)?))
    }
}

/// What folders get at last, by inode: a path per folder would have no bound.
#[derive(Default)]
struct Folders {
    late: HashMap<(u64, u64), Late>,
}

struct Late {
    mtime: Time,
    /// Inherited by what is made in the folder, and so not set before.
    default_acl: Option<Vec<u8>>,
}

impl Folders {
    /// Notes what a folder gets. An inode may have been another folder's before, so everything that is made is noted.
    fn note(&mut self, folder: BorrowedFd<'_>, mtime: Time, default_acl: Option<Vec<u8>>) -> io::Result<()> {
        let stat = fstat(folder)?;
        self.late.insert((stat.st_dev, stat.st_ino), Late { mtime, default_acl });
        Ok(())
    }

    fn finish(&self, top: &Path) -> io::Result<()> {
        let mut walk = Walk::folders(top)?;
        loop {
            match walk.step() {
                Step::Entry => {
                    let below = walk.below()?;
                    if !below.members.is_empty() {
                        walk.enter(below.members)?;
                    }
                }
                Step::Exhausted => {
                    self.finish_one(walk.folder())?;
                    if !walk.leave()? {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn finish_one(&self, folder: BorrowedFd<'_>) -> io::Result<()> {
        let stat = fstat(folder)?;
        let Some(late) = self.late.get(&(stat.st_dev, stat.st_ino)) else { return Ok(()) };
        if let Some(default_acl) = &late.default_acl {
            Holder::Open(folder.as_fd()).set(DEFAULT_ACL, default_acl)?;
        }
        set_time(folder, late.mtime)
    }
}
