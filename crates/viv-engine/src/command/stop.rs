//! Stop (L8).

use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Event, Phase};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to be stopped, and answers when it was looked for, if it was lost: see
    /// [`Engine::wait_settled`].
    pub async fn stop(&self, sandbox: &SandboxId, by: Actor) -> Result<View, EngineError> {
        let record = self.inner.apply(sandbox, &Event::Stop { by }).await?.sandbox();
        self.inner.reached("stop.committed");
        // What is lost may live all the same: it is looked for before this is answered, and stopped when it is found. Who
        // waits for it to settle would otherwise be told that it has.
        if record.phase == Phase::Lost {
            let looked_for = self.inner.check_health(&record.id);
            // Without an answer, who looks for what is lost finds it later.
            let _ = tokio::time::timeout(self.inner.config.budgets.call, looked_for).await;
            return Ok(self.inner.view(self.inner.load(sandbox).await?));
        }
        Ok(self.inner.view(record))
    }
}
