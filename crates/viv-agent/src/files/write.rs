//! Writing a file: whole, or not at all.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use viv_agent::proto::{Answer, Fence};
use viv_core::file::FileStat;

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::{Conn, Frame};
use crate::error::{Result, invalid, quoted, refused, refused_io};
use crate::exec::user::Database;
use crate::files::{self, Parents, Place};

/// Mode of a new file when none is given.
const MODE: u32 = 0o644;

/// A file beside its target until it is whole; removed if that never happens.
pub(crate) struct Draft {
    place: Place,
    name: OsString,
    pub(crate) file: File,
    kept: bool,
}

static DRAFTS: AtomicU64 = AtomicU64::new(0);

impl Draft {
    pub(super) fn create(place: Place) -> rustix::io::Result<Self> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
            let name = OsString::from(format!(".viv-{:x}-{number:x}.tmp", crate::sys::wall_ms()));
            match openat(&place.dir, &name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => return Ok(Self { place, name, file: file.into(), kept: false }),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Puts it in the place of its target.
    pub(crate) fn keep(mut self) -> rustix::io::Result<()> {
        renameat(&self.place.dir, &self.name, &self.place.dir, &self.place.name)?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.kept {
            // Best effort; the name says what it was.
            let _ = unlinkat(&self.place.dir, &self.name, AtFlags::empty());
        }
    }
}

/// Takes an upload and puts it in the place of a file. A link in that place is replaced, not followed.
pub(crate) fn write(
    agent: &Agent,
    conn: &Conn,
    fence: &Fence,
    path: &str,
    mode: Option<u32>,
    user: Option<&str>,
) -> io::Result<Next> {
    let begun = agent.fencing.check(fence).and_then(|()| begin(agent, path, mode, user));
    let mut draft = match begun {
        Ok(draft) => draft,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Close);
        }
    };
    let mut buf = Vec::new();
    loop {
        let refusal = match conn.read_frame(&mut buf)? {
            Frame::Data(length) => match draft.file.write_all(&buf[..length]) {
                Ok(()) => continue,
                Err(cause) => refused_io(path, &cause),
            },
            Frame::End => break,
            Frame::Json => invalid("a file is sent as data"),
        };
        drop(draft);
        conn.reply(Err(refusal))?;
        return Ok(Next::Close);
    }
    conn.reply(finish(agent, fence, draft, path).map(Answer::Stat))?;
    Ok(Next::Request)
}

fn begin(agent: &Agent, path: &str, mode: Option<u32>, user: Option<&str>) -> Result<Draft> {
    if mode.is_some_and(|mode| mode & !0o7777 != 0) {
        return Err(invalid("a mode has at most four octal digits"));
    }
    if path.ends_with('/') {
        return Err(invalid(format!("{} names a directory", quoted(path))));
    }
    let owner = match user {
        Some(_) => {
            let account = Database::read(&agent.places.root).find(user).map_err(invalid)?;
            Some((account.uid, account.gid))
        }
        None => None,
    };
    let place = files::place(agent, path, Parents::Made)?;
    // What is replaced passes on its owner and mode.
    let before = statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW).ok();
    if before.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory) {
        return Err(refused(path, Errno::ISDIR));
    }
    let before = before.filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    let draft = Draft::create(place).map_err(|errno| refused(path, errno))?;
    let owner = owner.or(before.map(|stat| (stat.st_uid, stat.st_gid)));
    if let Some((uid, gid)) = owner {
        fchown(&draft.file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
            .map_err(|errno| refused("owner", errno))?;
    }
    let mode = mode.or(before.map(|stat| stat.st_mode & 0o7777)).unwrap_or(MODE);
    fchmod(&draft.file, Mode::from_raw_mode(mode)).map_err(|errno| refused("mode", errno))?;
    Ok(draft)
}

fn finish(agent: &Agent, fence: &Fence, draft: Draft, path: &str) -> Result<FileStat> {
    let stat = fstat(&draft.file).map_err(|errno| refused(path, errno))?;
    agent.fencing.still(fence, || draft.keep())?.map_err(|errno| refused(path, errno))?;
    Ok(files::describe(&stat, None))
}
