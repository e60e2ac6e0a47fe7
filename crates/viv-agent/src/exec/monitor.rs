//! Keeping an execution together where there is no cgroup for it.
//!
//! ```text
//!   agent ── monitor (subreaper) ── leader ── …
//!                  └──────────────── whatever lost its parent
//! ```
//!
//! Whatever the workload does, its processes stay below the monitor, which
//! reports the leader's exit and ends itself when nothing is left below it: its
//! own end is the proof. It takes the keeper's id, so that a workload, even
//! as root, may not signal it. Where there is only one id it can be killed;
//! then the orphans come to the agent, which ends them
//! ([`crate::exec::kill::end_unowned`]).
//!
//! Everything here runs between fork and exit of the monitor: see [`crate::exec::child`].
#![expect(unsafe_code, reason = "a process that is never replaced by exec")]

use std::os::fd::{BorrowedFd, RawFd};

use rustix::process::{Gid, Pid, Uid, WaitOptions, getpid, set_child_subreaper, setsid};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::exec::child;
use crate::exec::plan::Plan;
use crate::sys::{self, Cloned, Exit};

/// Length of a message from the monitor: a kind and a number.
pub(crate) const MESSAGE_BYTES: usize = 5;

/// What the monitor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    /// The leader is there and waits.
    Leader(i32),
    /// The leader ended.
    Exit(Exit),
}

impl Message {
    fn encode(self) -> [u8; MESSAGE_BYTES] {
        let (kind, number) = match self {
            Self::Leader(pid) => (1, pid),
            Self::Exit(Exit::Code(code)) => (2, code),
            Self::Exit(Exit::Signal(signal)) => (3, signal),
        };
        let [a, b, c, d] = number.to_ne_bytes();
        [kind, a, b, c, d]
    }

    pub(crate) fn decode(message: [u8; MESSAGE_BYTES]) -> Option<Self> {
        let [kind, number @ ..] = message;
        let number = i32::from_ne_bytes(number);
        match kind {
            1 => Some(Self::Leader(number)),
            2 => Some(Self::Exit(Exit::Code(number))),
            3 => Some(Self::Exit(Exit::Signal(number))),
            _ => None,
        }
    }
}

/// The monitor's whole life. `link` is its end of a socket to the agent.
pub(crate) fn run(plan: &Plan, link: RawFd, keeper_id: u32) -> ! {
    if setsid().is_err() || set_child_subreaper(Some(getpid())).is_err() {
        sys::exit_now(1);
    }
    // SAFETY: the child only runs the plan, which ends in exec or exit.
    let leader = match unsafe { sys::clone_process(None) } {
        Ok(Cloned::Child) => child::run(plan),
        Ok(Cloned::Parent { pid, .. }) => pid,
        Err(_) => sys::exit_now(2),
    };
    // Nothing but the link is kept: an end of a pipe held here would never be seen closed elsewhere.
    if sys::replace_descriptor(link, 0).is_err() || sys::close_descriptors(1, sys::LAST_DESCRIPTOR).is_err() {
        sys::exit_now(3);
    }
    // The leader still waits, so nothing of the workload has seen this process with another id.
    if !give_up_everything(keeper_id) {
        sys::exit_now(4);
    }
    say(Message::Leader(leader.as_raw_nonzero().get()));
    wait_for_all(leader)
}

fn give_up_everything(keeper_id: u32) -> bool {
    if keeper_id != rustix::process::geteuid().as_raw() {
        let (uid, gid) = (Uid::from_raw(keeper_id), Gid::from_raw(keeper_id));
        if rustix::thread::set_thread_res_gid(gid, gid, gid).is_err()
            || rustix::thread::set_thread_res_uid(uid, uid, uid).is_err()
        {
            return false;
        }
    }
    // The agent may be the keeper already, in all but this.
    sys::set_file_ids(keeper_id, keeper_id);
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // Without a keeper this is the id of workloads.
    let guarded = if keeper_id == 0 { sys::hide_memory() } else { sys::rely_on_id() };
    rustix::thread::set_capabilities(None, sets).is_ok() && guarded.is_ok()
}

fn say(message: Message) {
    // SAFETY: descriptor 0 is the link.
    let link = unsafe { BorrowedFd::borrow_raw(0) };
    // When the agent is gone, so is everything else soon.
    let _ = rustix::io::write(link, &message.encode());
}

fn wait_for_all(leader: Pid) -> ! {
    let all = WaitOptions::from_bits_retain(libc::__WALL as u32);
    loop {
        match rustix::process::wait(all) {
            Ok(Some((pid, status))) if pid == leader => {
                if let Some(code) = status.exit_status() {
                    say(Message::Exit(Exit::Code(code)));
                } else if let Some(signal) = status.terminating_signal() {
                    say(Message::Exit(Exit::Signal(signal)));
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // No child is left, and as every orphan becomes one, nothing is.
            Err(rustix::io::Errno::CHILD) => sys::exit_now(0),
            Err(_) => sys::exit_now(5),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back() {
        for message in [Message::Leader(7), Message::Exit(Exit::Code(255)), Message::Exit(Exit::Signal(9))] {
            assert_eq!(Message::decode(message.encode()), Some(message));
        }
        assert_eq!(Message::decode([9, 0, 0, 0, 0]), None);
    }
}
