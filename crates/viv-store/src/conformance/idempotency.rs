use std::sync::Arc;

use viv_core::lifecycle::{PhaseName, Sandbox};

use super::Lab;
use super::lab::{MANY, at_once, change, everything, idempotency, keyed, phase};
use crate::error::StoreError;
use crate::record::{Change, Idempotency, Remembered};

pub(super) async fn l1_two_hundred_at_once_make_one(lab: &Lab) {
    let sandboxes: Vec<Sandbox> = (0..200).map(|at| lab.new_sandbox(at)).collect();
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let answers = at_once(sandboxes.len(), |at| {
        let (store, sandbox) = (Arc::clone(&store), sandboxes[at].clone());
        async move { store.commit(epoch, keyed(&sandbox, "one")).await }
    })
    .await;
    let made = lab.store.list(&everything()).await.unwrap().items;
    assert_eq!(made.len(), 1);
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    for answer in answers.into_iter().filter(Result::is_err) {
        assert!(matches!(&answer, Err(StoreError::Repeated(known)) if known.sandbox == made[0].id), "{answer:?}");
    }
    assert_eq!(lab.lines().await.len(), 1);
}

pub(super) async fn l1_a_repeat_tells_what_was_made(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    let key = idempotency(&sandbox.project, "one");
    assert_eq!(lab.store.remembered(&key).await.unwrap(), None);
    lab.store.commit(lab.epoch, keyed(&sandbox, "one")).await.unwrap();
    let known = Remembered { body_hash: key.body_hash, sandbox: sandbox.id.clone(), at_ms: key.at_ms, made: None };
    // Also after it is over, and with another body: the caller compares the hash.
    for name in [PhaseName::Ready, PhaseName::Stopped] {
        lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(name)).await;
        let other = Idempotency { body_hash: [8; 32], at_ms: 9_999, ..key.clone() };
        assert_eq!(lab.store.remembered(&other).await.unwrap().as_ref(), Some(&known));
        let repeat = Change { idempotency: Some(other), ..keyed(&lab.new_sandbox(2), "one") };
        let answer = lab.store.commit(lab.epoch, repeat).await;
        assert!(matches!(&answer, Err(StoreError::Repeated(told)) if **told == known), "{answer:?}");
    }
}

pub(super) async fn l1_keys_are_per_project_and_route(lab: &Lab) {
    let first = lab.new_sandbox(1);
    lab.store.commit(lab.epoch, keyed(&first, "one")).await.unwrap();
    let theirs = Sandbox { project: "theirs".parse().unwrap(), ..lab.new_sandbox(2) };
    lab.store.commit(lab.epoch, keyed(&theirs, "one")).await.expect("another project");
    let key = Idempotency { route: "fork".to_owned(), ..idempotency(&first.project, "one") };
    let other_route = Change { idempotency: Some(key), ..keyed(&lab.new_sandbox(3), "one") };
    lab.store.commit(lab.epoch, other_route).await.expect("another route");
    lab.store.commit(lab.epoch, keyed(&lab.new_sandbox(4), "two")).await.expect("another key");
}

pub(super) async fn l1_a_refused_create_leaves_its_key_free(lab: &Lab) {
    lab.put(&lab.named(1, "a")).await;
    let twin = lab.named(2, "a");
    let refused = lab.store.commit(lab.epoch, keyed(&twin, "one")).await;
    assert!(matches!(refused, Err(StoreError::NameTaken { .. })), "{refused:?}");
    lab.store.commit(lab.epoch, keyed(&Sandbox { name: None, ..twin }, "one")).await.expect("the key was not used");
}

pub(super) async fn l1_what_was_made_beside_a_record_is_told_and_kept_for_its_time(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let made = Some("snp_1".to_owned());
    let key = Idempotency { made: made.clone(), ..idempotency(&sandbox.project, "one") };
    sandbox.version += 1;
    let written = Change { idempotency: Some(key.clone()), ..change(&sandbox) };
    lab.store.commit(lab.epoch, written.clone()).await.unwrap();
    sandbox.version += 1;
    let repeat = lab.store.commit(lab.epoch, Change { sandbox: sandbox.clone(), ..written }).await;
    assert!(matches!(&repeat, Err(StoreError::Repeated(known)) if known.made == made), "{repeat:?}");
    assert_eq!(lab.store.get(&sandbox.id).await.unwrap().unwrap().version, 2, "nothing was written");
    // However long the sandbox lives.
    lab.store.retain(lab.epoch, key.at_ms, MANY).await.unwrap();
    assert_eq!(lab.store.remembered(&key).await.unwrap().and_then(|known| known.made), made);
    lab.store.retain(lab.epoch, key.at_ms + 1, MANY).await.unwrap();
    assert_eq!(lab.store.remembered(&key).await.unwrap(), None);
}
