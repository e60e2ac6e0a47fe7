//! For each invariant on all that is recorded beside all that is there, a picture that breaks it, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use viv_core::exec::ExecState;
use viv_core::lifecycle::{Cause, Desired, FreezeStep, Phase, Sandbox};
use viv_core::service::{Readiness, Restart, ServiceSpec};
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::{Generation, SandboxId};
use viv_provider::InstanceState;
use viv_provider::sim::{SimClock, SimProvider};
use viv_store::MemoryStore;

use super::task_tests::{execution, started, task};
use super::tests::{NOW_MS, entry, ready, row, running, schedule, snapshot_id, work};
use super::{Found, INVARIANTS, Picture, When};
use crate::store::FaultyStore;
use crate::{BUGS, IN_WORLDS};

/// One sandbox that is ready, and runs.
fn well() -> Picture {
    let record = ready();
    let instances = [(record.id.clone(), (Generation::FIRST, InstanceState::Running))];
    Picture {
        records: [(record.id.clone(), record)].into(),
        instances: instances.into(),
        rows: BTreeMap::new(),
        saved: BTreeSet::new(),
        schedules: Vec::new(),
        tasks: Vec::new(),
        strays: BTreeSet::new(),
    }
}

fn with(turn: impl FnOnce(&mut Picture)) -> Picture {
    let mut picture = well();
    turn(&mut picture);
    picture
}

/// The same, where its record is otherwise.
fn as_if(turn: impl FnOnce(&mut Sandbox)) -> Picture {
    with(|picture| turn(picture.records.values_mut().next().unwrap()))
}

fn over(record: &mut Sandbox) {
    (record.phase, record.desired) = (Phase::Stopped, Desired::Gone);
}

fn owned(state: SnapshotState) -> Snapshot {
    Snapshot { sandbox: Some(ready().id), ..*row(state, 1) }
}

fn service() -> ServiceSpec {
    ServiceSpec {
        name: "web".parse().unwrap(),
        argv: vec!["/bin/sleep".to_owned()],
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        ready: Readiness::Runs { ms: 0 },
        ready_within_ms: 1,
        restart: Restart::default(),
        nudge: None,
    }
}

/// Everything that is looked at in a picture, at rest and before.
async fn check(picture: &Picture, store: &FaultyStore, provider: &SimProvider) -> Found {
    picture.check()?;
    picture.check_quota(1)?;
    picture.check_deadlines(NOW_MS)?;
    picture.check_rest(false, true)?;
    picture.check_idle(NOW_MS)?;
    picture.check_leftovers(store).await?;
    picture.check_services(provider).await
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn broken() -> Vec<(&'static str, Picture)> {
    let other = SandboxId::from_bytes([2; 16]);
    let gone = |picture: &mut Picture| picture.instances.clear();
    let hibernated = |record: &mut Sandbox| {
        (record.phase, record.desired) = (Phase::Hibernated { snapshot: snapshot_id(1) }, Desired::Hibernated);
    };
    let saved = |picture: &mut Picture, state| {
        picture.rows.insert(snapshot_id(1), owned(state));
        picture.saved.insert(snapshot_id(1));
    };
    vec![
        ("intent-before-instance", with(|picture| picture.records.clear())),
        ("one-generation-lives", as_if(|record| record.generation = Generation(2))),
        ("stopped-is-absent", as_if(over)),
        (
            "hibernated-is-absent",
            with(|picture| {
                saved(picture, SnapshotState::Ready);
                picture.records.values_mut().for_each(hibernated);
            }),
        ),
        ("failed-leaves-nothing", as_if(|record| record.phase = Phase::Failed { work: None })),
        (
            "ready-snapshots-exist",
            with(|picture| drop(picture.rows.insert(snapshot_id(1), owned(SnapshotState::Ready)))),
        ),
        ("begins-with-what-is-there", as_if(|record| record.origin = Some(snapshot_id(1)))),
        (
            "schedules-of-the-living",
            with(|picture| {
                gone(picture);
                picture.records.values_mut().for_each(over);
                picture.schedules.push(schedule());
            }),
        ),
        (
            "names-are-unique",
            with(|picture| {
                let name = Some("name".parse().unwrap());
                let twin = Sandbox { id: other.clone(), name: name.clone(), ..ready() };
                picture.records.values_mut().for_each(|record| record.name.clone_from(&name));
                picture.instances.insert(other.clone(), (Generation::FIRST, InstanceState::Running));
                picture.records.insert(other.clone(), twin);
            }),
        ),
        (
            "quota-holds",
            with(|picture| {
                picture.instances.insert(other.clone(), (Generation::FIRST, InstanceState::Running));
                picture.records.insert(other.clone(), Sandbox { id: other.clone(), ..ready() });
            }),
        ),
        (
            "stuck-is-noticed",
            as_if(|record| {
                let mut work = work();
                work.deadline_at_ms = 0;
                (record.phase, record.desired) = (Phase::Stopping { work }, Desired::Gone);
            }),
        ),
        ("ends-at-its-deadline", as_if(|record| record.expires_at_ms = Some(1))),
        (
            "comes-to-rest",
            as_if(|record| (record.phase, record.desired) = (Phase::Stopping { work: work() }, Desired::Gone)),
        ),
        ("no-entry-waits", as_if(|record| record.entry = Some(entry()))),
        ("rest-is-real", with(gone)),
        (
            "lost-is-not-there",
            as_if(|record| {
                (record.phase, record.cause.cause) = (Phase::Lost, Cause::Unresponsive);
            }),
        ),
        (
            "lost-is-not-there",
            with(|picture| {
                // A service was given up, and then it was stopped: it is to be saved, and is not.
                picture.instances.values_mut().for_each(|(_, state)| *state = InstanceState::Frozen);
                picture.records.values_mut().for_each(|record| {
                    (record.phase, record.desired) = (Phase::Lost, Desired::Hibernated);
                    record.cause.cause = Cause::ServiceFailed;
                });
            }),
        ),
        ("no-orphans", with(|picture| picture.strays = [other.clone()].into())),
        ("tasks-come-to-rest", with(|picture| picture.tasks.push(task()))),
        ("nothing-is-at-work", with(|picture| picture.schedules.push(running()))),
        ("rows-are-what-is-there", with(|picture| picture.saved = [snapshot_id(1)].into())),
        (
            "unused-goes-to-rest",
            as_if(|record| {
                record.policy.idle_ms = 60_000;
                (record.active_at_ms, record.phase_since_ms) = (1, 1);
            }),
        ),
        (
            "unused-goes-to-rest",
            with(|picture| {
                picture.instances.values_mut().for_each(|(_, state)| *state = InstanceState::Frozen);
                picture.records.values_mut().for_each(|record| {
                    record.phase = Phase::Frozen { step: FreezeStep::Done };
                    record.policy.hibernate_ms = 60_000;
                    (record.active_at_ms, record.phase_since_ms) = (1, 1);
                });
            }),
        ),
        (
            "deleted-leaves-no-rows",
            with(|picture| {
                gone(picture);
                saved(picture, SnapshotState::Ready);
                picture.records.values_mut().for_each(|record| {
                    over(record);
                    record.deleted = true;
                });
            }),
        ),
        ("services-run", as_if(|record| record.spec.services.push(service()))),
    ]
}

#[test]
fn p2_every_invariant_on_pictures_can_be_broken() {
    let run = async {
        let sim = SimProvider::new(SimClock::starting_at(NOW_MS));
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), sim.clone(), 1, 0, Vec::new());
        assert_eq!(check(&well(), &store, &sim).await, Ok(()), "and without that all is well");
        for (name, picture) in broken() {
            assert_eq!(check(&picture, &store, &sim).await.map_err(|(found, _)| found), Err(name));
        }
    };
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(run);
}

#[test]
fn l18_what_is_being_ended_counts_for_as_long_as_it_lives() {
    let other = SandboxId::from_bytes([2; 16]);
    let stopping = Sandbox { id: other.clone(), phase: Phase::Stopping { work: work() }, ..ready() };
    let mut picture = well();
    picture.records.insert(other.clone(), stopping);
    assert_eq!(picture.check_quota(1), Ok(()), "it asks for no room any more");
    picture.instances.insert(other, (Generation::FIRST, InstanceState::Running));
    assert_eq!(picture.check_quota(1).map_err(|(found, _)| found), Err("quota-holds"));
    assert_eq!(picture.check_quota(2), Ok(()));
}

#[test]
fn l18_who_is_wanted_again_waits_for_room_and_for_nothing_else() {
    let mut picture = well();
    picture.instances.clear();
    picture.rows.insert(snapshot_id(1), owned(SnapshotState::Ready));
    picture.saved.insert(snapshot_id(1));
    picture.records.values_mut().for_each(|record| {
        record.phase = Phase::Hibernated { snapshot: snapshot_id(1) };
        record.entry = Some(entry());
    });
    assert_eq!(picture.check_rest(false, false), Ok(()));
    assert_eq!(picture.check_rest(false, true).map_err(|(found, _)| found), Err("comes-to-rest"));
    picture.records.values_mut().for_each(|record| record.entry = None);
    assert_eq!(picture.check_rest(false, false).map_err(|(found, _)| found), Err("comes-to-rest"));
}

#[test]
fn x5_what_is_listed_and_does_not_run_is_found() {
    let run = async {
        let sim = SimProvider::new(SimClock::starting_at(NOW_MS));
        assert_eq!(well().check_executions(&[], &sim).await, Ok(()));
        let listed = [*execution(started(ExecState::Running))];
        let mut picture = well();
        let record = ready();
        picture.records = [(listed[0].sandbox.clone(), Sandbox { id: listed[0].sandbox.clone(), ..record })].into();
        let found = picture.check_executions(&listed, &sim).await.map_err(|(found, _)| found);
        assert_eq!(found, Err("listed-executions-run"));
        let ended = [*execution(started(ExecState::Exited { code: 0 }))];
        assert_eq!(picture.check_executions(&ended, &sim).await, Ok(()));
    };
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(run);
}

/// None is forgotten: what no change and no picture breaks is broken in a world by hand, by a planted bug, or without a
/// gate.
#[test]
fn p2_every_invariant_is_broken_somewhere() {
    let pictures: BTreeSet<&str> = broken().into_iter().map(|(name, _)| name).collect();
    let bugs = BUGS.iter().flat_map(|bug| bug.breaks);
    let gates = IN_WORLDS.iter().flat_map(|(_, _, names)| *names);
    let by_hand = super::world_tests::BY_HAND.iter();
    let pictures = pictures.into_iter().chain(["listed-executions-run"]);
    let broken: BTreeSet<&str> = pictures.chain(bugs.chain(gates).chain(by_hand).copied()).collect();
    let others = INVARIANTS.iter().filter(|invariant| invariant.when != When::Change).map(|invariant| invariant.name);
    let left: BTreeSet<&str> = others.filter(|name| !broken.contains(name)).collect();
    assert_eq!(left, BTreeSet::new());
}
