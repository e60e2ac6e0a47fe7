//! The root filesystem of an instance, as its container will see it.
//!
//! ```text
//!   lower folders ──idmapped, read-only──────┐
//!   writable layer: parts/ work/ ──idmapped──┴── overlay ── <stage>/root
//! ```
//!
//! Ids on disk equal ids inside; the mapping to unprivileged host ids is in
//! the mounts only. So the same layer can be mounted under any other mapping.
//!
//! All mounts are made in the shim's own mount namespace, on a small tmpfs (the
//! *stage*) that anyone may traverse: the container's first process walks to
//! its root with an id that may not enter the data folder. They end with the
//! namespace, so none can be left behind.
//!
//! In the namespace of an ordinary user ids are the same on both sides, so
//! nothing is mapped; overlays keep their marks in `user.` attributes there.
//!
//! A [`RootPlan`] is all that the shim knows about what a root is made of;
//! `store` makes it.

mod attached;
mod host;
mod idmap;
mod overlay;
mod prepare;
mod stage;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::store::disk::MountedDisk;
use crate::store::layer::PARTS;
pub(crate) use host::HostBase;
pub(crate) use idmap::user_namespace;
pub(crate) use stage::{Stage, mounted_root};

/// A mapping of ids inside to ids of the host, users and groups alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdRange {
    /// The host id of root inside.
    pub base: u32,
    /// How many ids there are inside.
    pub count: u32,
}

impl IdRange {
    /// As many as Debian's and Alpine's users need, and a keeper.
    pub const COUNT: u32 = 65_536;

    /// Whether ids are the same on both sides, as in the namespace of an ordinary user.
    pub fn is_identity(self) -> bool {
        self.base == 0
    }

    /// The mapping in pieces of id inside, id outside and length; `file` is `uid_map` or `gid_map`.
    pub(crate) fn mapping(self, file: &str) -> io::Result<Vec<(u32, u32, u32)>> {
        if !self.is_identity() {
            return Ok(vec![(0, self.base, self.count)]);
        }
        let pieces = crate::ordinary::one_to_one(file, self.count)?;
        Ok(pieces.into_iter().map(|(first, size)| (first, first, size)).collect())
    }

    /// The last id: it owns what only the agent may touch, and no workload ever gets it.
    pub fn keeper_inside(self) -> u32 {
        self.count - 1
    }

    /// The keeper as the host sees it.
    pub fn keeper_on_host(self) -> u32 {
        self.base + self.count - 1
    }
}

/// What a root is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RootPlan {
    /// Where what is written goes.
    pub(crate) writable: Writable,
    /// The root itself, and folders of the host that appear in it.
    pub(crate) parts: Vec<Part>,
}

impl RootPlan {
    /// Everything on the host that it is made of.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        let writable = match &self.writable {
            Writable::Folder(path) | Writable::Disk(path) => path.as_path(),
        };
        let lowers = self.parts.iter().flat_map(|part| &part.lowers);
        let lowers = lowers.map(|lower| match lower {
            Lower::Folder(path) | Lower::Disk(path) => path.as_path(),
        });
        std::iter::once(writable).chain(lowers)
    }
}

/// The writable layer: `parts/<name>` and `work/<name>` for each part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Writable {
    /// In a folder.
    Folder(PathBuf),
    /// In a filesystem in a file.
    Disk(PathBuf),
}

/// One overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// What its folder in a layer is called.
    pub(crate) name: String,
    /// Where it appears.
    pub(crate) at: PathBuf,
    /// What is below the writable layer, the topmost first.
    pub(crate) lowers: Vec<Lower>,
}

/// Something to be put below, read-only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Lower {
    /// A folder.
    Folder(PathBuf),
    /// The part of the same name in a filesystem in a file.
    Disk(PathBuf),
}

/// The part that is the root itself.
pub(crate) const ROOT: &str = "root";

/// A step of making a root that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub(crate) struct RootError {
    step: String,
    #[source]
    source: io::Error,
}

/// Says what was tried when it fails.
trait Step<T> {
    fn step(self, step: impl FnOnce() -> String) -> Result<T, RootError>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: impl FnOnce() -> String) -> Result<T, RootError> {
        self.map_err(|source| RootError { step: step(), source: source.into() })
    }
}

/// Where a mounted root lies, in the shim's mount namespace.
#[derive(Debug)]
pub(crate) struct MountedRoot {
    /// The root.
    pub(crate) root: PathBuf,
    /// Our own folder in the root, once more: bound onto itself, it cannot be renamed or replaced from inside.
    pub(crate) home: PathBuf,
    /// What the runtime is to bind into it: place inside, source.
    pub(crate) binds: Vec<(PathBuf, PathBuf)>,
    /// The writable layer, as it lies on disk.
    pub(crate) writable: PathBuf,
    /// Whether there is a file in the place of [`RESOLV_CONF`], to be covered.
    pub(crate) resolves_names: bool,
}

/// Mounts everything, and shows by writing that the root can be written.
pub(crate) fn mount(
    stage: &Stage,
    plan: &RootPlan,
    ids: IdRange,
    contents: &Contents<'_>,
) -> Result<MountedRoot, RootError> {
    let mapping = if ids.is_identity() {
        None
    } else {
        Some(user_namespace(ids).step(|| "make a user namespace for the id mapping".to_owned())?)
    };
    let mut disks = Disks { stage, mounted: Vec::new() };
    let writable = match &plan.writable {
        Writable::Folder(folder) => folder.clone(),
        Writable::Disk(file) => disks.show(file, false)?,
    };
    let mut targets = Vec::new();
    for part in &plan.parts {
        let lowers = part.lowers.iter().map(|lower| disks.folder(lower, &part.name)).collect::<Result<Vec<_>, _>>()?;
        let target = stage.folder(&stage::part_name(&part.name))?;
        overlay::mount(stage.path(), mapping.as_ref(), &lowers, &writable, &part.name, &target, ids)?;
        prepare::probe_writable(&target, ids)?;
        targets.push((part, target));
    }
    let (mut root, mut binds) = (None, Vec::new());
    for (part, target) in targets {
        if part.name == ROOT {
            root = Some(target);
        } else {
            binds.push((part.at.clone(), target));
        }
    }
    let root =
        root.ok_or(io::Error::from(io::ErrorKind::InvalidData)).step(|| "find the root in its plan".to_owned())?;
    let (home, resolves_names) = prepare::root(&root, ids, contents)?;
    let home = stage.show_opened(&home, "home")?;
    Ok(MountedRoot { root, home, binds, writable, resolves_names })
}

/// Filesystems in files, each mounted once.
struct Disks<'a> {
    stage: &'a Stage,
    mounted: Vec<(PathBuf, PathBuf)>,
}

impl Disks<'_> {
    fn folder(&mut self, lower: &Lower, part: &str) -> Result<PathBuf, RootError> {
        match lower {
            Lower::Folder(folder) => Ok(folder.clone()),
            Lower::Disk(file) => Ok(self.show(file, true)?.join(PARTS).join(part)),
        }
    }

    fn show(&mut self, file: &Path, read_only: bool) -> Result<PathBuf, RootError> {
        if let Some((_, place)) = self.mounted.iter().find(|(known, _)| known == file) {
            return Ok(place.clone());
        }
        let disk = if read_only { MountedDisk::mount_sealed(file) } else { MountedDisk::mount_alone(file, false) };
        let disk = disk.step(|| format!("mount {}", file.display()))?;
        let place = self.stage.attach(disk.mount_fd(), &format!("disk{}", self.mounted.len()))?;
        self.mounted.push((file.to_owned(), place.clone()));
        Ok(place)
    }
}

pub(crate) use overlay::{mount_below, mount_lowers, why_no_mapped_layers};
pub(crate) use prepare::{Contents, RESOLV_CONF};
