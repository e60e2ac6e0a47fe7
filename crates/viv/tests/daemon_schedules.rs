//! Schedules and drain on the real daemon (L17, L21).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use serde_json::Value;
use support::daemon::{Daemon, PATIENCE};
use viv_api::bound::{ScheduleRef, WaitMs};
use viv_api::daemon::{BeginDrain, Drain};
use viv_api::error::ErrorCode;
use viv_api::execution::StartExecution;
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Sandbox, Status, StopSandbox};
use viv_api::schedule::{CreateSchedule, Schedule};
use viv_core::SandboxId;

const APPEND: [&str; 3] = ["sh", "-c", "echo x >> /workspace/runs"];

fn named(daemon: &Daemon, name: &str) -> Sandbox {
    daemon.create_from(&CreateSandbox { name: Some(name.parse().unwrap()), ..CreateSandbox::default() })
}

fn until<T>(what: &str, within: Duration, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + within;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) => assert!(Instant::now() < deadline, "not within {within:?}: {what}: {seen}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn drained(daemon: &Daemon) -> Drain {
    until("it is drained", PATIENCE, || {
        let drain = daemon.client().drain_status().unwrap();
        if drain.drained { Ok(drain) } else { Err(format!("{drain:?}")) }
    })
}

/// Puts all to sleep, held by nobody.
fn put_to_sleep(daemon: &Daemon) {
    daemon.client().drain(&BeginDrain::default()).unwrap();
    drained(daemon);
    assert!(!daemon.client().undrain().unwrap().draining);
}

fn of(schedule: &Schedule) -> ScheduleRef {
    schedule.id.as_str().parse().unwrap()
}

fn settled(daemon: &Daemon, schedule: &Schedule, occurrences: u64, within: Duration) -> Schedule {
    until("it ran", within, || {
        let now = daemon.client().schedule(&of(schedule)).unwrap();
        let done = now.running.is_none() && now.runs + now.skipped >= occurrences;
        if done { Ok(now) } else { Err(format!("{now:?}")) }
    })
}

fn ran(daemon: &Daemon, id: &SandboxId) -> usize {
    daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
    let listed = daemon.viv().args(["exec", id.as_str(), "cat", "/workspace/runs"]).output().unwrap();
    String::from_utf8(listed.stdout).unwrap().lines().count()
}

#[test]
fn l17_a_due_schedule_wakes_a_hibernated_sandbox_runs_and_goes_back() {
    let daemon = Daemon::start();
    let id = named(&daemon, "box").id;
    put_to_sleep(&daemon);
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Hibernated);
    let schedule = daemon.sandbox(&id).create_schedule(&CreateSchedule::of("* * * * *", APPEND).unwrap()).unwrap();
    let done = settled(&daemon, &schedule, 1, PATIENCE * 3);
    let last = done.last.clone().unwrap();
    assert_eq!((last.outcome.as_str(), last.exit_code), ("exited", Some(0)), "{done:?}");
    assert_eq!(last.at_ms % 60_000, 0);
    daemon.wait_for(&id, "it goes back", |now| now.status == Status::Hibernated);
    daemon.client().remove_schedule(&of(&schedule)).unwrap();
    daemon.wait_for(&id, "it goes back", |now| now.status == Status::Hibernated);
    let runs = daemon.client().schedule(&of(&schedule));
    assert_eq!(runs.unwrap_err().code(), Some(ErrorCode::NotFound));
    assert!(ran(&daemon, &id) >= 1);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn l17_run_now_and_the_command_line() {
    let mut daemon = Daemon::start();
    let id = named(&daemon, "box").id;
    put_to_sleep(&daemon);
    let viv = |daemon: &Daemon, arguments: &[&str]| {
        let done = daemon.viv().args(arguments).output().unwrap();
        let told = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.success(), told(done.stdout), told(done.stderr))
    };
    let (wrong, _, said) = viv(&daemon, &["schedule", "add", "--cron", "61 * * * *", "box", "true"]);
    assert!(!wrong && said.contains("minute") && said.contains("hint:"), "{said}");
    let (_, _, said) = viv(&daemon, &["schedule", "add", "--cron", "@daily", "--zone", "Mars/Base", "box", "true"]);
    assert!(said.contains("time zone"), "{said}");
    let add = ["schedule", "add", "--cron", "0 4 1 1 *", "--zone", "Europe/Berlin", "box", "--", "sh", "-c", APPEND[2]];
    let (made, schedule, said) = viv(&daemon, &add);
    assert!(made, "{said}");
    let schedule = schedule.trim().to_owned();
    assert!(viv(&daemon, &["schedule", "run", &schedule]).0);
    let kept = daemon.client().schedule(&schedule.parse().unwrap()).unwrap();
    settled(&daemon, &kept, 1, PATIENCE);
    // The daemon dies after that; the schedule and what came of it are there again.
    daemon.kill();
    daemon.restart();
    let (_, shown, _) = viv(&daemon, &["--json", "schedule", "show", &schedule]);
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((shown["last"]["outcome"].as_str(), shown["runs"].as_u64()), (Some("exited"), Some(1)), "{shown}");
    daemon.wait_for(&id, "it went back", |now| now.status == Status::Hibernated);
    let (_, table, _) = viv(&daemon, &["schedule", "ls", "box"]);
    assert!(table.contains(&schedule) && table.contains("exited 0"), "{table}");
    assert!(viv(&daemon, &["schedule", "disable", &schedule]).0);
    assert!(viv(&daemon, &["schedule", "ls"]).1.contains("disabled"));
    assert_eq!(ran(&daemon, &id), 1);
    // A user stops it: from now on no schedule wakes it (L9).
    daemon.sandbox(&id).stop(&StopSandbox::default()).unwrap();
    daemon.wait_for(&id, "it is stopped", |now| now.status == Status::Hibernated);
    assert!(viv(&daemon, &["schedule", "run", &schedule]).0);
    let kept = settled(&daemon, &kept, 2, PATIENCE);
    let last = kept.last.unwrap();
    assert_eq!((last.outcome.as_str(), last.why.as_deref()), ("skipped", Some("held")));
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Hibernated);
    daemon.remove(&id);
    assert!(viv(&daemon, &["schedule", "ls"]).1.lines().count() <= 1, "who is gone has none");
    daemon.assert_nothing_left();
}

#[test]
fn l21_a_drain_saves_or_finishes_all_also_over_a_restart() {
    let mut daemon = Daemon::start();
    let persistent: Vec<SandboxId> = ["one", "two", "three"].map(|name| named(&daemon, name).id).into();
    let ephemeral = [daemon.create().id, daemon.create().id];
    let long = StartExecution::of(["sleep", "1000"]).unwrap();
    for id in [&persistent[0], &ephemeral[0]] {
        daemon.sandbox(id).start(&long, None).unwrap();
    }
    for id in &persistent {
        let wrote =
            daemon.viv().args(["exec", id.as_str(), "sh", "-c", "echo kept > /workspace/file"]).status().unwrap();
        assert!(wrote.success());
    }
    daemon.client().drain(&BeginDrain { grace_ms: Some(WaitMs::new(2_000).unwrap()) }).unwrap();
    let refused = daemon.client().create(&CreateSandbox::default(), None).unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Draining), "{refused:?}");
    daemon.kill();
    daemon.restart();
    let drain = drained(&daemon);
    assert_eq!((drain.instances, drain.left.len()), (Some(0), 0));
    for id in &persistent {
        assert_eq!(daemon.sandbox(id).get().unwrap().status, Status::Hibernated);
        let refused = daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap_err();
        assert_eq!(refused.code(), Some(ErrorCode::Draining), "{refused:?}");
    }
    for id in &ephemeral {
        assert_eq!(daemon.sandbox(id).get().unwrap().status, Status::Stopped);
    }
    assert!(daemon.instances().is_empty());
    let told = daemon.viv().args(["drain", "--status"]).output().unwrap();
    assert!(String::from_utf8(told.stdout).unwrap().starts_with("drained"));
    assert!(daemon.viv().arg("undrain").status().unwrap().success());
    for id in &persistent {
        daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
        daemon.wait_for(id, "it is ready again", |now| now.status == Status::Ready);
        let kept = daemon.viv().args(["exec", id.as_str(), "cat", "/workspace/file"]).output().unwrap();
        assert_eq!(kept.stdout, b"kept\n");
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}
