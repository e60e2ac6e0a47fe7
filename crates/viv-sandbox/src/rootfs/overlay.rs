//! One overlay under an id mapping.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_fd,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use super::{IdRange, RootError, Step};
use crate::store::layer::{PARTS, WORK};
use crate::sys::creds::ActingAs;
use crate::sys::idmap::idmap_mount;

/// Mounts `lowers` (topmost first) under one part of a writable layer.
pub(super) fn mount(
    mapping: &OwnedFd,
    lowers: &[PathBuf],
    writable: &Path,
    part: &str,
    target: &Path,
    ids: IdRange,
) -> Result<(), RootError> {
    let (upper, work) = (Path::new(PARTS).join(part), Path::new(WORK).join(part));
    make_upper(&writable.join(&upper), lowers).step(|| format!("make the writable layer of {part}"))?;
    fs::create_dir_all(writable.join(&work)).step(|| "make the overlay's work folder".to_owned())?;
    let lowers = lowers
        .iter()
        .map(|lower| idmapped(lower, mapping.as_fd(), true).step(|| format!("map the ids of {}", lower.display())))
        .collect::<Result<Vec<_>, _>>()?;
    let layer = idmapped(writable, mapping.as_fd(), false).step(|| format!("map the ids of {}", writable.display()))?;
    let below = |path: &Path| openat(&layer, path, FOLDER | OFlags::NOFOLLOW, Mode::empty());
    let upper = below(&upper).step(|| "open the writable layer".to_owned())?;
    let work = below(&work).step(|| "open the overlay's work folder".to_owned())?;

    // The overlay keeps these credentials and makes its work folder with them.
    // An id that the mapping does not know could not own that folder, and the
    // overlay would come up read-only without a word.
    let acting = ActingAs::id(ids.base).step(|| "take the mapped root's id".to_owned())?;
    let mounted = (|| {
        let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        for lower in &lowers {
            set_layer(&context, "lowerdir+", lower)?;
        }
        set_layer(&context, "upperdir", &upper)?;
        set_layer(&context, "workdir", &work)?;
        let overlay = finish(&context, MountAttrFlags::MOUNT_ATTR_NODEV)?;
        Ok(move_mount(&overlay, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    })();
    drop(acting);
    mounted.map_err(|source: io::Error| RootError { step: format!("mount an overlay on {}", target.display()), source })
}

/// Mounts folders one above the other (topmost first), read-only, without mapping, attached nowhere.
pub(crate) fn mount_lowers(folders: &[PathBuf]) -> io::Result<OwnedFd> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for folder in folders {
        set_layer(&context, "lowerdir+", &openat(CWD, folder, FOLDER | OFlags::NOFOLLOW, Mode::empty())?)?;
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    finish(&context, attributes)
}

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn finish(context: &OwnedFd, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    // A layer must mean the same above anything else later, so folders are never kept as a reference to below. What a
    // foreign layer says of that kind is not followed.
    fsconfig_set_string(context, "redirect_dir", "nofollow")?;
    fsconfig_create(context).map_err(|error| with_log(context, error))?;
    Ok(fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The folder of what is written. It stands for the topmost folder below it, so it looks like that.
fn make_upper(upper: &Path, lowers: &[PathBuf]) -> io::Result<()> {
    if upper.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(upper)?;
    if let Some(below) = lowers.first() {
        let below = fs::metadata(below)?;
        std::os::unix::fs::chown(upper, Some(below.uid()), Some(below.gid()))?;
        fs::set_permissions(upper, below.permissions())?;
    }
    Ok(())
}

/// Gives a layer by descriptor; kernels before 6.13 want a path, for which the descriptor has one.
fn set_layer(context: &OwnedFd, key: &str, layer: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    match fsconfig_set_fd(context, key, layer) {
        Err(rustix::io::Errno::INVAL) => {
            Ok(fsconfig_set_string(context, key, format!("/proc/self/fd/{}", layer.as_raw_fd()))?)
        }
        result => Ok(result?),
    }
}

/// A private clone of a folder's mount that shows mapped ids.
fn idmapped(folder: &Path, mapping: BorrowedFd<'_>, read_only: bool) -> io::Result<OwnedFd> {
    // A link in the place of a layer would show what it leads to.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let mount = open_tree(CWD, folder, flags)?;
    idmap_mount(mount.as_fd(), mapping, read_only)?;
    Ok(mount)
}

/// The kernel says why in the context's own log.
fn with_log(context: &OwnedFd, error: rustix::io::Errno) -> io::Error {
    let mut log = String::new();
    if let Ok(clone) = context.try_clone() {
        let mut file = File::from(clone);
        let mut buffer = [0; 512];
        while let Ok(length) = io::Read::read(&mut file, &mut buffer) {
            if length == 0 {
                break;
            }
            log.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }
    io::Error::new(io::Error::from(error).kind(), format!("{error}: {}", log.trim()))
}
