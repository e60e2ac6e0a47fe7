//! Room that is kept for what has to be written on a full disk: that something is to end.
//!
//! Whoever fills the disk could not be stopped otherwise, since a stop counts only once it is recorded (L8). Everything
//! else is refused where there is no room, and finds the reserve still there for that.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Enough for the records of several stops: the log takes some tens of kilobytes for each, and is written anew from its
/// beginning once it was put back into the file.
const BYTES: u64 = 1 << 20;

/// What is given at once: enough for one group of statements, so that others who find it there leave most of it.
const PART_BYTES: u64 = BYTES / 4;

/// How soon it is tried to have all of it again.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// A file that holds room until it is needed.
pub(super) struct Reserve {
    path: PathBuf,
    /// How long it is.
    bytes: u64,
    tried: Option<Instant>,
}

impl Reserve {
    /// Beside the file itself, wherever a link to it lies.
    pub(super) fn of(file: &Path) -> Self {
        let mut path = OsString::from(fs::canonicalize(file).unwrap_or_else(|_| file.to_owned()));
        path.push("-reserve");
        let bytes = fs::metadata(&path).map_or(0, |found| found.len());
        let mut reserve = Self { path: path.into(), bytes, tried: None };
        reserve.keep();
        reserve
    }

    /// Has all of it be there, if there is room. Without it, all writes wait for room alike.
    pub(super) fn keep(&mut self) {
        if self.bytes >= BYTES || self.tried.is_some_and(|tried| tried.elapsed() < TRY_AGAIN) {
            return;
        }
        self.tried = Some(Instant::now());
        let Ok(mut file) = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path) else { return };
        let missing = usize::try_from(BYTES - self.bytes).unwrap_or(0);
        // Not by allocating: what a filesystem only promises may not be there.
        if file.write_all(&vec![0; missing]).and_then(|()| file.sync_data()).is_ok() {
            self.bytes = BYTES;
        } else {
            let _ = file.set_len(self.bytes);
        }
    }

    /// Gives a part of it to whoever writes next; false when nothing is left.
    pub(super) fn give(&mut self) -> bool {
        let left = self.bytes.saturating_sub(PART_BYTES);
        let given = self.bytes > 0
            && OpenOptions::new().write(true).open(&self.path).and_then(|file| file.set_len(left)).is_ok();
        self.bytes = left;
        self.tried = Some(Instant::now());
        given
    }
}
