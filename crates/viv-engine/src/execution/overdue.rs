//! Executions whose time limit has passed and of whose end nobody heard (X1): whoever runs them is asked, and who does not
//! answer is looked at. Who stays silent cannot be shown to have ended them, and that ends the sandbox (X3): what is
//! persistent is saved. So nothing runs past its limit because an agent that enforces none stands still.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use viv_core::exec::{ExecState, ExecStatus};
use viv_core::execution::{Execution, Place};
use viv_core::lifecycle::{Actor, Event, Phase, Sandbox};
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{InstanceRef, ProviderError};

use crate::engine::Inner;
use crate::error::EngineError;

/// After its time limit: what ending a whole tree may take, and a moment for it to be told.
const SLACK_MS: u64 = 5_000;

/// When one that still runs, because it was frozen, or whose agent is silent, is asked after again.
const AGAIN_MS: u64 = 5_000;

/// So often one who is silent is asked, which is over more than ten seconds (T7).
const SILENT_MAX: u32 = 3;

/// Most that are waited for; more are asked after when they are listed.
const EXPECTED_MAX: usize = 10_000;

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

type Expected = BTreeSet<(u64, SandboxId, ExecutionId)>;

#[derive(Debug, Default)]
pub(super) struct Overdue {
    expected: Mutex<Expected>,
    /// How often those were asked after in vain that did not answer.
    silent: Mutex<BTreeMap<(SandboxId, ExecutionId), u32>>,
    bell: Notify,
}

impl Overdue {
    fn lock(&self) -> MutexGuard<'_, Expected> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is to have ended by its time limit.
    pub(super) fn expect(&self, row: &Execution) {
        let (Some(limit_ms), Some(status)) = (row.limit_ms, row.status()) else { return };
        let due_ms = status.started_at_ms.saturating_add(limit_ms).saturating_add(SLACK_MS);
        self.insert(due_ms, row.sandbox.clone(), row.id.clone());
    }

    fn insert(&self, due_ms: u64, sandbox: SandboxId, execution: ExecutionId) {
        let mut expected = self.lock();
        let soonest = expected.first().is_none_or(|(first_ms, ..)| due_ms < *first_ms);
        if expected.len() < EXPECTED_MAX {
            expected.insert((due_ms, sandbox, execution));
        }
        drop(expected);
        if soonest {
            self.bell.notify_one();
        }
    }

    fn silences(&self) -> MutexGuard<'_, BTreeMap<(SandboxId, ExecutionId), u32>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_ms(&self) -> Option<u64> {
        self.lock().first().map(|(due_ms, ..)| *due_ms)
    }

    fn take(&self, now_ms: u64) -> Option<(SandboxId, ExecutionId)> {
        let mut expected = self.lock();
        if expected.first()?.0 > now_ms {
            return None;
        }
        expected.pop_first().map(|(_, sandbox, execution)| (sandbox, execution))
    }
}

pub(super) async fn keep(inner: Arc<Inner>) {
    let mut ending = inner.ending();
    let overdue = &inner.executions.overdue;
    loop {
        while let Some((sandbox, execution)) = overdue.take(inner.clock.now_ms()) {
            let asked = inner.ask_after(&sandbox, &execution).await;
            match asked {
                Ok(true) => drop(overdue.silences().remove(&(sandbox, execution))),
                Ok(false) => overdue.insert(inner.clock.now_ms().saturating_add(AGAIN_MS), sandbox, execution),
                Err(error) => {
                    inner.heed(&error);
                    overdue.insert(inner.clock.now_ms().saturating_add(AGAIN_MS), sandbox, execution);
                    inner.pause(STORE_PAUSE).await;
                }
            }
            if inner.is_ending() {
                return;
            }
        }
        let due = async {
            match overdue.next_ms() {
                Some(at_ms) => tokio::time::sleep_until(inner.clock.at(at_ms)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = ending.wait_for(|ending| *ending) => return,
            () = overdue.bell.notified() => {}
            () = due => {}
        }
    }
}

impl Inner {
    /// It cannot be shown to have ended, so its sandbox does.
    async fn end_unverified(self: &Arc<Self>, record: &Sandbox, execution: &ExecutionId) -> Result<(), EngineError> {
        let by = Actor::part(&format!("execution:{execution}"));
        // What is being checked, or was given up as lost, is saved when it is stopped.
        let rests = record.policy.persistent && record.phase == Phase::Ready;
        let event = if rests { Event::Hibernate { by } } else { Event::Stop { by } };
        tracing::warn!(component = "execution", sandbox = %record.id, %execution, "cannot be shown to have ended");
        let applied = self.apply(&record.id, &event).await.map(crate::engine::Applied::sandbox);
        match applied {
            // What is lost may live all the same: it is stopped when it is found.
            Ok(record) if record.phase == Phase::Lost => self.look_for_lost(&record.id).await,
            Ok(_) => Ok(()),
            Err(error) => {
                self.heed(&error);
                tracing::warn!(component = "execution", sandbox = %record.id, %error, "is ended in a moment");
                Ok(())
            }
        }
    }

    /// Its time limit has passed. Whether nothing more is to be found out.
    async fn ask_after(self: &Arc<Self>, sandbox: &SandboxId, execution: &ExecutionId) -> Result<bool, EngineError> {
        let stored = self.store.execution(sandbox, execution).await?;
        let known = super::newest(stored, self.executions.ledger.pending(sandbox, execution));
        let Some(row) = known.filter(Execution::is_open) else { return Ok(true) };
        let Some(record) = self.store.get(sandbox).await? else { return Ok(true) };
        let status = match row.status() {
            Some(status) if record.generation == row.generation => status.clone(),
            // Its instance is gone, and its row says so, or will.
            Some(_) | None => return Ok(true),
        };
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: row.generation };
        let asked = self.provider.execution(&instance, execution);
        let told = match self.call_agent(sandbox, self.config.budgets.probe, asked).await {
            Ok(told) if told.state.is_final() => told,
            // Frozen, its clock stands still.
            Ok(_) => return Ok(false),
            Err(ProviderError::NotFound { .. }) => {
                let state = ExecState::Lost { cause: "forgotten".to_owned() };
                ExecStatus { state, ended_at_ms: Some(self.clock.now_ms()), pid: None, ..status }
            }
            Err(ProviderError::TimedOut { .. } | ProviderError::Unavailable { .. }) => {
                self.signal_health(sandbox);
                let asked = {
                    let mut silences = self.executions.overdue.silences();
                    let asked = silences.entry((sandbox.clone(), execution.clone())).or_default();
                    *asked += 1;
                    *asked
                };
                if asked >= SILENT_MAX {
                    self.end_unverified(&record, execution).await?;
                }
                return Ok(false);
            }
            Err(_) => {
                self.signal_health(sandbox);
                return Ok(false);
            }
        };
        let place = Place { project: row.project, sandbox: row.sandbox, generation: row.generation };
        self.note_statuses(&place, &[told]);
        Ok(true)
    }
}
