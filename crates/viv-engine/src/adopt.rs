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
    adopt_living(inner).await?;
    adopt_due(inner).await?;
    // Snapshots that were being made or removed.
    inner.adopt_snapshots().await?;
    // What ended, or came back, while nobody looked.
    inner.reconcilers.signal_all();
    // And what was left on the machine and in the store (J2).
    inner.reconcilers.compare_everything();
    Ok(())
}

async fn adopt_living(inner: &Arc<Inner>) -> Result<(), EngineError> {
    let phases = PhaseName::MAY_LIVE.into();
    let mut query = ListQuery { phases, deleted: true, limit: PAGE, ..ListQuery::default() };
    loop {
        let page = inner.store.list(&query).await?;
        for sandbox in &page.items {
            inner.committed(sandbox);
        }
        let Some(next) = page.next else { return Ok(()) };
        query.after = Some(next);
    }
}

/// Of what is saved, only that which somebody wants to run has something due (L3). The rest is not read: there may be
/// any number of it, and nothing is to be done.
async fn adopt_due(inner: &Arc<Inner>) -> Result<(), EngineError> {
    let mut after = None;
    loop {
        let page = inner.store.due(after.as_ref(), u64::MAX, PAGE).await?;
        for (_, id) in &page {
            if inner.knowledge.knows(id) {
                continue;
            }
            if let Some(sandbox) = inner.store.get(id).await? {
                inner.committed(&sandbox);
            }
        }
        if page.len() < PAGE {
            return Ok(());
        }
        after = page.into_iter().next_back();
    }
}
