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
    "task_continue",
    "task_list",
    "task_logs",
    "task_run",
    "task_show",
    "task_stop",
    "write_file",
];

/// Where `scripts/prepare test` put the client.
fn python() -> String {
    let prepared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/mcp/bin/python");
    std::env::var("VIV_MCP_PYTHON").unwrap_or_else(|_| prepared.to_str().unwrap().to_owned())
}

/// Lets the official client do what a script says, and answers with what it has seen.
fn seen_by(script: &str, daemon: &Daemon) -> Value {
    let told: Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    let env = json!({
        "VIV_URL": told["url"], "VIV_KEY": key.trim(), "PATH": std::env::var("PATH").unwrap(), "HOME": "/nonexistent",
        "TOKEN": "s3cret-value",
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(script);
    let mut client = Command::new(python());
    client.arg(script).arg(env!("CARGO_BIN_EXE_viv")).arg(env.to_string()).env("PYTHONDONTWRITEBYTECODE", "1");
    let ran = client.output();
    let ran = ran.expect("the official client: make prepare installs it");
    let (said, wrong) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}\n{wrong}\n{}", daemon.said());
    serde_json::from_str(said.trim()).unwrap()
}

#[test]
fn an_official_client_runs_commands_watches_progress_and_cancels() {
    let daemon = Daemon::start();
    let seen = seen_by("mcp_client.py", &daemon);

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

#[test]
fn k2_an_official_client_runs_a_task_stops_it_from_another_connection_and_continues_it() {
    let daemon = Daemon::start();
    let seen = seen_by("mcp_tasks.py", &daemon);

    // The one that ran it was told what it wrote and where it was, while it ran.
    let news: Vec<&str> = seen["news"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(news.iter().any(|line| line.starts_with("working ")) && news.len() >= 2, "{news:?}");
    // The other connection found it, looked at it, and stopped it.
    assert_eq!((&seen["found"], &seen["shown"]), (&json!(1), &json!("running")), "{seen}");
    assert_eq!((&seen["stopped"]["state"], &seen["stopped"]["over"]), (&json!("stopped"), &json!(true)), "{seen}");
    assert!(seen["stopped"]["seen_gone_at_ms"].is_u64(), "{seen}");
    // Which the first one was told as the end of its call.
    assert_eq!((&seen["ran"]["error"], &seen["ran"]["data"]["state"]), (&json!(true), &json!("stopped")), "{seen}");
    assert!(seen["ran"]["text"].as_str().unwrap().contains("working "), "{seen}");
    // Continued it is the same sandbox and the same session; its effect went through the gate, with its credential.
    let went_on = &seen["continued"];
    assert_eq!((&went_on["data"]["state"], &went_on["data"]["run"]), (&json!("succeeded"), &json!(2)), "{seen}");
    assert_eq!(went_on["data"]["came"], "reused", "{seen}");
    let said = went_on["text"].as_str().unwrap();
    assert!(
        said.contains("session: first") && said.contains("outside: nothing") && said.contains("inside: 12"),
        "{said}"
    );
    assert_eq!(went_on["data"]["effects"], json!([{ "effect": "push", "outcome": "done" }]), "{seen}");
    assert_eq!((&seen["tail"], &seen["search"]), (&json!("last\n"), &json!("session: first\n")), "{seen}");
    // Bounded, and what is wrong is told.
    let (bytes, tail) = (seen["long"]["bytes"].as_u64().unwrap(), seen["long"]["tail"].as_str().unwrap());
    assert!(bytes < 80_000 && tail.contains("viv task logs"), "{bytes} {tail}");
    for refused in ["missing", "nothing", "both", "unknown_credential"] {
        assert_eq!(seen[refused]["error"], true, "{refused}: {}", seen[refused]);
    }
    assert!(!seen.to_string().contains("s3cret-value"), "{seen}");

    // A call that is cancelled stops its task.
    let client = daemon.client();
    let all = || client.tasks_all(viv_api::query::ListTasks::default()).map(Result::unwrap).collect::<Vec<_>>();
    eventually_within(PATIENCE, "every task is over", || all().iter().all(|task| task.state.is_final()));
    let named = seen["cancelled"].as_str().unwrap();
    let cancelled = all().into_iter().find(|task| task.id.as_str() == named).unwrap();
    assert_eq!(cancelled.ending.as_ref().unwrap().cause, "user_stop", "{cancelled:#?}");
    for sandbox in client.list_all(viv_api::query::ListSandboxes::default()) {
        daemon.remove(&sandbox.unwrap().id);
    }
    daemon.assert_nothing_left();
}
