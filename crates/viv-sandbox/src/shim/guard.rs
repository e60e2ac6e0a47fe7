//! A second process beside the shim, for the moment in which the shim is killed.
//!
//! The kernel kills the agent when its parent dies, but only once the agent
//! has asked for it, and nobody would remove cgroups or say what happened. So
//! a child of the shim waits for the shim's end on a pipe. If it comes without
//! a word, the guard kills what is in the cgroups, removes them and records the
//! end. It shares the shim's lock, so the instance is not called ended before.
//!
//! It is a fork without an exec that touches almost nothing: a tenth of a
//! megabyte.

use std::fs::File;
use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use viv_core::EndCause;
use viv_provider::Ended;

use super::deadline::now_wall_ms;
use super::first;
use crate::cgroup::InstanceCgroups;
use crate::durable;
use crate::layout::InstanceDir;
use crate::sys::clone::{Forked, close_all_but, exit_now, fork};
use crate::wait::readable_within;

/// How long one attempt to kill may take; there is another one after it.
const KILL_WITHIN: Duration = Duration::from_secs(5);

/// How long a guard that is dismissed may take to go.
const DISMISS_WITHIN: Duration = Duration::from_secs(1);

/// The shim's end of it.
pub(super) struct Guard {
    pid: Pid,
    pidfd: OwnedFd,
    pipe: PipeWriter,
}

impl Guard {
    /// Starts one, which holds the lock too.
    pub(super) fn start(cgroups: &InstanceCgroups, dir: &InstanceDir, lock: &File) -> io::Result<Self> {
        let (reader, pipe) = io::pipe()?;
        match fork(None)? {
            Forked::Child => {
                // None of the shim's connections: only the pipe and the lock matter.
                close_all_but(&[reader.as_fd(), lock.as_fd()]);
                let _ = rustix::process::setsid();
                let code = i32::from(guard(reader, cgroups, dir).is_err());
                exit_now(code);
            }
            Forked::Parent(pid) => Ok(Self { pid, pidfd: pidfd_open(pid, PidfdFlags::empty())?, pipe }),
        }
    }

    /// Readable when the guard is gone, which it should not be.
    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// Whose pid to kill when nobody answers.
    pub(super) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// The shim has done everything itself.
    pub(super) fn dismiss(mut self) {
        let _ = self.pipe.write_all(b"done");
        drop(self.pipe);
        // One that was stopped would keep the lock, and us.
        if !matches!(readable_within(&self.pidfd, DISMISS_WITHIN), Ok(true)) {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        }
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

fn guard(mut pipe: impl Read, cgroups: &InstanceCgroups, dir: &InstanceDir) -> io::Result<()> {
    let mut word = [0; 4];
    if pipe.read(&mut word)? > 0 {
        return Ok(());
    }
    while let Err(error) = cgroups.kill(KILL_WITHIN) {
        note!("guard: not all processes ended: {error}");
    }
    while let Err(error) = first::end(dir, KILL_WITHIN) {
        note!("guard: {error}");
    }
    cgroups.remove()?;
    // An end that the shim recorded before it was killed stands.
    if durable::read_json::<Ended>(&dir.exit())?.is_none() {
        let ended = Ended { cause: EndCause::SupervisorLost, at_ms: now_wall_ms() };
        durable::replace_json_from_reserve(&dir.exit(), &ended, &dir.reserve())?;
    }
    Ok(())
}
