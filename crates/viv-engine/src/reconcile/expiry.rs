//! Hard deadlines that have passed without a word. The shim ends the instance; this only makes sure that it is known.
//!
//! Who is late is known by the roster, and its record is read before anything follows: what is not late costs nothing.

use std::sync::Arc;

use super::Report;
use crate::engine::Inner;
use crate::error::EngineError;

/// The end of one that is this late was not pushed, or was lost.
const LATE_MS: u64 = 5_000;

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let mut report = Report::default();
    let until_ms = inner.clock.now_ms().saturating_sub(LATE_MS);
    for sandbox in inner.roster.expired(until_ms) {
        let Some(record) = inner.store.get(&sandbox).await? else { continue };
        if record.lives_until_ms().is_some_and(|at_ms| at_ms <= until_ms) {
            report.found += 1;
            report.did += u64::from(inner.look_at_instance(&record, record.generation).await?);
        }
    }
    Ok(report)
}
