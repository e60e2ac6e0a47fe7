//! Blobs in a folder, by their digests.
//!
//! ```text
//!   <folder>/sha256/<hex>            complete: verified and on disk before it got this name
//!   <folder>/sha256/<hex>.part       being fetched, or to be resumed; locked while somebody does
//!   <folder>/sha256/.write-…         being written by a LayerWriter
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};

use crate::digest::{Digest, Hasher};
use crate::files::{Links, open_regular, sync_folder};

const PART_SUFFIX: &str = ".part";
pub(crate) const WRITE_PREFIX: &str = ".write-";
/// How often a lock that somebody else holds is asked for.
const LOCK_EVERY: Duration = Duration::from_millis(50);
const COPY_BYTES: usize = 128 << 10;

/// A folder of blobs.
#[derive(Debug, Clone)]
pub struct BlobDir {
    folder: PathBuf,
}

/// What went wrong with a folder of blobs.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The file system.
    #[error("{} cannot be {verb}", path.display())]
    Io {
        /// What was done.
        verb: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Another thread or process is fetching the same blob, and took too long.
    #[error("{0} is being fetched by somebody else")]
    Busy(Digest),
    /// The caller's callback said so.
    #[error("cancelled")]
    Cancelled,
}

impl BlobDir {
    /// Opens a folder, and makes it if there is none.
    pub fn open(folder: &Path) -> Result<Self, BlobError> {
        let own = folder.join("sha256");
        fs::create_dir_all(&own).map_err(|source| BlobError::Io { verb: "made", path: own.clone(), source })?;
        Ok(Self { folder: own })
    }

    /// Where a blob is once it is complete.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.folder.join(digest.hex())
    }

    /// The path of a complete blob. It is read and checked; one that was damaged is removed.
    pub fn get(&self, digest: &Digest, size: u64) -> Result<Option<PathBuf>, BlobError> {
        let path = self.path(digest);
        let mut file = match open_regular(&path, Links::Refuse) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(BlobError::Io { verb: "read", path, source }),
        };
        let good = hash_up_to(&mut file, size)
            .map_err(|source| BlobError::Io { verb: "read", path: path.clone(), source })?
            .is_some_and(|hasher| hasher.count() == size && hasher.finish() == *digest);
        if good {
            return Ok(Some(path));
        }
        remove(&path)?;
        Ok(None)
    }

    /// Removes a complete blob, if it is there.
    pub fn remove(&self, digest: &Digest) -> Result<(), BlobError> {
        remove(&self.path(digest))
    }

    /// The complete blobs.
    pub fn digests(&self) -> Result<Vec<Digest>, BlobError> {
        let failed = |source| BlobError::Io { verb: "listed", path: self.folder.clone(), source };
        let mut digests = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            digests.extend(name.to_str().and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok()));
        }
        digests.sort();
        Ok(digests)
    }

    /// Removes what was begun, is not being worked on, and was not touched for a while. Answers how many files.
    pub fn sweep(&self, untouched_for: Duration) -> Result<usize, BlobError> {
        let failed = |source| BlobError::Io { verb: "listed", path: self.folder.clone(), source };
        let mut removed = 0;
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if !name.ends_with(PART_SUFFIX) && !name.starts_with(WRITE_PREFIX) {
                continue;
            }
            let old = entry
                .metadata()
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age >= untouched_for));
            // Locked files are being worked on; the lock is held until the file is gone.
            if old
                && let Ok(file) = open_regular(&entry.path(), Links::Refuse)
                && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
            {
                remove(&entry.path())?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    fn part_path(&self, digest: &Digest) -> PathBuf {
        self.folder.join(format!("{}{PART_SUFFIX}", digest.hex()))
    }

    /// Opens what was begun of a blob, and locks it. `go_on` is asked while somebody else has it.
    pub(crate) fn begin(
        &self,
        digest: &Digest,
        wait: Duration,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Partial, BlobError> {
        let path = self.part_path(digest);
        let failed = |source| BlobError::Io { verb: "opened", path: path.clone(), source };
        let deadline = Instant::now() + wait;
        loop {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Who had it before may have renamed or removed it: then the lock is on a file without this name.
                Ok(()) if still_there(&file, &path).map_err(failed)? => {
                    return Ok(Partial { file, path, hasher: Hasher::default() });
                }
                Ok(()) => continue,
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
            if Instant::now() >= deadline {
                return Err(BlobError::Busy(*digest));
            }
            if !go_on() {
                return Err(BlobError::Cancelled);
            }
            std::thread::sleep(LOCK_EVERY);
        }
    }
}

fn remove(path: &Path) -> Result<(), BlobError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(BlobError::Io { verb: "removed", path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

fn still_there(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((held.dev(), held.ino()) == (named.dev(), named.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Hashes a file from where it stands; `None` if it is longer than `limit_bytes`.
fn hash_up_to(file: &mut File, limit_bytes: u64) -> io::Result<Option<Hasher>> {
    if file.metadata()?.len() > limit_bytes {
        return Ok(None);
    }
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Some(hasher)),
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// A blob that is being fetched, locked for as long as this lives.
pub(crate) struct Partial {
    file: File,
    path: PathBuf,
    hasher: Hasher,
}

impl Partial {
    /// Reads what is there from an earlier attempt; more than the blob has is thrown away.
    pub(crate) fn take_up(&mut self, size: u64) -> Result<(), BlobError> {
        let resumed = self.file.rewind().and_then(|()| hash_up_to(&mut self.file, size));
        match resumed.map_err(|source| self.failed("read", source))? {
            Some(hasher) => self.hasher = hasher,
            None => self.restart()?,
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> u64 {
        self.hasher.count()
    }

    /// Throws away what is there.
    pub(crate) fn restart(&mut self) -> Result<(), BlobError> {
        self.hasher = Hasher::default();
        let emptied = self.file.set_len(0).and_then(|()| self.file.rewind());
        emptied.map_err(|source| self.failed("emptied", source))
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), BlobError> {
        self.file.write_all(bytes).map_err(|source| self.failed("written", source))?;
        self.hasher.update(bytes);
        Ok(())
    }

    pub(crate) fn digest(&self) -> Digest {
        self.hasher.clone().finish()
    }

    /// Gives it its name. The content is on disk before, the name after.
    pub(crate) fn complete(self, blobs: &BlobDir, digest: &Digest) -> Result<PathBuf, BlobError> {
        assert_eq!(self.digest(), *digest, "only what is verified gets its name");
        let path = blobs.path(digest);
        let named =
            self.file.sync_all().and_then(|()| fs::rename(&self.path, &path)).and_then(|()| sync_folder(&blobs.folder));
        named.map_err(|source| self.failed("completed", source))?;
        Ok(path)
    }

    /// Removes it: what is there is not the beginning of the blob.
    pub(crate) fn discard(self) -> Result<(), BlobError> {
        remove(&self.path)
    }

    fn failed(&self, verb: &'static str, source: io::Error) -> BlobError {
        BlobError::Io { verb, path: self.path.clone(), source }
    }
}
