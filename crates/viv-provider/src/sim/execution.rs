//! One command in one instance.
//!
//! ```text
//!   start ──► Running ──exits, is signalled──► Exited | Signalled
//!     │          ├──cancel, limit: TERM, grace, KILL──► Cancelled | TimedOut
//!     │          └──the instance ends──► Lost
//!     └──cannot start──► Failed
//! ```

use std::collections::BTreeMap;

use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, TtySize};

use super::output::{OUTPUT_BYTES_DEFAULT, Output};
use super::process::{Fate, KILL, Process, Surroundings, TERM};
use super::tree::Tree;
use crate::conformance::program::Program;
use crate::error::ProviderError;

/// Between asking a tree to end and ending it (X3).
pub(super) const GRACE_MS: u64 = 500;

/// Input that a command which does not read can be given, as with a pipe.
const INPUT_BYTES_MAX: u64 = 64 << 10;

/// Users that every simulated image knows.
const USERS: [(&str, u32); 2] = [("root", 0), ("nobody", 65_534)];

/// How an execution is being ended.
#[derive(Debug, Clone)]
struct Ending {
    kill_at_ms: u64,
    outcome: ExecState,
}

/// An execution.
#[derive(Debug, Clone)]
pub(super) struct Execution {
    pub(super) id: ExecutionId,
    pub(super) spec: ExecSpec,
    state: ExecState,
    started_at_ms: u64,
    ended_at_ms: Option<u64>,
    pub(super) output: Output,
    /// The terminal as it is now; the spec keeps how it was asked for.
    tty: Option<TtySize>,
    input_open: bool,
    input_taken: u64,
    pid: u32,
    process: Option<Process>,
    limit_at_ms: Option<u64>,
    ending: Option<Ending>,
}

/// What of its instance an execution needs.
pub(super) struct Host<'h> {
    pub(super) now_ms: u64,
    pub(super) tree: &'h mut Tree,
    pub(super) env: &'h BTreeMap<String, String>,
    pub(super) workdir: &'h str,
    pub(super) open_files: Option<u64>,
}

impl Execution {
    /// Starts a command; one that cannot start is an execution that failed.
    pub(super) fn start(id: ExecutionId, spec: ExecSpec, pid: u32, mut host: Host<'_>) -> Self {
        let mut execution = Self {
            id,
            state: ExecState::Running,
            started_at_ms: host.now_ms,
            ended_at_ms: None,
            output: Output::new(spec.output_bytes_max.unwrap_or(OUTPUT_BYTES_DEFAULT)),
            tty: spec.tty,
            input_open: spec.stdin,
            input_taken: 0,
            pid,
            process: None,
            limit_at_ms: spec.limit_ms.map(|limit| host.now_ms.saturating_add(limit)),
            ending: None,
            spec,
        };
        match execution.prepare(&host) {
            Ok(process) => {
                execution.process = Some(process);
                execution.play(&mut host, Process::start);
            }
            Err(what) => execution.finish(host.now_ms, ExecState::Failed { what }),
        }
        execution
    }

    fn prepare(&self, host: &Host<'_>) -> Result<Process, String> {
        let name = self.spec.argv.first().map_or("", String::as_str);
        let program = Program::parse(&self.spec.argv).ok_or_else(|| format!("{name}: no such program"))?;
        let cwd = self.spec.cwd.as_deref().unwrap_or(host.workdir);
        let resolved = host.tree.resolve(cwd, true).map_err(|error| error.to_string())?;
        if !host.tree.get(&resolved).is_some_and(super::tree::Node::is_dir) {
            return Err(format!("{cwd}: no such directory"));
        }
        self.uid().ok_or_else(|| format!("{}: no such user", self.spec.user.as_deref().unwrap_or_default()))?;
        Ok(Process::new(program))
    }

    fn uid(&self) -> Option<u32> {
        let Some(user) = &self.spec.user else { return Some(0) };
        let name = user.split(':').next().unwrap_or_default();
        USERS.iter().find(|(known, _)| *known == name).map(|(_, uid)| *uid).or_else(|| name.parse().ok())
    }

    /// Lets the process do something, and ends the execution when that was its last.
    fn play(&mut self, host: &mut Host<'_>, what: impl FnOnce(&mut Process, &mut Surroundings<'_>) -> Fate) {
        let Some(mut process) = self.process.take() else { return };
        let mut env = host.env.clone();
        env.extend(self.spec.env.clone());
        let mut around = Surroundings {
            now_ms: host.now_ms,
            uid: self.uid().unwrap_or_default(),
            output: &mut self.output,
            tree: host.tree,
            env: &env,
            cwd: self.spec.cwd.as_deref().unwrap_or(host.workdir),
            tty: self.tty,
            has_input: self.input_open,
            open_files: host.open_files,
        };
        match what(&mut process, &mut around) {
            Fate::Lives => self.process = Some(process),
            Fate::Ends(state) => self.finish(host.now_ms, state),
        }
    }

    /// The first outcome stands; one that was being brought about takes the place of how it looked.
    fn finish(&mut self, now_ms: u64, state: ExecState) {
        self.process = None;
        if self.state.is_final() {
            return;
        }
        self.state = self.ending.take().map_or(state, |ending| ending.outcome);
        self.ended_at_ms = Some(now_ms);
        self.input_open = false;
    }

    pub(super) fn is_final(&self) -> bool {
        self.state.is_final()
    }

    pub(super) fn status(&self) -> ExecStatus {
        ExecStatus {
            id: self.id.clone(),
            state: self.state.clone(),
            started_at_ms: self.started_at_ms,
            ended_at_ms: self.ended_at_ms,
            output_bytes: self.output.written(),
            stdin_bytes: self.input_taken,
            pid: (!self.is_final()).then_some(self.pid),
            argv: self.spec.told_argv(),
            detached: self.spec.detached,
        }
    }

    /// When something happens to it by itself.
    pub(super) fn due_ms(&self) -> Option<u64> {
        if self.is_final() {
            return None;
        }
        let wake = self.process.as_ref().and_then(|process| process.wake_at_ms);
        let end = match &self.ending {
            Some(ending) => Some(ending.kill_at_ms),
            None => self.limit_at_ms,
        };
        [wake, end].into_iter().flatten().min()
    }

    /// What is due happens. An end comes before a timer at the same time.
    pub(super) fn happen(&mut self, host: &mut Host<'_>) {
        if self.ending.as_ref().is_some_and(|ending| ending.kill_at_ms <= host.now_ms) {
            self.play(host, |process, _| process.signal(KILL));
        } else if self.ending.is_none() && self.limit_at_ms.is_some_and(|limit| limit <= host.now_ms) {
            self.begin_end(host, ExecState::TimedOut);
        } else {
            self.play(host, Process::wake);
        }
    }

    /// Asks the tree to end, and sees to it that it will have.
    fn begin_end(&mut self, host: &mut Host<'_>, outcome: ExecState) {
        self.ending = Some(Ending { kill_at_ms: host.now_ms.saturating_add(GRACE_MS), outcome });
        self.play(host, |process, _| process.signal(TERM));
    }

    pub(super) fn cancel(&mut self, host: &mut Host<'_>) {
        if !self.is_final() && self.ending.is_none() {
            self.begin_end(host, ExecState::Cancelled);
        }
    }

    /// The instance ended under it.
    pub(super) fn lose(&mut self, now_ms: u64, cause: &str) {
        self.ending = None;
        self.finish(now_ms, ExecState::Lost { cause: cause.to_owned() });
    }

    /// Its clocks stood still for this long: limits move, and timers that went by fire now.
    pub(super) fn thaw(&mut self, now_ms: u64, frozen_ms: u64) {
        self.shift_ends(frozen_ms);
        if let Some(wake) = self.process.as_mut().and_then(|process| process.wake_at_ms.as_mut()) {
            *wake = (*wake).max(now_ms);
        }
    }

    /// It was saved, and all of its clocks stood still for this long.
    pub(super) fn wake_up(&mut self, asleep_ms: u64) {
        self.shift_ends(asleep_ms);
        if let Some(wake) = self.process.as_mut().and_then(|process| process.wake_at_ms.as_mut()) {
            *wake = wake.saturating_add(asleep_ms);
        }
    }

    fn shift_ends(&mut self, ms: u64) {
        if let Some(limit) = self.limit_at_ms.as_mut() {
            *limit = limit.saturating_add(ms);
        }
        if let Some(ending) = self.ending.as_mut() {
            ending.kill_at_ms = ending.kill_at_ms.saturating_add(ms);
        }
    }

    /// Takes what was not taken before, as far as there is room.
    pub(super) fn input(&mut self, host: &mut Host<'_>, offset: u64, data: &[u8]) -> Result<u64, ProviderError> {
        let conflict = |what: String| Err(ProviderError::Conflict { what });
        if offset.saturating_add(data.len() as u64) <= self.input_taken {
            return Ok(self.input_taken);
        }
        if !self.input_open {
            return conflict(format!("{} takes no input", self.id));
        }
        let Some(known) = self.input_taken.checked_sub(offset) else {
            return conflict(format!("input has come up to {}, not to {offset}", self.input_taken));
        };
        let mut fresh = &data[known as usize..];
        if !self.process.as_ref().is_some_and(Process::reads) {
            let room = INPUT_BYTES_MAX.saturating_sub(self.input_taken) as usize;
            fresh = &fresh[..room.min(fresh.len())];
        }
        self.input_taken += fresh.len() as u64;
        self.play(host, |process, around| {
            process.input(around, fresh);
            Fate::Lives
        });
        Ok(self.input_taken)
    }

    pub(super) fn close_input(&mut self, host: &mut Host<'_>) {
        if self.input_open {
            self.input_open = false;
            self.play(host, |process, _| process.input_closed());
        }
    }

    pub(super) fn signal(&mut self, host: &mut Host<'_>, signal: i32) -> Result<(), ProviderError> {
        if self.is_final() {
            return Err(ProviderError::Conflict { what: format!("{} has ended", self.id) });
        }
        self.play(host, |process, _| process.signal(signal));
        Ok(())
    }

    /// What it asks for, while it waits for the answer.
    pub(super) fn asks(&self) -> Option<&str> {
        self.process.as_ref().and_then(Process::asks)
    }

    /// The answer to that.
    pub(super) fn answered(&mut self, host: &mut Host<'_>, answer: &str) {
        self.play(host, |_, around| Process::answered(around, answer));
    }

    pub(super) fn resize(&mut self, size: TtySize) -> Result<(), ProviderError> {
        match self.tty.as_mut() {
            Some(current) => {
                *current = size;
                Ok(())
            }
            None => Err(ProviderError::Conflict { what: format!("{} has no terminal", self.id) }),
        }
    }
}
