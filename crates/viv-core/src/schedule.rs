//! Schedules (L17): what is run in a sandbox when, and how each occurrence is accounted for.
//!
//! ```text
//!   next_at ──due──► run ──────────────► last: exited, lost, not started …
//!              │      ▲ one at a time
//!              │      └── waiting: occurrences that nobody was there for, to be made up for (policy all)
//!              └────► skipped: overlap, held, draining, missed
//! ```
//!
//! Invariants:
//!
//! - `next_at_ms` only grows, and in the same step in which an occurrence becomes a run or is skipped: so every
//!   occurrence is one of the two, once.
//! - The execution of an occurrence has an id that is made of schedule and occurrence, so a start that is repeated finds
//!   what the first one started.
//! - A run names the generation that it is started in before it is started, and is never started in another one: what
//!   was under way when that generation was lost is `lost`, not repeated.
//!
//! When an expression is due is told by who knows calendars (`viv-cron`), as a function from one moment to the next.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::exec::{ExecSpec, ExecState};
use crate::id::{ExecutionId, Generation, SandboxId, ScheduleId};
use crate::lifecycle::{Actor, RestAt};
use crate::spec::Project;

/// Most schedules of one sandbox.
pub const SCHEDULES_MAX: u64 = 64;

/// An occurrence that is noticed later than this was missed. Less than a minute, so that no two of one schedule are on
/// time at once.
pub const LATE_MS: u64 = 59_999;

/// Most occurrences that are made up for after nobody was there: the latest.
pub const MAKE_UP_MAX: usize = 24;

/// How far back is looked for occurrences to make up for.
pub const MAKE_UP_SPAN_MS: u64 = 24 * 3600 * 1000;

/// What becomes of occurrences at which no daemon was there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissedRuns {
    /// They are left out.
    #[default]
    Skip,
    /// One run stands for all of them.
    Once,
    /// Each is run, one after the other: the latest [`MAKE_UP_MAX`] of the last day.
    All,
}

/// A schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// Its identity.
    pub id: ScheduleId,
    /// Whose it is: its sandbox's.
    pub project: Project,
    /// Where it runs.
    pub sandbox: SandboxId,
    /// Grows with every change; writes compare it.
    pub version: u64,
    /// When, as a cron expression.
    pub cron: String,
    /// By which clock, as a name of the IANA database.
    pub zone: String,
    /// What.
    pub command: ExecSpec,
    /// What becomes of occurrences at which no daemon was there.
    pub missed: MissedRuns,
    /// Whether it comes due.
    pub enabled: bool,
    /// Who made it.
    pub made_by: Actor,
    /// When.
    pub made_at_ms: u64,
    /// When it is due next; nothing while it is disabled.
    pub next_at_ms: Option<u64>,
    /// Occurrences that are to be made up for, oldest first.
    #[serde(default)]
    pub waiting: Vec<u64>,
    /// What is under way.
    #[serde(default)]
    pub run: Option<Run>,
    /// What came last.
    #[serde(default)]
    pub last: Option<LastRun>,
    /// How many occurrences were run.
    #[serde(default)]
    pub runs: u64,
    /// How many were not.
    #[serde(default)]
    pub skipped: u64,
}

/// Why there is a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunReason {
    /// Its time came.
    Due,
    /// Its time had come while nobody was there.
    MadeUp,
    /// Somebody asked for it.
    Asked,
}

/// A run that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The occurrence: when it was due, or was asked for.
    pub at_ms: u64,
    /// Why.
    pub reason: RunReason,
    /// Its execution, whether it was started or not.
    pub execution: ExecutionId,
    /// Since when.
    pub began_at_ms: u64,
    /// Where the sandbox was, if it has to be woken: it goes back there.
    pub woken_from: Option<RestAt>,
    /// When it asked for the sandbox to run: who used it later than that was somebody else.
    pub entered_at_ms: Option<u64>,
    /// In which generation it was started, or is about to be.
    pub generation: Option<Generation>,
    /// What came of it, once that is known and the sandbox has yet to go back.
    pub outcome: Option<RunOutcome>,
}

/// What came of an occurrence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum RunOutcome {
    /// The command ended with a code.
    Exited {
        /// The code.
        code: i32,
    },
    /// A signal ended it.
    Signalled {
        /// Its number.
        signal: i32,
    },
    /// The kernel ended it for memory.
    OomKilled,
    /// Its time limit passed.
    TimedOut,
    /// Somebody ended it.
    Cancelled,
    /// It was started, and its instance ended before it did.
    Lost {
        /// Why.
        what: String,
    },
    /// It could not be started: the sandbox did not come up, or there is no such program.
    NotStarted {
        /// Why.
        what: String,
    },
    /// It was left out.
    Skipped {
        /// Why.
        why: SkipReason,
    },
}

/// Why an occurrence was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// A user stopped the sandbox (L9).
    Held,
    /// The one before was still under way.
    Overlap,
    /// Nobody was there.
    Missed,
    /// The daemon takes no new work (L21).
    Draining,
}

impl SkipReason {
    /// A stable word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Overlap => "overlap",
            Self::Missed => "missed",
            Self::Draining => "draining",
        }
    }
}

impl RunOutcome {
    /// A stable word.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Exited { .. } => "exited",
            Self::Signalled { .. } => "signalled",
            Self::OomKilled => "oom_killed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Lost { .. } => "lost",
            Self::NotStarted { .. } => "not_started",
            Self::Skipped { .. } => "skipped",
        }
    }

    /// What the end of an execution means; `None` while it runs, or will.
    pub fn of(state: &ExecState) -> Option<Self> {
        Some(match state {
            ExecState::Running | ExecState::Suspended => return None,
            ExecState::Exited { code } => Self::Exited { code: *code },
            ExecState::Signalled { signal } => Self::Signalled { signal: *signal },
            ExecState::OomKilled => Self::OomKilled,
            ExecState::TimedOut => Self::TimedOut,
            ExecState::Cancelled => Self::Cancelled,
            ExecState::Failed { what } => Self::NotStarted { what: what.clone() },
            ExecState::Lost { cause } => Self::Lost { what: cause.clone() },
        })
    }
}

/// An occurrence that is accounted for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRun {
    /// The occurrence.
    pub at_ms: u64,
    /// Its execution, if there was to be one.
    pub execution: Option<ExecutionId>,
    /// When that was settled.
    pub ended_at_ms: u64,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: RunOutcome,
}

/// Occurrences that were left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// The first of them.
    pub at_ms: u64,
    /// How many; at least so many when nobody was there for long.
    pub count: u64,
    /// Why.
    pub why: SkipReason,
}

impl Schedule {
    /// When it has to be looked at.
    pub fn due_at_ms(&self) -> Option<u64> {
        if self.run.is_none() && !self.waiting.is_empty() { Some(0) } else { self.next_at_ms }
    }

    /// Switches it on or off. What is under way goes on; what was to be made up for is not, once it is off.
    pub fn enable(&mut self, enabled: bool, now_ms: u64, next: &dyn Fn(u64) -> Option<u64>) {
        self.enabled = enabled;
        self.next_at_ms = if enabled { next(now_ms) } else { None };
        if !enabled {
            self.waiting.clear();
        }
    }

    /// Its time has come: the occurrences up to now become a run, wait for their turn, or are left out, and it is due
    /// again after now. Answers with those that were left out.
    pub fn come_due(&mut self, now_ms: u64, next: &dyn Fn(u64) -> Option<u64>) -> Vec<Left> {
        let mut left = Vec::new();
        if let Some(due_ms) = self.next_at_ms.filter(|due_ms| *due_ms <= now_ms) {
            let late_ms = now_ms.saturating_sub(LATE_MS);
            let on_time = next(late_ms.max(due_ms) - 1).filter(|at_ms| *at_ms <= now_ms);
            let missed = (due_ms < late_ms).then_some(due_ms);
            if self.run.is_some() || !self.waiting.is_empty() {
                left.push(Left { at_ms: due_ms, count: 1, why: SkipReason::Overlap });
            } else {
                left.extend(self.make_up(missed, on_time, late_ms, next));
                self.waiting.extend(on_time);
            }
            self.next_at_ms = next(now_ms);
        }
        for left in &left {
            self.left_out(*left, now_ms);
        }
        if self.run.is_none() && !self.waiting.is_empty() {
            let at_ms = self.waiting.remove(0);
            let reason = if at_ms < now_ms.saturating_sub(LATE_MS) { RunReason::MadeUp } else { RunReason::Due };
            self.run = Some(self.run_of(at_ms, reason, now_ms));
        }
        left
    }

    /// What becomes of those that were missed.
    fn make_up(
        &mut self,
        missed: Option<u64>,
        on_time: Option<u64>,
        late_ms: u64,
        next: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<Left> {
        let first_ms = missed?;
        let mut count = 1;
        match self.missed {
            MissedRuns::Skip => {}
            MissedRuns::Once if on_time.is_some() => {}
            MissedRuns::Once => {
                self.waiting.push(first_ms);
                return None;
            }
            MissedRuns::All => {
                let begin_ms = first_ms.max(late_ms.saturating_sub(MAKE_UP_SPAN_MS));
                let mut at_ms = next(begin_ms - 1);
                let mut found = 0;
                while let Some(found_ms) = at_ms.filter(|at_ms| *at_ms < late_ms) {
                    found += 1;
                    self.waiting.push(found_ms);
                    if self.waiting.len() > MAKE_UP_MAX {
                        self.waiting.remove(0);
                    }
                    at_ms = next(found_ms);
                }
                count = found - self.waiting.len() as u64 + u64::from(begin_ms > first_ms);
                if count == 0 {
                    return None;
                }
            }
        }
        Some(Left { at_ms: first_ms, count, why: SkipReason::Missed })
    }

    fn left_out(&mut self, left: Left, now_ms: u64) {
        self.skipped += left.count;
        // What is under way, or was to be, is what people want to see last.
        if self.run.is_none() {
            let outcome = RunOutcome::Skipped { why: left.why };
            self.last = Some(LastRun { at_ms: left.at_ms, execution: None, ended_at_ms: now_ms, outcome });
        }
    }

    /// Somebody asks for a run now. `false` while one is under way.
    pub fn ask(&mut self, now_ms: u64) -> bool {
        if self.run.is_some() {
            return false;
        }
        self.run = Some(self.run_of(now_ms, RunReason::Asked, now_ms));
        true
    }

    fn run_of(&self, at_ms: u64, reason: RunReason, now_ms: u64) -> Run {
        let execution = execution_of(&self.id, at_ms, reason);
        Run {
            at_ms,
            reason,
            execution,
            began_at_ms: now_ms,
            woken_from: None,
            entered_at_ms: None,
            generation: None,
            outcome: None,
        }
    }

    /// The run that is under way came to this.
    pub fn finish(&mut self, outcome: RunOutcome, now_ms: u64) {
        let Some(run) = self.run.take() else { return };
        match outcome {
            RunOutcome::Skipped { .. } => self.skipped += 1,
            RunOutcome::Exited { .. }
            | RunOutcome::Signalled { .. }
            | RunOutcome::OomKilled
            | RunOutcome::TimedOut
            | RunOutcome::Cancelled
            | RunOutcome::Lost { .. }
            | RunOutcome::NotStarted { .. } => self.runs += 1,
        }
        let execution = run.generation.is_some().then_some(run.execution);
        self.last = Some(LastRun { at_ms: run.at_ms, execution, ended_at_ms: now_ms, outcome });
    }
}

/// The execution of an occurrence: made of what it is of, so that it is the same whoever starts it.
fn execution_of(schedule: &ScheduleId, at_ms: u64, reason: RunReason) -> ExecutionId {
    let kind = match reason {
        RunReason::Due | RunReason::MadeUp => 'x',
        RunReason::Asked => 'a',
    };
    ExecutionId::derived(schedule.as_str(), &format!("{kind}{at_ms}"))
}
