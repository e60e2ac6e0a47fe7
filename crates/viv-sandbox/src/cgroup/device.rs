//! The disk under a folder, as cgroups name it.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A whole disk: partitions share their disk's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockDevice {
    major: u32,
    minor: u32,
}

impl fmt::Display for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl BlockDevice {
    /// The disk that a folder lies on, or why there is none that can be named.
    pub fn under(folder: &Path) -> Result<Self, &'static str> {
        let found = fs::metadata(folder).map_err(|_| "the data folder cannot be looked at")?;
        let (major, minor) = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        if major == 0 {
            return Err("the data folder's filesystem is not on one disk");
        }
        let known = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        if !known.join("partition").exists() {
            return Ok(Self { major, minor });
        }
        let disk = fs::canonicalize(&known).ok().and_then(|partition| Some(partition.parent()?.join("dev")));
        let disk = disk.and_then(|file| fs::read_to_string(file).ok());
        let numbers = disk.as_deref().and_then(|text| text.trim().split_once(':'));
        let numbers = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let (major, minor) = numbers.ok_or("the disk of the data folder's partition is not known")?;
        Ok(Self { major, minor })
    }
}
