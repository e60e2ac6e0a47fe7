//! Leaving namespaces.

use std::io;

use rustix::io::Result;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;

/// Goes on in new namespaces. Must be called from a process with one thread.
pub(crate) fn leave_for_new(namespaces: UnshareFlags) -> Result<()> {
    debug_assert!(!namespaces.intersects(UnshareFlags::FILES | UnshareFlags::FS));
    // SAFETY: no descriptor table or memory is unshared, and the process has one thread.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }
}

/// Does something where mounts are seen by nobody else and end with it: in a thread with a mount namespace of its own.
pub(crate) fn with_own_mounts<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let in_thread = || {
        // SAFETY: no descriptor table or memory is unshared. Root, working directory and mounts change for this thread
        // only, which ends here.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }?;
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
        work()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, in_thread)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
