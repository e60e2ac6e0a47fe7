//! Limits as the kernel has them, and as people ask for them (S1).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use support::{Ground, Sandbox, eventually, kill, mutation, stdout};
use viv_provider::{InstanceSpec, InstanceState, ObservedVia, Provider, ResourceLimits, UNLIMITED};
use viv_sandbox::Runtime;
use viv_sandbox::cgroup::{Controller, Layout};

/// What the kernel has in a file of the sandbox's cgroup, by its name in each hierarchy.
fn kernel(sandbox: &Sandbox<'_>, controller: Controller, v1: &str, v2: &str) -> String {
    let layout = Layout::detect().unwrap();
    let own = format!("{}/{}", sandbox.ground.cgroup_prefix, sandbox.id);
    let path = match layout.v1_of(controller) {
        Some(mount) => mount.join(own).join(v1),
        None => layout.v2.expect("a hierarchy").join(own).join(v2),
    };
    fs::read_to_string(path).unwrap().trim().to_owned()
}

async fn set(sandbox: &Sandbox<'_>, change: ResourceLimits) -> ResourceLimits {
    sandbox.ground.provider.set_limits(&mutation(1, 1), &sandbox.id, &change).await.unwrap()
}

async fn in_force(sandbox: &Sandbox<'_>) -> ResourceLimits {
    sandbox.ground.provider.observe(&sandbox.instance()).await.unwrap().limits.unwrap()
}

#[tokio::test]
async fn s1_a_spec_that_says_nothing_is_bounded() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let limits = in_force(&sandbox).await;
    assert!(limits.memory_bytes.is_some() && limits.open_files.is_some(), "{limits:?}");
    assert_eq!((limits.processes, limits.cpu_weight), (Some(512), Some(100)));
    assert_eq!(kernel(&sandbox, Controller::Pids, "pids.max", "pids.max"), "512");
    let bytes = limits.memory_bytes.unwrap().to_string();
    let kernel_bytes: u64 =
        kernel(&sandbox, Controller::Memory, "memory.limit_in_bytes", "memory.max").parse().unwrap();
    // The kernel counts in pages.
    assert_eq!(kernel_bytes, bytes.parse::<u64>().unwrap() / 4096 * 4096);
    sandbox.destroy().await;

    let spec = InstanceSpec { limits: ResourceLimits::unlimited(), ..InstanceSpec::host(600_000) };
    let sandbox = ground.create_from(spec).await;
    assert_eq!(in_force(&sandbox).await, ResourceLimits::default());
    assert_eq!(kernel(&sandbox, Controller::Pids, "pids.max", "pids.max"), "max");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// With both runtimes, since neither may write limits of its own.
#[tokio::test]
async fn the_kernel_has_what_is_in_force_before_and_after_a_change() {
    for ground in [Ground::new(), Ground::with_runtime(Runtime::Binary("runc".into()))] {
        let mut spec = InstanceSpec::host(600_000);
        spec.limits = ResourceLimits {
            cpu_millis: Some(1500),
            cpu_weight: Some(200),
            cpu_burst_us: Some(50_000),
            memory_bytes: Some(128 << 20),
            processes: Some(99),
            io_read_bps: Some(64 << 20),
            ..ResourceLimits::default()
        };
        let sandbox = ground.create_from(spec).await;
        let quota = || kernel(&sandbox, Controller::Cpu, "cpu.cfs_quota_us", "cpu.max");
        let memory = || kernel(&sandbox, Controller::Memory, "memory.limit_in_bytes", "memory.max");
        let processes = || kernel(&sandbox, Controller::Pids, "pids.max", "pids.max");
        let io = || kernel(&sandbox, Controller::Io, "blkio.throttle.read_bps_device", "io.max");
        assert!(quota().starts_with("150000"), "{}", quota());
        assert_eq!(kernel(&sandbox, Controller::Cpu, "cpu.cfs_burst_us", "cpu.max.burst"), "50000");
        assert_eq!((memory(), processes()), ((128 << 20).to_string(), "99".to_owned()));
        assert!(io().contains(&(64 << 20).to_string()), "{}", io());

        let before = in_force(&sandbox).await;
        let change = ResourceLimits {
            cpu_millis: Some(UNLIMITED),
            cpu_burst_us: Some(UNLIMITED),
            memory_bytes: Some(256 << 20),
            processes: Some(77),
            io_read_bps: Some(UNLIMITED),
            ..ResourceLimits::default()
        };
        let after = set(&sandbox, change.clone()).await;
        assert_eq!(after, change.or(&before).in_force());
        assert!(quota().starts_with("-1") || quota().starts_with("max"), "{}", quota());
        assert_eq!((memory(), processes()), ((256 << 20).to_string(), "77".to_owned()));
        assert!(!io().contains(&(64 << 20).to_string()), "{}", io());
        // It is refused as a whole, and the kernel has what it had.
        let bad = ResourceLimits { processes: Some(55), cpu_weight: Some(0), ..ResourceLimits::default() };
        ground.provider.set_limits(&mutation(1, 1), &sandbox.id, &bad).await.unwrap_err();
        assert_eq!(processes(), "77");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

#[tokio::test]
async fn what_was_changed_outlives_the_daemon_and_the_shim() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let change = ResourceLimits { processes: Some(321), open_files: Some(123), ..ResourceLimits::default() };
    let after = set(&sandbox, change).await;
    let seen = ground.reopen().observe(&sandbox.instance()).await.unwrap();
    assert_eq!((seen.via, seen.limits.as_ref()), (ObservedVia::Supervisor, Some(&after)));
    assert_eq!(sandbox.run("ulimit -n").await.0, "123\n");
    kill(sandbox.shim_pid(), Signal::KILL);
    eventually("nothing runs", || ground.processes().is_empty());
    let seen = ground.reopen().observe(&sandbox.instance()).await.unwrap();
    assert!(matches!(seen.state, InstanceState::Ended(_)), "{:?}", seen.state);
    assert_eq!((seen.via, seen.limits.as_ref()), (ObservedVia::Record, Some(&after)));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// A link that an agent put where the shim writes leads nowhere.
#[tokio::test]
async fn s4_nothing_that_lies_in_the_agents_folder_is_opened_to_tell_of_limits() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let victim = ground.data.join("victim");
    fs::write(&victim, "untouched").unwrap();
    let run = sandbox.folder().join("run");
    std::os::unix::fs::symlink(&victim, run.join(".limits.new")).unwrap();
    std::os::unix::fs::symlink(&victim, run.join("limits.json")).unwrap();
    set(&sandbox, ResourceLimits { open_files: Some(200), ..ResourceLimits::default() }).await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    assert_eq!(sandbox.run("ulimit -n").await.0, "200\n");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn people_ask_for_limits_in_their_words() {
    let ground = Ground::new();
    let created = ground.viv().args(["create", "--memory", "256M", "--cpus", "0.5", "--open-files", "500"]).output();
    let sandbox = stdout(&created.unwrap());
    let limit = |args: &[&str]| ground.viv().args(["limit", &sandbox]).args(args).output().unwrap();
    let shown = stdout(&limit(&[]));
    for line in ["cpus        0.500", "memory      256.0 MiB", "processes   512", "open files  500"] {
        assert!(shown.contains(line), "{line:?} is not in\n{shown}");
    }
    let shown = stdout(&limit(&["--memory", "1G", "--cpus", "unlimited", "--processes", "200"]));
    for line in ["cpus        unlimited", "memory      1.0 GiB", "processes   200", "open files  500"] {
        assert!(shown.contains(line), "{line:?} is not in\n{shown}");
    }
    assert!(stdout(&limit(&["--json"])).contains("\"processes\":200"));
    let refused = limit(&["--cpu-weight", "20000"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("between 1 and 10000") && said.contains("hint:"), "{said}");
    assert!(ground.viv().args(["rm", &sandbox]).status().unwrap().success());
    ground.assert_nothing_left();
}
