//! What clients do with tasks, and what is heard from inside of them.

use std::collections::BTreeMap;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use viv_core::TaskId;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::lifecycle::{Desired, Phase};
use viv_core::spec::Project;
use viv_core::task::{EffectRule, MakeSandbox, NewTask, Task, TaskLimits};
use viv_engine::{ContinueTask, CreateTask, Engine, EngineError, FromInside, Inside};
use viv_provider::conformance::program::Program;
use viv_provider::{InstanceRef, Provider};
use viv_store::TaskQuery;

use crate::at_once::at_once;
use crate::clients::Told;
use crate::invariants::{Found, Picture, holds};
use crate::plan::Deed;
use crate::world::{World, somebody};

/// How soon who is inside asks again.
const AGAIN: Duration = Duration::from_millis(500);

/// Most tasks that a world has seen.
const TASKS_MAX: usize = 12;

/// The one effect that is declared.
const EFFECT: &str = "push";

/// Within this a task that was stopped is over, where nothing goes wrong: its effect may end, its tree is killed, its
/// sandbox saved, and an agent that hangs is waited for.
const STOPPED_WITHIN_MS: u64 = 60_000;

/// How long after its window a silent step may run: it is asked to end first.
const SILENT_WITHIN_MS: u64 = 20_000;

/// Answers what steps of these tasks say: `push` asks for the effect and never tells what came of it, `push done` does,
/// and `deploy` is nothing that anybody declared.
pub(crate) fn answers() -> Inside {
    Inside(Arc::new(|engine, asked| Box::pin(answer(engine, asked))))
}

/// The same for who does not take an error for an answer, and asks again.
pub(crate) fn patient_answers() -> Inside {
    Inside(Arc::new(|engine, asked| {
        Box::pin(async move {
            loop {
                let said = answer(engine.clone(), asked.clone()).await;
                if !said.starts_with("error") {
                    return said;
                }
                tokio::time::sleep(AGAIN).await;
            }
        })
    }))
}

async fn answer(engine: Engine, asked: FromInside) -> String {
    let at_work =
        match engine.tasks_at_work(slice::from_ref(&asked.sandbox.id)).await.map(|all| all.into_values().next()) {
            Ok(Some(id)) => engine.task(None, &id).await,
            Ok(None) => return "no task".to_owned(),
            Err(error) => return format!("error: {error}"),
        };
    let Ok(task) = at_work else { return "no task".to_owned() };
    let of = (&task.id, task.run);
    let done = match asked.body.as_str() {
        "push done" => match engine.gate_inside(&asked, of, Some(EFFECT)).await {
            Ok(granted) => engine.effect_ended_inside(&asked, of, &granted.grant, None).await.map(drop),
            Err(error) => Err(error),
        },
        "deploy" => engine.gate_inside(&asked, of, Some("deploy")).await.map(drop),
        _ => engine.gate_inside(&asked, of, Some(EFFECT)).await.map(drop),
    };
    match done {
        Ok(()) => "done".to_owned(),
        Err(EngineError::TaskDenied { why, .. }) => format!("{why:?}"),
        Err(error) => format!("error: {error}"),
    }
}

fn program(program: &Program) -> ExecSpec {
    ExecSpec { argv: program.argv(), limit_ms: Some(300_000), ..ExecSpec::default() }
}

impl World<'_> {
    async fn all_tasks(&self) -> Vec<Task> {
        let query = TaskQuery { limit: 10_000, ..TaskQuery::default() };
        at_once(self.store.truth.tasks(&query)).await.unwrap_or_default().items
    }

    fn step_of_task(&mut self) -> ExecSpec {
        let ask = |body: &str| self.provider.ask_spec(body);
        match self.rng.below(8) {
            0 => ask("push done"),
            1 => ask("push"),
            2 => ask("deploy"),
            3 => program(&Program::Tick { count: 200 }),
            4 => program(&Program::Stubborn { path: "/workspace/task".to_owned() }),
            5 => program(&Program::Exit { code: 0 }),
            _ => program(&Program::Sleep { seconds: 1 + self.rng.below(200) }),
        }
    }

    pub(crate) async fn run_task(&mut self) -> Found {
        if self.all_tasks().await.len() >= TASKS_MAX {
            return Ok(());
        }
        let living = self.known.values().filter(|known| !known.ended).count();
        let own = living < self.living_max && self.rng.chance(50);
        let sandbox = if own { None } else { self.someone() };
        if sandbox.is_none() && !own {
            return Ok(());
        }
        if let Some(id) = &sandbox {
            self.known.entry(id.clone()).or_default().wakes_itself = true;
        }
        let make = if own {
            let (policy, spec) = (self.policy(), self.spec());
            Some(Box::new(MakeSandbox { name: None, spec, policy, labels: BTreeMap::new(), snapshot: None }))
        } else {
            None
        };
        let steps = 1 + self.rng.below(3);
        let steps = (0..steps).map(|_| self.step_of_task()).collect();
        let limits = TaskLimits {
            inactivity_ms: self.rng.chance(50).then(|| 5_000 + self.rng.below(60_000)),
            total_ms: Some(20_000 + self.rng.below(280_000)),
            reports_max: None,
        };
        let new = NewTask {
            id: self.engine().new_task_id(),
            project: Project::default(),
            sandbox,
            make,
            files: Vec::new(),
            source: None,
            steps,
            limits,
            effects: vec![EffectRule { name: EFFECT.to_owned(), repeatable: self.rng.chance(30) }],
            credentials: BTreeMap::new(),
            keep_alive: self.rng.chance(50),
            by: somebody(),
            body_hash: None,
        };
        let engine = self.engine();
        let asked = async move { engine.create_task(CreateTask { new, keyed: false }).await.map(|_| Told::Done) };
        self.ask(Deed::Task, None, asked).await
    }

    /// Somebody stops a task, or goes on with one: one that can be, if there is one.
    pub(crate) async fn turn_task(&mut self, deed: Deed) -> Found {
        let all = self.all_tasks().await;
        let stops = deed == Deed::StopTask;
        let fit: Vec<&Task> = all.iter().filter(|task| task.state.is_final() != stops).collect();
        let at = self.rng.below(fit.len() as u64) as usize;
        let Some(id) = fit.get(at).map(|task| task.id.clone()) else { return Ok(()) };
        let engine = self.engine();
        let asked = async move {
            if stops {
                let task = engine.stop_task(&id, somebody()).await?;
                return Ok(Told::Stopping(id, task.run));
            }
            let more = ContinueTask::as_it_was(somebody());
            engine.continue_task(&id, more).await.map(|_| Told::Done)
        };
        self.ask(deed, None, asked).await
    }

    /// A stop was acknowledged, so it is recorded.
    pub(crate) async fn heard_stop(&self, id: &TaskId, run: u32) -> Found {
        let row = at_once(self.store.truth.task(id)).await.ok().flatten();
        let durable = row.as_ref().is_some_and(|task| task.run > run || task.stop.is_some() || task.state.is_final());
        holds("stops-of-tasks-are-durable", durable, || format!("{id} was stopped, and is {row:?}"))
    }

    pub(crate) async fn check_tasks(&self, picture: &Picture) -> Found {
        let mut at_work = BTreeMap::new();
        for task in &picture.tasks {
            if task.is_at_work() {
                let other = at_work.insert(task.sandbox.clone(), task.id.clone());
                holds("one-task-at-work", other.is_none(), || format!("{} and {other:?}", task.id))?;
            }
            let asked_at_ms = task.stop.as_ref().filter(|_| !task.state.is_final()).map(|stop| stop.at_ms);
            if let Some(at_ms) = asked_at_ms.filter(|_| self.is_calm()) {
                let late_ms = self.clock.now_ms().saturating_sub(at_ms);
                let soon = late_ms <= STOPPED_WITHIN_MS || self.may_take_long(picture, task);
                holds("stops-of-tasks-are-soon", soon, || {
                    format!("{} is {:?} {late_ms} ms later", task.id, task.state)
                })?;
            }
            let deadline_ms = task.deadline_ms.filter(|_| !task.state.is_final() && self.is_calm());
            if let Some(deadline_ms) = deadline_ms {
                let late_ms = self.clock.now_ms().saturating_sub(deadline_ms);
                let soon = late_ms <= STOPPED_WITHIN_MS || self.may_take_long(picture, task);
                holds("tasks-end-in-time", soon, || format!("{} is {:?} {late_ms} ms too late", task.id, task.state))?;
            }
            self.check_silent(picture, task).await?;
            self.check_over(picture, task).await?;
        }
        Ok(())
    }

    /// A step that never said anything does not run on for long after its task's window.
    async fn check_silent(&self, picture: &Picture, task: &Task) -> Found {
        let Some(window_ms) = task.limits.inactivity_ms.filter(|_| !task.state.is_final() && self.is_calm()) else {
            return Ok(());
        };
        let (Some(execution), Some(record)) = (task.executions.last(), picture.records.get(&task.sandbox)) else {
            return Ok(());
        };
        if execution.generation != record.generation || self.may_take_long(picture, task) {
            return Ok(());
        }
        let instance = InstanceRef { sandbox: task.sandbox.clone(), generation: record.generation };
        let Ok(seen) = self.provider.truth().execution(&instance, &execution.id).await else { return Ok(()) };
        if seen.state != ExecState::Running || seen.output_bytes > 0 {
            return Ok(());
        }
        let heard_at_ms = seen.started_at_ms.max(record.phase_since_ms).max(task.times.reported_at_ms.unwrap_or(0));
        let silent_ms = self.clock.now_ms().saturating_sub(heard_at_ms);
        holds("silent-tasks-end", silent_ms <= window_ms.saturating_add(SILENT_WITHIN_MS), || {
            format!("{} may be silent for {window_ms} ms, and is for {silent_ms}", task.id)
        })
    }

    /// What it ends in is damaged, or cannot be saved, or was never seen to end; or was so a moment ago.
    fn may_take_long(&self, picture: &Picture, task: &Task) -> bool {
        let record = picture.records.get(&task.sandbox);
        let long_ago = |since_ms: u64| self.clock.now_ms().saturating_sub(since_ms) > STOPPED_WITHIN_MS;
        let calm = record.is_none_or(|record| record.phase == Phase::Ready && long_ago(record.phase_since_ms));
        !calm || self.provider.damage_of(&task.sandbox).is_some()
    }

    /// Of a task that is over nothing runs in what is ready, and wanted so.
    async fn check_over(&self, picture: &Picture, task: &Task) -> Found {
        if !task.state.is_final() {
            return Ok(());
        }
        let Some(record) = picture.records.get(&task.sandbox) else { return Ok(()) };
        if record.phase != Phase::Ready || record.desired != Desired::Running {
            return Ok(());
        }
        for execution in task.executions.iter().filter(|execution| execution.generation == record.generation) {
            let instance = InstanceRef { sandbox: task.sandbox.clone(), generation: record.generation };
            let seen = self.provider.truth().execution(&instance, &execution.id).await;
            let runs = seen.as_ref().is_ok_and(|seen| seen.state == ExecState::Running);
            holds("over-tasks-run-nothing", !runs, || format!("{} is {:?}, and {seen:?}", task.id, task.state))?;
        }
        Ok(())
    }
}
