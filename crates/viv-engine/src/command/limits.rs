//! Limits of what runs, changed live (L18).

use viv_core::lifecycle::Actor;
use viv_provider::ResourceLimits;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::Handle;

impl Engine {
    /// Changes limits of what a handle holds, and of its later instances; answers with all that are in force.
    pub async fn set_limits(
        &self,
        handle: &Handle,
        change: &ResourceLimits,
        by: &Actor,
    ) -> Result<ResourceLimits, EngineError> {
        let inner = &self.inner;
        let (sandbox, mutation) = (handle.sandbox(), handle.mutation().await?);
        let budget = inner.config.budgets.call;
        let set = inner.call(sandbox, budget, inner.provider.set_limits(&mutation, sandbox, change)).await;
        let in_force = set.map_err(EngineError::Provider)?;
        let now_ms = inner.clock.now_ms();
        inner
            .amend(sandbox, |record| {
                record.spec.limits = change.or(&record.spec.limits);
                let data = serde_json::json!({ "limits": record.spec.limits });
                Some(crate::journal::noted(record, "sandbox.limited", by.clone(), now_ms, data))
            })
            .await?;
        Ok(in_force)
    }
}
