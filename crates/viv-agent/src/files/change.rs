//! Making, moving and removing.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;

use rustix::fs::{AtFlags, Dir, Mode, OFlags, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;
use viv_agent::proto::Answer;

use crate::agent::Agent;
use crate::error::{Result, refused, say};
use crate::files::{self, DIR, Parents};

/// Deepest tree that is removed in one go; every level costs a descriptor.
const REMOVE_DEPTH_MAX: usize = 512;

/// Makes the directory where commands start.
pub(crate) fn make_workdir(agent: &Agent) {
    let path = &agent.config.workdir;
    if files::open(agent, path, DIR).is_err()
        && let Err(refusal) = mkdir(agent, path)
    {
        say(&format!("working directory not made: {refusal}"));
    }
}

/// Makes a directory and those above it; one that exists is fine.
pub(crate) fn mkdir(agent: &Agent, path: &str) -> Result<Answer> {
    let place = files::place(agent, path, Parents::Made)?;
    match mkdirat(&place.dir, &place.name, Mode::from_raw_mode(0o755)) {
        Ok(()) => Ok(Answer::Done),
        Err(Errno::EXIST) => match openat(&place.dir, &place.name, DIR | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(_) => Ok(Answer::Done),
            Err(_) => Err(refused(path, Errno::EXIST)),
        },
        Err(errno) => Err(refused(path, errno)),
    }
}

/// Moves; a file in the way is replaced, a directory only if it is empty.
pub(crate) fn rename(agent: &Agent, from: &str, to: &str) -> Result<Answer> {
    let source = files::place(agent, from, Parents::Needed)?;
    let target = files::place(agent, to, Parents::Made)?;
    match renameat(&source.dir, &source.name, &target.dir, &target.name) {
        Ok(()) => Ok(Answer::Done),
        Err(errno @ Errno::INVAL) => Err(refused(&format!("{from:?} into itself"), errno)),
        Err(errno @ Errno::NOENT) => Err(refused(from, errno)),
        Err(errno) => Err(refused(to, errno)),
    }
}

/// Removes whatever stands at a path, and everything below it. Links are removed, not followed.
pub(crate) fn remove(agent: &Agent, path: &str) -> Result<Answer> {
    let place = files::place(agent, path, Parents::Needed)?;
    match unlinkat(&place.dir, &place.name, AtFlags::empty()) {
        Ok(()) => return Ok(Answer::Done),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(errno) => return Err(refused(path, errno)),
    }
    remove_tree(place.dir, place.name).map_err(|errno| refused(path, errno))?;
    Ok(Answer::Done)
}

/// One directory on the way down, and those of its subdirectories that are still there.
struct Level {
    dir: OwnedFd,
    subdirs: Vec<OsString>,
}

/// Removes a directory with all that is in it, without recursion: what is no
/// directory goes at once, then down into the last subdirectory, and up when none is left.
fn remove_tree(parent: OwnedFd, name: OsString) -> rustix::io::Result<()> {
    let mut levels = vec![Level { dir: parent, subdirs: vec![name] }];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.subdirs.last() else {
            levels.pop();
            continue;
        };
        match unlinkat(&level.dir, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {
                level.subdirs.pop();
                continue;
            }
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(&level.dir, name, flags, Mode::empty())?;
        let subdirs = remove_files(&dir)?;
        if levels.len() > REMOVE_DEPTH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        levels.push(Level { dir, subdirs });
    }
    Ok(())
}

/// Removes everything in a directory but directories, and returns those.
fn remove_files(dir: &OwnedFd) -> rustix::io::Result<Vec<OsString>> {
    let mut subdirs = Vec::new();
    for entry in Dir::read_from(dir)? {
        let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
        if name == "." || name == ".." {
            continue;
        }
        match unlinkat(dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => subdirs.push(name),
            Err(errno) => return Err(errno),
        }
    }
    Ok(subdirs)
}
