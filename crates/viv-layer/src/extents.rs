//! Where a file has data, and where only holes.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{OFlags, SeekFrom, seek};
use rustix::io::{Errno, pread};

/// Opening a regular file to read it. Should it have become a pipe or a terminal meanwhile, this neither waits nor adopts it.
pub(crate) const FILE: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// The pieces of a file that have data, as far as a size. A filesystem that does not tell has one piece.
pub(crate) struct Extents<'f> {
    file: &'f OwnedFd,
    from: u64,
    size: u64,
}

impl<'f> Extents<'f> {
    pub(crate) fn new(file: &'f OwnedFd, size: u64) -> Self {
        Self { file, from: 0, size }
    }

    fn following(&self) -> io::Result<Option<(u64, u64)>> {
        if self.from >= self.size {
            return Ok(None);
        }
        let start = match seek(self.file, SeekFrom::Data(self.from)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((self.from, self.size))),
            Err(errno) => return Err(errno.into()),
        };
        let end = match seek(self.file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(self.size),
            // It shrank meanwhile.
            Err(Errno::NXIO) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        Ok((start < end).then_some((start, end)))
    }
}

impl Iterator for Extents<'_> {
    /// Start and end.
    type Item = io::Result<(u64, u64)>;

    fn next(&mut self) -> Option<Self::Item> {
        let following = self.following();
        self.from = match following {
            Ok(Some((_, end))) => end,
            Ok(None) | Err(_) => self.size,
        };
        following.transpose()
    }
}

/// Fills a buffer from a place in a file. What lies beyond its end is zeros: files shrink while they are read.
pub(crate) fn read_at(file: &OwnedFd, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match pread(file, &mut buffer[filled..], offset + filled as u64) {
            Ok(0) => {
                buffer[filled..].fill(0);
                break;
            }
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Writes all of a buffer at a place in a file.
pub(crate) fn write_at(file: &OwnedFd, mut buffer: &[u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match rustix::io::pwrite(file, buffer, offset) {
            Ok(count) => {
                buffer = &buffer[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Whether a buffer is all zeros, as fast as memory compares.
pub(crate) fn is_zero(buffer: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    buffer.chunks(ZEROS.len()).all(|piece| piece == &ZEROS[..piece.len()])
}
