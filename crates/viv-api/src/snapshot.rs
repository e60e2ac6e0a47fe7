//! Snapshots: what is asked for, and what is shown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viv_core::{Generation, SandboxId, SnapshotId};

use crate::bound::{ForkCount, Labels, SandboxName, SnapshotRef, WaitMs};
use crate::sandbox::{CreatePolicy, Sandbox};

/// Make a snapshot of a sandbox. What runs stands still for the copy and runs on; of what is saved already nothing is
/// copied: the state that was saved is the snapshot, and is kept from now on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"name": "before-the-upgrade", "labels": {"step": "12"}})))]
#[serde(default, deny_unknown_fields)]
pub struct CreateSnapshot {
    /// What it is called, for people. Names of snapshots need not differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<SandboxName>,
    /// Labels.
    pub labels: Labels,
}

/// Go on from a snapshot, under the same id and as a new generation (T5). What runs is ended first. An entry: it runs
/// then, also when it was stopped. Its policy stays as it is (L16).
///
/// Answered with 200 when it is ready, with 202 when `wait_ms` passed before that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"snapshot": "snp_01h2xcejqtf2nbrexx3vqjhp41"})))]
#[serde(deny_unknown_fields)]
pub struct RollbackSandbox {
    /// To this one, of the same project.
    pub snapshot: SnapshotRef,
    /// Throw away what it is now, instead of saving it first as an `auto` snapshot.
    #[serde(default)]
    pub discard: bool,
    /// How long to wait: 0 does not wait, nothing is the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// Begin anew: its instance and all its snapshots go, but for those that others begin with; name, spec and policy stay
/// (L12). An entry: it is made again from its image, or from the snapshot that it was made from.
///
/// Answered with 200 when it is ready, with 202 when `wait_ms` passed before that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ResetSandbox {
    /// How long to wait: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// Make sandboxes that begin where another one is, or with a snapshot: all of them or none. Each has an identity of its
/// own, and nothing that one of them writes is seen by another.
///
/// Answered with 201 when all are ready, with 202 when `wait_ms` passed before that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"count": 10, "labels": {"try": "b"}})))]
#[serde(default, deny_unknown_fields)]
pub struct Fork {
    /// How many; one when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<ForkCount>,
    /// What they are called: this, or this and a number if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<SandboxName>,
    /// Labels, beside those that they get from where they come.
    pub labels: Labels,
    /// Whether what runs goes on in each of them, with its memory; otherwise they have its files alone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
    /// How long they live; like the sandbox that they come from when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<CreatePolicy>,
    /// How long to wait until they are ready: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// What a fork made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Forked {
    /// What they begin with.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub snapshot: SnapshotId,
    /// They.
    pub sandboxes: Vec<Sandbox>,
}

/// Why there is a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Its sandbox was put to rest, or went back. Only the latest is kept, and what is in use.
    Auto,
    /// Somebody asked for it.
    Manual,
    /// Others were to begin with it. It goes when none of them needs it.
    Fork,
    /// It was read from a file.
    Imported,
}

/// How far a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// It is being made.
    Saving,
    /// It is there.
    Ready,
    /// It is being removed.
    Removing,
}

/// Whether a snapshot is what was saved (L10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotIntegrity {
    /// Its structure was checked; its content is still being hashed.
    Pending,
    /// Its content was hashed, and is as it was.
    Verified,
    /// It is not what was saved, and nothing begins with it.
    Damaged,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SnapshotId,
    /// Whose it is.
    pub project: String,
    /// Of which sandbox; what was imported is of none.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub sandbox: Option<SandboxId>,
    /// Of which of its generations.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// The snapshot that its instance began with; it may be gone since.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub parent: Option<SnapshotId>,
    /// Why there is one.
    pub kind: SnapshotKind,
    /// What it is called.
    pub name: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// How far it is.
    pub state: SnapshotState,
    /// When it was asked for.
    pub created_at_ms: u64,
    /// By whom.
    pub by: String,
    /// Whether the memory of the same moment is saved with it.
    #[serde(default)]
    pub memory: bool,
    /// All that it holds beyond its image, once it is there.
    pub size_bytes: Option<u64>,
    /// What removing it would free: the rest is shared with others.
    pub own_bytes: Option<u64>,
    /// Whether it is whole.
    pub integrity: Option<SnapshotIntegrity>,
    /// What is wrong with the memory that it holds, as far as anybody saw. Its files are what `integrity` says, and whoever
    /// goes on from it begins with them.
    #[serde(default)]
    pub memory_damage: Option<String>,
    /// How long the sandbox stood still for it.
    pub paused_ms: Option<u64>,
    /// How long it took in all.
    pub took_ms: Option<u64>,
    /// Bytes that had to be copied.
    pub copied_bytes: Option<u64>,
    /// When size and integrity were last seen at the provider.
    pub observed_at_ms: Option<u64>,
    /// Some of the sandboxes that begin with it. Told of one snapshot, not in lists.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    #[serde(default)]
    pub used_by: Vec<SandboxId>,
}
