//! What the shim puts into a new root, which is at once the proof that it can be written.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid, fchown, mkdirat, openat2, unlinkat};
use rustix::io::Errno;
use viv_agent::proto::{HOME, IDENTITY, Identity};

use super::{IdRange, RootError, Step};
use crate::sys::creds::ActingAs;

/// Names in our own folder on which the runtime mounts: the shared folder, and the agent.
const MOUNTED_FOLDER: &str = "run";
const MOUNTED_FILE: &str = "agent";

/// What goes into a root.
pub(crate) struct Contents<'a> {
    /// Whose root it is.
    pub(crate) identity: &'a Identity,
    /// A folder that is made if it is not there.
    pub(crate) workdir: &'a str,
    /// Whether it is an error when that cannot be done.
    pub(crate) needs_workdir: bool,
}

/// Puts it in, and answers with our own folder in it. Fails when the root came up read-only.
pub(super) fn root(root: &Path, ids: IdRange, contents: &Contents<'_>) -> Result<OwnedFd, RootError> {
    let _acting = ActingAs::id(ids.base).step(|| "take the mapped root's id".to_owned())?;
    let root = open_folder(CWD, root, ResolveFlags::empty()).step(|| "open the new root".to_owned())?;

    let home = make_home(&root, ids).step(|| format!("make {HOME} in the new root"))?;
    write_identity(&home, ids, contents.identity).step(|| format!("write {IDENTITY}: the new root is not writable"))?;
    let workdir = make_folders(&root, Path::new(contents.workdir));
    if contents.needs_workdir {
        workdir.step(|| format!("make the working directory {}", contents.workdir))?;
    }
    Ok(home)
}

/// Our own folder, with the places on which its contents are mounted. An image that has a link there is refused.
fn make_home(root: &OwnedFd, ids: IdRange) -> io::Result<OwnedFd> {
    let name = HOME.trim_start_matches('/');
    let real = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    make_folder(root, name.as_ref())?;
    let home = open_folder(root, Path::new(name), real)?;
    give(&home, ids)?;
    make_folder(&home, MOUNTED_FOLDER.as_ref())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    openat2(&home, MOUNTED_FILE, flags, Mode::RUSR, real)?;
    Ok(home)
}

/// Shows that a file can be made, and takes it away again.
pub(super) fn probe_writable(folder: &Path, ids: IdRange) -> Result<(), RootError> {
    // A name that nobody inside could have taken before.
    let name = format!(".vivarium-probe-{}", crate::store::unique());
    let _acting = ActingAs::id(ids.base).step(|| "take the mapped root's id".to_owned())?;
    let what = || format!("write to {}: it came up read-only", folder.display());
    let folder = open_folder(CWD, folder, ResolveFlags::empty()).step(what)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    openat2(&folder, &name, flags, Mode::RUSR, ResolveFlags::BENEATH).step(what)?;
    unlinkat(&folder, &name, AtFlags::empty()).step(what)
}

fn write_identity(home: &OwnedFd, ids: IdRange, identity: &Identity) -> io::Result<()> {
    let name = Path::new(IDENTITY).file_name().expect("a file in HOME");
    match unlinkat(home, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::RGRP | Mode::ROTH;
    let file = openat2(home, name, flags, mode, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)?;
    give(&file, ids)?;
    File::from(file).write_all(&serde_json::to_vec(identity)?)
}

/// Makes it the keeper's: workloads can look and not touch.
fn give(what: impl AsFd, ids: IdRange) -> io::Result<()> {
    let keeper = ids.keeper_on_host();
    Ok(fchown(what, Some(Uid::from_raw(keeper)), Some(Gid::from_raw(keeper)))?)
}

/// Opens a folder below the root, making what is missing. Links that an image
/// brings are resolved inside the root and never lead out of it (S4).
fn make_folders(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let mut folder = open_folder(root, Path::new("."), ResolveFlags::IN_ROOT)?;
    let mut walked = std::path::PathBuf::new();
    for component in path.components() {
        let name = match component {
            Component::Normal(name) => name,
            Component::RootDir | Component::CurDir => continue,
            Component::ParentDir | Component::Prefix(_) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        walked.push(name);
        make_folder(&folder, name)?;
        folder = open_folder(root, &walked, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)?;
    }
    Ok(folder)
}

fn make_folder(at: &OwnedFd, name: &OsStr) -> io::Result<()> {
    match mkdirat(at, name, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn open_folder(at: impl AsFd, path: &Path, resolve: ResolveFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat2(at, path, flags, Mode::empty(), resolve)?)
}

#[cfg(test)]
mod tests {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    use rustix::thread::UnshareFlags;

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "a mount namespace of its own for this thread")]
    fn a_root_that_came_up_read_only_is_noticed() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("mounting takes root");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let probed = std::thread::spawn(move || {
            // SAFETY: only this thread's view of mounts changes, and it ends here.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }.unwrap();
            mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
            let ids = IdRange { base: 0x2000_0000, count: IdRange::COUNT };
            let probe = |flags, options| {
                mount("none", &path, "tmpfs", flags, Some(options)).unwrap();
                probe_writable(&path, ids).map_err(|error| error.to_string())
            };
            (probe(MountFlags::empty(), c"mode=0777"), probe(MountFlags::RDONLY, c"mode=0777"))
        });
        let (writable, read_only) = probed.join().unwrap();
        assert_eq!(writable, Ok(()));
        assert!(read_only.is_err_and(|why| why.contains("read-only")));
    }
}
