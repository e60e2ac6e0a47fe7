//! Failures that happened elsewhere, named after their row in the list of incidents, at the level of `step`; and the
//! rules that are best read as a short story.

use viv_core::lifecycle::{
    Actor, Cause, Denial, Desired, Effect, EntryKind, Event, Failure, FailureKind, Finding, FreezeStep, HibernateStep,
    Ignored, KeepAwake, Outcome, Phase, PhaseName, RestAt, Sandbox, Seen, Stepped, outstanding,
};
use viv_core::{EndCause, Generation, SnapshotId};

use crate::explore::{events, explored};
use crate::setup::{
    NOW_MS, after, created, delete, done, enter, evidence, hibernated, made, ready, rollback, seen, step_at, stop,
    target, user,
};

const EVERY_KIND: [EntryKind; 5] =
    [EntryKind::Create, EntryKind::Ensure, EntryKind::Task, EntryKind::Gateway, EntryKind::Schedule];
const EVERY_FAILURE: [FailureKind; 3] = [FailureKind::Refused, FailureKind::Failed, FailureKind::Unknown];

fn failed(kind: FailureKind) -> Outcome {
    Outcome::Failed(Failure { kind, what: "as it goes".to_owned() })
}

fn effect(sandbox: &Sandbox) -> Effect {
    outstanding(sandbox).expect("something is outstanding").0
}

fn well(now_ms: u64) -> Outcome {
    Outcome::Probed(evidence(Finding::Ok, now_ms))
}

#[test]
fn incident_2_stuck_in_starting_and_deleted() {
    let mut stuck = created(false);
    for _ in 0..20 {
        stuck = after(&stuck, &done(&stuck, failed(FailureKind::Unknown)), NOW_MS);
    }
    assert_eq!(stuck.phase.name(), PhaseName::Provisioning);
    let going = after(&stuck, &delete(), NOW_MS);
    assert_eq!(effect(&going), Effect::Clear { generation: Generation::FIRST });
    let gone = after(&going, &done(&going, Outcome::Cleared), NOW_MS);
    assert_eq!((gone.is_over(), &gone.cause.cause), (true, &Cause::UserDelete));
}

#[test]
fn incident_10_a_slow_clean_up_does_not_touch_the_resumed_one() {
    let saving = after(&ready(true), &stop(), NOW_MS);
    let clearing = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
    let slow = done(&clearing, Outcome::Cleared);
    assert_eq!(effect(&clearing), Effect::Clear { generation: Generation(1) });
    let resuming = after(&after(&clearing, &slow, NOW_MS), &enter(EntryKind::Ensure), NOW_MS);
    assert!(matches!(effect(&resuming), Effect::Restore { generation: Generation(2), .. }));
    assert_eq!(step_at(&resuming, &slow, NOW_MS), Stepped::Ignored(Ignored::StaleOperation));
    let old = seen(&clearing, Seen::Absent, NOW_MS);
    assert_eq!(step_at(&resuming, &old, NOW_MS), Stepped::Ignored(Ignored::StaleGeneration));
}

#[test]
fn incident_17_a_deadline_is_in_the_record_and_the_sweep_finds_it() {
    let expired = after(&ready(false), &seen(&ready(false), Seen::Ended(EndCause::Expired), NOW_MS), NOW_MS);
    let text = serde_json::to_string(&expired).expect("JSON");
    let restarted: Sandbox = serde_json::from_str(&text).expect("a restart reads it");
    assert_eq!((restarted.phase.name(), &restarted.cause.cause), (PhaseName::Stopping, &Cause::Expired));
    assert_eq!(effect(&restarted), effect(&expired));
    let due_at_ms = restarted.due_at_ms().expect("the sweep comes back");
    // Whoever lost the race says it again, and nothing comes of it.
    let again = seen(&restarted, Seen::Ended(EndCause::Expired), NOW_MS);
    assert_eq!(step_at(&restarted, &again, NOW_MS), Stepped::Ignored(Ignored::Busy));
    let overdue = after(&restarted, &Event::Due, due_at_ms);
    assert!(overdue.due_at_ms() > Some(due_at_ms));
}

#[test]
fn incident_22_what_has_expired_is_not_brought_back() {
    let going = after(&ready(false), &seen(&ready(false), Seen::Ended(EndCause::Expired), NOW_MS), NOW_MS);
    let gone = after(&going, &done(&going, Outcome::Cleared), NOW_MS);
    for kind in EVERY_KIND {
        assert_eq!(step_at(&going, &enter(kind), NOW_MS), Stepped::Denied(Denial::Gone));
        assert_eq!(step_at(&gone, &enter(kind), NOW_MS), Stepped::Denied(Denial::Gone));
    }
    for (_, event) in events(&gone, NOW_MS) {
        if let Stepped::Accepted(accepted) = step_at(&gone, &event, NOW_MS) {
            assert_eq!((accepted.next.phase, event), (Phase::Stopped, delete()));
        }
    }
    // A persistent one is saved; that it was extended too late, and is said to run, does not wake it.
    let expired = seen(&ready(true), Seen::Ended(EndCause::Expired), NOW_MS);
    let saving = after(&ready(true), &expired, NOW_MS);
    assert_eq!(effect(&saving).code(), "save");
    let late = seen(&saving, Seen::Running, NOW_MS);
    assert_eq!(step_at(&saving, &late, NOW_MS), Stepped::Ignored(Ignored::Busy));
}

#[test]
fn incident_24_pausing_does_not_last_for_ever() {
    let freezing = after(&ready(true), &Event::Idle { freezes: true }, NOW_MS + 900_000);
    let Phase::Frozen { step: FreezeStep::Freeze { work } } = &freezing.phase else { panic!("{freezing:?}") };
    let thawing = after(&freezing, &Event::Due, work.deadline_at_ms);
    assert_eq!(effect(&thawing).code(), "thaw");
    let probing = after(&thawing, &done(&thawing, Outcome::Thawed), work.deadline_at_ms);
    let again = after(&probing, &done(&probing, well(work.deadline_at_ms)), work.deadline_at_ms);
    assert_eq!((again.phase.name(), again.generation), (PhaseName::Ready, Generation::FIRST));
    // Saved, and the answer never came: it is said, the same save is tried again, and it ends.
    let saving = after(&ready(true), &stop(), NOW_MS);
    let late_ms = saving.due_at_ms().expect("a deadline");
    let overdue = after(&saving, &Event::Due, late_ms);
    assert_eq!((effect(&overdue), &overdue.cause.cause), (effect(&saving), &Cause::SaveFailed));
    let clearing = after(&overdue, &done(&overdue, Outcome::Saved), late_ms);
    let done = after(&clearing, &done(&clearing, Outcome::Cleared), late_ms);
    assert_eq!(done.phase.name(), PhaseName::Hibernated);
}

#[test]
fn incident_26_a_create_that_failed_leaves_nothing() {
    let mut sandbox = created(false);
    let mut cleared = Vec::new();
    while sandbox.phase != (Phase::Failed { work: None }) {
        match effect(&sandbox) {
            Effect::Create { .. } => sandbox = after(&sandbox, &done(&sandbox, failed(FailureKind::Failed)), NOW_MS),
            Effect::Clear { generation } => {
                cleared.push(generation.0);
                sandbox = after(&sandbox, &done(&sandbox, Outcome::Cleared), NOW_MS);
            }
            other @ (Effect::Restore { .. }
            | Effect::Probe { .. }
            | Effect::Freeze { .. }
            | Effect::Claim { .. }
            | Effect::Thaw { .. }
            | Effect::Serve { .. }
            | Effect::Hook { .. }
            | Effect::Save { .. }) => panic!("{other:?}"),
        }
    }
    assert_eq!(cleared, [1, 2, 3], "every generation that was tried is cleared before the next, and the last one too");
}

#[test]
fn incident_28_an_error_is_left_on_evidence() {
    // It did not answer and was lost; it is seen to live, and shows that it works: the same one is ready again.
    let silent = Event::Probed { generation: Generation::FIRST, evidence: evidence(Finding::Timeout, NOW_MS) };
    let asked = after(&ready(false), &silent, NOW_MS);
    let lost = after(&asked, &Event::Due, asked.due_at_ms().expect("a deadline"));
    assert_eq!((lost.phase.name(), &lost.cause.cause), (PhaseName::Lost, &Cause::Unresponsive));
    let back = after(&lost, &seen(&lost, Seen::Running, NOW_MS + 60_000), NOW_MS + 60_000);
    let back = after(&back, &done(&back, well(NOW_MS + 60_000)), NOW_MS + 60_000);
    assert_eq!((back.phase.name(), back.generation), (PhaseName::Ready, Generation::FIRST));
    // It failed: an entry is enough, and nothing less is.
    let failed = after(&created(false), &done(&created(false), failed(FailureKind::Refused)), NOW_MS);
    let failed = after(&failed, &done(&failed, Outcome::Cleared), NOW_MS);
    assert_eq!(failed.due_at_ms(), None);
    let again = after(&failed, &enter(EntryKind::Ensure), NOW_MS);
    let again = after(&again, &done(&again, Outcome::Cleared), NOW_MS);
    let again = after(&again, &done(&again, made()), NOW_MS);
    let again = after(&again, &done(&again, well(NOW_MS)), NOW_MS);
    assert_eq!((again.phase.name(), again.generation), (PhaseName::Ready, Generation(2)));
}

#[test]
fn incident_30_a_sweep_does_not_end_a_create_in_flight() {
    let making = created(false);
    for sight in [Seen::Absent, Seen::Running, Seen::Ended(EndCause::Destroyed)] {
        let answer = step_at(&making, &seen(&making, sight, NOW_MS), NOW_MS);
        assert_eq!(answer, Stepped::Ignored(Ignored::Busy), "the intent was there first");
    }
    assert_eq!(after(&making, &done(&making, made()), NOW_MS).phase.name(), PhaseName::Verifying);
}

#[test]
fn incident_31_a_stop_is_not_undone_by_a_restore_in_flight() {
    let resuming = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    let told = after(&resuming, &stop(), NOW_MS);
    assert_eq!((told.desired, told.held, &told.entry), (Desired::Hibernated, true, &None));
    // The restore succeeds all the same: it is saved without becoming ready.
    let there = after(&told, &done(&told, made()), NOW_MS);
    assert_eq!((there.phase.name(), there.due_at_ms()), (PhaseName::Verifying, Some(NOW_MS)));
    let saving = after(&there, &Event::Due, NOW_MS);
    assert_eq!((effect(&saving).code(), &saving.cause.by), ("save", &user()));
    // Probed before that was acted upon, or idle: the stop stands.
    let was_ready = after(&there, &done(&there, well(NOW_MS)), NOW_MS);
    assert_eq!(step_at(&was_ready, &Event::Idle { freezes: true }, NOW_MS + 900_000), Stepped::Ignored(Ignored::Busy));
    let saving = after(&was_ready, &Event::Due, NOW_MS);
    assert_eq!((saving.phase.name(), saving.held), (PhaseName::Hibernating, true));
    // The restore fails: once nothing is left of it, it is as it was.
    for kind in [FailureKind::Failed, FailureKind::Refused] {
        let clearing = after(&told, &done(&told, failed(kind)), NOW_MS);
        assert_eq!(effect(&clearing), Effect::Clear { generation: told.generation });
        let back = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
        assert_eq!(back.phase.name(), PhaseName::Hibernated);
        assert_eq!(step_at(&back, &enter(EntryKind::Gateway), NOW_MS), Stepped::Denied(Denial::Held));
    }
}

pub(crate) fn incident_32_another_instance_is_another_generation_and_never_behind_ready() {
    for sandbox in explored().records.iter().filter(|sandbox| sandbox.phase == Phase::Ready) {
        for (word, event) in events(sandbox, NOW_MS) {
            if let Stepped::Accepted(accepted) = step_at(sandbox, &event, NOW_MS) {
                assert_eq!(accepted.next.generation, sandbox.generation, "{word}");
            }
        }
    }
    let oom = seen(&ready(false), Seen::Ended(EndCause::OomKilled), NOW_MS);
    let lost = after(&ready(false), &oom, NOW_MS);
    assert_eq!((lost.phase.name(), &lost.cause.cause), (PhaseName::Lost, &Cause::OomKilled));
    let again = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
    assert_eq!((effect(&again), again.generation), (Effect::Clear { generation: Generation(1) }, Generation(1)));
    let again = after(&again, &done(&again, Outcome::Cleared), NOW_MS);
    assert_eq!((effect(&again), again.generation), (Effect::Create { generation: Generation(2) }, Generation(2)));
}

#[test]
fn incident_33_a_kill_that_failed_is_not_called_stopped() {
    let mut going = after(&ready(false), &stop(), NOW_MS);
    for kind in EVERY_FAILURE {
        going = after(&going, &done(&going, failed(kind)), NOW_MS);
        assert_eq!(going.phase.name(), PhaseName::Stopping);
    }
    let absent = seen(&going, Seen::Absent, NOW_MS);
    assert_eq!(step_at(&going, &absent, NOW_MS), Stepped::Ignored(Ignored::Busy), "the clearing has to see it");
    let overdue = after(&going, &Event::Due, NOW_MS + 30_000);
    assert_eq!((overdue.phase.name(), &overdue.cause.cause), (PhaseName::Stopping, &Cause::KillFailed));
    assert_eq!(effect(&overdue), effect(&going), "it is tried on");
    let gone = after(&overdue, &done(&overdue, Outcome::Cleared), NOW_MS + 30_000);
    assert!(gone.is_over());
}

#[test]
fn l3_an_entry_during_hibernating_is_neither_forgotten_nor_a_chain() {
    let saving = after(&ready(true), &stop(), NOW_MS);
    let told = after(&saving, &enter(EntryKind::Ensure), NOW_MS);
    assert_eq!(effect(&told), effect(&saving), "what is under way ends first");
    let told = after(&told, &done(&told, Outcome::Saved), NOW_MS);
    let there = after(&told, &done(&told, Outcome::Cleared), NOW_MS);
    assert_eq!((there.phase.name(), there.due_at_ms()), (PhaseName::Hibernated, Some(NOW_MS)));
    assert_eq!(after(&there, &Event::Due, NOW_MS).phase.name(), PhaseName::Resuming);
    // The same when there turns out to be nothing to save.
    let told = after(&saving, &enter(EntryKind::Ensure), NOW_MS);
    let lost = after(&told, &seen(&told, Seen::Absent, NOW_MS), NOW_MS);
    assert_eq!((lost.phase.name(), lost.due_at_ms()), (PhaseName::Lost, Some(NOW_MS)));
    let sealing = after(&lost, &Event::Due, NOW_MS);
    assert_eq!(effect(&sealing).code(), "save", "unless there is something all the same");
    let making = after(&sealing, &done(&sealing, failed(FailureKind::Failed)), NOW_MS);
    assert_eq!(making.phase.name(), PhaseName::Provisioning);
}

#[test]
fn l3_who_waits_for_what_has_expired_still_does() {
    let probing = after(&created(true), &done(&created(true), made()), NOW_MS);
    let saving = after(&probing, &seen(&probing, Seen::Ended(EndCause::Expired), NOW_MS), NOW_MS);
    let saving = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
    let there = after(&saving, &done(&saving, Outcome::Cleared), NOW_MS);
    assert_eq!((there.phase.name(), there.due_at_ms()), (PhaseName::Hibernated, Some(NOW_MS)));
}

#[test]
fn t4_what_was_frozen_by_others_is_thawed_and_probed_before_it_is_used() {
    let frozen = after(&ready(true), &seen(&ready(true), Seen::Frozen, NOW_MS), NOW_MS);
    assert_eq!(effect(&frozen).code(), "thaw");
    let thawed = after(&frozen, &done(&frozen, Outcome::Thawed), NOW_MS);
    assert_eq!(effect(&thawed).code(), "probe");
}

#[test]
fn l8_a_stop_of_what_does_not_answer_ends_it() {
    let silent = Event::Probed { generation: Generation::FIRST, evidence: evidence(Finding::Timeout, NOW_MS) };
    let asked = after(&ready(true), &silent, NOW_MS);
    let saving = after(&asked, &stop(), NOW_MS);
    assert!(matches!(saving.phase, Phase::Hibernating { step: HibernateStep::Save, .. }));
    // And of one that is lost, when it is seen again.
    let lost = after(&asked, &Event::Due, asked.due_at_ms().expect("a deadline"));
    let told = after(&lost, &stop(), NOW_MS);
    for sight in [Seen::Running, Seen::Frozen, Seen::Ended(EndCause::OomKilled)] {
        let saving = after(&told, &seen(&told, sight, NOW_MS), NOW_MS);
        assert_eq!((effect(&saving).code(), &saving.cause.by), ("save", &user()));
    }
}

#[test]
fn l9_a_stop_in_the_middle_of_a_create_ends_stopped() {
    let told = after(&created(false), &stop(), NOW_MS);
    let late = done(&created(false), made());
    assert_eq!(step_at(&told, &late, NOW_MS), Stepped::Ignored(Ignored::StaleOperation));
    let gone = after(&told, &done(&told, Outcome::Cleared), NOW_MS);
    assert_eq!((gone.is_over(), gone.generation), (true, Generation::FIRST));
    // A persistent one: no other instance is made for it.
    let told = after(&created(true), &stop(), NOW_MS);
    let failed = after(&told, &done(&told, failed(FailureKind::Failed)), NOW_MS);
    assert_eq!((failed.phase.name(), failed.generation), (PhaseName::Failed, Generation::FIRST));
}

#[test]
fn l15_a_lost_one_is_cleared_before_the_next_and_not_replaced_if_that_fails() {
    let lost = after(&ready(false), &seen(&ready(false), Seen::Absent, NOW_MS), NOW_MS);
    let clearing = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
    let mut tried = clearing.clone();
    for kind in EVERY_FAILURE {
        tried = after(&tried, &done(&tried, failed(kind)), NOW_MS);
        assert_eq!((effect(&tried), tried.generation), (effect(&clearing), lost.generation));
    }
    let deadline_at_ms = tried.phase.work().expect("work").deadline_at_ms;
    let unproven = after(&tried, &Event::Due, deadline_at_ms);
    assert_eq!((unproven.phase.name(), &unproven.cause.cause), (PhaseName::Lost, &Cause::AbsenceUnproven));
    assert_eq!(unproven.generation, lost.generation);
}

/// Findings one after the other, each reported this often; whether the instance was given up.
fn given_up(finding: Finding, at: &[u64], times: usize) -> bool {
    let mut sandbox = after(&created(false), &done(&created(false), made()), NOW_MS);
    for after_ms in at {
        let now_ms = NOW_MS + after_ms;
        for _ in 0..times {
            sandbox = after(&sandbox, &done(&sandbox, Outcome::Probed(evidence(finding, now_ms))), now_ms);
            if sandbox.phase.name() != PhaseName::Verifying {
                return true;
            }
        }
    }
    false
}

#[test]
fn t7_replacing_needs_findings_and_time() {
    for finding in [Finding::Unhealthy, Finding::Gone] {
        assert!(!given_up(finding, &[0, 5_000, 9_999], 1), "too soon");
        assert!(!given_up(finding, &[0, 10_000], 1), "too few");
        assert!(!given_up(finding, &[0, 10_000], 3), "the same report again is the same finding");
        assert!(given_up(finding, &[0, 1, 10_000], 1));
    }
    assert!(!given_up(Finding::Timeout, &[0, 1, 10_000, 20_000, 29_000], 1), "nothing is known");
}

#[test]
fn t7_an_answer_that_comes_late_proves_nothing_more() {
    let probing = after(&created(false), &done(&created(false), made()), NOW_MS);
    let bad = Outcome::Probed(evidence(Finding::Unhealthy, NOW_MS + 2_000));
    let found = after(&probing, &done(&probing, bad), NOW_MS + 2_000);
    let late = after(&found, &done(&found, well(NOW_MS + 1_000)), NOW_MS + 3_000);
    assert_eq!(late.phase.name(), PhaseName::Verifying, "it was well before it was not");
    // The clock was set back by an hour: what is known is from the future, and does not hold it up for that long.
    let back_ms = NOW_MS - 3_600_000;
    let back = after(&found, &done(&found, well(back_ms)), back_ms);
    assert_eq!(back.phase.name(), PhaseName::Ready);
    // Made within a second, delivered over a minute.
    let mut sandbox = probing;
    for (made_ms, now_ms) in [(0, 0), (500, 500), (1_000, 25_000)] {
        let report = Outcome::Probed(evidence(Finding::Unhealthy, NOW_MS + made_ms));
        sandbox = after(&sandbox, &done(&sandbox, report), NOW_MS + now_ms);
    }
    assert_eq!(sandbox.phase.name(), PhaseName::Verifying);
}

#[test]
fn l17_who_was_woken_by_a_schedule_goes_back_unless_somebody_else_used_it() {
    let woken = {
        let asleep = Sandbox { held: false, held_by: None, ..hibernated() };
        let resuming = after(&asleep, &enter(EntryKind::Schedule), NOW_MS);
        let made = after(&resuming, &done(&resuming, made()), NOW_MS + 10);
        after(&made, &done(&made, Outcome::Probed(evidence(Finding::Ok, NOW_MS + 20))), NOW_MS + 20)
    };
    assert_eq!(woken.phase, Phase::Ready);
    let rest = |to, used_at_ms| Event::Rest { to, woken_at_ms: NOW_MS, used_at_ms, by: Actor::part("schedule") };
    let back = after(&woken, &rest(RestAt::Hibernated, 0), NOW_MS + 1_000);
    assert!(matches!(back.phase, Phase::Hibernating { .. }) && !back.held, "{back:?}");
    let frozen = after(&woken, &rest(RestAt::Frozen, 0), NOW_MS + 1_000);
    assert!(matches!(frozen.phase, Phase::Frozen { .. }), "{frozen:?}");
    // Somebody used it: as the record has it, or as is known beside it.
    let used = Sandbox { active_at_ms: NOW_MS + 500, ..woken.clone() };
    for (sandbox, used_at_ms) in [(&used, 0), (&woken, NOW_MS + 500)] {
        let stays = step_at(sandbox, &rest(RestAt::Hibernated, used_at_ms), NOW_MS + 1_000);
        assert_eq!(stays, Stepped::Ignored(Ignored::NotIdle));
    }
    // So does what keeps it awake, until that is over (L7).
    for (until_ms, stays) in [(NOW_MS + 1_001, true), (NOW_MS + 1_000, false), (NOW_MS + 999, false)] {
        let mut held = woken.clone();
        held.keep_awake.insert("thinking".to_owned(), KeepAwake { reason: String::new(), until_ms });
        let answer = step_at(&held, &rest(RestAt::Hibernated, 0), NOW_MS + 1_000);
        assert_eq!(answer == Stepped::Ignored(Ignored::NotIdle), stays, "{until_ms}: {answer:?}");
    }
    // A stop by a user stands, and no schedule undoes it (L9).
    let stopped = after(&woken, &stop(), NOW_MS + 900);
    assert_eq!(step_at(&stopped, &rest(RestAt::Hibernated, 0), NOW_MS + 1_000), Stepped::Ignored(Ignored::Busy));
}

/// The clearing of what was there before a rollback timed out.
fn unproven(clearing: &Sandbox) -> Sandbox {
    let late_ms = clearing.phase.work().expect("work").deadline_at_ms;
    let unproven = after(clearing, &Event::Due, late_ms);
    assert_eq!((unproven.phase.name(), &unproven.cause.cause), (PhaseName::Lost, &Cause::AbsenceUnproven));
    assert!(unproven.uses().contains(&target()), "nobody removes it meanwhile");
    unproven
}

#[test]
fn l11_a_rollback_whose_clearing_timed_out_is_what_the_next_entry_leads_to() {
    // Asked for while it had failed.
    let refused = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    let failed = after(&refused, &done(&refused, failed(FailureKind::Refused)), NOW_MS);
    assert_eq!(failed.phase.name(), PhaseName::Failed);
    let from_failed = unproven(&after(&failed, &rollback(false), NOW_MS));
    // Asked for while what was lost was being sealed.
    let lost = after(&ready(true), &seen(&ready(true), Seen::Ended(EndCause::OomKilled), NOW_MS), NOW_MS);
    let sealing = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
    let told = after(&sealing, &rollback(false), NOW_MS);
    let from_lost = unproven(&after(&told, &done(&told, Outcome::Saved), NOW_MS));
    for lost in [from_failed, from_lost] {
        let sealing = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
        assert_eq!(effect(&sealing).code(), "save", "what is there is kept");
        let outcomes = [Outcome::Saved, self::failed(FailureKind::Failed)];
        for outcome in outcomes {
            let clearing = after(&sealing, &done(&sealing, outcome), NOW_MS);
            let making = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
            let generation = lost.generation.next();
            assert_eq!(
                effect(&making),
                Effect::Restore { generation, snapshot: target(), memory: false },
                "the last wish"
            );
            assert_eq!((&making.rollback, &making.saved), (&None, &Some(target())));
        }
        // Seen alive, and nobody asked again: it stays as it is.
        let back = after(&lost, &seen(&lost, Seen::Running, NOW_MS), NOW_MS);
        assert_eq!((back.phase.name(), &back.rollback), (PhaseName::Verifying, &None));
        assert_eq!(after(&back, &done(&back, well(NOW_MS + 1)), NOW_MS + 1).phase, Phase::Ready);
        assert_ne!(back.saved, Some(target()));
    }
}

#[test]
fn l11_a_rollback_that_is_asked_for_again_while_the_last_is_cleared_is_the_same() {
    let failed = after(&created(true), &done(&created(true), failed(FailureKind::Refused)), NOW_MS);
    let clearing = after(&failed, &rollback(false), NOW_MS);
    assert_eq!(step_at(&clearing, &rollback(false), NOW_MS), Stepped::Ignored(Ignored::NothingNew));
    // Another one is the last wish, and nothing is made of the first.
    let other: SnapshotId = "snp_other".parse().unwrap();
    let told = Event::Rollback { snapshot: other.clone(), discard: false, by: user() };
    let told = after(&clearing, &told, NOW_MS);
    let making = after(&told, &done(&told, Outcome::Cleared), NOW_MS);
    assert_eq!(effect(&making), Effect::Restore { generation: making.generation, snapshot: other, memory: false });
}

#[test]
fn l11_who_enters_what_was_stopped_on_its_way_back_waits_for_that() {
    let told = after(&created(true), &rollback(false), NOW_MS);
    let stopped = after(&told, &stop(), NOW_MS);
    let made = after(&stopped, &done(&stopped, made()), NOW_MS);
    let ready = after(&made, &done(&made, well(NOW_MS + 1)), NOW_MS + 1);
    assert_eq!((&ready.phase, ready.desired), (&Phase::Ready, Desired::Hibernated));
    let entered = after(&ready, &enter(EntryKind::Ensure), NOW_MS + 2);
    assert!(entered.entry.is_some(), "it is not where it was to go back to");
    let mut next = after(&entered, &Event::Due, NOW_MS + 3);
    for outcome in [Outcome::Saved, Outcome::Cleared] {
        next = after(&next, &done(&next, outcome), NOW_MS + 4);
    }
    assert_eq!(next.phase, Phase::Hibernated { snapshot: target() });
    let resuming = after(&next, &Event::Due, NOW_MS + 5);
    assert_eq!(
        effect(&resuming),
        Effect::Restore { generation: resuming.generation, snapshot: target(), memory: false }
    );
}
