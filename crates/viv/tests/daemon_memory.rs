//! Memory that survives, on the real daemon: what runs goes on after a hibernation, and whatever goes wrong with that is
//! followed by the files of the same moment, in sight (L13, X5, T4, T5).
//!
//! The CRIU is that of `scripts/prepare criu`, or what `VIV_CRIU` names; without one these are passed over.
#![allow(missing_docs, reason = "tests")]

#[path = "daemon_memory/broken.rs"]
mod broken;
#[path = "daemon_memory/details.rs"]
mod details;
#[path = "daemon_memory/follow.rs"]
mod follow;
#[path = "daemon_memory/lazy.rs"]
mod lazy;
#[path = "daemon_memory/middle.rs"]
mod middle;
#[path = "daemon_memory/share.rs"]
mod share;
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};
use support::criu::{self, criu};
use support::daemon::{Daemon, PATIENCE, run};
use support::disk::Disk;
use support::restart::{House, all, instance_folder, shim_pid};
use support::{eventually_within, fresh_bytes, kill};
use viv_api::bound::WaitMs;
use viv_api::checkpoint::CheckpointCheck;
use viv_api::diagnosis::Integrity;
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution, Terminal, TimeLimit};
use viv_api::sandbox::{
    CreateSandbox, EnsureSandbox, Hibernate, MemoryState, Phase, RestSandbox, Sandbox, Status, StopSandbox,
    TimelineEntry,
};
use viv_api::snapshot::{CreateSnapshot, Fork, SnapshotIntegrity};
use viv_core::{ExecutionId, Generation, SandboxId, SnapshotId};

/// Long enough to be made and to come as far as a dump on a crowded machine, and short enough to be waited for.
const LIFETIME_MS: u64 = 15_000;

/// Saved and resumed so often, unless `VIV_MEMORY_ROUNDS` says otherwise.
const ROUNDS: u64 = 2;

const COUNT: &str = "import time\ni = 0\nwhile True:\n    i += 1\n    print(i)\n    time.sleep(0.02)";

/// The same by a timer of the kernel.
const TICK: &str = "
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
i = 0
while True:
    signal.sigwait({signal.SIGALRM})
    i += 1
    print(i)
";

/// Holds 72 MiB, no page of which is like another, and says what they hash to when it is asked. Whatever holds so much is
/// brought back while it is used already, where the kernel lets it.
const HOLD_MUCH: &str = "
import os, time, zlib
held = b''.join(number.to_bytes(4096, 'little') for number in range(1, 18 << 10))
print('it is held')
while True:
    if os.path.exists('/workspace/ask'):
        open('/workspace/sum.new', 'w').write(str(zlib.crc32(held)))
        os.remove('/workspace/ask')
        os.rename('/workspace/sum.new', '/workspace/sum')
    time.sleep(0.02)
";

const ASK: &str = "rm -f sum; touch ask; while [ ! -s sum ]; do sleep 0.02; done; cat sum";

/// Is held by another process as by a debugger.
const TRACED: &str = "
import ctypes, os, time
if os.fork():
    time.sleep(100000)
PTRACE_TRACEME = 0
assert ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, 0, 0) == 0
print('it is held')
time.sleep(100000)
";

/// Each row is a transaction, which stays open for as long as somebody wants.
const WRITE_ROWS: &str = "
import os, sqlite3, time
db = sqlite3.connect('/workspace/db', isolation_level=None)
db.execute('create table t(n)')
n = 0
while True:
    n += 1
    db.execute('begin immediate')
    db.execute('insert into t values(?)', (n,))
    if os.path.exists('/workspace/stay'):
        open('/workspace/within', 'w').close()
        while os.path.exists('/workspace/stay'):
            time.sleep(0.005)
        os.remove('/workspace/within')
    time.sleep(0.05)
    db.execute('commit')
    print(n)
    time.sleep(0.005)
";

/// From here on a transaction is open, and what it wrote is in its journal.
const STAY: &str = "touch stay; while [ ! -e within ]; do sleep 0.01; done; test -s db-journal";

/// It was open all the time, and goes on to its end.
const GO_ON: &str = "test -e within && test -s db-journal && rm stay && while [ -e within ]; do sleep 0.01; done";

const CHECK_ROWS: &str = "python3 -c \"
import sqlite3
db = sqlite3.connect('/workspace/db', timeout=60)
assert db.execute('pragma integrity_check').fetchone() == ('ok',)
n, low, high = db.execute('select count(*), min(n), max(n) from t').fetchone()
assert (low, high) == (1, n), (n, low, high)
print(n)
\"";

const GET: &str = "python3 -c \"
import urllib.request
print(urllib.request.urlopen('http://127.0.0.1:8123/served', timeout=60).read().decode(), end='')
\"";

/// A persistent sandbox whose memory is kept.
fn request(name: &str, more: &Value) -> CreateSandbox {
    let mut body = json!({"name": name, "policy": {"hibernate": "memory"}});
    for (name, value) in more.as_object().expect("an object") {
        body[name] = value.clone();
    }
    serde_json::from_value(body).expect("a request")
}

fn start(daemon: &Daemon, id: &SandboxId, argv: &[&str]) -> Execution {
    let mut request = StartExecution::of(argv.iter().copied()).unwrap();
    (request.detach, request.limit_ms) = (true, Some(TimeLimit::NONE));
    daemon.sandbox(id).start(&request, None).unwrap()
}

/// Starts one that has its terminal open by a name that CRIU cannot keep.
fn start_holder(daemon: &Daemon, id: &SandboxId) -> ExecutionId {
    let script = "exec 5<>/dev/tty; echo it is open; exec sleep 1000";
    let mut holder = StartExecution::of(["/bin/sh", "-c", script]).unwrap();
    holder.tty = Some(serde_json::from_value::<Terminal>(json!({"rows": 24, "cols": 80})).unwrap());
    let holder = daemon.sandbox(id).start(&holder, None).unwrap().id;
    until_more(daemon, id, &holder, 0);
    holder
}

/// What an execution has written so far.
fn written(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId) -> String {
    let mut said = Vec::new();
    for line in daemon.sandbox(id).execution(execution.clone()).output(0) {
        match line.unwrap() {
            OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap()),
            OutputLine::Cut(cut) => panic!("output was cut: {cut:?}"),
            OutputLine::End(_) | OutputLine::Alive(_) => {}
        }
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Waits until an execution has written more than before.
fn until_more(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId, before: usize) -> String {
    let mut text = String::new();
    eventually_within(PATIENCE, "it goes on", || {
        text = written(daemon, id, execution);
        text.len() > before + 8
    });
    text
}

/// Whole lines that count from one on.
#[track_caller]
fn assert_counts(text: &str) {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (nth, line) in whole.lines().enumerate() {
        assert_eq!(line.trim(), (nth + 1).to_string(), "line {} of {text:?}", nth + 1);
    }
}

fn state(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId) -> (ExecutionState, Option<String>) {
    let told = daemon.sandbox(id).execution(execution.clone()).get().unwrap();
    (told.state, told.message)
}

fn stop(daemon: &Daemon, id: &SandboxId) -> Sandbox {
    let request = StopSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), ..StopSandbox::default() };
    daemon.sandbox(id).stop(&request).unwrap();
    daemon.wait_for(id, "it is saved", |now| now.status == Status::Hibernated)
}

fn ensure(daemon: &Daemon, id: &SandboxId) -> Sandbox {
    daemon.sandbox(id).ensure(&EnsureSandbox { wait_ms: Some(WaitMs::new(0).unwrap()) }).unwrap();
    daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready)
}

/// Asks for it, and sees that it fails without ever being ready.
fn ensure_in_vain(daemon: &Daemon, id: &SandboxId) -> Sandbox {
    daemon.sandbox(id).ensure(&EnsureSandbox { wait_ms: Some(WaitMs::new(0).unwrap()) }).unwrap();
    daemon.wait_for(id, "it failed", |now| {
        assert_ne!(now.status, Status::Ready, "{now:#?}");
        now.status == Status::Failed
    })
}

fn memory(sandbox: &Sandbox) -> (MemoryState, String) {
    let memory = sandbox.memory.clone().expect("something became of it");
    (memory.state, memory.why.unwrap_or_default())
}

/// What the timeline says of this kind, or with this cause.
fn told(daemon: &Daemon, id: &SandboxId, kind: &str) -> Vec<TimelineEntry> {
    let sandbox = daemon.sandbox(id);
    let all = sandbox.timeline_all().map(Result::unwrap);
    let code = kind.strip_prefix("sandbox.").unwrap_or(kind).to_owned();
    all.filter(|entry| entry.kind == kind || entry.cause.as_ref().is_some_and(|cause| cause.code == code)).collect()
}

/// Where the daemon keeps the memory of a snapshot.
fn dump_of(daemon: &Daemon, saved: &Sandbox) -> PathBuf {
    let snapshot = saved.memory.as_ref().and_then(|memory| memory.snapshot.clone()).expect("it is kept");
    daemon.provider_folder().join("memory").join(snapshot.as_str())
}

#[test]
fn x5_what_runs_goes_on_with_nothing_lost() {
    let Some(criu) = criu() else { return };
    let mut daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let box_of = daemon.create_from(&request("box", &json!({})));
    let id = &box_of.id;
    assert_eq!(box_of.policy.hibernate, Hibernate::Memory);
    run(&daemon.sandbox(id), "echo content > /workspace/served");
    let counter = start(&daemon, id, &["python3", "-u", "-c", COUNT]).id;
    let timer = start(&daemon, id, &["python3", "-u", "-c", TICK]).id;
    let rows = start(&daemon, id, &["python3", "-u", "-c", WRITE_ROWS]).id;
    let serve = "exec python3 -m http.server 8123 --bind 127.0.0.1 --directory /workspace";
    let server = start(&daemon, id, &["sh", "-c", serve]).id;
    let append = "exec 3>>/workspace/log; i=0; while :; do i=$((i+1)); echo $i >&3; echo $i; sleep 0.02; done";
    let append = start(&daemon, id, &["sh", "-c", append]).id;
    let ten = "n=0; while [ $n -lt 9 ]; do sleep 100000 & n=$((n+1)); done; echo all ten of them; wait";
    let ten = start(&daemon, id, &["sh", "-c", ten]).id;
    let holder = start(&daemon, id, &["python3", "-u", "-c", HOLD_MUCH]).id;
    let mut shell = StartExecution::of(["/bin/bash", "--norc", "-i"]).unwrap();
    shell.tty = Some(serde_json::from_value::<Terminal>(json!({"rows": 24, "cols": 80})).unwrap());
    (shell.stdin, shell.detach, shell.limit_ms) = (true, true, Some(TimeLimit::NONE));
    let shell = daemon.sandbox(id).start(&shell, None).unwrap().id;
    let mut typed = 0;
    let mut type_in = |daemon: &Daemon, text: &str| {
        let taken = daemon.sandbox(id).execution(shell.clone()).input(typed, text.as_bytes()).unwrap();
        typed = taken.stdin_bytes;
    };
    type_in(&daemon, "x=41\n");
    let all = [&counter, &timer, &rows, &append, &ten, &server, &holder, &shell];
    for execution in [&counter, &timer, &rows, &append, &ten, &holder] {
        until_more(&daemon, id, execution, 0);
    }
    let held = run(&daemon.sandbox(id), ASK).0;
    let rounds = std::env::var("VIV_MEMORY_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    for round in 1..=rounds {
        let says = |daemon: &Daemon, script: &str| {
            let (said, ended) = run(&daemon.sandbox(id), script);
            assert_eq!(ended.exit_code, Some(0), "round {round}: {said}");
            said
        };
        says(&daemon, STAY);
        let saved = stop(&daemon, id);
        assert_eq!(memory(&saved), (MemoryState::Kept, String::new()), "round {round}");
        for execution in all {
            assert_eq!(state(&daemon, id, execution).0, ExecutionState::Suspended, "round {round}");
        }
        if round == 1 {
            // All that is known of it is on disk.
            daemon.kill();
            daemon.restart();
        }
        let back = ensure(&daemon, id);
        assert_eq!(memory(&back), (MemoryState::Restored, String::new()), "round {round}");
        assert_eq!((back.generation, &back.policy), (Generation(1 + round), &box_of.policy), "T5, L16");
        for execution in all {
            let now = state(&daemon, id, execution);
            assert_eq!(now.0, ExecutionState::Running, "round {round}: {}", written(&daemon, id, execution));
        }
        let says = |script: &str| says(&daemon, script);
        // In the middle of a transaction others see what was there before it: its lock is held as it was, or they would take
        // its journal for that of somebody who died, and undo what it goes on with.
        says(CHECK_ROWS);
        says(GO_ON);
        for execution in [&counter, &timer, &rows, &append] {
            let before = written(&daemon, id, execution);
            let after = until_more(&daemon, id, execution, before.len());
            assert!(after.starts_with(&before), "round {round}");
            assert_counts(&after);
        }
        assert_eq!(says(GET), "content\n", "round {round}");
        assert_eq!(says(ASK), held, "round {round}");
        // What was acknowledged is there: there are no fewer rows than were told of before this look at them.
        let printed = written(&daemon, id, &rows).lines().count();
        assert!(says(CHECK_ROWS).trim().parse::<usize>().unwrap() >= printed, "round {round}");
        assert_counts(&says("cat /workspace/log"));
        assert_eq!(says("pgrep -c -x sleep -P $(pgrep -f 'all ten' | head -n 1)").trim(), "9", "round {round}");
        type_in(&daemon, &format!("echo $((x+{round}))\n"));
        let expected = format!("{}\r\n", 41 + round);
        eventually_within(PATIENCE, "the shell answers", || written(&daemon, id, &shell).contains(&expected));
    }
    let list: Vec<Execution> = daemon.sandbox(id).executions_all().map(Result::unwrap).collect();
    for execution in all {
        let found: Vec<_> = list.iter().filter(|one| one.id == *execution).collect();
        assert_eq!(found.len(), 1, "the list equals what is (X5): {list:?}");
    }
    // They are still ended for certain, tree and all (X3).
    for execution in [&ten, &counter] {
        let ended = daemon.sandbox(id).execution(execution.clone()).cancel().unwrap();
        assert_eq!(ended.state, ExecutionState::Cancelled);
    }
    daemon.remove(id);
    daemon.assert_nothing_left();
}

#[test]
fn l14_services_go_on_as_they_were_and_are_nudged() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let serve = "echo started >> starts; trap 'echo nudged >> nudges' USR1; while true; do sleep 0.05; done";
    let service = json!({
        "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 200},
        // It reports in at the second signal only.
        "nudge": {"signal": 10, "within_ms": 60_000, "reports": {"command": ["sh", "-c", "[ $(wc -l < nudges) -ge 2 ]"]}},
    });
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    let id = &made.id;
    let before = made.services[0].execution.clone();
    let saved = daemon.sandbox(id).hibernate(&RestSandbox::default()).unwrap().into_sandbox();
    assert_eq!((saved.status, memory(&saved).0), (Status::Hibernated, MemoryState::Kept));
    let back = ensure(&daemon, id);
    assert_eq!(back.services[0].execution, before, "it is the same execution");
    assert_eq!(run(&daemon.sandbox(id), "cat starts; sort -u nudges").0, "started\nnudged\n");
    // Frozen first, to disk later: it goes with its memory too.
    daemon.sandbox(id).freeze(&RestSandbox::default()).unwrap();
    let saved = daemon.sandbox(id).hibernate(&RestSandbox::default()).unwrap().into_sandbox();
    assert_eq!((saved.status, memory(&saved).0), (Status::Hibernated, MemoryState::Kept));
    let back = ensure(&daemon, id);
    assert_eq!((memory(&back).0, back.services[0].execution.clone()), (MemoryState::Restored, before));
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// A service that was restored is not ready before it reported in; one that never does is ended, and named (incident 1).
#[test]
fn l14_incident_1_a_restored_service_that_does_not_report_in_is_ended_and_named() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let serve = "trap 'echo nudged >> nudges' USR1; while true; do sleep 0.05; done";
    let service = json!({
        "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 50}, "restart": {"policy": "never"},
        "nudge": {"signal": 10, "within_ms": 1_000, "reports": {"command": ["test", "-e", "never"]}},
    });
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    let id = &made.id;
    let service = made.services[0].execution.clone().unwrap();
    let saved = stop(&daemon, id);
    assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
    let failed = ensure_in_vain(&daemon, id);
    assert_eq!(memory(&failed).0, MemoryState::Restored, "its memory is there, and that is not enough");
    assert_eq!((failed.generation, &failed.services[0].execution), (Generation(2), &made.services[0].execution));
    let cause = failed.cause.unwrap();
    assert_eq!(cause.code, "service_failed");
    let named = "service web: did not report in within 1000 ms after signal 10";
    assert!(cause.message.starts_with(named), "{}", cause.message);
    assert!(
        failed.services[0].ended.as_ref().is_some_and(|ended| ended.starts_with("did not report in within 1000 ms"))
    );
    assert_eq!(state(&daemon, id, &service), (ExecutionState::Lost, Some("service_failed".to_owned())));
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// What was restored and dies while it is looked at is no ready service: it is started again as another execution, linked
/// to the old, where that is wanted, and else the sandbox is not ready.
#[test]
fn l14_a_restored_service_that_dies_while_it_is_verified_is_not_ready() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    // The signal that it is nudged by is its end, and it is waited for until then.
    let serve = "echo started >> starts; trap 'exit 3' USR1; while true; do sleep 0.05; done";
    for policy in ["always", "never"] {
        let service = json!({
            "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 50},
            "restart": {"policy": policy, "times_max": 1, "backoff_ms": 50},
            "nudge": {"signal": 10, "within_ms": 60_000, "reports": {"command": ["test", "-e", "never"]}},
        });
        let made = daemon.create_from(&request(policy, &json!({"services": [service]})));
        let id = &made.id;
        let before = made.services[0].execution.clone().unwrap();
        assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
        if policy == "always" {
            let back = ensure(&daemon, id);
            assert_eq!((memory(&back).0, back.generation), (MemoryState::Restored, Generation(2)));
            let service = &back.services[0];
            assert_eq!((service.after.as_ref(), service.restarts), (Some(&before), 1));
            assert_eq!(run(&daemon.sandbox(id), "cat starts").0, "started\nstarted\n");
            assert_eq!(state(&daemon, id, &before).0, ExecutionState::Exited);
        } else {
            let failed = ensure_in_vain(&daemon, id);
            assert_eq!(failed.services[0].ended.as_deref(), Some("exited with code 3"));
            let cause = failed.cause.unwrap();
            assert_eq!((cause.code.as_str(), &*cause.message), ("service_failed", "service web: exited with code 3"));
            assert_eq!(state(&daemon, id, &before).0, ExecutionState::Lost);
        }
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l13_forks_go_on_from_the_same_instant() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let serve = "echo started >> starts; exec sleep 100000";
    let service = json!({"name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 50}});
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    let id = &made.id;
    // It draws a number that is nowhere but in its memory, and tells it later.
    let count = "
import os, time
drawn, i = os.urandom(8).hex(), 0
while True:
    i += 1
    print(i)
    if os.path.exists('/workspace/ask'):
        open('/workspace/drawn', 'w').write(drawn)
        os.remove('/workspace/ask')
    time.sleep(0.02)";
    let counter = start(&daemon, id, &["python3", "-u", "-c", count]).id;
    until_more(&daemon, id, &counter, 20);
    let drawn = |id: &SandboxId| {
        let script = "rm -f drawn; touch ask; while [ ! -s drawn ]; do sleep 0.05; done; cat drawn";
        run(&daemon.sandbox(id), script).0
    };
    let names = std::cell::RefCell::new(std::collections::BTreeSet::new());
    let goes_on = |fork: &Sandbox, of: &Sandbox, wanted: &str| {
        let fork = daemon.wait_for(&fork.id, "it is ready", |now| now.status == Status::Ready);
        assert_eq!((memory(&fork), fork.generation), ((MemoryState::Restored, String::new()), Generation(1)));
        let copy = counter.copied_into(&fork.id);
        let before = written(&daemon, &fork.id, &copy);
        assert!(before.len() > 20, "it begins where the other one was: {before:?}");
        assert_counts(&until_more(&daemon, &fork.id, &copy, before.len()));
        assert_eq!(drawn(&fork.id), wanted, "from the same memory");
        let ids: Vec<_> = daemon.sandbox(&fork.id).executions_all().map(|one| one.unwrap().id).collect();
        assert!(ids.contains(&copy) && !ids.contains(&counter), "they are copies: {ids:?}");
        let served = of.services[0].execution.as_ref().unwrap().copied_into(&fork.id);
        assert_eq!(fork.services[0].execution.as_ref(), Some(&served), "services go on");
        assert_eq!(run(&daemon.sandbox(&fork.id), "cat starts").0, "started\n");
        let identity =
            "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id; awk '{print $2}' /proc/self/uid_map";
        for line in run(&daemon.sandbox(&fork.id), identity).0.lines() {
            assert!(names.borrow_mut().insert(line.to_owned()), "{line} is another's too");
        }
        let ended = daemon.sandbox(&fork.id).execution(copy).cancel().unwrap();
        assert_eq!(ended.state, ExecutionState::Cancelled, "X3");
    };
    let count = |count| Some(viv_api::bound::ForkCount::new(count).unwrap());
    let fork = Fork { count: count(3), memory: true, wait_ms: Some(WaitMs::new(0).unwrap()), ..Fork::default() };
    let forked = daemon.sandbox(id).fork(&fork, None).unwrap();
    // The one that they come from goes on as if nothing had been.
    let before = written(&daemon, id, &counter);
    assert_counts(&until_more(&daemon, id, &counter, before.len()));
    let now = daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
    assert_eq!((now.generation, &now.services[0].execution), (made.generation, &made.services[0].execution));
    let wanted = drawn(id);
    assert_eq!(forked.sandboxes.len(), 3);
    for fork in &forked.sandboxes {
        goes_on(fork, &made, &wanted);
    }
    // From what is on disk, by hand.
    let saved = stop(&daemon, id);
    let output = daemon.viv().args(["--json", "fork", "--memory", "box"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let again: viv_api::snapshot::Forked = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(Some(&again.snapshot), saved.memory.as_ref().and_then(|memory| memory.snapshot.as_ref()));
    goes_on(&again.sandboxes[0], &saved, &wanted);
    let back = ensure(&daemon, id);
    assert_eq!(memory(&back).0, MemoryState::Restored, "its own memory is its own");
    assert_eq!(drawn(id), wanted);
    let shown = daemon.viv().args(["--json", "snapshot", "show", again.snapshot.as_str()]).output().unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&shown.stdout).unwrap()["memory"], json!(true));
    // What has none is refused.
    let output = daemon.viv().args(["--json", "snapshot", "create", "box"]).output().unwrap();
    let without: viv_api::snapshot::Snapshot = serde_json::from_slice(&output.stdout).unwrap();
    let refused = daemon.viv().args(["fork", "--memory", without.id.as_str()]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("without memory"), "{said}");
    for fork in forked.sandboxes.iter().chain(&again.sandboxes) {
        daemon.remove(&fork.id);
    }
    daemon.remove(id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_is_frozen_goes_to_disk_when_memory_gets_short() {
    let Some(criu) = criu() else { return };
    let mut daemon = Daemon::prepare(&["--criu", criu.to_str().unwrap()]);
    // Whatever the machine has, it is short of it.
    daemon.configure("[cleanup]\nmemory_below_percent = 100\nmemory_period_s = 1\n");
    daemon.restart();
    let made = daemon.create_from(&request("box", &json!({})));
    let files = daemon.create_from(&serde_json::from_value(json!({"name": "files"})).unwrap());
    let counter = start(&daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
    let before = until_more(&daemon, &made.id, &counter, 0);
    assert_eq!(daemon.wait_for(&made.id, "it is told", |_| true).status, Status::Ready, "what runs is left alone");
    // What could not be dumped, and is the longest frozen.
    let held = daemon.create_from(&request("held", &json!({})));
    let holder = start_holder(&daemon, &held.id);
    daemon.sandbox(&held.id).freeze(&RestSandbox::default()).unwrap();
    daemon.sandbox(&files.id).freeze(&RestSandbox::default()).unwrap();
    daemon.sandbox(&made.id).freeze(&RestSandbox::default()).unwrap();
    let saved = daemon.wait_for(&made.id, "it is on disk", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
    let lines = told(&daemon, &made.id, "cleanup.item");
    assert!(!lines.is_empty(), "it is told why");
    let back = ensure(&daemon, &made.id);
    assert_eq!(memory(&back).0, MemoryState::Restored);
    assert_counts(&until_more(&daemon, &made.id, &counter, before.len()));
    // Those whose memory would be lost stay where they are.
    for id in [&files.id, &held.id] {
        assert_eq!(daemon.wait_for(id, "it is told", |_| true).status, Status::Frozen);
    }
    assert_eq!(state(&daemon, &held.id, &holder).0, ExecutionState::Suspended);
    for id in [&made.id, &files.id, &held.id] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

/// A daemon whose CRIU first does what the file `hook` beside it says, when there is one.
struct Staged {
    daemon: Daemon,
    folder: tempfile::TempDir,
}

impl Staged {
    fn new(criu: &Path) -> Self {
        Self::on(criu, Daemon::prepare(&[]))
    }

    fn on(criu: &Path, daemon: Daemon) -> Self {
        Self::configured(criu, daemon, "")
    }

    fn configured(criu: &Path, mut daemon: Daemon, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let hook = folder.path().join("hook");
        let path = criu::instead(folder.path(), criu, &format!("[ -e {0} ] && . {0}", hook.display()));
        let path = path.display().to_string();
        daemon.configure(&format!("[sandboxes]\ncriu = {path:?}\nsave_memory = \"on\"\n{more}"));
        daemon.restart();
        Self { daemon, folder }
    }

    /// What CRIU does first, when it is called with this verb.
    fn when(&self, verb: &str, script: &str) {
        let text = format!("case \"$1\" in {verb}) {script} ;; esac\n");
        fs::write(self.folder.path().join("hook"), text).unwrap();
    }

    /// Has it wait in the middle of this verb until it is told to go on: all processes are there and stand still.
    fn hold(&self, verb: &str) {
        let (begun, go) = (self.folder.path().join("begun"), self.folder.path().join("go"));
        let (begun, go) = (begun.display(), go.display());
        // It ends with this stage too.
        let wait = format!("touch {begun}; while [ -e {begun} ] && [ ! -e {go} ]; do sleep 0.05; done");
        self.at(verb, if verb == "dump" { "network-lock" } else { "post-restore" }, &wait);
    }

    fn until_held(&self) {
        let begun = self.folder.path().join("begun");
        eventually_within(PATIENCE, "CRIU is at work", || begun.exists());
    }

    fn let_go(&self) {
        fs::write(self.folder.path().join("go"), "").unwrap();
    }

    /// A sandbox with a file, a service and a command that runs.
    fn busy(&self) -> (Sandbox, ExecutionId) {
        let service = json!({"name": "tick", "argv": ["sh", "-c", "exec sleep 100000"], "ready": {"runs_ms": 50}});
        let made = self.daemon.create_from(&request("box", &json!({"services": [service]})));
        run(&self.daemon.sandbox(&made.id), "echo kept > /workspace/file; sync");
        let execution = start(&self.daemon, &made.id, &["sh", "-c", "exec sleep 99999"]).id;
        (made, execution)
    }

    fn begin_stop(&self, id: &SandboxId) {
        let request = StopSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), ..StopSandbox::default() };
        self.daemon.sandbox(id).stop(&request).unwrap();
    }

    fn begin_ensure(&self, id: &SandboxId) {
        let request = EnsureSandbox { wait_ms: Some(WaitMs::new(0).unwrap()) };
        self.daemon.sandbox(id).ensure(&request).unwrap();
    }

    /// It was saved with its files alone, says why everywhere, and comes back with them.
    fn assert_not_saved(&self, made: &Sandbox, execution: &ExecutionId, why: &str) {
        let (daemon, id) = (&self.daemon, &made.id);
        let saved = daemon.wait_for(id, "it is saved", |now| now.status == Status::Hibernated);
        let (state_of, said) = memory(&saved);
        assert!(state_of == MemoryState::NotSaved && !said.is_empty() && said.contains(why), "{saved:#?}");
        assert!(saved.cause.unwrap().message.contains(why));
        let lines = told(daemon, id, "sandbox.memory_not_saved");
        assert!(lines.len() == 1 && lines[0].message.contains(why), "{lines:#?}");
        let lost = state(daemon, id, execution);
        assert_eq!(lost, (ExecutionState::Lost, Some("hibernated".to_owned())), "X5");
        let back = ensure(daemon, id);
        assert_eq!(back.generation, Generation(2));
        self.assert_files_only(&back, made);
    }

    /// It runs again with its files alone, in another generation than the attempt, and says why everywhere.
    fn assert_not_restored(&self, made: &Sandbox, execution: &ExecutionId, why: &str) {
        let back = self.assert_begins_with_files(made, execution, why);
        self.assert_files_only(&back, made);
    }

    fn assert_begins_with_files(&self, made: &Sandbox, execution: &ExecutionId, why: &str) -> Sandbox {
        let (daemon, id) = (&self.daemon, &made.id);
        let back = daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
        let (state_of, said) = memory(&back);
        assert!(state_of == MemoryState::NotRestored && !said.is_empty() && said.contains(why), "{back:#?}");
        assert_eq!(back.generation, Generation(3), "the attempt had the second");
        let lines = told(daemon, id, "sandbox.memory_not_restored");
        assert!(lines.iter().any(|line| line.message.contains(why)), "{lines:#?}");
        let lost = state(daemon, id, execution);
        assert_eq!(lost, (ExecutionState::Lost, Some("memory_not_restored".to_owned())), "X5");
        back
    }

    fn assert_files_only(&self, back: &Sandbox, made: &Sandbox) {
        let (daemon, id) = (&self.daemon, &made.id);
        assert_eq!(run(&daemon.sandbox(id), "cat /workspace/file; pgrep -f '[9]9999'").0, "kept\n");
        let (old, new) = (&made.services[0], &back.services[0]);
        assert_ne!(old.execution, new.execution);
        assert_eq!(new.after, old.execution, "services are started again, linked to the old");
        daemon.remove(id);
        daemon.assert_nothing_left();
    }
}

/// What was dumped, why it was not restored, and CRIU's word on that.
#[track_caller]
fn assert_kept_for_a_look(dump: &Path, why: &str) {
    let said = fs::read_to_string(dump.join("not-restored")).unwrap();
    assert!(said.contains(why), "{said}");
    assert!(fs::metadata(dump.join("restore.log")).unwrap().len() > 0, "what CRIU said");
    assert!(dump.join("manifest.json").is_file() && dump.join("kept/images").is_dir(), "what was dumped");
}

/// Waits until whatever nobody refers to has been taken away: what never was anybody's goes with it.
fn collected(daemon: &Daemon) {
    let nobodys = daemon.provider_folder().join("memory").join(SnapshotId::from_bytes(fresh_bytes()).as_str());
    fs::create_dir(&nobodys).unwrap();
    let of_nobody = daemon.create_from(&serde_json::from_value(json!({"name": "passing"})).unwrap());
    daemon.sandbox(&of_nobody.id).make_snapshot(&CreateSnapshot::default(), None).unwrap();
    daemon.remove(&of_nobody.id);
    eventually_within(PATIENCE, "it is collected", || !nobodys.exists());
}
