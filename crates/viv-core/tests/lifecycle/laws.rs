//! What holds of every single step, said without looking at how `step` does it.

use viv_core::EndCause;
use viv_core::lifecycle::{
    Accepted, Cause, Denial, Desired, Effect, Event, Evidence, Finding, FreezeStep, Happened, HibernateStep, Ignored,
    MakeStep, Memory, Outcome, Phase, PhaseName, ResumeStep, Sandbox, Seen, Stepped, Timings, VerifyStep, outstanding,
};
use viv_core::spec::{Hibernate, ServiceName};

/// Whether nothing is under way.
pub(crate) fn is_settled(phase: &Phase) -> bool {
    match phase {
        Phase::Ready | Phase::Hibernated { .. } | Phase::Lost | Phase::Stopped => true,
        Phase::Frozen { step } => *step == FreezeStep::Done,
        Phase::Failed { work } => work.is_none(),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Hibernating { .. }
        | Phase::Resuming { .. }
        | Phase::Stopping { .. } => false,
    }
}

/// Panics unless the answer keeps every law.
pub(crate) fn check(before: &Sandbox, event: &Event, now_ms: u64, answer: &Stepped) {
    match answer {
        Stepped::Accepted(accepted) => {
            record(before, accepted, now_ms);
            generation(before, event, accepted);
            operations(before, &accepted.next, now_ms);
            arrivals(before, event, accepted);
            wishes(before, event, accepted);
            whose(before, event, accepted);
            patience(before, event, accepted, now_ms);
            ladder(before, event, accepted, now_ms);
            kept(before, event, accepted);
            way_back(before, event, accepted);
            memory(before, event, &accepted.next);
            room(before, event, &accepted.next, now_ms);
        }
        Stepped::Ignored(why) => ignored(before, event, *why),
        Stepped::Denied(why) => {
            denied(before, event, *why);
        }
    }
}

/// Nothing is refused without ground: what is gone is, what a user stopped is for traffic, and what a verb cannot do
/// where the record is.
fn denied(before: &Sandbox, event: &Event, why: Denial) {
    let gone = before.deleted || before.desired == Desired::Gone;
    assert_eq!(gone, why == Denial::Gone, "{event:?} in {:?}", before.phase);
    let phase = before.phase.name();
    match event {
        Event::Enter { kind, .. } => assert!(gone || (before.held && !kind.is_explicit() && why == Denial::Held)),
        Event::Freeze { .. } => assert!(gone || (phase != PhaseName::Frozen && why == Denial::NotNow)),
        Event::Thaw { .. } => {
            assert!(gone || (why == Denial::NotNow && !matches!(phase, PhaseName::Frozen | PhaseName::Ready)));
        }
        Event::Hibernate { .. } => match why {
            Denial::Ephemeral => assert!(!before.policy.persistent),
            Denial::Gone | Denial::Held | Denial::NotNow | Denial::NoFailedSave => {
                let at_rest = [PhaseName::Ready, PhaseName::Frozen, PhaseName::Hibernated].contains(&phase);
                assert!(gone || (why == Denial::NotNow && !at_rest));
            }
        },
        Event::RetrySave { .. } | Event::Discard { .. } => {
            let failed = matches!(before.phase, Phase::Hibernating { save_failed: true, .. });
            assert!(gone || (why == Denial::NoFailedSave && !failed));
        }
        Event::Rollback { .. } | Event::Reset { .. } => assert!(gone),
        Event::Stop { .. }
        | Event::Delete { .. }
        | Event::Idle { .. }
        | Event::MakeRoom { .. }
        | Event::Rest { .. }
        | Event::Drain { .. }
        | Event::Unhealthy { .. }
        | Event::Done { .. }
        | Event::Seen { .. }
        | Event::Probed { .. }
        | Event::Due => panic!("{event:?} was denied"),
    }
}

fn ignored(before: &Sandbox, event: &Event, why: Ignored) {
    let current = before.phase.work().map(|work| &work.operation);
    match event {
        Event::Done { operation, .. } => {
            let stale = current != Some(operation);
            assert_eq!(stale, why == Ignored::StaleOperation, "{event:?} in {:?}", before.phase);
            assert!(stale || why == Ignored::Misplaced, "{event:?} in {:?}: {why:?}", before.phase);
        }
        Event::Seen { generation, .. } | Event::Probed { generation, .. } => {
            assert_eq!(*generation != before.generation, why == Ignored::StaleGeneration);
        }
        Event::Due => assert_eq!(why, Ignored::NotDue),
        Event::Unhealthy { .. } => assert_eq!(why, Ignored::Busy),
        Event::Rest { .. } | Event::Drain { .. } => {
            assert!(matches!(why, Ignored::NotIdle | Ignored::Busy | Ignored::NothingNew));
        }
        Event::Idle { .. } => assert!(matches!(why, Ignored::NotIdle | Ignored::Busy)),
        Event::MakeRoom { .. } => assert!(matches!(why, Ignored::NotDue | Ignored::Busy)),
        Event::RetrySave { .. } | Event::Discard { .. } => panic!("{event:?} was dropped in {:?}", before.phase),
        Event::Enter { .. }
        | Event::Stop { .. }
        | Event::Delete { .. }
        | Event::Freeze { .. }
        | Event::Thaw { .. }
        | Event::Hibernate { .. }
        | Event::Rollback { .. }
        | Event::Reset { .. } => assert_eq!(why, Ignored::NothingNew),
    }
    if let Event::Enter { .. } = event {
        // Whoever asks is answered by what is there, or by what is under way.
        assert!(before.desired == Desired::Running && (before.entry.is_some() || before.phase == Phase::Ready));
    }
    if let Event::Stop { .. } = event {
        assert!(before.desired != Desired::Running && before.entry.is_none(), "a stop was dropped: {before:?}");
    }
}

/// Whether somebody wants it to run.
fn is_entry(event: &Event) -> bool {
    matches!(event, Event::Enter { .. } | Event::Rollback { .. } | Event::Reset { .. })
}

/// The version grows by exactly one; who it is and by which policy it lives never change (L16); every transition has a
/// cause and a time (T10).
fn record(before: &Sandbox, accepted: &Accepted, now_ms: u64) {
    let next = &accepted.next;
    assert_eq!(next.version, before.version + 1);
    assert_eq!(next.policy, before.policy);
    assert_eq!(
        (&next.id, &next.project, &next.name, &next.spec, &next.labels, next.created_at_ms),
        (&before.id, &before.project, &before.name, &before.spec, &before.labels, before.created_at_ms)
    );
    let (from, to) = (before.phase.name(), next.phase.name());
    if from == to {
        assert!(!matches!(accepted.happened, Happened::Moved { .. }));
        assert_eq!(next.phase_since_ms, before.phase_since_ms);
    } else {
        assert_eq!(accepted.happened, Happened::Moved { from, to });
        assert_eq!((next.phase_since_ms, next.cause.at_ms), (now_ms, now_ms));
    }
}

/// The generation grows by one, only when an instance is to be made, only for somebody who waits for it, and only after
/// the last one was seen to be gone (T5, L4, L15).
fn generation(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let next = &accepted.next;
    if next.generation == before.generation {
        return;
    }
    assert_eq!(next.generation, before.generation.next());
    assert!(next.entry.is_some() && next.desired == Desired::Running, "nobody wants {next:?}");
    assert_eq!((&next.evidence, &next.observed), (&Evidence::default(), &None), "that was about the last one");
    assert!(matches!(
        next.phase,
        Phase::Provisioning { step: MakeStep::Make, .. } | Phase::Resuming { step: ResumeStep::Make, .. }
    ));
    let cleared = match &before.phase {
        Phase::Hibernated { .. } => true,
        Phase::Provisioning { step: MakeStep::Clear, .. } | Phase::Resuming { step: ResumeStep::Clear, .. } => {
            matches!(event, Event::Done { outcome: Outcome::Cleared, .. })
        }
        Phase::Provisioning { step: MakeStep::Make, .. }
        | Phase::Resuming { step: ResumeStep::Seal | ResumeStep::Make, .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    };
    assert!(cleared, "{event:?} made another one of {:?}", before.phase);
}

/// What is outstanding has an id of its own and a deadline; what is settled has nothing outstanding.
fn operations(before: &Sandbox, next: &Sandbox, now_ms: u64) {
    assert_eq!(outstanding(next).is_none(), is_settled(&next.phase), "{:?}", next.phase);
    assert!(next.operations == before.operations || next.operations == before.operations + 1);
    let (last, now) = (before.phase.work(), next.phase.work());
    let Some(work) = now else { return };
    let kept = last.is_some_and(|last| last.operation == work.operation);
    assert_eq!(kept, next.operations == before.operations, "an id is used twice, or for nothing: {work:?}");
    if !kept {
        assert!(work.operation.as_str().ends_with(&format!("x{}", next.operations)));
        // The making that follows a clearing has what the clearing left of the time.
        let continued = last.is_some_and(|last| last.deadline_at_ms == work.deadline_at_ms);
        assert!(continued || work.deadline_at_ms > now_ms || now_ms == u64::MAX);
    }
    assert!(next.due_at_ms().is_some());
}

/// Where a phase can be reached at all, this is the only way.
fn arrivals(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let next = &accepted.next;
    let Happened::Moved { from, to } = accepted.happened else { return };
    let cleared = matches!(event, Event::Done { outcome: Outcome::Cleared, .. });
    match to {
        PhaseName::Ready => {
            let Event::Done { outcome: Outcome::Probed(evidence), .. } = event else { panic!("ready by {event:?}") };
            assert_eq!(from, PhaseName::Verifying);
            let ports_checked = before.spec.ports.iter().all(|port| evidence.ports.iter().any(|at| at.port == *port));
            let all = [&evidence.exec, &evidence.filesystem].into_iter().flatten();
            let all: Vec<_> = all.chain(evidence.ports.iter().map(|port| &port.check)).collect();
            let services = before.spec.services.iter();
            let served = |name: &ServiceName| {
                evidence.services.iter().any(|at| at.service == *name && at.check.finding == Finding::Ok)
            };
            assert!(services.map(|service| &service.name).all(served), "{evidence:?}");
            assert!(before.hook.is_none(), "ready before its hook was performed");
            assert!(ports_checked && all.len() == 2 + evidence.ports.len());
            assert!(all.iter().all(|check| check.finding == Finding::Ok), "{evidence:?}");
            assert_eq!(next.evidence, *evidence);
        }
        PhaseName::Stopped => assert!(from == PhaseName::Stopping && cleared),
        PhaseName::Hibernated => {
            let clearing = matches!(
                before.phase,
                Phase::Hibernating { step: HibernateStep::Clear, .. } | Phase::Resuming { step: ResumeStep::Clear, .. }
            );
            assert!(clearing && cleared && next.made_from().is_some());
            assert!(next.rollback.is_none(), "what was to be gone back to was forgotten: {next:?}");
        }
        PhaseName::Provisioning | PhaseName::Resuming => match from {
            PhaseName::Hibernated | PhaseName::Lost | PhaseName::Failed => {
                let waited_for = before.entry.is_some() && *event == Event::Due;
                assert!(is_entry(event) || waited_for, "{event:?} woke {before:?}");
            }
            // It did not come up, and the next one begins where it is to go back to.
            PhaseName::Provisioning if before.rollback.is_some() => {
                let to = if let Phase::Resuming { snapshot, .. } = &next.phase { Some(snapshot) } else { None };
                assert_eq!(to, before.rollback.as_ref());
            }
            _ if matches!(event, Event::Reset { .. }) => assert!(next.resetting && next.saved.is_none()),
            PhaseName::Verifying => assert!(before.entry.is_some()),
            // There was something to save of what is replaced, and it could not be, and nothing was before (T7).
            PhaseName::Resuming => {
                let sealing = matches!(before.phase, Phase::Resuming { step: ResumeStep::Seal, .. });
                let failed = matches!(event, Event::Done { outcome: Outcome::Failed(_), .. });
                assert!((sealing && failed && before.saved.is_none()) || before.sealed.is_some(), "{event:?}");
            }
            PhaseName::Provisioning
            | PhaseName::Ready
            | PhaseName::Frozen
            | PhaseName::Hibernating
            | PhaseName::Stopping
            | PhaseName::Stopped => panic!("{from:?} → {to:?}"),
        },
        PhaseName::Verifying
        | PhaseName::Frozen
        | PhaseName::Hibernating
        | PhaseName::Lost
        | PhaseName::Failed
        | PhaseName::Stopping => {}
    }
}

/// A transition that a user asked for is theirs, whenever it is made (O7).
fn whose(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let Happened::Moved { .. } = accepted.happened else { return };
    if accepted.next.cause.cause == Cause::UserStop {
        let by = match event {
            Event::Stop { by } => Some(by),
            Event::Done { .. } if accepted.next.is_over() => Some(&before.cause.by),
            Event::Enter { .. }
            | Event::Delete { .. }
            | Event::Freeze { .. }
            | Event::Thaw { .. }
            | Event::Hibernate { .. }
            | Event::RetrySave { .. }
            | Event::Discard { .. }
            | Event::Idle { .. }
            | Event::MakeRoom { .. }
            | Event::Rest { .. }
            | Event::Drain { .. }
            | Event::Unhealthy { .. }
            | Event::Rollback { .. }
            | Event::Reset { .. }
            | Event::Done { .. }
            | Event::Seen { .. }
            | Event::Probed { .. }
            | Event::Due => before.held_by.as_ref(),
        };
        assert_eq!(Some(&accepted.next.cause.by), by, "{event:?}");
    }
}

/// What somebody asked for is done, and nothing that nobody asked for (L9, L20).
fn wishes(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let next = &accepted.next;
    if before.deleted || before.desired == Desired::Gone {
        assert_eq!(next.desired, Desired::Gone);
        assert!(matches!(next.phase, Phase::Stopping { .. } | Phase::Stopped));
    }
    if next.deleted {
        assert!(matches!(next.phase, Phase::Stopping { .. } | Phase::Stopped), "{next:?}");
    }
    if next.desired == Desired::Gone {
        assert!(next.entry.is_none());
    }
    let entered = is_entry(event) || matches!(event, Event::Thaw { .. });
    assert!(entered || before.entry.is_some() || next.entry.is_none(), "an entry out of nothing");
    if before.held && !next.held {
        assert!(is_entry(event) && !matches!(event, Event::Enter { kind, .. } if !kind.is_explicit()));
    }
    if before.held && next.held {
        assert!(next.desired != Desired::Running && next.entry.is_none());
    }
    assert!(!next.held || next.held_by.is_some());
    if let Event::Stop { by } = event {
        assert!(next.desired != Desired::Running && next.entry.is_none());
        assert!(next.desired == Desired::Gone || next.held_by.as_ref() == Some(by));
        assert_eq!(next.desired == Desired::Hibernated, next.policy.persistent);
    }
    let undone =
        matches!(event, Event::Stop { .. } | Event::Delete { .. } | Event::Hibernate { .. } | Event::Discard { .. });
    if before.phase.name() == PhaseName::Hibernating && before.entry.is_some() && !undone {
        assert!(next.entry.is_some(), "an entry during hibernating was forgotten: {next:?}");
    }
    let expired = matches!(event, Event::Seen { seen: Seen::Ended(EndCause::Expired), .. });
    if expired && next.policy.persistent {
        assert_eq!(next.entry, before.entry, "who waits for what has expired still does");
    }
    if let Event::Rest { woken_at_ms, .. } = event {
        assert!(before.phase == Phase::Ready && before.active_at_ms <= *woken_at_ms && !next.held);
    }
    if entered {
        assert_eq!(next.desired, Desired::Running);
        assert!(next.entry.is_some() || next.phase == Phase::Ready);
    }
}

/// Timeouts never replace; findings do when there are enough, over enough time; a look at what is gone does (T7).
fn patience(before: &Sandbox, event: &Event, accepted: &Accepted, now_ms: u64) {
    let next = &accepted.next;
    let timings = Timings::default();
    if let (Event::Seen { seen: Seen::Frozen, .. }, Phase::Verifying { step, .. }) = (event, &next.phase) {
        assert_eq!(*step, VerifyStep::Thaw, "nothing is said to a frozen agent");
    }
    if accepted.happened == Happened::Overdue {
        assert!(*event == Event::Due && before.phase.work().is_some_and(|work| work.deadline_at_ms <= now_ms));
        assert!(next.phase.work().is_some_and(|work| work.overdue));
    }
    let Phase::Verifying { findings, found_at_ms, .. } = before.phase else { return };
    if next.phase.name() == PhaseName::Verifying || next.phase.name() == PhaseName::Ready {
        return;
    }
    // What was made ahead is nothing that anybody had, until it worked for whom it was given to (L19).
    if next.cause.cause == Cause::SpareBroken {
        let on_trial = matches!(before.phase, Phase::Verifying { was_ready: false, .. });
        assert!(on_trial && before.claimed == Some(before.generation), "{before:?}");
        return;
    }
    match event {
        Event::Done { outcome: Outcome::Probed(evidence), .. } => {
            let bad = matches!(evidence.finding(), Some(Finding::Unhealthy | Finding::Gone));
            let checked_ms = evidence.at_ms().expect("something was checked").min(now_ms);
            assert!(bad && findings + 1 >= timings.findings_min, "given up for {evidence:?}");
            assert!(checked_ms - found_at_ms >= timings.findings_span_ms);
        }
        // The instance is sound: it is not replaced for a service or a hook.
        Event::Done { outcome: Outcome::Served(_), .. } => {
            assert!(matches!(next.phase, Phase::Lost | Phase::Failed { .. }));
            assert_eq!(next.cause.cause, Cause::ServiceFailed);
            assert!(next.services.values().any(|run| run.ended.is_some()), "which one is said");
        }
        Event::Done { outcome: Outcome::Hooked(_), .. } => assert_eq!(next.cause.cause, Cause::HookFailed),
        Event::Seen { seen, .. } => assert!(matches!(seen, Seen::Ended(_) | Seen::Absent)),
        Event::Stop { .. } | Event::Delete { .. } | Event::Rollback { .. } | Event::Reset { .. } => {}
        Event::Due => {
            // What was restored and never was ready is nothing that anybody had.
            let on_trial = matches!(before.memory, Some(Memory::Restored { .. }))
                && matches!(before.phase, Phase::Verifying { was_ready: false, .. });
            let replaced = matches!(next.phase, Phase::Provisioning { .. } | Phase::Resuming { .. });
            assert!(!replaced || on_trial, "replaced for time");
        }
        Event::Enter { .. }
        | Event::Freeze { .. }
        | Event::Thaw { .. }
        | Event::Hibernate { .. }
        | Event::RetrySave { .. }
        | Event::Discard { .. }
        | Event::Idle { .. }
        | Event::MakeRoom { .. }
        | Event::Rest { .. }
        | Event::Drain { .. }
        | Event::Unhealthy { .. }
        | Event::Done { .. }
        | Event::Probed { .. } => panic!("{event:?}"),
    }
}

/// Nobody is put to rest before its window has passed, whoever keeps it awake has had his time, and nobody waits (L4 to
/// L7). By hand, only what works is frozen, and nothing that is on its way up is saved (L21).
fn ladder(before: &Sandbox, event: &Event, accepted: &Accepted, now_ms: u64) {
    let next = &accepted.next;
    match event {
        Event::Idle { freezes } => {
            let frozen_ms = before.kept_frozen.map_or(before.phase_since_ms, |kept| kept.since_ms);
            let since_ms = before.active_at_ms.max(frozen_ms);
            let window_ms = match (&before.phase, freezes) {
                (Phase::Ready, true) => before.policy.idle_ms,
                (Phase::Ready, false) => before.policy.idle_ms + before.policy.hibernate_ms,
                (Phase::Frozen { step: FreezeStep::Done }, _) => before.policy.hibernate_ms,
                (phase, _) => panic!("{phase:?} idles"),
            };
            assert!(now_ms >= since_ms.saturating_add(window_ms));
            assert!(before.keep_awake.values().all(|lease| lease.until_ms <= now_ms));
            assert!(before.entry.is_none() && before.desired == Desired::Running);
            let to = match (before.phase.name(), freezes) {
                (PhaseName::Ready, true) => PhaseName::Frozen,
                (_, _) if before.policy.persistent => PhaseName::Hibernating,
                (_, _) => PhaseName::Stopping,
            };
            assert_eq!((next.phase.name(), &next.cause.cause, next.held), (to, &Cause::Idle, false));
        }
        Event::Freeze { .. } => assert_eq!(before.phase, Phase::Ready),
        Event::Thaw { .. } => {
            let frozen = before.phase.name() == PhaseName::Frozen;
            assert!(frozen && next.phase.name() == PhaseName::Verifying && next.generation == before.generation);
        }
        Event::Hibernate { .. } => {
            assert!(!matches!(
                before.phase,
                Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. }
            ));
            assert!(next.desired == Desired::Hibernated && next.held == before.held);
        }
        Event::Unhealthy { .. } => {
            assert!(before.phase == Phase::Lost && before.entry.is_none() && next.held == before.held);
            let to = if before.policy.persistent { PhaseName::Hibernating } else { PhaseName::Stopping };
            assert_eq!((next.phase.name(), &next.cause.cause), (to, &Cause::Unhealthy));
        }
        Event::Enter { .. }
        | Event::Stop { .. }
        | Event::Delete { .. }
        | Event::RetrySave { .. }
        | Event::Discard { .. }
        | Event::Rollback { .. }
        | Event::Reset { .. }
        | Event::MakeRoom { .. }
        | Event::Rest { .. }
        | Event::Drain { .. }
        | Event::Done { .. }
        | Event::Seen { .. }
        | Event::Probed { .. }
        | Event::Due => {}
    }
}

/// The last good state is given up for a later one only when that was saved by intent, or what was made from it works;
/// and what could be saved of an instance is, before it is replaced (T7, L10).
fn kept(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let next = &accepted.next;
    if next.saved != before.saved {
        let hibernating = matches!(before.phase, Phase::Hibernating { step: HibernateStep::Save, .. });
        let by_intent = hibernating && matches!(event, Event::Done { outcome: Outcome::Saved, .. });
        let works = next.phase == Phase::Ready && next.saved == before.sealed;
        // Somebody asked for another state, or for none.
        let target = match event {
            Event::Rollback { snapshot, .. } => Some(snapshot),
            _ => before.rollback.as_ref(),
        };
        let back = target.is_some() && next.saved.as_ref() == target && next.rollback.is_none();
        let anew = matches!(event, Event::Reset { .. }) && next.saved.is_none() && next.resetting;
        assert!(by_intent || works || back || anew, "{event:?}: {next:?}");
    }
    let had_worked = match before.phase {
        Phase::Lost => true,
        Phase::Verifying { was_ready, .. } => was_ready,
        Phase::Provisioning { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    };
    let replaced = matches!(next.phase, Phase::Provisioning { .. } | Phase::Resuming { .. });
    if had_worked && replaced && before.policy.persistent && !next.resetting {
        assert!(matches!(next.phase, Phase::Resuming { step: ResumeStep::Seal, .. }), "{event:?}: {next:?}");
    }
}

/// A wish to go back stands until the next generation is made from there, or what is saved is that; only another wish,
/// or what is seen to live on while nobody waits, takes its place (L11, L15). What is acted upon has somebody who waits.
fn way_back(before: &Sandbox, event: &Event, accepted: &Accepted) {
    let next = &accepted.next;
    if next.rollback.is_some() && next.desired == Desired::Running {
        let given_up = matches!(next.phase, Phase::Lost | Phase::Failed { .. });
        assert!(next.entry.is_some() || given_up, "nobody waits for it to go back: {next:?}");
    }
    let Some(target) = before.rollback.as_ref().filter(|_| next.rollback != before.rollback) else { return };
    match event {
        Event::Rollback { snapshot, .. } => {
            assert!(next.rollback.as_ref() == Some(snapshot) || next.saved.as_ref() == Some(snapshot));
        }
        Event::Reset { .. } => assert!(next.resetting),
        Event::Seen { seen: Seen::Running | Seen::Frozen, .. } => {
            assert!(before.phase == Phase::Lost && before.entry.is_none() && next.generation == before.generation);
        }
        Event::Enter { .. }
        | Event::Stop { .. }
        | Event::Delete { .. }
        | Event::Freeze { .. }
        | Event::Thaw { .. }
        | Event::Hibernate { .. }
        | Event::RetrySave { .. }
        | Event::Discard { .. }
        | Event::Idle { .. }
        | Event::MakeRoom { .. }
        | Event::Rest { .. }
        | Event::Drain { .. }
        | Event::Unhealthy { .. }
        | Event::Done { .. }
        | Event::Seen { .. }
        | Event::Probed { .. }
        | Event::Due => {
            assert!(next.rollback.is_none() && next.saved.as_ref() == Some(target) && next.sealed.is_none());
            let from = match &next.phase {
                Phase::Hibernated { snapshot } => Some(snapshot),
                Phase::Resuming { step: ResumeStep::Make, snapshot, .. } => {
                    assert_eq!(next.generation, before.generation.next(), "gone back to before there is another one");
                    Some(snapshot)
                }
                Phase::Resuming { step: ResumeStep::Seal | ResumeStep::Clear, .. }
                | Phase::Provisioning { .. }
                | Phase::Verifying { .. }
                | Phase::Ready
                | Phase::Frozen { .. }
                | Phase::Hibernating { .. }
                | Phase::Lost
                | Phase::Failed { .. }
                | Phase::Stopping { .. }
                | Phase::Stopped => None,
            };
            assert_eq!(from, Some(target), "{event:?} dropped the wish to go back: {next:?}");
        }
    }
}

/// What is frozen goes to disk for the room that it takes only with its memory, and when that cannot be saved it is as
/// before and left alone for a while, unless somebody asked for it to end (L13).
fn room(before: &Sandbox, event: &Event, next: &Sandbox, now_ms: u64) {
    if let Event::MakeRoom { .. } = event {
        assert_eq!(before.phase, Phase::Frozen { step: FreezeStep::Done });
        assert!(before.kept_frozen.is_none_or(|kept| kept.until_ms <= now_ms), "{before:?}");
        assert!(matches!(outstanding(next), Some((Effect::Save { memory: true, .. }, _))), "{next:?}");
        assert!(next.policy.hibernate == Hibernate::Memory && next.cause.cause == Cause::MemoryShort);
    }
    let still = matches!(event, Event::Done { outcome: Outcome::MemoryNotSaved { frozen: true, .. }, .. });
    // An entry before it undoes what was asked for.
    let asked = before.held
        || before.rollback.is_some()
        || (before.entry.is_none() && before.rests_for != Some(Cause::MemoryShort));
    if still && before.cause.cause == Cause::MemoryShort && !asked {
        match &next.phase {
            Phase::Frozen { step: FreezeStep::Freeze { .. } } => {
                assert!(before.entry.is_none() && next.cause.cause == Cause::MemoryNotSaved);
                assert!(next.kept_frozen.is_some_and(|kept| kept.until_ms > now_ms && kept.failures > 0));
            }
            Phase::Verifying { step: VerifyStep::Thaw, .. } => assert!(before.entry.is_some()),
            phase => panic!("what nobody asked to end is {phase:?}"),
        }
        assert!(next.generation == before.generation && next.desired == Desired::Running);
    }
    if next.kept_frozen.is_some() {
        assert!(matches!(next.phase.name(), PhaseName::Frozen | PhaseName::Hibernating), "{event:?}: {next:?}");
    }
}

/// Memory belongs to the files that were saved with it, is asked for by policy alone, and is restored once at the most:
/// whatever goes wrong with it is followed by the files (L13).
fn memory(before: &Sandbox, event: &Event, next: &Sandbox) {
    if next.policy.hibernate == Hibernate::Filesystem {
        assert_eq!(next.memory, None);
    }
    let begins = before.phase.name() != PhaseName::Hibernating && next.phase.name() == PhaseName::Hibernating;
    if begins && next.policy.hibernate == Hibernate::Memory && next.cause.cause != Cause::Rollback {
        assert!(matches!(next.memory, Some(Memory::Saving | Memory::NotSaved { .. })), "{event:?}: {next:?}");
    }
    if next.phase.name() != PhaseName::Hibernating {
        assert_ne!(next.memory, Some(Memory::Saving), "{event:?}: {next:?}");
    }
    if let Some((Effect::Restore { memory: true, snapshot, .. }, _)) = outstanding(next) {
        assert_eq!(next.memory, Some(Memory::Kept { snapshot }));
    }
    if next.memory == before.memory {
        return;
    }
    let asked_for =
        |memory| matches!(outstanding(before), Some((Effect::Restore { memory: asked, .. }, _)) if asked == memory);
    match &next.memory {
        Some(Memory::Saving) => assert!(begins, "{event:?}: {next:?}"),
        Some(Memory::Kept { snapshot }) => {
            assert_eq!((&before.memory, next.saved.as_ref()), (&Some(Memory::Saving), Some(snapshot)));
            assert!(matches!(event, Event::Done { outcome: Outcome::Saved, .. }));
        }
        Some(Memory::Restored { .. }) => {
            assert!(asked_for(true) && matches!(event, Event::Done { outcome: Outcome::Made { .. }, .. }));
        }
        Some(Memory::NotRestored { .. }) => {
            let on_trial = matches!(before.memory, Some(Memory::Restored { .. }));
            assert!(asked_for(true) || on_trial, "{event:?}: {next:?}");
            // The files of the same moment, in another instance.
            assert!(matches!(next.phase, Phase::Resuming { step: ResumeStep::Clear, .. }), "{event:?}: {next:?}");
        }
        Some(Memory::NotSaved { .. }) | None => {}
    }
}
