//! Delete: legal from every phase, and after it nothing is left (L20).

use viv_core::lifecycle::{Actor, Event};

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to be gone for ever, and answers at once: see [`Engine::wait_settled`].
    pub async fn delete(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        let record = self.inner.ask(&aim.into(), &Event::Delete { by }).await?.sandbox();
        self.inner.reached("delete.committed");
        if record.is_over() {
            // There is nothing left to clear but what was saved of it; what is in use is looked at again later.
            self.inner.reconcilers.tidy_snapshots_of(&record.id);
        }
        Ok(self.inner.view(record))
    }
}
