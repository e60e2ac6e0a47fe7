//! What can happen to a sandbox.

use serde::{Deserialize, Serialize};

use super::cause::Actor;
use super::evidence::Evidence;
use super::{EntryKind, Observed};
use crate::cause::EndCause;
use crate::hook::HookReport;
use crate::id::{Generation, OperationId, SnapshotId};
use crate::service::ServiceReport;

/// Something that happened, or that somebody wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Somebody wants it to run (L3).
    Enter {
        /// Which way.
        kind: EntryKind,
        /// Who.
        by: Actor,
    },
    /// Somebody wants it stopped: saved if it is persistent, else gone (L8).
    Stop {
        /// Who.
        by: Actor,
    },
    /// Somebody wants it gone for ever (L20).
    Delete {
        /// Who.
        by: Actor,
    },
    /// Somebody wants it to stand still, with its memory (L13).
    Freeze {
        /// Who.
        by: Actor,
    },
    /// Somebody wants what stands still to go on.
    Thaw {
        /// Who.
        by: Actor,
    },
    /// Somebody wants it saved. Unlike after a stop, whatever may wake it still does (L9).
    Hibernate {
        /// Who.
        by: Actor,
    },
    /// Somebody wants a save that failed to be tried again now (L10).
    RetrySave {
        /// Who.
        by: Actor,
    },
    /// Somebody gives up what could not be saved (L10).
    Discard {
        /// Who.
        by: Actor,
    },
    /// Nobody uses it: the next rung of the ladder (L5).
    Idle {
        /// Whether its provider can freeze; else that rung is left out.
        freezes: bool,
    },
    /// The machine's memory is short: what is frozen goes to disk with its own, or stays where it is. Nobody asked for it
    /// to end (L13).
    MakeRoom {
        /// Who found that out.
        by: Actor,
    },
    /// Who woke it is done with it: it goes back to where it was, unless somebody else used it meanwhile (L17).
    Rest {
        /// Back to what.
        to: RestAt,
        /// When it was woken. Who used it later than that was somebody else.
        woken_at_ms: u64,
        /// The last use that is known beside the record.
        used_at_ms: u64,
        /// Who woke it.
        by: Actor,
    },
    /// The daemon is being drained: it is to be saved if it is persistent, else gone, and whoever comes later may have it
    /// again (L21).
    Drain {
        /// Who drains.
        by: Actor,
    },
    /// It was found unwell, for long: it is to be saved if it is persistent, else gone, and whoever comes later may have it
    /// again.
    Unhealthy {
        /// Who gives it up.
        by: Actor,
    },
    /// Somebody wants it to go on from a snapshot, under the same id (L11). An entry: it runs then.
    Rollback {
        /// From which.
        snapshot: SnapshotId,
        /// Whether what it is now is thrown away instead of saved first.
        discard: bool,
        /// Who.
        by: Actor,
    },
    /// Somebody wants it to begin anew: without its instance and without what was saved of it (L12). An entry.
    Reset {
        /// Who.
        by: Actor,
    },
    /// An effect had this outcome.
    Done {
        /// Under which id it was performed.
        operation: OperationId,
        /// What came of it.
        outcome: Outcome,
    },
    /// The provider was asked, or said by itself, how an instance is.
    Seen {
        /// Which.
        generation: Generation,
        /// How.
        seen: Seen,
        /// In its own words.
        observed: Observed,
    },
    /// An instance was probed without being in verification.
    Probed {
        /// Which.
        generation: Generation,
        /// What was found.
        evidence: Evidence,
    },
    /// The time has come that [`super::Sandbox::due_at_ms`] told.
    Due,
}

/// Where a sandbox is at rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RestAt {
    /// Frozen.
    Frozen,
    /// Hibernated.
    Hibernated,
}

/// How an instance was seen. What could not be seen is not an event (T7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Seen {
    /// It runs.
    Running,
    /// It is frozen.
    Frozen,
    /// It has ended.
    Ended(EndCause),
    /// There is none: this was looked at.
    Absent,
}

/// What came of an effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The instance runs, and this is left of its lifetime.
    Made {
        /// Time to its hard deadline, where there is one.
        remaining_ms: Option<u64>,
    },
    /// Nothing of the generation is left: this was seen.
    Cleared,
    /// It was probed.
    Probed(Evidence),
    /// Its services were started, and each is ready or has ended.
    Served(Vec<ServiceReport>),
    /// A hook was performed.
    Hooked(HookReport),
    /// It is frozen.
    Frozen,
    /// It has its processors back.
    Thawed,
    /// What was a spare lives for as long as whom it was given to wants.
    Claimed {
        /// Time to its hard deadline, where there is one.
        remaining_ms: Option<u64>,
    },
    /// It is saved, as the snapshot that the effect named.
    Saved,
    /// Its memory cannot be saved; its files are another matter.
    MemoryNotSaved {
        /// For this reason.
        why: String,
        /// Whether it was seen frozen after that, with all that it holds.
        frozen: bool,
    },
    /// It did not succeed.
    Failed(Failure),
}

/// Why an effect did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What that means.
    pub kind: FailureKind,
    /// In words.
    pub what: String,
}

/// What a failure means for the next try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// It will never succeed as it was asked for.
    Refused,
    /// It was tried, went wrong, and left nothing.
    Failed,
    /// It may or may not have happened.
    Unknown,
}
