//! Who is with a command stays with it, whatever becomes of its sandbox meanwhile (X2, X5): nothing is left out, nothing
//! comes twice, no end is told before there is one, and nobody who comes back is in the way of a dump.
#![allow(clippy::wildcard_imports, reason = "a part of the tests beside it")]

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread;

use support::restart::instance_folder;

use super::*;

/// Counts until it is told that it is enough, says what it was given to read, and ends with a code of its own.
const WORK: &str = "
import os, sys, time
i = 0
while not os.path.exists('/workspace/enough'):
    i += 1
    print(i)
    time.sleep(0.02)
print('given', sys.stdin.readline().strip())
sys.exit(7)
";

/// More than are ever there, so that some of them come back at every moment.
const FOLLOWERS: usize = 20;

#[test]
fn x5_who_follows_stays_over_a_hibernation_and_a_fork() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    // As on a crowded machine: everybody has come back before it begins, if he can.
    staged.when("dump", "sleep 2");
    let made = staged.daemon.create_from(&request("box", &json!({})));
    let (daemon, id) = (&staged.daemon, &made.id);
    let mut viv = daemon.viv();
    viv.args(["exec", "--interactive", "--timeout", "none", "box", "--", "python3", "-u", "-c", WORK]);
    let mut viv = viv.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (mut stdout, copy) = (viv.stdout.take().unwrap(), Arc::clone(&heard));
    let reader = thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(count @ 1..) = stdout.read(&mut piece) {
            copy.lock().unwrap().extend_from_slice(&piece[..count]);
        }
    });
    let length = || heard.lock().unwrap().len();
    eventually_within(PATIENCE, "it counts", || length() > 20);
    let execution = daemon.sandbox(id).executions_all().next().unwrap().unwrap().id;
    let others = thread::scope(|scope| {
        let follow = |_| {
            let execution = execution.clone();
            scope.spawn(move || {
                let (mut said, mut end) = (Vec::new(), None);
                for line in daemon.sandbox(id).execution(execution).follow(0) {
                    match line.unwrap() {
                        OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap()),
                        OutputLine::Cut(cut) => panic!("output was cut: {cut:?}"),
                        OutputLine::End(last) => end = last.end.exit_code,
                        OutputLine::Alive(_) => {}
                    }
                }
                (said, end)
            })
        };
        let others: Vec<_> = (1..FOLLOWERS).map(follow).collect();
        let saved = stop(daemon, id);
        assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
        assert!(viv.try_wait().unwrap().is_none(), "it has not ended");
        // What is given meanwhile is kept for it.
        viv.stdin.take().unwrap().write_all(b"this\n").unwrap();
        ensure(daemon, id);
        let before = length();
        eventually_within(PATIENCE, "more is heard", || length() > before + 20);
        let fork = Fork { memory: true, wait_ms: Some(WaitMs::new(0).unwrap()), ..Fork::default() };
        let forked = daemon.sandbox(id).fork(&fork, None).unwrap();
        let before = length();
        eventually_within(PATIENCE, "and more", || length() > before + 20);
        let log = fs::read_to_string(instance_folder(daemon, id).join("shim.log")).unwrap();
        assert!(!log.contains("its memory was not saved"), "nobody was in the way: {log}");
        assert!(viv.try_wait().unwrap().is_none(), "it has not ended");
        daemon.wait_for(&forked.sandboxes[0].id, "it is ready", |now| now.status == Status::Ready);
        daemon.remove(&forked.sandboxes[0].id);
        run(&daemon.sandbox(id), "touch enough");
        others.into_iter().map(|other| other.join().unwrap()).collect::<Vec<_>>()
    });
    let ended = viv.wait_with_output().unwrap();
    reader.join().unwrap();
    assert_eq!(ended.status.code(), Some(7), "{}", String::from_utf8_lossy(&ended.stderr));
    let heard = String::from_utf8(heard.lock().unwrap().clone()).unwrap();
    let (counted, given) = heard.rsplit_once("given ").expect("it told what it was given");
    assert_eq!(given, "this\n");
    assert_counts(counted);
    for (said, end) in others {
        assert_eq!((String::from_utf8(said).unwrap(), end), (heard.clone(), Some(7)));
    }
    let ends = told(daemon, id, "execution.ended").into_iter().filter(|end| end.message.contains(execution.as_str()));
    let ends: Vec<_> = ends.map(|end| end.message).collect();
    assert!(ends.len() == 1 && ends[0].contains("exited with 7"), "one end is written: {ends:?}");
    daemon.remove(id);
    daemon.assert_nothing_left();
}
