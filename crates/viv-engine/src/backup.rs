//! A copy of what is recorded, of one moment, while it is written to.

use std::path::Path;

use viv_core::lifecycle::Actor;
use viv_store::NewLine;

use crate::engine::Engine;
use crate::error::EngineError;

impl Engine {
    /// Writes a copy of all records to this path. Whoever has it has all environments: that it was made is journaled.
    pub async fn backup(&self, to: &Path, by: Actor) -> Result<(), EngineError> {
        let inner = &self.inner;
        inner.store.backup(to).await?;
        let line = NewLine {
            at_ms: inner.clock.now_ms(),
            project: None,
            sandbox: None,
            generation: None,
            kind: "store.copied".to_owned(),
            from: None,
            to: None,
            cause: None,
            by,
            data: serde_json::Value::Null,
        };
        inner.store.append(inner.epoch, vec![line]).await?;
        Ok(())
    }
}
