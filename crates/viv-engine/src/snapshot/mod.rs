//! Snapshots: made, looked at, begun with, removed (L10, L11).
//!
//! ```text
//!   asked for ──► row: saving ──► provider saves ──► row: ready ──► row: removing ──► provider removes ──► no row
//!                 (with the sandbox's compare-and-set)  (the same)   (nobody uses it)
//! ```
//!
//! - A row that is not ready says what is outstanding. One task at a time works on it ([`Savers`]), and the next daemon
//!   goes on with it: the operation's id is made of the snapshot's, so it is saved once.
//! - A row becomes ready only in a transaction that compares the record of its sandbox: what was deleted meanwhile has
//!   no row, and what the provider made of it is removed (L11).
//! - Whoever is forked begins in the transaction that makes the snapshot ready: there are all of them or none.

mod fork;
mod look;
mod make;
mod remove;
mod repeat;
mod transfer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use viv_core::lifecycle::{Actor, Event, Memory, Outcome, Sandbox};
use viv_core::planted::{Planted, is_planted};
use viv_core::snapshot::{Snapshot, SnapshotIntegrity, SnapshotKind, SnapshotMemory, SnapshotSeen, SnapshotState};
use viv_core::spec::Project;
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{Integrity, Mutation, ProviderError};
use viv_store::{Change, Idempotency, NewLine, SnapshotQuery, StoreError};

pub use fork::{ForkRequest, Forked, ForkedFrom};
pub use make::{NewSnapshot, SnapshotMade};

use crate::aim::Aim;
use crate::engine::{Inner, RACES_MAX};
use crate::error::EngineError;
use crate::token::Hold;

/// How many rows are read at a time.
const PAGE: usize = 500;

/// What the provider said of saves whose rows are about to be written: more than can be under way at once.
const NOTED_MAX: usize = 1024;

/// Where a sandbox is to go back to.
#[derive(Debug, Clone)]
pub struct RollbackRequest {
    /// To this.
    pub snapshot: SnapshotId,
    /// Whether what it is now is thrown away instead of saved first.
    pub discard: bool,
    /// Who asks.
    pub by: Actor,
}

/// Those who make or remove a snapshot, one for each at a time.
#[derive(Debug, Default)]
pub(crate) struct Savers {
    working: Mutex<BTreeMap<SnapshotId, AbortHandle>>,
    /// Those whose file is on its way: only the request that brings it works on them.
    importing: Mutex<BTreeSet<SnapshotId>>,
    noted: Mutex<BTreeMap<SnapshotId, viv_provider::Snapshot>>,
}

impl Savers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SnapshotId, AbortHandle>> {
        self.working.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The provider saved this; its row is about to be written.
    pub(crate) fn noted(&self, saved: &viv_provider::Snapshot) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() >= NOTED_MAX {
            noted.pop_first();
        }
        noted.insert(saved.id.clone(), saved.clone());
    }

    /// A file is on its way.
    fn busy(&self, id: &SnapshotId) {
        self.importing.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
    }

    /// It has come, or will not.
    fn free(&self, id: &SnapshotId) {
        self.importing.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn is_importing(&self, id: &SnapshotId) -> bool {
        self.importing.lock().unwrap_or_else(PoisonError::into_inner).contains(id)
    }

    fn take_noted(&self, id: &SnapshotId) -> Option<viv_provider::Snapshot> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).remove(id)
    }

    /// Ends all of them, where they are.
    pub(crate) fn end(&self) {
        for task in std::mem::take(&mut *self.lock()).into_values() {
            task.abort();
        }
    }
}

/// What was seen of a snapshot when it was saved.
fn seen_when_saved(saved: &viv_provider::Snapshot, now_ms: u64) -> SnapshotSeen {
    SnapshotSeen {
        size_bytes: saved.size_bytes,
        own_bytes: 0,
        integrity: SnapshotIntegrity::Pending,
        memory_damage: None,
        paused_us: saved.cost.paused_us,
        total_us: saved.cost.total_us,
        copied_bytes: saved.cost.copied_bytes,
        at_ms: now_ms,
    }
}

/// What is seen of a snapshot now.
pub(crate) fn seen_now(seen: &viv_provider::SnapshotSeen, now_ms: u64) -> SnapshotSeen {
    SnapshotSeen {
        own_bytes: seen.own_bytes,
        integrity: match seen.integrity {
            Integrity::Pending => SnapshotIntegrity::Pending,
            Integrity::Verified => SnapshotIntegrity::Verified,
            Integrity::Damaged => SnapshotIntegrity::Damaged,
        },
        memory_damage: seen.memory_damage.clone(),
        ..seen_when_saved(&seen.snapshot, now_ms)
    }
}

/// A line about a snapshot.
pub(crate) fn line(row: &Snapshot, kind: &str, by: &Actor, now_ms: u64, what: Option<&str>) -> NewLine {
    NewLine {
        at_ms: now_ms,
        project: Some(row.project.clone()),
        sandbox: row.sandbox.clone(),
        generation: row.sandbox.as_ref().map(|_| row.generation),
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by: by.clone(),
        data: serde_json::json!({ "snapshot": row.id, "kind": row.kind, "name": row.name, "message": what }),
    }
}

impl Inner {
    /// The row of what was just saved by hibernating, or sealed to be replaced, to be written with the record that refers to it.
    pub(crate) async fn saved_row(&self, next: &Sandbox, event: &Event) -> Result<Vec<Snapshot>, EngineError> {
        let Event::Done { outcome: Outcome::Saved, operation } = event else { return Ok(Vec::new()) };
        let id = Sandbox::snapshot_of(operation);
        if self.store.snapshot(&id).await?.is_some() {
            return Ok(Vec::new());
        }
        let saved = self.savers.take_noted(&id);
        Ok(vec![self.auto_row(next, id, saved.as_ref())])
    }

    /// A row for what was saved by hibernating.
    pub(crate) fn auto_row(&self, of: &Sandbox, id: SnapshotId, saved: Option<&viv_provider::Snapshot>) -> Snapshot {
        let now_ms = self.clock.now_ms();
        let has_memory = matches!(&of.memory, Some(Memory::Kept { snapshot }) if *snapshot == id)
            || saved.is_some_and(|saved| saved.memory);
        Snapshot {
            memory: has_memory.then(|| SnapshotMemory { services: of.services.clone() }),
            id,
            project: of.project.clone(),
            sandbox: Some(of.id.clone()),
            generation: of.generation,
            parent: saved.and_then(|saved| saved.parent.clone()),
            kind: SnapshotKind::Auto,
            name: None,
            labels: BTreeMap::new(),
            state: SnapshotState::Ready,
            version: 1,
            created_at_ms: now_ms,
            by: of.cause.by.clone(),
            seen: saved.map(|saved| seen_when_saved(saved, now_ms)),
            fork: None,
        }
    }

    /// What goes with a change of a snapshot, which belongs to no generation.
    pub(crate) fn snapshot_mutation(&self, row: &Snapshot, hold: &Hold) -> Mutation {
        Mutation {
            operation: row.operation(),
            generation: row.generation,
            token: hold.token(),
            budget_ms: u64::try_from(self.config.budgets.save.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// The row of a snapshot of this project.
    pub(crate) async fn snapshot_row(
        &self,
        project: Option<&Project>,
        id: &SnapshotId,
    ) -> Result<Snapshot, EngineError> {
        let row = self.store.snapshot(id).await?;
        let row = row.filter(|row| project.is_none_or(|project| row.project == *project));
        row.ok_or_else(|| EngineError::NoSnapshot { which: id.clone() })
    }

    /// A snapshot of this project that can be begun with, as far as can be told.
    pub(crate) async fn good_snapshot(&self, project: &Project, id: &SnapshotId) -> Result<Snapshot, EngineError> {
        let row = self.snapshot_row(Some(project), id).await?;
        if row.state != SnapshotState::Ready {
            return Err(EngineError::NoSnapshot { which: id.clone() });
        }
        match self.call(&row.fence(), self.config.budgets.call, self.provider.snapshot(id)).await {
            Ok(seen) if seen.integrity == Integrity::Damaged && !is_planted(Planted::DamageUnread) => {
                Err(EngineError::SnapshotDamaged { snapshot: id.clone() })
            }
            Err(ProviderError::NotFound { .. }) => Err(EngineError::SnapshotDamaged { snapshot: id.clone() }),
            // Nothing is known for now: whoever begins with it will find out.
            Ok(_) | Err(_) => Ok(row),
        }
    }

    /// Writes a row with the compare-and-set of its sandbox's record, and the key under which it was asked for. The
    /// closure is asked again after a race.
    async fn write_row(
        self: &Arc<Self>,
        aim: &Aim,
        keyed: Option<&Idempotency>,
        mut make: impl FnMut(&Sandbox) -> Result<(Snapshot, NewLine), EngineError>,
    ) -> Result<Snapshot, EngineError> {
        for _ in 0..RACES_MAX {
            let mut next = self.load(aim.sandbox()).await?;
            self.check_aim(aim, &next)?;
            let (row, line) = make(&next)?;
            next.version += 1;
            let change = Change {
                sandbox: next,
                lines: vec![line],
                idempotency: keyed.cloned(),
                quota: None,
                unused_since_ms: None,
                snapshots: vec![row.clone()],
            };
            match self.commit_change(change).await {
                Ok(_) => return Ok(row),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(EngineError::Store(StoreError::Unavailable {
            what: format!("{} changes faster than it can be read", aim.sandbox()),
        }))
    }

    /// Works on a row that is not ready, unless somebody does. Whoever asked for it hears how it went.
    pub(crate) fn work_on_snapshot(
        self: &Arc<Self>,
        id: &SnapshotId,
        told: Option<oneshot::Sender<Result<(), EngineError>>>,
    ) {
        if self.is_ending() || self.savers.is_importing(id) {
            return;
        }
        let mut working = self.savers.lock();
        if working.get(id).is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (inner, snapshot) = (self.clone(), id.clone());
        let task = tokio::spawn(async move {
            let went = inner.settle_snapshot(&snapshot).await;
            if let Err(error) = &went {
                inner.heed(error);
                tracing::warn!(component = "snapshots", %snapshot, %error, "was not made or removed");
            }
            inner.savers.lock().remove(&snapshot);
            if let Some(told) = told {
                // Whoever asked may be gone.
                let _ = told.send(went);
            }
        });
        working.insert(id.clone(), task.abort_handle());
    }

    /// Does what the row says is outstanding.
    async fn settle_snapshot(self: &Arc<Self>, id: &SnapshotId) -> Result<(), EngineError> {
        let Some(row) = self.store.snapshot(id).await? else { return Ok(()) };
        match row.state {
            SnapshotState::Ready => Ok(()),
            SnapshotState::Removing => self.finish_removal(&row).await,
            SnapshotState::Saving => match row.sandbox.clone() {
                Some(sandbox) => self.save_snapshot(row, &sandbox).await,
                // Its file came with a request that is gone.
                None => self.give_up_snapshot(&row, "the file did not arrive").await,
            },
        }
    }

    /// Takes up what the last daemon left.
    pub(crate) async fn adopt_snapshots(self: &Arc<Self>) -> Result<(), EngineError> {
        let mut query = SnapshotQuery { unsettled: true, limit: PAGE, ..SnapshotQuery::default() };
        loop {
            let page = self.store.snapshots(&query).await?;
            for row in &page.items {
                self.work_on_snapshot(&row.id, None);
            }
            let Some(next) = page.next else { return Ok(()) };
            query.after = Some(next);
        }
    }

    /// All rows of a sandbox.
    pub(crate) async fn rows_of(&self, sandbox: &SandboxId) -> Result<Vec<Snapshot>, EngineError> {
        let mut query = SnapshotQuery { sandbox: Some(sandbox.clone()), limit: PAGE, ..SnapshotQuery::default() };
        let mut rows = Vec::new();
        loop {
            let page = self.store.snapshots(&query).await?;
            rows.extend(page.items);
            let Some(next) = page.next else { return Ok(rows) };
            query.after = Some(next);
        }
    }
}
