//! What was seen without being asked for by the record: pushed ends, listings, health checks.

use super::draft::{Draft, Verify};
use super::{Happened, Ignored, Stepped, claim, done};
use crate::cause::EndCause;
use crate::id::Generation;
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::event::Seen;
use crate::lifecycle::evidence::{Evidence, Finding};
use crate::lifecycle::phase::{FreezeStep, HibernateStep, Phase, VerifyStep};
use crate::lifecycle::{Desired, Moment, Observed, Sandbox};

const AGAIN: Verify = Verify { step: VerifyStep::Probe, rebuilds: 0, findings: 0, was_ready: true };

/// Nothing is said to a frozen agent, so it gets its processors back first.
const THAWED: Verify = Verify { step: VerifyStep::Thaw, ..AGAIN };

/// An instance was seen.
pub(super) fn seen(
    sandbox: &Sandbox,
    generation: Generation,
    seen: &Seen,
    observed: &Observed,
    at: Moment<'_>,
) -> Stepped {
    if generation != sandbox.generation {
        return Stepped::Ignored(Ignored::StaleGeneration);
    }
    let mut draft = Draft::of(sandbox, at);
    draft.next.observed = Some(observed.clone());
    let engine = Actor::part("engine");
    let words = Some(observed.state.clone());
    match (&sandbox.phase, seen) {
        (Phase::Ready, Seen::Running) | (Phase::Frozen { step: FreezeStep::Done }, Seen::Frozen) => {
            Stepped::Ignored(Ignored::NothingNew)
        }
        // Somebody else froze or thawed it, or a freeze came late: it has to show that it works.
        (Phase::Ready, Seen::Frozen) => draft.verifying(THAWED, Cause::ProbeFinding, &engine, words),
        (Phase::Frozen { step: FreezeStep::Done }, Seen::Running) => {
            draft.verifying(AGAIN, Cause::ProbeFinding, &engine, words)
        }
        // It ended as a spare, and be it at the deadline of one: that is nothing to whom it was given to.
        (Phase::Verifying { .. }, Seen::Ended(_) | Seen::Absent) if claim::is_on_trial(sandbox) => {
            claim::broken(draft, words)
        }
        (
            Phase::Ready | Phase::Frozen { .. } | Phase::Verifying { .. } | Phase::Lost,
            Seen::Ended(EndCause::Expired),
        ) => draft.expire(),
        (Phase::Ready | Phase::Frozen { .. }, Seen::Ended(end)) => {
            draft.lost(Cause::of_end(end), Some(end.to_string()))
        }
        (Phase::Ready | Phase::Frozen { .. } | Phase::Hibernating { step: HibernateStep::Save, .. }, Seen::Absent) => {
            draft.lost(Cause::ProviderLost, words)
        }
        (Phase::Verifying { .. }, Seen::Ended(end)) => done::given_up(draft, Cause::of_end(end), Some(end.to_string())),
        (Phase::Verifying { .. }, Seen::Absent) => done::given_up(draft, Cause::ProviderLost, words),
        // It lives, which was never in doubt: a service of it does not come back.
        (Phase::Lost, Seen::Running)
            if sandbox.cause.cause == Cause::ServiceFailed && sandbox.desired == Desired::Running =>
        {
            Stepped::Ignored(Ignored::NothingNew)
        }
        (Phase::Lost, Seen::Running | Seen::Frozen) => match sandbox.desired {
            Desired::Running => {
                // Who wanted it to go back heard that it came to nothing, and nobody asked again: what came back is
                // kept as it is (L15).
                if sandbox.entry.is_none() {
                    draft.next.rollback = None;
                }
                let verify = if *seen == Seen::Frozen { THAWED } else { AGAIN };
                draft.verifying(verify, Cause::Reappeared, &engine, words)
            }
            // It was stopped while it was away: whether it works does not matter any more.
            Desired::Hibernated => draft.hibernating_as_wanted(),
            Desired::Gone => Stepped::Ignored(Ignored::Busy),
        },
        // Stopped after it had ended by itself: what it left is saved all the same.
        (Phase::Lost, Seen::Ended(_)) if sandbox.desired == Desired::Hibernated => draft.hibernating_as_wanted(),
        (Phase::Lost, Seen::Ended(_) | Seen::Absent) => {
            let known = sandbox.observed.as_ref().is_some_and(|known| known.state == observed.state);
            if known { Stepped::Ignored(Ignored::NothingNew) } else { draft.is(Happened::Advanced) }
        }
        // Each of these has an effect outstanding that will find out, or nothing that could be seen.
        (
            Phase::Provisioning { .. }
            | Phase::Resuming { .. }
            | Phase::Verifying { .. }
            | Phase::Frozen { step: FreezeStep::Freeze { .. } }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped,
            Seen::Running | Seen::Frozen | Seen::Ended(_) | Seen::Absent,
        ) => Stepped::Ignored(Ignored::Busy),
    }
}

/// An instance was probed, outside of verification: only a finding moves the phase (T3).
pub(super) fn probed(sandbox: &Sandbox, generation: Generation, evidence: &Evidence, at: Moment<'_>) -> Stepped {
    if generation != sandbox.generation {
        return Stepped::Ignored(Ignored::StaleGeneration);
    }
    match &sandbox.phase {
        Phase::Ready => {
            let findings = match evidence.finding_for(&sandbox.spec) {
                Some(Finding::Ok) => return Stepped::Ignored(Ignored::NothingNew),
                Some(Finding::Unhealthy | Finding::Gone) => 1,
                Some(Finding::Timeout) | None => 0,
            };
            let mut draft = Draft::of(sandbox, at);
            draft.next.evidence = evidence.clone();
            let verify = Verify { findings, ..AGAIN };
            draft.verifying(verify, Cause::ProbeFinding, &Actor::part("health"), evidence.complaint())
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Stepped::Ignored(Ignored::Busy),
    }
}
