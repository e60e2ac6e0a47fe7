//! Executions as rows (SPEC part 3): what is learnt about them is written down beside the work, what waits is started,
//! and what should have ended is asked after.
//!
//! ```text
//!   start, cancel, list, output's end ──note──► ledger ──a moment later, all in one──► Store::note_executions
//!   a record's commit that ends an instance ──in its transaction──► what was open there is lost (X5)
//!   queue     one task per sandbox in which something waits; it starts the oldest when the sandbox is ready
//!   overdue   one sleep until the next time limit has passed: whoever was not heard of is asked
//!   follow    one wait per detached command, and per one whose client left, that a daemon before this one left open, or whose
//!             sandbox came back, for its end to be told
//!   keep      outputs of an instance that is removed
//! ```
//!
//! Invariants:
//!
//! - Whoever runs it is the truth while the instance lives; a row that was not written yet is missing from nothing but
//!   the past. So commands in the foreground cost no commit, and their rows may be a moment late.
//! - What is queued, and that a detached one is to be started, is durable before it is answered. It is started under one
//!   id in one instance, which is written down before: so it is started once, whoever dies when.

mod follow;
mod keep;
mod ledger;
mod overdue;
mod queue;

use std::sync::Arc;

use viv_core::exec::ExecStatus;
use viv_core::execution::{Execution, KeptOutput, Place, Stage};
use viv_core::lifecycle::{Phase, Sandbox};
use viv_core::{ExecutionId, SandboxId};
use viv_provider::InstanceRef;
use viv_store::{ExecutionListing, ExecutionQuery};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

pub use queue::QueueRequest;

/// How many rows are read at a time.
const PAGE: usize = 500;

/// What is kept in memory of executions: nothing that the store and the provider do not have.
#[derive(Debug, Default)]
pub(crate) struct Executions {
    ledger: ledger::Ledger,
    overdue: overdue::Overdue,
    follow: follow::Follow,
    queues: queue::Queues,
}

impl Executions {
    pub(crate) fn end(&self) {
        self.queues.end();
        self.follow.end();
    }
}

/// Takes up what waits and what runs by its row, and begins to write down what is learnt.
pub(crate) async fn spawn(engine: &Engine) -> Result<(), EngineError> {
    tokio::spawn(ledger::keep(engine.inner.clone()));
    tokio::spawn(overdue::keep(engine.inner.clone()));
    let mut query = ExecutionQuery { open: true, limit: PAGE, ..ExecutionQuery::default() };
    loop {
        let page = engine.inner.store.executions(&query).await?;
        for row in page.items {
            if row.queued().is_some() {
                engine.wake_queue(&row.sandbox);
            } else {
                engine.inner.attend_execution(&row);
                // Whoever listened to it, and what was learnt and not written down yet, died with the daemon before.
                engine.inner.follow_execution(&row);
            }
        }
        let Some(next) = page.next else { return Ok(()) };
        query.after = Some(next);
    }
}

impl Inner {
    /// Something was learnt about an execution: written down in a moment, and attended to while it runs.
    pub(crate) fn note_execution(self: &Arc<Self>, row: Execution) {
        self.attend_execution(&row);
        self.executions.ledger.note(row);
    }

    fn attend_execution(self: &Arc<Self>, row: &Execution) {
        self.trace_execution(row);
        if !row.is_open() || row.status().is_none() {
            return;
        }
        self.executions.overdue.expect(row);
        if row.detached {
            self.follow_execution(row);
        }
    }

    /// What was told about commands of an instance.
    pub(crate) fn note_statuses(self: &Arc<Self>, place: &Place, statuses: &[ExecStatus]) {
        let now_ms = self.clock.now_ms();
        for status in statuses {
            let row = Execution::found(place.clone(), status.clone(), now_ms);
            self.trace_execution(&row);
            if status.state.is_final() {
                self.roster.ended(&place.sandbox, now_ms);
            }
            self.executions.ledger.note(row);
        }
    }

    /// It was away, frozen or silent, and is back: who listened to what runs in it may have given up (X1).
    pub(crate) fn follow_what_is_open(self: &Arc<Self>, sandbox: &Sandbox) {
        let (inner, sandbox) = (self.clone(), sandbox.clone());
        tokio::spawn(async move {
            let query =
                ExecutionQuery { sandbox: Some(sandbox.id), open: true, limit: PAGE, ..ExecutionQuery::default() };
            inner.executions.ledger.flush(&inner).await;
            // Without an answer it is as it was before: whoever lists them learns how they are.
            let Ok(found) = inner.store.executions(&query).await else { return };
            for row in found.items.iter().filter(|row| row.generation == sandbox.generation) {
                inner.follow_execution(row);
            }
        });
    }

    /// Its instance ended and was not removed: how its commands ended is known from it, and they do not run (X6).
    pub(crate) fn learn_of_lost(self: &Arc<Self>, sandbox: &Sandbox) {
        if sandbox.phase != Phase::Lost || self.is_ending() {
            return;
        }
        let (inner, sandbox) = (self.clone(), sandbox.clone());
        tokio::spawn(async move {
            let open =
                ExecutionQuery { sandbox: Some(sandbox.id.clone()), open: true, limit: 1, ..ExecutionQuery::default() };
            inner.executions.ledger.flush(&inner).await;
            if inner.store.executions(&open).await.is_ok_and(|found| found.items.is_empty()) {
                return;
            }
            let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
            let asked = inner.call(&sandbox.id, inner.config.budgets.call, inner.provider.executions(&instance)).await;
            if let Ok(statuses) = asked {
                inner.note_statuses(&Place::from(&sandbox), &statuses);
            }
        });
    }
}

impl Engine {
    /// A fresh id for a command.
    pub fn new_execution(&self) -> ExecutionId {
        ExecutionId::from_bytes((self.inner.draw)())
    }

    /// What is recorded of an execution, with what was learnt a moment ago.
    pub async fn execution_row(
        &self,
        sandbox: &SandboxId,
        execution: &ExecutionId,
    ) -> Result<Option<Execution>, EngineError> {
        let news = self.inner.executions.ledger.pending(sandbox, execution);
        // What was started here a moment ago is known in full.
        if let Some(row) = news.as_ref().filter(|row| !row.is_open() && row.is_asked()) {
            return Ok(Some(row.clone()));
        }
        let stored = self.inner.store.execution(sandbox, execution).await?;
        let Some(mut row) = newest(stored, news) else { return Ok(None) };
        self.settled(&mut row).await?;
        Ok(Some(row))
    }

    /// A page of rows, newest first, with what was learnt a moment ago about those.
    pub async fn execution_rows(&self, query: &ExecutionQuery) -> Result<ExecutionListing, EngineError> {
        // A listing is no hot path: what waits to be written is written first, so that pages are whole.
        self.inner.executions.ledger.flush(&self.inner).await;
        let mut page = self.inner.store.executions(query).await?;
        for row in &mut page.items {
            if row.is_open() {
                self.settled(row).await?;
            }
        }
        Ok(page)
    }

    /// As the record of its sandbox has it: what is lost with its instance does not run in any listing.
    async fn settled(&self, row: &mut Execution) -> Result<(), EngineError> {
        if !row.is_open() {
            return Ok(());
        }
        if let Some(sandbox) = self.inner.store.get(&row.sandbox).await?
            && !row.settle(&sandbox)
            && row.status().is_some()
            && matches!(sandbox.phase, Phase::Lost | Phase::Failed { .. })
        {
            let cause = sandbox.cause.cause.code().to_owned();
            row.end(viv_core::exec::ExecState::Lost { cause }, sandbox.phase_since_ms, true);
        }
        Ok(())
    }

    /// Something was learnt about commands by who looked.
    pub fn learnt(&self, sandbox: &Sandbox, statuses: &[ExecStatus]) {
        self.inner.note_statuses(&Place::from(sandbox), statuses);
    }

    /// Who listened to a command has left: the end of one that is listed as running is listened for in his place (X1).
    pub fn hear_out(&self, sandbox: SandboxId, execution: ExecutionId) {
        let engine = self.clone();
        tokio::spawn(async move {
            // Without an answer it is as it was before: whoever lists them learns how they are.
            if let Ok(Some(row)) = engine.execution_row(&sandbox, &execution).await {
                engine.inner.follow_execution(&row);
            }
        });
    }

    /// What is kept of an output whose instance is gone.
    pub async fn kept_output(
        &self,
        sandbox: &SandboxId,
        execution: &ExecutionId,
    ) -> Result<Option<KeptOutput>, EngineError> {
        let kept = self.inner.store.output(sandbox, execution).await?;
        Ok(kept.and_then(|bytes| KeptOutput::from_bytes(&bytes)))
    }
}

fn newest(stored: Option<Execution>, news: Option<Execution>) -> Option<Execution> {
    match (stored, news) {
        (Some(stored), Some(news)) => Some(stored.learn(&news).unwrap_or(stored)),
        (stored, news) => stored.or(news),
    }
}

/// A row of one that was started.
pub(crate) fn started(mut row: Execution, status: ExecStatus, now_ms: u64) -> Execution {
    row.stage = Stage::Started { status, concluded: false };
    row.learnt_at_ms = now_ms;
    row
}
