//! A disk that is full or fails: an error for who writes, nothing lost that was acknowledged, and no restart needed
//! when it is well again.
//!
//! Each runs in a child: one in a mount namespace of its own with a small tmpfs, the other with a library before libc
//! that makes syncing fail on demand.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use common::{change, owner, sandbox};
use viv_core::lifecycle::{Desired, Sandbox};
use viv_store::{Cursor, Epoch, JournalFilter, LeaseKind, SqliteStore, Store, StoreError};

const FOLDER: &str = "VIV_STORE_DISK_FOLDER";

/// Makes `fsync` and `fdatasync` fail while a file is there.
const FAILING: &str = r#"
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/syscall.h>
static int fails(void) { const char *f = getenv("VIV_STORE_FAIL_SYNC"); return f && access(f, F_OK) == 0; }
int fsync(int fd) { if (fails()) { errno = EIO; return -1; } return syscall(SYS_fsync, fd); }
int fdatasync(int fd) { if (fails()) { errno = EIO; return -1; } return syscall(SYS_fdatasync, fd); }
"#;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var(FOLDER).expect("started by a test below"))
}

fn passes(mut command: Command) {
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
}

/// Every one of these is there, and its line is.
async fn all_there(store: &SqliteStore, acknowledged: &[Sandbox]) {
    for sandbox in acknowledged {
        assert_eq!(store.get(&sandbox.id).await.unwrap().as_ref(), Some(sandbox));
        let filter = JournalFilter { sandbox: Some(sandbox.id.clone()), ..JournalFilter::default() };
        assert_eq!(store.journal(Cursor(0), &filter, 10).await.unwrap().len(), 1);
    }
}

/// Writes this many at once; gives those that were acknowledged, and how many were not.
async fn many(store: &Arc<SqliteStore>, epoch: Epoch, count: usize) -> (Vec<Sandbox>, usize) {
    let tasks: Vec<_> = (0..count)
        .map(|_| {
            let (store, sandbox) = (Arc::clone(store), sandbox(1));
            tokio::spawn(async move { (store.commit(epoch, change(&sandbox)).await, sandbox) })
        })
        .collect();
    let (mut acknowledged, mut failed) = (Vec::new(), 0);
    for task in tasks {
        match task.await.unwrap() {
            (Ok(_), sandbox) => acknowledged.push(sandbox),
            (Err(StoreError::Unavailable { .. }), _) => failed += 1,
            (Err(other), _) => panic!("{other}"),
        }
    }
    (acknowledged, failed)
}

#[test]
#[ignore = "the child of the test below"]
fn inside_a_small_disk() {
    let path = folder().join("store.db");
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(&path).unwrap());
        let epoch = store.own(owner()).await.unwrap();
        let mut acknowledged = Vec::new();
        for round in 0..3 {
            // Full, by somebody else's file and then by our own writing.
            let other = folder().join("other");
            let room = [400, 100, 3][round] * 1024;
            fill(&other, room);
            loop {
                let (written, failed) = many(&store, epoch, 20).await;
                acknowledged.extend(written);
                if failed > 0 {
                    break;
                }
            }
            let (written, _) = many(&store, epoch, 50).await;
            acknowledged.extend(written);
            all_there(&store, &acknowledged).await;
            // There is room again: it goes on, without having been opened anew.
            std::fs::remove_file(&other).unwrap();
            let (written, failed) = many(&store, epoch, 20).await;
            assert_eq!(failed, 0, "there is room");
            acknowledged.extend(written);
            all_there(&store, &acknowledged).await;
        }
        drop(store);
        all_there(&SqliteStore::open(&path).unwrap(), &acknowledged).await;
    });
}

/// Fills the disk but for this much.
fn fill(path: &Path, room: u64) {
    use std::io::Write;
    let mut file = std::fs::File::create(path).unwrap();
    while file.write_all(&[1; 1024]).is_ok() {}
    let size = file.metadata().unwrap().len();
    file.set_len(size.saturating_sub(room)).unwrap();
}

#[test]
#[ignore = "the child of the test below"]
fn inside_a_full_disk() {
    let path = folder().join("store.db");
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(&path).unwrap());
        let epoch = store.own(owner()).await.unwrap();
        let (mut running, failed) = many(&store, epoch, 5).await;
        assert_eq!(failed, 0);
        fill(&folder().join("other"), 0);
        // The log has room in it that was used before; it is used up by what succeeds.
        while many(&store, epoch, 20).await.1 < 20 {}
        for record in &mut running {
            record.version += 1;
            record.desired = Desired::Hibernated;
            store.commit(epoch, change(record)).await.expect("that it is to end is recorded");
            let lease = store.lease(epoch, &record.id, LeaseKind::Lifecycle, "test", 1, 1_000).await;
            lease.expect("who is to end it may");
        }
        std::fs::remove_file(folder().join("other")).unwrap();
        let (_, failed) = many(&store, epoch, 20).await;
        assert_eq!(failed, 0, "there is room");
        drop(store);
        let store = SqliteStore::open(&path).unwrap();
        for record in &running {
            assert_eq!(store.get(&record.id).await.unwrap().as_ref(), Some(record));
        }
        let reserve = std::fs::metadata(folder().join("store.db-reserve")).unwrap();
        assert_eq!(reserve.len(), 1 << 20, "with room it is whole again");
    });
}

#[test]
fn l8_on_a_full_disk_a_stop_is_recorded_although_nothing_else_is() {
    on_a_small_disk("inside_a_full_disk");
}

#[test]
fn s5_a_full_disk_loses_nothing_and_recovers() {
    on_a_small_disk("inside_a_small_disk");
}

/// Runs the named test in a mount namespace of its own, on a disk of 8 MiB.
fn on_a_small_disk(test: &str) {
    let folder = tempfile::tempdir().unwrap();
    // Who is not root can mount a tmpfs as root of a user namespace.
    let root = std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    let mut command = Command::new("unshare");
    command.arg(if root { "-m" } else { "-rm" });
    let script = "mount -t tmpfs -o size=8m none \"$1\" && exec \"$2\" --ignored --exact \"$3\" --nocapture";
    command.args(["sh", "-c", script, "sh"]).arg(folder.path()).arg(std::env::current_exe().unwrap()).arg(test);
    command.env(FOLDER, folder.path());
    passes(command);
}

#[test]
#[ignore = "the child of the test below"]
fn inside_a_failing_disk() {
    let (path, failing) = (folder().join("store.db"), folder().join("failing"));
    runtime().block_on(async {
        let store = Arc::new(SqliteStore::open(&path).unwrap());
        let epoch = store.own(owner()).await.unwrap();
        let mut acknowledged = Vec::new();
        for _ in 0..3 {
            let (written, failed) = many(&store, epoch, 20).await;
            assert_eq!(failed, 0);
            acknowledged.extend(written);
            std::fs::write(&failing, "").unwrap();
            let (written, failed) = many(&store, epoch, 20).await;
            assert_eq!((written.len(), failed), (0, 20), "nothing is acknowledged that was not synced");
            all_there(&store, &acknowledged).await;
            std::fs::remove_file(&failing).unwrap();
        }
        let (written, failed) = many(&store, epoch, 20).await;
        assert_eq!(failed, 0, "it is well again");
        acknowledged.extend(written);
        drop(store);
        all_there(&SqliteStore::open(&path).unwrap(), &acknowledged).await;
    });
}

#[test]
fn s5_a_failing_disk_acknowledges_nothing_and_recovers() {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("failing.c"), folder.path().join("failing.so"));
    std::fs::write(&source, FAILING).unwrap();
    let mut compiler = Command::new("cc");
    passes({
        compiler.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        compiler
    });
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "inside_a_failing_disk", "--nocapture"]);
    command.env("LD_PRELOAD", &library).env("VIV_STORE_FAIL_SYNC", folder.path().join("failing"));
    command.env(FOLDER, folder.path());
    passes(command);
}
