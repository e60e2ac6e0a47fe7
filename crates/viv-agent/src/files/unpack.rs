//! Unpacking a tar stream, however hostile (S4).
//!
//! The `tar` crate only parses. Every entry is made by descriptor, below the
//! destination, through directories that are no links, so nothing is ever
//! written elsewhere. A symbolic link may name any target, as those of a Python
//! environment do: it is a text that is never followed here, and whoever
//! follows it later is inside the sandbox too. What was unpacked before an
//! entry was refused stays.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, chownat, fchmod, fchown, fstat, futimens, linkat,
    mkdirat, openat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType};
use viv_agent::proto::{AgentError, Answer, ErrorCode, Fence};
use viv_core::file::{ArchiveBounds, Unpacked};

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::{Conn, Frame};
use crate::error::{Result, error, invalid, quoted, refused};
use crate::files::write::Draft;
use crate::files::{self, DIR, Place, change};

/// What may come between two entries: headers and long names. The parser keeps it in memory.
const HEADERS_BYTES_MAX: u64 = 1 << 20;

/// The upload, as the parser reads it.
struct Upload<'c> {
    conn: &'c Conn,
    meter: &'c Meter,
    buf: Vec<u8>,
    from: usize,
    to: usize,
}

/// What the parser and we both have to know about the upload.
#[derive(Default)]
struct Meter {
    received: Cell<u64>,
    /// What may still be read before we say so.
    allowance: Cell<u64>,
    ended: Cell<bool>,
    /// Whether the client is gone.
    broken: Cell<bool>,
}

impl Upload<'_> {
    fn fill(&mut self) -> io::Result<()> {
        match self.conn.read_frame(&mut self.buf) {
            Ok(Frame::Data(length)) => (self.from, self.to) = (0, length),
            Ok(Frame::End) => self.meter.ended.set(true),
            Ok(Frame::Json) => return Err(io::Error::other("an archive is sent as data")),
            Err(cause) => {
                self.meter.broken.set(true);
                return Err(cause);
            }
        }
        Ok(())
    }

    /// Takes what follows the archive's end.
    fn drain(&mut self) -> io::Result<()> {
        while !self.meter.ended.get() {
            self.fill()?;
        }
        Ok(())
    }
}

impl Read for Upload<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.from == self.to && !self.meter.ended.get() {
            self.fill()?;
        }
        let allowance = self.meter.allowance.get();
        if allowance == 0 && !buf.is_empty() {
            return Err(io::Error::other("its headers are too long"));
        }
        let count = buf.len().min(self.to - self.from).min(usize::try_from(allowance).unwrap_or(usize::MAX));
        buf[..count].copy_from_slice(&self.buf[self.from..self.from + count]);
        self.from += count;
        self.meter.allowance.set(allowance - count as u64);
        self.meter.received.set(self.meter.received.get() + count as u64);
        Ok(count)
    }
}

/// Takes an upload and unpacks it below a directory, which is made if it is missing.
pub(crate) fn put(agent: &Agent, conn: &Conn, fence: &Fence, path: &str, bounds: ArchiveBounds) -> io::Result<Next> {
    let destination = agent.fencing.check(fence).and_then(|()| open_destination(agent, path));
    let destination = match destination {
        Ok(destination) => destination,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Close);
        }
    };
    let meter = Meter::default();
    let home = agent.places.home.as_ref().and_then(|home| fstat(home).ok()).map(|stat| (stat.st_dev, stat.st_ino));
    let done = Unpacked { entries: 0, bytes: 0 };
    let unpacking = Unpacking { agent, fence, destination, home, bounds, meter: &meter, done };
    let mut archive = Archive::new(Upload { conn, meter: &meter, buf: Vec::new(), from: 0, to: 0 });
    let result = unpacking.run(&mut archive);
    match result {
        Ok(unpacked) => {
            archive.into_inner().drain()?;
            conn.reply(Ok(Answer::Unpacked(unpacked)))?;
            Ok(Next::Request)
        }
        Err(_) if meter.broken.get() => Err(io::ErrorKind::ConnectionAborted.into()),
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            Ok(Next::Close)
        }
    }
}

fn open_destination(agent: &Agent, path: &str) -> Result<OwnedFd> {
    if path.trim_end_matches('/').is_empty() {
        return files::open(agent, "/", DIR);
    }
    let directory = match files::open(agent, path, DIR) {
        Err(missing) if missing.code == ErrorCode::NotFound => {
            change::mkdir(agent, path)?;
            files::open(agent, path, DIR | OFlags::NOFOLLOW)?
        }
        directory => directory?,
    };
    files::guard(agent, &directory, path)?;
    Ok(directory)
}

struct Unpacking<'m> {
    agent: &'m Agent,
    /// Whose upload this is: asked for again with each change, since uploads are long.
    fence: &'m Fence,
    destination: OwnedFd,
    home: Option<(u64, u64)>,
    bounds: ArchiveBounds,
    meter: &'m Meter,
    done: Unpacked,
}

impl Unpacking<'_> {
    fn run(mut self, archive: &mut Archive<Upload<'_>>) -> Result<Unpacked> {
        let unreadable = |cause: io::Error| invalid(format!("not a tar archive: {cause}"));
        self.meter.allowance.set(HEADERS_BYTES_MAX);
        for entry in archive.entries().map_err(unreadable)? {
            let mut entry = entry.map_err(|cause| {
                if self.meter.allowance.get() == 0 { exhausted("its headers are too long") } else { unreadable(cause) }
            })?;
            self.done.entries += 1;
            if self.done.entries > self.bounds.entries_max {
                return Err(exhausted(&format!("it has more than {} entries", self.bounds.entries_max)));
            }
            self.meter.allowance.set(u64::MAX);
            self.unpack(&mut entry)?;
            // What was left unread of it is skipped by the parser, and not kept in memory.
            io::copy(&mut entry, &mut io::sink()).map_err(unreadable)?;
            self.meter.allowance.set(HEADERS_BYTES_MAX);
        }
        Ok(self.done)
    }

    fn unpack(&mut self, entry: &mut Entry<'_, Upload<'_>>) -> Result<()> {
        let path = entry.path_bytes().into_owned();
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        self.agent.fencing.check(self.fence)?;
        let names = names(&path)?;
        let shown = String::from_utf8_lossy(&path);
        let Some((name, parents)) = names.split_last() else {
            // The destination itself, as in "./": it is there.
            return if kind == EntryType::Directory { Ok(()) } else { Err(invalid("an entry has no name")) };
        };
        let dir = self.descend(parents, &shown)?;
        let place = Place { dir, name: OsString::from(name) };
        let fail = |errno| refused(&shown, errno);
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => self.write_file(entry, place, &shown),
            EntryType::Directory => self.make_dir(entry, &place, &shown),
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                if target.is_empty() || target.contains(&0) {
                    return Err(invalid(format!("{} links to nothing", quoted(&shown))));
                }
                let make = || symlinkat(OsStr::from_bytes(&target), &place.dir, &place.name);
                self.still(|| clear(&place).and_then(|()| make()))?.map_err(fail)?;
                let (uid, gid) = owner(entry, &shown)?;
                forgive(chownat(&place.dir, &place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW))
                    .map_err(fail)
                    .map(drop)
            }
            EntryType::Link => self.link(entry, &place, &shown),
            _ => Err(invalid(format!("{} is neither file, directory nor link", quoted(&shown)))),
        }
    }

    /// Makes one change, if the sender of the upload may still make any.
    fn still<T>(&self, change: impl FnOnce() -> T) -> Result<T> {
        self.agent.fencing.still(self.fence, change)
    }

    /// Opens the directory of an entry, through real directories only, making those that are missing.
    fn descend(&self, parents: &[&OsStr], shown: &str) -> Result<OwnedFd> {
        let mut dir = openat(&self.destination, c".", DIR, Mode::empty()).map_err(|errno| refused(shown, errno))?;
        for name in parents {
            let open = || openat(&dir, *name, DIR | OFlags::NOFOLLOW, Mode::empty());
            let next = match open() {
                Err(Errno::NOENT) => match self.still(|| mkdirat(&dir, *name, Mode::from_raw_mode(0o755)))? {
                    Ok(()) | Err(Errno::EXIST) => open(),
                    Err(errno) => Err(errno),
                },
                next => next,
            };
            dir = match next {
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(invalid(format!("{} leads through something that is no directory", quoted(shown))));
                }
                next => next.map_err(|errno| refused(shown, errno))?,
            };
            self.spare_home(&dir, shown)?;
        }
        Ok(dir)
    }

    /// What is ours is not unpacked into.
    fn spare_home(&self, dir: &OwnedFd, shown: &str) -> Result<()> {
        let stat = fstat(dir).map_err(|errno| refused(shown, errno))?;
        if self.home == Some((stat.st_dev, stat.st_ino)) {
            return Err(invalid(format!("{} belongs to the sandbox itself", quoted(shown))));
        }
        Ok(())
    }

    fn write_file(&mut self, entry: &mut Entry<'_, Upload<'_>>, place: Place, shown: &str) -> Result<()> {
        let mut draft = Draft::create(place).map_err(|errno| refused(shown, errno))?;
        let mut buf = vec![0; files::read::PIECE_BYTES];
        loop {
            let count = entry.read(&mut buf).map_err(|cause| invalid(format!("{}: {cause}", quoted(shown))))?;
            if count == 0 {
                break;
            }
            self.done.bytes += count as u64;
            if self.done.bytes > self.bounds.bytes_max {
                return Err(exhausted(&format!("it unpacks to more than {} bytes", self.bounds.bytes_max)));
            }
            let ratio_max = self.bounds.ratio_max.max(1);
            if self.done.bytes > self.meter.received.get().saturating_mul(ratio_max) {
                return Err(exhausted(&format!("it unpacks to more than {ratio_max} times its size")));
            }
            draft.file.write_all(&buf[..count]).map_err(|cause| crate::error::refused_io(shown, &cause))?;
        }
        let file = draft.file.try_clone().map_err(|cause| crate::error::refused_io(shown, &cause))?;
        settle(entry, &file.into(), shown)?;
        self.still(|| draft.keep())?.map_err(|errno| refused(shown, errno))
    }

    fn make_dir(&self, entry: &Entry<'_, Upload<'_>>, place: &Place, shown: &str) -> Result<()> {
        match self.still(|| mkdirat(&place.dir, &place.name, Mode::from_raw_mode(0o755)))? {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(refused(shown, errno)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(&place.dir, &place.name, flags, Mode::empty()).map_err(|errno| refused(shown, errno))?;
        self.spare_home(&dir, shown)?;
        self.still(|| settle(entry, &dir, shown))?
    }

    fn link(&self, entry: &Entry<'_, Upload<'_>>, place: &Place, shown: &str) -> Result<()> {
        let target = entry.link_name_bytes().unwrap_or_default().into_owned();
        let names = names(&target)?;
        let Some((name, parents)) = names.split_last() else {
            return Err(invalid(format!("{} links to nothing", quoted(shown))));
        };
        let dir = self.descend(parents, shown)?;
        let fail = |errno| refused(shown, errno);
        let stat = statat(&dir, *name, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        // A symbolic link would point elsewhere from its second place.
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(invalid(format!("{} links to something that is no file", quoted(shown))));
        }
        let make = || linkat(&dir, *name, &place.dir, &place.name, AtFlags::empty());
        self.still(|| clear(place).and_then(|()| make()))?.map_err(fail)
    }
}

/// The names of a path below the destination.
fn names(path: &[u8]) -> Result<Vec<&OsStr>> {
    let refuse = |why: &str| invalid(format!("{} {why}", quoted(&String::from_utf8_lossy(path))));
    if path.starts_with(b"/") {
        return Err(refuse("is an absolute path"));
    }
    if path.contains(&0) {
        return Err(refuse("holds a NUL"));
    }
    let names: Vec<&OsStr> =
        path.split(|&b| b == b'/').filter(|name| !name.is_empty() && *name != b".").map(OsStr::from_bytes).collect();
    if names.iter().any(|name| *name == "..") {
        return Err(refuse("leads upwards"));
    }
    Ok(names)
}

/// Makes room for a link: what is no directory goes.
fn clear(place: &Place) -> rustix::io::Result<()> {
    match unlinkat(&place.dir, &place.name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        cleared => cleared,
    }
}

fn owner(entry: &Entry<'_, Upload<'_>>, shown: &str) -> Result<(Uid, Gid)> {
    let header = entry.header();
    // Who leaves a field empty means root, as every tar takes it.
    let id = |field: [u8; 8], id: io::Result<u64>| {
        if field.iter().all(|byte| matches!(byte, 0 | b' ')) {
            return Ok(0);
        }
        let id = id.ok().and_then(|id| u32::try_from(id).ok()).filter(|&id| id != u32::MAX);
        id.ok_or_else(|| invalid(format!("{} has an owner that cannot be", quoted(shown))))
    };
    let old = header.as_old();
    Ok((Uid::from_raw(id(old.uid, header.uid())?), Gid::from_raw(id(old.gid, header.gid())?)))
}

/// An owner that does not exist in this sandbox is passed over: false.
fn forgive(changed: rustix::io::Result<()>) -> rustix::io::Result<bool> {
    match changed {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::PERM | Errno::OVERFLOW) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Owner, mode and time, in this order: a change of owner clears set-id bits.
fn settle(entry: &Entry<'_, Upload<'_>>, file: &OwnedFd, shown: &str) -> Result<()> {
    let fail = |errno| refused(shown, errno);
    let (uid, gid) = owner(entry, shown)?;
    let owned = forgive(fchown(file, Some(uid), Some(gid))).map_err(fail)?;
    let mode = entry.header().mode().map_err(|cause| invalid(format!("{}: {cause}", quoted(shown))))?;
    // Set-id bits without their owner would be somebody else's.
    let mask = if owned { 0o7777 } else { 0o1777 };
    fchmod(file, Mode::from_raw_mode(mode & mask)).map_err(fail)?;
    let seconds = i64::try_from(entry.header().mtime().unwrap_or(0)).unwrap_or(i64::MAX);
    let time = Timespec { tv_sec: seconds.min(i64::from(u32::MAX)), tv_nsec: 0 };
    futimens(file, &Timestamps { last_access: time, last_modification: time }).map_err(fail)
}

fn exhausted(what: &str) -> AgentError {
    error(ErrorCode::Exhausted, format!("the archive is too large: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_below() {
        assert_eq!(names(b"./a//b/").unwrap(), ["a", "b"]);
        assert!(names(b"").unwrap().is_empty());
        for bad in [b"/a".as_slice(), b"../a", b"a/../b", b"a/..", b"a\0b"] {
            assert_eq!(names(bad).unwrap_err().code, ErrorCode::Invalid);
        }
    }
}
