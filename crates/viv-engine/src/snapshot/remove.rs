//! Removing snapshots. What is in use stays; the row goes last (J5, L11).

use std::sync::Arc;

use viv_core::lifecycle::{Actor, Phase, Sandbox};
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::Project;
use viv_core::{OperationId, SandboxId, SnapshotId};
use viv_provider::{Mutation, Page, PageRequest, ProviderError, SnapshotSeen};
use viv_store::StoreError;

use super::line;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;

impl Engine {
    /// Removes a snapshot, and answers when it is gone; one that is in use stays. In any project when none is named.
    pub async fn remove_snapshot(
        &self,
        project: Option<&Project>,
        id: &SnapshotId,
        by: &Actor,
    ) -> Result<(), EngineError> {
        let row = self.inner.snapshot_row(project, id).await?;
        self.inner.remove_row(&row, by).await
    }
}

impl Inner {
    /// Removes what a row is about, and then the row.
    pub(crate) async fn remove_row(self: &Arc<Self>, row: &Snapshot, by: &Actor) -> Result<(), EngineError> {
        match row.state {
            // Whoever makes it finds no row when it is done.
            SnapshotState::Saving | SnapshotState::Removing => self.finish_removal(row).await,
            SnapshotState::Ready => {
                // Whose instance began with it need not use it by its record, and keeps it for as long as it lives: then
                // nothing is asked for, and nothing is written down, again and again (P3).
                let by_instances = self.instances_of(&row.id).await;
                if !by_instances.is_empty() {
                    return Err(EngineError::SnapshotInUse { snapshot: row.id.clone(), by: by_instances });
                }
                let removing = Snapshot {
                    state: SnapshotState::Removing,
                    version: row.version + 1,
                    by: by.clone(),
                    ..row.clone()
                };
                let asked = vec![line(row, "snapshot.remove_asked", by, self.clock.now_ms(), None)];
                // From here on nobody begins with it: both are decided on its row.
                self.store.put_snapshot(self.epoch, removing.clone(), asked).await?;
                self.reached("snapshot.removing");
                self.finish_removal(&removing).await
            }
        }
    }

    /// Nobody begins with it any more: it is removed at the provider, and then its row.
    pub(super) async fn finish_removal(self: &Arc<Self>, row: &Snapshot) -> Result<(), EngineError> {
        let sandbox = row.fence();
        let hold = self.hold(&sandbox).await?;
        let mutation = self.snapshot_mutation(row, &hold);
        let removed = self.provider.remove_snapshot(&mutation, &sandbox, &row.id);
        let removed = self.call(&sandbox, self.config.budgets.call, removed).await;
        drop(hold);
        match removed {
            Ok(()) | Err(ProviderError::NotFound { .. }) => {
                let lines = vec![line(row, "snapshot.removed", &row.by, self.clock.now_ms(), None)];
                self.store.forget_snapshot(self.epoch, &row.id, lines).await?;
                Ok(())
            }
            // An instance that began with it is still there, though its record needs it no more.
            Err(ProviderError::Conflict { .. }) if row.state == SnapshotState::Removing => {
                let kept = Snapshot { state: SnapshotState::Ready, version: row.version + 1, ..row.clone() };
                match self.store.put_snapshot(self.epoch, kept, Vec::new()).await {
                    Ok(_) | Err(StoreError::SnapshotConflict { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
                let by = self.instances_of(&row.id).await;
                Err(EngineError::SnapshotInUse { snapshot: row.id.clone(), by })
            }
            Err(error) => Err(EngineError::Provider(error)),
        }
    }

    /// Whose instances began with it, as far as that can be told.
    async fn instances_of(&self, id: &SnapshotId) -> Vec<SandboxId> {
        let seen = tokio::time::timeout(self.config.budgets.call, self.provider.snapshot(id)).await;
        let seen = seen.ok().and_then(Result::ok);
        seen.map(|seen| seen.used_by.into_iter().map(|used_by| used_by.sandbox).collect()).unwrap_or_default()
    }

    /// It was put to rest, or is over: what it began with before may be of no use to anybody any more.
    pub(crate) async fn freed_snapshots(self: &Arc<Self>, record: &Sandbox) {
        if let Phase::Hibernated { .. } = record.phase {
            self.reconcilers.tidy_snapshots_of(&record.id);
        }
        if !record.is_over() {
            return;
        }
        for id in [&record.origin, &record.saved, &record.sealed, &record.rollback].into_iter().flatten() {
            match self.store.snapshot(id).await {
                Ok(Some(Snapshot { sandbox: Some(sandbox), .. })) => self.reconcilers.tidy_snapshots_of(&sandbox),
                Ok(_) => {}
                // What cannot be read now is looked at in the next minute.
                Err(_) => self.reconcilers.strays.watch(id),
            }
        }
    }

    /// All that was saved of a sandbox that was deleted or begins anew goes, unless others begin with it (L11, L12).
    pub(crate) async fn remove_all_of(self: &Arc<Self>, record: &Sandbox) -> Result<(), EngineError> {
        Engine { inner: self.clone() }.clear_schedules(&record.id, &record.cause.by).await?;
        for row in self.rows_of(&record.id).await? {
            match self.remove_row(&row, &record.cause.by).await {
                Ok(()) | Err(EngineError::SnapshotInUse { .. }) => {}
                // Somebody else removes it, or makes it ready, at this moment: it is looked at again.
                Err(error) => return Err(error),
            }
        }
        if record.policy.persistent { self.remove_strays_of(record).await } else { Ok(()) }
    }

    /// A page of what the provider has of ours, in bounded time (J7).
    pub(crate) async fn list_at_provider(&self, page: PageRequest) -> Result<Page<SnapshotSeen>, ProviderError> {
        // Its first page reads the records of all.
        let budget = self.config.budgets.sweep;
        let listed = tokio::time::timeout(budget, self.provider.snapshots(&self.config.owner, page)).await;
        let after_ms = u64::try_from(budget.as_millis()).unwrap_or(u64::MAX);
        listed.unwrap_or(Err(ProviderError::TimedOut { what: "a listing of snapshots", after_ms }))
    }

    /// What was saved and never got a row: its save was under way when the record turned to something else.
    async fn remove_strays_of(self: &Arc<Self>, record: &Sandbox) -> Result<(), EngineError> {
        let mut page = PageRequest::default();
        loop {
            let found = self.list_at_provider(page).await.map_err(EngineError::Provider)?;
            for seen in found.items.iter().filter(|seen| seen.snapshot.source.sandbox == record.id) {
                if self.store.snapshot(&seen.snapshot.id).await?.is_none() {
                    self.remove_stray(&record.id, &seen.snapshot).await?;
                }
            }
            let Some(next) = found.next else { return Ok(()) };
            page = PageRequest { cursor: Some(next), limit: None };
        }
    }

    /// Removes what has no row, unless an instance that began with it is still there.
    pub(crate) async fn remove_stray(
        &self,
        sandbox: &SandboxId,
        snapshot: &viv_provider::Snapshot,
    ) -> Result<(), EngineError> {
        let hold = self.hold(sandbox).await?;
        let mutation = Mutation {
            operation: OperationId::from_bytes((self.draw)()),
            generation: snapshot.source.generation,
            token: hold.token(),
            budget_ms: u64::try_from(self.config.budgets.call.as_millis()).unwrap_or(u64::MAX),
        };
        let removed = self.provider.remove_snapshot(&mutation, sandbox, &snapshot.id);
        let removed = self.call(sandbox, self.config.budgets.call, removed).await;
        drop(hold);
        match removed {
            Ok(()) | Err(ProviderError::Conflict { .. }) => Ok(()),
            Err(error) => Err(EngineError::Provider(error)),
        }
    }
}
