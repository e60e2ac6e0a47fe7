//! What once was wrong with the layer store, or could be.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use support::{Ground, Sandbox, eventually, fresh_bytes, mutation, stdout};
use viv_core::{OperationId, SandboxId, SnapshotId};
use viv_layer::{Bounds, Form, Packer};
use viv_provider::{
    Image, InstanceRef, InstanceSpec, InstanceState, PageRequest, Provider, ProviderError, ResourceLimits, SaveRequest,
    Snapshot,
};
use viv_sandbox::{Tidier, TidyTurn};

fn both() -> [Ground; 2] {
    [Ground::new(), Ground::on_btrfs()]
}

fn request(live: bool) -> SaveRequest {
    SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory: false }
}

fn limited(mib: u64) -> InstanceSpec {
    let limits = ResourceLimits { disk_bytes: Some(mib << 20), ..ResourceLimits::default() };
    InstanceSpec { limits, ..InstanceSpec::host(600_000) }
}

async fn save(sandbox: &Sandbox<'_>, live: bool) -> Snapshot {
    sandbox.ground.provider.save(&mutation(1, 1), &sandbox.id, &request(live)).await.unwrap()
}

async fn restore<'g>(ground: &'g Ground, spec: &InstanceSpec, id: &SnapshotId) -> Result<Sandbox<'g>, ProviderError> {
    let sandbox = SandboxId::from_bytes(fresh_bytes());
    ground.provider.restore(&mutation(1, 1), &sandbox, &ground.owner, spec, id).await?;
    Ok(Sandbox { ground, id: sandbox })
}

async fn forget(ground: &Ground, snapshot: &Snapshot) {
    ground.provider.remove_snapshot(&mutation(1, 1), &snapshot.source.sandbox, &snapshot.id).await.unwrap();
}

fn assert_clean(ground: &Ground) {
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}

/// A writer that closes and renames: whatever has its final name is whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l11_a_live_snapshot_loses_no_write() {
    for ground in both() {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let script =
            "cd /workspace; i=0; while :; do i=$((i+1)); head -c 20000 /dev/zero | tr '\\0' x > t; mv t f$i; done";
        sandbox.start(script).await;
        let mut saved = Vec::new();
        for round in 0..6 {
            eventually("it writes", || {
                let seen = ground.data.join("layers/active").join(format!("{}.1/parts/root/workspace", sandbox.id));
                fs::read_dir(seen).is_ok_and(|entries| entries.count() > 10 * (round + 1))
            });
            saved.push(save(&sandbox, true).await);
        }
        assert_eq!(sandbox.state().await, InstanceState::Running);
        sandbox.destroy().await;
        for snapshot in saved {
            let restored = restore(&ground, &InstanceSpec::host(600_000), &snapshot.id).await.unwrap();
            let (short, _) =
                restored.run("cd /workspace; find . -name 'f*' -not -size 20000c | wc -l; ls | wc -l").await;
            let counts: Vec<u64> = short.lines().map(|line| line.parse().unwrap()).collect();
            assert!(counts[0] == 0 && counts[1] > 5, "{:?}: {counts:?}", ground.provider.driver());
            restored.destroy().await;
            forget(&ground, &snapshot).await;
        }
        assert_clean(&ground);
    }
}

/// A fork of a writer is whole as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l11_a_fork_loses_no_write() {
    for ground in both() {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let script =
            "cd /workspace; i=0; while :; do i=$((i+1)); head -c 20000 /dev/zero | tr '\\0' x > t; mv t f$i; done";
        sandbox.start(script).await;
        for _ in 0..4 {
            let fork = Sandbox { ground: &ground, id: SandboxId::from_bytes(fresh_bytes()) };
            let (spec, source) = (InstanceSpec::host(600_000), sandbox.instance());
            ground.provider.fork(&mutation(1, 1), &fork.id, &ground.owner, &spec, &source).await.unwrap();
            let (short, _) = fork.run("cd /workspace; find . -name 'f*' -not -size 20000c | wc -l").await;
            assert_eq!(short.trim(), "0", "{:?}", ground.provider.driver());
            fork.destroy().await;
        }
        sandbox.destroy().await;
        assert_clean(&ground);
    }
}

/// T7: what cannot be read is not taken for absent, and least of all removed.
#[tokio::test]
async fn t7_a_record_that_cannot_be_read_keeps_its_sandbox() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(5)).await;
    sandbox.run("echo kept > /workspace/f").await;
    ground.provider.wait_end(&sandbox.instance()).await.unwrap();
    let file = sandbox.folder().join("record.json");
    let record = fs::read_to_string(&file).unwrap();
    fs::write(&file, record.replace("\"embedded\"", "\"of_the_future\"")).unwrap();
    let reopened = ground.reopen();
    let listed = reopened.list(&ground.owner, PageRequest::default()).await.unwrap();
    assert!(listed.is_partial() && sandbox.folder().exists(), "{listed:?}");
    let tidied = reopened.tidy();
    assert!(!tidied.failed.is_empty() && tidied.collected.is_none(), "collected with a record unread: {tidied:?}");
    fs::write(&file, record).unwrap();
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    forget(&ground, &saved).await;
    assert_clean(&ground);
}

/// To look for what nothing refers to, every record has to be read: that is done when something came or went, and not
/// otherwise for a long time. What is on its way out goes at every turn.
#[tokio::test]
async fn j2_a_store_in_which_nothing_came_or_went_is_not_read_again() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    let mut tidier = Tidier::new(ground.provider.clone(), Duration::from_secs(86_400));
    assert!(matches!(tidier.turn(), TidyTurn::Everything(_)), "nothing is known at first");
    // What it does itself is a change, too.
    eventually("there is nothing to do", || tidier.turn() == TidyTurn::Trash);

    // Written in place, so that nothing comes or goes: whoever reads it fails.
    let file = ground.data.join("snapshots").join(format!("{}.json", saved.id));
    let record = fs::read(&file).unwrap();
    fs::write(&file, "no record").unwrap();
    let left = ["trash", "layers/trash"].map(|trash| ground.data.join(trash).join("left"));
    for left in &left {
        fs::create_dir(left).unwrap();
    }
    assert_eq!(tidier.turn(), TidyTurn::Trash);
    assert!(left.iter().all(|left| !left.exists()), "what is on its way out goes all the same");
    let read = |turn: TidyTurn| match turn {
        TidyTurn::Trash => false,
        TidyTurn::Everything(done) => !done.failed.is_empty(),
    };
    assert!(
        read(Tidier::new(ground.provider.clone(), Duration::from_secs(86_400)).turn()),
        "nor is it known to others"
    );
    let strange = ground.data.join("snapshots/strange");
    fs::write(&strange, "").unwrap();
    assert!(read(tidier.turn()), "something came");
    assert!(read(tidier.turn()), "what could not be done is tried again at the next turn");
    fs::write(&file, record).unwrap();
    fs::remove_file(&strange).unwrap();
    eventually("there is nothing to do", || tidier.turn() == TidyTurn::Trash);

    let mut impatient = Tidier::new(ground.provider.clone(), Duration::ZERO);
    for _ in 0..3 {
        assert!(matches!(impatient.turn(), TidyTurn::Everything(_)), "it was looked at so long ago");
    }
    forget(&ground, &saved).await;
    assert!(matches!(tidier.turn(), TidyTurn::Everything(_)), "something went");
    assert_clean(&ground);
}

/// A snapshot that is removed while it is exported is exported whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l11_an_export_is_whole_although_the_snapshot_is_removed() {
    for ground in both() {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        sandbox.run("mkdir /workspace/d; cd /workspace/d; for i in $(seq 1 3000); do echo $i > $i; done").await;
        let saved = save(&sandbox, false).await;
        sandbox.destroy().await;
        let (file, provider, id) = (ground.data.join("e.snap"), ground.provider.clone(), saved.id.clone());
        let to = file.clone();
        let export = std::thread::spawn(move || provider.export_snapshot(&id, &to));
        forget(&ground, &saved).await;
        ground.provider.tidy();
        match export.join().unwrap() {
            Ok(_) => {
                let (id, operation) = (SnapshotId::from_bytes(fresh_bytes()), OperationId::from_bytes(fresh_bytes()));
                let imported = ground.provider.import_snapshot(&file, &id, &ground.owner, &operation).unwrap();
                forget(&ground, &imported).await;
            }
            // It was removed before the export had begun.
            Err(error) => assert_eq!(error.code(), "not_found", "{error}"),
        }
        assert_clean(&ground);
    }
}

/// One that nobody could read again would keep everybody from looking.
#[tokio::test]
async fn s5_an_import_cannot_make_a_record_that_is_too_long() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    let file = ground.data.join("e.snap");
    ground.provider.export_snapshot(&saved.id, &file).unwrap();

    let unpacked = tempfile::tempdir().unwrap();
    let stream = zstd::Decoder::new(fs::File::open(&file).unwrap()).unwrap();
    viv_layer::unpack(stream, unpacked.path(), Form::Native, &Bounds::default()).unwrap();
    let header = unpacked.path().join("snapshot.json");
    let mut text: serde_json::Value = serde_json::from_slice(&fs::read(&header).unwrap()).unwrap();
    text["env"]["LONG"] = "x".repeat(2 << 20).into();
    let mut packer = Packer::new(zstd::Encoder::new(fs::File::create(&file).unwrap(), 1).unwrap(), Form::Native);
    packer.file("snapshot.json", &serde_json::to_vec(&text).unwrap()).unwrap();
    packer.tree("layers/0", &unpacked.path().join("layers/0")).unwrap();
    packer.finish().unwrap().finish().unwrap();

    let (id, operation) = (SnapshotId::from_bytes(fresh_bytes()), OperationId::from_bytes(fresh_bytes()));
    let refused = ground.provider.import_snapshot(&file, &id, &ground.owner, &operation);
    assert!(refused.is_err(), "{refused:?}");
    let page = ground.provider.snapshots(&ground.owner, PageRequest::default()).await.unwrap();
    assert_eq!((page.items.len(), page.is_partial()), (1, false));

    // And one that cannot be read, for whatever reason, is told and can be removed.
    let strange = SnapshotId::from_bytes(fresh_bytes());
    fs::write(ground.data.join("snapshots").join(format!("{strange}.json")), "{").unwrap();
    let page = ground.provider.snapshots(&ground.owner, PageRequest::default()).await.unwrap();
    assert_eq!((page.items.len(), page.is_partial()), (1, true));
    ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &strange).await.unwrap();
    forget(&ground, &saved).await;
    assert_clean(&ground);
}

/// What cannot be looked at is not damaged.
#[tokio::test]
async fn a_check_that_cannot_look_marks_nothing() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    ground.provider.tidy();
    for files in 6..14 {
        let check = format!("ulimit -n {files}; exec \"$@\"");
        let arguments = [support::VIV, "local", "image", "check", "--deep"];
        let output = Command::new("sh")
            .args(["-c", &check, "sh"])
            .args(arguments)
            .env("VIV_DATA", ground.folder())
            .output()
            .unwrap();
        assert!(!stdout(&output).contains("damaged"), "{output:?}");
    }
    assert!(ground.provider.check_store(true).unwrap().is_clean());
    let restored = restore(&ground, &InstanceSpec::host(600_000), &saved.id).await.unwrap();
    restored.destroy().await;
    forget(&ground, &saved).await;
    assert_clean(&ground);
}

/// Nobody else may read what sandboxes write, or hold up the store.
#[test]
fn the_data_folder_is_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("local");
    fs::create_dir(&data).unwrap();
    fs::set_permissions(&data, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(support::VIV).args(["local", "ls", "--data"]).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::metadata(&data).unwrap().permissions().mode() & 0o777, 0o700);
    let ground = Ground::on_btrfs();
    assert_eq!(fs::metadata(ground.data.join("pool.btrfs")).unwrap().permissions().mode() & 0o777, 0o600);
}

/// Files of absurd size add up to more than there are numbers.
#[tokio::test]
async fn sparse_files_of_any_size_can_be_saved() {
    let ground = Ground::on_btrfs();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (said, _) =
        sandbox.run("cd /workspace; for i in 1 2 3; do truncate -s 9223372036854775807 $i && echo made; done").await;
    assert_eq!(said.lines().count(), 3, "{said}");
    let saved = save(&sandbox, true).await;
    sandbox.destroy().await;
    forget(&ground, &saved).await;
    assert_clean(&ground);
}

/// Hibernating again and again does not use up a limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_counts_what_there_is_and_not_what_there_was() {
    for ground in both() {
        let spec = limited(64);
        let mut sandbox = ground.create_from(spec.clone()).await;
        let mut last: Option<Snapshot> = None;
        for round in 0..8 {
            let (said, _) = sandbox.run("head -c 12000000 /dev/urandom > /workspace/f && sync && echo fits").await;
            assert_eq!(said.trim(), "fits", "{:?} in round {round}", ground.provider.driver());
            let saved = save(&sandbox, false).await;
            sandbox.destroy().await;
            if let Some(last) = last.replace(saved.clone()) {
                forget(&ground, &last).await;
            }
            sandbox = restore(&ground, &spec, &saved.id).await.unwrap();
        }
        sandbox.destroy().await;
        forget(&ground, &last.unwrap()).await;
        assert_clean(&ground);
    }
}

/// A sandbox that filled its disk can be put to sleep and woken under the limit that it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_sandbox_can_be_resumed() {
    for ground in both() {
        let spec = limited(48);
        let sandbox = ground.create_from(spec.clone()).await;
        sandbox.run("head -c 100000000 /dev/urandom > /workspace/f").await;
        let saved = save(&sandbox, false).await;
        sandbox.destroy().await;
        let restored = restore(&ground, &spec, &saved.id).await.unwrap();
        let (said, _) = restored
            .run(
                "(head -c 60000000 /dev/urandom > /workspace/g) 2>/dev/null && echo too much; \
                 rm -f /workspace/f /workspace/g && sync; head -c 1000000 /dev/urandom > /workspace/h && echo room",
            )
            .await;
        assert_eq!(said.trim(), "room", "{:?}", ground.provider.driver());
        restored.destroy().await;
        forget(&ground, &saved).await;
        assert_clean(&ground);
    }
}

/// What somebody inside does to the working directory, or to names of ours, does not keep him from being resumed.
#[tokio::test]
async fn nobody_inside_can_make_a_snapshot_useless() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.run("cd /; rm -rf /workspace; ln -s /nowhere /workspace; touch /.vivarium-probe /usr/.vivarium-probe; mkdir -p /.vivarium/x").await;
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    let restored = restore(&ground, &InstanceSpec::host(600_000), &saved.id).await.unwrap();
    assert_eq!(restored.state().await, InstanceState::Running);
    let instance = InstanceRef { sandbox: restored.id.clone(), generation: viv_core::Generation::FIRST };
    let mut text = String::new();
    let mut file = ground.provider.file_read(&instance, "/.vivarium/identity.json", 0, None).await.unwrap();
    tokio::io::AsyncReadExt::read_to_string(&mut file, &mut text).await.unwrap();
    assert!(text.contains(restored.id.as_str()), "{text}");
    restored.destroy().await;
    forget(&ground, &saved).await;
    assert_clean(&ground);
}

/// The place that shims cover for themselves may be where an image lies.
#[tokio::test]
async fn an_image_may_lie_where_shims_mount() {
    let Ok(folder) = tempfile::Builder::new().prefix("viv-test-").tempdir_in("/mnt") else {
        return eprintln!("there is no /mnt to write to");
    };
    fs::create_dir_all(folder.path().join("etc")).unwrap();
    fs::write(folder.path().join("etc/here"), "here").unwrap();
    let ground = Ground::new();
    let path = folder.path().to_str().unwrap().to_owned();
    let spec = InstanceSpec { image: Image::Directory { path }, ..InstanceSpec::host(600_000) };
    let sandbox = ground.create_from(spec).await;
    let mut file = ground.provider.file_read(&sandbox.instance(), "/etc/here", 0, None).await.unwrap();
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut file, &mut text).await.unwrap();
    assert_eq!(text, "here");
    sandbox.destroy().await;
    assert_clean(&ground);
}

/// Whoever holds a sandbox still to copy it, and dies, lets it run on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l13_a_sandbox_runs_on_when_its_copier_is_killed() {
    let ground = Ground::new();
    let spec = InstanceSpec::host(600_000);
    let sandbox = Sandbox { ground: &ground, id: SandboxId::from_bytes(fresh_bytes()) };
    ground.provider.create(&mutation(1, 0), &sandbox.id, &ground.owner, &spec).await.unwrap();
    let fill = viv_core::ExecutionId::from_bytes(fresh_bytes());
    let script = support::sh(
        "mkdir /workspace/d; cd /workspace/d; for i in $(seq 1 4000); do echo $i > $i; done; while :; do echo x; sleep 0.02; done",
    );
    ground.provider.execute(&mutation(1, 0), &sandbox.id, &fill, &script).await.unwrap();
    let frozen = || {
        let cgroup = ground
            .cgroups()
            .into_iter()
            .find_map(|folder| fs::read_to_string(folder.join(sandbox.id.as_str()).join("cgroup.freeze")).ok());
        cgroup.is_some_and(|text| text.starts_with('1'))
    };
    eventually("all is written", || {
        let folder = ground.data.join("layers/active").join(format!("{}.1/parts/root/workspace/d", sandbox.id));
        fs::read_dir(folder).is_ok_and(|entries| entries.count() == 4000)
    });
    let mut caught = 0;
    for _ in 0..20 {
        let mut copier = ground
            .viv()
            .args(["save", "--live", sandbox.id.as_str()])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let held = support::eventually_quietly(|| frozen() || copier.try_wait().unwrap().is_some());
        assert!(held);
        if copier.try_wait().unwrap().is_none() {
            copier.kill().unwrap();
            caught += 1;
        }
        copier.wait().unwrap();
        eventually("it runs on", || !frozen());
        if caught == 3 {
            break;
        }
    }
    assert!(caught > 0, "no copier was caught while it copied");
    let instance = sandbox.instance();
    let before = ground.provider.execution(&instance, &fill).await.unwrap().output_bytes;
    eventually("it goes on writing", || {
        tokio::task::block_in_place(|| {
            let status = ground.provider.execution(&instance, &fill);
            tokio::runtime::Handle::current().block_on(status).unwrap().output_bytes > before
        })
    });
    ground.provider.destroy(&mutation(1, 0), &sandbox.id).await.unwrap();
    for seen in ground.provider.snapshots(&ground.owner, PageRequest::default()).await.unwrap().items {
        ground.provider.remove_snapshot(&mutation(1, 0), &sandbox.id, &seen.snapshot.id).await.unwrap();
    }
    assert_clean(&ground);
}

/// The file of a snapshot is what it says, byte by byte.
#[test]
fn a_file_that_was_changed_on_its_way_is_refused() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let ground = Ground::new();
    let (file, saved) = runtime.block_on(async {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        sandbox.run("head -c 30000 /dev/urandom > /workspace/f").await;
        let saved = save(&sandbox, false).await;
        sandbox.destroy().await;
        let file = ground.data.join("e.snap");
        ground.provider.export_snapshot(&saved.id, &file).unwrap();
        (file, saved)
    });
    let mut whole = Vec::new();
    fs::File::open(&file).unwrap().read_to_end(&mut whole).unwrap();
    for part in 0..20 {
        let at = part * whole.len() / 20;
        let mut changed = whole.clone();
        changed[at] ^= 0x10;
        fs::write(&file, &changed).unwrap();
        let (id, operation) = (SnapshotId::from_bytes(fresh_bytes()), OperationId::from_bytes(fresh_bytes()));
        let imported = ground.provider.import_snapshot(&file, &id, &ground.owner, &operation);
        assert!(imported.is_err(), "a change at {at} of {} was not noticed", whole.len());
    }
    fs::write(&file, &whole[..whole.len() - 3]).unwrap();
    let (id, operation) = (SnapshotId::from_bytes(fresh_bytes()), OperationId::from_bytes(fresh_bytes()));
    assert!(ground.provider.import_snapshot(&file, &id, &ground.owner, &operation).is_err(), "cut short");
    runtime.block_on(forget(&ground, &saved));
    assert_clean(&ground);
}

/// What is damaged can be brought in again, but not from under those who stand on it.
#[tokio::test]
async fn l11_a_damaged_layer_is_replaced_when_nobody_uses_it() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.run("echo kept > /workspace/f; echo other > /workspace/g").await;
    let saved = save(&sandbox, false).await;
    sandbox.destroy().await;
    let file = ground.data.join("e.snap");
    ground.provider.export_snapshot(&saved.id, &file).unwrap();
    let import = || {
        let (id, operation) = (SnapshotId::from_bytes(fresh_bytes()), OperationId::from_bytes(fresh_bytes()));
        ground.provider.import_snapshot(&file, &id, &ground.owner, &operation)
    };
    let imported = import().unwrap();
    let user = restore(&ground, &InstanceSpec::host(600_000), &imported.id).await.unwrap();
    let layers = fs::read_dir(ground.data.join("layers/sealed")).unwrap();
    let layer =
        layers.map(|entry| entry.unwrap().path()).find(|path| path.is_dir() && path.to_string_lossy().contains("/b3-"));
    fs::remove_file(layer.unwrap().join("parts/root/workspace/g")).unwrap();
    assert!(!ground.provider.check_store(false).unwrap().is_clean());

    let refused = import().unwrap_err();
    assert!(std::error::Error::source(&refused).unwrap().to_string().contains("still there"), "{refused:?}");
    assert_eq!(user.run("cat /workspace/f").await.0, "kept\n");
    user.destroy().await;
    let again = import().unwrap();
    let restored = restore(&ground, &InstanceSpec::host(600_000), &again.id).await.unwrap();
    assert_eq!(restored.run("cat /workspace/g").await.0, "other\n");
    restored.destroy().await;
    assert!(ground.provider.check_store(true).unwrap().is_clean());
    for snapshot in [saved, imported, again] {
        forget(&ground, &snapshot).await;
    }
    assert_clean(&ground);
}

/// A fork of what is gone says so at once, whatever its own id is.
#[tokio::test]
async fn a_fork_of_itself_is_absent() {
    let ground = Ground::new();
    let sandbox = SandboxId::from_bytes(fresh_bytes());
    let source = InstanceRef { sandbox: sandbox.clone(), generation: viv_core::Generation::FIRST };
    let spec = InstanceSpec::host(600_000);
    let refused = ground.provider.fork(&mutation(1, 1), &sandbox, &ground.owner, &spec, &source).await;
    assert!(matches!(refused, Err(ProviderError::Absent)), "{refused:?}");
    assert_clean(&ground);
}

/// L10: what does not show its identity is not acknowledged, its files are kept, and the next try succeeds.
#[tokio::test]
async fn l10_a_save_that_fails_its_check_keeps_everything() {
    for ground in both() {
        let sandbox = ground.create(Duration::from_secs(5)).await;
        sandbox.run("echo kept > /workspace/f").await;
        ground.provider.wait_end(&sandbox.instance()).await.unwrap();
        let root = ground.data.join("layers/active").join(format!("{}.1/parts/root", sandbox.id));
        let identity = root.join(".vivarium/identity.json");
        let right = fs::read(&identity).unwrap();
        fs::write(&identity, String::from_utf8(right.clone()).unwrap().replace(":1}", ":7}")).unwrap();
        let refused = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(false)).await;
        assert!(matches!(&refused, Err(ProviderError::Failed { what }) if what.contains("identity")), "{refused:?}");
        assert!(matches!(sandbox.state().await, InstanceState::Ended(_)));
        let listed = ground.provider.snapshots(&ground.owner, PageRequest::default()).await.unwrap();
        assert!(listed.items.is_empty() && root.join("workspace/f").exists(), "{listed:?}");

        fs::write(&identity, right).unwrap();
        let saved = save(&sandbox, false).await;
        sandbox.destroy().await;
        let restored = restore(&ground, &InstanceSpec::host(600_000), &saved.id).await.unwrap();
        assert_eq!(restored.run("cat /workspace/f").await.0, "kept\n");
        restored.destroy().await;
        forget(&ground, &saved).await;
        assert_clean(&ground);
    }
}
