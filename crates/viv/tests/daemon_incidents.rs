//! Failures that happened elsewhere, staged on the real daemon with real sandboxes: named after their rows in the list of
//! incidents.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

use support::daemon::{Daemon, PATIENCE};
use support::{eventually_within, is_alive};
use viv_api::bound::{KeyName, ListDepth, Path, ProjectName};
use viv_api::client::{Client, Location};
use viv_api::execution::{ExecutionState, StartExecution};
use viv_api::key::{CreateKey, Scope};
use viv_api::query::ReadFile;

/// By which its processes are known from outside: nobody else sleeps this long.
const MARK: &str = "86397";

/// Ignores TERM, has a child that left the session, and one that did not.
const TREE: &str = "trap '' TERM; setsid sleep 86397 & sleep 86397 & echo started; wait; wait; wait";

/// Its living processes, as the host sees them.
fn marked(daemon: &Daemon) -> Vec<u32> {
    let has_mark = |pid: &u32| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&command).contains(MARK) && is_alive(*pid)
    };
    let inside = daemon.processes();
    inside.into_iter().filter(has_mark).collect()
}

#[test]
fn incident_34_a_cancel_ends_the_processes_and_not_the_client() {
    let daemon = Daemon::start();
    let made = daemon.create();
    let mut client = daemon.viv();
    client.args(["exec", made.id.as_str(), "--", "sh", "-c", TREE]);
    let mut client = client.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "started\n");
    eventually_within(PATIENCE, "all of the tree runs", || marked(&daemon).len() == 3);
    let sandbox = daemon.sandbox(&made.id);
    let running = sandbox.executions_all().map(|one| one.unwrap()).find(|one| one.argv.iter().any(|word| word == TREE));
    let running = running.expect("it is listed");
    // Whoever kills the client has killed nothing (X2).
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(sandbox.execution(running.id.clone()).get().unwrap().state, ExecutionState::Running);
    assert_eq!(marked(&daemon).len(), 3);
    // And who cancels is answered when all of it is gone (X3).
    let ended = sandbox.execution(running.id).cancel().unwrap();
    assert_eq!(marked(&daemon), Vec::<u32>::new(), "{ended:?}");
    assert_ne!(ended.state, ExecutionState::Running);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

/// What is the sandbox's own is for those who run the host; a link does not lead others there (S3).
#[test]
fn s3_no_link_leads_the_key_of_a_project_to_what_is_the_sandboxs_own() {
    let daemon = Daemon::start();
    let made = daemon.create();
    let key = daemon.client().create_key(&CreateKey {
        name: KeyName::new("theirs").unwrap(),
        scope: Scope::Project,
        project: Some(ProjectName::new(made.project.clone()).unwrap()),
        lifetime_ms: None,
    });
    let told: serde_json::Value = serde_json::from_slice(&fs::read(daemon.data.join("daemon.json")).unwrap()).unwrap();
    let location = Location::new(told["url"].as_str().unwrap()).key(&key.unwrap().secret).name("theirs");
    let theirs = Client::locate(location).unwrap();
    let theirs = theirs.sandbox(&made.id);
    let script = "ln -s /.vivarium /tmp/ours; ln -s /.vivarium/identity.json /tmp/identity; echo mine > /tmp/mine";
    let linked = theirs.start(&StartExecution::of(["sh", "-c", script]).unwrap(), None).unwrap();
    let linked = theirs.execution(linked.id);
    eventually_within(PATIENCE, "the links are made", || linked.get().unwrap().state == ExecutionState::Exited);
    let path = |text: &str| Path::new(text).unwrap();
    let read = |text: &str| {
        let read = theirs.read_file(&ReadFile { path: path(text), offset: None, length: None, generation: None });
        read.map(|mut content| std::io::copy(&mut content, &mut std::io::sink()).unwrap())
    };
    assert_eq!(read("/tmp/mine").unwrap(), 5, "what is theirs they read");
    for text in ["/.vivarium/identity.json", "/tmp/ours/identity.json", "/tmp/identity", "/tmp/ours/run/agent.json"] {
        assert!(read(text).is_err(), "{text}");
    }
    for text in ["/.vivarium", "/tmp/ours", "/tmp/ours/run"] {
        assert!(theirs.list_files(&path(text), None).is_err(), "{text}");
        assert!(theirs.archive(&path(text)).is_err(), "{text}");
    }
    let all = theirs.list_files(&path("/"), Some(ListDepth::nearest(3))).unwrap();
    let is_inside = |path: &str| path.trim_start_matches('/').starts_with(".vivarium/");
    assert!(!all.entries.iter().any(|entry| is_inside(&entry.path)), "{:?}", all.entries);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}
