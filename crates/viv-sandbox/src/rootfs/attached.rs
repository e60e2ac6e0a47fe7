//! Overlays on kernels before 6.15, which want their layers named, and attached in the mount namespace of who asks.
//!
//! Nothing stays attached: an overlay has copies of its layers' mounts. `mount(2)` names them, because it takes any
//! number of layers on every kernel that has overlays; each by its descriptor, whose name is short and has no
//! character that would need care.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};

use super::overlay::{Layers, NO_REDIRECTS, OWN_NUMBERS, USER_MARKS, marks_are_the_users};
use super::stage::CANDIDATES;
use crate::sys::descriptor::replace;
use crate::sys::namespace::with_own_mounts;

/// The kernel reads a page of options, and cuts off the rest without a word.
const OPTIONS_BYTES_MAX: usize = 4095;

/// Where descriptors have names.
const DESCRIPTORS: &str = "/proc/self/fd";

/// Mounts an overlay, attached nowhere. Meanwhile the layers' mounts that are `detached` are on `place`, a folder in a
/// mount namespace that nobody else sees.
pub(super) fn mount(layers: &Layers, detached: &[&OwnedFd], place: &Path, flags: MountFlags) -> io::Result<OwnedFd> {
    let options = options(layers)?;
    let mut attached = Attached { place, count: 0 };
    for mount in detached {
        attached.put(mount)?;
    }
    rustix::mount::mount("overlay", place, "overlay", flags, Some(options.as_c_str()))?;
    attached.count += 1;
    clone(&openat(CWD, place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Mounts folders one above the other (topmost first), attached nowhere, from a process of any kind.
pub(super) fn mount_lowers(folders: &[PathBuf], flags: MountFlags) -> io::Result<OwnedFd> {
    with_own_mounts(|| {
        let place = CANDIDATES.into_iter().map(Path::new).find(|candidate| candidate.is_dir());
        let place = place.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("there is none of {} to mount on", CANDIDATES.join(", ")))
        })?;
        // Before anything covers them.
        let layers = Layers::open(folders)?;
        let mut attached = Attached { place, count: 0 };
        let mut seen = Vec::new();
        for number in folders.iter().filter_map(|folder| descriptor_of(folder)) {
            if seen.contains(&number) {
                continue;
            }
            seen.push(number);
            let disk = Path::new(DESCRIPTORS).join(number.to_string());
            let mount = openat(CWD, disk, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            attached.put(&mount)?;
            // What was attached once cannot be attached in another namespace, and its owner may want more than one view.
            replace(number, &clone(&mount)?)?;
        }
        mount(&layers, &[], place, flags)
    })
}

/// The descriptor through which a path leads: a disk's, mounted and attached nowhere.
fn descriptor_of(path: &Path) -> Option<RawFd> {
    path.strip_prefix(DESCRIPTORS).ok()?.iter().next()?.to_str()?.parse().ok()
}

/// A copy of a mount, attached nowhere.
fn clone(mount: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(mount, "", flags)?)
}

/// Mounts on a folder, one on the other, for as long as this lives.
struct Attached<'a> {
    place: &'a Path,
    count: usize,
}

impl Attached<'_> {
    fn put(&mut self, mount: &OwnedFd) -> io::Result<()> {
        move_mount(mount, "", CWD, self.place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        self.count += 1;
        Ok(())
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        for _ in 0..self.count {
            // If it fails, the namespace's end does it.
            let _ = unmount(self.place, UnmountFlags::DETACH);
        }
    }
}

fn options(layers: &Layers) -> io::Result<CString> {
    let name = |layer: &OwnedFd| format!("{DESCRIPTORS}/{}", layer.as_raw_fd());
    let lowers = layers.lowers.iter().map(name).collect::<Vec<_>>().join(":");
    let mut options = vec![format!("lowerdir={lowers}"), format!("{}={}", NO_REDIRECTS.0, NO_REDIRECTS.1)];
    if let Some((upper, work)) = &layers.upper {
        options.extend([format!("upperdir={}", name(upper)), format!("workdir={}", name(work))]);
    }
    if layers.numbers_repeat {
        options.push(format!("{}={}", OWN_NUMBERS.0, OWN_NUMBERS.1));
    }
    if marks_are_the_users() {
        options.push(USER_MARKS.to_owned());
    }
    let options = options.join(",");
    if options.len() > OPTIONS_BYTES_MAX {
        let count = layers.lowers.len();
        let what = format!("{count} layers are more than this kernel can be told of (hint: Linux 6.15 and newer can)");
        return Err(io::Error::new(io::ErrorKind::ArgumentListTooLong, what));
    }
    Ok(CString::new(options)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::store::disk::{self, MountedDisk};

    const READ_ONLY: MountFlags = MountFlags::RDONLY;

    fn shown(overlay: &OwnedFd, name: &str) -> String {
        fs::read_to_string(format!("{DESCRIPTORS}/{}/{name}", overlay.as_raw_fd())).unwrap()
    }

    /// Folders `0` to `count`, each with a file of its own and one that all have.
    fn folders(ground: &Path, count: usize) -> Vec<PathBuf> {
        let make = |number: usize| {
            let folder = ground.join(number.to_string());
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(format!("own{number}")), "").unwrap();
            fs::write(folder.join("all"), number.to_string()).unwrap();
            folder
        };
        (0..count).map(make).collect()
    }

    /// As many as an image may have and more; any kernel can be told of them.
    #[test]
    fn folders_are_named_however_many() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("mounting takes root");
        }
        let ground = tempfile::tempdir().unwrap();
        let folders = folders(ground.path(), 150);
        let covered = || {
            let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
            mounts.lines().filter(|line| line.split(' ').nth(4).is_some_and(|at| CANDIDATES.contains(&at))).count()
        };
        let before = covered();
        let overlay = mount_lowers(&folders, READ_ONLY).unwrap();
        assert_eq!(shown(&overlay, "all"), "0");
        assert_eq!(shown(&overlay, "own149"), "");
        assert_eq!(covered(), before, "everybody sees it");
    }

    #[test]
    fn too_many_to_be_named_are_refused_with_the_number() {
        let ground = tempfile::tempdir().unwrap();
        let folders = vec![ground.path().to_owned(); 400];
        let refused = options(&Layers::open(&folders).unwrap()).unwrap_err();
        assert!(refused.to_string().contains("400 layers"), "{refused}");
    }

    /// As a shim does it, but for the mapping: clones that are attached nowhere, and a layer to write to.
    #[test]
    fn what_is_written_goes_to_the_upper_layer() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("mounting takes root");
        }
        let ground = tempfile::tempdir().unwrap();
        let folders = folders(ground.path(), 2);
        let (written, place) = (ground.path().join("written"), ground.path().join("place"));
        for folder in [&written, &written.join("upper"), &written.join("work"), &place] {
            fs::create_dir(folder).unwrap();
        }
        let open = |at: &Path| openat(CWD, at, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let overlay = with_own_mounts(|| {
            let lowers = folders.iter().map(|folder| clone(&open(folder))).collect::<io::Result<Vec<_>>>()?;
            let layer = clone(&open(&written))?;
            let below = |name| openat(&layer, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let layers = Layers { lowers, upper: Some((below("upper")?, below("work")?)), numbers_repeat: false };
            let detached: Vec<_> = layers.lowers.iter().chain([&layer]).collect();
            let overlay = mount(&layers, &detached, &place, MountFlags::NODEV)?;
            assert!(fs::read_dir(&place)?.next().is_none(), "something is still there");
            Ok(overlay)
        });
        let overlay = overlay.unwrap();
        fs::write(format!("{DESCRIPTORS}/{}/all", overlay.as_raw_fd()), "written").unwrap();
        assert_eq!((shown(&overlay, "all"), shown(&overlay, "own1")), ("written".to_owned(), String::new()));
        assert_eq!(fs::read_to_string(written.join("upper/all")).unwrap(), "written");
        assert_eq!(fs::read_to_string(folders[0].join("all")).unwrap(), "0");
    }

    /// A disk is attached nowhere, and is shown twice in a row.
    #[test]
    fn disks_are_shown_as_often_as_wanted() {
        if let Some(why) = disk::why_not() {
            return eprintln!("PASSED OVER: {why}");
        }
        let ground = tempfile::tempdir().unwrap();
        let file = ground.path().join("disk");
        disk::make(&file, 16 << 20).unwrap();
        let disk = MountedDisk::mount_alone(&file, false).unwrap();
        fs::create_dir(disk.path().join("part")).unwrap();
        fs::write(disk.path().join("part/all"), "disk").unwrap();
        let below = folders(ground.path(), 1).remove(0);
        for _ in 0..2 {
            let overlay = mount_lowers(&[disk.path().join("part"), below.clone()], READ_ONLY).unwrap();
            assert_eq!((shown(&overlay, "all"), shown(&overlay, "own0")), ("disk".to_owned(), String::new()));
        }
        drop(disk);
        // Nobody has it any more, so it can be had alone.
        MountedDisk::mount_alone(&file, true).unwrap();
    }
}
