//! A step: started or found, followed, and held to its limits.

use std::pin::pin;
use std::time::Duration;

use viv_core::exec::{ExecState, OutputEvent};
use viv_core::lifecycle::Phase;
use viv_core::task::{Task, TaskCause, TaskEvent, TaskWork};
use viv_core::{ExecutionId, Generation};
use viv_provider::ProviderError;

use super::prepare::is_passing;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::handle::Handle;
use crate::read::Which;
use crate::standing::Standing;

/// How long to wait before asking again who did not answer.
const PAUSE: Duration = Duration::from_millis(250);

/// Why a step is not followed any more.
enum Followed {
    /// It ended.
    Ended(ExecState),
    /// The row says something else now.
    Turned,
    /// The stream broke: it is looked at again.
    Broken,
}

impl Engine {
    pub(super) async fn run_task(&self, task: Task) -> Result<(), EngineError> {
        let inner = &self.inner;
        let Some(generation) = task.generation else {
            let what = "it was never in a sandbox".to_owned();
            return self.apply_task(&task.id, &TaskEvent::Gone { what }).await.map(drop);
        };
        if let Standing::Over(what) = self.inner.standing(&task.sandbox, generation).await? {
            return self.apply_task(&task.id, &TaskEvent::Gone { what }).await.map(drop);
        }
        let step = task.step;
        let task = self.apply_task(&task.id, &TaskEvent::Starting { step: Some(step) }).await?;
        if task.work() != TaskWork::Run {
            return Ok(());
        }
        inner.reached("task.starting");
        let id = task.execution_of(Some(step));
        let worked = tokio::select! {
            biased;
            ended = self.until_ending(&task.id) => return ended,
            worked = self.start_step(&task, generation, &id) => worked,
        };
        let handle = match worked {
            Ok(Ok(handle)) => handle,
            Ok(Err(what)) => {
                let ended = ExecState::Failed { what };
                return self.apply_task(&task.id, &TaskEvent::StepEnded { step, ended }).await.map(drop);
            }
            // Nothing is concluded from silence (T7): only from what the record says, which is looked at again.
            Err(error) => {
                tracing::debug!(component = "task", task = %task.id, %error, "asks again");
                inner.pause(PAUSE).await;
                return if matches!(error, EngineError::Store(_) | EngineError::ShuttingDown) {
                    Err(error)
                } else {
                    Ok(())
                };
            }
        };
        let task = self.apply_task(&task.id, &TaskEvent::Started { execution: id.clone() }).await?;
        inner.reached("task.started");
        match self.follow_step(&task, &handle, &id).await {
            Ok(Followed::Ended(ended)) => {
                inner.reached("task.step_ended");
                // What it left in the background goes before anything follows from its end.
                if let Err(error) = handle.cancel(&id).await
                    && is_passing(&error)
                {
                    inner.pause(PAUSE).await;
                    return Ok(());
                }
                self.apply_task(&task.id, &TaskEvent::StepEnded { step, ended }).await.map(drop)
            }
            Ok(Followed::Turned) => Ok(()),
            Ok(Followed::Broken) => {
                inner.pause(PAUSE).await;
                Ok(())
            }
            Err(EngineError::Provider(error)) => {
                tracing::debug!(component = "task", task = %task.id, %error, "looks again");
                inner.pause(PAUSE).await;
                Ok(())
            }
            Err(other) => Err(other),
        }
    }

    /// Starts a step, which was perhaps started before. Why it cannot be, if so.
    async fn start_step(
        &self,
        task: &Task,
        generation: Generation,
        id: &ExecutionId,
    ) -> Result<Result<Handle, String>, EngineError> {
        let inner = &self.inner;
        let handle = self.work_in(&task.project, &Which::Id(task.sandbox.clone()), Some(generation)).await?;
        let Some(spec) = task.command(task.step) else { return Ok(Err("there is no such step".to_owned())) };
        // A task's execution is activity for as long as it runs (L6): it is one of the foreground.
        inner.active(&task.sandbox).await?;
        match handle.execute_unattended(id, &spec).await {
            // The id is of this step alone: with another command it was started, and its environment changed since.
            Ok(_) | Err(EngineError::Provider(ProviderError::Conflict { .. })) => Ok(Ok(handle)),
            Err(EngineError::Provider(
                error @ (ProviderError::Invalid { .. }
                | ProviderError::Unsupported { .. }
                | ProviderError::Exhausted { .. }
                | ProviderError::Outdated { .. }),
            )) => Ok(Err(error.to_string())),
            Err(other) => Err(other),
        }
    }

    /// Follows a step until it ends, or the row says something else, which includes that it was silent for too long.
    async fn follow_step(&self, task: &Task, handle: &Handle, id: &ExecutionId) -> Result<Followed, EngineError> {
        let inner = &self.inner;
        let status = handle.execution(id).await?;
        if status.state.is_final() {
            if status.output_bytes > 0 {
                self.apply_task(&task.id, &TaskEvent::Output).await?;
            }
            return Ok(Followed::Ended(status.state));
        }
        // Its last byte tells when it was written, whoever was there then.
        let mut seen = status.output_bytes.saturating_sub(1);
        let mut output = handle.attach(id, seen, true).await?;
        let started_at_ms = task.executions.iter().find(|known| known.id == *id).and_then(|known| known.started_at_ms);
        let mut heard_at_ms = started_at_ms.unwrap_or_else(|| inner.clock.now_ms());
        let mut wrote = task.times.output_at_ms.is_some();
        let mut turned = pin!(self.until_ending(&task.id));
        loop {
            let silent_at_ms = self.silent_at_ms(task, heard_at_ms);
            let silence = async {
                match silent_at_ms {
                    Some(at_ms) => tokio::time::sleep_until(inner.clock.at(at_ms)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                ended = &mut turned => return ended.map(|()| Followed::Turned),
                event = output.next() => match event.map_err(EngineError::Provider)? {
                    Some(OutputEvent::Chunk { offset, at_ms, data, .. }) => {
                        seen = offset + data.len() as u64;
                        heard_at_ms = heard_at_ms.max(at_ms.min(inner.clock.now_ms()));
                        if !wrote {
                            wrote = true;
                            self.apply_task(&task.id, &TaskEvent::Output).await?;
                        }
                    }
                    Some(OutputEvent::Cut { to, .. }) => seen = to,
                    Some(OutputEvent::End(status)) if status.state.is_final() => {
                        return Ok(Followed::Ended(status.state));
                    }
                    Some(OutputEvent::End(_)) | None => return Ok(Followed::Broken),
                },
                () = silence => {
                    let Some(now_at_ms) = self.heard_since(task, handle, id, (seen, heard_at_ms)).await? else {
                        return Ok(Followed::Broken);
                    };
                    heard_at_ms = heard_at_ms.max(now_at_ms);
                }
            }
        }
    }

    /// When it has been silent for too long, if nothing is heard until then.
    fn silent_at_ms(&self, task: &Task, heard_at_ms: u64) -> Option<u64> {
        let window_ms = task.limits.inactivity_ms.filter(|_| self.task_gate(Gate::InactivityLimit, task))?;
        Some(heard_at_ms.saturating_add(window_ms))
    }

    /// Nothing was heard for too long: whether that is so, by everything that is known, and then it ends as inactive.
    /// Answers from when on it counts; nothing, when the output has to be read again.
    async fn heard_since(
        &self,
        task: &Task,
        handle: &Handle,
        id: &ExecutionId,
        (seen, heard_at_ms): (u64, u64),
    ) -> Result<Option<u64>, EngineError> {
        let inner = &self.inner;
        let record = inner.load(&task.sandbox).await?;
        let now_ms = inner.clock.now_ms();
        // What stands still cannot speak; its clock stands still too, and begins anew when it thaws (L13).
        if record.phase != Phase::Ready {
            inner.pause(PAUSE).await;
            return Ok(Some(inner.clock.now_ms().saturating_sub(1)));
        }
        let current = self.task(None, &task.id).await?;
        let heard_at_ms = heard_at_ms.max(record.phase_since_ms).max(current.times.reported_at_ms.unwrap_or(0));
        if self.silent_at_ms(task, heard_at_ms).is_none_or(|at_ms| at_ms > now_ms) {
            return Ok(Some(heard_at_ms));
        }
        // A stream that hangs is not a command that is silent.
        let status = handle.execution(id).await?;
        if status.state.is_final() || status.output_bytes > seen.max(1) {
            return Ok(None);
        }
        let window_ms = task.limits.inactivity_ms.unwrap_or(0);
        let message = format!("nothing was heard of it for {window_ms} ms");
        self.apply_task(&task.id, &TaskEvent::LimitPassed { cause: TaskCause::Inactivity, message }).await?;
        Ok(Some(now_ms))
    }
}
