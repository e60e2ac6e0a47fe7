//! Cleanup in layers, by hand, on a real daemon: what each finds, in which order, and that nothing of value goes (J2).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::held::unmount_root;
use support::kill;
use support::restart::House;
use viv_api::bound::CleanupAgeMs;
use viv_api::cleanup::{BeginCleanup, Cleanup, CleanupLayer};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Status};
use viv_core::SandboxId;

/// Nothing runs by itself, nobody is left alone for being new, and more than 40 % of what there may be is too much.
const BY_HAND: &str = "[sandboxes]\nmax = 10\n[cleanup]\nperiod_s = 86400\nage_period_s = 86400\nfull_period_s = 86400\n\
    leftover_after_s = 0\nunhealthy_after_s = 0\nunhealthy_age_s = 0\nemergency_idle_s = 0\nemergency_above_percent = 40\n";

/// How much older than what is asked for the one is that is too old, at least: a cleanup is asked for in less.
const APART: Duration = Duration::from_secs(10);

/// Persistent ones that are idle.
const IDLE: usize = 5;

fn house() -> Daemon {
    Daemon::in_house(House::with_config(BY_HAND)).running()
}

/// A persistent sandbox with a file of its own.
fn kept(daemon: &Daemon, name: &str) -> SandboxId {
    let request: CreateSandbox = serde_json::from_value(serde_json::json!({ "name": name })).unwrap();
    let made = daemon.create_from(&request);
    let (_, end) = run(&daemon.sandbox(&made.id), &format!("echo {name} > /workspace/file && sync /workspace/file"));
    assert_eq!(end.exit_code, Some(0), "{end:?}");
    made.id
}

fn still_has_its_file(daemon: &Daemon, id: &SandboxId, name: &str) {
    daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(run(&daemon.sandbox(id), "cat /workspace/file").0, format!("{name}\n"));
}

/// One that is lost, and nobody's.
fn leftover(daemon: &Daemon) -> SandboxId {
    let left = daemon.create().id;
    kill(daemon.host(&left).shim_pid.unwrap(), Signal::KILL);
    daemon.wait_for(&left, "it is lost", |sandbox| sandbox.status == Status::Lost);
    left
}

/// One that is persistent, lives, and is found unwell.
fn unwell(daemon: &Daemon, name: &str) -> SandboxId {
    let id = kept(daemon, name);
    unmount_root(&daemon.host(&id));
    support::eventually_within(PATIENCE, "its damage is found", || {
        let _ = daemon.sandbox(&id).verify();
        daemon.sandbox(&id).get().unwrap().status == Status::Lost
    });
    id
}

/// Who cleans up.
#[derive(Debug, Clone, Copy)]
enum By {
    Command,
    Api,
}

impl By {
    fn cleans(self, daemon: &Daemon, asked: &BeginCleanup) -> Cleanup {
        let mut command = daemon.viv();
        match self {
            Self::Api => return daemon.client().clean_up(asked).unwrap(),
            Self::Command => command.args(["--json", "cleanup"]),
        };
        command.args(asked.layers.iter().flat_map(|layer| ["--layer", layer.as_str()]));
        command.args(asked.age_max_ms.iter().flat_map(|ms| ["--older-than".to_owned(), format!("{}ms", ms.get())]));
        command.args(asked.emergency.then_some("--emergency"));
        command.args(asked.dry_run.then_some("--dry-run"));
        let said = command.output().unwrap();
        assert!(said.status.success(), "{asked:?}: {}", String::from_utf8_lossy(&said.stderr));
        serde_json::from_slice(&said.stdout).unwrap()
    }
}

/// Layer, action and outcome of each, in their order.
fn seen(done: &Cleanup) -> Vec<(&SandboxId, &str, &str, &str)> {
    let words = done.items.iter();
    words.map(|item| (&item.sandbox, item.layer.as_str(), item.action.as_str(), item.outcome.as_str())).collect()
}

fn statuses(daemon: &Daemon, all: &[&SandboxId]) -> BTreeMap<SandboxId, Status> {
    all.iter().map(|id| ((*id).clone(), daemon.sandbox(id).get().unwrap().status)).collect()
}

/// So long ago.
fn since(began: Instant) -> Option<CleanupAgeMs> {
    CleanupAgeMs::new(began.elapsed().as_millis() as u64).ok()
}

#[test]
fn j2_all_layers_by_hand_say_what_they_would_do_then_do_it_in_order_and_lose_no_file() {
    let daemon = house();
    let aged = kept(&daemon, "aged");
    let aged_at = Instant::now();
    let left = leftover(&daemon);
    let sick = unwell(&daemon, "sick");
    // Between the one and the others, with time on both sides, however loaded the machine is.
    support::eventually_within(PATIENCE, "it is much older than the others", || aged_at.elapsed() >= 2 * APART);
    let apart = aged_at.elapsed() / 2;
    let others_at = Instant::now();
    let idle: Vec<SandboxId> = (0..IDLE).map(|number| kept(&daemon, &format!("idle-{number}"))).collect();
    let all: Vec<&SandboxId> = [&aged, &left, &sick].into_iter().chain(&idle).collect();
    let before = (statuses(&daemon, &all), daemon.instances().len());

    let asked = |dry_run| {
        let age_max_ms = since(others_at.checked_sub(apart).unwrap());
        BeginCleanup { emergency: true, dry_run, age_max_ms, ..BeginCleanup::default() }
    };
    // Eight of ten are there. Three go by the layers before, so one of the idle ones has to: four tenths are left.
    let found = |outcome: &'static str| {
        vec![
            (&sick, "unhealthy", "hibernate", outcome),
            (&left, "leftovers", "stop", outcome),
            (&aged, "age", "hibernate", outcome),
            (&idle[0], "emergency", "hibernate", outcome),
        ]
    };
    let mut would = By::Command.cleans(&daemon, &asked(true));
    support::eventually_within(PATIENCE, "nobody used them a moment ago", || {
        would = By::Command.cleans(&daemon, &asked(true));
        would.items.iter().all(|item| item.outcome == "planned")
    });
    assert_eq!(seen(&would), found("planned"), "{would:#?}");
    assert_eq!((would.dry_run, would.found, would.done, would.failed), (true, 4, 0, 0), "{would:#?}");
    assert_eq!((statuses(&daemon, &all), daemon.instances().len()), before, "nothing was done");

    let did = By::Command.cleans(&daemon, &asked(false));
    assert_eq!(seen(&did), found("done"), "{did:#?}");
    assert_eq!((did.dry_run, did.found, did.done, did.failed), (false, 4, 4, 0), "{did:#?}");
    for (id, status) in [
        (&sick, Status::Hibernated),
        (&left, Status::Stopped),
        (&aged, Status::Hibernated),
        (&idle[0], Status::Hibernated),
    ] {
        daemon.wait_for(id, "it is done", |sandbox| sandbox.status == status);
    }
    for id in &idle[1..] {
        assert_ne!(daemon.sandbox(id).get().unwrap().status, Status::Hibernated, "it did not have to go");
    }
    let again = By::Command.cleans(&daemon, &asked(true));
    assert_eq!(again.found, 0, "there is room: {again:#?}");
    // What was told in advance is what was done.
    let told = daemon.viv().args(["--json", "events", "--kind", "cleanup.found"]).output().unwrap();
    let told: Vec<serde_json::Value> =
        String::from_utf8(told.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let acted = told.iter().rfind(|line| line["data"]["dry_run"] == false).expect("it was told");
    let named: Vec<&str> =
        acted["data"]["items"].as_array().unwrap().iter().map(|item| item["sandbox"].as_str().unwrap()).collect();
    assert_eq!(named, [&sick, &left, &aged, &idle[0]].map(SandboxId::as_str), "{acted:#}");

    still_has_its_file(&daemon, &aged, "aged");
    still_has_its_file(&daemon, &sick, "sick");
    for (number, id) in idle.iter().enumerate() {
        still_has_its_file(&daemon, id, &format!("idle-{number}"));
    }
    for id in [&aged, &sick].into_iter().chain(&idle) {
        daemon.remove(id);
    }
}

#[test]
fn j2_each_layer_by_itself_finds_its_own_and_nothing_else() {
    let daemon = house();
    for by in [By::Command, By::Api] {
        let left = leftover(&daemon);
        let sick = unwell(&daemon, &format!("sick-{by:?}").to_lowercase());
        let idle: Vec<SandboxId> =
            (0..3).map(|number| kept(&daemon, &format!("idle-{by:?}-{number}").to_lowercase())).collect();
        let layer = |layer| BeginCleanup { layers: vec![layer], ..BeginCleanup::default() };
        let ready: BTreeSet<SandboxId> = idle.iter().cloned().collect();

        // Five of ten are more than four tenths: the one that was not used for longest, and it alone.
        let mut did = by.cleans(&daemon, &BeginCleanup { dry_run: true, ..layer(CleanupLayer::Emergency) });
        support::eventually_within(PATIENCE, "nobody used them a moment ago", || {
            did = by.cleans(&daemon, &BeginCleanup { dry_run: true, ..layer(CleanupLayer::Emergency) });
            did.items.iter().all(|item| item.outcome == "planned")
        });
        assert_eq!(seen(&did), [(&idle[0], "emergency", "hibernate", "planned")], "{by:?}: {did:#?}");

        let did = by.cleans(&daemon, &layer(CleanupLayer::Unhealthy));
        assert_eq!(seen(&did), [(&sick, "unhealthy", "hibernate", "done")], "{by:?}: {did:#?}");
        daemon.wait_for(&sick, "it is saved", |sandbox| sandbox.status == Status::Hibernated);

        let did = by.cleans(&daemon, &layer(CleanupLayer::Leftovers));
        assert_eq!(seen(&did), [(&left, "leftovers", "stop", "done")], "{by:?}: {did:#?}");
        daemon.wait_for(&left, "it is over", |sandbox| sandbox.status == Status::Stopped);

        let did = by.cleans(&daemon, &layer(CleanupLayer::Age));
        assert_eq!(did.found, 0, "nothing is too old, as it is set: {by:?}: {did:#?}");
        let old = BeginCleanup { age_max_ms: CleanupAgeMs::new(1).ok(), ..layer(CleanupLayer::Age) };
        support::eventually_within(PATIENCE, "they are old, and nobody uses them", || {
            let did = by.cleans(&daemon, &old);
            assert!(did.items.iter().all(|item| item.layer == "age" && ready.contains(&item.sandbox)), "{did:#?}");
            did.found == 0
        });
        for id in &idle {
            daemon.wait_for(id, "it is saved", |sandbox| sandbox.status == Status::Hibernated);
        }
        let did = by.cleans(&daemon, &layer(CleanupLayer::Emergency));
        assert_eq!(did.found, 0, "there is room: {by:?}: {did:#?}");
        for id in idle.iter().chain([&sick]) {
            daemon.remove(id);
        }
    }
    let refused = daemon.viv().args(["cleanup", "--layer", "everything"]).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("the layers are unhealthy, leftovers, age, emergency"),
        "{said}"
    );
    let refused = daemon.viv().args(["cleanup", "--layer", "age", "--older-than", "0s"]).output().unwrap();
    assert!(!refused.status.success(), "everything is older than nothing: {refused:?}");
}
