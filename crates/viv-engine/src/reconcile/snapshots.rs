//! Snapshots: those that are too many or too old go, by the policy of their sandbox; those that were left in the middle
//! are taken up; what is at the provider and nobody's is removed, and what is seen there is written down (L11).
//!
//! A sandbox that was just put to rest is looked at by itself; all of them on a period.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use viv_core::lifecycle::{Actor, Effect, Sandbox, outstanding};
use viv_core::snapshot::{Snapshot, SnapshotIntegrity, SnapshotState, surplus};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{PageRequest, ProviderError, SnapshotSeen};
use viv_store::{SnapshotQuery, StoreError};

use super::Report;
use crate::engine::Inner;
use crate::error::EngineError;

/// How many rows are read at a time.
const PAGE: usize = 500;

/// What is kept between runs.
#[derive(Debug, Default)]
pub(crate) struct Strays(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// Sandboxes that have something new.
    touched: BTreeSet<SandboxId>,
    /// When all of them were last looked at.
    all_at_ms: Option<u64>,
    /// What no row knows: since when, and in how many listings.
    strays: BTreeMap<SnapshotId, (u64, u32)>,
}

impl Strays {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn touch(&self, sandbox: &SandboxId) {
        self.lock().touched.insert(sandbox.clone());
    }
}

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let now_ms = inner.clock.now_ms();
    let period_ms = u64::try_from(inner.config.periods.snapshots.as_millis()).unwrap_or(u64::MAX);
    let (touched, all) = {
        let mut kept = inner.reconcilers.strays.lock();
        let touched = std::mem::take(&mut kept.touched);
        let recent = kept.all_at_ms.is_some_and(|at_ms| now_ms.saturating_sub(at_ms) < period_ms);
        let all = touched.is_empty() || !recent;
        if all {
            kept.all_at_ms = Some(now_ms);
        }
        (touched, all)
    };
    let mut report = Report::default();
    if !all {
        for sandbox in &touched {
            let rows = inner.rows_of(sandbox).await?;
            tidy(inner, Some(sandbox), &rows, &mut report).await?;
        }
        return Ok(report);
    }
    let rows = everything(inner).await?;
    let mut by_sandbox: BTreeMap<Option<SandboxId>, Vec<Snapshot>> = BTreeMap::new();
    for row in &rows {
        by_sandbox.entry(row.sandbox.clone()).or_default().push(row.clone());
    }
    for (sandbox, rows) in &by_sandbox {
        tidy(inner, sandbox.as_ref(), rows, &mut report).await?;
    }
    compare(inner, &mut report).await?;
    Ok(report)
}

async fn everything(inner: &Arc<Inner>) -> Result<Vec<Snapshot>, EngineError> {
    let mut query = SnapshotQuery { limit: PAGE, ..SnapshotQuery::default() };
    let mut rows = Vec::new();
    loop {
        let page = inner.store.snapshots(&query).await?;
        rows.extend(page.items);
        let Some(next) = page.next else { return Ok(rows) };
        query.after = Some(next);
    }
}

/// What goes of one sandbox, and what is taken up.
async fn tidy(
    inner: &Arc<Inner>,
    sandbox: Option<&SandboxId>,
    rows: &[Snapshot],
    report: &mut Report,
) -> Result<(), EngineError> {
    for row in rows.iter().filter(|row| row.state != SnapshotState::Ready) {
        inner.work_on_snapshot(&row.id, None);
    }
    let Some(sandbox) = sandbox else { return Ok(()) };
    let record = inner.store.get(sandbox).await?;
    let goes: Vec<&Snapshot> = match &record {
        Some(record) if !record.deleted => surplus(rows, &record.policy, inner.clock.now_ms()),
        // What others begin with outlives it, for as long as they do.
        Some(_) | None => rows.iter().filter(|row| row.state == SnapshotState::Ready).collect(),
    };
    for row in goes {
        if !inner.store.users(&row.id, 1).await?.is_empty() {
            continue;
        }
        report.found += 1;
        match inner.remove_row(row, &Actor::part("snapshots")).await {
            Ok(()) => report.did += 1,
            Err(EngineError::SnapshotInUse { .. } | EngineError::Store(StoreError::SnapshotConflict { .. })) => {}
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "reconcile", snapshot = %row.id, %error, "could not be removed");
                report.failed += 1;
            }
        }
    }
    Ok(())
}

/// Rows and what the provider has, side by side.
async fn compare(inner: &Arc<Inner>, report: &mut Report) -> Result<(), EngineError> {
    let mut seen: BTreeMap<SnapshotId, SnapshotSeen> = BTreeMap::new();
    let mut complete = true;
    let mut page = PageRequest::default();
    loop {
        let listed = match inner.list_at_provider(page).await {
            Ok(listed) => listed,
            // Nothing is saved where nothing can be.
            Err(ProviderError::Unsupported { .. }) => return Ok(()),
            Err(error) => return Err(EngineError::Provider(error)),
        };
        complete &= !listed.is_partial();
        seen.extend(listed.items.into_iter().map(|seen| (seen.snapshot.id.clone(), seen)));
        let Some(next) = listed.next else { break };
        page = PageRequest { cursor: Some(next), limit: None };
    }
    // Rows are read after the listing: a row comes before anything is at the provider, so what has none now is a stray.
    let rows: BTreeMap<SnapshotId, Snapshot> =
        everything(inner).await?.into_iter().map(|row| (row.id.clone(), row)).collect();
    for (id, row) in rows.iter().filter(|(_, row)| row.state == SnapshotState::Ready) {
        match seen.get(id) {
            Some(seen) => inner.write_seen(row, seen).await?,
            None if complete => lost(inner, row).await?,
            None => {}
        }
    }
    seen.retain(|id, _| !rows.contains_key(id));
    strays(inner, seen, report).await
}

/// A row whose snapshot was not listed: it is looked at by itself, and then told as what it is (T7).
async fn lost(inner: &Arc<Inner>, row: &Snapshot) -> Result<(), EngineError> {
    let looked = inner.call(&row.fence(), inner.config.budgets.call, inner.provider.snapshot(&row.id)).await;
    if !matches!(looked, Err(ProviderError::NotFound { .. })) {
        return Ok(());
    }
    let Some(mut known) = row.seen.clone().filter(|seen| seen.integrity != SnapshotIntegrity::Damaged) else {
        return Ok(());
    };
    known.integrity = SnapshotIntegrity::Damaged;
    known.at_ms = inner.clock.now_ms();
    let next = Snapshot { seen: Some(known), version: row.version + 1, ..row.clone() };
    let by = Actor::part("snapshots");
    let lines = vec![crate::snapshot::line(&next, "snapshot.lost", &by, inner.clock.now_ms(), None)];
    match inner.store.put_snapshot(inner.epoch, next, lines).await {
        Ok(_) | Err(StoreError::SnapshotConflict { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What the provider has and no row knows. What a record begins with gets one; the rest goes, after a while.
async fn strays(
    inner: &Arc<Inner>,
    unknown: BTreeMap<SnapshotId, SnapshotSeen>,
    report: &mut Report,
) -> Result<(), EngineError> {
    let now_ms = inner.clock.now_ms();
    let grace_ms = u64::try_from(inner.config.periods.orphan_grace.as_millis()).unwrap_or(u64::MAX);
    let due: BTreeSet<SnapshotId> = {
        let mut kept = inner.reconcilers.strays.lock();
        kept.strays.retain(|id, _| unknown.contains_key(id));
        let mut due = BTreeSet::new();
        for id in unknown.keys() {
            let (since_ms, listings) = kept.strays.entry(id.clone()).or_insert((now_ms, 0));
            *listings += 1;
            if *listings >= 2 && now_ms.saturating_sub(*since_ms) >= grace_ms {
                due.insert(id.clone());
            }
        }
        due
    };
    for (id, seen) in unknown {
        let sandbox = seen.snapshot.source.sandbox.clone();
        let record = inner.store.get(&sandbox).await?;
        match record {
            // It was saved before there were rows.
            Some(record) if record.uses().contains(&id) => {
                report.found += 1;
                adopt(inner, record, seen).await?;
                report.did += 1;
            }
            Some(record) if is_being_saved(&record, &id) => {}
            Some(_) | None if due.contains(&id) => {
                report.found += 1;
                match inner.remove_stray(&sandbox, &seen.snapshot).await {
                    Ok(()) => report.did += 1,
                    Err(error) => {
                        tracing::warn!(component = "reconcile", snapshot = %id, %error, "could not be removed");
                        report.failed += 1;
                    }
                }
            }
            Some(_) | None => {}
        }
    }
    Ok(())
}

fn is_being_saved(record: &Sandbox, id: &SnapshotId) -> bool {
    matches!(outstanding(record), Some((Effect::Save { snapshot, .. }, _)) if snapshot == *id)
}

/// Gives a row to what a record begins with.
async fn adopt(inner: &Arc<Inner>, record: Sandbox, seen: SnapshotSeen) -> Result<(), EngineError> {
    let now_ms = inner.clock.now_ms();
    let mut row = inner.auto_row(&record, seen.snapshot.id.clone(), Some(&seen.snapshot));
    row.generation = seen.snapshot.source.generation;
    row.created_at_ms = seen.snapshot.created_at_ms;
    row.seen = Some(crate::snapshot::seen_now(&seen, now_ms));
    let line = crate::snapshot::line(&row, "snapshot.adopted", &Actor::part("snapshots"), now_ms, None);
    let next = Sandbox { version: record.version + 1, ..record };
    match inner.commit(next, vec![line], None, None, vec![row]).await {
        // Whoever was faster is looked at next time.
        Ok(_) | Err(EngineError::Store(StoreError::Conflict { .. } | StoreError::SnapshotConflict { .. })) => Ok(()),
        Err(error) => Err(error),
    }
}
