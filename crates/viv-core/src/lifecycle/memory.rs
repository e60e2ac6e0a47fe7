//! What becomes of memory when a sandbox is saved, and when it runs again (L13, X5).
//!
//! ```text
//!   hibernating ──► saving ──► kept ──resuming──► restored
//!                     │          │                   │ (never became ready)
//!                     ▼          └─► not restored ◄──┘
//!                 not saved
//! ```
//!
//! What was to go to disk only because the machine's memory got short, and could not, is not saved without it: it stays
//! frozen, and is left alone for a while ([`KeptFrozen`]).
//!
//! Invariant: a memory is restored once at the most. What was not restored, or was and is gone since, is followed by
//! the files of the same moment alone.

use serde::{Deserialize, Serialize};

use super::Sandbox;
use crate::exec::ExecState;
use crate::id::SnapshotId;
use crate::service::ServiceRun;
use crate::snapshot::SnapshotMemory;

/// Why a command is lost that was suspended, and whose memory did not come back.
pub const MEMORY_NOT_RESTORED: &str = "memory_not_restored";

/// What became of the memory of a sandbox whose policy asks for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Memory {
    /// It is being saved, with the files of the same moment.
    Saving,
    /// It is saved.
    Kept {
        /// With this.
        snapshot: SnapshotId,
    },
    /// The current instance began with it.
    Restored {
        /// From this.
        snapshot: SnapshotId,
    },
    /// The files were saved without it; or nothing was, and it is frozen as before.
    NotSaved {
        /// Why.
        why: String,
    },
    /// The instance after it began with the files alone.
    NotRestored {
        /// Where it was, and what was dumped is as long as that is there.
        snapshot: SnapshotId,
        /// Why.
        why: String,
    },
}

/// It was frozen, and its memory was to go to disk because the machine's got short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFrozen {
    /// Since when it has been frozen: its window goes on meanwhile.
    pub since_ms: u64,
    /// How often that did not succeed.
    pub failures: u32,
    /// It is not tried again before this.
    pub until_ms: u64,
}

impl Sandbox {
    /// Has a sandbox that was just asked for go on with the memory of what it was forked from: its services are copies
    /// of those that ran there.
    #[must_use]
    pub fn with_memory(mut self, snapshot: &SnapshotId, memory: &SnapshotMemory) -> Self {
        self.memory = Some(Memory::Kept { snapshot: snapshot.clone() });
        let copies = memory.services.iter().map(|(name, run)| {
            let execution = run.execution.copied_into(&self.id);
            (name.clone(), ServiceRun { generation: self.generation, execution, after: None, ..run.clone() })
        });
        self.services = copies.collect();
        self
    }

    /// Whether what runs in it is being saved with its memory, or was.
    pub fn suspends(&self) -> bool {
        matches!(self.memory, Some(Memory::Saving | Memory::Kept { .. }))
    }

    /// Whether the memory that was saved with this snapshot is to be restored.
    pub(super) fn has_memory_of(&self, snapshot: &SnapshotId) -> bool {
        matches!(&self.memory, Some(Memory::Kept { snapshot: kept }) if kept == snapshot)
    }

    /// What was suspended does not come back.
    pub(super) fn lose_suspended(&mut self, now_ms: u64) {
        for lost in &mut self.lost_executions {
            if lost.status.state == ExecState::Suspended {
                lost.status.state = ExecState::Lost { cause: MEMORY_NOT_RESTORED.to_owned() };
                lost.status.ended_at_ms = Some(now_ms);
            }
        }
    }

    /// What was suspended runs again, and is told by who runs it.
    pub(super) fn forget_suspended(&mut self) {
        self.lost_executions.retain(|lost| lost.status.state != ExecState::Suspended);
    }
}
