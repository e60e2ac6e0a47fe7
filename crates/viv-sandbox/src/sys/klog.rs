//! The kernel's log.

use std::io;

/// `SYSLOG_ACTION_READ_ALL`: the last bytes of the log, without taking them.
const READ_ALL: libc::c_int = 3;

/// The last `bytes_max` bytes of the log, cut at the beginning of a line. Never waits.
pub(crate) fn tail(bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0_u8; bytes_max];
    let length = libc::c_int::try_from(bytes_max).map_err(io::Error::other)?;
    // SAFETY: the buffer is ours and as long as is said.
    let read = unsafe { libc::klogctl(READ_ALL, buffer.as_mut_ptr().cast(), length) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    buffer.truncate(read);
    Ok(buffer)
}
