//! Inode numbers that programs remember.
//!
//! Overlayfs shows a file that was changed under the number of the one below
//! that it was copied from, and notes that one in an attribute. It looks at the
//! note in the writable layer only: once that is sealed and below another one,
//! the file has its own number. Nobody who starts anew can tell, but what is
//! restored from memory can: `SQLite` takes such a file for another one, and
//! does not write to it any more. So files with a note are brought up again,
//! with it, before they are looked at; all others keep their numbers as they are.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags, lgetxattr, lremovexattr, lsetxattr, utimensat};
use rustix::io::Errno;
use viv_provider::InstanceRef;

use super::Store;
use super::disk;
use super::layer::{LayerId, PARTS};

/// Where overlayfs notes what a file was copied from, and that a folder hides what is below it.
const ORIGIN: &CStr = c"trusted.overlay.origin";
const OPAQUE: &CStr = c"trusted.overlay.opaque";

/// Longest note: a file handle has 128 bytes at the most.
const ORIGIN_BYTES_MAX: usize = 256;

impl Store {
    /// Fills the new writable layer of an instance so that all files have the numbers that they had in the one that was
    /// sealed as this layer. Where layers are cloned, or are filesystems of their own, there is nothing to be done.
    pub(crate) fn keep_numbers(&self, instance: &InstanceRef, layer: &LayerId) -> io::Result<()> {
        let from = self.sealed_folder(layer).join(PARTS);
        let active = self.active_folder(instance);
        let to = active.join(PARTS);
        if !from.is_dir() || active.join(disk::FILE).exists() || !has_notes(&from)? {
            return Ok(());
        }
        viv_layer::copy(&from, &to)?;
        for part in fs::read_dir(&to)? {
            let part = part?;
            keep_noted(&from.join(part.file_name()), &part.path())?;
        }
        Ok(())
    }
}

fn note(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut value = [0; ORIGIN_BYTES_MAX];
    match lgetxattr(path, ORIGIN, &mut value[..]) {
        // An empty one says that there is nothing to be found.
        Ok(0) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Ok(length) => Ok(Some(value[..length].to_vec())),
        Err(error) => Err(error.into()),
    }
}

/// Whether any file below a folder has one.
fn has_notes(folder: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && has_notes(&entry.path())? || kind.is_file() && note(&entry.path())?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Leaves in a copy of a folder the files that have a note, with it, and the folders that lead there.
fn keep_noted(from: &Path, to: &Path) -> io::Result<()> {
    let before = fs::symlink_metadata(to)?;
    for entry in fs::read_dir(to)? {
        let entry = entry?;
        let (theirs, ours) = (from.join(entry.file_name()), entry.path());
        if entry.file_type()?.is_dir() {
            keep_noted(&theirs, &ours)?;
            if fs::read_dir(&ours)?.next().is_none() {
                fs::remove_dir(&ours)?;
                continue;
            }
            match lremovexattr(&ours, OPAQUE) {
                // What it hid is hidden by the one below.
                Ok(()) | Err(Errno::NODATA) => {}
                Err(error) => return Err(error.into()),
            }
        } else if !entry.file_type()?.is_file() || note(&theirs)?.is_none() {
            fs::remove_file(&ours)?;
            continue;
        }
        if let Some(note) = note(&theirs)? {
            lsetxattr(&ours, ORIGIN, &note, XattrFlags::empty())?;
        }
    }
    let time = |seconds, nanoseconds: i64| Timespec { tv_sec: seconds, tv_nsec: nanoseconds as _ };
    let times = Timestamps {
        last_access: time(before.atime(), before.atime_nsec()),
        last_modification: time(before.mtime(), before.mtime_nsec()),
    };
    Ok(utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}
