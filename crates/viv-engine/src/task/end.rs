//! The end of a task: its way out is cut, its tree killed, its sandbox ended, each seen, and only then it is over (K2).

use std::pin::pin;
use std::time::Duration;

use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::lifecycle::{Phase, Sandbox};
use viv_core::planted::{Planted, is_planted};
use viv_core::task::{EFFECT_GRACE_MS, Task, TaskEvent, TaskState};
use viv_provider::{InstanceRef, InstanceState, ProviderError};
use viv_store::TaskOutput;

use super::actor;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::handle::Handle;
use crate::read::Which;

/// How often an execution is tried to be ended before its sandbox is (X3).
const KILL_TRIES: usize = 3;

/// Between two tries.
const KILL_PAUSE: Duration = Duration::from_millis(200);

/// How long one try may take: the grace of a TERM, a KILL, and a look. The answer to a stop has 5 s in all (K2).
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// How long an agent may then take to show that it is there, and only slow: another try is for those alone.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// How long an end of a sandbox is waited for before it is asked for again.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);

/// How long until one that is lost is looked for again.
const LOST_PAUSE: Duration = Duration::from_secs(5);

/// How much of the end of an output is kept.
const OUTPUT_KEPT_BYTES: u64 = 256 << 10;

/// How long reading it may hold up the end.
const OUTPUT_WITHIN: Duration = Duration::from_secs(1);

/// How long cutting the way out may hold up the end: killing follows whatever came of it.
const CUT_WITHIN: Duration = Duration::from_secs(1);

/// How often it is tried to connect again what stays, before that ends: without its way out it is not what was kept.
const CONNECT_TRIES: usize = 3;

/// Where what a task started is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tree {
    /// Nowhere.
    Gone,
    /// It could not be ended by itself: its sandbox has to end.
    Held,
    /// Its sandbox is ending by itself.
    Leaving,
}

/// What came of killing one execution.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kill {
    /// It was seen to be gone, and so it ended; nothing is told of one that never began.
    Gone(Option<ExecState>),
    /// It was not.
    Held,
}

/// How executions ended that were not seen to, and that are not there any more.
fn gone_with_sandbox(task: &Task) -> Vec<(ExecutionId, ExecState)> {
    let began = task.executions.iter().filter(|one| one.started_at_ms.is_some());
    began.map(|one| (one.id.clone(), ExecState::Lost { cause: "its sandbox ended".to_owned() })).collect()
}

impl Engine {
    pub(super) async fn end_task(&self, task: Task) -> Result<(), EngineError> {
        let inner = &self.inner;
        let Some(ending) = task.ending.clone() else { return Ok(()) };
        let id = &task.id;
        // Its turn never came in this run: what is in its sandbox, and that itself, is another one's, or nobody's.
        if task.times.taken_up_at_ms.is_none() {
            self.apply_task(id, &TaskEvent::Confirmed).await?;
            inner.reached("task.ended");
            return Ok(());
        }
        // An effect that is in flight gets a moment to end by itself: killed, nobody would know what came of it.
        if task.in_flight().is_some() && task.times.killed_at_ms.is_none() {
            let until_ms = ending.at_ms.saturating_add(EFFECT_GRACE_MS);
            if inner.clock.now_ms() < until_ms {
                let bell = inner.tasks.bell(id);
                let mut rung = pin!(bell.notified());
                rung.as_mut().enable();
                if self.task(None, id).await?.in_flight().is_some() {
                    tokio::select! {
                        biased;
                        () = rung => {}
                        () = tokio::time::sleep_until(inner.clock.at(until_ms)) => {}
                    }
                }
                return Ok(());
            }
        }
        inner.reached("task.ending");
        let idle = ending.outcome == TaskState::TimedOut && !self.task_gate(Gate::AuthoritativeTimeout, &task);
        if !idle && !is_planted(Planted::TaskEndsUnkilled) {
            let tree = self.end_tree(&task).await?;
            self.end_place(&task, tree).await?;
            // Also what could not be ended by itself is gone now; said before, it is not said again.
            self.apply_task(id, &TaskEvent::Killed { ended: gone_with_sandbox(&task) }).await?;
        }
        self.apply_task(id, &TaskEvent::Confirmed).await?;
        inner.reached("task.ended");
        Ok(())
    }

    /// Everything that it started is gone after this, or its sandbox has to end for it.
    async fn end_tree(&self, task: &Task) -> Result<Tree, EngineError> {
        let inner = &self.inner;
        let (tree, handle) = self.look_at_tree(task).await?;
        let Some(handle) = handle else {
            if tree == Tree::Gone {
                let ended = gone_with_sandbox(task);
                self.apply_task(&task.id, &TaskEvent::Killed { ended }).await?;
            }
            return Ok(tree);
        };
        let by_itself =
            matches!(task.ending.as_ref().map(|end| end.outcome), Some(TaskState::Succeeded | TaskState::Failed));
        if !by_itself && task.times.cut_at_ms.is_none() {
            // Whatever comes of it: what has no process has no way out either.
            match tokio::time::timeout(CUT_WITHIN, handle.cut_network()).await {
                Ok(Ok(())) => drop(self.apply_task(&task.id, &TaskEvent::Cut).await?),
                Ok(Err(error)) => tracing::debug!(component = "task", task = %task.id, %error, "was not cut"),
                Err(_) => tracing::warn!(component = "task", task = %task.id, "was not cut in time"),
            }
            inner.reached("task.cut");
        }
        let here = || task.executions.iter().filter(|one| one.generation == handle.generation());
        let (mut tree, mut ended) = (Tree::Gone, Vec::new());
        for execution in here() {
            match self.kill(task, &handle, &execution.id).await? {
                Kill::Gone(state) => ended.extend(state.map(|state| (execution.id.clone(), state))),
                // The others are where this one is.
                Kill::Held => {
                    tree = Tree::Held;
                    break;
                }
            }
        }
        inner.reached("task.killing");
        if tree == Tree::Gone {
            self.apply_task(&task.id, &TaskEvent::Killed { ended }).await?;
        }
        for execution in here().filter(|_| tree == Tree::Gone) {
            let kept = tokio::time::timeout(OUTPUT_WITHIN, self.keep_output(task, &handle, &execution.id)).await;
            if let Ok(Err(error)) = kept {
                tracing::debug!(component = "task", task = %task.id, %error, "an output was not kept");
            }
        }
        // What was cut for one that stays is connected again.
        if task.keep_alive && tree == Tree::Gone && !by_itself && !self.connect_again(task, &handle).await {
            tree = Tree::Held;
        }
        Ok(tree)
    }

    /// Whether it has its way out again.
    async fn connect_again(&self, task: &Task, handle: &Handle) -> bool {
        for _ in 0..CONNECT_TRIES {
            match tokio::time::timeout(CUT_WITHIN, handle.connect_network()).await {
                Ok(Ok(())) => return true,
                other => tracing::warn!(component = "task", task = %task.id, ?other, "was not connected again"),
            }
            self.inner.pause(KILL_PAUSE).await;
        }
        false
    }

    /// Where its tree may be, and a handle if it has to be ended there.
    async fn look_at_tree(&self, task: &Task) -> Result<(Tree, Option<Handle>), EngineError> {
        let Some(generation) = task.generation else { return Ok((Tree::Gone, None)) };
        let Some(record) = self.inner.store.get(&task.sandbox).await? else { return Ok((Tree::Gone, None)) };
        if record.generation != generation {
            // A generation is replaced when its absence was seen (L15).
            return Ok((Tree::Gone, None));
        }
        Ok(match &record.phase {
            Phase::Ready | Phase::Verifying { .. } => {
                let which = Which::Id(task.sandbox.clone());
                match self.look_into(&task.project, &which, Some(generation)).await {
                    Ok(handle) => (Tree::Held, Some(handle.used_by(actor(&task.id)))),
                    Err(EngineError::Store(error)) => return Err(EngineError::Store(error)),
                    // It has turned since.
                    Err(_) => (Tree::Leaving, None),
                }
            }
            // What stands still is not let go on in order to be ended.
            Phase::Frozen { .. } | Phase::Lost | Phase::Failed { .. } => (Tree::Held, None),
            // Also what is to be replaced, until it is: then it has another generation.
            Phase::Hibernating { .. }
            | Phase::Stopping { .. }
            | Phase::Provisioning { .. }
            | Phase::Resuming { .. } => (Tree::Leaving, None),
            Phase::Hibernated { .. } | Phase::Stopped => (Tree::Gone, None),
        })
    }

    /// Ends one execution with its tree.
    async fn kill(&self, task: &Task, handle: &Handle, id: &ExecutionId) -> Result<Kill, EngineError> {
        let mut never_began = false;
        for _ in 0..KILL_TRIES {
            let (error, is_silent) = match tokio::time::timeout(KILL_WITHIN, handle.cancel(id)).await {
                Ok(Ok(status)) => return Ok(Kill::Gone(Some(status.state).filter(|_| !never_began))),
                Ok(Err(EngineError::Provider(ProviderError::NotFound { .. }))) => {
                    // It was never started, but a start may be on its way: its id is used up, so that it comes too late.
                    let nothing = ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() };
                    match handle.execute_unattended(id, &nothing).await {
                        Ok(_) => {
                            never_began = true;
                            continue;
                        }
                        Err(EngineError::Provider(ProviderError::Conflict { .. })) => continue,
                        Err(error) => (error.to_string(), false),
                    }
                }
                Ok(Err(error @ (EngineError::Store(_) | EngineError::ShuttingDown))) => return Err(error),
                Ok(Err(error)) => (error.to_string(), false),
                Err(_) => (format!("no answer within {KILL_WITHIN:?}"), true),
            };
            tracing::warn!(component = "task", task = %task.id, execution = %id, error, "could not be ended yet");
            // Somebody else may have ended all of it meanwhile.
            if let (Tree::Gone, None) = self.look_at_tree(task).await? {
                return Ok(Kill::Gone(Some(ExecState::Lost { cause: "its sandbox ended".to_owned() })));
            }
            if is_silent && !self.answers(handle).await {
                return Ok(Kill::Held);
            }
            self.inner.pause(KILL_PAUSE).await;
        }
        Ok(Kill::Held)
    }

    /// Whether its agent says anything at all; the store, which may be what is slow, is not asked.
    async fn answers(&self, handle: &Handle) -> bool {
        let inner = &self.inner;
        let instance = InstanceRef { sandbox: handle.sandbox().clone(), generation: handle.generation() };
        inner.call_agent(handle.sandbox(), ANSWERS_WITHIN, inner.provider.executions(&instance)).await.is_ok()
    }

    /// Its sandbox ends, unless it stays and nothing of the task is left in it.
    async fn end_place(&self, task: &Task, tree: Tree) -> Result<(), EngineError> {
        let inner = &self.inner;
        if task.keep_alive && tree == Tree::Gone {
            return Ok(());
        }
        loop {
            let Some(record) = inner.store.get(&task.sandbox).await? else { return Ok(()) };
            let is_ours = task.generation.is_none_or(|generation| record.generation == generation);
            // Somebody wants it to run again, and has it for herself.
            if !is_ours {
                return Ok(());
            }
            match &record.phase {
                Phase::Hibernated { .. } | Phase::Stopped => return Ok(()),
                Phase::Hibernating { .. } | Phase::Stopping { .. } => {}
                Phase::Provisioning { .. } | Phase::Resuming { .. } if task.keep_alive => {}
                Phase::Provisioning { .. }
                | Phase::Verifying { .. }
                | Phase::Ready
                | Phase::Frozen { .. }
                | Phase::Resuming { .. }
                | Phase::Lost
                | Phase::Failed { .. } => match self.stop(&task.sandbox, actor(&task.id)).await {
                    Ok(_) | Err(EngineError::Gone { .. } | EngineError::NotFound { .. }) => {}
                    Err(other) => return Err(other),
                },
            }
            inner.reached("task.stopping_sandbox");
            let settled = self.wait_settled(&task.sandbox, SETTLED_WITHIN).await?.sandbox;
            // None of these goes on by itself, and none of them shows that nothing runs: also a save that failed has
            // ended all processes only if it was heard.
            if matches!(
                settled.phase,
                Phase::Lost | Phase::Failed { .. } | Phase::Hibernating { save_failed: true, .. }
            ) {
                if self.runs_nothing(task, &settled).await {
                    return Ok(());
                }
                inner.pause(LOST_PAUSE).await;
            }
            if inner.is_ending() {
                return Err(EngineError::ShuttingDown);
            }
        }
    }

    /// Whether its last instance was seen to have ended, or not to be there, or to run nothing of the task (K2).
    async fn runs_nothing(&self, task: &Task, record: &Sandbox) -> bool {
        let inner = &self.inner;
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let budget = inner.config.budgets.probe;
        let seen = inner.call(&record.id, budget, inner.provider.observe(&instance)).await;
        if seen.is_ok_and(|seen| matches!(seen.state, InstanceState::Ended(_) | InstanceState::Absent)) {
            return true;
        }
        let all = inner.call_agent(&record.id, budget, inner.provider.executions(&instance)).await;
        let ours = |id: &ExecutionId| task.executions.iter().any(|one| one.id == *id);
        all.is_ok_and(|all| all.iter().filter(|one| ours(&one.id)).all(|one| one.state.is_final()))
    }

    /// Keeps the end of what it wrote, for when its sandbox is gone.
    async fn keep_output(&self, task: &Task, handle: &Handle, id: &ExecutionId) -> Result<(), EngineError> {
        let status = handle.execution(id).await?;
        let from = status.output_bytes.saturating_sub(OUTPUT_KEPT_BYTES);
        let mut output = handle.attach(id, from, false).await?;
        let (mut offset, mut data) = (from, Vec::new());
        while let Some(event) = output.next().await.map_err(EngineError::Provider)? {
            match event {
                OutputEvent::Chunk { data: more, .. } => data.extend(more),
                OutputEvent::Cut { to, .. } => (offset, data) = (to, Vec::new()),
                OutputEvent::End(_) => break,
            }
        }
        let output = TaskOutput { task: task.id.clone(), execution: id.clone(), offset, data };
        Ok(self.inner.store.keep_task_output(self.inner.epoch, output).await?)
    }
}
