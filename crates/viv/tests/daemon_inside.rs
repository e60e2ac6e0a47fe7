//! What is asked from inside a sandbox, on the real daemon: schedules (L17).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use serde_json::Value;
use support::daemon::{Daemon, PATIENCE, run};
use viv_api::bound::{Path as ApiPath, ScheduleRef, WaitMs};
use viv_api::daemon::BeginDrain;
use viv_api::execution::{Execution, ExecutionState, OutputLine, StartExecution};
use viv_api::query::{ListEvents, WriteFile};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Sandbox, Status};
use viv_api::schedule::{CreateSchedule, Schedule};
use viv_core::{ExecutionId, SandboxId};

fn named(daemon: &Daemon, name: &str) -> Sandbox {
    daemon.create_from(&CreateSandbox { name: Some(name.parse().unwrap()), ..CreateSandbox::default() })
}

fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) => assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}: {seen}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn code(execution: &Execution) -> Option<i32> {
    match execution.state {
        ExecutionState::Exited => execution.exit_code,
        _ => None,
    }
}

/// Runs a script inside that has to succeed, and gives what it said.
fn inside(daemon: &Daemon, id: &SandboxId, script: &str) -> String {
    let (said, ended) = run(&daemon.sandbox(id), script);
    assert_eq!(code(&ended), Some(0), "{script}: {said}");
    said
}

/// Runs a script inside that has to fail like this, and gives what it said.
fn refused(daemon: &Daemon, id: &SandboxId, script: &str, expected: i32) -> String {
    let (said, ended) = run(&daemon.sandbox(id), script);
    assert_eq!(code(&ended), Some(expected), "{script}: {said}");
    said
}

fn start(daemon: &Daemon, id: &SandboxId, script: &str) -> ExecutionId {
    daemon.sandbox(id).start(&StartExecution::of(["/bin/sh", "-c", script]).unwrap(), None).unwrap().id
}

/// Starts a script whose question ends the daemon: it asks once its start was answered, which the daemon is to live for.
fn start_fatal(daemon: &Daemon, id: &SandboxId, script: &str) -> ExecutionId {
    inside(daemon, id, "rm -f /workspace/go");
    let started = start(daemon, id, &format!("until [ -e /workspace/go ]; do sleep 0.02; done; {script}"));
    let go = WriteFile { path: ApiPath::new("/workspace/go").unwrap(), mode: None, user: None, generation: None };
    // Whether the daemon lives to answer this is of no matter.
    let _answered = daemon.sandbox(id).write_file(&go, &mut std::io::empty());
    started
}

/// What an execution said, and how it ended.
fn followed(daemon: &Daemon, id: &SandboxId, execution: &ExecutionId) -> (String, Option<i32>) {
    let mut said = Vec::new();
    for line in daemon.sandbox(id).execution(execution.clone()).follow(0) {
        match line.unwrap() {
            OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap()),
            OutputLine::Cut(cut) => panic!("output was cut: {cut:?}"),
            OutputLine::End(end) => return (String::from_utf8_lossy(&said).into_owned(), code(&end.end)),
            OutputLine::Alive(_) => {}
        }
    }
    panic!("an output without an end")
}

fn listed(daemon: &Daemon, id: &SandboxId) -> Vec<Schedule> {
    daemon.sandbox(id).schedules_all().collect::<Result<_, _>>().unwrap()
}

fn ids(schedules: &[Schedule]) -> Vec<&str> {
    schedules.iter().map(|schedule| schedule.id.as_str()).collect()
}

/// Who wrote the lines of this kind into the journal.
fn journal(daemon: &Daemon, id: &SandboxId, kind: &str) -> Vec<String> {
    let query = ListEvents { sandbox: Some(id.as_str().parse().unwrap()), ..ListEvents::default() };
    let page = daemon.client().events(&query).unwrap();
    page.items.into_iter().filter(|line| line.kind == kind).map(|line| line.by).collect()
}

#[test]
fn l17_a_schedule_made_inside_is_written_out_at_once_and_wakes_the_sandbox() {
    let mut daemon = Daemon::start();
    let id = named(&daemon, "box").id;
    let add = "viv schedule add --cron '0 4 1 1 *' --zone Europe/Berlin -- sh -c 'echo x >> /workspace/runs'";
    let made = inside(&daemon, &id, add).trim().to_owned();
    // It was answered, so it is there whatever happens to the daemon.
    daemon.kill();
    daemon.restart();
    let schedules = listed(&daemon, &id);
    assert_eq!(ids(&schedules), [made.as_str()]);
    let schedule = &schedules[0];
    assert_eq!((schedule.zone.as_str(), schedule.argv[0].as_str()), ("Europe/Berlin", "sh"));
    assert_eq!(schedule.created_by, format!("inside:{id}"));
    assert_eq!(journal(&daemon, &id, "schedule.created"), [schedule.created_by.as_str()]);
    // Hibernated, it is woken for it, and goes back.
    daemon.client().drain(&BeginDrain { grace_ms: Some(WaitMs::new(1_000).unwrap()) }).unwrap();
    until("it is drained", || {
        let drain = daemon.client().drain_status().unwrap();
        if drain.drained { Ok(()) } else { Err(format!("{drain:?}")) }
    });
    daemon.client().undrain().unwrap();
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Hibernated);
    let reference: ScheduleRef = made.parse().unwrap();
    daemon.client().run_schedule(&reference).unwrap();
    let done = until("it ran", || {
        let now = daemon.client().schedule(&reference).unwrap();
        if now.runs == 1 { Ok(now) } else { Err(format!("{now:?}")) }
    });
    let last = done.last.unwrap();
    assert_eq!((last.outcome.as_str(), last.exit_code), ("exited", Some(0)), "{last:?}");
    daemon.wait_for(&id, "it goes back", |now| now.status == Status::Hibernated);
    // Its agent is another one by now, and is listened to as well.
    daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(&id, "it is ready", |now| now.status == Status::Ready);
    assert_eq!(
        inside(&daemon, &id, "cat /workspace/runs; viv schedule rm $(viv schedule ls | grep -o 'sch_[a-z0-9]*')"),
        format!("x\n{made}\n")
    );
    assert!(listed(&daemon, &id).is_empty());
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn l17_inside_only_its_own_schedules_are_there() {
    let daemon = Daemon::start();
    let (id, other) = (named(&daemon, "box").id, named(&daemon, "other").id);
    let new = CreateSchedule::of("@daily", ["true"]).unwrap();
    let foreign = daemon.sandbox(&other).create_schedule(&new).unwrap().id;
    let outside = daemon.sandbox(&id).create_schedule(&new).unwrap().id;
    // Anybody inside may ask, and what is made by whom is told to all of them.
    let add = "su_add() { viv schedule add --cron @hourly --env SECRET=hidden --timeout 1m --disabled -- /bin/true; }";
    let made = inside(&daemon, &id, &format!("{add}; su_add")).trim().to_owned();
    let as_user = StartExecution {
        user: Some("1234".parse().unwrap()),
        ..StartExecution::of(["/bin/sh", "-c", "viv --json schedule ls"]).unwrap()
    };
    let started = daemon.sandbox(&id).start(&as_user, None).unwrap().id;
    let (said, ended) = followed(&daemon, &id, &started);
    assert_eq!(ended, Some(0), "{said}");
    let told: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut expected = [outside.to_string(), made.clone()];
    expected.sort();
    let mut found: Vec<String> = told.iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect();
    found.sort();
    assert_eq!(found, expected);
    assert!(!said.contains("hidden") && said.contains("SECRET"), "values are not told back: {said}");
    let kept = daemon.client().schedule(&made.parse().unwrap()).unwrap();
    assert_eq!((kept.limit_ms, kept.enabled), (Some(60_000), false));
    let table = inside(&daemon, &id, "viv schedule ls");
    assert!(table.contains(&made) && table.contains("disabled") && !table.contains(foreign.as_str()), "{table}");
    // What is another's is not there, for whoever asks inside.
    let said = refused(&daemon, &id, &format!("viv schedule rm {foreign} 2>&1"), 3);
    let never =
        refused(&daemon, &id, &format!("viv schedule rm {} 2>&1", foreign.as_str().replace("sch_", "sch_0")), 3);
    assert!(said.contains("error:") && said.contains("hint:"), "{said}");
    assert_eq!(said.replace("sch_", "sch_0"), never, "and nothing tells it from what never was");
    assert_eq!(ids(&listed(&daemon, &other)), [foreign.as_str()]);
    // Errors are those of outside, and change nothing.
    let said = refused(&daemon, &id, "viv schedule add --cron '61 * * * *' -- true 2>&1", 2);
    assert!(said.contains("minute") && said.contains("hint:"), "{said}");
    let said = refused(&daemon, &id, "viv schedule add --cron @daily --zone Mars/Base -- true 2>&1", 2);
    assert!(said.contains("time zone"), "{said}");
    for body in ["", "{", "{\"stop\": {}}", &format!("{{\"schedule_list\": {{\"sandbox\": \"{other}\"}}}}")] {
        let said = inside(&daemon, &id, &format!("/.vivarium/agent --ask '{body}'"));
        assert!(said.contains("invalid_request") && said.contains("hint"), "{body}: {said}");
    }
    refused(&daemon, &id, "viv schedule add --cron @daily -- echo $(head -c 70000 /dev/zero | tr '\\0' x)", 2);
    // A sandbox has as many as outside, and no more.
    let fill =
        "while viv schedule add --cron @daily -- true >/dev/null 2>/workspace/why; do :; done; cat /workspace/why";
    let said = inside(&daemon, &id, fill);
    assert!(said.contains("64") && said.contains("viv schedule rm"), "{said}");
    assert_eq!(listed(&daemon, &id).len(), 64);
    refused(&daemon, &id, "viv schedule add --cron @daily -- true", 6);
    daemon.remove(&id);
    assert!(listed(&daemon, &other).len() == 1);
    daemon.remove(&other);
    daemon.assert_nothing_left();
}

#[test]
fn j4_without_a_daemon_it_is_said_and_with_the_next_one_it_works() {
    let mut daemon = Daemon::start();
    let id = named(&daemon, "box").id;
    let script = "
        until [ \"$code\" = 7 ]; do viv --wait 500ms schedule ls >/dev/null 2>/tmp/why; code=$?; done
        cat /tmp/why; echo away
        viv --wait 2m schedule add --cron @daily -- true && echo back";
    let started = start(&daemon, &id, script);
    // Until then it is answered.
    inside(&daemon, &id, "viv schedule ls");
    daemon.kill();
    let logs = daemon.instances()[0].join("run/exec").join(started.as_str());
    until("it is told that nobody is there", || {
        let files = std::fs::read_dir(&logs).map_err(|error| error.to_string())?.flatten().map(|file| file.path());
        let written = files.filter(|file| file.extension().is_some_and(|kind| kind == "log"));
        let said: String =
            written.map(|file| String::from_utf8_lossy(&std::fs::read(file).unwrap()).into_owned()).collect();
        if said.contains("away") { Ok(()) } else { Err(said) }
    });
    daemon.restart();
    let (said, ended) = followed(&daemon, &id, &started);
    assert_eq!(ended, Some(0), "{said}");
    assert!(said.contains("nothing was done") && said.trim_end().ends_with("back"), "{said}");
    assert_eq!(listed(&daemon, &id).len(), 1);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn j4_a_daemon_that_dies_before_it_answers_makes_one_schedule() {
    let mut daemon = Daemon::prepare(&[]);
    daemon.run(&[("VIV_FAILPOINT", "inside.done")]);
    let id = named(&daemon, "box").id;
    let adding = start_fatal(&daemon, &id, "viv --wait 2m schedule add --cron @daily -- true");
    daemon.wait();
    daemon.restart();
    let (said, ended) = followed(&daemon, &id, &adding);
    assert_eq!(ended, Some(0), "{said}");
    let schedules = listed(&daemon, &id);
    assert_eq!(ids(&schedules), [said.trim()]);
    assert_eq!(journal(&daemon, &id, "schedule.created").len(), 1);
    // And it is taken away once, which is no error to who asked.
    daemon.end();
    daemon.run(&[("VIV_FAILPOINT", "inside.done")]);
    let removing = start_fatal(&daemon, &id, &format!("viv --wait 2m schedule rm {}", said.trim()));
    daemon.wait();
    daemon.restart();
    let (again, ended) = followed(&daemon, &id, &removing);
    assert_eq!((again.as_str(), ended), (said.as_str(), Some(0)));
    assert_eq!(journal(&daemon, &id, "schedule.removed").len(), 1);
    assert!(listed(&daemon, &id).is_empty());
    refused(&daemon, &id, &format!("viv schedule rm {}", said.trim()), 3);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}
