//! Locks of a process that can neither go on nor be ended hold nobody (J8).

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use common::{change, note, owner, sandbox};
use rusqlite::Connection;
use viv_store::{SqliteStore, Store, StoreError};

const FILE: &str = "VIV_STORE_RENEW_FILE";

/// Writes, says so, and writes the rest when it is told to: until then it holds the lock, as a frozen owner does.
#[test]
#[ignore = "the child of the test below"]
fn child() {
    let path = std::env::var(FILE).expect("started by the test below");
    let db = Connection::open(Path::new(&path)).unwrap();
    db.execute_batch("BEGIN IMMEDIATE; INSERT INTO meta VALUES ('late', 'yes')").unwrap();
    println!("\nheld");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_line(&mut String::new()).unwrap();
    db.execute_batch("COMMIT").unwrap();
}

#[tokio::test]
async fn j8_who_holds_the_lock_for_ever_holds_nobody_who_renews_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let before = sandbox(1);
    // Left open, so that what was written is in the log and not in the file yet.
    let old = SqliteStore::open(&path).unwrap();
    let epoch = old.own(owner()).await.unwrap();
    old.commit(epoch, change(&before)).await.unwrap();
    let mut frozen = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env(FILE, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(frozen.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap() == "held"));
    let refused = old.append(epoch, vec![note("held up")]).await;
    assert!(matches!(refused, Err(StoreError::Unavailable { .. })), "{refused:?}");

    SqliteStore::renew(&path).unwrap();
    let new = SqliteStore::open(&path).unwrap();
    let later = new.own(owner()).await.unwrap();
    assert!(later > epoch);
    assert_eq!(new.get(&before.id).await.unwrap(), Some(before), "what was acknowledged is there");
    let after = sandbox(2);
    new.commit(later, change(&after)).await.unwrap();

    // It thaws, and what it writes is nowhere.
    frozen.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    assert!(frozen.wait().unwrap().success());
    assert_eq!(new.meta("late").await.unwrap(), None);
    drop(new);
    drop(old);
    let again = SqliteStore::open(&path).unwrap();
    assert_eq!(again.get(&after.id).await.unwrap(), Some(after));
    assert_eq!(again.meta("late").await.unwrap(), None);
}

#[test]
fn a_file_that_is_not_there_needs_no_renewing() {
    let folder = tempfile::tempdir().unwrap();
    SqliteStore::renew(&folder.path().join("store.db")).unwrap();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
