//! Where layers lie: what is chosen by itself, what it can do there, and that it is found again.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use support::disk::Disk;
use support::{Ground, fresh_bytes, mutation, stdout};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{Capability, InstanceSpec, InstanceState, Provider, ProviderError, ResourceLimits, SaveRequest};
use viv_sandbox::{DriverKind, LocalConfig, LocalProvider, StoreConfig};

fn request(live: bool) -> SaveRequest {
    SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory: false }
}

#[tokio::test]
async fn a_data_folder_on_btrfs_uses_it_and_limits_only_with_quota_groups() {
    let disk = Disk::make(&["mkfs.btrfs", "-q"], "loop", 512).unwrap();
    let ground = Ground::at(&disk.path(), |_| {});
    assert_eq!(ground.provider.driver(), DriverKind::Btrfs);
    assert!(!ground.data.join("pool.btrfs").exists(), "a pool was made although there is no need for one");
    let capabilities = ground.provider.capabilities();
    let why = capabilities.missing.get(&Capability::LimitDisk).unwrap();
    assert!(why.contains("btrfs quota enable"), "{why}");
    let spec = InstanceSpec {
        limits: ResourceLimits { disk_bytes: Some(64 << 20), ..ResourceLimits::default() },
        ..InstanceSpec::host(600_000)
    };
    let sandbox = SandboxId::from_bytes(fresh_bytes());
    let refused = ground.provider.create(&mutation(1, 1), &sandbox, &ground.owner, &spec).await;
    assert!(
        matches!(refused, Err(ProviderError::Unsupported { capability: Capability::LimitDisk, .. })),
        "{refused:?}"
    );

    let enabled = Command::new("btrfs").args(["quota", "enable"]).arg(disk.path()).output().unwrap();
    assert!(enabled.status.success(), "{enabled:?}");
    let reopened = ground.reopen();
    assert!(reopened.capabilities().can(Capability::LimitDisk));
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (_, status) = sandbox.run("head -c 20000000 /dev/urandom > /workspace/f").await;
    assert!(status.state.is_final());
    let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(true)).await.unwrap();
    assert_eq!(saved.cost.copied_bytes, 0, "{saved:?}");
    assert_eq!(sandbox.state().await, InstanceState::Running);
    sandbox.destroy().await;
    ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}

#[tokio::test]
async fn where_files_can_share_their_blocks_nothing_is_copied() {
    let disk = Disk::make(&["mkfs.xfs", "-q", "-m", "reflink=1"], "loop", 512).unwrap();
    let ground = Ground::at(&disk.path(), |_| {});
    assert_eq!(ground.provider.driver(), DriverKind::Plain);
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.run("head -c 20000000 /dev/urandom > /workspace/f").await;
    let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(true)).await.unwrap();
    assert!(saved.size_bytes > 20_000_000 && saved.cost.copied_bytes < 1_000_000, "{saved:?}");
    sandbox.destroy().await;
    ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}

fn open(data: &Path, driver: Option<DriverKind>) -> Result<LocalProvider, viv_sandbox::OpenError> {
    let mut config = LocalConfig::new(data.to_owned(), support::VIV.into());
    config.store = StoreConfig { driver, pool_bytes: None };
    LocalProvider::open(config)
}

#[tokio::test]
async fn a_pool_is_found_again_after_a_reboot_and_in_other_namespaces() {
    let ground = Ground::on_btrfs();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.run("echo kept > /workspace/f").await;
    let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(false)).await.unwrap();
    sandbox.destroy().await;

    // Where it is not mounted, the device that is there already is used: a second one would destroy it.
    let listed = Command::new("unshare")
        .args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            "umount \"$VIV_DATA/local/layers\" && exec \"$@\"",
            "sh",
        ])
        .args([support::VIV, "local", "image", "check", "--deep"])
        .env("VIV_DATA", ground.folder())
        .output()
        .unwrap();
    assert!(listed.status.success() && stdout(&listed).contains("clean: 1 layers"), "{listed:?}");
    let devices = Command::new("losetup").arg("--associated").arg(ground.data.join("pool.btrfs")).output().unwrap();
    assert_eq!(stdout(&devices).lines().count(), 1, "{devices:?}");

    // As after a reboot: nothing is mounted.
    unmount(ground.data.join("layers"), UnmountFlags::empty()).unwrap();
    let reopened = ground.reopen();
    let other = SandboxId::from_bytes(fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    let seen = reopened.restore(&mutation(1, 1), &other, &ground.owner, &spec, &saved.id).await.unwrap();
    let found = reopened.file_read(&seen.instance, "/workspace/f", 0, None).await;
    let mut text = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut found.unwrap(), &mut text).await.unwrap();
    assert_eq!(text, "kept\n");
    reopened.destroy(&mutation(1, 1), &other).await.unwrap();
    reopened.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
    ground.assert_nothing_left();
    ground.assert_no_layer_left();
}

#[test]
fn the_driver_of_a_data_folder_is_chosen_once() {
    let ground = Ground::new();
    assert_eq!(ground.provider.driver(), DriverKind::Plain);
    let refused = open(&ground.data, Some(DriverKind::Btrfs)).map(|_| ()).unwrap_err();
    let said = format!("{}", std::error::Error::source(&refused).unwrap());
    assert!(said.contains("kept by the plain driver"), "{said}");
    assert!(open(&ground.data, None).is_ok());
}

/// A limit that a snapshot has passed already is told, and nothing is left.
#[tokio::test]
async fn a_limit_below_what_is_saved_is_refused() {
    for ground in [Ground::new(), Ground::on_btrfs()] {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        sandbox.run("head -c 60000000 /dev/urandom > /workspace/f").await;
        let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(false)).await.unwrap();
        let spec = InstanceSpec {
            limits: ResourceLimits { disk_bytes: Some(32 << 20), ..ResourceLimits::default() },
            ..InstanceSpec::host(600_000)
        };
        let other = SandboxId::from_bytes(fresh_bytes());
        let refused = ground.provider.restore(&mutation(1, 1), &other, &ground.owner, &spec, &saved.id).await;
        assert!(matches!(refused, Err(ProviderError::Exhausted { .. })), "{refused:?}");
        sandbox.destroy().await;
        ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
        ground.assert_nothing_left();
        ground.assert_no_layer_left();
    }
}

/// A disk that ends inside ends for commands too, and the sandbox lives on.
#[tokio::test]
async fn a_full_disk_stops_a_command_and_nothing_else() {
    for ground in [Ground::new(), Ground::on_btrfs()] {
        let spec = InstanceSpec {
            limits: ResourceLimits { disk_bytes: Some(48 << 20), ..ResourceLimits::default() },
            ..InstanceSpec::host(600_000)
        };
        let sandbox = ground.create_from(spec).await;
        let script = "head -c 100000000 /dev/urandom > /workspace/f; echo $?; rm /workspace/f; \
                      head -c 1000000 /dev/urandom > /usr/local/g && sync && echo room";
        let (said, _) = sandbox.run(script).await;
        assert!(said.contains('1') && said.ends_with("room\n"), "{said}");
        // What is full can be saved, and is as full when it is restored.
        let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(true)).await.unwrap();
        sandbox.destroy().await;
        ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
        ground.assert_nothing_left();
        ground.assert_no_layer_left();
    }
}

/// What layers take on disk, each file once.
fn used_bytes(ground: &Ground) -> u64 {
    let layers = ground.data.join("layers");
    rustix::fs::syncfs(std::fs::File::open(&layers).unwrap()).unwrap();
    if ground.provider.driver() == DriverKind::Btrfs {
        // Blocks that are shared are counted with each file there, so the pool is asked.
        let pool = rustix::fs::statvfs(&layers).unwrap();
        return (pool.f_blocks - pool.f_bfree) * pool.f_frsize;
    }
    let counted = Command::new("du").args(["-s", "--block-size=1"]).arg(&layers).output().unwrap();
    stdout(&counted).split_whitespace().next().unwrap().parse().unwrap()
}

/// What is made from a snapshot stands on it, on either driver; only what still lives has to be copied on `plain`.
#[tokio::test]
async fn l11_what_is_forked_from_a_snapshot_takes_no_room() {
    const BYTES: u64 = 48 << 20;
    const LITTLE: u64 = 6 << 20;
    for ground in [Ground::new(), Ground::on_btrfs()] {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let (text, _) =
            sandbox.run(&format!("head -c {BYTES} /dev/urandom > /workspace/f; cksum < /workspace/f")).await;
        let live = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(true)).await.unwrap();
        let before = used_bytes(&ground);
        let (mut forks, spec) = (Vec::new(), InstanceSpec::host(600_000));
        for _ in 0..3 {
            let id = SandboxId::from_bytes(fresh_bytes());
            ground.provider.restore(&mutation(1, 1), &id, &ground.owner, &spec, &live.id).await.unwrap();
            let fork = support::Sandbox { ground: &ground, id };
            assert_eq!(fork.run("cksum < /workspace/f").await.0, text, "all of it is there");
            fork.run("echo own > /workspace/own").await;
            forks.push(fork);
        }
        let grown = used_bytes(&ground).saturating_sub(before);
        assert!(grown < LITTLE, "{}: {grown} bytes for three forks", ground.provider.driver());
        // Of the living one, all that is not shared by blocks is copied on `plain`, and that is declared.
        let id = SandboxId::from_bytes(fresh_bytes());
        ground.provider.fork(&mutation(1, 1), &id, &ground.owner, &spec, &sandbox.instance()).await.unwrap();
        let copied = used_bytes(&ground).saturating_sub(before + grown);
        if ground.provider.driver() == DriverKind::Btrfs {
            assert!(copied < LITTLE, "{copied} bytes for a fork of what lives");
        }
        println!("{}: three forks of a snapshot {grown} bytes, one of what lives {copied}", ground.provider.driver());
        forks.push(support::Sandbox { ground: &ground, id });
        for one in forks.iter().chain([&sandbox]) {
            one.destroy().await;
        }
        ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &live.id).await.unwrap();
        ground.assert_nothing_left();
        ground.assert_no_layer_left();
    }
}
