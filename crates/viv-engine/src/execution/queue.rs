//! What waits to be started: one task per sandbox in which something does.
//!
//! ```text
//!   asked ──► row: queued ──► the sandbox is ready, and there is a place ──► row: starting in generation N ──► started
//!                 ├── its deadline passes                     ──► failed         │
//!                 ├── the sandbox rests, or is gone           ──► failed         └── the instance goes: lost
//!                 └── cancelled, by compare-and-set           ──► cancelled
//! ```
//!
//! That it is started in this instance is durable before it is: whoever carries on after a crash starts it under the same
//! id in the same instance, where it is the same, or nowhere.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::execution::{Execution, Place, Queued, START_UNKNOWN, Stage};
use viv_core::lifecycle::{Actor, Phase, Sandbox};
use viv_core::spec::Project;
use viv_core::{ExecutionId, Generation, SandboxId};
use viv_provider::ProviderError;
use viv_store::{ExecutionQuery, StoreError};

use crate::effect::in_words;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::{Handle, not_running};
use crate::read::Which;

/// Most that wait in one sandbox; more are refused.
pub(crate) const QUEUED_MAX: u64 = 64;

/// When a sandbox that had no place is asked again: of commands that end there, not all are heard of.
const PLACE_PAUSE: Duration = Duration::from_millis(250);

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// What is to wait.
#[derive(Debug, Clone)]
pub struct QueueRequest {
    /// Under which id: asked again, it is the same.
    pub id: ExecutionId,
    /// The generation that is there now, if that matters to who asks.
    pub generation: Option<Generation>,
    /// What to run.
    pub spec: ExecSpec,
    /// For how long.
    pub wait_ms: u64,
    /// Start it only when fewer than this many run in the foreground.
    pub running_max: Option<u64>,
    /// Who asks.
    pub by: Actor,
}

#[derive(Debug)]
struct Queue {
    task: AbortHandle,
    bell: Arc<Notify>,
    /// Somebody came since it was looked at.
    again: bool,
}

#[derive(Debug, Default)]
pub(super) struct Queues {
    queues: Mutex<BTreeMap<SandboxId, Queue>>,
}

impl Queues {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self) {
        for queue in std::mem::take(&mut *self.lock()).into_values() {
            queue.task.abort();
        }
    }
}

/// Whether something can be started in a sandbox.
enum Coming {
    Ready,
    NotYet,
    Never,
}

fn coming(record: &Sandbox) -> Coming {
    if record.deleted {
        return Coming::Never;
    }
    match &record.phase {
        Phase::Ready => Coming::Ready,
        Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. } => Coming::NotYet,
        // An entry is looked at again when the transition ends.
        Phase::Frozen { .. } | Phase::Hibernating { .. } | Phase::Hibernated { .. } | Phase::Lost
            if record.entry.is_some() =>
        {
            Coming::NotYet
        }
        Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Coming::Never,
    }
}

/// What came of trying to start one.
enum Tried {
    /// It is not in the queue any more.
    Done,
    /// There is no place for it, or nobody answers.
    NoPlace,
}

impl Engine {
    /// Puts a command in the queue of its sandbox, durably; asked again, it is the same. One that is at rest, with nobody
    /// waiting for it, is not woken by this (L4).
    pub async fn queue_execution(
        &self,
        project: &Project,
        which: &Which,
        request: QueueRequest,
    ) -> Result<Execution, EngineError> {
        let inner = &self.inner;
        let QueueRequest { id, generation, spec, wait_ms, running_max, by } = request;
        let record = self.found(project, which, generation).await?;
        if let Some(known) = self.execution_row(&record.id, &id).await? {
            return same(known, &spec);
        }
        inner.check_open()?;
        if matches!(coming(&record), Coming::Never) {
            return Err(not_running(&record));
        }
        let now_ms = inner.clock.now_ms();
        let until_ms = now_ms.saturating_add(wait_ms);
        let queued = Queued { spec: Box::new(spec.clone()), until_ms, running_max, starting_in: None };
        let row = Execution::asked(id.clone(), Place::from(&record), &spec, by, now_ms, Stage::Queued(queued));
        match inner.store.put_execution(inner.epoch, row.clone(), QUEUED_MAX).await.map_err(EngineError::from) {
            Ok(()) => {
                inner.reached("execution.queued");
                self.wake_queue(&record.id);
                Ok(row)
            }
            // Somebody asked for the same at this moment, or its sandbox ended.
            Err(EngineError::Store(StoreError::Conflict { .. })) => {
                let record = self.found(project, which, generation).await?;
                let known = self.execution_row(&record.id, &id).await?;
                known.map_or_else(|| Err(not_running(&record)), |known| same(known, &spec))
            }
            Err(other) => {
                inner.heed(&other);
                Err(other)
            }
        }
    }

    /// Takes one out of the queue; `None` when it does not wait any more.
    pub async fn cancel_queued(
        &self,
        sandbox: &SandboxId,
        execution: &ExecutionId,
    ) -> Result<Option<Execution>, EngineError> {
        let found = self.inner.store.execution(sandbox, execution).await?;
        let Some(row) = found.filter(|row| row.queued().is_some_and(|queued| queued.starting_in.is_none())) else {
            return Ok(None);
        };
        self.end_queued(row, ExecState::Cancelled, false).await
    }

    /// Ends one that waits; `None` when somebody else changed it first.
    async fn end_queued(
        &self,
        mut row: Execution,
        state: ExecState,
        concluded: bool,
    ) -> Result<Option<Execution>, EngineError> {
        let inner = &self.inner;
        row.end(state, inner.clock.now_ms(), concluded);
        row.version += 1;
        let ended = inner.store.put_execution(inner.epoch, row.clone(), QUEUED_MAX).await;
        // Whoever follows it waits for its sandbox to change.
        inner.bell(&row.sandbox).notify_waiters();
        match ended.map_err(EngineError::from) {
            Ok(()) => Ok(Some(row)),
            Err(EngineError::Store(StoreError::Conflict { .. })) => Ok(None),
            Err(other) => {
                inner.heed(&other);
                Err(other)
            }
        }
    }

    /// Waits until one that is queued is not any more; how it stands then.
    pub async fn wait_started(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<Execution, EngineError> {
        let inner = &self.inner;
        let bell = inner.bell(sandbox);
        let mut ending = inner.ending();
        loop {
            let mut rung = pin!(bell.notified());
            rung.as_mut().enable();
            let row = self.execution_row(sandbox, execution).await?;
            let row = row.ok_or_else(|| EngineError::NotFound { which: execution.to_string() })?;
            if row.queued().is_none() {
                return Ok(row);
            }
            tokio::select! {
                biased;
                _ = ending.wait_for(|ending| *ending) => return Err(EngineError::ShuttingDown),
                () = rung => {}
            }
        }
    }

    /// Waits until what stands still with its sandbox goes on, or never will. False when it does not stand still.
    pub async fn wait_awake(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Result<bool, EngineError> {
        let inner = &self.inner;
        let bell = inner.bell(sandbox);
        let mut ending = inner.ending();
        let mut waited = false;
        loop {
            let mut rung = pin!(bell.notified());
            rung.as_mut().enable();
            let row = self.execution_row(sandbox, execution).await?;
            if !self.is_at_rest(sandbox).await? || row.is_none_or(|row| !row.is_open()) {
                return Ok(waited);
            }
            waited = true;
            tokio::select! {
                biased;
                _ = ending.wait_for(|ending| *ending) => return Err(EngineError::ShuttingDown),
                () = rung => {}
            }
        }
    }

    /// Whether what runs in a sandbox stands still, or is on its way back.
    pub async fn is_at_rest(&self, sandbox: &SandboxId) -> Result<bool, EngineError> {
        Ok(match self.inner.load(sandbox).await?.phase {
            Phase::Frozen { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Provisioning { .. }
            | Phase::Resuming { .. }
            | Phase::Verifying { .. } => true,
            Phase::Ready | Phase::Lost | Phase::Failed { .. } | Phase::Stopping { .. } | Phase::Stopped => false,
        })
    }

    /// Something waits in this sandbox.
    pub(super) fn wake_queue(&self, sandbox: &SandboxId) {
        let inner = &self.inner;
        if inner.is_ending() {
            return;
        }
        let mut queues = inner.executions.queues.lock();
        if let Some(queue) = queues.get_mut(sandbox).filter(|queue| !queue.task.is_finished()) {
            queue.again = true;
            queue.bell.notify_one();
            return;
        }
        let bell = Arc::new(Notify::new());
        let task = tokio::spawn(serve(self.clone(), sandbox.clone(), bell.clone())).abort_handle();
        queues.insert(sandbox.clone(), Queue { task, bell, again: false });
    }

    /// Starts and ends what can be. When to look again without being told; `None` when nothing waits.
    async fn serve_once(&self, sandbox: &SandboxId) -> Result<Option<u64>, EngineError> {
        let inner = &self.inner;
        let query = ExecutionQuery {
            sandbox: Some(sandbox.clone()),
            queued: true,
            limit: QUEUED_MAX as usize,
            ..ExecutionQuery::default()
        };
        let mut waiting = inner.store.executions(&query).await?.items;
        waiting.reverse();
        let record = match inner.load(sandbox).await {
            Err(EngineError::NotFound { .. }) => return Ok(None),
            found => found?,
        };
        let mut look_at_ms: Option<u64> = None;
        let mut may_start = matches!(coming(&record), Coming::Ready);
        for row in waiting {
            let Some(queued) = row.queued().cloned() else { continue };
            let now_ms = inner.clock.now_ms();
            let started = if queued.until_ms <= now_ms {
                self.give_up(&record, row, &queued).await?;
                continue;
            } else if matches!(coming(&record), Coming::Never) && queued.starting_in.is_none() {
                let what = format!("the sandbox is {}", record.phase.name().as_str());
                self.end_queued(row, ExecState::Failed { what }, false).await?;
                continue;
            } else if may_start {
                self.try_start(row, &queued).await?
            } else {
                Tried::NoPlace
            };
            if matches!(started, Tried::NoPlace) {
                // In the order in which they came.
                let again_ms = if may_start { now_ms + PLACE_PAUSE.as_millis() as u64 } else { queued.until_ms };
                may_start = false;
                let at_ms = again_ms.min(queued.until_ms);
                look_at_ms = Some(look_at_ms.map_or(at_ms, |soonest| soonest.min(at_ms)));
            }
        }
        Ok(look_at_ms)
    }

    /// It was not started in time.
    async fn give_up(&self, record: &Sandbox, row: Execution, queued: &Queued) -> Result<(), EngineError> {
        let waited_ms = queued.until_ms.saturating_sub(row.asked_at_ms);
        let why = match coming(record) {
            Coming::Ready => "there was no place for it".to_owned(),
            Coming::NotYet | Coming::Never => format!("the sandbox is {}", record.phase.name().as_str()),
        };
        let not_started = ExecState::Failed { what: format!("it was not started within {waited_ms} ms: {why}") };
        let Some(generation) = queued.starting_in else {
            return self.end_queued(row, not_started, false).await.map(drop);
        };
        // It may have been: then it ends, and says how.
        let handle = self.handle(&Sandbox { generation, ..record.clone() });
        match handle.cancel(&row.id).await {
            Ok(status) => self
                .inner
                .store
                .note_executions(self.inner.epoch, vec![super::started(row, status, self.inner.clock.now_ms())])
                .await
                .map_err(EngineError::from),
            Err(EngineError::Provider(ProviderError::NotFound { .. })) => {
                self.end_queued(row, not_started, false).await.map(drop)
            }
            Err(_) => {
                let state = ExecState::Lost { cause: START_UNKNOWN.to_owned() };
                self.end_queued(row, state, true).await.map(drop)
            }
        }
    }

    async fn try_start(&self, row: Execution, queued: &Queued) -> Result<Tried, EngineError> {
        let inner = &self.inner;
        // Not ready any more, or not well: whoever looks after it says so, or the deadline passes.
        let Ok(handle) = self.work_in(&row.project, &Which::Id(row.sandbox.clone()), None).await else {
            return Ok(Tried::NoPlace);
        };
        if let Some(running_max) = queued.running_max.filter(|_| queued.starting_in.is_none()) {
            let Ok(all) = handle.executions().await else { return Ok(Tried::NoPlace) };
            let running = all.iter().filter(|other| other.state == ExecState::Running && !other.detached).count();
            if running as u64 >= running_max {
                return Ok(Tried::NoPlace);
            }
        }
        let mut row = row;
        if queued.starting_in.is_none() {
            row.version += 1;
            row.generation = handle.generation();
            let starting_in = Some(handle.generation());
            row.stage = Stage::Queued(Queued { starting_in, ..queued.clone() });
            match inner.store.put_execution(inner.epoch, row.clone(), QUEUED_MAX).await {
                Ok(()) => {}
                // It was cancelled, or its sandbox ended.
                Err(StoreError::Conflict { .. }) => return Ok(Tried::Done),
                Err(other) => return Err(other.into()),
            }
        } else if queued.starting_in != Some(handle.generation()) {
            let state = ExecState::Lost { cause: START_UNKNOWN.to_owned() };
            self.end_queued(row, state, true).await?;
            return Ok(Tried::Done);
        }
        inner.reached("execution.starting");
        self.start_marked(&handle, row, queued).await
    }

    /// That it is started in this instance is written down.
    async fn start_marked(&self, handle: &Handle, row: Execution, queued: &Queued) -> Result<Tried, EngineError> {
        let inner = &self.inner;
        match handle.clone().used_by(row.by.clone()).start(&row.id, &queued.spec).await {
            Ok(status) => {
                inner.reached("execution.started");
                let row = super::started(row, status, inner.clock.now_ms());
                inner.store.note_executions(inner.epoch, vec![row.clone()]).await?;
                inner.attend_execution(&row);
                inner.bell(&row.sandbox).notify_waiters();
                Ok(Tried::Done)
            }
            Err(EngineError::Provider(
                error @ (ProviderError::Exhausted { .. }
                | ProviderError::NotRunning { .. }
                | ProviderError::Absent
                | ProviderError::StaleGeneration { .. }
                | ProviderError::Expired),
            )) if queued.starting_in.is_none() => {
                // It was refused the first time that it was tried, so it may still be started elsewhere.
                let stage = Stage::Queued(Queued { starting_in: None, ..queued.clone() });
                let unmarked = Execution { version: row.version + 1, stage, ..row.clone() };
                match inner.store.put_execution(inner.epoch, unmarked, QUEUED_MAX).await {
                    Ok(()) => Ok(Tried::NoPlace),
                    // Its instance is gone by now, and it was concluded that nobody can tell.
                    Err(StoreError::Conflict { .. }) => {
                        let mut row = row;
                        row.end(ExecState::Failed { what: in_words(&error) }, inner.clock.now_ms(), false);
                        inner.store.note_executions(inner.epoch, vec![row]).await?;
                        Ok(Tried::Done)
                    }
                    Err(other) => Err(other.into()),
                }
            }
            Err(EngineError::Provider(
                error @ (ProviderError::Invalid { .. }
                | ProviderError::Unsupported { .. }
                | ProviderError::Conflict { .. }
                | ProviderError::Outdated { .. }),
            )) => {
                self.end_queued(row, ExecState::Failed { what: in_words(&error) }, false).await?;
                Ok(Tried::Done)
            }
            // Whether it started is not known; asked again, it is the same.
            Err(error) => {
                tracing::debug!(component = "execution", execution = %row.id, %error, "is started again in a moment");
                Ok(Tried::NoPlace)
            }
        }
    }
}

async fn serve(engine: Engine, sandbox: SandboxId, bell: Arc<Notify>) {
    let inner = &engine.inner;
    let moves = inner.bell(&sandbox);
    let mut ending = inner.ending();
    loop {
        if let Some(queue) = inner.executions.queues.lock().get_mut(&sandbox) {
            queue.again = false;
        }
        let mut changed = pin!(moves.notified());
        changed.as_mut().enable();
        let look_at_ms = match engine.serve_once(&sandbox).await {
            Ok(Some(at_ms)) => at_ms,
            Ok(None) => {
                let mut queues = inner.executions.queues.lock();
                if queues.get(&sandbox).is_some_and(|queue| queue.again) {
                    continue;
                }
                queues.remove(&sandbox);
                return;
            }
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "execution", %sandbox, %error, "its queue is looked at again in a moment");
                inner.clock.now_ms().saturating_add(STORE_PAUSE.as_millis() as u64)
            }
        };
        tokio::select! {
            biased;
            _ = ending.wait_for(|ending| *ending) => return,
            () = bell.notified() => {}
            () = changed => {}
            () = tokio::time::sleep_until(inner.clock.at(look_at_ms)) => {}
        }
    }
}

/// The one that has this id already, if it is what is asked for.
fn same(known: Execution, spec: &ExecSpec) -> Result<Execution, EngineError> {
    let is_same = known.argv == spec.told_argv()
        && known.cwd == spec.cwd
        && known.user == spec.user
        && known.limit_ms == spec.limit_ms
        && known.queued().is_none_or(|queued| *queued.spec == *spec);
    if is_same { Ok(known) } else { Err(EngineError::IdempotencyMismatch { made: known.id.to_string() }) }
}
