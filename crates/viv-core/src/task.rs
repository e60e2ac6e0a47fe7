//! Tasks (K1 to K7): commands in a sandbox that end in exactly one way, and end when they are told to.
//!
//! ```text
//!   queued ──► preparing ──► running ⇄ committing
//!      │           │            │          │        a stop, a limit, an end: `ending` says which, and from then on
//!      └───────────┴─────┬──────┴──────────┘        nothing begins any more; what runs is killed, and seen gone
//!                        ▼
//!   succeeded · failed · stopped · timed_out · inactive · step_limit · effect_unknown · lost
//! ```
//!
//! Invariants:
//!
//! - A task changes only by [`step`], which is total, and its row is written by compare-and-set: so a stop, a limit and
//!   the grant of an effect are put into an order, and after the first of `ending` no effect is granted (K5).
//! - A stop is legal in every state. It is acknowledged when the state is final, and that is so only when everything that
//!   the task started was seen to be gone (K2).
//! - Executions are named in the row before they are started, with ids that are made of task, run and step: a start that
//!   is repeated finds what the first one started.
//! - What an effect came to is done, failed or unknown, and what is unknown is never granted again (K5).

#[cfg(test)]
mod page;
mod step;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::exec::{ExecSpec, ExecState};
use crate::id::{ExecutionId, Generation, RequestId, SandboxId, SnapshotId, TaskId};
use crate::lifecycle::Actor;
use crate::spec::{Name, Policy, Project, SandboxSpec};

pub use step::{TaskDenial, TaskEvent, TaskStepped, step};

/// Most steps of one run.
pub const STEPS_MAX: usize = 64;

/// Most effects that a task declares.
pub const EFFECTS_MAX: usize = 32;

/// Most grants of one task: what is repeatable is not so without end.
pub const GRANTS_MAX: usize = 1_000;

/// Most files that a task brings along.
pub const FILES_MAX: usize = 64;

/// Most runs of one task.
pub const RUNS_MAX: u32 = 1_000;

/// Nothing is heard of a task for so long before it ends as inactive (K4).
pub const INACTIVITY_MS_DEFAULT: u64 = 60_000;

/// How long a task may take in all (K4).
pub const TOTAL_MS_DEFAULT: u64 = 5 * 60 * 1000;

/// How many steps an agent may report (K4).
pub const REPORTS_MAX_DEFAULT: u64 = 1_000;

/// How long an effect that is in flight may take to end by itself once its task is to end; then it is killed (K5).
pub const EFFECT_GRACE_MS: u64 = 2_000;

/// Where a task is: K1's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It waits for its turn.
    Queued,
    /// Its sandbox is made ready, and filled.
    Preparing,
    /// A step runs.
    Running,
    /// And an effect of it, through the gate.
    Committing,
    /// Every step exited with 0.
    Succeeded,
    /// One did not, or could not be started.
    Failed,
    /// Somebody stopped it.
    Stopped,
    /// It took too long.
    TimedOut,
    /// It was silent for too long.
    Inactive,
    /// It reported too many steps.
    StepLimit,
    /// It ended, and whether an effect of it happened is not known.
    EffectUnknown,
    /// Its sandbox was lost under it.
    Lost,
}

impl TaskState {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Queued,
        Self::Preparing,
        Self::Running,
        Self::Committing,
        Self::Succeeded,
        Self::Failed,
        Self::Stopped,
        Self::TimedOut,
        Self::Inactive,
        Self::StepLimit,
        Self::EffectUnknown,
        Self::Lost,
    ];

    /// A stable word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Preparing => "preparing",
            Self::Running => "running",
            Self::Committing => "committing",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Stopped => "stopped",
            Self::TimedOut => "timed_out",
            Self::Inactive => "inactive",
            Self::StepLimit => "step_limit",
            Self::EffectUnknown => "effect_unknown",
            Self::Lost => "lost",
        }
    }

    /// Whether nothing of it runs, and nothing will.
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Preparing | Self::Running | Self::Committing => false,
            Self::Succeeded
            | Self::Failed
            | Self::Stopped
            | Self::TimedOut
            | Self::Inactive
            | Self::StepLimit
            | Self::EffectUnknown
            | Self::Lost => true,
        }
    }
}

/// A task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Its identity.
    pub id: TaskId,
    /// Whose it is.
    pub project: Project,
    /// Grows with every change; writes compare it.
    pub version: u64,
    /// Where it runs.
    pub sandbox: SandboxId,
    /// Of what its sandbox is made, when it is not somebody else's.
    #[serde(default)]
    pub make: Option<Box<MakeSandbox>>,
    /// How many sandboxes took the place of its first.
    #[serde(default)]
    pub made: u32,
    /// What is brought into the sandbox.
    #[serde(default)]
    pub files: Vec<TaskFile>,
    /// And what is cloned there.
    #[serde(default)]
    pub source: Option<GitSource>,
    /// What is run, one after the other.
    pub steps: Vec<ExecSpec>,
    /// When it ends against its will.
    pub limits: TaskLimits,
    /// What it may do to the world, through the gate.
    #[serde(default)]
    pub effects: Vec<EffectRule>,
    /// What is handed out with a grant only (K5). Never told (S6).
    #[serde(default)]
    pub credentials: BTreeMap<String, String>,
    /// Whether its sandbox stays.
    pub keep_alive: bool,
    /// Who made it.
    pub made_by: Actor,
    /// When.
    pub made_at_ms: u64,
    /// What the request hashed to that made it, if that can be repeated.
    #[serde(default)]
    pub body_hash: Option<String>,
    /// Which run this is: the first one is 1, each `continue` is another.
    pub run: u32,
    /// Where it is.
    pub state: TaskState,
    /// Which step is next, or runs.
    pub step: u32,
    /// In which generation it runs.
    #[serde(default)]
    pub generation: Option<Generation>,
    /// How it came by its sandbox in this run.
    #[serde(default)]
    pub came: Option<Came>,
    /// What it started, or was about to start, in this run.
    #[serde(default)]
    pub executions: Vec<TaskExecution>,
    /// What it is to end as. From then on nothing begins.
    #[serde(default)]
    pub ending: Option<Ending>,
    /// Who wants it to stop.
    #[serde(default)]
    pub stop: Option<StopAsked>,
    /// Effects that were granted, of all runs.
    #[serde(default)]
    pub grants: Vec<Grant>,
    /// Steps that the agent reported in this run.
    #[serde(default)]
    pub reported: u64,
    /// By which request it did so last: heard again, it is not counted again.
    #[serde(default)]
    pub reported_by: Option<RequestId>,
    /// What it said last about them.
    #[serde(default)]
    pub note: Option<String>,
    /// The agent's own session, kept from run to run while its sandbox is the same (K6).
    #[serde(default)]
    pub session: Option<String>,
    /// When it has to be over.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
    /// Somebody says that this run should not have been ended (O2).
    #[serde(default)]
    pub mark: Option<Mark>,
    /// When what happened in this run.
    pub times: TaskTimes,
}

/// Of what a sandbox is made for a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MakeSandbox {
    /// What it is called.
    #[serde(default)]
    pub name: Option<Name>,
    /// What its instances are made of.
    pub spec: SandboxSpec,
    /// By which rules it lives.
    pub policy: Policy,
    /// Free labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What it begins with.
    #[serde(default)]
    pub snapshot: Option<SnapshotId>,
}

/// A file that a task brings along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFile {
    /// Where it goes.
    pub path: String,
    /// Its content.
    pub content: String,
    /// Its permission bits.
    #[serde(default)]
    pub mode: Option<u32>,
}

/// A repository that is cloned inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GitSource {
    /// From where, as seen from inside: a URL, a folder or a bundle.
    pub url: String,
    /// What is checked out.
    #[serde(default)]
    pub reference: Option<String>,
    /// Where to; what is there already stays.
    pub path: String,
}

/// When a task ends against its will. What is not said is not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskLimits {
    /// Silent for so long.
    #[serde(default)]
    pub inactivity_ms: Option<u64>,
    /// In all, from when it is taken up.
    #[serde(default)]
    pub total_ms: Option<u64>,
    /// So many steps reported.
    #[serde(default)]
    pub reports_max: Option<u64>,
}

impl Default for TaskLimits {
    fn default() -> Self {
        Self {
            inactivity_ms: Some(INACTIVITY_MS_DEFAULT),
            total_ms: Some(TOTAL_MS_DEFAULT),
            reports_max: Some(REPORTS_MAX_DEFAULT),
        }
    }
}

/// Limits as somebody says them: 0 is never, and what is not said is as it was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaidLimits {
    /// Silent for so long.
    pub inactivity_ms: Option<u64>,
    /// In all.
    pub total_ms: Option<u64>,
    /// So many steps reported.
    pub reports_max: Option<u64>,
}

impl SaidLimits {
    /// What holds then.
    #[must_use]
    pub fn over(self, before: TaskLimits) -> TaskLimits {
        TaskLimits {
            inactivity_ms: said_over(self.inactivity_ms, before.inactivity_ms),
            total_ms: said_over(self.total_ms, before.total_ms),
            reports_max: said_over(self.reports_max, before.reports_max),
        }
    }
}

/// 0 is none.
fn said_over(said: Option<u64>, before: Option<u64>) -> Option<u64> {
    said.map_or(before, |said| Some(said).filter(|&said| said > 0))
}

/// What is said anew of steps that stay; what is not said is as it was.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepChanges {
    /// Added to what they have.
    pub env: BTreeMap<String, String>,
    /// Where they start.
    pub cwd: Option<String>,
    /// As whom.
    pub user: Option<String>,
    /// How long each may take; 0 is never.
    pub limit_ms: Option<u64>,
}

impl StepChanges {
    /// The steps as they are then.
    pub fn of(&self, steps: &[ExecSpec]) -> Vec<ExecSpec> {
        let changed = |step: &ExecSpec| {
            let mut step = step.clone();
            step.env.extend(self.env.clone());
            step.cwd = self.cwd.clone().or(step.cwd);
            step.user = self.user.clone().or(step.user);
            step.limit_ms = said_over(self.limit_ms, step.limit_ms);
            step
        };
        steps.iter().map(changed).collect()
    }
}

/// Something that a task may do to the world.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EffectRule {
    /// What it is called.
    pub name: String,
    /// Whether it may be done again after it was done.
    #[serde(default)]
    pub repeatable: bool,
}

/// How a run came by its sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Came {
    /// It was made, or resumed, for it.
    Made,
    /// It was there, and was probed.
    Reused,
    /// The one of the run before was not there any more: it was made again, from what was saved of it if anything was.
    Recreated,
}

/// An execution of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskExecution {
    /// Which.
    pub id: ExecutionId,
    /// Of which step; none prepares.
    pub step: Option<u32>,
    /// In which generation.
    pub generation: Generation,
    /// Since when, once it was seen to run.
    #[serde(default)]
    pub started_at_ms: Option<u64>,
    /// How it ended.
    #[serde(default)]
    pub ended: Option<ExecState>,
}

/// What a task is to end as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// As what; what is not known of an effect weighs more.
    pub outcome: TaskState,
    /// Why, as a stable word.
    pub cause: TaskCause,
    /// In words.
    #[serde(default)]
    pub message: Option<String>,
    /// Since when.
    pub at_ms: u64,
}

/// Why a task ended: a closed list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskCause {
    /// Every step exited with 0.
    Done,
    /// A step exited with another code.
    Exited,
    /// A signal ended a step.
    Signalled,
    /// The kernel ended a step for memory.
    OomKilled,
    /// A step could not be started: no such program, no such folder.
    NotStarted,
    /// Somebody cancelled its execution.
    Cancelled,
    /// Its sandbox could not be made ready, or filled.
    NotPrepared,
    /// Somebody stopped it.
    UserStop,
    /// It took too long in all.
    TotalLimit,
    /// A step took too long.
    StepTimeLimit,
    /// Nothing was heard of it.
    Inactivity,
    /// It reported too many steps.
    Reports,
    /// Its sandbox ended, or was replaced, under it.
    SandboxLost,
}

impl TaskCause {
    /// A stable word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Exited => "exited",
            Self::Signalled => "signalled",
            Self::OomKilled => "oom_killed",
            Self::NotStarted => "not_started",
            Self::Cancelled => "cancelled",
            Self::NotPrepared => "not_prepared",
            Self::UserStop => "user_stop",
            Self::TotalLimit => "total_limit",
            Self::StepTimeLimit => "step_time_limit",
            Self::Inactivity => "inactivity",
            Self::Reports => "reports",
            Self::SandboxLost => "sandbox_lost",
        }
    }
}

/// Somebody's word that a task should not have been ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Whose.
    pub by: Actor,
    /// Since when.
    pub at_ms: u64,
    /// In words.
    #[serde(default)]
    pub why: Option<String>,
}

/// Who wanted a task to stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopAsked {
    /// Who.
    pub by: Actor,
    /// When it was durable.
    pub at_ms: u64,
    /// The effect that it found in flight (K5).
    #[serde(default)]
    pub effect_in_flight: Option<String>,
}

/// An effect that was granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The request that it answers: heard again, it is the same grant.
    pub request: RequestId,
    /// What.
    pub effect: String,
    /// In which run.
    pub run: u32,
    /// Since when.
    pub at_ms: u64,
    /// When its outcome was known, or given up.
    #[serde(default)]
    pub ended_at_ms: Option<u64>,
    /// What came of it.
    pub outcome: EffectOutcome,
}

/// What came of an effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum EffectOutcome {
    /// It runs, or is about to.
    InFlight,
    /// Its command exited with 0.
    Done,
    /// Its command did not, or was never begun.
    Failed {
        /// Why.
        what: String,
    },
    /// Its tree is gone and nobody said what came of it.
    Unknown,
}

impl EffectOutcome {
    /// A stable word.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::InFlight => "in_flight",
            Self::Done => "done",
            Self::Failed { .. } => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// When what happened in a run (K7).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TaskTimes {
    /// It was asked for.
    pub requested_at_ms: u64,
    /// It was taken up.
    pub taken_up_at_ms: Option<u64>,
    /// Its sandbox was ready and filled.
    pub prepared_at_ms: Option<u64>,
    /// Its first step ran.
    pub started_at_ms: Option<u64>,
    /// It wrote something for the first time.
    pub output_at_ms: Option<u64>,
    /// It reported something last.
    pub reported_at_ms: Option<u64>,
    /// Its way out was cut.
    pub cut_at_ms: Option<u64>,
    /// Everything that it started was seen to be gone.
    pub killed_at_ms: Option<u64>,
    /// And its sandbox too, unless that stays: its state is final.
    pub confirmed_at_ms: Option<u64>,
}

/// What is to be done about a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskWork {
    /// Its sandbox is to be made ready.
    Prepare,
    /// Its step is to be started, and followed.
    Run,
    /// All of it is to be ended.
    End,
    /// Nothing.
    Nothing,
}

/// A task that somebody wants.
#[derive(Debug, Clone)]
pub struct NewTask {
    /// Its identity.
    pub id: TaskId,
    /// Whose it is.
    pub project: Project,
    /// A sandbox that is there; otherwise it is made.
    pub sandbox: Option<SandboxId>,
    /// Of what.
    pub make: Option<Box<MakeSandbox>>,
    /// What is brought into the sandbox.
    pub files: Vec<TaskFile>,
    /// And what is cloned there.
    pub source: Option<GitSource>,
    /// What is run.
    pub steps: Vec<ExecSpec>,
    /// When it ends against its will.
    pub limits: TaskLimits,
    /// What it may do to the world.
    pub effects: Vec<EffectRule>,
    /// What is handed out with a grant only.
    pub credentials: BTreeMap<String, String>,
    /// Whether its sandbox stays.
    pub keep_alive: bool,
    /// Who asks.
    pub by: Actor,
    /// What the request hashed to, if it can be repeated.
    pub body_hash: Option<String>,
}

impl Task {
    /// As it begins.
    pub fn new(new: NewTask, now_ms: u64) -> Self {
        let sandbox = new.sandbox.unwrap_or_else(|| sandbox_of(&new.id, 0));
        Self {
            id: new.id,
            project: new.project,
            version: 1,
            sandbox,
            make: new.make,
            made: 0,
            files: new.files,
            source: new.source,
            steps: new.steps,
            limits: new.limits,
            effects: new.effects,
            credentials: new.credentials,
            keep_alive: new.keep_alive,
            made_by: new.by,
            made_at_ms: now_ms,
            body_hash: new.body_hash,
            run: 1,
            state: TaskState::Queued,
            step: 0,
            generation: None,
            came: None,
            executions: Vec::new(),
            ending: None,
            stop: None,
            grants: Vec::new(),
            reported: 0,
            reported_by: None,
            note: None,
            session: None,
            deadline_ms: None,
            mark: None,
            times: TaskTimes { requested_at_ms: now_ms, ..TaskTimes::default() },
        }
    }

    /// Whether somebody else's decision ended it, a user's or a limit's: only such an end can be mistaken (O2).
    pub fn was_ended(&self) -> bool {
        self.ending.as_ref().is_some_and(|ending| match ending.outcome {
            TaskState::Stopped | TaskState::TimedOut | TaskState::Inactive | TaskState::StepLimit => true,
            TaskState::Queued
            | TaskState::Preparing
            | TaskState::Running
            | TaskState::Committing
            | TaskState::Succeeded
            | TaskState::Failed
            | TaskState::EffectUnknown
            | TaskState::Lost => false,
        })
    }

    /// Whether it holds its sandbox for itself: others of the same sandbox wait for their turn.
    pub fn is_at_work(&self) -> bool {
        match self.state {
            TaskState::Preparing | TaskState::Running | TaskState::Committing => true,
            // One that is to end before its turn came has nothing to end in there.
            TaskState::Queued
            | TaskState::Succeeded
            | TaskState::Failed
            | TaskState::Stopped
            | TaskState::TimedOut
            | TaskState::Inactive
            | TaskState::StepLimit
            | TaskState::EffectUnknown
            | TaskState::Lost => false,
        }
    }

    /// What is to be done about it.
    pub fn work(&self) -> TaskWork {
        if self.state.is_final() {
            return TaskWork::Nothing;
        }
        if self.ending.is_some() {
            return TaskWork::End;
        }
        match self.state {
            TaskState::Queued | TaskState::Preparing => TaskWork::Prepare,
            TaskState::Running | TaskState::Committing => TaskWork::Run,
            TaskState::Succeeded
            | TaskState::Failed
            | TaskState::Stopped
            | TaskState::TimedOut
            | TaskState::Inactive
            | TaskState::StepLimit
            | TaskState::EffectUnknown
            | TaskState::Lost => TaskWork::Nothing,
        }
    }

    /// The effect that is in flight.
    pub fn in_flight(&self) -> Option<&Grant> {
        self.grants.iter().find(|grant| grant.outcome == EffectOutcome::InFlight)
    }

    /// The execution of a step in this run, or of its preparation: the same whoever starts it.
    pub fn execution_of(&self, step: Option<u32>) -> ExecutionId {
        let what = step.map_or_else(|| "p".to_owned(), |step| format!("s{step}"));
        ExecutionId::derived(self.id.as_str(), &format!("r{}{what}", self.run))
    }

    /// The sandbox that is made for it when the one that it has is gone: the same until it moved there.
    pub fn next_sandbox(&self) -> SandboxId {
        sandbox_of(&self.id, self.made + 1)
    }

    /// A step as it is run: it knows which task it is of.
    pub fn command(&self, step: u32) -> Option<ExecSpec> {
        let mut spec = self.steps.get(step as usize)?.clone();
        spec.env.insert("VIV_TASK".to_owned(), self.id.to_string());
        spec.env.insert("VIV_TASK_RUN".to_owned(), self.run.to_string());
        if let Some(session) = &self.session {
            spec.env.insert("VIV_TASK_SESSION".to_owned(), session.clone());
        }
        if spec.cwd.is_none() {
            spec.cwd = self.source.as_ref().map(|source| source.path.clone());
        }
        Some(spec)
    }
}

/// The sandbox that is made for a task, counted.
fn sandbox_of(task: &TaskId, count: u32) -> SandboxId {
    SandboxId::derived(task.as_str(), &format!("t{count}"))
}
