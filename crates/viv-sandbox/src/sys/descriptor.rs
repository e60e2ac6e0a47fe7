//! What descriptors stand for.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Makes the number of an open descriptor stand for something else. Whoever owns it goes on doing so.
pub(crate) fn replace(number: RawFd, with: &OwnedFd) -> io::Result<()> {
    // SAFETY: reads no memory. The number stays open and its owner's, who closes it once, as before.
    let result = unsafe { libc::dup3(with.as_raw_fd(), number, libc::O_CLOEXEC) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
