//! Going back: to a snapshot, or to the beginning.
//!
//! ```text
//!   rollback   end, save, clear ──► hibernated as the snapshot ──► (its entry) resuming, a new generation
//!   discard    end, clear ────────► the same
//!   reset      end, clear with all that was saved ──► made anew, a new generation
//! ```
//!
//! Both are entries: somebody wants it to run then. Neither touches its policy (L16), and both are acted upon when a
//! transition that is under way has ended (L3).

use super::draft::Draft;
use super::{Denial, Happened, Ignored, Stepped, is_gone};
use crate::id::SnapshotId;
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::phase::{HibernateStep, Phase};
use crate::lifecycle::{Desired, Entry, EntryKind, Moment, Sandbox};

/// Somebody wants it to go on from a snapshot.
pub(super) fn rollback(sandbox: &Sandbox, snapshot: &SnapshotId, discard: bool, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    let known = sandbox.rollback.as_ref() == Some(snapshot) && sandbox.entry.is_some();
    let mut draft = Draft::of(sandbox, at);
    wanted(&mut draft, by);
    draft.next.rollback = Some(snapshot.clone());
    // The last wish counts: who was to begin anew goes on from here.
    draft.next.resetting = false;
    match &sandbox.phase {
        // What is lost may live all the same, and what it left is saved if it can be: what is not there is seen not to be.
        Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } | Phase::Lost => draft.rolling_back(discard, by),
        Phase::Hibernating { step: HibernateStep::Save, .. } if discard => draft.rolling_back(discard, by),
        // What is under way ends first.
        Phase::Provisioning { .. } | Phase::Resuming { .. } | Phase::Hibernating { .. } => {
            if known {
                Stepped::Ignored(Ignored::NothingNew)
            } else {
                draft.is(Happened::Wanted)
            }
        }
        Phase::Hibernated { .. } => draft.resuming(snapshot.clone(), Cause::Rollback, by),
        Phase::Failed { .. } => draft.remake(0, Cause::Rollback, by, None),
        Phase::Stopping { .. } | Phase::Stopped => Stepped::Denied(Denial::Gone),
    }
}

/// Somebody wants it to begin anew.
pub(super) fn reset(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    let known = sandbox.resetting && sandbox.entry.is_some();
    let mut draft = Draft::of(sandbox, at);
    wanted(&mut draft, by);
    draft.next.saved = None;
    draft.next.sealed = None;
    draft.next.rollback = None;
    draft.next.resetting = true;
    draft.next.keep_awake.clear();
    match &sandbox.phase {
        Phase::Provisioning { .. } | Phase::Resuming { .. } if known => Stepped::Ignored(Ignored::NothingNew),
        // Whatever is under way is dropped: nothing of what it would lead to is kept.
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. } => draft.remake(0, Cause::Reset, by, None),
        Phase::Stopping { .. } | Phase::Stopped => Stepped::Denied(Denial::Gone),
    }
}

/// It is somebody's explicit will that it runs.
fn wanted(draft: &mut Draft<'_>, by: &Actor) {
    draft.next.desired = Desired::Running;
    draft.next.held = false;
    draft.next.held_by = None;
    draft.next.rests_for = None;
    draft.next.entry = Some(Entry { kind: EntryKind::Ensure, by: by.clone(), at_ms: draft.at.now_ms });
}
