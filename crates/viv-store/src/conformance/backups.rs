use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use viv_core::lifecycle::Sandbox;

use super::Lab;
use super::keys::key;
use super::lab::{MANY, change, everything, idempotency, keyed, note, owner};
use crate::journal::{Cursor, JournalFilter};
use crate::record::LeaseKind;
use crate::store::Store;

/// Everything that can be seen.
async fn seen(store: &dyn Store, sandbox: &Sandbox) -> String {
    let lines = store.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap();
    let list = store.list(&everything()).await.unwrap();
    let known = store.remembered(&idempotency(&sandbox.project, "k")).await;
    let (leases, keys, meta) = (store.leases(&sandbox.id).await, store.keys().await, store.meta("m").await);
    let (counts, owner, due) = (store.count(None).await, store.owner().await, store.next_due_ms().await);
    format!("{lines:?} {list:?} {known:?} {leases:?} {keys:?} {meta:?} {counts:?} {owner:?} {due:?}")
}

pub(super) async fn hold_everything(lab: &Lab) {
    let mut sandbox = lab.named(1, "a");
    sandbox.labels.insert("k".to_owned(), "v".to_owned());
    lab.store.commit(lab.epoch, keyed(&sandbox, "k")).await.unwrap();
    let lease = lab.store.lease(lab.epoch, &sandbox.id, LeaseKind::Start, "a", 1, 100).await.unwrap();
    lab.store.put_key(lab.epoch, key("key_1", 1), note(1, "made")).await.unwrap();
    lab.store.set_meta_once(lab.epoch, "m", "one").await.unwrap();
    lab.store.touch(lab.epoch, &sandbox.id, 500).await.unwrap();
    let path = lab.world.backup_path();
    lab.store.backup(&path).await.unwrap();
    let before = seen(lab.store.as_ref(), &sandbox).await;
    // What comes later is not in it.
    lab.store.append(lab.epoch, vec![note(1, "later")]).await.unwrap();
    let copy = lab.world.restored(&path).await;
    assert_eq!(seen(copy.as_ref(), &sandbox).await, before);
    // It can be used: its numbers go on where they stood.
    let epoch = copy.own(owner("restorer")).await.unwrap();
    assert!(epoch > lab.epoch);
    let next = copy.lease(epoch, &sandbox.id, LeaseKind::Start, "b", 1, 100).await.unwrap();
    assert!(next.token > lease.token);
    copy.commit(epoch, change(&Sandbox { version: 2, ..sandbox })).await.unwrap();
}

pub(super) async fn are_of_one_moment_while_it_is_written(lab: &Lab) {
    let over = Arc::new(AtomicBool::new(false));
    let (store, epoch, flag) = (Arc::clone(&lab.store), lab.epoch, Arc::clone(&over));
    let first = lab.new_sandbox(1);
    lab.put(&first).await;
    let mut sandbox = first.clone();
    let writer = tokio::spawn(async move {
        while !flag.load(Ordering::SeqCst) {
            sandbox.version += 1;
            store.commit(epoch, change(&sandbox)).await.unwrap();
        }
    });
    let mut before = 1;
    for _ in 0..5 {
        // It is written on: this waits for the next version, however long that takes.
        let last = before;
        while before == last {
            before = lab.get(&first).await.unwrap().version;
            tokio::task::yield_now().await;
        }
        let path = lab.world.backup_path();
        lab.store.backup(&path).await.unwrap();
        let copy = lab.world.restored(&path).await;
        let version = copy.get(&first.id).await.unwrap().unwrap().version;
        assert!(version >= before, "what was acknowledged before is in it");
        let lines = copy.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap();
        let told: Vec<u64> = lines.iter().map(|line| line.line.data["version"].as_u64().unwrap()).collect();
        assert_eq!(told, (1..=version).collect::<Vec<_>>(), "record and journal agree");
    }
    over.store(true, Ordering::SeqCst);
    writer.await.unwrap();
}

pub(super) async fn replace_what_was_there(lab: &Lab) {
    let path = lab.world.backup_path();
    lab.store.append(lab.epoch, vec![note(1, "one")]).await.unwrap();
    lab.store.backup(&path).await.unwrap();
    lab.store.append(lab.epoch, vec![note(1, "two")]).await.unwrap();
    lab.store.backup(&path).await.unwrap();
    let copy = lab.world.restored(&path).await;
    let lines = copy.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap();
    assert_eq!(lines, lab.lines().await);
}
