//! Spans of a real daemon, as a real collector understands them (O4): rotel, which `make traces` installs.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::daemon::{Daemon, PATIENCE, run};
use support::restart::House;
use support::{eventually_within, fresh_bytes, hex};
use viv_api::execution::StartExecution;
use viv_api::query::ReadFile;

/// How long a daemon may take to end: what its requests, its disk and its spans may hold it up, and a loaded machine.
const ENDED_WITHIN: Duration = Duration::from_secs(45);

fn rotel() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin/rotel-agent");
    if here.exists() { here } else { "rotel-agent".into() }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A collector, which tells what it takes.
struct Collector {
    child: Child,
    log: PathBuf,
    folder: tempfile::TempDir,
}

/// A span as the collector tells it.
#[derive(Debug, Clone, Default)]
struct Span {
    trace: String,
    parent: String,
    id: String,
    name: String,
    kind: String,
    status: String,
    start_ns: u64,
    end_ns: u64,
    what: BTreeMap<String, String>,
}

impl Span {
    fn is(&self, key: &str, value: &str) -> bool {
        self.what.get(key).is_some_and(|said| said == value)
    }
}

impl Collector {
    fn at(port: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("rotel.log");
        let file = File::create(&log).unwrap();
        let child = Command::new(rotel())
            .args(["start", "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed"])
            .args(["--otlp-http-endpoint", &format!("127.0.0.1:{port}")])
            .args(["--otlp-grpc-endpoint", &format!("127.0.0.1:{}", free_port())])
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .expect("`make traces` installs rotel");
        eventually_within(PATIENCE, "the collector listens", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self { child, log, folder }
    }

    fn said(&self) -> String {
        assert!(self.folder.path().exists());
        fs::read_to_string(&self.log).unwrap()
    }

    fn spans(&self) -> Vec<Span> {
        let (mut spans, said): (Vec<Span>, String) = (Vec::new(), self.said());
        for line in said.lines() {
            if line.starts_with("Span #") {
                spans.push(Span::default());
            } else if line.starts_with("ResourceSpans #") {
                // What follows is about who told, until the next span begins.
                spans.push(Span { name: "resource".to_owned(), ..Span::default() });
            }
            let Some(span) = spans.last_mut() else { continue };
            let Some((key, value)) = line.split_once(": ").or_else(|| line.split_once(':')) else { continue };
            let (key, value) = (key.trim(), value.trim().to_owned());
            match key {
                "Trace ID" => span.trace = value,
                "Parent ID" => span.parent = value,
                "ID" => span.id = value,
                "Name" => span.name = value,
                "Kind" => span.kind = value,
                "Status code" => span.status = value,
                "Start time" => span.start_ns = value.parse().unwrap(),
                "End time" => span.end_ns = value.parse().unwrap(),
                _ => {
                    if let Some(key) = key.strip_prefix("-> ") {
                        let bare = value.split_once('(').map_or(value.as_str(), |(_, rest)| rest.trim_end_matches(')'));
                        span.what.insert(key.to_owned(), bare.to_owned());
                    }
                }
            }
        }
        spans
    }

    /// The one span for which this holds. It tells what it took a moment after it took it.
    fn one(&self, what: &str, is_it: impl Fn(&Span) -> bool) -> Span {
        eventually_within(PATIENCE, what, || self.spans().iter().any(&is_it));
        let all = self.spans();
        let found: Vec<&Span> = all.iter().filter(|span| is_it(span)).collect();
        assert_eq!(found.len(), 1, "{what}: {found:#?}");
        found[0].clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn traced(port: u16) -> Daemon {
    let mut daemon = Daemon::in_house(House::with_config(&format!("[traces]\nendpoint = \"http://127.0.0.1:{port}\"")));
    daemon.run(&[]);
    daemon
}

fn secret(what: &str) -> String {
    format!("{what}-{}", hex(&fresh_bytes()))
}

/// A request of somebody who traces too.
fn post(daemon: &Daemon, path: &str, traceparent: &str, body: &serde_json::Value) -> serde_json::Value {
    let said: serde_json::Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).timeout_global(Some(PATIENCE)).build().into();
    let mut answer = agent
        .post(format!("{}{path}", said["url"].as_str().unwrap()))
        .header("authorization", format!("Bearer {}", key.trim()))
        .header("content-type", "application/json")
        .header("traceparent", traceparent)
        .send(body.to_string())
        .unwrap();
    serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap()
}

fn figure(daemon: &Daemon, name: &str) -> u64 {
    let text = daemon.client().metrics().unwrap();
    let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn doctor(daemon: &Daemon) -> String {
    support::stdout(&daemon.viv().arg("doctor").output().unwrap())
}

#[test]
fn o4_spans_reach_a_collector_in_the_trace_of_who_asked_and_hold_no_secrets() {
    let port = free_port();
    let collector = Collector::at(port);
    let mut daemon = traced(port);
    let secrets = ["env", "argument", "command", "stdin", "file", "name", "credential"].map(secret);
    let [env, argument, of_command, stdin, file, name, credential] = &secrets;
    let (trace, span) = (hex(&fresh_bytes()), hex(&fresh_bytes()[..8]));
    let traceparent = format!("00-{trace}-{span}-01");
    let made = post(
        &daemon,
        "/v1/sandboxes",
        &traceparent,
        &serde_json::json!({ "name": name, "env": { "TOKEN": env }, "labels": { "who": name } }),
    );
    let id: viv_core::SandboxId = made["id"].as_str().unwrap().parse().unwrap();
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == viv_api::sandbox::Status::Ready);

    let mut child = daemon
        .viv()
        .args(["exec", "-i", "--env", &format!("WORD={of_command}"), name, "/bin/sh", "-c"])
        .arg(format!("cat >/dev/null; : {argument}; exit 3"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3));
    let sandbox = daemon.sandbox(&id);
    assert_eq!(run(&sandbox, &format!("echo {file} > /workspace/{file}")).1.exit_code, Some(0));
    let path = "/workspace/nothing-there".parse().unwrap();
    let nothing = ReadFile { path, offset: None, length: None, generation: None };
    assert!(sandbox.read_file(&nothing).is_err());
    let mut task = daemon.viv();
    task.args(["task", "run", "--json", "--credential", "KEY", "--", "/bin/sh", "-c"]);
    let task = task.arg(format!("echo {argument}")).env("KEY", credential).output().unwrap();
    assert!(task.status.success(), "{task:?}");
    assert!(figure(&daemon, "viv_trace_spans_sent_total") > 0);
    assert_eq!(figure(&daemon, "viv_trace_spans_dropped_total"), 0);
    let said = doctor(&daemon);
    assert!(said.contains(&format!("traces go to http://127.0.0.1:{port}/v1/traces, which answers")), "{said}");
    sandbox.start(&StartExecution::of(["/bin/sleep", "1000"]).unwrap(), None).unwrap();
    daemon.remove(&id);
    // What was not sent yet is, before it ends.
    daemon.end();

    let id = id.as_str();
    let request = collector.one("the create", |one| one.name == "POST /v1/sandboxes" && one.trace == trace);
    assert_eq!((request.parent.as_str(), request.kind.as_str()), (span.as_str(), "SPAN_KIND_SERVER"), "{request:#?}");
    assert!(request.is("http.response.status_code", "201") && request.is("viv.sandbox", id), "{request:#?}");
    assert!(request.what.contains_key("viv.request") && request.is("http.route", "/v1/sandboxes"), "{request:#?}");
    for name in ["create", "probe"] {
        let name = format!("effect {name}");
        let effect = collector.one(&name, |one| one.name == name && one.is("viv.sandbox", id));
        assert_eq!((&effect.trace, &effect.parent), (&trace, &request.id), "{effect:#?}");
        assert!(effect.is("viv.outcome", "done") && effect.is("viv.generation", "1"), "{effect:#?}");
        assert!(effect.status == "STATUS_CODE_OK" && effect.end_ns >= effect.start_ns, "{effect:#?}");
    }
    let create = collector.one("the effect", |one| one.name == "effect create" && one.is("viv.sandbox", id));
    let call = collector.one("the call", |one| one.name == "provider create" && one.is("viv.sandbox", id));
    assert_eq!((&call.trace, &call.parent), (&trace, &create.id), "{call:#?}");
    assert!(call.is("viv.outcome", "ok") && call.is("viv.verb", "create"), "{call:#?}");
    assert!(create.start_ns <= call.start_ns && call.end_ns <= create.end_ns, "{create:#?} {call:#?}");
    let clear = collector.one("the end", |one| one.name == "effect clear" && one.is("viv.sandbox", id));
    let delete =
        collector.one("its request", |one| one.name == "DELETE /v1/sandboxes/{sandbox}" && one.is("viv.sandbox", id));
    assert_eq!((&clear.trace, &clear.parent), (&delete.trace, &delete.id));

    let execution = collector.one("the command", |one| one.name == "execution" && one.is("process.exit.code", "3"));
    assert!(execution.is("viv.outcome", "exited") && execution.status == "STATUS_CODE_ERROR", "{execution:#?}");
    let started = collector.one("its start", |one| one.id == execution.parent);
    assert_eq!((started.name.as_str(), &started.trace), ("POST /v1/sandboxes/{sandbox}/executions", &execution.trace));
    collector.one("the one that was ended with it", |one| one.name == "execution" && one.is("viv.outcome", "lost"));
    let missing = collector.one("no such file", |one| one.name == "provider file_read");
    assert!(missing.is("viv.outcome", "not_found") && missing.status == "STATUS_CODE_ERROR", "{missing:#?}");

    let task = collector.one("the task", |one| one.name == "task");
    assert!(task.is("viv.outcome", "succeeded") && task.is("viv.task_run", "1"), "{task:#?}");
    let asked = collector.one("who asked for it", |one| one.id == task.parent);
    assert_eq!(asked.name, "POST /v1/tasks", "{asked:#?}");
    let made = collector.one("its sandbox", |one| one.name == "effect create" && one.parent == task.id);
    assert_eq!(made.trace, asked.trace);

    assert!(collector.spans().iter().any(|one| one.name == "resource" && one.is("service.name", "vivarium")));
    let said = collector.said();
    for secret in &secrets {
        assert!(!said.contains(secret), "{secret} was told");
    }
    let key = fs::read_to_string(daemon.data.join("key")).unwrap();
    assert!(!said.contains(key.trim()), "the key was told");
}

#[test]
fn o4_nobody_is_held_up_by_a_collector_that_is_down_and_it_may_come_back() {
    let port = free_port();
    let mut daemon = traced(port);
    let made = daemon.create();
    assert_eq!(run(&daemon.sandbox(&made.id), "echo well").0, "well\n");
    eventually_within(PATIENCE, "drops are counted", || figure(&daemon, "viv_trace_spans_dropped_total") > 0);
    assert!(doctor(&daemon).contains("which does not answer"), "{}", doctor(&daemon));
    let collector = Collector::at(port);
    eventually_within(PATIENCE, "it takes them again", || {
        run(&daemon.sandbox(&made.id), "true");
        figure(&daemon, "viv_trace_spans_sent_total") > 0
    });
    daemon.remove(&made.id);
    daemon.end();
    collector.one("the end", |one| one.name == "effect clear");
    let said = daemon.said();
    assert_eq!(said.matches("spans are dropped").count(), 1, "{said}");
    assert_eq!(said.matches("spans are taken again").count(), 1, "{said}");
}

#[test]
fn o4_nobody_is_held_up_by_a_collector_that_never_answers() {
    // It takes connections, and nothing from them.
    let stuck = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut daemon = traced(stuck.local_addr().unwrap().port());
    let made = daemon.create();
    for _ in 0..20 {
        assert_eq!(run(&daemon.sandbox(&made.id), "echo well").0, "well\n");
    }
    daemon.remove(&made.id);
    let began = Instant::now();
    daemon.end();
    assert!(began.elapsed() < ENDED_WITHIN, "it ended after {:?}", began.elapsed());
}
