//! Rules that every store applies in the same way.

use std::collections::BTreeMap;

use viv_core::lifecycle::{Evidence, PhaseName, Sandbox};
use viv_core::limits::{ResourceLimits, UNLIMITED};
use viv_core::schedule::Schedule;
use viv_core::snapshot::Snapshot;
use viv_core::spec::{Policy, SandboxSpec};

use crate::error::StoreError;
use crate::record::{Lease, Quota, ScheduleListing, ScheduleQuery, Sums, Weights};
use crate::store::Epoch;

/// What is left of a sandbox that is over, in the end (J9): a record without what nobody asks about any more: id, name, cause and times stay, and what a late caller is
/// compared with (version, generation).
pub(crate) fn shrunk(sandbox: &Sandbox) -> Sandbox {
    Sandbox {
        spec: SandboxSpec::default(),
        policy: Policy::default_for(sandbox.name.as_ref()),
        labels: BTreeMap::new(),
        entry: None,
        evidence: Evidence::default(),
        observed: None,
        saved: None,
        origin: None,
        rollback: None,
        expires_at_ms: None,
        keep_awake: BTreeMap::new(),
        ..sandbox.clone()
    }
}

impl Quota {
    /// Refuses one more.
    pub(crate) fn check(self, total: u64, project: u64) -> Result<(), StoreError> {
        for (limit, used, max) in [(Self::TOTAL, total, self.total_max), (Self::PROJECT, project, self.project_max)] {
            if used >= max {
                return Err(StoreError::Quota { limit, used, max });
            }
        }
        Ok(())
    }

    /// Refuses one whose limits do not fit beside those of the others, which are these with their projects.
    pub(crate) fn check_sums<'l>(
        &self,
        sandbox: &Sandbox,
        others: impl Iterator<Item = (&'l str, ResourceLimits)>,
    ) -> Result<(), StoreError> {
        let (mut total, mut project) = (Sums::default(), Sums::default());
        for (of, limits) in others {
            let weighed = Sums::of(&limits, &self.weights);
            total = total.plus(&weighed);
            if of == sandbox.project.as_str() {
                project = project.plus(&weighed);
            }
        }
        let wanted = Sums::of(&sandbox.spec.limits, &self.weights);
        let parts = [(total, self.total_sums_max), (project, self.project_sums_max)];
        for ((used, max), names) in parts.into_iter().zip([SUMS, SUMS_PER_PROJECT]) {
            let bounds = [max.cpu_millis, max.memory_bytes, max.disk_bytes, max.processes];
            let parts = used.parts().into_iter().zip(wanted.parts()).zip(bounds).zip(names);
            for (((used, wanted), max), limit) in parts {
                let Some(max) = max else { continue };
                if used.saturating_add(wanted) > max {
                    return Err(StoreError::Quota { limit, used, max });
                }
            }
        }
        Ok(())
    }
}

/// The words for sums in all projects, in [`StoreError::Quota`]; in the order of [`Sums::parts`].
pub(crate) const SUMS: [&str; 4] = ["cpu_millis", "memory_bytes", "disk_bytes", "processes"];
/// And for those in one.
const SUMS_PER_PROJECT: [&str; 4] =
    ["cpu_millis_per_project", "memory_bytes_per_project", "disk_bytes_per_project", "processes_per_project"];

impl Sums {
    /// What one with these limits counts for.
    pub fn of(limits: &ResourceLimits, weights: &Weights) -> Self {
        let weigh = |limit: Option<u64>, unsaid: u64, unlimited: u64| match limit {
            None => unsaid,
            Some(UNLIMITED) => unlimited,
            Some(limit) => limit,
        };
        let Weights { unsaid, unlimited } = weights;
        Self {
            cpu_millis: weigh(limits.cpu_millis, unsaid.cpu_millis, unlimited.cpu_millis),
            memory_bytes: weigh(limits.memory_bytes, unsaid.memory_bytes, unlimited.memory_bytes),
            disk_bytes: weigh(limits.disk_bytes, unsaid.disk_bytes, unlimited.disk_bytes),
            processes: weigh(limits.processes, unsaid.processes, unlimited.processes),
        }
    }

    /// Both together.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_add(other.disk_bytes),
            processes: self.processes.saturating_add(other.processes),
        }
    }

    fn parts(self) -> [u64; 4] {
        [self.cpu_millis, self.memory_bytes, self.disk_bytes, self.processes]
    }
}

/// What becomes of the wish for a lease (L15).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// Its holder goes on under the same token.
    Renewed(Lease),
    /// It is taken, under a token greater than all before.
    Anew,
}

/// Whether a lease is granted. `held` is what stands in its place, with the ownership that it was taken under: who holds
/// it renews it, one that expired or is of an earlier owner is taken anew, and else it is `Leased`.
pub fn grant(held: Option<(&Lease, Epoch)>, epoch: Epoch, wanted: &Lease) -> Result<Grant, StoreError> {
    let now_ms = wanted.since_ms;
    match held.filter(|(held, taken_under)| *taken_under == epoch && now_ms < held.expires_at_ms) {
        None => Ok(Grant::Anew),
        Some((held, _)) if held.holder != wanted.holder => Err(StoreError::Leased(Box::new(held.clone()))),
        Some((held, _)) => Ok(Grant::Renewed(Lease { expires_at_ms: wanted.expires_at_ms, ..held.clone() })),
    }
}

/// What the stored version has to be for this record to be written.
pub(crate) fn expected_version(sandbox: &Sandbox) -> Result<u64, StoreError> {
    sandbox.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", sandbox.id),
    })
}

/// Users that an error names; more do not help.
pub(crate) const USERS_MAX: usize = 16;

/// What the stored version has to be for this row to be written.
pub(crate) fn expected_row_version(row: &Snapshot) -> Result<u64, StoreError> {
    row.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", row.id),
    })
}

/// Whether its name is its own.
pub(crate) fn is_living(sandbox: &Sandbox) -> bool {
    !sandbox.deleted && !sandbox.is_over()
}

/// Whether it counts for quotas (L18).
pub(crate) fn may_live(sandbox: &Sandbox) -> bool {
    PhaseName::MAY_LIVE.contains(&sandbox.phase.name())
}

/// What the stored version has to be for this schedule to be written.
pub(crate) fn expected_schedule_version(schedule: &Schedule) -> Result<u64, StoreError> {
    schedule.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", schedule.id),
    })
}

/// Refuses one more schedule of a sandbox.
pub(crate) fn check_schedules(used: u64, max: u64) -> Result<(), StoreError> {
    if used >= max { Err(StoreError::Quota { limit: ScheduleQuery::LIMIT, used, max }) } else { Ok(()) }
}

/// A page of those that are left, which are in order.
pub(crate) fn schedule_page(rest: impl Iterator<Item = Schedule>, limit: usize) -> ScheduleListing {
    let mut rest = rest.peekable();
    let items: Vec<Schedule> = rest.by_ref().take(limit).collect();
    let next = items.last().filter(|_| rest.peek().is_some()).map(|last| last.id.clone());
    ScheduleListing { items, next }
}
