//! A running instance and its one loop.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use viv_agent::proto::{AgentMessage, ControlMessage};
use viv_core::{EndCause, FencingToken, OperationId};
use viv_provider::{Deadline, DeadlineChange, InstanceRef, InstanceState, Mutation, ResourceLimits};

use super::agent::{ControlConnection, FromAgent};
use super::clients::Clients;
use super::create::Parts;
use super::deadline::{DeadlineKeeper, Passed, now_boot_ms};
use super::guard::Guard;
use super::memory::Checkpoint;
use super::oom::OomWatch;
use super::pages::Pages;
use super::proto::{ShimError, ShimReply, ShimRequest, ShimStatus};
use super::space::SpaceWatch;
use super::{chain, record_identity};
use crate::cgroup::InstanceCgroups;
use crate::layout::{InstanceDir, InstanceRecord};
use crate::network::Uplink;
use crate::wait::readable_within;

/// Freezing is a matter of a millisecond; a task that cannot be stopped for this long is a finding.
pub(super) const FREEZE_WITHIN: Duration = Duration::from_secs(2);

/// When thawing failed, it is tried again after this.
const RUN_AGAIN_EVERY: Duration = Duration::from_millis(200);

/// Refusing an address is a matter of a millisecond; nobody is answered meanwhile.
const FOLLOW_WITHIN: Duration = Duration::from_secs(1);

/// Messages of the agent that are heard before others are looked at: whoever got hold of it could say more for ever.
const MESSAGES_AT_ONCE_MAX: usize = 16;

/// Answers kept for repeated extensions, and as many for changed limits. An operation is repeated by one driver at a time.
pub(super) const EXTENSIONS_KEPT: usize = 32;

/// The container's first process, the agent: held, not guessed (J6).
pub(super) struct Init {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
}

/// How it ended.
#[derive(Debug, Clone, Copy)]
pub(super) enum InitExit {
    Code(i32),
    Signal(i32),
}

impl Init {
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { pid: self.pid, pidfd: self.pidfd.try_clone()? })
    }

    pub(super) fn has_ended(&self) -> io::Result<bool> {
        readable_within(&self.pidfd, Duration::ZERO)
    }

    /// SIGKILL. The kernel ends all of its PID namespace before it is done.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits until it and its whole PID namespace are gone.
    pub(super) fn wait(&self, within: Duration) -> io::Result<InitExit> {
        if !readable_within(&self.pidfd, within)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let status =
            waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED)?.ok_or(io::ErrorKind::NotFound)?;
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Ok(InitExit::Code(code)),
            (None, Some(signal)) => Ok(InitExit::Signal(signal)),
            (None, None) => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// A running instance.
pub(super) struct Shim {
    pub(super) dir: InstanceDir,
    pub(super) record: InstanceRecord,
    pub(super) cgroups: InstanceCgroups,
    pub(super) init: Init,
    pub(super) guard: Guard,
    pub(super) lock: File,
    pub(super) clients: Clients,
    pub(super) oom_kills_at_start: u64,
    pub(super) listener: UnixListener,
    pub(super) control: ControlConnection,
    deadline: DeadlineKeeper,
    pub(super) token: FencingToken,
    /// A user wants it frozen; a client that copies its files may hold it besides.
    pub(super) frozen: bool,
    pub(super) stopped_since_boot_ms: Option<u64>,
    extensions: Vec<(OperationId, Deadline)>,
    pub(super) limit_changes: Vec<(OperationId, ResourceLimits)>,
    oom: OomWatch,
    pub(super) writable: PathBuf,
    /// The root, where it is mounted.
    pub(super) root: PathBuf,
    /// Pages of the memory that it began with are being brought.
    pub(super) pages: Option<Pages>,
    /// The agent is gone, and until then those who bring pages may say that it is because of them.
    pub(super) pages_say_until: Option<Instant>,
    /// Its memory is being saved.
    pub(super) checkpoint: Option<Checkpoint>,
    /// The agent was asked to be without us while it is saved, and has not left since. It may do so late: whoever asked
    /// gives up after a while, and the dump may be over by then.
    pub(super) may_leave: bool,
    /// The way out, if there is one.
    pub(super) uplink: Option<Uplink>,
    pub(super) space: SpaceWatch,
}

/// What the loop does next.
pub(super) enum Next {
    Go,
    /// End it, and answer the client at this index when that is done.
    End(EndCause, Option<usize>),
}

impl Shim {
    pub(super) fn new(
        dir: InstanceDir,
        record: InstanceRecord,
        cgroups: InstanceCgroups,
        guard: Guard,
        lock: File,
        parts: Parts,
    ) -> Self {
        let Parts { listener, init, control, deadline, clients, oom_kills, writable, root, uplink, pages } = parts;
        let token = record.token;
        let space = SpaceWatch::join(&dir);
        Self {
            dir,
            record,
            cgroups,
            init,
            guard,
            lock,
            clients,
            oom_kills_at_start: oom_kills,
            listener,
            control,
            deadline,
            token,
            frozen: false,
            stopped_since_boot_ms: None,
            extensions: Vec::new(),
            limit_changes: Vec::new(),
            oom: OomWatch::default(),
            writable,
            root,
            pages,
            pages_say_until: None,
            checkpoint: None,
            may_leave: false,
            uplink,
            space,
        }
    }

    /// Serves until the instance has ended and everything of it is gone.
    pub(super) fn serve(mut self) {
        loop {
            match self.turn() {
                Ok(Next::Go) => {}
                Ok(Next::End(cause, asked_by)) => return self.end(cause, asked_by),
                Err(error) => {
                    // Nothing in a turn fails in a way that leaves it unclear what holds; an instance
                    // that cannot be watched is ended rather than left alone.
                    note!("the loop failed: {error}");
                    return self.end(EndCause::SupervisorLost, None);
                }
            }
        }
    }

    fn turn(&mut self) -> io::Result<Next> {
        let mut wake_after = self.clients.held_for();
        if wake_after.is_none() && !self.frozen && self.stopped_since_boot_ms.is_some() {
            // It should run and does not.
            wake_after = Some(RUN_AGAIN_EVERY);
        }
        if self.control.has_pending() {
            wake_after = Some(Duration::ZERO);
        }
        let until = [self.pages_say_until, self.checkpoint.as_ref().and_then(Checkpoint::waits_until)];
        let until = until.into_iter().flatten().min().map(|until| until.saturating_duration_since(Instant::now()));
        wake_after = [wake_after, until, self.space.waits_at_most()].into_iter().flatten().min();
        // That the agent is gone is known, and would be told again and again.
        let (agent, control) = match (&self.pages, self.pages_say_until) {
            (Some(pages), Some(_)) => (pages.pidfd().as_fd(), pages.pidfd().as_fd()),
            (Some(_) | None, _) => (self.init.pidfd.as_fd(), self.control.stream().as_fd()),
        };
        let mut fds = vec![
            PollFd::new(self.deadline.timer(), PollFlags::IN),
            PollFd::from_borrowed_fd(agent, PollFlags::IN),
            PollFd::from_borrowed_fd(control, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(self.guard.pidfd(), PollFlags::IN),
        ];
        if let Some(uplink) = &self.uplink {
            fds.push(PollFd::new(uplink.pidfd(), PollFlags::IN));
            fds.push(PollFd::from_borrowed_fd(uplink.addresses(), PollFlags::IN));
        }
        let space_at = fds.len();
        fds.extend(self.space.waits_for().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let saving_at = fds.len();
        let helper = self.checkpoint.as_ref().and_then(Checkpoint::helper);
        fds.extend(helper.map(|helper| PollFd::new(helper, PollFlags::IN)));
        let pages_at = fds.len();
        fds.extend(self.pages.iter().map(|pages| PollFd::new(pages.pidfd(), PollFlags::IN)));
        let fixed = fds.len();
        fds.extend(self.clients.streams().map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)));
        match poll(&mut fds, wake_after.map(timespec).as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Next::Go),
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();

        // The deadline goes first: a request that came with it finds it passed.
        if ready[0] && self.deadline.has_passed() {
            return Ok(Next::End(EndCause::Expired, None));
        }
        // Before the agent's end, which may be of that.
        if fixed > pages_at
            && ready[pages_at]
            && let Next::End(cause, asked_by) = self.tend_pages()
        {
            return Ok(Next::End(cause, asked_by));
        }
        if (ready[1] || self.pages_say_until.is_some())
            && let Next::End(cause, asked_by) = self.agent_is_gone()
        {
            return Ok(Next::End(cause, asked_by));
        }
        if (ready[2] || self.control.has_pending())
            && let Next::End(cause, asked_by) = self.hear_agent()?
        {
            return Ok(Next::End(cause, asked_by));
        }
        if ready[4] {
            self.replace_guard()?;
        }
        if space_at > 5 {
            self.tend_uplink(ready[5], ready[6]);
        }
        self.space.tend(saving_at > space_at && ready[space_at]);
        if pages_at > saving_at
            && ready[saving_at]
            && let Next::End(cause, asked_by) = self.tend_checkpoint()?
        {
            return Ok(Next::End(cause, asked_by));
        }
        self.tend_waiting();
        for index in (fixed..ready.len()).filter(|&index| ready[index]) {
            if let Next::End(cause, asked_by) = self.handle_client(index - fixed) {
                return Ok(Next::End(cause, asked_by));
            }
        }
        self.clients.prune();
        self.run_unless_held();
        if !self.rejoin_agent() {
            return Ok(Next::End(EndCause::AgentLost, None));
        }
        if ready[3] {
            self.clients.accept_for_gone(&self.listener);
        }
        Ok(Next::Go)
    }

    /// Hears what the agent has said, and notices that it closed the connection.
    pub(super) fn hear_agent(&mut self) -> io::Result<Next> {
        for _ in 0..MESSAGES_AT_ONCE_MAX {
            match self.control.receive() {
                FromAgent::Nothing => break,
                FromAgent::Message(AgentMessage::Unverifiable { what }) => {
                    return Ok(Next::End(EndCause::Unverifiable { what }, None));
                }
                FromAgent::Message(AgentMessage::OomKilled { execution, pid }) => {
                    self.count_oom_kills();
                    self.oom.told(execution, pid);
                }
                FromAgent::Lost if std::mem::take(&mut self.may_leave) => {
                    self.control = ControlConnection::absent()?;
                    break;
                }
                FromAgent::Lost => return Ok(self.agent_is_gone()),
            }
        }
        Ok(Next::Go)
    }

    /// Somebody killed the guard: there is a new one before anything else is done.
    fn replace_guard(&mut self) -> io::Result<()> {
        let new = Guard::start(&self.cgroups, &self.dir, &self.lock)?;
        std::mem::replace(&mut self.guard, new).dismiss();
        record_identity(&self.dir, &self.guard)
    }

    /// The sandbox goes on without a way out when that is lost, or cannot be kept from leading to the machine (S2).
    fn tend_uplink(&mut self, is_gone: bool, addresses_changed: bool) {
        let Some(uplink) = &mut self.uplink else { return };
        if is_gone {
            note!("the network is lost: pasta or its keeper ended; connections fail from now on");
            self.uplink = None;
        } else if addresses_changed && let Err(error) = uplink.follow_addresses(Instant::now() + FOLLOW_WITHIN) {
            note!("the network is given up, because new addresses of the machine are not refused: {}", chain(&error));
            self.uplink = None;
        }
    }

    /// Cuts the way out, or opens it again. Who cannot be cut off has none from then on.
    fn connect(&mut self, connected: bool) -> Handled {
        if let Some(uplink) = &self.uplink
            && let Err(error) = uplink.set_forwarding(connected, Instant::now() + FOLLOW_WITHIN)
        {
            note!("the network is given up, because it cannot be switched: {}", chain(&error));
            self.uplink = None;
        }
        Handled::Answer(ShimReply::Done)
    }

    fn handle_client(&mut self, index: usize) -> Next {
        loop {
            let Some(client) = self.clients.get_mut(index) else { return Next::Go };
            let Some(request) = client.receive() else { return Next::Go };
            if request == ShimRequest::Wait {
                self.clients.let_wait(index);
                continue;
            }
            if request == ShimRequest::Release {
                let reply = if client.release() { ShimReply::Done } else { ShimReply::Error(ShimError::NotHeld) };
                // It runs again before that is said.
                self.run_unless_held();
                let _ = self.rejoin_agent();
                self.answer(index, &reply);
                continue;
            }
            match self.handle(request) {
                Ok(Handled::Held(duration)) => {
                    if let Some(client) = self.clients.get_mut(index) {
                        client.hold(duration);
                        client.say(&ShimReply::Held { writable: self.writable.clone() });
                    }
                }
                Ok(Handled::Checkpoint) => {
                    if let Some(client) = self.clients.get_mut(index) {
                        client.saves(true);
                    }
                }
                Ok(Handled::Save) => return Next::End(EndCause::Saved, Some(index)),
                Ok(Handled::Full(what)) => return Next::End(EndCause::DiskFull { what }, Some(index)),
                Ok(Handled::Answer(reply)) => self.answer(index, &reply),
                Ok(Handled::Destroy) => return Next::End(EndCause::Destroyed, Some(index)),
                Err(ShimError::Expired) => {
                    self.answer(index, &ShimReply::Error(ShimError::Expired));
                    return Next::End(EndCause::Expired, None);
                }
                Err(error) => self.answer(index, &ShimReply::Error(error)),
            }
        }
    }

    fn answer(&mut self, index: usize, reply: &ShimReply) {
        if let Some(client) = self.clients.get_mut(index) {
            client.say(reply);
        }
    }

    fn handle(&mut self, request: ShimRequest) -> Result<Handled, ShimError> {
        if let Some(mutation) = request.mutation() {
            self.admit(mutation)?;
        }
        if let (Some(checkpoint), ShimRequest::Checkpoint { mutation, .. }) = (&mut self.checkpoint, &request)
            && checkpoint.is_for(&mutation.operation)
        {
            // Who asked before is gone, and asks again.
            checkpoint.waits_for(Duration::from_millis(mutation.budget_ms));
            return Ok(Handled::Checkpoint);
        }
        if self.checkpoint.is_some() && !request.goes_with_checkpoint() {
            return Err(ShimError::Conflict { what: "its memory is being saved".to_owned() });
        }
        match request {
            ShimRequest::Status | ShimRequest::Wait | ShimRequest::Release => {
                Ok(Handled::Answer(ShimReply::Status(Box::new(self.status()))))
            }
            ShimRequest::Extend { mutation, change } => self.extend(mutation.operation, change),
            ShimRequest::SetLimits { mutation, change, layer_bytes } => {
                self.set_limits(mutation.operation, &change, layer_bytes)
            }
            ShimRequest::Freeze { .. } => self.freeze(),
            ShimRequest::Thaw { .. } => self.thaw(),
            ShimRequest::Connect { connected, .. } => Ok(self.connect(connected)),
            ShimRequest::Destroy { .. } => Ok(Handled::Destroy),
            ShimRequest::EndToSave { .. } => Ok(Handled::Save),
            ShimRequest::Checkpoint { mutation, criu, folder, live } => {
                self.begin_checkpoint(&mutation, criu, folder, live)
            }
            ShimRequest::Hold { instance, for_ms } => self.hold(&instance, Duration::from_millis(for_ms)),
            ShimRequest::EndForSpace { instance, what } => {
                self.need_current(&instance)?;
                Ok(Handled::Full(what))
            }
            ShimRequest::Raise { .. } => Ok(Handled::Answer(ShimReply::Done)),
        }
    }

    /// Refuses who is late (L15) or means another generation (T5).
    fn admit(&mut self, mutation: &Mutation) -> Result<(), ShimError> {
        if mutation.token < self.token {
            return Err(ShimError::Fenced { presented: mutation.token, highest: self.token });
        }
        let current = self.record.generation();
        if mutation.generation != current {
            return Err(ShimError::StaleGeneration { asked: mutation.generation, current });
        }
        if mutation.token > self.token {
            self.token = mutation.token;
            self.tell_agent(&ControlMessage::Token(mutation.token));
        }
        Ok(())
    }

    /// An agent that cannot be told is stopped or dead: the one will hear it later, the other never matters again.
    pub(super) fn tell_agent(&mut self, message: &ControlMessage) {
        if let Err(error) = self.control.tell(message) {
            note!("the agent was not told {message:?}: {error}");
        }
    }

    fn status(&mut self) -> ShimStatus {
        let frozen = self.frozen;
        self.status_as(if frozen { InstanceState::Frozen } else { InstanceState::Running })
    }

    pub(super) fn status_as(&mut self, state: InstanceState) -> ShimStatus {
        let mut usage = self.cgroups.usage();
        self.oom.counted(usage.oom_kills.unwrap_or(0), &self.record.cgroup());
        usage.oom_last = self.oom.last();
        ShimStatus {
            instance: self.record.instance.clone(),
            state,
            deadline: self.deadline.current(),
            usage,
            limits: Some(self.record.spec.limits.clone()),
            stopped: Some(self.stopped_since_boot_ms.is_some()),
        }
    }

    fn count_oom_kills(&mut self) {
        self.oom.counted(self.oom_kills(), &self.record.cgroup());
    }

    fn extend(&mut self, operation: OperationId, change: DeadlineChange) -> Result<Handled, ShimError> {
        let again = self.extensions.iter().find(|(known, _)| *known == operation);
        if let Some((_, deadline)) = again
            && !self.deadline.has_passed()
        {
            return Ok(Handled::Answer(ShimReply::Deadline(*deadline)));
        }
        let changed = self.deadline.change(change);
        match changed.map_err(|error| ShimError::Failed { what: format!("the deadline cannot be stored: {error}") })? {
            Ok(deadline) => {
                if self.extensions.len() == EXTENSIONS_KEPT {
                    self.extensions.remove(0);
                }
                self.extensions.push((operation, deadline));
                Ok(Handled::Answer(ShimReply::Deadline(deadline)))
            }
            Err(Passed) => Err(ShimError::Expired),
        }
    }

    fn freeze(&mut self) -> Result<Handled, ShimError> {
        self.stop_running()?;
        self.frozen = true;
        Ok(Handled::Answer(ShimReply::Done))
    }

    fn thaw(&mut self) -> Result<Handled, ShimError> {
        if self.clients.held_for().is_none() {
            self.run_again()?;
        }
        self.frozen = false;
        Ok(Handled::Answer(ShimReply::Done))
    }

    fn hold(&mut self, instance: &InstanceRef, duration: Duration) -> Result<Handled, ShimError> {
        self.need_current(instance)?;
        self.stop_running()?;
        Ok(Handled::Held(duration))
    }

    fn need_current(&self, instance: &InstanceRef) -> Result<(), ShimError> {
        if *instance == self.record.instance {
            return Ok(());
        }
        let (asked, current) = (instance.generation, self.record.generation());
        Err(ShimError::StaleGeneration { asked, current })
    }

    fn run_unless_held(&mut self) {
        if !self.frozen
            && self.clients.held_for().is_none()
            && let Err(error) = self.run_again()
        {
            // Tried again in a moment; until then those who look see no progress, and the deadline holds.
            note!("it does not run again: {error:?}");
        }
    }

    pub(super) fn stop_running(&mut self) -> Result<(), ShimError> {
        // Also when it should stand still already: a thaw that failed may have gone through after all.
        if let Err(error) = self.cgroups.set_frozen(true, FREEZE_WITHIN) {
            // Half frozen is worse than running.
            let _ = self.cgroups.set_frozen(false, FREEZE_WITHIN);
            return Err(ShimError::Failed { what: format!("it cannot be frozen: {error}") });
        }
        self.stopped_since_boot_ms.get_or_insert_with(now_boot_ms);
        Ok(())
    }

    pub(super) fn run_again(&mut self) -> Result<(), ShimError> {
        if let Some(since) = self.stopped_since_boot_ms {
            // It stands in the agent's socket before the agent runs again, so no clock runs out in between (L13).
            self.tell_agent(&ControlMessage::Thawing { frozen_ms: now_boot_ms().saturating_sub(since) });
            // What was told is told; if this has to be tried again, it counts from now.
            self.stopped_since_boot_ms = Some(now_boot_ms());
            self.cgroups
                .set_frozen(false, FREEZE_WITHIN)
                .map_err(|error| ShimError::Failed { what: format!("it cannot be thawed: {error}") })?;
            self.stopped_since_boot_ms = None;
        }
        Ok(())
    }
}

/// What came of a request.
pub(super) enum Handled {
    Answer(ShimReply),
    Held(Duration),
    /// It will be answered when that is done.
    Checkpoint,
    Save,
    Full(String),
    Destroy,
}

fn timespec(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec { tv_sec: duration.as_secs().cast_signed(), tv_nsec: i64::from(duration.subsec_nanos()) }
}
