//! What a shim is asked and answers: a line of JSON each, on `shim.sock`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use viv_core::{EndCause, FencingToken, Generation};
use viv_provider::{
    Capability, Deadline, DeadlineChange, Ended, InstanceRef, InstanceState, Mutation, ProviderError, ResourceLimits,
    Usage,
};

/// Longest line that either side takes.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(crate) enum ShimRequest {
    /// How is it? The sandbox is not touched.
    Status,
    /// Answered when it has ended.
    Wait,
    Extend {
        mutation: Mutation,
        change: DeadlineChange,
    },
    SetLimits {
        mutation: Mutation,
        change: ResourceLimits,
        /// With a limit of disk: what is left of it for the writable layer.
        layer_bytes: Option<u64>,
    },
    Freeze {
        mutation: Mutation,
    },
    Thaw {
        mutation: Mutation,
    },
    /// Cuts its way out, or opens it again.
    Connect {
        mutation: Mutation,
        connected: bool,
    },
    Destroy {
        mutation: Mutation,
    },
    /// Ends it, so that its filesystem can be saved.
    EndToSave {
        mutation: Mutation,
    },
    /// Saves its memory into a folder, by this CRIU, and ends it. Answered when it has ended; when its memory cannot be
    /// saved, with an error, and it runs on.
    Checkpoint {
        mutation: Mutation,
        criu: PathBuf,
        folder: PathBuf,
        /// It is to run on. It stands still when this is answered, until it is released.
        #[serde(default)]
        live: bool,
    },
    /// Stands still until the connection ends, but no longer than said, so that its filesystem can be copied. Answered
    /// when it does.
    Hold {
        instance: InstanceRef,
        for_ms: u64,
    },
    /// Ends it, because the disk that all share has run out and it took most of it.
    EndForSpace {
        instance: InstanceRef,
        what: String,
    },
    /// Whether it stood still since the answer to `Hold` on this connection; from now on it runs again.
    Release,
    /// A newer token was seen elsewhere.
    Raise {
        mutation: Mutation,
    },
}

impl ShimRequest {
    pub(crate) fn mutation(&self) -> Option<&Mutation> {
        match self {
            Self::Status | Self::Wait | Self::Hold { .. } | Self::EndForSpace { .. } | Self::Release => None,
            Self::Extend { mutation, .. }
            | Self::SetLimits { mutation, .. }
            | Self::Freeze { mutation }
            | Self::Thaw { mutation }
            | Self::Connect { mutation, .. }
            | Self::Destroy { mutation }
            | Self::EndToSave { mutation }
            | Self::Checkpoint { mutation, .. }
            | Self::Raise { mutation } => Some(mutation),
        }
    }
}

impl ShimRequest {
    /// Whether it can be done while the memory is being saved: the rest would start, stop or change what
    /// is dumped. Who ends it to save its files alone has given the memory up.
    pub(crate) fn goes_with_checkpoint(&self) -> bool {
        match self {
            Self::Status
            | Self::Wait
            | Self::Release
            | Self::Extend { .. }
            | Self::Connect { .. }
            | Self::Destroy { .. }
            | Self::EndToSave { .. }
            | Self::EndForSpace { .. }
            | Self::Raise { .. } => true,
            Self::SetLimits { .. }
            | Self::Freeze { .. }
            | Self::Thaw { .. }
            | Self::Checkpoint { .. }
            | Self::Hold { .. } => false,
        }
    }
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ShimReply {
    Status(Box<ShimStatus>),
    Ended(Ended),
    Deadline(Deadline),
    Limits(ResourceLimits),
    /// It stands still. Its writable layer lies here, for other processes.
    Held {
        writable: PathBuf,
    },
    Done,
    Error(ShimError),
}

/// How an instance is, as its shim knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShimStatus {
    pub(crate) instance: InstanceRef,
    pub(crate) state: InstanceState,
    pub(crate) deadline: Deadline,
    pub(crate) usage: Usage,
    /// `None` from one that an older version made.
    #[serde(default)]
    pub(crate) limits: Option<ResourceLimits>,
    /// Whether the shim has it stand still, for a user or for a copy; `None` from one that an older version made.
    #[serde(default)]
    pub(crate) stopped: Option<bool>,
}

/// Why it was not done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "code", rename_all = "snake_case")]
pub(crate) enum ShimError {
    Fenced {
        presented: FencingToken,
        highest: FencingToken,
    },
    StaleGeneration {
        asked: Generation,
        current: Generation,
    },
    Expired,
    /// It is being ended; nothing else is done with it any more.
    Ending {
        #[serde(flatten)]
        cause: EndCause,
    },
    /// The request makes no sense.
    Invalid {
        what: String,
        hint: String,
    },
    /// Something is in the way.
    Conflict {
        what: String,
    },
    /// It cannot be done to this one.
    Unsupported {
        capability: Capability,
        why: String,
    },
    /// It did not stand still all the time.
    NotHeld,
    /// Too many are connected.
    Busy,
    Malformed {
        what: String,
    },
    Failed {
        what: String,
    },
}

impl From<ShimError> for ProviderError {
    fn from(error: ShimError) -> Self {
        match error {
            ShimError::Fenced { presented, highest } => Self::Fenced { presented, highest },
            ShimError::StaleGeneration { asked, current } => Self::StaleGeneration { asked, current },
            ShimError::Expired => Self::Expired,
            ShimError::Ending { cause } => Self::NotRunning { state: InstanceState::Ending { cause } },
            ShimError::Invalid { what, hint } => Self::Invalid { what, hint },
            ShimError::Conflict { what } => Self::Conflict { what },
            ShimError::Unsupported { capability, why } => Self::Unsupported { capability, why },
            ShimError::NotHeld => Self::Failed { what: "it did not stand still while it was copied".to_owned() },
            ShimError::Busy => {
                Self::Exhausted { limit: "connections to the shim", what: "too many are open".to_owned() }
            }
            ShimError::Malformed { what } | ShimError::Failed { what } => Self::Failed { what },
        }
    }
}

/// What a shim tells the process that started it, once, on its standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Started {
    Running,
    Failed { what: String },
}
