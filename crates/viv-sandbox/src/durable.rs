//! Small files that are there whole, or as before, whatever happens.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest file that [`read_json`] takes: ours are a few hundred bytes, and what a sandbox could reach is not trusted.
const READ_BYTES_MAX: u64 = 1 << 20;

/// Replaces a file's content in one step, on disk before it answers.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    write_beside(path, content, true)
}

/// [`replace`] for a value.
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    replace(path, &serde_json::to_vec(value)?)
}

/// Replaces in one step, without waiting for the disk: for what a power cut makes worthless anyway.
pub(crate) fn replace_json_unsynced(path: &Path, value: &impl Serialize) -> io::Result<()> {
    write_beside(path, &serde_json::to_vec(value)?, false)
}

/// How much a reserve holds: a block for the file, and some for a folder that grows.
const RESERVE_BYTES: usize = 16 << 10;

/// Makes a file whose space [`replace_json_from_reserve`] can use.
pub(crate) fn make_reserve(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| found.len() == RESERVE_BYTES as u64) {
        return Ok(());
    }
    fs::write(path, [0; RESERVE_BYTES])
}

/// [`replace_json`] that takes the space of a reserve when there is no other.
pub(crate) fn replace_json_from_reserve(path: &Path, value: &impl Serialize, reserve: &Path) -> io::Result<()> {
    match replace_json(path, value) {
        Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            fs::remove_file(reserve).map_err(|_| error)?;
            replace_json(path, value)
        }
        result => result,
    }
}

fn write_beside(path: &Path, content: &[u8], sync: bool) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().expect("a file has a folder");
    let name = path.file_name().expect("a file has a name").to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let beside = folder.join(format!(".{name}.{}.{count}", std::process::id()));
    let written = (|| {
        let mut file = File::create(&beside)?;
        file.write_all(content)?;
        if sync {
            file.sync_data()?;
        }
        fs::rename(&beside, path)?;
        if sync { File::open(folder)?.sync_all() } else { Ok(()) }
    })();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

/// Reads a value; `None` when there is no such file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let mut text = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(READ_BYTES_MAX).read_to_end(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(serde_json::from_slice(&text)?))
}
