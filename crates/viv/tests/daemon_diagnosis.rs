//! Diagnosis of real sandboxes: what is said names the right thing, and the command that it proposes works (O3).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::diagnosed::{diagnosed, is_said, proposed, remedy, start, tried};
use support::disk::{Disk, Flood};
use support::eventually_within;
use support::held::Held;
use support::restart::House;
use viv_api::alert::{Alert, AlertState};
use viv_api::bound::WaitMs;
use viv_api::execution::{ExecutionState, StartExecution};
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, Status, TakeKeepAwake};
use viv_core::{Generation, SandboxId};

/// 2 MiB twenty times a second; what it took is given back before it is too much, and it begins anew.
const GROWS: &str = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * (2 << 20))\n    \
                     if len(kept) > 60: kept.clear()\n    time.sleep(0.05)";

const MEMORY_BYTES: u64 = 256 << 20;

#[test]
fn o3_a_command_whose_memory_grows_is_named_and_ended() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    let greedy = start(&daemon, &id, &["/usr/bin/python3", "-c", GROWS]);
    let (found, words) = diagnosed(&daemon, &id, "memory_growing");
    assert!(words.contains("its memory grows and grows") && words.contains("in 5 looks, never less"), "{words}");
    assert_eq!(proposed(&found, "memory_growing"), format!("viv cancel {id} {}", greedy.id));
    remedy(&daemon, &found, "memory_growing");
    let ended = daemon.sandbox(&id).execution(greedy.id).get().unwrap();
    assert_eq!(ended.state, ExecutionState::Cancelled, "{ended:#?}");
    assert!(!is_said(&daemon, &id, "memory_growing"));
    daemon.remove(&id);
}

#[test]
fn o3_commands_that_run_out_of_time_again_and_again_are_told_and_listed() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    assert!(run(&daemon.sandbox(&id), "true").1.state.is_final());
    let late = || {
        let request = StartExecution {
            limit_ms: Some(serde_json::from_value(300.into()).unwrap()),
            ..StartExecution::of(["/bin/sleep", "1000"]).unwrap()
        };
        let started = daemon.sandbox(&id).start(&request, None).unwrap();
        let handle = daemon.sandbox(&id).execution(started.id.clone());
        eventually_within(PATIENCE, "it runs out of time", || handle.get().unwrap().state.is_final());
        assert_eq!(handle.get().unwrap().state, ExecutionState::TimedOut);
        started.id.to_string()
    };
    let first = late();
    assert!(!is_said(&daemon, &id, "repeated_timeouts"), "once is no pattern");
    let second = late();
    let (found, words) = diagnosed(&daemon, &id, "repeated_timeouts");
    assert!(words.contains("2 of 3") && words.contains(&first) && words.contains(&second), "{words}");
    let listed = remedy(&daemon, &found, "repeated_timeouts");
    for late in [&first, &second] {
        let row = listed.lines().find(|line| line.contains(late.as_str())).unwrap_or_else(|| panic!("{listed}"));
        assert!(row.contains("timed_out"), "{row}");
    }
    daemon.remove(&id);
}

#[test]
fn o3_what_a_command_says_of_itself_is_quoted_with_what_helps() {
    let daemon = Daemon::start();
    let limits = serde_json::json!({ "limits": { "memory_bytes": MEMORY_BYTES } });
    let id = daemon.create_from(&serde_json::from_value(limits).unwrap()).id;
    // Each of them really happens.
    let staged = [
        ("said_stack_overflow", "def f(): f()\nf()", "RecursionError"),
        (
            "said_timeout",
            "import socket\ns = socket.socket()\ns.settimeout(0.1)\ns.listen()\ns.accept()",
            "TimeoutError",
        ),
        ("said_out_of_memory", "bytearray(1 << 60)", "MemoryError"),
        ("said_disk_full", "full = open('/dev/full', 'w')\nfull.write('x')\nfull.flush()", "No space left on device"),
        (
            "said_too_many",
            "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n\
             kept = [open('/dev/null') for _ in range(32)]",
            "Too many open files",
        ),
    ];
    for (code, script, quoted) in staged {
        assert!(!is_said(&daemon, &id, code), "{code}: nobody said it yet");
        let said = start(&daemon, &id, &["/usr/bin/python3", "-c", script]);
        let (found, words) = diagnosed(&daemon, &id, code);
        assert!(words.contains(&format!("{} wrote: ", said.id)) && words.contains(quoted), "{code}: {words}");
        let limits = daemon.sandbox(&id).resources().unwrap().limits;
        let proposed = proposed(&found, code);
        match code {
            "said_out_of_memory" => {
                assert!(proposed.starts_with(&format!("viv limits {id}")), "{proposed}");
                remedy(&daemon, &found, code);
                let now = daemon.sandbox(&id).resources().unwrap().limits;
                assert_eq!((limits.memory_bytes, now.memory_bytes), (Some(MEMORY_BYTES), Some(MEMORY_BYTES * 2)));
            }
            // It has no limit, and there is room.
            "said_disk_full" => {
                assert_eq!(proposed, format!("viv exec {id} -- df -m"));
                assert!(words.contains("there is room now"), "{words}");
                assert!(remedy(&daemon, &found, code).contains("/dev/shm"));
            }
            _ => {
                assert_eq!(proposed, format!("viv attach {id} {}", said.id));
                // It ends as the command did.
                let shown = tried(&daemon, &found, code);
                let shown = [shown.stdout, shown.stderr].concat();
                assert!(String::from_utf8_lossy(&shown).contains(quoted), "{code}: {shown:?}");
            }
        }
    }
    daemon.remove(&id);
}

/// Of many, the newest are read, and of those that say the same the last is quoted.
#[test]
fn o3_of_many_commands_the_newest_are_heard() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    let say = |words: &str| run(&daemon.sandbox(&id), words).1.id;
    for number in 0..12 {
        say(&format!("echo {number}; sleep 0.01"));
    }
    let first = say("echo cannot open: Too many open files");
    let (_, words) = diagnosed(&daemon, &id, "said_too_many");
    assert!(words.contains(&format!("{first} wrote: ")), "{words}");
    let second = say("sleep 0.01; echo cannot open either: Too many open files");
    let (_, words) = diagnosed(&daemon, &id, "said_too_many");
    assert!(words.contains(&format!("{second} wrote: cannot open either")), "{words}");
    for number in 0..8 {
        say(&format!("sleep 0.01; echo {number}"));
    }
    assert!(!is_said(&daemon, &id, "said_too_many"), "that was long ago");
    daemon.remove(&id);
}

/// Kills the agent of a sandbox while whoever would tell of its end does not get to it.
fn kill_unseen(daemon: &Daemon, id: &SandboxId) {
    let host = daemon.host(id);
    let (shim, agent) = (Held::of(host.shim_pid), Held::of(host.agent_pid));
    shim.stop();
    agent.signal(Signal::KILL);
}

#[test]
fn o3_a_dead_agent_that_nobody_told_of_is_seen_and_what_helps_leads_to_a_new_instance() {
    let daemon = Daemon::start();
    let named = serde_json::json!({ "name": "kept" });
    let kept = daemon.create_from(&serde_json::from_value(named).unwrap()).id;
    let passing = daemon.create().id;
    assert_eq!(run(&daemon.sandbox(&kept), "echo words > /workspace/file").0, "");
    kill_unseen(&daemon, &kept);
    kill_unseen(&daemon, &passing);

    let (found, words) = diagnosed(&daemon, &passing, "agent_dead");
    assert!(words.contains("the agent inside is dead"), "{words}");
    assert_eq!(proposed(&found, "agent_dead"), format!("viv show --verify {passing}"));
    let shown = remedy(&daemon, &found, "agent_dead");
    assert!(shown.contains("verifying"), "it is not said to be ready any more: {shown}");

    let (found, words) = diagnosed(&daemon, &kept, "agent_dead");
    assert!(words.contains("the agent inside is dead") && words.contains("its files are saved"), "{words}");
    assert_eq!(proposed(&found, "agent_dead"), format!("viv stop {kept}"));
    remedy(&daemon, &found, "agent_dead");
    assert_eq!(daemon.sandbox(&kept).get().unwrap().status, Status::Hibernated);

    daemon.wait_for(&passing, "it is given up", |sandbox| matches!(sandbox.status, Status::Failed | Status::Lost));
    for (id, script) in [(&kept, "cat /workspace/file"), (&passing, "echo words")] {
        let ensured = daemon.viv().args(["ensure", id.as_str()]).output().unwrap();
        assert!(ensured.status.success(), "{}", String::from_utf8_lossy(&ensured.stderr));
        let again = daemon.sandbox(id).get().unwrap();
        assert!(again.status == Status::Ready && again.generation > Generation::FIRST, "{again:#?}");
        assert_eq!(run(&daemon.sandbox(id), script).0, "words\n");
        assert!(!is_said(&daemon, id, "agent_dead"));
        daemon.remove(id);
    }
}

#[test]
fn o3_an_agent_whose_end_was_seen_is_told_as_lost_and_ensured() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    Held::of(daemon.host(&id).agent_pid).kill();
    let (found, words) = diagnosed(&daemon, &id, "lost");
    assert!(words.contains("crashed"), "{words}");
    remedy(&daemon, &found, "lost");
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(run(&daemon.sandbox(&id), "echo well").0, "well\n");
    daemon.remove(&id);
}

#[test]
fn o3_an_agent_that_is_stopped_gives_no_answer_and_is_verified_once_it_goes_on() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    let agent = Held::of(daemon.host(&id).agent_pid);
    agent.stop();
    let looked = daemon.viv().args(["show", "--verify", id.as_str()]).output().unwrap();
    assert!(looked.status.success(), "{looked:?}");
    let (found, words) = diagnosed(&daemon, &id, "no_answer");
    assert!(words.contains("the agent hangs, is stopped or frozen") && words.contains("exec probe "), "{words}");
    assert_eq!(proposed(&found, "no_answer"), format!("viv show --verify {id}"));
    agent.signal(Signal::CONT);
    remedy(&daemon, &found, "no_answer");
    let well = daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert_eq!(well.generation, Generation::FIRST, "it was there, and is kept");
    assert!(!is_said(&daemon, &id, "no_answer"));
    daemon.remove(&id);
}

#[test]
fn o3_what_a_runtime_could_not_make_has_failed_and_is_made_once_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let (runtime, broken) = (folder.path().join("runtime"), folder.path().join("broken"));
    let script = format!(
        "#!/bin/sh\n[ -e {} ] && [ \"$1\" != --version ] && {{ echo out of order >&2; exit 1; }}\nexec runc \"$@\"\n",
        broken.display()
    );
    fs::write(&runtime, script).unwrap();
    fs::set_permissions(&runtime, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(&broken, "").unwrap();
    let daemon = Daemon::start_with(&["--layers", "plain", "--runtime", runtime.to_str().unwrap()]);
    let asked = CreateSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), ..CreateSandbox::default() };
    let id = daemon.client().create(&asked, None).unwrap().into_sandbox().id;
    daemon.wait_for(&id, "it has failed", |sandbox| sandbox.status == Status::Failed);
    let (found, words) = diagnosed(&daemon, &id, "failed");
    assert!(words.contains("it could not be brought up: create_failed"), "{words}");
    assert_eq!(proposed(&found, "failed"), format!("viv ensure {id}"));
    fs::remove_file(&broken).unwrap();
    remedy(&daemon, &found, "failed");
    assert_eq!(run(&daemon.sandbox(&id), "echo well").0, "well\n");
    assert!(!is_said(&daemon, &id, "failed"));
    daemon.remove(&id);
}

fn stuck(daemon: &Daemon) -> Alert {
    let all = daemon.client().alerts().unwrap().items;
    all.into_iter().find(|alert| alert.name == "sandbox_stuck").expect("it is a rule")
}

#[test]
fn o5_the_alert_about_stuck_sandboxes_names_them_and_no_others() {
    let mut daemon = Daemon::in_house(House::with_config(
        "[alerts]\nperiod_s = 1\nresolve_after_s = 1\nstuck_after_s = 2\nrules = { sandbox_stuck = { for_s = 0 } }\n",
    ));
    daemon.run(&[]);
    let ids: BTreeSet<SandboxId> = [daemon.create().id, daemon.create().id].into();
    let awake = daemon.create().id;
    let request = TakeKeepAwake { ttl_ms: 600_000.try_into().unwrap(), reason: None };
    daemon.sandbox(&awake).keep_awake(&"wanted".parse().unwrap(), &request).unwrap();
    for id in &ids {
        start(&daemon, id, &["/bin/sleep", "1000"]);
    }
    let named = || stuck(&daemon).sandboxes.into_iter().collect::<BTreeSet<_>>();
    eventually_within(PATIENCE, "both are named", || stuck(&daemon).state == AlertState::Firing && named() == ids);
    let said = daemon.viv().arg("doctor").output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(ids.iter().all(|id| said.contains(id.as_str())) && !said.contains(awake.as_str()), "{said}");
    let query = ListEvents { kind: Some("alert.firing".parse().unwrap()), ..ListEvents::default() };
    let fired = daemon.client().events(&query).unwrap().items;
    let fired = fired.iter().find(|event| event.data["alert"] == "sandbox_stuck").expect("it is in the journal");
    let told: BTreeSet<SandboxId> = serde_json::from_value(fired.data["sandboxes"].clone()).unwrap();
    assert!(!told.is_empty() && told.is_subset(&ids), "{told:?}");

    // The command that it names, for each that it names, and what that proposes.
    let command = stuck(&daemon).command;
    assert!(ids.iter().any(|id| command == format!("viv doctor {id}")), "{command}");
    for id in &ids {
        let said = daemon.viv().args(["doctor", id.as_str()]).output().unwrap();
        assert!(String::from_utf8(said.stdout).unwrap().contains(id.as_str()));
        let (found, words) = diagnosed(&daemon, id, "waiting");
        assert!(words.contains("(sleep)"), "{words}");
        remedy(&daemon, &found, "waiting");
    }
    for id in ids.iter().chain([&awake]) {
        daemon.remove(id);
    }
    eventually_within(PATIENCE, "it is resolved", || stuck(&daemon).state != AlertState::Firing);
    assert!(named().is_empty());
}

const DISK_BYTES: u64 = 64 << 20;

/// Takes more than is left of a disk of that size, and no more than is left of one that is twice as large.
const HALF: &str = "dd if=/dev/zero of=/workspace/kept bs=1M count=40";
const OTHER_HALF: &str = "dd if=/dev/zero of=/workspace/more bs=1M count=30";

/// A sandbox whose disk a command has just found full.
fn filled(daemon: &Daemon, more: &serde_json::Value) -> SandboxId {
    let mut request = serde_json::json!({ "limits": { "disk_bytes": DISK_BYTES } });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let id = daemon.create_from(&serde_json::from_value(request).unwrap()).id;
    assert_eq!(run(&daemon.sandbox(&id), HALF).1.exit_code, Some(0));
    let (said, ended) = run(&daemon.sandbox(&id), OTHER_HALF);
    assert_eq!(ended.exit_code, Some(1), "{said}");
    id
}

/// The command that could not end ends well, and nothing else was lost.
fn assert_has_room(daemon: &Daemon, id: &SandboxId) {
    let limits = daemon.sandbox(id).resources().unwrap().limits;
    assert_eq!(limits.disk_bytes, Some(DISK_BYTES * 2));
    let (said, ended) = run(&daemon.sandbox(id), OTHER_HALF);
    assert_eq!(ended.exit_code, Some(0), "{said}");
    assert_eq!(run(&daemon.sandbox(id), "wc -c < /workspace/kept").0.trim(), (40 << 20).to_string());
}

#[test]
fn o3_a_disk_of_its_own_that_is_full_is_named_and_saved_it_goes_on_with_more() {
    let daemon = Daemon::in_house(House::new()).running();
    let id = filled(&daemon, &serde_json::json!({ "name": "kept" }));
    let (found, words) = diagnosed(&daemon, &id, "said_disk_full");
    assert!(words.contains("No space left on device") && words.contains("/ is full"), "{words}");
    assert!(words.contains("may have 64 MiB"), "{words}");
    assert_eq!(proposed(&found, "said_disk_full"), format!("viv limits {id} --disk 128M --restart"));

    // Without saying so nothing that runs is ended, and it is told what can be done.
    let refused = daemon.viv().args(["limits", id.as_str(), "--disk", "128M"]).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("keeps the size") && said.contains("--restart"), "{said}");
    assert_eq!(daemon.sandbox(&id).get().unwrap().generation, Generation::FIRST);

    remedy(&daemon, &found, "said_disk_full");
    assert_has_room(&daemon, &id);
    assert!(!is_said(&daemon, &id, "said_disk_full"));

    // While it rests, its limits are changed for when it goes on; less than it holds, or what nobody can keep, is refused.
    daemon.viv().args(["stop", id.as_str()]).output().unwrap();
    let limit = |disk: &str| daemon.viv().args(["limits", id.as_str(), "--disk", disk]).output().unwrap();
    let refused = limit("32M");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("are saved of it"), "{refused:?}");
    let limited = limit("256M");
    assert!(String::from_utf8_lossy(&limited.stdout).contains("256"), "{limited:?}");
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Hibernated, "it rests on (T9)");
    assert!(daemon.viv().args(["ensure", id.as_str()]).output().unwrap().status.success());
    assert_eq!(daemon.sandbox(&id).resources().unwrap().limits.disk_bytes, Some(256 << 20));
    daemon.remove(&id);
}

#[test]
fn o3_a_full_disk_of_what_is_not_kept_is_shown_with_what_takes_the_room() {
    let daemon = Daemon::in_house(House::new()).running();
    let id = filled(&daemon, &serde_json::json!({}));
    let (found, words) = diagnosed(&daemon, &id, "said_disk_full");
    assert!(words.contains("make room in it"), "{words}");
    let shown = remedy(&daemon, &found, "said_disk_full");
    let named = shown.lines().find(|line| line.ends_with("/workspace")).unwrap_or_else(|| panic!("{shown}"));
    let mib: u64 = named.split_whitespace().next().unwrap().parse().unwrap();
    assert!((50..=64).contains(&mib), "{shown}");
    let refused = daemon.viv().args(["limits", id.as_str(), "--disk", "128M", "--restart"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("nothing of"), "{refused:?}");
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Ready, "it was not stopped for that");
    // What it shows is what has to go.
    let (said, ended) = run(&daemon.sandbox(&id), &format!("rm /workspace/kept && {OTHER_HALF}"));
    assert_eq!(ended.exit_code, Some(0), "{said}");
    daemon.remove(&id);
}

#[test]
fn o3_a_full_disk_on_btrfs_is_given_more_while_it_runs() {
    let disk = Disk::make(&["mkfs.btrfs", "-q"], "loop", 600).unwrap();
    let quota = std::process::Command::new("btrfs").args(["quota", "enable"]).arg(disk.path()).output().unwrap();
    assert!(quota.status.success(), "{quota:?}");
    let daemon = Daemon::in_house(House::on_btrfs(&disk)).running();
    let id = filled(&daemon, &serde_json::json!({}));
    let (found, words) = diagnosed(&daemon, &id, "said_disk_full");
    assert!(words.contains("Disk quota exceeded") && words.contains("may have 64 MiB"), "{words}");
    assert_eq!(proposed(&found, "said_disk_full"), format!("viv limits {id} --disk 128M"));
    remedy(&daemon, &found, "said_disk_full");
    assert_has_room(&daemon, &id);
    assert_eq!(daemon.sandbox(&id).get().unwrap().generation, Generation::FIRST, "it ran on");
    daemon.remove(&id);
}

#[test]
fn o3_a_full_place_in_memory_is_told_from_a_full_disk() {
    let daemon = Daemon::in_house(House::new()).running();
    let limits = serde_json::json!({ "limits": { "memory_bytes": MEMORY_BYTES, "disk_bytes": DISK_BYTES } });
    let id = daemon.create_from(&serde_json::from_value(limits).unwrap()).id;
    let fill = "dd if=/dev/zero of=/dev/shm/filler bs=1M count=150";
    assert_eq!(run(&daemon.sandbox(&id), fill).1.exit_code, Some(1));
    let (found, words) = diagnosed(&daemon, &id, "said_disk_full");
    assert!(words.contains("/dev/shm is, which is in memory") && words.contains("/dev/shm is full"), "{words}");
    let shown = remedy(&daemon, &found, "said_disk_full");
    assert_eq!(shown.trim(), "128\t/dev/shm", "what takes the room");
    assert_eq!(run(&daemon.sandbox(&id), "rm /dev/shm/filler").1.exit_code, Some(0));
    assert_eq!(run(&daemon.sandbox(&id), "dd if=/dev/zero of=/dev/shm/less bs=1M count=50").1.exit_code, Some(0));
    daemon.remove(&id);
}

#[test]
fn o3_a_machine_whose_disk_is_full_is_told_and_looked_at() {
    let disk = Disk::make(&["mkfs.ext4", "-q"], "loop", 400).unwrap();
    let daemon = Daemon::in_house(House::on_disk(&disk)).running();
    let id = daemon.create().id;
    // The machine itself: nobody in a sandbox is ended for that. Nothing can be started, and nothing that is said is kept.
    let flood = Flood::of(&disk);
    let refused = daemon.sandbox(&id).start(&StartExecution::of(["/bin/true"]).unwrap(), None).unwrap_err();
    assert!(refused.to_string().contains("no space left on device"), "{refused}");
    let (found, words) = diagnosed(&daemon, &id, "disk_full");
    assert!(words.contains("the disk of the machine is full") && words.contains("/ is full"), "{words}");
    assert_eq!(proposed(&found, "disk_full"), "viv doctor");
    let said = remedy(&daemon, &found, "disk_full");
    let line = said.lines().find(|line| line.contains("(disk_full)")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("0 MiB are left of it") && line.contains("viv snapshot rm"), "{line}");
    drop(flood);
    let (said, ended) = run(&daemon.sandbox(&id), OTHER_HALF);
    assert_eq!(ended.exit_code, Some(0), "with room: {said}");
    assert!(!is_said(&daemon, &id, "disk_full"));
    daemon.remove(&id);
}
