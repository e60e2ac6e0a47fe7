//! Services and hooks in the life of a sandbox (L14, X5, T2).

use viv_core::hook::{HookPoint, HookReport, OnFailure};
use viv_core::lifecycle::{
    Cause, Effect, EntryKind, Event, Evidence, Failure, FailureKind, Finding, Outcome, Phase, PhaseName, Sandbox, Seen,
    Status, Stepped, outstanding, status,
};
use viv_core::service::{RESTARTS_FORGOTTEN_MS, RestartPolicy, ServiceFound};

use crate::setup::{
    NOW_MS, after, created_with_service, done, enter, evidence, hook, made, of_service, seen, served, step_at, stop,
    web,
};

fn ended(failed: bool) -> ServiceFound {
    ServiceFound::Ended { how: "exited with code 3".to_owned(), failed }
}

fn hooked(point: HookPoint, ok: bool) -> Outcome {
    let what = if ok { "exited with code 0" } else { "exited with code 1" };
    let report = HookReport { point, ok, what: what.to_owned(), execution: None, tail: String::new(), took_ms: 5 };
    Outcome::Hooked(report)
}

fn effect(sandbox: &Sandbox) -> Effect {
    outstanding(sandbox).expect("something is outstanding").0
}

/// Its instance is there, and its service is to be started.
fn starting(persistent: bool) -> Sandbox {
    let sandbox = created_with_service(persistent);
    after(&sandbox, &done(&sandbox, made()), NOW_MS)
}

/// What was started becomes ready.
fn through(sandbox: &Sandbox, point: HookPoint) -> Sandbox {
    let sandbox = after(sandbox, &done(sandbox, served(sandbox, ServiceFound::Ready, NOW_MS)), NOW_MS);
    let sandbox =
        if sandbox.hook.is_some() { after(&sandbox, &done(&sandbox, hooked(point, true)), NOW_MS) } else { sandbox };
    after(&sandbox, &done(&sandbox, Outcome::Probed(well())), NOW_MS)
}

fn ready(persistent: bool) -> Sandbox {
    through(&starting(persistent), HookPoint::AfterStart)
}

fn well() -> Evidence {
    Evidence { services: vec![of_service(Finding::Ok, NOW_MS)], ..evidence(Finding::Ok, NOW_MS) }
}

fn unwell(at_ms: u64) -> Evidence {
    Evidence { services: vec![of_service(Finding::Unhealthy, at_ms)], ..evidence(Finding::Ok, at_ms) }
}

#[test]
fn t2_services_then_the_hook_then_probes_and_only_then_ready() {
    let sandbox = starting(false);
    let generation = sandbox.generation;
    assert_eq!(effect(&sandbox), Effect::Serve { generation });
    let sandbox = after(&sandbox, &done(&sandbox, served(&sandbox, ServiceFound::Ready, NOW_MS)), NOW_MS);
    assert_eq!(effect(&sandbox), Effect::Hook { generation, point: HookPoint::AfterStart });
    let sandbox = after(&sandbox, &done(&sandbox, hooked(HookPoint::AfterStart, true)), NOW_MS);
    assert_eq!(effect(&sandbox), Effect::Probe { generation });
    // A report that says nothing of the service proves nothing.
    let silent = evidence(Finding::Ok, NOW_MS);
    let again = after(&sandbox, &done(&sandbox, Outcome::Probed(silent.clone())), NOW_MS);
    assert_eq!(again.phase.name(), PhaseName::Verifying);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Probed(well())), NOW_MS);
    assert_eq!(sandbox.phase, Phase::Ready);
    assert_eq!(status(&sandbox, &silent, NOW_MS), Status::Unverified, "nor is it shown as ready on it");
}

#[test]
fn l14_a_service_that_ends_is_started_again_in_bounds_and_then_named() {
    let first = starting(false);
    let again = after(&first, &done(&first, served(&first, ended(true), NOW_MS)), NOW_MS);
    let (before, run) = (&first.services[&web()], &again.services[&web()]);
    assert_eq!((run.start, run.restarts, run.after.as_ref()), (2, 1, Some(&before.execution)));
    assert_ne!(run.execution, before.execution);
    assert_eq!((again.cause.cause.clone(), again.phase.name()), (Cause::ServiceEnded, PhaseName::Verifying));
    let work = again.phase.work().expect("work");
    assert_eq!(work.retry_at_ms, NOW_MS + 500, "not at once");
    // A report about the start before says nothing.
    let late = done(&again, served(&first, ServiceFound::Ready, NOW_MS));
    assert_eq!(after(&again, &late, NOW_MS).phase.name(), PhaseName::Verifying);
    let over = after(&again, &done(&again, served(&again, ended(true), NOW_MS + 900)), NOW_MS + 900);
    assert_eq!((over.phase.name(), over.cause.cause.clone()), (PhaseName::Failed, Cause::ServiceFailed));
    let said = over.cause.message.clone().expect("words");
    assert_eq!(said, "service web: exited with code 3, after 1 restarts");
    assert_eq!(over.evidence.complaint().as_deref(), Some("service web: exited with code 3"));
}

#[test]
fn l14_the_policy_says_what_is_started_again() {
    for (policy, failed, starts) in [
        (RestartPolicy::Never, true, 1),
        (RestartPolicy::OnFailure, false, 1),
        (RestartPolicy::OnFailure, true, 2),
        (RestartPolicy::Always, false, 2),
    ] {
        let mut sandbox = starting(false);
        sandbox.spec.services[0].restart.policy = policy;
        let next = after(&sandbox, &done(&sandbox, served(&sandbox, ended(failed), NOW_MS)), NOW_MS);
        assert_eq!(next.services[&web()].start, starts, "{policy:?}");
        assert_eq!(next.phase.name() == PhaseName::Failed, starts == 1);
        let restarting = if starts == 1 { "" } else { "; restart 1 of 1" };
        assert_eq!(next.cause.message, Some(format!("service web: exited with code 3{restarting}")));
    }
}

#[test]
fn incident_1_a_service_that_ends_makes_what_was_ready_not_ready_and_its_instance_is_kept() {
    let sandbox = ready(true);
    let generation = sandbox.generation;
    let verifying = after(&sandbox, &Event::Probed { generation, evidence: unwell(NOW_MS) }, NOW_MS);
    assert_eq!(verifying.phase.name(), PhaseName::Verifying);
    assert_eq!(effect(&verifying), Effect::Serve { generation });
    assert_eq!(verifying.cause.message.as_deref(), Some("service web: not as it has to be"));
    // It comes back.
    let again = after(&verifying, &done(&verifying, served(&verifying, ended(true), NOW_MS)), NOW_MS);
    let back = through(&again, HookPoint::AfterStart);
    assert_eq!((back.phase.clone(), back.generation), (Phase::Ready, generation));
    assert_eq!(back.hook, None, "hooks are performed once for an instance");
    // It does not: the instance is neither replaced nor cleared, and does not come back by being seen.
    let lost = after(&again, &done(&again, served(&again, ended(true), NOW_MS)), NOW_MS);
    assert_eq!((lost.phase.clone(), lost.cause.cause.clone()), (Phase::Lost, Cause::ServiceFailed));
    assert_eq!(outstanding(&lost), None);
    assert!(matches!(step_at(&lost, &seen(&lost, Seen::Running, NOW_MS), NOW_MS), Stepped::Ignored(_)));
    // It can be saved, and somebody who wants it to run gets another try on the same files.
    let stopped = after(&lost, &stop(), NOW_MS);
    let saving = after(&stopped, &seen(&stopped, Seen::Running, NOW_MS), NOW_MS);
    assert_eq!(saving.phase.name(), PhaseName::Hibernating);
    let wanted = after(&lost, &enter(EntryKind::Ensure), NOW_MS);
    let run = &wanted.services[&web()];
    assert_eq!((wanted.generation, run.start, run.restarts, run.ended.as_ref()), (generation, 3, 0, None));
    assert_eq!(through(&wanted, HookPoint::AfterStart).phase, Phase::Ready);
}

#[test]
fn restarts_are_forgotten_by_what_served_long() {
    let first = starting(false);
    let again = after(&first, &done(&first, served(&first, ended(true), NOW_MS)), NOW_MS);
    let sandbox = through(&again, HookPoint::AfterStart);
    assert_eq!(sandbox.services[&web()].restarts, 1);
    for (passed_ms, phase) in
        [(RESTARTS_FORGOTTEN_MS - 1, PhaseName::Lost), (RESTARTS_FORGOTTEN_MS, PhaseName::Verifying)]
    {
        let now_ms = NOW_MS + passed_ms;
        let event = Event::Probed { generation: sandbox.generation, evidence: unwell(now_ms) };
        let verifying = after(&sandbox, &event, now_ms);
        let next = after(&verifying, &done(&verifying, served(&verifying, ended(true), now_ms)), now_ms);
        assert_eq!(next.phase.name(), phase);
    }
}

#[test]
fn x5_after_a_resume_services_are_new_executions_linked_to_the_old_and_nudged() {
    let sandbox = ready(true);
    let old = sandbox.services[&web()].clone();
    let sandbox = after(&sandbox, &stop(), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Saved), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Cleared), NOW_MS);
    let sandbox = after(&sandbox, &enter(EntryKind::Ensure), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, made()), NOW_MS);
    let run = &sandbox.services[&web()];
    assert_eq!((run.generation, run.after.as_ref()), (sandbox.generation, Some(&old.execution)));
    assert!(run.nudge && !starting(true).services[&web()].nudge, "a first start is not nudged");
    let sandbox = through(&sandbox, HookPoint::AfterResume);
    assert_eq!((sandbox.phase.clone(), sandbox.services[&web()].nudge), (Phase::Ready, false));
    // A thaw keeps the execution, and nudges it because it asked for that.
    let idle_ms = NOW_MS + 900_000;
    let frozen = after(&sandbox, &Event::Idle { freezes: true }, idle_ms);
    let frozen = after(&frozen, &done(&frozen, Outcome::Frozen), idle_ms);
    let thawing = after(&frozen, &enter(EntryKind::Ensure), idle_ms);
    let thawed = after(&thawing, &done(&thawing, Outcome::Thawed), idle_ms);
    let kept = &thawed.services[&web()];
    assert!(kept.nudge && kept.execution == sandbox.services[&web()].execution);
    assert_eq!(effect(&thawed), Effect::Serve { generation: thawed.generation });
    assert_eq!(thawed.hook, None, "a thaw is no resume");
}

#[test]
fn l14_a_hook_that_must_succeed_fails_the_create_and_one_that_need_not_does_not() {
    let sandbox = starting(false);
    let hooking = after(&sandbox, &done(&sandbox, served(&sandbox, ServiceFound::Ready, NOW_MS)), NOW_MS);
    let other = done(&hooking, hooked(HookPoint::OnTimeout, true));
    assert!(matches!(step_at(&hooking, &other, NOW_MS), Stepped::Ignored(_)), "that is another one's");
    let failed = after(&hooking, &done(&hooking, hooked(HookPoint::AfterStart, false)), NOW_MS);
    assert_eq!((failed.phase.name(), failed.cause.cause.clone()), (PhaseName::Failed, Cause::HookFailed));
    assert_eq!(failed.cause.message.as_deref(), Some("hook after_start: exited with code 1"));
    let mut hooking = hooking;
    hooking.spec.hooks.insert(HookPoint::AfterStart, hook(OnFailure::Ignore));
    let probing = after(&hooking, &done(&hooking, hooked(HookPoint::AfterStart, false)), NOW_MS);
    assert_eq!(effect(&probing), Effect::Probe { generation: probing.generation });
}

#[test]
fn t7_a_service_that_comes_and_goes_has_no_more_time_than_a_verification() {
    let sandbox = ready(false);
    let (generation, mut now_ms) = (sandbox.generation, NOW_MS);
    let mut sandbox = after(&sandbox, &Event::Probed { generation, evidence: unwell(now_ms) }, now_ms);
    for _ in 0..1_000 {
        let work = sandbox.phase.work().expect("work").clone();
        now_ms = now_ms.max(work.retry_at_ms) + 1;
        if now_ms >= work.deadline_at_ms {
            sandbox = after(&sandbox, &Event::Due, now_ms);
            break;
        }
        let outcome = match effect(&sandbox) {
            Effect::Serve { .. } => served(&sandbox, ServiceFound::Ready, now_ms),
            Effect::Probe { .. } => Outcome::Probed(unwell(now_ms)),
            other => panic!("{other:?}"),
        };
        sandbox = after(&sandbox, &done(&sandbox, outcome), now_ms);
    }
    assert_eq!((sandbox.phase.clone(), sandbox.generation), (Phase::Lost, generation));
    assert!(sandbox.cause.message.is_some_and(|said| said.contains("service web")));
}

#[test]
fn x5_who_did_not_ask_for_a_nudge_gets_none() {
    let mut sandbox = ready(true);
    sandbox.spec.services[0].nudge = None;
    let sandbox = after(&sandbox, &stop(), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Saved), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Cleared), NOW_MS);
    let sandbox = after(&sandbox, &enter(EntryKind::Ensure), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, made()), NOW_MS);
    assert!(!sandbox.services[&web()].nudge);
}

#[test]
fn l14_the_pause_before_a_start_doubles() {
    let mut sandbox = starting(false);
    sandbox.spec.services[0].restart.times_max = 9;
    for pause_ms in [500, 1_000, 2_000, 4_000] {
        sandbox = after(&sandbox, &done(&sandbox, served(&sandbox, ended(true), NOW_MS)), NOW_MS);
        let work = sandbox.phase.work().expect("it is started again");
        assert_eq!((work.retry_at_ms, sandbox.services[&web()].since_ms), (NOW_MS + pause_ms, NOW_MS + pause_ms));
    }
}

/// How long a service has to become ready is counted from `since_ms`.
#[test]
fn t2_services_have_their_time_from_when_they_are_looked_at_again() {
    let sandbox = ready(true);
    assert_eq!(sandbox.services[&web()].since_ms, NOW_MS);
    let found_ms = NOW_MS + 60_000;
    let event = Event::Probed { generation: sandbox.generation, evidence: unwell(found_ms) };
    assert_eq!(after(&sandbox, &event, found_ms).services[&web()].since_ms, found_ms);
    // While it is frozen nothing can become ready, so it counts from when it is thawed.
    let idle_ms = NOW_MS + 900_000;
    let frozen = after(&sandbox, &Event::Idle { freezes: true }, idle_ms);
    let frozen = after(&frozen, &done(&frozen, Outcome::Frozen), idle_ms);
    let thawing = after(&frozen, &enter(EntryKind::Ensure), idle_ms);
    let thawed = after(&thawing, &done(&thawing, Outcome::Thawed), idle_ms + 7);
    assert_eq!(thawed.services[&web()].since_ms, idle_ms + 7);
}

#[test]
fn t2_each_step_of_a_verification_is_tried_anew_in_what_is_left_of_its_time() {
    let serving = starting(false);
    let silent = Outcome::Failed(Failure { kind: FailureKind::Unknown, what: "no answer".to_owned() });
    let tried = after(&serving, &done(&serving, silent), NOW_MS);
    let before = tried.phase.work().expect("it is tried again");
    assert!(before.attempt == 2 && before.retry_at_ms > NOW_MS, "{before:?}");
    let hooking = after(&tried, &done(&tried, served(&tried, ServiceFound::Ready, NOW_MS)), NOW_MS);
    let work = hooking.phase.work().expect("the hook");
    assert_eq!((work.attempt, work.retry_at_ms, work.deadline_at_ms), (1, 0, before.deadline_at_ms));
    assert_ne!(work.operation, before.operation);
}
