//! Stop (L8).

use viv_core::lifecycle::{Actor, Desired, Event, Phase, Sandbox};
use viv_core::planted::{Planted, is_planted};

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to be stopped, and answers when it was looked for, if it was lost: see
    /// [`Engine::wait_settled`].
    pub async fn stop(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        let aim = aim.into();
        let sandbox = aim.sandbox();
        if is_planted(Planted::StopUnwritten) {
            let record = self.inner.load(sandbox).await?;
            let version = record.version + 1;
            return Ok(self.inner.view(Sandbox { desired: Desired::Hibernated, version, ..record }));
        }
        let record = self.inner.ask(&aim, &Event::Stop { by }).await?.sandbox();
        self.inner.knowledge.stopped(sandbox);
        self.inner.reached("stop.committed");
        // What is lost may live all the same: it is looked for before this is answered, and stopped when it is found. Who
        // waits for it to settle would otherwise be told that it has.
        if record.phase == Phase::Lost {
            self.inner.look_for_lost(sandbox).await?;
            return Ok(self.inner.view(self.inner.load(sandbox).await?));
        }
        Ok(self.inner.view(record))
    }
}
