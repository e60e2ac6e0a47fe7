//! When another instance takes the place of a broken one on the real daemon, and when none does (T4, T7).
//!
//! Everything is broken from outside, and for real: the root is unmounted where the shim has it, files of the writable
//! layer are taken away, an agent is stopped, a port is closed.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::path::{Path as HostPath, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::held::{Held, Hold, listen_inside, unmount_root};
use support::{eventually_within, is_alive};
use viv_api::bound::{Port, Ports, SandboxName, WaitMs};
use viv_api::execution::{Execution, ExecutionState, StartExecution};
use viv_api::query::ListEvents;
use viv_api::sandbox::{CreateSandbox, EnsureSandbox, Phase, Sandbox, Status, StopSandbox, TimelineEntry};
use viv_core::{Generation, SandboxId};

/// Bad findings have to span this before an instance is given up (T7).
const FINDINGS_SPAN_MS: u64 = 10_000;

/// How long a recovery may take: findings, a seal, an instance, its verification, on a loaded machine.
const RECOVERED_WITHIN: Duration = Duration::from_secs(180);

/// How often a status is read: readers must not be what keeps a machine busy.
const PAUSE: Duration = Duration::from_millis(50);

const PORT: u16 = 8_080;

fn said(daemon: &Daemon, id: &SandboxId, script: &str) -> String {
    let (said, end) = run(&daemon.sandbox(id), script);
    assert_eq!(end.exit_code, Some(0), "{said}");
    said
}

fn named(name: &str) -> CreateSandbox {
    CreateSandbox { name: Some(SandboxName::new(name).unwrap()), ..CreateSandbox::default() }
}

fn no_wait() -> EnsureSandbox {
    EnsureSandbox { wait_ms: Some(WaitMs::new(0).unwrap()) }
}

fn timeline(daemon: &Daemon, id: &SandboxId) -> Vec<TimelineEntry> {
    daemon.sandbox(id).timeline_all().map(Result::unwrap).collect()
}

/// One in its second generation: with what was saved, with something that was not, and with a command that runs.
struct Used {
    id: SandboxId,
    job: Execution,
}

const SECOND: Generation = Generation(2);
const THIRD: Generation = Generation(3);

impl Used {
    fn in_house(daemon: &Daemon) -> Self {
        let id = daemon.create_from(&named("kept")).id;
        said(daemon, &id, "echo saved > /workspace/saved");
        let sandbox = daemon.sandbox(&id);
        assert_eq!(sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox().status, Status::Hibernated);
        let back = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
        assert_eq!((back.status, back.generation), (Status::Ready, SECOND));
        said(daemon, &id, "echo unsaved > /workspace/unsaved; sync");
        let job = sandbox.start(&StartExecution::of(["/bin/sleep", "10000"]).unwrap(), None).unwrap();
        Self { id, job }
    }

    /// Has somebody want it, once it was found to be broken, and sees another generation take its place in time: not
    /// before there were enough findings, with something to see of it, and never `ready` in between.
    fn recovered(&self, daemon: &Daemon) -> Sandbox {
        let sandbox = daemon.sandbox(&self.id);
        let (shim, agent) = (daemon.host(&self.id).shim_pid.unwrap(), daemon.host(&self.id).agent_pid.unwrap());
        let found = sandbox.verify().unwrap();
        assert_eq!((found.status, found.generation), (Status::Verifying, SECOND), "one finding: {found:#?}");
        sandbox.ensure(&no_wait()).unwrap();
        let until = std::time::Instant::now() + RECOVERED_WITHIN;
        let back = loop {
            let now = sandbox.get().unwrap();
            assert!(now.status != Status::Ready || now.generation == THIRD, "{now:#?}");
            assert!(std::time::Instant::now() < until, "it is not recovered: {now:#?}");
            if now.status == Status::Ready {
                break now;
            }
            thread::sleep(PAUSE);
        };
        eventually_within(PATIENCE, "nothing is left of the old one", || !is_alive(shim) && !is_alive(agent));
        assert_eq!(daemon.instances().len(), 1);
        self.assert_told(daemon);
        back
    }

    /// The timeline has the findings, over their time, and then the recovery; the journal too.
    fn assert_told(&self, daemon: &Daemon) {
        let told = timeline(daemon, &self.id);
        let moved = |to: Phase, from: Phase| {
            told.iter()
                .rposition(|entry| entry.to == Some(to) && entry.from == Some(from))
                .unwrap_or_else(|| panic!("{told:#?}"))
        };
        let (broken, given_up) = (moved(Phase::Verifying, Phase::Ready), moved(Phase::Resuming, Phase::Verifying));
        assert!(broken < given_up, "{told:#?}");
        let cause = told[given_up].cause.as_ref().expect("why");
        assert!(["probe_failed", "provider_lost"].contains(&cause.code.as_str()), "{cause:?}");
        let again = told[broken..given_up].iter().filter(|entry| entry.kind == "sandbox.retrying").count();
        assert!(again >= 1, "found more than once between its first and its last: {told:#?}");
        let span_ms = told[given_up].at_ms - told[broken].at_ms;
        assert!(span_ms >= FINDINGS_SPAN_MS, "after {span_ms} ms: {told:#?}");
        let query = ListEvents { sandbox: Some((&self.id).into()), ..ListEvents::default() };
        let events = daemon.client().events(&query).unwrap().items;
        assert!(events.iter().any(|event| event.to == Some(Phase::Resuming) && event.from == Some(Phase::Verifying)));
        let lost = daemon.sandbox(&self.id).execution(self.job.id.clone()).get().unwrap();
        assert_eq!((lost.state, lost.generation), (ExecutionState::Lost, SECOND), "X5: {lost:#?}");
        assert!(lost.message.is_some_and(|why| !why.is_empty()), "with a word why");
    }
}

#[test]
fn t7_t4_three_findings_over_ten_seconds_seal_what_there_is_and_replace_it() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let used = Used::in_house(&daemon);
    unmount_root(&daemon.host(&used.id));
    used.recovered(&daemon);
    assert_eq!(said(&daemon, &used.id, "cat /workspace/saved /workspace/unsaved"), "saved\nunsaved\n");
    daemon.remove(&used.id);
    daemon.assert_nothing_left();
}

/// Files of this name below a folder.
fn find(folder: &HostPath, name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name() == name {
            found.push(entry.path());
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(find(&entry.path(), name));
        }
    }
    found
}

#[test]
fn t4_what_cannot_be_sealed_any_more_goes_back_to_what_was_saved_last() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let used = Used::in_house(&daemon);
    // What shows whose layer it is goes, and the root: whatever is in it cannot be told from another's.
    let layer = daemon.provider_folder().join("layers/active").join(format!("{}.{}", used.id, SECOND.0));
    let identity = find(&layer.join("parts/root/.vivarium"), "identity.json");
    assert_eq!(identity.len(), 1, "{identity:?} in {}", layer.display());
    unmount_root(&daemon.host(&used.id));
    fs::remove_file(&identity[0]).unwrap();
    used.recovered(&daemon);
    assert_eq!(said(&daemon, &used.id, "cd /workspace; cat saved; ls"), "saved\nsaved\n");
    let told = timeline(&daemon, &used.id);
    let says_so =
        |entry: &TimelineEntry| entry.cause.as_ref().is_some_and(|cause| cause.message.contains("could not be saved"));
    assert!(told.iter().any(says_so), "it is said that something is missing: {told:#?}");
    daemon.remove(&used.id);
    daemon.assert_nothing_left();
}

#[test]
fn t7_one_failed_probe_replaces_nothing() {
    let hold = Hold::at("probe.before");
    let mut daemon = Daemon::prepare(&["--layers", "plain"]);
    daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
    let ports = Ports::new(vec![Port::new(PORT.into()).unwrap()]).unwrap();
    let request = CreateSandbox { ports, wait_ms: Some(WaitMs::new(0).unwrap()), ..named("served") };
    let id = daemon.client().create(&request, None).unwrap().into_sandbox().id;
    eventually_within(PATIENCE, "it was made", || hold.is_reached(1));
    let service = listen_inside(&daemon.host(&id), PORT);
    hold.open();
    daemon.wait_for(&id, "it is ready", |now| now.status == Status::Ready);
    let before = daemon.host(&id);

    drop(service);
    let found = daemon.sandbox(&id).verify().unwrap();
    assert_eq!((found.status, found.generation), (Status::Verifying, Generation::FIRST), "{found:#?}");
    // Somebody wants it, so another one would be made.
    daemon.sandbox(&id).ensure(&no_wait()).unwrap();
    let _service = listen_inside(&daemon.host(&id), PORT);
    let back = daemon.wait_for(&id, "it is ready again", |now| now.status == Status::Ready);
    assert_eq!(back.generation, Generation::FIRST);
    let now = daemon.host(&id);
    assert_eq!((now.shim_pid, now.agent_pid), (before.shim_pid, before.agent_pid), "it is itself");
    let told = timeline(&daemon, &id);
    let left = told.iter().filter(|entry| entry.from == Some(Phase::Verifying) && entry.to != Some(Phase::Ready));
    assert_eq!(left.count(), 0, "{told:#?}");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn t7_timeouts_alone_replace_nothing_though_somebody_waits() {
    let daemon = Daemon::start_with(&["--layers", "plain"]);
    let id = daemon.create_from(&named("silent")).id;
    said(&daemon, &id, "echo work > /workspace/work");
    let (sandbox, host) = (daemon.sandbox(&id), daemon.host(&id));
    let (agent, shim) = (Held::of(host.agent_pid), Held::of(host.shim_pid));
    agent.stop();
    let seen = sandbox.verify().unwrap();
    assert_eq!(seen.status, Status::Verifying, "{seen:#?}");
    sandbox.ensure(&no_wait()).unwrap();
    // Longer than a verification waits: it is given up, and nothing takes its place.
    let lost = daemon.wait_for(&id, "it is given up", |now| now.status == Status::Lost);
    assert_eq!((lost.generation, lost.cause.unwrap().code.as_str()), (Generation::FIRST, "unresponsive"));
    assert_eq!(daemon.instances().len(), 1);
    assert!(is_alive(agent.pid) && is_alive(shim.pid), "nothing was ended");
    agent.signal(Signal::CONT);
    sandbox.verify().unwrap();
    let back = daemon.wait_for(&id, "it is ready again", |now| now.status == Status::Ready);
    assert_eq!((back.generation, daemon.host(&id).agent_pid), (Generation::FIRST, Some(agent.pid)));
    assert_eq!(said(&daemon, &id, "cat /workspace/work"), "work\n");
    let made = timeline(&daemon, &id).iter().filter(|entry| entry.to == Some(Phase::Resuming)).count();
    assert_eq!(made, 0);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}
