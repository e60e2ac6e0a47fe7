//! The command line against a daemon that says what it is told to: exit codes, what goes where, JSON, and that what was
//! started is cleaned up.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const VIV: &str = env!("CARGO_BIN_EXE_viv");
/// A condition that does not come true within this is a failure.
const PATIENCE: Duration = Duration::from_secs(60);
const SANDBOX: &str = "sbx_01h2xcejqtf2nbrexx3vqjhp41";
const EXECUTION: &str = "exe_01h2xcejqtf2nbrexx3vqjhp41";

/// A request as it arrived.
#[derive(Debug, Clone)]
struct Seen {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Seen {
    fn is(&self, method: &str, path: &str) -> bool {
        self.method == method && self.path.split('?').next() == Some(path)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }
}

/// What to answer.
enum Say {
    Json(u16, Value),
    Bytes(Vec<u8>),
    /// Lines, and then the end of the answer, or a connection that breaks.
    Lines(Vec<Value>, bool),
    /// Lines, then silence until the execution is cancelled, then the line that says so.
    Held(Vec<Value>),
}

type Answer = Box<dyn Fn(&Seen) -> Option<Say> + Send + Sync>;

/// A daemon that says what it is told to.
struct Daemon {
    url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Daemon {
    fn new(answer: impl Fn(&Seen) -> Option<Say> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (answer, log): (Arc<Answer>, _) = (Arc::new(Box::new(answer)), Arc::clone(&seen));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, log) = (Arc::clone(&answer), Arc::clone(&log));
                thread::spawn(move || serve(stream.unwrap(), &answer, &log));
            }
        });
        Self { url, seen }
    }

    fn viv(&self) -> Command {
        let mut command = viv();
        command.env("VIV_URL", &self.url).env("VIV_KEY", "vk_secret");
        command
    }

    fn say(&self, arguments: &[&str]) -> Output {
        self.viv().args(arguments).output().unwrap()
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn count(&self, method: &str, path: &str) -> usize {
        self.seen().iter().filter(|seen| seen.is(method, path)).count()
    }
}

/// Without anything that this machine has configured.
fn viv() -> Command {
    let mut command = Command::new(VIV);
    for variable in ["VIV_URL", "VIV_KEY", "VIV_DATA", "VIV_CONFIG"] {
        command.env_remove(variable);
    }
    command.env("HOME", "/nonexistent").env("XDG_CONFIG_HOME", "/nonexistent").env("XDG_DATA_HOME", "/nonexistent");
    command.stdin(Stdio::null());
    command
}

fn serve(stream: TcpStream, answer: &Answer, log: &Mutex<Vec<Seen>>) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = || {
        let mut text = String::new();
        reader.read_line(&mut text).ok()?;
        Some(text.trim_end().to_owned())
    };
    let Some(first) = line().filter(|line| !line.is_empty()) else { return };
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let mut headers = Vec::new();
    while let Some((name, value)) =
        line().and_then(|line| line.split_once(": ").map(|(a, b)| (a.to_lowercase(), b.to_owned())))
    {
        headers.push((name, value));
    }
    let mut seen = Seen { method, path, headers, body: Vec::new() };
    if seen.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            let mut piece = vec![0; size + 2];
            reader.read_exact(&mut piece).unwrap();
            seen.body.extend_from_slice(&piece[..size]);
            if size == 0 {
                break;
            }
        }
    } else if let Some(length) = seen.header("content-length").and_then(|length| length.parse().ok()) {
        seen.body = vec![0; length];
        reader.read_exact(&mut seen.body).unwrap();
    }
    let said = answer(&seen).unwrap_or_else(|| {
        let message = format!("the test has no answer to {} {}", seen.method, seen.path);
        Say::Json(404, json!({"error": {"code": "not_found", "message": message, "docs": "docs/errors/not_found.md"}}))
    });
    log.lock().unwrap().push(seen);
    let mut stream = stream;
    let _ = reply(&mut stream, said, log);
}

fn reply(stream: &mut TcpStream, said: Say, log: &Mutex<Vec<Seen>>) -> std::io::Result<()> {
    let head = |status: u16, kind: &str, length: Option<usize>| {
        let length =
            length.map_or("transfer-encoding: chunked".to_owned(), |length| format!("content-length: {length}"));
        format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{length}\r\nconnection: close\r\n\r\n")
    };
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    match said {
        Say::Json(status, body) => {
            let body = if status == 204 { String::new() } else { body.to_string() };
            stream.write_all((head(status, "application/json", Some(body.len())) + &body).as_bytes())
        }
        Say::Bytes(bytes) => {
            stream.write_all(head(200, "application/octet-stream", Some(bytes.len())).as_bytes())?;
            stream.write_all(&bytes)
        }
        Say::Lines(lines, whole) => {
            stream.write_all(head(200, "application/x-ndjson", None).as_bytes())?;
            for line in lines {
                stream.write_all(chunk(&format!("{line}\n")).as_bytes())?;
            }
            if whole { stream.write_all(b"0\r\n\r\n") } else { Ok(()) }
        }
        Say::Held(lines) => {
            stream.write_all(head(200, "application/x-ndjson", None).as_bytes())?;
            for line in lines {
                stream.write_all(chunk(&format!("{line}\n")).as_bytes())?;
            }
            eventually("it is cancelled", || log.lock().unwrap().iter().any(|seen| seen.path.ends_with("/cancel")));
            stream.write_all(chunk(&format!("{}\n", json!({"end": execution("cancelled", None)}))).as_bytes())?;
            stream.write_all(b"0\r\n\r\n")
        }
    }
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn sandbox(status: &str) -> Value {
    json!({
        "id": SANDBOX, "project": "default", "name": "box", "status": status, "desired": "running", "phase": "ready",
        "generation": 1, "cause": null, "evidence": {"exec": null, "filesystem": null, "ports": []}, "observed": null,
        "observed_at": 5, "labels": {}, "created_at_ms": now_ms() - 65_000, "last_activity_at_ms": null, "expires_at_ms": null,
        "spec": {"image": "host", "workdir": "/workspace", "env_names": [], "limits": {},
                 "network": {"egress": "none"}, "ports": []},
        "policy": {"persistent": false, "lifetime_ms": 1000, "idle_ms": null}, "version": 1
    })
}

fn now_ms() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64
}

fn execution(state: &str, exit_code: Option<i32>) -> Value {
    json!({
        "id": EXECUTION, "sandbox": SANDBOX, "generation": 1, "state": state, "exit_code": exit_code, "signal": null,
        "message": null, "argv": ["x"], "cwd": null, "user": null, "tty": false, "detach": false, "limit_ms": null,
        "started_at_ms": 1, "ended_at_ms": null, "output_bytes": 0, "stdin_bytes": 0, "pid": null
    })
}

fn chunk(offset: u64, stream: &str, text: &str) -> Value {
    json!({"offset": offset, "stream": stream, "at_ms": 1, "text": text})
}

fn error(status: u16, code: &str, message: &str) -> Say {
    Say::Json(status, json!({"error": {"code": code, "message": message, "docs": format!("docs/errors/{code}.md")}}))
}

fn path(rest: &str) -> String {
    format!("/v1/sandboxes/{SANDBOX}{rest}")
}

fn of_execution(rest: &str) -> String {
    path(&format!("/executions/{EXECUTION}{rest}"))
}

/// Answers for a life of one sandbox with one command, whose output is this.
fn life(output: impl Fn(&Seen) -> Say + Send + Sync + 'static) -> Daemon {
    Daemon::new(move |seen| {
        let taken = |seen: &Seen| {
            let query = seen.path.split_once("offset=").unwrap().1;
            query.split('&').next().unwrap().parse::<usize>().unwrap() + seen.body.len()
        };
        match seen {
            seen if seen.is("POST", "/v1/sandboxes") => Some(Say::Json(201, sandbox("ready"))),
            seen if seen.is("DELETE", &path("")) => Some(Say::Json(200, sandbox("stopped"))),
            seen if seen.is("POST", &path("/executions")) || seen.is("POST", "/v1/sandboxes/box/executions") => {
                Some(Say::Json(201, execution("running", None)))
            }
            seen if seen.is("GET", &of_execution("/output")) => Some(output(seen)),
            seen if seen.is("POST", &of_execution("/input")) => {
                Some(Say::Json(200, json!({"stdin_bytes": taken(seen)})))
            }
            seen if seen.is("POST", &of_execution("/cancel")) => Some(Say::Json(200, execution("cancelled", None))),
            seen if seen.is("POST", &of_execution("/input/close")) || seen.is("POST", &of_execution("/signal")) => {
                Some(Say::Json(204, Value::Null))
            }
            _ => None,
        }
    })
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn finished(mut child: Child) -> Output {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("it did not end: {:?}", child.wait_with_output().unwrap());
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn each_kind_of_failure_has_its_exit_code_its_hint_and_its_page() {
    let answers: Mutex<VecDeque<(u16, &str)>> = Mutex::new(VecDeque::new());
    let answers = Arc::new(answers);
    let told = Arc::clone(&answers);
    let daemon = Daemon::new(move |_| {
        let (status, code) = told.lock().unwrap().pop_front()?;
        Some(error(status, code, "it is not so"))
    });
    for (status, code, exit) in [
        (400, "invalid_request", 2),
        (404, "not_found", 3),
        (409, "not_running", 4),
        (409, "name_taken", 4),
        (410, "gone", 5),
        (410, "stale_handle", 5),
        (401, "unauthenticated", 6),
        (429, "quota_exceeded", 6),
        (409, "timeout", 124),
        (500, "internal", 1),
    ] {
        answers.lock().unwrap().push_back((status, code));
        let output = daemon.say(&["show", "box"]);
        assert_eq!(output.status.code(), Some(exit), "{code}: {output:?}");
        assert_eq!(stdout(&output), "", "{code}");
        let error = stderr(&output);
        assert!(error.starts_with("error: it is not so\n"), "{error}");
        assert!(error.contains(&format!("see: docs/errors/{code}.md")), "{error}");
    }
    // Where a command's own code is passed on, ours cannot be mistaken for it.
    answers.lock().unwrap().push_back((404, "not_found"));
    let output = daemon.say(&["exec", "box", "--", "true"]);
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(stderr(&output).contains("hint: "), "{output:?}");
}

#[test]
fn s5_wrong_input_is_told_in_the_words_that_it_was_given_in() {
    let daemon = Daemon::new(|_| None);
    for (args, told) in [
        (&["create", "--lifetime", "0s"][..], "a lifetime must be from 1s to 30d\nhint: write it like 90s"),
        (&["extend", "box", "9999d"], "a lifetime must be from 1s to 30d\nhint: write it like 90s"),
        (&["create", "--label", "x"], "a label must be key=value"),
        (&["create", "--name", "Box"], "a name must be small letters, digits and hyphens"),
        (&["show", "Box"], "an id (sbx_…) or a name of small letters"),
        (&["rollback", "box", "before"], "a snapshot's id must be snp_ and then small letters and digits"),
        (&["key", "revoke", "robot"], "a key's id must be key_ and then small letters and digits"),
        (&["task", "show", "build"], "a task's id must be tsk_ and then small letters and digits"),
        (&["cp", "a", "b"], "hint: write one of them as SANDBOX:/PATH"),
        (&["cp", "box:relative", "."], "a path must be absolute"),
        (&["ps", "--config", "/nowhere/config.toml"], "hint: --config or VIV_CONFIG names a file"),
    ] {
        let output = daemon.say(args);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{args:?}: {output:?}");
        assert!(stderr(&output).contains(told), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(daemon.seen().len(), 0, "nobody was asked");
}

#[test]
fn s3_a_key_that_is_no_good_is_told_with_where_keys_are_from() {
    let daemon = Daemon::new(|_| {
        let hint = "send Authorization: Bearer viv_…";
        let told = json!({"code": "unauthenticated", "message": "no", "hint": hint, "docs": "d"});
        Some(Say::Json(401, json!({ "error": told })))
    });
    let output = daemon.say(&["ps"]);
    assert_eq!(output.status.code(), Some(6), "{output:?}");
    assert!(stderr(&output).contains("hint: set VIV_KEY, or VIV_DATA to the daemon's data folder"), "{output:?}");
}

#[test]
fn without_a_daemon_it_is_said_how_to_start_one() {
    let folder = tempfile::tempdir().unwrap();
    let output = viv().args(["ps"]).env("VIV_DATA", folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(stderr(&output).ends_with("hint: start it with: viv serve\n"), "{output:?}");

    // It left its address, and nobody listens there any more.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    fs::write(
        folder.path().join("daemon.json"),
        json!({"url": format!("http://127.0.0.1:{port}"), "pid": 1}).to_string(),
    )
    .unwrap();
    let output = viv().args(["ps"]).env("VIV_DATA", folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(stderr(&output).contains("hint: start it with: viv serve\n"), "{output:?}");
    let version = viv().args(["version"]).env("VIV_DATA", folder.path()).output().unwrap();
    let said = stdout(&version);
    assert!(version.status.success() && said.contains("daemon: not reached"), "{version:?}");
    let (own, commit) = said.lines().next().unwrap().split_once(" (").unwrap();
    assert_eq!(own, concat!("viv ", env!("CARGO_PKG_VERSION")));
    assert!(commit.ends_with(')') && commit.len() > 1, "it says what it was built from: {said}");
}

#[test]
fn the_daemon_is_found_by_its_data_folder_by_a_file_and_by_flags() {
    let daemon = Daemon::new(|seen| {
        seen.is("GET", "/v1/sandboxes").then(|| Say::Json(200, json!({"items": [sandbox("ready")], "next": null})))
    });
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("daemon.json"), json!({"url": daemon.url, "pid": 1, "more": true}).to_string()).unwrap();
    fs::write(at("key"), "vk_of_the_folder\n").unwrap();
    fs::write(at("other"), "vk_of_the_file").unwrap();
    let config = format!("[client]\nurl = \"{}/\"\nkey_file = \"{}\"\n", daemon.url, at("other").display());
    fs::write(at("config.toml"), config).unwrap();
    fs::write(at("wrong.toml"), "[client]\nurll = 1\n").unwrap();
    let (data, config) = (folder.path().to_str().unwrap(), at("config.toml"));
    let config = config.to_str().unwrap();
    let cases: [(&[&str], &str); 3] = [
        (&["--data", data], "Bearer vk_of_the_folder"),
        (&["--config", config], "Bearer vk_of_the_file"),
        (&["--config", config, "--key", "vk_flag"], "Bearer vk_flag"),
    ];
    for (flags, key) in cases {
        let output = viv().args(["ps", "--json"]).args(flags).output().unwrap();
        assert!(output.status.success(), "{flags:?}: {output:?}");
        let last = daemon.seen().pop().unwrap();
        assert_eq!((last.header("authorization"), last.header("viv-client")), (Some(key), Some("cli")));
        assert_eq!(serde_json::from_str::<Value>(&stdout(&output)).unwrap()["status"], "ready");
    }
    let output = viv().args(["ps", "--config"]).arg(at("wrong.toml")).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("urll") && stderr(&output).contains("hint: "), "{output:?}");
}

#[test]
fn o1_show_has_its_fields_at_the_top_and_lists_are_one_object_a_line() {
    let daemon = Daemon::new(|seen| match seen {
        seen if seen.is("GET", "/v1/sandboxes/box") => Some(Say::Json(200, sandbox("ready"))),
        seen if seen.is("GET", "/v1/sandboxes") => {
            let next = if seen.path.contains("cursor=") { Value::Null } else { json!("more") };
            Some(Say::Json(200, json!({"items": [sandbox("ready")], "next": next})))
        }
        _ => None,
    });
    let shown: Value = serde_json::from_str(&stdout(&daemon.say(&["show", "box", "--json", "--verify"]))).unwrap();
    for field in ["id", "name", "status", "desired", "phase", "generation", "cause", "evidence", "observed_at"] {
        assert!(shown.get(field).is_some(), "{field}: {shown}");
    }
    assert!(daemon.seen().last().unwrap().path.contains("verify=true"));
    let listed = stdout(&daemon.say(&["ps", "--json", "--all", "--label", "team=search"]));
    assert_eq!(listed.lines().count(), 2, "{listed}");
    let first = &daemon.seen()[1];
    assert!(first.path.contains("all=true") && first.path.contains("label=team%3Dsearch"), "{first:?}");
    let table = stdout(&daemon.say(&["ps"]));
    assert!(table.starts_with("ID ") && table.contains(SANDBOX), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[test]
fn run_passes_input_output_and_code_through_and_leaves_nothing() {
    let daemon = life(|_| {
        let lines = vec![
            chunk(0, "stdout", "out\n"),
            chunk(4, "stderr", "err\n"),
            json!({"end": execution("exited", Some(3))}),
        ];
        Say::Lines(lines, true)
    });
    let mut child = daemon
        .viv()
        .args(["run", "--label", "agent=coder", "--memory", "512M", "--timeout", "90s", "--", "sh", "-c", "x"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"some input").unwrap();
    let output = finished(child);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("out\n", "err\n"));
    let seen = daemon.seen();
    let create = seen.iter().find(|seen| seen.is("POST", "/v1/sandboxes")).unwrap();
    assert_eq!(create.json()["labels"], json!({"agent": "coder"}));
    assert_eq!(create.json()["limits"], json!({"memory_bytes": 536_870_912}));
    assert_eq!(create.json()["policy"]["persistent"], json!(false));
    assert!(create.header("idempotency-key").is_some());
    let start = seen.iter().find(|seen| seen.is("POST", &path("/executions"))).unwrap();
    assert_eq!(start.json()["argv"], json!(["sh", "-c", "x"]));
    assert_eq!((&start.json()["stdin"], &start.json()["limit_ms"]), (&json!(true), &json!(90_000)));
    // T5: what is started is started in the generation that was made.
    assert_eq!(start.header("viv-generation"), Some("1"));
    assert_eq!(daemon.count("DELETE", &path("")), 1);
}

#[test]
fn exec_gives_all_input_and_takes_output_up_again_where_it_broke() {
    let input = "0123456789".repeat(20_000);
    let wanted = input.len();
    let fed = Arc::new(Mutex::new(0));
    let given = Arc::clone(&fed);
    let daemon = life(move |seen| {
        if seen.path.contains("offset=0") {
            return Say::Lines(vec![chunk(0, "stdout", "one ")], false);
        }
        assert!(seen.path.contains("offset=4"), "{}", seen.path);
        eventually("all input is there", || *given.lock().unwrap() == wanted);
        Say::Lines(vec![chunk(4, "stdout", "two"), json!({"end": execution("exited", Some(0))})], true)
    });
    let mut child = daemon
        .viv()
        .args(["exec", "-i", "box", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = thread::spawn(move || stdin.write_all(input.as_bytes()).unwrap());
    eventually("input is closed", || daemon.count("POST", &of_execution("/input/close")) == 1);
    let taken: usize =
        daemon.seen().iter().filter(|seen| seen.is("POST", &of_execution("/input"))).map(|seen| seen.body.len()).sum();
    *fed.lock().unwrap() = taken;
    let output = finished(child);
    writer.join().unwrap();
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "one two"), "{output:?}");
}

#[test]
fn an_interrupt_cancels_what_runs_and_the_sandbox_goes_too() {
    let daemon = life(|_| Say::Held(vec![chunk(0, "stdout", "running\n")]));
    let mut child = daemon
        .viv()
        .args(["run", "--", "sleep", "1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = finished(child);
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(daemon.count("POST", &of_execution("/cancel")), 1);
    assert_eq!(daemon.count("DELETE", &path("")), 1);
}

#[test]
fn options_end_where_the_command_begins() {
    let daemon = life(|_| Say::Lines(vec![json!({"end": execution("exited", Some(0))})], true));
    let output = daemon.say(&["exec", "box", "--timeout", "5s", "-e", "A=b=c", "ls", "-la", "--json"]);
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), ""), "{output:?}");
    let start = daemon.seen().into_iter().find(|seen| seen.is("POST", "/v1/sandboxes/box/executions")).unwrap().json();
    assert_eq!(start["argv"], json!(["ls", "-la", "--json"]));
    assert_eq!((&start["limit_ms"], &start["env"]), (&json!(5_000), &json!({"A": "b=c"})));
    // One that is misspelt is not taken for a program.
    assert_eq!(daemon.say(&["exec", "box", "--timout", "5s", "ls"]).status.code(), Some(2));
    assert_eq!(daemon.seen().iter().filter(|seen| seen.path.ends_with("/executions")).count(), 1);
}

#[test]
fn exec_passes_a_signal_on() {
    let daemon = life(|_| Say::Held(vec![chunk(0, "stdout", "running\n")]));
    let mut child = daemon
        .viv()
        .args(["exec", "box", "sleep", "1000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    eventually("it is passed on", || daemon.count("POST", &of_execution("/signal")) == 1);
    let signal = daemon.seen().into_iter().find(|seen| seen.is("POST", &of_execution("/signal"))).unwrap();
    assert_eq!(signal.json(), json!({"signal": 15}));
    // The second one leaves.
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(finished(child).status.code(), Some(143));
}

#[test]
fn a_reader_that_goes_away_is_success_and_ends_the_command() {
    let daemon = life(|_| {
        let lines = (0..2_000).map(|number| chunk(number * 1000, "stdout", &"y\n".repeat(500))).collect();
        Say::Held(lines)
    });
    let script = format!("{VIV} run -- yes | head -n 1; echo ${{PIPESTATUS[0]}}");
    let mut command = daemon.viv();
    let environment: Vec<_> =
        command.get_envs().map(|(name, value)| (name.to_owned(), value.map(ToOwned::to_owned))).collect();
    command = Command::new("bash");
    for (name, value) in environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let child = command
        .args(["-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = finished(child);
    assert_eq!(stdout(&output), "y\n0\n", "{output:?}");
    assert_eq!(daemon.count("POST", &of_execution("/cancel")), 1);
    assert_eq!(daemon.count("DELETE", &path("")), 1);
}

#[test]
fn the_terminal_is_as_it_was_after_every_end() {
    for (state, code, exit) in [("exited", Some(7), 7), ("lost", None, 125)] {
        let daemon = life(move |_| {
            Say::Lines(vec![chunk(0, "stdout", "hello\r\n"), json!({"end": execution(state, code)})], true)
        });
        let script = format!("stty rows 33 cols 99; {VIV} exec -t box -- sh; echo code=$?; stty -a");
        let mut command = Command::new("script");
        command
            .args(["-qec", &script, "/dev/null"])
            .env("VIV_URL", &daemon.url)
            .env("VIV_KEY", "k")
            .env_remove("VIV_DATA");
        let output = command.stdin(Stdio::null()).output().unwrap();
        let text = stdout(&output);
        assert!(text.contains("hello") && text.contains(&format!("code={exit}")), "{text}");
        assert!(text.contains(" icanon") && text.contains(" echo ") && !text.contains("-icanon"), "{text}");
        let seen = daemon.seen();
        let start = seen.iter().find(|seen| seen.is("POST", "/v1/sandboxes/box/executions")).unwrap();
        assert_eq!(start.json()["tty"], json!({"rows": 33, "cols": 99}));
        // Who sits at a terminal ends it herself.
        assert_eq!(start.json()["limit_ms"], json!("none"));
    }
}

#[test]
fn cp_moves_files_and_folders_both_ways() {
    let archive = {
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        archive.append_data(&mut header, "sub/file", &b"deep"[..]).unwrap();
        archive.into_inner().unwrap()
    };
    let daemon = Daemon::new(move |seen| {
        let stat = |kind: &str| json!({"kind": kind, "size_bytes": 1, "mode": "0640", "uid": 0, "gid": 0, "modified_at_ms": 1});
        match seen {
            seen if seen.is("GET", "/v1/sandboxes/box/files/stat") => match seen.path.split("path=").nth(1).unwrap() {
                "%2Fdir" => Some(Say::Json(200, stat("dir"))),
                "%2Ffile" => Some(Say::Json(200, stat("file"))),
                _ => None,
            },
            seen if seen.is("GET", "/v1/sandboxes/box/files") => Some(Say::Bytes(b"content".to_vec())),
            seen if seen.is("PUT", "/v1/sandboxes/box/files") => Some(Say::Json(200, stat("file"))),
            seen if seen.is("GET", "/v1/sandboxes/box/archive") => Some(Say::Bytes(archive.clone())),
            seen if seen.is("PUT", "/v1/sandboxes/box/archive") => {
                Some(Say::Json(200, json!({"entries": 2, "bytes": 4})))
            }
            _ => None,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let good = |arguments: &[&str]| {
        let output = daemon.say(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        output
    };
    assert_eq!(stdout(&good(&["cp", "box:/file", "-"])), "content");
    good(&["cp", "box:/file", &at("here")]);
    assert_eq!(fs::read(at("here")).unwrap(), b"content");
    good(&["cp", "box:/dir", &at("tree")]);
    assert_eq!(fs::read(at("tree/sub/file")).unwrap(), b"deep");
    // Into a folder that is there, under its own name.
    good(&["cp", "box:/dir", &at("tree")]);
    assert_eq!(fs::read(at("tree/dir/sub/file")).unwrap(), b"deep");

    good(&["cp", &at("here"), "box:/dir"]);
    let last = daemon.seen().pop().unwrap();
    assert!(last.path.contains("path=%2Fdir%2Fhere") && last.body == b"content", "{last:?}");
    good(&["cp", &at("tree"), "box:/new"]);
    let last = daemon.seen().pop().unwrap();
    assert!(last.path.contains("path=%2Fnew"), "{last:?}");
    let mut names: Vec<String> = tar::Archive::new(&last.body[..])
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().to_str().unwrap().trim_end_matches('/').to_owned())
        .filter(|name| !name.is_empty())
        .collect();
    names.sort();
    assert!(names.contains(&"sub/file".to_owned()), "{names:?}");

    let output = daemon.say(&["cp", "a", "b"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = daemon.say(&["cp", &at("nothing"), "box:/x"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

#[test]
fn rm_asks_before_it_deletes_all_and_goes_on_after_a_failure() {
    let daemon = Daemon::new(|seen| match seen {
        seen if seen.is("GET", "/v1/sandboxes") => {
            Some(Say::Json(200, json!({"items": [sandbox("ready")], "next": null})))
        }
        seen if seen.is("DELETE", &path("")) || seen.is("DELETE", "/v1/sandboxes/box") => {
            Some(Say::Json(200, sandbox("stopped")))
        }
        seen if seen.is("DELETE", "/v1/sandboxes/gone") => Some(error(410, "gone", "it was deleted")),
        _ => None,
    });
    let output = daemon.say(&["rm", "--all"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(stderr(&output).contains("--yes") && daemon.count("DELETE", &path("")) == 0, "{output:?}");
    let output = daemon.say(&["rm", "--all", "--yes"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), format!("{SANDBOX}\n")));
    let output = daemon.say(&["rm", "gone", "box"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(5), format!("{SANDBOX}\n")), "{output:?}");
    assert_eq!(daemon.say(&["rm"]).status.code(), Some(2));
}

#[test]
fn what_does_not_get_done_in_time_is_said_and_goes_on() {
    let daemon = Daemon::new(|seen| match seen {
        seen if seen.is("POST", "/v1/sandboxes") => Some(Say::Json(202, sandbox("provisioning"))),
        seen if seen.is("POST", "/v1/sandboxes/box/ensure") => Some(Say::Json(200, sandbox("failed"))),
        _ => None,
    });
    let output = daemon.say(&["create", "--wait", "1s"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(124), format!("{SANDBOX}\n")), "{output:?}");
    let output = daemon.say(&["create", "--wait", "0"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), format!("{SANDBOX}\n")), "{output:?}");
    assert_eq!(daemon.seen()[1].json()["wait_ms"], json!(0));
    assert_eq!(daemon.say(&["ensure", "box"]).status.code(), Some(1));
    // What makes no sense is not even asked.
    let before = daemon.seen().len();
    for wrong in
        [&["create", "--name", "Not A Name"][..], &["create", "--lifetime", "1ms"], &["create", "--memory", "1K"]]
    {
        assert_eq!(daemon.say(wrong).status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(daemon.seen().len(), before);
}

#[test]
fn progress_turns_on_a_terminal_while_it_lasts_and_is_said_once_elsewhere() {
    // Nothing is stopped before the test has seen what is said meanwhile.
    let (allow, allowed) = mpsc::channel::<()>();
    let allowed = Mutex::new(allowed);
    let daemon = Daemon::new(move |seen| {
        seen.is("POST", "/v1/sandboxes/box/stop").then(|| {
            allowed.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            Say::Json(200, sandbox("stopped"))
        })
    });
    let answer = format!("{SANDBOX}  stopped");
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &format!("{VIV} stop box"), "/dev/null"]);
    terminal.env("VIV_URL", &daemon.url).env("VIV_KEY", "k").env_remove("VIV_DATA");
    let mut terminal = terminal.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut screen = terminal.stdout.take().unwrap();
    let mut told = String::new();
    while told.matches("stopping box (").count() < 2 {
        let mut piece = [0; 256];
        let read = screen.read(&mut piece).unwrap();
        assert!(read > 0, "it ended and had not said twice that it waits: {told:?}");
        told.push_str(std::str::from_utf8(&piece[..read]).unwrap());
    }
    allow.send(()).unwrap();
    screen.read_to_string(&mut told).unwrap();
    assert!(terminal.wait().unwrap().success(), "{told:?}");
    assert!(["| stopping box (", "/ stopping box ("].iter().all(|turn| told.contains(turn)), "it turns: {told:?}");
    let (_, after) = told.rsplit_once("\r\x1b[K").expect("the line is cleared");
    assert_eq!(after.trim_end(), answer, "the word is taken back before the answer");

    let mut command = daemon.viv();
    let mut piped = command.args(["stop", "box"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(piped.stderr.take().unwrap());
    let mut said = String::new();
    errors.read_line(&mut said).unwrap();
    allow.send(()).unwrap();
    errors.read_to_string(&mut said).unwrap();
    assert_eq!(said, "stopping box …\n", "once, and nothing that moves");
    let output = piped.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stdout(&output)), (Some(0), answer + "\n"), "standard output is data");
}

#[test]
fn a_key_is_told_once_and_alone_on_standard_output() {
    let daemon = Daemon::new(|seen| {
        seen.is("POST", "/v1/keys").then(|| {
            let key = json!({"id": "key_1", "name": "ci", "scope": "read_only", "project": "default", "created_at_ms": 1,
                             "last_used_at_ms": null, "expires_at_ms": null, "revoked_at_ms": null});
            Say::Json(201, json!({"key": key, "secret": "vk_new"}))
        })
    });
    let output = daemon.say(&["key", "create", "ci", "--scope", "read-only", "--lifetime", "30d"]);
    assert_eq!(stdout(&output), "vk_new\n");
    let asked = daemon.seen().pop().unwrap().json();
    assert_eq!(asked, json!({"name": "ci", "scope": "read_only", "lifetime_ms": 2_592_000_000_u64}));
}

#[test]
fn completions_are_what_shells_understand() {
    for (shell, checker) in [("bash", Some("bash")), ("zsh", None), ("fish", None)] {
        let output = viv().args(["completions", shell]).output().unwrap();
        assert!(output.status.success() && stdout(&output).contains("executions"), "{shell}");
        if let Some(checker) = checker {
            let mut child = Command::new(checker).arg("-n").stdin(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(&output.stdout).unwrap();
            assert!(child.wait().unwrap().success(), "{shell}");
        }
    }
}

#[test]
fn exit_codes_are_explained() {
    for arguments in [["help", "exit-codes"], ["exit-codes", "--help"]] {
        let output = viv().args(arguments).output().unwrap();
        assert!(stdout(&output).contains("124  a time limit passed"), "{output:?}");
    }
}
