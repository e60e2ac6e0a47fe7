//! Files of the sandbox, by descriptor.
//!
//! Invariants: every path is resolved beneath the sandbox's root by the kernel
//! or as it would ([`resolve`]), so no link and no `..` leads out of it;
//! nothing is ever looked up twice by name where the second look decides
//! about rights. What is ours ([`viv_agent::proto::HOME`]) is changed by nobody, and read by its own name only, by which
//! others decide who may: no link leads there, and no walk from above goes into it.

pub(crate) mod change;
pub(crate) mod list;
pub(crate) mod pack;
pub(crate) mod read;
pub(crate) mod resolve;
pub(crate) mod unpack;
pub(crate) mod watch;
pub(crate) mod write;

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, mkdirat, openat};
use rustix::io::Errno;
use viv_agent::proto::AgentError;
use viv_core::file::{FileKind, FileStat};

use crate::agent::Agent;
use crate::error::{Result, invalid, quoted, refused};
use crate::files::resolve::{Astray, open_by_name, open_in_root};

/// The kernel's own limit on a path.
const PATH_BYTES_MAX: usize = 4095;

/// Directories between a file and the root: a path has no room for more.
const DEPTH_MAX: usize = 2048;

/// A directory, to go on from.
const DIR: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Checks the form of a path from outside.
fn check(path: &str) -> Result<()> {
    if !path.starts_with('/') {
        return Err(invalid(format!("{} is not an absolute path", quoted(path))));
    }
    if path.contains('\0') {
        return Err(invalid("a path holds a NUL"));
    }
    if path.len() > PATH_BYTES_MAX {
        return Err(invalid(format!("a path is longer than {PATH_BYTES_MAX} bytes")));
    }
    Ok(())
}

/// Opens a path beneath the root.
fn open(agent: &Agent, path: &str, flags: OFlags) -> Result<OwnedFd> {
    check(path)?;
    open_by_name(&agent.places.root, agent.places.home.as_ref(), path, flags).map_err(|astray| match astray {
        Astray::Ours => belongs(path),
        Astray::Errno(errno) => refused(path, errno),
    })
}

/// The refusal of what is ours.
fn belongs(path: &str) -> AgentError {
    invalid(format!("{} belongs to the sandbox itself", quoted(path)))
}

/// Our own directory, by which a walk that comes from above knows it.
fn home(agent: &Agent) -> Option<(u64, u64)> {
    let home = agent.places.home.as_ref()?;
    fstat(home).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// A name in a directory that is open.
struct Place {
    dir: OwnedFd,
    name: OsString,
}

/// Whether missing directories on the way are made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parents {
    Needed,
    Made,
}

/// Finds the place of a path that is to be changed, which must not be ours.
fn place(agent: &Agent, path: &str, parents: Parents) -> Result<Place> {
    check(path)?;
    let trimmed = path.trim_end_matches('/');
    let Some((parent, name)) = trimmed.rsplit_once('/') else {
        return Err(invalid("the root itself cannot be changed"));
    };
    if matches!(name, "." | "..") {
        return Err(invalid(format!("{} does not end in a name", quoted(path))));
    }
    let dir = match open_in_root(&agent.places.root, rooted(parent), DIR) {
        Ok(dir) => dir,
        Err(Errno::NOENT) if parents == Parents::Made => make_parents(agent, parent)?,
        Err(errno) => return Err(refused(rooted(parent), errno)),
    };
    guard(agent, &dir, path)?;
    let place = Place { dir, name: name.into() };
    // The directory itself, by whatever name, is as untouchable as what is in it.
    if let Ok(own) = openat(&place.dir, &place.name, DIR | OFlags::NOFOLLOW, Mode::empty()) {
        guard(agent, &own, path)?;
    }
    Ok(place)
}

fn rooted(path: &str) -> &str {
    if path.is_empty() { "/" } else { path }
}

fn make_parents(agent: &Agent, parent: &str) -> Result<OwnedFd> {
    let mut dir = open(agent, "/", DIR)?;
    let ends = parent.match_indices('/').map(|(at, _)| at).chain([parent.len()]).skip(1);
    for end in ends {
        let prefix = &parent[..end];
        let name = prefix.rsplit('/').next().unwrap_or_default();
        let next = open_in_root(&agent.places.root, rooted(prefix), DIR);
        dir = match next {
            Err(Errno::NOENT) if !matches!(name, "" | "." | "..") => {
                guard(agent, &dir, prefix)?;
                match mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => open(agent, prefix, DIR)?,
                    Err(errno) => return Err(refused(prefix, errno)),
                }
            }
            next => next.map_err(|errno| refused(prefix, errno))?,
        };
    }
    Ok(dir)
}

/// Refuses what is at or below our own directory, however it was reached.
fn guard(agent: &Agent, dir: &OwnedFd, path: &str) -> Result<()> {
    let Some(home) = &agent.places.home else { return Ok(()) };
    let identity = |fd: &OwnedFd| fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    let look = || -> rustix::io::Result<bool> {
        let (home, root) = (identity(home)?, identity(&agent.places.root)?);
        let mut at = identity(dir)?;
        let mut parent = openat(dir, c".", DIR, Mode::empty())?;
        for _ in 0..DEPTH_MAX {
            if at == home {
                return Ok(true);
            }
            if at == root {
                return Ok(false);
            }
            parent = openat(&parent, c"..", DIR, Mode::empty())?;
            at = identity(&parent)?;
        }
        // Deeper than a path can be: no answer is a no.
        Ok(true)
    };
    match look() {
        Ok(false) => Ok(()),
        Ok(true) => Err(belongs(path)),
        Err(errno) => Err(refused(path, errno)),
    }
}

fn kind_of(stat: &Stat) -> FileKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Dir,
        FileType::Symlink => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

/// A stat as the protocol has it.
fn describe(stat: &Stat, link_target: Option<String>) -> FileStat {
    FileStat {
        kind: kind_of(stat),
        size_bytes: stat.st_size as u64,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        modified_at_ms: u64::try_from(stat.st_mtime).unwrap_or(0).saturating_mul(1000) + stat.st_mtime_nsec / 1_000_000,
        link_target,
    }
}

/// Where the link at a name points, as text.
fn link_target(dir: &OwnedFd, name: &OsStr) -> Option<String> {
    let target = rustix::fs::readlinkat(dir, name, Vec::new()).ok()?;
    Some(String::from_utf8_lossy(OsStr::from_bytes(target.as_bytes()).as_bytes()).into_owned())
}
