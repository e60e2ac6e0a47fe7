//! A root as a sandbox would see it, read-only and for nobody else.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use viv_agent::proto::{IDENTITY, Identity};

use crate::rootfs::mount_lowers;

/// Longest identity file: ours have a hundred bytes.
const IDENTITY_BYTES_MAX: u64 = 4096;

/// Folders one above the other, mounted where nobody sees it.
#[derive(Debug)]
pub(crate) struct View(OwnedFd);

impl View {
    /// Mounts folders, the topmost first; there have to be two.
    pub(crate) fn mount(folders: &[PathBuf]) -> io::Result<Self> {
        mount_lowers(folders).map(Self)
    }

    /// A path to it, for this process.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.0.as_raw_fd().to_string())
    }

    /// Whose root it is, by its own word.
    pub(crate) fn identity(&self) -> io::Result<Identity> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file = openat2(&self.0, IDENTITY.trim_start_matches('/'), flags, Mode::empty(), resolve)?;
        let mut text = Vec::new();
        File::from(file).take(IDENTITY_BYTES_MAX).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}
