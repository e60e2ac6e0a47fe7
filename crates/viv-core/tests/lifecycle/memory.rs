//! Saved and restored with its memory, and what follows when that fails (L13, X5).

use viv_core::exec::{ExecState, ExecStatus};
use viv_core::lifecycle::{
    Cause, Effect, EntryKind, Event, Failure, FailureKind, Finding, HIBERNATED, LostExecution, MEMORY_NOT_RESTORED,
    Memory, Moment, Outcome, Phase, PhaseName, Sandbox, Seen, Stepped, Timings, outstanding, step,
};
use viv_core::service::ServiceFound;
use viv_core::spec::Hibernate;
use viv_core::{EndCause, Generation};

use crate::setup::{
    NOW_MS, after, created_with_memory, created_with_service, done, enter, evidence, made, of_service, rollback, seen,
    served, step_at, stop, user, web,
};

fn well() -> Outcome {
    Outcome::Probed(evidence(Finding::Ok, NOW_MS))
}

fn ready() -> Sandbox {
    let sandbox = created_with_memory();
    let sandbox = after(&sandbox, &done(&sandbox, made()), NOW_MS);
    after(&sandbox, &done(&sandbox, well()), NOW_MS)
}

fn running(id: &str) -> ExecStatus {
    ExecStatus {
        id: id.parse().expect("an id"),
        state: ExecState::Running,
        started_at_ms: NOW_MS,
        ended_at_ms: None,
        output_bytes: 7,
        stdin_bytes: 0,
        pid: Some(2),
        argv: Vec::new(),
        detached: false,
    }
}

/// Saved with its memory, with a command that is suspended.
fn hibernated() -> Sandbox {
    let sandbox = after(&ready(), &stop(), NOW_MS);
    let mut sandbox = after(&sandbox, &done(&sandbox, Outcome::Saved), NOW_MS);
    let status = ExecStatus { state: ExecState::Suspended, pid: None, ..running("exe_a") };
    sandbox.lost_executions.push(LostExecution { generation: sandbox.generation, status });
    after(&sandbox, &done(&sandbox, Outcome::Cleared), NOW_MS)
}

fn effect(sandbox: &Sandbox) -> Effect {
    outstanding(sandbox).expect("something is outstanding").0
}

fn state_of(sandbox: &Sandbox) -> Option<&ExecState> {
    sandbox.lost_executions.first().map(|lost| &lost.status.state)
}

#[test]
fn x5_what_is_saved_with_its_memory_is_suspended_and_goes_on() {
    let saving = after(&ready(), &stop(), NOW_MS);
    assert!(matches!(effect(&saving), Effect::Save { memory: true, .. }));
    let told = saving.execution(running("exe_a"));
    assert_eq!((told.state.clone(), told.pid, told.ended_at_ms), (ExecState::Suspended, None, None));
    assert!(!told.state.is_final());
    let clearing = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
    // Its instance ended, because it was saved.
    let ended = ExecState::Lost { cause: "saved".to_owned() };
    assert_eq!(clearing.execution(ExecStatus { state: ended, ..running("exe_a") }).state, ExecState::Suspended);
    let exited = ExecStatus { state: ExecState::Exited { code: 3 }, ..running("exe_b") };
    assert_eq!(clearing.execution(exited.clone()), exited);
    let hibernated = hibernated();
    assert_eq!(hibernated.cause.message, None);
    let resuming = after(&hibernated, &enter(EntryKind::Ensure), NOW_MS);
    let Effect::Restore { generation, snapshot, memory: true } = effect(&resuming) else { panic!("{resuming:?}") };
    assert_eq!((generation, Some(&snapshot)), (Generation(2), resuming.saved.as_ref()));
    assert_eq!(state_of(&resuming), Some(&ExecState::Suspended), "not before it runs");
    let verifying = after(&resuming, &done(&resuming, made()), NOW_MS);
    assert_eq!(verifying.lost_executions, [], "it is told by who runs it");
    let ready = after(&verifying, &done(&verifying, well()), NOW_MS);
    assert_eq!((ready.phase.clone(), ready.memory), (Phase::Ready, Some(Memory::Restored { snapshot })));
}

fn not_saved(frozen: bool) -> Outcome {
    Outcome::MemoryNotSaved { why: "a device".to_owned(), frozen }
}

fn make_room() -> Event {
    Event::MakeRoom { by: user() }
}

/// Frozen, and being saved because the machine's memory got short.
fn leaving() -> Sandbox {
    let freezing = after(&ready(), &Event::Freeze { by: user() }, NOW_MS);
    let frozen = after(&freezing, &done(&freezing, Outcome::Frozen), NOW_MS);
    after(&frozen, &make_room(), NOW_MS)
}

/// What could not be saved then, frozen again.
fn stayed(leaving: &Sandbox, now_ms: u64) -> Sandbox {
    let back = after(leaving, &done(leaving, not_saved(true)), now_ms);
    assert_eq!((back.phase.name(), &back.cause.cause), (PhaseName::Frozen, &Cause::MemoryNotSaved));
    assert_eq!(effect(&back), Effect::Freeze { generation: Generation(1) }, "whatever the dump left");
    after(&back, &done(&back, Outcome::Frozen), now_ms)
}

#[test]
fn l13_what_goes_for_room_alone_and_cannot_be_dumped_stays_frozen() {
    let timings = Timings::default();
    let leaving = leaving();
    assert!(matches!(effect(&leaving), Effect::Save { memory: true, .. }));
    assert_eq!(leaving.execution(running("exe_a")).state, ExecState::Suspended);
    let stays = stayed(&leaving, NOW_MS);
    assert!(stays.cause.message.as_ref().is_some_and(|said| said.contains("a device")), "{:?}", stays.cause);
    assert_eq!(stays.execution(running("exe_a")).state, ExecState::Running, "nothing is lost");
    assert_eq!(stays.memory, Some(Memory::NotSaved { why: "a device".to_owned() }));
    // It is left alone, longer each time, up to a bound.
    let (mut stays, mut now_ms) = (stays, NOW_MS);
    let mut waited_ms = Vec::new();
    for _ in 0..6 {
        let until_ms = stays.kept_frozen.expect("it was kept").until_ms;
        assert!(matches!(step_at(&stays, &make_room(), until_ms - 1), Stepped::Ignored(_)));
        waited_ms.push(until_ms - now_ms);
        now_ms = until_ms;
        stays = stayed(&after(&stays, &make_room(), now_ms), now_ms);
    }
    assert_eq!((waited_ms[0], waited_ms[1], waited_ms[5]), (300_000, 600_000, timings.left_alone_ms_max));
    // Its window goes on from when it was frozen, and is over then: idling ends with the files at the least.
    assert_eq!(stays.idle_at_ms(true), Some(NOW_MS + stays.policy.hibernate_ms));
    let idle = after(&stays, &Event::Idle { freezes: true }, NOW_MS + stays.policy.hibernate_ms);
    let files = after(&idle, &done(&idle, not_saved(true)), NOW_MS);
    assert!(matches!(effect(&files), Effect::Save { memory: false, .. }));
    // Whoever wants it has it as it was, and what is frozen later is none of this.
    let thawing = after(&stays, &enter(EntryKind::Ensure), now_ms);
    assert_eq!((thawing.phase.name(), thawing.kept_frozen), (PhaseName::Verifying, None));
}

#[test]
fn l13_what_goes_for_room_is_saved_without_memory_once_somebody_asked_for_its_end() {
    let leaving = leaving();
    let files = |sandbox: &Sandbox| matches!(effect(sandbox), Effect::Save { memory: false, .. });
    for asked in [stop(), Event::Hibernate { by: user() }, rollback(false)] {
        let asked_for = after(&leaving, &asked, NOW_MS);
        let failed = after(&asked_for, &done(&asked_for, not_saved(true)), NOW_MS);
        assert!(files(&failed), "{asked:?}: {failed:?}");
    }
    // What is not there any more is saved as far as it is.
    assert!(files(&after(&leaving, &done(&leaving, not_saved(false)), NOW_MS)));
    // Who came meanwhile has it back, with all that it holds.
    let wanted = after(&leaving, &enter(EntryKind::Ensure), NOW_MS);
    let back = after(&wanted, &done(&wanted, not_saved(true)), NOW_MS);
    assert_eq!((effect(&back), back.generation), (Effect::Thaw { generation: Generation(1) }, Generation(1)));
    assert!(back.entry.is_some() && back.kept_frozen.is_none(), "{back:?}");
    // And a hibernated one is that, whatever it was for.
    let clearing = after(&leaving, &done(&leaving, Outcome::Saved), NOW_MS);
    let hibernated = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!((hibernated.phase.name(), hibernated.kept_frozen), (PhaseName::Hibernated, None));
}

#[test]
fn l13_a_dump_that_fails_is_followed_by_the_files() {
    let saving = after(&ready(), &stop(), NOW_MS);
    let failed = after(&saving, &done(&saving, not_saved(true)), NOW_MS);
    let (before, now) = (effect(&saving), effect(&failed));
    let Effect::Save { snapshot, .. } = before else { panic!("{before:?}") };
    assert_eq!(now, Effect::Save { generation: Generation(1), snapshot, memory: false }, "under the same id");
    assert_eq!(failed.execution(running("exe_a")).state, ExecState::Lost { cause: HIBERNATED.to_owned() });
    let again = done(&failed, not_saved(true));
    assert!(matches!(step_at(&failed, &again, NOW_MS), Stepped::Ignored(_)), "once");
    let clearing = after(&failed, &done(&failed, Outcome::Saved), NOW_MS);
    let hibernated = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!(hibernated.memory, Some(Memory::NotSaved { why: "a device".to_owned() }));
    assert!(hibernated.cause.message.as_ref().is_some_and(|said| said.contains("a device")));
    let resuming = after(&hibernated, &enter(EntryKind::Ensure), NOW_MS);
    assert!(matches!(effect(&resuming), Effect::Restore { memory: false, .. }));
}

/// From a restore that did not work to what is ready, with its files alone.
#[track_caller]
fn assert_files_follow(clearing: &Sandbox, why: &str, now_ms: u64) {
    assert_eq!((clearing.phase.name(), &clearing.cause.cause), (PhaseName::Resuming, &Cause::MemoryNotRestored));
    assert!(clearing.cause.message.as_ref().is_some_and(|said| said.contains(why)), "{:?}", clearing.cause);
    let before = clearing.generation;
    assert_eq!(effect(clearing), Effect::Clear { generation: before });
    let making = after(clearing, &done(clearing, Outcome::Cleared), now_ms);
    let snapshot = making.saved.clone().expect("it is kept");
    assert_eq!(effect(&making), Effect::Restore { generation: before.next(), snapshot, memory: false });
    let verifying = after(&making, &done(&making, made()), now_ms);
    let ready = after(&verifying, &done(&verifying, Outcome::Probed(evidence(Finding::Ok, now_ms))), now_ms);
    assert_eq!(ready.phase, Phase::Ready);
    assert!(matches!(&ready.memory, Some(Memory::NotRestored { why: said, .. }) if said.contains(why)), "{ready:?}");
}

#[test]
fn l13_a_restore_that_fails_is_followed_by_the_files_in_another_generation() {
    let resuming = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    for kind in [FailureKind::Failed, FailureKind::Refused] {
        let failure = Failure { kind, what: "it is damaged".to_owned() };
        let clearing = after(&resuming, &done(&resuming, Outcome::Failed(failure)), NOW_MS);
        assert_eq!(state_of(&clearing), Some(&ExecState::Lost { cause: MEMORY_NOT_RESTORED.to_owned() }));
        assert_files_follow(&clearing, "it is damaged", NOW_MS);
    }
    // Nothing is known of it: it is asked for again, and given up in time.
    let unknown = Failure { kind: FailureKind::Unknown, what: "no answer".to_owned() };
    let again = after(&resuming, &done(&resuming, Outcome::Failed(unknown)), NOW_MS);
    assert!(matches!(effect(&again), Effect::Restore { memory: true, .. }));
    let late_ms = again.phase.work().expect("work").deadline_at_ms;
    assert_files_follow(&after(&again, &Event::Due, late_ms), "no answer", late_ms);
}

#[test]
fn t4_what_was_restored_and_does_not_verify_is_followed_by_the_files() {
    let resuming = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    let verifying = after(&resuming, &done(&resuming, made()), NOW_MS);
    let ended = after(&verifying, &seen(&verifying, Seen::Ended(EndCause::OomKilled), NOW_MS), NOW_MS);
    assert_files_follow(&ended, "does not work", NOW_MS);
    // It is silent: that is no ground to replace what anybody had, but nobody had this.
    let late_ms = verifying.phase.work().expect("work").deadline_at_ms;
    assert_files_follow(&after(&verifying, &Event::Due, late_ms), "does not work", late_ms);
}

#[test]
fn l13_a_memory_is_restored_once() {
    let resuming = after(&hibernated(), &enter(EntryKind::Ensure), NOW_MS);
    let verifying = after(&resuming, &done(&resuming, made()), NOW_MS);
    let ready = after(&verifying, &done(&verifying, well()), NOW_MS);
    // It dies later: what is made of the same snapshot then has its files, and no commands of long ago.
    let lost = after(&ready, &seen(&ready, Seen::Ended(EndCause::OomKilled), NOW_MS), NOW_MS);
    let sealing = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
    let failure = Failure { kind: FailureKind::Failed, what: "nothing is left".to_owned() };
    let clearing = after(&sealing, &done(&sealing, Outcome::Failed(failure)), NOW_MS);
    let making = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    assert_eq!(making.saved, hibernated().saved);
    assert!(matches!(effect(&making), Effect::Restore { memory: false, .. }), "{making:?}");
    // Saved again, it is another memory.
    let saving = after(&ready, &stop(), NOW_MS);
    assert!(matches!(effect(&saving), Effect::Save { memory: true, .. }));
}

#[test]
fn l13_what_cannot_be_saved_is_told_in_the_same_step() {
    let timings = Timings::default();
    let at = Moment { now_ms: NOW_MS, timings: &timings, no_memory: Some("there is no CRIU") };
    let Stepped::Accepted(accepted) = step(&ready(), &stop(), at) else { panic!("it is stopped") };
    let saving = accepted.next;
    assert_eq!(saving.memory, Some(Memory::NotSaved { why: "there is no CRIU".to_owned() }));
    assert!(matches!(effect(&saving), Effect::Save { memory: false, .. }));
    assert_eq!(saving.execution(running("exe_a")).state, ExecState::Lost { cause: HIBERNATED.to_owned() });
    // Its deadline ended all processes.
    let expired = after(&ready(), &seen(&ready(), Seen::Ended(EndCause::Expired), NOW_MS), NOW_MS);
    assert!(matches!(&expired.memory, Some(Memory::NotSaved { .. })), "{expired:?}");
    // And whoever did not ask has none.
    let mut plain = ready();
    plain.policy.hibernate = Hibernate::Filesystem;
    assert_eq!(after(&plain, &stop(), NOW_MS).memory, None);
}

#[test]
fn l11_going_back_elsewhere_gives_up_what_is_suspended() {
    let resuming = after(&hibernated(), &rollback(false), NOW_MS);
    assert!(matches!(effect(&resuming), Effect::Restore { memory: false, .. }));
    assert_eq!(state_of(&resuming), Some(&ExecState::Lost { cause: MEMORY_NOT_RESTORED.to_owned() }));
    assert_eq!(resuming.memory, None);
}

#[test]
fn l14_services_go_on_as_the_executions_they_were_and_are_nudged() {
    let mut sandbox = created_with_service(true);
    sandbox.policy.hibernate = Hibernate::Memory;
    sandbox.spec.hooks.clear();
    let probe = |sandbox: &Sandbox| {
        let mut evidence = evidence(Finding::Ok, NOW_MS);
        evidence.services = vec![of_service(Finding::Ok, NOW_MS)];
        let served = served(sandbox, ServiceFound::Ready, NOW_MS);
        let probing = after(sandbox, &done(sandbox, served), NOW_MS);
        after(&probing, &done(&probing, Outcome::Probed(evidence)), NOW_MS)
    };
    let ready = probe(&after(&sandbox, &done(&sandbox, made()), NOW_MS));
    let saving = after(&ready, &stop(), NOW_MS);
    let clearing = after(&saving, &done(&saving, Outcome::Saved), NOW_MS);
    let hibernated = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    let resuming = after(&hibernated, &enter(EntryKind::Ensure), NOW_MS);
    let verifying = after(&resuming, &done(&resuming, made()), NOW_MS);
    let (old, new) = (&ready.services[&web()], &verifying.services[&web()]);
    assert_eq!((&new.execution, new.generation, new.ready_at_ms), (&old.execution, Generation(2), old.ready_at_ms));
    assert!(new.nudge && !old.nudge);
    let again = probe(&verifying);
    assert_eq!((again.phase.clone(), again.services[&web()].nudge), (Phase::Ready, false));
    // Without its memory it is another execution, that names the one before.
    let failure = Failure { kind: FailureKind::Failed, what: "no".to_owned() };
    let clearing = after(&resuming, &done(&resuming, Outcome::Failed(failure)), NOW_MS);
    let making = after(&clearing, &done(&clearing, Outcome::Cleared), NOW_MS);
    let verifying = after(&making, &done(&making, made()), NOW_MS);
    let new = &verifying.services[&web()];
    assert_eq!((new.after.as_ref(), new.execution == old.execution), (Some(&old.execution), false));
}
