//! The real daemon tells the truth about real sandboxes that somebody broke from outside (SPEC part 1).
//!
//! Everything is broken with nothing but what the diagnosis names: process ids, the mount point, cgroups. The bounds
//! that are asserted are T3's promises, with a margin for a loaded machine.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE};
use support::held::{Held, Hold, unmount_root};
use support::{eventually_within, freezer, is_alive};
use viv_api::ErrorCode;
use viv_api::bound::{IdempotencyKey, Labels, LifetimeMs, Path, WaitMs};
use viv_api::client::{Change, ClientError};
use viv_api::diagnosis::HostView;
use viv_api::execution::StartExecution;
use viv_api::query::{ListEvents, ListSandboxes, PageQuery, ReadFile, SandboxLogQuery, StatsQuery, WriteFile};
use viv_api::sandbox::{
    CreatePolicy, CreateSandbox, Desired, EnsureSandbox, ExtendSandbox, Phase, Sandbox, Status, StopSandbox,
};
use viv_core::{Generation, SandboxId};

/// The death of a shim or an agent is shown within 1 s (T3). A machine that is loaded may be late with anything, so that
/// is asked of the best of a few; and of all, far less than what has to be found takes.
const PUSHED: Duration = Duration::from_secs(1);
const PUSHED_LATE: Duration = Duration::from_secs(10);
const KILLED: usize = 4;

/// Other damage is shown within 30 s (T3).
const OTHER: Duration = Duration::from_secs(33);

/// How often a status is read: readers must not be what keeps a machine busy.
const PAUSE: Duration = Duration::from_millis(50);

fn status(daemon: &Daemon, id: &SandboxId) -> Status {
    daemon.sandbox(id).get().unwrap().status
}

/// The status as lists and diagnoses show it, besides what a look at the one shows.
fn statuses(daemon: &Daemon, id: &SandboxId) -> Vec<Status> {
    let listed = daemon.client().list_all(ListSandboxes::default()).map(Result::unwrap);
    let listed = listed.filter(|sandbox| sandbox.id == *id).map(|sandbox| sandbox.status);
    let diagnosed = daemon.sandbox(id).diagnosis().unwrap().sandbox.status;
    listed.chain([diagnosed, status(daemon, id)]).collect()
}

fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> Option<ErrorCode> {
    answer.expect_err("it is refused").code()
}

fn echo() -> StartExecution {
    StartExecution::of(["/bin/sh", "-c", "echo here"]).unwrap()
}

/// Phases that its timeline went through, oldest first.
fn phases(daemon: &Daemon, id: &SandboxId) -> Vec<Phase> {
    daemon.sandbox(id).timeline_all().filter_map(|entry| entry.unwrap().to).collect()
}

/// A death that is pushed: shown as lost in no time, everywhere, and nothing is made in its place (T7).
fn death(kill: impl Fn(&HostView), cause: &str) {
    let daemon = Daemon::start();
    let (read, verified): ([SandboxId; KILLED], _) = (std::array::from_fn(|_| daemon.create().id), daemon.create().id);
    let seen_after = read.each_ref().map(|id| {
        let host = daemon.host(id);
        kill(&host);
        let killed_at = Instant::now();
        while status(&daemon, id) == Status::Ready {
            assert!(killed_at.elapsed() < PUSHED_LATE, "ready is shown of the dead");
            thread::sleep(PAUSE);
        }
        killed_at.elapsed()
    });
    assert!(seen_after.iter().any(|took| *took < PUSHED), "{seen_after:?}");
    for id in &read {
        let lost = daemon.wait_for(id, "it is lost", |sandbox| sandbox.status == Status::Lost);
        assert_eq!((lost.cause.unwrap().code.as_str(), lost.generation), (cause, Generation::FIRST));
        assert!(statuses(&daemon, id).iter().all(|status| *status == Status::Lost));
    }

    // Asked at once, before anything may have been pushed.
    kill(&daemon.host(&verified));
    let seen = daemon.sandbox(&verified).verify().unwrap();
    assert_ne!(seen.status, Status::Ready, "{seen:#?}");
    let lost = daemon.wait_for(&verified, "it is lost", |sandbox| sandbox.status == Status::Lost);
    assert_eq!((lost.cause.unwrap().code.as_str(), lost.generation), (cause, Generation::FIRST));

    for id in read.iter().chain([&verified]) {
        assert_eq!(code(daemon.sandbox(id).start(&echo(), None)), Some(ErrorCode::NotRunning));
        assert_eq!(daemon.sandbox(id).verify().unwrap().generation, Generation::FIRST, "a look makes nothing");
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn t3_incident_18_a_killed_agent_is_not_ready() {
    death(|host| Held::of(host.agent_pid).kill(), "crashed");
}

#[test]
fn t3_a_killed_shim_is_not_ready() {
    death(|host| Held::of(host.shim_pid).kill(), "supervisor_lost");
}

/// Damage that nobody is told of: `ready` goes with the age of its evidence, and at once for who asks.
fn damage(break_it: impl Fn(&HostView)) {
    let daemon = Daemon::start();
    let (read, verified) = (daemon.create().id, daemon.create().id);
    break_it(&daemon.host(&read));
    let broken_at = Instant::now();
    break_it(&daemon.host(&verified));
    let seen = daemon.sandbox(&verified).verify().unwrap();
    assert_ne!(seen.status, Status::Ready, "{seen:#?}");

    while status(&daemon, &read) == Status::Ready {
        assert!(broken_at.elapsed() < OTHER, "ready is shown of the broken");
        thread::sleep(PAUSE);
    }
    // From here on it is nowhere ready, whatever is looked at: its damage was found, and it stays.
    for id in [&read, &verified] {
        let found = |sandbox: &Sandbox| matches!(sandbox.status, Status::Verifying | Status::Lost);
        daemon.wait_for(id, "the damage is found", found);
        for _ in 0..20 {
            let all = statuses(&daemon, id);
            assert!(!all.contains(&Status::Ready), "{all:?}");
        }
        let sandbox = daemon.sandbox(id).verify().unwrap();
        assert_ne!(sandbox.status, Status::Ready, "{sandbox:#?}");
        assert_eq!(sandbox.generation, Generation::FIRST, "nothing is made in its place unasked (T7)");
        assert_eq!(code(daemon.sandbox(id).start(&echo(), None)), Some(ErrorCode::NotRunning));
    }
    for id in [&read, &verified] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn t3_incident_5_a_stopped_agent_is_not_ready() {
    damage(|host| Held::of(host.agent_pid).stop());
}

#[test]
fn t3_incident_21_an_unmounted_root_is_not_ready() {
    damage(unmount_root);
}

fn freeze(host: &HostView, file: &str, word: &str) {
    let switch = host.cgroups.iter().map(|cgroup| PathBuf::from(cgroup).join(file)).find(|path| path.exists());
    fs::write(switch.expect("a cgroup that can be frozen"), word).unwrap();
}

#[test]
fn t3_processes_frozen_by_hand_are_not_ready() {
    damage(|host| freeze(host, "cgroup.freeze", "1"));
}

#[test]
fn t3_processes_frozen_by_hand_with_v1_are_not_ready() {
    let Some(_) = freezer::first_kind() else { return };
    damage(|host| freeze(host, "freezer.state", "FROZEN"));
}

/// Lost by silence alone: kept for who comes back, replaced for who asks, and never two.
#[test]
fn t7_l15_who_was_silent_is_kept_or_replaced_but_never_doubled() {
    let daemon = Daemon::start();
    let all: [SandboxId; 3] = std::array::from_fn(|_| daemon.create().id);
    let [returns, replaced, races] = &all;
    let hosts = all.each_ref().map(|id| daemon.host(id));
    let agents = hosts.each_ref().map(|host| Held::of(host.agent_pid));
    let shims = hosts.each_ref().map(|host| Held::of(host.shim_pid));
    agents.iter().for_each(Held::stop);
    for id in &all {
        let seen = daemon.sandbox(id).verify().unwrap();
        assert_eq!(seen.status, Status::Verifying, "silence is no end: {seen:#?}");
    }
    for id in &all {
        let lost = daemon.wait_for(id, "it is lost", |sandbox| sandbox.status == Status::Lost);
        assert_eq!(lost.cause.unwrap().code, "unresponsive");
    }
    assert_eq!(daemon.instances().len(), 3, "nothing was made, nothing was ended");
    assert!(agents.iter().chain(&shims).all(|held| is_alive(held.pid)));

    // It comes back: verified, and itself.
    agents[0].signal(Signal::CONT);
    daemon.sandbox(returns).verify().unwrap();
    let back = daemon.wait_for(returns, "it is ready again", |sandbox| sandbox.status == Status::Ready);
    assert_eq!((back.generation, daemon.host(returns).agent_pid), (Generation::FIRST, Some(agents[0].pid)));
    let tail = phases(&daemon, returns);
    assert!(tail.ends_with(&[Phase::Lost, Phase::Verifying, Phase::Ready]), "{tail:?}");

    // Asked for, there is a new one, and the old one is gone.
    let made = daemon.sandbox(replaced).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!((made.status, made.generation), (Status::Ready, Generation(2)), "{made:#?}");
    agents[1].wait_gone();
    shims[1].wait_gone();
    let refused = daemon.sandbox(replaced).at(Generation::FIRST).start(&echo(), None);
    assert_eq!(code(refused), Some(ErrorCode::StaleHandle));

    // The old one wakes up in the middle of that.
    shims[2].stop();
    thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.sandbox(races).ensure(&EnsureSandbox::default()).unwrap().into_sandbox());
        eventually_within(PATIENCE, "it is being replaced", || status(&daemon, races) != Status::Lost);
        shims[2].signal(Signal::CONT);
        agents[2].signal(Signal::CONT);
        let made = asked.join().unwrap();
        assert_eq!((made.status, made.generation), (Status::Ready, Generation(2)), "{made:#?}");
    });
    agents[2].wait_gone();
    shims[2].wait_gone();
    assert_eq!(daemon.instances().len(), 3);
    for id in &all {
        assert_eq!(daemon.sandbox(id).verify().unwrap().status, Status::Ready);
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}

#[test]
fn l1_many_creates_with_one_key_make_one_sandbox() {
    const CALLERS: usize = 200;
    let daemon = Daemon::start();
    let key = IdempotencyKey::new("one-of-a-kind").unwrap();
    let request = CreateSandbox::default();
    let made: Vec<Sandbox> = thread::scope(|scope| {
        let create = || daemon.client().create(&request, Some(&key)).unwrap().into_sandbox();
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(create)).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    let ids: BTreeSet<&str> = made.iter().map(|sandbox| sandbox.id.as_str()).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let waited: BTreeSet<_> = made.iter().map(|sandbox| (sandbox.status, sandbox.generation.0)).collect();
    assert_eq!(waited, BTreeSet::from([(Status::Ready, 1)]), "all waited for it");
    let listed = || daemon.client().list_all(ListSandboxes { all: true, ..ListSandboxes::default() }).count();
    assert_eq!((listed(), daemon.instances().len()), (1, 1));

    let labels = serde_json::from_str::<Labels>(r#"{"another": "body"}"#).unwrap();
    let other = CreateSandbox { labels, ..CreateSandbox::default() };
    let error = daemon.client().create(&other, Some(&key)).unwrap_err();
    assert!(matches!(&error, ClientError::Api { status: 409, .. }), "{error:?}");
    assert_eq!(error.code(), Some(ErrorCode::IdempotencyMismatch));

    let id = &made[0].id;
    daemon.remove(id);
    let tombstone = daemon.client().create(&request, Some(&key)).unwrap().into_sandbox();
    assert_eq!((&tombstone.id, tombstone.status, tombstone.deleted), (id, Status::Stopped, true));
    assert_eq!(listed(), 1);
    daemon.assert_nothing_left();
}

#[test]
fn l3_many_ensures_of_a_lost_one_make_one_instance() {
    const CALLERS: usize = 50;
    let daemon = Daemon::start();
    let id = daemon.create().id;
    Held::of(daemon.host(&id).agent_pid).kill();
    daemon.wait_for(&id, "it is lost", |sandbox| sandbox.status == Status::Lost);
    let made: Vec<Sandbox> = thread::scope(|scope| {
        let ensure = || daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(ensure)).collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    let seen: BTreeSet<_> = made.iter().map(|sandbox| (sandbox.status, sandbox.generation.0)).collect();
    assert_eq!(seen, BTreeSet::from([(Status::Ready, 2)]));
    assert_eq!(daemon.instances().len(), 1);
    let provisioned = phases(&daemon, &id).into_iter().filter(|phase| *phase == Phase::Provisioning).count();
    assert_eq!(provisioned, 2, "the first, and one more");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// A stop at any moment of a create is the last word.
/// Held where it is being made, where it was made and nobody wrote that down, and where it is about to be probed.
#[test]
fn l9_a_stop_in_the_middle_of_a_create_ends_stopped() {
    let at_once = Some(WaitMs::new(0).unwrap());
    for (point, phase, instances) in [
        ("create.before", Phase::Provisioning, 0),
        ("create.after", Phase::Provisioning, 1),
        ("probe.before", Phase::Verifying, 1),
    ] {
        let hold = Hold::at(point);
        let mut daemon = Daemon::prepare(&[]);
        daemon.run(&[("VIV_FAILPOINT", &hold.variable())]);
        let request = CreateSandbox { wait_ms: at_once, ..CreateSandbox::default() };
        let id = daemon.client().create(&request, None).unwrap().into_sandbox().id;
        eventually_within(PATIENCE, "it comes that far", || hold.is_reached(1));
        assert_eq!(daemon.sandbox(&id).get().unwrap().phase, phase, "{point}");
        assert_eq!(daemon.instances().len(), instances, "{point}");
        let asked = daemon.sandbox(&id).stop(&StopSandbox { wait_ms: at_once, ..StopSandbox::default() }).unwrap();
        let asked = asked.into_sandbox();
        assert_eq!((asked.desired, asked.generation), (Desired::Gone, Generation::FIRST), "{point}: {asked:#?}");
        hold.open();
        let Change::Done(over) = daemon.sandbox(&id).stop(&StopSandbox::default()).unwrap() else {
            panic!("a stop waits until it is done");
        };
        assert_eq!((over.status, over.generation), (Status::Stopped, Generation::FIRST), "{point}: {over:#?}");
        assert_eq!(over.cause.unwrap().code, "user_stop");
        assert!(!phases(&daemon, &id).contains(&Phase::Ready), "{point}: it never ran");
        assert_eq!(code(daemon.sandbox(&id).ensure(&EnsureSandbox::default())), Some(ErrorCode::Gone));
        daemon.assert_nothing_left();
    }
}

#[test]
fn t5_a_stale_generation_is_told_the_current_one() {
    let daemon = Daemon::start();
    let id = daemon.create().id;
    Held::of(daemon.host(&id).agent_pid).kill();
    daemon.wait_for(&id, "it is lost", |sandbox| sandbox.status == Status::Lost);
    daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap();

    let path = Path::new("/workspace").unwrap();
    let file = Path::new("/workspace/file").unwrap();
    let read = ReadFile { path: file.clone(), offset: None, length: None, generation: None };
    let write = WriteFile { path: file.clone(), mode: None, user: None, generation: None };
    let old = daemon.sandbox(&id).at(Generation::FIRST);
    let answers = [
        ("get", old.get().err()),
        ("verify", old.verify().err()),
        ("diagnosis", old.diagnosis().err()),
        ("exec", old.start(&echo(), None).err()),
        ("list", old.list_files(&path, None).err()),
        ("stat", old.stat_file(&path).err()),
        ("read", old.read_file(&read).err()),
        ("write", old.write_file(&write, &mut &b"x"[..]).err()),
        ("remove", old.remove_file(&file).err()),
        ("extend", old.extend(ExtendSandbox::AtLeastMs(LifetimeMs::new(60_000).unwrap())).err()),
        ("ensure", old.ensure(&EnsureSandbox::default()).err()),
        ("stop", old.stop(&StopSandbox::default()).err()),
        ("delete", old.delete(None).err()),
    ];
    for (what, answer) in answers {
        let Some(ClientError::Api { status: 410, error }) = answer else { panic!("{what}: {answer:?}") };
        assert_eq!(error.code, ErrorCode::StaleHandle, "{what}");
        assert_eq!(error.details.unwrap().current_generation, Some(Generation(2)), "{what}");
    }
    let current = daemon.sandbox(&id).at(Generation(2));
    assert_eq!(current.verify().unwrap().status, Status::Ready, "nothing was done to it");
    assert_eq!(code(current.stat_file(&file)), Some(ErrorCode::NotFound));
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn t9_l6_reads_are_not_activity_and_an_exec_is() {
    let daemon = Daemon::start();
    let made = daemon.create();
    let (id, client) = (&made.id, daemon.client());
    let active_at = || daemon.sandbox(id).get().unwrap().last_activity_at_ms;
    let (began, expires) = (active_at(), made.expires_at_ms);
    // Longer than the second to which activity is rounded.
    let until = Instant::now() + Duration::from_millis(1_500);
    while Instant::now() < until {
        let sandbox = daemon.sandbox(id);
        assert_eq!(sandbox.verify().unwrap().status, Status::Ready);
        client.list(&ListSandboxes::default()).unwrap();
        sandbox.diagnosis().unwrap();
        sandbox.resources().unwrap();
        sandbox.timeline(&PageQuery::default()).unwrap();
        sandbox.logs(&SandboxLogQuery::default()).unwrap();
        sandbox.executions_all().for_each(|execution| drop(execution.unwrap()));
        client.events(&ListEvents::default()).unwrap();
        client.stats(&StatsQuery::default()).unwrap();
        thread::sleep(PAUSE);
    }
    let seen = daemon.sandbox(id).get().unwrap();
    assert_eq!((seen.last_activity_at_ms, seen.expires_at_ms), (began, expires));
    assert_eq!(seen.version, made.version, "no read changed the record");
    daemon.sandbox(id).start(&echo(), None).unwrap();
    assert!(active_at() > began, "{:?}", active_at());
    daemon.remove(id);
    daemon.assert_nothing_left();
}

/// What was deleted is refused, whatever is asked of it.
fn assert_gone(daemon: &Daemon, id: &SandboxId) {
    let path = Path::new("/workspace").unwrap();
    let read = ReadFile { path: path.clone(), offset: None, length: None, generation: None };
    let write = WriteFile { path: path.clone(), mode: None, user: None, generation: None };
    let sandbox = daemon.sandbox(id);
    let answers = [
        ("exec", sandbox.start(&echo(), None).err()),
        ("ensure", sandbox.ensure(&EnsureSandbox::default()).err()),
        ("extend", sandbox.extend(ExtendSandbox::AtLeastMs(LifetimeMs::new(60_000).unwrap())).err()),
        ("executions", sandbox.executions_all().next().and_then(Result::err)),
        ("list", sandbox.list_files(&path, None).err()),
        ("stat", sandbox.stat_file(&path).err()),
        ("read", sandbox.read_file(&read).err()),
        ("write", sandbox.write_file(&write, &mut &b"x"[..]).err()),
        ("remove", sandbox.remove_file(&path).err()),
        ("logs", sandbox.logs(&SandboxLogQuery::default()).err()),
    ];
    for (what, answer) in answers {
        let Some(ClientError::Api { status: 410, error }) = answer else { panic!("{what}: {answer:?}") };
        assert_eq!(error.code, ErrorCode::Gone, "{what}");
    }
    // What it was and why it ended is kept (T10), and asking again for its end changes nothing.
    let tombstone = sandbox.get().unwrap();
    assert_eq!((tombstone.status, tombstone.deleted), (Status::Stopped, true));
    assert_eq!(sandbox.verify().unwrap(), tombstone);
    assert_eq!(sandbox.delete(None).unwrap().into_sandbox().version, tombstone.version);
}

#[test]
fn l20_what_was_deleted_is_gone_for_ever() {
    let mut daemon = Daemon::start();
    let id = daemon.create().id;
    daemon.sandbox(&id).start(&StartExecution::of(["/bin/sleep", "1000"]).unwrap(), None).unwrap();
    daemon.remove(&id);
    daemon.assert_nothing_left();
    assert_gone(&daemon, &id);
    daemon.kill();
    daemon.restart();
    assert_gone(&daemon, &id);
    daemon.assert_nothing_left();
    daemon.end();
}

fn short_lived() -> CreateSandbox {
    let lifetime_ms = Some(LifetimeMs::new(3_000).unwrap());
    CreateSandbox { policy: CreatePolicy { lifetime_ms, ..CreatePolicy::default() }, ..CreateSandbox::default() }
}

#[test]
fn l5_incident_7_a_lifetime_ends_with_the_daemon_alive_or_dead() {
    let mut daemon = Daemon::start();
    let expired = |daemon: &Daemon, id: &SandboxId| {
        let over = daemon.wait_for(id, "it is over", |sandbox| sandbox.status == Status::Stopped);
        assert_eq!(over.cause.unwrap().code, "expired");
        assert_eq!(code(daemon.sandbox(id).ensure(&EnsureSandbox::default())), Some(ErrorCode::Gone));
    };
    let id = daemon.create_from(&short_lived()).id;
    expired(&daemon, &id);
    daemon.assert_nothing_left();

    let id = daemon.create_from(&short_lived()).id;
    let shim = Held::of(daemon.host(&id).shim_pid);
    daemon.kill();
    shim.wait_gone();
    eventually_within(PATIENCE, "nothing of it runs", || daemon.processes().is_empty());
    daemon.restart();
    expired(&daemon, &id);
    daemon.assert_nothing_left();
    daemon.end();
}

/// Whoever is to end it stands still, and whoever would see to that too.
#[test]
fn l5_a_lifetime_ends_though_shim_and_guard_stand_still() {
    let mut daemon = Daemon::start();
    let begun = [false, true].map(|persistent| {
        let mut asked = short_lived();
        asked.policy.persistent = Some(persistent);
        asked.policy.lifetime_ms = Some(LifetimeMs::new(8_000).unwrap());
        let id = daemon.create_from(&asked).id;
        let host = daemon.host(&id);
        let (shim, agent) = (Held::of(host.shim_pid), Held::of(host.agent_pid));
        let told = fs::read(daemon.provider_folder().join(format!("instances/{id}/shim.json"))).unwrap();
        let told: serde_json::Value = serde_json::from_slice(&told).unwrap();
        let guard = Held::of(told["guard"]["pid"].as_u64().map(|pid| pid as u32));
        guard.stop();
        shim.stop();
        (id, [shim, guard, agent])
    });
    let ends = [(Status::Stopped, "expired"), (Status::Hibernated, "saved")];
    for ((id, all), (end, code)) in begun.iter().zip(ends) {
        let over = daemon.wait_for(id, "it is over", |sandbox| sandbox.status == end);
        let cause = over.cause.unwrap();
        assert_eq!((cause.code.as_str(), cause.by.as_str()), (code, "expiry"), "{}", cause.message);
        all.iter().for_each(Held::wait_gone);
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
    daemon.end();
}

#[test]
fn x6_incident_4_an_agent_killed_for_memory_is_told_as_that() {
    let daemon = Daemon::start();
    let limits = serde_json::from_str(r#"{"memory_bytes": 67108864}"#).unwrap();
    let id = daemon.create_from(&CreateSandbox { limits, ..CreateSandbox::default() }).id;
    // By itself the kernel would take the command. What lies in files is nobody's, so the score decides.
    fs::write(format!("/proc/{}/oom_score_adj", daemon.host(&id).agent_pid.unwrap()), "1000").unwrap();
    let hog = "head -c 60M /dev/zero > /run/much; head -c 60M /dev/zero > /dev/too-much";
    let hog = StartExecution::of(["/bin/sh", "-c", hog]).unwrap();
    daemon.sandbox(&id).start(&hog, None).unwrap();
    let lost = daemon.wait_for(&id, "it is lost", |sandbox| sandbox.status == Status::Lost);
    assert_eq!(lost.cause.unwrap().code, "oom_killed");
    assert_eq!(lost.observed.unwrap().end_cause.as_deref(), Some("oom_killed"));
    let again = daemon.sandbox(&id).ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
    assert_eq!((again.status, again.generation), (Status::Ready, Generation(2)));
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn l18_a_quota_is_told_with_limit_and_use() {
    let daemon = Daemon::start_with(&["--sandboxes-max", "2"]);
    let ids = [daemon.create().id, daemon.create().id];
    let error = daemon.client().create(&CreateSandbox::default(), None).unwrap_err();
    let ClientError::Api { status: 429, error } = error else { panic!("{error:?}") };
    assert_eq!(error.code, ErrorCode::QuotaExceeded);
    let details = error.details.unwrap();
    assert_eq!((details.limit, details.used, details.quota.is_some()), (Some(2), Some(2), true), "{details:?}");
    assert_eq!(daemon.instances().len(), 2);
    // One that is lost may still be there, so it counts until it was seen to be gone.
    Held::of(daemon.host(&ids[0]).agent_pid).kill();
    daemon.wait_for(&ids[0], "it is lost", |sandbox| sandbox.status == Status::Lost);
    assert_eq!(code(daemon.client().create(&CreateSandbox::default(), None)), Some(ErrorCode::QuotaExceeded));
    daemon.remove(&ids[0]);
    let third = daemon.create().id;
    for id in [&ids[1], &third] {
        daemon.remove(id);
    }
    daemon.assert_nothing_left();
}
