//! Built-in alerts (O5).

use serde::{Deserialize, Serialize};
use viv_core::SandboxId;

use crate::daemon::Severity;

/// A built-in alert and how it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Alert {
    /// Its name.
    #[cfg_attr(feature = "openapi", schema(example = "sandbox_leak_detected"))]
    pub name: String,
    /// How bad it is.
    pub severity: Severity,
    /// Where it stands.
    pub state: AlertState,
    /// Since when, unless it is inactive.
    pub since_at_ms: Option<u64>,
    /// What was measured last.
    pub value: f64,
    /// It holds above this.
    pub above: f64,
    /// How long it has to hold before it fires.
    pub for_ms: u64,
    /// In words.
    pub message: String,
    /// The command to begin with.
    pub command: String,
    /// Some of the sandboxes that it is about, where it is about single ones; only keys of the installation see them.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    #[serde(default)]
    pub sandboxes: Vec<SandboxId>,
}

/// Where an alert stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AlertState {
    /// It does not hold.
    Inactive,
    /// It holds, and not for long enough yet.
    Pending,
    /// It fires.
    Firing,
}
