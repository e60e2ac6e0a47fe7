//! Cleanups by hand (J2).

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

use crate::bound::CleanupAgeMs;

/// Clean up now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"dry_run": true})))]
#[serde(default, deny_unknown_fields)]
pub struct BeginCleanup {
    /// Only these layers; all but `emergency` when none is named. They run in this order: `unhealthy`, `leftovers`, `age`,
    /// `emergency`.
    pub layers: Vec<CleanupLayer>,
    /// Whatever is older than this goes this time, by the layer `age`, which that asks for too. Who is in use, or has a
    /// task at work, is left alone all the same.
    pub age_max_ms: Option<CleanupAgeMs>,
    /// Also put idle sandboxes to rest until there is room again: persistent ones are saved, others end.
    pub emergency: bool,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// A layer of cleanup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum CleanupLayer {
    /// What does not answer, or is found unwell, and is not new.
    Unhealthy,
    /// Leftovers of what failed or is lost.
    Leftovers,
    /// What is past its time.
    Age,
    /// What is idle, until there is room again.
    Emergency,
}

impl CleanupLayer {
    /// All of them, in their order.
    pub const ALL: [Self; 4] = [Self::Unhealthy, Self::Leftovers, Self::Age, Self::Emergency];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unhealthy => "unhealthy",
            Self::Leftovers => "leftovers",
            Self::Age => "age",
            Self::Emergency => "emergency",
        }
    }
}

/// What a cleanup found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cleanup {
    /// Whether it only says what would be done.
    pub dry_run: bool,
    /// How many were found.
    pub found: u64,
    /// How many were done.
    pub done: u64,
    /// How many could not be.
    pub failed: u64,
    /// One by one, in the order in which they are done.
    pub items: Vec<CleanupItem>,
}

/// A sandbox that a cleanup found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CleanupItem {
    /// Which.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// By which layer: `unhealthy`, `leftovers`, `age`, `emergency`.
    pub layer: String,
    /// What is done: `hibernate`, `stop`.
    pub action: String,
    /// Why.
    pub why: String,
    /// What came of it: `planned`, `done`, `in_use`, `failed`.
    pub outcome: String,
    /// Why it could not be done.
    pub message: Option<String>,
}
