use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use viv_core::FencingToken;
use viv_core::lifecycle::Sandbox;
use viv_core::snapshot::{Snapshot, SnapshotState};

use super::Lab;
use super::executions::started;
use super::keys::key;
use super::lab::{MANY, about, change, everything, idempotency, note, owner};
use super::schedules::schedule;
use super::snapshots::row;
use super::subscriptions::subscription;
use super::tasks::task;
use crate::error::StoreError;
use crate::journal::{Cursor, JournalFilter};
use crate::record::{LeaseKind, Owner};
use crate::store::{Epoch, Store};
use crate::subscription::Replay;
use crate::task::TaskOutput;

pub(super) async fn j8_the_owner_is_told(lab: &Lab) {
    let told = lab.store.owner().await.unwrap();
    assert_eq!(told, Some(Owner { epoch: lab.epoch.0, ..owner("first") }));
    let epoch = lab.store.own(Owner { epoch: 77, pid: 5, ..owner("second") }).await.unwrap();
    let told = lab.world.another().await.owner().await.unwrap();
    assert_eq!(told, Some(Owner { epoch: epoch.0, pid: 5, ..owner("second") }));
}

pub(super) async fn j8_epochs_grow(lab: &Lab) {
    let mut last = lab.epoch;
    for _ in 0..5 {
        let next = lab.world.another().await.own(owner("next")).await.unwrap();
        assert!(next > last);
        last = next;
    }
}

/// Everything that can be seen.
async fn seen(store: &dyn Store, sandbox: &Sandbox) -> String {
    let lines = store.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap();
    let list = store.list(&everything()).await.unwrap();
    let (leases, keys, meta) = (store.leases(&sandbox.id).await, store.keys().await, store.meta("m").await);
    let known = store.remembered(&idempotency(&sandbox.project, "k")).await;
    format!("{lines:?} {list:?} {leases:?} {keys:?} {meta:?} {known:?}")
}

fn execution(sandbox: &Sandbox) -> viv_core::execution::Execution {
    started(sandbox, 1, viv_core::exec::ExecState::Cancelled)
}

/// Every kind of write, all of which would change something.
async fn writes(
    lab: &Lab,
    store: &dyn Store,
    epoch: Epoch,
    sandbox: &Sandbox,
    token: FencingToken,
) -> Vec<(&'static str, bool)> {
    let next = Sandbox { version: sandbox.version + 1, ..sandbox.clone() };
    let refused = |answer: Result<(), StoreError>| matches!(answer, Err(StoreError::Superseded));
    let (id, hook) = (&sandbox.id, subscription(1).id);
    let after = Sandbox { version: next.version + 1, ..next.clone() };
    let saved = Snapshot { state: SnapshotState::Saving, ..row(lab, "snp_late", Some(sandbox), 1) };
    let task_row = task(1, 1);
    let output =
        TaskOutput { execution: task_row.execution_of(Some(0)), task: task_row.id, offset: 0, data: b"late".to_vec() };
    vec![
        ("commit", refused(store.commit(epoch, change(&next)).await.map(drop))),
        ("commit_all", refused(store.commit_all(epoch, vec![change(&after)]).await.map(drop))),
        ("put_snapshot", refused(store.put_snapshot(epoch, saved.clone(), Vec::new()).await.map(drop))),
        ("forget_snapshot", refused(store.forget_snapshot(epoch, &saved.id, Vec::new()).await.map(drop))),
        ("append", refused(store.append(epoch, vec![note(1, "late")]).await.map(drop))),
        ("append nothing", refused(store.append(epoch, Vec::new()).await.map(drop))),
        ("lease", refused(store.lease(epoch, id, LeaseKind::Start, "late", 1, 1).await.map(drop))),
        ("draw_token", refused(store.draw_token(epoch).await.map(drop))),
        ("release", refused(store.release(epoch, id, LeaseKind::Lifecycle, token).await)),
        ("touch", refused(store.touch(epoch, id, 99_999).await)),
        ("put_key", refused(store.put_key(epoch, key("key_late", 1), note(1, "late")).await)),
        ("set_meta_once", refused(store.set_meta_once(epoch, "m", "late").await.map(drop))),
        ("put_meta", refused(store.put_meta(epoch, "n", Some("late"), note(1, "late")).await)),
        ("put_schedule", refused(store.put_schedule(epoch, schedule(sandbox, 1, None), Vec::new(), 9).await)),
        (
            "remove_schedule",
            refused(store.remove_schedule(epoch, &schedule(sandbox, 1, None).id, note(1, "late")).await.map(drop)),
        ),
        ("put_task", refused(store.put_task(epoch, task(1, 1), Vec::new()).await)),
        ("keep_task_output", refused(store.keep_task_output(epoch, output).await)),
        ("note_executions", refused(store.note_executions(epoch, vec![execution(sandbox)]).await)),
        ("put_execution", refused(store.put_execution(epoch, execution(sandbox), 9).await)),
        ("put_outputs", refused(store.put_outputs(epoch, &sandbox.id, Vec::new(), 9).await)),
        ("put_subscription", refused(store.put_subscription(epoch, subscription(1), Cursor(0), Vec::new(), 9).await)),
        ("put_letters", refused(store.put_letters(epoch, &hook, (Cursor(0), Cursor(1)), Vec::new()).await.map(drop))),
        ("settle_letters", refused(store.settle_letters(epoch, &hook, Vec::new(), Vec::new()).await)),
        ("replay", refused(store.replay(epoch, &hook, Replay::Dead, 1, note(1, "late")).await.map(drop))),
        ("remove_subscription", refused(store.remove_subscription(epoch, &hook, note(1, "late")).await.map(drop))),
        ("retain", refused(store.retain(epoch, 99_999, MANY).await.map(drop))),
    ]
}

pub(super) async fn j8_every_write_of_the_superseded_is_refused(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let other = lab.world.another().await;
    let epoch = other.own(owner("second")).await.unwrap();
    let lease = other.lease(epoch, &sandbox.id, LeaseKind::Lifecycle, "b", 1, 100).await.unwrap();
    other.append(epoch, vec![about(&sandbox)]).await.unwrap();
    let before = seen(other.as_ref(), &sandbox).await;
    // By the one that was taken over, and by the new one with the old number.
    for store in [&lab.store, &other] {
        for (what, refused) in writes(lab, store.as_ref(), lab.epoch, &sandbox, lease.token).await {
            assert!(refused, "{what} was not refused as superseded");
        }
    }
    assert_eq!(seen(other.as_ref(), &sandbox).await, before);
    assert_eq!(seen(lab.store.as_ref(), &sandbox).await, before);
    // And all of them are taken from the one that owns it.
    for (what, refused) in writes(lab, other.as_ref(), epoch, &sandbox, lease.token).await {
        assert!(!refused, "{what} was refused");
    }
}

pub(super) async fn j8_nobody_writes_without_owning(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    for epoch in [Epoch(0), Epoch(lab.epoch.0 + 1), Epoch(u64::MAX)] {
        for (what, refused) in writes(lab, lab.store.as_ref(), epoch, &sandbox, FencingToken(1)).await {
            assert!(refused, "{what} was taken under {epoch:?}");
        }
    }
}

pub(super) async fn j8_after_a_takeover_nothing_late_gets_in(lab: &Lab) {
    let taken = Arc::new(AtomicBool::new(false));
    let (old, epoch, flag) = (Arc::clone(&lab.store), lab.epoch, Arc::clone(&taken));
    let started = Arc::new(tokio::sync::Notify::new());
    let start = Arc::clone(&started);
    let writer = tokio::spawn(async move {
        loop {
            let late = flag.load(Ordering::SeqCst);
            match old.append(epoch, vec![note(1, "old")]).await {
                Ok(_) => assert!(!late, "a write that began after the takeover was taken"),
                Err(StoreError::Superseded) if late => return,
                Err(StoreError::Superseded) => {}
                Err(other) => panic!("{other}"),
            }
            start.notify_one();
        }
    });
    started.notified().await;
    let new = lab.world.another().await;
    let epoch = new.own(owner("second")).await.unwrap();
    taken.store(true, Ordering::SeqCst);
    let first = new.append(epoch, vec![note(1, "new")]).await.unwrap();
    writer.await.unwrap();
    let after = new.journal(first, &JournalFilter::default(), MANY).await.unwrap();
    assert!(after.is_empty(), "{after:?}");
}
