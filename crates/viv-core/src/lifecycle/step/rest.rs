//! The way down to rest, by hand and by idling: frozen, then saved. And what becomes of a save that failed.

use super::draft::Draft;
use super::{Denial, Happened, Ignored, Stepped, asked, is_gone};
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::event::RestAt;
use crate::lifecycle::phase::{FreezeStep, HibernateStep, Phase, PhaseName};
use crate::lifecycle::{Desired, EntryKind, KeptFrozen, Moment, Sandbox};
use crate::planted::{Planted, is_planted};
use crate::spec::Hibernate;

/// Somebody wants it to stand still. Only what works is frozen: what comes up does so first (L21).
pub(super) fn freeze(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    match &sandbox.phase {
        // A stop, or a way back, was acknowledged and is about to be acted upon; frozen, it would be forgotten.
        Phase::Ready if sandbox.desired == Desired::Hibernated || sandbox.rollback.is_some() => {
            Stepped::Denied(Denial::NotNow)
        }
        Phase::Ready => Draft::of(sandbox, at).freezing(Cause::UserFreeze, by),
        Phase::Frozen { .. } => Stepped::Ignored(Ignored::NothingNew),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Denied(Denial::NotNow),
    }
}

/// Somebody wants what is frozen to go on: an entry, for which nothing is made (T5).
pub(super) fn thaw(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    match &sandbox.phase {
        Phase::Frozen { .. } => asked::enter(sandbox, EntryKind::Ensure, by, at),
        Phase::Ready | Phase::Verifying { was_ready: true, .. } => Stepped::Ignored(Ignored::NothingNew),
        Phase::Provisioning { .. }
        | Phase::Verifying { was_ready: false, .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Denied(Denial::NotNow),
    }
}

/// Somebody wants it saved, and does not mind who wakes it (L9). What comes up does so first (L21).
pub(super) fn hibernate(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    if !sandbox.policy.persistent {
        return Stepped::Denied(Denial::Ephemeral);
    }
    let mut draft = Draft::of(sandbox, at);
    match &sandbox.phase {
        // A stop was acknowledged, which is more than this.
        Phase::Ready if sandbox.desired == Desired::Hibernated => Stepped::Ignored(Ignored::NothingNew),
        Phase::Ready | Phase::Frozen { .. } => draft.hibernating(Cause::UserHibernate, by),
        Phase::Hibernating { .. } | Phase::Hibernated { .. } => {
            let saving = sandbox.phase.name() == PhaseName::Hibernating;
            let for_room = saving && sandbox.rests_for == Some(Cause::MemoryShort);
            if sandbox.entry.is_none() && !for_room {
                return Stepped::Ignored(Ignored::NothingNew);
            }
            if for_room {
                // From now on somebody asked for it, so it does not go back when its memory cannot be saved.
                draft.next.rests_for = Some(Cause::UserHibernate);
            }
            draft.next.desired = Desired::Hibernated;
            draft.next.entry = None;
            draft.is(Happened::Wanted)
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Denied(Denial::NotNow),
    }
}

/// Somebody made room, or repaired what was broken: the save is tried again now, not after its pause.
pub(super) fn retry_save(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    if !is_failed_save(&sandbox.phase) {
        return Stepped::Denied(Denial::NoFailedSave);
    }
    let mut draft = Draft::of(sandbox, at);
    // It has not failed again yet: whoever waits hears when it does.
    if let Phase::Hibernating { save_failed, work, .. } = &mut draft.next.phase {
        *save_failed = false;
        work.retry_at_ms = 0;
        work.overdue = false;
    }
    draft.next.cause.by = by.clone();
    draft.is(Happened::Wanted)
}

/// Somebody gives up what could not be saved.
pub(super) fn discard(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    if is_gone(sandbox) {
        return Stepped::Denied(Denial::Gone);
    }
    if !is_failed_save(&sandbox.phase) {
        return Stepped::Denied(Denial::NoFailedSave);
    }
    let draft = Draft::of(sandbox, at);
    // What is on its way back goes on without it.
    if sandbox.rollback.is_some() { draft.rolling_back(true, by) } else { draft.discarding(by) }
}

fn is_failed_save(phase: &Phase) -> bool {
    match phase {
        Phase::Hibernating { step, save_failed, work } => {
            *step == HibernateStep::Save && (*save_failed || work.overdue)
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    }
}

/// Nobody uses it. Activity is read again here, where the decision is made (L6).
pub(super) fn idle(sandbox: &Sandbox, freezes: bool, at: Moment<'_>) -> Stepped {
    let Some(idle_at_ms) = sandbox.idle_at_ms(freezes) else { return Stepped::Ignored(Ignored::Busy) };
    let read_again = !is_planted(Planted::IdleUnread);
    if read_again && (at.now_ms < idle_at_ms || sandbox.entry.is_some()) {
        return Stepped::Ignored(Ignored::NotIdle);
    }
    let (draft, by) = (Draft::of(sandbox, at), Actor::part("idle"));
    match &sandbox.phase {
        Phase::Ready if freezes => draft.freezing(Cause::Idle, &by),
        Phase::Ready | Phase::Frozen { step: FreezeStep::Done } => {
            if sandbox.policy.persistent {
                draft.hibernating(Cause::Idle, &by)
            } else {
                draft.stopping(Cause::Idle, &by, None)
            }
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Frozen { step: FreezeStep::Freeze { .. } }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Ignored(Ignored::Busy),
    }
}

/// The machine's memory is short. Only what is frozen and loses nothing by it goes, and not soon again when it could not.
pub(super) fn make_room(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    let keeps = sandbox.policy.persistent && sandbox.policy.hibernate == Hibernate::Memory && at.no_memory.is_none();
    match &sandbox.phase {
        Phase::Frozen { step: FreezeStep::Done } if keeps => {
            let kept = sandbox.kept_frozen.unwrap_or(KeptFrozen {
                since_ms: sandbox.phase_since_ms,
                failures: 0,
                until_ms: 0,
            });
            if at.now_ms < kept.until_ms {
                return Stepped::Ignored(Ignored::NotDue);
            }
            let mut draft = Draft::of(sandbox, at);
            draft.next.kept_frozen = Some(kept);
            draft.hibernating(Cause::MemoryShort, by)
        }
        Phase::Frozen { .. }
        | Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Ignored(Ignored::Busy),
    }
}

/// Who woke it is done with it. Whether somebody else used it meanwhile is read here, where the decision is made.
pub(super) fn rest(
    sandbox: &Sandbox,
    to: RestAt,
    woken_at_ms: u64,
    used_at_ms: u64,
    by: &Actor,
    at: Moment<'_>,
) -> Stepped {
    match &sandbox.phase {
        // A stop, or a way back, was acknowledged and is about to be acted upon.
        Phase::Ready if sandbox.desired == Desired::Hibernated || sandbox.rollback.is_some() => {
            Stepped::Ignored(Ignored::Busy)
        }
        Phase::Ready => {
            let awake = sandbox.keep_awake.values().any(|lease| lease.until_ms > at.now_ms);
            let used = sandbox.active_at_ms.max(used_at_ms) > woken_at_ms;
            if used || awake || sandbox.entry.is_some() {
                return Stepped::Ignored(Ignored::NotIdle);
            }
            let draft = Draft::of(sandbox, at);
            match to {
                RestAt::Hibernated if sandbox.policy.persistent => draft.hibernating(Cause::Idle, by),
                // What is not saved has nowhere else to go.
                RestAt::Hibernated | RestAt::Frozen => draft.freezing(Cause::Idle, by),
            }
        }
        Phase::Frozen { step: FreezeStep::Freeze { .. } | FreezeStep::Done } | Phase::Hibernated { .. } => {
            Stepped::Ignored(Ignored::NothingNew)
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Hibernating { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Ignored(Ignored::Busy),
    }
}

/// The daemon is being drained. What is under way ends first: a save never crosses a resume (L21).
pub(super) fn drain(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    let draft = Draft::of(sandbox, at);
    match &sandbox.phase {
        Phase::Ready | Phase::Frozen { .. } if sandbox.policy.persistent => draft.hibernating(Cause::Drained, by),
        Phase::Ready | Phase::Frozen { .. } => draft.stopping(Cause::Drained, by, None),
        Phase::Hibernated { .. } | Phase::Lost | Phase::Stopped => Stepped::Ignored(Ignored::NothingNew),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Hibernating { .. }
        | Phase::Resuming { .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. } => Stepped::Ignored(Ignored::Busy),
    }
}

/// It is lost because it is unwell, and nobody wants it: what it has is saved, or it ends, with what was found.
pub(super) fn unhealthy(sandbox: &Sandbox, by: &Actor, at: Moment<'_>) -> Stepped {
    let draft = Draft::of(sandbox, at);
    match &sandbox.phase {
        // Who waits for it, or had it stopped or go back, is before.
        Phase::Lost if sandbox.desired != Desired::Running || sandbox.entry.is_some() || sandbox.rollback.is_some() => {
            Stepped::Ignored(Ignored::Busy)
        }
        Phase::Lost => {
            let found = sandbox.evidence.complaint().or_else(|| sandbox.cause.message.clone());
            let mut stepped = if sandbox.policy.persistent {
                draft.hibernating(Cause::Unhealthy, by)
            } else {
                draft.stopping(Cause::Unhealthy, by, None)
            };
            if let Stepped::Accepted(accepted) = &mut stepped {
                accepted.next.cause.message = found;
            }
            stepped
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Ignored(Ignored::Busy),
    }
}
