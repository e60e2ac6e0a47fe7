//! How it stands with the instance that something was started in, for those that outlive it: runs of schedules, tasks.

use viv_core::lifecycle::Phase;
use viv_core::{Generation, SandboxId};

use crate::engine::Inner;
use crate::error::EngineError;

/// How it stands with it.
pub(crate) enum Standing {
    /// It is there.
    There,
    /// It is gone, or another one is there.
    Over(String),
}

impl Inner {
    /// How it stands with this generation.
    pub(crate) async fn standing(&self, sandbox: &SandboxId, generation: Generation) -> Result<Standing, EngineError> {
        let record = match self.load(sandbox).await {
            Err(EngineError::NotFound { .. }) => return Ok(Standing::Over("the sandbox is gone".to_owned())),
            found => found?,
        };
        if record.generation != generation {
            let what = format!("generation {generation} was replaced: {}", record.cause.cause.code());
            return Ok(Standing::Over(what));
        }
        Ok(match &record.phase {
            Phase::Ready | Phase::Verifying { .. } | Phase::Frozen { .. } => Standing::There,
            Phase::Provisioning { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => {
                let (phase, cause) = (record.phase.name().as_str(), record.cause.cause.code());
                Standing::Over(format!("the sandbox is {phase}: {cause}"))
            }
        })
    }
}
