//! What can go wrong with images, transfers and checks.

use std::io;

use viv_image::{ArchiveError, BlobError, LayerError, ReferenceError, RegistryError, WriteError};
use viv_layer::UnpackError;
use viv_provider::ProviderError;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no such thing.
    #[error("{what} was not found")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// Something is in the way.
    #[error("{what}")]
    Conflict {
        /// What.
        what: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// It makes no sense.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: String,
        /// What to do instead.
        hint: &'static str,
    },
    /// It is not what it was, or not what it says.
    #[error("{what}")]
    Damaged {
        /// What is wrong.
        what: String,
    },
    /// An archive cannot be read.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A layer is not what was promised.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// An archive or layer was refused.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A registry refused, or could not be reached.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A name that names nothing.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Blobs that were downloaded cannot be read.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// An image cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The disk.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    /// A stable word for scripts.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Conflict { .. } => "conflict",
            Self::Invalid { .. } | Self::Reference(_) => "invalid",
            Self::Damaged { .. } | Self::Layer(_) => "damaged",
            Self::Archive(_) | Self::Unpack(_) => "refused_archive",
            Self::Registry(_) => "registry",
            Self::Blob(_) | Self::Write(_) | Self::Io { .. } => "failed",
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Conflict { hint, .. } | Self::Invalid { hint, .. } => Some((*hint).to_owned()),
            Self::Archive(error) => error.hint(),
            Self::Registry(error) => error.hint().map(str::to_owned),
            Self::Reference(error) => error.hint().map(str::to_owned),
            Self::NotFound { .. } => Some("`viv image ls` lists images, `viv local snapshots` snapshots".to_owned()),
            Self::Damaged { .. } => Some("`viv image check` tells what else is".to_owned()),
            Self::Layer(_) | Self::Unpack(_) | Self::Blob(_) | Self::Write(_) | Self::Io { .. } => None,
        }
    }
}

/// Says what was tried when it fails.
pub(crate) trait Tried<T> {
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, StoreError>;
}

impl<T, E: Into<io::Error>> Tried<T> for Result<T, E> {
    fn tried(self, what: impl FnOnce() -> String) -> Result<T, StoreError> {
        self.map_err(|source| StoreError::Io { what: what(), source: source.into() })
    }
}

impl From<StoreError> for ProviderError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { what } => Self::NotFound { what },
            StoreError::Conflict { what, .. } => Self::Conflict { what },
            StoreError::Invalid { what, hint } => Self::Invalid { what, hint: hint.to_owned() },
            StoreError::Io { what, source } => Self::Unavailable { what, source },
            other => Self::Failed { what: crate::shim::chain(&other) },
        }
    }
}
