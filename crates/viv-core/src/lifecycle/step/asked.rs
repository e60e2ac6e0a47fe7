//! What people ask for: that it runs, that it stops, that it is gone.

use super::draft::{Draft, Verify};
use super::{Denial, Happened, Ignored, Stepped, is_gone};
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::phase::{Phase, VerifyStep};
use crate::lifecycle::{Desired, Entry, EntryKind, Moment, Sandbox};
use crate::planted::{Planted, is_planted};

/// Somebody wants it to run.
pub(super) fn enter(sandbox: &Sandbox, kind: EntryKind, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    if sandbox.held && !kind.is_explicit() && !is_planted(Planted::HeldForgotten) {
        return Stepped::Denied(Denial::Held);
    }
    let wanted_before = sandbox.desired == Desired::Running;
    let mut draft = Draft::of(sandbox, at);
    draft.next.desired = Desired::Running;
    draft.next.held = false;
    draft.next.held_by = None;
    draft.next.rests_for = None;
    draft.next.entry = Some(Entry { kind, by: by.clone(), at_ms: at.now_ms });
    match &sandbox.phase {
        Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. } | Phase::Hibernating { .. } => {
            if wanted_before && sandbox.entry.is_some() {
                return Stepped::Ignored(Ignored::NothingNew);
            }
            draft.is(Happened::Wanted)
        }
        Phase::Ready => {
            if wanted_before {
                return Stepped::Ignored(Ignored::NothingNew);
            }
            // Nothing has to be done for it, unless it is to go back: then it is answered when it has.
            if sandbox.rollback.is_none() {
                draft.next.entry = None;
            }
            draft.is(Happened::Wanted)
        }
        Phase::Frozen { .. } => {
            let verify = Verify { step: VerifyStep::Thaw, rebuilds: 0, findings: 0, was_ready: true };
            draft.verifying(verify, Cause::Requested, by, None)
        }
        Phase::Hibernated { snapshot } => draft.resuming(snapshot.clone(), Cause::Requested, by),
        Phase::Lost if sandbox.cause.cause == Cause::ServiceFailed => draft.serve_anew(by),
        // What is left of it may hold files that nobody saved; what failed was cleared.
        Phase::Lost => draft.replace(0, Cause::Requested, by, None),
        Phase::Failed { .. } => draft.remake(0, Cause::Requested, by, None),
        // What is wanted gone was denied above; a record that says otherwise is gone all the same.
        Phase::Stopping { .. } | Phase::Stopped => Stepped::Denied(Denial::Gone),
    }
}

/// Somebody wants it stopped.
pub(super) fn stop(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    let mut draft = Draft::of(sandbox, at);
    let persistent = sandbox.policy.persistent;
    match &sandbox.phase {
        Phase::Stopping { .. } | Phase::Stopped => Stepped::Ignored(Ignored::NothingNew),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
            if !persistent =>
        {
            draft.stopping(Cause::UserStop, by, None)
        }
        // There is an instance, and whether it works does not matter any more: its processes end now (L8).
        Phase::Verifying { .. } | Phase::Ready | Phase::Frozen { .. } => {
            draft.held_by(by);
            draft.hibernating(Cause::UserStop, by)
        }
        // The transition under way ends first; then what is wanted is looked at again.
        Phase::Provisioning { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. } => {
            let known = sandbox.desired == Desired::Hibernated && sandbox.held && sandbox.entry.is_none();
            if known || is_planted(Planted::StopDroppedWhenBusy) {
                return Stepped::Ignored(Ignored::NothingNew);
            }
            draft.next.desired = Desired::Hibernated;
            draft.next.entry = None;
            draft.held_by(by);
            draft.is(Happened::Wanted)
        }
    }
}

/// Somebody wants it gone for ever.
pub(super) fn delete(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if sandbox.deleted {
        return Stepped::Ignored(Ignored::NothingNew);
    }
    let mut draft = Draft::of(sandbox, at);
    draft.next.deleted = true;
    match &sandbox.phase {
        Phase::Stopping { .. } | Phase::Stopped => draft.is(Happened::Wanted),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. } => draft.stopping(Cause::UserDelete, by, None),
    }
}
