//! What an instance says about itself.

use serde::{Deserialize, Serialize};

use crate::id::{Generation, SandboxId};

/// Which instance this is: what its identity file holds (T2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The incarnation.
    pub generation: Generation,
}
