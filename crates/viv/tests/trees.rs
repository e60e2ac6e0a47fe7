//! A process tree that does what it can to stay is gone after a cancel (X3, incidents 15, 34), on every cgroup layout.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::time::Duration;

use support::{Ground, NO_CGROUPS, PURE_V2, again_in_namespace, eventually, is_in_namespace, mutation};
use viv_core::exec::ExecState;
use viv_provider::{Capability, Provider};
use viv_sandbox::cgroup::Layout;

/// Ignores TERM, double-forks, changes session, and goes on forking.
const STUBBORN: &str = "
    trap '' TERM HUP INT
    ( setsid sh -c 'trap \"\" TERM; while :; do sleep 0.05; done' & )
    ( ( setsid sh -c 'trap \"\" TERM; (sleep 1000 &); exec sleep 1000' & ) & )
    setsid -f sleep 1000
    echo ready
    while :; do sleep 1; done
";

async fn a_stubborn_tree_is_gone_after_a_cancel(ground: &Ground) {
    let sandbox = ground.create(Duration::from_secs(600)).await;
    // Beside it, another execution that must not be hurt.
    let bystander = sandbox.start("echo here; exec sleep 1000").await;
    let agent = sandbox.agent_pid();
    let execution = sandbox.start(STUBBORN).await;
    let mut output = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
    output.next().await.unwrap().unwrap();
    eventually("the tree has grown", || descendants(agent) >= 6);

    let status = ground.provider.cancel(&mutation(1, 1), &sandbox.id, &execution).await.unwrap();
    assert_eq!(status.state, ExecState::Cancelled);
    // Answered means gone: no waiting here.
    if let Some(v2) = Layout::detect().unwrap().v2 {
        let cgroup = v2.join(&ground.cgroup_prefix).join(sandbox.id.as_str()).join(execution.as_str());
        let events = fs::read_to_string(cgroup.join("cgroup.events"));
        assert!(events.as_ref().map_or(true, |events| events.contains("populated 0")), "{events:?}");
    }
    let left = sandbox.run("ps -eo args | grep -v grep | grep -c -e 'while :' -e 'sleep 0.05'").await.0;
    assert_eq!(left.trim(), "0", "some of the tree is left");
    let others = ground.provider.execution(&sandbox.instance(), &bystander).await.unwrap();
    assert_eq!(others.state, ExecState::Running, "a bystander was killed");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Processes below one, as the host sees them.
fn descendants(of: u32) -> usize {
    let mut found = 0;
    let mut pending = vec![of];
    while let Some(pid) = pending.pop() {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        for child in children.split_ascii_whitespace().filter_map(|child| child.parse().ok()) {
            found += 1;
            pending.push(child);
        }
    }
    found
}

#[tokio::test]
async fn x3_incident_15_on_the_layout_of_this_machine() {
    a_stubborn_tree_is_gone_after_a_cancel(&Ground::new()).await;
}

#[tokio::test]
async fn x3_incident_15_on_pure_v2() {
    if !is_in_namespace() {
        return again_in_namespace("x3_incident_15_on_pure_v2", PURE_V2);
    }
    let layout = Layout::detect().unwrap();
    assert!(layout.v1.is_empty() && layout.v2.is_some(), "{layout:?}");
    a_stubborn_tree_is_gone_after_a_cancel(&Ground::new()).await;
    a_stubborn_tree_is_gone_after_a_cancel(&Ground::with_runtime(viv_sandbox::Runtime::Binary("runc".into()))).await;
}

#[tokio::test]
async fn x3_incident_15_without_cgroups() {
    if !is_in_namespace() {
        return again_in_namespace("x3_incident_15_without_cgroups", NO_CGROUPS);
    }
    assert_eq!(Layout::detect().unwrap(), Layout::default());
    let ground = Ground::new();
    assert!(!ground.provider.capabilities().can(Capability::Freeze), "declared, not guessed");
    a_stubborn_tree_is_gone_after_a_cancel(&ground).await;
}
