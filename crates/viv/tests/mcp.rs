//! `viv mcp` with the official Python client, on the real daemon with a real sandbox.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::daemon::{Daemon, PATIENCE};
use support::eventually_within;
use viv_api::execution::ExecutionState;
use viv_api::query::ListAllExecutions;

/// The tools that there are; a client knows them by these names.
const TOOLS: &[&str] = &[
    "execute",
    "list_files",
    "read_file",
    "sandbox_create",
    "sandbox_diagnose",
    "sandbox_ensure",
    "sandbox_list",
    "write_file",
];

/// Where `scripts/prepare test` put the client.
fn python() -> String {
    let prepared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/mcp/bin/python");
    std::env::var("VIV_MCP_PYTHON").unwrap_or_else(|_| prepared.to_str().unwrap().to_owned())
}

#[test]
fn an_official_client_runs_commands_watches_progress_and_cancels() {
    let daemon = Daemon::start();
    let told: Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    let env = json!({
        "VIV_URL": told["url"], "VIV_KEY": key.trim(), "PATH": std::env::var("PATH").unwrap(), "HOME": "/nonexistent",
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mcp_client.py");
    let ran = Command::new(python()).arg(script).arg(env!("CARGO_BIN_EXE_viv")).arg(env.to_string()).output();
    let ran = ran.expect("the official client: make prepare installs it");
    let (said, wrong) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}\n{wrong}\n{}", daemon.said());
    let seen: Value = serde_json::from_str(said.trim()).unwrap();

    assert_eq!(seen["tools"], json!(TOOLS));
    assert_eq!((&seen["made"], &seen["ensured"]), (&json!("ready"), &json!("ready")));
    let output = seen["ran"]["text"].as_str().unwrap();
    assert!(output.contains("line 1\n") && output.contains("line 5\n") && output.contains("wrong"), "{output}");
    assert!(output.ends_with("[exit code 3]"), "{output}");
    assert_eq!((&seen["ran"]["error"], &seen["ran"]["data"]["exit_code"]), (&json!(true), &json!(3)));
    let news = seen["news"].as_array().unwrap();
    assert!(news.len() >= 2, "it was told while it ran: {news:?}");
    assert!(news.iter().any(|news| news[1].as_str().is_some_and(|line| line.starts_with("line "))), "{news:?}");
    assert_eq!(seen["read"], "written\n");
    assert!(seen["files"].as_str().unwrap().contains("note"));
    // What is long is cut, and says where the rest is.
    let (bytes, tail) = (seen["long"]["bytes"].as_u64().unwrap(), seen["long"]["tail"].as_str().unwrap());
    assert!(bytes < 80_000 && tail.contains("viv attach") && tail.contains("100000\n"), "{bytes} {tail}");
    assert!(seen["listed"].as_array().unwrap().contains(&json!("tooled")));
    assert_eq!(seen["diagnosed"], true);
    for refused in ["missing", "wrong"] {
        assert_eq!(seen[refused]["error"], true, "{}", seen[refused]);
        assert!(!seen[refused]["text"].as_str().unwrap().is_empty());
    }

    // What was cancelled over there ends here, with all that it started.
    let all = || daemon.client().executions_all(ListAllExecutions::default()).map(Result::unwrap).collect::<Vec<_>>();
    eventually_within(PATIENCE, "everything ended", || all().iter().all(|one| one.state.is_final()));
    let cancelled: Vec<_> = all().into_iter().filter(|one| one.state == ExecutionState::Cancelled).collect();
    assert_eq!(cancelled.len(), 1, "{:#?}", all());
    let sandbox = daemon.client().list(&viv_api::query::ListSandboxes::default()).unwrap().items.remove(0);
    let (left, _) = support::daemon::run(&daemon.sandbox(&sandbox.id), "pgrep sleep || echo nothing");
    assert_eq!(left, "nothing\n");
    daemon.remove(&sandbox.id);
    daemon.assert_nothing_left();
}
