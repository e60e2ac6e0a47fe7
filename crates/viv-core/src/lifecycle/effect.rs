//! What the record says is to be done.

use super::phase::{FreezeStep, HibernateStep, MakeStep, Phase, ResumeStep, VerifyStep};
use super::{Memory, Sandbox, Work};
use crate::hook::HookPoint;
use crate::id::{Generation, OperationId, SnapshotId};

/// One thing that is outstanding at the provider. Safe to repeat under its operation id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Make this generation from the spec.
    Create {
        /// Which.
        generation: Generation,
    },
    /// Make this generation from a snapshot.
    Restore {
        /// Which.
        generation: Generation,
        /// From what.
        snapshot: SnapshotId,
        /// Whether with the memory that was saved with it; without, only its files count.
        memory: bool,
    },
    /// Give what was a spare the lifetime of whom it was given to (L19).
    Claim {
        /// Which.
        generation: Generation,
    },
    /// Probe it (T2).
    Probe {
        /// Which.
        generation: Generation,
    },
    /// Start its services, and wait until each is ready or has ended.
    Serve {
        /// Which.
        generation: Generation,
    },
    /// Perform a hook.
    Hook {
        /// In which.
        generation: Generation,
        /// Which hook.
        point: HookPoint,
    },
    /// Freeze it.
    Freeze {
        /// Which.
        generation: Generation,
    },
    /// Thaw it.
    Thaw {
        /// Which.
        generation: Generation,
    },
    /// End it and save its files.
    Save {
        /// Which.
        generation: Generation,
        /// As what.
        snapshot: SnapshotId,
        /// Whether its memory is to be saved too.
        memory: bool,
    },
    /// End it, remove every trace, and see that there is none.
    Clear {
        /// Which.
        generation: Generation,
    },
}

impl Effect {
    /// A stable word for logs, metrics and failpoints.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Restore { .. } => "restore",
            Self::Claim { .. } => "claim",
            Self::Probe { .. } => "probe",
            Self::Serve { .. } => "serve",
            Self::Hook { .. } => "hook",
            Self::Freeze { .. } => "freeze",
            Self::Thaw { .. } => "thaw",
            Self::Save { .. } => "save",
            Self::Clear { .. } => "clear",
        }
    }
}

/// The one effect that the record names, with its operation id and deadline.
pub fn outstanding(sandbox: &Sandbox) -> Option<(Effect, &Work)> {
    let generation = sandbox.generation;
    let effect = |operation: &OperationId| match &sandbox.phase {
        Phase::Provisioning { step: MakeStep::Clear, .. }
        | Phase::Resuming { step: ResumeStep::Clear, .. }
        | Phase::Hibernating { step: HibernateStep::Clear, .. }
        | Phase::Failed { .. }
        | Phase::Stopping { .. } => Some(Effect::Clear { generation }),
        Phase::Provisioning { step: MakeStep::Make, .. } => Some(Effect::Create { generation }),
        Phase::Resuming { step: ResumeStep::Make, snapshot, .. } => {
            let memory = sandbox.has_memory_of(snapshot);
            Some(Effect::Restore { generation, snapshot: snapshot.clone(), memory })
        }
        Phase::Verifying { step: VerifyStep::Claim, .. } => Some(Effect::Claim { generation }),
        Phase::Verifying { step: VerifyStep::Thaw, .. } => Some(Effect::Thaw { generation }),
        Phase::Verifying { step: VerifyStep::Services, .. } => Some(Effect::Serve { generation }),
        // A record that names a hook which is not outstanding has nothing to do but to be probed.
        Phase::Verifying { step: VerifyStep::Hook, .. } => {
            Some(sandbox.hook.map_or(Effect::Probe { generation }, |point| Effect::Hook { generation, point }))
        }
        Phase::Verifying { step: VerifyStep::Probe, .. } => Some(Effect::Probe { generation }),
        Phase::Frozen { step: FreezeStep::Freeze { .. } } => Some(Effect::Freeze { generation }),
        Phase::Hibernating { step: HibernateStep::Save, .. } => {
            let memory = sandbox.memory == Some(Memory::Saving);
            Some(Effect::Save { generation, snapshot: Sandbox::snapshot_of(operation), memory })
        }
        Phase::Resuming { step: ResumeStep::Seal, .. } => {
            Some(Effect::Save { generation, snapshot: Sandbox::snapshot_of(operation), memory: false })
        }
        Phase::Ready
        | Phase::Frozen { step: FreezeStep::Done }
        | Phase::Hibernated { .. }
        | Phase::Lost
        | Phase::Stopped => None,
    };
    let work = sandbox.phase.work()?;
    Some((effect(&work.operation)?, work))
}
