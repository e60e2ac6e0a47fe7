//! The tokens under which this daemon changes things at the provider (L15).
//!
//! ```text
//!   a record that is not over    its lifecycle lease, in the store: taken once, shown, gone with the record
//!   over, or never recorded      a token that nobody holds, shared by those who remove something at the same time
//! ```
//!
//! So there is no lease on what is over, whoever comes late: the store gives none, in the transaction that would have
//! (L20).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use viv_core::{FencingToken, SandboxId};
use viv_store::{LeaseKind, StoreError};

use crate::engine::Inner;
use crate::error::EngineError;

/// A lease of ours lasts as long as we own the store; it is shown, and taken over with the store.
const LEASE_MS: u64 = 10 * 365 * 24 * 3600 * 1000;

/// Tokens of those who remove something of what is over, while they do. Who comes meanwhile works under the same one,
/// so that none fences the other off.
#[derive(Debug, Default)]
pub(crate) struct Removers {
    tokens: Mutex<HashMap<SandboxId, Weak<FencingToken>>>,
}

impl Removers {
    fn shared(&self, sandbox: &SandboxId) -> Option<Hold> {
        let tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.get(sandbox).and_then(Weak::upgrade).map(Hold)
    }

    /// This one, unless somebody was first.
    fn share(&self, sandbox: &SandboxId, drawn: FencingToken) -> Hold {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = tokens.get(sandbox).and_then(Weak::upgrade) {
            return Hold(first);
        }
        tokens.retain(|_, token| token.strong_count() > 0);
        let hold = Hold(Arc::new(drawn));
        tokens.insert(sandbox.clone(), Arc::downgrade(&hold.0));
        hold
    }
}

/// A token for as long as something is changed under it.
#[derive(Debug)]
pub(crate) struct Hold(Arc<FencingToken>);

impl Hold {
    pub(crate) fn token(&self) -> FencingToken {
        *self.0
    }
}

impl Inner {
    /// The token under which this daemon changes things of a sandbox that is not over.
    pub(crate) async fn token(&self, sandbox: &SandboxId) -> Result<FencingToken, EngineError> {
        if let Some(token) = self.knowledge.token(sandbox) {
            return Ok(token);
        }
        let (now_ms, holder) = (self.clock.now_ms(), &self.config.holder);
        match self.store.lease(self.epoch, sandbox, LeaseKind::Lifecycle, holder, now_ms, LEASE_MS).await {
            Ok(lease) => {
                self.knowledge.set_token(sandbox, lease.token);
                Ok(lease.token)
            }
            Err(StoreError::Over { .. }) => {
                let record = self.load(sandbox).await?;
                Err(EngineError::Gone { sandbox: record.id, cause: Box::new(record.cause) })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The token for who removes something, or has a fence of its own: also of what is over, or was never recorded.
    pub(crate) async fn hold(&self, sandbox: &SandboxId) -> Result<Hold, EngineError> {
        match self.token(sandbox).await {
            Ok(token) => return Ok(Hold(Arc::new(token))),
            Err(EngineError::Gone { .. } | EngineError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        if let Some(hold) = self.removers.shared(sandbox) {
            return Ok(hold);
        }
        let drawn = self.store.draw_token(self.epoch).await?;
        Ok(self.removers.share(sandbox, drawn))
    }

    /// A provider has seen a greater token than ours, and we own the store: it was given by an owner whose records are
    /// not here any more, as when they were restored from a backup. The next lease is above it (L15).
    ///
    /// Whoever owned the store before us has another epoch, and is refused by the store before it can get here.
    pub(crate) async fn outrank(&self, sandbox: &SandboxId, highest: FencingToken) -> Result<(), EngineError> {
        self.store.raise_token(self.epoch, highest).await?;
        let held = self.store.leases(sandbox).await?;
        for lease in held.into_iter().filter(|lease| lease.kind == LeaseKind::Lifecycle && lease.token <= highest) {
            self.store.release(self.epoch, sandbox, LeaseKind::Lifecycle, lease.token).await?;
        }
        self.knowledge.forget_token(sandbox);
        tracing::warn!(component = "engine", %sandbox, seen = highest.0, "a newer token was seen than was ever given here");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l15_who_removes_at_the_same_time_does_so_under_one_token() {
        let (removers, gone) = (Removers::default(), SandboxId::from_bytes([1; 16]));
        assert!(removers.shared(&gone).is_none());
        let first = removers.share(&gone, FencingToken(5));
        let second = removers.share(&gone, FencingToken(6));
        assert_eq!((first.token(), second.token()), (FencingToken(5), FencingToken(5)));
        drop(first);
        assert_eq!(removers.shared(&gone).map(|hold| hold.token()), Some(FencingToken(5)));
        drop(second);
        assert!(removers.shared(&gone).is_none(), "nothing is kept of what is over");
        assert_eq!(removers.share(&gone, FencingToken(7)).token(), FencingToken(7));
    }
}
