//! Limits of what runs, changed live (L18).

use viv_core::lifecycle::Actor;
use viv_provider::ResourceLimits;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::Handle;

impl Engine {
    /// Changes limits of what a handle holds, and of its later instances; answers with all that are in force.
    ///
    /// They are recorded first, within the quota, so that two who want the same room do not both get it. What the
    /// provider refuses is taken back.
    pub async fn set_limits(
        &self,
        handle: &Handle,
        change: &ResourceLimits,
        by: &Actor,
    ) -> Result<ResourceLimits, EngineError> {
        let inner = &self.inner;
        let (sandbox, mutation) = (handle.sandbox(), handle.mutation().await?);
        let mut before = ResourceLimits::default();
        let recorded = inner.amend_within(
            sandbox,
            |record| inner.quota(record),
            |record| {
                // It was ended since the handle was given, and nothing happens to it any more (L9).
                if record.is_over() {
                    return None;
                }
                before = record.spec.limits.clone();
                record.spec.limits = change.or(&before);
                let data = serde_json::json!({ "limits": record.spec.limits });
                Some(crate::journal::noted(record, "sandbox.limited", by.clone(), inner.clock.now_ms(), data))
            },
        );
        let recorded = recorded.await?.spec.limits;
        let budget = inner.config.budgets.call;
        let set = inner.call(sandbox, budget, inner.provider.set_limits(&mutation, sandbox, change)).await;
        if set.as_ref().is_err_and(|error| !error.is_transient()) {
            inner
                .amend(sandbox, |record| {
                    // Somebody else has set others meanwhile: those stand. So does what has ended.
                    if record.is_over() || record.spec.limits != recorded {
                        return None;
                    }
                    record.spec.limits = before.clone();
                    let data = serde_json::json!({ "limits": record.spec.limits, "refused": true });
                    Some(crate::journal::noted(record, "sandbox.limited", by.clone(), inner.clock.now_ms(), data))
                })
                .await?;
        }
        set.map_err(EngineError::Provider)
    }
}
