//! Rules that every store applies in the same way.

use std::collections::BTreeMap;

use viv_core::lifecycle::{Evidence, PhaseName, Sandbox};
use viv_core::spec::{Policy, SandboxSpec};

use crate::error::StoreError;
use crate::record::Quota;

/// What is left of a sandbox that is over, in the end (J9): a record without what nobody asks about any more: id, name, cause and times stay, and what a late caller is
/// compared with (version, generation, token).
pub(crate) fn shrunk(sandbox: &Sandbox) -> Sandbox {
    Sandbox {
        spec: SandboxSpec::default(),
        policy: Policy::default_for(sandbox.name.as_ref()),
        labels: BTreeMap::new(),
        entry: None,
        evidence: Evidence::default(),
        observed: None,
        saved: None,
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
}

/// What the stored version has to be for this record to be written.
pub(crate) fn expected_version(sandbox: &Sandbox) -> Result<u64, StoreError> {
    sandbox.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", sandbox.id),
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
