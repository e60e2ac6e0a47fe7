//! Limits, changed live, or while it rests (L18).

use viv_core::lifecycle::{Actor, Phase, Sandbox};
use viv_core::spec::Project;
use viv_core::{Generation, SandboxId};
use viv_provider::{ProviderError, ResourceLimits};

use crate::aim::Aim;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::handle::{Handle, not_running};
use crate::read::{Which, has_instance};

impl Engine {
    /// Changes limits of what runs; of what rests, those that it will go on with. Answers with all that are in force
    /// then.
    pub async fn limit(
        &self,
        project: &Project,
        which: &Which,
        generation: Option<Generation>,
        change: &ResourceLimits,
        by: &Actor,
    ) -> Result<ResourceLimits, EngineError> {
        let sandbox = self.found(project, which, generation).await?;
        if rests(&sandbox) {
            return self.limit_resting(&Aim::at(sandbox.id, generation), change, by).await;
        }
        if !has_instance(&sandbox) {
            return Err(not_running(&sandbox));
        }
        self.set_limits(&self.handle(&sandbox), change, by).await
    }

    /// Nothing is asked of the provider, so what it would refuse to go on with is refused here. Quotas are looked at
    /// when it goes on.
    async fn limit_resting(
        &self,
        aim: &Aim,
        change: &ResourceLimits,
        by: &Actor,
    ) -> Result<ResourceLimits, EngineError> {
        let inner = &self.inner;
        let declared = inner.provider.capabilities();
        if let Some(capability) = change.first_missing(|needed| declared.can(needed)) {
            let why = declared.missing.get(&capability).cloned().unwrap_or_default();
            return Err(EngineError::Provider(ProviderError::Unsupported { capability, why }));
        }
        let holds_bytes = self.holds_bytes(aim.sandbox()).await?;
        let mut refused = None;
        let changed = inner.amend(aim.clone(), |record| {
            let limits = change.or(&record.spec.limits);
            // It goes on, or is over, since it was looked at.
            refused = if rests(record) { unfit(&limits, holds_bytes).err() } else { Some(not_running(record)) };
            if refused.is_some() || limits == record.spec.limits {
                return None;
            }
            record.spec.limits = limits;
            let data = serde_json::json!({ "limits": record.spec.limits });
            Some(crate::journal::noted(record, "sandbox.limited", by.clone(), inner.clock.now_ms(), data))
        });
        let changed: Sandbox = changed.await?;
        refused.map_or_else(|| Ok(changed.spec.limits.in_force()), Err)
    }

    /// What was saved of it last holds so much.
    async fn holds_bytes(&self, id: &SandboxId) -> Result<u64, EngineError> {
        let Some(saved) = self.inner.load(id).await?.saved else { return Ok(0) };
        let row = self.inner.store.snapshot(&saved).await?;
        Ok(row.and_then(|row| row.seen).map_or(0, |seen| seen.size_bytes))
    }

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
            handle,
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

fn rests(sandbox: &Sandbox) -> bool {
    matches!(sandbox.phase, Phase::Hibernated { .. })
}

/// Refuses limits with which it would not go on.
fn unfit(limits: &ResourceLimits, holds_bytes: u64) -> Result<(), EngineError> {
    limits.check().map_err(|error| EngineError::Provider(error.into()))?;
    match limits.in_force().disk_bytes {
        Some(disk) if disk < holds_bytes => {
            let what = format!("{holds_bytes} bytes are saved of it, and its disk would have {disk}");
            Err(EngineError::Provider(ProviderError::Conflict { what }))
        }
        Some(_) | None => Ok(()),
    }
}
