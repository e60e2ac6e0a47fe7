//! What does not go on, on the real daemon: a runtime that hangs, one that fails, and processes that cannot be killed.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread;

use support::daemon::{Daemon, PATIENCE};
use support::restart::House;
use support::{eventually_within, freezer};
use viv_api::alert::AlertState;
use viv_api::bound::WaitMs;
use viv_api::query::ListSandboxes;
use viv_api::sandbox::{CreateSandbox, Status};

/// A runtime that does this when it is to make a container.
fn runtime(does: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("runtime");
    fs::write(&path, format!("#!/bin/sh\n[ \"$1\" = --version ] && exec echo odd\n{does}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (folder, path)
}

fn now() -> WaitMs {
    WaitMs::new(0).unwrap()
}

#[test]
fn incident_2_what_is_stuck_in_starting_is_deleted_all_the_same() {
    let (_folder, runtime) = runtime("exec sleep 86395");
    let daemon = Daemon::start_with(&["--layers", "plain", "--runtime", runtime.to_str().unwrap()]);
    let asked = CreateSandbox { wait_ms: Some(now()), ..CreateSandbox::default() };
    let made = daemon.client().create(&asked, None).unwrap().into_sandbox();
    let hangs = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("86395")
    };
    eventually_within(PATIENCE, "its runtime hangs", || daemon.processes().iter().any(hangs));
    assert_eq!(daemon.sandbox(&made.id).get().unwrap().status, Status::Provisioning);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn incident_26_creates_that_fail_at_once_leave_nothing() {
    let (_folder, runtime) = runtime("sleep 86396 & exit 1");
    let daemon = Daemon::start_with(&["--layers", "plain", "--runtime", runtime.to_str().unwrap()]);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let made = daemon.client().create(&CreateSandbox::default(), None);
                assert!(made.is_err(), "nothing can be made here: {made:?}");
            });
        }
    });
    let all: Vec<_> = daemon.client().list_all(ListSandboxes::default()).map(|one| one.unwrap()).collect();
    assert_eq!(all.len(), 4, "each is recorded");
    for failed in &all {
        daemon.wait_for(&failed.id, "it has failed", |now| now.status == Status::Failed);
    }
    // They are still recorded, and nothing runs for them.
    daemon.assert_nothing_left();
    for failed in all {
        daemon.remove(&failed.id);
    }
}

/// Thaws when this goes, also when a test fails: nobody else could end them.
struct Frozen(PathBuf);

impl Frozen {
    fn from_above(state: PathBuf) -> Self {
        fs::write(&state, "FROZEN").unwrap();
        Self(state)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(&self.0, "THAWED");
    }
}

/// Processes that cannot die (here in a frozen v1 cgroup, in life in uninterruptible I/O) are not called ended (L8).
#[test]
fn incident_33_what_cannot_be_killed_stays_stopping_and_alerts() {
    let Some(freezer) = freezer::first_kind() else { return };
    let mut daemon = Daemon::in_house(House::with_config("[alerts]\nperiod_s = 1\nresolve_after_s = 1\n"));
    daemon.run(&[]);
    let made = daemon.create();
    // From above: what was frozen by itself is thawed to be killed.
    let frozen = Frozen::from_above(freezer.join(&daemon.cgroup_prefix).join("freezer.state"));
    daemon.sandbox(&made.id).delete(Some(now())).unwrap();
    let fires = || {
        let alerts = daemon.client().alerts().unwrap().items;
        alerts.iter().any(|alert| alert.name == "kill_failed" && alert.state == AlertState::Firing)
    };
    eventually_within(3 * PATIENCE, "the alert fires", fires);
    let seen = daemon.sandbox(&made.id).get().unwrap();
    assert_eq!(seen.status, Status::Stopping, "{seen:#?}");
    assert_eq!(daemon.instances().len(), 1, "it is there, and said to be");
    drop(frozen);
    let over = daemon.wait_for(&made.id, "it is over", |now| now.status == Status::Stopped);
    assert!(over.deleted, "{over:#?}");
    daemon.assert_nothing_left();
    eventually_within(PATIENCE, "the alert is over", || !fires());
}
