//! Taking apart what is out of sight already.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Takes a folder apart, unless somebody else is at it: whoever opens a data folder empties its trash.
pub(crate) fn take_apart(folder: &Path, remove: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let lock = match File::open(folder) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => remove(folder),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Takes apart what processes left that died while they did.
pub(crate) fn empty(trash: &Path, remove: impl Fn(&Path) -> io::Result<()>) {
    let Ok(entries) = fs::read_dir(trash) else { return };
    for entry in entries.flatten() {
        // What does not go now is tried again when the folder is opened next.
        let _ = take_apart(&entry.path(), &remove);
    }
}
