//! What the tests of single stores share.
#![allow(dead_code, reason = "no test uses all of it")]

use std::sync::atomic::{AtomicU64, Ordering};

use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Moment, NewSandbox, Sandbox, Timings};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_store::{Change, NewLine, Owner};

/// A new record with an id that no other call in any process gave.
pub(crate) fn sandbox(now_ms: u64) -> Sandbox {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let count = COUNT.fetch_add(1, Ordering::Relaxed) & 0xffff_ffff;
    let bytes = (u128::from(time) << 64) | (u128::from(std::process::id()) << 32) | u128::from(count);
    let new = NewSandbox {
        id: SandboxId::from_bytes(bytes.to_be_bytes()),
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy::default_for(None),
        labels: [("suite".to_owned(), "store".to_owned())].into(),
        origin: None,
        by: Actor::part("test"),
    };
    Sandbox::create(new, Moment { now_ms, timings: &Timings::default(), no_memory: None })
}

/// Its change, with a line that tells the version.
pub(crate) fn change(sandbox: &Sandbox) -> Change {
    let line = NewLine {
        sandbox: Some(sandbox.id.clone()),
        project: Some(sandbox.project.clone()),
        data: serde_json::json!({ "version": sandbox.version }),
        ..note("")
    };
    Change {
        sandbox: sandbox.clone(),
        lines: vec![line],
        idempotency: None,
        quota: None,
        unused_since_ms: None,
        snapshots: Vec::new(),
    }
}

/// A line about nothing.
pub(crate) fn note(text: &str) -> NewLine {
    NewLine {
        at_ms: 1,
        project: None,
        sandbox: None,
        generation: None,
        kind: "note".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("test"),
        data: serde_json::json!({ "text": text }),
    }
}

/// Somebody.
pub(crate) fn owner() -> Owner {
    Owner {
        name: format!("test {}", std::process::id()),
        boot_id: "boot".to_owned(),
        pid: std::process::id(),
        start_ticks: 1,
        epoch: 0,
        since_ms: 1,
    }
}
