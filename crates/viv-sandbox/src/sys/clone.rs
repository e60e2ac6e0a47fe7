//! Starting processes from a single-threaded one.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Pid;

/// `CLONE_INTO_CGROUP`; libc's constant of that name does not fit its type and is zero.
const INTO_CGROUP: u64 = 0x2_0000_0000;

/// In which of the two processes a fork came back.
pub(crate) enum Forked {
    /// In the one that called.
    Parent(Pid),
    /// In the new one.
    Child,
}

/// Forks, with the child born in the cgroup whose directory is given.
///
/// Being born there costs nothing; moving there later costs ten milliseconds.
///
/// Must be called from a process with one thread, so that the child may use
/// everything; the shim and its helpers are such processes.
pub(crate) fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    clone(0, cgroup)
}

/// Forks, with the child as the first process of a PID namespace: when it ends, the kernel ends all others in it.
///
/// The same holds for the caller as for [`fork`].
pub(crate) fn fork_as_init() -> io::Result<Forked> {
    clone(libc::CLONE_NEWPID as u64, None)
}

/// Forks, with one table of descriptors for both: what one of them opens, both have open, and what one of them closes is
/// closed. When either ends, nothing is closed.
///
/// The same holds for the caller as for [`fork`].
pub(crate) fn fork_with_descriptors() -> io::Result<Forked> {
    clone(libc::CLONE_FILES as u64, None)
}

fn clone(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    debug_assert_eq!(threads(), 1, "a fork of one thread of many leaves locks behind");
    // SAFETY: clone_args is plain data, for which zero is valid everywhere.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    args.flags = flags;
    if let Some(cgroup) = cgroup {
        args.flags |= INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and a stack this is a fork: the child has its own
    // copy of everything. There is one thread, so no lock is held by another.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent(Pid::from_raw(pid as i32).expect("a child's pid is positive"))),
    }
}

/// Closes every descriptor from 3 on but these. For a child that goes on without an exec.
pub(crate) fn close_all_but(keep: &[BorrowedFd<'_>]) {
    let mut keep: Vec<u32> = keep.iter().map(|fd| fd.as_raw_fd().cast_unsigned()).filter(|&fd| fd >= 3).collect();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep.into_iter().chain([u32::MAX]) {
        if first < fd {
            // SAFETY: the descriptors belong to copies of owners in a child that never drops them: it leaves by _exit.
            unsafe { libc::syscall(libc::SYS_close_range, first, fd - 1, 0) };
        }
        first = fd.saturating_add(1);
    }
}

/// Has the kernel kill this process when its parent dies. False when the parent is dead already.
pub(crate) fn die_with(parent: Pid) -> bool {
    let asked = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    asked.is_ok() && rustix::process::getppid() == Some(parent)
}

/// Leaves the session keyring of whoever started us behind: what is in it is not for sandboxes.
pub(crate) fn leave_session_keyring() {
    const JOIN_SESSION_KEYRING: libc::c_ulong = 1;
    // SAFETY: with a null name this reads no memory of ours. A kernel without keyrings has none to leave.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
}

/// Whether this process may have a `userfaultfd`, as CRIU asks for one: for what the kernel does in its name too. It ends
/// with the process.
pub(crate) fn try_userfaultfd() -> io::Result<()> {
    // SAFETY: the call takes flags alone.
    let opened = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if opened < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ends this process at once: no destructors, no exit handlers, which belong to the parent.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count)
}
