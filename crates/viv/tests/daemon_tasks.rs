//! Tasks on the real daemon, with real git and a scripted agent that pushes through the gate (K1 to K7).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::daemon::{Daemon, PATIENCE, run};
use support::held::unmount_root;
use support::restart::{Freezer, FreezerKind, House};
use viv_api::bound::{
    Argument, Argv, CommandEnv, EffectName, IdempotencyKey, LifetimeMs, ReportsMax, SandboxRef, TaskEffects, TaskFiles,
    TaskMs, TaskRef, TaskSteps, WaitMs,
};
use viv_api::client::Client;
use viv_api::execution::{ExecutionState, OutputLine};
use viv_api::query::{ListEvents, ListTasks};
use viv_api::sandbox::{CreatePolicy, CreateSandbox, EnsureSandbox, Status};
use viv_api::task::{
    ContinueTask, CreateTask, StopTask, Task, TaskCame, TaskEffect, TaskFile, TaskLimits, TaskSource, TaskState,
    TaskStep,
};
use viv_core::SandboxId;

/// A bare repository with one commit, in the sandbox, where no network is needed to reach it.
const ORIGIN: &str = "
    set -e
    export HOME=/root GIT_CONFIG_NOSYSTEM=1
    git init -q --bare -b main /srv/origin.git
    git init -q -b main /tmp/seed && cd /tmp/seed
    git config user.name t && git config user.email t@t
    echo one > file && git add file && git commit -q -m one
    git push -q /srv/origin.git main";

/// What the scripted agent does: works for as long as it is told, then commits, and pushes through the gate.
const AGENT: &str = r#"#!/bin/sh
set -e
export HOME=/root GIT_CONFIG_NOSYSTEM=1
git config user.name agent && git config user.email agent@agent
viv step --session "session-$VIV_TASK_RUN" started
echo "session before: ${VIV_TASK_SESSION:-none}"
for count in $(seq "${WORK:-1}"); do echo "working $count"; viv step; sleep 0.1; done
echo "$VIV_TASK_RUN" >> file
git commit -q -a -m "run $VIV_TASK_RUN"
viv gate -- git push -q origin main
echo pushed
"#;

fn words(words: &[&str]) -> Argv {
    Argv::new(words.iter().map(|word| Argument::new(*word).unwrap()).collect()).unwrap()
}

fn sandbox(daemon: &Daemon, name: &str) -> SandboxId {
    let request = CreateSandbox { name: Some(name.parse().unwrap()), ..CreateSandbox::default() };
    let id = daemon.create_from(&request).id;
    let (said, ended) = run(&daemon.sandbox(&id), ORIGIN);
    assert_eq!(ended.exit_code, Some(0), "{said}");
    id
}

fn agent_file() -> TaskFile {
    TaskFile {
        path: "/opt/agent.sh".parse().unwrap(),
        text: AGENT.parse().unwrap(),
        mode: Some("0755".parse().unwrap()),
    }
}

/// The agent as a task in this sandbox.
fn agent(sandbox: &SandboxId, work: &str) -> CreateTask {
    let source = TaskSource { git: "/srv/origin.git".parse().unwrap(), reference: None, path: None };
    CreateTask {
        sandbox: Some(SandboxRef::from(sandbox)),
        argv: Some(words(&["/opt/agent.sh"])),
        env: CommandEnv::new([("WORK".parse().unwrap(), work.parse().unwrap())].into()).unwrap(),
        source: Some(source),
        files: TaskFiles::new(vec![agent_file()]).unwrap(),
        effects: push(),
        ..CreateTask::default()
    }
}

fn push() -> TaskEffects {
    TaskEffects::new(vec![TaskEffect { name: EffectName::new("push").unwrap(), repeatable: true }]).unwrap()
}

fn limits(inactivity_ms: u64, total_ms: u64) -> TaskLimits {
    TaskLimits {
        inactivity_ms: Some(TaskMs::new(inactivity_ms).unwrap()),
        total_ms: Some(TaskMs::new(total_ms).unwrap()),
        ..TaskLimits::default()
    }
}

fn until(client: &Client, task: &Task, what: &str, so: impl Fn(&Task) -> bool) -> Task {
    let deadline = Instant::now() + 2 * PATIENCE;
    loop {
        let now = client.task(&TaskRef::from(&task.id)).unwrap();
        if so(&now) {
            return now;
        }
        assert!(Instant::now() < deadline, "not so after {:?}: {what}: {now:#?}", 2 * PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn over(client: &Client, task: &Task) -> Task {
    until(client, task, "it is over", |now| now.state.is_final())
}

fn stop(client: &Client, task: &Task) -> Task {
    let wait_ms = Some(WaitMs::new(120_000).unwrap());
    client.stop_task(&TaskRef::from(&task.id), &StopTask { wait_ms }).unwrap()
}

/// What a step said.
fn said(client: &Client, task: &Task, step: u32) -> String {
    let mut said = Vec::new();
    for line in client.task_logs(&TaskRef::from(&task.id), step, 0, true) {
        match line.unwrap() {
            OutputLine::Chunk(chunk) => said.extend(chunk.data().unwrap()),
            OutputLine::End(_) => break,
            OutputLine::Cut(_) | OutputLine::Alive(_) => {}
        }
    }
    String::from_utf8(said).unwrap()
}

/// How many commits were pushed, looked at in the sandbox as it is after the task.
fn commits(daemon: &Daemon, id: &SandboxId) -> usize {
    daemon.sandbox(id).ensure(&EnsureSandbox::default()).unwrap();
    daemon.wait_for(id, "it is ready", |now| now.status == Status::Ready);
    let (said, ended) = run(&daemon.sandbox(id), "git -C /srv/origin.git rev-list --count main");
    assert_eq!(ended.exit_code, Some(0), "{said}");
    said.trim().parse().unwrap()
}

fn moments(client: &Client, task: &Task) -> Vec<String> {
    let timeline = client.task_timeline(&TaskRef::from(&task.id)).unwrap();
    assert!(timeline.moments.is_sorted_by_key(|moment| moment.at_ms), "{timeline:?}");
    timeline.moments.into_iter().map(|moment| moment.what).collect()
}

#[test]
fn k1_a_task_completes_and_pushes() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let id = sandbox(&daemon, "box");
    let key = IdempotencyKey::new("once").unwrap();
    let task = client.run_task(&agent(&id, "3"), Some(&key)).unwrap();
    let again = client.run_task(&agent(&id, "3"), Some(&key)).unwrap();
    assert_eq!(again.id, task.id);
    assert!(client.run_task(&agent(&id, "4"), Some(&key)).is_err(), "another body under the same key");
    let done = over(client, &task);
    assert_eq!(done.state, TaskState::Succeeded, "{done:#?}\n{}", said(client, &done, 0));
    assert_eq!((done.grants.len(), done.grants[0].outcome.as_str()), (1, "done"));
    assert_eq!((done.reported, done.session.as_deref()), (4, Some("session-1")));
    // What it wrote is there though its sandbox is not.
    assert!(said(client, &done, 0).ends_with("pushed\n"));
    let shown = daemon.sandbox(&id).get().unwrap();
    assert_eq!(shown.status, Status::Hibernated, "without keep_alive its sandbox ends, and one with a name is saved");
    let happened = moments(client, &done);
    for what in
        ["requested", "taken_up", "prepared", "started", "output", "effect_granted", "effect_ended", "confirmed"]
    {
        assert!(happened.iter().any(|one| one == what), "{what}: {happened:?}");
    }
    assert_eq!(commits(&daemon, &id), 2);
    let listed: Vec<Task> = client.tasks_all(ListTasks::default()).map(Result::unwrap).collect();
    assert_eq!(listed.iter().map(|task| &task.id).collect::<Vec<_>>(), [&done.id]);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn k2_stopped_in_the_middle_nothing_is_pushed() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let id = sandbox(&daemon, "box");
    let task = client.run_task(&agent(&id, "10000"), None).unwrap();
    until(client, &task, "it works", |now| now.reported > 2);
    let stopped = stop(client, &task);
    assert_eq!(stopped.state, TaskState::Stopped, "{stopped:#?}");
    assert_eq!(stopped.ending.as_ref().unwrap().cause, "user_stop");
    assert!(stopped.times.killed_at_ms.is_some() && stopped.times.confirmed_at_ms.is_some());
    // The answer says what was terminated.
    assert_eq!(stopped.steps[0].ended, Some(ExecutionState::Cancelled), "{stopped:#?}");
    // Everything of it is gone when that is said.
    assert_eq!(daemon.sandbox(&id).get().unwrap().status, Status::Hibernated);
    assert!(daemon.instances().is_empty());
    let happened = moments(client, &stopped);
    let place =
        |what: &str| happened.iter().position(|one| one == what).unwrap_or_else(|| panic!("{what}: {happened:?}"));
    assert!(place("stop_requested") < place("killed") && place("killed") < place("confirmed"), "{happened:?}");
    assert_eq!(stop(client, &task).times.confirmed_at_ms, stopped.times.confirmed_at_ms, "again changes nothing");
    assert_eq!(commits(&daemon, &id), 1);
    let refused = client.continue_task(&TaskRef::from(&task.id), &ContinueTask::default()).unwrap_err();
    assert!(refused.to_string().contains("not kept"), "{refused}");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// It cannot be shown that anything ended, so the sandbox goes, kept or not (X3), and at once: asking again and again would
/// take longer than a stop may.
#[test]
fn k2_a_stop_does_not_wait_for_an_agent_that_stands_still() {
    let daemon = Daemon::start();
    let client = daemon.client();
    for (keep_alive, tries) in [(false, 1), (true, 2)] {
        let argv = Some(words(&["sleep", "1000"]));
        let task = CreateTask { argv, keep_alive, limits: limits(0, 0), ..CreateTask::default() };
        let task = client.run_task(&task, None).unwrap();
        let task = until(client, &task, "it runs", |now| now.times.started_at_ms.is_some());
        let agent = daemon.host(&task.sandbox).agent_pid.unwrap();
        support::kill(agent, Signal::STOP);
        let stopped = stop(client, &task);
        assert_eq!(stopped.state, TaskState::Stopped, "{stopped:#?}");
        assert_eq!(stopped.steps[0].ended, Some(ExecutionState::Lost), "{stopped:#?}");
        assert!(!support::is_alive(agent) && daemon.instances().is_empty(), "{stopped:#?}");
        let took_ms = stopped.times.confirmed_at_ms.unwrap() - stopped.stop.as_ref().unwrap().at_ms;
        eprintln!("with keep_alive {keep_alive}: confirmed {took_ms} ms after the stop");
        assert_eq!(daemon.said().matches("could not be ended yet").count(), tries, "it was asked once for each");
        daemon.remove(&task.sandbox);
    }
    daemon.assert_nothing_left();
}

#[test]
fn k4_timed_out_it_is_terminated_and_nothing_is_pushed() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let id = sandbox(&daemon, "box");
    let task = CreateTask { limits: limits(60_000, 6_000), ..agent(&id, "10000") };
    let ended = over(client, &client.run_task(&task, None).unwrap());
    assert_eq!((ended.state, ended.ending.as_ref().unwrap().cause.as_str()), (TaskState::TimedOut, "total_limit"));
    assert!(daemon.instances().is_empty(), "{ended:#?}");
    assert_eq!(commits(&daemon, &id), 1);
    // A step of its own time, and as many reports as there may be.
    let step = TaskStep { limit_ms: Some(300.try_into().unwrap()), ..shell("sleep 600") };
    let steps = CreateTask { steps: TaskSteps::new(vec![step]).unwrap(), ..in_sandbox(&id) };
    let ended = over(client, &client.run_task(&steps, None).unwrap());
    assert_eq!((ended.state, ended.ending.as_ref().unwrap().cause.as_str()), (TaskState::TimedOut, "step_time_limit"));
    let reports = TaskLimits { reports_max: Some(ReportsMax::new(3).unwrap()), ..TaskLimits::default() };
    let task = CreateTask {
        limits: reports,
        argv: Some(words(&["sh", "-c", "while viv step; do :; done; sleep 600"])),
        ..in_sandbox(&id)
    };
    let ended = over(client, &client.run_task(&task, None).unwrap());
    assert_eq!((ended.state, ended.reported), (TaskState::StepLimit, 4), "{ended:#?}");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

fn shell(line: &str) -> TaskStep {
    TaskStep { argv: words(&["/bin/sh", "-c", line]), env: CommandEnv::default(), cwd: None, limit_ms: None }
}

fn in_sandbox(id: &SandboxId) -> CreateTask {
    CreateTask { sandbox: Some(SandboxRef::from(id)), ..CreateTask::default() }
}

#[test]
fn k6_kept_alive_and_continued_it_resumes_its_session() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let id = sandbox(&daemon, "box");
    let task = client.run_task(&CreateTask { keep_alive: true, ..agent(&id, "1") }, None).unwrap();
    let first = over(client, &task);
    assert_eq!(first.state, TaskState::Succeeded, "{first:#?}");
    let kept = daemon.sandbox(&id).get().unwrap();
    assert_eq!(kept.status, Status::Ready, "its sandbox stays");
    client.continue_task(&TaskRef::from(&task.id), &ContinueTask::default()).unwrap();
    let second = until(client, &task, "it is over again", |now| now.run == 2 && now.state.is_final());
    assert_eq!((second.state, second.came), (TaskState::Succeeded, Some(TaskCame::Reused)), "{second:#?}");
    assert_eq!(second.generation, first.generation);
    let said = said(client, &second, 0);
    assert!(said.contains("session before: session-1"), "{said}");
    assert_eq!(
        second.grants.iter().map(|grant| (grant.run, grant.outcome.as_str())).collect::<Vec<_>>(),
        [(1, "done"), (2, "done")]
    );
    assert_eq!(commits(&daemon, &id), 3);
    // Stopped, it stays too, and nothing of the task runs in it.
    let request =
        ContinueTask { argv: Some(words(&["sh", "-c", "setsid sleep 1000 & sleep 1000"])), ..ContinueTask::default() };
    client.continue_task(&TaskRef::from(&task.id), &request).unwrap();
    until(client, &task, "it runs", |now| now.run == 3 && now.times.started_at_ms.is_some());
    assert_eq!(stop(client, &task).state, TaskState::Stopped);
    let (left, _) = run(&daemon.sandbox(&id), "ps -e -o args | grep -c '[s]leep 1000'");
    assert_eq!(left.trim(), "0");
    assert_eq!(daemon.sandbox(&id).get().unwrap().generation, kept.generation);
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn k6_kept_alive_and_expired_meanwhile_it_is_recreated() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let policy = CreatePolicy { lifetime_ms: Some(LifetimeMs::new(3_600_000).unwrap()), ..CreatePolicy::default() };
    let create = Some(Box::new(CreateSandbox { policy, ..CreateSandbox::default() }));
    // All of it is inside, so that what was saved, and what was not, can be told from each other.
    let origin = shell(&format!("[ -e /srv/origin.git ] || {{ {ORIGIN}\n}}"));
    let agent = shell(
        "set -e; [ -e /workspace/source ] || git clone -q /srv/origin.git /workspace/source
         cd /workspace/source && exec /opt/agent.sh",
    );
    let request = CreateTask {
        create,
        steps: TaskSteps::new(vec![origin, agent]).unwrap(),
        files: TaskFiles::new(vec![agent_file()]).unwrap(),
        effects: push(),
        keep_alive: true,
        ..CreateTask::default()
    };
    let task = client.run_task(&request, None).unwrap();
    let first = over(client, &task);
    assert_eq!((first.state, first.session.as_deref()), (TaskState::Succeeded, Some("session-1")), "{first:#?}");
    assert_eq!(commits(&daemon, &first.sandbox), 2);
    // Its deadline passes: what is persistent is saved, and is not there.
    let deadline = viv_api::sandbox::ExtendSandbox::ExactlyMs(LifetimeMs::new(1_000).unwrap());
    daemon.sandbox(&first.sandbox).extend(deadline).unwrap();
    daemon.wait_for(&first.sandbox, "it expires", |now| now.status == Status::Hibernated);
    let again = |run: u32| {
        client.continue_task(&TaskRef::from(&task.id), &ContinueTask::default()).unwrap();
        let over = until(client, &task, "it is over again", |now| now.run == run && now.state.is_final());
        assert_eq!((over.state, over.came), (TaskState::Succeeded, Some(TaskCame::Recreated)), "{over:#?}");
        let said = said(client, &over, 1);
        assert!(said.contains("session before: none"), "{said}");
        over
    };
    let second = again(2);
    assert_eq!(commits(&daemon, &second.sandbox), 3, "what was pushed before is there");
    // Broken, and said to be ready still: it is probed before it is used again (K6).
    unmount_root(&daemon.host(&second.sandbox));
    let third = again(3);
    assert_ne!((&third.sandbox, third.generation), (&second.sandbox, second.generation));
    // Deleted, there is nothing to begin with but what it is made of.
    daemon.remove(&third.sandbox);
    let last = again(4);
    assert_ne!(last.sandbox, third.sandbox);
    assert_eq!(commits(&daemon, &last.sandbox), 2, "all of it began anew");
    daemon.remove(&last.sandbox);
    daemon.assert_nothing_left();
}

#[test]
fn k4_a_stalling_agent_ends_as_inactive() {
    let mut daemon = Daemon::start();
    let id = sandbox(&daemon, "box");
    let stalls = CreateTask {
        limits: limits(3_000, 0),
        argv: Some(words(&["sh", "-c", "echo begin; trap '' TERM; sleep 1000; WORK=1 exec /opt/agent.sh"])),
        ..agent(&id, "1")
    };
    let ended = over(daemon.client(), &daemon.client().run_task(&stalls, None).unwrap());
    assert_eq!((ended.state, ended.ending.as_ref().unwrap().cause.as_str()), (TaskState::Inactive, "inactivity"));
    assert!(daemon.instances().is_empty());
    assert_eq!(said(daemon.client(), &ended, 0), "begin\n");
    // The clock goes on over a restart; what speaks is not inactive.
    let task = daemon.client().run_task(&stalls, None).unwrap();
    until(daemon.client(), &task, "it speaks", |now| now.times.output_at_ms.is_some());
    daemon.kill();
    daemon.restart();
    assert_eq!(over(daemon.client(), &task).state, TaskState::Inactive);
    let speaks = CreateTask {
        argv: Some(words(&["sh", "-c", "for count in 1 2 3 4 5 6 7 8; do echo $count; sleep 0.7; done"])),
        ..stalls
    };
    let ended = over(daemon.client(), &daemon.client().run_task(&speaks, None).unwrap());
    assert_eq!(ended.state, TaskState::Succeeded, "{ended:#?}");
    assert_eq!(commits(&daemon, &id), 1, "nothing was pushed by who stalled");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

#[test]
fn k5_credentials_are_handed_out_behind_the_gate_only() {
    let daemon = Daemon::start();
    let client = daemon.client();
    let id = sandbox(&daemon, "box");
    let script = "
        echo \"outside: ${TOKEN:-nothing}\"
        viv gate --effect push -- sh -c 'test ${#TOKEN} = 12 && echo inside' || exit 9
        viv gate --effect push -- true; echo \"again: $?\"
        viv gate -- true 2>&1 | grep -o 'push, note'
        viv gate --effect deploy -- touch /workspace/deployed; echo \"undeclared: $?\"
        viv gate --effect note -- sh -c 'exit 5'; echo \"failed: $?\"
        viv gate --effect note -- true; echo \"tried again: $?\"";
    let effects = ["push", "note"].map(|name| TaskEffect { name: EffectName::new(name).unwrap(), repeatable: false });
    let task = CreateTask {
        argv: Some(words(&["sh", "-c", script])),
        effects: TaskEffects::new(effects.to_vec()).unwrap(),
        credentials: CommandEnv::new([("TOKEN".parse().unwrap(), "s3cret-value".parse().unwrap())].into()).unwrap(),
        keep_alive: true,
        ..in_sandbox(&id)
    };
    let done = over(client, &client.run_task(&task, None).unwrap());
    let output = said(client, &done, 0);
    let lines: Vec<&str> = output
        .lines()
        .filter(|line| !line.starts_with("error") && !line.starts_with("hint") && !line.starts_with("see"))
        .collect();
    assert_eq!(
        lines,
        ["outside: nothing", "inside", "again: 4", "push, note", "undeclared: 4", "failed: 5", "tried again: 0"],
        "{output}"
    );
    assert_eq!(done.state, TaskState::Succeeded);
    let outcomes: Vec<_> = done.grants.iter().map(|grant| (grant.effect.as_str(), grant.outcome.as_str())).collect();
    assert_eq!(outcomes, [("push", "done"), ("note", "failed"), ("note", "done")]);
    // Nobody is told what they are (S6).
    assert_eq!(done.credentials, ["TOKEN"]);
    let events = client.events(&ListEvents::default()).unwrap();
    let told = format!("{done:?} {events:?} {}", daemon.said());
    assert!(!told.contains("s3cret-value"));
    // Outside of a task there is no gate.
    let (said, ended) = run(&daemon.sandbox(&id), "viv gate --effect push -- true 2>&1");
    assert_eq!(ended.exit_code, Some(4), "{said}");
    daemon.remove(&id);
    daemon.assert_nothing_left();
}

/// How many races there are: few, unless somebody asks for more.
fn races() -> usize {
    std::env::var("VIV_TASK_RACES").ok().and_then(|text| text.parse().ok()).unwrap_or(32)
}

/// How many are on their way at once, each in a sandbox of its own.
const ABREAST: usize = 8;

/// Of those, so many have a sandbox that ends with each task, and is saved.
const ENDING: usize = 2;

/// How long after they all run the last stop is given, and the daemon dies if it does.
const WITHIN_MS: u64 = 1_200;

/// Numbers for the races: the same for the same seed, though the machine's own timing is not.
struct Draw(u64);

impl Draw {
    /// Any spread will do.
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// What an effect wrote: first of all that it begins, last of all that it is done.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mark {
    race: usize,
    is_end: bool,
    at_ms: u64,
}

/// What the effects of this sandbox wrote, which is brought back if it ended with its task.
fn marks(client: &Client, sandbox: &SandboxId) -> Vec<Mark> {
    client.sandbox(sandbox).ensure(&EnsureSandbox::default()).unwrap();
    support::restart::settled(client, sandbox);
    let (said, ended) = run(&client.sandbox(sandbox), "cat /root/effects 2>/dev/null; true");
    assert_eq!(ended.exit_code, Some(0), "{said}");
    let mark = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let at_ns: u64 = words[2].parse().unwrap();
        Mark { race: words[1].parse().unwrap(), is_end: words[0] == "end", at_ms: at_ns / 1_000_000 }
    };
    said.lines().map(mark).collect()
}

fn of(marks: &[Mark], race: usize) -> Vec<Mark> {
    marks.iter().filter(|mark| mark.race == race).cloned().collect()
}

/// The clock of a daemon goes by another one than that of the machine from its start on; they do not differ by more.
const CLOCKS_MS: u64 = 100;

/// A task that does something to the world a moment after it began, and takes another moment for that.
fn racer(sandbox: &SandboxId, race: usize, draw: &mut Draw) -> CreateTask {
    // Some would take longer than anybody waits for them.
    let (after_ms, takes_ms) = (draw.below(1_000), if draw.below(8) == 0 { 60_000 } else { draw.below(400) });
    let takes = format!("{}.{:03}", takes_ms / 1_000, takes_ms % 1_000);
    let mark = |word: &str| format!("echo {word} {race} $(date +%s%N) >> /root/effects");
    let script = format!(
        "sleep 0.{after_ms:03}; viv gate --effect push -- sh -ec '{}; sleep {takes}; {}'; sleep 1000",
        mark("begin"),
        mark("end"),
    );
    CreateTask {
        argv: Some(words(&["/bin/sh", "-c", &script])),
        effects: push(),
        keep_alive: race % ABREAST >= ENDING,
        limits: limits(0, 0),
        ..in_sandbox(sandbox)
    }
}

/// What is said of a task that was stopped, against what it did (K5).
fn assert_truthful(task: &Task, marks: &[Mark]) -> &'static str {
    let confirmed_at_ms = task.times.confirmed_at_ms.unwrap();
    let late = |mark: &&Mark| mark.at_ms > confirmed_at_ms + CLOCKS_MS;
    assert_eq!(marks.iter().find(late), None, "after the stop was acknowledged: {task:#?}");
    let begun = marks.iter().filter(|mark| !mark.is_end).count();
    let whole = marks.iter().filter(|mark| mark.is_end).count();
    assert!(whole <= begun, "{marks:?}");
    let stopped_at_ms = task.stop.as_ref().unwrap().at_ms;
    assert!(task.grants.iter().all(|grant| grant.at_ms <= stopped_at_ms), "granted after the stop: {task:#?}");
    let grant = task.grants.last();
    let never_begun = grant.is_none_or(|grant| grant.what.as_deref() == Some("it was never begun"));
    match grant.map(|grant| grant.outcome.as_str()) {
        Some("done") => {
            assert_eq!((begun, whole, task.state), (1, 1, TaskState::Stopped), "done, and not there: {task:#?}");
            "done"
        }
        Some("unknown") => {
            assert!(begun <= 1 && task.state == TaskState::EffectUnknown, "{task:#?}");
            "unknown"
        }
        None | Some("failed") if never_begun => {
            assert_eq!((begun, task.state), (0, TaskState::Stopped), "{task:#?}");
            "never begun"
        }
        Some("failed") => {
            assert_eq!(task.state, TaskState::Stopped, "{task:#?}");
            "failed"
        }
        other => panic!("{other:?}: {task:#?}"),
    }
}

#[test]
fn k5_stop_against_effect_with_and_without_a_daemon_that_dies() {
    let house = House::new();
    let mut daemon = house.start();
    let seed = u64::from_le_bytes(support::fresh_bytes()[8..].try_into().unwrap());
    let mut draw = Draw(seed);
    let client = daemon.client();
    let named = |number| CreateSandbox { name: Some(format!("ends-{number}").parse().unwrap()), ..Default::default() };
    let boxes: Vec<SandboxId> = (0..ABREAST)
        .map(|number| if number < ENDING { named(number) } else { CreateSandbox::default() })
        .map(|request| client.create(&request, None).unwrap().into_sandbox().id)
        .collect();
    let mut told: Vec<(Task, Vec<Mark>)> = Vec::new();
    let mut count = std::collections::BTreeMap::<(bool, &str), u32>::new();
    for batch in 0..races().div_ceil(ABREAST) {
        let dies = batch % 2 == 1;
        let client = daemon.client();
        let first = told.len();
        let tasks: Vec<Task> = (boxes.iter().zip(first..))
            .map(|(sandbox, race)| client.run_task(&racer(sandbox, race, &mut draw), None).unwrap())
            .collect();
        let stop_after = |task: &Task, after_ms: u64| {
            let (client, task) = (daemon.client(), task.clone());
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(after_ms));
                let wait_ms = Some(WaitMs::new(0).unwrap());
                // One that is not answered is asked again.
                client.stop_task(&TaskRef::from(&task.id), &StopTask { wait_ms }).is_ok()
            })
        };
        // Some are stopped before they run, or while they begin to.
        let early: Vec<_> = tasks.iter().map(|_| draw.below(6) == 0).collect();
        let begun = tasks.iter().zip(&early).filter(|(_, early)| **early);
        let mut asked: Vec<_> = begun.map(|(task, _)| stop_after(task, draw.below(400))).collect();
        let others: Vec<&Task> = tasks.iter().zip(&early).filter(|(_, early)| !**early).map(|(task, _)| task).collect();
        for task in &others {
            until(&client, task, "it runs", |now| now.times.started_at_ms.is_some());
        }
        asked.extend(others.into_iter().map(|task| stop_after(task, draw.below(WITHIN_MS))));
        if dies {
            std::thread::sleep(Duration::from_millis(draw.below(WITHIN_MS)));
            daemon.kill();
        }
        let durable: Vec<bool> = asked.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(dies || durable.iter().all(|durable| *durable), "{durable:?}");
        if dies {
            daemon = house.start();
        }
        let client = daemon.client();
        let in_order = tasks.iter().zip(&early).filter(|(_, early)| **early);
        let in_order = in_order.chain(tasks.iter().zip(&early).filter(|(_, early)| !**early));
        for ((task, _), durable) in in_order.zip(durable) {
            let now = client.task(&TaskRef::from(&task.id)).unwrap();
            assert!(!durable || now.stop.is_some(), "a stop that was answered is gone: {now:#?}");
        }
        for ((task, sandbox), race) in tasks.iter().zip(&boxes).zip(first..) {
            let ended = stop(&client, task);
            assert!(ended.state.is_final(), "{ended:#?}");
            // It is acknowledged: what is there now is all that there will be.
            let then = of(&marks(&client, sandbox), race);
            *count.entry((dies, assert_truthful(&ended, &then))).or_default() += 1;
            told.push((ended, then));
        }
    }
    let client = daemon.client();
    let all: Vec<Mark> = boxes.iter().flat_map(|sandbox| marks(&client, sandbox)).collect();
    for (race, (task, then)) in told.iter().enumerate() {
        assert_eq!(of(&all, race), *then, "an effect began after the stop was acknowledged: {task:#?}");
        assert_eq!(client.task(&TaskRef::from(&task.id)).unwrap(), *task, "what was said is said of it still");
    }
    eprintln!("{} races, seed {seed}; by (daemon dies, what came of the effect): {count:?}", told.len());
    for sandbox in &boxes {
        client.sandbox(sandbox).delete(None).unwrap();
    }
    house.assert_nothing_left();
}

/// The rule's 3 s, and as much again and more for a loaded machine.
const TAKEN_OVER_WITHIN: Duration = Duration::from_secs(3 + 7);

#[test]
fn k2_incident_40_a_stop_is_carried_out_by_the_standby() {
    let house = House::new();
    let sleeps = CreateTask { argv: Some(words(&["sleep", "1000"])), ..CreateTask::default() };
    // Given to the standby, while the owner is frozen.
    let mut owner = house.start();
    let task = owner.client().run_task(&sleeps, None).unwrap();
    until(&owner.client(), &task, "it runs", |now| now.times.started_at_ms.is_some());
    let standby = house.stand_by();
    owner.signal(Signal::STOP);
    support::eventually_within(TAKEN_OVER_WITHIN, "the standby serves", || standby.serves());
    let stopped = stop(&standby.client(), &task);
    assert_eq!(stopped.state, TaskState::Stopped, "{stopped:#?}");
    owner.assert_killed();
    house.assert_nothing_left();
    // Given to the owner, who dies when it is durable.
    drop(standby);
    let mut owner = house.start_to_die("task.stopped");
    let task = owner.client().run_task(&sleeps, None).unwrap();
    until(&owner.client(), &task, "it runs", |now| now.times.started_at_ms.is_some());
    let standby = house.stand_by();
    assert!(owner.client().stop_task(&TaskRef::from(&task.id), &StopTask::default()).is_err());
    owner.assert_killed();
    support::eventually_within(TAKEN_OVER_WITHIN, "the standby serves", || standby.serves());
    let stopped = over(&standby.client(), &task);
    assert_eq!(stopped.state, TaskState::Stopped, "{stopped:#?}");
    house.assert_nothing_left();
}

/// The takeover's 3 s and the 5 s of a stop (J8, K2), and as much again for a loaded machine.
const CARRIED_OUT_WITHIN: Duration = Duration::from_secs(2 * (3 + 5));

#[test]
fn k2_incident_40_an_owner_that_thaws_after_the_stop_changes_nothing() {
    let Some(freezer) = Freezer::find(FreezerKind::HoldsTheDead) else { return };
    let house = House::new();
    // One that would do something to the world at any moment, and one that is never stopped.
    let script = "while :; do viv gate --effect push -- sh -ec 'echo done >> /root/effects'; sleep 0.05; done";
    let acts = CreateTask {
        argv: Some(words(&["sh", "-c", script])),
        effects: push(),
        keep_alive: true,
        ..CreateTask::default()
    };
    let waits = CreateTask { argv: Some(words(&["sleep", "1000"])), limits: limits(0, 0), ..CreateTask::default() };
    let mut owner = house.start();
    let (acts, waits) = (owner.client().run_task(&acts, None).unwrap(), owner.client().run_task(&waits, None).unwrap());
    until(&owner.client(), &acts, "it acts", |now| now.grants.len() > 2);
    until(&owner.client(), &waits, "it runs", |now| now.times.started_at_ms.is_some());
    let standby = house.stand_by();
    let frozen_at = Instant::now();
    freezer.freeze(&owner);
    support::eventually_within(CARRIED_OUT_WITHIN, "the standby serves", || standby.serves());
    let client = standby.client();
    let stopped = stop(&client, &acts);
    assert!(frozen_at.elapsed() < CARRIED_OUT_WITHIN, "{:?}: {stopped:#?}", frozen_at.elapsed());
    assert!(matches!(stopped.state, TaskState::Stopped | TaskState::EffectUnknown), "{stopped:#?}");
    assert!(support::is_alive(owner.pid()), "it was to be frozen, and is gone");
    let effects = || run(&client.sandbox(&stopped.sandbox), "wc -l < /root/effects").0;
    let then = effects();

    freezer.thaw();
    owner.assert_killed();
    assert_eq!(client.task(&TaskRef::from(&acts.id)).unwrap(), stopped);
    assert_eq!(effects(), then, "something was done to the world after the stop was acknowledged");
    assert!(!client.task(&TaskRef::from(&waits.id)).unwrap().state.is_final());
    assert_eq!(stop(&client, &waits).state, TaskState::Stopped);
    client.sandbox(&stopped.sandbox).delete(None).unwrap();
    house.assert_nothing_left();
}

#[test]
fn k7_the_command_line_runs_follows_stops_and_shows() {
    let daemon = Daemon::start();
    let viv = |arguments: &[&str]| {
        let done = daemon.viv().args(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout), text(done.stderr))
    };
    let (code, out, error) = viv(&["task", "run", "--step", "echo one", "--step", "echo two; exit 3"]);
    assert_eq!((code, out.as_str()), (Some(3), "one\ntwo\n"), "{error}");
    let task = error.lines().next().unwrap().trim_start_matches("viv: ").to_owned();
    assert!(task.starts_with("tsk_") && error.contains("failed: step 1 exited with 3"), "{error}");
    let (code, out, _) = viv(&["task", "logs", &task]);
    assert_eq!((code, out.as_str()), (Some(0), "one\ntwo\n"), "kept, though the sandbox is gone");
    let (code, out, _) = viv(&["task", "run", "--detach", "--", "sleep", "1000"]);
    let sleeping = out.trim().to_owned();
    assert_eq!(code, Some(0), "{out}");
    // O1: whoever lists sandboxes sees which task is at work where.
    support::eventually_within(PATIENCE, "its task is shown", || viv(&["ps"]).1.contains(&sleeping));
    let runs = || viv(&["task", "timeline", &sleeping]).1.contains("started");
    support::eventually_within(PATIENCE, "it runs", runs);
    let (code, out, error) = viv(&["task", "stop", "--wait", "2m", &sleeping]);
    assert!(code == Some(0) && out.contains("stopped") && out.contains("1 execution(s) terminated"), "{out}{error}");
    let (_, out, _) = viv(&["task", "ls"]);
    assert!(out.contains(&task) && out.contains("failed") && out.contains(&sleeping), "{out}");
    let (_, out, _) = viv(&["task", "ls", "--state", "stopped"]);
    assert!(!out.contains(&task) && out.contains(&sleeping), "{out}");
    let (_, out, _) = viv(&["task", "timeline", &sleeping]);
    assert!(out.contains("stop_requested") && out.contains("confirmed (stopped)"), "{out}");
    // A part of what was written, also after its sandbox is gone.
    let lines = "for n in 1 2 3 4 5; do echo line $n; done; echo other";
    let (code, out, error) = viv(&["task", "run", "--step", lines, "--step", "echo line six"]);
    assert_eq!((code, out.lines().count()), (Some(0), 7), "{error}");
    let wrote = error.lines().next().unwrap().trim_start_matches("viv: ").to_owned();
    assert_eq!(viv(&["task", "logs", "--tail", "2", &wrote]).1, "line 5\nother\nline six\n");
    assert_eq!(viv(&["task", "logs", "--step", "0", "--search", "line 4", &wrote]).1, "line 4\n");
    assert_eq!(viv(&["task", "logs", "--search", "nowhere", &wrote]).1, "");
    assert_eq!(viv(&["task", "logs", "--since", "1h", &wrote]).1.lines().count(), 7);
    // A mistake is marked, shown, counted, and taken back.
    let (code, out, error) = viv(&["task", "mark", &sleeping, "--mistaken", "--why", "it was thinking"]);
    assert!(code == Some(0) && out.contains("marked as mistaken"), "{out}{error}");
    assert!(viv(&["task", "show", &sleeping]).1.contains("it was thinking"));
    let counted = |times: u64| {
        let stats: serde_json::Value = serde_json::from_str(&viv(&["--json", "stats", "--slo"]).1).unwrap();
        let slo = stats["slo"].as_array().unwrap().iter().find(|one| one["name"] == "cancel_mistaken").unwrap();
        assert_eq!((slo["numerator"].as_u64(), slo["denominator"].as_u64()), (Some(times), Some(1)), "{slo}");
    };
    counted(1);
    assert_eq!(viv(&["task", "mark", &sleeping, "--right"]).0, Some(0));
    counted(0);
    assert_eq!(viv(&["task", "mark", &task, "--mistaken"]).0, Some(4), "it ended by itself");
    assert_eq!(viv(&["task", "mark", &sleeping]).0, Some(2));
    let (_, out, _) = viv(&["--json", "task", "show", &task]);
    let shown: Task = serde_json::from_str(&out).unwrap();
    assert_eq!(shown.state, TaskState::Failed);
    assert_eq!(viv(&["task", "continue", &task, "--", "true"]).0, Some(4), "its sandbox was not kept");
    assert_eq!(viv(&["task", "show", "tsk_none"]).0, Some(3));
    assert_eq!(viv(&["task", "run"]).0, Some(2));
    daemon.assert_nothing_left();
}
