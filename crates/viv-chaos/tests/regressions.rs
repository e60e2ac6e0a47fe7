//! What reviews and worlds found once, each as a small world of its own.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::time::Duration;

use place::{EPOCH_MS, LONG, by, paused, persistent, place, place_with, request};
use viv_chaos::Damage;
use viv_core::exec::ExecSpec;
use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure};
use viv_core::lifecycle::{Actor, Cause, EntryKind, Finding, PhaseName, Sandbox, Status};
use viv_core::schedule::MissedRuns;
use viv_core::service::{Readiness, Restart, RestartPolicy, ServiceSpec};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, FencingToken, Generation, OperationId, SandboxId};
use viv_engine::{
    CreateRequest, EngineError, ForkRequest, ForkedFrom, Gate, GateSetting, KeyedBy, NewSchedule, View, Which,
};
use viv_provider::conformance::program::Program;
use viv_provider::{
    DeadlineChange, InstanceRef, InstanceSpec, InstanceState, Mutation, PageRequest, Provider, ProviderError,
    ResourceLimits,
};
use viv_store::memory::Fault;
use viv_store::{Change, Cursor, ExecutionQuery, JournalFilter, LeaseKind, Quota, SnapshotQuery, Store, SumsMax};

/// The stored copy of a deadline is for display. One that is behind its arbiter's made a driver look without end, and
/// on simulated time that is for ever.
#[test]
fn t6_a_deadline_that_was_moved_behind_our_back_is_corrected() {
    paused(async {
        let place = place().await;
        let id = place.ready(5_000).await;
        let leases = place.store.leases(&id).await.unwrap();
        let token = leases.iter().find(|lease| lease.kind == LeaseKind::Lifecycle).unwrap().token;
        let generation = place.store.get(&id).await.unwrap().unwrap().generation;
        let operation = OperationId::from_bytes([9; 16]);
        let mutation = Mutation { operation, generation, token, budget_ms: 1_000 };
        place.provider.truth().extend(&mutation, &id, DeadlineChange::AtLeastMs(60_000)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(20)).await;
        let view = place.engine.verify(&id).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        let expires_at_ms = view.sandbox.expires_at_ms.unwrap();
        assert!(expires_at_ms > EPOCH_MS + 55_000, "{expires_at_ms}");
        assert_eq!(place.engine.stats(None).await.unwrap().drivers, 0);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(place.status(&id).await, Status::Stopped);
    });
}

/// An end that is known and cannot be written down is not shown as ready, and nobody gets a handle on it.
#[test]
fn t3_an_end_that_cannot_be_recorded_is_not_shown_as_ready() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        place.store.set_faults(Some(Box::new(|call| (call == "commit").then_some(Fault::Before))));
        assert!(place.provider.truth().crash(&id, EndCause::SupervisorLost));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(place.status(&id).await, Status::Unverified);
        assert_ne!(place.engine.verify(&id).await.unwrap().status, Status::Ready);
        place.store.set_faults(None);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(place.status(&id).await, Status::Lost);
        let used = place.engine.work_in(&Project::default(), &Which::Id(id), None).await;
        assert!(matches!(used, Err(EngineError::NotRunning { .. })), "{used:?}");
    });
}

/// What is saved takes no room, so it has to be asked whether there is some when it is to run again.
#[test]
fn l18_an_entry_into_what_is_saved_needs_room() {
    paused(async {
        let place = place_with(|config| config.quota = Quota::of(1, 1)).await;
        let saved = place.made(persistent()).await;
        place.engine.stop(&saved, Actor::part("test")).await.unwrap();
        let view = place.engine.wait_settled(&saved, Duration::from_secs(60)).await.unwrap();
        assert_eq!(view.sandbox.phase.name(), PhaseName::Hibernated);
        let other = place.ready(600_000).await;
        for _ in 0..3 {
            let refused = place.engine.ensure(&saved, EntryKind::Ensure, Actor::part("test")).await;
            let quota = matches!(refused, Err(EngineError::Quota { limit: "sandboxes", used: 1, max: 1 }));
            assert!(quota, "{refused:?}");
        }
        assert_eq!(place.store.get(&saved).await.unwrap().unwrap(), view.sandbox, "a refusal changes nothing");
        place.engine.delete(&other, Actor::part("test")).await.unwrap();
        place.engine.wait_settled(&other, Duration::from_secs(60)).await.unwrap();
        place.engine.ensure(&saved, EntryKind::Ensure, Actor::part("test")).await.unwrap();
        let view = place.engine.wait_ready(&saved, Duration::from_secs(60)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
    });
}

/// Whoever asked while it was on its way to sleep was answered: that is not forgotten, and not forced.
#[test]
fn l18_an_entry_that_was_accepted_waits_for_room() {
    paused(async {
        let exempt: Project = "exempt".parse().unwrap();
        let off = GateSetting::off_for(exempt.clone());
        let place = place_with(|config| {
            config.quota = Quota::of(1, 1);
            config.gates.replace([(Gate::Quota, off)].into());
        })
        .await;
        let saved = place.made(persistent()).await;
        let other = place.made(CreateRequest { project: exempt, ..request() }).await;
        place.engine.stop(&saved, Actor::part("test")).await.unwrap();
        place.engine.ensure(&saved, EntryKind::Ensure, Actor::part("test")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(120)).await;
        let waiting = place.store.get(&saved).await.unwrap().unwrap();
        assert_eq!((waiting.phase.name(), waiting.entry.is_some()), (PhaseName::Hibernated, true));
        assert_eq!(place.engine.stats(None).await.unwrap().drivers, 0, "nobody turns in circles for it");
        place.engine.delete(&other, Actor::part("test")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(place.status(&saved).await, Status::Ready);
    });
}

/// Limits are recorded within the quota before they are set, and what the provider refuses is taken back.
#[test]
fn l18_more_room_for_what_runs_is_counted() {
    paused(async {
        let most = SumsMax { memory_bytes: Some(1 << 30), ..SumsMax::default() };
        let place = place_with(|config| config.quota = Quota { total_sums_max: most, ..Quota::of(10, 10) }).await;
        let memory = |mib: u64| ResourceLimits { memory_bytes: Some(mib << 20), ..ResourceLimits::default() };
        let with =
            |mib| CreateRequest { spec: SandboxSpec { limits: memory(mib), ..SandboxSpec::default() }, ..request() };
        let one = place.made(with(400)).await;
        place.made(with(400)).await;
        let refused = place.engine.create(with(300)).await;
        let used = 800 << 20;
        assert!(matches!(refused, Err(EngineError::Quota { limit: "memory_bytes", used: told, .. }) if told == used));
        let which = Which::Id(one.clone());
        let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
        let by = Actor::part("test");
        let refused = place.engine.set_limits(&handle, &memory(700), &by).await;
        assert!(matches!(refused, Err(EngineError::Quota { limit: "memory_bytes", .. })), "{refused:?}");
        assert_eq!(place.store.get(&one).await.unwrap().unwrap().spec.limits, memory(400));
        let set = place.engine.set_limits(&handle, &memory(600), &by).await.unwrap();
        assert_eq!(set.memory_bytes, Some(600 << 20));
        let refused = place.engine.set_limits(&handle, &memory(0), &by).await;
        assert!(matches!(refused, Err(EngineError::Provider(_))), "{refused:?}");
        assert_eq!(place.store.get(&one).await.unwrap().unwrap().spec.limits, memory(600));
    });
}

/// What is over is held by nobody, in the store and in memory; what was collected without a record too.
#[test]
fn l15_what_is_over_is_held_by_nobody() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        assert_eq!(place.store.leases(&id).await.unwrap().len(), 1);
        place.delete(&id).await;
        assert_eq!(place.store.leases(&id).await.unwrap(), []);
        assert_eq!(place.engine.stats(None).await.unwrap().known, 0);
        // Nobody who comes late makes it known again.
        let _ = place.engine.verify(&id).await;
        let _ = place.engine.activity(&id).await;
        place.status(&id).await;
        assert_eq!(place.engine.stats(None).await.unwrap().known, 0);

        let stray = SandboxId::from_bytes([7; 16]);
        let mutation = Mutation {
            operation: OperationId::from_bytes([7; 16]),
            generation: Generation(1),
            token: FencingToken(1),
            budget_ms: 1_000,
        };
        let spec = InstanceSpec::host(86_400_000);
        place.provider.truth().create(&mutation, &stray, &"sim".parse().unwrap(), &spec).await.unwrap();
        tokio::time::sleep(Duration::from_secs(600)).await;
        let instance = InstanceRef { sandbox: stray.clone(), generation: Generation(1) };
        assert_eq!(place.provider.truth().observe(&instance).await.unwrap().state, InstanceState::Absent);
        assert_eq!(place.store.leases(&stray).await.unwrap(), []);
        assert_eq!(place.engine.stats(None).await.unwrap().known, 0);
    });
}

/// The record has gone on, and the last instance is there all the same: as when it was restored from a backup.
#[test]
fn j1_an_instance_of_an_older_generation_is_collected() {
    paused(async {
        let place = place().await;
        let (id, other) = (place.ready(86_400_000).await, place.ready(86_400_000).await);
        let before = place.record(&id).await;
        let instance = InstanceRef { sandbox: id.clone(), generation: before.generation };
        let sandbox = Sandbox {
            generation: before.generation.next(),
            phase: viv_core::lifecycle::Phase::Lost,
            version: before.version + 1,
            ..before
        };
        let change = Change {
            sandbox,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(30)).await;
        let state = place.provider.truth().observe(&instance).await.unwrap().state;
        assert_eq!(state, InstanceState::Running, "one listing is not enough");
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(place.provider.truth().observe(&instance).await.unwrap().state, InstanceState::Absent);
        assert!(place.lines(&id).await.iter().any(|line| line.line.kind == "orphan.collected"));
        assert_eq!(place.status(&other).await, Status::Unverified, "the other one was not looked at, nor touched");
        assert_eq!(place.engine.verify(&other).await.unwrap().status, Status::Ready);
    });
}

/// Ports that do not answer are waited for together; one after the other they took longer than verifying may.
#[test]
fn t2_ports_are_probed_at_once() {
    paused(async {
        let place = place().await;
        let spec = SandboxSpec { ports: (8_000..8_016).collect(), ..SandboxSpec::default() };
        let id = place.engine.create(CreateRequest { spec, ..request() }).await.unwrap().view.sandbox.id;
        // Nobody listens there, so it is probed again and again.
        let ports = async |finding: Finding| loop {
            let view = place.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap();
            let ports: Vec<u16> = view.evidence.ports.iter().map(|found| found.port).collect();
            if !ports.is_empty() && view.evidence.ports.iter().all(|found| found.check.finding == finding) {
                return ports;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert_eq!(ports(Finding::Unhealthy).await.len(), 16);
        place.provider.damage(&id, Some(Damage::Hangs));
        let silent = tokio::time::timeout(Duration::from_secs(10), ports(Finding::Timeout)).await;
        let silent = silent.expect("all are waited for at once");
        assert_eq!(silent, (8_000..8_016).collect::<Vec<u16>>(), "all of them, in their order");
    });
}

/// That it lives was never in doubt. Taken for news at every listing, it was verified and lost again for ever.
#[test]
fn t7_an_agent_that_hangs_does_not_fill_the_journal() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        place.engine.verify(&id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(120)).await;
        let lost = place.record(&id).await;
        assert_eq!((lost.phase.name(), &lost.cause.cause), (PhaseName::Lost, &Cause::Unresponsive));
        let lines = place.lines(&id).await.len();
        for _ in 0..8 {
            tokio::time::sleep(Duration::from_secs(1_800)).await;
            assert_eq!(place.engine.verify(&id).await.unwrap().status, Status::Lost);
        }
        assert_eq!(place.lines(&id).await.len(), lines, "nothing happened, and nothing is told");
        // It answers again: nobody has to ask for it to be found.
        place.provider.damage(&id, None);
        tokio::time::sleep(Duration::from_secs(420)).await;
        let back = place.record(&id).await;
        assert_eq!((back.phase.name(), back.generation), (PhaseName::Ready, lost.generation));
    });
}

/// Agents of three sandboxes that hang say nothing about who runs them.
#[test]
fn j7_silent_agents_do_not_open_the_breaker() {
    paused(async {
        let place = place().await;
        let mut ids = Vec::new();
        for _ in 0..4 {
            ids.push(place.ready(86_400_000).await);
        }
        let mut asked = tokio::task::JoinSet::new();
        for id in &ids {
            let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
            place.provider.damage(id, Some(Damage::Hangs));
            for handle in [handle.clone(), handle] {
                asked.spawn(async move { handle.file_stat("/workspace").await });
            }
        }
        // All of them at the same moment, so that no answer to anybody else comes between.
        while let Some(read) = asked.join_next().await {
            assert!(matches!(read, Ok(Err(EngineError::Provider(_)))), "{read:?}");
        }
        let breakers = place.engine.breakers();
        assert!(breakers.iter().all(|breaker| !breaker.open && breaker.opened == 0), "{breakers:?}");
    });
}

/// The records are from a backup, and the provider has seen tokens that were given after it.
#[test]
fn l15_who_owns_the_store_is_not_fenced_by_tokens_that_it_does_not_know() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        let generation = place.record(&id).await.generation;
        let operation = OperationId::from_bytes([9; 16]);
        let mutation = Mutation { operation, generation, token: FencingToken(1_000_000), budget_ms: 1_000 };
        place.provider.truth().extend(&mutation, &id, DeadlineChange::AtLeastMs(60_000)).await.unwrap();
        place.delete(&id).await;
        let other = place.ready(86_400_000).await;
        let leases = place.store.leases(&other).await.unwrap();
        assert!(leases.iter().all(|lease| lease.token > FencingToken(1_000_000)), "{leases:?}");
    });
}

/// A check that panics is over, and the next one is a check.
#[test]
fn t3_a_check_that_panicked_is_not_waited_for() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.store.set_faults(Some(Box::new(|call| if call == "get" { panic!("on purpose") } else { None })));
        let (engine, which) = (place.engine.clone(), id.clone());
        assert!(tokio::spawn(async move { engine.verify(&which).await }).await.is_err());
        place.store.set_faults(None);
        place.provider.damage(&id, Some(Damage::Rootless));
        let view = tokio::time::timeout(LONG, place.engine.verify(&id)).await.expect("it is not stuck").unwrap();
        assert_ne!(view.status, Status::Ready, "it was looked at");
    });
}

/// A reconciler that panics runs again.
#[test]
fn j3_a_reconciler_that_panicked_runs_again() {
    paused(async {
        let place = place().await;
        place.ready(86_400_000).await;
        place.store.set_faults(Some(Box::new(|call| if call == "due" { panic!("on purpose") } else { None })));
        tokio::time::sleep(Duration::from_secs(120)).await;
        place.store.set_faults(None);
        let stuck = || {
            let all = place.engine.reconcilers();
            all.into_iter().find(|status| status.name.as_str() == "stuck").unwrap()
        };
        assert!(stuck().error.is_some(), "who looks is told");
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(stuck().error, None);
    });
}

/// A retry was written down by a clock that was set back before the next daemon began.
#[test]
fn j4_a_clock_that_was_set_back_holds_up_no_retry() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.provider.damage(&id, None);
        place.engine.shut_down();
        let before = place.record(&id).await;
        let mut sandbox = Sandbox { version: before.version + 1, deleted: true, ..before };
        sandbox.desired = viv_core::lifecycle::Desired::Gone;
        let work = viv_core::lifecycle::Work {
            operation: "op_retry1".parse().unwrap(),
            attempt: 3,
            deadline_at_ms: EPOCH_MS + 90_000_000,
            retry_at_ms: EPOCH_MS + 86_400_000,
            overdue: false,
        };
        sandbox.phase = viv_core::lifecycle::Phase::Stopping { work };
        let change = Change {
            sandbox,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        let place = place.restart().await;
        let view = place.engine.wait_settled(&id, LONG).await.unwrap();
        assert!(view.sandbox.is_over(), "{:?}", view.sandbox.phase);
    });
}

/// It was lost for not answering, and lives: who stops it and waits is not told before it was looked for.
#[test]
fn l8_a_stop_of_what_is_lost_is_answered_when_it_was_looked_for() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        place.engine.verify(&id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Lost);
        place.engine.stop(&id, by()).await.unwrap();
        let view = place.engine.wait_settled(&id, LONG).await.unwrap();
        assert_eq!(view.sandbox.phase.name(), PhaseName::Hibernated);
    });
}

/// What is switched off for one project is off for that one alone.
#[test]
fn o9_listings_and_grace_are_switched_by_project() {
    paused(async {
        let hasty: Project = "hasty".parse().unwrap();
        let off = || GateSetting::off_for(hasty.clone());
        let gates = [(Gate::TwoListings, off()), (Gate::OrphanGrace, off())].into();
        let place = place_with(|config| drop(config.gates.replace(gates))).await;
        let mut instances = Vec::new();
        for project in [hasty.clone(), Project::default()] {
            let id = place.made(CreateRequest { project, ..request() }).await;
            let before = place.record(&id).await;
            instances.push(InstanceRef { sandbox: id, generation: before.generation });
            let (generation, version) = (before.generation.next(), before.version + 1);
            let sandbox = Sandbox { generation, version, phase: viv_core::lifecycle::Phase::Lost, ..before };
            let change = Change {
                sandbox,
                lines: Vec::new(),
                idempotency: None,
                quota: None,
                unused_since_ms: None,
                snapshots: Vec::new(),
            };
            place.store.commit(place.engine.epoch(), change).await.unwrap();
        }
        place.engine.reconcile();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let mut states = Vec::new();
        for instance in &instances {
            states.push(place.provider.truth().observe(instance).await.unwrap().state);
        }
        assert_eq!(states, [InstanceState::Absent, InstanceState::Running]);
    });
}

/// A machine that is too busy for a minute: no call is answered, whoever asks. What was there is there afterwards.
#[test]
fn t7_a_minute_in_which_nothing_answers_loses_no_work_and_replaces_nothing() {
    paused(async {
        for persistent in [false, true] {
            let place = place().await;
            let id = place.made(CreateRequest { policy: Policy { persistent, ..request().policy }, ..request() }).await;
            let which = Which::Id(id.clone());
            let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
            handle.file_mkdir("/workspace/work").await.unwrap();
            let mutations = place.provider.mutations();

            place.provider.set_silent(true);
            for _ in 0..60 {
                let view = place.engine.verify(&id).await.unwrap();
                assert_ne!(view.status, Status::Ready, "nothing shows that it is");
                let used = place.engine.work_in(&Project::default(), &which, None).await;
                assert!(used.is_err(), "{used:?}");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            place.provider.set_silent(false);

            let mut seconds = 0;
            while place.engine.verify(&id).await.unwrap().status != Status::Ready {
                seconds += 1;
                assert!(seconds < 120, "it is {:?}", place.status(&id).await);
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
            assert_eq!(handle.generation(), Generation::FIRST, "persistent: {persistent}");
            handle.file_stat("/workspace/work").await.unwrap();
            let asked = place.provider.mutations() - mutations;
            assert_eq!(asked, 0, "nothing was made, saved or ended for it");
        }
    });
}

/// A snapshot outlived its sandbox because another one began with it. When it went, a lease was taken on who is gone, and
/// nobody gave it back.
#[test]
fn l20_what_is_removed_of_the_gone_leaves_no_lease() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        place.engine.stop(&id, by()).await.unwrap();
        place.engine.wait_settled(&id, LONG).await.unwrap();
        let request = ForkRequest {
            project: Project::default(),
            from: ForkedFrom::Sandbox((&id).into()),
            count: 1,
            name: None,
            policy: None,
            labels: BTreeMap::new(),
            memory: false,
            by: by(),
            key: None,
        };
        let fork = place.engine.fork(request).await.unwrap().views.remove(0).sandbox.id;
        place.engine.wait_ready(&fork, LONG).await.unwrap();
        place.delete(&id).await;
        place.delete(&fork).await;
        tokio::time::sleep(Duration::from_secs(300)).await;
        assert_eq!(
            place.store.snapshots(&SnapshotQuery { limit: 10, ..SnapshotQuery::default() }).await.unwrap().items,
            []
        );
        assert_eq!(place.store.leases(&id).await.unwrap(), []);
        assert_eq!(place.store.leases(&fork).await.unwrap(), []);
    });
}

/// The wish was written, and the answer lost: the daemon did the opposite of what it said, until it was started anew.
#[test]
fn l21_a_drain_whose_answer_is_lost_is_what_is_stored() {
    paused(async {
        let place = place().await;
        let lost = || place.store.set_faults(Some(Box::new(|call| (call == "put_meta").then_some(Fault::After))));
        lost();
        assert!(place.engine.drain(Duration::ZERO, by()).await.is_err());
        place.store.set_faults(None);
        assert!(place.engine.drain_status().await.unwrap().draining);
        let refused = place.engine.create(request()).await;
        assert!(matches!(refused, Err(EngineError::Draining)), "{refused:?}");
        lost();
        assert!(place.engine.undrain(by()).await.is_err());
        place.store.set_faults(None);
        assert!(!place.engine.drain_status().await.unwrap().draining);
        place.made(request()).await;
    });
}

/// It was lost for not answering, and lives. A listing without it was taken for its absence.
#[test]
fn l21_a_part_of_a_listing_does_not_show_that_a_daemon_is_drained() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        place.engine.verify(&id).await.unwrap();
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Lost);
        place.engine.drain(Duration::ZERO, by()).await.unwrap();
        for partial in [false, true] {
            place.provider.set_partial(partial);
            tokio::time::sleep(Duration::from_secs(5)).await;
            let status = place.engine.drain_status().await.unwrap();
            assert!(!status.is_drained(), "{status:?}");
        }
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 1_000).await.unwrap();
        assert!(lines.iter().all(|line| line.line.kind != "daemon.drained"), "nobody saw that");
    });
}

/// Somebody waits for room to run again, and was let in before the drain: it is not drained before that is over.
#[test]
fn l21_who_waits_for_room_is_waited_for_by_a_drain() {
    paused(async {
        let exempt: Project = "exempt".parse().unwrap();
        let off = GateSetting::off_for(exempt.clone());
        let place = place_with(|config| {
            config.quota = Quota::of(1, 1);
            config.gates.replace([(Gate::Quota, off)].into());
        })
        .await;
        let saved = place.made(persistent()).await;
        place.made(CreateRequest { project: exempt, ..request() }).await;
        place.engine.stop(&saved, by()).await.unwrap();
        place.engine.ensure(&saved, EntryKind::Ensure, by()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
        let waiting = place.record(&saved).await;
        assert_eq!((waiting.phase.name(), waiting.entry.is_some()), (PhaseName::Hibernated, true));
        place.engine.drain(Duration::ZERO, by()).await.unwrap();
        let mut drained = false;
        for _ in 0..1_200 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            drained |= place.engine.drain_status().await.unwrap().is_drained();
            let listed = place.provider.truth().list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
            assert!(!drained || listed.items.is_empty(), "{listed:?}");
        }
        assert!(drained);
    });
}

/// Who has a handle and comes after the delete took a lease on what was gone, which nobody gave back (world 349).
#[test]
fn l20_who_comes_after_a_delete_takes_no_lease() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        place.delete(&id).await;
        let made = handle.file_mkdir("/workspace/late").await;
        assert!(matches!(made, Err(EngineError::Gone { .. })), "{made:?}");
        let started = handle.execute(&handle.new_execution(), &ExecSpec::default()).await;
        assert!(matches!(started, Err(EngineError::Gone { .. })), "{started:?}");
        assert_eq!(place.store.leases(&id).await.unwrap(), []);
    });
}

/// What is left of somebody who is over is removed under a token that is newer than all before, and nobody holds then.
#[test]
fn l20_an_orphan_of_what_is_over_is_collected_without_a_lease() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        place.delete(&id).await;
        // A late create that got past the fence, of somebody whose record is gone.
        let other = SandboxId::from_bytes([7; 16]);
        let operation = OperationId::from_bytes([9; 16]);
        let mutation = Mutation { operation, generation: Generation::FIRST, token: FencingToken(1), budget_ms: 1_000 };
        let spec = InstanceSpec::host(86_400_000);
        place.provider.truth().create(&mutation, &other, &"sim".parse().unwrap(), &spec).await.unwrap();
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        let listed = place.provider.truth().list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
        assert!(listed.items.is_empty(), "{listed:?}");
        for gone in [&id, &other] {
            assert_eq!(place.store.leases(gone).await.unwrap(), []);
        }
    });
}

/// A fork whose save came to nothing kept its key for a day, and whoever repeated it heard that nothing was there.
#[test]
fn l1_a_fork_that_came_to_nothing_can_be_repeated_under_its_key() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        let key = KeyedBy { key: "again".to_owned(), body_hash: [1; 32] };
        let request = ForkRequest {
            project: Project::default(),
            from: ForkedFrom::Sandbox((&id).into()),
            count: 2,
            name: None,
            policy: None,
            labels: BTreeMap::new(),
            memory: false,
            by: by(),
            key: Some(key),
        };
        assert!(place.provider.truth().crash(&id, EndCause::SupervisorLost));
        let failed = place.engine.fork(request.clone()).await;
        assert!(matches!(failed, Err(EngineError::Provider(_) | EngineError::NotSaved { .. })), "{failed:?}");
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        place.engine.wait_ready(&id, LONG).await.unwrap();
        let forked = place.engine.fork(request.clone()).await.unwrap();
        assert!(forked.fresh && forked.views.len() == 2);
        let again = place.engine.fork(request).await.unwrap();
        let ids = |views: &[View]| views.iter().map(|view| view.sandbox.id.clone()).collect::<Vec<_>>();
        assert_eq!((again.fresh, ids(&again.views)), (false, ids(&forked.views)));
    });
}

/// What ran in the foreground when a daemon died was listed as running for ever: nobody heard of its end (seed 40270).
#[test]
fn x1_what_a_daemon_left_open_is_heard_by_the_next() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let spec = ExecSpec { argv: Program::Sleep { seconds: 20 }.argv(), ..ExecSpec::default() };
        handle.execute(&handle.new_execution(), &spec).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let place = place.restart().await;
        let open = ExecutionQuery { open: true, limit: 10, ..ExecutionQuery::default() };
        assert_eq!(place.store.executions(&open).await.unwrap().items.len(), 1);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(place.store.executions(&open).await.unwrap().items, []);
    });
}

/// The command of a schedule that was removed while its provider could not be reached began when it could be (seed 910).
#[test]
fn l17_what_was_removed_starts_nothing_any_more() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        let command = ExecSpec { argv: Program::Sleep { seconds: 1 }.argv(), ..ExecSpec::default() };
        let (cron, zone) = ("* * * * *".to_owned(), "UTC".to_owned());
        let new = NewSchedule { cron, zone, command, missed: MissedRuns::Skip, enabled: true };
        let schedule = place.engine.create_schedule(&id, new, by()).await.unwrap();
        let due_in_ms = 60_000 - EPOCH_MS % 60_000;
        tokio::time::sleep(Duration::from_millis(due_in_ms - 1_000)).await;
        place.provider.set_down(true);
        tokio::time::sleep(Duration::from_secs(3)).await;
        let kept = place.store.schedule(&schedule.id).await.unwrap().unwrap();
        let run = kept.run.expect("it is under way");
        assert_eq!(run.outcome, None);
        place.engine.remove_schedule(&schedule.id, by()).await.unwrap();
        place.provider.set_down(false);
        tokio::time::sleep(LONG).await;
        let instance = InstanceRef { sandbox: id, generation: Generation::FIRST };
        let known = place.provider.truth().execution(&instance, &run.execution).await;
        assert!(matches!(known, Err(ProviderError::NotFound { .. })), "{known:?}");
    });
}

/// The last write of a delete was done and not answered: whoever waited for it waited until his time was over.
#[test]
fn t1_who_waits_hears_of_a_write_that_was_done_and_not_answered() {
    paused(async {
        let place = place().await;
        let id = place.ready(600_000).await;
        let mut commits = 0;
        place.store.set_faults(Some(Box::new(move |call| {
            commits += u32::from(call == "commit");
            // The first one says that it is to end, the second one that it has.
            (call == "commit" && commits == 2).then_some(Fault::After)
        })));
        let began = tokio::time::Instant::now();
        place.delete(&id).await;
        assert!(began.elapsed() < Duration::from_secs(5), "it took {:?}", began.elapsed());
    });
}

/// A daemon that began when both a retry and the hook ahead of the deadline were due turned in circles: the alarm for the
/// one broke off the other, again and again, and a hook that could not be performed held up the retry, whose alarm rang
/// at once (seed 86290).
#[test]
fn l14_a_hook_ahead_of_the_deadline_is_not_broken_off_by_an_alarm() {
    paused(async {
        let place = place().await;
        let action = HookAction::Command { argv: vec!["echo".into(), "done".into()] };
        let hook = Hook { action, deadline_ms: 10_000, on_failure: OnFailure::Ignore };
        let spec = SandboxSpec { hooks: [(HookPoint::OnTimeout, hook)].into(), ..SandboxSpec::default() };
        let policy = Policy { lifetime_ms: 60_000, ..request().policy };
        let id = place.made(CreateRequest { spec, policy, ..request() }).await;
        tokio::time::sleep(Duration::from_secs(48)).await;
        place.provider.set_down(true);
        place.engine.freeze(&id, by()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        place.engine.shut_down();
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut calls = 0;
        place.store.set_faults(Some(Box::new(move |_| {
            calls += 1;
            // Whoever turns in circles is held up, or no time would pass here.
            (calls > 10_000).then_some(Fault::Before)
        })));
        let place = place.restart().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(place.record(&id).await.warned_of_ms, None);
        place.provider.set_down(false);
        tokio::time::sleep(Duration::from_secs(3)).await;
        let record = place.record(&id).await;
        assert_eq!(record.warned_of_ms, record.expires_at_ms);
        assert_eq!(record.phase.name(), PhaseName::Frozen);
        assert!(place.engine.stats(None).await.unwrap().drivers == 0, "{:?}", record.phase);
    });
}

/// A service that had to be seen running for a while was ended as late when the daemon that looked was away meanwhile, and
/// its sandbox was failed (found beside seed 97400).
#[test]
fn l14_a_service_is_not_late_because_nobody_looked() {
    paused(async {
        let place = place().await;
        let service = ServiceSpec {
            name: "web".parse().unwrap(),
            argv: Program::Sleep { seconds: 100_000 }.argv(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            ready: Readiness::Runs { ms: 2_000 },
            ready_within_ms: 5_000,
            restart: Restart { policy: RestartPolicy::Never, ..Restart::default() },
            nudge: None,
        };
        let spec = SandboxSpec { services: vec![service], ..SandboxSpec::default() };
        let id = place.engine.create(CreateRequest { spec, ..request() }).await.unwrap().view.sandbox.id;
        tokio::time::sleep(Duration::from_millis(500)).await;
        let before = place.record(&id).await;
        assert_eq!(before.phase.name(), PhaseName::Verifying);
        place.engine.shut_down();
        tokio::time::sleep(Duration::from_secs(10)).await;
        let place = place.restart().await;
        let view = place.engine.wait_ready(&id, LONG).await.unwrap();
        assert_eq!(view.status, Status::Ready, "{:?}", view.sandbox.cause);
        let ran = |record: &Sandbox| record.services.values().map(|run| run.execution.clone()).collect::<Vec<_>>();
        assert_eq!(ran(&view.sandbox), ran(&before));
    });
}
