//! Small files that are there whole, or as before, whatever happens.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
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

/// [`replace`] for a value. One that could not be read again is not written.
pub(crate) fn replace_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    replace_json_within(path, value, READ_BYTES_MAX)
}

/// The same for values that are read with [`read_json_within`].
pub(crate) fn replace_json_within(path: &Path, value: &impl Serialize, bytes_max: u64) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    if text.len() as u64 > bytes_max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "this is more than a record may hold"));
    }
    replace(path, &text)
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
        Err(error) if is_full(&error) => {
            fs::remove_file(reserve).map_err(|_| error)?;
            replace_json(path, value)
        }
        result => result,
    }
}

/// Whether it failed because there is no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Whether a file is one that [`replace`] had not finished when its process was killed.
pub(crate) fn is_half_written(name: &std::ffi::OsStr) -> bool {
    let Some(name) = name.to_str().and_then(|name| name.strip_prefix('.')) else { return false };
    let mut parts = name.rsplitn(3, '.');
    let is_number = |part: Option<&str>| part.is_some_and(|part| part.parse::<u64>().is_ok());
    is_number(parts.next()) && is_number(parts.next()) && parts.next().is_some_and(|name| !name.is_empty())
}

fn write_beside(path: &Path, content: &[u8], sync: bool) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().expect("a file has a folder");
    let name = path.file_name().expect("a file has a name").to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let beside = folder.join(format!(".{name}.{}.{count}", std::process::id()));
    let written = (|| {
        // Records hold what was given in confidence (S6).
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
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
    read_json_within(path, READ_BYTES_MAX)
}

/// The same for files that may be longer.
pub(crate) fn read_json_within<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> io::Result<Option<T>> {
    let mut text = Vec::new();
    match File::open(path) {
        Ok(file) => file.take(bytes_max).read_to_end(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(serde_json::from_slice(&text)?))
}

/// Moves a file or folder in one step, on disk before it answers.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    let folder = to.parent().expect("what is renamed has a folder");
    File::open(folder)?.sync_all()?;
    match from.parent() {
        Some(before) if before != folder => File::open(before)?.sync_all(),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_half_written_is_known() {
        assert!(is_half_written(".snp_01.json.1627.4".as_ref()));
        for other in ["snp_01.json", ".lock", ".1.2", "a.1.2", ".json.x.1"] {
            assert!(!is_half_written(other.as_ref()), "{other}");
        }
    }
}
