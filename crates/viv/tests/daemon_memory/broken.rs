//! Whatever goes wrong with a dump or a restore is followed by the files of the same moment, and told (L13, T4).
#![allow(clippy::wildcard_imports, reason = "a part of the tests beside it")]

use super::*;

#[test]
fn l13_a_dump_that_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    for (script, why) in [("exit 1", "CRIU"), ("kill -9 $$", "CRIU")] {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        staged.when("dump", script);
        staged.begin_stop(&made.id);
        staged.assert_not_saved(&made, &execution, why);
    }
}

/// CRIU's word on a dump stays beyond the instance, which ends with the save of its files.
#[test]
fn l13_what_criu_said_of_a_dump_that_failed_stays_for_a_look() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (daemon, made) = (&staged.daemon, staged.daemon.create_from(&request("box", &json!({}))));
    let place = daemon.provider_folder().join("memory");
    let kept = || {
        let all = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.join("not-saved").exists()).collect::<Vec<_>>()
    };
    // CRIU cannot keep this, and says so when it comes to it.
    for round in 1..=5 {
        start_holder(daemon, &made.id);
        staged.begin_stop(&made.id);
        let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
        assert_eq!(memory(&saved).0, MemoryState::NotSaved, "round {round}");
        ensure(daemon, &made.id);
        collected(daemon);
        let all = kept();
        assert_eq!(all.len(), round.min(3), "the last three: {all:?}");
        let told = all.iter().filter(|path| {
            let (log, why) = (fs::read_to_string(path.join("dump.log")), fs::read_to_string(path.join("not-saved")));
            log.unwrap().contains("Error (") && memory(&saved).1.contains(why.unwrap().trim())
        });
        assert!(told.count() > 0, "{all:?}");
    }
    daemon.remove(&made.id);
    collected(daemon);
    assert!(kept().is_empty(), "with the last of its sandbox they go");
    daemon.assert_nothing_left();
}

/// Who deletes it in the middle of a dump or of a restore has it gone, whatever CRIU is at (L20).
#[test]
fn l20_what_is_deleted_in_a_dump_or_a_restore_is_gone() {
    let Some(criu) = criu() else { return };
    for verb in ["dump", "restore"] {
        let staged = Staged::new(&criu);
        let (made, _) = staged.busy();
        let daemon = &staged.daemon;
        if verb == "restore" {
            stop(daemon, &made.id);
        }
        staged.hold(verb);
        match verb {
            "dump" => staged.begin_stop(&made.id),
            _ => staged.begin_ensure(&made.id),
        }
        staged.until_held();
        daemon.remove(&made.id);
        staged.let_go();
        daemon.assert_nothing_left();
        collected(daemon);
        let memory = daemon.provider_folder().join("memory");
        let left: Vec<_> = fs::read_dir(&memory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{verb}: {left:?}");
    }
}

/// The hard deadline is the shim's, which waits for no CRIU (L5): what was on disk is saved.
#[test]
fn l5_the_hard_deadline_holds_in_the_middle_of_a_dump() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let daemon = &staged.daemon;
    let policy = json!({"policy": {"hibernate": "memory", "lifetime_ms": LIFETIME_MS}});
    let made = daemon.create_from(&request("box", &policy));
    run(&daemon.sandbox(&made.id), "echo kept > /workspace/file; sync");
    let execution = start(daemon, &made.id, &["sh", "-c", "exec sleep 99999"]).id;
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    // Nobody lets it go.
    let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::NotSaved, "{saved:#?}");
    assert_eq!(state(daemon, &made.id, &execution).0, ExecutionState::Lost);
    staged.let_go();
    let back = ensure(daemon, &made.id);
    assert_eq!(back.generation, Generation(2));
    assert_eq!(run(&daemon.sandbox(&made.id), "cat /workspace/file").0, "kept\n");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_criu_cannot_keep_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    start_holder(&staged.daemon, &made.id);
    staged.begin_stop(&made.id);
    staged.assert_not_saved(&made, &execution, "/dev/tty");
}

/// Nobody asked for it to end: what is frozen is tried once, and stays what it is when its dump fails for a reason that
/// nobody knew of.
#[test]
fn l13_what_cannot_go_to_disk_when_memory_gets_short_stays_frozen() {
    let Some(criu) = criu() else { return };
    let short = "[cleanup]\nmemory_below_percent = 100\nmemory_period_s = 1\n";
    let staged = Staged::configured(&criu, Daemon::prepare(&[]), short);
    let daemon = &staged.daemon;
    let made = daemon.create_from(&request("box", &json!({})));
    let counter = start(daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
    let before = until_more(daemon, &made.id, &counter, 0);
    let dumps = staged.folder.path().join("dumps");
    staged.when("dump", &format!("echo >> {}; exit 1", dumps.display()));
    daemon.sandbox(&made.id).freeze(&RestSandbox::default()).unwrap();
    let code = |now: &Sandbox| now.cause.as_ref().map(|cause| cause.code.clone()).unwrap_or_default();
    let is_left = |now: &Sandbox| now.status == Status::Frozen && code(now) == "memory_not_saved";
    let stays = daemon.wait_for(&made.id, "it was tried and stays", is_left);
    assert_eq!((memory(&stays).0, stays.generation), (MemoryState::NotSaved, Generation(1)));
    assert!(stays.cause.unwrap().message.contains("memory cannot be saved"));
    // Others go, and it is left alone though it is the longest frozen.
    fs::remove_file(staged.folder.path().join("hook")).unwrap();
    for name in ["one", "two"] {
        let other = daemon.create_from(&request(name, &json!({})));
        daemon.sandbox(&other.id).freeze(&RestSandbox::default()).unwrap();
        daemon.wait_for(&other.id, "it is on disk", |now| now.status == Status::Hibernated);
        daemon.remove(&other.id);
    }
    assert!(is_left(&daemon.wait_for(&made.id, "it is told", |_| true)));
    assert_eq!(fs::read_to_string(&dumps).unwrap().lines().count(), 1);
    // All that it holds is there.
    let back = ensure(daemon, &made.id);
    assert_eq!((back.generation, state(daemon, &made.id, &counter).0), (Generation(1), ExecutionState::Running));
    assert_counts(&until_more(daemon, &made.id, &counter, before.len()));
    // Who stops it has its files saved, whatever becomes of its memory.
    staged.when("dump", "exit 1");
    staged.begin_stop(&made.id);
    let saved = daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::NotSaved);
    assert_eq!(state(daemon, &made.id, &counter).0, ExecutionState::Lost);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_is_in_the_way_is_said_beforehand_with_who_holds_it() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("box", &json!({})));
    let check = |wanted: bool| {
        let output = daemon.viv().args(["--json", "checkpoint", "--check", "box"]).output().unwrap();
        assert_eq!(output.status.success(), wanted, "{output:?}");
        serde_json::from_slice::<CheckpointCheck>(&output.stdout).unwrap()
    };
    let counter = start(&daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
    until_more(&daemon, &made.id, &counter, 0);
    let found = check(true);
    assert!(found.can && found.obstacles.is_empty(), "{found:#?}");
    // The daemon says by what it does it, which need not be what this process would.
    let doctor = daemon.viv().arg("doctor").env("VIV_CRIU", "/no/such/criu").output().unwrap();
    let doctor = String::from_utf8_lossy(&doctor.stdout).into_owned();
    let line = doctor.lines().find(|line| line.contains("it saves memory by CRIU")).unwrap_or_default();
    assert!(line.contains(&*criu.display().to_string()), "{doctor}");
    let holder = start_holder(&daemon, &made.id);
    let ghost = "exec 3>/workspace/ghost; rm /workspace/ghost; truncate -s 300M /proc/self/fd/3; echo it is open; exec sleep 1001";
    let ghost = start(&daemon, &made.id, &["sh", "-c", ghost]).id;
    until_more(&daemon, &made.id, &ghost, 0);
    let traced = start(&daemon, &made.id, &["python3", "-u", "-c", TRACED]).id;
    until_more(&daemon, &made.id, &traced, 0);
    // Memory with a descriptor is dumped as memory.
    let held =
        "import os, time\nos.truncate(os.memfd_create('held'), 300 << 20)\nprint('it is held')\ntime.sleep(100000)";
    let held = start(&daemon, &made.id, &["python3", "-u", "-c", held]).id;
    until_more(&daemon, &made.id, &held, 0);
    let found = check(false);
    let told = |execution: &ExecutionId, what: &str, command: &str| {
        let is_it = |one: &&viv_api::checkpoint::Obstacle| one.execution.as_ref() == Some(execution);
        let one = found.obstacles.iter().find(is_it).unwrap_or_else(|| panic!("{found:#?}"));
        assert!(one.what.contains(what) && one.pid.is_some(), "{one:?}");
        assert!(one.command.as_ref().is_some_and(|line| line.contains(command)), "{one:?}");
    };
    told(&holder, "/dev/tty", "sleep 1000");
    told(&ghost, "a file without a name of 300 MiB", "sleep 1001");
    told(&traced, "a debugger", "TRACEME");
    assert_eq!(found.obstacles.len(), 3, "{found:#?}");
    // Nobody noticed.
    let before = written(&daemon, &made.id, &counter);
    assert_counts(&until_more(&daemon, &made.id, &counter, before.len()));
    // And what was not in the way is not.
    for execution in [&holder, &ghost, &traced] {
        daemon.sandbox(&made.id).execution(execution.clone()).cancel().unwrap();
    }
    assert_eq!(memory(&stop(&daemon, &made.id)), (MemoryState::Kept, String::new()));
    assert_eq!(memory(&ensure(&daemon, &made.id)).0, MemoryState::Restored);
    assert_eq!(state(&daemon, &made.id, &held).0, ExecutionState::Running);
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn p6_the_selftest_covers_it() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let output = daemon.viv().args(["selftest"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("with its memory") && said.contains("fork with memory"), "{said}");
    daemon.assert_nothing_left();
}

#[test]
fn p6_the_selftest_fails_where_memory_is_declared_and_not_saved() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    staged.when("dump", "exit 1");
    let output = staged.daemon.viv().args(["selftest"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("says that it saves memory, and did not"), "{said}");
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_shim_killed_in_a_dump_leaves_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    assert_eq!(state(&staged.daemon, &made.id, &execution).0, ExecutionState::Suspended);
    kill(shim_pid(&staged.daemon, &made.id), Signal::KILL);
    staged.assert_not_saved(&made, &execution, "");
}

#[test]
fn j4_a_daemon_killed_in_a_dump_and_in_a_restore_loses_nothing() {
    let Some(criu) = criu() else { return };
    let mut staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    staged.hold("dump");
    staged.begin_stop(&made.id);
    staged.until_held();
    staged.daemon.kill();
    staged.daemon.restart();
    staged.let_go();
    let saved = staged.daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(memory(&saved).0, MemoryState::Kept, "{saved:#?}");
    for file in ["begun", "go"] {
        fs::remove_file(staged.folder.path().join(file)).unwrap();
    }
    staged.hold("restore");
    staged.begin_ensure(&made.id);
    staged.until_held();
    staged.daemon.kill();
    staged.daemon.restart();
    staged.let_go();
    let back = staged.daemon.wait_for(&made.id, "it is ready", |now| now.status == Status::Ready);
    assert_eq!((memory(&back).0, back.generation), (MemoryState::Restored, Generation(2)), "{back:#?}");
    assert_eq!(state(&staged.daemon, &made.id, &execution).0, ExecutionState::Running);
    assert_eq!(back.services[0].execution, made.services[0].execution);
    staged.daemon.remove(&made.id);
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_restore_that_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    for script in ["exit 1", "kill -9 $$"] {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let saved = stop(&staged.daemon, &made.id);
        staged.when("restore", script);
        staged.begin_ensure(&made.id);
        let dump = dump_of(&staged.daemon, &saved);
        staged.daemon.wait_for(&made.id, "it is ready", |now| now.status == Status::Ready);
        assert!(dump.join("kept/images").is_dir(), "it is kept for a look");
        assert!(fs::read_to_string(dump.join("not-restored")).unwrap().contains("memory"));
        staged.assert_not_restored(&made, &execution, "cannot be restored");
    }
}

#[test]
fn l13_a_fork_whose_restore_fails_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let daemon = &staged.daemon;
    staged.when("restore", "exit 1");
    let fork = Fork { memory: true, wait_ms: Some(WaitMs::new(0).unwrap()), ..Fork::default() };
    let forked = daemon.sandbox(&made.id).fork(&fork, None).unwrap();
    let forked = &forked.sandboxes[0].id;
    let back = daemon.wait_for(forked, "it is ready", |now| now.status == Status::Ready);
    let (state_of, said) = memory(&back);
    assert!(state_of == MemoryState::NotRestored && said.contains("cannot be restored"), "{back:#?}");
    assert_eq!(back.generation, Generation(2), "the attempt had the first");
    assert!(!told(daemon, forked, "sandbox.memory_not_restored").is_empty());
    assert_eq!(run(&daemon.sandbox(forked), "cat /workspace/file; pgrep -f '[9]9999'").0, "kept\n");
    assert_ne!(back.services[0].execution, made.services[0].execution, "services are started again");
    // Whom it comes from does not notice.
    assert_eq!(state(daemon, &made.id, &execution).0, ExecutionState::Running);
    let now = daemon.sandbox(&made.id).get().unwrap();
    assert_eq!((now.generation, &now.services[0].execution), (made.generation, &made.services[0].execution));
    for id in [forked, &made.id] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l13_a_damaged_image_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let saved = stop(&staged.daemon, &made.id);
    let pages = dump_of(&staged.daemon, &saved).join("kept/images/pages-1.img.zst");
    let mut content = fs::read(&pages).unwrap();
    content[100] ^= 1;
    fs::write(&pages, &content).unwrap();
    staged.begin_ensure(&made.id);
    let back = staged.assert_begins_with_files(&made, &execution, "damaged");
    // Who looks at its snapshot is told, and that its files are what they were (L10).
    let snapshot = saved.memory.and_then(|memory| memory.snapshot).expect("it was kept");
    let seen = staged.daemon.client().snapshot(&snapshot).unwrap();
    assert!(seen.integrity != Some(SnapshotIntegrity::Damaged), "{seen:#?}");
    assert!(seen.memory_damage.is_some_and(|why| why.contains("not what was dumped")));
    let shown = staged.daemon.viv().args(["snapshot", "show", snapshot.as_str()]).output().unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.lines().any(|line| line.starts_with("memory") && line.contains("DAMAGED")), "{shown}");
    staged.assert_files_only(&back, &made);
}

/// Files and memory belong together: below damaged files nothing begins, with its memory as little as without (L10).
#[test]
fn l10_what_was_saved_with_memory_and_is_damaged_is_not_begun_with() {
    type Damage = fn(&Path);
    let Some(criu) = criu() else { return };
    let longer: Damage = |file| fs::write(file, "something else\n").unwrap();
    let gone: Damage = |file| fs::remove_file(file).unwrap();
    for damage in [longer, gone] {
        let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
        let made = daemon.create_from(&request("box", &json!({})));
        let id = &made.id;
        run(&daemon.sandbox(id), "echo kept > file");
        let counter = start(&daemon, id, &["python3", "-u", "-c", COUNT]).id;
        until_more(&daemon, id, &counter, 0);
        assert_eq!(memory(&stop(&daemon, id)), (MemoryState::Kept, String::new()));
        // All of it was read by then, and nothing more is noted of it.
        eventually_within(PATIENCE, "it is hashed", || {
            let saved = daemon.sandbox(id).diagnosis().unwrap().auto_saved.expect("it was saved");
            saved.integrity == Integrity::Verified
        });
        let layers = fs::read_dir(daemon.provider_folder().join("layers/sealed")).unwrap();
        let files = layers.map(|layer| layer.unwrap().path().join("parts/root/workspace/file"));
        let files: Vec<PathBuf> = files.filter(|file| file.exists()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        damage(&files[0]);
        let failed = ensure_in_vain(&daemon, id);
        let (state_of, why) = memory(&failed);
        assert!(state_of == MemoryState::NotRestored && why.contains("damaged"), "{failed:#?}");
        assert!(failed.cause.unwrap().message.contains("damaged"));
        let saved = daemon.sandbox(id).diagnosis().unwrap().auto_saved.expect("it was saved");
        assert_eq!(saved.integrity, Integrity::Damaged);
        assert_eq!(state(&daemon, id, &counter).0, ExecutionState::Lost);
        daemon.remove(id);
        daemon.assert_nothing_left();
    }
}

#[test]
fn l13_ids_that_are_taken_are_replaced_by_others() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let id = &made.id;
    let counter = start(&staged.daemon, id, &["python3", "-u", "-c", COUNT]).id;
    let before = until_more(&staged.daemon, id, &counter, 0);
    let ids = staged.daemon.provider_folder().join("ids");
    let taken: Vec<_> = fs::read_dir(&ids).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    stop(&staged.daemon, id);
    // Somebody else has the range of ids that its processes know.
    let other = staged.daemon.create();
    std::os::unix::fs::symlink(other.id.as_str(), ids.join(&taken[0])).unwrap();
    staged.begin_ensure(id);
    let back = staged.daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
    fs::remove_file(ids.join(&taken[0])).unwrap();
    assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
    assert_eq!(state(&staged.daemon, id, &execution).0, ExecutionState::Running);
    assert_counts(&until_more(&staged.daemon, id, &counter, before.len()));
    let script = "cat file; echo more >> file; awk '{print $2}' /proc/self/uid_map";
    let said = run(&staged.daemon.sandbox(id), script).0;
    assert!(said.starts_with("kept\n") && !said.contains(taken[0].to_str().unwrap()), "{said}");
    for id in [id, &other.id] {
        staged.daemon.remove(id);
    }
    staged.daemon.assert_nothing_left();
}

#[test]
fn l13_a_machine_that_lacks_something_is_followed_by_the_files() {
    type Change = fn(&mut Value);
    let Some(criu) = criu() else { return };
    // It is of a machine with a newer kernel, with processors that can do more, of another kind.
    let flag: Change = |machine| machine["cpu_flags"].as_array_mut().expect("a list").push(json!("fly"));
    let kernel: Change = |machine| machine["kernel"] = json!("99.1.0");
    let kind: Change = |machine| machine["architecture"] = json!("pdp11");
    let others =
        [(kernel, "Linux 99.1.0"), (flag, "whose processors can do more (fly"), (kind, "a machine with pdp11")];
    for (make_other, why) in others {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let saved = stop(&staged.daemon, &made.id);
        let path = dump_of(&staged.daemon, &saved).join("manifest.json");
        let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        make_other(&mut manifest["machine"]);
        fs::write(&path, manifest.to_string()).unwrap();
        staged.begin_ensure(&made.id);
        staged.assert_not_restored(&made, &execution, why);
    }
}

#[test]
fn l13_a_shim_killed_in_a_restore_leaves_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    staged.hold("restore");
    staged.begin_ensure(&made.id);
    staged.until_held();
    kill(shim_pid(&staged.daemon, &made.id), Signal::KILL);
    staged.assert_not_restored(&made, &execution, "");
}

#[test]
fn t4_what_was_restored_and_dies_at_once_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    // Everything is there, and has ended before anybody does anything with it: first of all it would get its name.
    let criu_path = criu.display();
    let script = format!(
        "{criu_path} \"$@\" || exit 1; for word in \"$@\"; do case $before in --pidfile) file=$word ;; esac; before=$word; done; \
         pid=$(cat $file); kill -9 $pid; while readlink /proc/$pid/ns/uts >/dev/null; do sleep 0.01; done; exit 0"
    );
    staged.when("restore", &script);
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, "naming it failed");
}

/// It is there, and cannot be verified: its agent dies while a service is waited for.
#[test]
fn t4_what_was_restored_and_does_not_work_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let daemon = &staged.daemon;
    // It reports in when it is started again, and not when it goes on.
    let serve = "[ -e started ] && touch reported; touch started; trap : USR1; while true; do sleep 0.05; done";
    let service = json!({
        "name": "web", "argv": ["sh", "-c", serve], "ready": {"runs_ms": 50},
        "nudge": {"signal": 10, "reports": {"command": ["test", "-e", "reported"]}},
    });
    let made = daemon.create_from(&request("box", &json!({"services": [service]})));
    run(&daemon.sandbox(&made.id), "echo kept > /workspace/file");
    let execution = start(daemon, &made.id, &["sh", "-c", "exec sleep 99999"]).id;
    let dump = dump_of(daemon, &stop(daemon, &made.id));
    staged.begin_ensure(&made.id);
    let restored = daemon.wait_for(&made.id, "it is being verified", |now| {
        now.phase == Phase::Verifying && now.generation == Generation(2)
    });
    assert_eq!(memory(&restored).0, MemoryState::Restored);
    let agent = fs::read_to_string(instance_folder(daemon, &made.id).join("init.pid")).unwrap();
    kill(agent.trim().parse().unwrap(), Signal::KILL);
    staged.assert_begins_with_files(&made, &execution, "what was restored does not work");
    // It stays for a look, with what CRIU said, though its snapshot is replaced by the next one.
    assert_kept_for_a_look(&dump, "what was restored does not work");
    assert_eq!(memory(&stop(daemon, &made.id)).0, MemoryState::Kept);
    collected(daemon);
    assert_kept_for_a_look(&dump, "what was restored does not work");
    assert_eq!(memory(&ensure(daemon, &made.id)), (MemoryState::Restored, String::new()), "the next one is another");
    assert_eq!(run(&daemon.sandbox(&made.id), "cat /workspace/file").0, "kept\n");
    // Until nothing of its sandbox is there.
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_a_full_disk_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    if let Err(why) = Disk::make(&["mkfs.ext4", "-q", "-F"], "", 96) {
        return criu::pass_over(&why);
    }
    middle::until_it_comes_so_far(|| {
        let disk = Disk::make(&["mkfs.ext4", "-q", "-F"], "", 96).unwrap();
        let staged = Staged::on(&criu, Daemon::in_house(House::on_disk(&disk)));
        let (made, execution) = staged.busy();
        let hold = "import time\nheld = bytearray(b'x' * (160 << 20))\nprint('it holds much')\ntime.sleep(100000)";
        let holder = start(&staged.daemon, &made.id, &["python3", "-u", "-c", hold]).id;
        until_more(&staged.daemon, &made.id, &holder, 0);
        staged.assert_not_saved_once_written(&made, &execution, "No space left")
    });
}

/// One look at a busy start is not the last word: what the doctor says is what is done, without another daemon.
#[test]
fn l13_a_criu_that_works_later_is_used_by_the_daemon_that_runs() {
    let Some(criu) = criu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("criu");
    let write = |then: &str| {
        let text = format!("#!/bin/sh\n[ $1 = --version ] || {then}\nexec {} \"$@\"\n", criu.display());
        fs::write(folder.path().join("new"), text).unwrap();
        fs::set_permissions(folder.path().join("new"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(folder.path().join("new"), &path).unwrap();
    };
    write("exit 1");
    let daemon = Daemon::start_with(&["--criu", path.to_str().unwrap()]);
    let says = |daemon: &Daemon| {
        let told = daemon.client().doctor().unwrap();
        let one = told.capabilities.into_iter().find(|one| one.name == "save_memory").expect("it is told");
        assert_eq!(one.has, told.saves_memory_by.is_some(), "it says one thing");
        (one.has, one.reason.unwrap_or_default())
    };
    let (has, why) = says(&daemon);
    assert!(!has && why.contains("does not work here"), "{why}");
    let made = daemon.create_from(&request("box", &json!({})));
    let counter = |daemon: &Daemon| {
        let counter = start(daemon, &made.id, &["python3", "-u", "-c", COUNT]).id;
        let before = until_more(daemon, &made.id, &counter, 0);
        (counter, before)
    };
    counter(&daemon);
    let (state_of, said) = memory(&stop(&daemon, &made.id));
    assert!(state_of == MemoryState::NotSaved && said.contains("does not work here"), "{said}");
    write("true");
    assert_eq!(says(&daemon), (true, String::new()));
    ensure(&daemon, &made.id);
    let (execution, before) = counter(&daemon);
    assert_eq!(memory(&stop(&daemon, &made.id)), (MemoryState::Kept, String::new()));
    assert_eq!(memory(&ensure(&daemon, &made.id)), (MemoryState::Restored, String::new()));
    assert_counts(&until_more(&daemon, &made.id, &execution, before.len()));
    // And the other way round: what is gone is not promised.
    fs::remove_file(&path).unwrap();
    let (has, why) = says(&daemon);
    assert!(!has && why.contains("there is no program"), "{why}");
    let (state_of, said) = memory(&stop(&daemon, &made.id));
    assert!(state_of == MemoryState::NotSaved && said.contains("there is no program"), "{said}");
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_without_any_criu_everything_works_and_says_so() {
    for arguments in [["--criu", "/no/such/criu"], ["--save-memory", "off"]] {
        let folder = tempfile::tempdir().unwrap();
        let staged = Staged { daemon: Daemon::start_with(&arguments), folder };
        let (made, execution) = staged.busy();
        assert_eq!(made.policy.hibernate, Hibernate::Memory, "what is asked for is kept");
        let why = if arguments[0] == "--criu" { "there is no program /no/such/criu" } else { "switched off" };
        staged.begin_stop(&made.id);
        let saved = staged.daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
        assert!(memory(&saved).1.contains(why), "{saved:#?}");
        assert_eq!(state(&staged.daemon, &made.id, &execution).1.as_deref(), Some("hibernated"));
        let back = ensure(&staged.daemon, &made.id);
        // Asked beforehand it says so, and what cannot be done without it is refused, and nothing made.
        let said = |arguments: &[&str]| {
            let output = staged.daemon.viv().args(arguments).output().unwrap();
            assert!(!output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        };
        for arguments in [&["--json", "checkpoint", "--check", "box"][..], &["fork", "--memory", "box"]] {
            let said = said(arguments);
            assert!(said.contains(why), "{arguments:?}: {said}");
        }
        assert_eq!(all(staged.daemon.client()).len(), 1);
        staged.assert_files_only(&back, &made);
    }
    // Who cannot do without is told at once.
    let house = House::with_arguments(&["--criu", "/no/such/criu", "--save-memory", "on"]);
    let mut refused = house.spawn(&[], &[]);
    assert!(!refused.wait().success());
    assert!(refused.said().contains("there is no program /no/such/criu"), "{}", refused.said());
}
