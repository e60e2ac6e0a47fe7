//! Taking folders apart that a sandbox filled: as deep and as wide as it liked.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Folders that are open at a time. What lies deeper is first moved up, so
/// that neither the stack nor the descriptors depend on what a sandbox made.
const DEPTH_MAX: usize = 32;

/// Removes a folder with everything in it. What is gone already is fine:
/// another process that opens the data folder empties the trash too.
pub(super) fn take_apart(folder: &Path) -> io::Result<()> {
    let top = match open(CWD, &CString::new(folder.as_os_str().as_bytes())?) {
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
    gone_is_fine(unlinkat(CWD, folder, AtFlags::REMOVEDIR))
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
            *moved += 1;
            gone_is_fine(renameat(folder, name, top, format!(".deep-{moved}")))?;
            continue;
        }
        match open(folder, name) {
            Ok(below) => empty(&below, top, depth + 1, moved)?,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error.into()),
        }
        gone_is_fine(unlinkat(folder, name, AtFlags::REMOVEDIR))?;
    }
    Ok(())
}

fn open(at: impl AsFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
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
        let place = tempfile::tempdir().unwrap();
        let victim = place.path().join("victim");
        let bystander = place.path().join("bystander");
        std::fs::write(&bystander, "here").unwrap();
        std::fs::create_dir(&victim).unwrap();
        let mut folder = open(CWD, &CString::new(victim.as_os_str().as_bytes()).unwrap()).unwrap();
        for _ in 0..20_000 {
            mkdirat(&folder, "below", Mode::RWXU).unwrap();
            rustix::fs::symlinkat(bystander.as_os_str(), &folder, "link").unwrap();
            folder = open(&folder, c"below").unwrap();
        }
        take_apart(&victim).unwrap();
        assert!(!victim.exists());
        assert_eq!(std::fs::read_to_string(&bystander).unwrap(), "here", "a link was followed");
        take_apart(&victim).unwrap();
    }
}
