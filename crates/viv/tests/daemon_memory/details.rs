//! What is easily forgotten of what was restored: terminals, time limits, ports, hooks, and that forks are nudged (L13, L14,
//! X1, X2).
#![allow(clippy::wildcard_imports, reason = "a part of the tests beside it")]

use std::time::Instant;

use viv_api::sandbox::ProbeOutcome;

use super::*;

/// Of a command that is over soon, unless its clock stands still.
const LIMIT_MS: u64 = 12_000;

/// A terminal is still one: it has the size that it is given, and Control-C reaches who is in front.
#[test]
fn x2_a_terminal_that_was_restored_is_resized_and_interrupted() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("box", &json!({})));
    let id = &made.id;
    let mut shell = StartExecution::of(["/bin/bash", "--norc", "-i"]).unwrap();
    let size = |rows: u16, cols: u16| serde_json::from_value::<Terminal>(json!({"rows": rows, "cols": cols})).unwrap();
    shell.tty = Some(size(24, 80));
    (shell.stdin, shell.detach, shell.limit_ms) = (true, true, Some(TimeLimit::NONE));
    let shell = daemon.sandbox(id).start(&shell, None).unwrap().id;
    let mut typed = 0;
    let mut type_in = |text: &str| {
        typed = daemon.sandbox(id).execution(shell.clone()).input(typed, text.as_bytes()).unwrap().stdin_bytes;
    };
    let until_said = |what: &str| eventually_within(PATIENCE, what, || written(&daemon, id, &shell).contains(what));
    type_in("stty size; sleep 100000\n");
    until_said("24 80\r\n");
    eventually_within(PATIENCE, "it sleeps", || {
        run(&daemon.sandbox(id), "pgrep -fx 'sleep 100000'").1.exit_code == Some(0)
    });
    assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
    assert_eq!(memory(&ensure(&daemon, id)), (MemoryState::Restored, String::new()));
    assert_eq!(run(&daemon.sandbox(id), "pgrep -fx 'sleep 100000'").1.exit_code, Some(0), "it was not interrupted yet");
    daemon.sandbox(id).execution(shell.clone()).resize(size(50, 132)).unwrap();
    type_in("\u{3}");
    type_in("echo ended by $?; stty size\n");
    until_said("ended by 130\r\n50 132\r\n");
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// A time limit is of the time in which it runs: on disk no clock goes on, and after that it holds (X1).
#[test]
fn x1_a_time_limit_stands_still_on_disk_and_holds_after_that() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("box", &json!({})));
    let id = &made.id;
    let mut limited = StartExecution::of(["sleep", "100000"]).unwrap();
    (limited.detach, limited.limit_ms) = (true, Some(serde_json::from_value(json!(LIMIT_MS)).unwrap()));
    let began = Instant::now();
    let limited = daemon.sandbox(id).start(&limited, None).unwrap().id;
    assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
    let on_disk = Instant::now();
    eventually_within(PATIENCE, "its limit has passed", || began.elapsed().as_millis() as u64 > LIMIT_MS + 1_000);
    assert_eq!(state(&daemon, id, &limited).0, ExecutionState::Suspended);
    let rested = on_disk.elapsed();
    assert_eq!(memory(&ensure(&daemon, id)), (MemoryState::Restored, String::new()));
    assert_eq!(state(&daemon, id, &limited).0, ExecutionState::Running, "it stood still");
    let over = || state(&daemon, id, &limited).0 != ExecutionState::Running;
    eventually_within(PATIENCE, "its limit holds", over);
    assert_eq!(state(&daemon, id, &limited).0, ExecutionState::TimedOut);
    // Seen from outside it ran for longer than it did, however busy the machine is.
    let ran = began.elapsed().saturating_sub(rested).as_millis() as u64;
    assert!(ran >= LIMIT_MS, "it ran for {ran} ms");
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// Who listens is reached from outside after that, and hooks are performed.
#[test]
fn l13_who_listens_is_reached_after_that_and_the_hook_is_performed() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let serve = "import http.server as h; h.HTTPServer(('0.0.0.0', 8123), h.SimpleHTTPRequestHandler).serve_forever()";
    let more = json!({
        "services": [{"name": "web", "argv": ["python3", "-c", serve], "ready": {"port": 8123}}],
        "ports": [8123],
        "hooks": {"after_resume": {"run": {"command": ["sh", "-c", "echo resumed >> hooks"]}}},
    });
    let made = daemon.create_from(&request("box", &more));
    let id = &made.id;
    let pid = run(&daemon.sandbox(id), "pgrep -fo serve_forever").0;
    assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
    let back = ensure(&daemon, id);
    assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
    // Its port was dialled by the way that users take, or it would not be ready (T2).
    let ports: Vec<_> = back.evidence.ports.iter().map(|port| (port.port, port.probe.outcome)).collect();
    assert_eq!(ports, [(8123, ProbeOutcome::Ok)]);
    assert_eq!(run(&daemon.sandbox(id), "cat hooks; pgrep -fo serve_forever").0, format!("resumed\n{pid}"));
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// A fork has connections that are not its own any more, as anybody has who was restored.
#[test]
fn l14_services_of_forks_are_nudged_and_those_that_they_come_from_are_not() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let serve = "trap 'echo nudged >> nudges' USR1; while true; do sleep 0.05; done";
    let service = json!({
        "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 200},
        "nudge": {"signal": 10, "within_ms": 60_000, "reports": {"command": ["test", "-s", "nudges"]}},
    });
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    let fork = Fork { memory: true, ..Fork::default() };
    let forked = daemon.sandbox(&made.id).fork(&fork, None).unwrap().sandboxes;
    let fork = daemon.wait_for(&forked[0].id, "it is ready", |now| now.status == Status::Ready);
    assert_eq!(memory(&fork), (MemoryState::Restored, String::new()));
    assert_eq!(run(&daemon.sandbox(&fork.id), "sort -u nudges").0, "nudged\n");
    assert_eq!(run(&daemon.sandbox(&made.id), "ls nudges").1.exit_code, Some(2), "it was never away");
    daemon.remove(&fork.id);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}
