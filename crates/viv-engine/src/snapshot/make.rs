//! Making a snapshot: of what runs, live; of what is saved already, without copying anything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use viv_core::lifecycle::{Actor, FreezeStep, Phase, Sandbox};
use viv_core::planted::{Planted, is_planted};
use viv_core::snapshot::{ForkPlan, SNAPSHOTS_MAX, Snapshot, SnapshotKind, SnapshotMemory, SnapshotState};
use viv_core::spec::{Name, check_pairs};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{ProviderError, SaveRequest};
use viv_store::{Change, Idempotency, StoreError};

use super::repeat::{Made, first, making};
use super::{line, seen_when_saved};
use crate::aim::Aim;
use crate::command::KeyedBy;
use crate::engine::{Engine, Inner, RACES_MAX};
use crate::error::EngineError;

/// The first wait before a save is tried again whose answer was lost; it doubles.
const BACKOFF: Duration = Duration::from_millis(200);

/// The longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// A snapshot that somebody wants.
#[derive(Debug, Clone)]
pub struct NewSnapshot {
    /// What it is called.
    pub name: Option<Name>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Who asks.
    pub by: Actor,
    /// The key under which the request can be repeated.
    pub key: Option<KeyedBy>,
}

/// What came of asking for a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotMade {
    /// Its row.
    pub row: Snapshot,
    /// Whether this request made it; otherwise one before it with the same key did.
    pub fresh: bool,
}

impl Engine {
    /// Makes a snapshot of a sandbox, and answers when it is there. What runs stands still for the copy and runs on;
    /// what is saved already is that snapshot, which is kept from now on.
    ///
    /// It is made also when whoever asks goes away: the row that says so is durable first.
    pub async fn make_snapshot(&self, aim: impl Into<Aim>, new: NewSnapshot) -> Result<SnapshotMade, EngineError> {
        let (inner, aim) = (&self.inner, aim.into());
        if inner.is_ending() {
            return Err(EngineError::ShuttingDown);
        }
        check_pairs("labels", &new.labels)?;
        let record = inner.load(aim.sandbox()).await?;
        // What is saved already is that snapshot.
        let saved = if let Phase::Hibernated { snapshot } = record.phase { Some(snapshot) } else { None };
        let id = saved.clone().unwrap_or_else(|| SnapshotId::from_bytes((inner.draw)()));
        let keyed = inner.keyed(new.key.clone(), "snapshots.create", &record.project);
        if let Some(before) = inner.made_before(keyed.as_ref()).await? {
            return inner.made_again(&before).await;
        }
        let keyed = making(keyed, &Made { snapshot: id.clone(), sandboxes: Vec::new() });
        let rows = inner.rows_of(aim.sandbox()).await?;
        let asked_for = rows.iter().filter(|row| row.kind == SnapshotKind::Manual).count();
        if asked_for >= SNAPSHOTS_MAX {
            let (used, max) = (asked_for as u64, SNAPSHOTS_MAX as u64);
            return Err(EngineError::Quota { limit: "snapshots of a sandbox", used, max });
        }
        let made = match saved {
            Some(saved) => inner.keep_saved(&aim, &saved, &new, keyed.as_ref()).await,
            None => inner.begin_live(&aim, &id, SnapshotKind::Manual, &new, None, keyed.as_ref()).await,
        };
        match first(made, keyed.as_ref())? {
            Ok(row) => {
                // There may be one too many now, also where what was saved already is kept.
                inner.reconcilers.strays.watch(&row.id);
                Ok(SnapshotMade { row, fresh: true })
            }
            Err(before) => inner.made_again(&before).await,
        }
    }
}

impl Inner {
    /// What a request before this one makes, or made.
    async fn made_again(self: &Arc<Self>, made: &Made) -> Result<SnapshotMade, EngineError> {
        let row = self.wait_saved(&made.snapshot).await?;
        let row = row.ok_or_else(|| EngineError::NoSnapshot { which: made.snapshot.clone() })?;
        Ok(SnapshotMade { row, fresh: false })
    }

    /// Records that a snapshot of what runs is wanted, makes it, and answers when it is there.
    pub(super) async fn begin_live(
        self: &Arc<Self>,
        aim: &Aim,
        id: &SnapshotId,
        kind: SnapshotKind,
        new: &NewSnapshot,
        fork: Option<ForkPlan>,
        keyed: Option<&Idempotency>,
    ) -> Result<Snapshot, EngineError> {
        let now_ms = self.clock.now_ms();
        let row = self
            .write_row(aim, keyed, |record| {
                need_alive(record)?;
                let row = Snapshot {
                    id: id.clone(),
                    project: record.project.clone(),
                    sandbox: Some(record.id.clone()),
                    generation: record.generation,
                    parent: None,
                    kind,
                    name: new.name.clone(),
                    labels: new.labels.clone(),
                    state: SnapshotState::Saving,
                    version: 1,
                    created_at_ms: now_ms,
                    by: new.by.clone(),
                    memory: fork
                        .as_ref()
                        .filter(|plan| plan.memory)
                        .map(|_| SnapshotMemory { services: record.services.clone() }),
                    seen: None,
                    fork: fork.clone(),
                };
                let line = line(&row, "snapshot.asked_for", &new.by, now_ms, None);
                Ok((row, line))
            })
            .await?;
        self.reached("snapshot.committed");
        let (tell, told) = oneshot::channel();
        self.work_on_snapshot(&row.id, Some(tell));
        told.await.map_err(|_| EngineError::ShuttingDown)??;
        self.snapshot_row(None, id).await
    }

    /// What was saved by hibernating is kept from now on: it is what was asked for, and nothing is copied.
    async fn keep_saved(
        self: &Arc<Self>,
        aim: &Aim,
        saved: &SnapshotId,
        new: &NewSnapshot,
        keyed: Option<&Idempotency>,
    ) -> Result<Snapshot, EngineError> {
        let known = self.store.snapshot(saved).await?;
        let now_ms = self.clock.now_ms();
        self.write_row(aim, keyed, |record| {
            if record.phase != (Phase::Hibernated { snapshot: saved.clone() }) {
                return Err(not_now(record));
            }
            let known =
                known.clone().unwrap_or_else(|| Snapshot { version: 0, ..self.auto_row(record, saved.clone(), None) });
            if known.sandbox.as_ref() != Some(&record.id) || known.state != SnapshotState::Ready {
                let hint = "it is that snapshot: fork it, or make it run first".to_owned();
                return Err(EngineError::Invalid { what: format!("nothing was changed since {saved}"), hint });
            }
            let mut labels = known.labels.clone();
            labels.extend(new.labels.clone());
            let row = Snapshot {
                kind: SnapshotKind::Manual,
                name: new.name.clone().or_else(|| known.name.clone()),
                labels,
                version: known.version + 1,
                ..known
            };
            let line = line(&row, "snapshot.made", &new.by, now_ms, None);
            Ok((row, line))
        })
        .await
    }

    /// Saves what the row says, however often it was begun before.
    pub(super) async fn save_snapshot(self: &Arc<Self>, row: Snapshot, sandbox: &SandboxId) -> Result<(), EngineError> {
        let until_ms = row.created_at_ms.saturating_add(self.config.timings.save_ms);
        let request = SaveRequest { snapshot: row.id.clone(), live: true, memory: row.memory.is_some() };
        let mut pause = BACKOFF;
        loop {
            let record = self.load(sandbox).await?;
            if gone(&record) && !is_planted(Planted::SnapshotAfterDelete) {
                return self.give_up_snapshot(&row, "its sandbox was deleted").await;
            }
            let hold = self.hold(&row.fence()).await?;
            let mutation = self.snapshot_mutation(&row, &hold);
            self.reached("snapshot.before");
            let saved = self.provider.save(&mutation, sandbox, &request);
            let why = match self.call(sandbox, self.config.budgets.save, saved).await {
                Ok(saved) => {
                    self.reached("snapshot.after");
                    return match self.snapshot_is_ready(&row, sandbox, &saved).await {
                        // It may have been written: the row tells whoever looks at it next.
                        Err(error @ EngineError::Store(StoreError::Unavailable { .. } | StoreError::Superseded)) => {
                            Err(error)
                        }
                        Err(error) => {
                            self.give_up_snapshot(&row, &error.to_string()).await.ok();
                            Err(error)
                        }
                        Ok(()) => Ok(()),
                    };
                }
                Err(error) if error.is_transient() || matches!(error, ProviderError::Fenced { .. }) => error,
                Err(error) => {
                    self.give_up_snapshot(&row, &crate::effect::in_words(&error)).await.ok();
                    return Err(EngineError::Provider(error));
                }
            };
            if self.clock.now_ms() >= until_ms {
                return self.give_up_snapshot(&row, &crate::effect::in_words(&why)).await;
            }
            self.pause(pause).await;
            if self.is_ending() {
                return Err(EngineError::ShuttingDown);
            }
            pause = (pause * 2).min(BACKOFF_MAX);
        }
    }

    /// It is saved: the row says so from now on, and whoever was forked from it begins, if it was not deleted meanwhile.
    async fn snapshot_is_ready(
        self: &Arc<Self>,
        row: &Snapshot,
        sandbox: &SandboxId,
        saved: &viv_provider::Snapshot,
    ) -> Result<(), EngineError> {
        // Those who would begin with it are new work.
        let _entering = row.fork.as_ref().map(|_| self.begin_entry()).transpose()?;
        for _ in 0..RACES_MAX {
            let mut record = self.load(sandbox).await?;
            if gone(&record) && !is_planted(Planted::SnapshotAfterDelete) {
                return Err(EngineError::Gone { sandbox: record.id, cause: Box::new(record.cause) });
            }
            record.version += 1;
            let now_ms = self.clock.now_ms();
            let ready = Snapshot {
                state: SnapshotState::Ready,
                version: row.version + 1,
                parent: saved.parent.clone(),
                seen: Some(seen_when_saved(saved, now_ms)),
                fork: None,
                ..row.clone()
            };
            let lines = vec![line(&ready, "snapshot.made", &row.by, now_ms, None)];
            let forks = row.fork.as_ref().map_or_else(Vec::new, |plan| self.forks(&ready, plan));
            let made: Vec<Sandbox> = forks.iter().map(|change| change.sandbox.clone()).collect();
            let own = Change {
                sandbox: record.clone(),
                lines,
                idempotency: None,
                quota: None,
                unused_since_ms: None,
                snapshots: vec![ready],
            };
            let changes = std::iter::once(own).chain(forks).collect();
            match self.store.commit_all(self.epoch, changes).await {
                Ok(_) => {
                    self.reached("snapshot.recorded");
                    self.committed(&record);
                    for sandbox in &made {
                        self.committed(sandbox);
                    }
                    self.refresh_snapshot(&row.id).await;
                    // Whoever asked for it may be gone.
                    self.reconcilers.strays.watch(&row.id);
                    return Ok(());
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(StoreError::SnapshotConflict { .. }) => {
                    let what = "it was removed meanwhile".to_owned();
                    return Err(EngineError::NotSaved { sandbox: record.id, what });
                }
                Err(StoreError::NameTaken { by }) => {
                    let name = row.fork.as_ref().and_then(|plan| plan.names.first());
                    return Err(EngineError::NameTaken { name: name.map(Name::to_string).unwrap_or_default(), by });
                }
                Err(other) => {
                    let all = std::iter::once(&record).chain(&made);
                    all.for_each(|sandbox| self.doubt(&other, &sandbox.id));
                    let error = EngineError::from(other);
                    self.heed(&error);
                    return Err(error);
                }
            }
        }
        Err(EngineError::Store(StoreError::Unavailable {
            what: format!("{sandbox} changes faster than it can be read"),
        }))
    }

    /// Nothing came of it: what the provider may have of it is removed, and then the row.
    pub(super) async fn give_up_snapshot(self: &Arc<Self>, row: &Snapshot, why: &str) -> Result<(), EngineError> {
        let sandbox = row.fence();
        let hold = self.hold(&sandbox).await?;
        let mutation = self.snapshot_mutation(row, &hold);
        let removed = self.provider.remove_snapshot(&mutation, &sandbox, &row.id);
        let removed = self.call(&sandbox, self.config.budgets.call, removed).await;
        drop(hold);
        // What fails here leaves the row, which is looked at again.
        removed.map_err(EngineError::Provider)?;
        let lines = vec![line(row, "snapshot.failed", &row.by, self.clock.now_ms(), Some(why))];
        self.store.forget_snapshot(self.epoch, &row.id, lines).await?;
        Err(EngineError::NotSaved { sandbox, what: why.to_owned() })
    }
}

/// Whether nothing is saved of it any more.
pub(super) fn gone(record: &Sandbox) -> bool {
    record.deleted || record.is_over() || record.resetting
}

/// Refuses what has no filesystem that could be saved live.
pub(super) fn need_alive(record: &Sandbox) -> Result<(), EngineError> {
    if record.deleted || record.is_over() {
        return Err(EngineError::Gone { sandbox: record.id.clone(), cause: Box::new(record.cause.clone()) });
    }
    match &record.phase {
        Phase::Ready | Phase::Frozen { step: FreezeStep::Done } => Ok(()),
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Frozen { step: FreezeStep::Freeze { .. } }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => Err(not_now(record)),
    }
}

fn not_now(record: &Sandbox) -> EngineError {
    let cause = Box::new(record.cause.clone());
    EngineError::NotRunning { sandbox: record.id.clone(), phase: record.phase.name(), cause }
}
