//! Records, evidence and events to begin with.

use std::path::PathBuf;

use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure};
use viv_core::lifecycle::{
    Actor, Check, EntryKind, Event, Evidence, Finding, Moment, NewSandbox, Observed, Outcome, PortCheck, Sandbox, Seen,
    ServiceCheck, Stepped, Timings, outstanding, step,
};
use viv_core::service::{Nudge, Readiness, Restart, RestartPolicy, ServiceFound, ServiceReport, ServiceSpec};
use viv_core::spec::{Hibernate, Policy, Project, SandboxSpec, ServiceName};
use viv_core::{SandboxId, SnapshotId};

/// A time like any other, far from either end.
pub(crate) const NOW_MS: u64 = 1_000_000_000_000;

/// The port that has to answer in every sandbox made here.
pub(crate) const PORT: u16 = 8080;

pub(crate) fn user() -> Actor {
    Actor { who: "key_ada".to_owned(), from: Some("192.0.2.7".to_owned()) }
}

/// The service of those sandboxes that have one.
pub(crate) fn web() -> ServiceName {
    "web".parse().expect("a name")
}

/// It is started once more when it ends, and nudged.
pub(crate) fn service() -> ServiceSpec {
    ServiceSpec {
        name: web(),
        argv: vec!["serve".to_owned()],
        env: std::collections::BTreeMap::new(),
        cwd: None,
        user: None,
        ready: Readiness::Port { port: 80 },
        ready_within_ms: 30_000,
        restart: Restart { policy: RestartPolicy::OnFailure, times_max: 1, backoff_ms: 500 },
        nudge: Some(Nudge { signal: 10, within_ms: 120_000, reports: None, on_thaw: true }),
    }
}

/// A hook that must succeed.
pub(crate) fn hook(on_failure: OnFailure) -> Hook {
    Hook { action: HookAction::Command { argv: vec!["set-up".to_owned()] }, deadline_ms: 10_000, on_failure }
}

/// A sandbox that was just asked for, with a service, and hooks that must succeed.
pub(crate) fn created_with_service(persistent: bool) -> Sandbox {
    let mut sandbox = created(persistent);
    sandbox.spec.services = vec![service()];
    for point in [HookPoint::AfterStart, HookPoint::AfterResume] {
        sandbox.spec.hooks.insert(point, hook(OnFailure::Abort));
    }
    sandbox
}

/// A sandbox that was just asked for, whose memory is saved too.
pub(crate) fn created_with_memory() -> Sandbox {
    let mut sandbox = created(true);
    sandbox.policy.hibernate = Hibernate::Memory;
    sandbox
}

/// What was found of its service.
#[expect(clippy::needless_pass_by_value, reason = "a finding is made for one call")]
pub(crate) fn served(sandbox: &Sandbox, found: ServiceFound, at_ms: u64) -> Outcome {
    let report = |(service, run): (&ServiceName, &viv_core::service::ServiceRun)| ServiceReport {
        service: service.clone(),
        execution: run.execution.clone(),
        found: found.clone(),
        at_ms,
    };
    Outcome::Served(sandbox.services.iter().map(report).collect())
}

/// A spare that is ready.
pub(crate) fn spare() -> Sandbox {
    let mut sandbox = created(false);
    (sandbox.project, sandbox.spec, sandbox.labels) = (Project::spares(), SandboxSpec::default(), [].into());
    let made = after(&sandbox, &done(&sandbox, made()), NOW_MS);
    let well = Evidence { ports: Vec::new(), ..evidence(Finding::Ok, NOW_MS) };
    after(&made, &done(&made, Outcome::Probed(well)), NOW_MS)
}

/// A sandbox as somebody wants it who may get a spare.
pub(crate) fn wanted(persistent: bool) -> NewSandbox {
    let Sandbox { id, project, name, spec, policy, labels, .. } = created(persistent);
    NewSandbox { id, project, name, spec, policy, labels, origin: None, by: user() }
}

/// A spare that was just claimed.
pub(crate) fn claimed() -> Sandbox {
    let timings = Timings::default();
    let at = Moment { now_ms: NOW_MS, timings: &timings, no_memory: None };
    viv_core::lifecycle::claim(&spare(), wanted(true), at).expect("it fits")
}

/// A sandbox that was just asked for.
pub(crate) fn created(persistent: bool) -> Sandbox {
    let new = NewSandbox {
        id: SandboxId::from_bytes([7; 16]),
        project: Project::default(),
        name: persistent.then(|| "box".parse().expect("a name")),
        spec: SandboxSpec { ports: vec![PORT], ..SandboxSpec::default() },
        policy: Policy { persistent, lifetime_ms: 3_600_000, idle_ms: 900_000, ..Policy::default_for(None) },
        labels: [("team".to_owned(), "a".to_owned())].into(),
        origin: None,
        by: user(),
    };
    let timings = Timings::default();
    Sandbox::create(new, Moment { now_ms: NOW_MS, timings: &timings, no_memory: None })
}

pub(crate) fn check(finding: Finding, at_ms: u64) -> Check {
    let message = (finding != Finding::Ok).then(|| "not as it has to be".to_owned());
    Check { finding, at_ms, took_ms: 3, message }
}

/// A report in which one probe found this and the others were well.
pub(crate) fn evidence(finding: Finding, at_ms: u64) -> Evidence {
    Evidence {
        exec: Some(check(finding, at_ms)),
        filesystem: Some(check(Finding::Ok, at_ms)),
        ports: vec![PortCheck { port: PORT, check: check(Finding::Ok, at_ms) }],
        services: Vec::new(),
    }
}

/// The check of the service of those that have one.
pub(crate) fn of_service(finding: Finding, at_ms: u64) -> ServiceCheck {
    ServiceCheck { service: web(), execution: "exe_s".parse().expect("an id"), check: check(finding, at_ms) }
}

/// Everything that was looked at is well, and something was not looked at.
pub(crate) fn incomplete(at_ms: u64) -> [Evidence; 3] {
    let whole = evidence(Finding::Ok, at_ms);
    [
        Evidence { exec: None, ..whole.clone() },
        Evidence { filesystem: None, ..whole.clone() },
        Evidence { ports: Vec::new(), ..whole },
    ]
}

pub(crate) fn step_at(sandbox: &Sandbox, event: &Event, now_ms: u64) -> Stepped {
    let timings = Timings::default();
    step(sandbox, event, Moment { now_ms, timings: &timings, no_memory: None })
}

/// The record after an event that has to be accepted.
pub(crate) fn after(sandbox: &Sandbox, event: &Event, now_ms: u64) -> Sandbox {
    match step_at(sandbox, event, now_ms) {
        Stepped::Accepted(accepted) => accepted.next,
        other @ (Stepped::Ignored(_) | Stepped::Denied(_)) => {
            panic!("{event:?} in {:?}: {other:?}", sandbox.phase)
        }
    }
}

/// What is outstanding had this outcome.
pub(crate) fn done(sandbox: &Sandbox, outcome: Outcome) -> Event {
    let (_, work) = outstanding(sandbox).expect("something is outstanding");
    Event::Done { operation: work.operation.clone(), outcome }
}

pub(crate) fn made() -> Outcome {
    Outcome::Made { remaining_ms: Some(3_600_000) }
}

pub(crate) fn enter(kind: EntryKind) -> Event {
    Event::Enter { kind, by: user() }
}

pub(crate) fn stop() -> Event {
    Event::Stop { by: user() }
}

pub(crate) fn delete() -> Event {
    Event::Delete { by: user() }
}

/// What it can go back to.
pub(crate) fn target() -> SnapshotId {
    "snp_target".parse().expect("an id")
}

pub(crate) fn rollback(discard: bool) -> Event {
    Event::Rollback { snapshot: target(), discard, by: user() }
}

pub(crate) fn reset() -> Event {
    Event::Reset { by: user() }
}

/// One that is made from a snapshot.
pub(crate) fn made_from(persistent: bool) -> Sandbox {
    let new = created(persistent);
    let new = NewSandbox {
        id: new.id,
        project: new.project,
        name: new.name,
        spec: new.spec,
        policy: new.policy,
        labels: new.labels,
        origin: Some(target()),
        by: user(),
    };
    let timings = Timings::default();
    Sandbox::create(new, Moment { now_ms: NOW_MS, timings: &timings, no_memory: None })
}

/// The current generation was seen so.
pub(crate) fn seen(sandbox: &Sandbox, seen: Seen, now_ms: u64) -> Event {
    let state = match &seen {
        Seen::Running => "running",
        Seen::Frozen => "frozen",
        Seen::Ended(_) => "ended",
        Seen::Absent => "absent",
    };
    let observed = Observed { state: state.to_owned(), via: "listing".to_owned(), at_ms: now_ms };
    Event::Seen { generation: sandbox.generation, seen, observed }
}

/// One that works.
pub(crate) fn ready(persistent: bool) -> Sandbox {
    let sandbox = created(persistent);
    let sandbox = after(&sandbox, &done(&sandbox, made()), NOW_MS);
    after(&sandbox, &done(&sandbox, Outcome::Probed(evidence(Finding::Ok, NOW_MS))), NOW_MS)
}

/// One that is saved. A user stopped it.
pub(crate) fn hibernated() -> Sandbox {
    let sandbox = after(&ready(true), &stop(), NOW_MS);
    let sandbox = after(&sandbox, &done(&sandbox, Outcome::Saved), NOW_MS);
    after(&sandbox, &done(&sandbox, Outcome::Cleared), NOW_MS)
}

/// A committed file.
pub(crate) fn read(path_in_repository: &str) -> String {
    std::fs::read_to_string(in_repository(path_in_repository)).unwrap_or_default()
}

fn in_repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Compares with a committed file, or writes it anew with `UPDATE=1`.
pub(crate) fn compare(path_in_repository: &str, now: &str) {
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(in_repository(path_in_repository), now).expect("written");
    }
    assert!(
        read(path_in_repository) == now,
        "{path_in_repository} is not what the code says any more.\n\
         hint: if that is intended, UPDATE=1 cargo test -p viv-core --test lifecycle, and read the difference\n\
         it should be:\n{now}"
    );
}
