//! A place for mounts that only the shim's mount namespace has.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount, open_tree,
};
use rustix::thread::UnshareFlags;

use super::{RootError, Step};

/// Folders at the root of every Linux that nothing of ours lies in. The first
/// one that nothing of a sandbox lies below is covered, for the shim only.
const CANDIDATES: [&str; 3] = ["/mnt", "/media", "/srv"];

/// How a mount is copied.
const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// The stage.
#[derive(Debug)]
pub(crate) struct Stage(PathBuf);

impl Stage {
    /// Leaves the mount namespace of the host and sets up the stage in the new one, where it covers none of `needed`.
    pub(crate) fn enter(needed: &[&Path]) -> Result<Self, RootError> {
        // The shim has one thread, so no other is surprised by the new namespace.
        unshare_mounts().step(|| "make a mount namespace".to_owned())?;
        // Unmounts on the host come through, mounts of ours do not get out.
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
            .step(|| "keep mounts from the host".to_owned())?;
        let place = CANDIDATES
            .into_iter()
            .map(Path::new)
            .find(|candidate| candidate.is_dir() && !needed.iter().any(|path| path.starts_with(candidate)))
            .ok_or(io::Error::from(io::ErrorKind::NotFound))
            .step(|| format!("find one of {} to mount on", CANDIDATES.join(", ")))?;
        mount("vivarium", place, "tmpfs", MountFlags::NODEV | MountFlags::NOSUID, Some(c"mode=0711,size=64k"))
            .step(|| format!("mount a tmpfs on {}", place.display()))?;
        mount_change(place, MountPropagationFlags::PRIVATE).step(|| "make the stage private".to_owned())?;
        Ok(Self(place.to_owned()))
    }

    /// Covers the place where cgroups usually are, on a machine that has none: the embedded runtime takes an empty
    /// tmpfs there for *no controllers*, and anything else for an error.
    pub(crate) fn show_no_cgroups() -> Result<(), RootError> {
        let place = Path::new("/sys/fs/cgroup");
        if place.is_dir() {
            mount("none", place, "tmpfs", MountFlags::RDONLY, None).step(|| format!("cover {}", place.display()))?;
        }
        Ok(())
    }

    /// A folder to mount on.
    pub(crate) fn folder(&self, name: &str) -> Result<PathBuf, RootError> {
        let path = self.0.join(name);
        DirBuilder::new().mode(0o755).create(&path).step(|| format!("make {}", path.display()))?;
        Ok(path)
    }

    /// Shows a file or folder of the host on the stage.
    pub(crate) fn show(&self, source: &Path, name: &str) -> Result<PathBuf, RootError> {
        let what = || format!("show {} to the sandbox", source.display());
        let target = if fs::metadata(source).step(what)?.is_dir() {
            self.folder(name)?
        } else {
            let path = self.0.join(name);
            File::create(&path).step(what)?;
            path
        };
        let tree = open_tree(CWD, source, CLONE).step(what)?;
        move_mount(&tree, "", CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).step(what)?;
        Ok(target)
    }

    /// Shows a mount that is attached nowhere yet.
    pub(crate) fn attach(&self, mount: &OwnedFd, name: &str) -> Result<PathBuf, RootError> {
        let target = self.folder(name)?;
        move_mount(mount, "", CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .step(|| format!("attach {name} to the stage"))?;
        Ok(target)
    }

    /// Shows a folder that is open on the stage.
    pub(crate) fn show_opened(&self, folder: &OwnedFd, name: &str) -> Result<PathBuf, RootError> {
        let what = || format!("show {name} to the sandbox");
        let target = self.folder(name)?;
        let tree = open_tree(folder, "", CLONE | OpenTreeFlags::AT_EMPTY_PATH).step(what)?;
        move_mount(&tree, "", CWD, &target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).step(what)?;
        Ok(target)
    }
}

#[expect(unsafe_code, reason = "a new mount namespace in a process with one thread disturbs nobody")]
fn unshare_mounts() -> rustix::io::Result<()> {
    // SAFETY: no descriptor table or memory is unshared, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
