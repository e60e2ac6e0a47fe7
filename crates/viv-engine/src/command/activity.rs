//! Activity, and leases that stand for it (L6, L7).

use std::sync::Arc;

use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, KeepAwake};

use crate::aim::Aim;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::journal;
use crate::read::View;

/// Longest a lease keeps a sandbox awake before it has to be renewed.
const AWAKE_MS_MAX: u64 = 24 * 3600 * 1000;

/// Most such leases on one sandbox.
const AWAKE_MAX: usize = 32;

impl Inner {
    /// Somebody used it. Written down at most once a second.
    pub(crate) async fn active(self: &Arc<Self>, sandbox: &SandboxId) -> Result<(), EngineError> {
        self.begin_use(sandbox).await.map(drop)
    }
}

impl Engine {
    /// Somebody says that it is in use.
    ///
    /// That is written beside the record and is no change of it, so another generation may be there when it is written.
    /// It is refused then all the same; all that comes of it is that the new one idles that much later.
    pub async fn activity(&self, aim: impl Into<Aim>) -> Result<View, EngineError> {
        let (inner, aim) = (&self.inner, aim.into());
        inner.check_aim(&aim, &inner.load(aim.sandbox()).await?)?;
        inner.active(aim.sandbox()).await?;
        let record = inner.load(aim.sandbox()).await?;
        inner.check_aim(&aim, &record)?;
        Ok(inner.view(record))
    }

    /// Keeps a sandbox from idling for a while; a lease with the same name is renewed.
    pub async fn keep_awake(
        &self,
        aim: impl Into<Aim>,
        lease: &str,
        ttl_ms: u64,
        reason: &str,
        by: Actor,
    ) -> Result<View, EngineError> {
        if ttl_ms == 0 || ttl_ms > AWAKE_MS_MAX {
            return Err(EngineError::Invalid {
                what: format!("a lease lasts between 1 and {AWAKE_MS_MAX} ms"),
                hint: "renew it while it is needed".to_owned(),
            });
        }
        let now_ms = self.inner.clock.now_ms();
        let mut full = false;
        let record = self
            .inner
            .amend(aim, |record| {
                record.keep_awake.retain(|_, held| held.until_ms > now_ms);
                full = record.keep_awake.len() >= AWAKE_MAX && !record.keep_awake.contains_key(lease);
                if full || record.is_over() {
                    return None;
                }
                let held = KeepAwake { reason: reason.to_owned(), until_ms: now_ms + ttl_ms };
                record.keep_awake.insert(lease.to_owned(), held);
                let data = serde_json::json!({ "lease": lease, "ttl_ms": ttl_ms });
                Some(journal::noted(record, "sandbox.kept_awake", by.clone(), now_ms, data))
            })
            .await?;
        if full {
            return Err(EngineError::Quota {
                limit: "keep-awake leases",
                used: AWAKE_MAX as u64,
                max: AWAKE_MAX as u64,
            });
        }
        if record.is_over() {
            return Err(EngineError::Gone { sandbox: record.id.clone(), cause: Box::new(record.cause) });
        }
        Ok(self.inner.view(record))
    }

    /// Ends a lease; one that is not there is ended already.
    pub async fn let_sleep(&self, aim: impl Into<Aim>, lease: &str, by: Actor) -> Result<View, EngineError> {
        let now_ms = self.inner.clock.now_ms();
        let record = self
            .inner
            .amend(aim, |record| {
                record.keep_awake.remove(lease)?;
                let data = serde_json::json!({ "lease": lease });
                Some(journal::noted(record, "sandbox.let_sleep", by.clone(), now_ms, data))
            })
            .await?;
        Ok(self.inner.view(record))
    }
}
