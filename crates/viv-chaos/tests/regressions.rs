//! What reviews and worlds found once, each as a small world of its own.
#![allow(missing_docs, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use viv_chaos::Rng;
use viv_core::lifecycle::{Actor, Status};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::{EndCause, OperationId, SandboxId};
use viv_engine::{Clock, CreateRequest, Engine, EngineConfig, EngineError, Which};
use viv_provider::sim::{SimClock, SimProvider};
use viv_provider::{DeadlineChange, Mutation, Provider};
use viv_store::memory::Fault;
use viv_store::{LeaseKind, MemoryStore, Owner, Store};

const EPOCH_MS: u64 = 1_700_000_000_000;

struct Place {
    engine: Engine,
    provider: SimProvider,
    store: MemoryStore,
}

/// An engine without faults, on simulated time.
async fn place() -> Place {
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
    let engine = Engine::start(
        EngineConfig::new("sim".parse().unwrap(), "daemon"),
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
        let request = CreateRequest {
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: Policy { persistent: false, lifetime_ms, idle_ms: 900_000 },
            labels: BTreeMap::new(),
            by: Actor::part("test"),
            key: None,
        };
        let id = self.engine.create(request).await.unwrap().view.sandbox.id;
        let view = self.engine.wait_ready(&id, Duration::from_secs(10)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        id
    }

    async fn status(&self, id: &SandboxId) -> Status {
        self.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap().status
    }
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
