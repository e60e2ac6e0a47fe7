//! One overlay under an id mapping.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_fd,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use super::{IdRange, RootError, Step};
use crate::sys::creds::ActingAs;
use crate::sys::idmap::idmap_mount;

/// Mounts `lowers` (topmost first) under the writable layer in `layer`.
pub(super) fn mount(
    mapping: &OwnedFd,
    lowers: &[PathBuf],
    layer: &Path,
    target: &Path,
    ids: IdRange,
) -> Result<(), RootError> {
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    for folder in [&upper, &work] {
        fs::create_dir_all(folder).step(|| format!("make {}", folder.display()))?;
    }
    let lowers = lowers
        .iter()
        .map(|lower| idmapped(lower, mapping.as_fd(), true).step(|| format!("map the ids of {}", lower.display())))
        .collect::<Result<Vec<_>, _>>()?;
    let layer = idmapped(layer, mapping.as_fd(), false).step(|| format!("map the ids of {}", layer.display()))?;
    let below = |name: &str| openat(&layer, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let upper = below("upper").step(|| "open the writable layer".to_owned())?;
    let work = below("work").step(|| "open the overlay's work folder".to_owned())?;

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
        fsconfig_create(&context).map_err(|error| with_log(&context, error))?;
        let overlay = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?;
        Ok(move_mount(&overlay, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    })();
    drop(acting);
    mounted.map_err(|source: io::Error| RootError { step: format!("mount an overlay on {}", target.display()), source })
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
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
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
