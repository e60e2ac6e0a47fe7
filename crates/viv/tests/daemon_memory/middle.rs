//! What goes wrong in the middle: CRIU is killed with processes in its hands, somebody has a pid, the kernel lacks a call,
//! a file was changed, the disk fills up. Each is done to the real CRIU, and none loses what was saved.
#![allow(clippy::wildcard_imports, reason = "a part of the tests beside it")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use support::Ground;

use super::*;

/// A file may have 2 MiB: enough for what CRIU says, and less than any memory that is dumped.
const DIES_WRITING: &str = "ulimit -c 0; ulimit -f 4096";

/// What the kernel does to who writes more.
const BY_SIGXFSZ: &str = "CRIU was killed (signal 25)";

/// Takes from whoever it runs what processes are given their memory back by (`PR_SET_MM`), as a kernel does that was built
/// without. Having a filter, they may not look past those of others either.
const WITHOUT: &str = r"
import ctypes, errno, os, platform, struct, sys
LOAD, EQUALS, RETURN, ALLOW, REFUSE = 0x20, 0x15, 0x06, 0x7fff0000, 0x00050000
prctl, set_mm = {'x86_64': 157, 'aarch64': 167}[platform.machine()], 35
code = [(LOAD, 0, 0, 0), (EQUALS, 0, 3, prctl), (LOAD, 0, 0, 16), (EQUALS, 0, 1, set_mm),
        (RETURN, 0, 0, REFUSE | errno.EINVAL), (RETURN, 0, 0, ALLOW)]
kept = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *one) for one in code))
given = struct.pack('HxxxxxxQ', len(code), ctypes.addressof(kept))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, ctypes.c_char_p(given), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
";

/// On a crowded machine a client's connection may be seen half closed, and CRIU gives up before it writes anything.
const TOO_EARLY: &str = "unix";

/// Staged again so often then.
const TRIES_MAX: usize = 3;

/// A number that is nowhere but in memory, beside much that is checked to be what it was.
const HOLD: &str = "
import hashlib, os, time
held = os.urandom(1 << 20) * 24
digest, i = hashlib.sha256(held).hexdigest(), 0
while True:
    i += 1
    print(i)
    if i % 50 == 0: assert hashlib.sha256(held).hexdigest() == digest
    time.sleep(0.02)
";

impl Staged {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program of the stage's own.
    fn program(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.display().to_string()
    }

    /// What is done when CRIU has come so far in this verb.
    pub(crate) fn at(&self, verb: &str, action: &str, script: &str) {
        let test = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = {action} ] || exit 0\n{script}\n");
        let program = self.program("stage", &test);
        self.when(verb, &format!("set -- \"$@\" --action-script {program}"));
    }

    /// Stops it, and sees that it is saved without its memory: for this reason, which CRIU comes to when it writes, or
    /// because it gave up before that. True for the first of the two.
    pub(crate) fn assert_not_saved_once_written(&self, made: &Sandbox, execution: &ExecutionId, why: &str) -> bool {
        self.begin_stop(&made.id);
        let saved = self.daemon.wait_for(&made.id, "it is saved", |now| now.status == Status::Hibernated);
        let has_written = memory(&saved).1.contains(why);
        self.assert_not_saved(made, execution, if has_written { why } else { TOO_EARLY });
        has_written
    }

    /// CRIU is as it is.
    fn nothing_more(&self) {
        fs::remove_file(self.path("hook")).unwrap();
    }
}

/// Stages it again, a few times, while CRIU gives up too early.
pub(crate) fn until_it_comes_so_far(mut staged: impl FnMut() -> bool) {
    assert!((0..TRIES_MAX).any(|_| staged()), "it never came as far as that");
}

#[test]
fn l13_a_criu_killed_in_the_middle_of_a_dump_leaves_the_files() {
    let Some(criu) = criu() else { return };
    until_it_comes_so_far(|| {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let holder = start(&staged.daemon, &made.id, &["python3", "-u", "-c", HOLD]).id;
        until_more(&staged.daemon, &made.id, &holder, 0);
        staged.when("dump", DIES_WRITING);
        staged.assert_not_saved_once_written(&made, &execution, BY_SIGXFSZ)
    });
}

#[test]
fn l13_a_criu_killed_in_the_middle_of_a_fork_leaves_what_runs_as_it_was() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let (daemon, id) = (&staged.daemon, &made.id);
    let holder = start(daemon, id, &["python3", "-u", "-c", HOLD]).id;
    until_more(daemon, id, &holder, 0);
    staged.when("dump", DIES_WRITING);
    eventually_within(PATIENCE, "CRIU is killed", || {
        let refused = daemon.viv().args(["fork", "--memory", "box"]).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success(), "{said}");
        assert!(said.contains(BY_SIGXFSZ) || said.contains(TOO_EARLY), "{said}");
        said.contains(BY_SIGXFSZ)
    });
    assert_eq!(all(daemon.client()).len(), 1, "nothing was made");
    // All of it goes on with all that it had, for long enough to look at it.
    let before = written(daemon, id, &holder);
    assert_counts(&until_more(daemon, id, &holder, before.len() + 300));
    for one in [&holder, &execution, made.services[0].execution.as_ref().unwrap()] {
        assert_eq!(state(daemon, id, one).0, ExecutionState::Running);
    }
    let now = daemon.sandbox(id).get().unwrap();
    assert_eq!((now.status, now.generation), (Status::Ready, Generation(1)));
    // Nor is anything in the way of the next one.
    staged.nothing_more();
    let saved = stop(daemon, id);
    assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
    let back = ensure(daemon, id);
    assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
    let before = written(daemon, id, &holder);
    assert_counts(&until_more(daemon, id, &holder, before.len() + 300));
    daemon.remove(id);
    daemon.assert_nothing_left();
}

#[test]
fn j4_a_daemon_killed_between_a_dump_and_its_record_goes_on() {
    let Some(criu) = criu() else { return };
    let mut staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let id = &made.id;
    // So much that packing it takes a while.
    let holder = start(&staged.daemon, id, &["python3", "-u", "-c", &HOLD.replace("* 24", "* 160")]).id;
    until_more(&staged.daemon, id, &holder, 0);
    let place = staged.daemon.provider_folder().join("memory");
    let recorded = || {
        let all = fs::read_dir(&place).unwrap();
        all.map(|entry| entry.unwrap().file_name()).collect::<std::collections::BTreeSet<_>>()
    };
    for _ in 0..TRIES_MAX {
        let before = recorded();
        staged.begin_stop(id);
        let dumped = instance_folder(&staged.daemon, id).join("memory/kept/dump.json");
        eventually_within(PATIENCE, "it is dumped", || dumped.exists());
        staged.daemon.kill();
        let is_between = recorded() == before;
        staged.daemon.restart();
        let saved = staged.daemon.wait_for(id, "it is saved", |now| now.status == Status::Hibernated);
        assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
        let back = ensure(&staged.daemon, id);
        assert_eq!(memory(&back), (MemoryState::Restored, String::new()));
        let before = written(&staged.daemon, id, &holder);
        assert_counts(&until_more(&staged.daemon, id, &holder, before.len() + 200));
        assert_eq!(state(&staged.daemon, id, &execution).0, ExecutionState::Running);
        if is_between {
            staged.daemon.remove(id);
            return staged.daemon.assert_nothing_left();
        }
    }
    panic!("it was never killed in between");
}

#[test]
fn l13_a_criu_killed_in_the_middle_of_a_restore_leaves_the_files() {
    let Some(criu) = criu() else { return };
    // With nothing but the first process, and with all of them about to run.
    for action in ["setup-namespaces", "post-restore"] {
        let staged = Staged::new(&criu);
        let (made, execution) = staged.busy();
        let dump = dump_of(&staged.daemon, &stop(&staged.daemon, &made.id));
        staged.at("restore", action, "kill -9 $PPID");
        staged.begin_ensure(&made.id);
        let back = staged.assert_begins_with_files(&made, &execution, "CRIU was killed (signal 9)");
        assert_kept_for_a_look(&dump, "CRIU was killed (signal 9)");
        staged.assert_files_only(&back, &made);
    }
}

#[test]
fn l13_a_pid_that_is_taken_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    // The namespace is there, and who is to live in it is not yet.
    let take = "exec nsenter -t $CRTOOLS_INIT_PID -p sh -c \
        'n=0; while [ $n -lt 200 ]; do sleep 1000 </dev/null >/dev/null 2>&1 & n=$((n+1)); done'";
    staged.at("restore", "setup-namespaces", take);
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, "File exists");
}

#[test]
fn l13_a_kernel_that_lacks_a_call_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    // Found out when it is tried, before anybody relies on it.
    let folder = tempfile::tempdir().unwrap();
    let without = folder.path().join("without.py");
    fs::write(&without, WITHOUT).unwrap();
    let lacking = format!("exec /usr/bin/python3 {} {} \"$@\"", without.display(), criu.display());
    let path = folder.path().join("criu");
    fs::write(&path, format!("#!/bin/sh\n{lacking}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let ground = Ground::with(|config| config.criu = Some(path.clone()));
    let why = ground.provider.criu().unwrap_err();
    assert!(why.contains("does not work here: a small process cannot be"), "{why}");
    let doctor = ground.verb("doctor").env("VIV_CRIU", &path).output().unwrap();
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(said.contains("does not work here") && said.contains("scripts/prepare criu"), "{said}");
    // And when it is lacking later than that.
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    staged.when("dump", &lacking);
    staged.begin_stop(&made.id);
    staged.assert_not_saved(&made, &execution, "suspending seccomp failed");
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    stop(&staged.daemon, &made.id);
    staged.when("restore", &lacking);
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, "cannot be restored");
}

#[test]
fn l13_a_file_changed_below_it_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    // Of the machine's own userland, which sandboxes see. It is the only one that this one has open.
    let Ok(mut file) = tempfile::Builder::new().prefix("viv-test-").tempfile_in("/usr/local/share") else {
        return criu::pass_over("/usr/local/share cannot be written to");
    };
    file.write_all(b"of the machine\n").unwrap();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o644)).unwrap();
    let staged = Staged::new(&criu);
    let (made, execution) = staged.busy();
    let hold = format!("exec 3<{}; echo it is open; exec sleep 100001", file.path().display());
    let holder = start(&staged.daemon, &made.id, &["sh", "-c", &hold]).id;
    until_more(&staged.daemon, &made.id, &holder, 0);
    stop(&staged.daemon, &made.id);
    file.write_all(b"and of somebody who changed it\n").unwrap();
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, &format!("{} was changed since", file.path().display()));
}

#[test]
fn l13_a_disk_that_fills_up_before_a_restore_is_followed_by_the_files() {
    let Some(criu) = criu() else { return };
    let disk = match Disk::make(&["mkfs.ext4", "-q", "-F"], "", 256) {
        Ok(disk) => disk,
        Err(why) => return criu::pass_over(&why),
    };
    let staged = Staged::on(&criu, Daemon::in_house(House::on_disk(&disk)));
    let (made, execution) = staged.busy();
    // Packed it takes next to nothing, and whole more than there will be.
    let hold = "import time\nheld = bytearray(b'x' * (96 << 20))\nprint('it holds much')\ntime.sleep(100000)";
    let holder = start(&staged.daemon, &made.id, &["python3", "-u", "-c", hold]).id;
    until_more(&staged.daemon, &made.id, &holder, 0);
    let saved = stop(&staged.daemon, &made.id);
    assert_eq!(memory(&saved), (MemoryState::Kept, String::new()));
    let free = rustix::fs::statvfs(disk.path()).unwrap();
    let taken = (free.f_bavail * free.f_frsize).saturating_sub(64 << 20);
    rustix::fs::fallocate(
        fs::File::create(disk.path().join("taken")).unwrap(),
        rustix::fs::FallocateFlags::empty(),
        0,
        taken,
    )
    .unwrap();
    staged.begin_ensure(&made.id);
    staged.assert_not_restored(&made, &execution, "No space left");
}

/// Ends whoever follows, and at once when the test failed.
struct Over<'a> {
    is_over: &'a AtomicBool,
    has_failed: &'a AtomicBool,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.has_failed.store(thread::panicking(), Ordering::SeqCst);
        self.is_over.store(true, Ordering::SeqCst);
    }
}

#[test]
fn x2_who_follows_is_let_go_and_hears_the_rest_where_it_was() {
    let Some(criu) = criu() else { return };
    let daemon = Daemon::start_with(&["--criu", criu.to_str().unwrap()]);
    let made = daemon.create_from(&request("box", &json!({})));
    let (daemon, id) = (&daemon, &made.id);
    let counter = start(daemon, id, &["python3", "-u", "-c", COUNT]).id;
    until_more(daemon, id, &counter, 0);
    let heard = std::sync::Mutex::new(Vec::new());
    let length = || heard.lock().unwrap().len();
    let (is_over, has_failed) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let _over = Over { is_over: &is_over, has_failed: &has_failed };
        scope.spawn(|| {
            let mut offset = 0;
            // As clients do: who is let go comes back to where it was, and once more when it is over.
            for is_last in std::iter::repeat_with(|| is_over.load(Ordering::SeqCst)) {
                let mut lines = daemon.sandbox(id).execution(counter.clone()).follow(offset);
                for line in lines.by_ref().take_while(|_| !has_failed.load(Ordering::SeqCst)) {
                    match line {
                        Ok(OutputLine::Chunk(chunk)) => heard.lock().unwrap().extend(chunk.data().unwrap()),
                        Ok(OutputLine::Cut(cut)) => panic!("output was cut: {cut:?}"),
                        Ok(OutputLine::End(_) | OutputLine::Alive(_)) => {}
                        Err(_) => break,
                    }
                }
                offset = lines.offset();
                if is_last {
                    return;
                }
                // A look at it is answered whatever happens to it meanwhile.
                state(daemon, id, &counter);
            }
        });
        eventually_within(PATIENCE, "it follows", || length() > 20);
        for _ in 0..2 {
            let saved = stop(daemon, id);
            assert_eq!(memory(&saved), (MemoryState::Kept, String::new()), "who listens is not in the way");
            ensure(daemon, id);
            let before = length();
            eventually_within(PATIENCE, "it hears more", || length() > before + 20);
        }
        daemon.sandbox(id).execution(counter.clone()).cancel().unwrap();
    });
    let heard = heard.into_inner().unwrap();
    assert_eq!(String::from_utf8(heard).unwrap(), written(daemon, id, &counter), "nothing twice, and nothing left out");
    assert_counts(&written(daemon, id, &counter));
    daemon.remove(id);
    daemon.assert_nothing_left();
}
