//! The way down to a folder, however deep, with few descriptors.
//!
//! Only the lowest folders of a trail are open. Going up to one that is not, it
//! is opened as `..` of the one below, and must be the very folder that was
//! left: who moves folders about meanwhile gets an error, not another tree.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, fstat, openat};

pub(crate) const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

struct Level {
    folder: Option<OwnedFd>,
    inode: (u64, u64),
}

pub(crate) struct Trail {
    levels: Vec<Level>,
    /// How many folders may be open at a time; at least one.
    window: usize,
}

impl Trail {
    /// A trail that starts at a folder. Its own path is the caller's and may lead through links.
    pub(crate) fn new(top: &Path, window: usize) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::start(openat(CWD, top, flags, Mode::empty())?, window)
    }

    /// A trail that starts at an open folder.
    pub(crate) fn start(top: OwnedFd, window: usize) -> io::Result<Self> {
        let mut trail = Self { levels: Vec::new(), window: window.max(1) };
        trail.enter(top)?;
        Ok(trail)
    }

    /// The folder where the trail ends.
    pub(crate) fn here(&self) -> BorrowedFd<'_> {
        self.levels.last().and_then(|level| level.folder.as_ref()).expect("the end of a trail is open").as_fd()
    }

    /// Opens a folder that is in the last one.
    pub(crate) fn open(&self, name: &CStr) -> rustix::io::Result<OwnedFd> {
        openat(self.here(), name, FOLDER, Mode::empty())
    }

    pub(crate) fn enter(&mut self, folder: OwnedFd) -> io::Result<()> {
        let stat = fstat(&folder)?;
        self.levels.push(Level { folder: Some(folder), inode: (stat.st_dev, stat.st_ino) });
        if let Some(far) = self.levels.len().checked_sub(self.window + 1) {
            self.levels[far].folder = None;
        }
        Ok(())
    }

    /// Goes up by one, unless this is where it starts.
    pub(crate) fn leave(&mut self) -> io::Result<()> {
        let [.., above, last] = self.levels.as_mut_slice() else { return Ok(()) };
        if above.folder.is_none() {
            let below = last.folder.as_ref().expect("the end of a trail is open");
            let folder = openat(below, c"..", FOLDER, Mode::empty())?;
            let stat = fstat(&folder)?;
            if (stat.st_dev, stat.st_ino) != above.inode {
                return Err(io::Error::other("a folder was moved elsewhere while it was read"));
            }
            above.folder = Some(folder);
        }
        self.levels.pop();
        Ok(())
    }
}
