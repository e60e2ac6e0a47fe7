//! What an idle sandbox costs in memory, and how long the basic verbs take beside the same with `runc` alone.
//!
//! Memory is proportional set size: pages shared by several processes count
//! for each by its part. Times are medians; ratios compare within this run.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use viv_core::exec::{ExecSpec, OutputEvent};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId};
use viv_provider::{InstanceRef, InstanceSpec, Provider};
use viv_sandbox::{LocalConfig, LocalProvider};

mod common;

use common::{fresh, median, mutation, ratio, show, timed};

/// Idle sandboxes at once, for the shared part to show.
const IDLE: usize = 20;

/// Repetitions of each timed verb.
const ROUNDS: usize = 50;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(bench());
}

async fn bench() {
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let mut config = LocalConfig::new(folder.path().join("data"), env!("CARGO_BIN_EXE_viv").into());
    config.cgroup_prefix = format!("viv-bench-{}", std::process::id());
    let provider = LocalProvider::open(config).unwrap();
    let owner: OwnerMark = "bench".parse().unwrap();

    let mut sandboxes = Vec::new();
    let mut creates = Vec::new();
    for _ in 0..IDLE.max(ROUNDS) {
        let sandbox = SandboxId::from_bytes(fresh());
        let spec = InstanceSpec::host(600_000);
        creates.push(timed(provider.create(&mutation(), &sandbox, &owner, &spec)).await);
        sandboxes.push(sandbox);
        if sandboxes.len() == 1 {
            memory(&folder.path().join("data"), &sandboxes);
        }
    }
    memory(&folder.path().join("data"), &sandboxes);

    let instance = InstanceRef { sandbox: sandboxes[0].clone(), generation: Generation::FIRST };
    let mut execs = Vec::new();
    let mut freezes = Vec::new();
    for _ in 0..ROUNDS {
        execs.push(timed(round_trip(&provider, &instance)).await);
        freezes.push(
            timed(async {
                provider.freeze(&mutation(), &instance.sandbox).await?;
                provider.thaw(&mutation(), &instance.sandbox).await
            })
            .await,
        );
    }
    let mut destroys = Vec::new();
    for sandbox in &sandboxes {
        destroys.push(timed(provider.destroy(&mutation(), sandbox)).await);
    }
    let (create, exec, destroy) = (median(creates), median(execs), median(destroys));
    println!("create          {}", show(create));
    println!("exec and output {}", show(exec));
    println!("freeze, thaw    {}", show(median(freezes)));
    println!("destroy         {}", show(destroy));
    match runc(folder.path()) {
        Some((run, exec_peer)) => {
            println!("runc run+delete {}  viv create+destroy is {:.2} of it", show(run), ratio(create + destroy, run));
            println!("runc exec       {}  viv exec is {:.2} of it", show(exec_peer), ratio(exec, exec_peer));
        }
        None => println!("runc is not here to compare with"),
    }
}

/// A command, its output and its exit code, as a user waits for them.
async fn round_trip(provider: &LocalProvider, instance: &InstanceRef) -> Result<(), viv_provider::ProviderError> {
    let execution = ExecutionId::from_bytes(fresh());
    let spec = ExecSpec { argv: vec!["/bin/true".into()], ..ExecSpec::default() };
    provider.execute(&mutation(), &instance.sandbox, &execution, &spec).await?;
    let mut output = provider.attach(instance, &execution, 0, true).await?;
    while let Some(event) = output.next().await? {
        if let OutputEvent::End(_) = event {
            break;
        }
    }
    Ok(())
}

fn memory(data: &Path, sandboxes: &[SandboxId]) {
    let (mut shims, mut agents) = (Vec::new(), Vec::new());
    for sandbox in sandboxes {
        let folder = data.join("instances").join(sandbox.as_str());
        let shim: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("shim.json")).unwrap()).unwrap();
        shims.push(pss_kib(&shim["shim"]["pid"].to_string()) + pss_kib(&shim["guard"]["pid"].to_string()));
        agents.push(pss_kib(fs::read_to_string(folder.join("init.pid")).unwrap().trim()));
    }
    let mean = |values: &[u64]| (values.iter().sum::<u64>() / values.len() as u64) as u32;
    let show = |kib: u32| format!("{:.2} MB", f64::from(kib) / 1024.0);
    println!("idle sandboxes  {}", sandboxes.len());
    println!("shim and guard  {}", show(mean(&shims)));
    println!("agent           {}", show(mean(&agents)));
    println!("together        {}", show(mean(&shims) + mean(&agents)));
}

fn pss_kib(pid: &str) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The peer: the same kernel work by `runc` alone, with the simplest bundle.
fn runc(folder: &Path) -> Option<(Duration, Duration)> {
    let bundle = folder.join("bundle");
    let root = bundle.join("rootfs");
    for below in ["proc", "dev", "sys", "usr", "tmp"] {
        fs::create_dir_all(root.join(below)).unwrap();
    }
    for link in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{link}"), root.join(link)).unwrap();
    }
    let runc = |args: &[&str]| {
        let mut command = Command::new("runc");
        command.arg("--root").arg(folder.join("runc")).args(args).current_dir(&bundle);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().ok().filter(std::process::ExitStatus::success)
    };
    runc(&["spec"])?;
    let path = bundle.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["process"]["terminal"] = false.into();
    config["process"]["args"] = serde_json::json!(["/bin/sleep", "600"]);
    config["mounts"].as_array_mut().unwrap().push(serde_json::json!({
        "destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]
    }));
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();

    let (mut whole, mut execs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS / 2 {
        let id = format!("viv-bench-{}-{round}", std::process::id());
        let started = Instant::now();
        runc(&["run", "--detach", &id])?;
        let run = started.elapsed();
        let started = Instant::now();
        runc(&["exec", &id, "/bin/true"])?;
        execs.push(started.elapsed());
        let started = Instant::now();
        runc(&["delete", "--force", &id])?;
        whole.push(run + started.elapsed());
    }
    Some((median(whole), median(execs)))
}
