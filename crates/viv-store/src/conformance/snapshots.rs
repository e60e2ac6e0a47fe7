//! Snapshots: rows that come and go with their sandbox's record, and what is in use stays (L11).

use std::collections::BTreeMap;
use std::sync::Arc;

use viv_core::lifecycle::{Actor, Phase, PhaseName, Sandbox};
use viv_core::snapshot::{Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::Project;
use viv_core::{Generation, SnapshotId};

use super::Lab;
use super::lab::{MANY, at_once, change, idempotency, limited, note, phase};
use crate::error::StoreError;
use crate::record::{Change, Idempotency, SnapshotQuery};

fn id(text: &str) -> SnapshotId {
    text.parse().expect("an id")
}

/// A row that is ready.
pub(super) fn row(_: &Lab, name: &str, of: Option<&Sandbox>, created_at_ms: u64) -> Snapshot {
    Snapshot {
        id: id(name),
        project: of.map_or_else(Project::default, |of| of.project.clone()),
        sandbox: of.map(|of| of.id.clone()),
        generation: Generation::FIRST,
        parent: None,
        kind: SnapshotKind::Manual,
        name: Some("before-the-change".parse().expect("a name")),
        labels: BTreeMap::from([("why".to_owned(), "ä'--".to_owned())]),
        state: SnapshotState::Ready,
        version: 1,
        created_at_ms,
        by: Actor::part("suite"),
        seen: None,
        memory: None,
        fork: None,
    }
}

fn with(sandbox: &Sandbox, rows: Vec<Snapshot>) -> Change {
    Change { snapshots: rows, ..change(sandbox) }
}

/// The next version of a row, in this state.
fn next(row: &Snapshot, state: SnapshotState) -> Snapshot {
    Snapshot { version: row.version + 1, state, ..row.clone() }
}

async fn put(lab: &Lab, row: &Snapshot) -> Result<(), StoreError> {
    lab.store.put_snapshot(lab.epoch, row.clone(), Vec::new()).await.map(drop)
}

async fn forget(lab: &Lab, row: &Snapshot) -> Result<(), StoreError> {
    lab.store.forget_snapshot(lab.epoch, &row.id, Vec::new()).await.map(drop)
}

async fn get(lab: &Lab, row: &Snapshot) -> Option<Snapshot> {
    lab.store.snapshot(&row.id).await.unwrap()
}

pub(super) async fn l11_are_written_with_the_record_or_not_at_all(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let saved = row(lab, "snp_a", Some(&sandbox), 2);
    let stale = sandbox.clone();
    sandbox.version += 1;
    sandbox.saved = Some(saved.id.clone());
    lab.store.commit(lab.epoch, with(&sandbox, vec![saved.clone()])).await.unwrap();
    assert_eq!(get(lab, &saved).await, Some(saved.clone()));
    assert_eq!(lab.store.users(&saved.id, 10).await.unwrap(), [sandbox.id.clone()]);
    // Whoever was too late, because it was deleted for instance, leaves no row.
    let late = row(lab, "snp_b", Some(&sandbox), 3);
    let stale = Sandbox { version: stale.version + 1, ..stale };
    let refused = lab.store.commit(lab.epoch, with(&stale, vec![late.clone()])).await;
    assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
    assert_eq!(get(lab, &late).await, None);
    // Nor does one of whose rows one is refused.
    let next_version = Sandbox { version: sandbox.version + 1, ..sandbox.clone() };
    let refused = lab.store.commit(lab.epoch, with(&next_version, vec![late.clone(), saved])).await;
    assert!(matches!(refused, Err(StoreError::SnapshotConflict { expected: 0, found: 1, .. })), "{refused:?}");
    assert_eq!(get(lab, &late).await, None);
    assert_eq!(lab.get(&sandbox).await, Some(sandbox));
}

pub(super) async fn l11_a_stale_version_conflicts(lab: &Lab) {
    let first = row(lab, "snp_a", None, 1);
    let second = next(&first, SnapshotState::Removing);
    let refused = put(lab, &second).await;
    assert!(matches!(refused, Err(StoreError::SnapshotConflict { expected: 1, found: 0, .. })), "{refused:?}");
    put(lab, &first).await.unwrap();
    assert!(matches!(put(lab, &first).await, Err(StoreError::SnapshotConflict { .. })));
    put(lab, &second).await.unwrap();
    assert!(matches!(put(lab, &second).await, Err(StoreError::SnapshotConflict { .. })));
    assert_eq!(get(lab, &first).await, Some(second));
    let zero = Snapshot { version: 0, ..row(lab, "snp_z", None, 1) };
    assert!(matches!(put(lab, &zero).await, Err(StoreError::Corrupt { .. })));
}

pub(super) async fn l11_what_is_in_use_does_not_go(lab: &Lab) {
    let saved = row(lab, "snp_a", None, 1);
    put(lab, &saved).await.unwrap();
    let removing = next(&saved, SnapshotState::Removing);
    for field in 0..3 {
        let mut user = lab.new_sandbox(2);
        let place = match field {
            0 => &mut user.saved,
            1 => &mut user.origin,
            _ => &mut user.rollback,
        };
        *place = Some(saved.id.clone());
        lab.put(&user).await;
        for refused in [put(lab, &removing).await, forget(lab, &saved).await] {
            let by = match refused {
                Err(StoreError::SnapshotInUse { by, .. }) => by,
                other => panic!("{other:?}"),
            };
            assert_eq!(by, [user.id.clone()]);
        }
        // A tombstone uses nothing, nor does who begins with something else now.
        if field == 0 {
            lab.put_next(&mut user, |user| user.phase = Phase::Stopped).await;
        } else {
            lab.put_next(&mut user, |user| (user.saved, user.origin, user.rollback) = (None, None, None)).await;
        }
        assert!(lab.store.users(&saved.id, 10).await.unwrap().is_empty());
    }
    let refused = forget(lab, &saved).await;
    assert!(matches!(refused, Err(StoreError::SnapshotConflict { .. })), "it is to be removed first: {refused:?}");
    put(lab, &removing).await.unwrap();
    forget(lab, &removing).await.unwrap();
    assert_eq!(get(lab, &saved).await, None);
}

pub(super) async fn l11_nothing_begins_with_what_is_not_ready(lab: &Lab) {
    let saved = row(lab, "snp_a", None, 1);
    let beginning = Sandbox { origin: Some(saved.id.clone()), ..lab.new_sandbox(2) };
    let missing = |answer: Result<_, StoreError>| matches!(answer, Err(StoreError::SnapshotMissing { .. }));
    assert!(missing(lab.commit(&beginning).await), "there is none");
    put(lab, &Snapshot { state: SnapshotState::Saving, ..saved.clone() }).await.unwrap();
    assert!(missing(lab.commit(&beginning).await), "it is being made");
    put(lab, &next(&saved, SnapshotState::Ready)).await.unwrap();
    lab.put(&beginning).await;
    // Whoever began with it before is written on, whatever becomes of it.
    let mut other = Sandbox { origin: Some(id("snp_b")), ..lab.new_sandbox(3) };
    let own = Snapshot { id: id("snp_b"), ..saved.clone() };
    lab.store.commit(lab.epoch, with(&other, vec![own.clone()])).await.expect("with a row that comes with it");
    lab.put_next(&mut other, |other| other.phase = phase(PhaseName::Ready)).await;
    lab.put_next(&mut other, |other| other.origin = None).await;
    put(lab, &next(&own, SnapshotState::Removing)).await.unwrap();
    let again = Sandbox { version: other.version + 1, origin: Some(own.id.clone()), ..other };
    assert!(missing(lab.commit(&again).await), "it is being removed");
}

pub(super) async fn l11_of_a_use_and_a_removal_at_once_one_wins(lab: &Lab) {
    for round in 0..20_u64 {
        let saved = row(lab, &format!("snp_{round}"), None, round + 1);
        put(lab, &saved).await.unwrap();
        let user = Sandbox { origin: Some(saved.id.clone()), ..lab.new_sandbox(1) };
        let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
        let (using, removing) = (change(&user), next(&saved, SnapshotState::Removing));
        let answers = at_once(2, |at| {
            let (store, using, removing) = (Arc::clone(&store), using.clone(), removing.clone());
            async move {
                match at {
                    0 => store.commit(epoch, using).await.is_ok(),
                    _ => store.put_snapshot(epoch, removing, Vec::new()).await.is_ok(),
                }
            }
        })
        .await;
        assert_eq!(answers.iter().filter(|won| **won).count(), 1, "{answers:?}");
        assert_eq!(lab.get(&user).await.is_some(), answers[0]);
    }
}

pub(super) async fn l11_a_fork_makes_all_or_none(lab: &Lab) {
    let saved = row(lab, "snp_a", None, 1);
    let one = Sandbox { origin: Some(saved.id.clone()), ..lab.named(2, "one") };
    let two = Sandbox { origin: Some(saved.id.clone()), ..lab.named(2, "one") };
    let changes = vec![with(&one, vec![saved.clone()]), change(&two)];
    let refused = lab.store.commit_all(lab.epoch, changes).await;
    assert!(matches!(refused, Err(StoreError::NameTaken { .. })), "{refused:?}");
    assert_eq!((lab.get(&one).await, get(lab, &saved).await), (None, None));
    assert!(lab.lines().await.is_empty());
    let two = Sandbox { name: Some("two".parse().unwrap()), ..two };
    let changes = vec![with(&one, vec![saved.clone()]), change(&two)];
    let cursor = lab.store.commit_all(lab.epoch, changes).await.unwrap();
    let lines = lab.lines().await;
    assert_eq!((lines.len(), lines.last().map(|line| line.cursor)), (2, Some(cursor)));
    let mut users = lab.store.users(&saved.id, 10).await.unwrap();
    users.sort();
    let mut both = [one.id, two.id];
    both.sort();
    assert_eq!(users, both);
    assert_eq!(lab.store.users(&saved.id, 1).await.unwrap().len(), 1);
}

pub(super) async fn l18_a_fork_counts_all_of_its_own(lab: &Lab) {
    let all: Vec<Sandbox> = (0..4).map(|_| lab.new_sandbox(1)).collect();
    let refused = lab.store.commit_all(lab.epoch, all.iter().map(|one| limited(one, 3, 3)).collect()).await;
    assert!(matches!(refused, Err(StoreError::Quota { used: 3, max: 3, .. })), "{refused:?}");
    assert_eq!(lab.get(&all[0]).await, None);
    lab.store.commit_all(lab.epoch, all.iter().map(|one| limited(one, 4, 4)).collect()).await.unwrap();
}

pub(super) async fn are_listed_newest_first_by_every_filter(lab: &Lab) {
    let (one, two) = (lab.new_sandbox(1), Sandbox { project: "other".parse().unwrap(), ..lab.new_sandbox(2) });
    let mut rows = Vec::new();
    for at in 0..12_u64 {
        let of = [Some(&one), Some(&two), None][at as usize % 3];
        let mut row = row(lab, &format!("snp_{:02}", 20 - at), of, 100 + at / 2);
        if at % 4 == 0 {
            row.state = SnapshotState::Saving;
        }
        put(lab, &row).await.unwrap();
        rows.push(row);
    }
    rows.sort_by(|a, b| (b.created_at_ms, &b.id).cmp(&(a.created_at_ms, &a.id)));
    for project in [None, Some(Project::default()), Some("other".parse().unwrap())] {
        for sandbox in [None, Some(one.id.clone()), Some(two.id.clone())] {
            for unsettled in [false, true] {
                let mut query = SnapshotQuery {
                    project: project.clone(),
                    sandbox: sandbox.clone(),
                    unsettled,
                    after: None,
                    limit: 2,
                };
                let fits = |row: &&Snapshot| {
                    project.as_ref().is_none_or(|project| row.project == *project)
                        && sandbox.as_ref().is_none_or(|sandbox| row.sandbox.as_ref() == Some(sandbox))
                        && (!unsettled || row.state != SnapshotState::Ready)
                };
                let expected: Vec<Snapshot> = rows.iter().filter(fits).cloned().collect();
                let mut listed = Vec::new();
                loop {
                    let page = lab.store.snapshots(&query).await.unwrap();
                    assert!(page.items.len() <= 2);
                    listed.extend(page.items);
                    let Some(next) = page.next else { break };
                    query.after = Some(next);
                }
                assert_eq!(listed, expected, "{query:?}");
            }
        }
    }
    let bad = SnapshotQuery { after: Some("nonsense".to_owned()), limit: MANY, ..SnapshotQuery::default() };
    assert!(matches!(lab.store.snapshots(&bad).await, Err(StoreError::BadCursor)));
}

pub(super) async fn are_forgotten_with_a_line_once(lab: &Lab) {
    let row = Snapshot { state: SnapshotState::Saving, ..row(lab, "snp_a", None, 1) };
    lab.store.put_snapshot(lab.epoch, row.clone(), vec![note(1, "asked for")]).await.unwrap();
    for _ in 0..2 {
        lab.store.forget_snapshot(lab.epoch, &row.id, vec![note(2, "failed")]).await.unwrap();
    }
    assert_eq!(get(lab, &row).await, None);
    assert_eq!(lab.lines().await.len(), 2);
}

pub(super) async fn l1_one_that_came_to_nothing_frees_its_keys(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let made = |key: &str, row: &Snapshot| Idempotency {
        made: Some(format!("{{\"snapshot\":\"{}\"}}", row.id)),
        ..idempotency(&sandbox.project, key)
    };
    let saving = |name: &str| Snapshot { state: SnapshotState::Saving, ..row(lab, name, Some(&sandbox), 2) };
    let (failed, kept) = (saving("snp_a"), saving("snp_b"));
    let keys = [made("failed", &failed), made("kept", &kept)];
    let of = sandbox.clone();
    for (row, key) in [&failed, &kept].into_iter().zip(&keys) {
        sandbox.version += 1;
        let change = Change { idempotency: Some(key.clone()), ..with(&sandbox, vec![row.clone()]) };
        lab.store.commit(lab.epoch, change).await.unwrap();
    }
    put(lab, &next(&kept, SnapshotState::Ready)).await.unwrap();
    put(lab, &Snapshot { version: 3, ..next(&kept, SnapshotState::Removing) }).await.unwrap();
    for row in [&failed, &kept] {
        forget(lab, row).await.unwrap();
    }
    assert_eq!(lab.store.remembered(&keys[0]).await.unwrap(), None, "nothing was made under it");
    let known = lab.store.remembered(&keys[1]).await.unwrap().expect("something was, though it is gone");
    assert_eq!(known.sandbox, of.id);
}
