//! Transient phases past their deadline. Alarms see to them; this is for the one that was lost.

use std::sync::Arc;

use super::Report;
use crate::engine::Inner;
use crate::error::EngineError;

/// An alarm that is this late was lost.
const LATE_MS: u64 = 5_000;

/// How many are looked at in a run.
const BATCH: usize = 500;

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let until_ms = inner.clock.now_ms().saturating_sub(LATE_MS);
    let late = inner.store.due(None, until_ms, BATCH).await?;
    for (_, sandbox) in &late {
        inner.wake(sandbox);
    }
    let count = late.len() as u64;
    Ok(Report { found: count, did: count, failed: 0 })
}
