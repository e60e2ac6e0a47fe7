//! Stop (L8).

use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Event, Phase};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to be stopped, and answers at once: see [`Engine::wait_settled`].
    pub async fn stop(&self, sandbox: &SandboxId, by: Actor) -> Result<View, EngineError> {
        let record = self.inner.apply(sandbox, &Event::Stop { by }).await?.sandbox();
        self.inner.reached("stop.committed");
        // What is lost may live all the same: it is looked for, and stopped when it is found.
        if record.phase == Phase::Lost {
            self.inner.signal_health(&record.id);
        }
        Ok(self.inner.view(record))
    }
}
