//! Chaos on the real daemon: whole agent loops, one fault in each, as a user starts them (P5).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::process::Stdio;

use serde_json::Value;
use support::VIV;
use support::restart::House;

/// One session for each kind of fault.
#[test]
fn p5_of_every_kind_of_fault_nothing_acknowledged_is_lost_and_nothing_is_left() {
    // Who is not root passes over it.
    let _ours = House::new();
    let mut command = std::process::Command::new(VIV);
    command.args(["chaos", "--at-once", "4", "--json"]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut told: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let verdict = told.pop().expect("a verdict");
    let unwell =
        |one: &&Value| one["failed"] != Value::Null || one["done"] != true || one["lost"] != Value::Array(vec![]);
    let unwell: Vec<&Value> = told.iter().filter(unwell).collect();
    assert!(output.status.success() && unwell.is_empty(), "{unwell:#?}\n{verdict:#}");
    assert_eq!((&verdict["lost"], &verdict["failed"]), (&0.into(), &0.into()), "{verdict}");
    assert_eq!((&verdict["unused"], &verdict["leaked"]), (&Value::Array(vec![]), &Value::Array(vec![])), "{verdict}");
    assert_eq!(verdict["sessions"], told.len());
    // Something was acknowledged in each, or there was nothing to be lost.
    assert!(told.iter().all(|one| one["acknowledged"].as_u64() > Some(3)), "{told:#?}");
    assert!(told.iter().all(|one| one["healthy_after_ms"].is_u64()), "{told:#?}");
}

/// What `make soak` bounds itself by.
#[test]
fn p5_a_bound_in_minutes_ends_it_and_nothing_is_left() {
    let _ours = House::new();
    let mut command = std::process::Command::new(VIV);
    command.args(["chaos", "--sessions", "1000000", "--minutes", "0.02", "--at-once", "1", "--json"]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let verdict: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(output.status.success(), "{verdict:#}");
    let sessions = verdict["sessions"].as_u64().unwrap();
    assert!((1..1_000).contains(&sessions), "{verdict:#}");
    assert_eq!(verdict["leaked"], Value::Array(vec![]), "{verdict}");
    for wrong in ["-1", "soon", "NaN"] {
        let refused = std::process::Command::new(VIV).args(["chaos", "--minutes", wrong]).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{wrong}");
    }
}

#[test]
fn p5_chaos_is_loud_and_only_on_a_folder_of_its_own() {
    let house = House::new();
    let mut daemon = house.spawn(&["--chaos=7"], &[]);
    daemon.wait_until_it_serves();
    assert!(daemon.said().contains("CHAOS") && daemon.said().contains("seed 7"), "{}", daemon.said());
    daemon.kill();
    drop(daemon);
    let used = House::new();
    used.start().kill();
    assert!(!used.said().contains("CHAOS"), "{}", used.said());
    let mut refused = used.spawn(&["--chaos"], &[]);
    assert!(!refused.wait().success());
    assert!(refused.said().contains("was not made for chaos"), "{}", refused.said());
}
