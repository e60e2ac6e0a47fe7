//! What can go wrong for a client.

use std::io;

use crate::error::{ApiError, ErrorCode};

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server said no, and why.
    #[error("{error}")]
    Api {
        /// The HTTP status.
        status: u16,
        /// What it said.
        error: Box<ApiError>,
    },
    /// An answer that is not the API's: something else listens there, or is in between, or it is much newer.
    #[error("{url} answered {status} with something that is not the API's: {found}")]
    Unexpected {
        /// What was asked.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The beginning of what came.
        found: String,
    },
    /// The server cannot be asked like this.
    #[error("{url:?} is not where a server could be: {why}")]
    Address {
        /// The address.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The server did not answer, or the connection broke: a change that was asked for may have happened.
    #[error("{url} cannot be reached")]
    Transport {
        /// What was asked.
        url: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A stream that broke, and could not be taken up again.
    #[error("{what} broke and could not be taken up again")]
    Interrupted {
        /// Which stream.
        what: &'static str,
        /// What went wrong last.
        #[source]
        last: Box<Self>,
    },
}

impl ClientError {
    /// The code, if the server gave one.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Api { error, .. } => Some(error.code),
            Self::Interrupted { last, .. } => last.code(),
            Self::Unexpected { .. } | Self::Address { .. } | Self::Transport { .. } => None,
        }
    }

    /// What to do about it, if there is something to say.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Api { error, .. } => error.hint.as_deref(),
            Self::Interrupted { last, .. } => last.hint(),
            Self::Transport { source, .. } if source.kind() == io::ErrorKind::ConnectionRefused => {
                Some("is the daemon running? viv serve starts it")
            }
            Self::Unexpected { .. } | Self::Address { .. } | Self::Transport { .. } => None,
        }
    }

    /// Whether asking again may help: the server is away, or says that it will be back. Whether it is safe depends on
    /// what was asked.
    pub fn passes(&self) -> bool {
        match self {
            Self::Transport { .. } => true,
            Self::Api { status, .. } => matches!(status, 429 | 503),
            // What stands in between says so while the server is away.
            Self::Unexpected { status, .. } => matches!(status, 502..=504),
            Self::Interrupted { last, .. } => last.passes(),
            Self::Address { .. } => false,
        }
    }
}
