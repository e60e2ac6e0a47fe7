//! How layers lie on disk: what a filesystem can do for them, and what has to be copied.
//!
//! | | new layer | clone for a fork or restore | live snapshot | disk limit |
//! |---|---|---|---|---|
//! | `btrfs` | subvolume | snapshot, constant time | snapshot, constant time | quota group |
//! | `plain` | folder | reflink or copy; restores mount and do not copy | freeze, reflink or copy | a sparse filesystem each |

use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::disk;
use crate::sys::btrfs;

/// Which driver, as configured or found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// Subvolumes and quota groups.
    Btrfs,
    /// Folders on any filesystem.
    Plain,
}

impl std::fmt::Display for DriverKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Btrfs => "btrfs",
            Self::Plain => "plain",
        })
    }
}

/// A driver at work on one folder.
#[derive(Debug, Clone)]
pub(crate) enum Driver {
    Btrfs {
        /// Where the kernel tells about quota groups, when they are on.
        quota: Option<PathBuf>,
    },
    Plain {
        /// Why there can be no filesystem of its own for a sandbox.
        no_disks: Option<String>,
    },
}

/// What a subvolume refers to, and what of that is its alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counted {
    pub(crate) referenced_bytes: u64,
    pub(crate) exclusive_bytes: u64,
}

/// Whether a folder lies on btrfs.
pub(crate) fn is_btrfs(folder: &Path) -> io::Result<bool> {
    const MAGIC: i64 = 0x9123_683E;
    Ok(rustix::fs::statfs(folder)?.f_type as i64 == MAGIC)
}

impl Driver {
    /// Sets up for a folder that lies where its layers will.
    pub(crate) fn open(kind: DriverKind, layers: &Path) -> io::Result<Self> {
        match kind {
            DriverKind::Btrfs => {
                let name = btrfs::filesystem_name(File::open(layers)?)?;
                let quota = Path::new("/sys/fs/btrfs").join(name).join("qgroups");
                let on = fs::read_to_string(quota.join("enabled")).is_ok_and(|text| text.trim() == "1");
                Ok(Self::Btrfs { quota: on.then_some(quota) })
            }
            DriverKind::Plain => Ok(Self::Plain { no_disks: disk::why_not() }),
        }
    }

    pub(crate) fn kind(&self) -> DriverKind {
        match self {
            Self::Btrfs { .. } => DriverKind::Btrfs,
            Self::Plain { .. } => DriverKind::Plain,
        }
    }

    /// Whether a live snapshot or a fork is a copy.
    pub(crate) fn copies_live(&self) -> bool {
        matches!(self, Self::Plain { .. })
    }

    /// Why a sandbox's disk cannot be limited.
    pub(crate) fn why_no_limit(&self) -> Option<String> {
        match self {
            Self::Btrfs { quota: Some(_) } => None,
            Self::Btrfs { quota: None } => {
                Some("quota groups are off on this btrfs (turn them on with `btrfs quota enable`)".to_owned())
            }
            Self::Plain { no_disks } => no_disks.clone(),
        }
    }

    /// An empty folder for one layer.
    pub(crate) fn make(&self, folder: &Path) -> io::Result<()> {
        match self {
            Self::Btrfs { .. } => {
                let (parent, name) = parent_and_name(folder)?;
                btrfs::create_subvolume(parent, &name)
            }
            Self::Plain { .. } => DirBuilder::new().mode(0o755).create(folder),
        }
    }

    /// A writable subvolume with the same content, sharing nothing writable. What is being written meanwhile may be in
    /// it in part.
    #[expect(clippy::unused_self, reason = "reads as what one of the drivers can do")]
    pub(crate) fn snapshot(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (parent, name) = parent_and_name(to)?;
        btrfs::snapshot(File::open(from)?, parent, &name)
    }

    /// Has nobody write to it any more.
    pub(crate) fn seal(&self, folder: &Path) -> io::Result<()> {
        match self {
            Self::Btrfs { .. } => btrfs::set_read_only(File::open(folder)?),
            // Nobody does: it is only ever mounted read-only from now on.
            Self::Plain { .. } => Ok(()),
        }
    }

    /// Limits what a writable folder may refer to, or takes a limit away.
    pub(crate) fn limit(&self, folder: &Path, bytes: Option<u64>) -> io::Result<()> {
        match (self, bytes) {
            (Self::Btrfs { quota: Some(_) }, bytes) => btrfs::limit_referenced(File::open(folder)?, bytes),
            (Self::Btrfs { quota: None } | Self::Plain { .. }, None) => Ok(()),
            (Self::Btrfs { quota: None } | Self::Plain { .. }, Some(_)) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// What the filesystem itself counts for a folder.
    pub(crate) fn counted(&self, folder: &Path) -> Option<Counted> {
        let Self::Btrfs { quota: Some(quota) } = self else { return None };
        let number = btrfs::subvolume_number(File::open(folder).ok()?).ok()?;
        let group = quota.join(format!("0_{number}"));
        let read = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse().ok();
        Some(Counted { referenced_bytes: read("referenced")?, exclusive_bytes: read("exclusive")? })
    }

    /// Whether a folder goes in one step, and can then not be moved when it is sealed.
    pub(crate) fn is_subvolume(&self, folder: &Path) -> bool {
        matches!(self, Self::Btrfs { .. })
            && fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && found.ino() == btrfs::SUBVOLUME_INODE)
    }

    /// Has the kernel count anew, if it lost count of what subvolumes refer to.
    pub(crate) fn recount(&self, layers: &Path) -> io::Result<()> {
        let Self::Btrfs { quota: Some(quota) } = self else { return Ok(()) };
        let lost = fs::read_to_string(quota.join("inconsistent")).is_ok_and(|text| text.trim() == "1");
        if lost { btrfs::recount(File::open(layers)?) } else { Ok(()) }
    }

    /// Removes a folder with everything in it; what is gone is fine.
    pub(crate) fn remove(&self, folder: &Path) -> io::Result<()> {
        if self.is_subvolume(folder) {
            let (parent, name) = parent_and_name(folder)?;
            return gone_is_fine(btrfs::destroy_subvolume(parent, &name));
        }
        // Whatever was left where only folders should be must not keep the rest from being collected.
        if fs::symlink_metadata(folder).is_ok_and(|found| !found.is_dir()) {
            return gone_is_fine(fs::remove_file(folder));
        }
        if let Self::Btrfs { .. } = self {
            self.remove_subvolumes_in(folder)?;
        }
        viv_layer::remove(folder)
    }

    /// A folder that is being built may hold subvolumes, one level down at most.
    fn remove_subvolumes_in(&self, folder: &Path) -> io::Result<()> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            if self.is_subvolume(&path) {
                self.remove(&path)?;
            }
        }
        Ok(())
    }
}

fn gone_is_fine(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn parent_and_name(path: &Path) -> io::Result<(File, CString)> {
    let parent = File::open(path.parent().ok_or(io::ErrorKind::InvalidFilename)?)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
    Ok((parent, CString::new(name.as_bytes())?))
}
