//! All that a simulated provider knows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use viv_core::fence::Intent;
use viv_core::{ExecutionId, SandboxId, SnapshotId};

use super::fence::{Admission, Fences};
use super::instance::{Instance, Kept};
use super::snapshot::Saved;
use crate::capability::{Capabilities, Capability};
use crate::error::ProviderError;
use crate::instance::{Deadline, InstanceRef, Mutation};
use crate::limits::ResourceLimits;

type Result<T> = std::result::Result<T, ProviderError>;

/// The state of a simulated provider. Everything is ordered, so that the same calls give the same answers.
#[derive(Debug)]
pub(super) struct State {
    pub(super) capabilities: Capabilities,
    /// When it was last settled; also the time of the call that is being answered.
    pub(super) now_ms: u64,
    pub(super) fences: Fences,
    /// The living and the ended; a sandbox has at most one. Invariant: those whose fence says that they live.
    pub(super) instances: BTreeMap<SandboxId, Instance>,
    /// They outlive what they were made from.
    pub(super) snapshots: BTreeMap<SnapshotId, Saved>,
    /// Ids that no snapshot has any more, or ever will have.
    pub(super) removed: BTreeSet<SnapshotId>,
    /// How often connecting again fails from now on.
    pub(super) connects_fail: u32,
    /// Which part of the memory that sandboxes share is left, if that is to be known.
    pub(super) memory_left: Option<f64>,
    /// Why no memory can be saved.
    pub(super) dumps_fail: Option<String>,
    /// After how long it is worth another look at what it can do, if that may change.
    pub(super) looks_again_after: Option<Duration>,
}

impl State {
    pub(super) fn new(capabilities: Capabilities, now_ms: u64) -> Self {
        Self {
            capabilities,
            now_ms,
            fences: Fences::default(),
            instances: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            removed: BTreeSet::new(),
            connects_fail: 0,
            memory_left: None,
            dumps_fail: None,
            looks_again_after: None,
        }
    }

    /// Lets everything happen that is due until now.
    pub(super) fn settle(&mut self, now_ms: u64) {
        if now_ms > self.now_ms {
            self.now_ms = now_ms;
            for instance in self.instances.values_mut() {
                instance.settle(now_ms);
            }
        }
    }

    /// Refuses what is not declared.
    pub(super) fn require(&self, capability: Capability) -> Result<()> {
        if self.capabilities.can(capability) {
            return Ok(());
        }
        let why = self.capabilities.missing.get(&capability).cloned();
        Err(ProviderError::Unsupported { capability, why: why.unwrap_or_else(|| "it is not declared".to_owned()) })
    }

    /// The instance for a read.
    pub(super) fn read(&self, instance: &InstanceRef) -> Result<&Instance> {
        self.fences.admit_read(instance)?;
        self.instances.get(&instance.sandbox).ok_or(ProviderError::Absent)
    }

    /// Somebody heard of the end of an execution.
    pub(super) fn note_read(&mut self, instance: &InstanceRef, execution: &ExecutionId) {
        if let Some(found) = self.instances.get_mut(&instance.sandbox)
            && found.reference == *instance
        {
            found.note_read(execution);
        }
    }

    /// The instance for a read that needs its processes.
    pub(super) fn read_running(&self, instance: &InstanceRef) -> Result<&Instance> {
        let found = self.read(instance)?;
        found.need_running()?;
        Ok(found)
    }

    /// The instance for a change that is by its nature safe to repeat.
    pub(super) fn change(&mut self, mutation: &Mutation, sandbox: &SandboxId) -> Result<&mut Instance> {
        match self.fences.admit(sandbox, mutation, Intent::Change)? {
            Admission::Work | Admission::Done => self.instances.get_mut(sandbox).ok_or(ProviderError::Absent),
        }
    }

    /// Does a change once for each operation, and keeps its answer for a repetition.
    pub(super) fn change_once<T: Answered>(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        work: impl FnOnce(&mut Instance, u64) -> Result<T>,
    ) -> Result<T> {
        let now_ms = self.now_ms;
        let instance = self.change(mutation, sandbox)?;
        if let Some(kept) = instance.recall(&mutation.operation) {
            let reused = || ProviderError::Conflict { what: format!("{} was something else", mutation.operation) };
            return T::recalled(kept).ok_or_else(reused);
        }
        let answer = work(instance, now_ms)?;
        instance.remember(mutation.operation.clone(), answer.kept());
        Ok(answer)
    }
}

/// An answer that can be kept for a repetition.
pub(super) trait Answered: Sized {
    fn kept(&self) -> Kept;
    fn recalled(kept: &Kept) -> Option<Self>;
}

macro_rules! answered {
    ($type:ty, $value:pat => $kept:expr, $pattern:pat => $recalled:expr) => {
        impl Answered for $type {
            fn kept(&self) -> Kept {
                let $value = self.clone();
                $kept
            }

            fn recalled(kept: &Kept) -> Option<Self> {
                match kept.clone() {
                    $pattern => Some($recalled),
                    _ => None,
                }
            }
        }
    };
}

answered!((), () => Kept::Done, Kept::Done => ());
answered!(Deadline, deadline => Kept::Deadline(deadline), Kept::Deadline(deadline) => deadline);
answered!(ResourceLimits, limits => Kept::Limits(limits), Kept::Limits(limits) => limits);
answered!(viv_core::file::FileStat, stat => Kept::Stat(stat), Kept::Stat(stat) => stat);
answered!(viv_core::file::Unpacked, unpacked => Kept::Unpacked(unpacked), Kept::Unpacked(unpacked) => unpacked);
