//! Another file in the place of one whose locks are held by a process that can neither go on nor be ended.
//!
//! SQLite's locks belong to the file, not to its name. Whoever was killed while frozen keeps them until it thaws, and
//! would keep everybody else from writing for that long. It cannot write any more either, so what it left is what a
//! crash leaves, and is read as such.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{Result, connect, failure, sync_folder};
use crate::error::StoreError;

/// What SQLite adds to a file's name.
const BESIDE: [&str; 2] = ["-shm", "-wal"];

/// Copies the file with its log, puts the log into the copy, and gives the copy the name.
pub(super) fn renew(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let copy = with_end(path, ".renewed");
    let failed = |error: std::io::Error| failure::io("the copy cannot be written:", &copy, &error);
    remove(&copy)?;
    for end in BESIDE {
        remove(&with_end(&copy, end))?;
    }
    fs::copy(path, &copy).map_err(failed)?;
    // The log's index stays behind: it is what the locks are on, and is made anew from the log.
    match fs::copy(with_end(path, "-wal"), with_end(&copy, "-wal")) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        Ok(_) | Err(_) => {}
    }
    let db = connect(&copy)?;
    let busy: i64 = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
    db.close().map_err(|(_, error)| error)?;
    if busy != 0 {
        return Err(StoreError::Unavailable { what: format!("somebody else uses {}", copy.display()) });
    }
    File::open(&copy).and_then(|file| file.sync_all()).map_err(failed)?;
    fs::rename(&copy, path).map_err(|error| failure::io("the copy cannot be named", path, &error))?;
    // A crash from here on is harmless: the old log holds nothing that is not in the copy, so it changes nothing in
    // it. The index goes first, since without it the log is read, and without the log it would be believed.
    for end in BESIDE {
        remove(&with_end(path, end))?;
    }
    sync_folder(path)
}

fn with_end(path: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(end);
    name.into()
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failure::io("cannot be removed:", path, &error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
