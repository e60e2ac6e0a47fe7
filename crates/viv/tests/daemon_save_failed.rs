//! A runaway is stopped while the disk of the data folder is full: its processes end in time, its files are kept, and
//! they are saved once there is room, or given up by hand (L8, L10).
//!
//! Whoever fills the disk is ended for it if that was a sandbox (decision 11), so here it is somebody else: a file of
//! the machine itself, which takes whatever is given back at once. What a sandbox wrote before is its own to keep.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::thread;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use support::daemon::{Daemon, PATIENCE, run};
use support::disk::{Disk, Flood};
use support::restart::House;
use support::{eventually_within, is_alive, pids};
use viv_api::ErrorCode;
use viv_api::alert::AlertState;
use viv_api::bound::{SandboxName, WaitMs};
use viv_api::client::ClientError;
use viv_api::execution::{ExecutionState, StartExecution, TimeLimit};
use viv_api::query::{ListEvents, ListSandboxes};
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, FailedSave, Sandbox, Status, StopSandbox};
use viv_core::{Generation, SandboxId};

/// The user's processes end within this after an acknowledged stop, whatever they do (L8).
const ENDED_WITHIN: Duration = Duration::from_secs(5);

const DISK_MIB: u64 = 256;

/// Files of all kinds that somebody worked for.
const MAKE: &str = "set -e
    mkdir -p /workspace/tree; cd /workspace/tree
    for folder in $(seq 5); do
        mkdir $folder
        for file in $(seq 20); do echo $folder $file > $folder/$file; done
    done
    ln -s 1/1 link; ln 1/2 hard; mkfifo pipe; mkdir empty; chmod 751 3/3
    head -c 3000000 /dev/urandom > random; truncate -s 50000000 sparse";

/// Names, kinds, modes, owners, times, targets and content of everything.
const MANIFEST: &str = "set -e
    cd /workspace
    find tree -type d -printf '%p %m %U %G %T@\\n' -o -printf '%p %y %m %U %G %n %T@ %l\\n' | LC_ALL=C sort | sha256sum
    find tree -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
    find tree | wc -l";

/// Burns processors, hears nothing, and has children in sessions of their own that do the same.
const RUNAWAY: &str = "trap '' TERM HUP INT
    setsid sh -c 'trap \"\" TERM HUP INT; echo > /workspace/spins-1; while :; do :; done' &
    setsid setsid sh -c '(trap \"\" TERM HUP INT; echo > /workspace/spins-2; while :; do :; done) & exit' &
    echo > /workspace/spins-3
    while :; do wait; sleep 0.1; done";

/// The place of the records of snapshots is a disk of its own, so that what is given back elsewhere for a moment is no
/// room for them: whether a save fails is not a matter of who is faster.
struct Snapshots(PathBuf);

impl Snapshots {
    fn below(provider: &Path) -> Self {
        let at = provider.join("snapshots");
        fs::create_dir_all(&at).unwrap();
        mount("viv-small", &at, "tmpfs", MountFlags::empty(), c"size=64k").unwrap();
        Self(at)
    }

    fn fill(&self) {
        let mut filler = File::create(self.0.join("filler")).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for Snapshots {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// Where the records of the daemon are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Records {
    Elsewhere,
    OnTheDisk,
}

/// A daemon on a disk of its own, with a sandbox that has files and a runaway.
struct Stage {
    // In this order they go: what is mounted in a folder before it, and the disk last.
    snapshots: Snapshots,
    daemon: Daemon,
    disk: Disk,
    id: SandboxId,
    manifest: String,
}

impl Stage {
    fn new(records: Records) -> Self {
        let disk = Disk::make(&["mkfs.ext4", "-q", "-m", "0"], "loop", DISK_MIB).unwrap();
        let house = match records {
            Records::Elsewhere => House::on_disk(&disk),
            Records::OnTheDisk => House::wholly_on_disk(&disk),
        };
        let snapshots = Snapshots::below(&house.provider_folder());
        let mut daemon = Daemon::in_house(house);
        daemon.run(&[]);
        let name = Some(SandboxName::new("runaway").unwrap());
        let id = daemon.create_from(&CreateSandbox { name, ..CreateSandbox::default() }).id;
        said(&daemon, &id, MAKE);
        let manifest = said(&daemon, &id, MANIFEST);
        Self { snapshots, daemon, disk, id, manifest }
    }

    fn flood(&self) -> Flood {
        self.snapshots.fill();
        Flood::of(&self.disk)
    }

    fn make_room(&self, flood: Flood) {
        flood.make_room();
        self.snapshots.make_room();
    }

    /// Lets the runaway loose, and answers with what it is made of, as the machine sees it.
    fn run_away(&self) -> BTreeSet<u32> {
        let mut request = StartExecution::of(["sh", "-c", RUNAWAY]).unwrap();
        (request.detach, request.limit_ms) = (true, Some(TimeLimit::NONE));
        self.daemon.sandbox(&self.id).start(&request, None).unwrap();
        let spins = "cat /workspace/spins-* 2>/dev/null | wc -l";
        eventually_within(PATIENCE, "it runs away", || said(&self.daemon, &self.id, spins).trim() == "3");
        self.inside()
    }

    /// Everything in the sandbox's cgroups.
    fn inside(&self) -> BTreeSet<u32> {
        let is_inside = |pid: &u32| {
            let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            cgroups.contains(&self.daemon.cgroup_prefix) && is_alive(*pid)
        };
        pids().filter(is_inside).collect()
    }

    /// Stops it, and sees its processes end in time and its save fail.
    fn stop_in_vain(&self, runaway: &BTreeSet<u32>) -> Sandbox {
        let at_once = StopSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), failed_save: None };
        self.daemon.sandbox(&self.id).stop(&at_once).unwrap();
        let answered = Instant::now();
        while runaway.iter().any(|&pid| is_alive(pid)) || !self.inside().is_empty() {
            assert!(answered.elapsed() < ENDED_WITHIN, "it runs on: {:?}", self.inside());
            thread::sleep(Duration::from_millis(20));
        }
        self.daemon.wait_for(&self.id, "its save has failed", |now| now.status == Status::SaveFailed)
    }

    /// It is said everywhere that its save has failed, and why; nothing runs, nothing can be run, and its files are kept.
    fn assert_stuck(&self, generation: Generation) {
        let (daemon, sandbox) = (&self.daemon, self.daemon.sandbox(&self.id));
        let listed = daemon.client().list_all(ListSandboxes::default()).map(Result::unwrap);
        let listed = listed.filter(|one| one.id == self.id).map(|one| one.status);
        let verified = sandbox.verify().unwrap();
        let told: Vec<Status> = listed.chain([verified.status, sandbox.diagnosis().unwrap().sandbox.status]).collect();
        assert_eq!(told, [Status::SaveFailed; 3]);
        let cause = verified.cause.expect("a cause");
        assert_eq!(cause.code, "user_stop");
        let why = cause.message.to_lowercase();
        assert!(why.contains("no space") || why.contains("disk"), "it is said why: {why}");
        let findings = sandbox.diagnosis().unwrap().findings;
        let told = findings.iter().find(|finding| finding.code == "save_failed").expect("the diagnosis names it");
        assert_eq!(told.severity, viv_api::daemon::Severity::Critical);
        assert_eq!(told.command.as_deref(), Some(format!("viv stop --retry {}", self.id).as_str()));
        assert!(told.message.contains(&cause.message) && told.message.contains("--discard"), "{told:#?}");
        assert_eq!(verified.generation, generation);
        assert_eq!(daemon.instances().len(), 1, "its files are kept");
        assert_eq!(self.inside(), BTreeSet::new(), "nothing runs on");
        let refused = sandbox.start(&StartExecution::of(["true"]).unwrap(), None);
        assert_eq!(code(refused), Some(ErrorCode::NotRunning));
        let running = sandbox.executions_all().map(Result::unwrap).filter(|one| !one.state.is_final());
        assert_eq!(running.count(), 0, "nothing is said to run");
        let events = daemon.client().events(&ListEvents::default()).unwrap().items;
        assert!(events.iter().any(|event| event.kind == "sandbox.save_failed"), "somebody hears of it");
    }

    /// What somebody does by hand.
    fn viv(&self, words: &[&str]) -> Output {
        self.daemon.viv().args(words).output().unwrap()
    }

    /// Nobody has to look for it: an alert fires by itself, and says what helps (L10, O5).
    fn assert_alerted(&self) {
        eventually_within(PATIENCE, "an alert fires", || {
            let all = self.daemon.client().alerts().unwrap().items;
            let firing = all.iter().find(|alert| alert.name == "save_failed" && alert.state == AlertState::Firing);
            firing.is_some_and(|alert| {
                alert.command.starts_with("viv ") && alert.sandboxes == std::slice::from_ref(&self.id)
            })
        });
    }

    /// It runs again as the next generation, with all that it had, and what ran is said to be lost.
    fn assert_whole(&self, generation: u64) {
        let back = self.daemon.sandbox(&self.id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
        assert_eq!((back.status, back.generation), (Status::Ready, Generation(generation)), "{back:#?}");
        assert_eq!(said(&self.daemon, &self.id, MANIFEST), self.manifest);
        let sandbox = self.daemon.sandbox(&self.id);
        let runaway =
            sandbox.executions_all().map(Result::unwrap).find(|one| one.argv.iter().any(|word| word == RUNAWAY));
        let runaway = runaway.expect("what ran is told");
        // Who watches the disk may end it before the stop does.
        let told = runaway.message.as_deref();
        assert!(
            runaway.state == ExecutionState::Lost && matches!(told, Some("hibernated" | "disk_full")),
            "{runaway:#?}"
        );
    }

    fn clear_away(self) {
        let Self { snapshots, mut daemon, disk, id, .. } = self;
        daemon.remove(&id);
        drop(snapshots);
        daemon.assert_nothing_left();
        daemon.end();
        drop((daemon, disk));
    }
}

fn said(daemon: &Daemon, id: &SandboxId, script: &str) -> String {
    let (said, end) = run(&daemon.sandbox(id), script);
    assert_eq!(end.exit_code, Some(0), "{said}");
    said
}

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Option<ErrorCode> {
    answer.expect_err("it is refused").code()
}

fn complaint(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stopped_on_a_full_disk(records: Records) {
    let stage = Stage::new(records);
    let runaway = stage.run_away();
    assert!(runaway.len() >= 4, "the agent and the runaway: {runaway:?}");
    let mut flood = stage.flood();
    if records == Records::OnTheDisk {
        // What the daemon keeps for writing down a stop is room for whoever is faster.
        flood.rest();
    }
    stage.stop_in_vain(&runaway);
    stage.assert_stuck(Generation::FIRST);
    if records == Records::Elsewhere {
        stage.assert_alerted();
    }

    // Without room, trying again changes nothing; it says so, and what to do.
    let told = complaint(&stage.viv(&["stop", "--retry", "runaway"]));
    assert!(told.contains("could not be saved") && told.contains("hint:") && told.contains("--retry"), "{told}");
    stage.assert_stuck(Generation::FIRST);

    stage.make_room(flood);
    // It may have been saved by itself since: then there is nothing to retry.
    let retried = stage.viv(&["stop", "--retry", "runaway"]);
    let saved = stage.daemon.wait_for(&stage.id, "it is saved", |now| now.status == Status::Hibernated);
    assert!(retried.status.success() || complaint(&retried).contains("save"), "{retried:?}");
    assert_eq!(saved.cause.unwrap().code, "saved");
    stage.assert_whole(2);
    stage.clear_away();
}

#[test]
fn l10_a_runaway_that_is_stopped_on_a_full_disk_is_ended_kept_and_saved_once_there_is_room() {
    stopped_on_a_full_disk(Records::Elsewhere);
}

/// That it is to stop is recorded on the disk that is full.
#[test]
fn l8_j5_a_daemon_whose_records_are_on_the_full_disk_stops_a_runaway_all_the_same() {
    stopped_on_a_full_disk(Records::OnTheDisk);
}

#[test]
fn l10_what_could_not_be_saved_is_given_up_by_hand_and_nothing_of_it_is_left() {
    let stage = Stage::new(Records::Elsewhere);
    let (daemon, sandbox) = (&stage.daemon, stage.daemon.sandbox(&stage.id));
    // As long as no save has failed, there is nothing to give up.
    let discard = StopSandbox { failed_save: Some(FailedSave::Discard), wait_ms: None };
    assert_eq!(code(sandbox.stop(&discard)), Some(ErrorCode::Conflict));
    let told = complaint(&stage.viv(&["stop", "--discard", "runaway"]));
    assert!(told.contains("save"), "it is said why: {told}");
    assert_eq!(sandbox.get().unwrap().status, Status::Ready);
    assert_eq!(said(daemon, &stage.id, MANIFEST), stage.manifest);

    let runaway = stage.run_away();
    let mut flood = stage.flood();
    stage.stop_in_vain(&runaway);
    flood.rest();
    // On the full disk, which this is to help: nothing was saved before, so nothing is left.
    stage.viv(&["stop", "--discard", "runaway"]);
    let given_up = daemon.wait_for(&stage.id, "it is given up", |now| now.status == Status::Failed);
    assert_eq!(given_up.cause.unwrap().code, "user_discard");
    let layers = |place: &str| fs::read_dir(daemon.provider_folder().join("layers").join(place)).unwrap().count();
    eventually_within(PATIENCE, "its files are gone", || daemon.instances().is_empty() && layers("active") == 0);
    assert_eq!(stage.inside(), BTreeSet::new());
    assert_eq!(code(sandbox.stop(&discard)), Some(ErrorCode::Conflict), "once");
    stage.make_room(flood);
    let anew = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!((anew.status, anew.generation), (Status::Ready, Generation(2)), "{anew:#?}");
    assert_eq!(said(daemon, &stage.id, "ls -A /workspace"), "", "it begins anew");
    drop(sandbox);
    stage.clear_away();
}

#[test]
fn l10_what_is_given_up_goes_back_to_what_was_saved_before() {
    let stage = Stage::new(Records::Elsewhere);
    let sandbox = stage.daemon.sandbox(&stage.id);
    let saved = sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox();
    assert_eq!(saved.status, Status::Hibernated, "{saved:#?}");
    let back = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!(back.generation, Generation(2));
    said(&stage.daemon, &stage.id, "rm -r /workspace/tree/1; echo newer > /workspace/tree/newer");
    let runaway = stage.run_away();
    let mut flood = stage.flood();
    stage.stop_in_vain(&runaway);
    stage.assert_stuck(Generation(2));
    flood.rest();
    let told = stage.viv(&["stop", "--discard", "runaway"]);
    assert!(told.status.success(), "{told:?}");
    let given_up = sandbox.get().unwrap();
    assert_eq!(given_up.status, Status::Hibernated, "{given_up:#?}");
    assert_eq!(given_up.cause.unwrap().code, "user_discard", "it is not said to have been saved");
    assert_eq!(stage.daemon.instances(), Vec::<PathBuf>::new());
    stage.make_room(flood);
    drop(sandbox);
    stage.assert_whole(3);
    stage.clear_away();
}
