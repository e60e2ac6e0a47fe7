//! Requests that are repeated under a key (L1): the work is done once, and who asks again has the same answer.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viv_core::snapshot::{Snapshot, SnapshotState};
use viv_core::spec::Project;
use viv_core::{SandboxId, SnapshotId};
use viv_store::{Idempotency, Remembered, StoreError};

use crate::command::KeyedBy;
use crate::engine::Inner;
use crate::error::EngineError;

/// How often somebody who waits for a snapshot that another request makes looks whether it is there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a request made, as it is remembered with its key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Made {
    pub(super) snapshot: SnapshotId,
    /// Those who begin with it, if it is a fork.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) sandboxes: Vec<SandboxId>,
}

impl Inner {
    /// By what a request is remembered; `None` without a key.
    pub(super) fn keyed(&self, key: Option<KeyedBy>, route: &str, project: &Project) -> Option<Idempotency> {
        let KeyedBy { key, body_hash } = key?;
        let (project, route) = (project.clone(), route.to_owned());
        Some(Idempotency { project, route, key, body_hash, at_ms: self.clock.now_ms(), made: None })
    }

    /// What the request made that came first with this key; `None` when this is the first one.
    pub(super) async fn made_before(&self, keyed: Option<&Idempotency>) -> Result<Option<Made>, EngineError> {
        let Some(keyed) = keyed else { return Ok(None) };
        let known = self.store.remembered(keyed).await?;
        known.map(|known| made_by(&known, keyed)).transpose()
    }

    /// Waits until a snapshot that somebody makes is there, or will not be.
    pub(super) async fn wait_saved(self: &Arc<Self>, id: &SnapshotId) -> Result<Option<Snapshot>, EngineError> {
        loop {
            let row = self.store.snapshot(id).await?;
            if row.as_ref().is_none_or(|row| row.state != SnapshotState::Saving) {
                return Ok(row);
            }
            // It is being worked on, in bounds; by nobody only until the next look of who takes up what was left.
            self.pause(LOOK_EVERY).await;
            if self.is_ending() {
                return Err(EngineError::ShuttingDown);
            }
        }
    }
}

/// By what a request is remembered, with what it makes.
pub(super) fn making(keyed: Option<Idempotency>, made: &Made) -> Option<Idempotency> {
    keyed.map(|keyed| Idempotency { made: serde_json::to_string(made).ok(), ..keyed })
}

/// What came of a commit under a key: its own answer, or what a request made that was faster with the same key.
pub(super) fn first<T>(
    committed: Result<T, EngineError>,
    keyed: Option<&Idempotency>,
) -> Result<Result<T, Made>, EngineError> {
    match (committed, keyed) {
        (Ok(made), _) => Ok(Ok(made)),
        (Err(EngineError::Store(StoreError::Repeated(known))), Some(keyed)) => Ok(Err(made_by(&known, keyed)?)),
        (Err(error), _) => Err(error),
    }
}

fn made_by(known: &Remembered, asked: &Idempotency) -> Result<Made, EngineError> {
    let made = known.made.as_deref().and_then(|made| serde_json::from_str::<Made>(made).ok());
    let made = made.ok_or_else(|| {
        let what = format!("what was made under the key of {} cannot be read", known.sandbox);
        EngineError::Store(StoreError::Corrupt { what })
    })?;
    if known.body_hash != asked.body_hash {
        return Err(EngineError::IdempotencyMismatch { made: made.snapshot.to_string() });
    }
    Ok(made)
}
