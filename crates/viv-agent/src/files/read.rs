//! Reading a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{OFlags, fstat};
use viv_agent::proto::{Answer, ErrorCode};
use viv_core::file::FileKind;

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::{Result, error, invalid, quoted, refused, refused_io};
use crate::files;

/// Read and sent at once: a quarter of the largest frame, since every connection may have one.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Streams a regular file. Anything else could block, or do something by being read.
pub(crate) fn read(agent: &Agent, conn: &Conn, path: &str, offset: u64, length: Option<u64>) -> io::Result<Next> {
    let (file, stat) = match open(agent, path) {
        Ok(opened) => opened,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Request);
        }
    };
    conn.reply(Ok(Answer::Stat(stat)))?;
    let mut buf = vec![0; PIECE_BYTES];
    let (mut at, mut left) = (offset, length.unwrap_or(u64::MAX));
    while left > 0 {
        let want = left.min(PIECE_BYTES as u64) as usize;
        match file.read_at(&mut buf[..want], at) {
            Ok(0) => break,
            Ok(count) => {
                conn.send_data(&buf[..count])?;
                at = at.saturating_add(count as u64);
                left -= count as u64;
            }
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => {
                conn.reply(Err(refused_io(path, &cause)))?;
                return Ok(Next::Request);
            }
        }
    }
    conn.send_end()?;
    Ok(Next::Request)
}

fn open(agent: &Agent, path: &str) -> Result<(File, viv_core::file::FileStat)> {
    // Looked at first, since opening a device can already do something.
    let look = files::open(agent, path, OFlags::PATH)?;
    require_file(path, &fstat(&look).map_err(|errno| refused(path, errno))?)?;
    let file = files::open(agent, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let stat = fstat(&file).map_err(|errno| refused(path, errno))?;
    require_file(path, &stat)?;
    Ok((file.into(), files::describe(&stat, None)))
}

fn require_file(path: &str, stat: &rustix::fs::Stat) -> Result<()> {
    match files::kind_of(stat) {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(error(ErrorCode::Conflict, format!("{} is a directory", quoted(path)))),
        FileKind::Symlink | FileKind::Other => Err(invalid(format!("{} is not a regular file", quoted(path)))),
    }
}
