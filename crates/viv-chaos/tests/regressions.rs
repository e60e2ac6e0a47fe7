//! What reviews and worlds found once, each as a small world of its own.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use viv_chaos::Rng;
use viv_core::lifecycle::{Actor, EntryKind, PhaseName, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, OperationId, SandboxId};
use viv_engine::{Clock, CreateRequest, Engine, EngineConfig, EngineError, Gate, GateSetting, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{DeadlineChange, Mutation, Provider, ResourceLimits};
use viv_store::memory::Fault;
use viv_store::{LeaseKind, MemoryStore, Owner, Quota, Store, SumsMax};

const EPOCH_MS: u64 = 1_700_000_000_000;

struct Place {
    engine: Engine,
    provider: SimProvider,
    store: MemoryStore,
}

/// An engine without faults, on simulated time.
async fn place() -> Place {
    place_with(|_| {}).await
}

/// The same, set up otherwise.
async fn place_with(set_up: impl FnOnce(&mut EngineConfig)) -> Place {
    let clock = SimClock::starting_at(EPOCH_MS);
    let ticking = clock.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            ticking.advance(50);
        }
    });
    let (store, provider) = (MemoryStore::new(), SimProvider::new(clock));
    let owner =
        Owner { name: "daemon".into(), boot_id: "b".into(), pid: 1, start_ticks: 0, epoch: 0, since_ms: EPOCH_MS };
    let epoch = store.own(owner).await.unwrap();
    let rng = Mutex::new(Rng::new(1));
    let mut config = EngineConfig::new("sim".parse().unwrap(), "daemon");
    set_up(&mut config);
    let engine = Engine::start(
        config,
        Arc::new(store.clone()),
        Arc::new(provider.clone()),
        epoch,
        Clock::showing(EPOCH_MS),
        move || rng.lock().unwrap().bytes(),
    );
    Place { engine: engine.await.unwrap(), provider, store }
}

impl Place {
    async fn ready(&self, lifetime_ms: u64) -> SandboxId {
        let policy = Policy { persistent: false, lifetime_ms, idle_ms: 900_000 };
        self.made(CreateRequest { policy, ..request() }).await
    }

    async fn made(&self, request: CreateRequest) -> SandboxId {
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        let view = self.engine.wait_ready(&id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        id
    }

    async fn status(&self, id: &SandboxId) -> Status {
        self.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap().status
    }
}

/// A sandbox that lives for an hour.
fn request() -> CreateRequest {
    CreateRequest {
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy { persistent: false, lifetime_ms: 3_600_000, idle_ms: 900_000 },
        labels: BTreeMap::new(),
        by: Actor::part("test"),
        key: None,
    }
}

/// One that is saved when it stops.
fn persistent() -> CreateRequest {
    CreateRequest { policy: Policy { persistent: true, ..request().policy }, ..request() }
}

fn paused(world: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(world);
}

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
        place.provider.extend(&mutation, &id, DeadlineChange::AtLeastMs(60_000)).await.unwrap();
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
        assert!(place.provider.crash(&id, EndCause::SupervisorLost));
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
        let off = GateSetting { percent: 100, projects: [(exempt.clone(), 0)].into() };
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
        let with = |mib| CreateRequest { spec: SandboxSpec { limits: memory(mib), ..SandboxSpec::default() }, ..request() };
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
