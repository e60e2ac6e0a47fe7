//! What must not wear out: a sandbox that is stopped and resumed again and again, and a machine that is too busy to
//! answer for a while (L10, T7).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::held::Held;
use support::is_alive;
use viv_api::client::SandboxHandle;
use viv_api::execution::StartExecution;
use viv_api::sandbox::{CreatePolicy, CreateSandbox, EnsureSandbox, Phase, Status, StopSandbox};
use viv_core::Generation;

/// How often it is stopped and resumed, and how many folders of a hundred files are in it: enough that layers are
/// merged, which happens at 24 of them at the latest. `make storms` does it a hundred times with 10,000 files.
const SHORT: (u64, u64) = (26, 10);
const LONG_FOLDERS: u64 = 100;

/// Folders with a hundred files each, and a few of another kind.
const MAKE: &str = "set -e
    cd /workspace
    for folder in $(seq $1); do
        mkdir -p tree/$folder
        for file in $(seq 100); do echo $folder $file > tree/$folder/$file; done
    done
    ln -s 1/1 tree/link; ln tree/1/2 tree/hard; mkfifo tree/pipe; mkdir tree/empty; chmod 751 tree/3/3
    head -c 1000000 /dev/urandom > tree/random
    find tree -type f | wc -l";

/// What each cycle changes: one more, one other, one less.
const CHANGE: &str = "set -e
    cd /workspace/tree
    cycle=$1
    echo $cycle > cycle-$cycle; echo $cycle >> 5/50; rm -f 6/$cycle; mv 7/$cycle 8/moved-$cycle
    rm -r 9/folder-$((cycle - 1)) 2>/dev/null || true; mkdir 9/folder-$cycle; echo $cycle > 9/folder-$cycle/file";

/// Names, kinds, modes, owners, times, targets and content of everything. Links are counted of files only: overlayfs
/// counts those of folders by how many layers have them.
const MANIFEST: &str = "set -e
    cd /workspace
    find tree -type d -printf '%p %m %U %G %T@\\n' -o -printf '%p %y %m %U %G %n %T@ %l\\n' | LC_ALL=C sort | sha256sum
    find tree -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
    find tree -type f | wc -l";

fn persistent() -> CreateSandbox {
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    CreateSandbox { policy, ..CreateSandbox::default() }
}

fn said(sandbox: &SandboxHandle<'_>, script: &str) -> String {
    let (said, end) = run(sandbox, script);
    assert_eq!(end.exit_code, Some(0), "{said}");
    said
}

#[test]
fn l10_incident_13_many_stops_and_resumes_lose_nothing() {
    let long = std::env::var("VIV_RESUME_CYCLES").map(|text| (text.parse().unwrap(), LONG_FOLDERS));
    let (cycles, folders) = long.unwrap_or(SHORT);
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let id = daemon.create_from(&persistent()).id;
    let sandbox = daemon.sandbox(&id);
    let made = said(&sandbox, &MAKE.replace("$1", &folders.to_string()));
    assert_eq!(made.trim(), (folders * 100 + 2).to_string());
    for cycle in 1..=cycles {
        said(&sandbox, &CHANGE.replace("$1", &cycle.to_string()));
        let before = said(&sandbox, MANIFEST);
        let stopped = sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox();
        assert_eq!(stopped.phase, Phase::Hibernated, "{stopped:#?}");
        let resumed = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
        assert_eq!((resumed.status, resumed.generation), (Status::Ready, Generation(cycle + 1)), "{resumed:#?}");
        assert_eq!(said(&sandbox, MANIFEST), before, "cycle {cycle}");
    }
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// Longer than any verification waits, and than the minute that is promised.
const SILENT: Duration = Duration::from_secs(65);

/// Nobody answers for a minute, while everybody asks: who stood still goes on, with all that it had.
#[test]
fn t7_incident_1_a_minute_of_silence_loses_no_work_and_replaces_nothing() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let id = daemon.create_from(&persistent()).id;
    let sandbox = daemon.sandbox(&id);
    let job = "echo work > /workspace/work; while sleep 0.2; do echo $$ >> /workspace/ticks; done";
    let job = sandbox.start(&StartExecution::of(["/bin/sh", "-c", job]).unwrap(), None).unwrap();
    support::eventually("it works", || !said(&sandbox, "cat /workspace/ticks 2>/dev/null || true").is_empty());
    let host = daemon.host(&id);
    let (agent, shim) = (Held::of(host.agent_pid), Held::of(host.shim_pid));
    agent.stop();
    let silent_since = Instant::now();
    let command = StartExecution::of(["/bin/true"]).unwrap();
    while silent_since.elapsed() < SILENT {
        let seen = sandbox.verify().unwrap();
        assert_ne!(seen.status, Status::Ready, "{seen:#?}");
        assert_eq!(seen.generation, Generation::FIRST, "{seen:#?}");
        assert!(sandbox.start(&command, None).is_err(), "a command is not taken and forgotten");
        assert_eq!(daemon.instances().len(), 1);
        thread::sleep(Duration::from_millis(500));
    }
    let ticks = "wc -l < /workspace/ticks; cut -d' ' -f1 /workspace/ticks | sort -u | wc -l";
    agent.signal(Signal::CONT);
    sandbox.verify().unwrap();
    let back = daemon.wait_for(&id, "it is ready again", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(back.generation, Generation::FIRST);
    let now = daemon.host(&id);
    assert_eq!((now.agent_pid, now.shim_pid), (Some(agent.pid), Some(shim.pid)), "it is itself");
    assert!(is_alive(agent.pid) && is_alive(shim.pid));
    assert_eq!(said(&sandbox, "cat /workspace/work"), "work\n");
    // The job went on all the time, as one process: nobody asked it to stop.
    let seen = sandbox.execution(job.id).get().unwrap();
    assert!(!seen.state.is_final(), "{seen:#?}");
    let count = |line: usize| said(&sandbox, ticks).lines().nth(line).unwrap().trim().parse::<u64>().unwrap();
    let then = count(0);
    support::eventually_within(PATIENCE, "the job goes on", || count(0) > then);
    assert_eq!(count(1), 1, "it is one and the same");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}
