//! Making, looking at and ending instances.

use viv_core::exec::OutputEvent;
use viv_core::{EndCause, Generation};

use super::lab::{Answer, Lab, SOON_MS, TOKEN, assert_refused, assert_unsupported};
use super::program;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{InstanceSpec, InstanceState};
use crate::limits::ResourceLimits;

/// How much of a lifetime may be gone by the time that it is first seen.
const CREATE_MS_MAX: u64 = 30_000;

/// Most events that a follower may hear before it is let go.
const EVENTS_MAX: usize = 10_000;

fn unmade(lab: &Lab) -> Subject<'_> {
    Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN)
}

pub(super) async fn create_answers_when_it_runs(lab: &Lab) {
    let subject = unmade(lab);
    let mut spec = lab.spec();
    spec.lifetime_ms = 300_000;
    let answered = subject.create(&spec).await;
    assert_eq!(answered.instance, subject.instance());
    assert_eq!(answered.state, InstanceState::Running);

    let seen = subject.observe().await;
    assert_eq!(seen.instance, subject.instance());
    assert_eq!(seen.state, InstanceState::Running);
    assert!(seen.observed_at_ms <= lab.now_ms() + SOON_MS, "looked at in the future");
    if lab.can(Capability::HardDeadline) {
        let deadline = seen.deadline.expect("a living instance has a deadline");
        let range = spec.lifetime_ms - CREATE_MS_MAX..=spec.lifetime_ms;
        assert!(range.contains(&deadline.remaining_ms), "{deadline:?} of {range:?}");
    } else {
        assert_eq!(seen.deadline, None, "a deadline that nobody keeps must not be shown");
    }
}

pub(super) async fn create_repeated_makes_one(lab: &Lab) {
    let subject = unmade(lab);
    let (mutation, owner, spec) = (subject.mutation(), lab.owner(), lab.spec());
    lab.provider().create(&mutation, &subject.sandbox, &owner, &spec).await.must("create");
    subject.write("/tmp/mark", b"first").await;
    let again = lab.provider().create(&mutation, &subject.sandbox, &owner, &spec).await.must("create, repeated");
    assert_eq!(again.instance, subject.instance());
    assert_eq!(again.state, InstanceState::Running);
    assert_eq!(subject.read("/tmp/mark").await, b"first", "it was made anew");
    assert_eq!(lab.list_all(&owner, None).await.len(), 1);
}

pub(super) async fn create_repeated_at_once_makes_one(lab: &Lab) {
    let subject = unmade(lab);
    let (mutation, owner, spec) = (subject.mutation(), lab.owner(), lab.spec());
    let create = || lab.provider().create(&mutation, &subject.sandbox, &owner, &spec);
    let (one, other) = tokio::join!(create(), create());
    assert_eq!(one.must("the one").state, InstanceState::Running);
    assert_eq!(other.must("the other").state, InstanceState::Running);
    assert_eq!(lab.list_all(&owner, None).await.len(), 1);
}

pub(super) async fn create_by_two_operations_at_once_makes_one(lab: &Lab) {
    let subject = unmade(lab);
    let (owner, spec) = (lab.owner(), lab.spec());
    let (first, second) = (subject.mutation(), subject.mutation());
    let (one, other) = tokio::join!(
        lab.provider().create(&first, &subject.sandbox, &owner, &spec),
        lab.provider().create(&second, &subject.sandbox, &owner, &spec),
    );
    match (one, other) {
        (Ok(_), Err(ProviderError::Conflict { .. })) | (Err(ProviderError::Conflict { .. }), Ok(_)) => {}
        both => panic!("exactly one has to win, the other to conflict: {both:?}"),
    }
    assert_eq!(subject.state().await, InstanceState::Running);
    assert_eq!(lab.list_all(&owner, None).await.len(), 1);
}

pub(super) async fn create_by_another_operation_conflicts(lab: &Lab) {
    let subject = lab.subject().await;
    let again = lab.provider().create(&subject.mutation(), &subject.sandbox, &lab.owner(), &lab.spec()).await;
    assert_refused!(again, ProviderError::Conflict { .. });
    assert_eq!(subject.state().await, InstanceState::Running);
}

pub(super) async fn create_of_the_next_generation_waits_for_the_destroy(lab: &Lab) {
    let subject = lab.subject().await;
    let next = subject.next();
    let early = lab.provider().create(&next.mutation(), &next.sandbox, &lab.owner(), &lab.spec()).await;
    assert_refused!(early, ProviderError::Conflict { .. });
    assert_eq!(subject.state().await, InstanceState::Running, "the living one was harmed");

    let mutation = lab.mutation(subject.generation, next.token);
    lab.provider().destroy(&mutation, &subject.sandbox).await.must("destroy");
    assert_eq!(next.create(&lab.spec()).await.instance.generation, next.generation);
    assert_eq!(lab.list_all(&lab.owner(), None).await.len(), 1);
}

pub(super) async fn create_with_a_bad_spec_leaves_nothing(lab: &Lab) {
    let subject = unmade(lab);
    let relative = InstanceSpec { workdir: "not/absolute".to_owned(), ..lab.spec() };
    let stillborn = InstanceSpec { lifetime_ms: 0, ..lab.spec() };
    for bad in [relative, stillborn] {
        let refused = lab.provider().create(&subject.mutation(), &subject.sandbox, &lab.owner(), &bad).await;
        assert_refused!(refused, ProviderError::Invalid { .. });
        assert_eq!(subject.state().await, InstanceState::Absent);
    }
    assert!(lab.list_all(&lab.owner(), None).await.is_empty());
    // What was refused for its content changed nothing, so the generation is still free.
    subject.create(&lab.spec()).await;
}

/// What keeps an instance in bounds is there, or whoever looks is told that it is not and why, never neither.
pub(super) async fn what_an_instance_lacks_is_told(lab: &Lab) {
    let subject = lab.subject().await;
    let seen = subject.observe().await;
    assert_eq!(seen.lacks, lab.provider().capabilities().lacks());
    for bound in [Capability::LimitMemory, Capability::LimitProcesses, Capability::HardDeadline, Capability::ProvenKill]
    {
        assert_eq!(lab.can(bound), !seen.lacks.contains_key(&bound), "{bound:?}");
    }
    assert!(seen.lacks.values().all(|why| !why.is_empty()), "{:?}", seen.lacks);
}

pub(super) async fn limits_are_honoured_or_refused(lab: &Lab) {
    let none = ResourceLimits::default;
    let limits = [
        (Capability::LimitCpu, ResourceLimits { cpu_millis: Some(500), ..none() }),
        (Capability::LimitCpu, ResourceLimits { cpu_weight: Some(50), ..none() }),
        (Capability::LimitMemory, ResourceLimits { memory_bytes: Some(256 << 20), ..none() }),
        (Capability::LimitProcesses, ResourceLimits { processes: Some(64), ..none() }),
        (Capability::LimitDisk, ResourceLimits { disk_bytes: Some(64 << 20), ..none() }),
        (Capability::LimitIoRead, ResourceLimits { io_read_bps: Some(64 << 20), ..none() }),
        (Capability::LimitIoWrite, ResourceLimits { io_write_bps: Some(64 << 20), ..none() }),
        (Capability::LimitOpenFiles, ResourceLimits { open_files: Some(256), ..none() }),
    ];
    for (capability, limits) in limits {
        let subject = unmade(lab);
        let mut spec = lab.spec();
        spec.limits = limits;
        let created = lab.provider().create(&subject.mutation(), &subject.sandbox, &lab.owner(), &spec).await;
        if lab.can(capability) {
            assert_eq!(created.must("create with a limit").state, InstanceState::Running);
            let word = lab.nonce();
            assert_eq!(subject.run_ok(&program::echo(&word)).await, format!("{word}\n"));
            subject.destroy().await;
        } else {
            assert_unsupported(created, capability);
            assert_eq!(subject.state().await, InstanceState::Absent);
        }
    }
}

pub(super) async fn usage_is_reported_or_absent(lab: &Lab) {
    let subject = lab.subject().await;
    let usage = subject.observe().await.usage;
    assert_eq!(usage.is_some(), lab.can(Capability::Usage), "declared and reported differ: {usage:?}");
}

pub(super) async fn observe_after_destroy_is_absent(lab: &Lab) {
    let subject = lab.subject().await;
    subject.destroy().await;
    let seen = subject.observe().await;
    assert_eq!(seen.instance, subject.instance());
    assert_eq!(seen.state, InstanceState::Absent);
    assert_eq!(seen.deadline, None);
}

pub(super) async fn observe_of_what_never_was_is_absent(lab: &Lab) {
    assert_eq!(unmade(lab).state().await, InstanceState::Absent);
}

pub(super) async fn observe_of_an_old_generation_is_absent(lab: &Lab) {
    let old = lab.subject().await;
    old.destroy().await;
    let new = old.next();
    new.create(&lab.spec()).await;
    assert_eq!(old.state().await, InstanceState::Absent);
    assert_eq!(new.state().await, InstanceState::Running);
}

pub(super) async fn destroy_is_safe_to_repeat(lab: &Lab) {
    let subject = lab.subject().await;
    let mutation = subject.mutation();
    for round in ["destroy", "destroy, repeated", "destroy, repeated again"] {
        lab.provider().destroy(&mutation, &subject.sandbox).await.must(round);
        assert_eq!(subject.state().await, InstanceState::Absent);
    }
    subject.destroy().await;
}

pub(super) async fn destroy_of_what_never_was_answers(lab: &Lab) {
    let subject = unmade(lab);
    subject.destroy().await;
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn destroy_ends_a_busy_instance(lab: &Lab) {
    let subject = lab.subject().await;
    let stubborn = program::Program::Stubborn { path: "/tmp/ticks".to_owned() };
    let execution = subject.start(&stubborn.spec()).await;
    subject.until_written(&execution, "ready").await;
    lab.drive("destroy", SOON_MS, subject.destroy()).await;
    assert_eq!(subject.state().await, InstanceState::Absent);
    assert!(lab.list_all(&lab.owner(), None).await.is_empty());
}

pub(super) async fn destroy_lets_followers_go(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::sleep()).await;
    let mut stream = subject.attach(&execution, 0, true).await;
    subject.destroy().await;
    // It may be told of the end or of the absence; what it may not is wait for ever.
    let let_go = async {
        for _ in 0..EVENTS_MAX {
            match stream.next().await {
                Ok(None | Some(OutputEvent::End(_))) | Err(_) => return,
                Ok(Some(_)) => {}
            }
        }
        panic!("more than {EVENTS_MAX} events from a command that is silent");
    };
    lab.drive("the follower's last event", SOON_MS, let_go).await;
}

pub(super) async fn wait_end_hears_of_a_destroy(lab: &Lab) {
    let subject = lab.subject().await;
    let instance = subject.instance();
    let wait = lab.drive("wait_end", SOON_MS, lab.provider().wait_end(&instance));
    let (ended, ()) = tokio::join!(wait, subject.destroy());
    assert_eq!(ended.must("wait_end").cause, EndCause::Destroyed);
    // Whoever asks after the end is answered at once, from the tombstone.
    let after = lab.drive("wait_end", SOON_MS, lab.provider().wait_end(&instance)).await;
    assert_eq!(after.must("wait_end after the end").cause, EndCause::Destroyed);
}

pub(super) async fn wait_end_of_what_never_was_is_absent(lab: &Lab) {
    let subject = unmade(lab);
    let waited = lab.drive("wait_end", SOON_MS, lab.provider().wait_end(&subject.instance())).await;
    assert_refused!(waited, ProviderError::Absent);
}

pub(super) async fn reads_change_nothing(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo("once")).await;
    subject.until_final(&execution).await;
    let before = subject.observe().await;
    for _ in 0..3 {
        subject.hear(&execution, 0, true).await;
        subject.status(&execution).await;
        subject.list("/tmp", 1).await.must("file_list");
        subject.stat("/tmp").await.must("file_stat");
        lab.list_all(&lab.owner(), None).await;
        lab.provider().executions(&subject.instance()).await.must("executions");
    }
    let after = subject.observe().await;
    assert_eq!(after.state, before.state);
    assert_eq!(after.deadline.map(|d| d.revision), before.deadline.map(|d| d.revision), "a read moved the deadline");
    assert!(after.deadline.map(|d| d.remaining_ms) <= before.deadline.map(|d| d.remaining_ms), "a read gave more time");
}
