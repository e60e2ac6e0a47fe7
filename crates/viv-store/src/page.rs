//! Where a page of a listing ends: by what it is ordered, so nothing that comes or goes moves it.

use std::cmp::Ordering;

use viv_core::SandboxId;
use viv_core::lifecycle::Sandbox;

use crate::error::StoreError;

/// The place of a record in a listing. The lesser one is listed first: newest first, then by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// When it was created.
    pub(crate) created_at_ms: u64,
    /// Its id.
    pub(crate) id: SandboxId,
}

impl Place {
    /// That of a record.
    pub(crate) fn of(sandbox: &Sandbox) -> Self {
        Self { created_at_ms: sandbox.created_at_ms, id: sandbox.id.clone() }
    }

    /// For a client to hand back.
    pub(crate) fn encode(&self) -> String {
        format!("{}.{}", self.created_at_ms, self.id)
    }

    /// What a client handed back.
    pub(crate) fn decode(text: &str) -> Result<Self, StoreError> {
        let parsed = text.split_once('.').and_then(|(created_at_ms, id)| {
            Some(Self { created_at_ms: created_at_ms.parse().ok()?, id: id.parse().ok()? })
        });
        parsed.ok_or(StoreError::BadCursor)
    }
}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.created_at_ms, &other.id).cmp(&(self.created_at_ms, &self.id))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
