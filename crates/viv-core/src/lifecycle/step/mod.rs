//! The one function by which a record changes. Total: every event has an answer in every phase.

mod asked;
mod back;
mod claim;
mod done;
mod draft;
mod due;
mod rest;
mod seen;
mod serve;

pub use claim::claim;

use super::event::Event;
use super::phase::PhaseName;
use super::{Desired, Moment, Sandbox};

/// The answer to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stepped {
    /// The record changes.
    Accepted(Box<Accepted>),
    /// It does not, and nobody has to hear of it.
    Ignored(Ignored),
    /// It does not, and whoever asked is told why.
    Denied(Denial),
}

/// A change of the record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The record after it, with a new version.
    pub next: Sandbox,
    /// What kind of change it is, for the journal.
    pub happened: Happened,
}

/// What kind of change it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happened {
    /// A transition.
    Moved {
        /// From.
        from: PhaseName,
        /// To.
        to: PhaseName,
    },
    /// What is wanted was recorded; it is acted upon when the current transition ends.
    Wanted,
    /// The phase has its next effect.
    Advanced,
    /// An effect will be tried again.
    Retrying,
    /// A deadline passed in a phase that cannot be left for it: somebody has to hear of it.
    Overdue,
}

/// Why an event changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    /// It is the outcome of an operation that is not outstanding any more.
    StaleOperation,
    /// It is about another generation.
    StaleGeneration,
    /// It is so already.
    NothingNew,
    /// The time has not come.
    NotDue,
    /// It is, or may be, in use.
    NotIdle,
    /// What is under way will find out by itself.
    Busy,
    /// An outcome that the outstanding effect cannot have.
    Misplaced,
}

/// Why something is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denial {
    /// It was deleted, or stopped and not persistent: nothing brings it back (L9).
    Gone,
    /// A user stopped it, and this entry is not somebody's explicit will (L9).
    Held,
    /// What it is in does not allow it, or something is under way that comes first (L21).
    NotNow,
    /// It is not persistent, so it is not saved (L2).
    Ephemeral,
    /// No save of it has failed.
    NoFailedSave,
}

/// Whether nothing is accepted any more but what finishes it (L9).
fn is_gone(sandbox: &Sandbox) -> bool {
    sandbox.deleted || sandbox.desired == Desired::Gone
}

/// What this event does to this record.
pub fn step(sandbox: &Sandbox, event: &Event, at: Moment<'_>) -> Stepped {
    match event {
        Event::Enter { kind, by } => asked::enter(sandbox, *kind, by, at),
        Event::Stop { by } => asked::stop(sandbox, by, at),
        Event::Delete { by } => asked::delete(sandbox, by, at),
        Event::Freeze { by } => rest::freeze(sandbox, by, at),
        Event::Thaw { by } => rest::thaw(sandbox, by, at),
        Event::Hibernate { by } => rest::hibernate(sandbox, by, at),
        Event::RetrySave { by } => rest::retry_save(sandbox, by, at),
        Event::Discard { by } => rest::discard(sandbox, by, at),
        Event::Idle { freezes } => rest::idle(sandbox, *freezes, at),
        Event::MakeRoom { by } => rest::make_room(sandbox, by, at),
        Event::Rest { to, woken_at_ms, used_at_ms, by } => rest::rest(sandbox, *to, *woken_at_ms, *used_at_ms, by, at),
        Event::Drain { by } => rest::drain(sandbox, by, at),
        Event::Unhealthy { by } => rest::unhealthy(sandbox, by, at),
        Event::Rollback { snapshot, discard, by } => back::rollback(sandbox, snapshot, *discard, by, at),
        Event::Reset { by } => back::reset(sandbox, by, at),
        Event::Done { operation, outcome } => done::done(sandbox, operation, outcome, at),
        Event::Seen { generation, seen, observed } => seen::seen(sandbox, *generation, seen, observed, at),
        Event::Probed { generation, evidence } => seen::probed(sandbox, *generation, evidence, at),
        Event::Due => due::due(sandbox, at),
    }
}
