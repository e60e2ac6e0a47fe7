//! What came of an effect. Outcomes are observations: only what the outstanding effect can have counts.

use super::draft::{Draft, Verify};
use super::{Happened, Ignored, Stepped, claim, serve};
use crate::hook::HookPoint;
use crate::id::OperationId;
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::event::{Failure, FailureKind, Outcome};
use crate::lifecycle::evidence::{Evidence, Finding, Observed};
use crate::lifecycle::phase::{FreezeStep, HibernateStep, MakeStep, Phase, PhaseName, ResumeStep, VerifyStep};
use crate::lifecycle::{Memory, Moment, Sandbox};
use crate::planted::{Planted, is_planted};

/// What was cleared was looked for, and was not there.
fn with_what_was_seen<'a>(mut draft: Draft<'a>, outcome: &Outcome) -> Draft<'a> {
    if *outcome == Outcome::Cleared {
        draft.next.observed = Some(Observed::absent(draft.at.now_ms));
    }
    draft
}

/// An effect had this outcome.
#[expect(clippy::too_many_lines, reason = "every outcome in every phase, in one place")]
pub(super) fn done(sandbox: &Sandbox, operation: &OperationId, outcome: &Outcome, at: Moment<'_>) -> Stepped {
    let Some(work) = sandbox.phase.work().filter(|work| work.operation == *operation) else {
        return Stepped::Ignored(Ignored::StaleOperation);
    };
    let deadline_at_ms = work.deadline_at_ms;
    let mut draft = with_what_was_seen(Draft::of(sandbox, at), outcome);
    match (&sandbox.phase, outcome) {
        (Phase::Provisioning { step: MakeStep::Clear, rebuilds, .. }, Outcome::Cleared) => {
            draft.make(*rebuilds, None, deadline_at_ms)
        }
        (Phase::Resuming { step: ResumeStep::Clear, rebuilds, snapshot, .. }, Outcome::Cleared) => {
            draft.make(*rebuilds, Some(snapshot.clone()), deadline_at_ms)
        }
        (
            phase @ (Phase::Provisioning { step: MakeStep::Make, rebuilds, .. }
            | Phase::Resuming { step: ResumeStep::Make, rebuilds, .. }),
            Outcome::Made { remaining_ms },
        ) => made(draft, phase, *rebuilds, *remaining_ms),
        (Phase::Resuming { step: ResumeStep::Make, rebuilds, snapshot, .. }, Outcome::Failed(failure))
            if sandbox.has_memory_of(snapshot) && failure.kind != FailureKind::Unknown =>
        {
            draft.without_memory(*rebuilds, snapshot.clone(), failure.what.clone())
        }
        (
            Phase::Provisioning { step: MakeStep::Make, rebuilds, .. }
            | Phase::Resuming { step: ResumeStep::Make, rebuilds, .. },
            Outcome::Failed(failure),
        ) => not_made(draft, *rebuilds, failure),
        (Phase::Resuming { step: ResumeStep::Seal, rebuilds, .. }, Outcome::Saved) => {
            draft.sealed(*rebuilds, Sandbox::snapshot_of(operation))
        }
        (Phase::Resuming { step: ResumeStep::Seal, rebuilds, .. }, Outcome::Failed(failure)) => {
            not_sealed(draft, *rebuilds, failure)
        }
        (Phase::Verifying { step: VerifyStep::Claim, .. }, Outcome::Claimed { remaining_ms }) => {
            claim::claimed(draft, *remaining_ms)
        }
        (
            Phase::Verifying { step: VerifyStep::Claim, .. },
            Outcome::Failed(Failure { kind: FailureKind::Failed | FailureKind::Refused, what }),
        ) => claim::broken(draft, Some(what.clone())),
        // What cannot be thawed, ever, may not be frozen either: the probe finds out.
        (
            Phase::Verifying { step: VerifyStep::Thaw, .. },
            Outcome::Thawed | Outcome::Failed(Failure { kind: FailureKind::Refused, .. }),
        ) => thawed(draft),
        (Phase::Verifying { step: VerifyStep::Services, .. }, Outcome::Served(reports)) => {
            serve::served(draft, reports)
        }
        (Phase::Verifying { step: VerifyStep::Hook, .. }, Outcome::Hooked(report)) => serve::hooked(draft, report),
        (Phase::Verifying { step: VerifyStep::Probe, .. }, Outcome::Probed(evidence)) => probed(draft, evidence),
        (Phase::Frozen { step: FreezeStep::Freeze { .. } }, Outcome::Frozen) => {
            draft.next.phase = Phase::Frozen { step: FreezeStep::Done };
            draft.is(Happened::Advanced)
        }
        // What cannot be frozen has to show that it still works.
        (
            Phase::Frozen { step: FreezeStep::Freeze { .. } },
            Outcome::Failed(Failure { kind: FailureKind::Refused, what }),
        ) => {
            let verify = Verify { step: VerifyStep::Thaw, rebuilds: 0, findings: 0, was_ready: true };
            draft.verifying(verify, Cause::ProbeFinding, &Actor::part("engine"), Some(what.clone()))
        }
        (Phase::Hibernating { step: HibernateStep::Save, .. }, Outcome::Saved) => saved(draft, operation),
        (Phase::Hibernating { step: HibernateStep::Save, .. }, Outcome::MemoryNotSaved { why, frozen })
            if sandbox.memory == Some(Memory::Saving) =>
        {
            if *frozen && stays_frozen(sandbox) {
                draft.back_to_frozen(why)
            } else {
                draft.memory_not_saved(why)
            }
        }
        (Phase::Hibernating { step: HibernateStep::Save, .. }, Outcome::Failed(_))
            if is_planted(Planted::FailedSaveRunsOn) =>
        {
            let verify = Verify { step: VerifyStep::Probe, rebuilds: 0, findings: 0, was_ready: true };
            draft.verifying(verify, Cause::SaveFailed, &Actor::part("engine"), None)
        }
        (Phase::Hibernating { step: HibernateStep::Save, .. }, Outcome::Failed(failure)) => {
            if let Phase::Hibernating { save_failed, .. } = &mut draft.next.phase {
                *save_failed = true;
            }
            draft.retry(failure.what.clone())
        }
        (Phase::Hibernating { step: HibernateStep::Clear, .. }, Outcome::Cleared) => {
            match sandbox.rollback.clone().or_else(|| sandbox.saved.clone()) {
                Some(snapshot) => {
                    // What was given up was not saved; the state before it is what there is.
                    let discarded = sandbox.cause.cause == Cause::UserDiscard;
                    draft.hibernated(snapshot, if discarded { Cause::UserDiscard } else { Cause::Saved })
                }
                None => Stepped::Ignored(Ignored::Misplaced),
            }
        }
        (Phase::Failed { .. }, Outcome::Cleared) => draft.failed_and_cleared(),
        (Phase::Stopping { .. }, Outcome::Cleared) => draft.stopped(),
        (
            Phase::Provisioning { step: MakeStep::Clear, .. }
            | Phase::Resuming { step: ResumeStep::Clear, .. }
            | Phase::Verifying { .. }
            | Phase::Frozen { .. }
            | Phase::Hibernating { step: HibernateStep::Clear, .. }
            | Phase::Failed { .. }
            | Phase::Stopping { .. },
            Outcome::Failed(failure),
        ) => draft.retry(failure.what.clone()),
        (
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped,
            Outcome::Made { .. }
            | Outcome::Cleared
            | Outcome::Probed(_)
            | Outcome::Served(_)
            | Outcome::Hooked(_)
            | Outcome::Frozen
            | Outcome::Claimed { .. }
            | Outcome::Thawed
            | Outcome::Saved
            | Outcome::MemoryNotSaved { .. }
            | Outcome::Failed(_),
        ) => Stepped::Ignored(Ignored::Misplaced),
    }
}

/// Whether what is being saved is so only for the room that it takes: nobody asked for it to end, or to go back, and
/// whoever came since wants it to run.
fn stays_frozen(sandbox: &Sandbox) -> bool {
    let for_room = sandbox.cause.cause == Cause::MemoryShort && sandbox.rollback.is_none();
    let asked = sandbox.held || sandbox.rests_for != Some(Cause::MemoryShort);
    for_room && (sandbox.entry.is_some() || !asked)
}

/// There is an instance, and it has to show that it works.
fn made(mut draft: Draft<'_>, phase: &Phase, rebuilds: u32, remaining_ms: Option<u64>) -> Stepped {
    if let Phase::Resuming { snapshot, .. } = phase
        && draft.next.has_memory_of(snapshot)
    {
        draft.next.forget_suspended();
        draft.next.memory = Some(Memory::Restored { snapshot: snapshot.clone() });
        draft.services_go_on();
    } else {
        let is_resumed = phase.name() == PhaseName::Resuming;
        draft.begin_services(if is_resumed { HookPoint::AfterResume } else { HookPoint::AfterStart });
    }
    draft.next.expires_at_ms = remaining_ms.map(|left_ms| draft.at.now_ms.saturating_add(left_ms));
    draft.next.evidence = Evidence::default();
    if is_planted(Planted::ReadyUnverified) {
        return draft.ready();
    }
    let verify = Verify { step: VerifyStep::Probe, rebuilds, findings: 0, was_ready: false };
    draft.verifying(verify, Cause::Made, &Actor::part("engine"), None)
}

/// An instance could not be made, or it is not known whether it was.
fn not_made(draft: Draft<'_>, rebuilds: u32, failure: &Failure) -> Stepped {
    let why = Some(failure.what.clone());
    let wanted = draft.next.entry.is_some();
    match failure.kind {
        FailureKind::Unknown => draft.retry(failure.what.clone()),
        // What failed is fenced off for ever and the next generation tried, so a late success of it can do no harm.
        FailureKind::Failed if wanted && rebuilds < draft.at.timings.rebuilds_max => {
            draft.remake(rebuilds + 1, Cause::CreateFailed, &Actor::part("engine"), why)
        }
        // It was stopped meanwhile, and what was saved is intact: once nothing is left of this one, it is as it was.
        FailureKind::Failed | FailureKind::Refused if !wanted && draft.next.made_from().is_some() => {
            draft.remake(rebuilds, Cause::CreateFailed, &Actor::part("engine"), why)
        }
        FailureKind::Failed | FailureKind::Refused => draft.failed(Cause::CreateFailed, why),
    }
}

/// What is to be replaced could not be saved. As long as it may yet be, nothing takes its place (T7).
fn not_sealed(draft: Draft<'_>, rebuilds: u32, failure: &Failure) -> Stepped {
    match failure.kind {
        FailureKind::Unknown => draft.retry(failure.what.clone()),
        FailureKind::Failed | FailureKind::Refused => {
            let cause = draft.next.cause.cause.clone();
            let why = format!("what it had could not be saved: {}", failure.what);
            draft.remake(rebuilds, cause, &Actor::part("engine"), Some(why))
        }
    }
}

/// It has its processors back, and is probed now, in what is left of the time.
fn thawed(mut draft: Draft<'_>) -> Stepped {
    draft.nudge_after_thaw();
    draft.services_count_from(draft.at.now_ms);
    let next = draft.first_check();
    draft.go_on(next)
}

/// The filesystem is sealed: the instance can go, in a time of its own.
fn saved(mut draft: Draft<'_>, operation: &OperationId) -> Stepped {
    let snapshot = Sandbox::snapshot_of(operation);
    if draft.next.memory == Some(Memory::Saving) {
        draft.next.memory = Some(Memory::Kept { snapshot: snapshot.clone() });
    }
    draft.next.saved = Some(snapshot);
    draft.next.sealed = None;
    let (at, limit_ms) = (draft.at, draft.at.timings.stop_ms);
    let work = draft.next.work(at, limit_ms);
    draft.next.phase = Phase::Hibernating { step: HibernateStep::Clear, save_failed: false, work };
    draft.is(Happened::Advanced)
}

/// It was probed, in verification.
fn probed(mut draft: Draft<'_>, evidence: &Evidence) -> Stepped {
    let complaint = evidence.complaint().unwrap_or_else(|| "no answer".to_owned());
    // Answers come twice, and late. What is older than what is known proves nothing more; unless what is known is from
    // the future, because the clock was set back.
    let (known_ms, made_ms) = (draft.next.evidence.at_ms(), evidence.at_ms());
    if made_ms < known_ms && known_ms <= Some(draft.at.now_ms) {
        return draft.retry(complaint);
    }
    let repeated = draft.next.evidence == *evidence;
    draft.next.evidence = evidence.clone();
    match evidence.finding_for(&draft.next.spec) {
        Some(Finding::Ok) => draft.ready(),
        // The instance is sound: whether its services come back is theirs to show, in what is left of the time.
        Some(Finding::Unhealthy | Finding::Gone) if evidence.is_about_services() => draft.back_to_services(complaint),
        Some(Finding::Unhealthy | Finding::Gone) if repeated => draft.retry(complaint),
        Some(Finding::Unhealthy) => found(draft, made_ms, Cause::ProbeFailed, complaint),
        // That there is nothing is what a probe found, not what a look showed: it counts like any other finding.
        Some(Finding::Gone) => found(draft, made_ms, Cause::ProviderLost, complaint),
        // Nothing is known: timeouts alone never replace an instance (T7).
        Some(Finding::Timeout) | None => draft.retry(complaint),
    }
}

/// One more bad finding: enough of them, over enough time, and the instance is given up (T7). The time is that of the
/// checks, so that answers which come late do not make it longer.
fn found(mut draft: Draft<'_>, made_ms: Option<u64>, cause: Cause, complaint: String) -> Stepped {
    if claim::is_on_trial(&draft.next) {
        return claim::broken(draft, Some(complaint));
    }
    let (at, mut enough) = (draft.at, false);
    if let Phase::Verifying { findings, found_at_ms, .. } = &mut draft.next.phase {
        if *findings == 0 {
            *found_at_ms = at.now_ms;
        }
        *findings = findings.saturating_add(1);
        let span_ms = made_ms.unwrap_or(0).min(at.now_ms).saturating_sub(*found_at_ms);
        enough = *findings >= at.timings.findings_min && span_ms >= at.timings.findings_span_ms;
    }
    if enough || is_planted(Planted::OneFindingKills) {
        given_up(draft, cause, Some(complaint))
    } else {
        draft.retry(complaint)
    }
}

/// The snapshot whose memory an instance began with that somebody waits for, and that never was ready.
pub(super) fn on_trial(sandbox: &Sandbox) -> Option<crate::id::SnapshotId> {
    let Phase::Verifying { was_ready: false, .. } = sandbox.phase else { return None };
    let Some(Memory::Restored { snapshot }) = &sandbox.memory else { return None };
    sandbox.entry.is_some().then(|| snapshot.clone())
}

/// The instance that is being verified will not do. Another one is made if somebody waits, in bounds (T4); else it is
/// lost, or, when it never worked, failed.
///
/// What worked once is sealed first, and the next one made from that (T7). What was made from a seal or from what was
/// saved, and does not come up, is made from it once more; what is new from its spec, by another. Nothing older takes the
/// place of a seal: what was acknowledged since is in it alone (L10), and going back is for users to ask for.
pub(super) fn given_up(draft: Draft<'_>, cause: Cause, message: Option<String>) -> Stepped {
    let Phase::Verifying { rebuilds, was_ready, .. } = draft.next.phase else {
        return Stepped::Ignored(Ignored::Misplaced);
    };
    if let Some(snapshot) = on_trial(&draft.next) {
        let said = message.unwrap_or_else(|| cause.code().to_owned());
        return draft.without_memory(rebuilds, snapshot, format!("what was restored does not work: {said}"));
    }
    if draft.next.entry.is_some() && rebuilds < draft.at.timings.rebuilds_max {
        let engine = Actor::part("engine");
        if was_ready {
            return draft.replace(rebuilds + 1, cause, &engine, message);
        }
        if rebuilds == 0 || draft.next.sealed.is_some() || draft.next.saved.is_none() {
            return draft.remake(rebuilds + 1, cause, &engine, message);
        }
    }
    if was_ready { draft.lost(cause, message) } else { draft.failed(cause, message) }
}
