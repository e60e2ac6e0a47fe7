//! Disk limits by project quota. Most kernels have it and some have not: there, these pass over and say so, and
//! `make quota` runs them in a kernel that has.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::Instant;

use support::disk::Disk;
use support::{Ground, LocalWorld, fresh_bytes, mutation, stdout};
use viv_core::exec::ExecState;
use viv_core::{SandboxId, SnapshotId};
use viv_provider::conformance::{cases, run_named};
use viv_provider::{InstanceSpec, Provider, ProviderError, ResourceLimits, SaveRequest};
use viv_sandbox::{DriverKind, LimitedBy};

const EXT4: &[&str] = &["mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"];
const XFS: &[&str] = &["mkfs.xfs", "-q"];

/// Cases of the conformance suite by how they begin; `VIV_TEST_CASES` names others. The guest of `make quota` is slow,
/// and cases with short deadlines do not pass in it.
const THEMES: &str = "disk:: forks::fork_leaves_the_source_alone";

/// A filesystem that counts projects, if the kernel can. With `VIV_TEST_QUOTA` it has to.
fn disk(mkfs: &[&str]) -> Option<Disk> {
    match Disk::make(mkfs, "loop,prjquota", 768) {
        Ok(disk) => Some(disk),
        Err(why) if std::env::var_os("VIV_TEST_QUOTA").is_none() => {
            eprintln!("PASSED OVER: {} with project quota: {why} (make quota runs this)", mkfs[0]);
            None
        }
        Err(why) => panic!("{mkfs:?}: {why}"),
    }
}

/// A ground on each of the filesystems.
fn grounds() -> impl Iterator<Item = (Ground, Disk)> {
    [EXT4, XFS].into_iter().filter_map(disk).map(|disk| (Ground::at(&disk.path(), |_| {}), disk))
}

fn limited(mib: u64) -> InstanceSpec {
    let limits = ResourceLimits { disk_bytes: Some(mib << 20), ..ResourceLimits::default() };
    InstanceSpec { limits, ..InstanceSpec::host(600_000) }
}

fn request(live: bool) -> SaveRequest {
    SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live, memory: false }
}

fn pass_the_suite(mkfs: &[&str]) {
    let themes = std::env::var("VIV_TEST_CASES").unwrap_or_else(|_| THEMES.to_owned());
    for case in cases().iter().filter(|case| themes.split_whitespace().any(|theme| case.name.starts_with(theme))) {
        // One each, so that nothing of one case is charged to another.
        let Some(disk) = disk(mkfs) else { return };
        let since = Instant::now();
        run_named(case.name, async { LocalWorld(Ground::at(&disk.path(), |_| {})) });
        eprintln!("{}: {:?}", case.name, since.elapsed());
    }
}

#[test]
fn the_suite_passes_with_projects_of_ext4() {
    pass_the_suite(EXT4);
}

#[test]
fn the_suite_passes_with_projects_of_xfs() {
    pass_the_suite(XFS);
}

/// Also a driver that limits says how.
#[test]
fn a_filesystem_that_counts_projects_is_used_and_told() {
    for (ground, _disk) in grounds() {
        assert_eq!(ground.provider.driver(), DriverKind::Plain);
        assert_eq!(ground.provider.limited_by(), Some(LimitedBy::ProjectQuota));
        let told = stdout(&ground.verb("doctor").output().unwrap());
        assert!(told.contains("yes  limit disk, by project quota"), "{told}");
    }
}

/// Space and files end, removing gives both back, and what is full can be saved and started again.
#[tokio::test]
async fn a_full_project_takes_no_more_and_starts_again() {
    for (ground, _disk) in grounds() {
        let sandbox = ground.create_from(limited(48)).await;
        let script = "head -c 100000000 /dev/zero > /workspace/f; echo $?; rm /workspace/f; \
                      head -c 1000000 /dev/zero > /usr/g && sync && echo room";
        let (said, _) = sandbox.run(script).await;
        assert!(said.contains('1') && said.ends_with("room\n"), "{said}");
        let (said, _) = sandbox.run("head -c 100000000 /dev/zero > /workspace/full; echo $?; sync").await;
        assert!(said.trim_end().ends_with('1'), "{said}");
        let used = ground.provider.disk_usage(&sandbox.instance()).await.unwrap();
        assert!((40 << 20..=48 << 20).contains(&used.own_bytes), "{used:?}");

        let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(false)).await.unwrap();
        sandbox.destroy().await;
        let other = SandboxId::from_bytes(fresh_bytes());
        let seen =
            ground.provider.restore(&mutation(1, 1), &other, &ground.owner, &limited(48), &saved.id).await.unwrap();
        let script = "head -c 20000000 /dev/zero > /workspace/more; echo $?; stat -c %s /workspace/full; \
                      rm -f /workspace/more && echo x > /workspace/little && echo room";
        let (said, _) = ground.run(&seen.instance, 1, script).await;
        assert!(said.contains("1\n") && said.ends_with("room\n"), "{said}");
        // Less than is there already is refused.
        let third = SandboxId::from_bytes(fresh_bytes());
        let refused = ground.provider.restore(&mutation(1, 1), &third, &ground.owner, &limited(16), &saved.id).await;
        assert!(matches!(refused, Err(ProviderError::Exhausted { .. })), "{refused:?}");
        let refused = ground.provider.fork(&mutation(1, 1), &third, &ground.owner, &limited(16), &seen.instance).await;
        assert!(matches!(refused, Err(ProviderError::Exhausted { .. })), "{refused:?}");

        ground.provider.destroy(&mutation(1, 1), &other).await.unwrap();
        ground.provider.remove_snapshot(&mutation(1, 1), &sandbox.id, &saved.id).await.unwrap();
        ground.assert_nothing_left();
        ground.assert_no_layer_left();
    }
}

/// Files that hold nothing take no space, and would still use up what all sandboxes share.
#[tokio::test]
async fn empty_files_come_to_an_end_too() {
    for (ground, _disk) in grounds() {
        let sandbox = ground.create_from(limited(16)).await;
        let script = "cd /workspace; i=0; while [ $i -lt 4000 ] && true > f$i; do i=$((i + 1)); done; \
                      echo $i; rm f*; true > again && echo room";
        let (said, status) = sandbox.run(&format!("({script}) 2>/dev/null")).await;
        assert_eq!(status.state, ExecState::Exited { code: 0 }, "{said}");
        let count: u64 = said.lines().next().unwrap().parse().unwrap();
        assert!((1_500..=2_048).contains(&count) && said.ends_with("room\n"), "{said}");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

/// Whoever could give his files to another project would be rid of his limit.
#[tokio::test]
async fn s5_nobody_inside_gets_out_of_his_project() {
    for (ground, _disk) in grounds() {
        let sandbox = ground.create_from(limited(32)).await;
        let script = "command -v chattr || echo changed; cd /workspace; mkdir d; \
                      for p in 0 7; do chattr -p $p d && echo changed; done; \
                      chattr -P d; chattr -p 0 /workspace && echo changed; \
                      head -c 60000000 /dev/zero > d/f; echo $?";
        let (said, _) = sandbox.run(script).await;
        assert!(!said.contains("changed") && said.trim_end().ends_with('1'), "{said}");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}
