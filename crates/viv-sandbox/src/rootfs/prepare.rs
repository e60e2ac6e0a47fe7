//! What the shim puts into a new root, which is at once the proof that it can be written.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, fchown, mkdirat, openat2, readlinkat, statat,
    symlinkat, unlinkat,
};
use rustix::io::Errno;
use viv_agent::proto::{BIN, HOME, IDENTITY, Identity, VIV_VERB};

use super::{IdRange, RootError, Step};
use crate::sys::creds::ActingAs;

/// Names in our own folder on which the runtime mounts: the shared folder, and the agent.
const MOUNTED_FOLDER: &str = "run";
const MOUNTED_FILE: &str = "agent";

/// Where programs look for the id of an installation.
const MACHINE_ID: &str = "/etc/machine-id";

/// Where the runtime mounts the kernel's filesystems. A runtime follows the links of an image there, or says only that
/// it failed.
const MOUNTED: [&str; 4] = ["proc", "dev", "sys", "run"];

/// Where programs look for who resolves names.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";

/// How often a folder is looked for whose way leads through `..`: the kernel gives up when anybody on the whole machine,
/// another sandbox too, renames something at that moment. Such a moment is a microsecond long.
const RACES_MAX: usize = 10_000;

/// What goes into a root.
pub(crate) struct Contents<'a> {
    /// Whose root it is.
    pub(crate) identity: &'a Identity,
    /// A folder that is made if it is not there.
    pub(crate) workdir: &'a str,
    /// Whether it is an error when that cannot be done.
    pub(crate) needs_workdir: bool,
    /// Whether [`RESOLV_CONF`] is to be covered.
    pub(crate) resolves_names: bool,
}

/// Puts it in, and answers with our own folder in it and whether there is something to cover at [`RESOLV_CONF`]. Fails when the root came up read-only.
pub(super) fn root(root: &Path, ids: IdRange, contents: &Contents<'_>) -> Result<(OwnedFd, bool), RootError> {
    let _acting = ActingAs::id(ids.base).step(|| "take the mapped root's id".to_owned())?;
    let root = open_folder(CWD, root, ResolveFlags::empty()).step(|| "open the new root".to_owned())?;

    for name in MOUNTED {
        make_real_folder(&root, name).step(|| format!("mount on /{name} in the new root, which must be a folder"))?;
    }
    let home = make_home(&root, ids).step(|| format!("make {HOME} in the new root"))?;
    write_identity(&home, ids, contents.identity).step(|| format!("write {IDENTITY}: the new root is not writable"))?;
    write_machine_id(&root, contents.identity).step(|| format!("write {MACHINE_ID}"))?;
    let workdir = make_folders(&root, Path::new(contents.workdir));
    if contents.needs_workdir {
        workdir.step(|| format!("make the working directory {}", contents.workdir))?;
    }
    let mut resolves_names = contents.resolves_names;
    if resolves_names && let Err(error) = make_resolv_conf(&root) {
        // What somebody inside has put there is his to live with; addresses still work.
        note!("names are not resolved inside, {RESOLV_CONF} cannot be made: {error}");
        resolves_names = false;
    }
    Ok((home, resolves_names))
}

/// Sees to it that a file is there to be covered. A link would lead the runtime elsewhere, so it is replaced.
fn make_resolv_conf(root: &OwnedFd) -> io::Result<()> {
    let path = Path::new(RESOLV_CONF);
    let (folder, name) = (path.parent().expect("in /etc"), path.file_name().expect("a name"));
    let folder = make_folders(root, folder)?;
    match statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) if FileType::from_raw_mode(found.st_mode).is_file() => return Ok(()),
        Ok(_) => unlinkat(&folder, name, AtFlags::empty())?,
        Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let real = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    openat2(&folder, name, flags, Mode::RUSR | Mode::RGRP | Mode::ROTH, real)?;
    Ok(())
}

/// Our own folder, with the places on which its contents are mounted. An image that has a link there is refused.
fn make_home(root: &OwnedFd, ids: IdRange) -> io::Result<OwnedFd> {
    let home = make_real_folder(root, HOME.trim_start_matches('/'))?;
    give(&home, ids)?;
    make_real_folder(&home, MOUNTED_FOLDER)?;
    make_real_file(&home, MOUNTED_FILE)?;
    make_command(&home)?;
    Ok(home)
}

/// The agent under the name by which commands call it: a link in a folder of its own, which is last in their `PATH`.
fn make_command(home: &OwnedFd) -> io::Result<()> {
    let folder = make_real_folder(home, BIN)?;
    let target = format!("../{MOUNTED_FILE}");
    // One that is restored has it, and may have no room to make it again.
    if readlinkat(&folder, VIV_VERB, Vec::new()).is_ok_and(|found| found.as_bytes() == target.as_bytes()) {
        return Ok(());
    }
    match unlinkat(&folder, VIV_VERB, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(symlinkat(&target, &folder, VIV_VERB)?)
}

/// A folder that is there and not through a link.
fn make_real_folder(at: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    make_folder(at, name.as_ref())?;
    open_folder(at, Path::new(name), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
}

/// A plain file that is there. What is there already is looked at and not opened: opening a pipe would wait for ever.
fn make_real_file(at: &OwnedFd, name: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    match openat2(at, name, flags, Mode::RUSR, ResolveFlags::BENEATH) {
        Ok(_) => return Ok(()),
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let found = statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a plain file")))
    }
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

/// Gives every sandbox a machine id of its own, the same for all its instances. An image without `/etc`, or with
/// something else in that place, has none.
fn write_machine_id(root: &OwnedFd, identity: &Identity) -> io::Result<()> {
    let path = Path::new(MACHINE_ID);
    let (folder, name) = (path.parent().expect("in /etc"), path.file_name().expect("a name"));
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let Ok(folder) = open_folder(root, folder, inside) else { return Ok(()) };
    let digest = viv_image::Digest::of(identity.sandbox.as_str().as_bytes());
    let id = format!("{}\n", &digest.hex()[..32]);
    let real = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    // A sandbox that is restored has it, and may have no room to write it again.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    if let Ok(file) = openat2(&folder, name, flags, Mode::empty(), real) {
        let mut found = String::new();
        let outcome = File::from(file).take(id.len() as u64 + 1).read_to_string(&mut found);
        if outcome.is_ok() && found == id {
            return Ok(());
        }
    }
    // Whatever else is there belongs to somebody else: the image, or what this was forked from.
    match unlinkat(&folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(_) => return Ok(()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::RGRP | Mode::ROTH;
    File::from(openat2(&folder, name, flags, mode, real)?).write_all(id.as_bytes())
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
    let open = || openat2(&at, path, flags, Mode::empty(), resolve);
    let raced = |opened: &rustix::io::Result<OwnedFd>| matches!(opened, Err(Errno::AGAIN));
    let opened = (0..RACES_MAX).map(|_| open()).find(|opened| !raced(opened));
    Ok(opened.unwrap_or(Err(Errno::AGAIN))?)
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
