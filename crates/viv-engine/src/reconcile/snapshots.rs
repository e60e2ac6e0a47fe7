//! Snapshots: those that are too many or too old go, by the policy of their sandbox; those that were left in the middle
//! are taken up; what is at the provider and nobody's is removed, and what is seen there is written down (L11).
//!
//! Three passes, so that a minute costs what changed and not what there is:
//!
//! | | when | what is looked at |
//! |---|---|---|
//! | rung | a sandbox was put to rest, or is over | its rows |
//! | the minute's | `periods.snapshots` | what was left in the middle, and what something happened to |
//! | whole | at the start, by hand, `periods.snapshots_all`, and each minute while something is left to do | all |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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

/// For how long a new one is looked at each minute until its content is hashed. Where that takes longer, or is never
/// done, the whole comparison is soon enough: whoever asks for one by its id is told the present anyway.
const FRESH_MS: u64 = 600_000;

/// What is kept between runs.
#[derive(Debug, Default)]
pub(crate) struct Strays(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// Sandboxes that have something new, and the bell was rung for.
    touched: BTreeSet<SandboxId>,
    /// Sandboxes that are looked at in the next minute.
    later: BTreeSet<SandboxId>,
    /// Snapshots that are looked at in the next minute, with the rest of their sandbox.
    watched: BTreeSet<SnapshotId>,
    /// All of them are to be looked at, whenever that was last done.
    wanted: bool,
    /// When it last was more than what the bell was rung for.
    looked_at_ms: Option<u64>,
    /// When all of them were last looked at.
    all_at_ms: Option<u64>,
    /// What no row knows: since when, and in how many listings.
    strays: BTreeMap<SnapshotId, (u64, u32)>,
}

/// What a run looks at.
enum Pass {
    /// These, for they were rung for.
    Rung(BTreeSet<SandboxId>),
    /// These, and what is not settled.
    Minute(BTreeSet<SandboxId>, BTreeSet<SnapshotId>),
    Whole,
}

impl Kept {
    /// What is to be looked at now.
    fn next(&mut self, now_ms: u64, period: Duration, whole_period: Duration) -> Pass {
        let is_within = |at_ms: Option<u64>, period: Duration| {
            at_ms.is_some_and(|at_ms| u128::from(now_ms.saturating_sub(at_ms)) < period.as_millis())
        };
        let mut touched = std::mem::take(&mut self.touched);
        // However often the bell rings, the rest is looked at once in a minute.
        if !touched.is_empty() && is_within(self.looked_at_ms, period) {
            return Pass::Rung(touched);
        }
        self.looked_at_ms = Some(now_ms);
        let is_due = !is_within(self.all_at_ms, whole_period);
        let (mut later, watched) = (std::mem::take(&mut self.later), std::mem::take(&mut self.watched));
        // Strays go after two listings and a grace, which are counted in minutes and not in hours.
        if is_due || self.wanted || !self.strays.is_empty() {
            (self.all_at_ms, self.wanted) = (Some(now_ms), false);
            return Pass::Whole;
        }
        later.append(&mut touched);
        Pass::Minute(later, watched)
    }
}

impl Strays {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn touch(&self, sandbox: &SandboxId) {
        self.lock().touched.insert(sandbox.clone());
    }

    /// Something may have happened to what was saved of it: it is looked at in the next minute.
    pub(crate) fn look_later(&self, sandbox: &SandboxId) {
        self.lock().later.insert(sandbox.clone());
    }

    /// Something happened to this one: it is looked at in the next minute.
    pub(crate) fn watch(&self, snapshot: &SnapshotId) {
        self.lock().watched.insert(snapshot.clone());
    }

    /// All of them are looked at in the next run.
    pub(crate) fn want_all(&self) {
        self.lock().wanted = true;
    }
}

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let periods = &inner.config.periods;
    let strays = &inner.reconcilers.strays;
    let pass = strays.lock().next(inner.clock.now_ms(), periods.snapshots, periods.snapshots_all);
    let looked = match pass {
        Pass::Rung(sandboxes) => look_at(inner, &sandboxes).await,
        Pass::Minute(sandboxes, watched) => minute(inner, sandboxes, watched).await,
        Pass::Whole => whole(inner).await,
    };
    // Nobody knows what it did not come to.
    if looked.is_err() {
        strays.want_all();
    }
    looked
}

async fn look_at(inner: &Arc<Inner>, sandboxes: &BTreeSet<SandboxId>) -> Result<Report, EngineError> {
    let mut report = Report::default();
    for sandbox in sandboxes {
        let rows = inner.rows_of(sandbox).await?;
        tidy(inner, Some(sandbox), &rows, &mut report).await?;
    }
    Ok(report)
}

async fn minute(
    inner: &Arc<Inner>,
    mut sandboxes: BTreeSet<SandboxId>,
    watched: BTreeSet<SnapshotId>,
) -> Result<Report, EngineError> {
    inner.adopt_snapshots().await?;
    for id in &watched {
        inner.refresh_snapshot(id).await;
        let Some(row) = inner.store.snapshot(id).await? else { continue };
        match &row.sandbox {
            Some(sandbox) => drop(sandboxes.insert(sandbox.clone())),
            None => watch_while_fresh(inner, &row),
        }
    }
    look_at(inner, &sandboxes).await
}

async fn whole(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let mut report = Report::default();
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

/// One whose content is not hashed yet soon is: whoever lists them is to see that before the hour is over.
fn watch_while_fresh(inner: &Arc<Inner>, row: &Snapshot) {
    let is_hashed = row.seen.as_ref().is_some_and(|seen| seen.integrity != SnapshotIntegrity::Pending);
    let age_ms = inner.clock.now_ms().saturating_sub(row.created_at_ms);
    if row.state == SnapshotState::Ready && !is_hashed && age_ms < FRESH_MS {
        inner.reconcilers.strays.watch(&row.id);
    }
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
    for row in rows {
        watch_while_fresh(inner, row);
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
            // An instance that began with it is still there, or somebody was faster: that is over soon.
            Err(EngineError::SnapshotInUse { .. } | EngineError::Store(StoreError::SnapshotConflict { .. })) => {
                inner.reconcilers.strays.watch(&row.id);
            }
            Err(error) => {
                inner.reconcilers.strays.watch(&row.id);
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
    // One that was not listed is looked at when somebody can list it.
    if !complete {
        inner.reconcilers.strays.want_all();
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
