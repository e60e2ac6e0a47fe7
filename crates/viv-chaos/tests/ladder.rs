//! The ladder of idling on simulated time, without faults: what moves a sandbox, and what does not.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use viv_chaos::Rng;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, EntryKind, Sandbox, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{Generation, SandboxId};
use viv_engine::{Clock, CreateRequest, Engine, EngineConfig, ReconcilerName, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_store::{Cursor, JournalFilter, MemoryStore, Owner, Store};

const EPOCH_MS: u64 = 1_700_000_000_000;
const HOUR_MS: u64 = 3_600_000;
const MINUTE: Duration = Duration::from_secs(60);

/// Both windows of the ladder.
const WINDOW_MS: u64 = 900_000;

struct Place {
    engine: Engine,
    store: MemoryStore,
}

/// An engine without faults, on simulated time.
async fn place() -> Place {
    let clock = SimClock::starting_at(EPOCH_MS);
    let ticking = clock.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            ticking.advance(500);
        }
    });
    let (store, provider) = (MemoryStore::new(), SimProvider::new(clock));
    let owner =
        Owner { name: "daemon".into(), boot_id: "b".into(), pid: 1, start_ticks: 0, epoch: 0, since_ms: EPOCH_MS };
    let epoch = store.own(owner).await.unwrap();
    let rng = Mutex::new(Rng::new(1));
    let engine = Engine::start(
        EngineConfig::new("sim".parse().unwrap(), "daemon"),
        Arc::new(store.clone()),
        Arc::new(provider),
        epoch,
        Clock::showing(EPOCH_MS),
        move || rng.lock().unwrap().bytes(),
    );
    Place { engine: engine.await.unwrap(), store }
}

impl Place {
    async fn ready(&self, persistent: bool) -> SandboxId {
        let request = CreateRequest {
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: Policy {
                persistent,
                lifetime_ms: HOUR_MS,
                idle_ms: WINDOW_MS,
                hibernate_ms: WINDOW_MS,
                ..Policy::default_for(None)
            },
            labels: BTreeMap::new(),
            snapshot: None,
            by: Actor::part("test"),
            key: None,
        };
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        let view = self.engine.wait_ready(&id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        id
    }

    /// Transitions so far.
    async fn moves(&self) -> usize {
        let lines = self.store.journal(Cursor(0), &JournalFilter::default(), usize::MAX).await.unwrap();
        lines.iter().filter(|line| line.line.kind == "sandbox.moved").count()
    }

    async fn record(&self, id: &SandboxId) -> Sandbox {
        self.store.get(id).await.unwrap().unwrap()
    }

    async fn start(&self, id: &SandboxId, argv: &[&str], detached: bool) {
        let handle = self.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        let spec = ExecSpec { argv, detached, ..ExecSpec::default() };
        handle.execute(&handle.new_execution(), &spec).await.unwrap();
    }

    async fn status(&self, id: &SandboxId) -> Status {
        self.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap().status
    }
}

fn paused(world: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(world);
}

/// Nobody uses it: frozen after one window, saved or ended after two, and nothing moves before or after.
#[test]
fn l5_the_ladder_goes_down_by_itself_and_stays_down() {
    paused(async {
        let place = place().await;
        let (kept, passing) = (place.ready(true).await, place.ready(false).await);
        tokio::time::sleep(14 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Unverified, Status::Unverified));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Frozen, Status::Frozen));
        tokio::time::sleep(13 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Frozen, Status::Frozen));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!((place.status(&kept).await, place.status(&passing).await), (Status::Hibernated, Status::Stopped));
        let moves = place.moves().await;
        tokio::time::sleep(600 * MINUTE).await;
        assert_eq!(place.moves().await, moves);
        let idle = place.engine.reconcilers().into_iter().find(|status| status.name == ReconcilerName::Idle);
        assert_eq!(idle.map(|status| status.runs), Some(4), "two rungs each, and no look besides");
    });
}

/// A foreground command is activity for as long as it runs, and the window begins with its end; a service is not (L6).
#[test]
fn l6_what_runs_in_the_foreground_keeps_it_awake_and_a_service_does_not() {
    paused(async {
        let place = place().await;
        let (busy, serving) = (place.ready(true).await, place.ready(true).await);
        place.start(&busy, &["/bin/sleep", "2400"], false).await;
        place.start(&serving, &["/bin/sleep", "2400"], true).await;
        tokio::time::sleep(17 * MINUTE).await;
        assert_eq!(place.status(&serving).await, Status::Frozen);
        for minute in 17..54 {
            let status = place.status(&busy).await;
            assert!(matches!(status, Status::Ready | Status::Unverified), "{status:?} after {minute} minutes");
            tokio::time::sleep(MINUTE).await;
        }
        tokio::time::sleep(3 * MINUTE).await;
        assert_eq!(place.status(&busy).await, Status::Frozen, "a window after the command had ended");
    });
}

/// A lease holds every rung off until it ends, and is bounded (L7).
#[test]
fn l7_a_lease_keeps_it_awake_until_it_ends() {
    paused(async {
        let place = place().await;
        let id = place.ready(true).await;
        let hold = 40 * 60_000;
        place.engine.keep_awake(&id, "thinking", hold, "the model thinks", Actor::part("test")).await.unwrap();
        tokio::time::sleep(39 * MINUTE).await;
        assert!(matches!(place.status(&id).await, Status::Ready | Status::Unverified));
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!(place.status(&id).await, Status::Frozen);
    });
}

/// A day of status polls, a due idle timer, a client that reconnects, traffic and a schedule: every transition is
/// somebody's wish or the ladder's, and their number is bounded by the number of entries.
#[test]
fn l4_a_day_of_polls_timers_reconnects_traffic_and_schedules_does_not_loop() {
    paused(async {
        const MINUTES: u64 = 24 * 60;
        let place = place().await;
        let id = place.ready(true).await;
        let policy = place.record(&id).await.policy;
        let which = Which::Id(id.clone());
        let mut entries = 1;
        for minute in 1..=MINUTES {
            // A dashboard, twice a minute, now and then with a probe; and a listing of commands.
            for half in 0..2 {
                let _ = place.engine.get(&Project::default(), &which, "dashboard").await;
                if (minute + half) % 5 == 0 {
                    let _ = place.engine.verify(&id).await;
                }
                if let Ok(handle) = place.engine.look_into(&Project::default(), &which, None).await {
                    let _ = handle.executions().await;
                }
                tokio::time::sleep(MINUTE / 2).await;
            }
            // A client that lost its connection joins what is there, and wakes nothing.
            if minute % 7 == 0 {
                let _ = place.engine.work_in(&Project::default(), &which, None).await;
            }
            let kind = match minute {
                _ if minute % 360 == 0 => Some(EntryKind::Schedule),
                _ if minute % 120 == 60 => Some(EntryKind::Gateway),
                _ => None,
            };
            if let Some(kind) = kind {
                entries += 1;
                place.engine.ensure(&id, kind, Actor::part("somebody")).await.unwrap();
                place.engine.wait_ready(&id, MINUTE).await.unwrap();
                place.start(&id, &["/bin/sleep", "1"], false).await;
            }
        }
        tokio::time::sleep(40 * MINUTE).await;
        let record = place.record(&id).await;
        assert_eq!((record.policy, record.phase.name().as_str()), (policy, "hibernated"));
        // Each entry: resuming, verifying, ready, frozen, hibernating, hibernated.
        let moves = place.moves().await;
        assert_eq!(record.generation, Generation(entries), "one instance for each entry");
        assert!(moves <= 6 * entries as usize, "{moves} transitions for {entries} entries");
    });
}
