//! Tasks (K1 to K7): one driver per living task, which does what its row says is next.
//!
//! ```text
//!   row ──► Prepare ──► enter, wait until ready, bring files, clone
//!    ▲      Run     ──► start the step (or find it started), follow it, watch limits
//!    │      End     ──► cut the way out, kill the tree, end the sandbox, confirm
//!    └───── each by `step` and compare-and-set, and the bell rings for who waits
//! ```
//!
//! Invariants:
//!
//! - What is done follows from the row alone, so the next daemon goes on where this one was (J4).
//! - Stop, limits and grants are changes of the row (K5). Whoever is at work on a task hears of them by its bell, at
//!   once, and at the latest when its step ends (K3).
//! - A task is over only when everything that it started was seen to be gone: an execution that cannot be shown to have
//!   ended takes its sandbox with it (X3).

mod command;
mod end;
mod inside;
mod journal;
mod prepare;
mod run;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use tracing::Instrument;
use viv_core::TaskId;
use viv_core::lifecycle::Actor;
use viv_core::task::{Task, TaskCause, TaskEvent, TaskStepped, TaskWork, step};
use viv_store::StoreError;

use crate::engine::{Engine, RACES_MAX};
use crate::error::EngineError;
use crate::gate::Gate;

pub use command::{ContinueTask, CreateTask, TaskMade};
pub use inside::Granted;

/// Most tasks that are prepared at once; the others wait for their turn.
const PLACES: usize = 64;

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// How often those who wait for their turn look for it, should nobody have called them.
const TURN_EVERY: Duration = Duration::from_secs(1);

/// Somebody at work on a task.
#[derive(Debug)]
struct Driver {
    running: AbortHandle,
    /// Somebody wanted it to be worked on since it was looked at last.
    again: bool,
}

/// What is kept in memory of tasks: nothing that the store does not have.
#[derive(Debug)]
pub(crate) struct Tasks {
    drivers: Mutex<BTreeMap<TaskId, Driver>>,
    bells: Mutex<BTreeMap<TaskId, Arc<Notify>>>,
    /// Stops that are not written down, because somebody switched that off (O9).
    unwritten: Mutex<BTreeSet<TaskId>>,
    /// Rings when one has ended: it may be another one's turn.
    turn: Notify,
    places: Semaphore,
}

impl Default for Tasks {
    fn default() -> Self {
        Self {
            drivers: Mutex::default(),
            bells: Mutex::default(),
            unwritten: Mutex::default(),
            turn: Notify::new(),
            places: Semaphore::new(PLACES),
        }
    }
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<TaskId, Driver>> {
        self.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn end(&self) {
        for driver in std::mem::take(&mut *self.lock()).into_values() {
            driver.running.abort();
        }
    }

    /// Whoever worked on a task found nothing to do, and leaves, unless somebody asked for more meanwhile. Whether it
    /// left: decided in one step, so that nobody relies on who is about to leave.
    fn leave(&self, id: &TaskId) -> bool {
        let mut drivers = self.lock();
        if drivers.get_mut(id).is_some_and(|driver| std::mem::take(&mut driver.again)) {
            return false;
        }
        drivers.remove(id);
        true
    }

    /// Rings when this task changes. Ask before looking, so that no change is missed between.
    fn bell(&self, id: &TaskId) -> Arc<Notify> {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that nobody holds any more are of no use; looked at now and then, so it costs next to nothing.
        if bells.len() >= 64 && bells.len().is_power_of_two() {
            bells.retain(|_, bell| Arc::strong_count(bell) > 1);
        }
        bells.entry(id.clone()).or_default().clone()
    }

    fn ring(&self, id: &TaskId) {
        let bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = bells.get(id) {
            bell.notify_waiters();
        }
    }
}

/// Who does what a task asks for.
pub(crate) fn actor(task: &TaskId) -> Actor {
    Actor::part(&format!("task:{task}"))
}

/// Takes up those that are not over.
pub(crate) async fn spawn(engine: &Engine) -> Result<(), EngineError> {
    for task in engine.inner.store.living_tasks().await? {
        engine.drive_task(&task);
    }
    Ok(())
}

/// Works on a task until it is over.
async fn drive(engine: Engine, id: TaskId) {
    let inner = &engine.inner;
    loop {
        match engine.drive_once(&id).await {
            Ok(TaskWork::Nothing) if inner.tasks.leave(&id) => break,
            Ok(TaskWork::Nothing | TaskWork::Prepare | TaskWork::Run | TaskWork::End) => {}
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "task", task = %id, %error, "goes on in a moment");
                inner.pause(STORE_PAUSE).await;
            }
        }
        if inner.is_ending() {
            return;
        }
    }
    inner.tasks.turn.notify_waiters();
}

impl Engine {
    /// Works on a task; who does already looks once more before it leaves.
    pub(crate) fn drive_task(&self, id: &TaskId) {
        if self.inner.is_ending() {
            return;
        }
        let mut drivers = self.inner.tasks.lock();
        if let Some(driver) = drivers.get_mut(id).filter(|driver| !driver.running.is_finished()) {
            driver.again = true;
            return;
        }
        let driving = drive(self.clone(), id.clone()).instrument(self.inner.task_span(id));
        let running = tokio::spawn(driving).abort_handle();
        drivers.insert(id.clone(), Driver { running, again: false });
    }

    /// Somebody's word on it could not be written, or that was not heard: whoever works on it, or waits for it, looks.
    fn task_may_have_changed(&self, id: &TaskId) {
        self.inner.tasks.ring(id);
        self.drive_task(id);
    }

    /// Does one thing, and answers what that was.
    async fn drive_once(&self, id: &TaskId) -> Result<TaskWork, EngineError> {
        let Some(task) = self.inner.store.task(id).await? else { return Ok(TaskWork::Nothing) };
        let work = task.work();
        match work {
            TaskWork::Prepare => Box::pin(self.prepare_task(task)).await?,
            TaskWork::Run => Box::pin(self.run_task(task)).await?,
            TaskWork::End => Box::pin(self.end_task(task)).await?,
            TaskWork::Nothing => {}
        }
        Ok(work)
    }

    /// The one way by which a task changes: load, step, compare-and-set with the journal's lines, ring the bell.
    /// Answers with what is there then.
    pub(crate) async fn apply_task(&self, id: &TaskId, event: &TaskEvent) -> Result<Task, EngineError> {
        let inner = &self.inner;
        for _ in 0..RACES_MAX {
            let before = inner.store.task(id).await?.ok_or_else(|| EngineError::NoTask { which: id.clone() })?;
            let now_ms = inner.clock.now_ms();
            let next = match step(&before, event, now_ms) {
                TaskStepped::Accepted(next) => *next,
                TaskStepped::Ignored => return Ok(before),
                TaskStepped::Denied(why) => return Err(EngineError::TaskDenied { task: id.clone(), why }),
            };
            let lines = journal::lines(&before, &next, event, now_ms);
            match inner.store.put_task(inner.epoch, next.clone(), lines).await {
                Ok(()) => {
                    self.task_changed(&next, event);
                    return Ok(next);
                }
                Err(StoreError::TaskConflict { .. }) => {}
                Err(other) => {
                    let error = EngineError::from(other);
                    inner.heed(&error);
                    return Err(error);
                }
            }
        }
        Err(EngineError::Store(StoreError::Unavailable { what: format!("{id} changes faster than it can be read") }))
    }

    fn task_changed(&self, task: &Task, event: &TaskEvent) {
        let inner = &self.inner;
        crate::trace::task_changed(task);
        // Switched off, a stop is found when somebody looks at the row for another reason (O9).
        let silent = matches!(event, TaskEvent::Stop { .. }) && !self.task_gate(Gate::PushedCancellation, task);
        if !silent {
            inner.tasks.ring(&task.id);
        }
        if task.state.is_final() {
            inner.tasks.turn.notify_waiters();
        }
    }

    fn task_gate(&self, gate: Gate, task: &Task) -> bool {
        self.inner.config.gates.is_on(gate, &task.project, &task.sandbox)
    }

    /// Answers when the task is to end: somebody stops it, or its time in all has passed, which is written down here.
    /// Ask before anything is begun that this may end.
    async fn until_ending(&self, id: &TaskId) -> Result<(), EngineError> {
        let inner = &self.inner;
        let bell = inner.tasks.bell(id);
        loop {
            // Listening begins before the look, so a change between look and wait is heard.
            let mut rung = pin!(bell.notified());
            rung.as_mut().enable();
            self.write_stop(id).await?;
            let Some(task) = inner.store.task(id).await? else { return Ok(()) };
            if task.ending.is_some() || task.state.is_final() {
                return Ok(());
            }
            let due = async {
                match task.deadline_ms {
                    Some(at_ms) => tokio::time::sleep_until(inner.clock.at(at_ms)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = rung => {}
                () = due => {
                    self.apply_task(id, &total_passed(&task)).await?;
                }
            }
        }
    }

    /// A stop that was only remembered is written down by whoever hears of it.
    async fn write_stop(&self, id: &TaskId) -> Result<(), EngineError> {
        let was = self.inner.tasks.unwritten.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        if was {
            self.apply_task(id, &TaskEvent::Stop { by: actor(id) }).await?;
        }
        Ok(())
    }
}

fn total_passed(task: &Task) -> TaskEvent {
    let total_ms = task.limits.total_ms.unwrap_or(0);
    let message = format!("it took longer than {total_ms} ms in all");
    TaskEvent::LimitPassed { cause: TaskCause::TotalLimit, message }
}
