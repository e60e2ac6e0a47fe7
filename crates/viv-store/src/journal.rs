//! The journal: append-only, one order for everybody (O7).

use serde::{Deserialize, Serialize};
use viv_core::lifecycle::{Actor, PhaseName};
use viv_core::spec::Project;
use viv_core::{Generation, SandboxId};

/// A place in the journal. Lines after it have a greater one; there may be gaps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(pub u64);

/// A line to be written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewLine {
    /// When.
    pub at_ms: u64,
    /// In which project; `None` is of the installation.
    pub project: Option<Project>,
    /// About which sandbox.
    pub sandbox: Option<SandboxId>,
    /// About which of its generations.
    pub generation: Option<Generation>,
    /// A stable word: `sandbox.created`, `sandbox.moved`, `key.revoked`, …
    pub kind: String,
    /// The phase before, for a transition.
    pub from: Option<PhaseName>,
    /// The phase after, for a transition.
    pub to: Option<PhaseName>,
    /// The code of the cause.
    pub cause: Option<String>,
    /// Who.
    pub by: Actor,
    /// The rest. No secret is ever in here (S6).
    pub data: serde_json::Value,
}

/// A line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalLine {
    /// Where it stands.
    pub cursor: Cursor,
    /// What it says.
    #[serde(flatten)]
    pub line: NewLine,
}

/// Which lines to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalFilter {
    /// Of this project only.
    pub project: Option<Project>,
    /// About this sandbox only.
    pub sandbox: Option<SandboxId>,
}
