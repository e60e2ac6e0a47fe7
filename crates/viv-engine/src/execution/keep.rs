//! What stays of the commands of an instance that is removed: how they ended, and of what they wrote the beginning and the
//! end (X2, J9).

use std::sync::Arc;
use std::time::Duration;

use viv_core::Generation;
use viv_core::exec::{ExecStatus, OutputEvent};
use viv_core::execution::{Keeping, KeptOutput, Place};
use viv_core::lifecycle::Sandbox;
use viv_provider::{InstanceRef, ProviderError};
use viv_store::KeptBytes;

use crate::engine::Inner;

/// Most outputs of one instance that are kept: the latest.
const OUTPUTS_MAX: usize = 64;

/// Of one output: this much of its beginning and this much of its end.
const HEAD_BYTES: usize = 64 << 10;
const TAIL_BYTES: usize = 192 << 10;

/// Of all outputs of one sandbox: so much is read again into the store, and carried along in its backups.
const SANDBOX_BYTES_MAX: u64 = 4 << 20;

/// For all of it: whoever waits for the instance to be gone waits for this too.
const KEEP_WITHIN: Duration = Duration::from_secs(5);

impl Inner {
    /// Writes down how the commands of an instance ended, and keeps what they wrote. What cannot be read, or written, is
    /// not waited for: the instance goes.
    pub(crate) async fn keep_executions(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
        mut statuses: Vec<ExecStatus>,
    ) {
        if statuses.is_empty() {
            return;
        }
        self.note_statuses(&Place { generation, ..Place::from(record) }, &statuses);
        self.executions.ledger.flush(self).await;
        statuses.sort_by_key(|status| std::cmp::Reverse(status.started_at_ms));
        let instance = InstanceRef { sandbox: record.id.clone(), generation };
        let mut outputs = Vec::new();
        let read = async {
            let mut left = SANDBOX_BYTES_MAX;
            for status in statuses.iter().take(OUTPUTS_MAX) {
                let Ok(kept) = self.read_output(&instance, status).await else { continue };
                if kept.events.is_empty() {
                    continue;
                }
                let bytes = kept.to_bytes();
                let Some(rest) = left.checked_sub(bytes.len() as u64) else { break };
                left = rest;
                outputs.push(KeptBytes {
                    execution: status.id.clone(),
                    kept_at_ms: status.ended_at_ms.unwrap_or_else(|| self.clock.now_ms()),
                    bytes,
                });
            }
        };
        if tokio::time::timeout(KEEP_WITHIN, read).await.is_err() {
            tracing::warn!(component = "execution", sandbox = %record.id, "not all outputs could be kept in time");
        }
        if outputs.is_empty() {
            return;
        }
        if let Err(error) = self.store.put_outputs(self.epoch, &record.id, outputs, SANDBOX_BYTES_MAX).await {
            tracing::warn!(component = "execution", sandbox = %record.id, %error, "outputs could not be kept");
        }
    }

    async fn read_output(
        self: &Arc<Self>,
        instance: &InstanceRef,
        status: &ExecStatus,
    ) -> Result<KeptOutput, ProviderError> {
        let mut keeping = Keeping::new(HEAD_BYTES, TAIL_BYTES);
        let mut next = 0;
        let tail = status.output_bytes.saturating_sub(TAIL_BYTES as u64);
        for (from, until) in [(0, HEAD_BYTES as u64), (tail, u64::MAX)] {
            if next >= until || (from > 0 && from <= next && next >= status.output_bytes) {
                continue;
            }
            let mut output = self.provider.attach(instance, &status.id, from.max(next), false).await?;
            while next < until
                && let Some(event) = output.next().await?
            {
                match &event {
                    OutputEvent::Chunk { offset, data, .. } => next = offset + data.len() as u64,
                    OutputEvent::Cut { to, .. } => next = *to,
                    OutputEvent::End(_) => break,
                }
                keeping.push(event);
            }
        }
        Ok(keeping.done())
    }
}
