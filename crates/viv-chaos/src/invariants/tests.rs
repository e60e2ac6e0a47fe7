//! For each invariant on changes, a change that breaks it.

use std::collections::BTreeMap;

use viv_core::lifecycle::{
    Actor, Cause, Caused, Check, Desired, Entry, EntryKind, Evidence, Finding, FreezeStep, HibernateStep, KeepAwake,
    Moment, NewSandbox, Phase, Sandbox, Timings, VerifyStep, Work,
};
use viv_core::schedule::{MissedRuns, Schedule};
use viv_core::snapshot::{Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, ExecutionId, FencingToken, Generation, SandboxId, ScheduleId, SnapshotId};
use viv_provider::{Ended, InstanceRef, InstanceState};
use viv_store::{Epoch, Lease, LeaseKind, NewLine};

use super::change::as_lost_for;
use super::{Changes, INVARIANTS, When};
use crate::plan::Deed;
use crate::store::{Recorded, is_an_end};
use crate::world::{holder, somebody};

pub(super) const NOW_MS: u64 = 1_000_000;

pub(super) fn work() -> Work {
    let operation = "op_1".parse().unwrap();
    Work { operation, attempt: 1, deadline_at_ms: NOW_MS + 30_000, retry_at_ms: 0, overdue: false }
}

fn verifying(findings: u32) -> Phase {
    let (step, rebuilds, found_at_ms) = (VerifyStep::Probe, 0, NOW_MS - 1_000);
    Phase::Verifying { step, rebuilds, findings, found_at_ms, was_ready: true, work: work() }
}

fn hibernating() -> Phase {
    Phase::Hibernating { step: HibernateStep::Save, save_failed: true, work: work() }
}

pub(super) fn snapshot_id(byte: u8) -> SnapshotId {
    SnapshotId::from_bytes([byte; 16])
}

pub(super) fn entry() -> Entry {
    Entry { kind: EntryKind::Ensure, by: somebody(), at_ms: NOW_MS }
}

/// One that is ready, and nobody waits for.
pub(super) fn ready() -> Sandbox {
    let new = NewSandbox {
        id: SandboxId::from_bytes([1; 16]),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy { persistent: true, ..Policy::default_for(None) },
        labels: BTreeMap::new(),
        origin: None,
        by: somebody(),
    };
    let sandbox = Sandbox::create(new, Moment { now_ms: NOW_MS, timings: &Timings::default(), no_memory: None });
    Sandbox { phase: Phase::Ready, entry: None, ..sandbox }
}

fn well(finding: Finding) -> Evidence {
    let check = Check { finding, at_ms: NOW_MS, took_ms: 1, message: None };
    Evidence { exec: Some(check.clone()), filesystem: Some(check), ..Evidence::default() }
}

/// A change of a record, with the line that belongs to it.
#[expect(clippy::default_trait_access, reason = "its type is of a crate that is needed for nothing else here")]
fn change(before: Sandbox, cause: Cause, by: Actor, turn: impl FnOnce(&mut Sandbox)) -> Recorded {
    let mut after = Sandbox { version: before.version + 1, ..before.clone() };
    after.cause = Caused { cause, by: by.clone(), at_ms: NOW_MS, message: None };
    turn(&mut after);
    let line = NewLine {
        at_ms: NOW_MS,
        project: None,
        sandbox: Some(after.id.clone()),
        generation: Some(after.generation),
        kind: "sandbox.moved".to_owned(),
        from: Some(before.phase.name()),
        to: Some(after.phase.name()),
        cause: Some(after.cause.cause.code().to_owned()),
        by,
        data: Default::default(),
    };
    Recorded::Sandbox { before: Some(Box::new(before)), after: Box::new(after), lines: vec![line] }
}

fn by_engine(before: Sandbox, cause: Cause, turn: impl FnOnce(&mut Sandbox)) -> Recorded {
    change(before, cause, Actor::part("engine"), turn)
}

pub(super) fn row(state: SnapshotState, version: u64) -> Box<Snapshot> {
    Box::new(Snapshot {
        id: snapshot_id(1),
        project: Project::default(),
        sandbox: None,
        generation: Generation::FIRST,
        parent: None,
        kind: SnapshotKind::Manual,
        name: None,
        labels: BTreeMap::new(),
        state,
        version,
        created_at_ms: NOW_MS,
        by: somebody(),
        seen: None,
        memory: None,
        fork: None,
    })
}

pub(super) fn schedule() -> Schedule {
    Schedule {
        id: ScheduleId::from_bytes([1; 16]),
        project: Project::default(),
        sandbox: SandboxId::from_bytes([1; 16]),
        version: 1,
        cron: "* * * * *".to_owned(),
        zone: "UTC".to_owned(),
        command: viv_core::exec::ExecSpec::default(),
        missed: MissedRuns::Skip,
        enabled: true,
        made_by: somebody(),
        made_at_ms: NOW_MS,
        next_at_ms: Some(NOW_MS),
        waiting: Vec::new(),
        run: None,
        last: None,
        runs: 0,
        skipped: 0,
    }
}

/// A schedule that somebody asked to run.
pub(super) fn running() -> Schedule {
    let mut running = schedule();
    assert!(running.ask(NOW_MS));
    running
}

fn put(before: Schedule, after: Schedule) -> Recorded {
    Recorded::Schedule { before: Some(Box::new(before)), after: Some(Box::new(after)), lines: Vec::new() }
}

fn lease(token: u64) -> Recorded {
    let lease = Lease {
        sandbox: SandboxId::from_bytes([1; 16]),
        kind: LeaseKind::Lifecycle,
        holder: "daemon".to_owned(),
        since_ms: NOW_MS,
        expires_at_ms: NOW_MS,
        token: FencingToken(token),
    };
    Recorded::Lease { lease, epoch: Epoch(token) }
}

/// What breaks them, the last change of each; those before are well.
#[expect(clippy::too_many_lines, reason = "a table")]
fn broken() -> Vec<(&'static str, Vec<Recorded>)> {
    let stopped = || Sandbox { phase: Phase::Stopped, desired: Desired::Gone, ..ready() };
    let stopping = || Sandbox { phase: Phase::Stopping { work: work() }, desired: Desired::Gone, ..ready() };
    let held = || Sandbox { held: true, desired: Desired::Hibernated, ..ready() };
    let lost = || Sandbox { phase: Phase::Lost, ..ready() };
    let as_verifying = |findings| Sandbox { phase: verifying(findings), evidence: well(Finding::Ok), ..ready() };
    let moved = Cause::ProviderLost;
    let forgotten =
        by_engine(Sandbox { entry: Some(entry()), ..as_verifying(0) }, Cause::Requested, |next| next.entry = None);
    let mut silent = by_engine(ready(), moved.clone(), |next| next.phase = Phase::Lost);
    if let Recorded::Sandbox { lines, .. } = &mut silent {
        lines.clear();
    }
    let mut unready = Sandbox { phase: Phase::Lost, ..ready() };
    unready.entry = None;
    let other = |byte| Some(ExecutionId::from_bytes([byte; 16]));
    let with_run = |execution: Option<ExecutionId>, generation: Option<u64>| {
        let mut schedule = running();
        if let (Some(run), Some(execution)) = (&mut schedule.run, execution) {
            run.execution = execution;
            run.generation = generation.map(Generation);
        }
        schedule
    };
    vec![
        (
            "ends-are-told-apart",
            vec![Recorded::Over {
                instance: InstanceRef { sandbox: ready().id, generation: Generation::FIRST },
                state: InstanceState::Ended(Ended { cause: EndCause::OomKilled, at_ms: NOW_MS }),
                cause: Cause::Crashed,
            }],
        ),
        (
            "ends-are-told-apart",
            vec![Recorded::Over {
                instance: InstanceRef { sandbox: ready().id, generation: Generation::FIRST },
                state: InstanceState::Ended(Ended { cause: EndCause::OomKilled, at_ms: NOW_MS }),
                cause: Cause::MemoryNotRestored,
            }],
        ),
        ("version-counts", vec![by_engine(ready(), Cause::Requested, |next| next.version += 1)]),
        ("begins-with-intent", vec![Recorded::Sandbox { before: None, after: Box::new(unready), lines: Vec::new() }]),
        ("generation-grows", vec![by_engine(ready(), Cause::Requested, |next| next.generation = Generation(3))]),
        (
            "same-instance-same-generation",
            vec![by_engine(lost(), Cause::Reappeared, |next| {
                (next.phase, next.generation, next.entry) = (verifying(0), Generation(2), Some(entry()));
            })],
        ),
        ("entry-makes", vec![by_engine(ready(), Cause::Requested, |next| next.generation = Generation(2))]),
        ("entry-is-answered", vec![forgotten]),
        (
            "verified-before-ready",
            vec![by_engine(
                Sandbox { phase: Phase::Frozen { step: FreezeStep::Done }, ..ready() },
                Cause::Verified,
                |next| {
                    next.phase = Phase::Ready;
                },
            )],
        ),
        (
            "ready-on-evidence",
            vec![by_engine(as_verifying(0), Cause::Verified, |next| {
                (next.phase, next.evidence) = (Phase::Ready, well(Finding::Timeout));
            })],
        ),
        ("moves-have-causes", vec![silent]),
        (
            "verbs-reach-what-they-name",
            vec![change(ready(), Cause::Requested, holder(&ready().id, Generation(9), Deed::Stop, 1), |next| {
                next.operations += 1;
            })],
        ),
        (
            "absence-before-rest",
            vec![by_engine(ready(), Cause::Saved, |next| {
                next.phase = Phase::Hibernated { snapshot: snapshot_id(1) };
            })],
        ),
        ("gone-for-ever", vec![by_engine(stopping(), moved.clone(), |next| next.phase = Phase::Lost)]),
        (
            "deleted-for-ever",
            vec![by_engine(Sandbox { deleted: true, ..stopping() }, Cause::Requested, |next| next.deleted = false)],
        ),
        ("stopped-is-the-end", vec![by_engine(stopped(), Cause::Requested, |next| next.operations += 1)]),
        ("held-until-asked", vec![by_engine(held(), Cause::Requested, |next| next.held = false)]),
        ("held-by-a-stop", vec![by_engine(Sandbox { held: false, ..held() }, Cause::Saved, |next| next.held = true)]),
        (
            "held-is-not-wanted",
            vec![change(held(), Cause::Requested, somebody(), |next| next.desired = Desired::Running)],
        ),
        (
            "saving-never-runs-on",
            vec![by_engine(Sandbox { phase: hibernating(), ..ready() }, Cause::SaveFailed, |next| {
                next.phase = Phase::Frozen { step: FreezeStep::Done };
            })],
        ),
        ("three-findings", vec![by_engine(as_verifying(1), Cause::ProbeFailed, |next| next.phase = Phase::Lost)]),
        (
            "timeouts-replace-nothing",
            vec![by_engine(as_verifying(0), Cause::Unresponsive, |next| next.phase = Phase::Stopping { work: work() })],
        ),
        ("one-look-is-not-enough", vec![by_engine(ready(), Cause::ProbeFailed, |next| next.phase = Phase::Lost)]),
        (
            "idle-after-its-window",
            vec![change(ready(), Cause::Idle, Actor::part("idle"), |next| {
                next.phase = Phase::Frozen { step: FreezeStep::Done }
            })],
        ),
        (
            "kept-awake-is-not-idle",
            vec![change(
                {
                    let lease = KeepAwake { reason: String::new(), until_ms: NOW_MS + 1 };
                    Sandbox { keep_awake: [("lease".to_owned(), lease)].into(), ..ready() }
                },
                Cause::Idle,
                Actor::part("idle"),
                |next| next.phase = Phase::Frozen { step: FreezeStep::Done },
            )],
        ),
        ("reset-keeps-nothing", vec![Recorded::Reset { sandbox: ready().id, left: vec![snapshot_id(1)] }]),
        ("policy-stays", vec![by_engine(ready(), Cause::Requested, |next| next.policy.persistent = false)]),
        (
            "goes-back-where-asked",
            vec![by_engine(
                Sandbox { rollback: Some(snapshot_id(1)), phase: hibernating(), ..ready() },
                Cause::Saved,
                |next| {
                    (next.rollback, next.phase) = (None, Phase::Hibernated { snapshot: snapshot_id(2) });
                },
            )],
        ),
        (
            "what-is-over-holds-nothing",
            vec![by_engine(stopping(), Cause::UserStop, |next| {
                let lease = KeepAwake { reason: String::new(), until_ms: NOW_MS };
                next.phase = Phase::Stopped;
                next.keep_awake.insert("lease".to_owned(), lease);
            })],
        ),
        ("tokens-grow", vec![lease(5), lease(4)]),
        (
            "leases-of-the-living",
            vec![by_engine(stopping(), Cause::UserStop, |next| next.phase = Phase::Stopped), lease(5)],
        ),
        ("owner-writes", vec![Recorded::Foreign { what: "commit" }]),
        (
            "in-use-stays",
            vec![Recorded::Row {
                before: Some(row(SnapshotState::Ready, 1)),
                after: Some(row(SnapshotState::Removing, 2)),
                users: vec![ready().id],
            }],
        ),
        (
            "snapshots-go-one-way",
            vec![Recorded::Row { before: Some(row(SnapshotState::Ready, 1)), after: None, users: Vec::new() }],
        ),
        ("one-run-at-a-time", vec![put(with_run(other(1), None), with_run(other(2), None))]),
        ("an-occurrence-once", vec![put(schedule(), running()), put(schedule(), running())]),
        ("a-run-in-one-generation", vec![put(with_run(other(1), Some(1)), with_run(other(1), Some(2)))]),
    ]
}

#[test]
fn p2_every_invariant_on_changes_can_be_broken() {
    let mut cases = broken();
    cases.extend(super::task_tests::broken());
    for invariant in INVARIANTS.iter().filter(|invariant| invariant.when == When::Change) {
        let of_it: Vec<_> = cases.iter().filter(|(name, _)| *name == invariant.name).collect();
        assert!(!of_it.is_empty(), "nothing breaks {}", invariant.name);
        for (name, changes) in of_it {
            let mut checked = Changes::new(true);
            let (last, first) = changes.split_last().unwrap();
            for change in first {
                assert_eq!(checked.check(change), Ok(()), "{name}");
            }
            assert_eq!(checked.check(last).map_err(|(found, _)| found), Err(*name));
        }
    }
}

/// What an instance ended with is compared for every cause that it can end with by itself: called one of them, it is
/// looked at.
#[test]
fn x6_every_end_is_looked_at() {
    let ends = [
        EndCause::OomKilled,
        EndCause::DiskFull { what: String::new() },
        EndCause::Exited { code: 1 },
        EndCause::Signalled { signal: 9 },
        EndCause::Unverifiable { what: String::new() },
        EndCause::MemoryLost { what: String::new() },
        EndCause::AgentLost,
        EndCause::SupervisorLost,
        EndCause::Rebooted,
        EndCause::CreateFailed { what: String::new() },
    ];
    for end in ends {
        let cause = as_lost_for(&end).unwrap();
        assert!(is_an_end(&cause), "{cause:?} is not looked at");
    }
}
