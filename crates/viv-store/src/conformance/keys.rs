use std::sync::Arc;

use super::Lab;
use super::lab::{at_once, note};
use crate::record::{ApiKey, KeyScope};

/// A key with this id.
pub(super) fn key(id: &str, created_at_ms: u64) -> ApiKey {
    ApiKey {
        id: id.to_owned(),
        name: "for tests".to_owned(),
        scope: KeyScope::Project { project: "p".parse().unwrap() },
        hash: [0xab; 32],
        created_at_ms,
        expires_at_ms: None,
        revoked_at_ms: None,
    }
}

pub(super) async fn s3_are_kept_and_replaced_with_a_line(lab: &Lab) {
    assert!(lab.store.keys().await.unwrap().is_empty());
    let mut keys = [key("key_b", 1), key("key_c", 2), key("key_a", 2)];
    keys[0].scope = KeyScope::Admin;
    keys[1].scope = KeyScope::ReadOnly { project: "q".parse().unwrap() };
    for key in &keys {
        lab.store.put_key(lab.epoch, key.clone(), note(1, "made")).await.unwrap();
    }
    keys[1].revoked_at_ms = Some(9);
    lab.store.put_key(lab.epoch, keys[1].clone(), note(9, "revoked")).await.unwrap();
    let [first, second, third] = keys;
    assert_eq!(lab.store.keys().await.unwrap(), [first, third, second], "oldest first");
    let lines = lab.lines().await;
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[3].line, note(9, "revoked"));
    assert_eq!(*lab.store.tail().borrow(), lines[3].cursor);
}

pub(super) async fn meta_is_set_once(lab: &Lab) {
    assert_eq!(lab.store.meta("m").await.unwrap(), None);
    assert_eq!(lab.store.set_meta_once(lab.epoch, "m", "one").await.unwrap(), "one");
    assert_eq!(lab.store.set_meta_once(lab.epoch, "m", "two").await.unwrap(), "one");
    assert_eq!(lab.store.set_meta_once(lab.epoch, "n", "").await.unwrap(), "");
    assert_eq!(lab.store.meta("m").await.unwrap().as_deref(), Some("one"));
    assert_eq!(lab.store.meta("n").await.unwrap().as_deref(), Some(""));
}

pub(super) async fn meta_of_many_at_once_is_one(lab: &Lab) {
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let answers = at_once(30, |at| {
        let store = Arc::clone(&store);
        async move { store.set_meta_once(epoch, "m", &at.to_string()).await.unwrap() }
    })
    .await;
    let there = lab.store.meta("m").await.unwrap().unwrap();
    assert!(answers.iter().all(|answer| *answer == there), "{answers:?}");
}

pub(super) async fn meta_is_put_and_taken_away_with_a_line(lab: &Lab) {
    lab.store.put_meta(lab.epoch, "m", Some("one"), note(1, "put")).await.unwrap();
    lab.store.put_meta(lab.epoch, "m", Some("two"), note(2, "put again")).await.unwrap();
    assert_eq!(lab.store.meta("m").await.unwrap().as_deref(), Some("two"));
    lab.store.put_meta(lab.epoch, "m", None, note(3, "taken away")).await.unwrap();
    assert_eq!(lab.store.meta("m").await.unwrap(), None);
    assert_eq!(lab.lines().await.len(), 3);
}
