//! Audit and reconciliation: what belongs to nobody, or is missing (J1).

use serde::{Deserialize, Serialize};

/// What to do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Reconcile {
    /// Whether what is found is only told. Otherwise it is put right.
    pub dry_run: bool,
}

/// What was found, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reconciled {
    /// Whether it was only told.
    pub dry_run: bool,
    /// When it began.
    pub began_at_ms: u64,
    /// When it was over.
    pub ended_at_ms: u64,
    /// Whether the provider told of all its instances. If not, no record is called missing.
    pub complete: bool,
    /// How much was found.
    pub found: u64,
    /// How much of it was put right.
    pub done: u64,
    /// How much is left for now: somebody uses it, or the grace has not passed.
    pub left: u64,
    /// How much could not be put right.
    pub failed: u64,
    /// Each, up to a bound.
    pub items: Vec<Orphan>,
}

/// One thing that belongs to nobody, or is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Orphan {
    /// `instance` (without a record), `record` (without an instance), `half_made`, `supervisor`, `unsupervised`, `mount`,
    /// `cgroup`, `layer`, `socket`, `lease`, `fence`, `lock`, `spare`.
    #[cfg_attr(feature = "openapi", schema(example = "cgroup"))]
    pub kind: String,
    /// Which.
    pub what: String,
    /// The sandbox that it was of, if that is known.
    pub sandbox: Option<String>,
    /// What shows it.
    pub why: String,
    /// `reported`, `done`, `left` or `failed`.
    #[cfg_attr(feature = "openapi", schema(example = "done"))]
    pub outcome: String,
    /// What there is to say about that.
    pub message: Option<String>,
}
