//! The end of an instance: kill, prove, clean, record, tell.

use std::io;
use std::time::Duration;

use rustix::process::{WaitOptions, waitpid};
use viv_core::EndCause;
use viv_provider::{Ended, InstanceState};

use super::deadline::now_wall_ms;
use super::proto::{ShimError, ShimReply, ShimRequest};
use super::serve::{InitExit, Shim};
use crate::durable;

/// How long one attempt may take. SIGKILL takes milliseconds; a process in uninterruptible I/O takes as long as its
/// device, and between two attempts those who ask are answered.
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// An agent whose connection ended is dead, or about to be.
const AGENT_DIES_WITHIN: Duration = Duration::from_millis(500);

impl Shim {
    /// Why PID 1 is gone, or no longer talks to us.
    pub(super) fn cause_of_agent_end(&mut self) -> EndCause {
        if let Some(what) = self.why_pages_lost() {
            return EndCause::MemoryLost { what };
        }
        match self.init.wait(AGENT_DIES_WITHIN) {
            Ok(InitExit::Code(code)) => EndCause::Exited { code },
            Ok(InitExit::Signal(libc::SIGKILL)) if self.oom_kills() > self.oom_kills_at_start => EndCause::OomKilled,
            Ok(InitExit::Signal(signal)) => EndCause::Signalled { signal },
            Err(_) => EndCause::AgentLost,
        }
    }

    pub(super) fn oom_kills(&self) -> u64 {
        self.cgroups.usage().oom_kills.unwrap_or(0)
    }

    /// Ends everything and does not come back before it is proven. `asked_by` is answered then.
    pub(super) fn end(mut self, cause: EndCause, asked_by: Option<usize>) {
        self.space.leave();
        if let Some(checkpoint) = self.checkpoint.take() {
            checkpoint.abandon();
        }
        self.cgroups.unthrottle(self.dir.path());
        while let Err(error) = self.kill_all() {
            // Nothing is called ended that is not (L8).
            note!("not all processes ended: {error}");
            self.answer_while_ending(&cause);
        }
        self.leave_pages(&cause);
        drop(self.uplink.take());
        if let Err(error) = self.cgroups.remove() {
            // They are empty; a destroy removes what is left.
            note!("cgroups are left: {error}");
        }
        let ended = Ended { cause, at_ms: now_wall_ms() };
        if let Err(error) = durable::replace_json_from_reserve(&self.dir.exit(), &ended, &self.dir.reserve()) {
            note!("the end could not be recorded: {error}");
        }
        self.clients.tell_waiting(&ShimReply::Ended(ended));
        if let Some(client) = asked_by.and_then(|index| self.clients.get_mut(index)) {
            client.say(&ShimReply::Done);
        }
        self.guard.dismiss();
    }

    /// Between two attempts: whoever asks hears that it is ending, and whoever waits for the end goes on waiting.
    pub(super) fn answer_while_ending(&mut self, cause: &EndCause) {
        self.clients.accept(&self.listener);
        let status = Box::new(self.status_as(InstanceState::Ending { cause: cause.clone() }));
        for index in 0.. {
            let Some(client) = self.clients.get_mut(index) else { break };
            match client.receive() {
                None => {}
                // Whoever wants it destroyed wants to hear when it is.
                Some(ShimRequest::Wait | ShimRequest::Destroy { .. }) => self.clients.let_wait(index),
                Some(ShimRequest::Status) => client.say(&ShimReply::Status(status.clone())),
                Some(_) => client.say(&ShimReply::Error(ShimError::Ending { cause: cause.clone() })),
            }
        }
    }

    fn kill_all(&self) -> io::Result<()> {
        self.init.kill();
        self.cgroups.kill(KILL_WITHIN)?;
        match self.init.wait(KILL_WITHIN) {
            // It was waited for when the cause was looked for.
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {}
            Err(error) => return Err(error),
        }
        while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
        Ok(())
    }
}
