//! Whether limits of speed do what they say: reading and writing, the weight of processors, bursts.
//!
//! Everything is a ratio within this run: with a limit beside without, or one sandbox beside another. The work is done
//! by this very program, inside. Writing is limited on cgroup v2 only; what the machine cannot limit is said and left out.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId};
use viv_provider::{Capability, FileWrite, InstanceRef, InstanceSpec, Provider, ResourceLimits, UNLIMITED};
use viv_sandbox::{LocalConfig, LocalProvider};

mod common;

use common::{fresh, median, mutation, show};

/// Where this program is put, and the argument by which it knows.
const INSIDE: &str = "/tmp/bench";
const WORK: &str = "--inside";

const MIB: usize = 1 << 20;

/// What disks are limited to: slower than any, and enough to be measured in seconds.
const BPS_MIB: u32 = 8;

/// What is read and written: some seconds at that speed.
const FILE_MIB: u32 = 32;

/// For how long two sandboxes share a processor.
const SHARED_S: u64 = 6;

/// A fifth of a processor, and work in pieces of which each takes nearly twice what that gives in a period.
const QUOTA_MILLIS: u64 = 200;
const BURST_US: u64 = 20_000;
const PIECE_MS: u64 = 35;
const PIECES: usize = 15;

/// Enough for what was saved up to be full again.
const PAUSE: Duration = Duration::from_millis(400);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, what, rest @ ..] = arguments.as_slice()
        && flag == WORK
    {
        return inside(what, rest);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(bench());
}

/// The work, in a sandbox. It answers one number, or several.
fn inside(what: &str, rest: &[String]) {
    match what {
        "write" => println!("{}", disk(true).as_micros()),
        "read" => println!("{}", disk(false).as_micros()),
        // On the first processor that it may have, from a moment on that another one was told too.
        "spin" => {
            let all = rustix::thread::sched_getaffinity(None).unwrap();
            let mut one = rustix::thread::CpuSet::new();
            one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let start_ms: u64 = rest[0].parse().unwrap();
            while now(ClockId::Boottime).as_millis() < u128::from(start_ms) {}
            let before = now(ClockId::ProcessCPUTime);
            while now(ClockId::Boottime).as_millis() < u128::from(start_ms + SHARED_S * 1000) {}
            println!("{}", used_since(before).as_micros());
        }
        "pieces" => {
            for _ in 0..PIECES {
                std::thread::sleep(PAUSE);
                let (started, before) = (Instant::now(), now(ClockId::ProcessCPUTime));
                while used_since(before) < Duration::from_millis(PIECE_MS) {}
                println!("{}", started.elapsed().as_micros());
            }
        }
        other => panic!("{other}?"),
    }
}

fn now(clock: ClockId) -> Duration {
    let now = clock_gettime(clock);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap())
}

fn used_since(before: Duration) -> Duration {
    now(ClockId::ProcessCPUTime).saturating_sub(before)
}

/// Past the cache, so that it is the disk that is measured.
fn disk(write: bool) -> Duration {
    let direct = i32::try_from(OFlags::DIRECT.bits()).unwrap();
    let mut file: File =
        File::options().read(!write).write(write).create(write).custom_flags(direct).open("/var/tmp/measured").unwrap();
    // The kernel wants whole blocks in memory too.
    let mut room = vec![0x5a_u8; 2 * MIB];
    let start = room.as_ptr().align_offset(4096);
    let block = &mut room[start..start + MIB];
    let started = Instant::now();
    for _ in 0..FILE_MIB {
        if write { file.write_all(block).unwrap() } else { file.read_exact(block).unwrap() }
    }
    if write {
        file.sync_all().unwrap();
    }
    started.elapsed()
}

struct Bench {
    provider: LocalProvider,
}

impl Bench {
    /// A sandbox with this program in it.
    async fn sandbox(&self, limits: ResourceLimits) -> SandboxId {
        let sandbox = SandboxId::from_bytes(fresh());
        let owner: OwnerMark = "bench".parse().unwrap();
        let spec = InstanceSpec { limits, ..InstanceSpec::host(600_000) };
        self.provider.create(&mutation(), &sandbox, &owner, &spec).await.unwrap();
        let file = FileWrite { path: INSIDE.to_owned(), mode: Some(0o755), user: None };
        let content = fs::read(std::env::current_exe().unwrap()).unwrap();
        let content = Box::new(std::io::Cursor::new(content));
        self.provider.file_write(&mutation(), &sandbox, &file, content).await.unwrap();
        sandbox
    }

    async fn work(&self, sandbox: &SandboxId, what: &[&str]) -> Vec<Duration> {
        let execution = ExecutionId::from_bytes(fresh());
        let argv = [&[INSIDE, WORK], what].concat().into_iter().map(str::to_owned).collect();
        let spec = ExecSpec { argv, ..ExecSpec::default() };
        self.provider.execute(&mutation(), sandbox, &execution, &spec).await.unwrap();
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST };
        let mut output = self.provider.attach(&instance, &execution, 0, true).await.unwrap();
        let mut text = Vec::new();
        loop {
            match output.next().await.unwrap() {
                Some(OutputEvent::Chunk { data, .. }) => text.extend(data),
                Some(OutputEvent::End(status)) => {
                    let text = String::from_utf8(text).unwrap();
                    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{what:?}: {text}");
                    return text.lines().map(|line| Duration::from_micros(line.parse().unwrap())).collect();
                }
                Some(_) => {}
                None => panic!("{what:?} has no end"),
            }
        }
    }

    async fn set(&self, sandbox: &SandboxId, limits: ResourceLimits) {
        self.provider.set_limits(&mutation(), sandbox, &limits).await.unwrap();
    }

    fn can(&self, what: &str, needed: Capability) -> bool {
        let capabilities = self.provider.capabilities();
        if !capabilities.can(needed) {
            println!("{what:<8} not here: {}", capabilities.missing.get(&needed).map_or("", String::as_str));
        }
        capabilities.can(needed)
    }

    /// The same sandbox without a limit, with one, and without again.
    async fn disk(&self, what: &str, needed: Capability, limit: impl Fn(u64) -> ResourceLimits) {
        if !self.can(what, needed) {
            return;
        }
        let sandbox = self.sandbox(ResourceLimits::default()).await;
        self.work(&sandbox, &["write"]).await;
        let mut seconds = Vec::new();
        for bps in [UNLIMITED, u64::from(BPS_MIB) << 20, UNLIMITED] {
            self.set(&sandbox, limit(bps)).await;
            seconds.push(self.work(&sandbox, &[what]).await[0].as_secs_f64());
        }
        let file_mib = f64::from(FILE_MIB);
        let (free, held, again) = (file_mib / seconds[0], file_mib / seconds[1], file_mib / seconds[2]);
        let asked = f64::from(BPS_MIB);
        println!(
            "{what:<8} {free:7.1} MiB/s without a limit, {held:5.1} with one of {asked:.0}, {again:7.1} once it is lifted"
        );
        println!("{:8} {:.2} of what was asked for, {:.3} of what there is", "", held / asked, held / free);
        self.provider.destroy(&mutation(), &sandbox).await.unwrap();
    }

    async fn weight(&self) {
        if !self.can("weight", Capability::LimitCpu) {
            return;
        }
        let weighing = |weight| ResourceLimits { cpu_weight: Some(weight), ..ResourceLimits::default() };
        let (heavy, light) = (self.sandbox(weighing(200)).await, self.sandbox(weighing(100)).await);
        // When both are there for certain.
        let start_ms = (now(ClockId::Boottime) + Duration::from_secs(3)).as_millis().to_string();
        let spin = ["spin", start_ms.as_str()];
        let (heavy_got, light_got) = tokio::join!(self.work(&heavy, &spin), self.work(&light, &spin));
        let (heavy_s, light_s) = (heavy_got[0].as_secs_f64(), light_got[0].as_secs_f64());
        println!("weight   {heavy_s:.2} s with 200 and {light_s:.2} s with 100, of {SHARED_S} s of one processor");
        println!("{:8} {:.2} as much (2 was asked for)", "", heavy_s / light_s);
        for sandbox in [heavy, light] {
            self.provider.destroy(&mutation(), &sandbox).await.unwrap();
        }
    }

    async fn burst(&self) {
        if !self.can("burst", Capability::LimitCpuBurst) {
            return;
        }
        let limits = ResourceLimits { cpu_millis: Some(QUOTA_MILLIS), ..ResourceLimits::default() };
        let sandbox = self.sandbox(limits).await;
        let mut medians = Vec::new();
        for burst in [UNLIMITED, BURST_US] {
            self.set(&sandbox, ResourceLimits { cpu_burst_us: Some(burst), ..ResourceLimits::default() }).await;
            medians.push(median(self.work(&sandbox, &["pieces"]).await));
        }
        println!(
            "burst    {PIECE_MS} ms of work after a pause, with 0.2 of a processor: {} without, {} with a burst of {} ms",
            show(medians[0]).trim_start(),
            show(medians[1]).trim_start(),
            BURST_US / 1000,
        );
        println!("{:8} {:.2} of the time", "", medians[1].as_secs_f64() / medians[0].as_secs_f64());
        self.provider.destroy(&mutation(), &sandbox).await.unwrap();
    }
}

async fn bench() {
    // On a disk, and not in memory.
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir_in("/var/tmp").unwrap();
    let viv = std::env::var_os("VIV_TEST_BINARY").map_or_else(|| env!("CARGO_BIN_EXE_viv").into(), Into::into);
    let mut config = LocalConfig::new(folder.path().join("data"), viv);
    config.cgroup_prefix = format!("viv-bench-{}", std::process::id());
    let bench = Bench { provider: LocalProvider::open(config).unwrap() };
    let none = ResourceLimits::default;
    bench.disk("read", Capability::LimitIoRead, |bps| ResourceLimits { io_read_bps: Some(bps), ..none() }).await;
    bench.disk("write", Capability::LimitIoWrite, |bps| ResourceLimits { io_write_bps: Some(bps), ..none() }).await;
    bench.weight().await;
    bench.burst().await;
}
