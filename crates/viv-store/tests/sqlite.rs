//! What is particular to the store in a file.

mod common;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{change, note, owner, sandbox};
use rusqlite::Connection;
use viv_store::{Cursor, JournalFilter, ListQuery, SqliteStore, Store, StoreError};

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test]
async fn s6_nobody_else_can_read_any_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    // Somebody was careless before.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
    let store = SqliteStore::open(&path).unwrap();
    let epoch = store.own(owner()).await.unwrap();
    store.append(epoch, vec![note("x")]).await.unwrap();
    store.backup(&folder.path().join("copy.db")).await.unwrap();
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() >= 4, "file, log, its index, copy: {files:?}");
    for file in files {
        assert_eq!(mode(&file), 0o600, "{}", file.display());
    }
}

#[tokio::test]
async fn it_holds_what_it_held_when_it_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a ? name % with #");
    let made = sandbox(1);
    let (epoch, token, cursor) = {
        let store = SqliteStore::open(&path).unwrap();
        let epoch = store.own(owner()).await.unwrap();
        store.commit(epoch, change(&made)).await.unwrap();
        let lease = store.lease(epoch, &made.id, viv_store::LeaseKind::Start, "a", 1, 1).await.unwrap();
        let cursor = store.append(epoch, vec![note("x")]).await.unwrap();
        store.retain(epoch, 1_000, 100).await.unwrap();
        (epoch, lease.token, cursor)
    };
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: std::collections::BTreeSet<_> = left.collect();
    let expected = ["a ? name % with #", "a ? name % with #-reserve"].map(str::to_owned);
    assert_eq!(left, expected.into(), "closing leaves one file, and what is kept for a full disk");
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(store.get(&made.id).await.unwrap(), Some(made.clone()));
    assert_eq!(*store.tail().borrow(), cursor, "though its lines were forgotten");
    store.append(epoch, Vec::new()).await.expect("opening it takes it from nobody");
    let next = store.own(owner()).await.unwrap();
    assert!(next > epoch);
    assert!(store.lease(next, &made.id, viv_store::LeaseKind::Start, "a", 1, 1).await.unwrap().token > token);
    assert!(store.append(next, vec![note("y")]).await.unwrap() > cursor);
}

#[test]
fn what_is_no_store_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let text = "this is a letter, and longer than the header of a database. ".repeat(100);
    std::fs::write(&path, &text).unwrap();
    let refused = SqliteStore::open(&path).unwrap_err();
    assert!(matches!(refused, StoreError::Corrupt { .. }), "{refused}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    for path in [folder.path(), &folder.path().join("no/such/folder/store.db")] {
        let refused = SqliteStore::open(path).unwrap_err();
        assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused}");
    }
}

#[test]
fn a_newer_file_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    drop(SqliteStore::open(&path).unwrap());
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 4_000).unwrap();
    let refused = SqliteStore::open(&path).unwrap_err().to_string();
    assert!(refused.contains("4000") && refused.contains("newer program"), "{refused}");
}

/// A file as version 1 wrote it, opened by every version after it.
#[tokio::test]
async fn a_file_of_version_1_is_brought_up_to_date() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    Connection::open(&path).unwrap().execute_batch(include_str!("data/version-1.sql")).unwrap();
    let store = SqliteStore::open(&path).unwrap();
    let all = store.list(&ListQuery { deleted: true, limit: 10, ..ListQuery::default() }).await.unwrap().items;
    let names: Vec<_> = all.iter().map(|found| found.name.as_ref().map(|name| name.as_str().to_owned())).collect();
    assert_eq!(names, [None, Some("kept".to_owned())]);
    assert_eq!((all[1].active_at_ms, all[1].version), (7_000, 2));
    let labels = [("team".to_owned(), "a".to_owned())].into();
    let labelled = store.list(&ListQuery { labels, limit: 10, ..ListQuery::default() }).await.unwrap().items;
    assert_eq!(labelled, all[1..]);
    assert_eq!(store.journal(Cursor(0), &JournalFilter::default(), 10).await.unwrap().len(), 4);
    assert_eq!(store.keys().await.unwrap().len(), 1);
    assert_eq!(store.meta("installation").await.unwrap().as_deref(), Some("one"));
    assert_eq!(store.count(None).await.unwrap().values().sum::<u64>(), 1);
    assert_eq!(store.owner().await.unwrap().unwrap().epoch, 1);
    let epoch = store.own(owner()).await.unwrap();
    store.commit(epoch, change(&sandbox(1))).await.unwrap();
}

#[tokio::test]
async fn a_damaged_record_is_told_and_does_not_hide_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = SqliteStore::open(&path).unwrap();
    let epoch = store.own(owner()).await.unwrap();
    let (good, bad) = (sandbox(1), sandbox(1));
    store.commit(epoch, change(&good)).await.unwrap();
    store.commit(epoch, change(&bad)).await.unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute("UPDATE sandboxes SET record = '{}' WHERE id = ?1", [bad.id.as_str()]).unwrap();
    let told = store.get(&bad.id).await.unwrap_err();
    assert!(matches!(told, StoreError::Corrupt { .. }), "{told}");
    assert_eq!(store.get(&good.id).await.unwrap(), Some(good));
}

/// Somebody looks at the file with another program and holds its lock: writes wait, reads do not.
#[tokio::test]
async fn a_lock_by_another_program_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = SqliteStore::open(&path).unwrap();
    let epoch = store.own(owner()).await.unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let sandbox = sandbox(1);
    let mut write = std::pin::pin!(store.commit(epoch, change(&sandbox)));
    // It is on its way, and reads go past it.
    let read = tokio::select! {
        biased;
        answer = &mut write => panic!("the lock is held, and this was answered: {answer:?}"),
        read = store.get(&sandbox.id) => read,
    };
    assert_eq!(read.unwrap(), None);
    other.execute_batch("ROLLBACK").unwrap();
    write.await.unwrap();
    assert_eq!(store.get(&sandbox.id).await.unwrap(), Some(sandbox));
}

/// Who asked and went is not written for, if its turn had not come.
#[tokio::test]
async fn a_call_that_was_given_up_in_the_queue_is_not_carried_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = SqliteStore::open(&path).unwrap();
    let epoch = store.own(owner()).await.unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (first, given_up) = (sandbox(1), sandbox(1));
    let mut write = std::pin::pin!(store.commit(epoch, change(&first)));
    tokio::select! {
        biased;
        answer = &mut write => panic!("the lock is held, and this was answered: {answer:?}"),
        () = async {
            // It is in the queue, or with the writer that waits for the lock, when it is dropped.
            let mut late = Box::pin(store.commit(epoch, change(&given_up)));
            tokio::select! { biased; _ = &mut late => (), _ = store.owner() => () }
        } => (),
    }
    other.execute_batch("ROLLBACK").unwrap();
    write.await.unwrap();
    store.append(epoch, vec![note("after")]).await.unwrap();
    assert_eq!(store.get(&given_up.id).await.unwrap(), None);
}

#[tokio::test]
async fn a_copy_that_cannot_be_made_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&folder.path().join("store.db")).unwrap();
    let target = folder.path().join("folder");
    std::fs::create_dir(&target).unwrap();
    for to in [target.as_path(), &folder.path().join("no/such/folder/copy.db")] {
        let refused = store.backup(to).await.unwrap_err();
        assert!(matches!(refused, StoreError::Unavailable { .. }), "{refused}");
    }
    let partial = |name: &std::ffi::OsStr| name.to_string_lossy().contains("partial");
    assert!(!std::fs::read_dir(folder.path()).unwrap().any(|entry| partial(&entry.unwrap().file_name())));
}

#[tokio::test]
async fn l20_a_lease_that_was_left_on_what_is_over_is_found_and_given_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = SqliteStore::open(&path).unwrap();
    let epoch = store.own(owner()).await.unwrap();
    let living = sandbox(1);
    store.commit(epoch, change(&living)).await.unwrap();
    let held = store.lease(epoch, &living.id, viv_store::LeaseKind::Lifecycle, "a", 1, 100).await.unwrap();
    // By hand: the store takes none on what it does not know.
    let stray = viv_store::Lease { sandbox: sandbox(2).id, token: viv_core::FencingToken(77), ..held.clone() };
    let db = Connection::open(&path).unwrap();
    let insert = "INSERT INTO leases VALUES (?1, 'lifecycle', 1, 100, 77, ?2)";
    db.execute(insert, [stray.sandbox.as_str(), &serde_json::to_string(&stray).unwrap()]).unwrap();
    drop(db);
    assert_eq!(store.stray_leases(10).await.unwrap(), std::slice::from_ref(&stray));
    store.release(epoch, &stray.sandbox, stray.kind, stray.token).await.unwrap();
    assert_eq!(store.stray_leases(10).await.unwrap(), []);
    assert_eq!(store.leases(&living.id).await.unwrap(), [held]);
}
