//! What saving costs: hibernating, restoring, forking and live snapshots, against the size of what was changed, with
//! both layer drivers, beside a plain copy of the same bytes on the same disk.
//!
//! Times are medians of a few rounds; ratios compare within this run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use viv_core::exec::{ExecSpec, OutputEvent};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId, SnapshotId};
use viv_provider::{InstanceRef, InstanceSpec, Provider, SaveRequest, Snapshot};
use viv_sandbox::{DriverKind, LocalConfig, LocalProvider, StoreConfig};

mod common;

use common::{fresh, median, mutation, ratio, show, timed};

/// Repetitions of each.
const ROUNDS: usize = 3;

/// Rounds of saving and restoring, to see whether they slow down.
const CYCLES: usize = 100;

/// Snapshots that a sandbox keeps which hibernates every day.
const KEPT: usize = 5;

/// Room for a gigabyte of changes several times.
const POOL_BYTES: u64 = 12 << 30;
const GROUND_BYTES: u64 = 14 << 30;

/// What is changed, and by which script.
const CHANGES: [(&str, &str); 5] = [
    ("1 MB", "head -c 1000000 /dev/urandom > /workspace/f"),
    ("10 MB", "head -c 10000000 /dev/urandom > /workspace/f"),
    ("100 MB", "head -c 100000000 /dev/urandom > /workspace/f"),
    ("1 GB", "head -c 1000000000 /dev/urandom > /workspace/f"),
    ("10,000 files", "mkdir -p /workspace/d; cd /workspace/d; seq 1 10000 | xargs -I{} sh -c 'echo {} > {}'"),
];

fn main() {
    // `cargo bench --bench layers -- cycles`: only what has this in its name.
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with("--")).unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for driver in [DriverKind::Plain, DriverKind::Btrfs] {
        runtime.block_on(bench(driver, &wanted));
    }
}

struct Bench {
    provider: LocalProvider,
    owner: OwnerMark,
}

async fn bench(driver: DriverKind, wanted: &str) {
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let ground = Ground::new(folder.path());
    let data = ground.0.join("data");
    let mut config = LocalConfig::new(data.clone(), env!("CARGO_BIN_EXE_viv").into());
    config.cgroup_prefix = format!("viv-bench-{}", std::process::id());
    config.store = StoreConfig { driver: Some(driver), pool_bytes: Some(POOL_BYTES) };
    let bench = Bench { provider: LocalProvider::open(config).unwrap(), owner: "bench".parse().unwrap() };

    println!("{driver}");
    println!(
        "  change        hibernate (of it: flush)   restore     fork        live save   stood still   cp -a       hibernate, live of cp"
    );
    for (change, script) in CHANGES.into_iter().filter(|(change, _)| change.contains(wanted)) {
        bench.measure(&data, change, script).await;
    }
    if "cycles".contains(wanted) {
        bench.cycles(CYCLES).await;
        bench.cycles(KEPT).await;
    }
    drop(bench);
    if driver == DriverKind::Btrfs {
        unmount(&data.join("layers"));
    }
}

/// A filesystem as users have it: ext4 with a journal, in a file. The machine's own may be something else; without a
/// journal, ext4 looks at each inode that was removed in the last minutes before it takes another.
struct Ground(PathBuf);

impl Ground {
    fn new(folder: &Path) -> Self {
        let (file, place) = (folder.join("disk"), folder.join("mounted"));
        std::fs::File::create(&file).unwrap().set_len(GROUND_BYTES).unwrap();
        std::fs::create_dir(&place).unwrap();
        let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&file));
        run(Command::new("mount").args(["-o", "loop"]).arg(&file).arg(&place));
        Self(place)
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// Whoever still tidies keeps it until he is done.
fn unmount(place: &Path) {
    let _ = Command::new("umount").arg("--lazy").arg(place).status();
}

impl Bench {
    async fn measure(&self, data: &Path, change: &str, script: &str) {
        let (mut hibernates, mut flushes, mut restores) = (Vec::new(), Vec::new(), Vec::new());
        let (mut forks, mut lives, mut pauses, mut copies) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let sandbox = SandboxId::from_bytes(fresh());
            let spec = InstanceSpec::host(3_600_000);
            self.provider.create(&mutation(), &sandbox, &self.owner, &spec).await.unwrap();
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST };
            self.run(&instance, script).await;
            sync();

            let started = Instant::now();
            let live = self.save(&sandbox, true).await;
            lives.push(started.elapsed());
            pauses.push(Duration::from_micros(live.cost.paused_us));
            sync();

            let forked = SandboxId::from_bytes(fresh());
            forks.push(timed(self.provider.fork(&mutation(), &forked, &self.owner, &spec, &instance)).await);
            sync();

            let started = Instant::now();
            let saved = self.save(&sandbox, false).await;
            hibernates.push(started.elapsed());
            flushes.push(Duration::from_micros(saved.cost.flush_us));
            self.provider.destroy(&mutation(), &sandbox).await.unwrap();

            let next = SandboxId::from_bytes(fresh());
            let operation = mutation();
            let restore = self.provider.restore(&operation, &next, &self.owner, &spec, &saved.id);
            restores.push(timed(restore).await);
            self.provider.destroy(&mutation(), &next).await.unwrap();

            copies.push(copy(&layer_of(data, &saved.id), &data.join("layers/copy")));
            self.provider.destroy(&mutation(), &forked).await.unwrap();
            for id in [&live.id, &saved.id] {
                self.provider.remove_snapshot(&mutation(), &sandbox, id).await.unwrap();
            }
            sync();
        }
        let (hibernate, live, peer) = (median(hibernates), median(lives), median(copies));
        println!(
            "  {change:<12} {} ({})  {}  {}  {}  {}  {}   {:.2}, {:.2}",
            show(hibernate),
            show(median(flushes)),
            show(median(restores)),
            show(median(forks)),
            show(live),
            show(median(pauses)),
            show(peer),
            ratio(hibernate, peer),
            ratio(live, peer),
        );
    }

    /// The same sandbox, saved and restored again and again, with so many snapshots kept. What it holds stays the same,
    /// so that only the rounds can make a difference.
    async fn cycles(&self, kept: usize) {
        let sandbox = SandboxId::from_bytes(fresh());
        let spec = InstanceSpec::host(3_600_000);
        let mut generation = 1;
        self.provider.create(&mutation(), &sandbox, &self.owner, &spec).await.unwrap();
        let (mut saves, mut restores, mut peers, mut snapshots) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for round in 0..CYCLES {
            let mut of = mutation();
            of.generation = Generation(generation);
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: of.generation };
            self.run(&instance, &format!("echo {round} > /workspace/f")).await;
            let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh()), live: false, memory: false };
            let started = Instant::now();
            self.provider.save(&of, &sandbox, &request).await.unwrap();
            saves.push(started.elapsed());
            self.provider.destroy(&of, &sandbox).await.unwrap();
            generation += 1;
            of.generation = Generation(generation);
            let started = Instant::now();
            self.provider.restore(&of, &sandbox, &self.owner, &spec, &request.snapshot).await.unwrap();
            restores.push(started.elapsed());
            // The peer: what the machine itself does from round to round.
            let other = SandboxId::from_bytes(fresh());
            peers.push(timed(self.provider.create(&mutation(), &other, &self.owner, &spec)).await);
            self.provider.destroy(&mutation(), &other).await.unwrap();
            snapshots.push(request.snapshot);
            if snapshots.len() > kept {
                let oldest = snapshots.remove(0);
                self.provider.remove_snapshot(&of, &sandbox, &oldest).await.unwrap();
            }
        }
        let part = CYCLES / 3;
        let ends = |times: &[Duration]| (median(times[..part].to_vec()), median(times[CYCLES - part..].to_vec()));
        let ((save_first, save_last), (restore_first, restore_last)) = (ends(&saves), ends(&restores));
        let (peer_first, peer_last) = ends(&peers);
        println!(
            "  {CYCLES} cycles, {kept} snapshots kept: save {} at first, {} at last ({:.2}); restore {}, {} ({:.2}); a new sandbox ({:.2})",
            show(save_first),
            show(save_last),
            ratio(save_last, save_first),
            show(restore_first),
            show(restore_last),
            ratio(restore_last, restore_first),
            ratio(peer_last, peer_first),
        );
        let mut of = mutation();
        of.generation = Generation(generation);
        self.provider.destroy(&of, &sandbox).await.unwrap();
        for id in snapshots {
            self.provider.remove_snapshot(&mutation(), &sandbox, &id).await.unwrap();
        }
    }

    async fn save(&self, sandbox: &SandboxId, live: bool) -> Snapshot {
        let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh()), live, memory: false };
        self.provider.save(&mutation(), sandbox, &request).await.unwrap()
    }

    async fn run(&self, instance: &InstanceRef, script: &str) {
        let execution = ExecutionId::from_bytes(fresh());
        let spec = ExecSpec { argv: vec!["/bin/sh".into(), "-c".into(), script.into()], ..ExecSpec::default() };
        let mut of = mutation();
        of.generation = instance.generation;
        self.provider.execute(&of, &instance.sandbox, &execution, &spec).await.unwrap();
        let mut output = self.provider.attach(instance, &execution, 0, true).await.unwrap();
        while let Some(event) = output.next().await.unwrap() {
            if let OutputEvent::End(_) = event {
                break;
            }
        }
    }
}

/// Where a snapshot's own layer lies.
fn layer_of(data: &Path, snapshot: &SnapshotId) -> PathBuf {
    let record = std::fs::read(data.join("snapshots").join(format!("{snapshot}.json"))).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    data.join("layers/sealed").join(record["kept"]["of"]["saved"][0].as_str().unwrap())
}

/// The peer: the same bytes copied and on disk.
fn copy(from: &Path, to: &Path) -> Duration {
    let started = Instant::now();
    let copied = Command::new("cp").args(["-a", "--reflink=never"]).arg(from).arg(to).stdin(Stdio::null()).status();
    assert!(copied.unwrap().success());
    sync();
    let took = started.elapsed();
    std::fs::remove_dir_all(to).unwrap();
    took
}

fn sync() {
    rustix::fs::sync();
}
