//! Rollback (L11): under the same id, from a snapshot, as a new generation (T5).

use viv_core::lifecycle::Event;

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;
use crate::snapshot::RollbackRequest;

impl Engine {
    /// Records that it is to go on from a snapshot of its project, and answers at once: see [`Engine::wait_ready`].
    pub async fn rollback(&self, aim: impl Into<Aim>, request: RollbackRequest) -> Result<View, EngineError> {
        let (inner, aim) = (&self.inner, aim.into());
        let _entering = inner.begin_entry()?;
        let RollbackRequest { snapshot, discard, by } = request;
        let project = inner.load(aim.sandbox()).await?.project;
        // Looked for before anything is ended for it.
        inner.good_snapshot(&project, &snapshot).await?;
        let record = inner.ask(&aim, &Event::Rollback { snapshot, discard, by }).await?.sandbox();
        inner.reached("rollback.committed");
        inner.active(&record.id).await?;
        Ok(inner.view(record))
    }
}
