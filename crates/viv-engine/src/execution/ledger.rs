//! What was learnt and is not written down yet.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use viv_core::execution::Execution;
use viv_core::{ExecutionId, SandboxId};

use crate::engine::Inner;
use crate::error::EngineError;

/// How long news may wait, so that many are written as one: a quick command's start and end are one write.
const GATHER: Duration = Duration::from_millis(200);

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// Most that wait, while the store cannot write. What is not kept then is asked for again from who runs it.
const PENDING_MAX: usize = 10_000;

type Rows = BTreeMap<(SandboxId, ExecutionId), Execution>;

#[derive(Debug, Default)]
pub(super) struct Ledger {
    pending: Mutex<Rows>,
    bell: Notify,
    /// One write at a time, so that whoever waited for one finds all that came before it.
    writing: tokio::sync::Mutex<()>,
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Rows> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, row: Execution) {
        let mut pending = self.lock();
        let place = (row.sandbox.clone(), row.id.clone());
        if let Some(known) = pending.get_mut(&place) {
            if let Some(better) = known.learn(&row) {
                *known = better;
            }
        } else if pending.len() < PENDING_MAX {
            pending.insert(place, row);
        }
        drop(pending);
        self.bell.notify_one();
    }

    pub(super) fn pending(&self, sandbox: &SandboxId, execution: &ExecutionId) -> Option<Execution> {
        self.lock().get(&(sandbox.clone(), execution.clone())).cloned()
    }

    /// Writes all that waits. Whether that succeeded.
    pub(super) async fn flush(&self, inner: &Arc<Inner>) -> bool {
        let _writing = self.writing.lock().await;
        let rows = self.lock().clone();
        if rows.is_empty() {
            return true;
        }
        let written = inner.store.note_executions(inner.epoch, rows.values().cloned().collect()).await;
        if let Err(error) = written.map_err(EngineError::from) {
            inner.heed(&error);
            tracing::warn!(component = "execution", %error, rows = rows.len(), "is written down in a moment");
            return false;
        }
        // What changed meanwhile is still news.
        self.lock().retain(|place, row| rows.get(place) != Some(row));
        true
    }
}

/// Writes down what is learnt, a moment after it was.
pub(super) async fn keep(inner: Arc<Inner>) {
    let mut ending = inner.ending();
    loop {
        tokio::select! {
            biased;
            _ = ending.wait_for(|ending| *ending) => break,
            () = inner.executions.ledger.bell.notified() => {}
        }
        inner.pause(GATHER).await;
        while !inner.executions.ledger.flush(&inner).await {
            inner.pause(STORE_PAUSE).await;
            if inner.is_ending() {
                break;
            }
        }
    }
    inner.executions.ledger.flush(&inner).await;
}
