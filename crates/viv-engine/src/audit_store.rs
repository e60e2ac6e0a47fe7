//! What the store holds and nobody needs: leases on what is over (L20), and spares that nobody keeps (L19).

use std::sync::Arc;

use viv_core::SandboxId;
use viv_store::Lease;

use crate::audit::{AuditItem, AuditOutcome};
use crate::engine::Inner;
use crate::error::EngineError;

/// Leases that are looked at in one run; the next one finds the others.
const LEASES_MAX: usize = 1_000;

/// What an item is about.
pub(crate) enum Held {
    /// A lease on what is over, or was never recorded.
    Lease(Lease),
    /// A spare that is broken, or of no class.
    Spare(SandboxId),
}

impl Inner {
    /// Finds them; changes nothing.
    pub(crate) async fn look_into_store(&self) -> Result<Vec<(Held, AuditItem)>, EngineError> {
        let item = |kind: &str, sandbox: &SandboxId, what: String, why: &str| AuditItem {
            kind: kind.to_owned(),
            what,
            sandbox: Some(sandbox.clone()),
            why: why.to_owned(),
            outcome: AuditOutcome::Reported,
        };
        let mut found = Vec::new();
        for lease in self.store.stray_leases(LEASES_MAX).await? {
            let what = format!("{} of {} by {}", lease.kind.as_str(), lease.sandbox, lease.holder);
            let item = item("lock", &lease.sandbox, what, "its sandbox is over, or was never recorded");
            found.push((Held::Lease(lease), item));
        }
        for spare in self.useless_spares().await? {
            let why = "it is broken, or no class wants it";
            let item = item("spare", &spare, spare.to_string(), why);
            found.push((Held::Spare(spare), item));
        }
        Ok(found)
    }

    /// Puts them right.
    pub(crate) async fn put_store_right(self: &Arc<Self>, found: &mut [(Held, AuditItem)]) {
        for (held, item) in found {
            let done = match held {
                Held::Lease(lease) => {
                    let given_back = self.store.release(self.epoch, &lease.sandbox, lease.kind, lease.token).await;
                    given_back.map(|()| true).map_err(EngineError::from)
                }
                Held::Spare(spare) => self.give_up(spare, "nobody keeps it").await,
            };
            item.outcome = match done {
                Ok(true) => AuditOutcome::Done,
                Ok(false) => AuditOutcome::Left("somebody has it, or it goes already".to_owned()),
                Err(error) => AuditOutcome::Failed(crate::effect::in_words(&error)),
            };
        }
    }
}
