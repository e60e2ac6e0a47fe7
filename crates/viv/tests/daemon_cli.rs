//! The command line on a real daemon, as people use it: the README's lines, every verb's way there and back, what is
//! switched, what is kept secret, and a backup of it all.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE};
use support::restart::House;
use support::{eventually_within, kill, viv_binary};
use viv_api::ErrorCode;
use viv_api::bound::{EventKind, KeyName, WaitMs};
use viv_api::client::{Client, ClientError, Location};
use viv_api::daemon::Gate;
use viv_api::key::{CreateKey, Scope};
use viv_api::query::{ListEvents, ListSandboxes};
use viv_api::sandbox::{CreateSandbox, Status};
use viv_store::{ListQuery, SqliteStore, Store};

/// Where the README and this project are.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Another program, with the environment that a user of this daemon has.
fn beside(house: &House, program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, value) in house.viv().get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A verb that goes well: what it says.
fn say(daemon: &Daemon, args: &[&str]) -> String {
    let done = daemon.viv().args(args).stdin(Stdio::null()).output().unwrap();
    assert!(done.status.success(), "{args:?}: {}\n{}", done.status, text(&done.stderr));
    text(&done.stdout)
}

fn json(daemon: &Daemon, args: &[&str]) -> serde_json::Value {
    let said = say(daemon, &[&["--json"], args].concat());
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{args:?}: {error}: {said}"))
}

/// The lines that the README tells a newcomer to copy who has a daemon, block by block.
fn lines_of_readme() -> Vec<String> {
    let readme = fs::read_to_string(project().join("README.md")).unwrap();
    let part = readme.split_once("## Using it").expect("the part about using it").1;
    let blocks: Vec<&str> = part.split("```sh\n").skip(1).map(|block| block.split_once("```").unwrap().0).collect();
    assert_eq!(blocks.len(), 2, "what there is besides needs a test: {blocks:?}");
    blocks.iter().flat_map(|block| block.lines()).filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
}

/// Where a daemon says that it listens.
fn url(daemon: &Daemon) -> String {
    let told: serde_json::Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    told["url"].as_str().unwrap().to_owned()
}

/// A daemon that listens beyond loopback, met by an address of loopback. That it wants a key is no setting: it makes one
/// before it listens, and again when it is gone.
#[test]
fn s3_beyond_loopback_nothing_goes_without_a_key_and_the_command_line_finds_its_own() {
    let mut daemon = Daemon::start_with(&["--layers", "plain", "--listen", "0.0.0.0:0"]);
    let told = url(&daemon);
    let port = told.strip_prefix("http://0.0.0.0:").expect("it listens for everybody").to_owned();
    let near = format!("http://127.0.0.1:{port}");
    let with = |key: Option<&str>| {
        let location = Location::new(near.clone());
        let client = Client::locate(key.map_or(location.clone(), |key| location.key(key))).unwrap();
        client.create(&CreateSandbox { wait_ms: Some(WaitMs::nearest(0)), ..CreateSandbox::default() }, None)
    };
    for key in [None, Some("viv_wrong")] {
        let refused = with(key).unwrap_err();
        assert!(matches!(&refused, ClientError::Api { status: 401, .. }), "{key:?}: {refused:?}");
        assert_eq!(refused.code(), Some(ErrorCode::Unauthenticated));
    }
    assert_eq!(say(&daemon, &["--json", "ps"]), "", "and nothing was made");
    let file = daemon.data.join("key");
    let bits = || fs::metadata(&file).unwrap().permissions().mode() & 0o7777;
    assert_eq!(bits(), 0o600, "for its owner alone");
    let key = fs::read_to_string(&file).unwrap();
    let made = with(Some(key.trim())).unwrap().into_sandbox();
    daemon.wait_for(&made.id, "it is ready", |seen| seen.status == Status::Ready);
    // By its data folder, and by an address that is on this machine; whoever names another one is shown no key.
    assert_eq!(say(&daemon, &["exec", made.id.as_str(), "--", "echo", "found"]), "found\n");
    let named = |url: &str| daemon.viv().args(["--json", "ps"]).env("VIV_URL", url).output().unwrap();
    let listed = named(&near);
    assert!(listed.status.success() && text(&listed.stdout).contains(made.id.as_str()), "{listed:?}");
    let refused = named(&told);
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");

    // A key that was lost is not a daemon without one.
    daemon.end();
    fs::remove_file(&file).unwrap();
    daemon.restart();
    let fresh = fs::read_to_string(&file).unwrap();
    assert!(bits() == 0o600 && fresh.len() == key.len() && fresh != key);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

/// Beside what a line says: that it is over, and how.
const MARK: &str = "-- line over:";

#[test]
fn the_lines_of_the_readme_work_as_they_stand() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let lines = lines_of_readme();
    assert!(lines.len() > 10 && lines[0] == "alias viv=target/release/viv", "{lines:?}");
    let mut script = "shopt -s expand_aliases\n".to_owned();
    for line in &lines {
        // Where a daemon is that `make up` started, and where this one is.
        let line = line
            .replace("target/release/viv", &viv_binary().display().to_string())
            .replace("/var/lib/viv", &daemon.data.display().to_string())
            .replace("127.0.0.1:7711", url(&daemon).strip_prefix("http://").unwrap());
        write!(script, "{line}\necho \"{MARK} $?\"\n").unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.sh");
    fs::write(&file, script).unwrap();
    let mut bash = beside(&daemon, "bash");
    let done = bash.arg(&file).current_dir(project()).stdin(Stdio::null()).output().unwrap();
    let (said, errors) = (text(&done.stdout), text(&done.stderr));
    let mut rest = said.as_str();
    let mut told = Vec::new();
    for line in &lines {
        let (before, after) = rest.split_once(MARK).unwrap_or_else(|| panic!("{line}: {said}\n{errors}"));
        let (code, after) = after.split_once('\n').unwrap();
        assert_eq!(code.trim(), "0", "{line}\n{before}\n{errors}");
        told.push((line.as_str(), before));
        rest = after;
    }
    let of = |begins: &str| -> Vec<&str> {
        let found: Vec<&str> =
            told.iter().filter(|(line, _)| line.starts_with(begins)).map(|(_, said)| *said).collect();
        assert!(!found.is_empty(), "no line begins with {begins}");
        found
    };
    assert!(of("viv run")[0].starts_with("hello from "), "{told:?}");
    assert_eq!(of("viv exec first -- cat"), ["hi\n", "hi\n"], "also after it was stopped and is here again");
    assert_eq!(of("echo 'from outside'"), ["from outside\n"]);
    assert!(of("viv ps")[0].contains("first"));
    assert!(of("viv show --verify")[0].contains("ready"));
    assert!(of("viv timeline")[0].lines().count() >= 2);
    assert_eq!(of("viv fork")[0].matches("sbx_").count(), 3);
    // What is left by now is what was forked, and whoever has the key is told so.
    let listed: serde_json::Value = serde_json::from_str(of("curl -s")[0]).unwrap();
    assert_eq!(listed["items"].as_array().unwrap().len(), 3, "{listed}");
    for left in daemon.client().list_all(ListSandboxes::default()) {
        daemon.remove(&left.unwrap().id);
    }
}

/// Ends the daemon that a script started, when a test goes.
struct PutDown<'h>(&'h House);

impl PutDown<'_> {
    fn down(&self) -> String {
        let done = beside(self.0, "sh").arg(project().join("scripts/down")).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        text(&done.stdout)
    }
}

impl Drop for PutDown<'_> {
    fn drop(&mut self) {
        let _ = beside(self.0, "sh").arg(project().join("scripts/down")).output();
    }
}

/// What `make up` does once there is a binary, and `make down`, on ground of their own.
#[test]
fn up_starts_a_daemon_and_says_of_which_build_one_is_that_runs_already_and_down_ends_it() {
    let house = House::new();
    let (logs, put_down) = (tempfile::tempdir().unwrap(), PutDown(&house));
    let up = |viv: &Path| {
        let mut up = beside(&house, "sh");
        up.env("VIV_LISTEN", "127.0.0.1:0").env("VIV_CGROUP_PREFIX", &house.cgroup_prefix);
        up.env("TMPDIR", logs.path()).arg(project().join("scripts/up")).arg(viv).stdin(Stdio::null());
        let done = up.output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let said = text(&done.stdout);
        assert!(said.contains("A first sandbox:\n  who am I ") && said.contains("its own files  written"), "{said}");
        text(&done.stdout)
    };
    let pid = || {
        let told: serde_json::Value =
            serde_json::from_slice(&fs::read(house.data.join("daemon.json")).unwrap()).unwrap();
        told["pid"].as_u64().unwrap()
    };
    let viv = viv_binary();
    let said = up(&viv);
    assert!(!said.contains("runs already") && said.contains("What it says is in"), "{said}");
    let first = pid();
    let done = house.viv().args(["create", "--name", "stays"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");

    let said = up(&viv);
    assert!(said.contains("A daemon of this build runs already: "), "{said}");
    // Another program of the same version and commit, and one of another commit.
    let other = |name: &str, does: &str| {
        let path = logs.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{does}\nexec {} \"$@\"\n", viv.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let said = up(&other("rebuilt", ""));
    assert!(said.contains("A daemon of ANOTHER BUILD runs already") && said.contains("make down"), "{said}");
    let newer =
        format!("[ \"$1\" = version ] && {{ {} version | sed '1s/.*/viv 9.9.9 (newer)/'; exit; }}", viv.display());
    let said = up(&other("newer", &newer));
    assert!(said.contains("ANOTHER BUILD") && said.contains("This build is 9.9.9 (newer)."), "{said}");
    assert_eq!(pid(), first, "it is left as it is");

    assert!(put_down.down().contains("has ended; its sandboxes run on"));
    assert!(!house.viv().args(["ps"]).output().unwrap().status.success(), "nobody answers");
    assert_eq!(house.instance_folders().len(), 1, "its sandbox runs on");
    assert!(put_down.down().contains("No daemon runs on"));
    up(&viv);
    let done = house.viv().args(["rm", "stays"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    put_down.down();
    house.assert_nothing_left();
}

#[test]
fn verbs_do_what_they_say_on_a_real_daemon() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let folder = tempfile::tempdir().unwrap();
    let here = |name: &str| folder.path().join(name);
    // The command's exit code is viv's, and what comes in at one end comes out at the other.
    let mut one_shot = daemon.viv();
    one_shot.args(["run", "--", "sh", "-c", "cat; exit 7"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut one_shot = one_shot.spawn().unwrap();
    one_shot.stdin.take().unwrap().write_all(b"passed in").unwrap();
    let done = one_shot.wait_with_output().unwrap();
    assert_eq!((done.status.code(), text(&done.stdout).as_str()), (Some(7), "passed in"));
    assert_eq!(say(&daemon, &["--json", "ps"]), "", "nothing stays of it");

    let made = json(&daemon, &["create", "--name", "verbs"]);
    let id = made["id"].as_str().unwrap();
    // What scripts rely on, as a real daemon tells it, also of one that has no name.
    let unnamed = json(&daemon, &["create"])["id"].as_str().unwrap().to_owned();
    for (which, name) in [("verbs", serde_json::json!("verbs")), (unnamed.as_str(), serde_json::Value::Null)] {
        let shown = json(&daemon, &["show", which]);
        for field in ["id", "name", "status", "desired", "phase", "generation", "cause", "evidence", "observed_at"] {
            assert!(shown.get(field).is_some(), "{field}: {shown}");
        }
        let fixed = ["name", "status", "desired", "phase", "generation"].map(|field| shown[field].clone());
        let wanted = [name, "ready".into(), "running".into(), "ready".into(), 1.into()];
        assert_eq!(fixed, wanted, "{shown}");
        assert!(shown["observed_at"].is_u64() && shown["evidence"]["exec"]["outcome"] == "ok", "{shown}");
    }
    say(&daemon, &["rm", &unnamed]);
    // A terminal of its own, and keys from ours.
    let mut terminal = beside(&daemon, "script");
    let command = format!("{} exec -it verbs -- sh", viv_binary().display());
    let terminal = terminal.args(["-qec", &command, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut terminal = terminal.spawn().unwrap();
    let mut keys = terminal.stdin.take().unwrap();
    keys.write_all(b"tty; stty size; exit 5\n").unwrap();
    let done: Output = terminal.wait_with_output().unwrap();
    drop(keys);
    assert!(text(&done.stdout).contains("/dev/pts/"), "{:?}", text(&done.stdout));
    assert_eq!(done.status.code(), Some(5), "{:?}", text(&done.stdout));

    fs::create_dir(here("tree")).unwrap();
    fs::write(here("tree/a"), "first").unwrap();
    fs::write(here("file"), "second").unwrap();
    let copied = json(&daemon, &["cp", &here("file").display().to_string(), "verbs:/workspace/file"]);
    assert_eq!(copied, serde_json::json!({ "entries": 1, "bytes": 6 }));
    say(&daemon, &["cp", &here("tree").display().to_string(), "verbs:/workspace/"]);
    assert_eq!(say(&daemon, &["cp", "verbs:/workspace/file", "-"]), "second");
    let back = json(&daemon, &["cp", "verbs:/workspace/tree", &here("back").display().to_string()]);
    assert_eq!((fs::read_to_string(here("back/a")).unwrap().as_str(), back["bytes"].as_u64()), ("first", Some(5)));
    assert_eq!(json(&daemon, &["cp", "verbs:/workspace/file", &here("again").display().to_string()])["bytes"], 6);
    let missing = daemon.viv().args(["cp", "verbs:/nowhere", "-"]).output().unwrap();
    assert!(text(&missing.stderr).starts_with("error: /nowhere was not found\nhint: "), "{}", text(&missing.stderr));
    let nowhere = here("nowhere").join("file");
    let refused = daemon.viv().args(["cp", "verbs:/workspace/file"]).arg(&nowhere).output().unwrap();
    let told = text(&refused.stderr);
    assert!(told.starts_with(&format!("error: {}: ", here("nowhere").display())), "{told}");
    assert_eq!(fs::read_to_string(here("again")).unwrap(), "second");

    // What its supervisor and its agent wrote, which is nothing while all is well: its end, and nobody else's.
    assert_eq!(json(&daemon, &["logs", "verbs"]), serde_json::json!({ "sandbox": id, "generation": 1, "logs": [] }));
    let instance = daemon.provider_folder().join("instances").join(id);
    for (log, line) in [("shim.log", "the shim says something\n"), ("run/agent.log", "one\ntwo\nthree\n")] {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(instance.join(log)).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
    let read = say(&daemon, &["logs", "verbs"]);
    assert!(read.contains("the shim says something") && read.contains("one\ntwo\nthree\n"), "{read}");
    let last = json(&daemon, &["logs", "verbs", "--source", "agent", "--tail", "1"]);
    assert_eq!(last["logs"], serde_json::json!([{ "source": "agent", "text": "three\n" }]));

    let extended = json(&daemon, &["extend", "verbs", "3h"]);
    let remaining_ms = extended["remaining_ms"].as_u64().unwrap();
    assert!(remaining_ms > 2 * 3_600_000 && remaining_ms <= 3 * 3_600_000, "{extended}");

    let mut following = daemon.viv();
    following.args(["--json", "events", "--follow", "--sandbox", "verbs"]).stdout(Stdio::piped());
    let mut following = following.spawn().unwrap();
    let lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let (sender, told) = mpsc::channel();
    thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    // Until a line of this kind tells of this phase.
    let until = |kind: &str, to: &str| {
        loop {
            let line = told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{kind} {to} is not told"));
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            if line["kind"] == kind && (to.is_empty() || line["to"] == to) {
                return;
            }
        }
    };
    until("sandbox.created", "");
    let removed = json(&daemon, &["rm", "verbs"]);
    until("sandbox.moved", "stopped");
    following.kill().unwrap();
    following.wait().unwrap();
    assert!(removed.to_string().contains(id), "{removed}");

    let key = json(&daemon, &["key", "create", "robot"]);
    let (key_id, secret) = (key["key"]["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
    assert!(say(&daemon, &["key", "ls"]).contains("robot") && !say(&daemon, &["key", "ls"]).contains(secret));
    let with_key = |args: &[&str]| daemon.viv().env("VIV_KEY", secret).args(args).output().unwrap().status.success();
    assert!(with_key(&["ps"]));
    say(&daemon, &["key", "revoke", key_id]);
    assert!(!with_key(&["ps"]), "a revoked key opens nothing");
    assert!(say(&daemon, &["completions", "bash"]).contains("_viv"));
    daemon.assert_nothing_left();
}

/// The lines about gates in the journal: which, how far it is on, and where that was said.
fn switched(daemon: &Daemon) -> Vec<(String, u64, serde_json::Value, String)> {
    let query = ListEvents { kind: Some("gate.switched".parse::<EventKind>().unwrap()), ..ListEvents::default() };
    let lines = daemon.client().events(&query).unwrap().items.into_iter().map(|event| event.data);
    let word = |data: &serde_json::Map<String, serde_json::Value>, name: &str| data[name].as_str().unwrap().to_owned();
    lines
        .map(|data| {
            (word(&data, "gate"), data["percent"].as_u64().unwrap(), data["projects"].clone(), word(&data, "set_by"))
        })
        .collect()
}

fn gate(daemon: &Daemon, name: &str) -> Gate {
    daemon.client().version().unwrap().gates.into_iter().find(|gate| gate.name == name).unwrap()
}

#[test]
fn o9_a_gate_that_is_switched_is_said_shown_and_journaled() {
    let mut daemon = Daemon::in_house(House::with_config(""));
    daemon.run(&[("VIV_GATE_BREAKER", "off")]);
    assert!(daemon.said().contains("warning: the gate breaker is off"), "{}", daemon.said());
    let (breaker, quota) = (gate(&daemon, "breaker"), gate(&daemon, "quota"));
    assert_eq!((breaker.on, breaker.set_by.as_str(), breaker.percent), (false, "environment", None));
    assert_eq!((quota.on, quota.set_by.as_str()), (true, "default"));
    let said = say(&daemon, &["version"]);
    assert!(said.contains("gate breaker: off (environment)") && !said.contains("quota"), "{said}");
    let none = serde_json::json!({});
    let off = ("breaker".to_owned(), 0, none.clone(), "environment".to_owned());
    assert_eq!(switched(&daemon), std::slice::from_ref(&off));
    // Read again: it is off for one project alone, and that is no change of its percentage.
    daemon.configure("[gates]\nquota = { projects = { test = 0 } }\n");
    kill(daemon.pid(), Signal::HUP);
    let for_test = ("quota".to_owned(), 100, serde_json::json!({ "test": 0 }), "file".to_owned());
    eventually_within(PATIENCE, "the switch is journaled", || switched(&daemon).len() == 2);
    assert_eq!(switched(&daemon), [off.clone(), for_test.clone()]);
    let quota = gate(&daemon, "quota");
    assert_eq!((quota.on, quota.percent, quota.except_projects), (false, Some(100), vec!["test".to_owned()]));
    // What cannot be read changes nothing.
    daemon.configure("[gates]\nno_such = false\n");
    kill(daemon.pid(), Signal::HUP);
    eventually_within(PATIENCE, "it says so", || daemon.said().contains("the configuration is not taken"));
    assert_eq!(switched(&daemon).len(), 2);
    // And what is switched while nobody runs is news as well, once.
    daemon.end();
    daemon.configure("[gates]\nquota = { projects = { test = 0 } }\n");
    daemon.restart();
    let on = ("breaker".to_owned(), 100, none, "default".to_owned());
    assert_eq!(switched(&daemon), [off, for_test, on]);
    assert!(daemon.said().contains("warning: the gate quota is on, for test off"), "{}", daemon.said());
}

/// What is in the environment of a sandbox or a command is in nothing that is told about them (S6).
#[test]
fn s6_environments_are_in_no_log_event_or_report() {
    let daemon = Daemon::start_with(&["--layers", "plain", "--log", "debug"]);
    let (of_create, of_exec) = ("SECRET-OF-CREATE", "SECRET-OF-EXEC");
    say(&daemon, &["create", "--name", "quiet", "--env", &format!("TOKEN={of_create}")]);
    let spoken = say(
        &daemon,
        &["exec", "--env", &format!("MORE={of_exec}"), "quiet", "--", "sh", "-c", "test $TOKEN$MORE; echo $?"],
    );
    assert_eq!(spoken, "0\n", "both are there inside");
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    say(&daemon, &["report", "quiet", "--output", &bundle.display().to_string()]);
    let mut told = vec![("the daemon's standard error".to_owned(), daemon.said())];
    assert!(told[0].1.contains("DEBUG"), "it says what it does");
    for args in [
        &["--json", "logs", "--daemon"][..],
        &["--json", "events"],
        &["--json", "timeline", "quiet"],
        &["--json", "doctor", "quiet"],
        &["--json", "executions", "quiet"],
        &["--json", "ps"],
    ] {
        let said = daemon.viv().args(args).output().unwrap();
        assert!(!said.stdout.is_empty(), "{args:?}");
        told.push((format!("{args:?}"), String::from_utf8_lossy(&said.stdout).into_owned()));
    }
    let mut folders = vec![bundle];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                folders.push(entry);
            } else {
                let content = fs::read(&entry).unwrap();
                told.push((entry.display().to_string(), String::from_utf8_lossy(&content).into_owned()));
            }
        }
    }
    assert!(told.len() > 8, "a bundle has parts: {:?}", told.iter().map(|(name, _)| name).collect::<Vec<_>>());
    for (name, said) in &told {
        for secret in [of_create, of_exec] {
            assert!(!said.contains(secret), "{name} tells {secret}");
        }
    }
    say(&daemon, &["rm", "quiet"]);
}

/// Whoever lists processes, or has a copy of the database, learns no environment and no key (S6).
#[test]
fn s6_environments_are_in_no_command_line_and_secrets_of_keys_are_not_on_disk() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let (of_create, of_exec) = ("SECRET-OF-CREATE-2", "SECRET-OF-EXEC-2");
    // What is searched for is there where it belongs, or the search would find nothing anywhere.
    let made = json(&daemon, &["create", "--name", "quiet", "--env", &format!("TOKEN={of_create}")]);
    let started =
        json(&daemon, &["exec", "--detach", "--env", &format!("MORE={of_exec}"), "quiet", "--", "sleep", "600"]);
    assert!(started["id"].is_string(), "{started}");
    let host = daemon.host(&made["id"].as_str().unwrap().parse().unwrap());
    let agent = host.agent_pid.unwrap();
    let ours = daemon.processes();
    assert!(ours.contains(&host.shim_pid.unwrap()) && ours.len() >= 3, "{ours:?}");
    let environments = ours.iter().filter_map(|pid| fs::read(format!("/proc/{pid}/environ")).ok());
    let environments: Vec<String> = environments.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect();
    for secret in [of_create, of_exec] {
        assert!(environments.iter().any(|environment| environment.contains(secret)), "{secret} is where it belongs");
    }
    let mut seen = 0;
    for pid in ours.iter().copied().chain([daemon.pid(), agent]) {
        // Who is gone by now tells nothing.
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line);
        seen += usize::from(!line.is_empty());
        assert!(!line.contains("SECRET-OF"), "{pid}: {line}");
    }
    assert!(seen > 3, "{seen} command lines were read");

    let key = json(&daemon, &["key", "create", "robot"]);
    let (id, secret) = (key["key"]["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
    let own = fs::read_to_string(daemon.data.join("key")).unwrap();
    assert!(daemon.viv().env("VIV_KEY", secret).args(["ps"]).output().unwrap().status.success(), "it opens");
    let files = ["viv.db", "viv.db-wal", "viv.db-shm"].map(|name| daemon.data.join(name));
    let content: Vec<u8> = files.iter().filter_map(|file| fs::read(file).ok()).flatten().collect();
    let holds = |text: &str| content.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(holds(id), "the key itself is there");
    for secret in [secret, own.trim()] {
        // Nor the part of it that is drawn, without what all begin with.
        let drawn = secret.rsplit('_').next().unwrap();
        assert!(drawn.len() >= 16 && !holds(drawn), "the database holds {secret}");
    }
    say(&daemon, &["rm", "quiet"]);
    daemon.assert_nothing_left();
}

/// A copy of one moment, while it is written to: everything that was acknowledged before it was asked for is in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_backup_is_complete_while_others_write() {
    let daemon = tokio::task::spawn_blocking(|| Daemon::start_with(&["--layers", "plain"])).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.db");
    let acknowledged = tokio::task::block_in_place(|| {
        let made = daemon.create();
        let key = |number: usize| {
            let name = KeyName::new(format!("key-{number}")).unwrap();
            let asked = CreateKey { name, scope: Scope::ReadOnly, project: None, lifetime_ms: None };
            daemon.client().create_key(&asked).unwrap().key.id
        };
        let before: Vec<_> = (0..5).map(key).collect();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            // More than are made meanwhile, and an end also when something goes wrong.
            scope.spawn(|| (5..1_000).take_while(|_| !over.load(Ordering::Relaxed)).map(key).last());
            for _ in 0..3 {
                let told = json(&daemon, &["backup", &copy.display().to_string()]);
                assert_eq!(told["size_bytes"].as_u64(), Some(fs::metadata(&copy).unwrap().len()));
            }
            over.store(true, Ordering::Relaxed);
        });
        daemon.remove(&made.id);
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, std::slice::from_ref(&copy), "nothing is left beside it");
        (made.id, before)
    });
    let (sandbox, keys) = acknowledged;
    let store = SqliteStore::open(&copy).unwrap();
    assert_eq!(store.list(&ListQuery { limit: 10, ..ListQuery::default() }).await.unwrap().items[0].id, sandbox);
    let copied: Vec<String> = store.keys().await.unwrap().into_iter().map(|key| key.id).collect();
    for key in keys {
        assert!(copied.contains(&key.to_string()), "{key} was acknowledged before");
    }
    tokio::task::block_in_place(|| drop(daemon));
}
