//! A sandbox as it is shown: what is desired, the phase of its record, and what was last observed, kept apart.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viv_core::lifecycle::Memory;
use viv_core::{Generation, SandboxId, SnapshotId, TaskId};

use super::{Hibernate, KeepAwake, Network};
use crate::limits::Limits;
use crate::service::{HookShown, ServiceShown};

/// A sandbox as it is shown.
///
/// `status` is computed from the rest and never kept. Whatever was observed says when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    /// Its id, for ever.
    #[cfg_attr(feature = "openapi", schema(value_type = String, example = "sbx_01h2xcejqtf2nbrexx3vqjhp41"))]
    pub id: SandboxId,
    /// Whose it is.
    pub project: String,
    /// Its name in the project.
    pub name: Option<String>,
    /// All of it in one word.
    pub status: Status,
    /// What its owner wants.
    pub desired: Desired,
    /// Where its record stands.
    pub phase: Phase,
    /// Counts its instances (T5). A call that names another one is answered with 410 `stale_handle`.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// Why it is in this phase (T10).
    pub cause: Option<Cause>,
    /// What was checked, when, and what came of it (T2).
    pub evidence: Evidence,
    /// How the provider last saw it (T1).
    pub observed: Option<Observed>,
    /// When anything about it was last observed, wall clock in milliseconds: the latest of `observed` and `evidence`.
    pub observed_at: Option<u64>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// What it is made of.
    pub spec: SandboxSpec,
    /// How long it lives.
    pub policy: SandboxPolicy,
    /// What became of its memory when it was last saved; for those whose policy asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryShown>,
    /// Its services, and their latest executions.
    #[serde(default)]
    pub services: Vec<ServiceShown>,
    /// Keep-awake leases that hold.
    #[serde(default)]
    pub keep_awake: Vec<KeepAwake>,
    /// When it was asked for.
    pub created_at_ms: u64,
    /// When it was last in use (L6).
    pub last_activity_at_ms: Option<u64>,
    /// Its hard deadline as the provider last told it; for display only (T6).
    pub expires_at_ms: Option<u64>,
    /// The task that is at work in it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub task: Option<TaskId>,
    /// Executions that run; told of one sandbox that runs, and not in lists.
    #[serde(default)]
    pub executions_running: Option<u64>,
    /// Whether it was deleted: this is all that is left of it (L9).
    #[serde(default)]
    pub deleted: bool,
    /// Grows with every change of its record.
    pub version: u64,
}

/// What became of a sandbox's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemoryShown {
    /// In a word.
    pub state: MemoryState,
    /// The snapshot that it was saved with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub snapshot: Option<SnapshotId>,
    /// Why it was not saved, or not restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What became of a sandbox's memory, in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MemoryState {
    /// It is being saved.
    Saving,
    /// It is saved, and what ran is suspended.
    Kept,
    /// It was restored: what ran goes on.
    Restored,
    /// The files were saved without it.
    NotSaved,
    /// The files of the same moment were restored without it.
    NotRestored,
}

impl From<&Memory> for MemoryShown {
    fn from(memory: &Memory) -> Self {
        let (state, snapshot, why) = match memory {
            Memory::Saving => (MemoryState::Saving, None, None),
            Memory::Kept { snapshot } => (MemoryState::Kept, Some(snapshot), None),
            Memory::Restored { snapshot } => (MemoryState::Restored, Some(snapshot), None),
            Memory::NotSaved { why } => (MemoryState::NotSaved, None, Some(why)),
            Memory::NotRestored { snapshot, why } => (MemoryState::NotRestored, Some(snapshot), Some(why)),
        };
        Self { state, snapshot: snapshot.cloned(), why: why.cloned() }
    }
}

/// A sandbox in one word, computed from what is desired, the phase and the evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It is being made.
    Provisioning,
    /// It is there, and is being probed.
    Verifying,
    /// It was probed along the path that users use, and that is not long ago.
    Ready,
    /// It was ready, and the evidence is too old to say that it is (T3).
    Unverified,
    /// It keeps its memory and gets no processor.
    Frozen,
    /// It is being saved.
    Hibernating,
    /// It could not be saved: its processes have ended, its files are kept, and it is tried again (L10).
    SaveFailed,
    /// It is saved, and nothing runs.
    Hibernated,
    /// It is being made from what was saved.
    Resuming,
    /// It is gone, unasked.
    Lost,
    /// It could not be made, and no more attempts are.
    Failed,
    /// It is being ended.
    Stopping,
    /// It ended for good, and its absence was observed.
    Stopped,
}

/// What a sandbox's owner wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Desired {
    /// That it runs.
    Running,
    /// That it is saved and does not run.
    Hibernated,
    /// That there is none.
    Gone,
}

/// Where a sandbox's record stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It is being made.
    Provisioning,
    /// It is being probed.
    Verifying,
    /// It was probed and found well.
    Ready,
    /// It keeps its memory and gets no processor.
    Frozen,
    /// It is being saved.
    Hibernating,
    /// It is saved.
    Hibernated,
    /// It is being made from what was saved.
    Resuming,
    /// It is gone, unasked.
    Lost,
    /// It could not be made.
    Failed,
    /// It is being ended.
    Stopping,
    /// It ended for good.
    Stopped,
}

macro_rules! words {
    ($($name:ident { $($variant:ident = $word:literal),+ $(,)? })+) => {$(
        impl $name {
            /// All of them, in the order of a life.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// As the API writes it.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = crate::bound::BoundError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let wrong = crate::bound::BoundError::Shape {
                    what: stringify!($name),
                    rule: concat!("one of", $(" ", $word),+),
                };
                Self::ALL.iter().copied().find(|word| word.as_str() == text).ok_or(wrong)
            }
        }
    )+};
}

words! {
    Status {
        Provisioning = "provisioning", Verifying = "verifying", Ready = "ready", Unverified = "unverified",
        Frozen = "frozen", Hibernating = "hibernating", SaveFailed = "save_failed", Hibernated = "hibernated",
        Resuming = "resuming", Lost = "lost", Failed = "failed", Stopping = "stopping", Stopped = "stopped",
    }
    Desired { Running = "running", Hibernated = "hibernated", Gone = "gone" }
    Phase {
        Provisioning = "provisioning", Verifying = "verifying", Ready = "ready", Frozen = "frozen",
        Hibernating = "hibernating", Hibernated = "hibernated", Resuming = "resuming", Lost = "lost",
        Failed = "failed", Stopping = "stopping", Stopped = "stopped",
    }
    ProbeOutcome { Ok = "ok", Unhealthy = "unhealthy", Timeout = "timeout", Gone = "gone", Unknown = "unknown" }
}

/// Why a sandbox is in its phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cause {
    /// A stable word of the core's closed list: `user_stop`, `expired`, `oom_killed`, `provider_lost`, …
    #[cfg_attr(feature = "openapi", schema(pattern = "^[a-z][a-z0-9_]*$", example = "user_stop"))]
    pub code: String,
    /// The same for people, with what is known beyond the word.
    pub message: String,
    /// When.
    pub at_ms: u64,
    /// Who: `key:NAME`, `reconciler:NAME`, `provider`, `engine`.
    #[cfg_attr(feature = "openapi", schema(example = "key:ci"))]
    pub by: String,
}

/// What was checked. A probe that was never made is absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Evidence {
    /// A real command echoed a fresh nonce and ended with 0.
    pub exec: Option<Probe>,
    /// The working directory was listed, and the identity file names this generation.
    pub filesystem: Option<Probe>,
    /// Each port of the spec.
    #[serde(default)]
    pub ports: Vec<PortProbe>,
    /// Each service of the spec.
    #[serde(default)]
    pub services: Vec<ServiceProbe>,
}

impl Evidence {
    /// When the latest of the checks was made.
    pub fn latest_at_ms(&self) -> Option<u64> {
        let ports = self.ports.iter().map(|port| &port.probe);
        let services = self.services.iter().map(|service| &service.probe);
        self.exec.iter().chain(&self.filesystem).chain(ports).chain(services).map(|probe| probe.checked_at_ms).max()
    }
}

/// One check and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Probe {
    /// What came of it.
    pub outcome: ProbeOutcome,
    /// When.
    pub checked_at_ms: u64,
    /// How long it took.
    pub took_ms: u64,
    /// What was found, for people.
    pub message: Option<String>,
    /// Along which path it was checked: the one that users use.
    #[cfg_attr(feature = "openapi", schema(example = "provider:local/agent"))]
    pub path: String,
}

/// The check of one port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PortProbe {
    /// Which port.
    pub port: u16,
    /// What came of it.
    #[serde(flatten)]
    pub probe: Probe,
}

/// The check of one service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceProbe {
    /// Which service.
    pub service: String,
    /// What came of it.
    #[serde(flatten)]
    pub probe: Probe,
}

/// What came of a check. Timeout, unhealthy and gone are different findings (T7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProbeOutcome {
    /// It is well.
    Ok,
    /// It answered, and the answer was wrong.
    Unhealthy,
    /// It did not answer in time.
    Timeout,
    /// There is nothing there; that was looked at.
    Gone,
    /// It could not be asked.
    Unknown,
}

/// How the provider saw a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Observed {
    /// What it said.
    pub provider_state: ProviderState,
    /// Why it ended or is ending, as a stable word, if it is.
    pub end_cause: Option<String>,
    /// Who was asked.
    pub via: ObservedVia,
    /// When.
    pub at_ms: u64,
}

/// An instance as a provider sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProviderState {
    /// It is being made.
    Creating,
    /// It runs.
    Running,
    /// It keeps its memory and gets no processor.
    Frozen,
    /// It is being ended.
    Ending,
    /// It ended, and is still on record there.
    Ended,
    /// There is none; that was looked at.
    Absent,
}

/// How something was learnt (T1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ObservedVia {
    /// The supervisor beside the instance answered.
    Supervisor,
    /// The supervisor is gone; its durable record was read.
    Record,
    /// A remote API answered.
    Api,
    /// Its end was pushed to us.
    Pushed,
    /// It was in a listing of all instances.
    Listing,
}

/// What a sandbox is made of, as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxSpec {
    /// `host`, or the name of an image.
    pub image: String,
    /// Where commands start.
    pub workdir: String,
    /// Names of the environment variables; values are not told back (S6).
    pub env_names: Vec<String>,
    /// What it may use, as it was asked for; what is in force is told by `resources`.
    pub limits: Limits,
    /// How it is connected.
    pub network: Network,
    /// Whether commands of root may install packages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub packages: bool,
    /// Ports that must answer before it is ready.
    pub ports: Vec<u16>,
    /// What is done at moments of its life.
    #[serde(default)]
    pub hooks: Vec<HookShown>,
}

/// How long a sandbox lives. No verb but the one that sets it changes it (L16).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxPolicy {
    /// Whether it is saved when it stops.
    pub persistent: bool,
    /// Time from its start to its hard deadline.
    pub lifetime_ms: u64,
    /// Time without activity after which it is frozen; never when absent.
    pub idle_ms: Option<u64>,
    /// Time frozen after which it is saved, or, when it is not persistent, ends; never when absent.
    #[serde(default)]
    pub hibernate_ms: Option<u64>,
    /// What is saved of it.
    #[serde(default)]
    pub hibernate: Hibernate,
    /// How many snapshots that were asked for are kept; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_max: Option<u32>,
    /// How long snapshots that were asked for are kept; for ever when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots_age_ms: Option<u64>,
}
