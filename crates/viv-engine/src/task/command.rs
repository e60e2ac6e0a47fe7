//! What can be asked about tasks.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::PoisonError;
use std::time::Duration;

use serde_json::json;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::Actor;
use viv_core::planted::{Planted, is_planted};
use viv_core::spec::Project;
use viv_core::task::{
    EFFECTS_MAX, FILES_MAX, NewTask, STEPS_MAX, SaidLimits, StepChanges, Task, TaskDenial, TaskEvent,
};
use viv_core::task::{TaskStepped, step};
use viv_core::{ExecutionId, SandboxId, TaskId};
use viv_store::{StoreError, TaskListing, TaskOutput, TaskQuery};

use super::journal::line;
use crate::engine::{Engine, RACES_MAX};
use crate::error::EngineError;
use crate::gate::Gate;

/// A task that somebody wants; its id is made here.
#[derive(Debug, Clone)]
pub struct CreateTask {
    /// All but its id.
    pub new: NewTask,
    /// The id, when the request can be repeated: made of its key, so that it is the same.
    pub keyed: bool,
}

/// What came of a create.
#[derive(Debug, Clone)]
pub struct TaskMade {
    /// The task.
    pub task: Task,
    /// Whether this request made it; otherwise one before it with the same key did.
    pub fresh: bool,
}

/// How a task is to go on.
#[derive(Debug, Clone)]
pub struct ContinueTask {
    /// With these steps; with those that it had, when there are none.
    pub steps: Vec<ExecSpec>,
    /// What is said anew of those that it had.
    pub changes: StepChanges,
    /// Within these limits.
    pub limits: SaidLimits,
    /// Whether its sandbox stays after that; as it was, when nothing is said.
    pub keep_alive: Option<bool>,
    /// Who asks.
    pub by: Actor,
}

impl ContinueTask {
    /// As it was.
    pub fn as_it_was(by: Actor) -> Self {
        let (changes, limits) = (StepChanges::default(), SaidLimits::default());
        Self { steps: Vec::new(), changes, limits, keep_alive: None, by }
    }
}

fn check_steps(steps: &[ExecSpec]) -> Result<(), EngineError> {
    let wrong = |what: &str| EngineError::Invalid {
        what: what.to_owned(),
        hint: "give a program and its arguments, or a list of steps".to_owned(),
    };
    if steps.is_empty() || steps.len() > STEPS_MAX {
        return Err(wrong(&format!("a task has 1 to {STEPS_MAX} steps")));
    }
    if steps.iter().any(|step| step.argv.first().is_none_or(String::is_empty)) {
        return Err(wrong("a step runs a command, and there is none"));
    }
    Ok(())
}

impl Engine {
    /// An id for a task, which sorts by when it was made.
    pub fn new_task_id(&self) -> TaskId {
        let mut bytes = (self.inner.draw)();
        bytes[..6].copy_from_slice(&self.inner.clock.now_ms().to_be_bytes()[2..]);
        TaskId::from_bytes(bytes)
    }

    /// Records a new task, and answers before anything is done: see [`Engine::wait_task`].
    pub async fn create_task(&self, request: CreateTask) -> Result<TaskMade, EngineError> {
        let inner = &self.inner;
        let _entering = inner.begin_entry()?;
        let CreateTask { new, keyed } = request;
        check_steps(&new.steps)?;
        if new.effects.len() > EFFECTS_MAX || new.files.len() > FILES_MAX {
            return Err(EngineError::Invalid {
                what: format!("a task has at most {EFFECTS_MAX} effects and {FILES_MAX} files"),
                hint: "put files into an image, a snapshot or a repository".to_owned(),
            });
        }
        if let Some(make) = &new.make {
            make.spec.check()?;
            make.policy.check()?;
        }
        let now_ms = inner.clock.now_ms();
        let (by, hash) = (new.by.clone(), new.body_hash.clone());
        let task = Task::new(new, now_ms);
        let lines = vec![line(&task, "task.created", by, now_ms, json!({ "steps": task.steps.len() }))];
        match inner.store.put_task(inner.epoch, task.clone(), lines).await {
            Ok(()) => {}
            Err(StoreError::TaskConflict { .. }) if keyed => {
                let missing = || EngineError::NoTask { which: task.id.clone() };
                let before = inner.store.task(&task.id).await?.ok_or_else(missing)?;
                if before.body_hash != hash {
                    return Err(EngineError::IdempotencyMismatch { made: before.id.to_string() });
                }
                return Ok(TaskMade { task: before, fresh: false });
            }
            Err(other) => {
                self.task_may_have_changed(&task.id);
                return Err(other.into());
            }
        }
        inner.reached("task.created");
        self.drive_task(&task.id);
        Ok(TaskMade { task, fresh: true })
    }

    /// A task, of this project if one is named.
    pub async fn task(&self, project: Option<&Project>, id: &TaskId) -> Result<Task, EngineError> {
        let found = self.inner.store.task(id).await?;
        // Nothing reaches from one project into another, not even the knowledge that it is there.
        let ours = found.filter(|found| project.is_none_or(|project| found.project == *project));
        ours.ok_or_else(|| EngineError::NoTask { which: id.clone() })
    }

    /// Those that are at work in some sandboxes.
    pub async fn tasks_at_work(&self, sandboxes: &[SandboxId]) -> Result<BTreeMap<SandboxId, TaskId>, EngineError> {
        Ok(self.inner.store.tasks_at_work(sandboxes).await?)
    }

    /// A page of tasks, newest first.
    pub async fn tasks(&self, query: &TaskQuery) -> Result<TaskListing, EngineError> {
        Ok(self.inner.store.tasks(query).await?)
    }

    /// What was kept of the output of one of its executions.
    pub async fn task_output(&self, task: &TaskId, execution: &ExecutionId) -> Result<Option<TaskOutput>, EngineError> {
        Ok(self.inner.store.task_output(task, execution).await?)
    }

    /// Records that it is to stop, and answers at once: a row before it is anything else (K2). It is acknowledged when
    /// its state is final: see [`Engine::wait_task`].
    pub async fn stop_task(&self, id: &TaskId, by: Actor) -> Result<Task, EngineError> {
        let task = self.task(None, id).await?;
        if !self.task_gate(Gate::DurableStop, &task) && !task.state.is_final() {
            self.inner.tasks.unwritten.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
            self.inner.tasks.ring(id);
            return Ok(task);
        }
        if is_planted(Planted::StopOfTaskUnwritten) {
            return Ok(task);
        }
        let stopped = self.apply_task(id, &TaskEvent::Stop { by }).await;
        if stopped.is_err() {
            self.task_may_have_changed(id);
        }
        let task = stopped?;
        self.inner.reached("task.stopped");
        self.drive_task(id);
        Ok(task)
    }

    /// Records somebody's word that a task should not have been ended, or that it should have been (O2).
    pub async fn mark_task(
        &self,
        id: &TaskId,
        by: Actor,
        mistaken: bool,
        why: Option<String>,
    ) -> Result<Task, EngineError> {
        self.apply_task(id, &TaskEvent::Marked { by, mistaken, why }).await
    }

    /// Goes on with a task that is over (K6), and answers when that is durable.
    pub async fn continue_task(&self, id: &TaskId, request: ContinueTask) -> Result<Task, EngineError> {
        let inner = &self.inner;
        let _entering = inner.begin_entry()?;
        for _ in 0..RACES_MAX {
            let before = self.task(None, id).await?;
            let steps =
                if request.steps.is_empty() { request.changes.of(&before.steps) } else { request.steps.clone() };
            check_steps(&steps)?;
            let event = TaskEvent::Continued {
                steps,
                limits: request.limits.over(before.limits),
                keep_alive: request.keep_alive.unwrap_or(before.keep_alive),
            };
            let now_ms = inner.clock.now_ms();
            let next = match step(&before, &event, now_ms) {
                TaskStepped::Accepted(next) => *next,
                TaskStepped::Ignored => {
                    return Err(EngineError::TaskDenied { task: id.clone(), why: TaskDenial::NotOver });
                }
                TaskStepped::Denied(why) => return Err(EngineError::TaskDenied { task: id.clone(), why }),
            };
            let lines = vec![line(&next, "task.continued", request.by.clone(), now_ms, json!({}))];
            match inner.store.put_task(inner.epoch, next.clone(), lines).await {
                Ok(()) => {
                    inner.reached("task.continued");
                    inner.tasks.ring(id);
                    self.drive_task(id);
                    return Ok(next);
                }
                Err(StoreError::TaskConflict { .. }) => {}
                Err(other) => {
                    self.task_may_have_changed(id);
                    return Err(other.into());
                }
            }
        }
        Err(EngineError::Store(StoreError::Unavailable { what: format!("{id} changes faster than it can be read") }))
    }

    /// Waits until it is so. After this long the answer is how it is then.
    pub async fn wait_task(
        &self,
        id: &TaskId,
        how_long: Duration,
        is_so: impl Fn(&Task) -> bool + Send,
    ) -> Result<Task, EngineError> {
        let inner = &self.inner;
        let until = tokio::time::Instant::now() + how_long;
        let bell = inner.tasks.bell(id);
        let mut ending = inner.ending();
        loop {
            // Listening begins before the look, so a change between look and wait is heard.
            let mut rung = pin!(bell.notified());
            rung.as_mut().enable();
            let task = self.task(None, id).await?;
            if is_so(&task) {
                return Ok(task);
            }
            tokio::select! {
                biased;
                () = rung => {}
                () = tokio::time::sleep_until(until) => return Ok(task),
                _ = ending.wait_for(|ending| *ending) => return Err(EngineError::ShuttingDown),
            }
        }
    }
}
