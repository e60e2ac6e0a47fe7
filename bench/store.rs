//! The store in a file: what commits cost, one at a time and in groups, and what reads cost among many records.
//!
//! Compare within one run: the disk and its neighbours decide about the rest. `VIV_BENCH_FOLDER` says on which disk.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_store::{Cursor, Epoch, JournalFilter, ListQuery, Quota, SqliteStore, Store};

#[path = "../crates/viv-store/tests/common/mod.rs"]
mod common;

use common::{change, owner, sandbox};

/// How long each number of writers writes in a turn.
const WRITE_MS: u64 = 500;

/// Turns: whatever else the machine does comes to all.
const TURNS: u32 = 8;

/// Records among which is read.
const RECORDS: usize = 100_000;

/// Reads of each kind.
const ROUNDS: usize = 301;

/// What a page of `viv ps` holds.
const PAGE: usize = 50;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = match std::env::var_os("VIV_BENCH_FOLDER") {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    };
    let folder = folder.unwrap();
    runtime.block_on(writes(folder.path()));
    runtime.block_on(reads(folder.path()));
}

async fn open(path: &Path) -> (Arc<SqliteStore>, Epoch) {
    let store = Arc::new(SqliteStore::open(path).unwrap());
    let epoch = store.own(owner()).await.unwrap();
    (store, epoch)
}

async fn writes(folder: &Path) {
    let (store, epoch) = open(&folder.join("writes.db")).await;
    let writers = [1, 10, 100];
    let (mut alone, mut grouped) = (0.0, [0.0; 3]);
    for _ in 0..TURNS {
        alone += one_by_one(&folder.join("alone.db")) / f64::from(TURNS);
        for (at, count) in writers.into_iter().enumerate() {
            grouped[at] += in_groups(&store, epoch, count).await / f64::from(TURNS);
        }
    }
    println!("{:<44}{:>14}{:>10}", "commits (a record and its line)", "per second", "");
    println!("{:<44}{alone:>14.0}{:>9.1}x", "a transaction for each, without the store", 1.0);
    for (count, rate) in writers.into_iter().zip(grouped) {
        println!("{:<44}{rate:>14.0}{:>9.1}x", format!("{count} at once"), rate / alone);
    }
}

/// What a program would do that knows nothing of groups: the same bytes, one transaction each.
fn one_by_one(path: &Path) -> f64 {
    let db = rusqlite::Connection::open(path).unwrap();
    let setup = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
                 CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, record TEXT) STRICT;
                 CREATE TABLE IF NOT EXISTS lines (cursor INTEGER PRIMARY KEY, line TEXT) STRICT;";
    db.execute_batch(setup).unwrap();
    let (start, mut count) = (Instant::now(), 0.0);
    while start.elapsed() < Duration::from_millis(WRITE_MS) {
        let change = change(&sandbox(1));
        let record = serde_json::to_string(&change.sandbox).unwrap();
        let line = serde_json::to_string(&change.lines[0]).unwrap();
        db.execute_batch("BEGIN IMMEDIATE").unwrap();
        let insert = "INSERT INTO records VALUES (?1, ?2)";
        db.prepare_cached(insert).unwrap().execute([change.sandbox.id.as_str(), &record]).unwrap();
        db.prepare_cached("INSERT INTO lines (line) VALUES (?1)").unwrap().execute([&line]).unwrap();
        db.execute_batch("COMMIT").unwrap();
        count += 1.0;
    }
    count / start.elapsed().as_secs_f64()
}

async fn in_groups(store: &Arc<SqliteStore>, epoch: Epoch, writers: usize) -> f64 {
    let start = Instant::now();
    let tasks: Vec<_> = (0..writers)
        .map(|_| {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                let mut count = 0.0;
                while start.elapsed() < Duration::from_millis(WRITE_MS) {
                    store.commit(epoch, change(&sandbox(1))).await.unwrap();
                    count += 1.0;
                }
                count
            })
        })
        .collect();
    let mut count = 0.0;
    for task in tasks {
        count += task.await.unwrap();
    }
    count / start.elapsed().as_secs_f64()
}

/// One of a hundred lives; of the others half are hibernated and half are over.
fn record(at: usize) -> Sandbox {
    let mut record = sandbox(at as u64);
    record.project = ["default", "a", "b", "c"][at % 4].parse().unwrap();
    record.labels = [("team".to_owned(), format!("t{}", at % 1_000)), ("all".to_owned(), "yes".to_owned())].into();
    record.name = at.is_multiple_of(3).then(|| format!("n{at}").parse().unwrap());
    record.phase = match at % 100 {
        0 => viv_core::lifecycle::Phase::Ready,
        odd if odd % 2 == 1 => viv_core::lifecycle::Phase::Stopped,
        _ => viv_core::lifecycle::Phase::Hibernated { snapshot: "snp_1".parse().unwrap() },
    };
    record
}

async fn reads(folder: &Path) {
    let path = folder.join("reads.db");
    let (store, epoch) = open(&path).await;
    let mut ids = Vec::with_capacity(RECORDS);
    let start = Instant::now();
    for chunk in (0..RECORDS).collect::<Vec<_>>().chunks(500) {
        let tasks: Vec<_> = chunk
            .iter()
            .map(|at| {
                let (store, record) = (Arc::clone(&store), record(*at));
                ids.push(record.id.clone());
                tokio::spawn(async move { store.commit(epoch, change(&record)).await.unwrap() })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    }
    println!("\n{RECORDS} records were written in {:.1?}", start.elapsed());
    drop(store);
    let start = Instant::now();
    let (store, epoch) = open(&path).await;
    println!("they were opened in {:.1?}", start.elapsed());
    let size = std::fs::metadata(&path).unwrap().len();
    println!("the file has {} MiB\n", size >> 20);
    println!("{:<44}{:>14}{:>14}", "among them", "median", "worst of 301");

    let page = ListQuery { limit: PAGE, ..ListQuery::default() };
    let middle = store.list(&ListQuery { limit: RECORDS / 2, ..page.clone() }).await.unwrap().next;
    let label = |name: &str, value: &str| [(name.to_owned(), value.to_owned())].into();
    let project = Some("a".parse().unwrap());
    let lists = [
        ("a page of all", page.clone()),
        ("a page from the middle", ListQuery { after: middle, ..page.clone() }),
        ("a page of a project", ListQuery { project: project.clone(), ..page.clone() }),
        ("a page of those that are ready", ListQuery { phases: vec![PhaseName::Ready], ..page.clone() }),
        ("a page by a rare label", ListQuery { labels: label("team", "t7"), ..page.clone() }),
        ("a page by a label that all have", ListQuery { labels: label("all", "yes"), ..page.clone() }),
        ("by name", ListQuery { name: Some("n30000".parse().unwrap()), ..page }),
    ];
    for (what, query) in &lists {
        row(what, async || assert!(!store.list(query).await.unwrap().items.is_empty())).await;
    }
    row("get", async || assert!(store.get(&ids[RECORDS / 3]).await.unwrap().is_some())).await;
    row("count", async || assert_eq!(store.count(None).await.unwrap().values().sum::<u64>() as usize, RECORDS)).await;
    row("count of a project", async || drop(store.count(project.as_ref()).await.unwrap())).await;
    row("due", async || drop(store.due(None, u64::MAX, 100).await.unwrap())).await;
    let filter = JournalFilter { sandbox: Some(ids[5].clone()), ..JournalFilter::default() };
    row("the lines of a sandbox", async || {
        assert_eq!(store.journal(Cursor(0), &filter, 100).await.unwrap().len(), 1);
    })
    .await;
    row("a create with its quota counted, synced", async || {
        let quota = Some(Quota::of(u64::MAX, u64::MAX));
        store.commit(epoch, viv_store::Change { quota, ..change(&sandbox(1)) }).await.unwrap();
    })
    .await;
    let start = Instant::now();
    store.backup(&folder.join("copy.db")).await.unwrap();
    println!("\na copy was made in {:.1?}", start.elapsed());
}

async fn row(what: &str, work: impl AsyncFn()) {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work().await;
        times.push(start.elapsed());
    }
    times.sort();
    let [median, worst] = [times[ROUNDS / 2], times[ROUNDS - 1]].map(|time| format!("{time:.1?}"));
    println!("{what:<44}{median:>14}{worst:>14}");
}
