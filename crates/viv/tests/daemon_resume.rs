//! The broken resume, staged from outside on the real daemon: it says idle, its filesystem is gone, commands wait for
//! ever, and a dead job says that it runs (incident 1). Here `ready` is not shown, whoever waits hears why, and what was
//! saved last can still be resumed (T2, T4, X1, L10).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::disk::Disk;
use support::eventually_within;
use support::held::{Held, Hold, listen_inside, unmount_root};
use support::restart::House;
use viv_api::bound::{Path as ApiPath, Port, Ports, WaitMs};
use viv_api::client::{ClientError, SandboxHandle};
use viv_api::diagnosis::HostView;
use viv_api::execution::{ExecutionState, StartExecution};
use viv_api::query::{ListSandboxes, ReadFile, WriteFile};
use viv_api::sandbox::{CreatePolicy, CreateSandbox, EnsureSandbox, Phase, Sandbox, Status, StopSandbox};
use viv_core::{Generation, SandboxId};

/// Who starts a command and wakes the sandbox for it is answered within the time that the server waits for a sandbox
/// (60 s), whatever happens; the rest is for a loaded machine.
const QUEUED_MAX: Duration = Duration::from_secs(90);

/// How long a resume may take to be given up: two instances more, each with its own verification, or the deadline for
/// making them.
const GIVEN_UP_MAX: Duration = Duration::from_secs(240);

/// How often a status is read: readers must not be what keeps a machine busy.
const PAUSE: Duration = Duration::from_millis(50);

const FILE: &str = "/workspace/kept/file";
const CONTENT: &[u8] = b"what somebody worked for\n";

/// A port that sandboxes of one test have to answer at.
const PORT: u16 = 8_080;

fn persistent() -> CreateSandbox {
    let policy = CreatePolicy { persistent: Some(true), ..CreatePolicy::default() };
    CreateSandbox { policy, ..CreateSandbox::default() }
}

fn ensure_within(wait: Duration) -> EnsureSandbox {
    EnsureSandbox { wait_ms: Some(WaitMs::new(wait.as_millis() as u64).unwrap()) }
}

fn content(sandbox: &SandboxHandle<'_>) -> Vec<u8> {
    let read = ReadFile { path: ApiPath::new(FILE).unwrap(), offset: None, length: None, generation: None };
    let mut bytes = Vec::new();
    sandbox.read_file(&read).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// A sandbox that was used and stopped, and the daemon that is to resume it.
struct Stage {
    daemon: Daemon,
    id: SandboxId,
    /// Where this daemon waits before it probes what it has made.
    hold: Hold,
}

impl Stage {
    fn new() -> Self {
        Self::in_house(House::new())
    }

    fn in_house(house: House) -> Self {
        let mut daemon = Daemon::in_house(house);
        daemon.run(&[]);
        let id = daemon.create_from(&persistent()).id;
        Self::hibernated(daemon, id)
    }

    /// Leaves something in it that can be lost, stops it, and has another daemon come.
    fn hibernated(mut daemon: Daemon, id: SandboxId) -> Self {
        let sandbox = daemon.sandbox(&id);
        let write = WriteFile { path: ApiPath::new(FILE).unwrap(), mode: None, user: None, generation: None };
        sandbox.make_dir(&ApiPath::new("/workspace/kept").unwrap()).unwrap();
        sandbox.write_file(&write, &mut &CONTENT[..]).unwrap();
        // A job that dies with the stop, and must not be said to run after it.
        let job = StartExecution::of(["/bin/sleep", "10000"]).unwrap();
        assert_eq!(sandbox.start(&job, None).unwrap().state, ExecutionState::Running);
        let stopped = sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox();
        assert_eq!((stopped.phase, stopped.generation), (Phase::Hibernated, Generation::FIRST), "{stopped:#?}");
        daemon.kill();
        let hold = Hold::at("probe.before");
        daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
        Self { daemon, id, hold }
    }

    fn sandbox(&self) -> SandboxHandle<'_> {
        self.daemon.sandbox(&self.id)
    }

    /// Resumes it, breaks every instance that is made for that before it is probed, and sees that it comes to nothing.
    fn resume_broken(&self, break_it: impl Fn(&HostView)) -> Sandbox {
        self.resume_in_vain(|is_over| self.break_each(is_over, break_it))
    }

    /// Resumes it, and sees that nobody is told that it is ready, and that everybody is told something.
    fn resume_in_vain(&self, meanwhile: impl FnOnce(&dyn Fn() -> bool)) -> Sandbox {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            // Whatever fails below, nobody watches for ever.
            let _at_last = SetAtLast(&over);
            let watched = scope.spawn(|| self.watch(&over));
            let asked = scope.spawn(|| self.sandbox().ensure(&ensure_within(GIVEN_UP_MAX)));
            eventually_within(PATIENCE, "it is being resumed", || {
                self.sandbox().get().unwrap().phase != Phase::Hibernated
            });
            let queued: Vec<_> =
                [false, true, true].into_iter().map(|wake| scope.spawn(move || self.queue(wake))).collect();
            meanwhile(&|| asked.is_finished());
            refused("the resume", asked.join().unwrap());
            for command in queued {
                command.join().unwrap();
            }
            over.store(true, Ordering::SeqCst);
            let seen = watched.join().unwrap();
            assert!(!seen.contains(&Status::Ready), "{seen:?}");
        });
        let failed = self.sandbox().verify().unwrap();
        assert_eq!(failed.phase, Phase::Failed, "{failed:#?}");
        assert!(failed.generation > Generation::FIRST, "a resume is another generation (T5)");
        let why = failed.cause.clone().expect("why is told");
        assert!(!why.message.is_empty(), "with the evidence: {why:?}");
        failed
    }

    /// Every look at it, in every way, for as long as it is being resumed.
    fn watch(&self, over: &AtomicBool) -> Vec<Status> {
        let mut seen = Vec::new();
        while !over.load(Ordering::SeqCst) {
            let listed = self.daemon.client().list_all(ListSandboxes::default()).map(Result::unwrap);
            let listed = listed.filter(|sandbox| sandbox.id == self.id).map(|sandbox| sandbox.status);
            seen.extend(listed);
            seen.extend([self.sandbox().get().unwrap().status, self.sandbox().verify().unwrap().status]);
            seen.push(self.sandbox().diagnosis().unwrap().sandbox.status);
            seen.dedup();
            thread::sleep(PAUSE);
        }
        seen
    }

    /// A command that is given to it meanwhile: it ends with a word why, in time.
    fn queue(&self, wake: bool) {
        let mut command = StartExecution::of(["/bin/sh", "-c", "echo here"]).unwrap();
        command.wake = wake;
        let began = Instant::now();
        refused("a command", self.sandbox().start(&command, None));
        assert!(began.elapsed() < QUEUED_MAX, "it took {:?} (wake: {wake})", began.elapsed());
    }

    /// Breaks each generation once, when it was made and before it is probed.
    fn break_each(&self, is_over: &dyn Fn() -> bool, break_it: impl Fn(&HostView)) {
        let (mut count, mut broken) = (1, Generation::FIRST);
        let until = Instant::now() + GIVEN_UP_MAX;
        while !is_over() {
            assert!(Instant::now() < until, "it is not given up: {:#?}", self.sandbox().get().unwrap());
            if !self.hold.is_reached(count) {
                thread::sleep(Duration::from_millis(5));
                continue;
            }
            let now = self.sandbox().get().unwrap();
            if now.generation > broken {
                break_it(&self.daemon.host(&self.id));
                broken = now.generation;
            }
            self.hold.let_go(count);
            count += 1;
        }
        self.hold.open();
    }

    /// What was saved last is there, whatever came in between.
    fn resume_for_good(&self) -> Sandbox {
        self.hold.open();
        let before = self.sandbox().get().unwrap();
        let resumed = self.sandbox().ensure(&ensure_within(2 * PATIENCE)).unwrap().into_sandbox();
        assert_eq!(resumed.status, Status::Ready, "{resumed:#?}");
        assert!(resumed.generation > before.generation);
        self.assert_whole();
        resumed
    }

    /// Its files are there by every way, and nothing is said to run that does not (X5).
    fn assert_whole(&self) {
        assert_eq!(content(&self.sandbox()), CONTENT);
        let (said, end) = run(&self.sandbox(), &format!("cat {FILE}"));
        assert_eq!((said.as_bytes(), end.exit_code), (CONTENT, Some(0)));
        let sandbox = self.sandbox();
        let running = sandbox.executions_all().map(Result::unwrap);
        let running: BTreeSet<_> = running.filter(|one| !one.state.is_final()).map(|one| one.id).collect();
        let services = sandbox.get().unwrap().services.into_iter().filter_map(|service| service.execution);
        assert_eq!(running, services.collect(), "what it is made of, and nothing else");
    }

    fn clear_away(self) {
        self.daemon.remove(&self.id);
        self.daemon.assert_nothing_left();
    }
}

/// Is set when this goes.
struct SetAtLast<'a>(&'a AtomicBool);

impl Drop for SetAtLast<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// That it was refused by the daemon, in words, and not by a connection that waited long enough.
fn refused<T: std::fmt::Debug>(what: &str, answer: Result<T, ClientError>) {
    match answer {
        Err(ClientError::Api { error, .. }) => assert!(!error.message.is_empty(), "{what}: {error:?}"),
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn t2_incident_1_a_resume_whose_root_is_unmounted_is_never_ready() {
    let stage = Stage::new();
    stage.resume_broken(unmount_root);
    stage.resume_for_good();
    stage.clear_away();
}

#[test]
fn t2_incident_1_a_resume_whose_agent_is_killed_is_never_ready() {
    let stage = Stage::new();
    stage.resume_broken(|host| Held::of(host.agent_pid).kill());
    stage.resume_for_good();
    stage.clear_away();
}

#[test]
fn t2_incident_1_a_resume_whose_agent_is_silent_is_never_ready() {
    let stage = Stage::new();
    stage.resume_broken(|host| Held::of(host.agent_pid).stop());
    stage.resume_for_good();
    stage.clear_away();
}

#[test]
fn t2_incident_1_a_resume_whose_port_does_not_come_back_is_never_ready() {
    let hold = Hold::at("probe.before");
    let mut daemon = Daemon::in_house(House::new());
    daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
    let ports = Ports::new(vec![Port::new(PORT.into()).unwrap()]).unwrap();
    let request = CreateSandbox { ports, wait_ms: Some(WaitMs::new(0).unwrap()), ..persistent() };
    let id = daemon.client().create(&request, None).unwrap().into_sandbox().id;
    eventually_within(PATIENCE, "it was made", || hold.is_reached(1));
    let service = listen_inside(&daemon.host(&id), PORT);
    hold.open();
    daemon.wait_for(&id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    let stage = Stage::hibernated(daemon, id);
    drop(service);

    // It is there, and is killed before it is asked.
    let failed = stage.resume_broken(|host| drop(listen_inside(host, PORT)));
    let complaint = failed.cause.unwrap().message;
    assert!(complaint.contains(&PORT.to_string()), "it is said which: {complaint}");

    let (hold, before) = (Hold::at("probe.before"), failed.generation);
    let mut stage = stage;
    stage.daemon.kill();
    stage.daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
    let no_wait = EnsureSandbox { wait_ms: Some(WaitMs::new(0).unwrap()) };
    stage.sandbox().ensure(&no_wait).unwrap();
    eventually_within(PATIENCE, "it was made", || hold.is_reached(1));
    let _service = listen_inside(&stage.daemon.host(&stage.id), PORT);
    hold.open();
    let resumed = stage.daemon.wait_for(&stage.id, "it is ready", |sandbox| sandbox.status == Status::Ready);
    assert!(resumed.generation > before);
    stage.assert_whole();
    stage.clear_away();
}

/// A service that listens after a while. Its words are how its processes are found from outside.
const SERVICE: &str = "echo started >> /workspace/starts; sleep 2; \
    perl -MIO::Socket::INET -e '$s = IO::Socket::INET->new(Listen => 5, LocalAddr => \"127.0.0.1\", \
    LocalPort => 8080, ReuseAddr => 1) or die; while (1) { $c = $s->accept; close $c if $c }'";

impl Stage {
    /// One with a service that is started again so often.
    fn with_service(restart: &serde_json::Value) -> Self {
        let service = serde_json::json!({
            "name": "web", "argv": ["sh", "-c", SERVICE], "ready": {"port": PORT}, "ready_within_ms": 60_000,
            "restart": restart,
        });
        let request = serde_json::json!({"policy": {"persistent": true}, "services": [service]});
        let mut daemon = Daemon::in_house(House::new());
        daemon.run(&[]);
        let id = daemon.create_from(&serde_json::from_value(request).unwrap()).id;
        Self::hibernated(daemon, id)
    }

    /// Kills all of the service that there is, from outside, and waits until whoever started it knows. Whether there was
    /// any.
    fn kill_service(&self) -> bool {
        let is_it = |pid: &u32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).contains("IO::Socket::INET") && self.daemon.processes().contains(pid)
        };
        let found: Vec<u32> = support::pids().filter(is_it).collect();
        for &pid in &found {
            support::kill(pid, Signal::KILL);
        }
        let is_reaped = |pid: &u32| !Path::new(&format!("/proc/{pid}")).exists();
        eventually_within(PATIENCE, "it has ended", || found.iter().all(is_reaped));
        !found.is_empty()
    }

    /// Its service is named as what failed, with how it ended, and nothing is said to run.
    fn assert_service_failed(&self, failed: &Sandbox) {
        let cause = failed.cause.clone().expect("why");
        assert_eq!(cause.code, "service_failed");
        assert!(cause.message.starts_with("service web:") && cause.message.contains("signal 9"), "{}", cause.message);
        let service = &failed.services[0];
        assert!(service.ended.as_deref().is_some_and(|how| how.contains("signal 9")), "{service:#?}");
        let sandbox = self.sandbox();
        let running = sandbox.executions_all().map(Result::unwrap).filter(|one| !one.state.is_final());
        assert_eq!(running.count(), 0);
    }
}

#[test]
fn t2_incident_1_a_service_that_is_killed_while_a_resume_is_verified_is_never_ready() {
    let stage = Stage::with_service(&serde_json::json!({"policy": "never"}));
    let failed = stage.resume_broken(|_| assert!(stage.kill_service(), "it ran"));
    stage.assert_service_failed(&failed);
    stage.resume_for_good();
    stage.clear_away();
}

#[test]
fn t2_incident_1_a_service_that_dies_at_each_start_of_a_resume_is_never_ready() {
    let stage = Stage::with_service(&serde_json::json!({"policy": "on_failure", "times_max": 2, "backoff_ms": 100}));
    stage.hold.open();
    let failed = stage.resume_in_vain(|is_over| {
        while !is_over() {
            stage.kill_service();
            thread::sleep(Duration::from_millis(20));
        }
    });
    stage.assert_service_failed(&failed);
    assert!(failed.cause.as_ref().unwrap().message.ends_with("after 2 restarts"), "{:?}", failed.cause);
    stage.resume_for_good();
    stage.clear_away();
}

/// Where what was saved lies on disk.
fn saved_layer(stage: &Stage) -> PathBuf {
    let sealed = stage.daemon.provider_folder().join("layers/sealed");
    let folders = fs::read_dir(&sealed).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir());
    let [layer] = &folders.collect::<Vec<_>>()[..] else {
        panic!("one was saved, and nothing else, in {}", sealed.display())
    };
    layer.clone()
}

/// Waits until what was saved was read in the background too: nothing changes about it from then on.
fn wait_until_hashed(stage: &Stage) {
    eventually_within(PATIENCE, "it is hashed", || {
        let saved = stage.sandbox().diagnosis().unwrap().auto_saved.expect("it was saved");
        saved.integrity == viv_api::diagnosis::Integrity::Verified
    });
}

/// Takes something away, and gives it back with the time that its folder had.
struct Taken {
    from: PathBuf,
    to: PathBuf,
    folder_modified: std::time::SystemTime,
    _aside: tempfile::TempDir,
}

impl Taken {
    fn away(from: &Path) -> Self {
        let folder = from.parent().unwrap();
        let aside = tempfile::Builder::new().prefix("viv-taken-").tempdir().unwrap();
        let (to, folder_modified) = (aside.path().join("it"), fs::metadata(folder).unwrap().modified().unwrap());
        fs::rename(from, &to).unwrap();
        Self { from: from.to_owned(), to, folder_modified, _aside: aside }
    }

    fn give_back(self) {
        fs::rename(&self.to, &self.from).unwrap();
        File::open(self.from.parent().unwrap()).unwrap().set_modified(self.folder_modified).unwrap();
    }
}

#[test]
fn t2_l10_incident_13_a_resume_from_a_damaged_layer_is_never_ready() {
    let stage = Stage::new();
    stage.hold.open();
    wait_until_hashed(&stage);
    let layer = saved_layer(&stage);
    // One file, which no probe would miss; and all of it.
    for damage in ["parts/root/workspace/kept/file", "parts/root/workspace", ""] {
        let taken = Taken::away(&if damage.is_empty() { layer.clone() } else { layer.join(damage) });
        let failed = stage.resume_in_vain(|_| ());
        let complaint = failed.cause.unwrap().message;
        assert!(complaint.contains("damaged"), "{damage}: {complaint}");
        let shown = stage.sandbox().diagnosis().unwrap().auto_saved.expect("it is kept");
        assert_eq!(shown.integrity, viv_api::diagnosis::Integrity::Damaged, "{damage}");
        taken.give_back();
        stage.resume_for_good();
        let stopped = stage.sandbox().stop(&StopSandbox::default()).unwrap().into_sandbox();
        assert_eq!(stopped.phase, Phase::Hibernated, "{stopped:#?}");
    }
    stage.clear_away();
}

/// A disk that can be filled up.
struct FullDisk<'a>(&'a Disk);

impl<'a> FullDisk<'a> {
    /// Takes all the room that is left.
    fn fill(disk: &'a Disk) -> Self {
        let mut filler = File::create(disk.path().join("filler")).unwrap();
        for piece_bytes in [1 << 20, 4096, 1] {
            while filler.write_all(&vec![7; piece_bytes]).is_ok() {}
        }
        Self(disk)
    }

    fn make_room(self) {
        fs::remove_file(self.0.path().join("filler")).unwrap();
    }
}

#[test]
fn t2_incident_1_a_resume_on_a_full_disk_is_never_ready() {
    let disk = Disk::make(&["mkfs.ext4", "-q", "-m", "0"], "loop", 96).unwrap();
    let stage = Stage::in_house(House::on_disk(&disk));
    stage.hold.open();
    wait_until_hashed(&stage);
    let full = FullDisk::fill(&disk);
    let failed = stage.resume_in_vain(|_| ());
    let complaint = failed.cause.unwrap().message;
    assert!(complaint.to_lowercase().contains("no space") || complaint.contains("disk"), "{complaint}");
    full.make_room();
    stage.resume_for_good();
    stage.clear_away();
}
