//! Snapshots as they are recorded: what was saved, of whom, and what is known of it.
//!
//! ```text
//!   saving ──► ready ──► removing ──► (no row)
//!      └─────────(failed)────────────────▲
//! ```
//!
//! - The row comes before anything exists at the provider, and goes after everything is gone there.
//! - It comes by compare-and-set on the record of its sandbox: what was deleted has no new ones (L11).
//! - Only what is ready is begun with, and nothing begins with what is being removed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{Generation, OperationId, SandboxId, SnapshotId};
use crate::lifecycle::Actor;
use crate::service::ServiceRun;
use crate::spec::{Name, Policy, Project, SandboxSpec, ServiceName};

/// Most snapshots of one sandbox that are asked for. More of them are a history, which belongs into a repository.
pub const SNAPSHOTS_MAX: usize = 256;

/// Most sandboxes that one fork makes.
pub const FORKS_MAX: usize = 100;

/// Why there is a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Its sandbox was put to rest, or went back. Only the latest is kept, and what is in use.
    Auto,
    /// Somebody asked for it.
    Manual,
    /// Others were to begin with it. It goes when none of them needs it.
    Fork,
    /// It was read from a file.
    Imported,
}

impl SnapshotKind {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Manual => "manual",
            Self::Fork => "fork",
            Self::Imported => "imported",
        }
    }
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// It is being made.
    Saving,
    /// It is there.
    Ready,
    /// It is being removed: nothing begins with it any more.
    Removing,
}

/// Whether it is what was saved (L10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotIntegrity {
    /// Its structure was checked; its content is still being hashed.
    Pending,
    /// Its content was hashed, and is as it was.
    Verified,
    /// It is not what was saved, and nothing begins with it.
    Damaged,
}

/// What was seen of it at the provider, and what it cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSeen {
    /// All that it holds beyond its image.
    pub size_bytes: u64,
    /// What removing it would free: the rest is shared with others.
    pub own_bytes: u64,
    /// Whether it is whole.
    pub integrity: SnapshotIntegrity,
    /// What is wrong with the memory that it holds, as far as anybody saw: its files are what `integrity` says, and are what
    /// whoever goes on from it begins with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_damage: Option<String>,
    /// How long a running instance stood still for it.
    pub paused_us: u64,
    /// How long it took in all.
    pub total_us: u64,
    /// Bytes that had to be copied.
    pub copied_bytes: u64,
    /// When this was seen.
    pub at_ms: u64,
}

/// Sandboxes that begin with a snapshot as soon as it is ready: in one transaction, so there are all of them or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkPlan {
    /// Their ids, drawn when they were asked for.
    pub ids: Vec<SandboxId>,
    /// Their names, one for each, or none.
    pub names: Vec<Name>,
    /// What their instances are made of.
    pub spec: SandboxSpec,
    /// By which rules they live.
    pub policy: Policy,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Who asked for them.
    pub by: Actor,
    /// Whether they go on with the memory of what they come from.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
}

/// What is known of the memory that was saved with a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotMemory {
    /// As which executions the services ran.
    pub services: BTreeMap<ServiceName, ServiceRun>,
}

/// A snapshot as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its identity, at the provider too.
    pub id: SnapshotId,
    /// Whose it is.
    pub project: Project,
    /// Of which sandbox; what was imported is of none.
    pub sandbox: Option<SandboxId>,
    /// Of which of its generations.
    pub generation: Generation,
    /// The snapshot that its instance began with; it may be gone since.
    pub parent: Option<SnapshotId>,
    /// Why there is one.
    pub kind: SnapshotKind,
    /// What it is called; the newest of several with the same name is meant.
    pub name: Option<Name>,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// How far it is.
    pub state: SnapshotState,
    /// Grows with every change of this row; writes compare it.
    pub version: u64,
    /// When it was asked for.
    pub created_at_ms: u64,
    /// Who asked for it.
    pub by: Actor,
    /// The memory of the same moment, if that was saved, or is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SnapshotMemory>,
    /// What was seen of it; nothing before it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SnapshotSeen>,
    /// Who begins with it once it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork: Option<ForkPlan>,
}

impl Snapshot {
    /// The operation under which it is saved: repeated, it is saved once.
    pub fn operation(&self) -> OperationId {
        OperationId::derived(self.id.as_str(), "")
    }

    /// The sandbox at whose fence it is changed. One that was imported has one of its own, which never has an instance.
    pub fn fence(&self) -> SandboxId {
        self.sandbox.clone().unwrap_or_else(|| SandboxId::derived(self.id.as_str(), ""))
    }
}

/// Which of these are to go, by the policy of their sandbox: of those that were asked for what is too many or too old,
/// of the others all but the latest. Whoever uses one keeps it, which is not looked at here.
pub fn surplus<'s>(rows: &'s [Snapshot], policy: &Policy, now_ms: u64) -> Vec<&'s Snapshot> {
    let mut ready: Vec<&Snapshot> = rows.iter().filter(|row| row.state == SnapshotState::Ready).collect();
    ready.sort_by(|a, b| (b.created_at_ms, &b.id).cmp(&(a.created_at_ms, &a.id)));
    let (mut autos, mut asked_for) = (0_usize, 0_usize);
    ready.retain(|row| match row.kind {
        SnapshotKind::Auto => {
            autos += 1;
            autos > 1
        }
        SnapshotKind::Manual => {
            asked_for += 1;
            let too_many = policy.snapshots_max.is_some_and(|max| asked_for > max as usize);
            let age_ms = now_ms.saturating_sub(row.created_at_ms);
            too_many || policy.snapshots_age_ms.is_some_and(|max_ms| age_ms > max_ms)
        }
        SnapshotKind::Fork => row.fork.is_none(),
        SnapshotKind::Imported => false,
    });
    ready
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: u8, kind: SnapshotKind, created_at_ms: u64) -> Snapshot {
        Snapshot {
            id: SnapshotId::from_bytes([n; 16]),
            project: Project::default(),
            sandbox: Some(SandboxId::from_bytes([1; 16])),
            generation: Generation::FIRST,
            parent: None,
            kind,
            name: None,
            labels: BTreeMap::new(),
            state: SnapshotState::Ready,
            version: 1,
            created_at_ms,
            by: Actor::part("test"),
            seen: None,
            memory: None,
            fork: None,
        }
    }

    #[test]
    fn l11_the_oldest_go_and_the_latest_auto_stays() {
        let kinds = [SnapshotKind::Auto, SnapshotKind::Manual, SnapshotKind::Imported];
        let mut rows: Vec<Snapshot> = (0..9).map(|n| row(n, kinds[usize::from(n) % 3], 1_000 * u64::from(n))).collect();
        rows.push(row(9, SnapshotKind::Fork, 1));
        let keep_all = Policy::default_for(None);
        let ids = |policy: &Policy, now_ms| {
            let mut ids: Vec<u64> = surplus(&rows, policy, now_ms).iter().map(|row| row.created_at_ms).collect();
            ids.sort_unstable();
            ids
        };
        assert_eq!(ids(&keep_all, 1_000_000), [0, 1, 3_000], "autos but the latest, and what was forked from");
        let two = Policy { snapshots_max: Some(2), ..keep_all.clone() };
        assert_eq!(ids(&two, 10_000), [0, 1, 1_000, 3_000]);
        let young = Policy { snapshots_age_ms: Some(4_000), ..keep_all };
        assert_eq!(ids(&young, 9_000), [0, 1, 1_000, 3_000, 4_000]);
        assert_eq!(ids(&young, 8_000), [0, 1, 1_000, 3_000], "as old as may be is not too old");
        rows[6].state = SnapshotState::Saving;
        assert!(
            !surplus(&rows, &young, 9_000).iter().any(|row| row.id == rows[3].id),
            "what is not ready replaces none"
        );
    }

    #[test]
    fn ids_that_are_made_of_its_own_are_ids() {
        let long: SnapshotId = format!("snp_{}", "z".repeat(48)).parse().unwrap();
        let row = Snapshot { id: long, sandbox: None, ..row(1, SnapshotKind::Imported, 1) };
        assert_eq!(row.operation().as_str().len(), 51);
        assert_eq!(row.fence().as_str(), format!("sbx_{}", "z".repeat(48)));
    }
}
