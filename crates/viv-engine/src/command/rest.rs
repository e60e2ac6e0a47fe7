//! Freeze, thaw, hibernate; and what becomes of a save that failed (L9, L10, L13).

use viv_core::lifecycle::{Actor, Event};
use viv_provider::{Capability, ProviderError};

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::read::View;

impl Engine {
    /// Records that it is to stand still, and answers at once: see [`Engine::wait_settled`].
    pub async fn freeze(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        if !self.inner.freezes {
            let declared = self.inner.provider.capabilities();
            let why = declared.missing.get(&Capability::Freeze).cloned().unwrap_or_default();
            return Err(EngineError::Provider(ProviderError::Unsupported { capability: Capability::Freeze, why }));
        }
        self.rest(&aim.into(), &Event::Freeze { by }).await
    }

    /// Records that what stands still is to go on, and answers at once: see [`Engine::wait_ready`].
    pub async fn thaw(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        let aim = aim.into();
        let view = self.rest(&aim, &Event::Thaw { by }).await?;
        self.inner.active(aim.sandbox()).await?;
        Ok(view)
    }

    /// Records that it is to be saved, and answers at once: see [`Engine::wait_settled`]. Whoever may wake it still does.
    pub async fn hibernate(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        self.rest(&aim.into(), &Event::Hibernate { by }).await
    }

    /// A save that failed is tried again now: see [`Engine::wait_settled`].
    pub async fn retry_save(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        self.rest(&aim.into(), &Event::RetrySave { by }).await
    }

    /// What could not be saved is given up, for the state that was saved before it, if there is one.
    pub async fn discard(&self, aim: impl Into<Aim>, by: Actor) -> Result<View, EngineError> {
        self.rest(&aim.into(), &Event::Discard { by }).await
    }

    async fn rest(&self, aim: &Aim, event: &Event) -> Result<View, EngineError> {
        let record = self.inner.ask(aim, event).await?.sandbox();
        self.inner.reached("rest.committed");
        Ok(self.inner.view(record))
    }
}
