//! Forks share on disk what they have in common, for as long as anybody has it (L13); who has nothing in common with
//! anybody that stays is packed whole.
#![allow(clippy::wildcard_imports, reason = "a part of the tests beside it")]

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;

use super::*;

const MIB: u64 = 1 << 20;

/// So often it is tried to come in between.
const TRIES_MAX: u32 = 5;

/// Holds random bytes, which nobody packs smaller; changes an eighth of a mebibyte in each of sixteen places, and says what
/// all of it hashes to, when it is asked.
const HOLD: &str = "
import hashlib, os, sys, time
os.chdir('/workspace')
held = bytearray(os.urandom(int(sys.argv[1]) << 20))
print('it is held')
def asked(name):
    if os.path.exists(name):
        os.remove(name)
        return True
while True:
    if asked('change'):
        step = len(held) // 16
        for at in range(0, len(held), step):
            held[at:at + (1 << 17)] = os.urandom(1 << 17)
    if asked('ask'):
        with open('sum.new', 'w') as file:
            file.write(hashlib.sha256(held).hexdigest())
        os.rename('sum.new', 'sum')
    time.sleep(0.02)
";

fn hold(daemon: &Daemon, name: &str, mib: u64) -> Sandbox {
    let made = daemon.create_from(&request(name, &json!({})));
    let holder = start(daemon, &made.id, &["python3", "-u", "-c", HOLD, &mib.to_string()]);
    until_more(daemon, &made.id, &holder.id, 0);
    made
}

/// What is held inside, by the word of who holds it.
fn sum(daemon: &Daemon, id: &SandboxId) -> String {
    run(&daemon.sandbox(id), "rm -f sum; touch ask; while [ ! -s sum ]; do sleep 0.05; done; cat sum").0
}

fn change(daemon: &Daemon, id: &SandboxId) -> String {
    run(&daemon.sandbox(id), "touch change; while [ -e change ]; do sleep 0.05; done");
    sum(daemon, id)
}

fn fork(daemon: &Daemon, of: &SandboxId, count: u64) -> Vec<Sandbox> {
    let count = Some(viv_api::bound::ForkCount::new(count).unwrap());
    let fork = Fork { count, memory: true, wait_ms: Some(WaitMs::new(0).unwrap()), ..Fork::default() };
    let forked = daemon.sandbox(of).fork(&fork, None).unwrap();
    let ready = |fork: &Sandbox| daemon.wait_for(&fork.id, "it is ready", |now| now.status == Status::Ready);
    forked.sandboxes.iter().map(ready).collect()
}

/// The files that dumps are on disk, each once, by what they take there.
fn on_disk(dumps: &[PathBuf]) -> u64 {
    let mut found = BTreeMap::new();
    let mut folders: Vec<PathBuf> = dumps.to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            if meta.is_dir() {
                folders.push(entry.path());
            }
            found.insert(meta.ino(), meta.blocks() * 512);
        }
    }
    found.values().sum()
}

fn shares(dump: &Path) -> bool {
    dump.join("kept/images/base").is_dir()
}

/// All dumps that there are.
fn dumps(daemon: &Daemon) -> Vec<PathBuf> {
    let folder = fs::read_dir(daemon.provider_folder().join("memory")).unwrap();
    folder.map(|entry| entry.unwrap().path()).collect()
}

fn snapshot(daemon: &Daemon, saved: &Sandbox) -> Value {
    let id = saved.memory.as_ref().and_then(|memory| memory.snapshot.clone()).expect("it is kept");
    let shown = daemon.viv().args(["--json", "snapshot", "show", id.as_str()]).output().unwrap();
    serde_json::from_slice(&shown.stdout).unwrap()
}

#[test]
fn l13_forks_share_what_they_have_in_common_on_disk() {
    const HELD_MIB: u64 = 64;
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = hold(&daemon, "box", HELD_MIB);
    let forks = fork(&daemon, &made.id, 3);
    let sums: Vec<String> = forks.iter().map(|fork| change(&daemon, &fork.id)).collect();
    let saved: Vec<Sandbox> = forks.iter().map(|fork| stop(&daemon, &fork.id)).collect();
    let kept: Vec<PathBuf> = saved.iter().map(|saved| dump_of(&daemon, saved)).collect();
    let together = on_disk(&kept);
    let each: Vec<u64> = kept.iter().map(|dump| on_disk(std::slice::from_ref(dump))).collect();
    eprintln!("together {together} bytes, each {each:?}");
    for (dump, whole) in kept.iter().zip(&each) {
        assert!(shares(dump) && *whole > HELD_MIB * MIB, "{whole}: all of it is there for each");
    }
    // All of it once, and of each what was changed: 2 MiB, and what the agent and Python did meanwhile.
    assert!(together < (HELD_MIB + 3 * 10) * MIB, "{together} of {each:?}");
    // What is told of one is what it would free.
    eventually_within(PATIENCE, "it is told what is its own", || {
        let told = snapshot(&daemon, &saved[0]);
        let (size, own) = (told["size_bytes"].as_u64().unwrap(), told["own_bytes"].as_u64().unwrap());
        size > HELD_MIB * MIB && own < 10 * MIB
    });
    // The one that they come from goes. What they began with stays, should they begin anew; by force it goes too, and they
    // have what they share.
    daemon.remove(&made.id);
    let origin: Vec<PathBuf> = dumps(&daemon).into_iter().filter(|dump| !kept.contains(dump)).collect();
    assert_eq!(origin.len(), 1, "{origin:?}");
    assert!(on_disk(&[&kept[..], &origin].concat()) < together + 10 * MIB, "all of them have it once");
    fs::remove_dir_all(&origin[0]).unwrap();
    for (fork, sum_before) in forks.iter().zip(&sums) {
        let back = ensure(&daemon, &fork.id);
        assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
        assert_eq!(sum(&daemon, &fork.id), *sum_before, "byte for byte");
    }
    // Again, compared with what the others still have, and never with a difference.
    let (first, rest) = forks.split_first().unwrap();
    let sum_after = change(&daemon, &first.id);
    let again = stop(&daemon, &first.id);
    assert!(shares(&dump_of(&daemon, &again)));
    for fork in rest {
        daemon.remove(&fork.id);
    }
    let back = ensure(&daemon, &first.id);
    assert_eq!((memory(&back).0, sum(&daemon, &first.id)), (MemoryState::Restored, sum_after.clone()));
    // Alone, it is whole, and nothing else is left.
    let alone = dump_of(&daemon, &stop(&daemon, &first.id));
    assert!(!shares(&alone));
    eventually_within(PATIENCE, "one dump is left", || dumps(&daemon) == [alone.clone()]);
    ensure(&daemon, &first.id);
    assert_eq!(sum(&daemon, &first.id), sum_after);
    daemon.remove(&first.id);
    eventually_within(PATIENCE, "no dump is left", || dumps(&daemon).is_empty());
    daemon.assert_nothing_left();
}

#[test]
fn l13_who_hibernates_again_is_packed_whole_and_leaves_one_dump() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = hold(&daemon, "box", 8);
    let before = sum(&daemon, &made.id);
    for _ in 0..2 {
        let saved = stop(&daemon, &made.id);
        let dump = dump_of(&daemon, &saved);
        assert!(!shares(&dump));
        eventually_within(PATIENCE, "one dump is left", || dumps(&daemon) == [dump.clone()]);
        assert_eq!(memory(&ensure(&daemon, &made.id)).0, MemoryState::Restored);
        assert_eq!(sum(&daemon, &made.id), before);
    }
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_damage_of_what_is_shared_is_followed_by_the_files_of_each() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = hold(&daemon, "box", 8);
    run(&daemon.sandbox(&made.id), "echo kept > file");
    let forks = fork(&daemon, &made.id, 2);
    let saved: Vec<Sandbox> = forks.iter().map(|fork| stop(&daemon, &fork.id)).collect();
    let base = dump_of(&daemon, &saved[0]).join("kept/images/base");
    let packed = fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path());
    let largest = packed.max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    assert_eq!(fs::metadata(&largest).unwrap().nlink(), 3, "of what they come from, and of both");
    let mut content = fs::read(&largest).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(&largest, content).unwrap();
    for fork in &forks {
        let back = ensure(&daemon, &fork.id);
        let (state, why) = memory(&back);
        assert!(state == MemoryState::NotRestored && why.contains("damaged"), "{state:?}: {why}");
        assert_eq!(run(&daemon.sandbox(&fork.id), "cat file").0, "kept\n");
        daemon.remove(&fork.id);
    }
    daemon.remove(&made.id);
    daemon.assert_nothing_left();
}

#[test]
fn j4_a_daemon_killed_while_it_compares_loses_nothing() {
    let Some(criu) = criu() else { return };
    let mut daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = hold(&daemon, "box", 64);
    let fork = fork(&daemon, &made.id, 1).remove(0);
    let origin = dumps(&daemon);
    let linked = |images: &Path| fs::read_dir(images.join("base")).is_ok_and(|mut links| links.next().is_some());
    let is_plain = |images: &Path| {
        let paths = fs::read_dir(images).into_iter().flatten().map(|entry| entry.unwrap().path());
        let mut pages = paths.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("pages-"));
        pages.any(|path| path.extension().is_some_and(|ending| ending == "img"))
    };
    for _ in 0..TRIES_MAX {
        let sum_before = change(&daemon, &fork.id);
        let images = instance_folder(&daemon, &fork.id).join("memory/kept/images");
        let before = dumps(&daemon).len();
        let request = StopSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), ..StopSandbox::default() };
        daemon.sandbox(&fork.id).stop(&request).unwrap();
        eventually_within(PATIENCE, "something is linked", || linked(&images) || dumps(&daemon).len() > before);
        daemon.kill();
        let is_between = linked(&images) && is_plain(&images);
        daemon.restart();
        let saved = daemon.wait_for(&fork.id, "it is saved", |now| now.status == Status::Hibernated);
        assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
        let dump = dump_of(&daemon, &saved);
        assert!(shares(&dump) && !is_plain(&dump.join("kept/images")));
        // Of both there are all bytes, whoever was killed on the way.
        assert!(on_disk(&[dump, origin[0].clone()]) < (64 + 10) * MIB);
        let back = ensure(&daemon, &fork.id);
        assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
        assert_eq!(sum(&daemon, &fork.id), sum_before);
        if is_between {
            daemon.remove(&fork.id);
            daemon.remove(&made.id);
            return daemon.assert_nothing_left();
        }
    }
    panic!("it was never killed in between");
}
