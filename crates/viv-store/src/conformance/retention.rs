use viv_core::lifecycle::{PhaseName, Sandbox};

use super::Lab;
use super::lab::{MANY, everything, idempotency, keyed, note, phase};
use crate::journal::{Cursor, JournalFilter};
use crate::record::{LeaseKind, ListQuery};

async fn retain(lab: &Lab, before_ms: u64) -> u64 {
    let touched = lab.store.retain(lab.epoch, before_ms, MANY).await.unwrap();
    assert_eq!(lab.store.retain(lab.epoch, before_ms, MANY).await.unwrap(), 0, "it was done");
    touched
}

pub(super) async fn j9_old_lines_are_forgotten(lab: &Lab) {
    for at_ms in [10, 30, 20, 40] {
        lab.store.append(lab.epoch, vec![note(at_ms, "x")]).await.unwrap();
    }
    let last = lab.lines().await[3].cursor;
    assert_eq!(retain(lab, 10).await, 0);
    assert_eq!(retain(lab, 25).await, 2);
    let left: Vec<u64> = lab.lines().await.iter().map(|line| line.line.at_ms).collect();
    assert_eq!(left, [30, 40]);
    assert_eq!(retain(lab, 1_000).await, 2);
    assert!(lab.lines().await.is_empty());
    // Followers hold cursors: none is given twice.
    let next = lab.store.append(lab.epoch, vec![note(50, "y")]).await.unwrap();
    assert!(next > last);
    assert_eq!(lab.store.journal(last, &JournalFilter::default(), MANY).await.unwrap().len(), 1);
    assert_eq!(lab.store.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap().len(), 1);
}

pub(super) async fn j9_keys_stay_while_the_sandbox_lives(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(5_000);
    let key = idempotency(&sandbox.project, "k");
    lab.store.commit(lab.epoch, keyed(&sandbox, "k")).await.unwrap();
    retain(lab, key.at_ms + 1).await;
    assert!(lab.store.remembered(&key).await.unwrap().is_some(), "it lives");
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    retain(lab, key.at_ms).await;
    assert!(lab.store.remembered(&key).await.unwrap().is_some(), "it is not old");
    retain(lab, key.at_ms + 1).await;
    assert_eq!(lab.store.remembered(&key).await.unwrap(), None);
}

pub(super) async fn j9_tombstones_shrink(lab: &Lab) {
    let mut over = lab.named(100, "a");
    over.labels.insert("k".to_owned(), "v".to_owned());
    over.spec.env.insert("TOKEN".to_owned(), "much".to_owned());
    over.saved = Some("snp_9".parse().unwrap());
    let living = Sandbox { name: Some("b".parse().unwrap()), id: lab.id(), ..over.clone() };
    let saved = super::snapshots::row(lab, "snp_9", Some(&over), 1);
    lab.store.put_snapshot(lab.epoch, saved, Vec::new()).await.unwrap();
    lab.put(&over).await;
    lab.put(&living).await;
    lab.put_next(&mut over, |over| {
        over.phase = phase(PhaseName::Stopped);
        over.phase_since_ms = 200;
        over.cause.message = Some("why".to_owned());
    })
    .await;
    lab.store.touch(lab.epoch, &over.id, 150).await.unwrap();
    retain(lab, 200).await;
    assert_eq!(lab.get(&over).await.unwrap().labels, over.labels, "it is not old");
    retain(lab, 201).await;
    let left = lab.get(&over).await.unwrap();
    assert!(left.labels.is_empty() && left.spec.env.is_empty() && left.saved.is_none());
    assert_eq!((&left.id, &left.name, &left.cause, &left.phase), (&over.id, &over.name, &over.cause, &over.phase));
    assert_eq!((left.created_at_ms, left.phase_since_ms, left.active_at_ms), (100, 200, 150));
    assert_eq!((left.version, left.generation), (over.version, over.generation));
    assert_eq!(lab.get(&living).await, Some(living));
    assert_eq!(lab.store.list(&everything()).await.unwrap().items.len(), 2);
    let labels = [("k".to_owned(), "v".to_owned())].into();
    let labelled = lab.store.list(&ListQuery { labels, ..everything() }).await.unwrap().items;
    assert_eq!(labelled.len(), 1, "what has no labels is not found by them");
}

pub(super) async fn j9_is_done_in_pieces(lab: &Lab) {
    for at in 0..10 {
        let mut sandbox = lab.new_sandbox(1);
        sandbox.labels.insert("k".to_owned(), "v".to_owned());
        lab.store.commit(lab.epoch, keyed(&sandbox, &at.to_string())).await.unwrap();
        lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    }
    let mut touched = 0;
    loop {
        let piece = lab.store.retain(lab.epoch, 5_000, 7).await.unwrap();
        assert!(piece <= 7, "{piece}");
        touched += piece;
        if piece == 0 {
            break;
        }
    }
    assert_eq!(touched, 20 + 10 + 10, "lines, keys, tombstones");
}

pub(super) async fn j9_old_leases_are_forgotten(lab: &Lab) {
    // Made later than what is forgotten, so that their lines are not in the way.
    let (old, new) = (lab.new_sandbox(9_000), lab.new_sandbox(9_000));
    lab.put(&old).await;
    lab.put(&new).await;
    let (old, new) = (old.id, new.id);
    lab.store.lease(lab.epoch, &old, LeaseKind::Start, "a", 1, 1).await.unwrap();
    let lease = lab.store.lease(lab.epoch, &new, LeaseKind::Start, "a", 1, 1_000).await.unwrap();
    assert_eq!(retain(lab, 500).await, 1);
    assert!(lab.store.leases(&old).await.unwrap().is_empty());
    assert_eq!(lab.store.leases(&new).await.unwrap(), [lease]);
}
