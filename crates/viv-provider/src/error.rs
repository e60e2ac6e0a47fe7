//! What can go wrong at a provider: a closed list.

use viv_core::fence::Late;
use viv_core::spec::Invalid;
use viv_core::{FencingToken, Generation, IdError};

use crate::capability::Capability;
use crate::instance::InstanceState;

/// What went wrong. None of these means *absent*, except [`ProviderError::Absent`].
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// Somebody with a newer lease was here (L15).
    #[error("fencing token {presented} is older than {highest}, which was seen before")]
    Fenced {
        /// The token of this call.
        presented: FencingToken,
        /// The highest one seen.
        highest: FencingToken,
    },
    /// The call names a generation that is not the current one (T5).
    #[error("generation {asked} is not the current one ({current})")]
    StaleGeneration {
        /// The generation of this call.
        asked: Generation,
        /// The current one, or the last one there was.
        current: Generation,
    },
    /// There is no such instance: this was looked at, not guessed.
    #[error("there is no such instance")]
    Absent,
    /// The instance is there and cannot do this now.
    #[error("the instance is not running: {state}")]
    NotRunning {
        /// What it is instead.
        state: InstanceState,
    },
    /// The hard deadline has passed; nothing brings it back (L9).
    #[error("the instance has expired")]
    Expired,
    /// No such execution, file, snapshot or port.
    #[error("{what} was not found")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// Something else stands in the way: a used id with another content, a file that exists.
    #[error("{what}")]
    Conflict {
        /// What is in the way.
        what: String,
    },
    /// The request makes no sense.
    #[error("{what}")]
    Invalid {
        /// What is wrong with it.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// A limit was reached.
    #[error("{limit} is exhausted: {what}")]
    Exhausted {
        /// Which limit.
        limit: &'static str,
        /// How it stands.
        what: String,
    },
    /// This provider cannot do that here.
    #[error("this provider cannot do that here ({capability:?}): {why}")]
    Unsupported {
        /// What it cannot do.
        capability: Capability,
        /// Why.
        why: String,
    },
    /// The instance was made by an older version and does not know this.
    #[error("the instance is older than this request: {what}")]
    Outdated {
        /// What it does not know.
        what: String,
    },
    /// No answer in time: it may or may not have happened.
    #[error("{what} was not answered within {after_ms} ms")]
    TimedOut {
        /// What was asked.
        what: &'static str,
        /// How long was waited.
        after_ms: u64,
    },
    /// The provider could not be reached: nothing is known.
    #[error("{what} cannot be reached")]
    Unavailable {
        /// Who.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It was tried and went wrong.
    #[error("{what}")]
    Failed {
        /// What went wrong.
        what: String,
    },
}

impl ProviderError {
    /// A stable word for scripts, metrics and documentation.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Fenced { .. } => "fenced",
            Self::StaleGeneration { .. } => "stale_generation",
            Self::Absent => "absent",
            Self::NotRunning { .. } => "not_running",
            Self::Expired => "expired",
            Self::NotFound { .. } => "not_found",
            Self::Conflict { .. } => "conflict",
            Self::Invalid { .. } => "invalid",
            Self::Exhausted { .. } => "exhausted",
            Self::Unsupported { .. } => "unsupported",
            Self::Outdated { .. } => "outdated",
            Self::TimedOut { .. } => "timed_out",
            Self::Unavailable { .. } => "unavailable",
            Self::Failed { .. } => "failed",
        }
    }

    /// Whether the same call may succeed later although nobody changed anything.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::TimedOut { .. } | Self::Unavailable { .. })
    }
}

impl From<IdError> for ProviderError {
    fn from(error: IdError) -> Self {
        Self::Invalid { what: error.to_string(), hint: "ids look like sbx_01h…, letters and digits only".to_owned() }
    }
}

impl From<Late> for ProviderError {
    fn from(late: Late) -> Self {
        match late {
            Late::Fenced { presented, highest } => Self::Fenced { presented, highest },
            Late::Stale { asked, current } => Self::StaleGeneration { asked, current },
            Late::Absent => Self::Absent,
        }
    }
}

impl From<Invalid> for ProviderError {
    fn from(Invalid { what, hint }: Invalid) -> Self {
        Self::Invalid { what, hint }
    }
}
