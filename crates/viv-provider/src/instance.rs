//! Instances as data: what is asked for, what is seen.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use viv_core::{EndCause, ExecutionId, FencingToken, Generation, OperationId, OwnerMark, SandboxId, SnapshotId};

use viv_core::capability::Capability;
use viv_core::limits::{OomKill, ResourceLimits};
use viv_core::spec::{Image, Network};

/// Goes with every change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mutation {
    /// Repeating the call with the same one does the work once.
    pub operation: OperationId,
    /// The generation that is meant.
    pub generation: Generation,
    /// An older one than the highest seen is refused.
    pub token: FencingToken,
    /// How long the caller waits; after that the call fails with `TimedOut`.
    pub budget_ms: u64,
}

/// One incarnation of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InstanceRef {
    /// Whose incarnation.
    pub sandbox: SandboxId,
    /// Which one.
    pub generation: Generation,
}

impl fmt::Display for InstanceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.sandbox, self.generation)
    }
}

/// What to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceSpec {
    /// What it is made of.
    pub image: Image,
    /// Limits; what is not said has the provider's default.
    #[serde(default)]
    pub limits: ResourceLimits,
    /// How it is connected.
    #[serde(default)]
    pub network: Network,
    /// Environment of every command in it.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where commands start; made if it is not there.
    #[serde(default = "default_workdir")]
    pub workdir: String,
    /// Whether commands of root may change owners of files and become other users, as package managers do. Off, they have
    /// no capability at all (S1).
    #[serde(default)]
    pub packages: bool,
    /// Free labels, shown in listings.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// How long it may live from now on (hard deadline, L5).
    pub lifetime_ms: u64,
    /// What becomes of the memory that was saved with what it is made from.
    #[serde(default)]
    pub recall: Recall,
}

/// What becomes of the memory that was saved with a snapshot, when an instance is made from that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recall {
    /// It is restored, or else the instance begins with the files alone and lacks [`Capability::SaveMemory`].
    #[default]
    IfPossible,
    /// It is restored, or else no instance is made.
    Required,
    /// It is left where it is.
    Never,
    /// The same, because what was restored of it did not work: it may be kept for a look.
    GivenUp {
        /// Why.
        why: String,
    },
}

fn default_workdir() -> String {
    "/workspace".to_owned()
}

impl InstanceSpec {
    /// The provider's own userland for this long, everything else by default.
    pub fn host(lifetime_ms: u64) -> Self {
        Self {
            image: Image::Host,
            limits: ResourceLimits::default(),
            network: Network::default(),
            env: BTreeMap::new(),
            workdir: default_workdir(),
            packages: false,
            labels: BTreeMap::new(),
            lifetime_ms,
            recall: Recall::default(),
        }
    }
}

/// How an instance was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum InstanceState {
    /// It is being made.
    Creating,
    /// It runs.
    Running,
    /// It keeps its memory and gets no processor.
    Frozen,
    /// It is being ended; there is no way back.
    Ending {
        /// Why.
        #[serde(flatten)]
        cause: EndCause,
    },
    /// It ended, and its record is still here.
    Ended(Ended),
    /// There is none, neither alive nor ended. This was looked at.
    Absent,
}

impl fmt::Display for InstanceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Creating => f.write_str("creating"),
            Self::Running => f.write_str("running"),
            Self::Frozen => f.write_str("frozen"),
            Self::Ending { cause } => write!(f, "ending ({cause})"),
            Self::Ended(ended) => write!(f, "ended ({})", ended.cause),
            Self::Absent => f.write_str("absent"),
        }
    }
}

/// The end of an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Why.
    #[serde(flatten)]
    pub cause: EndCause,
    /// When, wall time, for display.
    pub at_ms: u64,
}

/// The hard deadline as its arbiter has it right now (T6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadline {
    /// What is left.
    pub remaining_ms: u64,
    /// Grows with every change.
    pub revision: u64,
}

/// How to move a hard deadline. Both count from the arbiter's own now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadlineChange {
    /// No earlier than this from now; a later one stays.
    AtLeastMs(u64),
    /// Exactly this from now, also when that is earlier.
    ExactlyMs(u64),
}

/// How something was learnt (T1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObservedVia {
    /// The supervisor beside the instance answered.
    Supervisor,
    /// The supervisor is gone; its durable record was read.
    Record,
    /// A remote API answered.
    Api,
}

/// Live figures.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time so far.
    pub cpu_us: Option<u64>,
    /// Memory now.
    pub memory_bytes: Option<u64>,
    /// Processes now.
    pub processes: Option<u64>,
    /// Times that the kernel killed for memory.
    pub oom_kills: Option<u64>,
    /// The last of them.
    #[serde(default)]
    pub oom_last: Option<OomKill>,
}

/// An instance as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// Which one.
    pub instance: InstanceRef,
    /// How it is.
    pub state: InstanceState,
    /// Its hard deadline, while it lives.
    pub deadline: Option<Deadline>,
    /// Figures, where the provider has them.
    pub usage: Option<Usage>,
    /// The limits in force, or that were when it ended.
    #[serde(default)]
    pub limits: Option<ResourceLimits>,
    /// What it has to do without, since it could not be had where it was made; with the reasons.
    #[serde(default)]
    pub lacks: BTreeMap<Capability, String>,
    /// Wall time of the look.
    pub observed_at_ms: u64,
    /// Who was asked.
    pub via: ObservedVia,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Which one.
    pub instance: InstanceRef,
    /// Whose.
    pub owner: OwnerMark,
    /// How it is.
    pub state: InstanceState,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// Which part of a listing to give.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageRequest {
    /// What the page before gave as `next`.
    pub cursor: Option<String>,
    /// How many at most; the provider may give fewer.
    pub limit: Option<usize>,
}

/// A part of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T = Listed> {
    /// What is listed.
    pub items: Vec<T>,
    /// Where to go on; `None` at the end.
    pub next: Option<String>,
    /// What could not be looked at. When this is not empty, something that is
    /// not listed may well exist (T7).
    pub unreadable: Vec<String>,
}

impl<T> Default for Page<T> {
    fn default() -> Self {
        Self { items: Vec::new(), next: None, unreadable: Vec::new() }
    }
}

impl<T> Page<T> {
    /// Whether something could not be looked at.
    pub fn is_partial(&self) -> bool {
        !self.unreadable.is_empty()
    }
}

/// What to save, and as what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveRequest {
    /// The id of the snapshot to be.
    pub snapshot: SnapshotId,
    /// Whether the instance runs on. Otherwise it is ended first.
    pub live: bool,
    /// Whether memory is to be saved too.
    pub memory: bool,
}

/// A saved filesystem: what is true of it for ever.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Of which instance.
    pub source: InstanceRef,
    /// Whose.
    pub owner: OwnerMark,
    /// The snapshot that its instance was made from; it may be gone since.
    pub parent: Option<SnapshotId>,
    /// All that it holds beyond its image.
    pub size_bytes: u64,
    /// Whether it holds memory.
    pub memory: bool,
    /// Whether its instance ran on.
    pub live: bool,
    /// Wall time, for display.
    pub created_at_ms: u64,
    /// What it cost to make.
    pub cost: SaveCost,
}

/// Where the time of a save went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveCost {
    /// Writing out what was not on disk yet: in proportion to what was dirty, not to what was saved.
    pub flush_us: u64,
    /// How long a running instance got no processor.
    pub paused_us: u64,
    /// Everything, checks included.
    pub total_us: u64,
    /// Bytes that had to be copied; none where layers are sealed or cloned.
    pub copied_bytes: u64,
}

/// Whether a snapshot still is what was saved (L10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Integrity {
    /// Its structure was checked before it was acknowledged; its content is still being hashed.
    Pending,
    /// Its content was hashed, and is as it was.
    Verified,
    /// It is not what was saved, and is not restored.
    Damaged,
}

/// A snapshot as it was seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSeen {
    /// What it is.
    pub snapshot: Snapshot,
    /// Whether it is whole.
    pub integrity: Integrity,
    /// What is wrong with the memory that it holds, as far as anybody saw. Its files are what `integrity` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_damage: Option<String>,
    /// What removing it would free: the rest is shared with others.
    pub own_bytes: u64,
    /// Instances that were made from it and are still there, alive or ended.
    pub used_by: Vec<InstanceRef>,
}

/// What an instance has on disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    /// Its alone: what destroying it frees.
    pub own_bytes: u64,
    /// Of images, snapshots and other instances, and there once for all of them.
    pub shared_bytes: u64,
    /// What it may have beyond its image.
    pub limit_bytes: Option<u64>,
}

/// Where an operator finds what an instance consists of, as seen from the machine that it runs on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    /// The process that holds it, while that lives.
    pub supervisor_pid: Option<u32>,
    /// The process that serves it inside, while that lives.
    pub agent_pid: Option<u32>,
    /// The mount point of its root filesystem, in the mount namespace of the supervisor
    /// (`nsenter -t SUPERVISOR_PID -m`).
    pub root: Option<String>,
    /// The same root with all that is mounted in it, for looking into from outside.
    pub root_view: Option<String>,
    /// Its cgroups, as folders, while they are there.
    pub cgroups: Vec<String>,
    /// The folder with its record and its logs.
    pub folder: Option<String>,
}

/// A process inside, as the kernel shows it. Its name is its own choice, and nothing to be trusted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSeen {
    /// Its pid inside; that of the host where it has no other.
    pub pid: u32,
    /// What it calls itself.
    pub name: String,
    /// The kernel's letter for how it is: `R` runs, `S` and `D` wait, `T` is stopped, `Z` is over.
    pub state: char,
    /// Processor time so far.
    pub cpu_us: u64,
    /// Memory now.
    pub memory_bytes: u64,
    /// The call that it is in, if it waits in one.
    #[serde(default)]
    pub call: Option<String>,
    /// What that call is about: a descriptor, and what is behind it.
    #[serde(default)]
    pub on: Option<String>,
    /// Where in the kernel it waits.
    #[serde(default)]
    pub waits_in: Option<String>,
}

/// A place inside where next to nothing more can be written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FullPlace {
    /// Where it is mounted inside.
    pub path: String,
    /// Whether what is in it is kept in memory, and not on a disk.
    pub in_memory: bool,
    /// What it can hold.
    pub bytes: u64,
    /// What is left of that; no more files can be made where there is a lot.
    pub free_bytes: u64,
}

/// What becomes of something when an instance's memory is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObstacleEffect {
    /// With it, nothing is saved.
    Prevents,
    /// It is closed first, and what is saved is without it.
    Closed,
}

/// Something that is in the way of saving an instance's memory, or does not outlast it, and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Obstacle {
    /// What becomes of it.
    pub effect: ObstacleEffect,
    /// What, for people.
    pub what: String,
    /// The process that holds it, by its pid inside; none when it is about the whole instance.
    pub pid: Option<u32>,
    /// What that runs.
    pub command: Option<String>,
    /// Of which execution it is.
    pub execution: Option<ExecutionId>,
}

/// What one of those who keep an instance wrote down last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPart {
    /// Who: `shim`, `agent`.
    pub name: String,
    /// Whole lines, the oldest first. Those inside can have a hand in what the agent says.
    pub text: String,
}
