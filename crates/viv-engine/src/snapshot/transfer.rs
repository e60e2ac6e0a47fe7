//! Snapshots as one file: out of this installation, and into it.

use std::collections::BTreeMap;

use viv_core::lifecycle::Actor;
use viv_core::snapshot::{Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::{Name, Project};
use viv_core::{Generation, SnapshotId};
use viv_provider::ByteReader;

use super::{line, seen_when_saved};
use crate::engine::Engine;
use crate::error::EngineError;

impl Engine {
    /// A snapshot as one file. In any project when none is named.
    pub async fn export_snapshot(&self, project: Option<&Project>, id: &SnapshotId) -> Result<ByteReader, EngineError> {
        let inner = &self.inner;
        let row = inner.snapshot_row(project, id).await?;
        let row = inner.good_snapshot(&row.project, id).await?;
        let exported = inner.provider.export_snapshot(id);
        inner.call(&row.fence(), inner.config.budgets.save, exported).await.map_err(EngineError::Provider)
    }

    /// Reads a snapshot from a file. Takes as long as the file takes to come; what does not come leaves nothing.
    pub async fn import_snapshot(
        &self,
        project: Project,
        name: Option<Name>,
        by: Actor,
        file: ByteReader,
    ) -> Result<Snapshot, EngineError> {
        let inner = &self.inner;
        if inner.is_ending() {
            return Err(EngineError::ShuttingDown);
        }
        let now_ms = inner.clock.now_ms();
        let row = Snapshot {
            id: SnapshotId::from_bytes((inner.draw)()),
            project,
            sandbox: None,
            generation: Generation::FIRST,
            parent: None,
            kind: SnapshotKind::Imported,
            name,
            labels: BTreeMap::new(),
            state: SnapshotState::Saving,
            version: 1,
            created_at_ms: now_ms,
            by,
            seen: None,
            memory: None,
            fork: None,
        };
        let asked = vec![line(&row, "snapshot.asked_for", &row.by, now_ms, None)];
        // Whoever asked may go away: then what came is removed with the row.
        inner.savers.busy(&row.id);
        let importing = Importing { engine: self.clone(), id: Some(row.id.clone()) };
        inner.store.put_snapshot(inner.epoch, row.clone(), asked).await?;
        let imported = self.read_in(&row, file).await;
        importing.over();
        imported
    }

    async fn read_in(&self, row: &Snapshot, file: ByteReader) -> Result<Snapshot, EngineError> {
        let inner = &self.inner;
        let (owner, fence) = (&inner.config.owner, row.fence());
        let hold = inner.hold(&fence).await?;
        let mutation = inner.snapshot_mutation(row, &hold);
        let saved = match inner.provider.import_snapshot(&mutation, &fence, owner, &row.id, file).await {
            Ok(saved) => saved,
            Err(error) => {
                // What fails here leaves the row, which is looked at again.
                inner.give_up_snapshot(row, &crate::effect::in_words(&error)).await.ok();
                return Err(EngineError::Provider(error));
            }
        };
        inner.reached("import.after");
        let now_ms = inner.clock.now_ms();
        let ready = Snapshot {
            state: SnapshotState::Ready,
            version: row.version + 1,
            seen: Some(seen_when_saved(&saved, now_ms)),
            ..row.clone()
        };
        let made = vec![line(&ready, "snapshot.made", &row.by, now_ms, None)];
        inner.store.put_snapshot(inner.epoch, ready, made).await?;
        inner.refresh_snapshot(&row.id).await;
        inner.reconcilers.strays.watch(&row.id);
        inner.snapshot_row(None, &row.id).await
    }
}

/// Gives an import up when whoever asked for it goes away in the middle.
struct Importing {
    engine: Engine,
    id: Option<SnapshotId>,
}

impl Importing {
    fn over(mut self) {
        if let Some(id) = self.id.take() {
            self.engine.inner.savers.free(&id);
        }
    }
}

impl Drop for Importing {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.engine.inner.savers.free(&id);
            self.engine.inner.work_on_snapshot(&id, None);
        }
    }
}
