//! The way down to rest and back on the real daemon: idling, freezing, saving, and a disk that is full meanwhile.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path as HostPath, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use support::daemon::{Daemon, PATIENCE};
use support::disk::Disk;
use support::eventually_within;
use viv_api::ErrorCode;
use viv_api::bound::{ExecutionMs, IdleMs, LifetimeMs, Path, SandboxName, WaitMs};
use viv_api::client::ClientError;
use viv_api::execution::{Execution, ExecutionState, StartExecution, TimeLimit};
use viv_api::query::{ListEvents, ReadFile, WriteFile};
use viv_api::sandbox::{
    CreatePolicy, CreateSandbox, EnsureSandbox, ExtendSandbox, FailedSave, Phase, ProviderState, RestSandbox, Sandbox,
    Status, StopSandbox,
};
use viv_core::{Generation, SandboxId};

/// Counts for ever, and says how far it is in a file.
const COUNTER: &str = "n=0; while :; do n=$((n+1)); echo $n > /workspace/n.new; mv /workspace/n.new /workspace/n; done";

fn named(name: &str, policy: CreatePolicy) -> CreateSandbox {
    CreateSandbox { name: Some(SandboxName::new(name).unwrap()), policy, ..CreateSandbox::default() }
}

/// A service, whose running is no activity.
fn serve(daemon: &Daemon, id: &SandboxId, script: &str) -> Execution {
    let mut request = StartExecution::of(["sh", "-c", script]).unwrap();
    (request.detach, request.limit_ms) = (true, Some(TimeLimit::NONE));
    daemon.sandbox(id).start(&request, None).unwrap()
}

fn write(daemon: &Daemon, id: &SandboxId, path: &str, text: &str) {
    let query = WriteFile { path: Path::new(path).unwrap(), mode: None, user: None, generation: None };
    daemon.sandbox(id).write_file(&query, &mut text.as_bytes()).unwrap();
}

fn read(daemon: &Daemon, id: &SandboxId, path: &str) -> Result<String, ClientError> {
    let query = ReadFile { path: Path::new(path).unwrap(), offset: None, length: None, generation: None };
    let mut text = String::new();
    daemon.sandbox(id).read_file(&query)?.read_to_string(&mut text).unwrap();
    Ok(text)
}

fn count(daemon: &Daemon, id: &SandboxId) -> u64 {
    let mut last = None;
    eventually_within(PATIENCE, "it counts", || {
        last = read(daemon, id, "/workspace/n").ok().and_then(|text| text.trim().parse().ok());
        last.is_some()
    });
    last.unwrap()
}

fn counts_on(daemon: &Daemon, id: &SandboxId) {
    let before = count(daemon, id);
    eventually_within(PATIENCE, "it goes on", || count(daemon, id) > before + 20);
}

fn cpu_us(daemon: &Daemon, id: &SandboxId) -> u64 {
    daemon.sandbox(id).resources().unwrap().usage.unwrap().cpu_us.unwrap()
}

fn ensure(daemon: &Daemon, id: &SandboxId) -> Sandbox {
    daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox()
}

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Option<ErrorCode> {
    answer.expect_err("it is refused").code()
}

#[test]
fn l5_nobody_uses_it_and_it_is_frozen_then_saved_and_an_entry_brings_it_back() {
    let mut daemon = Daemon::start();
    let window = Some(IdleMs::new(2_000).unwrap());
    let policy = CreatePolicy { idle_ms: window, hibernate_ms: window, ..CreatePolicy::default() };
    let kept = daemon.create_from(&named("kept", policy.clone()));
    let passing = daemon.create_from(&CreateSandbox { policy, ..CreateSandbox::default() });
    write(&daemon, &kept.id, "/workspace/file", "worth keeping");
    let service = serve(&daemon, &kept.id, COUNTER);

    // Reading how it is keeps nobody awake (T9), nor does a service (L6).
    daemon.wait_for(&kept.id, "it is frozen", |now| now.status == Status::Frozen);
    let saved = daemon.wait_for(&kept.id, "it is saved", |now| now.status == Status::Hibernated);
    assert_eq!(saved.cause.unwrap().code, "saved");
    // What was seen of it while it ran is not told of what does not run (T1), before and after a restart.
    for round in 0..2 {
        let now = daemon.sandbox(&kept.id).get().unwrap();
        assert_eq!(now.observed.unwrap().provider_state, ProviderState::Absent, "round {round}");
        assert!(now.evidence.exec.is_none() && now.evidence.filesystem.is_none(), "{:?}", now.evidence);
        daemon.kill();
        daemon.restart();
    }
    daemon.wait_for(&passing.id, "what is not kept ends", |now| now.status == Status::Stopped);
    daemon.assert_nothing_left();
    let lost = daemon.sandbox(&kept.id).execution(service.id.clone()).get().unwrap();
    assert_eq!((lost.state, lost.message.as_deref()), (ExecutionState::Lost, Some("hibernated")), "X5");
    assert_eq!(
        code(daemon.sandbox(&kept.id).start(&StartExecution::of(["true"]).unwrap(), None)),
        Some(ErrorCode::NotRunning)
    );

    let back = ensure(&daemon, &kept.id);
    assert_eq!((back.status, back.generation, &back.policy), (Status::Ready, Generation(2), &kept.policy), "L16");
    assert_eq!(read(&daemon, &kept.id, "/workspace/file").unwrap(), "worth keeping");
    let all: Vec<Execution> = daemon.sandbox(&kept.id).executions_all().map(Result::unwrap).collect();
    let told: Vec<_> = all.iter().map(|one| (&one.id, one.state, one.generation)).collect();
    assert_eq!(told, [(&service.id, ExecutionState::Lost, Generation(1))], "the list equals what is (X5)");

    // A command that runs keeps it awake; a daemon that comes anew still knows when its window ends.
    let sleep = StartExecution::of(["sleep", "1000"]).unwrap();
    let sleep = daemon.sandbox(&kept.id).start(&sleep, None).unwrap();
    daemon.kill();
    daemon.restart();
    let idle_at_ms = || daemon.sandbox(&kept.id).get().unwrap().last_activity_at_ms;
    let before = idle_at_ms();
    eventually_within(PATIENCE, "that it runs is found to be activity", || idle_at_ms() > before);
    assert!(matches!(daemon.sandbox(&kept.id).get().unwrap().status, Status::Ready | Status::Unverified));
    daemon.sandbox(&kept.id).execution(sleep.id).cancel().unwrap();
    daemon.wait_for(&kept.id, "it is saved again", |now| now.status == Status::Hibernated);
    daemon.remove(&kept.id);
    daemon.assert_nothing_left();
}

#[test]
fn l13_what_is_frozen_uses_no_processor_and_goes_on_where_it_was() {
    let daemon = Daemon::start();
    let (frozen, control) = (daemon.create_from(&named("frozen", CreatePolicy::default())), daemon.create());
    let service = serve(&daemon, &frozen.id, COUNTER);
    serve(&daemon, &control.id, COUNTER);
    counts_on(&daemon, &frozen.id);
    let wait = RestSandbox::default();
    for _ in 0..2 {
        let now = daemon.sandbox(&frozen.id).freeze(&wait).unwrap().into_sandbox();
        assert_eq!((now.status, now.generation), (Status::Frozen, Generation::FIRST), "repeated, it is the same");
    }
    let used_us = cpu_us(&daemon, &frozen.id);
    // The other one shows that time passes.
    counts_on(&daemon, &control.id);
    assert_eq!(cpu_us(&daemon, &frozen.id), used_us);
    let told = daemon.sandbox(&frozen.id).execution(service.id.clone()).get().unwrap();
    assert_eq!(told.state, ExecutionState::Suspended);
    let run = |wake| {
        let mut request = StartExecution::of(["true"]).unwrap();
        request.wake = wake;
        daemon.sandbox(&frozen.id).start(&request, None)
    };
    assert_eq!(code(run(false)), Some(ErrorCode::NotRunning), "L4");
    assert_eq!(daemon.sandbox(&frozen.id).get().unwrap().status, Status::Frozen);
    run(true).unwrap();
    counts_on(&daemon, &frozen.id);
    let back = daemon.sandbox(&frozen.id).get().unwrap();
    assert_eq!((back.generation, &back.policy), (Generation::FIRST, &frozen.policy), "T5, L16");
    assert_eq!(daemon.sandbox(&frozen.id).execution(service.id).get().unwrap().state, ExecutionState::Running);

    daemon.sandbox(&frozen.id).freeze(&wait).unwrap();
    for _ in 0..2 {
        let now = daemon.sandbox(&frozen.id).thaw(&wait).unwrap().into_sandbox();
        assert_eq!((now.status, now.generation), (Status::Ready, Generation::FIRST));
    }
    counts_on(&daemon, &frozen.id);

    // Saved by hand: it is not held, and what it cannot do is refused.
    let saved = daemon.sandbox(&frozen.id).hibernate(&wait).unwrap().into_sandbox();
    assert_eq!(saved.status, Status::Hibernated);
    assert_eq!(daemon.sandbox(&frozen.id).hibernate(&wait).unwrap().into_sandbox().version, saved.version);
    assert_eq!(code(daemon.sandbox(&frozen.id).freeze(&wait)), Some(ErrorCode::NotRunning));
    assert_eq!(code(daemon.sandbox(&frozen.id).thaw(&wait)), Some(ErrorCode::NotRunning));
    assert_eq!(code(daemon.sandbox(&control.id).hibernate(&wait)), Some(ErrorCode::Conflict));
    let retry = StopSandbox { failed_save: Some(FailedSave::Retry), ..StopSandbox::default() };
    assert_eq!(code(daemon.sandbox(&control.id).stop(&retry)), Some(ErrorCode::Conflict));
    for id in [&frozen.id, &control.id] {
        daemon.remove(id);
        assert_eq!(code(daemon.sandbox(id).thaw(&wait)), Some(ErrorCode::Gone));
    }
    daemon.assert_nothing_left();
}

#[test]
fn l13_a_frozen_one_ends_at_its_hard_deadline_and_no_extension_brings_it_back() {
    let daemon = Daemon::start();
    let policy = CreatePolicy { lifetime_ms: Some(LifetimeMs::new(4_000).unwrap()), ..CreatePolicy::default() };
    let sandbox = daemon.create_from(&CreateSandbox { policy, ..CreateSandbox::default() });
    let expires_at_ms = sandbox.expires_at_ms.expect("a hard deadline");
    daemon.sandbox(&sandbox.id).freeze(&RestSandbox::default()).unwrap();
    let over = daemon.wait_for(&sandbox.id, "it has expired", |now| now.status == Status::Stopped);
    assert_eq!(over.cause.unwrap().code, "expired");
    let told: Vec<_> = daemon.sandbox(&sandbox.id).timeline_all().map(Result::unwrap).collect();
    let ended = told.iter().rfind(|entry| entry.from == Some(Phase::Frozen)).expect("it left what it was in");
    let late_ms = ended.at_ms.saturating_sub(expires_at_ms);
    assert!(ended.at_ms + 1_000 >= expires_at_ms && late_ms < 10_000, "{late_ms} ms late: {ended:#?}");
    let late = daemon.sandbox(&sandbox.id).extend(ExtendSandbox::AtLeastMs(LifetimeMs::new(60_000).unwrap()));
    assert!(matches!(code(late), Some(ErrorCode::Gone | ErrorCode::Expired)));
    assert_eq!(code(daemon.sandbox(&sandbox.id).ensure(&EnsureSandbox::default())), Some(ErrorCode::Gone));
    assert_eq!(daemon.sandbox(&sandbox.id).get().unwrap().status, Status::Stopped);
    daemon.assert_nothing_left();
}

/// What a command may take, and how long it stands still: longer than that.
const LIMIT_MS: u64 = 15_000;
const STANDS_STILL: Duration = Duration::from_secs(18);

#[test]
fn l13_a_time_limit_stands_still_with_its_command_and_goes_on_with_it() {
    let daemon = Daemon::start();
    let sandbox = daemon.create_from(&named("frozen", CreatePolicy::default()));
    let mut request = StartExecution::of(["sh", "-c", COUNTER]).unwrap();
    request.limit_ms = Some(TimeLimit::Ms(ExecutionMs::new(LIMIT_MS).unwrap()));
    let started = daemon.sandbox(&sandbox.id).start(&request, None).unwrap();
    let execution = || daemon.sandbox(&sandbox.id).execution(started.id.clone()).get().unwrap();
    let began_ms = execution().started_at_ms.expect("it runs");
    let rest = RestSandbox::default();
    daemon.sandbox(&sandbox.id).freeze(&rest).unwrap();
    // From here on, so much of its time at the most is used.
    let used_ms = now_ms() - began_ms;
    assert!(used_ms < LIMIT_MS, "the machine is too slow for this test: {used_ms} ms");
    let frozen = Instant::now();
    while frozen.elapsed() < STANDS_STILL {
        assert_eq!(execution().state, ExecutionState::Suspended);
        std::thread::sleep(Duration::from_millis(200));
    }
    let thawed_ms = now_ms();
    daemon.sandbox(&sandbox.id).thaw(&rest).unwrap();
    eventually_within(PATIENCE, "its time is up", || execution().state.is_final());
    let ended = execution();
    assert_eq!(ended.state, ExecutionState::TimedOut, "{ended:#?}");
    let had_ms = ended.ended_at_ms.unwrap().saturating_sub(thawed_ms);
    // Clocks inside and outside are asked one after the other.
    assert!(had_ms + 1_000 >= LIMIT_MS - used_ms, "it had {had_ms} ms more, and {used_ms} ms before: {ended:#?}");
    assert_eq!(daemon.sandbox(&sandbox.id).get().unwrap().generation, Generation::FIRST);
    daemon.remove(&sandbox.id);
    daemon.assert_nothing_left();
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

#[test]
fn l11_a_delete_in_the_middle_of_a_save_leaves_no_row_and_no_layer() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    for _ in 0..3 {
        let sandbox = daemon.create_from(&named("box", CreatePolicy::default()));
        let many = "for n in $(seq 2000); do echo $n > /workspace/file$n; done";
        let request = StartExecution::of(["sh", "-c", many]).unwrap();
        let made = daemon.sandbox(&sandbox.id).start(&request, None).unwrap();
        let ended = || daemon.sandbox(&sandbox.id).execution(made.id.clone()).get().unwrap().exit_code;
        eventually_within(PATIENCE, "they are written", || ended() == Some(0));
        let at_once = Some(WaitMs::new(0).unwrap());
        daemon.sandbox(&sandbox.id).stop(&StopSandbox { wait_ms: at_once, ..StopSandbox::default() }).unwrap();
        daemon.sandbox(&sandbox.id).delete(at_once).unwrap();
        daemon.wait_for(&sandbox.id, "it is gone", |now| now.status == Status::Stopped);
        assert_eq!(code(daemon.sandbox(&sandbox.id).ensure(&EnsureSandbox::default())), Some(ErrorCode::Gone));
    }
    daemon.assert_nothing_left();
    let folder = daemon.provider_folder();
    // What a snapshot held is collected in the background; a record that says that it was removed holds nothing.
    let layers = || fs::read_dir(folder.join("layers/sealed")).unwrap().map(|entry| entry.unwrap().path());
    eventually_within(PATIENCE, "no layer is left", || layers().next().is_none());
    for record in fs::read_dir(folder.join("snapshots")).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&record).unwrap();
        assert!(!text.contains("\"kept\""), "{}: {text}", record.display());
    }
}

/// The provider's folder is on a small disk of its own; the daemon's records are not. Records of snapshots have a place
/// on it that nothing else uses, so that what happens to be given back elsewhere is no room for them.
struct SmallDisk {
    at: PathBuf,
    _disk: Disk,
}

impl SmallDisk {
    fn below(data: &HostPath) -> Self {
        let disk = Disk::make(&["mkfs.ext4", "-q", "-m", "0"], "loop", 64).unwrap();
        let at = data.join("sandboxes");
        fs::create_dir_all(&at).unwrap();
        mount(disk.path(), &at, "", MountFlags::BIND, None).unwrap();
        let small = Self { at, _disk: disk };
        fs::create_dir(small.snapshots()).unwrap();
        mount("viv-small", small.snapshots(), "tmpfs", MountFlags::empty(), c"size=64k").unwrap();
        small
    }

    fn snapshots(&self) -> PathBuf {
        self.at.join("snapshots")
    }

    fn filler(&self) -> PathBuf {
        self.snapshots().join("filler")
    }

    fn fill(&self) {
        let mut filler = File::create(self.filler()).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = unmount(self.snapshots(), UnmountFlags::DETACH);
        let _ = unmount(&self.at, UnmountFlags::DETACH);
    }
}

#[test]
fn l10_a_runaway_whose_save_finds_no_room_is_ended_kept_and_saved_once_there_is_room() {
    let mut daemon = Daemon::prepare(&["--layers", "plain"]);
    let disk = SmallDisk::below(&daemon.data);
    daemon.run(&[]);
    let sandbox = daemon.create_from(&named("runaway", CreatePolicy::default()));
    write(&daemon, &sandbox.id, "/workspace/file", "worth keeping");
    // It forks, burns its processor, does not listen, and writes again and again.
    let runaway = "trap '' TERM; while :; do :; done & \
                   (trap '' TERM; while :; do head -c 20000000 /dev/zero > /workspace/full; done) & wait";
    serve(&daemon, &sandbox.id, runaway);
    let written = || daemon.sandbox(&sandbox.id).resources().unwrap().disk.map_or(0, |disk| disk.own_bytes);
    eventually_within(PATIENCE, "it writes", || written() > 1 << 20);
    disk.fill();
    let processes = daemon.processes();
    assert!(!processes.is_empty());

    let asked =
        daemon.sandbox(&sandbox.id).stop(&StopSandbox { wait_ms: Some(WaitMs::new(0).unwrap()), failed_save: None });
    asked.unwrap();
    let alive = || processes.iter().filter(|&&pid| support::is_alive(pid)).count();
    eventually_within(PATIENCE, "its processes are gone", || alive() == 0);
    let stuck = daemon.wait_for(&sandbox.id, "its save has failed", |now| now.status == Status::SaveFailed);
    assert_eq!(stuck.generation, Generation::FIRST);
    assert_eq!(daemon.instances().len(), 1, "its files are kept");
    let events = daemon.client().events(&ListEvents::default()).unwrap().items;
    assert!(events.iter().any(|event| event.kind == "sandbox.save_failed"), "somebody hears of it");
    // Without room, a retry fails again, and nothing runs.
    let retry = StopSandbox { failed_save: Some(FailedSave::Retry), wait_ms: Some(WaitMs::new(60_000).unwrap()) };
    assert_eq!(daemon.sandbox(&sandbox.id).stop(&retry).unwrap().into_sandbox().status, Status::SaveFailed);
    assert!(daemon.processes().is_empty());

    disk.make_room();
    // It may have saved itself by now: then there is nothing to retry.
    let _ = daemon.sandbox(&sandbox.id).stop(&retry);
    daemon.wait_for(&sandbox.id, "it is saved", |now| now.status == Status::Hibernated);
    let back = ensure(&daemon, &sandbox.id);
    assert_eq!((back.status, back.generation), (Status::Ready, Generation(2)));
    assert_eq!(read(&daemon, &sandbox.id, "/workspace/file").unwrap(), "worth keeping");
    daemon.remove(&sandbox.id);
    eventually_within(PATIENCE, "nothing is left", || daemon.processes().is_empty() && daemon.instances().is_empty());
    daemon.end();
}

#[test]
fn t7_what_a_lost_one_had_is_sealed_and_the_next_is_made_from_it() {
    let daemon = Daemon::start();
    let sandbox = daemon.create_from(&named("kept", CreatePolicy::default()));
    write(&daemon, &sandbox.id, "/workspace/file", "never saved");
    let agent = daemon.host(&sandbox.id).agent_pid.expect("the diagnosis names it");
    support::kill(agent, rustix::process::Signal::KILL);
    daemon.wait_for(&sandbox.id, "it is lost", |now| now.status == Status::Lost);
    let back = ensure(&daemon, &sandbox.id);
    assert_eq!((back.status, back.generation, &back.policy), (Status::Ready, Generation(2), &sandbox.policy));
    assert_eq!(read(&daemon, &sandbox.id, "/workspace/file").unwrap(), "never saved");
    daemon.remove(&sandbox.id);
    daemon.assert_nothing_left();
}
