//! Who a process is: boot, pid and start time, never a bare pid (J6).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// The identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Which run of the machine.
    pub boot_id: String,
    /// Its pid in that run; can be another's by now.
    pub pid: u32,
    /// When it started, in clock ticks since boot: tells it from the other.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// Of this process.
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Of a process that lives now.
    pub fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { boot_id: boot_id()?, pid, start_ticks: start_ticks(pid)? })
    }

    /// A descriptor of this very process; `None` when it is gone.
    pub fn open(&self) -> io::Result<Option<OwnedFd>> {
        if self.boot_id != boot_id()? {
            return Ok(None);
        }
        let Some(pid) = Pid::from_raw(self.pid.cast_signed()) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(errno) if is_nobody(errno) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // The descriptor holds whoever has the pid now. If the start time read
        // after opening it is ours, it was ours when opened as well.
        match start_ticks(self.pid) {
            Ok(ticks) if ticks == self.start_ticks => Ok(Some(pidfd)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Whether the kernel says that no process has this pid: it is free, or a thread's (which kernels before 6.15 call invalid).
pub(crate) fn is_nobody(errno: Errno) -> bool {
    matches!(errno, Errno::SRCH | Errno::NOENT | Errno::INVAL)
}

/// Changes with every start of the machine.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn start_ticks(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name stands in parentheses and may hold anything, so count from the last one: field 22 of all is 20th after it.
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19))
        .and_then(|ticks| ticks.parse().ok())
        .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has another form than expected")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel gives ids of processes to threads too, and opens those for nobody.
    #[test]
    fn j6_a_pid_that_a_thread_has_by_now_is_not_taken_for_the_process() {
        let open = || {
            let pid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
            assert_ne!(pid, std::process::id());
            ProcessIdentity { pid, ..ProcessIdentity::own().unwrap() }.open()
        };
        assert!(std::thread::spawn(open).join().unwrap().unwrap().is_none());
    }

    #[test]
    fn j6_a_reused_pid_is_not_taken_for_the_process() {
        let own = ProcessIdentity::own().unwrap();
        assert!(own.open().unwrap().is_some());
        let reused = ProcessIdentity { start_ticks: own.start_ticks + 1, ..own.clone() };
        assert!(reused.open().unwrap().is_none());
        let before_reboot = ProcessIdentity { boot_id: "another".to_owned(), ..own };
        assert!(before_reboot.open().unwrap().is_none());
    }
}
