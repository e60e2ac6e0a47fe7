//! The causes of the runbook, staged for real: each is seen, told, named, and its remedy works (O3, O5, J3).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::diagnosed::{diagnosed, remedy, start};
use support::held::{Hold, unmount_root};
use support::restart::House;
use support::{kill, mutation};
use viv_api::alert::AlertState;
use viv_api::cleanup::BeginCleanup;
use viv_api::client::Client;
use viv_api::diagnosis::Diagnosis;
use viv_api::execution::StartExecution;
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Status};
use viv_core::SandboxId;
use viv_engine::alert::RULES;
use viv_provider::Provider;

/// Judged every second, told at once.
const QUICK: &str = "[alerts]\nperiod_s = 1\nresolve_after_s = 1\nstuck_after_s = 2\n\
    rules = { sandbox_stuck = { for_s = 0 }, cleanup_failing = { for_s = 0 } }\n";

fn house(more: &str) -> Daemon {
    let mut daemon = Daemon::in_house(House::with_config(&format!("{QUICK}{more}")));
    daemon.run(&[]);
    daemon
}

fn state(client: &Client, name: &str) -> AlertState {
    let all = client.alerts().unwrap().items;
    all.iter().find(|alert| alert.name == name).unwrap_or_else(|| panic!("there is no {name}: {all:#?}")).state
}

/// Waits until an alert fires, or does not.
fn wait_for(daemon: &Daemon, name: &str, fires: bool) {
    let until = Instant::now() + PATIENCE;
    while (state(daemon.client(), name) == AlertState::Firing) != fires {
        let all = daemon.client().alerts().unwrap().items;
        assert!(Instant::now() < until, "{name} does not become so: {all:#?}\n{}", daemon.said());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn kinds(daemon: &Daemon, alert: &str) -> Vec<String> {
    let (mut query, mut found) = (ListEvents::default(), Vec::new());
    loop {
        let page = daemon.client().events(&query).unwrap();
        let about = page.items.into_iter().filter(|event| event.kind.starts_with("alert."));
        found.extend(
            about.filter(|event| event.message.contains(alert) || event.data["alert"] == alert).map(|event| event.kind),
        );
        if !page.more {
            return found;
        }
        query.after = Some(page.next_after.to_string().parse().unwrap());
    }
}

#[test]
fn o3_cause_1_an_endless_loop_is_seen_spinning_and_ended() {
    let daemon = house("");
    let made = daemon.create();
    start(&daemon, &made.id, &["/bin/sh", "-c", "while :; do :; done"]);
    wait_for(&daemon, "sandbox_stuck", true);
    let (found, words) = diagnosed(&daemon, &made.id, "spinning");
    assert!(words.contains("(sh)"), "{words}");
    let said = daemon.viv().args(["doctor", made.id.as_str()]).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("spinning") && said.contains("  try: viv cancel "), "{said}");
    remedy(&daemon, &found, "spinning");
    wait_for(&daemon, "sandbox_stuck", false);
    assert_eq!(kinds(&daemon, "sandbox_stuck"), ["alert.firing", "alert.resolved"]);
    daemon.remove(&made.id);
}

#[test]
fn o3_cause_2_a_call_that_hangs_is_named_with_its_descriptor() {
    let daemon = house("");
    let made = daemon.create();
    let hangs = "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n\
                 c = socket.create_connection(s.getsockname())\nc.recv(1)";
    start(&daemon, &made.id, &["/usr/bin/python3", "-c", hangs]);
    wait_for(&daemon, "sandbox_stuck", true);
    let (found, words) = diagnosed(&daemon, &made.id, "waiting");
    assert!(words.contains("waits in recvfrom on descriptor 4, a connection to 127.0.0.1:"), "{words}");
    remedy(&daemon, &found, "waiting");
    wait_for(&daemon, "sandbox_stuck", false);
    daemon.remove(&made.id);
}

/// As it is named in the runbook: nobody cleans up, and nothing fails.
#[test]
fn j3_cause_3_a_cleanup_that_hangs_is_an_alert_that_names_it_and_is_done_by_hand() {
    let hold = Hold::at("cleanup.due");
    let config = format!("{QUICK}[cleanup]\nperiod_s = 1\nleftover_after_s = 0\n");
    let mut daemon = Daemon::in_house(House::with_config(&config));
    daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
    support::eventually_within(PATIENCE, "it hangs", || hold.is_reached(1));
    let left = daemon.create().id;
    kill(daemon.host(&left).shim_pid.unwrap(), Signal::KILL);
    daemon.wait_for(&left, "it is lost", |sandbox| sandbox.status == Status::Lost);
    wait_for(&daemon, "cleanup_failing", true);
    let said = daemon.client().doctor().unwrap();
    let overdue = said.findings.iter().find(|finding| finding.code == "reconciler_overdue");
    let overdue = overdue.unwrap_or_else(|| panic!("{:#?}", said.findings));
    assert!(overdue.message.starts_with("cleanup should have run "), "{overdue:#?}");
    assert_eq!(overdue.command.as_deref(), Some("viv cleanup"));
    // Which one, and that the others run, is in the table, and for programs.
    let late: Vec<&str> = said.reconcilers.iter().filter(|one| one.overdue).map(|one| one.name.as_str()).collect();
    assert_eq!(late, ["cleanup"], "{:#?}", said.reconcilers);
    let viv = |words: &[&str]| {
        let said = daemon.viv().args(words).output().unwrap();
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    let table = viv(&["doctor"]);
    let row = |name: &str| {
        let row = table.lines().map(str::trim).find(|line| line.starts_with(name) && line.contains("  "));
        row.unwrap_or_else(|| panic!("{name} is not in\n{table}")).to_owned()
    };
    assert!(row("RECONCILER").contains("FOUND") && row("cleanup ").contains("OVERDUE"), "{table}");
    assert!(row("alerts ").contains(" in ") || row("alerts ").contains("OVERDUE"), "{table}");
    let program: serde_json::Value = serde_json::from_str(&viv(&["doctor", "--json"])).unwrap();
    let all = program["daemon"]["reconcilers"].as_array().unwrap();
    assert!(
        all.iter().any(|one| one["name"] == "cleanup" && one["overdue"] == true && one["runs_total"] == 0),
        "{all:#?}"
    );
    assert_eq!(daemon.sandbox(&left).get().unwrap().status, Status::Lost, "nobody cleans up");
    // The remedy waits for nobody who hangs.
    let did = viv(&["cleanup"]);
    assert!(did.contains(left.as_str()), "{did}");
    daemon.wait_for(&left, "it is over", |sandbox| sandbox.status == Status::Stopped);
    hold.open();
    wait_for(&daemon, "cleanup_failing", false);
}

#[test]
fn j3_incident_39_cause_3_a_cleanup_that_does_not_work_is_an_alert() {
    let daemon = house("[reconcile]\nprovider_sync_s = 1\n[cleanup]\nperiod_s = 3600\nleftover_after_s = 0\n");
    let (made, left) = (daemon.create(), daemon.create().id);
    kill(daemon.host(&left).shim_pid.unwrap(), Signal::KILL);
    daemon.wait_for(&left, "it is lost", |sandbox| sandbox.status == Status::Lost);
    assert_eq!(state(daemon.client(), "cleanup_failing"), AlertState::Inactive);
    // What it looks through is not there.
    let (folder, aside) = (daemon.data.join("sandboxes/instances"), daemon.data.join("sandboxes/aside"));
    std::fs::rename(&folder, &aside).unwrap();
    wait_for(&daemon, "cleanup_failing", true);
    let findings = daemon.client().doctor().unwrap().findings;
    assert!(findings.iter().any(|finding| finding.code == "reconciler_failing"), "{findings:#?}");
    assert!(findings.iter().any(|finding| finding.code == "alert_cleanup_failing"), "{findings:#?}");
    let viv = |words: &[&str]| {
        let said = daemon.viv().args(words).output().unwrap();
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    // What does not run is named, with why; what it says to begin with says so too.
    let said = viv(&["doctor"]);
    assert!(said.contains("RECONCILER ") && said.contains("\n    provider-sync "), "when each ran: {said}");
    let place = folder.display().to_string();
    assert!(said.contains("provider-sync did not run through") && said.contains(&place), "{said}");
    let failing = findings.iter().find(|finding| finding.code == "reconciler_failing").unwrap();
    let command = failing.command.as_deref().expect("it names one");
    let log = viv(&command.split_whitespace().skip(1).collect::<Vec<_>>());
    assert!(log.contains("provider-sync") && log.contains(&place), "{log}");
    std::fs::rename(&aside, &folder).unwrap();
    wait_for(&daemon, "cleanup_failing", false);
    // The remedy of the runbook: what nobody has cleaned up is, by hand.
    let would = viv(&["cleanup", "--dry-run"]);
    assert!(would.contains(left.as_str()), "{would}");
    assert_eq!(daemon.sandbox(&left).get().unwrap().status, Status::Lost, "nothing was done");
    let did = viv(&["cleanup"]);
    assert!(did.contains(left.as_str()), "{did}");
    daemon.wait_for(&left, "it is over", |sandbox| sandbox.status == Status::Stopped);
    let alive = daemon.sandbox(&made.id).get().unwrap();
    assert_ne!(alive.status, Status::Lost, "a listing that fails says nothing about who is there (T7)");
    daemon.wait_for(&made.id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    daemon.remove(&made.id);
}

#[test]
fn o5_cause_4_several_that_are_recorded_and_not_there_are_an_alert() {
    let daemon = house("");
    let made: Vec<SandboxId> = (0..3).map(|_| daemon.create().id).collect();
    for id in &made {
        let host = daemon.host(id);
        let shim = host.shim_pid.unwrap();
        kill(shim, Signal::KILL);
    }
    wait_for(&daemon, "several_corrupted", true);
    for id in &made {
        let (_, words) = diagnosed(&daemon, id, "lost");
        assert!(words.contains("supervisor_lost") || words.contains("crashed"), "{words}");
        daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
        let again = daemon.wait_for(id, "it is ready", |sandbox| sandbox.status == Status::Ready);
        assert_eq!(again.generation.0, 2);
        daemon.remove(id);
    }
}

/// The instance is taken away beside the daemon: what is recorded as running is not there.
#[tokio::test]
async fn o3_cause_4_what_is_recorded_and_was_taken_away_is_told_and_its_remedy_works() {
    let mut daemon = Daemon::in_house(House::with_config(
        "[alerts]\nperiod_s = 1\nresolve_after_s = 1\n[alerts.rules.several_corrupted]\nabove = 0\n",
    ));
    daemon.run(&[]);
    let made = daemon.create();
    let lock = daemon.sandbox(&made.id).diagnosis().unwrap().locks.lifecycle;
    let token = lock.map_or(1_000, |lock| lock.token);
    daemon.provider().destroy(&mutation(made.generation.0, token), &made.id).await.unwrap();
    wait_for(&daemon, "several_corrupted", true);
    let (found, _) = diagnosed(&daemon, &made.id, "lost");
    let said = |words: &[&str]| {
        let said = daemon.viv().args(words).output().unwrap();
        assert!(said.status.success(), "{words:?}: {}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    let doctor = said(&["doctor", made.id.as_str()]);
    assert!(doctor.contains("critical: its instance ended") && doctor.contains("  try: viv ensure "), "{doctor}");
    assert!(said(&["doctor"]).contains("several_corrupted"));
    // Nothing else is wrong: neither side has what the other one misses.
    assert!(said(&["audit"]).contains("nothing is left over"), "{}", said(&["audit"]));
    said(&["reconcile"]);
    remedy(&daemon, &found, "lost");
    let again = daemon.wait_for(&made.id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(again.generation.0, made.generation.0 + 1);
    daemon.remove(&made.id);
}

/// The two that the runbook of old begins with, on a daemon with small numbers.
#[test]
fn o5_too_many_that_are_active_and_too_many_that_run_into_their_deadline_are_alerts() {
    let mut daemon = Daemon::in_house(House::with_config(
        "[alerts]\nperiod_s = 1\nresolve_after_s = 1\n\
         [alerts.rules.sandbox_leak_detected]\nabove = 1\nfor_s = 0\n\
         [alerts.rules.sandbox_timeout_high]\nfor_s = 0\n",
    ));
    daemon.run(&[]);
    let first = daemon.create();
    assert_eq!(state(daemon.client(), "sandbox_leak_detected"), AlertState::Inactive);
    let brief: CreateSandbox =
        serde_json::from_value(serde_json::json!({ "policy": { "lifetime_ms": 5_000 } })).unwrap();
    let brief = daemon.create_from(&brief);
    wait_for(&daemon, "sandbox_leak_detected", true);
    let over = daemon.wait_for(&brief.id, "its time is over", |sandbox| sandbox.status == Status::Stopped);
    assert!(over.cause.is_some());
    wait_for(&daemon, "sandbox_timeout_high", true);
    wait_for(&daemon, "sandbox_leak_detected", false);
    assert_eq!(kinds(&daemon, "sandbox_leak_detected"), ["alert.firing", "alert.resolved"]);
    let shown = String::from_utf8(daemon.viv().arg("alerts").output().unwrap().stdout).unwrap();
    assert!(shown.contains("sandbox_timeout_high") && shown.contains("viv events --cause expired"), "{shown}");
    let told = daemon.viv().args(["events", "--cause", "expired"]).output().unwrap();
    assert!(String::from_utf8(told.stdout).unwrap().contains(brief.id.as_str()), "what it says to begin with helps");
    daemon.remove(&first.id);
    daemon.remove(&brief.id);
}

#[test]
fn l18_cause_5_a_limit_that_is_used_up_is_an_alert_and_goes_away() {
    let daemon = house("[sandboxes]\nmax = 1\n[cleanup]\nemergency_idle_s = 0\n");
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": "kept" })).unwrap();
    let made = daemon.create_from(&request);
    wait_for(&daemon, "quota_exhausted", true);
    let refused = daemon.client().create(&CreateSandbox::default(), None).unwrap_err();
    assert_eq!(refused.code().map(|code| code.to_string()).as_deref(), Some("quota_exceeded"));
    let stats = daemon.viv().arg("stats").output().unwrap();
    let stats = String::from_utf8(stats.stdout).unwrap();
    assert!(stats.starts_with("critical: quota_exhausted: a quota is used up: sandboxes 1 of 1, 100.0 %"), "{stats}");
    let shown = daemon.viv().arg("alerts").output().unwrap();
    assert!(String::from_utf8(shown.stdout).unwrap().contains("quota_exhausted"));
    let doctor = String::from_utf8(daemon.viv().arg("doctor").output().unwrap().stdout).unwrap();
    assert!(doctor.contains("a quota is used up: sandboxes 1 of 1,"), "{doctor}");
    let told = daemon.viv().args(["events", "--kind", "alert.firing", "--json"]).output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("\"most\":\"sandboxes 1 of 1\""), "{told}");
    // The remedy of the runbook: what is idle is put to rest, and there is room.
    support::eventually_within(PATIENCE, "there is room", || {
        let done = daemon.viv().args(["cleanup", "--emergency"]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        daemon.sandbox(&made.id).get().unwrap().status == Status::Hibernated
    });
    wait_for(&daemon, "quota_exhausted", false);
    daemon.remove(&daemon.create().id);
    daemon.remove(&made.id);
}

/// Each command of the runbook, as it stands there, in its order.
#[test]
fn o3_the_runbook_runs() {
    let daemon = house("");
    let name = "runbook";
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": name })).unwrap();
    daemon.create_from(&request);
    let sandbox = daemon.client().sandbox(name.parse::<viv_api::bound::SandboxRef>().unwrap());
    let sleeping = sandbox.start(&StartExecution::of(["/bin/sleep", "1000"]).unwrap(), None).unwrap();
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/runbook.md");
    let page = std::fs::read_to_string(page).unwrap();
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let commands: Vec<&str> = blocks.flat_map(str::lines).filter(|line| !line.is_empty()).collect();
    assert!(commands.len() >= 20, "{commands:?}");
    let folder = tempfile::tempdir().unwrap();
    for command in commands {
        let words: Vec<String> = command
            .split_whitespace()
            .map(|word| match word {
                "SANDBOX" => name.to_owned(),
                "EXECUTION" => sleeping.id.to_string(),
                "REPORT" | "REPORT-2" => folder.path().join(word).display().to_string(),
                word => word.to_owned(),
            })
            .collect();
        assert_eq!(words[0], "viv", "{command}");
        let done = daemon.viv().args(&words[1..]).output().unwrap();
        assert!(done.status.success(), "{command}: {}", String::from_utf8_lossy(&done.stderr));
    }
    assert_eq!(daemon.instances(), Vec::<std::path::PathBuf>::new());
    for report in ["REPORT", "REPORT-2"] {
        let about = folder.path().join(report);
        let text = |name: &str| std::fs::read_to_string(about.join(name)).unwrap();
        assert!(text("metrics.txt").contains("\nviv_sandboxes_created_total 1\n"), "{}", text("metrics.txt"));
        assert!(text("events.jsonl").contains("sandbox.created"));
        assert!(text("version.json").contains("\"commit\"") && text("daemon-log.json").contains("\"items\""));
        let sandbox = std::fs::read_dir(&about).unwrap().map(|entry| entry.unwrap().path()).find(|path| path.is_dir());
        let sandbox = sandbox.expect("a folder of its own");
        let diagnosis = std::fs::read(sandbox.join("diagnosis.json")).unwrap();
        assert_eq!(serde_json::from_slice::<Diagnosis>(&diagnosis).unwrap().sandbox.name.as_deref(), Some(name));
        assert!(std::fs::read_to_string(sandbox.join("timeline.json")).unwrap().contains("hibernated"));
        assert!(sandbox.join("logs.json").exists());
        let states = std::fs::read(sandbox.join("before-after.json")).unwrap();
        let states: serde_json::Value = serde_json::from_slice(&states).unwrap();
        // Of one, before its last change; of all of the last hour, it was not there before.
        assert_eq!(states["before"].is_object(), report == "REPORT", "{states:#}");
        assert!(states["after"]["phase"].is_string(), "{states:#}");
    }
}

/// What each alert says to begin with can be typed as it stands, and answers on a daemon on which nothing is wrong.
#[test]
fn o5_each_command_that_an_alert_names_runs() {
    let daemon = house("");
    let made = daemon.create();
    let all = daemon.client().alerts().unwrap().items;
    let names: BTreeSet<&str> = all.iter().map(|alert| alert.name.as_str()).collect();
    assert_eq!(names, RULES.iter().map(|rule| rule.name).collect(), "each rule is told of");
    let commands: BTreeSet<&str> = all.iter().map(|alert| alert.command.as_str()).collect();
    for command in commands {
        let mut words = command.split_whitespace().map(|word| if word == "SANDBOX" { made.id.as_str() } else { word });
        assert_eq!(words.next(), Some("viv"), "{command}");
        let done = daemon.viv().args(words.clone()).output().unwrap();
        let (said, why) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert_eq!(done.status.code(), Some(0), "{command}: {said}{why}");
        // What an operator reads is there for programs too.
        let done = daemon.viv().arg("--json").args(words).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "--json of {command}: {}", String::from_utf8_lossy(&done.stderr));
        let text = String::from_utf8(done.stdout).unwrap();
        let read: Result<Vec<serde_json::Value>, _> = serde_json::Deserializer::from_str(&text).into_iter().collect();
        assert!(read.is_ok(), "--json of {command}: {text}");
    }
    daemon.remove(&made.id);
}

/// A persistent sandbox with a file in it.
fn with_file(daemon: &Daemon, name: &str) -> SandboxId {
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": name })).unwrap();
    let made = daemon.create_from(&request);
    let (_, end) = run(&daemon.sandbox(&made.id), "echo precious > /workspace/file && sync /workspace/file");
    assert_eq!(end.exit_code, Some(0), "{end:?}");
    made.id
}

fn still_has_file(daemon: &Daemon, id: &SandboxId) {
    daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(run(&daemon.sandbox(id), "cat /workspace/file").0, "precious\n");
}

#[test]
fn j2_emergency_cleanup_says_what_it_would_do_and_loses_no_persistent_file() {
    let daemon = house("[sandboxes]\nmax = 2\n[cleanup]\nemergency_idle_s = 0\n");
    let kept = with_file(&daemon, "kept");
    let busy = daemon.create().id;
    start(&daemon, &busy, &["/bin/sleep", "1000"]);
    let clean = |dry_run| {
        daemon.client().clean_up(&BeginCleanup { emergency: true, dry_run, ..BeginCleanup::default() }).unwrap()
    };
    // Whoever used it a moment ago uses it still, and a dry run says so too.
    let mut would = clean(true);
    support::eventually_within(PATIENCE, "it would be done", || {
        would = clean(true);
        would.items.iter().any(|item| item.outcome == "planned")
    });
    assert_eq!((would.found, would.done), (1, 0), "who works need not be asked: {would:#?}");
    assert_eq!((&would.items[0].sandbox, would.items[0].action.as_str()), (&kept, "hibernate"), "{would:#?}");
    assert_eq!(daemon.instances().len(), 2, "nothing was done");
    let until = Instant::now() + PATIENCE;
    loop {
        let did = clean(false);
        if did.done == 1 {
            assert_eq!(did.items[0].outcome, "done", "{did:#?}");
            break;
        }
        assert!(did.items.iter().all(|item| item.outcome == "in_use"), "{did:#?}");
        assert!(Instant::now() < until, "{did:#?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    daemon.wait_for(&kept, "it is saved", |sandbox| sandbox.status == Status::Hibernated);
    assert_eq!(clean(false).found, 0, "there is room");
    still_has_file(&daemon, &kept);
    daemon.remove(&kept);
    daemon.remove(&busy);
    let said = daemon.viv().args(["events", "--kind", "cleanup"]).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    for kind in ["cleanup.started", "cleanup.found", "cleanup.item", "cleanup.completed"] {
        assert!(said.contains(kind), "{said}");
    }
}

#[test]
fn j2_who_works_is_left_alone_however_little_is_left_and_who_does_not_is_saved_by_itself() {
    let daemon = house("[sandboxes]\nmax = 1\n[cleanup]\nperiod_s = 1\nemergency_idle_s = 10\n");
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": "kept" })).unwrap();
    let kept = daemon.create_from(&request).id;
    let sandbox = daemon.sandbox(&kept);
    let works = sandbox.start(&StartExecution::of(["/bin/sleep", "1000"]).unwrap(), None).unwrap();
    let until = Instant::now() + PATIENCE;
    loop {
        let done = daemon.client().clean_up(&BeginCleanup { emergency: true, ..BeginCleanup::default() }).unwrap();
        if done.items.iter().any(|item| item.sandbox == kept && item.outcome == "in_use") {
            break;
        }
        assert_eq!(done.done, 0, "something runs in it: {done:#?}");
        assert!(Instant::now() < until, "it was not found");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_ne!(sandbox.get().unwrap().status, Status::Hibernated);
    sandbox.execution(works.id).cancel().unwrap();
    daemon.wait_for(&kept, "it is saved", |sandbox| sandbox.status == Status::Hibernated);
    daemon.remove(&kept);
}

#[test]
fn j2_leftovers_of_what_is_lost_go_and_what_is_persistent_stays() {
    let daemon = house("[cleanup]\nleftover_after_s = 0\n");
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": "kept" })).unwrap();
    let (gone, kept) = (daemon.create().id, daemon.create_from(&request).id);
    for id in [&gone, &kept] {
        kill(daemon.host(id).shim_pid.unwrap(), Signal::KILL);
        daemon.wait_for(id, "it is lost", |sandbox| sandbox.status == Status::Lost);
    }
    let done = daemon.client().clean_up(&BeginCleanup::default()).unwrap();
    assert_eq!((done.found, done.done, done.failed), (1, 1, 0), "{done:#?}");
    assert_eq!((&done.items[0].sandbox, done.items[0].action.as_str()), (&gone, "stop"), "{done:#?}");
    daemon.wait_for(&gone, "it is over", |sandbox| sandbox.status == Status::Stopped);
    assert_eq!(daemon.sandbox(&kept).get().unwrap().status, Status::Lost, "nobody decided about it");
    daemon.remove(&kept);
}

/// How often cleanups were made by themselves.
fn cleanups(daemon: &Daemon) -> u64 {
    let all = daemon.client().reconcilers().unwrap().items;
    all.iter().find(|one| one.name == "cleanup").map_or(0, |one| one.runs_total)
}

/// What ended for being unwell says so, with what was found.
fn assert_ended_with_evidence(daemon: &Daemon, id: &SandboxId, status: Status) {
    let over = daemon.wait_for(id, "it is given up", |sandbox| sandbox.status == status);
    let said = |words: &[&str]| {
        let said = daemon.viv().args(words).arg(id.as_str()).output().unwrap();
        String::from_utf8(said.stdout).unwrap()
    };
    // What was saved says that it was.
    if status == Status::Stopped {
        assert_eq!(over.cause.unwrap().code, "unhealthy");
        assert!(said(&["show"]).contains("unhealthy"), "{}", said(&["show"]));
    }
    let query = ListEvents { sandbox: Some(id.as_str().parse().unwrap()), ..ListEvents::default() };
    let events = daemon.client().events(&query).unwrap().items;
    let ended = events
        .iter()
        .find(|event| event.cause.as_ref().is_some_and(|cause| cause.code == "unhealthy"))
        .expect("it is told");
    assert_eq!(ended.data["evidence"]["filesystem"]["finding"], "unhealthy", "{ended:#?}");
    let item = events.iter().find(|event| event.kind == "cleanup.item").expect("and by whom");
    assert!(item.data["why"].as_str().is_some_and(|why| why.starts_with("unwell for")), "{item:#?}");
    assert!(said(&["timeline"]).contains("unhealthy"), "{}", said(&["timeline"]));
}

#[test]
fn j2_what_is_unwell_is_left_and_shown_while_it_is_young_and_ended_with_the_evidence_when_it_is_old() {
    let ages = |age_s: u64| {
        format!("[cleanup]\nperiod_s = 1\nunhealthy_after_s = 0\nunhealthy_age_s = {age_s}\nleftover_after_s = 3600\n")
    };
    let mut daemon = house(&ages(3_600));
    let (kept, passing) = (with_file(&daemon, "kept"), daemon.create().id);
    // Nobody reads them: whoever cleans up looks.
    for id in [&kept, &passing] {
        unmount_root(&daemon.host(id));
    }
    for id in [&kept, &passing] {
        let lost = daemon.wait_for(id, "its damage is found", |sandbox| sandbox.status == Status::Lost);
        assert_eq!(lost.cause.unwrap().code, "probe_failed");
    }
    let runs = cleanups(&daemon);
    support::eventually_within(PATIENCE, "it was looked at again", || cleanups(&daemon) >= runs + 2);
    for id in [&kept, &passing] {
        assert_eq!(daemon.sandbox(id).get().unwrap().status, Status::Lost, "it is young");
        let said = String::from_utf8(daemon.viv().args(["show", id.as_str()]).output().unwrap().stdout).unwrap();
        assert!(said.contains("probe_failed"), "{said}");
        let found = daemon.sandbox(id).diagnosis().unwrap().findings;
        let mount = found.iter().find(|finding| finding.code == "broken_mount").unwrap_or_else(|| panic!("{found:#?}"));
        assert_eq!(mount.command.as_deref(), Some(format!("viv stop {id}").as_str()));
    }
    assert_eq!(daemon.instances().len(), 2, "nothing was ended");

    daemon.end();
    daemon.configure(&format!("{QUICK}{}", ages(1)));
    daemon.restart();
    assert_ended_with_evidence(&daemon, &kept, Status::Hibernated);
    assert_ended_with_evidence(&daemon, &passing, Status::Stopped);
    // It was saved first: its file is in what it goes on from.
    still_has_file(&daemon, &kept);
    daemon.remove(&kept);
    daemon.remove(&passing);
    daemon.assert_nothing_left();
}
