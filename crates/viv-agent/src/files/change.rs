//! Making, moving and removing.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;
use viv_agent::proto::{Answer, ErrorCode};

use crate::agent::Agent;
use crate::error::{Result, error, quoted, refused, say};
use crate::files::{self, DIR, Parents};

/// Deepest tree that is removed in one go; every level costs a descriptor.
const REMOVE_DEPTH_MAX: usize = 512;

/// How often one directory is emptied. Once is enough, unless somebody fills it at the same
/// time; then every pass finds more than the one before, so there are few.
const PASSES_MAX: u32 = 3;

/// How long one removal goes on. A million files are gone by then; what is
/// still there is being made meanwhile, and even one look into such a directory may never end.
const REMOVE_PATIENCE: Duration = Duration::from_secs(60);

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
        Err(errno @ Errno::INVAL) => Err(refused(&format!("{} into itself", quoted(from)), errno)),
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
    match remove_tree(place.dir, place.name, Instant::now() + REMOVE_PATIENCE) {
        Ok(()) => Ok(Answer::Done),
        Err(NotRemoved::Refused(errno)) => Err(refused(path, errno)),
        Err(NotRemoved::Filled) => Err(error(ErrorCode::Conflict, format!("{} keeps being filled", quoted(path)))),
    }
}

/// Why a tree is still there.
#[derive(Debug, PartialEq, Eq)]
enum NotRemoved {
    Refused(Errno),
    /// Something appeared in it as often, or for as long, as it was emptied.
    Filled,
}

impl From<Errno> for NotRemoved {
    fn from(errno: Errno) -> Self {
        Self::Refused(errno)
    }
}

/// One directory on the way down, and those of its subdirectories that are still there.
struct Level {
    dir: OwnedFd,
    subdirs: Vec<OsString>,
    /// How often the last of them was emptied.
    passes: u32,
}

/// Removes a directory with all that is in it, without recursion: what is no
/// directory goes at once, then down into the last subdirectory, and up when none is left.
fn remove_tree(parent: OwnedFd, name: OsString, deadline: Instant) -> std::result::Result<(), NotRemoved> {
    let mut levels = vec![Level { dir: parent, subdirs: vec![name], passes: 0 }];
    while let Some(level) = levels.last_mut() {
        if Instant::now() >= deadline {
            return Err(NotRemoved::Filled);
        }
        let Some(name) = level.subdirs.last() else {
            levels.pop();
            continue;
        };
        match unlinkat(&level.dir, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {
                level.subdirs.pop();
                level.passes = 0;
                continue;
            }
            Err(Errno::NOTEMPTY | Errno::EXIST) if level.passes < PASSES_MAX => level.passes += 1,
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Err(NotRemoved::Filled),
            Err(errno) => return Err(errno.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(&level.dir, name, flags, Mode::empty())?;
        let subdirs = remove_files(&dir, deadline)?;
        if levels.len() > REMOVE_DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        levels.push(Level { dir, subdirs, passes: 0 });
    }
    Ok(())
}

/// Removes everything in a directory but directories, and returns those.
fn remove_files(dir: &OwnedFd, deadline: Instant) -> std::result::Result<Vec<OsString>, NotRemoved> {
    let mut subdirs = Vec::new();
    for entry in Dir::read_from(dir)? {
        if Instant::now() >= deadline {
            return Err(NotRemoved::Filled);
        }
        let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
        if name == "." || name == ".." {
            continue;
        }
        match unlinkat(dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => subdirs.push(name),
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(subdirs)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_directory_that_keeps_being_filled_is_given_up() {
        // What fills it ends by itself, so that nothing is left running when this fails.
        const FILLED_FOR: Duration = Duration::from_secs(5);
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("d");
        std::fs::create_dir(&dir).unwrap();
        let (done, begin) = (AtomicBool::new(false), Instant::now());
        let removed = std::thread::scope(|scope| {
            for writer in 0..2 {
                let (dir, done) = (&dir, &done);
                scope.spawn(move || {
                    for n in 0_u64.. {
                        if done.load(Ordering::Relaxed) || begin.elapsed() > FILLED_FOR {
                            return;
                        }
                        // The directory may be gone, and comes again.
                        let _ = std::fs::create_dir_all(dir.join(format!("{writer}-{n}/deeper")));
                    }
                });
            }
            let parent = std::fs::File::open(root.path()).unwrap().into();
            let removed = remove_tree(parent, "d".into(), Instant::now() + Duration::from_millis(300));
            done.store(true, Ordering::Relaxed);
            removed
        });
        assert!(begin.elapsed() < FILLED_FOR, "it went on for as long as there was something");
        assert!(matches!(removed, Ok(()) | Err(NotRemoved::Filled)), "{removed:?}");
        let parent = std::fs::File::open(root.path()).unwrap().into();
        assert_eq!(remove_tree(parent, "d".into(), Instant::now() + REMOVE_PATIENCE), Ok(()));
    }
}
