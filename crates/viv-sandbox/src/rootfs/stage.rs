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
pub(super) const CANDIDATES: [&str; 3] = ["/mnt", "/media", "/srv"];

/// What the stage says that it is made of.
const SOURCE: &str = "vivarium";

/// Where cgroups are by custom, and where runtimes look for them.
const CGROUPS: &str = "/sys/fs/cgroup";

/// How a mount is copied.
const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// What the folder is called that a part of a root is mounted on.
pub(super) fn part_name(part: &str) -> String {
    format!("part-{part}")
}

/// Where the root of an instance has its place, in the mount namespace of its shim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RootPlace {
    /// The mount point.
    pub(crate) at: PathBuf,
    /// Whether something is mounted there.
    pub(crate) is_mounted: bool,
}

/// Looks for it in another process's mount namespace. `None` when there is no stage.
pub(crate) fn mounted_root(shim: u32) -> io::Result<Option<RootPlace>> {
    Ok(find_root(&fs::read_to_string(format!("/proc/{shim}/mountinfo"))?))
}

fn find_root(mountinfo: &str) -> Option<RootPlace> {
    let mounts = || {
        mountinfo.lines().filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let at = before.split(' ').nth(4)?;
            let mut after = after.split(' ');
            Some((at, after.next()?, after.next()?))
        })
    };
    let (stage, ..) =
        mounts().find(|(at, kind, source)| CANDIDATES.contains(at) && *kind == "tmpfs" && *source == SOURCE)?;
    let root = Path::new(stage).join(part_name(super::ROOT));
    let is_mounted = mounts().any(|(at, ..)| Path::new(at) == root);
    Some(RootPlace { at: root, is_mounted })
}

/// The stage.
#[derive(Debug)]
pub(crate) struct Stage(PathBuf);

impl Stage {
    /// Leaves the mount namespace of the host and sets up the stage in the new one, where it covers none of `needed`.
    pub(crate) fn enter(needed: &[&Path]) -> Result<Self, RootError> {
        // The shim has one thread, so no other is surprised by the new namespace.
        unshare(UnshareFlags::NEWNS).step(|| "make a mount namespace".to_owned())?;
        // Unmounts on the host come through, mounts of ours do not get out.
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM)
            .step(|| "keep mounts from the host".to_owned())?;
        let place = CANDIDATES
            .into_iter()
            .map(Path::new)
            .find(|candidate| candidate.is_dir() && !needed.iter().any(|path| path.starts_with(candidate)))
            .ok_or(io::Error::from(io::ErrorKind::NotFound))
            .step(|| format!("find one of {} to mount on", CANDIDATES.join(", ")))?;
        mount(SOURCE, place, "tmpfs", MountFlags::NODEV | MountFlags::NOSUID, Some(c"mode=0711,size=64k"))
            .step(|| format!("mount a tmpfs on {}", place.display()))?;
        mount_change(place, MountPropagationFlags::PRIVATE).step(|| "make the stage private".to_owned())?;
        Ok(Self(place.to_owned()))
    }

    /// Covers the place where cgroups usually are, in a mount namespace of its own, on a machine that has none: the
    /// embedded runtime takes an empty tmpfs there for *no controllers*, and anything else for an error.
    pub(crate) fn show_no_cgroups() -> Result<(), RootError> {
        unshare(UnshareFlags::NEWNS).step(|| "make a mount namespace".to_owned())?;
        if Path::new(CGROUPS).is_dir() {
            mount("none", CGROUPS, "tmpfs", MountFlags::RDONLY, None).step(|| format!("cover {CGROUPS}"))?;
        }
        Ok(())
    }

    /// Covers the place where cgroups usually are, in a mount namespace of its own, with the v2 cgroup that this process
    /// is in, read-only: runtimes in a user namespace take that for *nothing to be done*.
    pub(crate) fn show_fixed_cgroup() -> Result<(), RootError> {
        unshare(UnshareFlags::NEWNS | UnshareFlags::NEWCGROUP).step(|| "make a cgroup namespace".to_owned())?;
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        // Where cgroups are v2 only, the same filesystem is there already, and the kernel refuses it on top of itself.
        mount("none", CGROUPS, "tmpfs", flags, None).step(|| format!("cover {CGROUPS}"))?;
        mount("none", CGROUPS, "cgroup2", flags, None).step(|| format!("cover {CGROUPS}"))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
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

#[expect(unsafe_code, reason = "new namespaces in a process with one thread disturb nobody")]
fn unshare(what: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: no descriptor table or memory is unshared, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(what) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t3_a_root_that_was_unmounted_is_told_from_one_that_is_there() {
        let host = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n30 22 0:5 / /mnt rw - tmpfs tmpfs rw\n";
        let stage = "40 22 0:55 / /mnt rw,nosuid,nodev - tmpfs vivarium rw,size=64k\n";
        let root = "41 40 0:56 / /mnt/part-root rw - overlay none rw,lowerdir+=/a - b\n";
        let place = |is_mounted| Some(RootPlace { at: "/mnt/part-root".into(), is_mounted });
        assert_eq!(find_root(host), None);
        assert_eq!(find_root(&format!("{host}{stage}{root}")), place(true));
        assert_eq!(find_root(&format!("{host}{stage}")), place(false));
    }
}
