//! Figures about all sandboxes (O2).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Figures about the sandboxes that the key may see.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stats {
    /// When they were counted.
    pub at_ms: u64,
    /// Those that run or may run: everything that is neither saved nor over.
    pub active: u64,
    /// Those that are being made or probed.
    pub provisioning: u64,
    /// Those that are being ended or saved.
    pub terminating: u64,
    /// Those that are saved.
    pub hibernated: u64,
    /// Hot spares.
    pub spare: u64,
    /// How many have each status.
    pub by_status: BTreeMap<String, u64>,
    /// Made so far, like all totals: as far as the journal is kept (J9).
    pub created_total: u64,
    /// Ended so far.
    pub destroyed_total: u64,
    /// Gone unasked so far.
    pub lost_total: u64,
    /// Given up so far.
    pub failed_total: u64,
    /// What is in use of each quota (L18): of the project that the key sees, or of all.
    #[serde(default)]
    pub quotas: Vec<QuotaUse>,
    /// The same by project, for keys that see all: those with the most sandboxes.
    #[serde(default)]
    pub projects: Vec<ProjectUse>,
    /// How old the active ones are.
    pub ages: Vec<AgeBucket>,
    /// How the targets are met, if that was asked for.
    #[serde(default)]
    pub slo: Vec<Target>,
}

/// What one project has in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProjectUse {
    /// Which.
    pub project: String,
    /// What is in use of each quota of a project.
    pub quotas: Vec<QuotaUse>,
}

/// What is in use of a quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct QuotaUse {
    /// Its name: `sandboxes`, `cpu_millis`, `memory_bytes`, `disk_bytes`, `processes`.
    pub name: String,
    /// How many sandboxes may live, or what their limits add up to. One without a limit counts as what it could use.
    pub used: u64,
    /// How much there may be; nothing is any amount.
    pub max: Option<u64>,
}

/// How many are this old, and not in a bucket before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AgeBucket {
    /// The oldest that count here; nothing is the last bucket.
    pub up_to_ms: Option<u64>,
    /// How many.
    pub count: u64,
}

/// A target, and how it is met. Numerator and denominator are told, since a ratio of nothing says nothing (O4).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Target {
    /// Its name: `stop_success`, `cancel_latency`, …
    pub name: String,
    /// What is aimed at, for people: `> 95 %`.
    pub target: String,
    /// How many counted.
    pub numerator: u64,
    /// Of how many.
    pub denominator: u64,
    /// Whether it is met; nothing when there is nothing to count.
    pub met: Option<bool>,
}
