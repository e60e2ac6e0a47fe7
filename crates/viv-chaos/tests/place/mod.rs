//! An engine on simulated time, without faults but those that a test asks for.
#![allow(dead_code, reason = "no test needs all of it")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use viv_chaos::{FaultyProvider, FaultyStore, Orders, Rng};
use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Sandbox, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_engine::{Clock, CreateRequest, Engine, EngineConfig, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_store::{Cursor, JournalFilter, JournalLine, MemoryStore, Owner, Store};

pub(crate) const EPOCH_MS: u64 = 1_700_000_000_000;

/// Longer than anything takes, in simulated time.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) struct Place {
    pub(crate) engine: Engine,
    pub(crate) provider: FaultyProvider,
    pub(crate) store: MemoryStore,
    clock: Clock,
}

/// An engine on its own.
pub(crate) async fn place() -> Place {
    place_with(|_| {}).await
}

/// The same, set up otherwise.
pub(crate) async fn place_with(set_up: impl FnOnce(&mut EngineConfig)) -> Place {
    place_ticking(50, set_up).await
}

/// The same, whose provider's clock goes in steps of so many milliseconds: larger ones for days.
pub(crate) async fn place_ticking(tick_ms: u64, set_up: impl FnOnce(&mut EngineConfig)) -> Place {
    place_behind(tick_ms, |store, sim| (Arc::new(store), FaultyProvider::new(sim, 1, 0)), set_up).await
}

/// The same, in which calls to store and provider go wrong as is ordered.
pub(crate) async fn place_ordered(tick_ms: u64, orders: &Arc<Orders>, set_up: impl FnOnce(&mut EngineConfig)) -> Place {
    let behind = |store, sim| {
        let store: Arc<dyn Store> = Arc::new(FaultyStore::around(Arc::new(store), 1, 0, orders.clone()));
        (store, FaultyProvider::around(sim, 1, 0, orders.clone()))
    };
    place_behind(tick_ms, behind, set_up).await
}

/// The same, on a machine that has this part of its memory left.
pub(crate) async fn place_with_memory(left: f64, set_up: impl FnOnce(&mut EngineConfig)) -> Place {
    let behind = |store: MemoryStore, sim: SimProvider| {
        sim.set_memory_left(Some(left));
        (Arc::new(store) as Arc<dyn Store>, FaultyProvider::new(sim, 1, 0))
    };
    place_behind(500, behind, set_up).await
}

/// The same, on a machine that declares that it cannot save memory, for this reason, and is worth another look after a while.
pub(crate) async fn place_without_memory(why: &str, looks_again_after: Duration) -> Place {
    let behind = |store: MemoryStore, sim: SimProvider| {
        sim.declare_no_memory(Some(why));
        sim.look_again_after(looks_again_after);
        (Arc::new(store) as Arc<dyn Store>, FaultyProvider::new(sim, 1, 0))
    };
    place_behind(500, behind, |_| {}).await
}

async fn place_behind(
    tick_ms: u64,
    behind: impl FnOnce(MemoryStore, SimProvider) -> (Arc<dyn Store>, FaultyProvider),
    set_up: impl FnOnce(&mut EngineConfig),
) -> Place {
    let sim = SimClock::starting_at(EPOCH_MS);
    let ticking = sim.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(tick_ms)).await;
            ticking.advance(tick_ms);
        }
    });
    let store = MemoryStore::new();
    let (behind, provider) = behind(store.clone(), SimProvider::new(sim));
    let clock = Clock::showing(EPOCH_MS);
    let engine = start(behind, &provider, clock, set_up).await;
    Place { engine, provider, store, clock }
}

async fn start(
    store: Arc<dyn Store>,
    provider: &FaultyProvider,
    clock: Clock,
    set_up: impl FnOnce(&mut EngineConfig),
) -> Engine {
    let owner =
        Owner { name: "daemon".into(), boot_id: "b".into(), pid: 1, start_ticks: 0, epoch: 0, since_ms: EPOCH_MS };
    let epoch = store.own(owner).await.unwrap();
    let rng = Mutex::new(Rng::new(epoch.0));
    let mut config = EngineConfig::new("sim".parse().unwrap(), "daemon");
    // Worlds are shorter than the hour in which a daemon compares all snapshots.
    config.periods.snapshots_all = config.periods.snapshots;
    set_up(&mut config);
    let draw = move || rng.lock().unwrap().bytes();
    let engine = Engine::start(config, store, Arc::new(provider.clone()), epoch, clock, draw);
    engine.await.unwrap()
}

impl Place {
    /// Another daemon takes over what this one left.
    pub(crate) async fn restart(self) -> Self {
        self.restart_with(|_| {}).await
    }

    /// The same, set up otherwise.
    pub(crate) async fn restart_with(self, set_up: impl FnOnce(&mut EngineConfig)) -> Self {
        self.engine.shut_down();
        let engine = start(Arc::new(self.store.clone()), &self.provider, self.clock, set_up).await;
        Self { engine, ..self }
    }

    /// Another daemon takes over, and the clock was set back by so much meanwhile.
    pub(crate) async fn restart_earlier(mut self, by: Duration) -> Self {
        self.clock = Clock::showing(self.clock.now_ms() - by.as_millis() as u64);
        self.restart().await
    }

    pub(crate) async fn ready(&self, lifetime_ms: u64) -> SandboxId {
        let policy = Policy { persistent: false, lifetime_ms, idle_ms: 900_000, ..Policy::default_for(None) };
        self.made(CreateRequest { policy, ..request() }).await
    }

    pub(crate) async fn made(&self, request: CreateRequest) -> SandboxId {
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        let view = self.engine.wait_ready(&id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        id
    }

    pub(crate) async fn status(&self, id: &SandboxId) -> Status {
        self.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap().status
    }

    pub(crate) async fn record(&self, id: &SandboxId) -> Sandbox {
        self.store.get(id).await.unwrap().unwrap()
    }

    /// Deletes it, and waits until it is over.
    pub(crate) async fn delete(&self, id: &SandboxId) {
        self.engine.delete(id, by()).await.unwrap();
        let view = self.engine.wait_settled(id, LONG).await.unwrap();
        assert!(view.sandbox.is_over(), "{:?}", view.sandbox);
    }

    /// All lines about it.
    pub(crate) async fn lines(&self, id: &SandboxId) -> Vec<JournalLine> {
        let filter = JournalFilter { sandbox: Some(id.clone()), ..JournalFilter::default() };
        self.store.journal(Cursor(0), &filter, 100_000).await.unwrap()
    }
}

pub(crate) fn by() -> Actor {
    Actor::part("test")
}

/// A sandbox that lives for a day.
pub(crate) fn request() -> CreateRequest {
    CreateRequest {
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy { persistent: false, lifetime_ms: 86_400_000, idle_ms: 900_000, ..Policy::default_for(None) },
        labels: BTreeMap::new(),
        snapshot: None,
        by: by(),
        key: None,
    }
}

/// One that is saved when it stops.
pub(crate) fn persistent() -> CreateRequest {
    CreateRequest { policy: Policy { persistent: true, ..request().policy }, ..request() }
}

pub(crate) fn paused(world: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(world);
}
