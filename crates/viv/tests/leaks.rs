//! Nothing leaks: hundreds of create, use, destroy, with everybody killed at random (L20, J1, J4, P8, incidents 6 to 8, 26, 29).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Chance, Ground, eventually, kill, mutation, pids, sh};
use viv_core::{ExecutionId, OwnerMark, SandboxId};
use viv_provider::{InstanceRef, InstanceSpec, PageRequest, Provider};
use viv_sandbox::cgroup::Layout;

/// Cycles, unless `VIV_LEAK_CYCLES` says otherwise.
const CYCLES: u64 = 300;
const AT_ONCE: u64 = 4;

/// What of ours there is on the machine.
#[derive(Debug, PartialEq, Eq)]
struct Inventory {
    processes: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
    mounts: BTreeSet<String>,
    namespaces: BTreeSet<PathBuf>,
    sockets: BTreeSet<String>,
    directories: BTreeSet<PathBuf>,
    descriptors: usize,
}

impl Inventory {
    fn take(ground: &Ground) -> Self {
        let own_pid_namespace = fs::read_link("/proc/self/ns/pid").unwrap();
        let mut inventory = Self {
            processes: BTreeSet::new(),
            cgroups: BTreeSet::new(),
            mounts: fs::read_to_string("/proc/self/mountinfo").unwrap().lines().map(str::to_owned).collect(),
            namespaces: BTreeSet::new(),
            sockets: BTreeSet::new(),
            directories: BTreeSet::new(),
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
        };
        for pid in pids() {
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            let inside = fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|found| found != own_pid_namespace);
            let ours =
                exe.file_name().is_some_and(|name| name == "viv" || name.to_string_lossy().starts_with("viv-agent"));
            if inside || ours {
                inventory.processes.insert(format!("{pid} {}", exe.display()));
            }
            for kind in ["mnt", "pid", "user", "net", "ipc", "uts", "cgroup"] {
                inventory.namespaces.extend(fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok());
            }
        }
        for mount in Layout::detect().unwrap().mounts() {
            walk(mount, &mut inventory.cgroups);
        }
        let data = ground.data.to_string_lossy().into_owned();
        let unix = fs::read_to_string("/proc/net/unix").unwrap();
        inventory.sockets = unix.lines().filter(|line| line.contains(&data)).map(str::to_owned).collect();
        walk(&ground.data, &mut inventory.directories);
        for place in ["/run", "/var/run", "/mnt", "/dev/shm"] {
            walk(Path::new(place), &mut inventory.directories);
        }
        inventory
    }

    /// What is here and was not there.
    fn more_than(&self, before: &Self) -> Vec<String> {
        fn added<T: Ord + std::fmt::Debug>(what: &str, now: &BTreeSet<T>, before: &BTreeSet<T>) -> Vec<String> {
            now.difference(before).map(|item| format!("{what}: {item:?}")).collect()
        }
        [
            added("process", &self.processes, &before.processes),
            added("cgroup", &self.cgroups, &before.cgroups),
            added("mount", &self.mounts, &before.mounts),
            added("namespace", &self.namespaces, &before.namespaces),
            added("socket", &self.sockets, &before.sockets),
            added("directory", &self.directories, &before.directories),
            (self.descriptors > before.descriptors)
                .then(|| format!("descriptors: {} instead of {}", self.descriptors, before.descriptors))
                .into_iter()
                .collect(),
        ]
        .concat()
    }
}

fn walk(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), found);
            found.insert(entry.path());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p8_incident_8_after_the_storm_nothing_is_left() {
    let cycles = std::env::var("VIV_LEAK_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(CYCLES);
    let chance = Chance::from_env("VIV_LEAK_SEED");
    let ground = Arc::new(Ground::new());
    // Once in peace, so that folders and descriptors that stay for good are there before the count.
    cycle(&ground, &chance, false).await;
    eventually("the first one is gone", || ground.processes().is_empty());
    let before = Inventory::take(&ground);

    let seconds = std::env::var("VIV_LEAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let storm = Storm::begin(ground.clone(), chance.clone());
    let done = Arc::new(AtomicU64::new(0));
    let mut lanes = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let (ground, chance, done) = (ground.clone(), chance.clone(), done.clone());
        lanes.spawn(async move {
            // For so long, or so many.
            let mut mine = 0;
            while until.map_or(mine < cycles / AT_ONCE, |until| Instant::now() < until) {
                cycle(&ground, &chance, true).await;
                mine += 1;
            }
            done.fetch_add(mine, Ordering::Relaxed);
        });
    }
    while let Some(lane) = lanes.join_next().await {
        lane.unwrap();
    }
    let (killed, cycles) = (storm.end(), done.load(Ordering::Relaxed));
    eprintln!("{killed} processes were killed in {cycles} cycles");
    assert!(killed > cycles / 10, "that was no storm: {killed}");

    // What killed creators left is found and collected, as a daemon does when it starts.
    let reopened = ground.reopen();
    for owner in [ground.owner.clone(), "by-hand".parse().unwrap()] {
        destroy_all(&reopened, &owner).await;
    }
    drop(reopened);
    let mut left = Vec::new();
    let gone = || {
        left = Inventory::take(&ground).more_than(&before);
        left.is_empty()
    };
    let deadline = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| eventually("nothing is left", gone)));
    assert!(deadline.is_ok(), "left:\n{}", left.join("\n"));
    ground.assert_nothing_left();
}

/// Create, use, destroy. In the storm every step but the last may fail.
async fn cycle(ground: &Ground, chance: &Chance, storm: bool) {
    if storm && chance.below(4) == 0 {
        return creator_killed(ground, chance).await;
    }
    let sandbox = SandboxId::from_bytes(support::fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    let created = ground.provider.create(&mutation(1, 1), &sandbox, &ground.owner, &spec).await;
    assert!(storm || created.is_ok(), "{created:?}");
    let execution = ExecutionId::from_bytes(support::fresh_bytes());
    let script = sh("(setsid sleep 100 &); echo used; sleep 0.01");
    if ground.provider.execute(&mutation(1, 1), &sandbox, &execution, &script).await.is_ok() {
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: viv_core::Generation::FIRST };
        if let Ok(mut output) = ground.provider.attach(&instance, &execution, 0, true).await {
            while let Ok(Some(_)) = output.next().await {}
        }
    }
    ground.provider.destroy(&mutation(1, 2), &sandbox).await.unwrap();
}

/// A creator of its own, killed at some moment.
async fn creator_killed(ground: &Ground, chance: &Chance) {
    let mut creator =
        ground.viv().arg("create").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    tokio::time::sleep(Duration::from_millis(chance.below(80))).await;
    let _ = creator.kill();
    creator.wait().unwrap();
}

/// Kills shims, agents and creators as they come.
struct Storm {
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Storm {
    fn begin(ground: Arc<Ground>, chance: Chance) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let until = over.clone();
        let thread = std::thread::spawn(move || {
            let mut killed = 0;
            while !until.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(chance.below(60)));
                let victims: Vec<_> = ground.processes().into_iter().collect();
                if !victims.is_empty() {
                    kill(victims[chance.below(victims.len() as u64) as usize], Signal::KILL);
                    killed += 1;
                }
            }
            killed
        });
        Self { over, thread }
    }

    fn end(self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

async fn destroy_all(provider: &viv_sandbox::LocalProvider, owner: &OwnerMark) {
    loop {
        let page = provider.list(owner, PageRequest::default()).await.unwrap();
        assert!(!page.is_partial(), "{page:?}");
        if page.items.is_empty() {
            return;
        }
        for item in page.items {
            provider.destroy(&mutation(1, 3), &item.instance.sandbox).await.unwrap();
        }
    }
}
