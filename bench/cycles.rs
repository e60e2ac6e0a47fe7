//! Whether stopping and resuming a sandbox wears out: a hundred times with 10,000 files in it, one of which changes each
//! time. What counts is the ratio of the last ten to the first ten; content is compared by `daemon_steady` of the tests.
//!
//! `VIV_BENCH_CYCLES` changes the number.

use std::time::{Duration, Instant};

use viv_api::client::SandboxHandle;
use viv_api::execution::{OutputLine, StartExecution};
use viv_api::sandbox::{CreatePolicy, CreateSandbox, EnsureSandbox, Phase, Status, StopSandbox};

mod common;
#[path = "common/daemon.rs"]
mod daemon;

use common::{median, ratio, show};
use daemon::{client_of, serve};

/// How many are compared at each end.
const END: usize = 10;

const MAKE: &str = "cd /workspace; for folder in $(seq 100); do mkdir $folder
    for file in $(seq 100); do echo $folder $file > $folder/$file; done; done";

fn main() {
    let cycles = std::env::var("VIV_BENCH_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(100);
    let cycles = std::cmp::max(cycles, 2 * END);
    let folder = tempfile::Builder::new().prefix("viv-bench-").tempdir().unwrap();
    let mut daemon = serve(folder.path());
    let client = client_of(folder.path());
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    let made = client.create(&CreateSandbox { policy, ..CreateSandbox::default() }, None).unwrap().into_sandbox();
    let sandbox = client.sandbox(made.id);
    run(&sandbox, MAKE);
    let (mut stops, mut resumes) = (Vec::new(), Vec::new());
    for cycle in 0..cycles {
        run(&sandbox, &format!("echo {cycle} > /workspace/50/50"));
        let began = Instant::now();
        let stopped = sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox();
        stops.push(began.elapsed());
        assert_eq!(stopped.phase, Phase::Hibernated);
        let began = Instant::now();
        let back = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
        resumes.push(began.elapsed());
        assert_eq!(back.status, Status::Ready);
    }
    println!("{cycles} stops and resumes of 10,000 files, median of the first and of the last {END}:");
    tell("stop", &stops);
    tell("resume", &resumes);
    sandbox.delete(None).unwrap();
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    // A pool stays mounted as long as the machine runs.
    let _ = rustix::mount::unmount(folder.path().join("sandboxes/layers"), rustix::mount::UnmountFlags::DETACH);
}

fn tell(what: &str, times: &[Duration]) {
    let (first, last) = (median(times[..END].to_vec()), median(times[times.len() - END..].to_vec()));
    println!("{what:<8} {}  {}   {:.2} times", show(first), show(last), ratio(last, first));
}

/// Runs a script to its end.
fn run(sandbox: &SandboxHandle<'_>, script: &str) {
    let started = sandbox.start(&StartExecution::of(["/bin/sh", "-c", script]).unwrap(), None).unwrap();
    let end = sandbox.execution(started.id).follow(0).find_map(|line| match line.unwrap() {
        OutputLine::End(end) => Some(end.end.exit_code),
        OutputLine::Chunk(_) | OutputLine::Cut(_) | OutputLine::Alive(_) => None,
    });
    assert_eq!(end, Some(Some(0)), "{script}");
}
