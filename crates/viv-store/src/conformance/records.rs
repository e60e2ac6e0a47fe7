use std::sync::Arc;

use viv_core::lifecycle::{
    Actor, Check, Entry, EntryKind, Finding, FreezeStep, KeepAwake, Observed, Phase, PhaseName, PortCheck, Sandbox,
};

use super::Lab;
use super::lab::{at_once, change, everything, keyed, limited, phase};
use crate::error::StoreError;
use crate::journal::JournalFilter;
use crate::record::Change;

/// A record in which nothing is at its default.
fn full(lab: &Lab) -> Sandbox {
    let mut sandbox = lab.named(1_000, "full");
    let check = Check { finding: Finding::Unhealthy, at_ms: 1, took_ms: 2, message: Some("näh \"\\\u{1}".to_owned()) };
    let by = Actor { who: "key_1".to_owned(), from: Some("192.0.2.1".to_owned()) };
    sandbox.labels = [("a".to_owned(), "ä'--\n".to_owned()), ("b".to_owned(), String::new())].into();
    sandbox.spec.env = [("PATH".to_owned(), "/bin".to_owned())].into();
    sandbox.spec.ports = vec![80, 65_535];
    sandbox.entry = Some(Entry { kind: EntryKind::Ensure, by: by.clone(), at_ms: 5 });
    sandbox.held_by = Some(by.clone());
    sandbox.cause.by = by;
    sandbox.cause.message = Some("because".to_owned());
    sandbox.held = true;
    sandbox.evidence.exec = Some(check.clone());
    sandbox.evidence.ports = vec![PortCheck { port: 80, check }];
    sandbox.observed = Some(Observed { state: "running".to_owned(), via: "list".to_owned(), at_ms: 9 });
    sandbox.saved = Some("snp_2".parse().unwrap());
    sandbox.expires_at_ms = Some(7);
    sandbox.keep_awake = [("k".to_owned(), KeepAwake { reason: "thinks".to_owned(), until_ms: 8 })].into();
    sandbox
}

pub(super) async fn what_is_written_is_read_back(lab: &Lab) {
    let mut sandbox = full(lab);
    let saved = super::snapshots::row(lab, "snp_2", Some(&sandbox), 1);
    lab.store.put_snapshot(lab.epoch, saved, Vec::new()).await.unwrap();
    lab.put(&sandbox).await;
    assert_eq!(lab.get(&sandbox).await.as_ref(), Some(&sandbox));
    let phases = PhaseName::ALL.map(phase).into_iter();
    let others = [Phase::Frozen { step: FreezeStep::Done }, Phase::Failed { work: None }];
    for phase in phases.chain(others) {
        lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase).await;
        assert_eq!(lab.get(&sandbox).await.as_ref(), Some(&sandbox));
        assert_eq!(lab.store.list(&everything()).await.unwrap().items, [sandbox.clone()]);
    }
}

pub(super) async fn what_was_never_written_is_none(lab: &Lab) {
    assert_eq!(lab.get(&lab.new_sandbox(1)).await, None);
    assert!(lab.store.list(&everything()).await.unwrap().items.is_empty());
    assert!(lab.store.count(None).await.unwrap().is_empty());
    assert!(lab.lines().await.is_empty());
}

pub(super) async fn acknowledged_is_seen_at_once_by_others(lab: &Lab) {
    let other = lab.world.another().await;
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    for _ in 0..50 {
        lab.put_next(&mut sandbox, |sandbox| sandbox.operations += 1).await;
        assert_eq!(other.get(&sandbox.id).await.unwrap().as_ref(), Some(&sandbox));
        assert_eq!(lab.get(&sandbox).await.as_ref(), Some(&sandbox));
        let newest = other.journal_tail(None, &JournalFilter::default(), 1).await.unwrap();
        assert_eq!(newest[0].line.data["version"], sandbox.version);
    }
}

pub(super) async fn a_stale_version_conflicts(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    lab.put_next(&mut sandbox, |_| ()).await;
    let before = lab.lines().await;
    for version in [1, 2, 4, 100] {
        let stale = Sandbox { version, held: true, ..sandbox.clone() };
        let Err(StoreError::Conflict { sandbox: id, expected, found }) = lab.commit(&stale).await else {
            panic!("version {version} was taken");
        };
        assert_eq!((id, expected, found), (sandbox.id.clone(), version - 1, 2));
    }
    assert_eq!(lab.get(&sandbox).await, Some(sandbox));
    assert_eq!(lab.lines().await, before);
}

pub(super) async fn a_new_one_that_is_there_conflicts(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    assert!(matches!(lab.commit(&sandbox).await, Err(StoreError::Conflict { expected: 0, found: 1, .. })));
}

pub(super) async fn a_change_of_nothing_conflicts(lab: &Lab) {
    let sandbox = Sandbox { version: 2, ..lab.new_sandbox(1) };
    assert!(matches!(lab.commit(&sandbox).await, Err(StoreError::Conflict { expected: 1, found: 0, .. })));
    assert_eq!(lab.get(&sandbox).await, None);
}

pub(super) async fn version_zero_is_refused(lab: &Lab) {
    let sandbox = Sandbox { version: 0, ..lab.new_sandbox(1) };
    assert!(matches!(lab.commit(&sandbox).await, Err(StoreError::Corrupt { .. })));
    assert_eq!(lab.get(&sandbox).await, None);
    assert!(lab.lines().await.is_empty());
}

pub(super) async fn of_many_at_once_one_wins_each_version(lab: &Lab) {
    const VERSIONS: u64 = 20;
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let wins = at_once(16, |_| {
        let (store, mut sandbox) = (Arc::clone(&store), sandbox.clone());
        async move {
            let mut won = Vec::new();
            while sandbox.version < VERSIONS {
                let next = Sandbox { version: sandbox.version + 1, ..sandbox.clone() };
                match store.commit(epoch, change(&next)).await {
                    Ok(_) => won.push(next.version),
                    Err(StoreError::Conflict { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
                sandbox = store.get(&sandbox.id).await.unwrap().unwrap();
            }
            won
        }
    })
    .await;
    let mut won: Vec<u64> = wins.into_iter().flatten().collect();
    won.sort_unstable();
    assert_eq!(won, (2..=VERSIONS).collect::<Vec<_>>());
    let told: Vec<u64> = lab.lines().await.iter().map(|line| line.line.data["version"].as_u64().unwrap()).collect();
    assert_eq!(told, (1..=VERSIONS).collect::<Vec<_>>());
}

pub(super) async fn a_refused_commit_leaves_nothing(lab: &Lab) {
    let there = lab.named(1, "there");
    lab.put(&there).await;
    let before = lab.lines().await;
    let new = lab.named(2, "new");
    let stale = Sandbox { version: 5, ..new.clone() };
    let twin = Sandbox { name: there.name.clone(), ..new.clone() };
    for refused in
        [keyed(&stale, "k"), keyed(&twin, "k"), Change { quota: limited(&new, 1, 1).quota, ..keyed(&new, "k") }]
    {
        let key = refused.idempotency.clone().unwrap();
        assert!(lab.store.commit(lab.epoch, refused).await.is_err());
        assert_eq!(lab.get(&new).await, None);
        assert_eq!(lab.lines().await, before);
        assert_eq!(lab.store.remembered(&key).await.unwrap(), None);
    }
    assert_eq!(lab.store.find(&new.project, new.name.as_ref().unwrap()).await.unwrap(), None);
    lab.store.commit(lab.epoch, keyed(&new, "k")).await.expect("nothing is in its way");
}

pub(super) async fn refusals_come_in_order(lab: &Lab) {
    let there = lab.named(1, "there");
    lab.store.commit(lab.epoch, keyed(&there, "k")).await.unwrap();
    let all_wrong = Sandbox { version: 3, ..lab.named(2, "there") };
    let change = |sandbox: &Sandbox, key: &str| Change { quota: limited(sandbox, 0, 0).quota, ..keyed(sandbox, key) };
    let refused = lab.store.commit(lab.epoch, change(&all_wrong, "k")).await;
    assert!(matches!(refused, Err(StoreError::Repeated(_))), "{refused:?}");
    let refused = lab.store.commit(lab.epoch, change(&all_wrong, "l")).await;
    assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
    let named = Sandbox { version: 1, ..all_wrong };
    let refused = lab.store.commit(lab.epoch, change(&named, "l")).await;
    assert!(matches!(refused, Err(StoreError::NameTaken { .. })), "{refused:?}");
    let limited = Sandbox { name: None, ..named.clone() };
    let refused = lab.store.commit(lab.epoch, change(&limited, "l")).await;
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    lab.store.own(super::lab::owner("second")).await.unwrap();
    let refused = lab.store.commit(lab.epoch, change(&named, "k")).await;
    assert!(matches!(refused, Err(StoreError::Superseded)), "{refused:?}");
}
