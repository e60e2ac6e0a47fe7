//! Tasks on simulated time (K1 to K7): daemons that die at every point, limits, turns, and switched gates.
#![allow(missing_docs, reason = "tests")]

mod daemons;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemons::{EPOCH_MS, MINUTE, Place, paused};
use viv_chaos::Rng;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::lifecycle::{Actor, EntryKind, Phase};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::task::{
    Came, EffectRule, GitSource, MakeSandbox, NewTask, SaidLimits, StepChanges, Task, TaskCause, TaskLimits, TaskState,
};
use viv_core::{EndCause, SandboxId, TaskId};
use viv_engine::{
    ContinueTask, CreateTask, Engine, EngineConfig, EngineError, Failpoint, FromInside, Gate, GateSetting, Inside,
    Which,
};
use viv_provider::Provider;
use viv_provider::conformance::program::Program;
use viv_store::{Cursor, JournalFilter, NewLine, Store};

const RUNS: &str = "/workspace/runs";

/// One that hears those inside, set up otherwise where it is said.
fn hearing(set_up: impl FnOnce(&mut EngineConfig)) -> impl FnOnce(&mut EngineConfig) {
    |config| {
        config.inside = Some(Inside(Arc::new(|engine, asked| Box::pin(answer(engine, asked)))));
        set_up(config);
    }
}

/// `step`, `push`, or `push done`: the words do not matter here.
async fn answer(engine: Engine, asked: FromInside) -> String {
    let at_work = engine.store().tasks_at_work(std::slice::from_ref(&asked.sandbox.id)).await.unwrap_or_default();
    let Some(task) = at_work.into_values().next() else { return "no task".to_owned() };
    let run = engine.task(None, &task).await.unwrap().run;
    let done = match asked.body.as_str() {
        "step" => engine.report_inside(&asked, (&task, run), 1, (None, Some("s".to_owned()))).await.map(drop),
        "any" => engine.gate_inside(&asked, (&task, run), None).await.map(drop),
        "push done" => match engine.gate_inside(&asked, (&task, run), Some("push")).await {
            Ok(granted) => engine.effect_ended_inside(&asked, (&task, run), &granted.grant, None).await.map(drop),
            Err(error) => Err(error),
        },
        _ => engine.gate_inside(&asked, (&task, run), Some("push")).await.map(drop),
    };
    match done {
        Ok(()) => "done".to_owned(),
        Err(EngineError::TaskDenied { why, .. }) => format!("{why:?}"),
        Err(error) => format!("error: {error}"),
    }
}

impl Place {
    fn new_task(&self, steps: Vec<ExecSpec>) -> NewTask {
        let policy = Policy { persistent: true, lifetime_ms: 86_400_000, ..Policy::default_for(None) };
        let make =
            MakeSandbox { name: None, spec: SandboxSpec::default(), policy, labels: BTreeMap::new(), snapshot: None };
        NewTask {
            id: self.engine.new_task_id(),
            project: Project::default(),
            sandbox: None,
            make: Some(Box::new(make)),
            files: Vec::new(),
            source: None,
            steps,
            limits: TaskLimits::default(),
            effects: vec![EffectRule { name: "push".to_owned(), repeatable: false }],
            credentials: BTreeMap::new(),
            keep_alive: false,
            by: Actor::part("test"),
            body_hash: None,
        }
    }

    async fn run(&self, new: NewTask) -> Task {
        self.engine.create_task(CreateTask { new, keyed: false }).await.unwrap().task
    }

    async fn task(&self, id: &TaskId) -> Task {
        self.store.task(id).await.unwrap().unwrap()
    }

    async fn over(&self, id: &TaskId) -> Task {
        let task = self.engine.wait_task(id, 20 * MINUTE, |task| task.state.is_final()).await.unwrap();
        assert!(task.state.is_final(), "{task:#?}");
        task
    }

    async fn running(&self, id: &TaskId) -> Task {
        self.engine.wait_task(id, MINUTE, |task| task.times.started_at_ms.is_some()).await.unwrap()
    }

    /// How often a step was really run: each leaves a line in a file that is saved and restored.
    async fn ran(&self, id: &SandboxId) -> usize {
        self.engine.ensure(id, EntryKind::Ensure, Actor::part("test")).await.unwrap();
        self.engine.wait_ready(id, MINUTE).await.unwrap();
        let handle = self.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        match handle.file_stat(RUNS).await {
            Ok(stat) => stat.size_bytes as usize / 2,
            Err(_) => 0,
        }
    }

    /// What a step wrote, in a sandbox that stayed.
    async fn said(&self, task: &Task, step: usize) -> String {
        let which = Which::Id(task.sandbox.clone());
        let handle = self.engine.look_into(&Project::default(), &which, task.generation).await.unwrap();
        let mut output = handle.attach(&task.executions[step].id, 0, false).await.unwrap();
        let mut said = Vec::new();
        while let Some(event) = output.next().await.unwrap() {
            match event {
                OutputEvent::Chunk { data, .. } => said.extend(data),
                OutputEvent::Cut { .. } => {}
                OutputEvent::End(_) => break,
            }
        }
        String::from_utf8(said).unwrap()
    }

    /// What the journal says of a task, in order.
    async fn told(&self, task: &TaskId) -> Vec<NewLine> {
        let lines = self.store.journal(Cursor(0), &JournalFilter::default(), 100_000).await.unwrap();
        lines.into_iter().map(|line| line.line).filter(|line| line.data["task"] == task.to_string()).collect()
    }

    /// No execution runs in there.
    async fn assert_quiet(&self, id: &SandboxId) {
        let which = Which::Id(id.clone());
        if let Ok(handle) = self.engine.look_into(&Project::default(), &which, None).await {
            let all = handle.executions().await.unwrap();
            assert!(all.iter().all(|one| one.state != ExecState::Running), "{all:?}");
        }
    }
}

fn go_on() -> ContinueTask {
    ContinueTask::as_it_was(Actor::part("user"))
}

fn program(program: &Program) -> ExecSpec {
    ExecSpec { argv: program.argv(), ..ExecSpec::default() }
}

fn append() -> ExecSpec {
    program(&Program::Append { path: RUNS.to_owned() })
}

fn sleep(seconds: u64) -> ExecSpec {
    program(&Program::Sleep { seconds })
}

/// A daemon that dies when it is there for the first time.
fn dies_at(point: &'static str) -> (Arc<AtomicBool>, impl FnOnce(&mut EngineConfig)) {
    let reached = Arc::new(AtomicBool::new(false));
    let flag = reached.clone();
    let failpoint = Failpoint(Arc::new(move |now| {
        assert!(now != point || flag.swap(true, Ordering::SeqCst), "the daemon dies at {point}, as planned");
    }));
    (reached, move |config| config.failpoint = Some(failpoint))
}

async fn until(reached: &AtomicBool, place: &Place, point: &str) {
    while !reached.load(Ordering::SeqCst) {
        assert!(place.engine.now_ms() < EPOCH_MS + 1_200_000, "{point} is never reached");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn j4_a_daemon_that_dies_at_any_point_runs_every_step_once() {
    let points = [
        "task.created",
        "task.taken_up",
        "task.entering",
        "task.entered",
        "task.prepared",
        "task.starting",
        "task.started",
        "task.step_ended",
        "task.ending",
        "task.killing",
        "task.stopping_sandbox",
        "task.ended",
    ];
    for point in points {
        paused(async {
            let (reached, set_up) = dies_at(point);
            let mut place = Place::beginning(50, hearing(set_up)).await;
            let new = place.new_task(vec![append(), append(), sleep(1)]);
            let id = new.id.clone();
            let engine = place.engine.clone();
            // Whoever asks dies with it, at the first of them.
            tokio::spawn(async move { engine.create_task(CreateTask { new, keyed: false }).await });
            until(&reached, &place, point).await;
            place.followed(Duration::from_secs(5), hearing(|_| {})).await;
            let over = place.over(&id).await;
            assert_eq!(over.state, TaskState::Succeeded, "{point}: {over:#?}");
            let phase = place.store.get(&over.sandbox).await.unwrap().unwrap().phase;
            assert!(matches!(phase, Phase::Hibernated { .. }), "{point}: {phase:?}");
            assert_eq!(place.ran(&over.sandbox).await, 2, "{point}");
        });
    }
}

#[test]
fn k2_a_stop_is_carried_out_by_whoever_comes_next() {
    for point in ["task.stopped", "task.ending", "task.cut", "task.killing", "task.stopping_sandbox", "task.ended"] {
        for keep_alive in [false, true] {
            if keep_alive && point == "task.stopping_sandbox" {
                continue;
            }
            paused(async {
                let (reached, set_up) = dies_at(point);
                let mut place = Place::beginning(50, hearing(set_up)).await;
                let stubborn = program(&Program::Stubborn { path: RUNS.to_owned() });
                let new = NewTask { keep_alive, ..place.new_task(vec![stubborn, append()]) };
                let task = place.run(new).await;
                place.running(&task.id).await;
                let (engine, id) = (place.engine.clone(), task.id.clone());
                tokio::spawn(async move { engine.stop_task(&id, Actor::part("user")).await });
                until(&reached, &place, point).await;
                place.followed(Duration::from_secs(5), hearing(|_| {})).await;
                let over = place.over(&task.id).await;
                assert_eq!(over.state, TaskState::Stopped, "{point}: {over:#?}");
                assert_eq!(over.executions.len(), 1, "{point}: no other step began");
                assert_eq!(
                    over.executions[0].ended,
                    Some(ExecState::Cancelled),
                    "{point}: what was terminated is told"
                );
                assert!(!place.provider.is_cut(&over.sandbox), "{point}: what stays has its way out again");
                place.assert_quiet(&over.sandbox).await;
                let phase = place.store.get(&over.sandbox).await.unwrap().unwrap().phase;
                assert_eq!(phase == Phase::Ready, keep_alive, "{point}: {phase:?}");
            });
        }
    }
}

#[test]
fn k2_a_stop_is_legal_before_anything_runs() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        for wait_ms in [0, 1, 10, 50, 100, 200, 400, 800] {
            let task = place.run(place.new_task(vec![sleep(1_000)])).await;
            tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            place.engine.stop_task(&task.id, Actor::part("user")).await.unwrap();
            let over = place.over(&task.id).await;
            assert_eq!(over.state, TaskState::Stopped, "{wait_ms}: {over:#?}");
            place.assert_quiet(&over.sandbox).await;
        }
    });
}

/// Stopped before its turn, nothing is done in the sandbox: not by one that was never in there, and not by one that was
/// in a run before, and knows the generation.
#[test]
fn k2_a_stop_of_one_that_waits_leaves_the_one_at_work_alone() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let earlier = place.run(NewTask { keep_alive: true, ..place.new_task(vec![append()]) }).await;
        let sandbox = place.over(&earlier.id).await.sandbox;
        let here = |steps| NewTask { sandbox: Some(sandbox.clone()), make: None, ..place.new_task(steps) };
        let at_work = place.run(NewTask { keep_alive: true, ..here(vec![sleep(30), append()]) }).await;
        place.running(&at_work.id).await;
        let waits = place.run(here(vec![sleep(1)])).await;
        let more = ContinueTask { keep_alive: Some(false), ..go_on() };
        place.engine.continue_task(&earlier.id, more).await.unwrap();
        tokio::time::sleep(Duration::from_secs(3)).await;
        for id in [&waits.id, &earlier.id] {
            assert_eq!(place.task(id).await.state, TaskState::Queued);
            place.engine.stop_task(id, Actor::part("user")).await.unwrap();
            let over = place.over(id).await;
            assert_eq!((over.state, over.times.taken_up_at_ms), (TaskState::Stopped, None), "{over:#?}");
            assert!(!place.provider.is_cut(&sandbox), "{over:#?}");
            assert_eq!(place.store.get(&sandbox).await.unwrap().unwrap().phase, Phase::Ready, "{over:#?}");
        }
        let done = place.over(&at_work.id).await;
        assert_eq!(done.state, TaskState::Succeeded, "{done:#?}");
        assert_eq!(place.ran(&sandbox).await, 2);
    });
}

#[test]
fn k2_what_is_kept_has_its_way_out_again_or_ends() {
    for (failures, stays) in [(0, true), (2, true), (1_000, false)] {
        paused(async {
            let place = Place::beginning(50, hearing(|_| {})).await;
            let task = place.run(NewTask { keep_alive: true, ..place.new_task(vec![sleep(1_000)]) }).await;
            place.running(&task.id).await;
            place.provider.fail_connects(failures);
            place.engine.stop_task(&task.id, Actor::part("user")).await.unwrap();
            let over = place.over(&task.id).await;
            assert_eq!(over.state, TaskState::Stopped, "{over:#?}");
            assert!(over.times.cut_at_ms <= over.times.killed_at_ms && over.times.cut_at_ms.is_some(), "{over:#?}");
            let phase = place.store.get(&over.sandbox).await.unwrap().unwrap().phase;
            assert_eq!(phase == Phase::Ready, stays, "{failures}: {phase:?}");
            assert!(!place.provider.is_cut(&over.sandbox), "{failures}");
            let more = ContinueTask { steps: vec![append()], ..go_on() };
            place.engine.continue_task(&task.id, more).await.unwrap();
            let again = place.over(&task.id).await;
            let came = if stays { Came::Reused } else { Came::Recreated };
            assert_eq!((again.state, again.came), (TaskState::Succeeded, Some(came)), "{failures}: {again:#?}");
            assert!(!place.provider.is_cut(&again.sandbox), "{failures}");
        });
    }
}

#[test]
fn k1_what_is_lost_or_cannot_be_prepared_ends_so() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let task = place.run(place.new_task(vec![sleep(1_000)])).await;
        let sandbox = place.running(&task.id).await.sandbox;
        assert!(place.provider.crash(&sandbox, EndCause::Signalled { signal: 9 }));
        let lost = place.over(&task.id).await;
        let cause = lost.ending.as_ref().unwrap().cause;
        assert_eq!((lost.state, cause), (TaskState::Lost, TaskCause::SandboxLost), "{lost:#?}");
        assert!(matches!(lost.executions[0].ended, Some(ExecState::Lost { .. })), "{lost:#?}");
        // Nothing in there knows how to clone.
        let source = Some(GitSource { url: "/none".to_owned(), reference: None, path: "/workspace/source".to_owned() });
        let task = place.run(NewTask { source, ..place.new_task(vec![append()]) }).await;
        let failed = place.over(&task.id).await;
        let ending = failed.ending.as_ref().unwrap();
        assert_eq!((failed.state, ending.cause), (TaskState::Failed, TaskCause::NotPrepared), "{failed:#?}");
        assert!(ending.message.as_ref().unwrap().contains("cannot be cloned"), "{failed:#?}");
        assert_eq!(failed.executions.iter().filter(|one| one.step.is_some()).count(), 0, "no step began");
    });
}

#[test]
fn k6_what_is_not_said_when_it_goes_on_is_as_it_was() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let limits = TaskLimits { inactivity_ms: Some(7_000), total_ms: Some(600_000), reports_max: None };
        let task = place.run(NewTask { limits, keep_alive: true, ..place.new_task(vec![append(), append()]) }).await;
        let first = place.over(&task.id).await;
        let said = SaidLimits { total_ms: Some(500_000), ..SaidLimits::default() };
        let env = [("MODE".to_owned(), "resume".to_owned())].into();
        let changes = StepChanges { env, limit_ms: Some(9_000), ..StepChanges::default() };
        let more = ContinueTask { changes, limits: said, ..go_on() };
        place.engine.continue_task(&task.id, more).await.unwrap();
        let second = place.over(&task.id).await;
        assert_eq!(second.limits, TaskLimits { total_ms: Some(500_000), ..limits });
        assert_eq!(second.steps.len(), 2);
        for (step, before) in second.steps.iter().zip(&first.steps) {
            assert_eq!((&step.argv, step.limit_ms), (&before.argv, Some(9_000)));
            assert_eq!(step.env.get("MODE").map(String::as_str), Some("resume"));
        }
        assert_eq!((second.state, place.ran(&second.sandbox).await), (TaskState::Succeeded, 4));
    });
}

#[test]
fn k5_the_gate_takes_the_only_effect_that_there_is_and_none_of_several() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let ask = place.provider.ask_spec("any");
        let one = place.run(place.new_task(vec![ask.clone()])).await;
        let granted = place.over(&one.id).await.grants;
        assert_eq!(granted.iter().map(|grant| grant.effect.as_str()).collect::<Vec<_>>(), ["push"]);
        let rule = |name: &str| EffectRule { name: name.to_owned(), repeatable: false };
        for effects in [vec![], vec![rule("push"), rule("deploy")]] {
            let task = place.run(NewTask { effects, keep_alive: true, ..place.new_task(vec![ask.clone()]) }).await;
            let over = place.over(&task.id).await;
            assert_eq!(over.grants, [], "{over:#?}");
            let said = place.said(&over, 0).await;
            let names = over.effects.iter().all(|rule| said.contains(&rule.name));
            assert!(names && (over.effects.is_empty() == (said.trim() == "Undeclared")), "{said}");
        }
    });
}

/// Whoever reads what a task writes goes away, and comes back minutes later, to this daemon or the next one; and whoever
/// stays hears the end.
#[test]
fn x2_incident_16_output_is_taken_up_again_after_more_than_two_minutes() {
    paused(async {
        let mut place = Place::beginning(50, hearing(|_| {})).await;
        let limits = TaskLimits { inactivity_ms: None, total_ms: None, reports_max: None };
        let numbers = 20 * 60 * 20;
        let ticks = program(&Program::Tick { count: numbers });
        let task = place.run(NewTask { limits, keep_alive: true, ..place.new_task(vec![ticks]) }).await;
        let task = place.running(&task.id).await;
        let mut read = Vec::new();
        for round in 0..3 {
            if round == 2 {
                place.followed(Duration::from_secs(1), hearing(|_| {})).await;
            }
            let which = Which::Id(task.sandbox.clone());
            let handle = place.engine.look_into(&Project::default(), &which, task.generation).await.unwrap();
            let mut output = handle.attach(&task.executions[0].id, read.len() as u64, true).await.unwrap();
            let until = tokio::time::Instant::now() + 3 * MINUTE;
            loop {
                match output.next().await.unwrap() {
                    Some(OutputEvent::Chunk { offset, data, .. }) => {
                        assert_eq!(offset, read.len() as u64, "round {round}");
                        read.extend(data);
                    }
                    Some(OutputEvent::End(status)) => {
                        assert_eq!((status.state, round), (ExecState::Exited { code: 0 }, 2));
                        break;
                    }
                    other => panic!("round {round}: {other:?}"),
                }
                // The first two leave, after more than two minutes; the last one stays to the end.
                if round < 2 && tokio::time::Instant::now() >= until {
                    break;
                }
            }
            drop(output);
            tokio::time::sleep(3 * MINUTE).await;
        }
        let said = String::from_utf8(read).unwrap();
        assert!(said.lines().map(|line| line.parse::<u64>().unwrap()).eq(0..numbers));
    });
}

#[test]
fn k4_each_limit_ends_it_in_its_own_way_also_over_a_restart() {
    let silent = TaskLimits { inactivity_ms: Some(30_000), total_ms: None, ..TaskLimits::default() };
    let long = TaskLimits { inactivity_ms: None, total_ms: Some(30_000), ..TaskLimits::default() };
    let step = ExecSpec { limit_ms: Some(30_000), ..sleep(1_000) };
    let none = TaskLimits { inactivity_ms: None, total_ms: None, ..TaskLimits::default() };
    let cases = [
        (silent, sleep(1_000), TaskState::Inactive, TaskCause::Inactivity),
        (long, sleep(1_000), TaskState::TimedOut, TaskCause::TotalLimit),
        (none, step, TaskState::TimedOut, TaskCause::StepTimeLimit),
    ];
    for (limits, spec, state, cause) in cases {
        for restarts in [false, true] {
            paused(async {
                let mut place = Place::beginning(50, hearing(|_| {})).await;
                let task = place.run(NewTask { limits, ..place.new_task(vec![spec.clone()]) }).await;
                place.running(&task.id).await;
                if restarts {
                    place.followed(Duration::from_secs(20), hearing(|_| {})).await;
                }
                let over = place.over(&task.id).await;
                assert_eq!((over.state, over.ending.as_ref().unwrap().cause), (state, cause), "{over:#?}");
                let took_ms = over.ending.unwrap().at_ms - over.times.started_at_ms.unwrap();
                assert!((25_000..40_000).contains(&took_ms), "{cause:?} {restarts}: {took_ms}");
                place.assert_quiet(&over.sandbox).await;
            });
        }
    }
    // What speaks is not silent, and what stands still is not either (L13).
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let limits = TaskLimits { inactivity_ms: Some(3_000), total_ms: None, ..TaskLimits::default() };
        let ticks = program(&Program::Tick { count: 400 });
        let speaks = place.run(NewTask { limits, ..place.new_task(vec![ticks]) }).await;
        assert_eq!(place.over(&speaks.id).await.state, TaskState::Succeeded);
        let frozen = place.run(NewTask { limits, ..place.new_task(vec![sleep(2)]) }).await;
        place.running(&frozen.id).await;
        place.engine.freeze(&frozen.sandbox, Actor::part("user")).await.unwrap();
        tokio::time::sleep(MINUTE).await;
        assert_eq!(place.task(&frozen.id).await.state, TaskState::Running);
        place.engine.ensure(&frozen.sandbox, EntryKind::Ensure, Actor::part("user")).await.unwrap();
        assert_eq!(place.over(&frozen.id).await.state, TaskState::Succeeded);
    });
}

#[test]
fn k1_tasks_of_one_sandbox_take_turns() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let kept = place.run(NewTask { keep_alive: true, ..place.new_task(vec![append()]) }).await;
        let sandbox = place.over(&kept.id).await.sandbox;
        let limits = TaskLimits { inactivity_ms: None, total_ms: Some(60_000), ..TaskLimits::default() };
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let (sandbox, make) = (Some(sandbox.clone()), None);
            let steps = vec![append(), sleep(20)];
            let new = NewTask { sandbox, make, limits, keep_alive: true, ..place.new_task(steps) };
            tasks.push(place.run(new).await.id);
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        let mut at_work = 0;
        for id in &tasks {
            at_work += usize::from(place.task(id).await.is_at_work());
        }
        assert_eq!(at_work, 1);
        for id in &tasks {
            assert_eq!(place.over(id).await.state, TaskState::Succeeded, "waiting for a turn is not counted");
        }
        assert_eq!(place.ran(&sandbox).await, 5);
    });
}

#[test]
fn k5_of_an_effect_of_which_nobody_heard_it_is_said_that_it_is_unknown() {
    paused(async {
        let place = Place::beginning(50, hearing(|_| {})).await;
        let ask = |body: &str| place.provider.ask_spec(body);
        let done = place.run(place.new_task(vec![ask("push done"), ask("push done")])).await;
        let done = place.over(&done.id).await;
        assert_eq!((done.state, done.grants.len()), (TaskState::Succeeded, 1), "{done:#?}");
        // Each effect is in the journal with what came of it, and so is the end of what ran.
        let lines = place.told(&done.id).await;
        let of = |kind: &str| lines.iter().filter(|line| line.kind == kind).map(|line| &line.data).collect::<Vec<_>>();
        let (granted, ended) = (of("task.effect_granted"), of("task.effect_ended"));
        assert_eq!((granted.len(), ended.len()), (1, 1), "{lines:#?}");
        assert_eq!((&granted[0]["effect"], &ended[0]["effect"]), (&"push".into(), &"push".into()));
        assert_eq!((&ended[0]["grant"], &ended[0]["result"]["outcome"]), (&granted[0]["grant"], &"done".into()));
        let killed = of("task.killed");
        assert_eq!((killed.len(), &killed[0]["executions"]), (1, &2.into()), "{killed:#?}");
        assert_eq!(killed[0]["ended"].as_array().unwrap().len(), 2);
        let unknown = place.run(NewTask { keep_alive: true, ..place.new_task(vec![ask("push")]) }).await;
        let unknown = place.over(&unknown.id).await;
        assert_eq!(unknown.state, TaskState::EffectUnknown, "{unknown:#?}");
        let lines = place.told(&unknown.id).await;
        let ended = lines.iter().find(|line| line.kind == "task.effect_ended").unwrap();
        assert_eq!(ended.data["result"]["outcome"], "unknown");
        let more = ContinueTask { steps: vec![ask("push")], ..go_on() };
        place.engine.continue_task(&unknown.id, more).await.unwrap();
        let again = place.over(&unknown.id).await;
        assert_eq!((again.state, again.grants.len()), (TaskState::Succeeded, 1), "it is not granted again: {again:#?}");
        assert_eq!(again.came, Some(Came::Reused));
    });
}

#[test]
fn k5_a_stop_in_the_middle_of_effects_lets_none_begin_after_it() {
    for seed in 1..=40 {
        paused(async {
            let mut rng = Rng::new(seed);
            let mut place = Place::beginning(50, hearing(|_| {})).await;
            let ask = place.provider.ask_spec(if rng.chance(50) { "push" } else { "push done" });
            let new = place.new_task(vec![sleep(rng.below(2)), ask, sleep(rng.below(3))]);
            let task = place.run(new).await;
            tokio::time::sleep(Duration::from_millis(rng.below(4_000))).await;
            place.engine.stop_task(&task.id, Actor::part("user")).await.unwrap();
            if rng.chance(50) {
                place.followed(Duration::from_millis(rng.below(3_000)), hearing(|_| {})).await;
            }
            let over = place.over(&task.id).await;
            let asked_at_ms = over.stop.as_ref().map(|stop| stop.at_ms);
            for grant in &over.grants {
                assert!(asked_at_ms.is_none_or(|at_ms| grant.at_ms <= at_ms), "seed {seed}: {over:#?}");
                assert_ne!(grant.outcome.as_str(), "in_flight", "seed {seed}");
            }
            let unknown = over.grants.iter().any(|grant| grant.outcome.as_str() == "unknown");
            assert_eq!(unknown, over.state == TaskState::EffectUnknown, "seed {seed}: {over:#?}");
            place.assert_quiet(&over.sandbox).await;
        });
    }
}

fn off(gate: Gate) -> impl FnOnce(&mut EngineConfig) {
    move |config| {
        config.gates.replace([(gate, GateSetting::off())].into());
    }
}

/// Each switch really switches something: what it keeps from happening happens (O9).
#[test]
fn o9_without_its_gate_each_promise_is_broken() {
    let limits = TaskLimits { inactivity_ms: Some(20_000), total_ms: Some(120_000), ..TaskLimits::default() };
    paused(async {
        let place = Place::beginning(50, hearing(off(Gate::InactivityLimit))).await;
        let task = place.run(NewTask { limits, ..place.new_task(vec![sleep(60)]) }).await;
        assert_eq!(place.over(&task.id).await.state, TaskState::Succeeded);
    });
    paused(async {
        let place = Place::beginning(50, hearing(off(Gate::AuthoritativeTimeout))).await;
        let limits = TaskLimits { inactivity_ms: None, total_ms: Some(20_000), ..TaskLimits::default() };
        let task = place.run(NewTask { limits, ..place.new_task(vec![sleep(60)]) }).await;
        let over = place.over(&task.id).await;
        assert_eq!(over.state, TaskState::TimedOut);
        let handle = place.engine.look_into(&Project::default(), &Which::Id(over.sandbox), None).await.unwrap();
        assert_eq!(handle.running().await.unwrap(), 1, "it is called over, and goes on");
    });
    paused(async {
        let place = Place::beginning(50, hearing(off(Gate::PushedCancellation))).await;
        let task = place.run(NewTask { limits, ..place.new_task(vec![sleep(15), append()]) }).await;
        place.running(&task.id).await;
        let stopped = place.engine.stop_task(&task.id, Actor::part("user")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(place.task(&task.id).await.state, TaskState::Running, "nobody hears of it");
        let over = place.over(&task.id).await;
        assert_eq!(over.state, TaskState::Stopped, "but when the step ends");
        assert!(over.times.confirmed_at_ms.unwrap() > stopped.stop.unwrap().at_ms + 10_000);
    });
    paused(async {
        // Its first daemon keeps the stop in memory alone, and dies before anybody hears.
        let mut place = Place::beginning(
            50,
            hearing(|config| {
                let both = [Gate::DurableStop, Gate::PushedCancellation];
                let setting = GateSetting::off;
                config.gates.replace(both.map(|gate| (gate, setting())).into());
            }),
        )
        .await;
        let task = place.run(place.new_task(vec![sleep(20)])).await;
        place.running(&task.id).await;
        let engine = place.engine.clone();
        engine.shut_down();
        engine.stop_task(&task.id, Actor::part("user")).await.unwrap();
        place.followed(Duration::from_secs(1), hearing(|_| {})).await;
        assert_eq!(place.over(&task.id).await.state, TaskState::Succeeded, "the stop is forgotten");
    });
    paused(async {
        let place = Place::beginning(50, hearing(off(Gate::EffectsGate))).await;
        let ask = place.provider.ask_spec("push done");
        let new = NewTask { effects: Vec::new(), ..place.new_task(vec![ask.clone(), ask]) };
        let task = place.run(new).await;
        assert_eq!(place.over(&task.id).await.grants.len(), 2, "also what nobody declared, and twice");
    });
}
