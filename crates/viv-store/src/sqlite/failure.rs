//! What SQLite's errors mean here.

use rusqlite::{Error, ErrorCode};

use crate::error::StoreError;

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        let what = error.to_string();
        match &error {
            Error::FromSqlConversionFailure(..)
            | Error::IntegralValueOutOfRange(..)
            | Error::Utf8Error(..)
            | Error::InvalidColumnType(..) => Self::Corrupt { what },
            _ => match error.sqlite_error_code() {
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Corrupt { what },
                Some(ErrorCode::OperationInterrupted) => {
                    Self::Unavailable { what: format!("a statement took longer than {} ms", super::STATEMENT_MS_MAX) }
                }
                _ => Self::Unavailable { what },
            },
        }
    }
}

/// A path that could not be used.
pub(super) fn io(what: &str, path: &std::path::Path, error: &std::io::Error) -> StoreError {
    StoreError::Unavailable { what: format!("{what} {}: {error}", path.display()) }
}
