//! A disk that is full refuses new work, loses nothing, and works again when there is room (J5).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs::{self, File};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::Signal;
use support::daemon::PATIENCE;
use support::restart::{House, all, create, settled};
use support::{eventually, eventually_within, kill};
use viv_api::client::{Client, ClientError, Location};
use viv_api::error::ErrorCode;
use viv_api::sandbox::{CreateSandbox, Phase, Status, StopSandbox};

/// A small disk in memory.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("viv-small-").tempdir().unwrap();
        mount("viv-small", folder.path(), "tmpfs", MountFlags::empty(), c"size=4m").unwrap();
        Self(folder)
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Takes all the room that is left.
    fn fill(&self) {
        let mut filler = File::create(self.filler()).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn j5_a_full_disk_refuses_creates_and_leaves_nothing_and_room_helps() {
    let disk = SmallDisk::new();
    let house = House::new();
    house.keep_records_in(disk.path());
    let mut daemon = house.start();
    let client = daemon.client();
    let kept = create(&client);
    let processes = house.processes();
    let log = disk.path().join("viv.db-wal");
    disk.fill();
    // The log has room in it that was used before; it is used up by what succeeds.
    let mut made_room_in_the_log = Vec::new();
    let refused = loop {
        match client.create(&CreateSandbox::default(), None) {
            Ok(made) => made_room_in_the_log.push(made.into_sandbox().id),
            Err(refused) => break refused,
        }
        assert!(made_room_in_the_log.len() < 20, "the disk is not full: {:?}", fs::metadata(&log));
    };
    for refused in [refused, client.create(&CreateSandbox::default(), None).unwrap_err()] {
        assert!(
            matches!(&refused, ClientError::Api { status: 503, error } if error.code == ErrorCode::StoreUnavailable),
            "{refused:?}"
        );
        assert!(refused.hint().is_some_and(|hint| !hint.is_empty()), "{refused:?}");
    }
    // What is there can be looked at.
    assert!(daemon.is_running());
    assert_eq!(client.sandbox(&kept.id).get().unwrap().phase, Phase::Ready);

    disk.make_room();
    let made = create(&client);
    let mut expected: Vec<_> = [kept.id.clone(), made.id.clone()].into_iter().chain(made_room_in_the_log).collect();
    let mut recorded: Vec<_> = all(&client).into_iter().map(|one| one.id).collect();
    expected.sort();
    recorded.sort();
    assert_eq!(recorded, expected, "what was refused left no record");
    for sandbox in &recorded {
        assert_eq!(settled(&client, sandbox).status, Status::Ready);
    }
    let mut instances: Vec<_> = house.instances().await.into_iter().map(|one| one.instance.sandbox).collect();
    instances.sort();
    assert_eq!(instances, expected, "what was refused left no instance");
    eventually("nobody is left over", || house.processes().len() == expected.len() * processes.len());

    // After a restart it is the same.
    daemon.kill();
    let daemon = house.start();
    let client = daemon.client();
    assert_eq!(all(&client).len(), expected.len());
    for sandbox in &expected {
        client.sandbox(sandbox).delete(None).unwrap();
        assert_eq!(settled(&client, sandbox).phase, Phase::Stopped);
    }
    house.assert_nothing_left();
}

#[test]
fn j5_a_stop_that_cannot_be_recorded_is_not_acknowledged_and_succeeds_later() {
    let disk = SmallDisk::new();
    let house = House::new();
    house.keep_records_in(disk.path());
    let daemon = house.start();
    let client = daemon.client();
    let sandbox = create(&client);
    // What is kept for a stop was used before.
    fs::remove_file(disk.path().join("viv.db-reserve")).unwrap();
    disk.fill();
    // Room in the log is used up first: by writes that succeed.
    eventually("the disk is full", || client.create(&CreateSandbox::default(), None).is_err());
    let refused = client.sandbox(&sandbox.id).stop(&StopSandbox::default()).unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::StoreUnavailable), "{refused:?}");
    assert_eq!(client.sandbox(&sandbox.id).get().unwrap().phase, Phase::Ready);
    disk.make_room();
    for sandbox in all(&client) {
        client.sandbox(&sandbox.id).stop(&StopSandbox::default()).unwrap();
        assert_eq!(settled(&client, &sandbox.id).phase, Phase::Stopped);
    }
    house.assert_nothing_left();
}

#[test]
fn j5_a_daemon_whose_log_is_on_a_full_disk_serves() {
    let house = House::new();
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut command = house.viv();
    command.args(["serve", "--listen", "127.0.0.1:0", "--layers", "plain", "--cgroup-prefix", &house.cgroup_prefix]);
    // Everything that it does is said, and cannot be.
    command.args(["--log", "debug"]).stdin(full()).stdout(full()).stderr(full());
    let mut child = command.spawn().unwrap();
    let served = catch_unwind(AssertUnwindSafe(|| {
        let daemon = || fs::read(house.data.join("daemon.json")).unwrap_or_default();
        let url = || Some(serde_json::from_slice::<serde_json::Value>(&daemon()).ok()?["url"].as_str()?.to_owned());
        eventually_within(PATIENCE, "it serves", || url().is_some());
        let key = fs::read_to_string(house.data.join("key")).unwrap();
        let location = Location::new(url().unwrap()).key(key.trim()).name("test");
        let client = Client::locate(location).unwrap();
        let sandbox = create(&client);
        client.sandbox(&sandbox.id).delete(None).unwrap();
        assert_eq!(settled(&client, &sandbox.id).phase, Phase::Stopped);
    }));
    // Whatever came of it, nobody is left who makes sandboxes.
    kill(child.id(), Signal::TERM);
    let ended = child.wait().unwrap();
    served.unwrap_or_else(|why| resume_unwind(why));
    assert!(ended.success(), "{ended}");
    house.assert_nothing_left();
}
