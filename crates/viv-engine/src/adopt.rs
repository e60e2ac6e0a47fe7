//! What is done at the start: every record that is not at rest is taken up where it is (J4).

use std::sync::Arc;

use viv_core::lifecycle::PhaseName;
use viv_store::ListQuery;

use crate::engine::Inner;
use crate::error::EngineError;

/// How many records are read at a time.
const PAGE: usize = 500;

/// Sets alarms, waits for ends and wakes drivers, in proportion to what is alive, not to what is recorded.
pub(crate) async fn adopt(inner: &Arc<Inner>) -> Result<(), EngineError> {
    let mut query = ListQuery {
        phases: PhaseName::MAY_LIVE.into_iter().chain([PhaseName::Hibernated]).collect(),
        deleted: true,
        limit: PAGE,
        ..ListQuery::default()
    };
    loop {
        let page = inner.store.list(&query).await?;
        for sandbox in &page.items {
            inner.committed(sandbox);
        }
        let Some(next) = page.next else { break };
        query.after = Some(next);
    }
    // Snapshots that were being made or removed.
    inner.adopt_snapshots().await?;
    // What ended, or came back, while nobody looked.
    inner.reconcilers.signal_all();
    // And what was left on the machine and in the store (J2).
    inner.reconcilers.compare_everything();
    Ok(())
}
