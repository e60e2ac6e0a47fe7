//! The agent as a whole: what all of its threads share.
//!
//! ```text
//!   main thread ── poll: listener, ended children, control connection, who asks from inside, wake-ups, deadlines
//!     ├─ a thread per connection ── requests                   (agent::serve)
//!     ├─ the pump, while anything runs ── output to disk       (exec::pump)
//!     └─ the reserve ── works when no thread can be started    (agent::reserve)
//! ```
//!
//! Invariants: once there is a supervisor, the main thread never changes its credentials (that would clear
//! its parent-death signal), and never waits on anything but its poll.

pub(crate) mod connections;
pub(crate) mod control;
pub(crate) mod fence;
pub(crate) mod inside;
pub(crate) mod reserve;
pub(crate) mod serve;
pub(crate) mod supervise;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::Rlimit;
use viv_agent::proto::{AgentConfig, Hello, Identity, PROTOCOL};

use crate::exec::pump::Pump;
use crate::exec::table::Executions;
use crate::seccomp::Confinement;
use crate::sys::{self, Keeper};

/// Stack of every thread but the main one; nothing here recurses.
pub(crate) const STACK_BYTES: usize = 256 << 10;

/// The requests that this agent knows, by name.
pub(crate) const FEATURES: &[&str] = &[
    "hello",
    "health",
    "control",
    "quiesce",
    "exec_start",
    "exec_status",
    "exec_list",
    "exec_attach",
    "exec_stdin",
    "exec_signal",
    "exec_resize",
    "exec_cancel",
    "file_read",
    "file_write",
    "file_stat",
    "file_list",
    "file_mkdir",
    "file_move",
    "file_remove",
    "file_watch",
    "archive_get",
    "archive_put",
    "dial",
    "requests",
    "request_answer",
    viv_agent::proto::TRANSIENT_FEATURE,
];

/// Where things are. Inside a sandbox these are fixed; tests run the agent elsewhere.
pub(crate) struct Places {
    /// Root of all paths that requests name.
    pub(crate) root: OwnedFd,
    /// What stands for [`viv_agent::proto::HOME`]; nothing in it can be changed by requests.
    pub(crate) home: Option<OwnedFd>,
    /// What stands for [`viv_agent::proto::RUN_DIR`].
    pub(crate) run: PathBuf,
    /// Whether this is PID 1, whose end is the end of everything here.
    pub(crate) is_init: bool,
}

/// What was true when the agent started.
pub(crate) struct Origin {
    /// The limit of open files before the agent raised its own.
    pub(crate) open_files: Rlimit,
    /// Whether the agent has any capability that a command must not get.
    pub(crate) privileged: bool,
    /// Whether the kernel forbids changing supplementary groups in this user namespace.
    pub(crate) groups_fixed: bool,
    /// Whether the agent has an id of its own.
    pub(crate) keeper: Keeper,
    /// Whether the kernel gives orphans to the nearest process that asked for them.
    pub(crate) has_subreapers: bool,
}

/// The agent. There is one, and it lives until the process ends.
pub(crate) struct Agent {
    /// As it was when the agent started.
    pub(crate) config: AgentConfig,
    /// Which instance it serves: another one once it was restored from memory.
    pub(crate) identity: Mutex<Identity>,
    pub(crate) places: Places,
    pub(crate) origin: Origin,
    /// What is put on each command; absent when the configuration wants none.
    pub(crate) confinement: Option<Confinement>,
    pub(crate) fencing: fence::Fencing,
    pub(crate) connections: connections::Connections,
    pub(crate) control: control::Control,
    pub(crate) reserve: reserve::Reserve,
    pub(crate) inside: inside::Inside,
    pub(crate) executions: Executions,
    pub(crate) pump: Pump,
    /// Wakes the main thread.
    pub(crate) wake: Wake,
}

impl Agent {
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            features: FEATURES.iter().map(|&name| name.to_owned()).collect(),
            identity: lock(&self.identity).clone(),
        }
    }

    /// The end of the agent, and with it of everything in the sandbox.
    pub(crate) fn end_everything(&self, why: &str) -> ! {
        crate::error::say(why);
        if !self.places.is_init {
            // PID 1 takes everything along; elsewhere it has to be done by hand.
            crate::exec::kill::end_all_descendants();
        }
        sys::exit_now(0)
    }
}

/// Starts a thread with a small stack. It fails when the sandbox is out of processes.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(work).map(drop)
}

/// Locks. A thread that panicked ends the whole agent (the profile aborts), so poison means nothing here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event descriptor: sticky, cheap, pollable.
pub(crate) struct Wake(pub OwnedFd);

impl Wake {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    pub(crate) fn ring(&self) {
        // The only failure is a full counter, and then it rings already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

/// A duration as poll wants it.
pub(crate) fn timeout(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

/// A moment on the boot clock, at most `length_ms` away.
///
/// The length is kept because the clock may be set back under us, when the
/// process is restored from a checkpoint: a moment never gets further away than it was at first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    at_ms: u64,
    length_ms: u64,
}

impl Deadline {
    pub(crate) fn after(length_ms: u64) -> Self {
        Self { at_ms: sys::boot_ms().saturating_add(length_ms), length_ms }
    }

    /// What is left; zero when it passed.
    pub(crate) fn left(&mut self) -> Duration {
        self.left_at(sys::boot_ms())
    }

    /// What was left at that moment, which was a moment ago or before a freeze.
    pub(crate) fn left_at(&mut self, seen_ms: u64) -> Duration {
        let now_ms = sys::boot_ms();
        self.at_ms = self.at_ms.min(now_ms.saturating_add(self.length_ms));
        Duration::from_millis(self.at_ms.saturating_sub(seen_ms.min(now_ms)))
    }

    /// How long ago it was set.
    pub(crate) fn age_ms(&self) -> u64 {
        sys::boot_ms().saturating_sub(self.at_ms.saturating_sub(self.length_ms))
    }

    pub(crate) fn postpone(&mut self, by_ms: u64) {
        self.at_ms = self.at_ms.saturating_add(by_ms);
        self.length_ms = self.length_ms.saturating_add(by_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l13_a_freeze_after_the_clock_was_looked_at_ends_nothing() {
        let seen_ms = sys::boot_ms();
        // As if it had begun a minute ago, almost all of which the sandbox stood still.
        let mut deadline = Deadline { at_ms: seen_ms.saturating_sub(1), length_ms: 1_500 };
        let before_the_freeze_ms = seen_ms.saturating_sub(1_000);
        assert_eq!(deadline.left(), Duration::ZERO);
        assert_eq!(deadline.left_at(before_the_freeze_ms), Duration::from_millis(999));
        // A machine that began anew counts from less: what was seen before cannot be later than now.
        let mut deadline = Deadline::after(60_000);
        assert!(deadline.left_at(u64::MAX) > Duration::from_secs(59));
    }
}
