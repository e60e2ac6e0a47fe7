//! Old lines, keys and tombstones (J9).

use std::sync::Arc;

use super::Report;
use crate::engine::Inner;
use crate::error::EngineError;

/// How many rows are touched at a time, so that writers are not kept waiting.
const BATCH: usize = 500;

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let keep_ms = u64::try_from(inner.config.periods.keep.as_millis()).unwrap_or(u64::MAX);
    let before_ms = inner.clock.now_ms().saturating_sub(keep_ms);
    let mut report = Report::default();
    loop {
        let touched = inner.store.retain(inner.epoch, before_ms, BATCH).await?;
        report.found += touched;
        report.did += touched;
        if touched == 0 || inner.is_ending() {
            return Ok(report);
        }
        tokio::task::yield_now().await;
    }
}
