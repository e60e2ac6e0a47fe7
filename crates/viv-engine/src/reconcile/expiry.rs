//! Hard deadlines that have passed without a word. The shim ends the instance; this only makes sure that it is known.

use std::sync::Arc;

use viv_core::lifecycle::PhaseName;
use viv_store::ListQuery;

use super::Report;
use crate::engine::Inner;
use crate::error::EngineError;

/// How many records are read at a time.
const PAGE: usize = 500;

/// The end of one that is this late was not pushed, or was lost.
const LATE_MS: u64 = 5_000;

pub(super) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let mut report = Report::default();
    let mut query = ListQuery {
        phases: vec![PhaseName::Ready, PhaseName::Frozen, PhaseName::Verifying],
        deleted: true,
        limit: PAGE,
        ..ListQuery::default()
    };
    loop {
        let page = inner.store.list(&query).await?;
        let now_ms = inner.clock.now_ms();
        for sandbox in &page.items {
            if sandbox.expires_at_ms.is_some_and(|at_ms| at_ms + LATE_MS <= now_ms) {
                report.found += 1;
                report.did += u64::from(inner.look_at_instance(sandbox, sandbox.generation).await?);
            }
        }
        let Some(next) = page.next else { return Ok(report) };
        query.after = Some(next);
    }
}
