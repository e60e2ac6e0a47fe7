//! What is stored beside the journal, as data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::schedule::Schedule;
use viv_core::snapshot::Snapshot;
use viv_core::spec::{Name, Project};
use viv_core::{FencingToken, SandboxId, ScheduleId};

use crate::journal::NewLine;

/// One transaction: a record, the lines about it, and what hangs on them.
#[derive(Debug, Clone)]
pub struct Change {
    /// The record as it is to be. Its version is one more than what it was made from; 1 is a new one.
    pub sandbox: Sandbox,
    /// The lines about the change.
    pub lines: Vec<NewLine>,
    /// For what makes something: the key under which it is remembered, checked and written in the same transaction (L1).
    pub idempotency: Option<Idempotency>,
    /// For what makes something run, or lets it use more: the limits that are counted from rows in the same
    /// transaction (L18).
    pub quota: Option<Quota>,
    /// For a decision that nobody uses it: refused as a conflict if somebody did after this, which is looked at in the
    /// same transaction (L6).
    pub unused_since_ms: Option<u64>,
    /// Rows of snapshots that are written with the record: by its compare-and-set, and each by its own (L11).
    pub snapshots: Vec<Snapshot>,
}

/// A key that a client gave, so that repeating its request does the work once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    /// Per project.
    pub project: Project,
    /// And route.
    pub route: String,
    /// The key.
    pub key: String,
    /// A hash of the body that came with it.
    pub body_hash: [u8; 32],
    /// When.
    pub at_ms: u64,
    /// What was made beside the record, in the words of who asks. With it the key is kept for its time; without, also
    /// until the record is over.
    pub made: Option<String>,
}

/// What is known about a key that was used before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remembered {
    /// The hash of the body that came with it.
    pub body_hash: [u8; 32],
    /// The record that was written with it.
    pub sandbox: SandboxId,
    /// When.
    pub at_ms: u64,
    /// What was made beside that.
    pub made: Option<String>,
}

/// How many sandboxes there may be whose phase is one of [`PhaseName::MAY_LIVE`], and what they may be allowed to use
/// together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// In all projects.
    pub total_max: u64,
    /// In the project of the one that is written.
    pub project_max: u64,
    /// The sum of their limits, in all projects.
    pub total_sums_max: SumsMax,
    /// In the project of the one that is written.
    pub project_sums_max: SumsMax,
    /// What a limit that is no number counts as.
    pub weights: Weights,
}

impl Quota {
    /// The word for the limit in all projects, in [`crate::StoreError::Quota`].
    pub const TOTAL: &'static str = "sandboxes";
    /// The word for the limit in one project.
    pub const PROJECT: &'static str = "sandboxes_per_project";

    /// Whether a limit in [`crate::StoreError::Quota`] is one of all projects together.
    pub fn is_total(limit: &str) -> bool {
        limit == Self::TOTAL || crate::rules::SUMS.contains(&limit)
    }

    /// Limits of numbers alone.
    pub fn of(total_max: u64, project_max: u64) -> Self {
        Self {
            total_max,
            project_max,
            total_sums_max: SumsMax::default(),
            project_sums_max: SumsMax::default(),
            weights: Weights::default(),
        }
    }

    /// Whether limits have to be added up at all.
    pub fn has_sums(&self) -> bool {
        self.total_sums_max != SumsMax::default() || self.project_sums_max != SumsMax::default()
    }
}

/// What sandboxes may use together: the sum of their limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Thousandths of one processor.
    pub cpu_millis: u64,
    /// Memory.
    pub memory_bytes: u64,
    /// Disk.
    pub disk_bytes: u64,
    /// Processes and threads.
    pub processes: u64,
}

/// What such sums may be; `None` is anything.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SumsMax {
    /// Thousandths of one processor.
    pub cpu_millis: Option<u64>,
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Disk.
    pub disk_bytes: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
}

/// What a limit that is no number counts as in [`Sums`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weights {
    /// Nothing was said: what the provider gives then.
    pub unsaid: Sums,
    /// It was said that there is none: all that the machine has.
    pub unlimited: Sums,
}

/// Which snapshots to list: newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Only those that are being made or removed.
    pub unsettled: bool,
    /// After this one, which the page before gave as `next`; anything else is [`crate::StoreError::BadCursor`].
    pub after: Option<String>,
    /// At most this many.
    pub limit: usize,
}

/// A page of snapshots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotListing {
    /// The rows.
    pub items: Vec<Snapshot>,
    /// Where to go on.
    pub next: Option<String>,
}

/// Which records to list: newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// With all of these labels.
    pub labels: BTreeMap<String, String>,
    /// In one of these phases; empty is any.
    pub phases: Vec<PhaseName>,
    /// With this name.
    pub name: Option<Name>,
    /// Whether those that were deleted are listed too.
    pub deleted: bool,
    /// After this one, which the page before gave as `next`; anything else is [`crate::StoreError::BadCursor`].
    pub after: Option<String>,
    /// At most this many.
    pub limit: usize,
}

/// A page of records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The records.
    pub items: Vec<Sandbox>,
    /// Where to go on.
    pub next: Option<String>,
}

/// Which schedules to list: in the order of their ids, which is that in which they were made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScheduleQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// Of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// After this one.
    pub after: Option<ScheduleId>,
    /// At most this many.
    pub limit: usize,
}

impl ScheduleQuery {
    /// The word for how many a sandbox may have, in [`crate::StoreError::Quota`].
    pub const LIMIT: &'static str = "schedules_per_sandbox";
}

/// A page of schedules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScheduleListing {
    /// The schedules.
    pub items: Vec<Schedule>,
    /// Where to go on.
    pub next: Option<ScheduleId>,
}

/// How many records are in each phase, deleted ones left out.
pub type PhaseCounts = BTreeMap<PhaseName, u64>;

/// How writes were put together: those that wait while one is made durable are one transaction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Groups {
    /// Transactions.
    pub count: u64,
    /// Writes in them.
    pub writes: u64,
    /// Writes in the last one.
    pub last: u64,
    /// Writes in the greatest.
    pub max: u64,
}

/// Who owns a store: one process, by an identity that outlives its pid (J6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// For people: host, pid, version.
    pub name: String,
    /// Boot id of the machine.
    pub boot_id: String,
    /// Its pid there.
    pub pid: u32,
    /// When that process started, in the kernel's ticks.
    pub start_ticks: u64,
    /// Which ownership it is.
    pub epoch: u64,
    /// Since when, wall time.
    pub since_ms: u64,
}

/// What a lease is for (L15).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseKind {
    /// Changing its life.
    Lifecycle,
    /// Making an instance.
    Start,
}

impl LeaseKind {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lifecycle => "lifecycle",
            Self::Start => "start",
        }
    }
}

/// A lease on a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// On what.
    pub sandbox: SandboxId,
    /// What for.
    pub kind: LeaseKind,
    /// Who.
    pub holder: String,
    /// Since when.
    pub since_ms: u64,
    /// Until when, unless it is renewed. Nobody else gets it before, except when the store changed its owner.
    pub expires_at_ms: u64,
    /// Greater than that of every lease before it, on anything.
    pub token: FencingToken,
}

/// What a key may do (S3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "scope", rename_all = "snake_case")]
pub enum KeyScope {
    /// Everything.
    Admin,
    /// Everything in one project.
    Project {
        /// Which.
        project: Project,
    },
    /// Looking at one project.
    ReadOnly {
        /// Which.
        project: Project,
    },
}

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKey {
    /// `key_…`.
    pub id: String,
    /// What it is called.
    pub name: String,
    /// What it may do.
    #[serde(flatten)]
    pub scope: KeyScope,
    /// Hash of the secret (blake3).
    pub hash: [u8; 32],
    /// Since when.
    pub created_at_ms: u64,
    /// Until when it is good; for ever when absent.
    #[serde(default)]
    pub expires_at_ms: Option<u64>,
    /// Since when it is of no use.
    pub revoked_at_ms: Option<u64>,
}
