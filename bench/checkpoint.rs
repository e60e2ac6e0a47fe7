//! What keeping memory costs: saving and restoring against its size, beside `runc checkpoint` and `runc restore` by the same
//! CRIU, on the same disk, in the same run.
//!
//! Ours saves the files too, packs, hashes and writes out what was dumped, and checks all of it before it restores; runc's is
//! the dump alone. The process holds so much memory, every page of it written to. Times are medians of a few rounds.
//!
//! The CRIU is that of `scripts/prepare criu`, or what `VIV_CRIU` names.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId, SnapshotId};
use viv_provider::{InstanceRef, InstanceSpec, Provider, Recall, SaveRequest};
use viv_sandbox::{KeepMemory, LocalConfig, LocalProvider};

mod common;

use common::{fresh, median, mutation, show};

/// Repetitions of each.
const ROUNDS: usize = 3;

/// What is held, in MiB.
const SIZES: [usize; 4] = [16, 64, 256, 1024];

/// What holds less is never restored lazily.
const LAZY_MIB_MIN: usize = 64;

/// How long a process may take to have its memory, or to go on.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes to every page, the way programs do: some of it is like the rest and some of it is not. Then it counts.
fn hold(mib: usize, ready: &str) -> String {
    format!(
        "import os, time
held = bytearray({mib} << 20)
for at in range(0, len(held), 4096):
    held[at:at + 512] = os.urandom(512)
    held[at + 1024:at + 1536] = b'some text that programs have in their memory. ' * 11 + b'......'
n = 0
while True:
    n += 1
    open('{ready}', 'w').write(str(n))
    time.sleep(0.01)
"
    )
}

fn main() {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/criu/bin/criu");
    let criu = std::env::var_os("VIV_CRIU").map_or(tools, PathBuf::from);
    let wanted = std::env::args().skip(1).find_map(|argument| argument.parse::<usize>().ok());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(bench(&criu, wanted));
}

async fn bench(criu: &Path, wanted: Option<usize>) {
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let data = folder.path().join("data");
    let mut config = LocalConfig::new(data.clone(), env!("CARGO_BIN_EXE_viv").into());
    config.cgroup_prefix = format!("viv-bench-{}", std::process::id());
    config.criu = Some(criu.to_owned());
    config.keep_memory = KeepMemory::Eager;
    let lazy = LocalProvider::open(LocalConfig { keep_memory: KeepMemory::Lazy, ..config.clone() }).unwrap();
    let provider = LocalProvider::open(config).unwrap();
    let found = match provider.criu() {
        Ok(found) => found,
        Err(why) => return println!("passed over: {why}"),
    };
    println!("CRIU {}, {} rounds", found.version, ROUNDS);
    // The same folder: one makes what the other restores.
    let lazy = match lazy.criu().map(|found| found.not_lazy) {
        Ok(None) => Some(lazy),
        Ok(Some(why)) | Err(why) => {
            println!("nothing is restored lazily: {why}");
            None
        }
    };
    println!(
        "  memory     save        live save (stood still)    restore (unpacked, by CRIU)      lazily       on disk, plain        runc: checkpoint  restore      on disk"
    );
    let bench = Bench { provider, lazy, owner: "bench".parse().unwrap(), data };
    for mib in SIZES.into_iter().filter(|mib| wanted.is_none_or(|wanted| wanted == *mib)) {
        let ours = bench.ours(mib).await;
        let theirs = runc(&folder.path().join("runc"), criu, mib);
        let theirs = match theirs {
            Ok(runc) => format!("{}  {}  {:6.1} MiB", show(runc.save), show(runc.restore), mib_of(runc.bytes)),
            Err(why) => format!("none: {why}"),
        };
        println!(
            "  {mib:4} MiB  {}  {} ({})  {} ({}, {})  {}  {:6.1} of {:6.1} MiB   {theirs}",
            show(ours.save),
            show(ours.live),
            show(ours.still),
            show(ours.restore),
            show(ours.unpacked),
            show(ours.by_criu),
            ours.lazily.map_or_else(|| "         -".to_owned(), show),
            mib_of(ours.bytes),
            mib_of(ours.plain_bytes)
        );
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
fn mib_of(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

struct Bench {
    provider: LocalProvider,
    lazy: Option<LocalProvider>,
    owner: OwnerMark,
    data: PathBuf,
}

struct Ours {
    save: Duration,
    live: Duration,
    still: Duration,
    restore: Duration,
    /// Of that, putting the images in plain files, and CRIU. The rest is hashing, the root, and the agent.
    unpacked: Duration,
    by_criu: Duration,
    /// While it is used already, where that can be.
    lazily: Option<Duration>,
    bytes: u64,
    plain_bytes: u64,
}

impl Bench {
    async fn ours(&self, mib: usize) -> Ours {
        let (mut lazies, mut unpacks, mut by_criu) = (Vec::new(), Vec::new(), Vec::new());
        let (mut ended, mut lives, mut stills, mut restores) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut bytes, mut plain_bytes) = (0, 0);
        for _ in 0..ROUNDS {
            let sandbox = SandboxId::from_bytes(fresh());
            let spec = InstanceSpec::host(3_600_000);
            self.provider.create(&mutation(), &sandbox, &self.owner, &spec).await.unwrap();
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: Generation::FIRST };
            let execution = ExecutionId::from_bytes(fresh());
            let argv = ["python3", "-c", &hold(mib, "/workspace/ready")].map(Into::into).to_vec();
            let command = ExecSpec { argv, limit_ms: None, ..ExecSpec::default() };
            self.provider.execute(&mutation(), &sandbox, &execution, &command).await.unwrap();
            self.counts(&instance).await;
            sync();

            let started = Instant::now();
            let live = self.save(&sandbox, true).await;
            lives.push(started.elapsed());
            stills.push(Duration::from_micros(live.cost.paused_us));
            sync();

            let started = Instant::now();
            let saved = self.save(&sandbox, false).await;
            ended.push(started.elapsed());
            (bytes, plain_bytes) = weigh(&self.data.join("memory").join(saved.id.as_str()).join("kept/images"));
            self.provider.destroy(&mutation(), &sandbox).await.unwrap();
            sync();

            let spec = InstanceSpec { recall: Recall::Required, ..spec };
            let (took, unpacking, criu) = self.restore(&self.provider, &spec, &saved.id, &execution).await;
            restores.push(took);
            unpacks.push(unpacking);
            by_criu.push(criu);
            if let Some(lazy) = self.lazy.as_ref().filter(|_| mib >= LAZY_MIB_MIN) {
                lazies.push(self.restore(lazy, &spec, &saved.id, &execution).await.0);
            }
            for id in [&live.id, &saved.id] {
                self.provider.remove_snapshot(&mutation(), &sandbox, id).await.unwrap();
            }
            sync();
        }
        let (save, live, still, restore) = (median(ended), median(lives), median(stills), median(restores));
        let lazily = (!lazies.is_empty()).then(|| median(lazies));
        let (unpacked, by_criu) = (median(unpacks), median(by_criu));
        Ours { save, live, still, restore, unpacked, by_criu, lazily, bytes, plain_bytes }
    }

    /// Until it is ready, and what of that was unpacking and CRIU; then it counts on.
    async fn restore(
        &self,
        provider: &LocalProvider,
        spec: &InstanceSpec,
        from: &SnapshotId,
        execution: &ExecutionId,
    ) -> (Duration, Duration, Duration) {
        let next = SandboxId::from_bytes(fresh());
        let started = Instant::now();
        provider.restore(&mutation(), &next, &self.owner, spec, from).await.unwrap();
        let took = started.elapsed();
        let said = fs::read_to_string(self.data.join("instances").join(next.as_str()).join("shim.log")).unwrap();
        let (unpacked, by_criu) = parts(&said).expect("its shim says what took how long");
        let instance = InstanceRef { sandbox: next.clone(), generation: Generation::FIRST };
        self.counts(&instance).await;
        let copy = self.provider.execution(&instance, &execution.copied_into(&next)).await.unwrap();
        assert_eq!(copy.state, ExecState::Running);
        self.provider.destroy(&mutation(), &next).await.unwrap();
        sync();
        (took, unpacked, by_criu)
    }

    async fn save(&self, sandbox: &SandboxId, live: bool) -> viv_provider::Snapshot {
        let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh()), live, memory: true };
        self.provider.save(&mutation(), sandbox, &request).await.unwrap()
    }

    /// Waits until the process inside has counted on.
    async fn counts(&self, instance: &InstanceRef) {
        let until = Instant::now() + PATIENCE;
        let mut first = None;
        loop {
            let stat = self.provider.file_stat(instance, "/workspace/ready").await.ok();
            let at = stat.map(|stat| stat.modified_at_ms);
            match (first, at) {
                (None, Some(_)) => first = at,
                (Some(_), Some(_)) if at != first => return,
                _ => assert!(Instant::now() < until, "it does not count"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// What a shim says of a restore: unpacking, and CRIU.
fn parts(said: &str) -> Option<(Duration, Duration)> {
    let said = said.lines().rev().find_map(|line| line.strip_prefix("its memory was unpacked in "))?;
    let mut numbers = said.split(' ').filter_map(|word| word.parse().ok()).map(Duration::from_millis);
    Some((numbers.next()?, numbers.next()?))
}

/// What images take, and what they would if they were not packed.
fn weigh(images: &Path) -> (u64, u64) {
    let (mut bytes, mut plain) = (0, 0);
    for entry in fs::read_dir(images).unwrap() {
        let entry = entry.unwrap();
        let (name, found) = (entry.file_name().into_string().unwrap(), entry.metadata().unwrap());
        bytes += found.blocks() * 512;
        let ending = Path::new(&name).extension().and_then(|ending| ending.to_str());
        if ending == Some("frames") {
            let frames: serde_json::Value = serde_json::from_slice(&fs::read(entry.path()).unwrap()).unwrap();
            plain += frames["bytes"].as_u64().unwrap();
        } else if ending != Some("zst") {
            plain += found.blocks() * 512;
        }
    }
    (bytes, plain)
}

struct Theirs {
    save: Duration,
    restore: Duration,
    bytes: u64,
}

/// The same process in a container of runc's.
fn runc(folder: &Path, criu: &Path, mib: usize) -> Result<Theirs, String> {
    let (mut saves, mut restores) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for round in 0..ROUNDS {
        let _ = fs::remove_dir_all(folder);
        let container = Container::new(folder, criu, &format!("viv-bench-{}-{mib}-{round}", std::process::id()), mib);
        container.run(&["run", "--detach", "--bundle", folder.to_str().unwrap(), &container.id])?;
        container.counts()?;
        sync();
        let images = folder.join("images");
        let (images, work) = (images.to_str().unwrap(), folder.join("work"));
        let work = work.to_str().unwrap();
        let started = Instant::now();
        container.run(&["checkpoint", "--image-path", images, "--work-path", work, &container.id])?;
        saves.push(started.elapsed());
        bytes = weigh(Path::new(images)).0;
        sync();
        let started = Instant::now();
        let bundle = folder.to_str().unwrap();
        let id = &container.id;
        let from = ["--image-path", images, "--work-path", work];
        container.run(&[&["restore", "--detach", "--bundle", bundle][..], &from, &[id]].concat())?;
        restores.push(started.elapsed());
        container.counts()?;
    }
    Ok(Theirs { save: median(saves), restore: median(restores), bytes })
}

struct Container {
    id: String,
    folder: PathBuf,
    path: String,
}

impl Container {
    fn new(folder: &Path, criu: &Path, id: &str, mib: usize) -> Self {
        let root = folder.join("rootfs");
        fs::create_dir_all(root.join("workspace")).unwrap();
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}),
        ];
        for part in ["/usr", "/lib", "/lib64", "/bin"] {
            if Path::new(part).exists() {
                let source = fs::canonicalize(part).unwrap();
                mounts.push(json!({"destination": part, "type": "bind", "source": source, "options": ["bind", "ro"]}));
            }
        }
        let namespaces = ["pid", "ipc", "uts", "mount", "network"].map(|kind| json!({"type": kind}));
        // What it was given is of the machine's own mounts, which CRIU does not find inside.
        let own = "import os\nfor fd in range(3):\n    os.dup2(os.open('/dev/null', os.O_RDWR), fd)\n";
        let script = format!("{own}{}", hold(mib, "/workspace/ready"));
        let args = ["/usr/bin/python3".to_owned(), "-c".to_owned(), script];
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {"cwd": "/", "args": args, "env": ["PATH=/usr/bin:/bin"], "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs"},
            "mounts": mounts,
            "annotations": {"org.criu.config": folder.join("criu.conf")},
            "linux": {"namespaces": namespaces},
        });
        fs::write(folder.join("config.json"), config.to_string()).unwrap();
        // As ours: there is nobody in that network, and not every machine has iptables.
        fs::write(folder.join("criu.conf"), "network-lock skip\n").unwrap();
        let criu = criu.parent().unwrap().canonicalize().unwrap();
        let path = format!("{}:{}", criu.display(), std::env::var("PATH").unwrap());
        Self { id: id.to_owned(), folder: folder.to_owned(), path }
    }

    fn run(&self, arguments: &[&str]) -> Result<(), String> {
        let log = fs::File::create(self.folder.join("log")).unwrap();
        let status = Command::new("runc")
            .arg("--root")
            .arg(self.folder.join("state"))
            .args(arguments)
            .env("PATH", &self.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .status()
            .map_err(|error| error.to_string())?;
        if status.success() {
            return Ok(());
        }
        let said = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        Err(format!("runc {}: {}", arguments[0], said.lines().next_back().unwrap_or("it does not say why")))
    }

    fn counts(&self) -> Result<(), String> {
        let ready = self.folder.join("rootfs/workspace/ready");
        let until = Instant::now() + PATIENCE;
        let at = || fs::metadata(&ready).ok().map(|found| (found.mtime(), found.mtime_nsec()));
        let mut first = None;
        while Instant::now() < until {
            match (first, at()) {
                (None, now) => first = now,
                (Some(before), Some(now)) if before != now => return Ok(()),
                (Some(_), _) => {}
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err("it does not count".to_owned())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.run(&["delete", "--force", &self.id]);
    }
}

fn sync() {
    rustix::fs::sync();
}
