//! Failures that happened elsewhere, each staged in a small world: named after its row in the list of incidents.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use place::{LONG, Place, by, paused, place, place_with, request};
use viv_chaos::Damage;
use viv_core::lifecycle::{PhaseName, Sandbox, Status};
use viv_core::spec::Policy;
use viv_core::{FencingToken, Generation, OperationId, SandboxId};
use viv_engine::{CreateRequest, EngineError, Failpoint};
use viv_provider::{InstanceRef, InstanceSpec, InstanceState, Mutation, PageRequest, Provider};
use viv_store::{Change, Store};

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
