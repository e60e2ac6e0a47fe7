//! Mounts that show other owners than the disk has.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Makes a detached mount show its files' owners through the mapping of a user namespace.
pub(crate) fn idmap_mount(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP | if read_only { libc::MOUNT_ATTR_RDONLY } else { 0 },
        attr_clr: 0,
        propagation: 0,
        userns_fd: user_namespace.as_raw_fd() as u64,
    };
    // SAFETY: the path is a static empty C string, `attr` outlives the call and its size is told.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
