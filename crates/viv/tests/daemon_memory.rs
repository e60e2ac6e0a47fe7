//! Memory that survives, on the real daemon: what runs goes on after a hibernation, and whatever goes wrong with that is
//! followed by the files of the same moment, in sight (L13, X5, T4, T5).
//!
//! The CRIU is that of `scripts/prepare criu`, or what `VIV_CRIU` names; without one these are passed over.
#![allow(missing_docs, reason = "tests")]

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

#[test]
fn l13_a_dump_that_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    for (script, why) in [("exit 1", "CRIU"), ("kill -9 $$", "CRIU")] {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        staged.when("dump", script);
        staged.begin_stop(&made.id);
        staged.assert_not_saved(&made, &execution, why);
    }
}

/// CRIU's word on a dump stays beyond the instance, which ends with the save of its files.
#[test]
fn l13_what_criu_said_of_a_dump_that_failed_stays_for_a_look() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (daemon, made) = (&staged.daemon, staged.daemon.create_from(&request("box", &json!({}))));
    let place = daemon.provider_folder().join("memory");
    let kept = || {
        let all = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.join("not-saved").exists()).collect::<Vec<_>>()
    };
    // CRIU cannot keep this, and says so when it comes to it.
    for round in 1..=5 {
        start_holder(daemon, &made.id);
        staged.begin_stop(&made.id);
        let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
        assert_eq!(memory(&saved).0, MemoryState::NotSaved, "round {round}");
        ensure(daemon, &made.id);
        collected(daemon);
        let all = kept();
        assert_eq!(all.len(), round.min(3), "the last three: {all:?}");
        let told = all.iter().filter(|path| {
            let (log, why) = (fs::read_to_string(path.join("dump.log")), fs::read_to_string(path.join("not-saved")));
            log.unwrap().contains("Error (") && memory(&saved).1.contains(why.unwrap().trim())
        });
        assert!(told.count() > 0, "{all:?}");
    }
    daemon.remove(&made.id);
    collected(daemon);
    assert!(kept().is_empty(), "with the last of its sandbox they go");
    daemon.assert_nothing_left();
}

/// Who deletes it in the middle of a dump or of a restore has it gone, whatever CRIU is at (L20).
#[test]
fn l20_what_is_deleted_in_a_dump_or_a_restore_is_gone() {
    let Some(criu) = criu() else { return };
    for verb in ["dump", "restore"] {
        let staged = Staged::new(&criu);
        let (made, _) = staged.busy();
        let daemon = &staged.daemon;
        if verb == "restore" {
            stop(daemon, &made.id);
        }
        staged.hold(verb);
        match verb {
            "dump" => staged.begin_stop(&made.id),
            _ => staged.begin_ensure(&made.id),
        }
        staged.until_held();
        daemon.remove(&made.id);
        staged.let_go();
        daemon.assert_nothing_left();
        collected(daemon);
        let memory = daemon.provider_folder().join("memory");
        let left: Vec<_> = fs::read_dir(&memory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{verb}: {left:?}");
    }
}

/// The hard deadline is the shim's, which waits for no CRIU (L5): what was on disk is saved.
#[test]
fn l5_the_hard_deadline_holds_in_the_middle_of_a_dump() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let daemon = &staged.daemon;
    let policy = json!({"policy": {"hibernate": "memory", "lifetime_ms": LIFETIME_MS}});
    let made = daemon.create_from(&request("box", &policy));
    run(&daemon.sandbox(&made.id), "echo kept > /workspace/file; sync");
    let execution = start(daemon, &made.id, &["sh", "-c", "exec sleep 99999"]).id;
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    // Nobody lets it go.
    let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::NotSaved, "{saved:#?}");
    assert_eq!(state(daemon, &made.id, &execution).0, ExecutionState::Lost);
    staged.let_go();
    let back = ensure(daemon, &made.id);
    assert_eq!(back.generation, Generation(2));
    assert_eq!(run(&daemon.sandbox(&made.id), "cat /workspace/file").0, "kept\n");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_criu_cannot_keep_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    start_holder(&staged.daemon, &made.id);
    staged.begin_stop(&made.id);
    staged.assert_not_saved(&made, &execution, "/dev/tty");
}

/// Nobody asked for it to end: what is frozen is tried once, and stays what it is when its dump fails for a reason that
/// nobody knew of.
#[test]
fn l13_what_cannot_go_to_disk_when_memory_gets_short_stays_frozen() {
    let Some(criu) = criu() else { return };
    let short = "[cleanup]\nmemory_below_percent = 100\nmemory_period_s = 1\n";
    let staged = Staged::configured(&criu, Daemon::prepare(&[]), short);
    let daemon = &staged.daemon;
    let made = daemon.create_from(&request("box", &json!({})));
    let counter = start(daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
    let before = until_more(daemon, &made.id, &counter, 0);
    let dumps = staged.folder.path().join("dumps");
    staged.when("dump", &format!("echo >> {}; exit 1", dumps.display()));
    daemon.sandbox(&made.id).freeze(&RestSandbox::default()).unwrap();
    let code = |now: &Sandbox| now.cause.as_ref().map(|cause| cause.code.clone()).unwrap_or_default();
    let is_left = |now: &Sandbox| now.status == Status::Frozen && code(now) == "memory_not_saved";
    let stays = daemon.wait_for(&made.id, "it was tried and stays", is_left);
    assert_eq!((memory(&stays).0, stays.generation), (MemoryState::NotSaved, Generation(1)));
    assert!(stays.cause.unwrap().message.contains("memory cannot be saved"));
    // Others go, and it is left alone though it is the longest frozen.
    fs::remove_file(staged.folder.path().join("hook")).unwrap();
    for name in ["one", "two"] {
        let other = daemon.create_from(&request(name, &json!({})));
        daemon.sandbox(&other.id).freeze(&RestSandbox::default()).unwrap();
        daemon.wait_for(&other.id, "it is on disk", |now| now.status == Status::Hibernated);
        daemon.remove(&other.id);
    }
    assert!(is_left(&daemon.wait_for(&made.id, "it is told", |_| true)));
    assert_eq!(fs::read_to_string(&dumps).unwrap().lines().count(), 1);
    // All that it holds is there.
    let back = ensure(daemon, &made.id);
    assert_eq!((back.generation, state(daemon, &made.id, &counter).0), (Generation(1), ExecutionState::Running));
    assert_counts(&until_more(daemon, &made.id, &counter, before.len()));
    // Who stops it has its files saved, whatever becomes of its memory.
    staged.when("dump", "exit 1");
    staged.begin_stop(&made.id);
    let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::NotSaved);
    assert_eq!(state(daemon, &made.id, &counter).0, ExecutionState::Lost);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_is_in_the_way_is_said_beforehand_with_who_holds_it() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("box", &json!({})));
    let check = |wanted: bool| {
        let output = daemon.viv().args(["--json", "checkpoint", "--check", "box"]).output().unwrap();
        assert_eq!(output.status.success(), wanted, "{output:?}");
        serde_json::from_slice::<CheckpointCheck>(&output.stdout).unwrap()
    };
    let counter = start(&daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
    until_more(&daemon, &made.id, &counter, 0);
    let found = check(true);
    assert!(found.can && found.obstacles.is_empty(), "{found:#?}");
    // The daemon says by what it does it, which need not be what this process would.
    let doctor = daemon.viv().arg("doctor").env("VIV_CRIU", "/no/such/criu").output().unwrap();
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line = doctor.lines().find(|line| line.contains("it saves memory by CRIU")).unwrap_or_default();
    assert!(line.contains(&*criu.display().to_string()), "{doctor}");
    let holder = start_holder(&daemon, &made.id);
    let ghost = "exec 3>/workspace/ghost; rm /workspace/ghost; truncate -s 300M /proc/self/fd/3; echo it is open; exec sleep 1001";
    let ghost = start(&daemon, &made.id, &["sh", "-c", ghost]).id;
    until_more(&daemon, &made.id, &ghost, 0);
    let traced = start(&daemon, &made.id, &["python3", "-u", "-c", TRACED]).id;
    until_more(&daemon, &made.id, &traced, 0);
    // Memory with a descriptor is dumped as memory.
    let held =
        "import os, time\nos.truncate(os.memfd_create('held'), 300 << 20)\nprint('it is held')\ntime.sleep(100000)";
    let held = start(&daemon, &made.id, &["python3", "-u", "-c", held]).id;
    until_more(&daemon, &made.id, &held, 0);
    let found = check(false);
    let told = |execution: &ExecutionId, what: &str, command: &str| {
        let is_it = |one: &&viv_api::checkpoint::Obstacle| one.execution.as_ref() == Some(execution);
        let one = found.obstacles.iter().find(is_it).unwrap_or_else(|| panic!("{found:#?}"));
        assert!(one.what.contains(what) && one.pid.is_some(), "{one:?}");
        assert!(one.command.as_ref().is_some_and(|line| line.contains(command)), "{one:?}");
    };
    told(&holder, "/dev/tty", "sleep 1000");
    told(&ghost, "a file without a name of 300 MiB", "sleep 1001");
    told(&traced, "a debugger", "TRACEME");
    assert_eq!(found.obstacles.len(), 3, "{found:#?}");
    // Nobody noticed.
    let before = written(&daemon, &made.id, &counter);
    assert_counts(&until_more(&daemon, &made.id, &counter, before.len()));
    // And what was not in the way is not.
    for execution in [&holder, &ghost, &traced] {
        daemon.sandbox(&made.id).execution(execution.clone()).cancel().unwrap();
    }
    assert_eq!(memory(&stop(&daemon, &made.id)), (MemoryState::Kept, String::new()));
    assert_eq!(memory(&ensure(&daemon, &made.id)).0, MemoryState::Restored);
    assert_eq!(state(&daemon, &made.id, &held).0, ExecutionState::Running);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn p6_the_selftest_covers_it() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let output = daemon.viv().args(["selftest"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("with its memory") && said.contains("fork with memory"), "{said}");
    daemon.assert_nothing_left();
}

#[test]
fn p6_the_selftest_fails_where_memory_is_declared_and_not_saved() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    staged.when("dump", "exit 1");
    let output = staged.daemon.viv().args(["selftest"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("says that it saves memory, and did not"), "{said}");
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_shim_killed_in_a_dump_leaves_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    assert_eq!(state(&staged.daemon, &made.id, &execution).0, ExecutionState::Suspended);
    kill(shim_pid(&staged.daemon, &made.id), Signal::KILL);
    staged.assert_not_saved(&made, &execution, "");
}

#[test]
fn j4_a_daemon_killed_in_a_dump_and_in_a_restore_loses_nothing() {
    let Some(criu) = criu() else { return };
    let mut staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    staged.daemon.kill();
    staged.daemon.restart();
    staged.let_go();
    let saved = staged.daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::Kept, "{saved:#?}");
    for file in ["begun", "go"] {
        fs::remove_file(staged.folder.path().join(file)).unwrap();
    }
    staged.hold("restore");
    staged.begin_ensure(&made.id);
    staged.until_held();
    staged.daemon.kill();
    staged.daemon.restart();
    staged.let_go();
    let back = staged.daemon.wait_for(&made.id, "it is ready", |now| now.status == Status::Ready);
    assert_eq!((memory(&back).0, back.generation), (MemoryState::Restored, Generation(2)), "{back:#?}");
    assert_eq!(state(&staged.daemon, &made.id, &execution).0, ExecutionState::Running);
    assert_eq!(back.services[0].execution, made.services[0].execution);
    staged.daemon.remove(&made.id);
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_restore_that_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    for script in ["exit 1", "kill -9 $$"] {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let saved = stop(&staged.daemon, &made.id);
        staged.when("restore", script);
        staged.begin_ensure(&made.id);
        let dump = dump_of(&staged.daemon, &saved);
        staged.daemon.wait_for(&made.id, "it is ready", |now| now.status == Status::Ready);
        assert!(dump.join("kept/images").is_dir(), "it is kept for a look");
        assert!(fs::read_to_string(dump.join("not-restored")).unwrap().contains("memory"));
        staged.assert_not_restored(&made, &execution, "cannot be restored");
    }
}

#[test]
fn l13_a_fork_whose_restore_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let daemon = &staged.daemon;
    staged.when("restore", "exit 1");
    let fork = Fork { memory: true, wait_ms: Some(WaitMs::new(0).unwrap()), ..Fork::default() };
    let forked = daemon.sandbox(&made.id).fork(&fork, None).unwrap();
    let forked = &forked.sandboxes[0].id;
    let back = daemon.wait_for(forked, "it is ready", |now| now.status == Status::Ready);
    let (state_of, said) = memory(&back);
    assert!(state_of == MemoryState::NotRestored && said.contains("cannot be restored"), "{back:#?}");
    assert_eq!(back.generation, Generation(2), "the attempt had the first");
    assert!(!told(daemon, forked, "sandbox.memory_not_restored").is_empty());
    assert_eq!(run(&daemon.sandbox(forked), "cat /workspace/file; pgrep -f '[9]9999'").0, "kept\n");
    assert_ne!(back.services[0].execution, made.services[0].execution, "services are started again");
    // Whom it comes from does not notice.
    assert_eq!(state(daemon, &made.id, &execution).0, ExecutionState::Running);
    let now = daemon.sandbox(&made.id).get().unwrap();
    assert_eq!((now.generation, &now.services[0].execution), (made.generation, &made.services[0].execution));
    for id in [forked, &made.id] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l13_a_damaged_image_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let saved = stop(&staged.daemon, &made.id);
    let pages = dump_of(&staged.daemon, &saved).join("kept/images/pages-1.img.zst");
    let mut content = fs::read(&pages).unwrap();
    content[100] ^= 1;
    fs::write(&pages, &content).unwrap();
    staged.begin_ensure(&made.id);
    let back = staged.assert_begins_with_files(&made, &execution, "damaged");
    // Who looks at its snapshot is told, and that its files are what they were (L10).
    let snapshot = saved.memory.and_then(|memory| memory.snapshot).expect("it was kept");
    let seen = staged.daemon.client().snapshot(&snapshot).unwrap();
    assert!(seen.integrity != Some(SnapshotIntegrity::Damaged), "{seen:#?}");
    assert!(seen.memory_damage.is_some_and(|why| why.contains("not what was dumped")));
    let shown = staged.daemon.viv().args(["snapshot", "show", snapshot.as_str()]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.lines().any(|line| line.starts_with("memory") && line.contains("DAMAGED")), "{shown}");
    staged.assert_files_only(&back, &made);
}

/// Files and memory belong together: below damaged files nothing begins, with its memory as little as without (L10).
#[test]
fn l10_what_was_saved_with_memory_and_is_damaged_is_not_begun_with() {
    type Damage = fn(&Path);
    let Some(criu) = criu() else { return };
    let longer: Damage = |file| fs::write(file, "something else\n").unwrap();
    let gone: Damage = |file| fs::remove_file(file).unwrap();
    for damage in [longer, gone] {
        let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
        let made = daemon.create_from(&request("box", &json!({})));
        let id = &made.id;
        run(&daemon.sandbox(id), "echo kept > file");
        let counter = start(&daemon, id, &["python3", "-u", "-c", COUNT]).id;
        until_more(&daemon, id, &counter, 0);
        assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
        // All of it was read by then, and nothing more is noted of it.
        eventually_within(PATIENCE, "it is hashed", || {
            let saved = daemon.sandbox(id).diagnosis().unwrap().auto_saved.expect("it was saved");
            saved.integrity == Integrity::Verified
        });
        let layers = fs::read_dir(daemon.provider_folder().join("layers/sealed")).unwrap();
        let files = layers.map(|layer| layer.unwrap().path().join("parts/root/workspace/file"));
        let files: Vec<PathBuf> = files.filter(|file| file.exists()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        damage(&files[0]);
        let failed = ensure_in_vain(&daemon, id);
        let (state_of, why) = memory(&failed);
        assert!(state_of == MemoryState::NotRestored && why.contains("damaged"), "{failed:#?}");
        assert!(failed.cause.unwrap().message.contains("damaged"));
        let saved = daemon.sandbox(id).diagnosis().unwrap().auto_saved.expect("it was saved");
        assert_eq!(saved.integrity, Integrity::Damaged);
        assert_eq!(state(&daemon, id, &counter).0, ExecutionState::Lost);
        daemon.remove(id);
        daemon.assert_nothing_left();
    }
}

#[test]
fn l13_ids_that_are_taken_are_replaced_by_others() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let id = &made.id;
    let counter = start(&staged.daemon, id, &["python3", "-u", "-c", COUNT]).id;
    let before = until_more(&staged.daemon, id, &counter, 0);
    let ids = staged.daemon.provider_folder().join("ids");
    let taken: Vec<_> = fs::read_dir(&ids).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    stop(&staged.daemon, id);
    // Somebody else has the range of ids that its processes know.
    let other = staged.daemon.create();
    std::os::unix::fs::symlink(other.id.as_str(), ids.join(&taken[0])).unwrap();
    staged.begin_ensure(id);
    let back = staged.daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
    fs::remove_file(ids.join(&taken[0])).unwrap();
    assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
    assert_eq!(state(&staged.daemon, id, &execution).0, ExecutionState::Running);
    assert_counts(&until_more(&staged.daemon, id, &counter, before.len()));
    let script = "cat file; echo more >> file; awk '{print $2}' /proc/self/uid_map";
    let said = run(&staged.daemon.sandbox(id), script).0;
    assert!(said.starts_with("kept\n") && !said.contains(taken[0].to_str().unwrap()), "{said}");
    for id in [id, &other.id] {
        staged.daemon.remove(id);
    }
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_machine_that_lacks_something_is_followed_by_the_files() {
    type Change = fn(&mut Value);
    let Some(criu) = criu() else { return };
    // It is of a machine with a newer kernel, with processors that can do more, of another kind.
    let flag: Change = |machine| machine["cpu_flags"].as_array_mut().expect("a list").push(json!("fly"));
    let kernel: Change = |machine| machine["kernel"] = json!("99.1.0");
    let kind: Change = |machine| machine["architecture"] = json!("pdp11");
    let others =
        [(kernel, "Linux 99.1.0"), (flag, "whose processors can do more (fly"), (kind, "a machine with pdp11")];
    for (make_other, why) in others {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let saved = stop(&staged.daemon, &made.id);
        let path = dump_of(&staged.daemon, &saved).join("manifest.json");
        let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        make_other(&mut manifest["machine"]);
        fs::write(&path, manifest.to_string()).unwrap();
        staged.begin_ensure(&made.id);
        staged.assert_not_restored(&made, &execution, why);
    }
}

#[test]
fn l13_a_shim_killed_in_a_restore_leaves_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    staged.hold("restore");
    staged.begin_ensure(&made.id);
    staged.until_held();
    kill(shim_pid(&staged.daemon, &made.id), Signal::KILL);
    staged.assert_not_restored(&made, &execution, "");
}

#[test]
fn t4_what_was_restored_and_dies_at_once_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    // Everything is there, and has ended before anybody does anything with it: first of all it would get its name.
    let criu_path = criu.display();
    let script = format!(
        "{criu_path} \"$@\" || exit 1; for word in \"$@\"; do case $before in --pidfile) file=$word ;; esac; before=$word; done; \
         pid=$(cat $file); kill -9 $pid; while readlink /proc/$pid/ns/uts >/dev/null; do sleep 0.01; done; exit 0"
    );
    staged.when("restore", &script);
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, "naming it failed");
}

/// It is there, and cannot be verified: its agent dies while a service is waited for.
#[test]
fn t4_what_was_restored_and_does_not_work_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let daemon = &staged.daemon;
    // It reports in when it is started again, and not when it goes on.
    let serve = "[ -e started ] && touch reported; touch started; trap : USR1; while true; do sleep 0.05; done";
    let service = json!({
        "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 50},
        "nudge": {"signal": 10, "reports": {"command": ["test", "-e", "reported"]}},
    });
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    run(&daemon.sandbox(&made.id), "echo kept > /workspace/file");
    let execution = start(daemon, &made.id, &["sh", "-c", "exec sleep 99999"]).id;
    let dump = dump_of(daemon, &stop(daemon, &made.id));
    staged.begin_ensure(&made.id);
    let restored = daemon.wait_for(&made.id, "it is being verified", |now| {
        now.phase == Phase::Verifying && now.generation == Generation(2)
    });
    assert_eq!(memory(&restored).0, MemoryState::Restored);
    let agent = fs::read_to_string(instance_folder(daemon, &made.id).join("init.pid")).unwrap();
    kill(agent.trim().parse().unwrap(), Signal::KILL);
    staged.assert_begins_with_files(&made, &execution, "what was restored does not work");
    // It stays for a look, with what CRIU said, though its snapshot is replaced by the next one.
    assert_kept_for_a_look(&dump, "what was restored does not work");
    assert_eq!(memory(&stop(daemon, &made.id)).0, MemoryState::Kept);
    collected(daemon);
    assert_kept_for_a_look(&dump, "what was restored does not work");
    assert_eq!(memory(&ensure(daemon, &made.id)), (MemoryState::Restored, String::new()), "the next one is another");
    assert_eq!(run(&daemon.sandbox(&made.id), "cat /workspace/file").0, "kept\n");
    // Until nothing of its sandbox is there.
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
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

#[test]
fn l13_a_full_disk_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    if let Err(why) = Disk::make(&["mkfs.ext4", "-q", "-F"], "", 96) {
        return criu::pass_over(&why);
    }
    middle::until_it_comes_so_far(|| {
        let disk = Disk::make(&["mkfs.ext4", "-q", "-F"], "", 96).unwrap();
        let staged = Staged::on(&criu, Daemon::in_house(House::on_disk(&disk)));
        let (made, execution) = staged.busy();
        let hold = "import time\nheld = bytearray(b'x' * (160 << 20))\nprint('it holds much')\ntime.sleep(100000)";
        let holder = start(&staged.daemon, &made.id, &["python3", "-u", "-c", hold]).id;
        until_more(&staged.daemon, &made.id, &holder, 0);
        staged.assert_not_saved_once_written(&made, &execution, "No space left")
    });
}

/// One look at a busy start is not the last word: what the doctor says is what is done, without another daemon.
#[test]
fn l13_a_criu_that_works_later_is_used_by_the_daemon_that_runs() {
    let Some(criu) = criu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("criu");
    let write = |then: &str| {
        let text = format!("#!/bin/sh\n[ $1 = --version ] || {then}\nexec {} \"$@\"\n", criu.display());
        fs::write(folder.path().join("new"), text).unwrap();
        fs::set_permissions(folder.path().join("new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
    };
    write("exit 1");
    let daemon = Daemon::start_with(&["--criu", path.to_str().unwrap()]);
    let says = |daemon: &Daemon| {
        let told = daemon.client().doctor().unwrap();
        let one = told.capabilities.into_iter().find(|one| one.name == "save_memory").expect("it is told");
        assert_eq!(one.has, told.saves_memory_by.is_some(), "it says one thing");
        (one.has, one.reason.unwrap_or_default())
    };
    let (has, why) = says(&daemon);
    assert!(!has && why.contains("does not work here"), "{why}");
    let made = daemon.create_from(&request("box", &json!({})));
    let counter = |daemon: &Daemon| {
        let counter = start(daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
        let before = until_more(daemon, &made.id, &counter, 0);
        (counter, before)
    };
    counter(&daemon);
    let (state_of, said) = memory(&stop(&daemon, &made.id));
    assert!(state_of == MemoryState::NotSaved && said.contains("does not work here"), "{said}");
    write("true");
    assert_eq!(says(&daemon), (true, String::new()));
    ensure(&daemon, &made.id);
    let (execution, before) = counter(&daemon);
    assert_eq!(memory(&stop(&daemon, &made.id)), (MemoryState::Kept, String::new()));
    assert_eq!(memory(&ensure(&daemon, &made.id)), (MemoryState::Restored, String::new()));
    assert_counts(&until_more(&daemon, &made.id, &execution, before.len()));
    // And the other way round: what is gone is not promised.
    fs::remove_file(&path).unwrap();
    let (has, why) = says(&daemon);
    assert!(!has && why.contains("there is no program"), "{why}");
    let (state_of, said) = memory(&stop(&daemon, &made.id));
    assert!(state_of == MemoryState::NotSaved && said.contains("there is no program"), "{said}");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_without_any_criu_everything_works_and_says_so() {
    for arguments in [["--criu", "/no/such/criu"], ["--save-memory", "off"]] {
        let folder = tempfile::tempdir().unwrap();
        let staged = Staged { daemon: Daemon::start_with(&arguments), folder };
        let (made, execution) = staged.busy();
        assert_eq!(made.policy.hibernate, Hibernate::Memory, "what is asked for is kept");
        let why = if arguments[0] == "--criu" { "there is no program /no/such/criu" } else { "switched off" };
        staged.begin_stop(&made.id);
        let saved = staged.daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
        assert!(memory(&saved).1.contains(why), "{saved:#?}");
        assert_eq!(state(&staged.daemon, &made.id, &execution).1.as_deref(), Some("hibernated"));
        let back = ensure(&staged.daemon, &made.id);
        // Asked beforehand it says so, and what cannot be done without it is refused, and nothing made.
        let said = |arguments: &[&str]| {
            let output = staged.daemon.viv().args(arguments).output().unwrap();
            assert!(!output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        };
        for arguments in [&["--json", "checkpoint", "--check", "box"][..], &["fork", "--memory", "box"]] {
            let said = said(arguments);
            assert!(said.contains(why), "{arguments:?}: {said}");
        }
        assert_eq!(all(staged.daemon.client()).len(), 1);
        staged.assert_files_only(&back, &made);
    }
    // Who cannot do without is told at once.
    let house = House::with_arguments(&["--criu", "/no/such/criu", "--save-memory", "on"]);
    let mut refused = house.spawn(&[], &[]);
    assert!(!refused.wait().success());
    assert!(refused.said().contains("there is no program /no/such/criu"), "{}", refused.said());
}
