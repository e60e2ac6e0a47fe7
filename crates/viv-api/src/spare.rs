//! Hot spares (L19): sandboxes that are made ahead.

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

/// A class of spares and how it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpareClass {
    /// What it is called.
    #[cfg_attr(feature = "openapi", schema(example = "small"))]
    pub name: String,
    /// What its sandboxes are made of: `host`, or the name of an image.
    pub image: String,
    /// At least this many are kept.
    pub min: u32,
    /// And at most.
    pub max: u32,
    /// How many there should be now: as many as were asked for lately.
    pub target: u32,
    /// Those that are ready and were verified, in the order in which they are given.
    pub ready: Vec<Spare>,
    /// How many are being made or verified.
    pub making: u64,
    /// How many were given to somebody since the daemon began.
    pub claimed_total: u64,
    /// How often one was asked for and none was there, so that it was made.
    pub missed_total: u64,
    /// How many were given up because they were broken.
    pub broken_total: u64,
    /// Why no more are made for now.
    pub held: Option<String>,
}

/// A sandbox that nobody has asked for yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Spare {
    /// The id that it has, and keeps when somebody gets it.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SandboxId,
    /// When it was made.
    pub made_at_ms: u64,
}
