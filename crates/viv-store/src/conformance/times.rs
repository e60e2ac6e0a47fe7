use std::sync::Arc;

use viv_core::lifecycle::{Phase, PhaseName, Sandbox, Work};

use super::Lab;
use super::lab::{MANY, at_once, change, everything, phase};
use crate::{Change, StoreError};

fn due_at(at_ms: u64) -> Phase {
    let operation = "op_1".parse().unwrap();
    Phase::Stopping { work: Work { operation, attempt: 1, deadline_at_ms: at_ms, retry_at_ms: 0, overdue: false } }
}

pub(super) async fn due_is_soonest_first(lab: &Lab) {
    assert_eq!(lab.store.next_due_ms().await.unwrap(), None);
    let mut all = Vec::new();
    for at_ms in [50, 10, 30, 30, 40, 20] {
        let sandbox = Sandbox { phase: due_at(at_ms), ..lab.new_sandbox(1) };
        lab.put(&sandbox).await;
        all.push((at_ms, sandbox.id));
    }
    lab.put(&Sandbox { phase: phase(PhaseName::Ready), ..lab.new_sandbox(1) }).await;
    all.sort();
    assert_eq!(lab.store.due(None, u64::MAX, MANY).await.unwrap(), all);
    assert_eq!(lab.store.due(None, 30, MANY).await.unwrap(), all[..4]);
    assert_eq!(lab.store.due(None, 30, 3).await.unwrap(), all[..3]);
    // On from where a page ended, also between two that are due at the same time.
    for ended in 0..all.len() {
        let rest = lab.store.due(Some(&all[ended]), u64::MAX, 2).await.unwrap();
        assert_eq!(rest, all[ended + 1..].iter().take(2).cloned().collect::<Vec<_>>(), "after {:?}", all[ended]);
    }
    assert_eq!(lab.store.due(Some(&all[0]), 30, MANY).await.unwrap(), all[1..4]);
    assert!(lab.store.due(None, 9, MANY).await.unwrap().is_empty());
    assert_eq!(lab.store.next_due_ms().await.unwrap(), Some(10));
}

pub(super) async fn due_follows_the_record(lab: &Lab) {
    let mut sandbox = Sandbox { phase: due_at(10), ..lab.new_sandbox(1) };
    lab.put(&sandbox).await;
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = due_at(20)).await;
    assert!(lab.store.due(None, 19, MANY).await.unwrap().is_empty());
    assert_eq!(lab.store.due(None, 20, MANY).await.unwrap(), [(20, sandbox.id.clone())]);
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    assert!(lab.store.due(None, u64::MAX, MANY).await.unwrap().is_empty());
    assert_eq!(lab.store.next_due_ms().await.unwrap(), None);
}

pub(super) async fn touch_only_grows(lab: &Lab) {
    let sandbox = lab.new_sandbox(100);
    lab.put(&sandbox).await;
    for (touched, wanted) in [(50, 100), (200, 200), (150, 200), (201, 201)] {
        lab.store.touch(lab.epoch, &sandbox.id, touched).await.unwrap();
        assert_eq!(lab.get(&sandbox).await.unwrap().active_at_ms, wanted);
    }
    let (store, epoch, id) = (Arc::clone(&lab.store), lab.epoch, sandbox.id.clone());
    at_once(50, |at| {
        let (store, id) = (Arc::clone(&store), id.clone());
        async move { store.touch(epoch, &id, 1_000 + (at as u64 * 37) % 50).await.unwrap() }
    })
    .await;
    assert_eq!(lab.get(&sandbox).await.unwrap().active_at_ms, 1_049);
    assert_eq!(lab.store.list(&everything()).await.unwrap().items[0].active_at_ms, 1_049);
}

pub(super) async fn touch_is_no_change(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let before = lab.lines().await;
    lab.store.touch(lab.epoch, &sandbox.id, 500).await.unwrap();
    lab.store.touch(lab.epoch, &lab.id(), 500).await.expect("one that is not known is passed over");
    assert_eq!(lab.get(&sandbox).await, Some(Sandbox { active_at_ms: 500, ..sandbox }));
    assert_eq!(lab.lines().await, before);
    assert_eq!(lab.store.list(&everything()).await.unwrap().items.len(), 1);
}

pub(super) async fn a_commit_does_not_undo_a_touch(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    lab.store.touch(lab.epoch, &sandbox.id, 500).await.unwrap();
    lab.put_next(&mut sandbox, |sandbox| sandbox.operations += 1).await;
    assert_eq!(lab.get(&sandbox).await.unwrap().active_at_ms, 500);
    lab.put_next(&mut sandbox, |sandbox| sandbox.active_at_ms = 700).await;
    assert_eq!(lab.get(&sandbox).await.unwrap().active_at_ms, 700);
    lab.store.touch(lab.epoch, &sandbox.id, 600).await.unwrap();
    assert_eq!(lab.get(&sandbox).await.unwrap().active_at_ms, 700);
}

pub(super) async fn l6_who_is_used_meanwhile_does_not_idle(lab: &Lab) {
    let sandbox = Sandbox { active_at_ms: 100, ..lab.new_sandbox(1) };
    lab.put(&sandbox).await;
    let idle = |since_ms| {
        let next = Sandbox { version: sandbox.version + 1, active_at_ms: since_ms, ..sandbox.clone() };
        Change { unused_since_ms: Some(since_ms), ..change(&next) }
    };
    lab.store.touch(lab.epoch, &sandbox.id, 500).await.unwrap();
    let before = lab.lines().await;
    let refused = lab.store.commit(lab.epoch, idle(100)).await;
    assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
    assert_eq!((lab.get(&sandbox).await.unwrap().version, lab.lines().await), (sandbox.version, before));
    lab.store.commit(lab.epoch, idle(500)).await.unwrap();
}
