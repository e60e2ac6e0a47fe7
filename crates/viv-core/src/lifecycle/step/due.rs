//! Time passed: every transient phase has a deadline, and falls to something when it passes.

use super::draft::{Draft, Verify};
use super::{Ignored, Stepped, claim, done};
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::phase::{FreezeStep, HibernateStep, MakeStep, Phase, ResumeStep, VerifyStep};
use crate::lifecycle::{Desired, Moment, Sandbox};
use crate::planted::{Planted, is_planted};

/// The time has come that [`Sandbox::due_at_ms`] told.
pub(super) fn due(sandbox: &Sandbox, at: Moment<'_>) -> Stepped {
    let draft = Draft::of(sandbox, at);
    match &sandbox.phase {
        // What was wanted while a transition was under way.
        Phase::Ready | Phase::Verifying { .. } if sandbox.desired == Desired::Hibernated => {
            return draft.hibernating_as_wanted();
        }
        Phase::Ready | Phase::Verifying { .. } if sandbox.rollback.is_some() => {
            let entry = sandbox.entry.clone();
            return draft.rolling_back(false, &entry.map_or_else(|| Actor::part("engine"), |entry| entry.by));
        }
        Phase::Lost => {
            let Some(entry) = sandbox.entry.clone() else { return Stepped::Ignored(Ignored::NotDue) };
            return draft.replace(0, Cause::Requested, &entry.by, None);
        }
        Phase::Hibernated { snapshot } if is_planted(Planted::ChainedResume) => {
            return draft.resuming(snapshot.clone(), Cause::Requested, &Actor::part("engine"));
        }
        Phase::Hibernated { snapshot } => {
            let Some(entry) = sandbox.entry.clone() else { return Stepped::Ignored(Ignored::NotDue) };
            return draft.resuming(snapshot.clone(), Cause::Requested, &entry.by);
        }
        Phase::Ready
        | Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Resuming { .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => {}
    }
    if sandbox.phase.work().is_none_or(|work| at.now_ms < work.deadline_at_ms) {
        return Stepped::Ignored(Ignored::NotDue);
    }
    let why = sandbox.cause.message.clone();
    match &sandbox.phase {
        // An entry wanted a new instance, and the last one could not be shown to be gone: that is no ground to make one.
        Phase::Provisioning { step: MakeStep::Clear, rebuilds: 0, .. }
        | Phase::Resuming { step: ResumeStep::Clear, rebuilds: 0, .. } => draft.lost(Cause::AbsenceUnproven, why),
        // Its files are kept as they are: nothing takes their place before they are saved, or cannot be (T7).
        Phase::Resuming { step: ResumeStep::Seal, .. } => draft.lost(Cause::SaveFailed, why),
        // Bringing memory back took all the time: there is more for the files alone.
        Phase::Resuming { step: ResumeStep::Make, snapshot, rebuilds, .. } if sandbox.has_memory_of(snapshot) => {
            let why = why.unwrap_or_else(|| "it was not restored in time".to_owned());
            draft.without_memory(*rebuilds, snapshot.clone(), why)
        }
        Phase::Provisioning { .. } | Phase::Resuming { .. } => draft.failed(Cause::DeadlinePassed, why),
        // Only timeouts, or too few findings: it is not replaced. What never worked is given up.
        // What its services and hooks take is theirs; else it is the spare that is silent.
        Phase::Verifying { step: VerifyStep::Claim | VerifyStep::Probe, .. } if claim::is_on_trial(sandbox) => {
            claim::broken(draft, why)
        }
        Phase::Verifying { was_ready: true, .. } if is_planted(Planted::SilentIsReplaced) => {
            draft.replace(1, Cause::Unresponsive, &Actor::part("engine"), why)
        }
        Phase::Verifying { was_ready: true, .. } => draft.lost(Cause::Unresponsive, why),
        // What was restored and is silent is nothing that anybody had: its files are those that were saved.
        Phase::Verifying { was_ready: false, rebuilds, .. } => match done::on_trial(sandbox) {
            Some(snapshot) => {
                let said = why.unwrap_or_else(|| "no answer".to_owned());
                draft.without_memory(*rebuilds, snapshot, format!("what was restored does not work: {said}"))
            }
            None => draft.failed(Cause::Unresponsive, why),
        },
        Phase::Frozen { step: FreezeStep::Freeze { .. } } => {
            let verify = Verify { step: VerifyStep::Thaw, rebuilds: 0, findings: 0, was_ready: true };
            draft.verifying(verify, Cause::DeadlinePassed, &Actor::part("engine"), why)
        }
        // Never running on: it stays quiesced and kept, and somebody hears of it (L10).
        Phase::Hibernating { step: HibernateStep::Save, .. } => draft.overdue(at.timings.save_ms, Cause::SaveFailed),
        // A kill that fails stays stopping, or what is saved hibernating, and somebody hears of it (L8).
        Phase::Hibernating { step: HibernateStep::Clear, .. } | Phase::Stopping { .. } => {
            draft.overdue(at.timings.stop_ms, Cause::KillFailed)
        }
        Phase::Failed { .. } => {
            let cause = sandbox.cause.cause.clone();
            draft.overdue(at.timings.stop_ms, cause)
        }
        Phase::Ready
        | Phase::Frozen { step: FreezeStep::Done }
        | Phase::Hibernated { .. }
        | Phase::Lost
        | Phase::Stopped => Stepped::Ignored(Ignored::NotDue),
    }
}
