//! Opening paths without being led astray.
//!
//! The kernel does it in one call (`openat2`). Where it cannot (before Linux
//! 5.6, under gVisor, or while somebody renames something), the way is walked here, one descriptor after
//! another, with the same answers: every step starts from a directory that is
//! held, a link is text that is walked like the rest, and `..` goes back to
//! where we came from, so whoever moves directories about meanwhile gains nothing.
//!
//! What is ours is read by its own name only ([`open_by_name`]): whoever decides by that name who may read it is not
//! deceived by a link that leads there.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, fstatfs, openat, openat2, readlinkat};
use rustix::io::{Errno, Result};

/// Links followed for one path; the kernel's own limit.
const LINKS_MAX: usize = 40;

/// Directories held for one path: it has no room for more, and links could go on for ever.
const DEPTH_MAX: usize = 2048;

/// What `fstatfs` says of `/proc`.
const PROC_MAGIC: i64 = 0x9fa0;

/// The links in `/proc` that are text like any other. The rest lead to what a process holds.
const PLAIN_PROC_LINKS: [&str; 4] = ["self", "thread-self", "mounts", "net"];

/// What the kernel answers to a path with `..` in it while anybody on the whole machine renames or mounts something:
/// it cannot be sure then. A walk holds on to where it came from and can.
const RACED: Errno = Errno::AGAIN;

/// What becomes of links on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    /// They are followed, as if the directory were the root of everything.
    InRoot,
    /// None is followed.
    Refused,
}

/// Opens a path as if `root` were the root of everything: no link and no `..` leads out of it.
pub(crate) fn open_in_root(root: impl AsFd, path: impl AsRef<Path>, flags: OFlags) -> Result<OwnedFd> {
    let (root, path) = (root.as_fd(), path.as_ref());
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Err(Errno::NOSYS | RACED) => walk(root, path, flags, Links::InRoot),
        opened => opened,
    }
}

/// Opens a path below a directory that is open; no link is followed at all.
pub(crate) fn open_beneath(base: impl AsFd, path: impl AsRef<Path>, flags: OFlags) -> Result<OwnedFd> {
    let (base, path) = (base.as_fd(), path.as_ref());
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(base, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Err(Errno::NOSYS | RACED) => walk(base, path, flags, Links::Refused),
        opened => opened,
    }
}

/// Why a path was not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Astray {
    /// A link on the way leads to what is ours.
    Ours,
    /// What the kernel says.
    Errno(Errno),
}

impl From<Errno> for Astray {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// Opens a path as [`open_in_root`] does, but what is at or below `ours` only when no link was followed to it.
pub(crate) fn open_by_name(
    root: impl AsFd,
    ours: Option<impl AsFd>,
    path: impl AsRef<Path>,
    flags: OFlags,
) -> std::result::Result<OwnedFd, Astray> {
    let (root, path) = (root.as_fd(), path.as_ref());
    let Some(ours) = ours else { return Ok(open_in_root(root, path, flags)?) };
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
        // Where links lead is seen one step at a time.
        Err(Errno::NOSYS | Errno::LOOP | RACED) => {
            let ours = fstat(ours)?;
            walk_past(root, path, flags, Links::InRoot, Some((ours.st_dev, ours.st_ino)))
        }
        opened => Ok(opened?),
    }
}

fn walk(root: BorrowedFd<'_>, path: &Path, flags: OFlags, links: Links) -> Result<OwnedFd> {
    walk_past(root, path, flags, links, None).map_err(|astray| match astray {
        Astray::Errno(errno) => errno,
        // Nothing was said to be ours.
        Astray::Ours => Errno::ACCESS,
    })
}

/// A directory on the way.
struct Held {
    dir: OwnedFd,
    is_ours: bool,
}

fn walk_past(
    root: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    links: Links,
    ours: Option<(u64, u64)>,
) -> std::result::Result<OwnedFd, Astray> {
    let path = path.as_os_str();
    if path.is_empty() {
        return Err(Errno::NOENT.into());
    }
    if links == Links::Refused && path.as_bytes().starts_with(b"/") {
        return Err(Errno::XDEV.into());
    }
    // The next part is the last one.
    let mut parts = Vec::new();
    push_parts(&mut parts, path);
    let mut trail: Vec<Held> = Vec::new();
    let mut links_left = LINKS_MAX;
    let has_followed = |links_left: usize| links_left < LINKS_MAX;
    while let Some(part) = parts.pop() {
        let is_last = parts.is_empty();
        match part.as_bytes() {
            b"" | b"." => continue,
            b".." => {
                if trail.pop().is_none() && links == Links::Refused {
                    return Err(Errno::XDEV.into());
                }
                continue;
            }
            _ => {}
        }
        let here = trail.last().map_or(root, |held| held.dir.as_fd());
        let next = openat(here, &part, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = fstat(&next)?;
        let (kind, is_ours) = (FileType::from_raw_mode(stat.st_mode), ours == Some((stat.st_dev, stat.st_ino)));
        if is_ours && has_followed(links_left) {
            return Err(Astray::Ours);
        }
        if kind == FileType::Symlink && !(is_last && flags.contains(OFlags::NOFOLLOW)) {
            if links == Links::Refused || is_magic(&next, &part)? {
                return Err(Errno::LOOP.into());
            }
            if trail.iter().any(|held| held.is_ours) {
                return Err(Astray::Ours);
            }
            links_left = links_left.checked_sub(1).ok_or(Errno::LOOP)?;
            let target = OsString::from_vec(readlinkat(&next, c"", Vec::new())?.into_bytes());
            if target.is_empty() {
                return Err(Errno::NOENT.into());
            }
            if target.as_bytes().starts_with(b"/") {
                trail.clear();
            }
            push_parts(&mut parts, &target);
        } else if is_last {
            // What was put in its place since then is opened only if it is no link.
            let opened = openat(here, &part, flags | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
            let stat = fstat(&opened)?;
            let is_ours = ours == Some((stat.st_dev, stat.st_ino));
            return if is_ours && has_followed(links_left) { Err(Astray::Ours) } else { Ok(opened) };
        } else if kind != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        } else if trail.len() >= DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        } else {
            trail.push(Held { dir: next, is_ours });
        }
    }
    let here = trail.last().map_or(root, |held| held.dir.as_fd());
    Ok(openat(here, c".", flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// What comes first comes last, to be taken from the end. A slash at the end leaves an empty part, so that what is
/// before it has to be a directory.
fn push_parts(parts: &mut Vec<OsString>, path: &OsStr) {
    parts.extend(path.as_bytes().rsplit(|&byte| byte == b'/').map(|part| OsStr::from_bytes(part).to_owned()));
}

/// Whether a link leads to something that a process holds, whatever its text says.
fn is_magic(link: &OwnedFd, name: &OsStr) -> Result<bool> {
    Ok(fstatfs(link)?.f_type == PROC_MAGIC && !PLAIN_PROC_LINKS.iter().any(|plain| name == *plain))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const READ: OFlags = OFlags::RDONLY;

    fn open_dir(path: &Path) -> OwnedFd {
        openat(rustix::fs::CWD, path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
    }

    /// A tree with what can be met on a way.
    fn tree() -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("root");
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), "inside").unwrap();
        fs::write(top.path().join("file"), "outside").unwrap();
        for (name, target) in [
            ("absolute", "/a/b/file"),
            ("relative", "a/b"),
            ("up", "../file"),
            ("far_up", "../../../../a/b/file"),
            ("loop", "loop"),
            ("slash", "a/"),
            ("root", "/"),
            ("dangling", "nowhere"),
            ("magic", "/proc/self/fd/0"),
        ] {
            symlink(target, root.join(name)).unwrap();
        }
        symlink("/a/../absolute", root.join("a/b/link")).unwrap();
        top
    }

    /// What was opened, or why not; the same file has the same answer.
    fn answer(opened: Result<OwnedFd>) -> std::result::Result<(u64, u64), Errno> {
        opened.map(|fd| fstat(&fd).map(|stat| (stat.st_dev, stat.st_ino)).unwrap())
    }

    #[test]
    fn s4_a_walk_answers_as_the_kernel_does() {
        let top = tree();
        let root = open_dir(&top.path().join("root"));
        let paths = [
            "/",
            "",
            ".",
            "..",
            "/..",
            "//a//b",
            "a/b/file",
            "/a/b/file",
            "a/b/file/",
            "a/b/file/.",
            "a/",
            "a/.",
            "a/..",
            "a/../../file",
            "../file",
            "absolute",
            "relative",
            "relative/file",
            "relative/",
            "up",
            "far_up",
            "loop",
            "loop/x",
            "slash",
            "slash/b/file",
            "root",
            "root/a",
            "dangling",
            "dangling/x",
            "a/b/link",
            "a/x/../b",
            "absolute/x",
            "nothing",
            "a/nothing/x",
        ];
        for path in paths {
            for extra in
                [OFlags::empty(), OFlags::NOFOLLOW, OFlags::DIRECTORY, OFlags::PATH, OFlags::PATH | OFlags::NOFOLLOW]
            {
                let flags = READ | extra;
                let kernel = answer(open_in_root(&root, path, flags));
                let walked = answer(walk(root.as_fd(), Path::new(path), flags, Links::InRoot));
                assert_eq!(kernel, walked, "{path:?} in the root with {extra:?}");
                let kernel = answer(open_beneath(&root, path, flags));
                let walked = answer(walk(root.as_fd(), Path::new(path), flags, Links::Refused));
                assert_eq!(kernel, walked, "{path:?} beneath with {extra:?}");
            }
        }
    }

    #[test]
    fn s3_what_is_ours_is_reached_by_its_own_name_only() {
        let top = tree();
        let root_path = top.path().join("root");
        fs::create_dir_all(root_path.join("ours/run")).unwrap();
        fs::write(root_path.join("ours/run/secret"), "ours").unwrap();
        for (name, target) in [
            ("a/to_ours", "/ours"),
            ("a/to_run", "../ours/run"),
            ("a/to_file", "/ours/run/secret"),
            ("a/again", "to_run"),
        ] {
            symlink(target, root_path.join(name)).unwrap();
        }
        symlink("secret", root_path.join("ours/run/inner")).unwrap();
        let (root, ours) = (open_dir(&root_path), open_dir(&root_path.join("ours")));
        let by_name = |path: &str, extra| open_by_name(&root, Some(&ours), path, READ | extra).map(drop);
        for path in
            ["/ours", "/ours/", "/ours/run/secret", "/a/../ours/run", "/a/b/file", "/absolute", "/relative/file"]
        {
            assert_eq!(by_name(path, OFlags::empty()), Ok(()), "{path}");
            let identity = |ours: &OwnedFd| fstat(ours).map(|stat| (stat.st_dev, stat.st_ino)).unwrap();
            let walked = walk_past(root.as_fd(), Path::new(path), READ, Links::InRoot, Some(identity(&ours)));
            assert_eq!(walked.map(drop), Ok(()), "{path}");
        }
        let led = ["/a/to_ours", "/a/to_ours/", "/a/to_ours/run/secret", "/a/to_run", "/a/to_run/secret", "/a/to_file"];
        for path in led.into_iter().chain(["/a/again", "/root/ours", "/root/ours/run/secret", "/ours/run/inner"]) {
            assert_eq!(by_name(path, OFlags::empty()), Err(Astray::Ours), "{path}");
        }
        // A link itself is whoever's made it, and is looked at as such.
        assert_eq!(by_name("/a/to_ours", OFlags::PATH | OFlags::NOFOLLOW), Ok(()));
    }

    #[test]
    fn a_path_is_found_while_somebody_renames_something_elsewhere() {
        let top = tree();
        let root = open_dir(&top.path().join("root"));
        let (one, other) = (top.path().join("one"), top.path().join("other"));
        fs::write(&one, "").unwrap();
        // Long, so that somebody does while it is walked.
        let path = format!("a/{}b/file", "b/../".repeat(400));
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let renamer = scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    fs::rename(&one, &other).and_then(|()| fs::rename(&other, &one)).unwrap();
                }
            });
            let opened: Vec<_> = (0..2000).map(|_| open_in_root(&root, &path, READ).map(drop)).collect();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            renamer.join().unwrap();
            assert_eq!(opened.into_iter().find(Result::is_err), None);
        });
    }

    #[test]
    fn s4_a_walk_follows_no_magic_link() {
        let root = open_dir(Path::new("/"));
        for path in
            ["/proc/self/fd/0", "/proc/self/root/etc", "/proc/self/cwd", "/proc/thread-self/exe", "/proc/self/ns/mnt"]
        {
            let walked = walk(root.as_fd(), Path::new(path), READ, Links::InRoot);
            assert_eq!(walked.map(drop), Err(Errno::LOOP), "{path}");
            assert_eq!(open_in_root(&root, path, READ).map(drop), Err(Errno::LOOP), "{path}");
        }
        let walked = answer(walk(root.as_fd(), Path::new("/proc/mounts"), READ, Links::InRoot));
        assert!(walked.is_ok(), "{walked:?}");
    }
}
