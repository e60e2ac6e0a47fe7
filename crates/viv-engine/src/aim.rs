//! What a verb is aimed at: a sandbox, and one generation of it where the caller names one (T5).
//!
//! A generation that is only looked at before a verb is begun says nothing about what the verb meets: between the two
//! another instance may have taken the place of the one that was meant. So it travels with the verb, and is compared
//! with each record that the verb is about to be written on, in the same turn of the same loop: what becomes another
//! generation before the write is a conflict, and is read and compared again.

use viv_core::lifecycle::Sandbox;
use viv_core::planted::{Planted, is_planted};
use viv_core::{Generation, SandboxId};

use crate::engine::Inner;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::handle::Handle;
use crate::read::check_generation;

/// A sandbox, in this generation alone or in whichever it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aim {
    sandbox: SandboxId,
    generation: Option<Generation>,
}

impl Aim {
    /// At this generation of it; without one, at whichever there is.
    pub fn at(sandbox: SandboxId, generation: Option<Generation>) -> Self {
        Self { sandbox, generation }
    }

    /// Which.
    pub fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }
}

/// Whichever generation there is: for those who name none.
impl From<&SandboxId> for Aim {
    fn from(sandbox: &SandboxId) -> Self {
        Self::at(sandbox.clone(), None)
    }
}

/// What a handle holds, and nothing that came after it.
impl From<&Handle> for Aim {
    fn from(handle: &Handle) -> Self {
        Self::at(handle.sandbox().clone(), Some(handle.generation()))
    }
}

impl Inner {
    /// Refuses a record that is not of the generation that was named.
    pub(crate) fn check_aim(&self, aim: &Aim, record: &Sandbox) -> Result<(), EngineError> {
        let checked = self.config.gates.is_on(Gate::GenerationCheck, &record.project, &record.id);
        if !checked || is_planted(Planted::VerbUnaimed) {
            return Ok(());
        }
        check_generation(record, aim.generation)
    }
}
