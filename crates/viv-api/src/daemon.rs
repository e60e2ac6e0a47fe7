//! The daemon itself: whether it is well, what it is, what it did.

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

/// The process lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Always `ok`.
    #[cfg_attr(feature = "openapi", schema(example = "ok"))]
    pub status: String,
}

/// Whether the daemon can do its work: with 200 it can, with 503 it cannot, and `checks` say why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Ready {
    /// Whether all checks are well.
    pub ready: bool,
    /// What was looked at.
    pub checks: Vec<ReadyCheck>,
}

/// One thing that the daemon needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReadyCheck {
    /// Its name: `store`, `provider`, `adoption`.
    pub name: String,
    /// Whether it is well.
    pub ok: bool,
    /// How it stands, for people.
    pub message: Option<String>,
}

/// What runs here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Version {
    /// Version of the daemon.
    #[cfg_attr(feature = "openapi", schema(example = "0.1.0"))]
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
    /// Version of the API.
    #[cfg_attr(feature = "openapi", schema(example = "v1"))]
    pub api: String,
    /// The provider's name.
    #[cfg_attr(feature = "openapi", schema(example = "local"))]
    pub provider: String,
    /// The protective gates (O9).
    pub gates: Vec<Gate>,
    /// When the daemon started.
    pub started_at_ms: u64,
}

/// A protective gate and whether it is on (O9).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Gate {
    /// Its name.
    pub name: String,
    /// Whether it is on for everybody.
    pub on: bool,
    /// What it keeps from happening.
    pub about: String,
    /// Where its switch was set: `default`, `file`, `environment`.
    pub set_by: String,
    /// For how many of a hundred sandboxes it is on, if not for all or none; of those outside of `except_projects`.
    pub percent: Option<u8>,
    /// Projects for which it is otherwise.
    #[serde(default)]
    pub except_projects: Vec<String>,
}

/// One line of the daemon's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogLine {
    /// Its place; it only grows.
    pub seq: u64,
    /// When.
    pub at_ms: u64,
    /// How important.
    pub level: LogLevel,
    /// Which part of the daemon.
    pub component: String,
    /// About which sandbox, if about one.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub sandbox: Option<SandboxId>,
    /// What.
    pub message: String,
    /// More.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// How important a line of the log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// For whoever writes the code.
    Trace,
    /// For whoever looks for a mistake.
    Debug,
    /// What happened.
    Info,
    /// What may become a problem.
    Warn,
    /// What is one.
    Error,
}

/// A part of the daemon's log. It has no end: `next_after` is where to go on later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogPage {
    /// The lines, oldest first.
    pub items: Vec<LogLine>,
    /// `after` of the next call.
    pub next_after: u64,
    /// Whether there are more already.
    pub more: bool,
}

/// A reconciler and how it stands. One that stopped running is an alert (J3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reconciler {
    /// Its name.
    #[cfg_attr(feature = "openapi", schema(example = "provider-sync"))]
    pub name: String,
    /// How often it runs without a signal.
    pub period_ms: u64,
    /// Runs so far.
    pub runs_total: u64,
    /// When it last ran.
    pub last_run_at_ms: Option<u64>,
    /// How long that took.
    pub took_ms: Option<u64>,
    /// What it found then.
    pub found: u64,
    /// What it did about it.
    pub did: u64,
    /// What it could not do.
    pub failed: u64,
    /// What went wrong last, and when it was well since, nothing.
    pub last_error: Option<String>,
    /// When it runs next, unless something signals it.
    pub next_run_at_ms: Option<u64>,
    /// Whether it should have run by now and did not.
    pub overdue: bool,
}

/// What this machine can and cannot do, and what is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Doctor {
    /// The provider's name.
    pub provider: String,
    /// What it can and cannot do here.
    pub capabilities: Vec<CapabilityShown>,
    /// What is wrong, most important first.
    pub findings: Vec<Finding>,
    /// By what it saves memory, and what that cannot do here; nothing where it does not, which `capabilities` says why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saves_memory_by: Option<String>,
    /// Where traces go, for keys of the installation; nothing where nothing is traced (O4).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traces: Option<TracesShown>,
    /// When each reconciler last ran, what it found and did; for keys of the installation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reconcilers: Vec<Reconciler>,
}

/// Where traces go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TracesShown {
    /// The address that spans are posted to.
    #[cfg_attr(feature = "openapi", schema(example = "http://127.0.0.1:4318/v1/traces"))]
    pub endpoint: String,
    /// Why it does not answer; nothing when it does.
    pub silent: Option<String>,
    /// Spans that it took since the daemon began.
    pub sent: u64,
    /// Spans that were dropped since then.
    pub dropped: u64,
}

/// Something that a provider can do, or cannot and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CapabilityShown {
    /// Its name.
    #[cfg_attr(feature = "openapi", schema(example = "limit_memory"))]
    pub name: String,
    /// Whether it can.
    pub has: bool,
    /// Why not, if it cannot.
    pub reason: Option<String>,
}

/// Something worth knowing, in words, with what helps (O3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// A stable word: `evidence_old`, `agent_dead`, `root_unmounted`, …
    pub code: String,
    /// What it is, for people.
    pub message: String,
    /// What it was seen by.
    #[serde(default)]
    pub evidence: Vec<String>,
    /// The command that helps, if one does.
    pub command: Option<String>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Good to know.
    Info,
    /// May become a problem.
    Warning,
    /// Is one.
    Critical,
}

/// Take no new work, and save or finish every sandbox (L21).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"grace_ms": 60_000})))]
#[serde(default, deny_unknown_fields)]
pub struct BeginDrain {
    /// How long executions in sandboxes that are not persistent may go on; a minute when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<crate::bound::WaitMs>,
}

/// How a drain stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Drain {
    /// Whether no new work is taken.
    pub draining: bool,
    /// Since when.
    pub since_at_ms: Option<u64>,
    /// Until when executions in sandboxes that are not persistent may go on.
    pub grace_until_ms: Option<u64>,
    /// Sandboxes that are not saved or finished yet, by id.
    pub left: Vec<String>,
    /// Instances that the provider still has; nothing when it could not be asked.
    pub instances: Option<u64>,
    /// Whether everything is saved or finished, and the provider was seen to have nothing that runs.
    pub drained: bool,
}
