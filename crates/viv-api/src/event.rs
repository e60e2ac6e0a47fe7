//! The journal, which is also the audit log (O7).

use serde::{Deserialize, Serialize};
use viv_core::{Generation, SandboxId};

use crate::sandbox::{Cause, Phase};

/// One row of the journal: who did what, when, from where, and why. Rows are only added.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// Its place; it only grows, and is the cursor of the stream.
    pub seq: u64,
    /// When.
    pub at_ms: u64,
    /// What, as a stable word of the journal: `sandbox.created`, `sandbox.phase`, `key.revoked`, …
    #[cfg_attr(feature = "openapi", schema(example = "sandbox.phase"))]
    pub kind: String,
    /// In which project, if in one.
    pub project: Option<String>,
    /// About which sandbox, if about one.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub sandbox: Option<SandboxId>,
    /// About which of its generations.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub generation: Option<Generation>,
    /// The phase before, if this changed it.
    pub from: Option<Phase>,
    /// The phase after, if this changed it.
    pub to: Option<Phase>,
    /// Why.
    pub cause: Option<Cause>,
    /// Who: `key:NAME`, `reconciler:NAME`, `provider`, `engine`.
    pub by: String,
    /// From which address, if from one.
    pub address: Option<String>,
    /// What happened, for people.
    pub message: String,
    /// More, depending on `kind`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub data: serde_json::Map<String, serde_json::Value>,
}

/// A part of the journal. Unlike other lists it has no end: `next_after` is where to go on later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventPage {
    /// The events, oldest first.
    pub items: Vec<Event>,
    /// `after` of the next call.
    pub next_after: u64,
    /// Whether there are more already.
    pub more: bool,
    /// The oldest event that is still kept (J9): when `after` is before it, some are missing.
    pub oldest_seq: u64,
}
