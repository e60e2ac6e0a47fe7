//! Who may work on a sandbox (L15), and what is known before another instance takes the place of one that is lost (T7).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place, request};
use viv_core::lifecycle::{Cause, EntryKind, PhaseName, Status};
use viv_core::spec::{Policy, Project};
use viv_core::{Generation, OperationId, SandboxId, SnapshotId};
use viv_engine::{CreateRequest, EngineError, NewSnapshot, Which};
use viv_provider::{DeadlineChange, InstanceRef, InstanceState, Mutation, Provider, ProviderError};
use viv_store::{Cursor, JournalFilter, Lease, LeaseKind, Store};

/// Longer than what is tried for an entry, in simulated time.
const VERY_LONG: Duration = Duration::from_secs(1_200);

async fn lifecycle_lease(place: &Place, id: &SandboxId) -> Lease {
    let leases = place.store.leases(id).await.unwrap();
    leases.into_iter().find(|lease| lease.kind == LeaseKind::Lifecycle).unwrap()
}

/// Somebody else holds this lock of it, for half a minute.
async fn take(place: &Place, id: &SandboxId, kind: LeaseKind) -> Lease {
    let (epoch, now_ms) = (place.engine.epoch(), place.engine.now_ms());
    for lease in place.store.leases(id).await.unwrap() {
        if lease.kind == kind {
            place.store.release(epoch, id, kind, lease.token).await.unwrap();
        }
    }
    place.store.lease(epoch, id, kind, "replica-b", now_ms, 30_000).await.unwrap()
}

#[test]
fn l15_what_somebody_else_works_on_is_locked_until_their_lease_lapses() {
    for kind in [LeaseKind::Lifecycle, LeaseKind::Start] {
        paused(async move {
            let place = place().await;
            let id = place.made(persistent()).await;
            place.engine.stop(&id, by()).await.unwrap();
            let before = place.engine.wait_settled(&id, LONG).await.unwrap().sandbox;
            assert_eq!(before.phase.name(), PhaseName::Hibernated);
            let ours = lifecycle_lease(&place, &id).await;
            let theirs = take(&place, &id, kind).await;
            assert!(theirs.token > ours.token);

            let engine = &place.engine;
            let asked = [
                engine.ensure(&id, EntryKind::Ensure, by()).await,
                engine.stop(&id, by()).await,
                engine.hibernate(&id, by()).await,
                engine.reset(&id, by()).await,
                engine.delete(&id, by()).await,
            ];
            for answer in asked {
                assert!(matches!(&answer, Err(EngineError::Locked(held)) if **held == theirs), "{answer:?}");
            }
            assert_eq!(place.record(&id).await, before, "what is refused changes nothing");

            tokio::time::sleep(Duration::from_secs(31)).await;
            engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
            let view = engine.wait_ready(&id, LONG).await.unwrap();
            assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation(2)));
            let now = lifecycle_lease(&place, &id).await;
            assert_eq!(now.holder, "daemon");
            if kind == LeaseKind::Start {
                return;
            }
            assert!(now.token > theirs.token, "{now:?}, {theirs:?}");
            // Whoever held it comes late: the provider has seen a greater token, and the store knows another holder.
            let late = Mutation {
                operation: OperationId::from_bytes([9; 16]),
                generation: view.sandbox.generation,
                token: theirs.token,
                budget_ms: 1_000,
            };
            let late = place.provider.truth().extend(&late, &id, DeadlineChange::AtLeastMs(60_000)).await;
            assert!(matches!(late, Err(ProviderError::Fenced { .. })), "{late:?}");
            place.store.release(engine.epoch(), &id, LeaseKind::Lifecycle, theirs.token).await.unwrap();
            assert_eq!(lifecycle_lease(&place, &id).await, now);
        });
    }
}

/// Nobody answers for as long as it takes to be lost.
async fn lost_in_silence(place: &Place, ids: &[SandboxId]) {
    place.provider.set_silent(true);
    for id in ids {
        place.engine.verify(id).await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(120)).await;
    for id in ids {
        let lost = place.record(id).await;
        assert_eq!((lost.phase.name(), &lost.cause.cause), (PhaseName::Lost, &Cause::Unresponsive));
    }
}

#[test]
fn l15_without_an_absence_that_was_seen_nothing_takes_its_place() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        lost_in_silence(&place, std::slice::from_ref(&id)).await;
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        let refused = place.engine.wait_ready(&id, VERY_LONG).await;
        assert!(matches!(refused, Err(EngineError::AbsenceUnproven { .. })), "{refused:?}");
        let record = place.record(&id).await;
        assert_eq!((record.phase.name(), record.generation), (PhaseName::Lost, Generation::FIRST));
        let instance = InstanceRef { sandbox: id.clone(), generation: Generation::FIRST };
        assert_eq!(place.provider.truth().observe(&instance).await.unwrap().state, InstanceState::Running);
        // It reappears alive: verified, and kept.
        place.provider.set_silent(false);
        place.engine.verify(&id).await.unwrap();
        let back = place.engine.wait_ready(&id, LONG).await.unwrap();
        assert_eq!((back.status, back.sandbox.generation), (Status::Ready, Generation::FIRST));
        let lines = place.lines(&id).await;
        assert!(lines.iter().any(|line| line.line.cause.as_deref() == Some(Cause::Reappeared.code())), "{lines:?}");
        place.delete(&id).await;
    });
}

/// Whoever asks in the moment in which the silence ends, and before anybody has looked, does not end what lives. So
/// many of them that the provider is left alone for a moment: a look that was not made is none.
#[test]
fn t7_an_entry_looks_for_what_was_silent_before_it_is_replaced() {
    paused(async {
        for persistent in [false, true] {
            let place = place().await;
            let mut ids = Vec::new();
            for _ in 0..4 {
                let policy = Policy { persistent, ..request().policy };
                let id = place.made(CreateRequest { policy, ..request() }).await;
                let which = Which::Id(id.clone());
                let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
                handle.file_mkdir("/workspace/work").await.unwrap();
                ids.push(id);
            }
            lost_in_silence(&place, &ids).await;
            let breakers = place.engine.breakers();
            assert!(breakers.iter().any(|breaker| breaker.opened > 0), "{breakers:?}");
            let mutations = place.provider.mutations();
            place.provider.set_silent(false);
            for id in &ids {
                place.engine.ensure(id, EntryKind::Ensure, by()).await.unwrap();
                let view = place.engine.wait_ready(id, VERY_LONG).await.unwrap();
                assert_eq!((view.status, view.sandbox.generation), (Status::Ready, Generation::FIRST));
                let which = Which::Id(id.clone());
                let handle = place.engine.work_in(&Project::default(), &which, None).await.unwrap();
                handle.file_stat("/workspace/work").await.unwrap();
            }
            assert_eq!(place.provider.mutations(), mutations, "nothing was made, saved or ended for it");
        }
    });
}

/// What is done about a snapshot of what is over, or of no sandbox, leaves nobody holding anything.
#[test]
fn l15_what_is_done_about_snapshots_leaves_no_lease_behind() {
    paused(async {
        let place = place().await;
        // A file that is none: its snapshot has a fence of its own.
        let file = Box::new(std::io::Cursor::new(b"no snapshot".to_vec()));
        let refused = place.engine.import_snapshot(Project::default(), None, by(), file).await;
        assert!(matches!(refused, Err(EngineError::Provider(ProviderError::Unsupported { .. }))), "{refused:?}");
        let lines = place.store.journal(Cursor(0), &JournalFilter::default(), 1_000).await.unwrap();
        let asked = lines.iter().find(|line| line.line.kind == "snapshot.asked_for").unwrap();
        let fence = asked.line.data["snapshot"].as_str().unwrap().replace(SnapshotId::PREFIX, SandboxId::PREFIX);
        assert_eq!(place.store.leases(&fence.parse().unwrap()).await.unwrap(), []);
        assert_eq!(place.engine.stats(None).await.unwrap().known, 0);

        // One that outlives its sandbox, because another one began with it.
        let source = place.made(request()).await;
        let new = NewSnapshot { name: None, labels: BTreeMap::new(), by: by(), key: None };
        let snapshot = place.engine.make_snapshot(&source, new).await.unwrap().row.id;
        let other = place.made(CreateRequest { snapshot: Some(snapshot.clone()), ..request() }).await;
        place.delete(&source).await;
        assert_eq!(place.store.leases(&source).await.unwrap(), []);
        place.delete(&other).await;
        let until = tokio::time::Instant::now() + VERY_LONG;
        while place.store.snapshot(&snapshot).await.unwrap().is_some() {
            assert!(tokio::time::Instant::now() < until, "it is of no use to anybody");
            place.engine.reconcile();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        for id in [&source, &other] {
            assert_eq!(place.store.leases(id).await.unwrap(), []);
        }
    });
}
