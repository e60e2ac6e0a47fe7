//! The ladder of idling, the verbs that put to rest, saves that fail, and what is sealed before it is replaced.

use std::collections::BTreeMap;

use viv_core::lifecycle::{
    Actor, Cause, Denial, Desired, Effect, EntryKind, Event, Failure, FailureKind, Finding, Ignored, KeepAwake, Moment,
    NewSandbox, Outcome, Phase, PhaseName, ResumeStep, Sandbox, Seen, Stepped, Timings, outstanding,
};
use viv_core::{EndCause, Generation};

use crate::setup::{
    NOW_MS, after, created, delete, done, enter, evidence, hibernated, made, ready, seen, step_at, stop, user, wanted,
};

const IDLE: Event = Event::Idle { freezes: true };
const WINDOW_MS: u64 = 900_000;

fn failed(kind: FailureKind) -> Outcome {
    Outcome::Failed(Failure { kind, what: "no room".to_owned() })
}

fn well(now_ms: u64) -> Outcome {
    Outcome::Probed(evidence(Finding::Ok, now_ms))
}

fn effect(sandbox: &Sandbox) -> Effect {
    outstanding(sandbox).expect("something is outstanding").0
}

fn frozen(persistent: bool) -> Sandbox {
    let freezing = after(&ready(persistent), &IDLE, NOW_MS + WINDOW_MS);
    after(&freezing, &done(&freezing, Outcome::Frozen), NOW_MS + WINDOW_MS)
}

/// It was given up after findings, unasked.
fn lost(persistent: bool) -> Sandbox {
    let ended = seen(&ready(persistent), Seen::Ended(EndCause::OomKilled), NOW_MS);
    after(&ready(persistent), &ended, NOW_MS)
}

fn freeze() -> Event {
    Event::Freeze { by: user() }
}

fn thaw() -> Event {
    Event::Thaw { by: user() }
}

fn hibernate() -> Event {
    Event::Hibernate { by: user() }
}

#[test]
fn l5_the_ladder_is_frozen_then_saved_or_ended() {
    for persistent in [true, false] {
        let one = ready(persistent);
        assert_eq!(one.idle_at_ms(true), Some(NOW_MS + WINDOW_MS));
        assert_eq!(step_at(&one, &IDLE, NOW_MS + WINDOW_MS - 1), Stepped::Ignored(Ignored::NotIdle));
        let frozen = frozen(persistent);
        assert_eq!(frozen.idle_at_ms(true), Some(NOW_MS + 2 * WINDOW_MS));
        assert_eq!(step_at(&frozen, &IDLE, NOW_MS + 2 * WINDOW_MS - 1), Stepped::Ignored(Ignored::NotIdle));
        let resting = after(&frozen, &IDLE, NOW_MS + 2 * WINDOW_MS);
        let wanted = if persistent { PhaseName::Hibernating } else { PhaseName::Stopping };
        assert_eq!((resting.phase.name(), &resting.cause.cause), (wanted, &Cause::Idle));
        assert!(!resting.held, "whatever may wake it still does (L9)");
        // Where nothing can be frozen, both windows are one.
        let never = Event::Idle { freezes: false };
        assert_eq!(step_at(&one, &never, NOW_MS + WINDOW_MS), Stepped::Ignored(Ignored::NotIdle));
        assert_eq!(after(&one, &never, NOW_MS + 2 * WINDOW_MS).phase.name(), wanted);
    }
}

#[test]
fn l4_who_was_entered_has_a_whole_window() {
    let late_ms = NOW_MS + WINDOW_MS + 700_000;
    let thawing = after(&frozen(true), &enter(EntryKind::Gateway), late_ms);
    let probing = after(&thawing, &done(&thawing, Outcome::Thawed), late_ms);
    let again = after(&probing, &done(&probing, well(late_ms)), late_ms);
    assert_eq!(again.idle_at_ms(true), Some(late_ms + WINDOW_MS));
    // What could not be frozen has one too: it is not tried again and again.
    let freezing = after(&ready(true), &IDLE, NOW_MS + WINDOW_MS);
    let now_ms = NOW_MS + WINDOW_MS + 10_000;
    let back = after(&freezing, &done(&freezing, failed(FailureKind::Refused)), now_ms);
    let back = after(&back, &done(&back, failed(FailureKind::Refused)), now_ms);
    assert_eq!(effect(&back).code(), "probe", "what cannot be thawed may not be frozen");
    let back = after(&back, &done(&back, well(now_ms)), now_ms);
    assert_eq!((back.phase.name(), back.idle_at_ms(true)), (PhaseName::Ready, Some(now_ms + WINDOW_MS)));
}

#[test]
fn l6_l7_activity_and_leases_hold_it_off_on_every_rung() {
    for (one, window_ms) in [(ready(true), WINDOW_MS), (frozen(true), WINDOW_MS)] {
        let mut used = one.clone();
        used.active_at_ms = NOW_MS + 3 * WINDOW_MS;
        assert_eq!(used.idle_at_ms(true), Some(NOW_MS + 3 * WINDOW_MS + window_ms));
        let mut held = one;
        let until_ms = NOW_MS + 9 * WINDOW_MS;
        held.keep_awake.insert("thinking".to_owned(), KeepAwake { reason: String::new(), until_ms });
        assert_eq!(step_at(&held, &IDLE, until_ms - 1), Stepped::Ignored(Ignored::NotIdle));
        assert!(matches!(step_at(&held, &IDLE, until_ms), Stepped::Accepted(_)));
    }
}

#[test]
fn l13_a_frozen_one_does_not_outlive_its_hard_deadline() {
    for persistent in [true, false] {
        let frozen = frozen(persistent);
        let ended = after(&frozen, &seen(&frozen, Seen::Ended(EndCause::Expired), NOW_MS), NOW_MS);
        let wanted = if persistent { PhaseName::Hibernating } else { PhaseName::Stopping };
        assert_eq!((ended.phase.name(), &ended.cause.cause), (wanted, &Cause::Expired));
    }
}

#[test]
fn t5_freeze_and_thaw_by_hand_keep_the_generation_and_can_be_repeated() {
    let freezing = after(&ready(true), &freeze(), NOW_MS);
    assert_eq!((&freezing.cause.cause, &freezing.cause.by), (&Cause::UserFreeze, &user()));
    assert_eq!(step_at(&freezing, &freeze(), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
    let still = after(&freezing, &done(&freezing, Outcome::Frozen), NOW_MS);
    assert_eq!(step_at(&still, &freeze(), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
    let thawing = after(&still, &thaw(), NOW_MS);
    assert_eq!(effect(&thawing), Effect::Thaw { generation: Generation::FIRST });
    assert_eq!(step_at(&thawing, &thaw(), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
    let probing = after(&thawing, &done(&thawing, Outcome::Thawed), NOW_MS);
    assert_eq!(effect(&probing).code(), "probe", "it is not used before it was probed (T4)");
    let again = after(&probing, &done(&probing, well(NOW_MS)), NOW_MS);
    assert_eq!((again.phase.name(), again.generation), (PhaseName::Ready, Generation::FIRST));
    assert_eq!(step_at(&again, &thaw(), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
}

#[test]
fn l21_a_suspend_that_arrives_during_a_resume_is_refused() {
    let hibernating = after(&ready(true), &hibernate(), NOW_MS);
    let clearing = after(&hibernating, &done(&hibernating, Outcome::Saved), NOW_MS);
    let saved = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    let resuming = after(&saved, &enter(EntryKind::Schedule), NOW_MS);
    let verifying = after(&resuming, &done(&resuming, made()), NOW_MS);
    for coming in [&resuming, &verifying, &created(true)] {
        for verb in [freeze(), hibernate()] {
            assert_eq!(step_at(coming, &verb, NOW_MS), Stepped::Denied(Denial::NotNow), "{verb:?} in {coming:?}");
        }
    }
    assert_eq!(step_at(&saved, &thaw(), NOW_MS), Stepped::Denied(Denial::NotNow));
}

#[test]
fn l9_hibernated_by_hand_is_woken_by_traffic_and_stopped_is_not() {
    let rested = |verb: &Event| {
        let saving = after(&ready(true), verb, NOW_MS);
        let clearing = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
        after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS)
    };
    let hibernated = rested(&hibernate());
    assert_eq!((hibernated.held, &hibernated.cause.by), (false, &user()));
    for kind in [EntryKind::Gateway, EntryKind::Schedule] {
        assert_eq!(after(&hibernated, &enter(kind), NOW_MS).phase.name(), PhaseName::Resuming);
        assert_eq!(step_at(&rested(&stop()), &enter(kind), NOW_MS), Stepped::Denied(Denial::Held));
    }
    // A stop of what is hibernated holds it; asking again to hibernate does not undo that.
    let held = after(&hibernated, &stop(), NOW_MS);
    assert_eq!(step_at(&held, &hibernate(), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
    assert!(held.held);
    // What is not persistent has nothing to be saved in.
    assert_eq!(step_at(&ready(false), &hibernate(), NOW_MS), Stepped::Denied(Denial::Ephemeral));
}

/// Its save has failed once.
fn save_failed(before: &Sandbox) -> Sandbox {
    let saving = after(before, &stop(), NOW_MS);
    after(&saving, &done(&saving, failed(FailureKind::Failed)), NOW_MS)
}

#[test]
fn l10_a_save_that_failed_is_tried_again_at_once_when_somebody_says_so() {
    let one = save_failed(&ready(true));
    let wait_ms = outstanding(&one).expect("the save").1.retry_at_ms;
    assert!(wait_ms > NOW_MS);
    let again = after(&one, &Event::RetrySave { by: user() }, NOW_MS);
    let (save, work) = outstanding(&again).expect("the same save");
    assert_eq!((save, work.retry_at_ms), (effect(&one), 0));
    let clearing = after(&again, &done(&again, Outcome::Saved), NOW_MS);
    let saved = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!((saved.phase.name(), saved.held), (PhaseName::Hibernated, true));
    for verb in [Event::RetrySave { by: user() }, Event::Discard { by: user() }] {
        for other in [ready(true), saved.clone(), after(&ready(true), &stop(), NOW_MS)] {
            assert_eq!(step_at(&other, &verb, NOW_MS), Stepped::Denied(Denial::NoFailedSave));
        }
    }
}

#[test]
fn l10_what_is_discarded_is_as_it_was_saved_before_or_is_made_anew() {
    let discard = Event::Discard { by: user() };
    // Nothing was ever saved.
    let clearing = after(&save_failed(&ready(true)), &discard, NOW_MS);
    assert_eq!((effect(&clearing).code(), &clearing.cause.cause), ("clear", &Cause::UserDiscard));
    let gone = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!((gone.phase.name(), gone.due_at_ms(), &gone.cause.by), (PhaseName::Failed, None, &user()));
    let anew = after(&gone, &enter(EntryKind::Ensure), NOW_MS);
    assert_eq!(anew.phase.name(), PhaseName::Provisioning);
    // It was saved before: that is what there is.
    let mut one = ready(true);
    one.saved = Some("snp_before".parse().expect("an id"));
    let clearing = after(&save_failed(&one), &discard, NOW_MS);
    let rested = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!(rested.phase, Phase::Hibernated { snapshot: "snp_before".parse().expect("an id") });
    assert_eq!(rested.cause.cause, Cause::UserDiscard);
}

#[test]
fn l20_a_delete_in_the_middle_of_a_save_has_nothing_but_the_end_before_it() {
    let saving = after(&ready(true), &stop(), NOW_MS);
    let late = done(&saving, Outcome::Saved);
    let going = after(&saving, &delete(), NOW_MS);
    assert_eq!(effect(&going).code(), "clear");
    assert_eq!(step_at(&going, &late, NOW_MS), Stepped::Ignored(Ignored::StaleOperation));
    let from_snapshot = after(&hibernated(), &delete(), NOW_MS);
    assert!(!hibernated().uses().is_empty() && from_snapshot.uses().is_empty(), "what is to be gone is never resumed");
    let gone = after(&going, &done(&going, Outcome::Cleared), NOW_MS);
    assert!(gone.is_over());
    for verb in [freeze(), thaw(), hibernate(), Event::RetrySave { by: user() }, Event::Discard { by: user() }] {
        assert_eq!(step_at(&gone, &verb, NOW_MS), Stepped::Denied(Denial::Gone));
    }
}

/// What is to be replaced is sealed, and the next instance made from that.
fn sealed() -> (Sandbox, viv_core::SnapshotId) {
    let sealing = after(&lost(true), &enter(EntryKind::Ensure), NOW_MS);
    let Effect::Save { generation: Generation(1), snapshot, memory: false } = effect(&sealing) else {
        panic!("{sealing:?}")
    };
    let clearing = after(&sealing, &done(&sealing, Outcome::Saved), NOW_MS);
    assert_eq!(effect(&clearing), Effect::Clear { generation: Generation(1) });
    let making = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!(
        effect(&making),
        Effect::Restore { generation: Generation(2), snapshot: snapshot.clone(), memory: false }
    );
    (after(&making, &done(&making, made()), NOW_MS), snapshot)
}

/// Enough bad findings, over enough time.
fn found_bad(mut sandbox: Sandbox) -> Sandbox {
    for after_ms in [0, 5_000, 10_000] {
        let now_ms = NOW_MS + after_ms;
        let bad = Outcome::Probed(evidence(Finding::Unhealthy, now_ms));
        sandbox = after(&sandbox, &done(&sandbox, bad), now_ms);
    }
    assert_ne!(sandbox.phase.name(), PhaseName::Verifying);
    sandbox
}

#[test]
fn t7_what_can_be_saved_is_sealed_before_another_takes_its_place() {
    let (probing, snapshot) = sealed();
    assert_eq!(probing.saved, None, "whether it is good has to be seen");
    let again = after(&probing, &done(&probing, well(NOW_MS)), NOW_MS);
    assert_eq!((again.phase.name(), &again.saved, &again.sealed), (PhaseName::Ready, &Some(snapshot), &None));
    // What leaves nothing has nothing that is worth keeping.
    let anew = after(&lost(false), &enter(EntryKind::Ensure), NOW_MS);
    assert_eq!(effect(&anew).code(), "clear");
}

#[test]
fn t7_as_long_as_a_seal_may_yet_succeed_nothing_takes_its_place() {
    let mut sealing = after(&lost(true), &enter(EntryKind::Ensure), NOW_MS);
    for _ in 0..20 {
        sealing = after(&sealing, &done(&sealing, failed(FailureKind::Unknown)), NOW_MS);
        assert!(matches!(sealing.phase, Phase::Resuming { step: ResumeStep::Seal, .. }));
    }
    let deadline_at_ms = sealing.phase.work().expect("work").deadline_at_ms;
    let kept = after(&sealing, &Event::Due, deadline_at_ms);
    assert_eq!((kept.phase.name(), &kept.cause.cause), (PhaseName::Lost, &Cause::SaveFailed));
    assert_eq!(kept.cause.message.as_deref(), Some("no room"));
    assert_eq!(effect(&after(&kept, &enter(EntryKind::Ensure), NOW_MS)).code(), "save", "somebody can try again");
    // A stop meanwhile: what was sealed is what it is saved as.
    let sealing = after(&lost(true), &enter(EntryKind::Ensure), NOW_MS);
    let told = after(&sealing, &stop(), NOW_MS);
    let clearing = after(&told, &done(&told, Outcome::Saved), NOW_MS);
    let rested = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    let Effect::Save { snapshot, .. } = effect(&sealing) else { panic!("{sealing:?}") };
    assert_eq!((rested.phase, rested.desired), (Phase::Hibernated { snapshot }, Desired::Hibernated));
}

#[test]
fn t4_l10_what_was_sealed_is_tried_again_in_bounds_and_never_passed_over_for_something_older() {
    let (mut probing, seal) = sealed();
    let older: viv_core::SnapshotId = "snp_older".parse().expect("an id");
    probing.saved = Some(older.clone());
    // What was made from the seal does not come up: what was acknowledged is in the seal alone, so that is next.
    for generation in [Generation(3), Generation(4)] {
        let recovering = found_bad(probing);
        let Phase::Resuming { snapshot, step: ResumeStep::Clear, .. } = &recovering.phase else {
            panic!("{recovering:?}")
        };
        assert_eq!((snapshot, &recovering.cause.cause), (&seal, &Cause::ProbeFailed));
        let making = after(&recovering, &done(&recovering, Outcome::Cleared), NOW_MS);
        assert_eq!(effect(&making), Effect::Restore { generation, snapshot: seal.clone(), memory: false });
        probing = after(&making, &done(&making, made()), NOW_MS);
    }
    let failed = found_bad(probing);
    assert_eq!((failed.phase.name(), &failed.cause.cause), (PhaseName::Failed, &Cause::ProbeFailed));
    assert_eq!(failed.cause.message.as_deref(), Some("exec: not as it has to be"), "with the evidence");
    assert_eq!((&failed.saved, &failed.sealed), (&Some(older), &Some(seal.clone())), "both survive that");
    // Somebody asks again: it is still what the next one is made from.
    let cleared = after(&failed, &done(&failed, Outcome::Cleared), NOW_MS);
    let again = after(&cleared, &enter(EntryKind::Ensure), NOW_MS);
    assert!(matches!(again.phase, Phase::Resuming { snapshot, .. } if snapshot == seal));
}

#[test]
fn t4_what_was_saved_and_does_not_come_up_is_made_from_it_once_more_after_a_pause() {
    let asleep = hibernated();
    let resuming = after(&asleep, &enter(EntryKind::Ensure), NOW_MS);
    let again = found_bad(after(&resuming, &done(&resuming, made()), NOW_MS));
    let Phase::Resuming { snapshot, step: ResumeStep::Clear, work, .. } = &again.phase else { panic!("{again:?}") };
    assert_eq!((Some(snapshot), &again.cause.cause), (asleep.saved.as_ref(), &Cause::ProbeFailed));
    let found_ms = NOW_MS + 10_000;
    assert!((found_ms + 100..=found_ms + 200).contains(&work.retry_at_ms), "{work:?}");
    let making = after(&again, &done(&again, Outcome::Cleared), NOW_MS);
    let failed = found_bad(after(&making, &done(&making, made()), NOW_MS));
    assert_eq!((failed.phase.name(), &failed.saved), (PhaseName::Failed, &asleep.saved));
    // Who asks is not made to wait.
    let cleared = after(&failed, &done(&failed, Outcome::Cleared), NOW_MS);
    let anew = after(&cleared, &enter(EntryKind::Ensure), NOW_MS);
    assert_eq!(anew.phase.work().expect("it is to be cleared").retry_at_ms, 0);
}

#[test]
fn l9_stopped_before_another_was_made_it_is_lost_or_failed_as_it_was_before() {
    let stopped = |clearing: &Sandbox| {
        assert_eq!((clearing.phase.name(), effect(clearing).code()), (PhaseName::Provisioning, "clear"));
        let told = after(clearing, &stop(), NOW_MS);
        let next = after(&told, &done(&told, Outcome::Cleared), NOW_MS);
        assert_eq!((&next.cause.cause, &next.cause.by), (&Cause::UserStop, &user()));
        assert_eq!(next.cause.message.as_deref(), Some("stopped before another instance was made"));
        next.phase.name()
    };
    let worked = after(&ready(true), &Event::Reset { by: user() }, NOW_MS);
    assert_eq!(stopped(&worked), PhaseName::Lost);
    let never = after(&created(true), &done(&created(true), failed(FailureKind::Failed)), NOW_MS);
    assert_eq!(stopped(&never), PhaseName::Failed);
}

#[test]
fn t10_what_was_to_rest_and_comes_back_rests_for_the_same_cause() {
    let one = ready(true);
    for (event, cause, part) in [
        (seen(&one, Seen::Ended(EndCause::Expired), NOW_MS), Cause::Expired, "expiry"),
        (Event::Drain { by: Actor::part("drain") }, Cause::Drained, "engine"),
    ] {
        let saving = after(&one, &event, NOW_MS);
        let away = after(&saving, &seen(&saving, Seen::Absent, NOW_MS), NOW_MS);
        assert_eq!((&away.phase, away.desired), (&Phase::Lost, Desired::Hibernated));
        let back = after(&away, &seen(&away, Seen::Running, NOW_MS), NOW_MS);
        assert_eq!(back.phase.name(), PhaseName::Hibernating);
        assert_eq!((back.cause.cause, back.cause.by), (cause, Actor::part(part)));
    }
}

#[test]
fn j7_many_that_fail_at_once_are_not_tried_again_at_once() {
    let timings = Timings::default();
    let at = Moment { now_ms: NOW_MS, timings: &timings, no_memory: None };
    let mut waits: BTreeMap<u64, usize> = BTreeMap::new();
    for number in 0..200 {
        let id = format!("sbx_{number}").parse().expect("an id");
        let one = Sandbox::create(NewSandbox { id, ..wanted(true) }, at);
        let retrying = after(&one, &done(&one, failed(FailureKind::Unknown)), NOW_MS);
        *waits.entry(retrying.phase.work().expect("a try").retry_at_ms - NOW_MS).or_default() += 1;
    }
    assert!(waits.keys().all(|wait_ms| (100..=200).contains(wait_ms)), "{waits:?}");
    assert!(waits.values().all(|together| *together <= 10), "{waits:?}");
}

#[test]
fn t4_one_entry_leads_to_as_many_instances_as_are_allowed_and_no_more() {
    let freezing = after(&ready(true), &freeze(), NOW_MS);
    let frozen = after(&freezing, &done(&freezing, Outcome::Frozen), NOW_MS);
    let thawing = after(&frozen, &enter(EntryKind::Ensure), NOW_MS);
    // What worked is sealed, and made from that again; what was made so is made from it again.
    let mut recovering = found_bad(after(&thawing, &done(&thawing, Outcome::Thawed), NOW_MS));
    assert_eq!(effect(&recovering).code(), "save");
    recovering = after(&recovering, &done(&recovering, Outcome::Saved), NOW_MS);
    for _ in 0..Timings::default().rebuilds_max {
        assert_eq!(effect(&recovering).code(), "clear");
        let making = after(&recovering, &done(&recovering, Outcome::Cleared), NOW_MS);
        recovering = found_bad(after(&making, &done(&making, made()), NOW_MS));
    }
    assert_eq!((recovering.phase.name(), recovering.generation), (PhaseName::Failed, Generation(3)));
}
