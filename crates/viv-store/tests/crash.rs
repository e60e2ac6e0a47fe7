//! What was acknowledged survives `kill -9`, and record and journal agree whenever it comes.
//!
//! A child commits with many tasks at once and prints what was acknowledged; it is killed at random, again and again,
//! on the same file. `VIV_STORE_SEED` repeats the choices (not the timing), `VIV_STORE_CRASHES` makes more of them.

mod common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::{change, owner, sandbox};
use viv_core::SandboxId;
use viv_core::lifecycle::Sandbox;
use viv_store::{Cursor, JournalFilter, ListQuery, SqliteStore, Store};

const CRASHES: u64 = 200;

/// Tasks of the child, so that groups are of several writes.
const TASKS: usize = 8;

/// Most acknowledgements before a kill.
const ACKS_MAX: u64 = 60;

const FILE: &str = "VIV_STORE_CRASH_FILE";

#[test]
#[ignore = "the child of the test below"]
fn child() {
    let path = std::env::var(FILE).expect("started by the test below");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Arc::new(SqliteStore::open(Path::new(&path)).unwrap());
        let epoch = store.own(owner()).await.unwrap();
        for _ in 0..TASKS {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                loop {
                    let mut sandbox = sandbox(1);
                    for version in 1..=4 {
                        sandbox.version = version;
                        let committed = store.commit(epoch, change(&sandbox)).await;
                        let mut out = std::io::stdout().lock();
                        let told = committed.is_ok() && writeln!(out, "ack {} {version}", sandbox.id).is_ok();
                        if !told {
                            // The parent finds that it ended by itself.
                            eprintln!("{committed:?}");
                            std::process::exit(1);
                        }
                    }
                }
            });
        }
        std::future::pending::<()>().await;
    });
}

/// Runs a child until it has acknowledged this many, kills it, and gives all that it acknowledged.
fn crash(path: &Path, acks: u64) -> Vec<(SandboxId, u64)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env(FILE, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let (mut acknowledged, mut line) = (Vec::new(), String::new());
    let mut killed = false;
    loop {
        if !killed && acknowledged.len() as u64 >= acks {
            child.kill().unwrap();
            killed = true;
        }
        line.clear();
        if out.read_line(&mut line).unwrap() == 0 {
            break;
        }
        let Some(ack) = line.strip_prefix("ack ").and_then(|ack| ack.strip_suffix('\n')) else { continue };
        let (id, version) = ack.split_once(' ').unwrap();
        acknowledged.push((id.parse().unwrap(), version.parse().unwrap()));
    }
    child.wait().unwrap();
    assert!(killed, "the child ended by itself");
    acknowledged
}

/// The record has all of its lines, and no other.
async fn agree(store: &SqliteStore, sandbox: &Sandbox) {
    let filter = JournalFilter { sandbox: Some(sandbox.id.clone()), ..JournalFilter::default() };
    let lines = store.journal(Cursor(0), &filter, 1_000).await.unwrap();
    let told: Vec<u64> = lines.iter().map(|line| line.line.data["version"].as_u64().unwrap()).collect();
    assert_eq!(told, (1..=sandbox.version).collect::<Vec<_>>(), "{}", sandbox.id);
}

async fn check(path: &Path, acknowledged: &BTreeMap<SandboxId, u64>) {
    let store = SqliteStore::open(path).unwrap();
    for (id, version) in acknowledged {
        let found = store.get(id).await.unwrap().unwrap_or_else(|| panic!("{id} was acknowledged and is lost"));
        assert!(found.version >= *version, "{id}: {version} was acknowledged, {} is there", found.version);
        agree(&store, &found).await;
    }
}

#[tokio::test]
async fn j4_what_was_acknowledged_survives_kills() {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let seed = number("VIV_STORE_SEED").unwrap_or_else(|| u64::from(std::process::id()) + 1);
    println!("VIV_STORE_SEED={seed}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let (mut random, mut all) = (seed, BTreeMap::new());
    for _ in 0..number("VIV_STORE_CRASHES").unwrap_or(CRASHES) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut last = BTreeMap::new();
        for (id, version) in crash(&path, (random >> 33) % ACKS_MAX) {
            last.insert(id, version);
        }
        check(&path, &last).await;
        all.extend(last);
    }
    check(&path, &all).await;
    // Also of what nobody was told.
    let store = SqliteStore::open(&path).unwrap();
    let everything = ListQuery { limit: usize::MAX, ..ListQuery::default() };
    let records = store.list(&everything).await.unwrap().items;
    for record in &records {
        agree(&store, record).await;
    }
    assert!(records.len() >= all.len() && all.len() > 100, "{} records, {} acknowledged", records.len(), all.len());
    drop(store);
    let damage: String =
        rusqlite::Connection::open(&path).unwrap().query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(damage, "ok");
}
