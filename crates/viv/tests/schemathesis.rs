//! Whatever a program can make of the document, the daemon that users run stands it, on real sandboxes: no 5xx, no answer
//! that the document does not say, and nothing is left (S5, L20).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use support::daemon::{Daemon, PATIENCE};
use viv_api::bound::{TaskRef, WaitMs};
use viv_api::query::{ListSandboxes, ListTasks};
use viv_api::task::StopTask;

/// Requests of each kind that are made up: more are made in `viv-server`, where a sandbox costs nothing.
const EXAMPLES: &str = "4";

/// What lives at once is bounded by the hooks; this is room for those that are still ending.
const SANDBOXES_MAX: &str = "12";

/// Whoever makes up requests makes up wrong keys too.
const CONFIG: &str = "[server]\nwrong_keys_max = 1000000\nwrong_keys_per_s = 1000000\n";

#[test]
fn s5_schemathesis_finds_nothing_in_the_running_daemon() {
    let mut daemon = Daemon::prepare(&["--sandboxes-max", SANDBOXES_MAX]);
    fs::create_dir(daemon.data.join("viv")).unwrap();
    fs::write(daemon.data.join("viv/config.toml"), CONFIG).unwrap();
    daemon.run(&[]);
    let told: serde_json::Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/schemathesis");
    let ran = Command::new(script)
        .env("VIV_URL", told["url"].as_str().unwrap())
        .env("VIV_KEY", key.trim())
        .env("EXAMPLES", EXAMPLES)
        .env("REQUEST_S", PATIENCE.as_secs().to_string())
        .output()
        .expect("scripts/schemathesis");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}\n{}", String::from_utf8_lossy(&ran.stderr));
    assert_is_stateful(&said);
    // Made-up tasks make sandboxes for as long as they live.
    for task in daemon.client().tasks_all(ListTasks::default()).map(|one| one.unwrap()) {
        let wait_ms = Some(WaitMs::nearest(PATIENCE.as_millis() as u64));
        let over = daemon.client().stop_task(&TaskRef::from(&task.id), &StopTask { wait_ms }).unwrap();
        assert!(over.state.is_final(), "{over:#?}");
    }
    let all = ListSandboxes { all: true, ..ListSandboxes::default() };
    let left: Vec<_> = daemon.client().list_all(all).map(|one| one.unwrap()).filter(|one| !one.deleted).collect();
    for sandbox in left {
        daemon.remove(&sandbox.id);
    }
    daemon.assert_nothing_left();
}

/// Requests are made up in sequence too, along links that schemathesis infers from the document: what one answers is what
/// the next one is about. A phase that is passed over is no failure to it.
fn assert_is_stateful(said: &str) {
    let line = |name: &str| said.lines().find_map(|line| line.trim().strip_prefix(name));
    let scenarios = line("Scenarios:").and_then(|told| told.trim().parse::<u64>().ok());
    let selected = line("API Links:").and_then(|told| told.split('/').nth(1)?.trim().strip_suffix(" selected"));
    let links = selected.and_then(|count| count.parse::<u64>().ok());
    assert!(scenarios > Some(0) && links > Some(0), "nothing was done in sequence: {scenarios:?}, {links:?}\n{said}");
}
