//! One wait per command that nobody else listens to, for its end to be told: detached ones, those whose client left, and
//! those that a daemon before this one left open, or that run in what came back. A stream that says nothing else, and costs
//! nothing while the command lives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use viv_core::exec::{ExecStatus, OutputEvent};
use viv_core::execution::{Execution, Place};
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{InstanceRef, ProviderError};

use crate::engine::Inner;

/// How long to wait before listening again to who hung up; it doubles up to the second one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Past the end of any output: what is heard then is the end alone.
const PAST_ALL_OUTPUT: u64 = u64::MAX;

/// Most that are listened to, since each is a connection; the ends of others are learnt when they are listed, or with
/// their instance.
const FOLLOWED_MAX: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Follow {
    tasks: Mutex<BTreeMap<(SandboxId, ExecutionId), AbortHandle>>,
}

impl Follow {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(SandboxId, ExecutionId), AbortHandle>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self) {
        for task in std::mem::take(&mut *self.lock()).into_values() {
            task.abort();
        }
    }
}

impl Inner {
    /// Listens for the end of a command that is listed as running, unless somebody does already.
    pub(super) fn follow_execution(self: &Arc<Self>, row: &Execution) {
        if !row.is_open() || row.status().is_none() {
            return;
        }
        let of = Place { project: row.project.clone(), sandbox: row.sandbox.clone(), generation: row.generation };
        self.follow_end(of, row.id.clone());
    }

    /// The same for one that may have been started there, and that nobody waits for any more.
    pub(crate) fn follow_end(self: &Arc<Self>, of: Place, execution: ExecutionId) {
        if self.is_ending() {
            return;
        }
        let place = (of.sandbox.clone(), execution.clone());
        let mut tasks = self.executions.follow.lock();
        if tasks.get(&place).is_some_and(|task| !task.is_finished()) {
            return;
        }
        if tasks.len() >= FOLLOWED_MAX {
            tasks.retain(|_, task| !task.is_finished());
        }
        if tasks.len() < FOLLOWED_MAX {
            let task = tokio::spawn(follow(self.clone(), of, execution)).abort_handle();
            tasks.insert(place, task);
        }
    }
}

async fn follow(inner: Arc<Inner>, place: Place, execution: ExecutionId) {
    let instance = InstanceRef { sandbox: place.sandbox.clone(), generation: place.generation };
    let mut pause = PAUSE.0;
    while !inner.is_ending() {
        match inner.end_of(&instance, &execution).await {
            Ok(Some(status)) => {
                inner.saw(&status).await;
                inner.note_statuses(&place, &[status]);
                break;
            }
            // Whatever became of it is told by who looks at its instance.
            Err(
                ProviderError::Absent
                | ProviderError::StaleGeneration { .. }
                | ProviderError::NotRunning { .. }
                | ProviderError::NotFound { .. },
            ) => break,
            // Nothing is known, and nothing is concluded (T7).
            Ok(None) | Err(_) => {
                inner.pause(pause).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        }
    }
    inner.executions.follow.lock().remove(&(place.sandbox, execution));
}

impl Inner {
    /// Waits for an execution's end. `None` when whoever told hung up before.
    pub(crate) async fn end_of(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
    ) -> Result<Option<ExecStatus>, ProviderError> {
        // The wait is as long as it takes; that somebody begins to tell is not. An agent that hung when it was asked, and
        // was mended since, would not be asked again otherwise (J7).
        let told = self.provider.attach(instance, execution, PAST_ALL_OUTPUT, true);
        let mut output = self.call_agent(&instance.sandbox, self.config.budgets.call, told).await?;
        while let Some(event) = output.next().await? {
            match event {
                OutputEvent::End(status) if status.state.is_final() => return Ok(Some(status)),
                OutputEvent::End(_) | OutputEvent::Chunk { .. } | OutputEvent::Cut { .. } => {}
            }
        }
        Ok(None)
    }
}
