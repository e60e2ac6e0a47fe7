//! What can go wrong in a store: a closed list.

use viv_core::{SandboxId, SnapshotId, TaskId, WebhookId};

use crate::record::{Lease, Owner, Remembered};

/// What went wrong. After any of these nothing was written, but for [`StoreError::Unavailable`].
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The record changed since it was read.
    #[error("{sandbox} has version {found}, not {expected}")]
    Conflict {
        /// Whose record.
        sandbox: SandboxId,
        /// What the change was made from.
        expected: u64,
        /// What there is; 0 is none.
        found: u64,
    },
    /// The name belongs to another sandbox of the project.
    #[error("the name is taken by {by}")]
    NameTaken {
        /// Who has it.
        by: SandboxId,
    },
    /// The idempotency key was used before.
    #[error("the idempotency key was used before")]
    Repeated(Box<Remembered>),
    /// A limit on the number of sandboxes is reached (L18).
    #[error("{limit}: {used} of {max} are in use")]
    Quota {
        /// Which limit.
        limit: &'static str,
        /// How many there are.
        used: u64,
        /// How many there may be.
        max: u64,
    },
    /// The row of a snapshot changed since it was read.
    #[error("{snapshot} has version {found}, not {expected}")]
    SnapshotConflict {
        /// Which.
        snapshot: SnapshotId,
        /// What the change was made from.
        expected: u64,
        /// What there is; 0 is none.
        found: u64,
    },
    /// A snapshot that is to go is what these sandboxes begin with (L11).
    #[error("{snapshot} is in use")]
    SnapshotInUse {
        /// Which.
        snapshot: SnapshotId,
        /// By some of those who use it.
        by: Vec<SandboxId>,
    },
    /// A record begins with a snapshot that is not there, not ready, or being removed.
    #[error("{snapshot} is not there to begin with")]
    SnapshotMissing {
        /// Which.
        snapshot: SnapshotId,
    },
    /// A lease was to be taken on what is over, or was never recorded (L20).
    #[error("{sandbox} is over")]
    Over {
        /// Which.
        sandbox: SandboxId,
    },
    /// The row of a task changed since it was read.
    #[error("{task} has version {found}, not {expected}")]
    TaskConflict {
        /// Which.
        task: TaskId,
        /// What the change was made from.
        expected: u64,
        /// What there is; 0 is none.
        found: u64,
    },
    /// The row of a subscription changed since it was read.
    #[error("{subscription} has version {found}, not {expected}")]
    SubscriptionConflict {
        /// Which.
        subscription: WebhookId,
        /// What the change was made from.
        expected: u64,
        /// What there is; 0 is none.
        found: u64,
    },
    /// Another task is at work in the sandbox.
    #[error("{by} is at work in {sandbox}")]
    TaskBusy {
        /// Where.
        sandbox: SandboxId,
        /// Who.
        by: TaskId,
    },
    /// Somebody else holds the lease.
    #[error("{} holds the lease", .0.holder)]
    Leased(Box<Lease>),
    /// Somebody else owns the store.
    #[error("{} owns the store", .0.name)]
    Owned(Box<Owner>),
    /// This process owned the store and does not any more: it must end.
    #[error("the store was taken over")]
    Superseded,
    /// It could not be written or read: full, failing, locked for too long. What was to be written may have been, as
    /// after any answer that got lost: read before it is tried again, or rely on version and idempotency key.
    #[error("the store failed: {what}")]
    Unavailable {
        /// What went wrong.
        what: String,
    },
    /// A listing was to go on after something that no page gave as `next`.
    #[error("there is no page after that")]
    BadCursor,
    /// What is stored cannot be understood: made by a newer version, or damaged.
    #[error("what is stored cannot be understood: {what}")]
    Corrupt {
        /// What.
        what: String,
    },
}
