//! Executions on the real daemon with real sandboxes: they outlive everyone, wait in a bounded queue, and none of them
//! stays (SPEC part 3).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::disk::{Disk, Flood};
use support::held::Held;
use support::restart::House;
use support::{eventually, eventually_within, is_alive, kill};
use viv_api::ErrorCode;
use viv_api::bound::{IdempotencyKey, MemoryBytes, MomentMs, QueueMs, RunningMax, SandboxName, SearchText, TailLines};
use viv_api::client::Output;
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution, TimeLimit};
use viv_api::limits::{Limit, Limits};
use viv_api::query::ListAllExecutions;
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Phase, RestSandbox, Sandbox, Status, TimelineEntry};
use viv_core::{ExecutionId, SandboxId};

/// Longer than anything here waits in a queue for its turn.
const QUEUE_MS: u64 = 120_000;

/// The longest time limit of those that are not to stay, and how long after it the daemon asks for the end of one.
const LIMITED: Duration = Duration::from_secs(4 + 5);

/// A silent agent is asked three times, each for the 10 s of a call, 5 s apart; then its sandbox ends (X3).
const SILENT: Duration = Duration::from_secs(3 * 10 + 2 * 5);

/// A loaded machine takes longer for all of it.
const LOADED: u32 = 2;

/// So long for the sandbox itself to be ended and saved.
const SAVED: Duration = Duration::from_secs(15);

fn sh(script: &str) -> StartExecution {
    StartExecution::of(["/bin/sh", "-c", script]).unwrap()
}

fn queued(script: &str, queue_ms: u64) -> StartExecution {
    StartExecution { queue_ms: Some(QueueMs::new(queue_ms).unwrap()), ..sh(script) }
}

/// Only when nothing else runs in the foreground.
fn alone(script: &str, queue_ms: u64) -> StartExecution {
    StartExecution { running_max: Some(RunningMax::new(1).unwrap()), ..queued(script, queue_ms) }
}

fn get(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId) -> Execution {
    daemon.sandbox(id).execution(execution.clone()).get().unwrap()
}

fn ended(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId) -> Execution {
    eventually_within(PATIENCE, "it ended", || get(daemon, id, execution).state.is_final());
    get(daemon, id, execution)
}

fn text(output: Output<'_>) -> String {
    let text = |line| match line {
        OutputLine::Chunk(chunk) => chunk.text.unwrap(),
        OutputLine::Cut(cut) => format!("[{} cut]", cut.cut.to - cut.cut.from),
        OutputLine::End(_) | OutputLine::Alive(_) => String::new(),
    };
    output.map(|line| text(line.unwrap())).collect()
}

fn all(daemon: &Daemon) -> Vec<Execution> {
    daemon.client().executions_all(ListAllExecutions::default()).map(Result::unwrap).collect()
}

/// The row as the list of all sandboxes has it.
fn listed(daemon: &Daemon, execution: &ExecutionId) -> Execution {
    all(daemon).into_iter().find(|one| one.id == *execution).expect("it is in the list of all")
}

fn named(daemon: &Daemon, name: &str) -> Sandbox {
    let request = CreateSandbox { name: Some(SandboxName::new(name).unwrap()), ..CreateSandbox::default() };
    daemon.create_from(&request)
}

#[test]
fn x2_an_execution_is_taken_up_at_an_offset_after_kill_9_of_the_daemon() {
    let mut daemon = Daemon::start();
    let id = daemon.create().id;
    let detached = StartExecution {
        detach: true,
        limit_ms: Some(TimeLimit::NONE),
        ..sh("trap 'echo heard; exit 7' USR1; echo begun; while :; do sleep 0.05; done")
    };
    let key: IdempotencyKey = "the-one".parse().unwrap();
    let started = daemon.sandbox(&id).start(&detached, Some(&key)).unwrap();
    let handle = |daemon: &Daemon| daemon.client().sandbox(&id).execution(started.id.clone()).get().unwrap();
    eventually("it began", || handle(&daemon).output_bytes == 6);
    daemon.kill();
    daemon.restart();
    let found = handle(&daemon);
    assert_eq!((found.state, &found.argv, found.detach), (ExecutionState::Running, &started.argv, true));
    assert!(found.by.as_deref().is_some_and(|by| by.starts_with("key")), "{found:?}");
    assert_eq!(listed(&daemon, &started.id).state, ExecutionState::Running);
    // The same key is the same execution, also for a daemon that did not start it.
    assert_eq!(daemon.sandbox(&id).start(&detached, Some(&key)).unwrap().id, started.id);
    assert_eq!(all(&daemon).len(), 1);

    daemon.sandbox(&id).execution(started.id.clone()).signal("10".parse().unwrap()).unwrap();
    let rest = text(daemon.sandbox(&id).execution(started.id.clone()).follow(6));
    assert_eq!(rest, "heard\n");
    let end = ended(&daemon, &id, &started.id);
    assert_eq!((end.exit_code, end.cause.as_deref()), (Some(7), Some("exit")));
    // Its end was pushed: the list of all knows it without anybody having looked.
    eventually("its row says so", || listed(&daemon, &started.id).state == ExecutionState::Exited);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// Who began it in the foreground leaves while it writes: its end is told all the same, and nobody has to ask for that.
#[test]
fn x1_o7_the_end_of_what_a_client_left_is_told_though_nobody_asks() {
    let daemon = Daemon::start();
    let made = daemon.create();
    let script = "while [ ! -e /workspace/go ]; do echo on; sleep 0.05; done";
    let mut client = daemon.viv();
    client.args(["exec", made.id.as_str(), "--", "sh", "-c", script]);
    let mut client = client.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "on\n");
    client.kill().unwrap();
    client.wait().unwrap();
    let left = all(&daemon).into_iter().find(|one| one.argv.iter().any(|word| word == script)).expect("it is listed");
    // It writes on, and the daemon finds out that nobody reads.
    let written = || get(&daemon, &made.id, &left.id).output_bytes;
    let before = written();
    eventually("it writes on", || written() > before + 60);
    run(&daemon.sandbox(&made.id), "touch /workspace/go");
    let told = |entry: &TimelineEntry| entry.kind == "execution.ended" && entry.message.contains(left.id.as_str());
    let timeline = || daemon.sandbox(&made.id).timeline_all().map(Result::unwrap).collect::<Vec<_>>();
    eventually_within(PATIENCE, "its end is told", || timeline().iter().any(told));
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn x5_after_a_hibernation_nothing_runs_and_outputs_are_still_read() {
    let mut daemon = Daemon::start();
    let id = named(&daemon, "kept").id;
    let (said, done) = run(&daemon.sandbox(&id), "seq 1 2000; echo last words");
    let runs = daemon.sandbox(&id).start(&sh("echo waits; sleep 1000"), None).unwrap();
    let dead = daemon.sandbox(&id).start(&sh("kill -SEGV $$"), None).unwrap();
    ended(&daemon, &id, &dead.id);
    daemon.sandbox(&id).hibernate(&RestSandbox::default()).unwrap();
    let rests = |daemon: &Daemon| {
        let states: Vec<_> = daemon.sandbox(&id).executions_all().map(|one| one.unwrap().state).collect();
        assert_eq!(states, [ExecutionState::Exited, ExecutionState::Lost, ExecutionState::Signalled]);
        let lost = get(daemon, &id, &runs.id);
        assert_eq!((lost.state, lost.cause.as_deref()), (ExecutionState::Lost, Some("hibernated")));
        let handle = daemon.sandbox(&id).execution(done.id.clone());
        assert_eq!(text(handle.output(0)), said);
        assert_eq!(text(handle.output(5)), said[5..]);
        assert_eq!(text(handle.tail(TailLines::new(2).unwrap(), false)), "2000\nlast words\n");
        assert_eq!(text(handle.search(SearchText::new("last").unwrap(), 0)), "last words\n");
        let end_ms = done.ended_at_ms.unwrap();
        assert_eq!(text(handle.output(0).since(MomentMs::nearest(end_ms + 60_000))), "");
        assert_eq!(text(handle.output(0).since(MomentMs::nearest(done.started_at_ms.unwrap() - 60_000))), said);
        assert_eq!(text(daemon.sandbox(&id).execution(runs.id.clone()).output(0)), "waits\n");
    };
    daemon.wait_for(&id, "it rests", |sandbox| sandbox.phase == Phase::Hibernated);
    rests(&daemon);
    daemon.kill();
    daemon.restart();
    rests(&daemon);
    // And after a resume the list equals reality: nothing of before runs.
    daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    rests(&daemon);
    let (_, fresh) = run(&daemon.sandbox(&id), "pgrep sleep || echo nothing");
    assert_eq!(fresh.exit_code, Some(0));
    assert!(all(&daemon).iter().all(|one| one.state.is_final()));
    assert_eq!(all(&daemon).len(), 4);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x1_what_waits_is_started_in_its_turn_or_ends_with_an_error() {
    let daemon = Daemon::start();
    let id = named(&daemon, "busy").id;
    let sandbox = daemon.sandbox(&id);
    let blocker = sandbox.start(&sh("while [ ! -e /tmp/go ]; do sleep 0.05; done"), None).unwrap();
    let second = sandbox.start(&alone("echo second", QUEUE_MS), None).unwrap();
    let late = sandbox.start(&alone("echo never", 300), None).unwrap();
    let cancelled = sandbox.start(&alone("echo never", QUEUE_MS), None).unwrap();
    for waits in [&second, &late, &cancelled] {
        assert_eq!((waits.state, waits.started_at_ms), (ExecutionState::Queued, None), "{waits:?}");
        assert!(waits.queued_until_ms.is_some());
    }
    assert_eq!(sandbox.execution(cancelled.id.clone()).cancel().unwrap().state, ExecutionState::Cancelled);
    let late = ended(&daemon, &id, &late.id);
    assert_eq!((late.state, late.cause.as_deref()), (ExecutionState::Failed, Some("not_started")));
    assert!(late.message.as_deref().unwrap().contains("300 ms"), "{late:?}");
    assert_eq!(get(&daemon, &id, &second.id).state, ExecutionState::Queued);
    // So many may wait, and no more.
    let mut waiting = vec![second.id.clone()];
    let refused = loop {
        match sandbox.start(&alone("echo more", QUEUE_MS), None) {
            Ok(more) => waiting.push(more.id),
            Err(error) => break error,
        }
        assert!(waiting.len() <= 64, "the queue has no end");
    };
    assert_eq!((waiting.len(), refused.code()), (64, Some(ErrorCode::QuotaExceeded)));
    for more in &waiting[1..] {
        sandbox.execution(more.clone()).cancel().unwrap();
    }
    // Who follows what waits hears all of it.
    run(&sandbox, "touch /tmp/go");
    assert_eq!(text(sandbox.execution(second.id.clone()).follow(0)), "second\n");
    assert_eq!(ended(&daemon, &id, &blocker.id).exit_code, Some(0));
    assert_eq!(ended(&daemon, &id, &second.id).exit_code, Some(0));

    // What is at rest is not woken by it, unless that is said; what waits there is started when it is ready.
    daemon.sandbox(&id).hibernate(&RestSandbox::default()).unwrap();
    daemon.wait_for(&id, "it rests", |sandbox| sandbox.phase == Phase::Hibernated);
    assert_eq!(sandbox.start(&queued("true", QUEUE_MS), None).unwrap_err().code(), Some(ErrorCode::NotRunning));
    let woken = StartExecution { wake: true, ..queued("echo awake", QUEUE_MS) };
    let woken = sandbox.start(&woken, None).unwrap();
    assert_eq!(text(sandbox.execution(woken.id.clone()).follow(0)), "awake\n");
    assert_eq!(ended(&daemon, &id, &woken.id).exit_code, Some(0));
    assert!(all(&daemon).iter().all(|one| one.state.is_final()));
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x1_what_waits_is_started_once_by_whoever_comes_after_kill_9() {
    let mut daemon = Daemon::start();
    let id = daemon.create().id;
    let sandbox = daemon.sandbox(&id);
    sandbox.start(&sh("while [ ! -e /tmp/go ]; do sleep 0.05; done"), None).unwrap();
    let key: IdempotencyKey = "once".parse().unwrap();
    let request = alone("echo ran >> /tmp/ran; cat /tmp/ran", QUEUE_MS);
    let waits = sandbox.start(&request, Some(&key)).unwrap();
    assert_eq!(waits.state, ExecutionState::Queued);
    daemon.kill();
    daemon.restart();
    assert_eq!(get(&daemon, &id, &waits.id).state, ExecutionState::Queued);
    // Asked for again, it is the same.
    assert_eq!(daemon.sandbox(&id).start(&request, Some(&key)).unwrap().id, waits.id);
    let other = daemon.sandbox(&id).start(&alone("echo other", QUEUE_MS), Some(&key)).unwrap_err();
    assert_eq!(other.code(), Some(ErrorCode::IdempotencyMismatch));
    run(&daemon.sandbox(&id), "touch /tmp/go");
    assert_eq!(text(daemon.sandbox(&id).execution(waits.id.clone()).follow(0)), "ran\n");
    daemon.kill();
    daemon.restart();
    assert_eq!(ended(&daemon, &id, &waits.id).exit_code, Some(0));
    assert_eq!(run(&daemon.sandbox(&id), "cat /tmp/ran").0, "ran\n");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x1_what_waits_for_a_sandbox_that_goes_ends_with_it() {
    let daemon = Daemon::start();
    let id = named(&daemon, "going").id;
    let sandbox = daemon.sandbox(&id);
    sandbox.start(&sh("sleep 1000"), None).unwrap();
    let waits = sandbox.start(&alone("echo never", QUEUE_MS), None).unwrap();
    sandbox.hibernate(&RestSandbox::default()).unwrap();
    let end = ended(&daemon, &id, &waits.id);
    assert_eq!((end.state, end.cause.as_deref()), (ExecutionState::Failed, Some("not_started")), "{end:?}");
    assert!(all(&daemon).iter().all(|one| one.state.is_final()), "{:?}", all(&daemon));
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x6_exit_signal_memory_agent_and_sandbox_are_told_apart() {
    let daemon = Daemon::start();
    let limits = Limits { memory_bytes: Some(Limit::Number(MemoryBytes::new(64 << 20).unwrap())), ..Limits::default() };
    let id = daemon.create_from(&CreateSandbox { limits, ..CreateSandbox::default() }).id;
    let sandbox = daemon.sandbox(&id);
    for (script, state, cause) in [
        ("exit 3", ExecutionState::Exited, "exit"),
        ("kill -KILL $$", ExecutionState::Signalled, "signal"),
        ("a=x; while :; do a=$a$a; done", ExecutionState::OomKilled, "oom_kill"),
    ] {
        let (_, end) = run(&sandbox, script);
        assert_eq!((end.state, end.cause.as_deref()), (state, Some(cause)), "{script}");
        assert_eq!(get(&daemon, &id, &end.id).cause.as_deref(), Some(cause));
    }
    let found = sandbox.diagnosis_over(500).unwrap().findings;
    let memory = found.iter().find(|finding| finding.code == "out_of_memory").unwrap_or_else(|| panic!("{found:#?}"));
    assert_eq!(memory.command.as_deref(), Some(format!("viv limits {id} --memory 128M").as_str()), "twice as much");
    let limited = StartExecution { limit_ms: Some(TimeLimit::Ms("100".parse().unwrap())), ..sh("sleep 1000") };
    let limited = sandbox.start(&limited, None).unwrap();
    assert_eq!(ended(&daemon, &id, &limited.id).cause.as_deref(), Some("time_limit"));
    let missing = sandbox.start(&StartExecution::of(["/no/such/program"]).unwrap(), None).unwrap();
    assert_eq!(ended(&daemon, &id, &missing.id).cause.as_deref(), Some("not_started"));
    daemon.remove(&id);

    for (agent, cause) in [(true, "agent_died"), (false, "supervisor_lost")] {
        let id = daemon.create().id;
        let runs = daemon.sandbox(&id).start(&sh("sleep 1000"), None).unwrap();
        let host = daemon.host(&id);
        Held::of(if agent { host.agent_pid } else { host.shim_pid }).kill();
        daemon.wait_for(&id, "it is lost", |sandbox| sandbox.status == Status::Lost);
        eventually_within(PATIENCE, "its row says so", || {
            let end = listed(&daemon, &runs.id);
            end.state == ExecutionState::Lost && end.cause.as_deref() == Some(cause)
        });
        let end = get(&daemon, &id, &runs.id);
        assert_eq!((end.state, end.cause.as_deref()), (ExecutionState::Lost, Some(cause)));
        daemon.remove(&id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn x3_a_child_that_changed_its_session_and_ignores_term_is_gone_after_a_cancel() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    let script = "setsid sh -c 'trap \"\" TERM HUP; echo $$ > /tmp/child; while :; do sleep 1; done' & \
                  while :; do sleep 1; done";
    let runs = daemon.sandbox(&id).start(&sh(script), None).unwrap();
    let sandbox = daemon.sandbox(&id);
    eventually("the child is there", || run(&sandbox, "cat /tmp/child 2>/dev/null").0.trim().parse::<u32>().is_ok());
    let before = daemon.processes().len();
    let began = Instant::now();
    let end = sandbox.execution(runs.id.clone()).cancel().unwrap();
    assert_eq!(end.state, ExecutionState::Cancelled);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(run(&sandbox, "kill -0 $(cat /tmp/child) 2>/dev/null || echo gone").0, "gone\n");
    assert!(daemon.processes().len() < before);
    assert_eq!(listed(&daemon, &runs.id).state, ExecutionState::Cancelled);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// One of each kind that could stay: in the foreground, detached, silent, writing, and waiting for a place.
fn of_every_kind(daemon: &Daemon, id: &SandboxId) -> Vec<ExecutionId> {
    let limited = |script: &str, detach: bool| StartExecution {
        detach,
        limit_ms: Some(TimeLimit::Ms("4000".parse().unwrap())),
        ..sh(script)
    };
    let requests = [
        limited("sleep 1000", false),
        limited("while :; do echo word; sleep 0.01; done", false),
        limited("trap '' TERM; while :; do echo line >> /tmp/lines; sleep 0.01; done", true),
        alone("echo never", 3_000),
    ];
    requests.iter().map(|request| daemon.sandbox(id).start(request, None).unwrap().id).collect()
}

/// Each of them ends, and says why, though nobody looks at it in particular: the list of all is told by rows. An agent
/// that is there, or is known not to be, is not asked in vain.
fn assert_each_ends_with_a_cause(daemon: &Daemon, executions: &[ExecutionId]) {
    let until = Instant::now() + LOADED * (LIMITED + SAVED);
    for execution in executions {
        let end = loop {
            let now = listed(daemon, execution);
            if now.state.is_final() {
                break now;
            }
            assert!(Instant::now() < until, "it stays: {now:?}\n{}", daemon.said());
            std::thread::sleep(Duration::from_millis(100));
        };
        assert!(end.cause.is_some(), "{end:?}");
    }
}

#[test]
fn x1_nothing_stays_with_an_agent_that_was_killed() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    let executions = of_every_kind(&daemon, &id);
    Held::of(daemon.host(&id).agent_pid).kill();
    assert_each_ends_with_a_cause(&daemon, &executions);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x1_nothing_stays_on_a_disk_that_is_full() {
    let disk = Disk::make(&["mkfs.ext4", "-q", "-m", "0"], "loop", 256).unwrap();
    let mut daemon = Daemon::in_house(House::on_disk(&disk));
    daemon.run(&[]);
    let id = daemon.create().id;
    let before = of_every_kind(&daemon, &id);
    let flood = Flood::of(&disk);
    assert_each_ends_with_a_cause(&daemon, &before);
    // What is begun on it is refused, or ends.
    let limit = Some(TimeLimit::Ms("3000".parse().unwrap()));
    let begun: Vec<ExecutionId> = (0..3)
        .map(|_| StartExecution { limit_ms: limit, ..sh("while :; do echo word; sleep 0.01; done") })
        .filter_map(|request| daemon.sandbox(&id).start(&request, None).ok())
        .map(|started| started.id)
        .collect();
    assert_each_ends_with_a_cause(&daemon, &begun);
    flood.make_room();
    // With room it is as before, or, had it been ended for this, made again.
    daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    let (said, end) = run(&daemon.sandbox(&id), "echo well");
    assert_eq!((said.as_str(), end.exit_code), ("well\n", Some(0)));
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x1_nothing_runs_past_its_deadline_with_an_agent_that_stands_still() {
    let daemon = Daemon::start();
    let id = named(&daemon, "silent").id;
    run(&daemon.sandbox(&id), "echo precious > /root/kept");
    let limited = StartExecution { limit_ms: Some(TimeLimit::Ms("2000".parse().unwrap())), ..sh("sleep 1000") };
    let runs = daemon.sandbox(&id).start(&limited, None).unwrap();
    let waits = daemon.sandbox(&id).start(&alone("echo never", 2_000), None).unwrap();
    let agent = daemon.host(&id).agent_pid.unwrap();
    kill(agent, Signal::STOP);
    // Nobody looks at it in particular: the list of all is told by rows.
    let until = Instant::now() + LOADED * (LIMITED + SILENT + SAVED);
    while !listed(&daemon, &runs.id).state.is_final() {
        assert!(Instant::now() < until, "it runs on: {:?}\n{}", listed(&daemon, &runs.id), daemon.said());
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(listed(&daemon, &runs.id).state, ExecutionState::Lost);
    assert_each_ends_with_a_cause(&daemon, &[waits.id]);
    eventually_within(PATIENCE, "the agent is gone", || !is_alive(agent));
    // Its files were saved before.
    daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(run(&daemon.sandbox(&id), "cat /root/kept").0, "precious\n");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn x2_the_command_line_leaves_takes_up_lists_and_ends_commands() {
    let daemon = Daemon::start();
    let id = named(&daemon, "box").id;
    let viv = |arguments: &[&str]| {
        let done = daemon.viv().args(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout), text(done.stderr))
    };
    // Left behind, and taken up again: all of it, and parts of it.
    let script =
        "for n in 1 2 3; do echo line $n; done; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo last; exit 7";
    let (code, out, error) = viv(&["exec", "--detach", "box", "/bin/sh", "-c", script]);
    assert_eq!(code, Some(0), "{error}");
    let left = out.trim().to_owned();
    let read = |more: &[&str]| viv(&[&["attach", "--no-follow"], more, &["box", &left]].concat()).1;
    eventually("it wrote", || read(&[]) == "line 1\nline 2\nline 3\n");
    assert_eq!(read(&["--offset", "7"]), "line 2\nline 3\n");
    assert_eq!(read(&["--tail", "1"]), "line 3\n");
    assert_eq!(read(&["--search", "line 2"]), "line 2\n");
    assert_eq!(read(&["--since", "1h"]).lines().count(), 3);

    // One that waits for a place is started by itself, or taken back before that.
    let blocker = daemon.sandbox(&id).start(&sh("while [ ! -e /tmp/go ]; do sleep 0.05; done"), None).unwrap();
    let waiting = std::thread::scope(|scope| {
        let waits = |word: &'static str| {
            let queue = ["exec", "--queue", "2m", "--running-max", "1", "box", "echo", word];
            scope.spawn(move || viv(&queue))
        };
        let (taken_back, started) = (waits("never"), waits("started"));
        let queued = || viv(&["executions", "--all", "--state", "queued"]).1;
        eventually("both wait", || queued().contains("never") && queued().contains("started"));
        let row = queued().lines().find(|line| line.contains("never")).unwrap().to_owned();
        let first = row.split_whitespace().find(|word| word.starts_with(ExecutionId::PREFIX)).unwrap().to_owned();
        let (code, out, error) = viv(&["cancel", "box", &first]);
        assert_eq!(code, Some(0), "{out}{error}");
        let taken_back = taken_back.join().unwrap();
        assert!(taken_back.0 != Some(0) && taken_back.1.is_empty(), "{taken_back:?}");
        run(&daemon.sandbox(&id), "touch /tmp/go");
        started.join().unwrap()
    });
    assert_eq!((waiting.0, waiting.1.as_str()), (Some(0), "started\n"), "{}", waiting.2);
    assert_eq!(ended(&daemon, &id, &blocker.id).exit_code, Some(0));
    // Who attaches hears the rest, and exits as it did.
    let (code, out, error) = viv(&["attach", "--offset", "21", "box", &left]);
    assert_eq!((code, out.as_str()), (Some(7), "last\n"), "{error}");

    // A signal reaches the first process, which decides; a cancel leaves nothing.
    let (_, out, _) =
        viv(&["exec", "-d", "box", "/bin/sh", "-c", "trap 'exit 9' USR1; echo set; while :; do sleep 0.05; done"]);
    let heeds = out.trim().to_owned();
    eventually("it listens", || viv(&["attach", "--no-follow", "box", &heeds]).1 == "set\n");
    let (code, _, error) = viv(&["kill", "--signal", "USR1", "box", &heeds]);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(ended(&daemon, &id, &heeds.parse().unwrap()).exit_code, Some(9));
    let (_, out, _) = viv(&["exec", "-d", "box", "sleep", "1000"]);
    let sleeps = out.trim().to_owned();
    assert_eq!(viv(&["cancel", "box", &sleeps]).0, Some(0));
    let (_, of_box, _) = viv(&["executions", "box"]);
    for one in [&left, &heeds, &sleeps] {
        assert!(of_box.contains(one.as_str()), "{one}: {of_box}");
    }
    let (_, cancelled, _) = viv(&["executions", "--all", "--state", "cancelled"]);
    assert!(cancelled.contains(&sleeps) && !cancelled.contains(&heeds), "{cancelled}");
    assert_eq!(viv(&["attach", "box", "exe_none"]).0, Some(125), "not the code of any command");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}
