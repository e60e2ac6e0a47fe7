//! The root filesystem of an instance, as its container will see it.
//!
//! ```text
//!   lower folders ──idmapped, read-only──┐
//!   layers/root/{upper,work} ──idmapped──┴── overlay ── <stage>/root
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
//! This is the seam for images and layers: a [`RootPlan`] is all that the shim
//! knows about what a root is made of.

mod host;
mod idmap;
mod overlay;
mod prepare;
mod stage;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub(crate) use host::plan as host_plan;
pub(crate) use stage::Stage;

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
    /// Read-only folders, the topmost first.
    pub(crate) lowers: Vec<PathBuf>,
    /// Folders of the host that appear at a place in the root, each copy-on-write.
    pub(crate) trees: Vec<Tree>,
}

/// A folder that appears at a place in the root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tree {
    /// Where it appears.
    pub(crate) at: PathBuf,
    /// What appears, copy-on-write.
    pub(crate) lower: PathBuf,
}

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
}

/// Mounts everything, and shows by writing that the root can be written.
pub(crate) fn mount(
    stage: &Stage,
    layers: &Path,
    plan: &RootPlan,
    ids: IdRange,
    contents: &Contents<'_>,
) -> Result<MountedRoot, RootError> {
    let mapping = idmap::user_namespace(ids).step(|| "make a user namespace for the id mapping".to_owned())?;
    let root = stage.folder("root")?;
    overlay::mount(&mapping, &plan.lowers, &layers.join("root"), &root, ids)?;
    let mut binds = Vec::new();
    for (index, tree) in plan.trees.iter().enumerate() {
        let target = stage.folder(&format!("tree{index}"))?;
        overlay::mount(
            &mapping,
            std::slice::from_ref(&tree.lower),
            &layers.join(format!("tree{index}")),
            &target,
            ids,
        )?;
        prepare::probe_writable(&target, ids)?;
        binds.push((tree.at.clone(), target));
    }
    let home = prepare::root(&root, ids, contents)?;
    let home = stage.show_opened(&home, "home")?;
    Ok(MountedRoot { root, home, binds })
}

pub(crate) use prepare::Contents;
