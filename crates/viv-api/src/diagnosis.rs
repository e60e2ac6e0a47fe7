//! All that is known about a sandbox at once (T8), and what that means in words (O3).

use serde::{Deserialize, Serialize};
use viv_core::{Generation, SnapshotId};

use crate::daemon::{Finding, Version};
use crate::sandbox::{Phase, Sandbox};

/// All that is known about a sandbox. Reading it changes nothing and is not activity (T9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Diagnosis {
    /// Desired, phase, provider state, evidence: the sandbox as it is shown.
    pub sandbox: Sandbox,
    /// When this was put together.
    pub at_ms: u64,
    /// The transition that is under way.
    pub transition: Option<Transition>,
    /// The latest state that was saved by itself.
    pub auto_saved: Option<SnapshotShown>,
    /// Snapshots that were asked for: the newest of them, newest first.
    pub snapshots: Vec<SnapshotShown>,
    /// How many of those there are.
    #[serde(default)]
    pub snapshots_count: u64,
    /// What all of those hold beyond their images; what they share is counted with each.
    #[serde(default)]
    pub snapshots_bytes: u64,
    /// Both locks.
    pub locks: Locks,
    /// When each client last read this sandbox.
    pub reads: Vec<ClientRead>,
    /// What runs here.
    pub daemon: Version,
    /// Where to look on the machine, if it runs on this one.
    pub host: Option<HostView>,
    /// What all of this means, most important first.
    pub findings: Vec<Finding>,
}

/// A transition that is under way. Each step has one effect, and each effect a deadline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Transition {
    /// The phase.
    pub phase: Phase,
    /// The step in it, as a word of the core.
    pub step: String,
    /// Which attempt at it this is, from 1.
    pub attempt: u32,
    /// How many there will be at most.
    pub attempts_max: Option<u32>,
    /// When the phase began.
    pub since_at_ms: u64,
    /// When it falls back, if nothing happens until then.
    pub deadline_at_ms: Option<u64>,
    /// The operation that is outstanding at the provider.
    pub operation: Option<String>,
    /// When the next attempt is made, if one is waited for.
    pub next_attempt_at_ms: Option<u64>,
    /// What went wrong last.
    pub last_error: Option<String>,
}

/// Something that was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotShown {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SnapshotId,
    /// What it is called, if it has a name.
    #[serde(default)]
    pub name: Option<String>,
    /// Of which generation.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// When.
    pub created_at_ms: u64,
    /// All that it holds beyond its image.
    pub size_bytes: u64,
    /// Whether it is whole (L10).
    pub integrity: Integrity,
}

/// Whether a snapshot still is what was saved (L10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Integrity {
    /// Its structure was checked; its content is still being hashed.
    Pending,
    /// Its content is as it was.
    Verified,
    /// It is not what was saved, and is not restored.
    Damaged,
}

/// Both locks of a sandbox (L15).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Locks {
    /// Held by whoever carries out a transition.
    pub lifecycle: Option<LockShown>,
    /// Held by whoever makes an instance.
    pub start: Option<LockShown>,
}

/// A lock that is held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LockShown {
    /// By whom.
    pub holder: String,
    /// Since when.
    pub since_at_ms: u64,
    /// Until when, unless it is renewed.
    pub expires_at_ms: u64,
    /// The fencing token that goes with it.
    pub token: u64,
}

/// When a client last read a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ClientRead {
    /// What it calls itself.
    pub client: String,
    /// When.
    pub at_ms: u64,
}

/// Where to look on the machine, so that an operator can see for herself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostView {
    /// The supervisor's process, as seen from the host.
    pub shim_pid: Option<u32>,
    /// The agent's process, PID 1 inside, as seen from the host.
    pub agent_pid: Option<u32>,
    /// The mount point of the root filesystem in the supervisor's mount namespace: after `/proc/SHIM_PID/root` it is a
    /// path to look at from the host.
    pub root_mount: Option<String>,
    /// Folders of its cgroups.
    pub cgroups: Vec<String>,
    /// The folder of the instance in the data folder.
    pub folder: Option<String>,
}
