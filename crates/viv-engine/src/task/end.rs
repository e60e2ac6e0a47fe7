//! The end of a task: its way out is cut, its tree killed, its sandbox ended, each seen, and only then it is over (K2).

use std::pin::pin;
use std::time::Duration;

use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, OutputEvent};
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

/// How long one try may take: the grace of a TERM, a KILL, and a look.
const KILL_WITHIN: Duration = Duration::from_secs(3);

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

impl Engine {
    pub(super) async fn end_task(&self, task: Task) -> Result<(), EngineError> {
        let inner = &self.inner;
        let Some(ending) = task.ending.clone() else { return Ok(()) };
        let id = &task.id;
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
                self.apply_task(&task.id, &TaskEvent::Killed).await?;
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
        let mut tree = Tree::Gone;
        for execution in &task.executions {
            if execution.generation == handle.generation() && !self.kill(task, &handle, &execution.id).await? {
                tree = Tree::Held;
            }
        }
        inner.reached("task.killing");
        if tree == Tree::Gone {
            self.apply_task(&task.id, &TaskEvent::Killed).await?;
        }
        for execution in task.executions.iter().filter(|one| one.generation == handle.generation()) {
            let kept = tokio::time::timeout(OUTPUT_WITHIN, self.keep_output(task, &handle, &execution.id)).await;
            if let Ok(Err(error)) = kept {
                tracing::debug!(component = "task", task = %task.id, %error, "an output was not kept");
            }
        }
        // What was cut for one that stays is connected again.
        if task.keep_alive && tree == Tree::Gone && !by_itself {
            match tokio::time::timeout(CUT_WITHIN, handle.connect_network()).await {
                Ok(Ok(())) => {}
                other => tracing::debug!(component = "task", task = %task.id, ?other, "was not connected again"),
            }
        }
        Ok(tree)
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

    /// Ends one execution with its tree. Whether it was seen to be gone.
    async fn kill(&self, task: &Task, handle: &Handle, id: &ExecutionId) -> Result<bool, EngineError> {
        for _ in 0..KILL_TRIES {
            let error = match tokio::time::timeout(KILL_WITHIN, handle.cancel(id)).await {
                Ok(Ok(_)) => return Ok(true),
                Ok(Err(EngineError::Provider(ProviderError::NotFound { .. }))) => {
                    // It was never started, but a start may be on its way: its id is used up, so that it comes too late.
                    let nothing = ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() };
                    match handle.execute_unattended(id, &nothing).await {
                        Ok(_) | Err(EngineError::Provider(ProviderError::Conflict { .. })) => continue,
                        Err(error) => error.to_string(),
                    }
                }
                Ok(Err(error @ (EngineError::Store(_) | EngineError::ShuttingDown))) => return Err(error),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no answer within {KILL_WITHIN:?}"),
            };
            tracing::warn!(component = "task", task = %task.id, execution = %id, error, "could not be ended yet");
            // Somebody else may have ended all of it meanwhile.
            if let (Tree::Gone, None) = self.look_at_tree(task).await? {
                return Ok(true);
            }
            self.inner.pause(KILL_PAUSE).await;
        }
        Ok(false)
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
