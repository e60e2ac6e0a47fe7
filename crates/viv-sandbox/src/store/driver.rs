//! How layers lie on disk: what a filesystem can do for them, and what has to be copied.
//!
//! | | new layer | clone for a fork or restore | live snapshot | disk limit |
//! |---|---|---|---|---|
//! | `btrfs` | subvolume if it is written to, else a folder (see `seed`) | snapshot, constant time | snapshot, constant time | quota group |
//! | `plain` | folder | reflink or copy; restores mount and do not copy | freeze, reflink or copy | project quota, or a sparse filesystem each |

use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{disk, project};
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

/// How the disk of a sandbox is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitedBy {
    /// A quota group of btrfs.
    QuotaGroup,
    /// A project of its own, on a filesystem that counts those.
    ProjectQuota,
    /// A filesystem of its own, in a sparse file.
    OwnFilesystem,
}

impl std::fmt::Display for LimitedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::QuotaGroup => "quota groups",
            Self::ProjectQuota => "project quota",
            Self::OwnFilesystem => "a filesystem for each sandbox",
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
        /// How writable layers are limited, or why they cannot be.
        limits: Result<PlainLimits, String>,
    },
}

/// How `plain` limits writable layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlainLimits {
    /// Each is a folder with a project.
    Projects,
    /// Each is a filesystem in a file.
    Disks,
}

/// What a layer refers to, and what of that is its alone.
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
            DriverKind::Plain => {
                if project::are_usable(layers)? {
                    return Ok(Self::Plain { limits: Ok(PlainLimits::Projects) });
                }
                Ok(Self::Plain { limits: disk::why_not().map_or(Ok(PlainLimits::Disks), Err) })
            }
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

    /// How a sandbox's disk is limited, or why it cannot be.
    pub(crate) fn limited_by(&self) -> Result<LimitedBy, String> {
        match self {
            Self::Btrfs { quota: Some(_) } => Ok(LimitedBy::QuotaGroup),
            Self::Btrfs { quota: None } => {
                Err("quota groups are off on this btrfs (turn them on with `btrfs quota enable`)".to_owned())
            }
            Self::Plain { limits: Ok(PlainLimits::Projects) } => Ok(LimitedBy::ProjectQuota),
            Self::Plain { limits: Ok(PlainLimits::Disks) } => Ok(LimitedBy::OwnFilesystem),
            Self::Plain { limits: Err(why) } => Err(why.clone()),
        }
    }

    /// Whether folders of writable layers can have a project.
    fn has_projects(&self) -> bool {
        matches!(self, Self::Plain { limits: Ok(PlainLimits::Projects) })
    }

    /// The same for a writable layer that will be limited.
    pub(crate) fn make_limited(&self, folder: &Path) -> io::Result<()> {
        self.make(folder)?;
        if self.has_projects() { project::begin(folder) } else { Ok(()) }
    }

    /// An empty folder for a layer that is written to by a sandbox.
    pub(crate) fn make(&self, folder: &Path) -> io::Result<()> {
        match self {
            Self::Btrfs { .. } => make_subvolume(folder),
            Self::Plain { .. } => make_folder(folder),
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
            Self::Btrfs { .. } if self.is_subvolume(folder) => btrfs::set_read_only(File::open(folder)?),
            Self::Btrfs { .. } => Ok(()),
            // Nobody does: it is only ever mounted read-only from now on.
            Self::Plain { .. } => self.unlimit(folder),
        }
    }

    /// Takes away the limit of a folder, if it has one.
    pub(crate) fn unlimit(&self, folder: &Path) -> io::Result<()> {
        match self {
            Self::Btrfs { quota: Some(_) } if self.is_subvolume(folder) => {
                btrfs::limit_referenced(File::open(folder)?, None)
            }
            Self::Plain { .. } if self.has_projects() => project::limit(folder, None),
            Self::Btrfs { .. } | Self::Plain { .. } => Ok(()),
        }
    }

    /// Whether what is not written out is not counted yet.
    pub(crate) fn counts_late(&self) -> bool {
        matches!(self, Self::Btrfs { .. })
    }

    /// What the filesystem itself counts for a folder.
    pub(crate) fn counted(&self, folder: &Path) -> Option<Counted> {
        if self.has_projects() {
            let bytes = project::counted_bytes(folder)?;
            return Some(Counted { referenced_bytes: bytes, exclusive_bytes: bytes });
        }
        let Self::Btrfs { quota: Some(quota) } = self else { return None };
        // A folder has no group of its own: its bytes are those of all others beside it, too.
        if !self.is_subvolume(folder) {
            return None;
        }
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
        if self.has_projects() {
            // The kernel forgets a project that has neither files nor a limit. One that cannot be forgotten is no reason
            // to keep the files.
            let _ = self.unlimit(folder);
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

/// Limits what the folder of a writable layer may refer to, by whatever its filesystem has for that. For the shim, which
/// knows no store.
pub(crate) fn limit(folder: &Path, bytes: u64) -> io::Result<()> {
    if is_btrfs(folder)? {
        btrfs::limit_referenced(File::open(folder)?, Some(bytes))
    } else {
        project::limit(folder, Some(bytes))
    }
}

/// A folder that shares its filesystem's numbers with all beside it.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o755).create(folder)
}

/// A subvolume, whose numbers begin anew.
pub(crate) fn make_subvolume(folder: &Path) -> io::Result<()> {
    let (parent, name) = parent_and_name(folder)?;
    btrfs::create_subvolume(parent, &name)
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
