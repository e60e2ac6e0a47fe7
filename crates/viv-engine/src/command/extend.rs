//! Extend: a compare-and-set at the arbiter of the deadline, never on a stored value (T6).

use viv_core::lifecycle::Actor;
use viv_provider::{Deadline, DeadlineChange};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::Handle;

impl Engine {
    /// Moves the hard deadline of what a handle holds.
    pub async fn extend(&self, handle: &Handle, change: DeadlineChange, by: &Actor) -> Result<Deadline, EngineError> {
        let inner = &self.inner;
        let (sandbox, mutation) = (handle.sandbox(), handle.mutation().await?);
        let budget = inner.config.budgets.call;
        let moved = inner.call(sandbox, budget, inner.provider.extend(&mutation, sandbox, change)).await;
        let deadline = moved.map_err(EngineError::Provider)?;
        let (now_ms, generation) = (inner.clock.now_ms(), handle.generation());
        let expires_at_ms = now_ms.saturating_add(deadline.remaining_ms);
        inner
            .amend(sandbox, |record| {
                if record.generation != generation || record.expires_at_ms.is_none() {
                    return None;
                }
                record.expires_at_ms = Some(expires_at_ms);
                let data = serde_json::json!({ "expires_at_ms": expires_at_ms, "revision": deadline.revision });
                Some(crate::journal::noted(record, "sandbox.extended", by.clone(), now_ms, data))
            })
            .await?;
        Ok(deadline)
    }
}
