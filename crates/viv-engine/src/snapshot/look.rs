//! Looking at snapshots. The provider is asked about one; a listing shows what was seen last (T1).

use std::sync::Arc;

use viv_core::snapshot::{Snapshot, SnapshotSeen, SnapshotState};
use viv_core::spec::Project;
use viv_core::{SandboxId, SnapshotId};
use viv_store::{SnapshotListing, SnapshotQuery, StoreError};

use super::seen_now;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;

/// Users that are told; more do not help.
const USERS_MAX: usize = 16;

impl Engine {
    /// A snapshot as it is now, and some of those who begin with it. In any project when none is named.
    pub async fn snapshot(
        &self,
        project: Option<&Project>,
        id: &SnapshotId,
    ) -> Result<(Snapshot, Vec<SandboxId>), EngineError> {
        self.inner.snapshot_row(project, id).await?;
        self.inner.refresh_snapshot(id).await;
        let row = self.inner.snapshot_row(project, id).await?;
        let users = self.inner.store.users(id, USERS_MAX).await?;
        Ok((row, users))
    }

    /// A page of snapshots, newest first.
    pub async fn snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotListing, EngineError> {
        Ok(self.inner.store.snapshots(query).await?)
    }
}

impl Inner {
    /// Looks at a snapshot and writes down what is seen. What cannot be seen changes nothing.
    pub(crate) async fn refresh_snapshot(self: &Arc<Self>, id: &SnapshotId) {
        let Ok(Some(row)) = self.store.snapshot(id).await else { return };
        if row.state != SnapshotState::Ready {
            return;
        }
        let looked = self.call(&row.fence(), self.config.budgets.probe, self.provider.snapshot(id)).await;
        if let Ok(seen) = looked {
            let refreshed = self.write_seen(&row, &seen).await;
            if let Err(error) = refreshed {
                tracing::debug!(component = "snapshots", snapshot = %id, %error, "what was seen was not written");
            }
        }
    }

    /// Writes down what was seen, if it is news. Somebody who was faster has newer ones.
    pub(crate) async fn write_seen(
        self: &Arc<Self>,
        row: &Snapshot,
        seen: &viv_provider::SnapshotSeen,
    ) -> Result<(), EngineError> {
        let now = seen_now(seen, self.clock.now_ms());
        let news = |seen: &SnapshotSeen| (seen.integrity, seen.own_bytes, seen.memory_damage.clone());
        if row.seen.as_ref().map(news) == Some(news(&now)) {
            return Ok(());
        }
        let parent = row.parent.clone().or_else(|| seen.snapshot.parent.clone());
        let next = Snapshot { seen: Some(now), parent, version: row.version + 1, ..row.clone() };
        match self.store.put_snapshot(self.epoch, next, Vec::new()).await {
            Ok(_) | Err(StoreError::SnapshotConflict { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
