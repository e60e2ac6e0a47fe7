//! A daemon that comes again finds its sandboxes as they are (J4, T4).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use support::restart::{House, all, create, instance_folder, settled, shim_pid};
use support::{eventually, is_alive, kill};
use viv_api::client::Client;
use viv_api::execution::{ExecutionState, OutputLine, StartExecution};
use viv_api::sandbox::{Phase, Status};
use viv_core::{ExecutionId, SandboxId};

/// Waits for a signal, says so, and ends.
const PATIENT: &str = "trap 'echo heard; exit 7' USR1; echo begun; while :; do sleep 0.02; done";

fn sh(script: &str) -> StartExecution {
    StartExecution::of(["sh", "-c", script]).unwrap()
}

fn output(client: &Client, sandbox: &SandboxId, execution: &ExecutionId) -> String {
    let lines = client.sandbox(sandbox).execution(execution.clone()).output(0);
    let text = |line| match line {
        OutputLine::Chunk(chunk) => chunk.text.unwrap(),
        OutputLine::Cut(_) | OutputLine::End(_) | OutputLine::Alive(_) => String::new(),
    };
    lines.map(|line| text(line.unwrap())).collect()
}

/// Pid of the patient command, as the host sees it.
fn patient_pid(house: &House) -> u32 {
    let is_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"sh\0") && String::from_utf8_lossy(&line).contains("echo heard")
    };
    house.processes().into_iter().find(is_it).expect("the command runs")
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn j4_sandboxes_run_on(signal: Signal) {
    let house = House::new();
    let mut daemon = house.start();
    let client = daemon.client();
    let sandbox = create(&client);
    let id = &sandbox.id;
    let run = client.sandbox(id).start(&sh(PATIENT), None).unwrap();
    eventually("it began", || output(&client, id, &run.id) == "begun\n");
    let (shim, patient) = (shim_pid(&house, id), patient_pid(&house));

    daemon.signal(signal);
    let status = daemon.wait();
    assert_eq!(status.success(), signal == Signal::TERM, "{status}: {}", daemon.said());
    assert!(is_alive(patient) && is_alive(shim));
    // It ends while there is no daemon.
    kill(patient, Signal::USR1);
    eventually("it ends", || !is_alive(patient));

    let began_ms = now_ms();
    let daemon = house.start();
    let client = daemon.client();
    let seen = client.sandbox(id).get().unwrap();
    assert_eq!((seen.phase, seen.generation), (Phase::Ready, sandbox.generation));
    assert_eq!(shim_pid(&house, id), shim);
    let ended = client.sandbox(id).execution(run.id.clone()).get().unwrap();
    assert_eq!((ended.state, ended.exit_code), (ExecutionState::Exited, Some(7)));
    assert_eq!(ended.argv, run.argv, "what it was told to run is known to who did not start it");
    assert_eq!(output(&client, id, &run.id), "begun\nheard\n");
    // The first use finds it probed by this daemon (T4).
    client.sandbox(id).start(&sh("true"), None).unwrap();
    let seen = client.sandbox(id).get().unwrap();
    assert_eq!((seen.status, seen.generation), (Status::Ready, sandbox.generation));
    assert!(seen.evidence.latest_at_ms().unwrap() >= began_ms, "{:?} is from before {began_ms}", seen.evidence);
    assert_eq!(client.sandbox(id).executions_all().count(), 2);

    client.sandbox(id).delete(None).unwrap();
    assert_eq!(settled(&client, id).phase, Phase::Stopped);
    house.assert_nothing_left();
}

#[test]
fn j4_incident_6_sandboxes_run_on_through_kill_9_and_are_found_with_exit_codes_and_output() {
    j4_sandboxes_run_on(Signal::KILL);
}

#[test]
fn j4_sandboxes_run_on_through_a_graceful_end_and_are_found_with_exit_codes_and_output() {
    j4_sandboxes_run_on(Signal::TERM);
}

#[test]
fn t4_what_broke_while_nobody_looked_is_not_used_in_the_dark() {
    let house = House::new();
    let mut daemon = house.start();
    let sandbox = create(&daemon.client());
    let id = &sandbox.id;
    daemon.kill();
    let agent = fs::read_to_string(instance_folder(&house, id).join("init.pid")).unwrap().trim().parse().unwrap();
    kill(agent, Signal::STOP);

    let daemon = house.start();
    let client = daemon.client();
    // It was ready when it was last looked at, and is asked to work: it is probed first, and refused.
    let refused = client.sandbox(id).start(&sh("touch /workspace/used"), None).unwrap_err();
    assert!(refused.code().is_some(), "{refused:?}");
    kill(agent, Signal::CONT);
    let seen = settled(&client, id);
    assert_eq!(
        (seen.status, seen.generation),
        (Status::Ready, sandbox.generation),
        "one failed probe ends nothing (T7)"
    );
    let looked = client.sandbox(id).start(&sh("ls -A /workspace"), None).unwrap();
    let handle = client.sandbox(id).execution(looked.id.clone());
    eventually("it looked", || handle.get().unwrap().state.is_final());
    assert_eq!(output(&client, id, &looked.id), "", "what was refused did not run");
    assert_eq!(client.sandbox(id).executions_all().count(), 1);

    client.sandbox(id).delete(None).unwrap();
    settled(&client, id);
    house.assert_nothing_left();
}

#[test]
fn j4_what_ended_while_nobody_looked_is_found_ended() {
    let house = House::new();
    let mut daemon = house.start();
    let client = daemon.client();
    let (lost, kept) = (create(&client), create(&client));
    daemon.kill();
    kill(shim_pid(&house, &lost.id), Signal::KILL);
    let daemon = house.start();
    let client = daemon.client();
    eventually("it is lost", || client.sandbox(&lost.id).get().unwrap().phase == Phase::Lost);
    let cause = client.sandbox(&lost.id).get().unwrap().cause.unwrap();
    assert!(!cause.code.is_empty() && cause.at_ms > 0, "{cause:?}");
    assert_eq!(settled(&client, &kept.id).status, Status::Ready);
    for sandbox in [&lost.id, &kept.id] {
        client.sandbox(sandbox).delete(None).unwrap();
        settled(&client, sandbox);
    }
    assert_eq!(all(&client), []);
    house.assert_nothing_left();
}
