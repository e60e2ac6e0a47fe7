//! Where a page of a listing ends: by what it is ordered, so nothing that comes or goes moves it.

use std::cmp::Ordering;
use std::fmt::Display;
use std::str::FromStr;

use viv_core::lifecycle::Sandbox;
use viv_core::snapshot::Snapshot;
use viv_core::{SandboxId, SnapshotId};

use crate::error::StoreError;

/// The place of a record in a listing. The lesser one is listed first: newest first, then by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place<Id = SandboxId> {
    /// When it was created.
    pub(crate) created_at_ms: u64,
    /// Its id.
    pub(crate) id: Id,
}

impl Place {
    /// That of a record.
    pub(crate) fn of(sandbox: &Sandbox) -> Self {
        Self { created_at_ms: sandbox.created_at_ms, id: sandbox.id.clone() }
    }
}

impl Place<SnapshotId> {
    /// That of a snapshot.
    pub(crate) fn of_snapshot(row: &Snapshot) -> Self {
        Self { created_at_ms: row.created_at_ms, id: row.id.clone() }
    }
}

impl<Id: Display + FromStr> Place<Id> {
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

impl<Id: Ord> Ord for Place<Id> {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.created_at_ms, &other.id).cmp(&(self.created_at_ms, &self.id))
    }
}

impl<Id: Ord> PartialOrd for Place<Id> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
