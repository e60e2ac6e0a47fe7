//! What a sandbox uses, and may use.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viv_core::{ExecutionId, Generation, SandboxId};

use crate::limits::LimitsInForce;
use crate::sandbox::ObservedVia;

/// What a sandbox uses, and may use. Reading it is not activity.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Resources {
    /// Which sandbox.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// Which of its instances.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// When this was looked at.
    pub observed_at_ms: u64,
    /// Who was asked.
    pub via: ObservedVia,
    /// What it uses, where the provider can tell.
    pub usage: Option<Usage>,
    /// What it may use.
    pub limits: LimitsInForce,
    /// What it has on disk, where the provider can tell.
    pub disk: Option<Disk>,
    /// Since when it runs.
    pub running_since_at_ms: Option<u64>,
    /// What it was asked to do.
    pub operations: Operations,
    /// What it has to do without on this machine, and why.
    #[serde(default)]
    pub lacks: BTreeMap<String, String>,
}

/// Live figures. What a provider cannot tell is `null`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct Usage {
    /// Processor time so far.
    pub cpu_us: Option<u64>,
    /// Processor use since the look before this one: 100 is one whole processor.
    pub cpu_percent: Option<f64>,
    /// Memory now.
    pub memory_bytes: Option<u64>,
    /// Processes now.
    pub processes: Option<u64>,
    /// Bytes read from disk so far.
    pub io_read_bytes: Option<u64>,
    /// Bytes written to disk so far.
    pub io_write_bytes: Option<u64>,
    /// Times that the kernel killed for memory.
    pub oom_kills: Option<u64>,
    /// The last of them.
    pub oom_last: Option<OomKill>,
}

/// Who was killed for memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OomKill {
    /// The process's name, which it chose itself.
    pub process: Option<String>,
    /// Its pid inside.
    pub pid: Option<u32>,
    /// Whose first process it was.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
    /// When it was noticed.
    pub at_ms: u64,
}

/// What a sandbox has on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Disk {
    /// Its alone: what deleting it frees.
    pub own_bytes: u64,
    /// Shared with images, snapshots and other sandboxes.
    pub shared_bytes: u64,
    /// What it may have beyond its image.
    pub limit_bytes: Option<u64>,
}

/// What a sandbox was asked to do so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Operations {
    /// Executions started.
    pub executions: u64,
    /// Calls about files.
    pub file_calls: u64,
    /// What those inside asked for: schedules, steps of tasks, effects.
    #[serde(default)]
    pub agent_requests: u64,
}

impl Operations {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.executions.saturating_add(self.file_calls).saturating_add(self.agent_requests)
    }
}
