//! What runs goes on after it was saved and restored, and what cannot is told (L13, X5).
//!
//! The CRIU is that of `scripts/prepare criu`, or what `VIV_CRIU` names; without one these are passed over.
#![allow(missing_docs, reason = "tests")]

#[path = "memory/lazy.rs"]
mod lazy;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use support::criu::{self, criu};
use support::{Ground, LocalWorld, Sandbox, eventually, fresh_bytes, mutation, sh};
use viv_core::exec::{ExecSpec, ExecState, OutputEvent, TtySize};
use viv_core::{EndCause, ExecutionId, Generation, SnapshotId};
use viv_provider::{
    Capability, Image, InstanceRef, InstanceSpec, InstanceState, Integrity, Mutation, Observation, ObstacleEffect,
    Provider, ProviderError, SaveRequest, Snapshot,
};

/// Saved and restored so often, unless `VIV_MEMORY_ROUNDS` says otherwise.
const ROUNDS: u64 = 3;

const LIFETIME: Duration = Duration::from_secs(600);

/// A ground whose CRIU does something else first when it is told about a sandbox.
fn ground_with(criu: &Path, instead: &str) -> (Ground, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = criu::instead(folder.path(), criu, instead);
    (Ground::with(|config| config.criu = Some(path)), folder)
}

fn ground(criu: &Path) -> Ground {
    let ground = Ground::with(|config| config.criu = Some(criu.to_owned()));
    let capabilities = ground.provider.capabilities();
    assert!(capabilities.can(Capability::SaveMemory), "{:?}", capabilities.missing.get(&Capability::SaveMemory));
    ground
}

async fn save(ground: &Ground, instance: &InstanceRef) -> Result<Snapshot, ProviderError> {
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: true };
    ground.provider.save(&mutation(instance.generation.0, 1), &instance.sandbox, &request).await
}

async fn destroy(ground: &Ground, instance: &InstanceRef) {
    ground.provider.destroy(&mutation(instance.generation.0, 1), &instance.sandbox).await.unwrap();
}

/// The sandbox's next generation, from a snapshot.
async fn restore(ground: &Ground, before: &InstanceRef, snapshot: &SnapshotId) -> Observation {
    let generation = before.generation.0 + 1;
    let spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
    let mutation = mutation(generation, 1);
    ground.provider.restore(&mutation, &before.sandbox, &ground.owner, &spec, snapshot).await.unwrap()
}

/// Saves, removes and restores an instance: the next one, with all that ran in it.
async fn turn(ground: &Ground, instance: &InstanceRef) -> InstanceRef {
    let snapshot = save(ground, instance).await.unwrap();
    assert!(snapshot.memory && snapshot.size_bytes > 100_000, "{snapshot:?}");
    let state = ground.provider.observe(instance).await.unwrap().state;
    assert!(matches!(&state, InstanceState::Ended(ended) if ended.cause == EndCause::Saved), "{state:?}");
    destroy(ground, instance).await;
    let seen = restore(ground, instance, &snapshot.id).await;
    assert_eq!(seen.lacks.get(&Capability::SaveMemory), None);
    assert_eq!((&seen.state, seen.instance.generation.0), (&InstanceState::Running, instance.generation.0 + 1));
    seen.instance
}

/// What an execution has written so far.
async fn written(ground: &Ground, instance: &InstanceRef, execution: &ExecutionId) -> String {
    let mut stream = ground.provider.attach(instance, execution, 0, false).await.unwrap();
    let mut text = Vec::new();
    while let Some(event) = stream.next().await.unwrap() {
        match event {
            OutputEvent::Chunk { data, .. } => text.extend(data),
            OutputEvent::Cut { from, to } => panic!("output was cut from {from} to {to}"),
            OutputEvent::End(_) => break,
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// Waits until an execution has written more than before.
async fn until_more(ground: &Ground, instance: &InstanceRef, execution: &ExecutionId, before: usize) -> String {
    for _ in 0..6000 {
        let text = written(ground, instance, execution).await;
        if text.len() > before + 8 {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{execution} does not go on");
}

/// Whole lines that count from one on.
#[track_caller]
fn assert_counts(text: &str) {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (nth, line) in whole.lines().enumerate() {
        assert_eq!(line.trim(), (nth + 1).to_string(), "line {} of {text:?}", nth + 1);
    }
}

fn python(script: &str) -> ExecSpec {
    ExecSpec { argv: ["python3", "-u", "-c", script].map(Into::into).to_vec(), ..ExecSpec::default() }
}

fn agent_pid(ground: &Ground, instance: &InstanceRef) -> String {
    let file = ground.data.join("instances").join(instance.sandbox.as_str()).join("init.pid");
    fs::read_to_string(file).unwrap().trim().to_owned()
}

/// The mounts that those inside see, without the numbers that the kernel gives them anew.
fn mounts(ground: &Ground, instance: &InstanceRef) -> BTreeSet<String> {
    let text = fs::read_to_string(format!("/proc/{}/mountinfo", agent_pid(ground, instance))).unwrap();
    let told = text.lines().map(|line| {
        let (before, after) = line.split_once(" - ").unwrap();
        let fields: Vec<_> = before.split(' ').skip(4).collect();
        format!("{} {}", fields.join(" "), after.split(' ').next().unwrap())
    });
    told.collect()
}

/// What confines a process of an execution, and where it is.
fn confined(ground: &Ground, instance: &InstanceRef, execution: &ExecutionId) -> Vec<String> {
    let mut told: Vec<String> = Vec::new();
    for cgroup in ground.cgroups() {
        let procs = cgroup.join(instance.sandbox.as_str()).join(execution.as_str()).join("cgroup.procs");
        let Ok(pids) = fs::read_to_string(procs) else { continue };
        for pid in pids.lines() {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let keep = ["Name:", "Uid:", "Gid:", "Groups:", "NoNewPrivs:", "Seccomp", "Cap", "Umask:"];
            told.extend(
                status.lines().filter(|line| keep.iter().any(|name| line.starts_with(name))).map(str::to_owned),
            );
            // Runtimes leave a hierarchy without controllers alone.
            let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
            told.extend(cgroups.lines().filter(|line| !line.contains(":name=")).map(str::to_owned));
        }
    }
    told
}

const COUNT: &str = "import time\ni = 0\nwhile True:\n    i += 1\n    print(i)\n    time.sleep(0.02)";

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
    time.sleep(0.01)
    db.execute('commit')
    print(n)
    time.sleep(0.01)
";

/// From here on a transaction is open, and what it wrote is in its journal.
const STAY: &str =
    "cd /workspace && touch stay && while [ ! -e within ]; do sleep 0.01; done && test -s db-journal && echo it stays";

/// It was open all the time, and goes on to its end.
const GO_ON: &str = "cd /workspace && test -e within && test -s db-journal && rm stay && \
     while [ -e within ]; do sleep 0.01; done && echo it goes on";

const CHECK_ROWS: &str = "
import sqlite3
db = sqlite3.connect('/workspace/db', timeout=60)
assert db.execute('pragma integrity_check').fetchone() == ('ok',)
n, low, high = db.execute('select count(*), min(n), max(n) from t').fetchone()
assert (low, high) == (1, n), (n, low, high)
print(n)
";

const GET: &str = "
import urllib.request
print(urllib.request.urlopen('http://127.0.0.1:8123/served', timeout=60).read().decode(), end='')
";

#[tokio::test(flavor = "multi_thread")]
async fn x5_what_runs_goes_on_with_nothing_lost() {
    let Some(criu) = criu() else { return };
    let rounds = std::env::var("VIV_MEMORY_ROUNDS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    nothing_is_lost(ground(&criu), rounds).await;
}

/// There the files are clones, with the numbers that they had.
#[tokio::test(flavor = "multi_thread")]
async fn x5_what_runs_goes_on_with_nothing_lost_on_btrfs() {
    let Some(criu) = criu() else { return };
    let rounds = std::env::var("VIV_MEMORY_ROUNDS").map_or(1, |rounds| rounds.parse().unwrap());
    nothing_is_lost(Ground::on_btrfs_with(|config| config.criu = Some(criu)), rounds).await;
}

async fn nothing_is_lost(ground: Ground, rounds: u64) {
    let sandbox = ground.create(LIFETIME).await;
    sandbox.run("echo content > /workspace/served; rm -f /workspace/log").await;
    let counter = sandbox.start_spec(&python(COUNT)).await;
    let rows = sandbox.start_spec(&python(WRITE_ROWS)).await;
    let server = "exec python3 -m http.server 8123 --bind 127.0.0.1 --directory /workspace";
    let server = sandbox.start(server).await;
    let append = "exec 3>>/workspace/log; i=0; while :; do i=$((i+1)); echo $i >&3; echo $i; sleep 0.02; done";
    let append = sandbox.start(append).await;
    let ten = "n=0; while [ $n -lt 9 ]; do sleep 100000 & n=$((n+1)); done; echo all ten of them; wait";
    let ten = sandbox.start(ten).await;
    let size = TtySize { rows: 24, cols: 80 };
    let shell = ExecSpec {
        argv: ["/bin/bash", "--norc", "-i"].map(Into::into).to_vec(),
        tty: Some(size),
        stdin: true,
        ..ExecSpec::default()
    };
    let shell = sandbox.start_spec(&shell).await;
    let mut stdin = 0;
    let typed = "x=41\n";
    stdin = ground.provider.write_stdin(&mutation(1, 1), &sandbox.id, &shell, stdin, typed.as_bytes()).await.unwrap();

    let mut instance = sandbox.instance();
    for execution in [&counter, &rows, &append, &ten] {
        until_more(&ground, &instance, execution, 0).await;
    }
    let (mounted, confinement) = (mounts(&ground, &instance), confined(&ground, &instance, &counter));
    assert!(!confinement.is_empty());
    for round in 1..=rounds {
        let stays = ground.run(&instance, 1, STAY).await.0;
        assert_eq!(stays, "it stays\n", "round {round}");
        instance = turn(&ground, &instance).await;
        assert_eq!(mounts(&ground, &instance), mounted, "round {round}");
        assert_eq!(confined(&ground, &instance, &counter), confinement, "round {round}");
        for execution in [&counter, &rows, &append, &ten, &server, &shell] {
            let status = ground.provider.execution(&instance, execution).await.unwrap();
            let told = written(&ground, &instance, execution).await;
            assert_eq!(status.state, ExecState::Running, "round {round}, {:?}: {told}", status.argv);
        }
        let run = async |spec: &ExecSpec| {
            let execution = ExecutionId::from_bytes(fresh_bytes());
            let mutation = mutation(instance.generation.0, 1);
            ground.provider.execute(&mutation, &instance.sandbox, &execution, spec).await.unwrap();
            loop {
                let status = ground.provider.execution(&instance, &execution).await.unwrap();
                if status.state.is_final() {
                    let text = written(&ground, &instance, &execution).await;
                    assert_eq!(status.state, ExecState::Exited { code: 0 }, "{text}");
                    return text;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // In the middle of a transaction others see what was there before it: its lock is held as it was, or they would take
        // its journal for that of somebody who died, and undo what it goes on with.
        run(&python(CHECK_ROWS)).await;
        assert_eq!(ground.run(&instance, 1, GO_ON).await.0, "it goes on\n", "round {round}");
        for execution in [&counter, &rows, &append] {
            let before = written(&ground, &instance, execution).await;
            let after = until_more(&ground, &instance, execution, before.len()).await;
            assert!(after.starts_with(&before));
            assert_counts(&after);
        }
        assert_eq!(run(&python(GET)).await, "content\n", "round {round}");
        // What was acknowledged before is there: the list of rows is longer than what was printed by then.
        let printed = written(&ground, &instance, &rows).await.lines().count();
        assert!(run(&python(CHECK_ROWS)).await.trim().parse::<usize>().unwrap() >= printed, "round {round}");
        assert_counts(&run(&sh("cat /workspace/log")).await);
        assert_eq!(run(&sh("pgrep -c -x sleep -P $(pgrep -f 'all ten' | head -n 1)")).await.trim(), "9");
        let typed = format!("echo $((x+{round}))\n");
        let mutation = mutation(instance.generation.0, 1);
        stdin =
            ground.provider.write_stdin(&mutation, &instance.sandbox, &shell, stdin, typed.as_bytes()).await.unwrap();
        let expected = format!("{}\r\n", 41 + round);
        for _ in 0..6000 {
            if written(&ground, &instance, &shell).await.contains(&expected) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let told = written(&ground, &instance, &shell).await;
        assert!(told.contains(&expected), "round {round}: {told:?}");
    }
    // They are still ended for certain, tree and all (X3).
    for execution in [&ten, &counter] {
        let mutation = mutation(instance.generation.0, 1);
        let ended = ground.provider.cancel(&mutation, &instance.sandbox, execution).await.unwrap();
        assert_eq!(ended.state, ExecState::Cancelled);
    }
    // An older generation is nobody's any more (T5).
    let late = ground.provider.cancel(&mutation(1, 1), &instance.sandbox, &rows).await.unwrap_err();
    assert!(matches!(late, ProviderError::StaleGeneration { .. }), "{late:?}");
    destroy(&ground, &instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_memory_goes_with_its_snapshot() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    let counter = sandbox.start("i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done").await;
    until_more(&ground, &sandbox.instance(), &counter, 0).await;
    // Whoever is frozen is saved too.
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: true };
    let saving = mutation(1, 1);
    let saved = ground.provider.save(&saving, &sandbox.id, &request).await.unwrap();
    assert_eq!(ground.provider.save(&saving, &sandbox.id, &request).await.unwrap(), saved, "asked again");
    let kept = ground.data.join("memory").join(saved.id.as_str());
    assert!(kept.join("manifest.json").exists());
    let seen = ground.provider.snapshot(&saved.id).await.unwrap();
    assert!(seen.own_bytes > 100_000, "{seen:?}");
    destroy(&ground, &sandbox.instance()).await;
    // Itself under its own ids, and others beside it under others.
    let mut made = vec![restore(&ground, &sandbox.instance(), &saved.id).await];
    let spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
    for _ in 0..2 {
        let other = viv_core::SandboxId::from_bytes(fresh_bytes());
        let seen = ground.provider.restore(&mutation(1, 1), &other, &ground.owner, &spec, &saved.id).await.unwrap();
        made.push(seen);
    }
    let mut told = BTreeSet::new();
    for (nth, seen) in made.iter().enumerate() {
        assert_eq!(seen.lacks.get(&Capability::SaveMemory), None);
        let sandbox = &seen.instance.sandbox;
        let counter = if nth == 0 { counter.clone() } else { counter.copied_into(sandbox) };
        let before = written(&ground, &seen.instance, &counter).await;
        assert!(!before.is_empty(), "it begins with what was written before");
        assert_counts(&until_more(&ground, &seen.instance, &counter, before.len()).await);
        let known: Vec<_> = ground.provider.executions(&seen.instance).await.unwrap();
        assert!(known.len() == 1 && known[0].id == counter, "{known:?}");
        let ids = "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/boot_id; cat /proc/self/uid_map";
        let said = ground.run(&seen.instance, 1, ids).await.0;
        assert!(said.starts_with(&sandbox.as_str().replace('_', "-")), "{said}");
        for line in said.lines() {
            assert!(told.insert(line.split_whitespace().collect::<Vec<_>>().join(" ")), "{line} is another's too");
        }
        // What belongs to it is its own: it writes, and it is ended for certain.
        assert_eq!(ground.run(&seen.instance, 1, "echo x > /tmp/x && echo well").await.0, "well\n");
        let mutation = mutation(seen.instance.generation.0, 1);
        let ended = ground.provider.cancel(&mutation, sandbox, &counter).await.unwrap();
        assert_eq!(ended.state, ExecState::Cancelled);
    }
    for seen in &made {
        destroy(&ground, &seen.instance).await;
    }
    ground.provider.remove_snapshot(&mutation(2, 1), &sandbox.id, &saved.id).await.unwrap();
    eventually("its memory is gone", || {
        ground.provider.tidy();
        !kept.exists()
    });
    ground.assert_nothing_left();
}

/// Where snapshots stay, the next one shares with the one that it went on from, and each says what is its own.
#[tokio::test(flavor = "multi_thread")]
async fn l13_snapshots_that_are_kept_share_memory() {
    const HELD: u64 = 16 << 20;
    let Some(criu) = criu() else { return };
    let ground = Ground::with(|config| (config.criu, config.keeps_snapshots) = (Some(criu), true));
    let sandbox = ground.create(LIFETIME).await;
    let hold = "
import os, time, zlib
held = bytearray(os.urandom(16 << 20))
while True:
    if os.path.exists('/workspace/change'):
        held[1 << 20:2 << 20] = os.urandom(1 << 20)
        os.remove('/workspace/change')
    print(zlib.crc32(held), flush=True)
    time.sleep(0.1)
";
    let holder = sandbox.start_spec(&python(hold)).await;
    until_more(&ground, &sandbox.instance(), &holder, 0).await;
    let first = save(&ground, &sandbox.instance()).await.unwrap();
    destroy(&ground, &sandbox.instance()).await;
    let instance = restore(&ground, &sandbox.instance(), &first.id).await.instance;
    ground.run(&instance, 1, "touch /workspace/change; while [ -e /workspace/change ]; do sleep 0.05; done").await;
    // It says what it holds now, and nothing else from here on.
    let before = written(&ground, &instance, &holder).await.len();
    let before = until_more(&ground, &instance, &holder, before + 12).await;
    let second = save(&ground, &instance).await.unwrap();
    let own_bytes = async |id: &SnapshotId| ground.provider.snapshot(id).await.unwrap().own_bytes;
    assert!(first.size_bytes > HELD && second.size_bytes > HELD, "{first:?} {second:?}");
    let (of_first, of_second) = (own_bytes(&first.id).await, own_bytes(&second.id).await);
    assert!(of_first < HELD / 4 && of_second < HELD / 2, "{of_first} {of_second}");
    // The first one goes, and what both had is the second one's.
    destroy(&ground, &instance).await;
    ground.provider.remove_snapshot(&mutation(2, 1), &sandbox.id, &first.id).await.unwrap();
    eventually("its memory is gone", || {
        ground.provider.tidy();
        !ground.data.join("memory").join(first.id.as_str()).exists()
    });
    assert!(own_bytes(&second.id).await > HELD);
    let seen = restore(&ground, &instance, &second.id).await;
    assert_eq!(seen.lacks.get(&Capability::SaveMemory), None);
    let after = until_more(&ground, &seen.instance, &holder, before.len()).await;
    let last = |text: &str| text.lines().last().map(str::to_owned);
    assert!(after.starts_with(&before) && last(&after) == last(&before), "the same bytes: {after}");
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_memory_is_saved_of_what_runs_on() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    // Two who talk to each other over a connection, and count what comes back.
    let talk = "
import socket, threading, time
server = socket.create_server(('127.0.0.1', 0))
def answer():
    peer, _ = server.accept()
    while True: peer.sendall(peer.recv(1))
threading.Thread(target=answer, daemon=True).start()
talker = socket.create_connection(server.getsockname())
open('/workspace/file', 'w').write('kept')
held, n = open('/workspace/file'), 0
while True:
    talker.sendall(b'.')
    assert talker.recv(1) == b'.' and held.read() in ('kept', '')
    n += 1
    print(n)
    time.sleep(0.02)
";
    sandbox.run("echo before > /workspace/when").await;
    let counter = sandbox.start(&format!("exec python3 -u -c \"{talk}\"")).await;
    until_more(&ground, &sandbox.instance(), &counter, 0).await;
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: true, memory: true };
    let saving = mutation(1, 1);
    let saved = ground.provider.save(&saving, &sandbox.id, &request).await.unwrap();
    assert!(saved.memory && saved.live, "{saved:?}");
    assert_eq!(ground.provider.save(&saving, &sandbox.id, &request).await.unwrap(), saved, "asked again");
    // It goes on, and is the one that it was.
    let before = written(&ground, &sandbox.instance(), &counter).await;
    assert_counts(&until_more(&ground, &sandbox.instance(), &counter, before.len()).await);
    assert_eq!(sandbox.state().await, InstanceState::Running);
    sandbox.run("echo after > /workspace/when").await;
    // Frozen it is saved too, and stays frozen.
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    let again = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: true, memory: true };
    ground.provider.save(&mutation(1, 1), &sandbox.id, &again).await.unwrap();
    assert_eq!(sandbox.state().await, InstanceState::Frozen);
    ground.provider.thaw(&mutation(1, 1), &sandbox.id).await.unwrap();
    let before = written(&ground, &sandbox.instance(), &counter).await;
    assert_counts(&until_more(&ground, &sandbox.instance(), &counter, before.len()).await);
    // Another one goes on from that moment.
    let other = viv_core::SandboxId::from_bytes(fresh_bytes());
    let spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
    let made = ground.provider.restore(&mutation(1, 1), &other, &ground.owner, &spec, &saved.id).await.unwrap();
    assert_eq!(made.lacks.get(&Capability::SaveMemory), None);
    let copy = counter.copied_into(&other);
    let before = written(&ground, &made.instance, &copy).await;
    assert_counts(&until_more(&ground, &made.instance, &copy, before.len()).await);
    assert_eq!(ground.run(&made.instance, 1, "cat /workspace/when").await.0, "before\n");
    destroy(&ground, &made.instance).await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_what_cannot_be_saved_is_told_and_runs_on() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    // The terminal is open by a name that CRIU cannot keep.
    let size = TtySize { rows: 24, cols: 80 };
    let argv = ["/bin/sh", "-c", "exec 5<>/dev/tty; echo it is open; exec sleep 100000"].map(Into::into).to_vec();
    let holder = sandbox.start_spec(&ExecSpec { argv, tty: Some(size), stdin: true, ..ExecSpec::default() }).await;
    until_more(&ground, &sandbox.instance(), &holder, 0).await;
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    let error = save(&ground, &sandbox.instance()).await.unwrap_err();
    assert!(error.to_string().contains("/dev/tty"), "{error}");
    assert_eq!(sandbox.state().await, InstanceState::Frozen, "as it was before");
    ground.provider.thaw(&mutation(1, 1), &sandbox.id).await.unwrap();
    assert_eq!(sandbox.run("echo well").await.0, "well\n");
    // Once it is gone, nothing is in the way.
    ground.provider.cancel(&mutation(1, 1), &sandbox.id, &holder).await.unwrap();
    assert!(save(&ground, &sandbox.instance()).await.unwrap().memory);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Holds something, says so, and sleeps.
fn holder(what: &str) -> ExecSpec {
    python(&format!(
        "import array, ctypes, os, socket, struct, time\nlibc = ctypes.CDLL(None)\n{what}\nprint('it is held')\ntime.sleep(100000)"
    ))
}

/// What is said beforehand is what CRIU does: it refuses what is told, and keeps what is not.
#[tokio::test(flavor = "multi_thread")]
async fn l13_what_is_told_beforehand_is_what_happens() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let listen = "a = socket.create_server(('127.0.0.1', 0))\nb = socket.create_connection(a.getsockname())";
    let route = "a = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)\na.bind((0, 0))";
    let ask = format!("{route}\na.send(struct.pack('=IHHIIBxHiII', 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0))");
    let watch = |path: &str| format!("assert libc.inotify_add_watch(libc.inotify_init(), b'{path}', 0x100) >= 0");
    let queue = "assert libc.syscall(240, b'q', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0";
    let landlock = "assert libc.syscall(444, ctypes.create_string_buffer(b'\\1', 8), 8, 0) >= 0";
    let secret = "assert libc.syscall(447, 0) >= 0";
    let passed = "a, b = socket.socketpair()\na.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])";
    let mut cases = vec![
        (listen.to_owned(), Some("not accepted")),
        (ask, Some("netlink")),
        (watch("/proc/self"), Some("in /proc")),
        (watch("/usr/lib"), Some("elsewhere than in /workspace")),
        (queue.to_owned(), Some("a queue of messages")),
        (landlock.to_owned(), Some("landlock-ruleset")),
        (route.to_owned(), None),
        (watch("/workspace"), None),
        (watch("/tmp"), None),
        (watch("/dev/shm"), None),
        (passed.to_owned(), None),
        ("a = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)".to_owned(), None),
    ];
    // Not every kernel has it.
    if fs::read_to_string("/proc/kallsyms").is_ok_and(|all| all.contains("secretmem_fault")) {
        cases.push((secret.to_owned(), Some("secret memory")));
    }
    for (what, expected) in cases {
        let sandbox = ground.create(LIFETIME).await;
        let execution = sandbox.start_spec(&holder(&what)).await;
        let said = until_more(&ground, &sandbox.instance(), &execution, 0).await;
        assert!(said.contains("it is held"), "{what}: {said}");
        let told = ground.provider.memory_obstacles(&sandbox.instance()).await.unwrap();
        let saved = save(&ground, &sandbox.instance()).await;
        assert_eq!(saved.is_err(), expected.is_some(), "{what}: {saved:?}");
        match expected {
            None => assert_eq!(told, [], "{what}"),
            Some(expected) => {
                let one = told.first().unwrap_or_else(|| panic!("{what} is not told: {saved:?}"));
                assert!(one.what.contains(expected), "{what}: {told:?}, {saved:?}");
                assert_eq!((told.len(), one.execution.as_ref()), (1, Some(&execution)), "{what}: {told:?}");
            }
        }
        sandbox.destroy().await;
    }
    // What cannot be made inside cannot be in the way.
    let sandbox = ground.create(LIFETIME).await;
    for call in ["425, 4, ctypes.create_string_buffer(120)", "272, 0x30000000"] {
        let script = format!("import ctypes\nprint(ctypes.CDLL(None).syscall({call}))");
        let said = sandbox.run(&format!("python3 -c \"{script}\"")).await.0;
        assert_eq!(said, "-1\n", "io_uring_setup, and unshare of processes and users");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_connections_from_outside_are_told_and_closed() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    let serve = "
import socket, time
server = socket.create_server(('127.0.0.1', 8124))
print('it listens now')
peer, _ = server.accept()
print('it is connected')
assert peer.recv(1) == b''
print('it is closed')
time.sleep(100000)
";
    let server = sandbox.start_spec(&python(serve)).await;
    let listens = until_more(&ground, &sandbox.instance(), &server, 0).await;
    let _outside = ground.provider.dial(&sandbox.instance(), 8124).await.unwrap();
    until_more(&ground, &sandbox.instance(), &server, listens.len()).await;
    let told = ground.provider.memory_obstacles(&sandbox.instance()).await.unwrap();
    assert_eq!((told.len(), told[0].effect, &told[0].execution), (1, ObstacleEffect::Closed, &Some(server.clone())));
    assert!(told[0].what.contains("8124"), "{told:?}");
    // It is in nobody's way.
    let instance = turn(&ground, &sandbox.instance()).await;
    let mut said = written(&ground, &instance, &server).await;
    if !said.contains("it is closed") {
        said = until_more(&ground, &instance, &server, said.len()).await;
    }
    assert!(said.contains("it is closed"), "{said}");
    destroy(&ground, &instance).await;
    ground.assert_nothing_left();
}

/// Who watches files is told of changes after as before.
#[tokio::test(flavor = "multi_thread")]
async fn l13_what_is_watched_is_watched_after_that() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    let watch = "
import ctypes, os
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
os.makedirs('/workspace/deep/down')
for path in (b'/workspace', b'/workspace/deep/down'):
    assert libc.inotify_add_watch(watch, path, 0x100) >= 0
print('it is watched')
while True:
    print(os.read(watch, 4096)[16:].rstrip(b'\\0').decode())
";
    let watcher = sandbox.start_spec(&python(watch)).await;
    until_more(&ground, &sandbox.instance(), &watcher, 0).await;
    let mut instance = sandbox.instance();
    for round in 1..=2 {
        instance = turn(&ground, &instance).await;
        for folder in ["/workspace", "/workspace/deep/down"] {
            let before = written(&ground, &instance, &watcher).await;
            let name = format!("made-in-round-{round}");
            ground.run(&instance, 1, &format!("touch {folder}/{name}")).await;
            let after = until_more(&ground, &instance, &watcher, before.len()).await;
            assert!(after[before.len()..].contains(&name), "{after}");
        }
    }
    destroy(&ground, &instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_a_dump_that_fails_leaves_it_running() {
    let Some(criu) = criu() else { return };
    for instead in ["exit 1", "kill -9 $$"] {
        let (ground, _folder) = ground_with(&criu, instead);
        let sandbox = ground.create(LIFETIME).await;
        let counter = sandbox.start("i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done").await;
        let error = save(&ground, &sandbox.instance()).await.unwrap_err();
        assert!(error.to_string().contains("memory cannot be saved"), "{error}");
        assert_eq!(sandbox.state().await, InstanceState::Running);
        let before = written(&ground, &sandbox.instance(), &counter).await;
        assert_counts(&until_more(&ground, &sandbox.instance(), &counter, before.len()).await);
        assert_eq!(sandbox.run("echo well").await.0, "well\n");
        let ended = ground.provider.cancel(&mutation(1, 1), &sandbox.id, &counter).await.unwrap();
        assert_eq!(ended.state, ExecState::Cancelled);
        sandbox.destroy().await;
        ground.assert_nothing_left();
    }
}

/// A sandbox that was saved with its memory and removed.
async fn saved(ground: &Ground) -> (Sandbox<'_>, SnapshotId, ExecutionId) {
    let sandbox = ground.create(LIFETIME).await;
    sandbox.run("echo kept > /workspace/file").await;
    let sleep = sandbox.start("exec sleep 100000").await;
    let snapshot = save(ground, &sandbox.instance()).await.unwrap();
    destroy(ground, &sandbox.instance()).await;
    (sandbox, snapshot.id, sleep)
}

/// It runs, with its files and without its memory, and says why.
async fn assert_files_only(ground: &Ground, seen: &Observation, lost: &ExecutionId, why: &str) {
    assert_eq!(seen.state, InstanceState::Running);
    let told = &seen.lacks[&Capability::SaveMemory];
    assert!(told.contains(why), "{told}");
    assert_eq!(ground.run(&seen.instance, 1, "cat /workspace/file; pgrep -x sleep").await.0, "kept\n");
    let gone = ground.provider.execution(&seen.instance, lost).await.unwrap_err();
    assert!(matches!(gone, ProviderError::NotFound { .. }), "{gone:?}");
    destroy(ground, &seen.instance).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_memory_that_cannot_be_restored_leaves_the_files() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let (sandbox, snapshot, sleep) = saved(&ground).await;
    let mut before = sandbox.instance();
    let kept = ground.data.join("memory").join(snapshot.as_str()).join("kept/images");
    // Nobody who could.
    let without = Ground::reopen(&ground);
    let spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
    let (id, owner) = (&sandbox.id, &ground.owner);
    let seen = without.restore(&mutation(2, 1), id, owner, &spec, &snapshot).await.unwrap();
    assert_files_only(&ground, &seen, &sleep, "CRIU").await;
    before.generation = Generation(2);
    // Damaged.
    let pages = kept.join("pages-1.img.zst");
    let mut content = fs::read(&pages).unwrap();
    content[100] ^= 1;
    fs::write(&pages, &content).unwrap();
    let seen = restore(&ground, &before, &snapshot).await;
    assert_files_only(&ground, &seen, &sleep, "damaged").await;
    before.generation = Generation(3);
    // Not there.
    fs::remove_dir_all(kept.parent().unwrap().parent().unwrap()).unwrap();
    let seen = restore(&ground, &before, &snapshot).await;
    assert_files_only(&ground, &seen, &sleep, "cannot be read").await;
    ground.assert_nothing_left();
}

/// An image that others can change: a shell, and what it runs with.
fn small_image() -> tempfile::TempDir {
    let image = tempfile::tempdir().unwrap();
    fs::set_permissions(image.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let listed = std::process::Command::new("ldd").arg("/bin/sleep").output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let libraries = listed.split_whitespace().filter(|word| word.starts_with('/'));
    for file in ["/bin/sh", "/bin/sleep"].into_iter().chain(libraries) {
        let to = image.path().join(file.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(file, to).unwrap();
    }
    fs::write(image.path().join("held"), "held by a process\n").unwrap();
    image
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_a_file_changed_below_it_leaves_the_files() {
    type Change = fn(&Path);
    let Some(criu) = criu() else { return };
    let written_to: Change = |image| fs::write(image.join("held"), "held by Another 1\n").unwrap();
    let shorter: Change = |image| fs::write(image.join("held"), "short\n").unwrap();
    let program: Change = |image| {
        // As packages are upgraded: another file of that name.
        fs::copy("/bin/sleep", image.join("bin/.new")).unwrap();
        fs::rename(image.join("bin/.new"), image.join("bin/sleep")).unwrap();
    };
    let nothing: Change = |_| {};
    let changes =
        [(nothing, None), (written_to, Some("/held")), (shorter, Some("/held")), (program, Some("/bin/sleep"))];
    let ground = ground(&criu);
    for (change, named) in changes {
        let image = small_image();
        let path = image.path().to_string_lossy().into_owned();
        let spec = InstanceSpec { image: Image::Directory { path }, ..InstanceSpec::host(LIFETIME.as_millis() as u64) };
        let sandbox = ground.create_from(spec.clone()).await;
        sandbox.run("echo kept > /workspace/file").await;
        let sleep = sandbox.start("exec 3</held; echo it is open; exec sleep 100000").await;
        until_more(&ground, &sandbox.instance(), &sleep, 0).await;
        let snapshot = save(&ground, &sandbox.instance()).await.unwrap();
        destroy(&ground, &sandbox.instance()).await;
        change(image.path());
        let (owner, next) = (&ground.owner, mutation(2, 1));
        let seen = ground.provider.restore(&next, &sandbox.id, owner, &spec, &snapshot.id).await.unwrap();
        assert_eq!(seen.state, InstanceState::Running);
        let why = seen.lacks.get(&Capability::SaveMemory).cloned();
        match named {
            None => assert_eq!((why, ground.provider.executions(&seen.instance).await.unwrap().len()), (None, 2)),
            Some(named) => {
                let why = why.unwrap_or_default();
                assert!(why.contains(&format!("{named} was changed since")), "{why}");
                let read = "while read line; do echo $line; done < /workspace/file";
                assert_eq!(ground.run(&seen.instance, 1, read).await.0, "kept\n");
            }
        }
        destroy(&ground, &seen.instance).await;
    }
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_a_restore_that_fails_leaves_the_files() {
    let Some(criu) = criu() else { return };
    for instead in ["case \"$1\" in restore) exit 1 ;; esac", "case \"$1\" in restore) kill -9 $$ ;; esac"] {
        let (ground, _folder) = ground_with(&criu, instead);
        let (sandbox, snapshot, sleep) = saved(&ground).await;
        let seen = restore(&ground, &sandbox.instance(), &snapshot).await;
        assert_files_only(&ground, &seen, &sleep, "cannot be restored").await;
        assert!(
            ground.data.join("memory").join(snapshot.as_str()).join("kept/images").exists(),
            "it is kept for a look"
        );
        ground.assert_nothing_left();
    }
}

/// Three of them, whose snapshots are gone, for as long as anything else of their sandbox is there.
#[tokio::test(flavor = "multi_thread")]
async fn l13_the_last_memories_that_were_not_restored_stay_for_a_look() {
    let Some(criu) = criu() else { return };
    let (ground, _folder) = ground_with(&criu, "case \"$1\" in restore) exit 1 ;; esac");
    let sandbox = ground.create(LIFETIME).await;
    let mut instance = sandbox.instance();
    let mut tried = Vec::new();
    for _ in 0..5 {
        let snapshot = save(&ground, &instance).await.unwrap();
        assert!(snapshot.memory, "{snapshot:?}");
        destroy(&ground, &instance).await;
        let seen = restore(&ground, &instance, &snapshot.id).await;
        assert!(seen.lacks[&Capability::SaveMemory].contains("cannot be restored"), "{seen:?}");
        instance = seen.instance;
        tried.push(snapshot.id);
    }
    // Somebody else's memory is somebody else's, whatever becomes of it.
    let other = ground.create(LIFETIME).await;
    let of_other = save(&ground, &other.instance()).await.unwrap().id;
    destroy(&ground, &other.instance()).await;
    let kept = || {
        let folder = fs::read_dir(ground.data.join("memory")).unwrap();
        let names = folder.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<BTreeSet<String>>()
    };
    let wanted = |ids: &[SnapshotId]| ids.iter().map(|id| id.as_str().to_owned()).collect::<BTreeSet<String>>();
    // As long as their snapshots are there, all of them are.
    ground.provider.tidy();
    assert_eq!(kept(), wanted(&[&tried[..], std::slice::from_ref(&of_other)].concat()));
    let files = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: false };
    ground.provider.save(&mutation(instance.generation.0, 1), &sandbox.id, &files).await.unwrap();
    destroy(&ground, &instance).await;
    let later = mutation(instance.generation.0 + 1, 1);
    for id in &tried {
        ground.provider.remove_snapshot(&later, &sandbox.id, id).await.unwrap();
    }
    ground.provider.remove_snapshot(&mutation(2, 1), &other.id, &of_other).await.unwrap();
    eventually("the last three are left", || {
        ground.provider.tidy();
        kept() == wanted(&tried[2..])
    });
    for id in &tried[2..] {
        let folder = ground.data.join("memory").join(id.as_str());
        assert!(folder.join("kept/images").is_dir() && folder.join("kept/dump.json").is_file());
        assert!(fs::read_to_string(folder.join("not-restored")).unwrap().contains("memory cannot be restored"));
    }
    ground.provider.tidy();
    assert_eq!(kept(), wanted(&tried[2..]), "they stay");
    // With the last of their sandbox they go.
    ground.provider.remove_snapshot(&later, &sandbox.id, &files.snapshot).await.unwrap();
    eventually("none is left", || {
        ground.provider.tidy();
        kept().is_empty()
    });
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_a_shim_that_is_killed_while_it_saves_loses_no_files() {
    let Some(criu) = criu() else { return };
    let (ground, folder) = ground_with(&criu, "touch \"$(dirname \"$0\")/begun\"; exec sleep 1000");
    let sandbox = ground.create(LIFETIME).await;
    sandbox.run("echo kept > /workspace/file; sync").await;
    let provider = ground.provider.clone();
    let instance = sandbox.instance();
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: true };
    let saving = tokio::spawn({
        let (sandbox, request) = (instance.sandbox.clone(), request.clone());
        async move { provider.save(&mutation(1, 1), &sandbox, &request).await }
    });
    eventually("it is being saved", || folder.path().join("begun").exists());
    // Nothing else is done with it meanwhile.
    let refused = ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap_err();
    assert!(matches!(refused, ProviderError::Conflict { .. }), "{refused:?}");
    support::kill(sandbox.shim_pid(), rustix::process::Signal::KILL);
    assert!(saving.await.unwrap().is_err());
    let state = sandbox.state().await;
    assert!(matches!(&state, InstanceState::Ended(ended) if ended.cause == EndCause::SupervisorLost), "{state:?}");
    let files = SaveRequest { memory: false, ..request };
    let snapshot = ground.provider.save(&mutation(1, 1), &sandbox.id, &files).await.unwrap();
    assert!(!snapshot.memory);
    destroy(&ground, &instance).await;
    let seen = restore(&ground, &instance, &snapshot.id).await;
    assert_eq!(ground.run(&seen.instance, 1, "cat /workspace/file").await.0, "kept\n");
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

/// One that hangs is not waited for longer than a save may take, and the files are saved after it.
#[tokio::test(flavor = "multi_thread")]
async fn l13_a_criu_that_hangs_in_a_dump_is_given_up_in_time() {
    let Some(criu) = criu() else { return };
    let (ground, folder) = ground_with(&criu, "touch \"$(dirname \"$0\")/begun\"; exec sleep 1000");
    let sandbox = ground.create(LIFETIME).await;
    sandbox.run("echo kept > /workspace/file; sync").await;
    let instance = sandbox.instance();
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(fresh_bytes()), live: false, memory: true };
    let hangs = Mutation { budget_ms: 3_000, ..mutation(1, 1) };
    let error = ground.provider.save(&hangs, &sandbox.id, &request).await.unwrap_err();
    assert!(matches!(error, ProviderError::TimedOut { .. }), "{error:?}");
    assert!(folder.path().join("begun").exists(), "it was at it");
    let files = SaveRequest { memory: false, ..request };
    let snapshot = ground.provider.save(&mutation(1, 1), &sandbox.id, &files).await.unwrap();
    assert!(!snapshot.memory);
    destroy(&ground, &instance).await;
    let seen = restore(&ground, &instance, &snapshot.id).await;
    assert_eq!(ground.run(&seen.instance, 1, "cat /workspace/file").await.0, "kept\n");
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

/// A memory that is damaged, or gone, is told of its snapshot, apart from the files of that, which whoever goes on from it
/// begins with (L10).
#[tokio::test(flavor = "multi_thread")]
async fn l10_damage_of_a_memory_is_told_and_is_none_of_its_files() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    sandbox.run("echo kept > /workspace/file; sync").await;
    let instance = sandbox.instance();
    let snapshot = save(&ground, &instance).await.unwrap().id;
    destroy(&ground, &instance).await;
    eventually("it is hashed", || {
        ground.provider.tidy();
        ground.provider.check_store(true).unwrap().is_clean()
    });
    let folder = ground.data.join("memory").join(snapshot.as_str());
    let pages = folder.join("kept/images/pages-1.img.zst");
    let mut damaged = fs::read(&pages).unwrap();
    damaged[100] ^= 1;
    let told = async || {
        let seen = ground.provider.snapshot(&snapshot).await.unwrap();
        assert_eq!(seen.integrity, Integrity::Verified, "its files are whole");
        seen.memory_damage
    };
    let found = |deep| {
        let checked = ground.provider.check_store(deep).unwrap();
        let of_memory = checked.damage.iter().filter(|what| what.contains("its memory, and not its files")).count();
        assert_eq!(checked.damage.len(), of_memory, "{checked:?}");
        of_memory
    };
    assert_eq!(told().await, None);
    let (images, whole) = (folder.join("kept/images"), folder.join("whole"));
    let changed_at = fs::metadata(&images).unwrap().modified().unwrap();
    fs::rename(&pages, &whole).unwrap();
    fs::write(&pages, damaged).unwrap();
    // Only who reads all of it finds that, and then everybody knows.
    assert_eq!((found(false), found(true), found(false)), (0, 1, 1));
    assert!(told().await.is_some_and(|why| why.contains("not what was dumped")));
    // As it was, and when.
    fs::rename(&whole, &pages).unwrap();
    fs::File::open(&images).unwrap().set_modified(changed_at).unwrap();
    assert_eq!((found(false), found(true), found(false)), (1, 0, 0), "somebody put it right");
    assert_eq!(told().await, None);
    // What is gone is seen at once.
    fs::remove_dir_all(&images).unwrap();
    assert!(told().await.is_some_and(|why| why.contains("missing")));
    assert_eq!(found(false), 1);
    fs::remove_dir_all(&folder).unwrap();
    assert!(told().await.is_some_and(|why| why.contains("missing")));
    assert_eq!(found(false), 1);
    let seen = restore(&ground, &instance, &snapshot).await;
    assert!(seen.lacks.contains_key(&Capability::SaveMemory), "{seen:?}");
    assert_eq!(ground.run(&seen.instance, 1, "cat /workspace/file").await.0, "kept\n");
    destroy(&ground, &seen.instance).await;
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn s5_memory_is_refused_where_it_cannot_be_kept() {
    let none = Ground::with(|config| config.criu = Some("/no/such/criu".into()));
    let sandbox = none.create(LIFETIME).await;
    let error = save(&none, &sandbox.instance()).await.unwrap_err();
    let is_refused = |error: &ProviderError, word: &str| matches!(error, ProviderError::Unsupported { capability: Capability::SaveMemory, why } if why.contains(word));
    assert!(is_refused(&error, "prepare criu"), "{error}");
    assert_eq!(sandbox.state().await, InstanceState::Running);
    sandbox.destroy().await;
    let broken = tempfile::tempdir().unwrap();
    let path = broken.path().join("criu");
    fs::write(&path, "#!/bin/sh\n[ $1 = --version ] && echo Version: 0.1\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let ground = Ground::with(|config| config.criu = Some(path));
    let why = ground.provider.criu().unwrap_err();
    assert!(why.contains("CRIU 0.1") && why.contains("does not work here"), "{why}");

    let Some(criu) = criu() else { return };
    let ground = self::ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    sandbox.destroy().await;
    if ground.provider.capabilities().can(Capability::EgressAll) {
        let mut spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
        spec.network.egress = viv_provider::Egress::All;
        let sandbox = ground.create_from(spec).await;
        let error = save(&ground, &sandbox.instance()).await.unwrap_err();
        assert!(is_refused(&error, "network"), "{error}");
        assert_eq!(sandbox.run("echo well").await.0, "well\n");
        sandbox.destroy().await;
    }
    // Files on a filesystem in a file are on another device afterwards.
    if ground.provider.limited_by() == Some(viv_sandbox::LimitedBy::OwnFilesystem) {
        let mut spec = InstanceSpec::host(LIFETIME.as_millis() as u64);
        spec.limits.disk_bytes = Some(64 << 20);
        let sandbox = ground.create_from(spec).await;
        let obstacles = ground.provider.memory_obstacles(&sandbox.instance()).await.unwrap();
        assert!(obstacles.iter().any(|one| one.what.contains("filesystem in a file")), "{obstacles:?}");
        let error = save(&ground, &sandbox.instance()).await.unwrap_err();
        assert!(is_refused(&error, "filesystem in a file"), "{error}");
        assert_eq!(sandbox.run("echo well").await.0, "well\n");
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn l13_a_dump_that_is_given_up_takes_no_room() {
    let Some(criu) = criu() else { return };
    let ground = ground(&criu);
    let sandbox = ground.create(LIFETIME).await;
    // It is dumped, and there is no place for it.
    let place = ground.data.join("memory");
    fs::remove_dir(&place).unwrap();
    fs::write(&place, "").unwrap();
    let snapshot = SnapshotId::from_bytes(fresh_bytes());
    let request = |memory| SaveRequest { snapshot: snapshot.clone(), live: false, memory };
    ground.provider.save(&mutation(1, 1), &sandbox.id, &request(true)).await.unwrap_err();
    let kept = sandbox.folder().join("memory/kept");
    assert!(kept.is_dir(), "it is there to be asked for again");
    fs::remove_file(&place).unwrap();
    fs::create_dir(&place).unwrap();
    let saved = ground.provider.save(&mutation(1, 1), &sandbox.id, &request(false)).await.unwrap();
    assert!(!saved.memory && !kept.exists(), "{saved:?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Tried among everybody's processes, the pid that is brought back may be somebody else's by then, who would be ended.
#[test]
fn l13_criu_is_tried_where_no_process_is_anybody_elses() {
    let Some(criu) = criu() else { return };
    for (then, works) in [("", true), ("[ $1 = dump ] || exit 1", false)] {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display();
        // Somebody is left behind each time, who is known by his name.
        let text = format!(
            "#!/bin/sh
if [ $1 != --version ]; then
    readlink /proc/self/ns/pid >> {place}/seen
    ln -sf /bin/sleep {place}/left
    {place}/left 1000 >/dev/null 2>&1 &
    {then}
fi
exec {} \"$@\"
",
            criu.display()
        );
        let path = folder.path().join("criu");
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let ground = Ground::with(|config| config.criu = Some(path));
        let found = ground.provider.criu();
        assert_eq!(found.is_ok(), works, "{found:?}");
        let seen = fs::read_to_string(folder.path().join("seen")).unwrap();
        let own = fs::read_link("/proc/self/ns/pid").unwrap();
        // A dump and a restore, and one more where memory may be brought lazily.
        assert!(seen.lines().count() >= 2 && seen.lines().all(|seen| *seen != *own.to_string_lossy()), "{seen}");
        let left = folder.path().join("left").to_string_lossy().into_owned();
        let is_left = |process: fs::DirEntry| {
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).starts_with(&left)
        };
        assert!(!fs::read_dir("/proc").unwrap().flatten().any(is_left), "what is left of it ends with it");
    }
}

/// The case of the conformance suite, which declares no memory without a CRIU.
#[test]
fn p6_the_conformance_suite_covers_it() {
    let Some(criu) = criu() else { return };
    let (embedded, runc) = (viv_sandbox::Runtime::Embedded, viv_sandbox::Runtime::Binary("runc".into()));
    for (runtime, on_btrfs) in [(embedded.clone(), false), (runc, false), (embedded, true)] {
        let cases = ["save_brings_executions_back", "is_recalled_only_if_wanted", "goes_to_others_as_copies"];
        for name in cases.map(|case| format!("saves::memory_{case}")) {
            let name = name.as_str();
            viv_provider::conformance::run_named(name, async {
                let change = |config: &mut viv_sandbox::LocalConfig| {
                    config.criu = Some(criu.clone());
                    config.runtime = runtime.clone();
                };
                let ground = if on_btrfs { Ground::on_btrfs_with(change) } else { Ground::with(change) };
                // Where it is not declared, the suite shows no more than that it is refused.
                let capabilities = ground.provider.capabilities();
                let missing = capabilities.missing.get(&Capability::SaveMemory);
                assert!(capabilities.can(Capability::SaveMemory), "{name}, {runtime:?}, {on_btrfs}: {missing:?}");
                LocalWorld(ground)
            });
        }
    }
}

#[test]
fn it_is_used_by_hand() {
    let Some(criu) = criu() else { return };
    let ground = Ground::new();
    let said = |arguments: &[&str]| {
        let output = ground.viv().args(arguments).env("VIV_CRIU", &criu).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {errors}");
        (String::from_utf8_lossy(&output.stdout).trim().to_owned(), errors)
    };
    let doctor = ground.verb("doctor").env("VIV_CRIU", &criu).output().unwrap();
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(doctor.contains("memory is saved by: CRIU") && doctor.contains(&*criu.display().to_string()), "{doctor}");
    // What it cannot do is what was found, not what is known of kernels.
    let setting = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    assert_eq!(doctor.contains("gives no userfaultfd"), setting.trim() != "1", "{doctor}");
    assert_eq!(doctor.contains("`sysctl vm.unprivileged_userfaultfd=1` allows it"), setting.trim() == "0", "{doctor}");
    let (sandbox, _) = said(&["create"]);
    let count = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done";
    let (execution, _) = said(&["exec", "--detach", &sandbox, "--", "sh", "-c", count]);
    let (snapshot, _) = said(&["save", "--memory", &sandbox]);
    said(&["rollback", &sandbox, &snapshot]);
    let before = said(&["logs", &sandbox, &execution]).0;
    eventually("it counts on", || said(&["logs", &sandbox, &execution]).0.len() > before.len());
    assert_counts(&said(&["logs", &sandbox, &execution]).0);
    said(&["rm", &sandbox]);
    // Without one the files are saved, and why not more is said.
    let (sandbox, _) = said(&["create"]);
    let output = ground.viv().args(["save", "--memory", &sandbox]).env("VIV_CRIU", "/no/criu").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && errors.contains("its memory is not saved"), "{errors}");
    said(&["rm", &sandbox]);
    ground.assert_nothing_left();
}

/// Also on a machine that has none, which every other test of memory passes over.
#[test]
fn l13_without_a_criu_doctor_says_why_and_how_to_have_one() {
    let ground = Ground::new();
    let doctor = ground.verb("doctor").env("VIV_CRIU", "/no/such/criu").output().unwrap();
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line = doctor.lines().find(|line| line.contains("no   save memory: ")).unwrap_or_default();
    assert!(line.contains("there is no program /no/such/criu") && line.contains("scripts/prepare criu"), "{doctor}");
    assert!(!doctor.contains("memory is saved by"), "{doctor}");
}
