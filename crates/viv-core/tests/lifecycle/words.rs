//! Words that others rely on, and what is read from a record by who does not step it.

use viv_core::lifecycle::{
    Actor, Evidence, Finding, Moment, NewSandbox, Observed, Phase, PhaseName, Sandbox, Status, Timings, claim,
};
use viv_core::service::ServiceRun;
use viv_core::snapshot::SnapshotMemory;
use viv_core::{ExecutionId, Generation, SandboxId, SnapshotId};

use crate::setup::{
    NOW_MS, after, created, created_with_service, done, evidence, made, of_service, ready, spare, stop, wanted, web,
};

#[test]
fn the_word_of_a_phase_is_read_back_and_is_that_of_its_record() {
    for name in PhaseName::ALL {
        assert_eq!(PhaseName::parse(name.as_str()), Some(name));
        assert_eq!(serde_json::to_value(name).unwrap(), name.as_str());
    }
    assert_eq!(PhaseName::parse("xyzzy"), None);
}

#[test]
fn the_word_of_a_status_is_that_of_the_api() {
    let all = [
        (Status::Provisioning, "provisioning"),
        (Status::Verifying, "verifying"),
        (Status::Ready, "ready"),
        (Status::Unverified, "unverified"),
        (Status::Frozen, "frozen"),
        (Status::Hibernating, "hibernating"),
        (Status::SaveFailed, "save_failed"),
        (Status::Hibernated, "hibernated"),
        (Status::Resuming, "resuming"),
        (Status::Lost, "lost"),
        (Status::Failed, "failed"),
        (Status::Stopping, "stopping"),
        (Status::Stopped, "stopped"),
    ];
    for (status, word) in all {
        assert_eq!((status.as_str(), serde_json::to_value(status).unwrap()), (word, word.into()));
    }
}

#[test]
fn who_did_something_is_told_by_name() {
    assert_eq!(Actor::part("idle").to_string(), "idle");
    let actor = Actor { who: "key_ada".to_owned(), from: Some("192.0.2.7".to_owned()) };
    assert_eq!(actor.to_string(), "key_ada");
}

#[test]
fn those_inside_are_heard_where_commands_run() {
    let verifying = after(&created(true), &done(&created(true), made()), NOW_MS);
    assert!(verifying.phase.is_heard() && ready(true).phase.is_heard());
    let saving = after(&ready(true), &stop(), NOW_MS);
    for phase in [created(true).phase, saving.phase, Phase::Lost, Phase::Stopped] {
        assert!(!phase.is_heard(), "{phase:?}");
    }
}

#[test]
fn t6_a_deadline_is_told_of_what_is_known_to_have_an_instance() {
    let verifying = after(&created(true), &done(&created(true), made()), NOW_MS);
    for lives in [&verifying, &ready(true)] {
        assert_eq!(lives.lives_until_ms(), Some(NOW_MS + 3_600_000));
    }
    let saving = after(&ready(true), &stop(), NOW_MS);
    let lost = Sandbox { phase: Phase::Lost, ..ready(true) };
    for other in [created(true), saving, lost] {
        assert_eq!(other.lives_until_ms(), None, "{:?}", other.phase);
    }
}

#[test]
fn an_end_is_told_by_the_words_for_it_alone() {
    let seen = |state: &str| Observed { state: state.to_owned(), via: "list".to_owned(), at_ms: 1 }.tells_of_an_end();
    assert!(seen("ended (exit 1)") && seen("ending") && Observed::absent(1).tells_of_an_end());
    assert!(!seen("running") && !seen("frozen"));
}

#[test]
fn it_is_about_services_when_all_else_is_well_and_one_was_seen_not_to_be() {
    let of = |rest, service| Evidence { services: vec![of_service(service, NOW_MS)], ..evidence(rest, NOW_MS) };
    assert!(of(Finding::Ok, Finding::Gone).is_about_services());
    assert!(of(Finding::Ok, Finding::Unhealthy).is_about_services());
    for (rest, service) in [
        (Finding::Ok, Finding::Ok),
        (Finding::Ok, Finding::Timeout),
        (Finding::Gone, Finding::Gone),
        (Finding::Unhealthy, Finding::Ok),
    ] {
        assert!(!of(rest, service).is_about_services(), "{rest:?} and {service:?}");
    }
}

/// Whatever is asked for, the instance is the spare's.
#[test]
fn l19_a_claim_keeps_what_is_the_instances_own() {
    let observed = Observed { state: "running".to_owned(), via: "list".to_owned(), at_ms: 3 };
    let spare = Sandbox {
        generation: Generation(4),
        observed: Some(observed.clone()),
        expires_at_ms: Some(NOW_MS + 5),
        ..spare()
    };
    let timings = Timings::default();
    let at = Moment { now_ms: NOW_MS, timings: &timings, no_memory: None };
    let asked = NewSandbox { id: SandboxId::from_bytes([9; 16]), ..wanted(true) };
    let claimed = claim(&spare, asked, at).expect("it fits");
    assert_eq!((claimed.id, claimed.generation, claimed.claimed), (spare.id, Generation(4), Some(Generation(4))));
    assert_eq!((claimed.observed, claimed.expires_at_ms), (Some(observed), Some(NOW_MS + 5)));
}

#[test]
fn what_is_to_be_tried_again_is_due_then_or_at_its_deadline() {
    let mut sandbox = created(true);
    let deadline_ms = sandbox.phase.work().unwrap().deadline_at_ms;
    assert_eq!(sandbox.due_at_ms(), Some(deadline_ms));
    let mut retried_at = |at_ms| {
        let Phase::Provisioning { work, .. } = &mut sandbox.phase else { panic!("it is being made") };
        work.retry_at_ms = at_ms;
        sandbox.due_at_ms()
    };
    assert_eq!(retried_at(NOW_MS + 1), Some(NOW_MS + 1));
    assert_eq!(retried_at(deadline_ms + 1), Some(deadline_ms));
}

/// A fork with memory has copies of the services that ran, under names of its own.
#[test]
fn x5_services_of_a_fork_with_memory_are_its_own() {
    let execution = ExecutionId::from_bytes([5; 16]);
    let run = ServiceRun {
        generation: Generation(7),
        after: Some(execution.clone()),
        ..begun(&created_with_service(true), &execution)
    };
    let memory = SnapshotMemory { services: [(web(), run)].into() };
    let snapshot: SnapshotId = "snp_a".parse().unwrap();
    let fork = created(true).with_memory(&snapshot, &memory);
    let copy = &fork.services[&web()];
    assert_eq!((copy.generation, &copy.after), (fork.generation, &None));
    assert_eq!(copy.execution, execution.copied_into(&fork.id));
    assert_ne!(copy.execution, execution);
}

/// A run of its service, as this execution.
fn begun(sandbox: &Sandbox, execution: &ExecutionId) -> ServiceRun {
    let making = after(sandbox, &done(sandbox, made()), NOW_MS);
    ServiceRun { execution: execution.clone(), ..making.services[&web()].clone() }
}
