//! Sandboxes: what is asked for, and what is shown.

use serde::{Deserialize, Serialize};
use viv_core::{Generation, SandboxId};

use crate::bound::{
    Env, IdleMs, ImageName, Labels, LeaseName, LifetimeMs, Note, Path, Ports, SandboxName, Services, SnapshotRef,
    SnapshotsAgeMs, SnapshotsMax, TtlMs, WaitMs,
};
use crate::limits::Limits;
use crate::service::Hooks;

mod shown;

pub use shown::{
    Cause, Desired, Evidence, MemoryShown, MemoryState, Observed, ObservedVia, Phase, PortProbe, Probe, ProbeOutcome,
    ProviderState, Sandbox, SandboxPolicy, SandboxSpec, ServiceProbe, Status,
};

/// A sandbox to make.
///
/// Answered with 201 and the sandbox when it is ready, with 202 when `wait_ms` passed before that: it is being made
/// all the same. A name that is in use is `name_taken`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "name": "build-agent",
    "image": "host",
    "labels": {"team": "search", "agent": "coder"},
    "limits": {"cpu_millis": 2000, "memory_bytes": 1_073_741_824},
    "network": {"egress": "all"},
    "policy": {"lifetime_ms": 3_600_000}
})))]
#[serde(default, deny_unknown_fields)]
pub struct CreateSandbox {
    /// Its name in the project. A named sandbox is persistent unless said otherwise (L2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<SandboxName>,
    /// What it is made of.
    pub image: ImageName,
    /// The snapshot that it begins with, instead of with its image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotRef>,
    /// Labels. `agent` says which kind of agent uses it, and is shown in lists.
    pub labels: Labels,
    /// Environment of every command in it. Values are not told back (S6).
    pub env: Env,
    /// Where commands start; made if it is not there. `/workspace` when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<Path>,
    /// What it may use.
    pub limits: Limits,
    /// How it is connected.
    pub network: Network,
    /// Whether commands of root may install packages: change owners of files, and become other users. Off, they have no
    /// capability at all (S1).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub packages: bool,
    /// Ports that must answer before it is ready (T2).
    pub ports: Ports,
    /// Long-running commands that must be ready before it is (T2).
    pub services: Services,
    /// What is done when it starts, stops, resumes or times out (L14).
    pub hooks: Hooks,
    /// How long it lives.
    pub policy: CreatePolicy,
    /// How long to wait until it is ready: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// How a sandbox is connected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Network {
    /// Whom those inside may talk to.
    pub egress: Egress,
}

/// Whom those inside may talk to. The machine itself, its neighbours and metadata addresses never (S2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Egress {
    /// Nobody.
    #[default]
    None,
    /// The internet.
    All,
}

/// What is saved of a sandbox that hibernates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Hibernate {
    /// Its files: what ran is lost, and services are started again.
    #[default]
    Filesystem,
    /// Its memory too, where the provider can: what ran goes on under the same ids.
    Memory,
}

/// How long a sandbox is to live.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CreatePolicy {
    /// Whether it is saved when it stops. By default if it has a name (L2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Time from its start to its hard deadline; one hour when absent (L5).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lifetime_ms: Option<LifetimeMs>,
    /// Time without activity after which it is frozen; 15 minutes when absent (L5).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_ms: Option<IdleMs>,
    /// Time frozen after which it is saved, or, when it is not persistent, ends; 15 minutes when absent (L5).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate_ms: Option<IdleMs>,
    /// What is saved of it: its files, or its memory too where that can be (L13). Its files when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hibernate: Option<Hibernate>,
    /// How many snapshots that were asked for are kept: the oldest go first, unless they are in use. All when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots_max: Option<SnapshotsMax>,
    /// How long snapshots that were asked for are kept, unless they are in use. For ever when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots_age_ms: Option<SnapshotsAgeMs>,
}

/// Make it run: join what is ready, wait for what is in transition, resume or make again what is not there (L3).
///
/// Answered with 200 when it is ready and verified, with 202 when `wait_ms` passed before that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"wait_ms": 30_000})))]
#[serde(default, deny_unknown_fields)]
pub struct EnsureSandbox {
    /// How long to wait: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// Stop it: persistent ones are saved, others leave nothing (L8).
///
/// Answered with 200 when it has stopped, with 202 when `wait_ms` passed before that: it stops all the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"wait_ms": 0})))]
#[serde(default, deny_unknown_fields)]
pub struct StopSandbox {
    /// How long to wait: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
    /// What is to become of a save that failed (`save_failed`); refused with `conflict` where none has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_save: Option<FailedSave>,
}

/// What is to become of a save that failed (L10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FailedSave {
    /// It is tried again now, not after its pause.
    Retry,
    /// It is given up, with the files that it was about: what was saved before is what there is.
    Discard,
}

/// Put it to rest, or take it out of it: freeze, thaw, hibernate.
///
/// Answered with 200 when it is so, with 202 when `wait_ms` passed before that: it goes on all the same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"wait_ms": 10_000})))]
#[serde(default, deny_unknown_fields)]
pub struct RestSandbox {
    /// How long to wait: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// Move the hard deadline: exactly one of the two. Both count from now, at whoever keeps the deadline; nothing is
/// computed from a cached time (T6). Once it has passed the answer is `expired`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ExtendSandbox {
    /// No earlier than this from now; a later one stays.
    AtLeastMs(LifetimeMs),
    /// Exactly this from now, also when that is earlier.
    ExactlyMs(LifetimeMs),
}

/// The hard deadline, as whoever keeps it has just said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Deadline {
    /// What is left.
    pub remaining_ms: u64,
    /// When that is, by the wall clock, for display.
    pub expires_at_ms: u64,
    /// Grows with every change.
    pub revision: u64,
}

/// Say that it is in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"reason": "a user wrote"})))]
#[serde(default, deny_unknown_fields)]
pub struct ReportActivity {
    /// By what, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Note>,
}

/// When it was last in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Activity {
    /// When.
    pub last_activity_at_ms: u64,
}

/// Keep a sandbox from idling for a while; taken again under the same name, it counts from now (L7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"ttl_ms": 120_000, "reason": "the model is thinking"})))]
#[serde(deny_unknown_fields)]
pub struct TakeKeepAwake {
    /// For how long.
    pub ttl_ms: TtlMs,
    /// Why, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Note>,
}

/// A keep-awake lease that holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KeepAwake {
    /// Its name.
    pub lease: LeaseName,
    /// Why, for people.
    pub reason: Option<String>,
    /// Until when it holds. Who took it stands in the journal.
    pub expires_at_ms: u64,
}

/// What happened to a sandbox: one line of its timeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimelineEntry {
    /// Its place in the journal.
    pub seq: u64,
    /// When.
    pub at_ms: u64,
    /// What, as a word of the journal.
    pub kind: String,
    /// The generation it is about.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub generation: Option<Generation>,
    /// The phase before, if this changed it.
    pub from: Option<Phase>,
    /// The phase after, if this changed it.
    pub to: Option<Phase>,
    /// How long the phase before lasted, if this changed it.
    pub took_ms: Option<u64>,
    /// Why.
    pub cause: Option<Cause>,
    /// Who.
    #[serde(default)]
    pub by: String,
    /// What happened, for people.
    pub message: String,
}

/// The ends of a sandbox's logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxLogs {
    /// Whose.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// Of which generation.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// One for each source that there is.
    pub logs: Vec<LogTail>,
}

/// The end of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogTail {
    /// Whose word it is.
    pub source: LogSource,
    /// The end of it, in whole lines; bytes that are no text are shown approximately.
    pub text: String,
}

/// Who writes logs about a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum LogSource {
    /// The supervisor beside it.
    Shim,
    /// The agent in it.
    Agent,
    /// Its console.
    Console,
}
