//! What was made ahead: claimed, found broken, and whose it is (L19).

use viv_core::cause::EndCause;
use viv_core::lifecycle::{
    Cause, Desired, Effect, EntryKind, Event, Failure, FailureKind, Finding, Moment, NewSandbox, Outcome, Phase,
    PhaseName, Sandbox, Seen, Timings, claim, outstanding,
};
use viv_core::limits::ResourceLimits;
use viv_core::spec::{Egress, Image, Network, Project, SandboxSpec};
use viv_core::{Generation, SnapshotId};

use crate::setup::{NOW_MS, after, claimed, created_with_service, delete, done, evidence, seen, spare, stop, wanted};

fn claim_at(spare: &Sandbox, new: NewSandbox) -> Option<Sandbox> {
    let timings = Timings::default();
    claim(spare, new, Moment { now_ms: NOW_MS, timings: &timings, no_memory: None })
}

fn effect(sandbox: &Sandbox) -> Effect {
    outstanding(sandbox).expect("something is outstanding").0
}

fn well(at_ms: u64) -> Outcome {
    Outcome::Probed(evidence(Finding::Ok, at_ms))
}

/// Its lifetime was set.
fn set(sandbox: &Sandbox) -> Sandbox {
    after(sandbox, &done(sandbox, Outcome::Claimed { remaining_ms: Some(3_600_000) }), NOW_MS)
}

#[test]
fn l19_a_claim_is_a_create_whose_instance_is_there_already() {
    let (spare, claimed) = (spare(), claimed());
    let asked = wanted(true);
    assert_eq!((&claimed.project, &claimed.name, &claimed.spec), (&asked.project, &asked.name, &asked.spec));
    assert_eq!((&claimed.labels, &claimed.policy), (&asked.labels, &asked.policy));
    assert_eq!((&claimed.id, claimed.generation), (&spare.id, spare.generation));
    assert_eq!((claimed.version, claimed.desired), (spare.version + 1, Desired::Running));
    assert!(claimed.operations > spare.operations, "no operation has a name twice");
    assert_eq!(claimed.entry.as_ref().map(|entry| entry.kind), Some(EntryKind::Create));
    assert!(!claimed.is_spare());
    assert_eq!(claimed.evidence.at_ms(), None, "what was found of the spare says nothing");
    assert_eq!(effect(&claimed), Effect::Claim { generation: Generation::FIRST });
    let probing = set(&claimed);
    assert_eq!(probing.expires_at_ms, Some(NOW_MS + 3_600_000));
    let ready = after(&probing, &done(&probing, well(NOW_MS)), NOW_MS);
    assert_eq!((ready.phase.name(), ready.generation), (PhaseName::Ready, Generation::FIRST));
}

#[test]
fn l19_only_what_is_a_spare_and_fits_is_claimed() {
    let good = spare();
    let not_ready = created_with_service(false);
    assert_eq!(claim_at(&not_ready, wanted(true)), None);
    assert_eq!(claim_at(&claimed(), wanted(true)), None, "not a second time");
    let gone = after(&good, &delete(), NOW_MS);
    assert_eq!(claim_at(&gone, wanted(true)), None);
    let lost = after(&good, &seen(&good, Seen::Absent, NOW_MS), NOW_MS);
    assert_eq!(claim_at(&lost, wanted(true)), None);
    // To the letter: one thing that an instance is made of, and it is another kind.
    let ships = SandboxSpec::default;
    let limits = |limits| SandboxSpec { limits, ..ships() };
    let others = [
        SandboxSpec { workdir: "/elsewhere".to_owned(), ..ships() },
        SandboxSpec { image: Image::Named { name: "python".to_owned() }, ..ships() },
        SandboxSpec { image: Image::Directory { path: "/srv/root".to_owned() }, ..ships() },
        SandboxSpec { network: Network { egress: Egress::All }, ..ships() },
        SandboxSpec { packages: true, ..ships() },
        limits(ResourceLimits { cpu_millis: Some(500), ..ResourceLimits::default() }),
        limits(ResourceLimits { memory_bytes: Some(64 << 20), ..ResourceLimits::default() }),
        limits(ResourceLimits { processes: Some(64), ..ResourceLimits::default() }),
        limits(ResourceLimits { disk_bytes: Some(64 << 20), ..ResourceLimits::default() }),
        limits(ResourceLimits { open_files: Some(64), ..ResourceLimits::default() }),
    ];
    for other in others {
        let own = Sandbox { spec: other.clone(), ..good.clone() };
        assert_eq!(claim_at(&good, NewSandbox { spec: other.clone(), ..wanted(true) }), None, "{other:?}");
        assert!(claim_at(&own, NewSandbox { spec: other.clone(), ..wanted(true) }).is_some(), "{other:?}");
        assert_eq!(claim_at(&own, wanted(true)), None, "{other:?}");
    }
    let origin: Option<SnapshotId> = Some("snp_a".parse().unwrap());
    assert_eq!(claim_at(&good, NewSandbox { origin, ..wanted(true) }), None);
    assert_eq!(claim_at(&good, NewSandbox { project: Project::spares(), ..wanted(true) }), None);
}

#[test]
fn l19_services_and_hooks_of_who_asks_are_performed_in_what_was_a_spare() {
    let Sandbox { spec, .. } = created_with_service(true);
    let claimed = claim_at(&spare(), NewSandbox { spec, ..wanted(true) }).unwrap();
    assert_eq!(claimed.services.len(), 1);
    let serving = set(&claimed);
    assert_eq!(effect(&serving), Effect::Serve { generation: Generation::FIRST });
    let (_, work) = outstanding(&serving).unwrap();
    assert!(work.deadline_at_ms >= NOW_MS + 30_000, "they have their time");
}

#[test]
fn l19_a_spare_that_is_broken_is_followed_by_an_ordinary_create() {
    let claimed = claimed();
    let probing = set(&claimed);
    let deadline_ms = probing.phase.work().unwrap().deadline_at_ms;
    assert!(deadline_ms <= NOW_MS + 5_000, "who waits does not wait long");
    let failed = |kind| Outcome::Failed(Failure { kind, what: "no".to_owned() });
    let ended = |end| seen(&claimed, Seen::Ended(end), NOW_MS);
    let unhealthy = Outcome::Probed(evidence(Finding::Unhealthy, NOW_MS));
    let broken = [
        after(&claimed, &done(&claimed, failed(FailureKind::Failed)), NOW_MS),
        after(&claimed, &done(&claimed, failed(FailureKind::Refused)), NOW_MS),
        after(&claimed, &ended(EndCause::AgentLost), NOW_MS),
        after(&claimed, &ended(EndCause::Expired), NOW_MS),
        after(&claimed, &seen(&claimed, Seen::Absent, NOW_MS), NOW_MS),
        after(&claimed, &Event::Due, NOW_MS + 5_000),
        after(&probing, &done(&probing, unhealthy), NOW_MS),
        after(&probing, &Event::Due, deadline_ms),
    ];
    for next in broken {
        assert_eq!((next.phase.name(), &next.cause.cause), (PhaseName::Provisioning, &Cause::SpareBroken), "{next:?}");
        assert!(next.entry.is_some(), "who waits is not forgotten");
        let making = after(&next, &done(&next, Outcome::Cleared), NOW_MS);
        assert_eq!(effect(&making), Effect::Create { generation: Generation::FIRST.next() });
        assert_eq!(making.claimed, None);
    }
    // Nobody knows what became of it: it is asked again.
    let again = after(&claimed, &done(&claimed, failed(FailureKind::Unknown)), NOW_MS);
    assert_eq!(effect(&again), Effect::Claim { generation: Generation::FIRST });
}

#[test]
fn l19_what_worked_for_its_owner_is_a_spare_no_more() {
    let probing = set(&claimed());
    let ready = after(&probing, &done(&probing, well(NOW_MS)), NOW_MS);
    let probed = Event::Probed { generation: ready.generation, evidence: evidence(Finding::Unhealthy, NOW_MS + 1) };
    let finding = after(&ready, &probed, NOW_MS + 1);
    let Phase::Verifying { was_ready, work, .. } = &finding.phase else { panic!("{finding:?}") };
    assert!(was_ready);
    // It is lost like any other, and not replaced at the first finding (T7).
    assert_eq!(after(&finding, &Event::Due, work.deadline_at_ms).phase.name(), PhaseName::Lost);
    let stopped = after(&probing, &stop(), NOW_MS);
    assert_eq!(stopped.entry, None);
}

#[test]
fn l19_commands_are_told_what_their_instance_was_not_made_with() {
    let mut new = wanted(false);
    new.spec.env.insert("TOKEN".to_owned(), "mine".to_owned());
    let claimed = claim_at(&spare(), new).unwrap();
    let told = claimed.env_to_tell(claimed.generation).unwrap();
    assert_eq!(told.get("TOKEN").map(String::as_str), Some("mine"));
    assert_eq!(claimed.env_to_tell(claimed.generation.next()), None, "that one is made with it");
}
