//! Cleanups by hand (J2).

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

/// Clean up now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"dry_run": true})))]
#[serde(default, deny_unknown_fields)]
pub struct BeginCleanup {
    /// Only these layers: `unhealthy`, `leftovers`, `age`, `emergency`. When none is named, all but the last; they run in
    /// this order.
    pub layers: Vec<String>,
    /// For the layer `age`: whatever is older than this goes this time, instead of what is set. Who is in use, or has a
    /// task at work, is left alone all the same.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>, minimum = 1))]
    pub age_max_ms: Option<NonZeroU64>,
    /// Also put idle sandboxes to rest until there is room again: persistent ones are saved, others end.
    pub emergency: bool,
    /// Only say what would be done.
    pub dry_run: bool,
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
