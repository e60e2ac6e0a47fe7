//! Taking folders apart that a sandbox filled: as deep and as wide as it liked.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, ResolveFlags, openat, openat2, renameat, unlinkat};
use rustix::io::Errno;

use crate::trail::FOLDER;

/// Folders that are open at a time. What lies deeper is first moved up, so
/// that neither the stack nor the descriptors depend on what a sandbox made.
const DEPTH_MAX: usize = 32;

/// Removes a folder with everything in it. What is gone already is fine:
/// another process may be removing it too. What is mounted inside is not
/// touched, and makes this fail: it is somebody else's.
pub fn remove(folder: &Path) -> io::Result<()> {
    remove_at(CWD, &CString::new(folder.as_os_str().as_bytes())?)
}

/// The same, for a name in an open folder.
pub(crate) fn remove_at(at: impl AsFd, name: &CStr) -> io::Result<()> {
    let top = match open(&at, name) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut moved = 0;
    // Each pass that moves something up leaves less below; a pass that moves nothing leaves nothing.
    loop {
        let before = moved;
        empty(&top, &top, 1, &mut moved)?;
        if moved == before {
            break;
        }
    }
    gone_is_fine(unlinkat(at, name, AtFlags::REMOVEDIR))
}

fn empty(folder: &OwnedFd, top: &OwnedFd, depth: usize, moved: &mut u64) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        if entry.file_type() != FileType::Directory {
            match unlinkat(folder, name, AtFlags::empty()) {
                // A filesystem that does not tell kinds in listings.
                Err(Errno::ISDIR) => {}
                result => {
                    gone_is_fine(result)?;
                    continue;
                }
            }
        }
        if depth == DEPTH_MAX {
            gone_is_fine(move_up(folder, name, top, moved))?;
            continue;
        }
        match open_below(folder, name) {
            Ok(below) => empty(&below, top, depth + 1, moved)?,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error.into()),
        }
        gone_is_fine(unlinkat(folder, name, AtFlags::REMOVEDIR))?;
    }
    Ok(())
}

/// Moves a folder to the top, under a name that is free: the sandbox may have taken some.
fn move_up(folder: &OwnedFd, name: &CStr, top: &OwnedFd, moved: &mut u64) -> rustix::io::Result<()> {
    loop {
        *moved += 1;
        match renameat(folder, name, top, format!(".deep-{moved}")) {
            Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
            result => return result,
        }
    }
}

fn open(at: impl AsFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    openat(at, name, FOLDER, Mode::empty())
}

fn open_below(folder: &OwnedFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    openat2(folder, name, FOLDER, Mode::empty(), ResolveFlags::NO_XDEV)
}

fn gone_is_fine(result: rustix::io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::mkdirat;

    use super::*;

    #[test]
    fn a_folder_deeper_than_any_stack_is_taken_apart() {
        // In memory where that is possible: disks are slow with this many folders.
        let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let victim = place.path().join("victim");
        let bystander = place.path().join("bystander");
        std::fs::write(&bystander, "here").unwrap();
        std::fs::create_dir(&victim).unwrap();
        // Names that get in the way of moving up.
        std::fs::create_dir_all(victim.join(".deep-1/full")).unwrap();
        std::fs::write(victim.join(".deep-2"), "").unwrap();
        let mut folder = open(CWD, &CString::new(victim.as_os_str().as_bytes()).unwrap()).unwrap();
        for level in 0..20_000 {
            mkdirat(&folder, "below", Mode::RWXU).unwrap();
            if level % 100 == 0 {
                rustix::fs::symlinkat(bystander.as_os_str(), &folder, "link").unwrap();
            }
            folder = open(&folder, c"below").unwrap();
        }
        remove(&victim).unwrap();
        assert!(!victim.exists());
        assert_eq!(std::fs::read_to_string(&bystander).unwrap(), "here", "a link was followed");
        remove(&victim).unwrap();
    }
}
