//! The kernel calls that no safe wrapper has. Everything unsafe of the agent is here and in `exec::child`.
#![expect(unsafe_code, reason = "raw kernel calls; each block says why it is sound")]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::{Pid, WaitOptions};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// `libc` has it as a `c_int`, in which it is zero.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Both results of a clone.
pub(crate) enum Cloned {
    /// This is the child: a copy of one thread, in which only async-signal-safe calls are allowed.
    Child,
    /// This is the parent.
    Parent { pid: Pid, pidfd: OwnedFd },
}

/// Starts a process like `fork`, with a descriptor for it, in a cgroup when one is given.
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
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        pid => {
            let pid = Pid::from_raw(pid as i32).ok_or_else(|| io::Error::other("clone gave no pid"))?;
            // SAFETY: the kernel just made this descriptor for us.
            Ok(Cloned::Parent { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
        }
    }
}

/// Ends this process without ceremony.
pub(crate) fn exit_now(code: c_int) -> ! {
    // SAFETY: it only ends the process; nothing of ours needs to run before.
    unsafe { libc::_exit(code) }
}

/// Sets this thread's ids for file access, and puts them back when dropped.
///
/// Architecture invariant: the main thread never does this. It would clear its
/// parent-death signal.
pub(crate) struct FileIds {
    before: Option<(u32, u32)>,
}

impl FileIds {
    /// Takes the keeper's id; nothing happens where there is no keeper.
    pub(crate) fn of_keeper(keeper_id: u32) -> io::Result<Self> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if keeper_id == uid {
            return Ok(Self { before: None });
        }
        set_file_ids(keeper_id, keeper_id);
        // These calls do not report failure; the value before, which they do report, must now be ours.
        if set_file_ids(keeper_id, keeper_id) != (keeper_id, keeper_id) {
            set_file_ids(uid, gid);
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        Ok(Self { before: Some((uid, gid)) })
    }
}

impl Drop for FileIds {
    fn drop(&mut self) {
        if let Some((uid, gid)) = self.before {
            set_file_ids(uid, gid);
        }
    }
}

/// Sets the ids for file access of this thread; returns the ones before.
pub(crate) fn set_file_ids(uid: u32, gid: u32) -> (u32, u32) {
    // SAFETY: plain numbers; the raw calls change only the calling thread.
    unsafe {
        let gid = libc::syscall(libc::SYS_setfsgid, gid);
        let uid = libc::syscall(libc::SYS_setfsuid, uid);
        (uid as u32, gid as u32)
    }
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

/// Gives up capabilities for good, in this thread and in those that it starts.
pub(crate) fn drop_capabilities(gone: CapabilitySet) -> io::Result<()> {
    let held = rustix::thread::capabilities(None)?;
    if !held.permitted.intersects(gone) {
        return Ok(());
    }
    for capability in gone.iter() {
        // Only while SETPCAP is held; without it the workloads' own dropping fails loudly.
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let sets = CapabilitySets {
        effective: held.effective - gone,
        permitted: held.permitted - gone,
        inheritable: held.inheritable - gone,
    };
    Ok(rustix::thread::set_capabilities(None, sets)?)
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
    // SAFETY: only called between clone and exec, where nothing else owns descriptor `to`.
    if unsafe { libc::dup2(from, to) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Marks every descriptor from `first` on to be closed by exec, or closes it. Async-signal-safe.
pub(crate) fn seal_descriptors(first: u32, close: bool) -> io::Result<()> {
    let flags = if close { 0 } else { libc::CLOSE_RANGE_CLOEXEC };
    // SAFETY: only called in a fresh child, which does not use what it closes.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, flags) };
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
