//! Spares (L19): sandboxes that were made ahead, for whoever asks for one like them.
//!
//! A spare is a record like any other, in a project that nobody can use. A claim rewrites it, in one compare-and-set, to
//! be the sandbox that was asked for, under the id that it has had from the start and that nobody was told: host name,
//! machine id and all that is made of that id are fresh.

use std::collections::BTreeMap;

use super::{Desired, NewSandbox, Phase, Sandbox};
use crate::id::Generation;

impl Sandbox {
    /// Whether it was made ahead, and nobody has claimed it.
    pub fn is_spare(&self) -> bool {
        self.project.is_spares()
    }

    /// Whether it can be given to whoever asks for this.
    pub fn fits(&self, new: &NewSandbox) -> bool {
        self.is_spare()
            && self.phase == Phase::Ready
            && self.desired == Desired::Running
            && !self.deleted
            && new.origin.is_none()
            && !new.project.is_spares()
            && new.spec.of_instance() == self.spec
    }

    /// What commands of this generation have to be told, because their instance was made before it was known.
    pub fn env_to_tell(&self, generation: Generation) -> Option<&BTreeMap<String, String>> {
        (self.claimed == Some(generation)).then_some(&self.spec.env).filter(|env| !env.is_empty())
    }
}
