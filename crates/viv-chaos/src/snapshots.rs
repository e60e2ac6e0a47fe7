//! What worlds do with snapshots, and what must hold of them in the end (L11, L12).

use std::collections::{BTreeMap, BTreeSet};

use viv_core::SandboxId;
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::Project;
use viv_engine::{ForkRequest, ForkedFrom, NewSnapshot, RollbackRequest};
use viv_provider::{PageRequest, Provider};
use viv_store::{SnapshotQuery, Store};

use crate::world::{SANDBOXES_MAX, Violation, World, somebody};

/// More than any world has.
const MANY: usize = 10_000;

impl World<'_> {
    /// Something is asked for; what comes of it comes while other things happen.
    pub(crate) async fn snapshots(&mut self, id: &SandboxId, what: u64) {
        let (engine, id) = (self.engine().clone(), id.clone());
        match what {
            0..2 => {
                let new = NewSnapshot { name: None, labels: BTreeMap::new(), by: somebody(), key: None };
                tokio::spawn(async move { engine.make_snapshot(&id, new).await.map(drop) });
            }
            2 => {
                let rows = self.rows().await;
                if rows.is_empty() {
                    return;
                }
                let row = &rows[self.rng.below(rows.len() as u64) as usize];
                let (snapshot, discard) = (row.id.clone(), self.rng.chance(50));
                self.forgive(&id);
                let _ = engine.rollback(&id, RollbackRequest { snapshot, discard, by: somebody() }).await;
            }
            3 if self.known.len() + 2 <= SANDBOXES_MAX => {
                let request = ForkRequest {
                    project: Project::default(),
                    from: ForkedFrom::Sandbox(id),
                    count: 2,
                    name: None,
                    policy: None,
                    labels: BTreeMap::new(),
                    by: somebody(),
                    key: None,
                };
                tokio::spawn(async move { engine.fork(request).await.map(drop) });
            }
            4 => {
                self.forgive(&id);
                let _ = engine.reset(&id, somebody()).await;
            }
            _ => {}
        }
    }

    /// It may be made again from now on, since somebody asked for it.
    fn forgive(&mut self, id: &SandboxId) {
        let promise = self.known.entry(id.clone()).or_default();
        (promise.goes_back, promise.entered) = (true, true);
    }

    async fn rows(&self) -> Vec<Snapshot> {
        let query = SnapshotQuery { limit: MANY, ..SnapshotQuery::default() };
        loop {
            if let Ok(listing) = self.store.snapshots(&query).await {
                return listing.items;
            }
        }
    }

    /// At rest: every row is ready and has its snapshot, every snapshot its row, and none is of what was deleted unless
    /// somebody begins with it.
    pub(crate) async fn check_snapshots(&self) -> Result<(), Violation> {
        let rows = self.rows().await;
        let mut there = BTreeSet::new();
        let owner = self.engine().config().owner.clone();
        let mut page = PageRequest::default();
        loop {
            let listed = self.provider.truth().snapshots(&owner, page).await.expect("the truth is always told");
            there.extend(listed.items.into_iter().map(|seen| seen.snapshot.id));
            let Some(next) = listed.next else { break };
            page = PageRequest { cursor: Some(next), limit: None };
        }
        if let Some(row) = rows.iter().find(|row| row.state != SnapshotState::Ready) {
            return Err(self.violated("P3", format!("{} is {:?} at rest", row.id, row.state)));
        }
        let recorded: BTreeSet<_> = rows.iter().map(|row| row.id.clone()).collect();
        if recorded != there {
            return Err(self.violated("L11", format!("rows {recorded:?} and what is there {there:?} differ")));
        }
        for row in &rows {
            let Some(sandbox) = &row.sandbox else { continue };
            let record = self.store.get(sandbox).await.map_err(|error| self.violated("P3", error.to_string()))?;
            let users = self.store.users(&row.id, 1).await.map_err(|error| self.violated("P3", error.to_string()))?;
            if record.is_none_or(|record| record.deleted) && users.is_empty() {
                return Err(self.violated("L11", format!("{} of {sandbox} is there, which was deleted", row.id)));
            }
        }
        for record in self.records().await {
            if let Some(missing) = record.uses().into_iter().find(|used| !recorded.contains(*used)) {
                return Err(self.violated("L11", format!("{} begins with {missing}, which is gone", record.id)));
            }
        }
        Ok(())
    }
}
