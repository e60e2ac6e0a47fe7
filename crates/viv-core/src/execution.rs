//! An execution as a row: what was asked, by whom, and how it stands as far as was learnt (SPEC part 3).
//!
//! ```text
//!   Queued ──► Started { Running } ──► Started { how it ended }
//!      └──────────────────────────────────────▲   cancelled, or not started in time
//! ```
//!
//! While its instance lives, whoever runs it is the truth about it, and the row a copy that says when it was learnt.
//! Once the instance is gone the row is all there is: [`Execution::settle`] sees to it that none says then that it runs.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::cause::EndCause;
use crate::exec::{ExecSpec, ExecState, ExecStatus, OutputEvent, Stream};
use crate::id::{ExecutionId, Generation, SandboxId};
use crate::lifecycle::{Actor, HIBERNATED, MEMORY_NOT_RESTORED, Memory, Phase, Sandbox};
use crate::spec::Project;

/// An execution as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    /// Its id.
    pub id: ExecutionId,
    /// Whose it is.
    pub project: Project,
    /// In which sandbox.
    pub sandbox: SandboxId,
    /// Grows with every change; who has to be the only one to make a change compares it.
    pub version: u64,
    /// In which instance it was started; while it is queued, the one that was there when it was asked for.
    pub generation: Generation,
    /// Program and arguments, as [`ExecSpec::told_argv`] has them. The environment is not kept (S6).
    pub argv: Vec<String>,
    /// Where it starts, if that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// As whom, if that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Whether it is on a terminal.
    #[serde(default)]
    pub tty: bool,
    /// Whether it is a service.
    #[serde(default)]
    pub detached: bool,
    /// Its time limit, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<u64>,
    /// Who asked for it.
    pub by: Actor,
    /// When.
    pub asked_at_ms: u64,
    /// When what `stage` says was learnt.
    pub learnt_at_ms: u64,
    /// How it stands.
    pub stage: Stage,
}

/// How it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "snake_case")]
pub enum Stage {
    /// It waits for its sandbox, or for a place in it.
    Queued(Queued),
    /// It was started, or could not be.
    Started {
        /// As it was learnt last.
        status: ExecStatus,
        /// Whether the end was concluded from that of its instance, and not told by who ran it: then who ran it may
        /// know better.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        concluded: bool,
    },
}

/// What waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queued {
    /// All that is needed to start it, its environment too, which goes with this.
    pub spec: Box<ExecSpec>,
    /// When it ends unless it was started.
    pub until_ms: u64,
    /// Start it only when fewer than this many run in the foreground.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running_max: Option<u64>,
    /// In which instance it is being started: from then on it is started in no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starting_in: Option<Generation>,
}

/// One instance of a sandbox of a project.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Whose it is.
    pub project: Project,
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// Which of its instances.
    pub generation: Generation,
}

impl From<&Sandbox> for Place {
    /// Its current instance.
    fn from(sandbox: &Sandbox) -> Self {
        Self { project: sandbox.project.clone(), sandbox: sandbox.id.clone(), generation: sandbox.generation }
    }
}

/// Who asked for what is known only from who runs it.
const FOUND: &str = "sandbox";

/// Why what was queued is lost that was being started when its instance went: nobody can tell whether it ran.
pub const START_UNKNOWN: &str = "start_unknown";

impl Execution {
    /// One that is asked for now.
    pub fn asked(id: ExecutionId, place: Place, spec: &ExecSpec, by: Actor, now_ms: u64, stage: Stage) -> Self {
        let Place { project, sandbox, generation } = place;
        Self {
            id,
            project,
            sandbox,
            version: 1,
            generation,
            argv: spec.told_argv(),
            cwd: spec.cwd.clone(),
            user: spec.user.clone(),
            tty: spec.tty.is_some(),
            detached: spec.detached,
            limit_ms: spec.limit_ms,
            by,
            asked_at_ms: now_ms,
            learnt_at_ms: now_ms,
            stage,
        }
    }

    /// One that is known only from who runs it.
    pub fn found(place: Place, status: ExecStatus, now_ms: u64) -> Self {
        let Place { project, sandbox, generation } = place;
        Self {
            id: status.id.clone(),
            project,
            sandbox,
            version: 1,
            generation,
            argv: status.argv.clone(),
            cwd: None,
            user: None,
            tty: false,
            detached: status.detached,
            limit_ms: None,
            by: Actor::part(FOUND),
            asked_at_ms: status.started_at_ms,
            learnt_at_ms: now_ms,
            stage: Stage::Started { status, concluded: false },
        }
    }

    /// What it is, once it was started.
    pub fn status(&self) -> Option<&ExecStatus> {
        match &self.stage {
            Stage::Queued(_) => None,
            Stage::Started { status, .. } => Some(status),
        }
    }

    /// What it waits with, while it does.
    pub fn queued(&self) -> Option<&Queued> {
        match &self.stage {
            Stage::Queued(queued) => Some(queued),
            Stage::Started { .. } => None,
        }
    }

    /// Whether it is known from who asked for it, and not only from who runs it.
    pub fn is_asked(&self) -> bool {
        self.by.who != FOUND
    }

    /// Whether it may run in an instance: it was started, or is being.
    pub fn may_run(&self) -> bool {
        self.queued().is_none_or(|queued| queued.starting_in.is_some())
    }

    /// Whether something will still become of it.
    pub fn is_open(&self) -> bool {
        self.status().is_none_or(|status| !status.state.is_final())
    }

    /// When it ended.
    pub fn ended_at_ms(&self) -> Option<u64> {
        let status = self.status().filter(|status| status.state.is_final())?;
        Some(status.ended_at_ms.unwrap_or(self.learnt_at_ms))
    }

    /// What was learnt about it, if it says more than what is known.
    ///
    /// An end stays as it is, unless it was only concluded. What was asked is kept from who knew it.
    #[must_use]
    pub fn learn(&self, news: &Self) -> Option<Self> {
        let better = match (&self.stage, &news.stage) {
            (Stage::Started { .. }, Stage::Queued(_)) => false,
            (Stage::Queued(_), _) => true,
            (Stage::Started { status, concluded }, Stage::Started { status: told, concluded: guessed }) => {
                // Why an instance ended is not why it was to end: the record knows that, and whether it goes on (X5).
                let only_lost = matches!(told.state, ExecState::Lost { .. });
                match (status.state.is_final(), told.state.is_final()) {
                    (false, true) if status.state == ExecState::Suspended && only_lost && !guessed => false,
                    // It was started after all.
                    (true, true) if *concluded && is_start(&status.state) => true,
                    (true, true) if only_lost && matches!(status.state, ExecState::Lost { .. }) => false,
                    (false, _) => news.generation >= self.generation,
                    (true, true) => *concluded && !guessed,
                    // It is there again, in another instance, with its memory; or it started after all.
                    (true, false) => *concluded && (news.generation > self.generation || is_start(&status.state)),
                }
            }
        };
        if !better {
            return None;
        }
        let knows_more = news.is_asked() || !self.is_asked();
        let asked = if knows_more && !news.argv.is_empty() { news } else { self };
        Some(Self {
            version: self.version + 1,
            generation: news.generation,
            asked_at_ms: self.asked_at_ms,
            learnt_at_ms: news.learnt_at_ms.max(self.learnt_at_ms),
            stage: news.stage.clone(),
            ..asked.clone()
        })
    }

    /// Ends it with this.
    pub fn end(&mut self, state: ExecState, now_ms: u64, concluded: bool) {
        let before = self.status().cloned();
        let asked_at_ms = self.asked_at_ms;
        let (id, argv, detached) = (self.id.clone(), self.argv.clone(), self.detached);
        let status = before.unwrap_or(ExecStatus {
            id,
            state: state.clone(),
            started_at_ms: asked_at_ms,
            ended_at_ms: None,
            output_bytes: 0,
            stdin_bytes: 0,
            pid: None,
            argv,
            detached,
        });
        let status = ExecStatus { state, ended_at_ms: Some(now_ms), pid: None, ..status };
        self.stage = Stage::Started { status, concluded };
        self.learnt_at_ms = now_ms;
    }

    /// The same, if its instance was ended to be saved, as the record tells that: suspended with its memory, or lost (X5).
    #[must_use]
    pub fn as_saved(&self, sandbox: &Sandbox) -> Self {
        let mut told = self.clone();
        if let Stage::Started { status, .. } = &mut told.stage
            && matches!(&status.state, ExecState::Lost { cause } if cause == EndCause::Saved.code())
        {
            let goes_on = sandbox.suspends() && self.generation == sandbox.generation;
            status.state =
                if goes_on { ExecState::Suspended } else { ExecState::Lost { cause: HIBERNATED.to_owned() } };
            status.ended_at_ms = status.ended_at_ms.filter(|_| !goes_on);
        }
        told
    }

    /// What its sandbox's record says about it: ended, if its instance cannot live any more. Whether that is news.
    ///
    /// A lost instance may come back as it was (L15), so it says nothing yet.
    pub fn settle(&mut self, sandbox: &Sandbox) -> bool {
        if !self.is_open() {
            return false;
        }
        let over = sandbox.deleted || sandbox.is_over();
        let started_in = match &self.stage {
            Stage::Queued(Queued { starting_in: None, .. }) if over => {
                let what = format!("the sandbox is gone: {}", sandbox.cause.cause.code());
                self.end(ExecState::Failed { what }, sandbox.phase_since_ms, false);
                return true;
            }
            Stage::Queued(Queued { starting_in: None, .. }) => return false,
            Stage::Queued(Queued { starting_in: Some(generation), .. }) => *generation,
            Stage::Started { .. } => self.generation,
        };
        let replaced = sandbox.generation > started_in;
        // What is saved with its memory is not running, and not lost before another instance goes without it.
        let suspended = self.status().is_some_and(|status| status.state == ExecState::Suspended);
        let goes_on = matches!(sandbox.memory, Some(Memory::Saving | Memory::Kept { .. } | Memory::Restored { .. }));
        let ended = match &sandbox.phase {
            Phase::Stopped => true,
            _ if suspended => !goes_on,
            Phase::Hibernating { .. } | Phase::Hibernated { .. } | Phase::Stopping { .. } => true,
            Phase::Provisioning { .. }
            | Phase::Resuming { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Lost
            | Phase::Failed { .. } => replaced,
        };
        if !ended && !over {
            return false;
        }
        if let (Phase::Hibernating { .. }, Some(status), false) = (&sandbox.phase, self.status(), suspended) {
            let status = sandbox.execution(status.clone());
            let concluded = status.state.is_final();
            self.learnt_at_ms = sandbox.phase_since_ms;
            self.stage = Stage::Started { status, concluded };
            return true;
        }
        let cause = match (&self.stage, &sandbox.phase) {
            (Stage::Queued(_), _) => START_UNKNOWN,
            (Stage::Started { .. }, Phase::Hibernating { .. } | Phase::Hibernated { .. }) => HIBERNATED,
            (Stage::Started { .. }, _) if suspended || matches!(sandbox.memory, Some(Memory::NotRestored { .. })) => {
                MEMORY_NOT_RESTORED
            }
            (Stage::Started { .. }, _) => sandbox.cause.cause.code(),
        };
        self.end(ExecState::Lost { cause: cause.to_owned() }, sandbox.phase_since_ms, true);
        true
    }
}

/// Whether a start did not succeed, as far as anybody could tell.
fn is_start(state: &ExecState) -> bool {
    match state {
        ExecState::Failed { .. } => true,
        ExecState::Lost { cause } => cause == START_UNKNOWN,
        ExecState::Running
        | ExecState::Suspended
        | ExecState::Exited { .. }
        | ExecState::Signalled { .. }
        | ExecState::OomKilled
        | ExecState::Cancelled
        | ExecState::TimedOut => false,
    }
}

/// What is kept of an output after its instance is gone: its beginning and its end, and where it was cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeptOutput {
    /// In order; no end among them.
    pub events: Vec<OutputEvent>,
}

/// Tells a chunk from a cut, and one stream from the other.
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const CUT: u8 = 3;

impl KeptOutput {
    /// What is to be read, bounded: this much of the beginning and this much of the end, with a cut between.
    pub fn bounded(events: impl IntoIterator<Item = OutputEvent>, head_bytes: usize, tail_bytes: usize) -> Self {
        let mut keeping = Keeping::new(head_bytes, tail_bytes);
        events.into_iter().for_each(|event| keeping.push(event));
        keeping.done()
    }

    /// As it is stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for event in &self.events {
            match event {
                OutputEvent::Chunk { offset, stream, at_ms, data } => {
                    bytes.push(if *stream == Stream::Stdout { STDOUT } else { STDERR });
                    bytes.extend(offset.to_be_bytes());
                    bytes.extend(at_ms.to_be_bytes());
                    bytes.extend((data.len() as u32).to_be_bytes());
                    bytes.extend(data);
                }
                OutputEvent::Cut { from, to } => {
                    bytes.push(CUT);
                    bytes.extend(from.to_be_bytes());
                    bytes.extend(to.to_be_bytes());
                }
                OutputEvent::End(_) => {}
            }
        }
        bytes
    }

    /// Reads it again; `None` when that is not what was stored.
    pub fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let mut events = Vec::new();
        while let Some((&kind, rest)) = bytes.split_first() {
            let (first, rest) = rest.split_first_chunk::<8>()?;
            let (second, rest) = rest.split_first_chunk::<8>()?;
            let (first, second) = (u64::from_be_bytes(*first), u64::from_be_bytes(*second));
            bytes = match kind {
                CUT => {
                    events.push(OutputEvent::Cut { from: first, to: second });
                    rest
                }
                STDOUT | STDERR => {
                    let (length, rest) = rest.split_first_chunk::<4>()?;
                    let (data, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
                    let stream = if kind == STDOUT { Stream::Stdout } else { Stream::Stderr };
                    events.push(OutputEvent::Chunk { offset: first, stream, at_ms: second, data: data.to_vec() });
                    rest
                }
                _ => return None,
            };
        }
        Some(Self { events })
    }

    /// From an offset on.
    pub fn since(&self, offset: u64) -> impl Iterator<Item = OutputEvent> + '_ {
        self.events.iter().filter_map(move |event| match event {
            OutputEvent::Chunk { offset: at, stream, at_ms, data } => {
                let known = usize::try_from(offset.saturating_sub(*at)).unwrap_or(usize::MAX);
                let data = data.get(known..).filter(|data| !data.is_empty())?.to_vec();
                Some(OutputEvent::Chunk { offset: at + known as u64, stream: *stream, at_ms: *at_ms, data })
            }
            OutputEvent::Cut { from, to } => {
                let from = (*from).max(offset);
                (from < *to).then_some(OutputEvent::Cut { from, to: *to })
            }
            OutputEvent::End(_) => None,
        })
    }
}

/// An output that is being read to be kept.
#[derive(Debug)]
pub struct Keeping {
    head: Vec<OutputEvent>,
    tail: std::collections::VecDeque<OutputEvent>,
    head_left: usize,
    tail_bytes: usize,
    tail_bytes_max: usize,
}

impl Keeping {
    /// Keeps this much of the beginning and this much of the end.
    pub fn new(head_bytes: usize, tail_bytes: usize) -> Self {
        Self {
            head: Vec::new(),
            tail: std::collections::VecDeque::new(),
            head_left: head_bytes,
            tail_bytes: 0,
            tail_bytes_max: tail_bytes,
        }
    }

    /// One more.
    pub fn push(&mut self, event: OutputEvent) {
        let length = match &event {
            OutputEvent::Chunk { data, .. } => data.len(),
            OutputEvent::Cut { .. } => 0,
            OutputEvent::End(_) => return,
        };
        if self.tail.is_empty() && length <= self.head_left {
            self.head_left -= length;
            self.head.push(event);
            return;
        }
        self.head_left = 0;
        self.tail_bytes += length;
        self.tail.push_back(event);
        while self.tail_bytes > self.tail_bytes_max && self.tail.len() > 1 {
            if let Some(OutputEvent::Chunk { data, .. }) = self.tail.pop_front() {
                self.tail_bytes -= data.len();
            }
        }
    }

    /// All that is kept, with a cut where something is missing.
    pub fn done(self) -> KeptOutput {
        let mut events: Vec<OutputEvent> = Vec::new();
        let mut next = 0;
        for event in self.head.into_iter().chain(self.tail) {
            let (from, to) = match &event {
                OutputEvent::Chunk { offset, data, .. } => (*offset, offset + data.len() as u64),
                OutputEvent::Cut { from, to } => (*from, *to),
                OutputEvent::End(_) => continue,
            };
            if from > next {
                events.push(OutputEvent::Cut { from: next, to: from });
            }
            next = to;
            // Two cuts beside each other are one.
            match (events.last_mut(), event) {
                (Some(OutputEvent::Cut { to, .. }), OutputEvent::Cut { to: more, .. }) => *to = more,
                (_, event) => events.push(event),
            }
        }
        KeptOutput { events }
    }
}
