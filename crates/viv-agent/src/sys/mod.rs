//! The kernel calls that no safe wrapper has. Everything unsafe of the agent is here and in `exec::child`.
#![expect(unsafe_code, reason = "raw kernel calls; each block says why it is sound")]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Pid, WaitOptions};

mod ids;

pub(crate) use ids::{FileIds, Keeper, become_keeper, drop_capabilities, set_file_ids};

/// `libc` has it as a `c_int`, in which it is zero.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Both results of a clone.
pub(crate) enum Cloned {
    /// This is the child: a copy of one thread, in which only async-signal-safe calls are allowed.
    Child,
    /// This is the parent; not every kernel has descriptors for processes.
    Parent { pid: Pid, pidfd: Option<OwnedFd> },
}

/// Starts a process like `fork`, with a descriptor for it where the kernel has those, in a cgroup when one is given.
///
/// # Safety
///
/// The caller may be one thread of many, so in the child no lock may be taken
/// and nothing allocated, and the child must end in `execve` or `_exit`.
pub(crate) unsafe fn clone_process(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Cloned> {
    let mut pidfd: c_int = -1;
    // SAFETY: all zeroes is a valid clone_args.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: no memory is shared and no stack is given, so the child goes on
    // on its own copy of this one; `args` lives until the call returns.
    let mut result = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    if result == -1 && cgroup.is_none() && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        let flags = libc::CLONE_PIDFD | libc::SIGCHLD;
        // SAFETY: the same in the older form, whose third argument is where the descriptor goes.
        result = unsafe { libc::syscall(libc::SYS_clone, flags, 0_usize, &raw mut pidfd, 0_usize, 0_usize) };
    }
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        pid => {
            let pid = Pid::from_raw(pid as i32).ok_or_else(|| io::Error::other("clone gave no pid"))?;
            // SAFETY: if it is one, the kernel just made this descriptor for us.
            let pidfd = (pidfd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(pidfd) });
            Ok(Cloned::Parent { pid, pidfd })
        }
    }
}

/// Ends this process without ceremony.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: it only ends the process; nothing of ours needs to run before.
    unsafe { libc::_exit(code) }
}

/// Blocks every signal in this thread and in those that it starts.
pub(crate) fn block_signals() -> io::Result<()> {
    let mut all = empty_signal_set();
    // SAFETY: both calls get a valid set; the old mask is not asked for.
    let result = unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// A descriptor that is readable when children ended.
pub(crate) fn child_signals() -> io::Result<OwnedFd> {
    let mut set = empty_signal_set();
    // SAFETY: a valid set; -1 asks for a new descriptor.
    let fd = unsafe {
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn empty_signal_set() -> libc::sigset_t {
    // SAFETY: all zeroes is a valid, empty set; sigemptyset makes it so by the book.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        set
    }
}

/// Back to how a program expects signals: default dispositions, nothing blocked. Async-signal-safe.
pub(crate) fn reset_signals() {
    // The kernel's own sigaction: handler, flags, restorer, mask. All zeroes is
    // SIG_DFL. Not by libc, which keeps two signals to itself.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        // SAFETY: a valid sigaction of that size; the old one is not asked for.
        // The kernel refuses the few that cannot be set, which is fine.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u64>(), size_of::<u64>());
        }
    }
    let none = empty_signal_set();
    // SAFETY: a valid set.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
}

/// Sends any signal, real-time ones included, to the very process that a descriptor stands for.
pub(crate) fn send_signal(pidfd: BorrowedFd<'_>, signal: c_int) -> io::Result<()> {
    // SAFETY: a valid descriptor, no siginfo.
    let result = unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, std::ptr::null::<libc::siginfo_t>(), 0)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The same by pid, where there are no such descriptors; the caller knows whose it is.
pub(crate) fn send_signal_by_number(pid: Pid, signal: c_int) -> io::Result<()> {
    // SAFETY: plain numbers. A pid of this type is never 0 or negative, which would mean others as well.
    let result = unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

/// Reaps one child that ended, whoever made it.
pub(crate) fn reap_one() -> Option<(Pid, Exit)> {
    // Also those orphans whose makers asked for another signal than SIGCHLD.
    let all = WaitOptions::from_bits_retain(libc::__WALL as u32);
    loop {
        match rustix::process::wait(WaitOptions::NOHANG | all) {
            Ok(Some((pid, status))) => {
                if let Some(code) = status.exit_status() {
                    return Some((pid, Exit::Code(code)));
                }
                if let Some(signal) = status.terminating_signal() {
                    return Some((pid, Exit::Signal(signal)));
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// One arena for all threads: a second one would cost more than the agent's whole heap.
pub(crate) fn frugal_malloc() {
    #[cfg(target_env = "gnu")]
    // SAFETY: called once before any thread is started.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        // Large buffers go back to the kernel when they are freed.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10);
    }
}

/// Gives the kernel back what was freed. After the boot, in which more is needed than ever again.
pub(crate) fn return_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it only touches what is free.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Brings the loopback interface up; needs `CAP_NET_ADMIN`.
pub(crate) fn loopback_up() -> io::Result<()> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, flags, None)?;
    // SAFETY: all zeroes is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as _;
    request.ifr_name[1] = b'o' as _;
    // SAFETY: both calls take an ifreq; the first fills in the flags that the second extends.
    unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) != 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Shows a file in the place of another one, read-only; needs `CAP_SYS_ADMIN`.
pub(crate) fn cover(file: &Path, place: &Path) -> io::Result<()> {
    use rustix::mount::{MountFlags, mount_bind, mount_remount};
    mount_bind(file, place)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount_remount(place, flags, c"")?)
}

/// Puts an empty folder over another one, which nobody without privilege may enter or change; needs `CAP_SYS_ADMIN`.
pub(crate) fn cover_folder(place: &Path) -> io::Result<()> {
    use rustix::mount::{MountFlags, mount};
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount(c"none", place, c"tmpfs", flags, c"mode=0,size=4k,nr_inodes=2")?)
}

/// Whether whoever made a connection is in this PID namespace, or in one below. Others have no number here.
pub(crate) fn is_peer_inside(stream: &UnixStream) -> bool {
    // SAFETY: all zeroes is a valid ucred.
    let mut peer: libc::ucred = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the buffer is as long as it says. Not by rustix, for which no process has number 0.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    // Who cannot be told is not let in either.
    result != 0 || peer.pid != 0
}

/// Keeps other processes out of this one's memory and descriptors, whatever
/// their ids, and of its copies until they exec. Async-signal-safe.
///
/// To be called again after every change of ids, with which the kernel sets this anew.
pub(crate) fn hide_memory() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?)
}

/// What a workload is ahead of the agent when the kernel looks for somebody to kill for memory: a fifth of all that
/// there is, so that the agent is not the largest among many small ones. It goes for the whole machine too, where
/// sandboxes are what can be spared.
const OOM_SCORE_AHEAD: &[u8] = b"200";

/// Has the kernel choose this process before the agent when memory runs out. Async-signal-safe.
///
/// Raising the score needs no privilege, and so it can be lowered again to what the agent has, but not below. Where
/// `/proc` is not there, all have the same.
pub(crate) fn offer_to_oom_killer() {
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", flags, rustix::fs::Mode::empty()) {
        let _ = rustix::io::write(&file, OOM_SCORE_AHEAD);
    }
}

/// Gives up the priority that the supervisor gave to the agent. Async-signal-safe. There is no way back without privilege.
pub(crate) fn be_nice_again() {
    if rustix::process::getpriority_process(None).is_ok_and(|nice| nice < 0) {
        let _ = rustix::process::setpriority_process(None, 0);
    }
}

/// The opposite of [`hide_memory`], for a process with an id that no workload has. Async-signal-safe.
///
/// The kernel gives what is in `/proc` of a hidden process to root, who then may
/// write what asks for nothing else: `oom_score_adj`, so that we would be the first to be killed.
/// In `/proc` of one that is not hidden everything is its own, and others' ids open nothing.
pub(crate) fn rely_on_id() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)?)
}

/// Replaces the session keyring, which is inherited from whoever started us,
/// by a new and empty one. Async-signal-safe.
///
/// It fails where the kernel or a filter has no keyrings to offer, and then there is nothing to be kept apart;
/// or when this id has used up its share of keys.
pub(crate) fn leave_session_keyring() -> io::Result<()> {
    let no_name = std::ptr::null::<std::ffi::c_char>();
    // SAFETY: a null name is allowed and asks for a keyring without one.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, no_name) };
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Descriptors 0 to 2 are always something, so that no other descriptor ever gets one of these numbers.
pub(crate) fn fill_stdio() -> io::Result<()> {
    for _ in 0..3 {
        let fd = rustix::fs::memfd_create(c"stdio", rustix::fs::MemfdFlags::empty())?;
        if fd.as_raw_fd() > 2 {
            break;
        }
        std::mem::forget(fd);
    }
    Ok(())
}

/// Standard output and error go to a file, and standard input to nothing.
pub(crate) fn log_to(file: &OwnedFd) -> io::Result<()> {
    let nothing = rustix::fs::memfd_create(c"stdin", rustix::fs::MemfdFlags::CLOEXEC)?;
    replace_descriptor(nothing.as_raw_fd(), 0)?;
    replace_descriptor(file.as_raw_fd(), 1)?;
    replace_descriptor(file.as_raw_fd(), 2)
}

/// Milliseconds of the clock that also runs while the machine sleeps.
pub(crate) fn boot_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Milliseconds of wall time, for display.
pub(crate) fn wall_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// Replaces descriptor `to` by a copy of `from` that survives exec. Async-signal-safe.
pub(crate) fn replace_descriptor(from: RawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: only called for descriptors that nothing owns: between clone and exec, or the standard ones.
    if unsafe { libc::dup2(from, to) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// No descriptor is higher. Linux takes higher numbers, too, gVisor does not.
pub(crate) const LAST_DESCRIPTOR: u32 = i32::MAX as u32;

/// Closes every descriptor from 3 on except one. Async-signal-safe.
///
/// Not merely marked to be closed by exec: until then a path like `/proc/self/fd/7` would lead to what the agent has open.
pub(crate) fn close_descriptors_but(kept: RawFd) -> io::Result<()> {
    let kept = u32::try_from(kept).map_err(|_| io::Error::from_raw_os_error(libc::EBADF))?;
    if kept > 3 {
        close_descriptors(3, kept - 1)?;
    }
    close_descriptors(kept.saturating_add(1).max(3), LAST_DESCRIPTOR)
}

/// Closes these descriptors. Async-signal-safe.
pub(crate) fn close_descriptors(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: only called in a fresh child, which does not use what it closes.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts a filter on this thread and on what it will start, on top of those that are there. Async-signal-safe.
///
/// It needs `no_new_privs`.
pub(crate) fn install_filter(program: &[libc::sock_filter]) -> io::Result<()> {
    let length = u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // The kernel only reads it.
    let program = libc::sock_fprog { len: length, filter: program.as_ptr().cast_mut() };
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, 0);
    // SAFETY: the program is as long as it says and lives until the call returns, after which the kernel has its own.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes descriptor 0 the controlling terminal of this session. Async-signal-safe.
pub(crate) fn take_terminal() -> io::Result<()> {
    // SAFETY: the argument 0 means: do not steal.
    if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives this thread a working directory (and root and umask) of its own.
pub(crate) fn unshare_workdir() -> io::Result<()> {
    // SAFETY: only the file-system attributes of this thread are set apart; no descriptor or memory is touched.
    if unsafe { libc::unshare(libc::CLONE_FS) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session_keyring() -> i64 {
        // SAFETY: plain numbers: the id of the session keyring (-3), which is not to be created.
        unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_GET_KEYRING_ID, -3, 0) }
    }

    #[test]
    fn a_session_keyring_is_left() {
        // Credentials are a thread's own, so nothing else is touched.
        let join = std::thread::spawn(|| {
            let before = session_keyring();
            match leave_session_keyring() {
                Ok(()) => assert_ne!(before, session_keyring()),
                Err(cause) => assert_ne!(cause.raw_os_error(), Some(libc::EINVAL)),
            }
        });
        join.join().unwrap();
    }
}
