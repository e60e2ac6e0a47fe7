//! Services and hooks on the real daemon: probed before ready, started again, nudged, and never a ready that is not
//! (L14, T2, X5; incident 1).
#![allow(missing_docs, reason = "tests")]

mod support;

use serde_json::{Value, json};
use support::daemon::Daemon;
use viv_api::client::ClientError;
use viv_api::execution::{ExecutionState, OutputLine, OutputStream, StartExecution};
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, ProbeOutcome, Sandbox, Status, StopSandbox};
use viv_core::SandboxId;

/// Listens on a port, after a moment, and takes note of being nudged.
const SERVE: &str = "echo started >> starts; trap 'echo nudged >> nudges' USR1; sleep 0.3; \
    perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 5, LocalAddr => \"127.0.0.1\", \
    LocalPort => 8080, ReuseAddr => 1) or die; while (1) { $c = $s->accept; close $c if $c }' & \
    while true; do wait; sleep 0.05; done";

fn request(body: Value) -> CreateSandbox {
    serde_json::from_value(body).expect("a request")
}

fn line(line: &str) -> Value {
    json!(["sh", "-c", line])
}

fn web(more: &Value) -> Value {
    let mut service = json!({"name": "web", "argv": line(SERVE), "ready": {"port": 8080}, "ready_within_ms": 60_000});
    for (name, value) in more.as_object().expect("an object") {
        service[name] = value.clone();
    }
    service
}

/// What a command in it writes.
fn says(daemon: &Daemon, id: &SandboxId, command: &str) -> String {
    let started = daemon.sandbox(id).start(&StartExecution::of(["sh", "-c", command]).unwrap(), None).unwrap();
    let mut said = Vec::new();
    for event in daemon.sandbox(id).execution(started.id).follow(0) {
        if let OutputLine::Chunk(chunk) = event.unwrap()
            && chunk.stream == OutputStream::Stdout
        {
            said.push(chunk.text.expect("text"));
        }
    }
    said.concat()
}

/// Tries to make one that does not become ready, and tells how it is.
fn fails(daemon: &Daemon, body: Value) -> Sandbox {
    let error = daemon.client().create(&request(body), None).expect_err("it does not become ready");
    assert!(matches!(error, ClientError::Api { .. }), "{error:?}");
    let all: Vec<Sandbox> =
        daemon.client().list(&viv_api::query::ListSandboxes::default()).unwrap().items.into_iter().collect();
    let found = all.into_iter().next().expect("it is recorded");
    daemon.wait_for(&found.id, "it failed", |now| now.status == Status::Failed)
}

fn lines(daemon: &Daemon, id: &SandboxId) -> Vec<viv_api::event::Event> {
    let query = ListEvents { sandbox: Some(id.into()), ..ListEvents::default() };
    daemon.client().events(&query).unwrap().items
}

#[test]
fn t2_a_service_is_probed_before_ready_and_started_again_when_it_is_killed() {
    let daemon = Daemon::start();
    let made = daemon.create_from(&request(json!({"services": [web(&json!({}))]})));
    let (service, probe) = (&made.services[0], &made.evidence.services[0]);
    assert_eq!((probe.service.as_str(), probe.probe.outcome), ("web", ProbeOutcome::Ok));
    let first = service.execution.clone().expect("it was started");
    let shown = daemon.sandbox(&made.id).execution(first.clone()).get().unwrap();
    assert_eq!(shown.state, ExecutionState::Running);

    // Killed from inside, whole tree: it is not ready any more, comes back as another execution, and is ready again.
    daemon.sandbox(&made.id).execution(first.clone()).cancel().unwrap();
    let again = daemon.wait_for(&made.id, "another execution is ready", |now| {
        now.status == Status::Ready && now.services[0].execution.as_ref() != Some(&first)
    });
    let service = &again.services[0];
    assert_eq!((service.after.as_ref(), service.restarts), (Some(&first), 1));
    assert_eq!(again.generation, made.generation, "the instance is the same");
    let ended = daemon.sandbox(&made.id).execution(first).get().unwrap();
    assert_eq!(ended.state, ExecutionState::Cancelled, "what ended says so");
    let moves: Vec<_> = lines(&daemon, &made.id).into_iter().filter(|event| event.kind == "sandbox.moved").collect();
    let left = moves.iter().any(|event| serde_json::to_string(event).unwrap().contains("service web: was cancelled"));
    assert!(left, "it was said why it is not ready: {moves:#?}");
    assert_eq!(says(&daemon, &made.id, "cat starts"), "started\nstarted\n");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn incident_1_a_service_that_never_is_ready_is_a_failure_that_names_it() {
    let daemon = Daemon::start();
    let never = json!({"name": "never", "argv": line("sleep 1000"), "ready": {"command": ["false"]},
                       "ready_within_ms": 500, "restart": {"policy": "on_failure", "times_max": 1, "backoff_ms": 50}});
    let failed = fails(&daemon, json!({"services": [never]}));
    let cause = failed.cause.clone().expect("a cause");
    assert_eq!(cause.code, "service_failed");
    assert!(cause.message.starts_with("service never: was not ready within 500 ms"), "{}", cause.message);
    assert!(cause.message.ends_with("after 1 restarts"), "{}", cause.message);
    let evidence = &failed.evidence.services[0];
    assert_eq!((evidence.service.as_str(), evidence.probe.outcome), ("never", ProbeOutcome::Unhealthy));
    daemon.remove(&failed.id);
    daemon.assert_nothing_left();
}

#[test]
fn l14_what_does_not_come_back_is_not_ready_and_its_files_can_still_be_saved() {
    let daemon = Daemon::start();
    let once = json!({"name": "once", "argv": line("echo here > file; sleep 1000"), "restart": {"policy": "never"},
                      "ready": {"command": ["test", "-e", "file"]}});
    let made = daemon.create_from(&request(json!({"name": "kept", "services": [once]})));
    let first = made.services[0].execution.clone().expect("it was started");
    daemon.sandbox(&made.id).execution(first.clone()).cancel().unwrap();
    let lost = daemon.wait_for(&made.id, "it is lost", |now| now.status == Status::Lost);
    assert_eq!(lost.cause.as_ref().map(|cause| cause.code.as_str()), Some("service_failed"));
    assert_eq!(lost.services[0].ended.as_deref(), Some("was cancelled"));
    // Whoever wants it gets another try on the same files.
    let ready = daemon.sandbox(&made.id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!((ready.status, ready.generation), (Status::Ready, made.generation), "{ready:#?}");
    assert_eq!(ready.services[0].after.as_ref(), Some(&first));
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn j4_a_daemon_that_is_killed_finds_its_services_running_and_starts_none_twice() {
    let mut daemon = Daemon::start();
    let made = daemon.create_from(&request(json!({"services": [web(&json!({}))]})));
    let first = made.services[0].execution.clone().expect("it was started");
    daemon.kill();
    daemon.restart();
    let kept = daemon.sandbox(&made.id).verify().unwrap();
    assert_eq!(kept.status, Status::Ready, "{kept:#?}");
    assert_eq!(kept.services[0].execution.as_ref(), Some(&first));
    assert_eq!(says(&daemon, &made.id, "cat starts"), "started\n");
    // And hears of their end as before.
    daemon.sandbox(&made.id).execution(first.clone()).cancel().unwrap();
    daemon.wait_for(&made.id, "another execution is ready", |now| {
        now.status == Status::Ready && now.services[0].after.as_ref() == Some(&first)
    });
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

/// At every point of the start of services, a crash starts them once.
#[test]
fn j4_a_crash_while_services_start_starts_them_once() {
    for point in ["serve.before", "serve.after", "serve.recorded"] {
        let mut daemon = Daemon::prepare(&[]);
        daemon.run(&[("VIV_FAILPOINT", point)]);
        let body = json!({"name": "box", "services": [web(&json!({}))], "wait_ms": 0});
        daemon.client().create(&request(body), None).expect("it is recorded");
        daemon.wait();
        daemon.restart();
        let all = daemon.client().list(&viv_api::query::ListSandboxes::default()).unwrap().items;
        let made = daemon.wait_for(&all[0].id, "it is ready", |now| now.status == Status::Ready);
        assert_eq!(says(&daemon, &made.id, "cat starts"), "started\n", "{point}");
        daemon.remove(&made.id);
        daemon.assert_nothing_left();
    }
}

#[test]
fn x5_after_a_resume_services_start_again_linked_to_the_old_and_are_nudged() {
    let daemon = Daemon::start();
    let nudge = json!({"nudge": {"signal": 10, "within_ms": 60_000, "reports": {"command": ["test", "-s", "nudges"]}}});
    let hooks = json!({"after_start": {"run": {"command": line("echo first >> hooks")}},
                       "after_resume": {"run": {"command": line("echo resumed >> hooks")}}});
    let made = daemon.create_from(&request(json!({"name": "box", "services": [web(&nudge)], "hooks": hooks})));
    assert_eq!(says(&daemon, &made.id, "cat nudges hooks"), "first\n", "a first start is not nudged");
    let old = made.services[0].execution.clone().expect("it was started");
    let saved = daemon.sandbox(&made.id).stop(&StopSandbox::default()).unwrap().into_sandbox();
    assert_eq!(saved.status, Status::Hibernated, "{saved:#?}");
    let back = daemon.sandbox(&made.id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!(back.status, Status::Ready, "{back:#?}");
    assert_eq!((back.generation.0, back.services[0].after.as_ref()), (made.generation.0 + 1, Some(&old)));
    assert_eq!(
        says(&daemon, &made.id, "head -n 1 nudges; cat hooks starts"),
        "nudged\nfirst\nresumed\nstarted\nstarted\n"
    );
    // What is listed is what there is.
    let listed: Vec<_> = daemon.sandbox(&made.id).executions_all().map(|one| one.unwrap()).collect();
    let before = listed.iter().find(|one| one.id == old).expect("what ran when it was saved is told");
    assert_eq!(before.state, ExecutionState::Lost);
    let running = listed.iter().filter(|one| one.state == ExecutionState::Running).map(|one| one.id.clone());
    assert_eq!(running.collect::<Vec<_>>(), back.services[0].execution.iter().cloned().collect::<Vec<_>>());
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l14_a_service_that_does_not_report_in_is_ended_and_named_and_what_was_saved_is_kept() {
    let daemon = Daemon::start();
    let nudge = json!({"nudge": {"signal": 10, "within_ms": 1_000, "reports": {"command": ["test", "-e", "never"]}},
                       "restart": {"policy": "never"}});
    let made = daemon.create_from(&request(json!({"name": "box", "services": [web(&nudge)]})));
    let saved = daemon.sandbox(&made.id).stop(&StopSandbox::default()).unwrap().into_sandbox();
    assert_eq!(saved.status, Status::Hibernated);
    daemon.sandbox(&made.id).ensure(&EnsureSandbox::default()).expect_err("it does not report in");
    let failed = daemon.wait_for(&made.id, "it failed", |now| now.status == Status::Failed);
    let said = failed.cause.expect("a cause").message;
    assert!(said.starts_with("service web: did not report in within 1000 ms after signal 10"), "{said}");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l14_hooks_that_fail_are_ignored_or_not_as_it_was_said() {
    let daemon = Daemon::start();
    let hook = |run: &str, on_failure: &str, deadline_ms: u64| json!({"run": {"command": line(run)}, "on_failure": on_failure, "deadline_ms": deadline_ms});
    let ignored =
        daemon.create_from(&request(json!({"hooks": {"after_start": hook("echo said; exit 3", "ignore", 60_000)}})));
    let told = lines(&daemon, &ignored.id).into_iter().map(|event| serde_json::to_string(&event).unwrap());
    let told = told.filter(|line| line.contains("after_start")).collect::<Vec<_>>();
    assert!(told.iter().any(|line| line.contains("exited with code 3") && line.contains("said")), "{told:#?}");
    daemon.remove(&ignored.id);
    for (run, deadline_ms, why) in [
        ("exit 3", 60_000, "hook after_start: exited with code 3"),
        ("sleep 1000", 500, "hook after_start: took longer than 500 ms"),
    ] {
        let failed = fails(&daemon, json!({"hooks": {"after_start": hook(run, "abort", deadline_ms)}}));
        let cause = failed.cause.clone().expect("a cause");
        assert_eq!((cause.code.as_str(), cause.message.as_str()), ("hook_failed", why));
        daemon.remove(&failed.id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l8_what_is_done_before_a_stop_is_done_and_holds_up_nothing() {
    let daemon = Daemon::start();
    let before = |run: &str| json!({"before_stop": {"run": {"command": line(run)}, "on_failure": "abort"}});
    let made = daemon.create_from(&request(json!({"name": "box", "hooks": before("echo bye > bye")})));
    let saved = daemon.sandbox(&made.id).stop(&StopSandbox::default()).unwrap().into_sandbox();
    assert_eq!(saved.status, Status::Hibernated);
    daemon.sandbox(&made.id).ensure(&EnsureSandbox::default()).unwrap();
    assert_eq!(says(&daemon, &made.id, "cat bye"), "bye\n", "what it wrote was saved");
    daemon.remove(&made.id);
    // One that hangs, and must not fail, is given up: the stop goes on.
    let stuck = daemon.create_from(&request(json!({"hooks": before("sleep 1000")})));
    let over = daemon.sandbox(&stuck.id).stop(&StopSandbox::default()).unwrap().into_sandbox();
    assert_eq!(over.status, Status::Stopped);
    let told = lines(&daemon, &stuck.id).into_iter().map(|event| serde_json::to_string(&event).unwrap());
    assert!(told.into_iter().any(|line| line.contains("before_stop") && line.contains("took longer than 3000 ms")));
    daemon.assert_nothing_left();
}

#[test]
fn a_file_says_what_a_sandbox_is_to_be() {
    let daemon = Daemon::start();
    let file = daemon.data.join("box.toml");
    let text = "labels = { team = \"a\" }\n[[services]]\nname = \"idle\"\nargv = [\"sleep\", \"1000\"]\nready = { runs_ms = 100 }\n";
    std::fs::write(&file, text).unwrap();
    let mut command = daemon.viv();
    command.args(["create", "--json", "--label", "more=b", "--service", "other=sleep 1000", "--spec"]).arg(&file);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let made: Sandbox = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = made.services.iter().map(|service| service.name.as_str()).collect();
    assert_eq!((made.status, names), (Status::Ready, vec!["idle", "other"]));
    assert_eq!(made.labels.len(), 2);
    daemon.remove(&made.id);
    std::fs::write(&file, "misspelt = 1\n").unwrap();
    let output = daemon.viv().args(["create", "--spec"]).arg(&file).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    daemon.assert_nothing_left();
}

/// A webhook is a request that somebody outside can check; its secret is told to nobody.
#[test]
fn s6_a_webhook_is_signed_and_its_secret_is_shown_nowhere() {
    use std::io::{Read, Write};
    const SECRET: &str = "a-secret-that-nobody-reads";
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let hook = json!({"run": {"webhook": {"url": format!("http://{address}/hook?token=hidden"), "secret": SECRET}},
                      "on_failure": "abort", "deadline_ms": 60_000});
    // The machine itself is no address for webhooks, unless the daemon is set up so.
    let mut daemon = Daemon::start();
    let refused = fails(&daemon, json!({"hooks": {"after_start": hook}}));
    assert!(refused.cause.as_ref().is_some_and(|cause| cause.message.contains("private address")), "{refused:#?}");
    daemon.remove(&refused.id);
    daemon.end();
    std::fs::create_dir_all(daemon.data.join("viv")).unwrap();
    let file = daemon.data.join("viv/config.toml");
    std::fs::write(&file, "[hooks]\nprivate_addresses = true\n").unwrap();
    daemon.run(&[("VIV_CONFIG", file.to_str().unwrap())]);
    let heard = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let (mut heard, mut buffer) = (Vec::new(), [0; 4096]);
        while !heard.ends_with(b"}") {
            let read = connection.read(&mut buffer).unwrap();
            assert!(read > 0, "it hung up");
            heard.extend_from_slice(&buffer[..read]);
        }
        connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        String::from_utf8(heard).unwrap()
    });
    let made = daemon.create_from(&request(json!({"hooks": {"after_start": hook}})));
    let heard = heard.join().unwrap();
    assert!(heard.to_lowercase().contains("vivarium-signature: t="), "{heard}");
    assert!(heard.contains("after_start") && heard.contains(made.id.as_str()), "{heard}");
    let told = lines(&daemon, &made.id).iter().map(|event| serde_json::to_string(event).unwrap()).collect::<String>();
    let shown = serde_json::to_string(&daemon.sandbox(&made.id).diagnosis().unwrap()).unwrap();
    for (what, text) in [("journal", &told), ("diagnosis", &shown), ("log", &daemon.said())] {
        assert!(!text.contains(SECRET) && !text.contains("token=hidden"), "{what}: {text}");
    }
    assert!(told.contains("was delivered"), "{told}");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l14_on_timeout_is_performed_ahead_of_the_hard_deadline() {
    let daemon = Daemon::start();
    let hook = json!({"run": {"command": line("echo soon > soon")}, "deadline_ms": 15_000});
    let body = json!({"name": "box", "hooks": {"on_timeout": hook}, "policy": {"lifetime_ms": 30_000}});
    let made = daemon.create_from(&request(body));
    let saved = daemon.wait_for(&made.id, "its time is up and it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(saved.generation, made.generation);
    let told = lines(&daemon, &made.id).iter().map(|event| serde_json::to_string(event).unwrap()).collect::<Vec<_>>();
    let told = told.into_iter().filter(|line| line.contains("on_timeout")).collect::<Vec<_>>();
    assert!(told.len() == 1 && told[0].contains("exited with code 0"), "{told:#?}");
    daemon.sandbox(&made.id).ensure(&EnsureSandbox::default()).unwrap();
    assert_eq!(says(&daemon, &made.id, "cat soon"), "soon\n");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}
