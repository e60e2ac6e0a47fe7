//! The life of a sandbox: one record, one total [`step`], one outstanding effect.
//!
//! ```text
//!             ┌──────────────────────── an entry ─────────────────────────┐
//!             ▼                                                           │
//!   provisioning ──► verifying ──► ready ──► frozen ──► hibernating ──► hibernated
//!        │  ▲  ▲        │ ▲ ▲       │ ▲ └───────────────────▲               │
//!        │  │  └────────┘ │ └───────┘ │ (a finding)                         ▼
//!        │  │ (bounded)   └─ thawed ──┘                                 resuming ──► verifying
//!        ▼  │
//!     failed, lost       from everywhere: stopping ──► stopped
//! ```
//!
//! The exact edges are generated from this code into `docs/lifecycle.md`.
//!
//! Three things are kept apart (T8): what is [`Desired`], which [`Phase`] the record is in, and what was observed
//! ([`Evidence`], [`Observed`]). The one word that people read, [`Status`], is computed from them and never stored.
//!
//! Invariants:
//!
//! - A transient phase carries [`Work`], which names one effect, its operation id and its deadline: [`outstanding`]
//!   reads it from the record, so nothing beside the record has to be kept in step with it.
//! - `Ready` is entered only from `Verifying`, and only by a report in which every probe was well (T2).
//! - `Stopped` and `Hibernated` are entered only by an absence that was seen (L8).
//! - The generation never shrinks, and grows only when an instance is to be made, for somebody who waits for it (T5).
//! - Nothing but an [`Entry`] leads from `Hibernated`, `Lost` or `Failed` to a new instance (L4).
//! - After a delete nothing is accepted but what finishes it (L9).

mod cause;
mod effect;
mod event;
mod evidence;
mod memory;
mod phase;
mod spare;
mod status;
mod step;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use cause::{Actor, Cause, Caused};
pub use effect::{Effect, outstanding};
pub use event::{Event, Failure, FailureKind, Outcome, RestAt, Seen};
pub use evidence::{Check, Evidence, Finding, Observed, PortCheck, ServiceCheck};
pub use memory::{KeptFrozen, MEMORY_NOT_RESTORED, Memory};
pub use phase::{FreezeStep, HibernateStep, MakeStep, Phase, PhaseName, ResumeStep, VerifyStep, Work};
pub use status::{EVIDENCE_MS_MAX, Status, status};
pub use step::{Accepted, Denial, Happened, Ignored, Stepped, claim, step};

use crate::exec::{ExecState, ExecStatus};
use crate::hook::HookPoint;
use crate::id::{Generation, OperationId, SandboxId, SnapshotId};
use crate::planted::{Planted, is_planted};
use crate::service::ServiceRun;
use crate::spec::{Name, Policy, Project, SandboxSpec, ServiceName};

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Desired {
    /// That it runs.
    Running,
    /// That it is saved and costs nothing.
    Hibernated,
    /// That nothing is left of it.
    Gone,
}

/// Who wants it to run and has not been answered. It is durable, so it is looked at again when a transition ends (L3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// What kind of entry.
    pub kind: EntryKind,
    /// Who.
    pub by: Actor,
    /// When.
    pub at_ms: u64,
}

/// The closed list of what may make a sandbox run (L4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// It was created.
    Create,
    /// Somebody asked for it.
    Ensure,
    /// A task starts in it.
    Task,
    /// Traffic that may wake it.
    Gateway,
    /// A schedule is due.
    Schedule,
}

impl EntryKind {
    /// Whether it is somebody's explicit will, which alone undoes a stop by a user (L9).
    pub fn is_explicit(self) -> bool {
        match self {
            Self::Create | Self::Ensure | Self::Task => true,
            Self::Gateway | Self::Schedule => false,
        }
    }
}

/// A lease that keeps a sandbox from idling (L7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepAwake {
    /// What for.
    pub reason: String,
    /// Until when.
    pub until_ms: u64,
}

/// A command that ran when its sandbox was saved (X5): it is lost, or suspended until its memory is restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostExecution {
    /// In which generation.
    pub generation: Generation,
    /// How it ended.
    #[serde(flatten)]
    pub status: ExecStatus,
}

/// Why a command is lost that ran when its sandbox was saved without its memory (X5).
pub const HIBERNATED: &str = "hibernated";

/// Most commands that are remembered as lost; the oldest are forgotten.
pub const LOST_EXECUTIONS_MAX: usize = 32;

/// A sandbox as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Its identity.
    pub id: SandboxId,
    /// Whose it is.
    pub project: Project,
    /// What it is called there.
    pub name: Option<Name>,
    /// What its instances are made of.
    pub spec: SandboxSpec,
    /// By which rules it lives.
    pub policy: Policy,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Grows with every change of this record; writes compare it.
    pub version: u64,
    /// What is wanted.
    pub desired: Desired,
    /// Where it is.
    pub phase: Phase,
    /// Since when.
    pub phase_since_ms: u64,
    /// Why.
    pub cause: Caused,
    /// Its current or last instance.
    pub generation: Generation,
    /// How many operations were named so far; ids are made of it.
    pub operations: u64,
    /// Who waits for it to run.
    pub entry: Option<Entry>,
    /// Whether a user stopped it, so that only an explicit entry runs it again (L9).
    pub held: bool,
    /// Which user: what is acted upon later is still theirs (O7).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_by: Option<Actor>,
    /// Whether it was deleted, or is to be once it is stopped.
    pub deleted: bool,
    /// What was checked last, as of the last transition.
    pub evidence: Evidence,
    /// What the provider said last, as of the last transition.
    pub observed: Option<Observed>,
    /// Why it is to be at rest, once it is: what is acted upon later still has this cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rests_for: Option<Cause>,
    /// The state that was saved last by hibernating or gone back to, and the last that is known to be good.
    pub saved: Option<SnapshotId>,
    /// What was sealed of an instance that had to be replaced, until what is made from it works (T7).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<SnapshotId>,
    /// Commands that ran when it was saved: they do not run any more, or not now, and are told so (X5).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost_executions: Vec<LostExecution>,
    /// What became of its memory when it was last saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// What came of bringing it to disk when the machine's memory got short, for as long as it is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_frozen: Option<KeptFrozen>,
    /// What it was made from, instead of from its image; it begins there again when nothing is saved (L11).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<SnapshotId>,
    /// What it is to go back to, once its instance is gone. It is the saved state from then on; until then the wish
    /// stands, also while it is lost or failed and nobody waits for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<SnapshotId>,
    /// Whether all that was saved of it goes with its last instance (L12).
    #[serde(default, skip_serializing_if = "is_false")]
    pub resetting: bool,
    /// When it was created.
    pub created_at_ms: u64,
    /// The last activity (L6).
    pub active_at_ms: u64,
    /// The hard deadline of this generation as it was seen last: for display (T6).
    pub expires_at_ms: Option<u64>,
    /// What keeps it from idling.
    pub keep_awake: BTreeMap<String, KeepAwake>,
    /// The latest start of each service that the spec names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<ServiceName, ServiceRun>,
    /// The generation that was made as a spare, before this sandbox was asked for (L19). That instance knows nothing of
    /// the environment, so each command in it is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed: Option<Generation>,
    /// The hook that is outstanding before it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook: Option<HookPoint>,
    /// The hard deadline ahead of which the hook for it was performed, so that it is once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warned_of_ms: Option<u64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it over so")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

/// What a new sandbox is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Its identity, drawn by the caller.
    pub id: SandboxId,
    /// Whose it is.
    pub project: Project,
    /// What it is called.
    pub name: Option<Name>,
    /// What its instances are made of.
    pub spec: SandboxSpec,
    /// By which rules it lives.
    pub policy: Policy,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// What it begins with, instead of with its image.
    pub origin: Option<SnapshotId>,
    /// Who creates it.
    pub by: Actor,
}

/// What time it is, how long things may take, and what cannot be done here.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'t> {
    /// Now, in milliseconds.
    pub now_ms: u64,
    /// The limits of transient phases.
    pub timings: &'t Timings,
    /// Why the provider cannot save memory; none when it can.
    pub no_memory: Option<&'t str>,
}

/// How long transient phases may take, and how failures are counted. Defaults are what ships.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timings {
    /// Making an instance, all tries together.
    pub make_ms: u64,
    /// Verifying one, all tries together.
    pub verify_ms: u64,
    /// Giving a spare to whom it is claimed for, and probing it, before it is taken for broken.
    pub claim_ms: u64,
    /// Freezing, thawing included.
    pub freeze_ms: u64,
    /// Saving.
    pub save_ms: u64,
    /// How long what is frozen is left alone when its memory could not be saved; it doubles.
    pub left_alone_ms: u64,
    /// The longest such time.
    pub left_alone_ms_max: u64,
    /// Ending one, before it is called overdue.
    pub stop_ms: u64,
    /// The first wait before a try is repeated; it doubles.
    pub backoff_ms: u64,
    /// The longest such wait.
    pub backoff_ms_max: u64,
    /// Bad findings before an instance is given up (T7).
    pub findings_min: u32,
    /// And the time that they have to span.
    pub findings_span_ms: u64,
    /// How often one entry may lead to another instance when the first does not come up.
    pub rebuilds_max: u32,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            make_ms: 120_000,
            verify_ms: 30_000,
            claim_ms: 5_000,
            freeze_ms: 10_000,
            save_ms: 600_000,
            left_alone_ms: 300_000,
            left_alone_ms_max: 3_600_000,
            stop_ms: 30_000,
            backoff_ms: 200,
            backoff_ms_max: 10_000,
            findings_min: 3,
            findings_span_ms: 10_000,
            rebuilds_max: 2,
        }
    }
}

impl Sandbox {
    /// A sandbox that was just asked for: its first instance is outstanding.
    pub fn create(new: NewSandbox, at: Moment<'_>) -> Self {
        let NewSandbox { id, project, name, spec, policy, labels, origin, by } = new;
        let entry = Entry { kind: EntryKind::Create, by: by.clone(), at_ms: at.now_ms };
        let mut sandbox = Self {
            id,
            project,
            name,
            spec,
            policy,
            labels,
            version: 1,
            desired: Desired::Running,
            phase: Phase::Ready, // replaced below, once an operation can be named
            phase_since_ms: at.now_ms,
            cause: Caused { cause: Cause::Requested, by, at_ms: at.now_ms, message: None },
            generation: Generation::FIRST,
            operations: 0,
            entry: Some(entry),
            held: false,
            held_by: None,
            deleted: false,
            evidence: Evidence::default(),
            observed: None,
            rests_for: None,
            saved: None,
            sealed: None,
            lost_executions: Vec::new(),
            memory: None,
            kept_frozen: None,
            origin,
            rollback: None,
            resetting: false,
            created_at_ms: at.now_ms,
            active_at_ms: at.now_ms,
            expires_at_ms: None,
            keep_awake: BTreeMap::new(),
            services: BTreeMap::new(),
            claimed: None,
            hook: None,
            warned_of_ms: None,
        };
        let work = sandbox.work(at, at.timings.make_ms);
        sandbox.phase = match sandbox.origin.clone() {
            Some(snapshot) => Phase::Resuming { step: ResumeStep::Make, snapshot, rebuilds: 0, work },
            None => Phase::Provisioning { step: MakeStep::Make, rebuilds: 0, work },
        };
        sandbox
    }

    /// The snapshots that it cannot do without: nobody removes them while it is there (L11).
    pub fn uses(&self) -> BTreeSet<&SnapshotId> {
        // What is to be gone is never made again.
        if self.is_over() || self.desired == Desired::Gone {
            return BTreeSet::new();
        }
        [&self.saved, &self.sealed, &self.origin, &self.rollback].into_iter().flatten().collect()
    }

    /// Whether nothing will ever happen to it again.
    pub fn is_over(&self) -> bool {
        self.phase.name() == PhaseName::Stopped
    }

    /// When its instance ends by itself, while it is known to have one. What is lost may be there and come back, so its
    /// deadline is kept, and nobody acts upon it.
    pub fn lives_until_ms(&self) -> Option<u64> {
        match &self.phase {
            Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } => self.expires_at_ms,
            Phase::Provisioning { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => None,
        }
    }

    /// When it has to be looked at again without anybody asking: the deadline of its phase, the time of a retry (then the
    /// effect is performed again, and [`Event::Due`] changes nothing), or at once when something is wanted that could not
    /// be acted upon before.
    pub fn due_at_ms(&self) -> Option<u64> {
        let looked_at_again = match &self.phase {
            Phase::Ready | Phase::Verifying { .. } => self.desired == Desired::Hibernated || self.rollback.is_some(),
            // A moment later, so that time goes on in a world that has this one.
            Phase::Hibernated { .. } if is_planted(Planted::ChainedResume) => {
                return Some(self.phase_since_ms.saturating_add(1_000));
            }
            Phase::Hibernated { .. } | Phase::Lost => self.entry.is_some(),
            Phase::Provisioning { .. }
            | Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Resuming { .. }
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => false,
        };
        if looked_at_again {
            return Some(self.phase_since_ms);
        }
        let work = self.phase.work()?;
        Some(if work.retry_at_ms > 0 { work.retry_at_ms.min(work.deadline_at_ms) } else { work.deadline_at_ms })
    }

    /// When the next rung of the ladder is due if nobody uses it until then (L5): frozen, then saved or ended. `freezes`
    /// is whether its provider can do the first of the two; else they are one.
    ///
    /// A window begins anew with the phase, so that what was brought up, or could not be frozen, has a whole one (L4).
    /// What keeps it awake holds it off (L7).
    pub fn idle_at_ms(&self, freezes: bool) -> Option<u64> {
        let window_ms = match &self.phase {
            Phase::Ready if freezes => self.policy.idle_ms,
            Phase::Ready => self.policy.idle_ms.saturating_add(self.policy.hibernate_ms),
            Phase::Frozen { step: FreezeStep::Done } => self.policy.hibernate_ms,
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Frozen { step: FreezeStep::Freeze { .. } }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => return None,
        };
        // A stop, or a way back, was acknowledged and is about to be acted upon; frozen, it would be forgotten.
        if self.desired != Desired::Running || self.rollback.is_some() {
            return None;
        }
        let since_ms = self.kept_frozen.map_or(self.phase_since_ms, |kept| kept.since_ms);
        let used_at_ms = self.active_at_ms.max(since_ms);
        let awake_ms = self.keep_awake.values().map(|lease| lease.until_ms).max().unwrap_or(0);
        Some(used_at_ms.saturating_add(window_ms).max(awake_ms))
    }

    /// What the next instance is made from, if not from its image.
    pub fn made_from(&self) -> Option<SnapshotId> {
        self.sealed.clone().or_else(|| self.saved.clone()).or_else(|| self.origin.clone())
    }

    /// An execution of its current instance as it stands by this record: what is being saved is suspended or runs no
    /// more, from the moment on in which that was decided (X5).
    pub fn execution(&self, mut status: ExecStatus) -> ExecStatus {
        if self.phase.name() != PhaseName::Hibernating {
            return status;
        }
        match (&status.state, self.suspends()) {
            // Its instance ended because it was saved.
            (ExecState::Running | ExecState::Lost { .. }, true) => {
                status.state = ExecState::Suspended;
                status.ended_at_ms = None;
            }
            (ExecState::Running, false) => {
                status.state = ExecState::Lost { cause: HIBERNATED.to_owned() };
                status.ended_at_ms = Some(self.phase_since_ms);
            }
            (
                ExecState::Suspended
                | ExecState::Exited { .. }
                | ExecState::Signalled { .. }
                | ExecState::OomKilled
                | ExecState::Failed { .. }
                | ExecState::Cancelled
                | ExecState::TimedOut
                | ExecState::Lost { .. },
                _,
            ) => return status,
        }
        status.pid = None;
        status
    }

    /// Names the next operation and gives it this long.
    fn work(&mut self, at: Moment<'_>, limit_ms: u64) -> Work {
        Work {
            operation: self.next_operation(),
            attempt: 1,
            deadline_at_ms: at.now_ms.saturating_add(limit_ms),
            retry_at_ms: 0,
            overdue: false,
        }
    }

    /// An id that no other operation has: the sandbox's own and a count.
    fn next_operation(&mut self) -> OperationId {
        self.operations += 1;
        OperationId::derived(self.id.as_str(), &format!("x{}", self.operations))
    }

    /// The snapshot that this operation makes.
    pub fn snapshot_of(operation: &OperationId) -> SnapshotId {
        SnapshotId::derived(operation.as_str(), "")
    }
}
