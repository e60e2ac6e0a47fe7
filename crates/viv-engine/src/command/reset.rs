//! Reset (L12): without its instance and without what was saved of it; name, spec and policy stay.

use viv_core::lifecycle::{Actor, Event};

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to begin anew, and answers at once: see [`Engine::wait_ready`].
    ///
    /// Snapshots of it that others begin with stay for as long as they do. What else hangs on a sandbox and is to be
    /// cleared with it (schedules, secrets) is removed where its snapshots are: [`crate::snapshot`], `remove_all_of`.
    pub async fn reset(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        let inner = &self.inner;
        let _entering = inner.begin_entry()?;
        let record = inner.ask(&aim.into(), &Event::Reset { by }).await?.sandbox();
        inner.reached("reset.committed");
        inner.active(&record.id).await?;
        Ok(inner.view(record))
    }
}
