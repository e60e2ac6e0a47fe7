//! Locks of files that are waited for, but not for ever.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

/// How often a lock that another holds is tried again.
const EVERY: Duration = Duration::from_micros(500);

/// Takes a lock, making the file if need be. Another holder is waited for only so long (J7).
pub(crate) fn lock_file(path: &Path, exclusive: bool, within: Duration) -> io::Result<File> {
    let file = File::options().create(true).append(true).open(path)?;
    lock(&file, exclusive, within)?;
    Ok(file)
}

/// The same for a file that is open.
pub(crate) fn lock(file: &File, exclusive: bool, within: Duration) -> io::Result<()> {
    let operation =
        if exclusive { FlockOperation::NonBlockingLockExclusive } else { FlockOperation::NonBlockingLockShared };
    let until = Instant::now() + within;
    while let Err(error) = flock(file, operation) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(error.into());
        }
        if Instant::now() >= until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "another process holds it and does not let go"));
        }
        std::thread::sleep(EVERY);
    }
    Ok(())
}

/// One of a number of locks that names share, so that there are not as many locks as names.
pub(crate) fn lock_bucket(folder: &Path, name: &str, buckets: u64, within: Duration) -> io::Result<File> {
    lock_file(&bucket_path(folder, spread(name, buckets)), true, within)
}

/// Lets all of these locks begin anew: whoever holds one holds nobody any more.
pub(crate) fn renew_buckets(folder: &Path, buckets: u64) -> io::Result<()> {
    for bucket in 0..buckets {
        match fs::remove_file(bucket_path(folder, bucket)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

fn bucket_path(folder: &Path, bucket: u64) -> PathBuf {
    folder.join(format!(".lock-{bucket:02}"))
}

/// Spreads names over a number of buckets.
pub(crate) fn spread(name: &str, buckets: u64) -> u64 {
    // FNV-1a: every version has to choose the same one.
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    hash % buckets
}
