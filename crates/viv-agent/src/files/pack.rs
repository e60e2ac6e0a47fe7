//! A tree as a tar stream.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, OFlags, Stat, fstat, readlinkat, statat};
use tar::{Builder, EntryType, Header};
use viv_agent::proto::Answer;

use crate::agent::Agent;
use crate::agent::serve::Next;
use crate::conn::Conn;
use crate::error::{refused, refused_io};
use crate::files;
use crate::files::read::PIECE_BYTES;
use crate::files::resolve::open_beneath;

/// Turns writes into data frames.
struct Frames<'c> {
    conn: &'c Conn,
    buf: Vec<u8>,
    /// Whether the client is gone, as opposed to a file that cannot be read.
    broken: bool,
}

impl Write for Frames<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let room = PIECE_BYTES - self.buf.len();
        let taken = &data[..data.len().min(room)];
        self.buf.extend_from_slice(taken);
        if self.buf.len() == PIECE_BYTES {
            self.flush()?;
        }
        Ok(taken.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if !self.buf.is_empty() {
            let sent = self.conn.send_data(&self.buf);
            self.broken |= sent.is_err();
            sent?;
            self.buf.clear();
        }
        Ok(())
    }
}

/// Exactly as many bytes as the header promised, whatever happens to the file meanwhile.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = (buf.len() as u64).min(self.left) as usize;
        let count = match self.file.read(&mut buf[..want])? {
            0 => {
                buf[..want].fill(0);
                want
            }
            count => count,
        };
        self.left -= count as u64;
        Ok(count)
    }
}

/// Streams what is at a path. Links are packed, not followed; sockets, pipes
/// and devices are left out, and so is what is on another filesystem.
pub(crate) fn get(agent: &Agent, conn: &Conn, path: &str) -> io::Result<Next> {
    let opened = files::open(agent, path, OFlags::PATH)
        .and_then(|base| Ok((fstat(&base).map_err(|errno| refused(path, errno))?, base)));
    let (stat, base) = match opened {
        Ok(opened) => opened,
        Err(refusal) => {
            conn.reply(Err(refusal))?;
            return Ok(Next::Request);
        }
    };
    conn.reply(Ok(Answer::Done))?;
    let frames = Frames { conn, buf: Vec::with_capacity(PIECE_BYTES), broken: false };
    let mut builder = Builder::new(frames);
    let packed = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        pack_tree(agent, &mut builder, &base, &stat)
    } else {
        pack_file(agent, &mut builder, path)
    };
    let finished = packed.and_then(|()| builder.finish()).and_then(|()| builder.get_mut().flush());
    match finished {
        Ok(()) => conn.send_end()?,
        Err(cause) if builder.get_ref().broken => return Err(cause),
        Err(cause) => conn.reply(Err(refused_io(path, &cause)))?,
    }
    Ok(Next::Request)
}

fn pack_file(agent: &Agent, builder: &mut Builder<Frames<'_>>, path: &str) -> io::Result<()> {
    let name = Path::new(path).file_name().map(PathBuf::from).unwrap_or_default();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = files::open(agent, path, flags).map_err(|refusal| io::Error::other(refusal.message))?;
    append_file(builder, &name, file)
}

fn pack_tree(agent: &Agent, builder: &mut Builder<Frames<'_>>, base: &OwnedFd, stat: &Stat) -> io::Result<()> {
    let home = files::home(agent);
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        let at = if below.as_os_str().is_empty() { Path::new(".") } else { &below };
        // It may have gone since it was seen.
        let Ok(dir) = open_below(base, at, OFlags::DIRECTORY) else { continue };
        for entry in Dir::read_from(&dir)? {
            let name = OsString::from_vec(entry?.file_name().to_bytes().to_vec());
            if name == "." || name == ".." {
                continue;
            }
            let Ok(found) = statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let path = below.join(&name);
            match FileType::from_raw_mode(found.st_mode) {
                FileType::Directory => {
                    if home == Some((found.st_dev, found.st_ino)) {
                        continue;
                    }
                    append_dir(builder, &path, &found)?;
                    if found.st_dev == stat.st_dev {
                        waiting.push(path);
                    }
                }
                FileType::RegularFile => {
                    if let Ok(file) = open_below(&dir, Path::new(&name), OFlags::NONBLOCK | OFlags::NOCTTY) {
                        append_file(builder, &path, file)?;
                    }
                }
                FileType::Symlink => {
                    if let Ok(target) = readlinkat(&dir, &name, Vec::new()) {
                        let target = OsString::from_vec(target.into_bytes());
                        let mut header = header(EntryType::Symlink, &found, 0);
                        builder.append_link(&mut header, &path, &target)?;
                    }
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn open_below(base: &OwnedFd, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    open_beneath(base, path, OFlags::RDONLY | flags)
}

fn append_dir(builder: &mut Builder<Frames<'_>>, path: &Path, stat: &Stat) -> io::Result<()> {
    builder.append_data(&mut header(EntryType::Directory, stat, 0), path, io::empty())
}

fn append_file(builder: &mut Builder<Frames<'_>>, path: &Path, file: OwnedFd) -> io::Result<()> {
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    let size = stat.st_size as u64;
    let data = Exactly { file: file.into(), left: size };
    builder.append_data(&mut header(EntryType::Regular, &stat, size), path, data)
}

fn header(kind: EntryType, stat: &Stat, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(size);
    header
}
