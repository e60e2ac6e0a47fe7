//! Failures that happened elsewhere, each staged in a small world: named after its row in the list of incidents.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place, place_ordered, place_ticking, place_with, request};
use viv_chaos::{Damage, Order, Orders, Trouble, Turn};
use viv_core::lifecycle::{Cause, Desired, EntryKind, FreezeStep, Phase, PhaseName, Sandbox, Status};
use viv_core::spec::{Policy, Project};
use viv_core::{EndCause, FencingToken, Generation, OperationId, SandboxId};
use viv_engine::{CreateRequest, EngineError, Failpoint, Gate, GateSetting, NewSnapshot, RollbackRequest, Which};
use viv_provider::{DeadlineChange, InstanceRef, InstanceSpec, InstanceState, Mutation, PageRequest, Provider};
use viv_store::{Change, JournalLine, ListQuery, Store};

/// Named, and with an end in ten seconds.
fn web() -> CreateRequest {
    let policy = Policy { lifetime_ms: 10_000, ..request().policy };
    CreateRequest { name: Some("web".parse().unwrap()), policy, ..request() }
}

/// What the provider really has.
async fn instances(place: &Place) -> Vec<SandboxId> {
    let listed = place.provider.truth().list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
    listed.items.into_iter().map(|item| item.instance.sandbox).collect()
}

#[test]
fn incident_20_not_found_is_not_deleted_and_a_name_is_not_an_identity() {
    paused(async {
        let place = place().await;
        let id = place.made(web()).await;
        place.provider.damage(&id, Some(Damage::Denied));
        tokio::time::sleep(Duration::from_secs(120)).await;
        // It has expired, and was destroyed; that nobody knows it is an error, and no absence that was seen (T7).
        let record = place.record(&id).await;
        assert_eq!((record.phase.name(), record.is_over()), (PhaseName::Stopping, false));
        let taken = place.engine.create(web()).await;
        assert!(matches!(taken, Err(EngineError::NameTaken { .. })), "its name is its own until then: {taken:?}");
        place.provider.damage(&id, None);
        assert!(place.engine.wait_settled(&id, LONG).await.unwrap().sandbox.is_over());
        // Another one of that name: whatever is still done about the first is done by its identity.
        let policy = Policy { lifetime_ms: 86_400_000, ..web().policy };
        let next = place.made(CreateRequest { policy, ..web() }).await;
        place.delete(&id).await;
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(place.engine.verify(&next).await.unwrap().status, Status::Ready);
        assert_eq!(instances(&place).await, [next]);
    });
}

/// Two teams that call theirs alike, and each of which stops, wakes and deletes its own.
#[test]
fn incident_9_what_one_team_does_changes_nothing_of_another_team() {
    paused(async {
        let place = place().await;
        let named = || CreateRequest { name: Some("web".parse().unwrap()), ..persistent() };
        let project: Project = "theirs".parse().unwrap();
        let theirs = place.made(CreateRequest { project: project.clone(), ..named() }).await;
        let ours = place.made(named()).await;
        let seen = |record: Sandbox| (record.phase, record.desired, record.generation, record.entry);
        let before = seen(place.record(&theirs).await);
        place.engine.stop(&ours, by()).await.unwrap();
        assert_eq!(place.engine.wait_settled(&ours, LONG).await.unwrap().status, Status::Hibernated);
        place.engine.ensure(&ours, EntryKind::Ensure, by()).await.unwrap();
        assert_eq!(place.engine.wait_ready(&ours, LONG).await.unwrap().sandbox.generation, Generation(2));
        let name = Which::Name("web".parse().unwrap());
        for (project, id) in [(&Project::default(), &ours), (&project, &theirs)] {
            assert_eq!(place.engine.get(project, &name, "test").await.unwrap().sandbox.id, *id);
        }
        assert_eq!(seen(place.record(&theirs).await), before, "a resume of ours is none of theirs");
        place.delete(&ours).await;
        assert_eq!(seen(place.record(&theirs).await), before);
        assert_eq!(place.engine.verify(&theirs).await.unwrap().status, Status::Ready);
        assert_eq!(instances(&place).await, [theirs]);
    });
}

/// Crashes once, where the clean-up is at this point; what is there then, and what the next daemon makes of it.
fn crash_in_clean_up(point: &'static str, instance_left: bool) {
    paused(async {
        let armed = Arc::new(AtomicBool::new(true));
        let failpoint = Failpoint(Arc::new(move |reached| {
            assert!(reached != point || !armed.swap(false, Ordering::SeqCst), "crashes on purpose at {point}");
        }));
        let place = place_with(|config| config.failpoint = Some(failpoint)).await;
        let id = place.ready(86_400_000).await;
        place.engine.delete(&id, by()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let record = place.record(&id).await;
        assert_eq!((record.phase.name(), record.deleted), (PhaseName::Stopping, true), "the record goes last (J5)");
        assert_eq!(!instances(&place).await.is_empty(), instance_left);
        let place = place.restart().await;
        assert!(place.engine.wait_settled(&id, LONG).await.unwrap().sandbox.is_over());
        assert_eq!(instances(&place).await, []);
        assert_eq!(place.store.leases(&id).await.unwrap(), []);
    });
}

#[test]
fn incident_29_a_crash_before_the_clean_up_loses_no_record() {
    crash_in_clean_up("clear.before", true);
}

#[test]
fn incident_29_a_crash_after_the_clean_up_loses_no_record() {
    crash_in_clean_up("clear.after", false);
}

#[test]
fn incident_36_what_lives_is_not_read_as_an_orphan() {
    paused(async {
        let place = place().await;
        let known = place.ready(86_400_000).await;
        // It is listed before anybody can see its record, which is there before the second listing.
        let id = SandboxId::from_bytes([3; 16]);
        let operation = OperationId::from_bytes([3; 16]);
        let mutation = Mutation { operation, generation: Generation(1), token: FencingToken(1), budget_ms: 1_000 };
        let spec = InstanceSpec::host(86_400_000);
        place.provider.truth().create(&mutation, &id, &"sim".parse().unwrap(), &spec).await.unwrap();
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let sandbox = Sandbox { id: id.clone(), version: 1, ..place.record(&known).await };
        let change = Change {
            sandbox,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        for _ in 0..10 {
            place.engine.reconcile();
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        for id in [&known, &id] {
            let instance = InstanceRef { sandbox: id.clone(), generation: Generation(1) };
            assert_eq!(place.provider.truth().observe(&instance).await.unwrap().state, InstanceState::Running);
        }
        assert!(!place.lines(&id).await.iter().any(|line| line.line.kind == "orphan.collected"));
    });
}

/// No end is pushed, and no other reconciler compares anything: what is found is found by the sweep for deadlines.
#[test]
fn incident_17_an_end_that_nobody_heard_and_whose_alarm_was_lost_is_found_by_the_sweep() {
    paused(async {
        let place = place_with(|config| {
            config.gates.replace([(Gate::PushedEnds, GateSetting::off())].into());
            config.periods.provider_sync = Duration::from_secs(86_400);
        })
        .await;
        let id = place.ready(30_000).await;
        // Whoever the alarm wakes dies of a mistake of ours before anything was read, and nobody rings again.
        let armed = Arc::new(AtomicBool::new(true));
        let dies = armed.clone();
        place.store.set_faults(Some(Box::new(move |call| {
            assert!(call != "get" || !dies.swap(false, Ordering::SeqCst), "fails on purpose");
            None
        })));
        tokio::time::sleep(Duration::from_secs(45)).await;
        assert!(!armed.load(Ordering::SeqCst), "its alarm rang");
        assert_eq!(place.record(&id).await.phase, Phase::Ready, "nobody knows of its end");
        tokio::time::sleep(place.engine.config().periods.expiry + Duration::from_secs(15)).await;
        let record = place.record(&id).await;
        assert_eq!((record.is_over(), &record.cause.cause), (true, &Cause::Expired), "{record:?}");
    });
}

/// A stop that is written and of which no alarm is there: whoever wrote it died before it set one, and nobody restarts.
#[test]
fn l3_what_is_due_and_has_no_alarm_is_found_by_the_sweep_for_what_is_stuck() {
    paused(async {
        let place = place_with(|config| config.periods.provider_sync = Duration::from_secs(86_400)).await;
        let id = place.made(persistent()).await;
        let mut record = place.record(&id).await;
        (record.version, record.desired) = (record.version + 1, Desired::Hibernated);
        let change = Change {
            sandbox: record,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        tokio::time::sleep(2 * place.engine.config().periods.stuck + LONG).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Hibernated);
    });
}

/// A world in which the next call of this name goes wrong so, and in which sweeps come soon.
async fn with_one_in_flight(call: &str, trouble: Trouble) -> (Place, Arc<Orders>) {
    let orders = Arc::new(Orders::new(Duration::from_secs(86_400), || {}));
    let place = place_ordered(50, &orders, |config| config.periods.orphan_grace = Duration::from_secs(1)).await;
    orders.give(Order { call: call.to_owned(), turn: Turn::Trouble(trouble), times: 1 });
    (place, orders)
}

/// It is not there yet, or it is and nobody was told: in either case the intent was there first.
#[test]
fn incident_30_sweeps_do_not_end_a_create_in_flight() {
    for trouble in [Trouble::Lost, Trouble::Unanswered] {
        paused(async move {
            let (place, orders) = with_one_in_flight("create", trouble).await;
            let id = place.engine.create(request()).await.unwrap().view.sandbox.id;
            for _ in 0..8 {
                tokio::time::sleep(Duration::from_secs(4)).await;
                place.engine.reconcile();
            }
            assert_eq!((place.record(&id).await.phase.name(), orders.carried_out()), (PhaseName::Provisioning, 1));
            let there = if trouble == Trouble::Unanswered { vec![id.clone()] } else { Vec::new() };
            assert_eq!(instances(&place).await, there);
            let view = place.engine.wait_ready(&id, 20 * LONG).await.unwrap();
            assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(1)), "{trouble:?}");
            assert!(!place.lines(&id).await.iter().any(|line| line.line.kind == "orphan.collected"));
            assert_eq!(instances(&place).await, [id]);
        });
    }
}

/// The restore that is in flight is done at its provider and nobody was told, or it never arrived.
#[test]
fn incident_31_a_stop_that_was_answered_is_not_undone_by_a_restore_in_flight() {
    for trouble in [Trouble::Lost, Trouble::Unanswered] {
        paused(async move {
            let (place, orders) = with_one_in_flight("restore", trouble).await;
            let id = place.made(persistent()).await;
            place.engine.stop(&id, by()).await.unwrap();
            assert_eq!(place.engine.wait_settled(&id, LONG).await.unwrap().status, Status::Hibernated);
            place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!((place.record(&id).await.phase.name(), orders.carried_out()), (PhaseName::Resuming, 1));
            let there = if trouble == Trouble::Unanswered { vec![id.clone()] } else { Vec::new() };
            assert_eq!(instances(&place).await, there);
            let stopped = place.engine.stop(&id, by()).await.unwrap();
            assert_eq!(stopped.sandbox.desired, Desired::Hibernated, "it is answered, and written");
            assert_eq!(place.engine.wait_settled(&id, 20 * LONG).await.unwrap().status, Status::Hibernated);
            // Longer than any call that was in flight.
            tokio::time::sleep(10 * LONG).await;
            assert_eq!(place.status(&id).await, Status::Hibernated, "{trouble:?}");
            assert_eq!(instances(&place).await, []);
            let went_ready =
                place.lines(&id).await.iter().filter(|line| line.line.to == Some(PhaseName::Ready)).count();
            assert_eq!(went_ready, 1, "it was ready once, and not when it was told to stop");
        });
    }
}

#[test]
fn incident_3_activity_that_was_not_written_down_yet_counts() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        let used = place.engine.activity(&id).await.unwrap().sandbox.active_at_ms;
        tokio::time::sleep(Duration::from_millis(600)).await;
        let then = place.engine.activity(&id).await.unwrap();
        assert_eq!(then.sandbox.active_at_ms, used, "it is kept back, so as not to write all the time");
        // The window of what was written has passed, and that of what was kept back has not.
        let window = Duration::from_millis(then.sandbox.policy.idle_ms + 1_000);
        tokio::time::sleep(window.checked_sub(Duration::from_millis(300)).unwrap()).await;
        assert_eq!(place.record(&id).await.phase, Phase::Ready);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Frozen);
    });
}

/// A preview is a request that comes for a port whenever it likes: it enters as traffic does, and dials. Here it comes
/// while the sandbox is being destroyed, when it is gone, and to the next daemon; by a handle of before, and without one.
#[test]
fn incident_27_a_stray_request_brings_nothing_back_that_was_destroyed() {
    paused(async {
        let place = place().await;
        let (ready, saved) = (place.made(persistent()).await, place.made(persistent()).await);
        let which = Which::Id(ready.clone());
        let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
        place.engine.hibernate(&saved, by()).await.unwrap();
        assert_eq!(place.engine.wait_settled(&saved, LONG).await.unwrap().status, Status::Hibernated);
        let generations = [place.record(&ready).await.generation, place.record(&saved).await.generation];
        // Nobody answers, so that it is being destroyed for a while.
        place.provider.set_silent(true);
        for id in [&ready, &saved] {
            place.engine.delete(id, by()).await.unwrap();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(place.record(&ready).await.phase.name(), PhaseName::Stopping);
        for id in [&ready, &saved] {
            stray(&place, id).await;
        }
        place.provider.set_silent(false);
        for id in [&ready, &saved] {
            assert!(place.engine.wait_settled(id, 20 * LONG).await.unwrap().sandbox.is_over());
        }
        let mutations = place.provider.mutations();
        for _ in 0..10 {
            assert!(handle.dial(80).await.is_err(), "who had a handle reaches nothing");
            for id in [&ready, &saved] {
                stray(&place, id).await;
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        let place = place.restart().await;
        for (id, generation) in [&ready, &saved].into_iter().zip(generations) {
            stray(&place, id).await;
            tokio::time::sleep(LONG).await;
            let record = place.record(id).await;
            assert_eq!((record.is_over(), record.deleted, record.generation), (true, true, generation), "{record:?}");
        }
        assert_eq!(instances(&place).await, []);
        assert_eq!(place.provider.mutations(), mutations, "nothing was so much as asked for");
    });
}

/// Everything by which traffic could wake what is asked for.
async fn stray(place: &Place, id: &SandboxId) {
    let which = Which::Id(id.clone());
    let entered = place.engine.ensure(id, EntryKind::Gateway, by()).await;
    assert!(matches!(entered, Err(EngineError::Gone { .. })), "it was entered: {entered:?}");
    let led = place.engine.work_in(&Project::default(), &which, None).await;
    assert!(led.is_err(), "somebody was led into it: {led:?}");
    // Whoever looks at it is told that it is gone, and nothing follows.
    assert!(place.engine.get(&Project::default(), &which, "a preview").await.unwrap().sandbox.deleted);
    let by_hand = place.engine.ensure(id, EntryKind::Ensure, by()).await;
    assert!(matches!(by_hand, Err(EngineError::Gone { .. })), "not even by who asks for it: {by_hand:?}");
}

/// A persistent sandbox that is being saved, and cannot get on with it.
async fn held_up(place: &Place) -> SandboxId {
    let id = place.made(persistent()).await;
    place.provider.set_silent(true);
    place.engine.hibernate(&id, by()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(place.record(&id).await.phase.name(), PhaseName::Hibernating);
    id
}

#[test]
fn incident_12_who_comes_while_it_is_being_saved_waits_or_is_refused() {
    paused(async {
        let place = place().await;
        let id = held_up(&place).await;
        let which = Which::Id(id.clone());
        let refused = place.engine.work_in(&Project::default(), &which, None).await;
        assert!(matches!(refused, Err(EngineError::NotRunning { .. })), "nothing is led into it: {refused:?}");
        place.engine.ensure(&id, EntryKind::Gateway, by()).await.unwrap();
        let waited = place.engine.wait_ready(&id, Duration::from_secs(5)).await.unwrap();
        assert_eq!(waited.status, Status::Hibernating, "it is not ready before it was saved");
        place.provider.set_silent(false);
        // Longer than the call that was lost is waited for.
        let view = place.engine.wait_ready(&id, 20 * LONG).await.unwrap();
        assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(2)));
        let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
        assert_eq!(handle.generation(), Generation(2), "and what comes then is led to what was resumed");
    });
}

#[test]
fn incident_14_no_verb_changes_the_policy() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        let policy = place.record(&id).await.policy;
        let snapshot = NewSnapshot { name: None, labels: BTreeMap::new(), by: by(), key: None };
        let saved = place.engine.make_snapshot(&id, snapshot).await.unwrap().row.id;
        for verb in 0..7 {
            match verb {
                0 => drop(place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap()),
                1 => {
                    let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
                    place.engine.extend(&handle, DeadlineChange::AtLeastMs(90_000_000), &by()).await.unwrap();
                }
                2 => drop(place.engine.freeze(&id, by()).await.unwrap()),
                3 => drop(place.engine.thaw(&id, by()).await.unwrap()),
                4 => drop(place.engine.stop(&id, by()).await.unwrap()),
                5 => drop(place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap()),
                _ => {
                    let back = RollbackRequest { snapshot: saved.clone(), discard: false, by: by() };
                    drop(place.engine.rollback(&id, back).await.unwrap());
                }
            }
            place.engine.wait_settled(&id, LONG).await.unwrap();
            assert_eq!(place.record(&id).await.policy, policy, "after verb {verb}");
        }
    });
}

#[test]
fn incident_23_a_resume_is_answered_when_it_was_seen() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        place.engine.stop(&id, by()).await.unwrap();
        assert_eq!(place.engine.wait_settled(&id, LONG).await.unwrap().status, Status::Hibernated);
        // Whoever resumes it is heard, and nothing is done.
        place.provider.set_silent(true);
        let entered = place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        assert_ne!(entered.status, Status::Ready);
        let waited = place.engine.wait_ready(&id, Duration::from_secs(20)).await.unwrap();
        assert_eq!(waited.status, Status::Resuming);
        assert_eq!(instances(&place).await, []);
        place.provider.set_silent(false);
        assert_eq!(place.engine.wait_ready(&id, LONG).await.unwrap().status, Status::Ready);
        assert_eq!(instances(&place).await, [id]);
    });
}

#[test]
fn incident_25_what_rests_is_not_ended_by_a_sweep() {
    paused(async {
        let place = place_ticking(5_000, |_| {}).await;
        let policy = Policy { hibernate_ms: 7 * 86_400_000, lifetime_ms: 30 * 86_400_000, ..persistent().policy };
        let frozen = place.made(CreateRequest { policy, ..persistent() }).await;
        let saved = place.made(persistent()).await;
        place.engine.freeze(&frozen, by()).await.unwrap();
        place.engine.hibernate(&saved, by()).await.unwrap();
        place.engine.wait_settled(&saved, LONG).await.unwrap();
        let mutations = place.provider.mutations();
        for _ in 0..24 {
            place.engine.reconcile();
            tokio::time::sleep(Duration::from_secs(3_600)).await;
        }
        assert_eq!(place.status(&frozen).await, Status::Frozen);
        assert_eq!(place.status(&saved).await, Status::Hibernated);
        assert_eq!(place.provider.mutations(), mutations, "nobody touched either");
    });
}

#[test]
fn incident_37_reading_resumes_nothing() {
    paused(async {
        let place = place().await;
        let (frozen, saved) = (place.made(persistent()).await, place.made(persistent()).await);
        place.engine.freeze(&frozen, by()).await.unwrap();
        place.engine.hibernate(&saved, by()).await.unwrap();
        for id in [&frozen, &saved] {
            place.engine.wait_settled(id, LONG).await.unwrap();
        }
        let (versions, mutations) = (versions(&place, [&frozen, &saved]).await, place.provider.mutations());
        for _ in 0..200 {
            for (id, status) in [(&frozen, Status::Frozen), (&saved, Status::Hibernated)] {
                assert_eq!(place.status(id).await, status);
                assert_eq!(place.engine.verify(id).await.unwrap().status, status, "nor does looking closely");
                let listed = place.engine.list(&ListQuery { limit: 10, ..ListQuery::default() }).await.unwrap().0;
                assert_eq!(listed.len(), 2);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(self::versions(&place, [&frozen, &saved]).await, versions, "no record changed");
        assert_eq!(place.provider.mutations(), mutations);
    });
}

async fn versions(place: &Place, of: [&SandboxId; 2]) -> [u64; 2] {
    [place.record(of[0]).await.version, place.record(of[1]).await.version]
}

/// What ends the first generation is slow: the sandbox is resumed long before it arrives, once under the token of then and
/// once under that of now.
#[test]
fn incident_10_a_clean_up_that_comes_late_does_not_touch_the_resumed_one() {
    paused(async {
        let orders = Arc::new(Orders::new(LONG, || {}));
        let place = place_ordered(500, &orders, |_| {}).await;
        let id = place.made(persistent()).await;
        let tokens = async || -> Vec<FencingToken> {
            place.store.leases(&id).await.unwrap().into_iter().map(|lease| lease.token).collect()
        };
        let mut all = tokens().await;
        assert!(!all.is_empty(), "who runs is held");
        orders.give(Order { call: "destroy".to_owned(), turn: Turn::Trouble(Trouble::Late), times: 1 });
        place.engine.hibernate(&id, by()).await.unwrap();
        assert_eq!(place.engine.wait_settled(&id, 20 * LONG).await.unwrap().status, Status::Hibernated);
        assert_eq!(orders.carried_out(), 1, "it took its time");
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        let view = place.engine.wait_ready(&id, LONG).await.unwrap();
        assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(2)));
        all.extend(tokens().await);
        for token in all {
            let operation = OperationId::from_bytes([9; 16]);
            let late = Mutation { operation, generation: Generation(1), token, budget_ms: 1_000 };
            let answer = place.provider.truth().destroy(&late, &id).await;
            assert!(answer.is_err(), "it names a generation that is over: {answer:?}");
        }
        for _ in 0..10 {
            place.engine.reconcile();
            tokio::time::sleep(LONG).await;
        }
        let view = place.engine.verify(&id).await.unwrap();
        assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(2)));
        assert_eq!(instances(&place).await, [id]);
    });
}

/// By whoever has a handle of before, while it is being ended, when it is gone, and at the next daemon.
#[test]
fn incident_22_an_extension_brings_back_nothing_that_has_expired() {
    paused(async {
        let place = place().await;
        let id = place.made(web()).await;
        let which = Which::Id(id.clone());
        let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
        let extend = async |handle: &_| {
            let longer = place.engine.extend(handle, DeadlineChange::AtLeastMs(90_000_000), &by()).await;
            assert!(longer.is_err(), "it was extended: {longer:?}");
        };
        // What ends it takes its time, so that it is on its way for a while: it has no deadline any more.
        place.provider.damage(&id, Some(Damage::Denied));
        tokio::time::sleep(LONG).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Stopping);
        assert!(place.lines(&id).await.iter().any(|line| line.line.cause.as_deref() == Some("expired")));
        extend(&handle).await;
        for kind in [EntryKind::Ensure, EntryKind::Task, EntryKind::Gateway, EntryKind::Schedule] {
            let entered = place.engine.ensure(&id, kind, by()).await;
            assert!(matches!(entered, Err(EngineError::Gone { .. })), "{kind:?}: {entered:?}");
        }
        place.provider.damage(&id, None);
        assert!(place.engine.wait_settled(&id, 20 * LONG).await.unwrap().sandbox.is_over());
        extend(&handle).await;
        drop(handle);
        let place = place.restart().await;
        let led = place.engine.work_in(&Project::default(), &which, None).await;
        assert!(matches!(led, Err(EngineError::Gone { .. })), "{led:?}");
        tokio::time::sleep(20 * LONG).await;
        let record = place.record(&id).await;
        assert_eq!((record.phase, record.generation), (Phase::Stopped, Generation(1)));
        assert_eq!(instances(&place).await, []);
    });
}

/// Frozen and saved by a provider that does not answer: neither is under way for ever, and the record says how it is.
#[test]
fn incident_24_what_is_being_paused_is_paused_or_runs_on() {
    paused(async {
        let place = place().await;
        let (frozen, saved) = (place.made(persistent()).await, place.made(persistent()).await);
        place.provider.set_silent(true);
        place.engine.freeze(&frozen, by()).await.unwrap();
        place.engine.hibernate(&saved, by()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let is_under_way = |record: &Sandbox| matches!(record.phase, Phase::Frozen { step: FreezeStep::Freeze { .. } });
        assert!(is_under_way(&place.record(&frozen).await));
        tokio::time::sleep(20 * LONG).await;
        let record = place.record(&frozen).await;
        assert!(!is_under_way(&record), "it is given up: {record:?}");
        assert_eq!(place.status(&saved).await, Status::SaveFailed, "and that it is not saved is said");
        place.provider.set_silent(false);
        // Nobody asks for anything.
        tokio::time::sleep(20 * LONG).await;
        assert_eq!(place.status(&saved).await, Status::Hibernated, "{:?}", place.record(&saved).await);
        let record = place.record(&frozen).await;
        assert_eq!(record.generation, Generation(1), "what was to be frozen is what it was");
        let entered = place.engine.ensure(&frozen, EntryKind::Ensure, by()).await.unwrap();
        assert_eq!(entered.sandbox.generation, Generation(1), "{record:?}");
        assert_eq!(place.engine.wait_ready(&frozen, LONG).await.unwrap().sandbox.generation, Generation(1));
    });
}

/// Its agent is silent for long, and answers again: the same one is ready, and nobody had to mend anything.
#[test]
fn incident_28_what_is_well_again_is_not_called_an_error() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        for _ in 0..20 {
            // Somebody looks, or nobody would know.
            let _ = place.engine.verify(&id).await;
            tokio::time::sleep(LONG).await;
        }
        assert_eq!(place.status(&id).await, Status::Lost, "{:?}", place.record(&id).await);
        let mutations = place.provider.mutations();
        place.provider.damage(&id, None);
        for _ in 0..5 {
            place.engine.reconcile();
            tokio::time::sleep(LONG).await;
        }
        let view = place.engine.verify(&id).await.unwrap();
        assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(1)), "{:?}", view.sandbox);
        assert_eq!(place.provider.mutations(), mutations, "it was looked at, and nothing was made or ended");
    });
}

/// It runs out of memory behind everybody's back: what comes after is another generation, and that it is is told to all.
#[test]
fn incident_32_what_takes_the_place_of_another_says_so() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        let which = Which::Id(id.clone());
        let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
        assert!(place.provider.truth().crash(&id, EndCause::OomKilled));
        tokio::time::sleep(Duration::from_secs(5)).await;
        let lost = place.record(&id).await;
        assert_eq!((lost.phase.name(), lost.generation), (PhaseName::Lost, Generation(1)));
        assert_eq!(lost.cause.cause.code(), "oom_killed");
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        let view = place.engine.wait_ready(&id, LONG).await.unwrap();
        assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(2)));
        // Who goes on with what was, is told that it is another one; without a word of it he is not led there.
        let old = place.engine.work_in(&Project::default(), &which, Some(Generation(1))).await;
        assert!(matches!(old, Err(EngineError::StaleHandle { .. })), "{old:?}");
        assert!(handle.dial(80).await.is_err(), "and a handle of before reaches nothing");
        let lines = place.lines(&id).await;
        let ready = |generation| {
            let is_it = |line: &&JournalLine| line.line.to == Some(PhaseName::Ready);
            let at = lines.iter().find(|line| is_it(line) && line.line.generation == Some(Generation(generation)));
            at.expect("it was ready").cursor
        };
        let between = lines.iter().filter(|line| line.cursor > ready(1) && line.cursor < ready(2));
        let to: Vec<PhaseName> = between.filter_map(|line| line.line.to).collect();
        assert_eq!(to.first(), Some(&PhaseName::Lost), "ready is left first: {to:?}");
    });
}
