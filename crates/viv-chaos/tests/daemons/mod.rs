//! Daemons that die and are followed by others, on simulated time, over one store and one simulated provider.
#![allow(dead_code, reason = "no test needs all of it")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use viv_chaos::Rng;
use viv_engine::{Clock, Engine, EngineConfig};
use viv_provider::sim::{SimClock, SimProvider};
use viv_store::{Epoch, MemoryStore, Owner, Store};

/// Midnight, so that occurrences are easy to count.
pub(crate) const EPOCH_MS: u64 = 1_700_006_400_000;
pub(crate) const MINUTE: Duration = Duration::from_secs(60);

pub(crate) struct Place {
    pub(crate) engine: Engine,
    pub(crate) epoch: Epoch,
    pub(crate) provider: SimProvider,
    pub(crate) store: MemoryStore,
    clock: Clock,
    daemons: u32,
}

impl Place {
    /// A first daemon; the provider's clock goes in steps of so many milliseconds.
    pub(crate) async fn beginning(tick_ms: u64, set_up: impl FnOnce(&mut EngineConfig)) -> Self {
        let ticking = SimClock::starting_at(EPOCH_MS);
        let provider = SimProvider::new(ticking.clone());
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(tick_ms)).await;
                ticking.advance(tick_ms);
            }
        });
        let (store, clock) = (MemoryStore::new(), Clock::showing(EPOCH_MS));
        let (engine, epoch) = begin(1, &store, &provider, clock, set_up).await;
        Self { engine, epoch, provider, store, clock, daemons: 1 }
    }

    /// The daemon dies, and another one begins after a while.
    pub(crate) async fn followed(&mut self, after: Duration, set_up: impl FnOnce(&mut EngineConfig)) {
        self.engine.shut_down();
        tokio::time::sleep(after).await;
        self.daemons += 1;
        (self.engine, self.epoch) = begin(self.daemons, &self.store, &self.provider, self.clock, set_up).await;
    }
}

async fn begin(
    number: u32,
    store: &MemoryStore,
    provider: &SimProvider,
    clock: Clock,
    set_up: impl FnOnce(&mut EngineConfig),
) -> (Engine, Epoch) {
    let name = format!("daemon {number}");
    let owner =
        Owner { name: name.clone(), boot_id: "b".into(), pid: number, start_ticks: 0, epoch: 0, since_ms: EPOCH_MS };
    let epoch = store.own(owner).await.unwrap();
    let rng = Mutex::new(Rng::new(u64::from(number)));
    let mut config = EngineConfig::new("sim".parse().unwrap(), name);
    // Worlds are shorter than the hour in which a daemon compares all snapshots.
    config.periods.snapshots_all = config.periods.snapshots;
    set_up(&mut config);
    let (store, provider) = (Arc::new(store.clone()), Arc::new(provider.clone()));
    let draw = move || rng.lock().unwrap().bytes();
    (Engine::start(config, store, provider, epoch, clock, draw).await.unwrap(), epoch)
}

/// On a clock that goes on when nobody has anything to do.
pub(crate) fn paused(world: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap().block_on(world);
}
