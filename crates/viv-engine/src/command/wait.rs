//! Waiting: apart from asking, so that who asked is not lost with who waits.

use std::pin::pin;
use std::time::Duration;

use viv_core::SandboxId;
use viv_core::lifecycle::{Cause, Phase, Sandbox};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

/// What is waited for.
enum Waited {
    /// Not yet.
    NotYet,
    /// It is so.
    Yes,
    /// It will not be.
    Never(EngineError),
}

impl Engine {
    /// Waits until it is ready. After this long the answer is how it is then; what came to nothing is an error.
    pub async fn wait_ready(&self, sandbox: &SandboxId, how_long: Duration) -> Result<View, EngineError> {
        self.wait(sandbox, how_long, |record| match &record.phase {
            Phase::Ready => Waited::Yes,
            Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. } => Waited::NotYet,
            // An entry is looked at again when the transition ends.
            Phase::Hibernating { .. } | Phase::Hibernated { .. } if record.entry.is_some() => Waited::NotYet,
            Phase::Frozen { .. } | Phase::Hibernating { .. } | Phase::Hibernated { .. } => {
                Waited::Never(EngineError::NotRunning {
                    sandbox: record.id.clone(),
                    phase: record.phase.name(),
                    cause: Box::new(record.cause.clone()),
                })
            }
            Phase::Lost if record.cause.cause == Cause::AbsenceUnproven => {
                Waited::Never(EngineError::AbsenceUnproven { sandbox: record.id.clone(), what: why(record) })
            }
            Phase::Lost | Phase::Failed { .. } => Waited::Never(EngineError::NotReady {
                sandbox: record.id.clone(),
                phase: record.phase.name(),
                what: why(record),
            }),
            Phase::Stopping { .. } | Phase::Stopped => {
                Waited::Never(EngineError::Gone { sandbox: record.id.clone(), cause: Box::new(record.cause.clone()) })
            }
        })
        .await
    }

    /// Waits until nothing is outstanding, or a save has failed, which goes no further by itself. After this long the
    /// answer is how it is then.
    pub async fn wait_settled(&self, sandbox: &SandboxId, how_long: Duration) -> Result<View, EngineError> {
        self.wait(sandbox, how_long, |record| {
            let stuck = matches!(record.phase, Phase::Hibernating { save_failed: true, .. });
            let settled = stuck || (record.phase.work().is_none() && record.due_at_ms().is_none());
            if settled { Waited::Yes } else { Waited::NotYet }
        })
        .await
    }

    async fn wait(
        &self,
        sandbox: &SandboxId,
        how_long: Duration,
        is_so: impl Fn(&Sandbox) -> Waited,
    ) -> Result<View, EngineError> {
        let inner = &self.inner;
        let until = tokio::time::Instant::now() + how_long;
        let bell = inner.bell(sandbox);
        let mut ending = inner.ending();
        loop {
            // Listening begins before the look, so a change between look and wait is heard.
            let mut rung = pin!(bell.notified());
            rung.as_mut().enable();
            let record = inner.load(sandbox).await?;
            match is_so(&record) {
                Waited::Yes => return Ok(inner.view(record)),
                Waited::Never(error) => return Err(error),
                Waited::NotYet => {}
            }
            tokio::select! {
                biased;
                () = rung => {}
                () = tokio::time::sleep_until(until) => return Ok(inner.view(record)),
                _ = ending.wait_for(|ending| *ending) => return Err(EngineError::ShuttingDown),
            }
        }
    }
}

fn why(record: &Sandbox) -> String {
    let code = record.cause.cause.code();
    record.cause.message.as_ref().map_or_else(|| code.to_owned(), |message| format!("{code}: {message}"))
}
