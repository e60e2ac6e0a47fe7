use std::sync::Arc;

use viv_core::lifecycle::{PhaseName, Sandbox};

use super::Lab;
use super::lab::{at_once, change, owner, phase};
use crate::error::StoreError;
use crate::record::{Lease, LeaseKind};

const KIND: LeaseKind = LeaseKind::Lifecycle;

async fn take(lab: &Lab, on: &viv_core::SandboxId, holder: &str, now_ms: u64) -> Result<Lease, StoreError> {
    lab.store.lease(lab.epoch, on, KIND, holder, now_ms, 100).await
}

/// A sandbox that has a record.
async fn recorded(lab: &Lab) -> viv_core::SandboxId {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    sandbox.id
}

pub(super) async fn l15_are_held_by_one(lab: &Lab) {
    let on = recorded(lab).await;
    assert!(lab.store.leases(&on).await.unwrap().is_empty());
    let lease = take(lab, &on, "a", 1_000).await.unwrap();
    assert_eq!((lease.holder.as_str(), lease.since_ms, lease.expires_at_ms), ("a", 1_000, 1_100));
    let refused = take(lab, &on, "b", 1_099).await;
    assert!(matches!(&refused, Err(StoreError::Leased(held)) if **held == lease), "{refused:?}");
    assert_eq!(lab.store.leases(&on).await.unwrap(), std::slice::from_ref(&lease));
    lab.store.release(lab.epoch, &on, KIND, lease.token).await.unwrap();
    assert!(lab.store.leases(&on).await.unwrap().is_empty());
    assert!(take(lab, &on, "b", 1_099).await.unwrap().token > lease.token);
}

pub(super) async fn l15_are_renewed_under_the_same_token(lab: &Lab) {
    let on = recorded(lab).await;
    let lease = take(lab, &on, "a", 1_000).await.unwrap();
    let renewed = take(lab, &on, "a", 1_050).await.unwrap();
    assert_eq!(renewed, Lease { expires_at_ms: 1_150, ..lease.clone() });
    assert!(matches!(take(lab, &on, "b", 1_149).await, Err(StoreError::Leased(_))));
    assert_eq!(lab.store.leases(&on).await.unwrap(), [renewed]);
}

pub(super) async fn l15_expired_ones_are_taken_under_a_new_token(lab: &Lab) {
    let on = recorded(lab).await;
    let first = take(lab, &on, "a", 1_000).await.unwrap();
    let second = take(lab, &on, "b", 1_100).await.expect("it has expired");
    assert!(second.token > first.token);
    assert!(matches!(take(lab, &on, "a", 1_101).await, Err(StoreError::Leased(_))));
    // Who let it expire does not know whether somebody had it in between.
    let third = take(lab, &on, "b", 2_000).await.unwrap();
    assert!(third.token > second.token);
    assert_eq!(third.since_ms, 2_000);
}

pub(super) async fn l15_kinds_and_sandboxes_are_apart(lab: &Lab) {
    let (one, two) = (recorded(lab).await, recorded(lab).await);
    for kind in [LeaseKind::Lifecycle, LeaseKind::Start] {
        for on in [&one, &two] {
            let holder = format!("{kind:?} {on}");
            lab.store.lease(lab.epoch, on, kind, &holder, 1, 100).await.expect("nobody has it");
        }
    }
    let kinds: Vec<LeaseKind> = lab.store.leases(&one).await.unwrap().iter().map(|lease| lease.kind).collect();
    assert_eq!(kinds, [LeaseKind::Lifecycle, LeaseKind::Start]);
}

pub(super) async fn l15_tokens_grow_over_everything(lab: &Lab) {
    let ids = [recorded(lab).await, recorded(lab).await, recorded(lab).await];
    let mut last = viv_core::FencingToken(0);
    for round in 0..4_u64 {
        let epoch = lab.store.own(owner("next")).await.unwrap();
        for on in &ids {
            let lease = lab.store.lease(epoch, on, KIND, "a", round, 1).await.unwrap();
            assert!(lease.token > last);
            last = lease.token;
            if round % 2 == 0 {
                lab.store.release(epoch, on, KIND, lease.token).await.unwrap();
            }
        }
    }
}

pub(super) async fn l15_of_many_at_once_one_wins(lab: &Lab) {
    let (store, epoch, on) = (Arc::clone(&lab.store), lab.epoch, recorded(lab).await);
    let answers = at_once(40, |at| {
        let (store, on) = (Arc::clone(&store), on.clone());
        async move { store.lease(epoch, &on, KIND, &format!("holder {at}"), 1, 100).await }
    })
    .await;
    let held: Vec<&Lease> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
    assert_eq!(held.len(), 1);
    for answer in answers.iter().filter(|answer| answer.is_err()) {
        assert!(matches!(answer, Err(StoreError::Leased(lease)) if **lease == *held[0]), "{answer:?}");
    }
}

pub(super) async fn l15_a_late_release_changes_nothing(lab: &Lab) {
    let on = recorded(lab).await;
    let first = take(lab, &on, "a", 1_000).await.unwrap();
    let second = take(lab, &on, "b", 1_100).await.unwrap();
    lab.store.release(lab.epoch, &on, KIND, first.token).await.unwrap();
    lab.store.release(lab.epoch, &on, LeaseKind::Start, second.token).await.unwrap();
    lab.store.release(lab.epoch, &lab.id(), KIND, second.token).await.unwrap();
    assert_eq!(lab.store.leases(&on).await.unwrap(), [second]);
}

pub(super) async fn l15_a_new_owner_takes_them_anew(lab: &Lab) {
    let on = recorded(lab).await;
    let first = take(lab, &on, "a", 1_000).await.unwrap();
    let epoch = lab.store.own(owner("next")).await.unwrap();
    assert!(lab.store.leases(&on).await.unwrap().is_empty(), "nobody holds it under this owner");
    // Also by who has the same name: it is another process.
    let second = lab.store.lease(epoch, &on, KIND, "a", 1_001, 100).await.unwrap();
    assert!(second.token > first.token);
    assert_eq!(second.since_ms, 1_001);
}

pub(super) async fn incident_35_go_in_the_transaction_that_ends_their_sandbox(lab: &Lab) {
    let (mut sandbox, other) = (lab.new_sandbox(1), lab.new_sandbox(2));
    lab.put(&sandbox).await;
    lab.put(&other).await;
    for on in [&sandbox.id, &other.id] {
        take(lab, on, "a", 1_000).await.unwrap();
        lab.store.lease(lab.epoch, on, LeaseKind::Start, "a", 1_000, 100).await.unwrap();
    }
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopping)).await;
    assert_eq!(lab.store.leases(&sandbox.id).await.unwrap().len(), 2, "it is not over yet");
    // Refused: neither is it over, nor are they given back.
    let stale = Sandbox { phase: phase(PhaseName::Stopped), ..sandbox.clone() };
    lab.store.commit(lab.epoch, change(&stale)).await.unwrap_err();
    assert_eq!(lab.store.leases(&sandbox.id).await.unwrap().len(), 2);
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    assert_eq!(lab.store.leases(&sandbox.id).await.unwrap(), []);
    assert_eq!(lab.store.leases(&other.id).await.unwrap().len(), 2, "those of others stay");
    assert_eq!(lab.store.stray_leases(10).await.unwrap(), [], "so none is on what is over");
}

pub(super) async fn l15_tokens_are_raised_above_what_was_seen(lab: &Lab) {
    let on = recorded(lab).await;
    let first = take(lab, &on, "a", 1_000).await.unwrap();
    let seen = viv_core::FencingToken(first.token.0 + 1_000);
    lab.store.raise_token(lab.epoch, seen).await.unwrap();
    assert_eq!(take(lab, &on, "a", 1_001).await.unwrap().token, first.token, "what is held is renewed as it is");
    lab.store.release(lab.epoch, &on, KIND, first.token).await.unwrap();
    let above = take(lab, &on, "a", 1_002).await.unwrap().token;
    assert!(above > seen, "{above:?}");
    // What is behind already changes nothing.
    lab.store.raise_token(lab.epoch, first.token).await.unwrap();
    assert!(take(lab, &recorded(lab).await, "a", 1_003).await.unwrap().token > above);
    lab.store.own(owner("next")).await.unwrap();
    let late = lab.store.raise_token(lab.epoch, viv_core::FencingToken(u64::from(u32::MAX))).await;
    assert!(matches!(late, Err(StoreError::Superseded)), "{late:?}");
}

pub(super) async fn l20_are_taken_only_on_what_is_not_over(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    let over = |answer: Result<Lease, StoreError>| matches!(answer, Err(StoreError::Over { .. }));
    assert!(over(take(lab, &sandbox.id, "a", 1_000).await), "nobody knows it");
    lab.put(&sandbox).await;
    let lease = take(lab, &sandbox.id, "a", 1_000).await.unwrap();
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopping)).await;
    assert_eq!(take(lab, &sandbox.id, "a", 1_010).await.unwrap().token, lease.token, "what is being ended is held");
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    for kind in [LeaseKind::Lifecycle, LeaseKind::Start] {
        assert!(over(lab.store.lease(lab.epoch, &sandbox.id, kind, "a", 1_020, 100).await));
    }
    assert_eq!(lab.store.leases(&sandbox.id).await.unwrap(), []);
}

pub(super) async fn l15_a_token_that_nobody_holds_is_greater_than_all_before(lab: &Lab) {
    let on = recorded(lab).await;
    let lease = take(lab, &on, "a", 1_000).await.unwrap();
    let drawn = lab.store.draw_token(lab.epoch).await.unwrap();
    let again = lab.store.draw_token(lab.epoch).await.unwrap();
    assert!(lease.token < drawn && drawn < again);
    assert_eq!(take(lab, &on, "a", 1_001).await.unwrap().token, lease.token, "what is held stays as it is");
    assert!(take(lab, &recorded(lab).await, "a", 1_002).await.unwrap().token > again);
    let seen = viv_core::FencingToken(again.0 + 1_000);
    lab.store.raise_token(lab.epoch, seen).await.unwrap();
    assert!(lab.store.draw_token(lab.epoch).await.unwrap() > seen);
}
