//! What is in the way of saving the memory of a sandbox.

use serde::{Deserialize, Serialize};
use viv_core::{ExecutionId, Generation, SandboxId};

/// Whether the memory of a sandbox can be saved as it is now, as far as is known beforehand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CheckpointCheck {
    /// Of which sandbox.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// Of which instance.
    #[cfg_attr(feature = "openapi", schema(value_type = u64))]
    pub generation: Generation,
    /// Whether nothing is known to be in the way.
    pub can: bool,
    /// What is in the way.
    pub obstacles: Vec<Obstacle>,
    /// What is not, and is closed first: what is saved is without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub closes: Vec<Obstacle>,
}

/// Something that is in the way, or is closed first, and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Obstacle {
    /// What, for people.
    pub what: String,
    /// The process that holds it, by its pid inside; none when it is about the whole sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What that process runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The execution that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
}
