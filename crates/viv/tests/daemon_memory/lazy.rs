//! Memory that is brought while it is used already, and lost on the way: the sandbox goes on from its files, in sight.

use rustix::process::kill_process;
use support::lazy::{MUCH_MIB, Slowed, Told, holder, servers, until_all_wait_for_pages, until_ended};
use support::restart::instance_folder;

use super::{
    Daemon, ExecutionState, MemoryState, PATIENCE, Signal, Status, assert_kept_for_a_look, criu, dump_of, ensure,
    eventually_within, json, memory, request, run, start, state, stop, support, told, until_more, written,
};

#[test]
fn t4_memory_that_is_lost_on_the_way_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let _told = Told::allowed();
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("lazily", &json!({})));
    run(&daemon.sandbox(&made.id), "echo kept > /workspace/file");
    let execution = start(&daemon, &made.id, &["python3", "-u", "-c", &holder(MUCH_MIB)]).id;
    until_more(&daemon, &made.id, &execution, 0);
    let dump = dump_of(&daemon, &stop(&daemon, &made.id));
    let folder = instance_folder(&daemon, &made.id);
    let mut slowed = Slowed::of(folder.clone());
    let resumed = ensure(&daemon, &made.id);
    assert_eq!(memory(&resumed).0, MemoryState::Restored);
    let (watcher, server) = servers(&folder).expect("its pages are being brought");
    slowed.stop();
    // Who would end it stands still, until those inside have shown what they read.
    kill_process(watcher, Signal::STOP).unwrap();
    kill_process(server, Signal::KILL).unwrap();
    until_ended(server);
    until_all_wait_for_pages(&daemon.cgroups(), &folder, &execution);
    kill_process(watcher, Signal::CONT).unwrap();
    // Its agent stood still too, so that it may have been looked at more closely before. Nobody waited for it to run.
    daemon.wait_for(&made.id, "its end is known", |now| {
        now.status == Status::Lost || now.generation > resumed.generation
    });
    let back = ensure(&daemon, &made.id);
    assert!(back.generation > resumed.generation, "{back:?}");
    assert!(!told(&daemon, &made.id, "memory_not_restored").is_empty());
    assert_kept_for_a_look(&dump, "");
    assert_eq!(run(&daemon.sandbox(&made.id), "cat /workspace/file").0, "kept\n");
    // Also when nobody had seen that it went on.
    eventually_within(PATIENCE, "it is lost", || state(&daemon, &made.id, &execution).0 == ExecutionState::Lost);
    let text = written(&daemon, &made.id, &execution);
    assert!(text.contains(" whole") && !text.contains("BROKEN"), "somebody has read something else: {text}");
    daemon.remove(&made.id);
}
