//! `viv selftest` as a user runs it, on a real daemon: well when all is well, also while the daemon is killed, and not
//! when something is broken.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use support::daemon::Daemon;
use support::{Chance, kill};
use tempfile::NamedTempFile;
use viv_api::query::ListSandboxes;
use viv_api::sandbox::Sandbox;

/// Rounds on an undisturbed daemon; `make storms` says more.
const ROUNDS: u64 = 2;

/// Rounds under a daemon that is killed.
const ROUNDS_KILLED: u64 = 2;

/// How often it is killed in a round at most: on a loaded machine nothing would get done between one and the next.
const KILLS_MAX: u64 = 10;

fn rounds(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}

fn lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{text}"))).collect()
}

/// One that goes on while something is done to its daemon. What it says goes to a file: nobody reads meanwhile.
struct Selftest {
    child: Child,
    said: NamedTempFile,
}

impl Selftest {
    fn start(daemon: &Daemon, arguments: &[&str]) -> Self {
        let said = NamedTempFile::new().unwrap();
        let mut command = daemon.viv();
        command.args(["selftest", "--json"]).args(arguments).stdin(Stdio::null()).stdout(said.reopen().unwrap());
        Self { child: command.stderr(Stdio::inherit()).spawn().unwrap(), said }
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn output(&mut self) -> Output {
        let status = self.child.wait().unwrap();
        Output { status, stdout: fs::read(self.said.path()).unwrap(), stderr: Vec::new() }
    }
}

impl Drop for Selftest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn live(daemon: &Daemon) -> Vec<Sandbox> {
    let query = ListSandboxes { all: true, ..ListSandboxes::default() };
    daemon.client().list_all(query).map(Result::unwrap).filter(|sandbox| !sandbox.deleted).collect()
}

#[test]
fn p8_the_control_experiment_goes_well_and_leaves_nothing() {
    let daemon = Daemon::start();
    let rounds = rounds("VIV_SELFTEST_ROUNDS", ROUNDS);
    let output = daemon.viv().args(["selftest", "--json", "--rounds", &rounds.to_string()]).output().unwrap();
    assert!(output.status.success(), "{output:?}\n{}", daemon.said());
    let mut told = lines(&output);
    let verdict = told.pop().unwrap();
    assert_eq!((&verdict["ok"], &verdict["rounds"]), (&true.into(), &rounds.into()), "{verdict}");
    assert_eq!(verdict["steps"], told.len(), "each step is told");
    assert!(told.iter().all(|step| step["ok"] == true && step["took_ms"].is_u64()), "{told:#?}");
    let first: Vec<_> =
        told.iter().filter(|step| step["round"] == 1).map(|step| step["step"].as_str().unwrap()).collect();
    assert_eq!(first, STEPS);
    // It looked at this machine, where its sandboxes were.
    let proof = told.last().unwrap()["message"].as_str().unwrap();
    assert!(proof.starts_with("none of "), "{proof}");
    assert_eq!(live(&daemon), []);
    daemon.assert_nothing_left();

    // The same for people: a line for each step, with its time.
    let output = daemon.viv().args(["selftest", "--provider", "local"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), STEPS.len() + 1, "{text}");
    for (line, step) in text.lines().zip(STEPS) {
        assert!(line.starts_with(step) && line.contains(" ok "), "{line}");
    }
    assert!(text.lines().last().unwrap().starts_with("all is well: "), "{text}");
    daemon.assert_nothing_left();
}

/// The steps of a round, in their order.
const STEPS: &[&str] = &[
    "create",
    "copy in",
    "file",
    "exec",
    "listing",
    "freeze",
    "thaw",
    "snapshot",
    "change",
    "hibernate",
    "resume",
    "file",
    "exec",
    "listing",
    "fork",
    "rollback",
    "file",
    "exec",
    "listing",
    "fork stays",
    "delete",
    "nothing left",
];

#[test]
fn s5_another_provider_is_refused_and_nothing_is_made() {
    let daemon = Daemon::start();
    let output = daemon.viv().args(["selftest", "--provider", "elsewhere"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("\"local\", not with \"elsewhere\"") && said.contains("hint: "), "{said}");
    assert_eq!(live(&daemon), []);
    assert!(daemon.client().list_all(ListSandboxes { all: true, ..ListSandboxes::default() }).next().is_none());
}

/// A selftest that cannot fail would be worse than none: here somebody kills the agent of what it made.
#[test]
fn t3_a_sandbox_that_dies_meanwhile_fails_the_selftest_and_is_cleared_away() {
    let daemon = Daemon::start();
    let mut selftest = Selftest::start(&daemon, &["--rounds", "1000"]);
    // Whichever is there, until one was killed that was not about to go anyway.
    while selftest.is_running() {
        let agent = |sandbox: Sandbox| daemon.sandbox(&sandbox.id).diagnosis().ok()?.host?.agent_pid;
        for agent in live(&daemon).into_iter().filter_map(agent) {
            kill(agent, Signal::KILL);
        }
    }
    let output = selftest.output();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let mut told = lines(&output);
    assert_eq!(told.pop().unwrap()["ok"], false);
    let last = told.pop().unwrap();
    assert!(last["ok"] == false && !last["message"].as_str().unwrap().is_empty(), "{last}");
    assert!(told.iter().all(|step| step["ok"] == true));
    assert_eq!(live(&daemon), []);
    daemon.assert_nothing_left();
}

/// `kill -9` of the daemon between and during steps: a client that asks again sees no difference (J4, L1).
#[test]
fn j4_p8_the_control_experiment_goes_well_while_the_daemon_is_killed() {
    let chance = Chance::from_env("VIV_SELFTEST_SEED");
    let mut daemon = Daemon::start();
    let rounds = rounds("VIV_SELFTEST_ROUNDS_KILLED", ROUNDS_KILLED);
    let mut selftest = Selftest::start(&daemon, &["--patient", "--rounds", &rounds.to_string()]);
    let mut kills = 0;
    while selftest.is_running() {
        // Long enough that something gets done, short enough that most steps are hit.
        thread::sleep(Duration::from_millis(300 + chance.below(1_500)));
        if kills == rounds * KILLS_MAX {
            continue;
        }
        daemon.kill();
        thread::sleep(Duration::from_millis(chance.below(300)));
        daemon.restart();
        kills += 1;
    }
    let output = selftest.output();
    eprintln!("killed {kills} times: {}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{output:?}\n{}", daemon.said());
    assert!(kills > 0);
    let verdict = lines(&output).pop().unwrap();
    assert_eq!((&verdict["ok"], &verdict["rounds"]), (&true.into(), &rounds.into()), "{verdict}");
    assert_eq!(live(&daemon), []);
    daemon.assert_nothing_left();
}
