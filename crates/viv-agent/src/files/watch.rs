//! Telling what changes below a directory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Dir, FileType, OFlags, fstat, inotify};
use rustix::io::Errno;
use viv_agent::proto::Answer;
use viv_core::file::{WatchEvent, WatchKind};

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::{Result, invalid, quoted, refused, refused_io};
use crate::files;
use crate::files::resolve::open_beneath;

/// Most directories in one watch; each costs the kernel about a kilobyte.
const WATCHES_MAX: usize = 8192;

/// Events taken from the kernel at once.
const BATCH_BYTES: usize = 16 << 10;

const CHANGES: inotify::WatchFlags = inotify::WatchFlags::CREATE
    .union(inotify::WatchFlags::DELETE)
    .union(inotify::WatchFlags::MODIFY)
    .union(inotify::WatchFlags::ATTRIB)
    .union(inotify::WatchFlags::MOVED_FROM)
    .union(inotify::WatchFlags::MOVED_TO)
    .union(inotify::WatchFlags::DELETE_SELF)
    .union(inotify::WatchFlags::MOVE_SELF)
    .union(inotify::WatchFlags::ONLYDIR)
    .union(inotify::WatchFlags::EXCL_UNLINK);

/// Streams changes until the client goes.
pub(crate) fn watch(agent: &Agent, conn: &Conn, path: &str, recursive: bool) -> io::Result<Next> {
    let mut watch = match Watch::begin(agent, path, recursive) {
        Ok(watch) => watch,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Request);
        }
    };
    conn.reply(Ok(Answer::Done))?;
    if watch.full {
        conn.send(&overflow())?;
    }
    loop {
        for event in watch.take()? {
            conn.send(&event)?;
        }
        let mut fds = [PollFd::new(&watch.inotify, PollFlags::IN), PollFd::new(conn.stream(), PollFlags::RDHUP)];
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return Ok(Next::Close),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn overflow() -> WatchEvent {
    WatchEvent { kind: WatchKind::Overflow, path: String::new(), is_dir: false }
}

/// One event as it was read.
struct Raw {
    descriptor: i32,
    flags: inotify::ReadFlags,
    name: Option<Vec<u8>>,
}

struct Watch {
    base: OwnedFd,
    inotify: OwnedFd,
    recursive: bool,
    /// Our own directory: what happens in it is nobody's business who watches from above.
    home: Option<(u64, u64)>,
    /// What is watched, by path below the base.
    paths: HashMap<i32, PathBuf>,
    /// Whether some directory is not watched because there are too many.
    full: bool,
}

impl Watch {
    fn begin(agent: &Agent, path: &str, recursive: bool) -> Result<Self> {
        let base = match files::open(agent, path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Err(refusal) if refusal.message.ends_with(&crate::error::words(Errno::NOTDIR)) => {
                return Err(invalid(format!("{} is not a directory", quoted(path))));
            }
            base => base?,
        };
        // Directories are watched as "." of this thread alone: `/proc`, by which a descriptor has a path, may not exist.
        own_workdir().map_err(|cause| refused_io("watch", &cause))?;
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let inotify = inotify::init(flags).map_err(|errno| refused("watch", errno))?;
        let mut watch = Self { base, inotify, recursive, home: files::home(agent), paths: HashMap::new(), full: false };
        watch.add_tree(PathBuf::new(), None).map_err(|errno| refused(path, errno))?;
        Ok(watch)
    }

    /// Watches a directory and, if asked for, all below it. What is found in
    /// one that is new was made before it was watched, and is told as created.
    fn add_tree(&mut self, top: PathBuf, mut found: Option<&mut Vec<WatchEvent>>) -> rustix::io::Result<()> {
        let mut waiting = vec![top];
        while let Some(below) = waiting.pop() {
            if self.paths.len() >= WATCHES_MAX {
                self.full = true;
                return Ok(());
            }
            let dir = match self.open(&below) {
                Ok(dir) => dir,
                // It went away meanwhile; its removal is told.
                Err(_) if !below.as_os_str().is_empty() => continue,
                Err(errno) => return Err(errno),
            };
            if !below.as_os_str().is_empty() && self.is_ours(&dir) {
                continue;
            }
            rustix::process::fchdir(&dir)?;
            match inotify::add_watch(&self.inotify, c".", CHANGES) {
                Ok(descriptor) => drop(self.paths.insert(descriptor, below.clone())),
                Err(Errno::NOSPC) => {
                    self.full = true;
                    return Ok(());
                }
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(errno),
            }
            if !self.recursive {
                continue;
            }
            for entry in Dir::read_from(&dir)? {
                let entry = entry?;
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                let is_dir = entry.file_type() == FileType::Directory;
                let path = below.join(name);
                if let Some(found) = &mut found {
                    found.push(WatchEvent { kind: WatchKind::Created, path: text(&path), is_dir });
                }
                if is_dir {
                    waiting.push(path);
                }
            }
        }
        Ok(())
    }

    fn is_ours(&self, dir: &OwnedFd) -> bool {
        self.home.is_some() && fstat(dir).is_ok_and(|stat| self.home == Some((stat.st_dev, stat.st_ino)))
    }

    fn open(&self, below: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        open_beneath(&self.base, path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    /// The events that wait, in order.
    fn take(&mut self) -> io::Result<Vec<WatchEvent>> {
        let mut events: Vec<WatchEvent> = Vec::new();
        for raw in self.read_batch()? {
            self.translate(&raw, &mut events)?;
        }
        // A file that is written in small pieces says so for each of them.
        events.dedup();
        Ok(events)
    }

    fn read_batch(&self) -> io::Result<Vec<Raw>> {
        let mut buf = [MaybeUninit::uninit(); BATCH_BYTES];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buf);
        let mut batch = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => batch.push(Raw {
                    descriptor: event.wd(),
                    flags: event.events(),
                    name: event.file_name().map(|name| name.to_bytes().to_vec()),
                }),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(batch),
                Err(errno) => return Err(errno.into()),
            }
            if reader.is_buffer_empty() {
                return Ok(batch);
            }
        }
    }

    fn translate(&mut self, raw: &Raw, events: &mut Vec<WatchEvent>) -> io::Result<()> {
        use inotify::ReadFlags as Flags;
        if raw.flags.contains(Flags::QUEUE_OVERFLOW) {
            events.push(overflow());
            return Ok(());
        }
        if raw.flags.contains(Flags::IGNORED) {
            self.paths.remove(&raw.descriptor);
            return Ok(());
        }
        let Some(dir) = self.paths.get(&raw.descriptor) else { return Ok(()) };
        let path = raw.name.as_deref().map_or_else(|| dir.clone(), |name| dir.join(OsStr::from_bytes(name)));
        let own = raw.name.is_none();
        let is_dir = own || raw.flags.contains(Flags::ISDIR);
        let kind = [
            (Flags::CREATE, WatchKind::Created),
            (Flags::DELETE, WatchKind::Removed),
            (Flags::DELETE_SELF, WatchKind::Removed),
            (Flags::MODIFY, WatchKind::Modified),
            (Flags::ATTRIB, WatchKind::Attributes),
            (Flags::MOVED_FROM, WatchKind::MovedFrom),
            (Flags::MOVE_SELF, WatchKind::MovedFrom),
            (Flags::MOVED_TO, WatchKind::MovedTo),
        ]
        .into_iter()
        .find_map(|(flag, kind)| raw.flags.contains(flag).then_some(kind));
        let Some(kind) = kind else { return Ok(()) };
        // Of a directory below, its parent tells the same.
        if own && !path.as_os_str().is_empty() {
            return Ok(());
        }
        events.push(WatchEvent { kind, path: text(&path), is_dir });
        if self.recursive && is_dir && !own {
            match kind {
                WatchKind::Created | WatchKind::MovedTo => {
                    let was_full = self.full;
                    let mut found = Vec::new();
                    self.add_tree(path, Some(&mut found))?;
                    events.append(&mut found);
                    if self.full && !was_full {
                        events.push(overflow());
                    }
                }
                WatchKind::MovedFrom => self.forget_tree(&path),
                _ => {}
            }
        }
        Ok(())
    }

    /// What was moved away has other paths now, if any; under its new name it is found again.
    fn forget_tree(&mut self, top: &Path) {
        let gone = self.paths.extract_if(|_, path| path.starts_with(top));
        for (descriptor, _) in gone {
            // It may be gone by itself.
            let _ = inotify::remove_watch(&self.inotify, descriptor);
        }
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Gives this thread a working directory of its own. Nothing else of the agent uses relative paths.
fn own_workdir() -> io::Result<()> {
    crate::sys::unshare_workdir()
}
