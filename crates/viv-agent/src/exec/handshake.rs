//! Between the clone and the exec: how long that may take, and what becomes of it when it takes longer.
//!
//! A child that has not become its command yet runs our code, but it is a
//! process like any other: a workload with the same id can stop it, or hold
//! up the opening of its program for as long as it likes. So nothing here waits
//! without an end, and what was started is killed, and seen to be gone,
//! whenever nothing comes of it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Pid;

use crate::agent::{Agent, lock, timeout};
use crate::error::Result;
use crate::exec::cgroup::{Cgroup, Removal};
use crate::exec::end::{kill_cgroup_now, kill_tagged_now, unverifiable};
use crate::exec::kill::{self, Held, KILL_PATIENCE};
use crate::exec::tag::Tag;
use crate::exec::{Execution, Tree};

/// How long a child may take to become its command. It takes milliseconds,
/// and a second or two where memory is short.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The wait is made of looks of this length. One that the whole sandbox was
/// frozen in counts like any other, so a freeze costs no start its time; and a cancel is seen after one.
const LOOK: Duration = Duration::from_millis(50);

/// How long a monitor gets to end by itself once nothing should be left below it.
const MONITOR_GRACE: Duration = Duration::from_millis(500);

/// Why nothing was heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unheard {
    /// Its time is over.
    Late,
    /// Somebody wants it to end.
    Cancelled,
}

/// The time that one start has.
pub(super) struct Handshake<'e> {
    execution: &'e Execution,
    looks_left: u128,
}

impl<'e> Handshake<'e> {
    pub(super) fn new(execution: &'e Execution) -> Self {
        Self { execution, looks_left: PATIENCE.as_millis() / LOOK.as_millis() }
    }

    /// Waits for a message that is whole or, when the other end was closed first, absent: false.
    pub(super) fn hear(&mut self, fd: &OwnedFd, message: &mut [u8]) -> std::result::Result<bool, Unheard> {
        loop {
            if lock(&self.execution.inner).ending.is_some() {
                return Err(Unheard::Cancelled);
            }
            match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout(LOOK))) {
                Ok(0) => self.looks_left = self.looks_left.checked_sub(1).ok_or(Unheard::Late)?,
                Ok(_) => match rustix::io::read(fd, &mut *message) {
                    Ok(count) => return Ok(count == message.len()),
                    Err(Errno::INTR) => {}
                    Err(_) => return Ok(false),
                },
                Err(Errno::INTR) => {}
                Err(_) => return Ok(false),
            }
        }
    }
}

/// What was started for an execution that does not run yet.
pub(super) struct Started {
    pub(super) pid: Pid,
    pub(super) first: Arc<Held>,
    pub(super) kept_by: KeptBy,
}

/// By what its processes are kept together.
pub(super) enum KeptBy {
    /// The first process is the leader.
    Cgroup { cgroup: Arc<Cgroup>, dir: OwnedFd },
    /// The first process is the monitor.
    Monitor,
    /// The first process is the leader.
    Tag(Tag),
}

impl Started {
    pub(super) fn tree(&self) -> Tree {
        match self.kept_by {
            KeptBy::Cgroup { .. } => Tree::Cgroup,
            KeptBy::Monitor => Tree::Monitor { pid: self.pid },
            KeptBy::Tag(tag) => Tree::Tag(tag),
        }
    }

    /// Ends it all; nothing of the command has run. It returns well only when the end was seen.
    pub(super) fn abandon(self, agent: &Agent, execution: &Arc<Execution>) -> Result<()> {
        match &self.kept_by {
            KeptBy::Cgroup { cgroup, dir } => {
                self.kill_first();
                kill_cgroup_now(cgroup, dir).map_err(|cause| unverifiable(agent, execution, &cause.to_string()))?;
                execution.cgroup_empty.store(true, Ordering::Release);
                if cgroup.remove(execution.id().as_str()) == Removal::Busy {
                    agent.executions.linger(execution);
                    agent.wake.ring();
                }
                Ok(())
            }
            KeptBy::Monitor => self.abandon_below_monitor(agent, execution),
            KeptBy::Tag(tag) => {
                // It may not have its tag yet.
                self.kill_first();
                kill_tagged_now(*tag).map_err(|cause| unverifiable(agent, execution, &cause.to_string()))
            }
        }
    }

    fn abandon_below_monitor(&self, agent: &Agent, execution: &Execution) -> Result<()> {
        let gone = |patience| execution.wait_until(patience, |inner| inner.monitor_ended);
        // A child that failed ends by itself, and the monitor after it.
        if gone(LOOK) {
            return Ok(());
        }
        let killed = kill::kill_below(self.pid);
        if killed.is_ok() && gone(MONITOR_GRACE) {
            return Ok(());
        }
        // It is stopped itself. What was below it becomes ours, and is ended before this counts as gone.
        self.kill_first();
        if gone(2 * KILL_PATIENCE) {
            return Ok(());
        }
        Err(unverifiable(agent, execution, "processes outlive SIGKILL"))
    }

    fn kill_first(&self) {
        // It may have ended, and that is what is wanted.
        let _ = self.first.send(libc::SIGKILL);
    }
}
