//! Failures and exit codes.
//!
//! Whatever goes wrong ends here: as `error: …`, `hint: …` and where it is explained on standard error, and as an exit
//! code that scripts can rely on.

use std::fmt;
use std::io::{self, ErrorKind};

use viv_api::client::ClientError;
use viv_api::{ApiError, ErrorCode};

use crate::settings::{START, is_loopback};

/// Done.
pub(crate) const OK: u8 = 0;
/// It failed, in a way that has no code of its own.
pub(crate) const FAILED: u8 = 1;
/// The command line, the configuration or the request makes no sense. The same as clap's.
pub(crate) const USAGE: u8 = 2;
/// There is no such thing.
pub(crate) const NOT_FOUND: u8 = 3;
/// Something stands in the way, or the sandbox does not run.
pub(crate) const CONFLICT: u8 = 4;
/// It was deleted, its deadline passed, or the handle is of an older generation.
pub(crate) const GONE: u8 = 5;
/// The key or a quota does not allow it.
pub(crate) const REFUSED: u8 = 6;
/// The daemon cannot be reached.
pub(crate) const UNREACHABLE: u8 = 7;
/// A time limit passed.
pub(crate) const TIMEOUT: u8 = 124;
/// `run`, `exec`, `attach` and all of `local` and `image`: viv itself failed, not the command.
pub(crate) const NOT_THE_COMMAND: u8 = 125;
/// The program is there and cannot be run.
pub(crate) const CANNOT_RUN: u8 = 126;
/// There is no such program.
pub(crate) const NO_PROGRAM: u8 = 127;
/// Added to the number of the signal that ended a command.
pub(crate) const SIGNAL_BASE: u8 = 128;

/// The same for people: `viv help exit-codes`, and a part of docs/cli.md.
pub(crate) const TABLE: &str = "\
Exit codes:
    0  done; also when whoever read the output went away
    1  it failed
    2  the command line, the configuration or the request makes no sense
    3  there is no such sandbox, execution, file or key
    4  something stands in the way: a name that is taken, a sandbox that does
       not run, a transition under way
    5  gone: it was deleted, its deadline passed, or the generation is not the
       current one
    6  refused: no good key, a key that does not allow it, a quota that is used up
    7  the daemon cannot be reached
  124  a time limit passed

`run`, `exec` and `attach` end with the code of the command:
  0..  its own exit code; 128 and the signal's number when a signal ended it
       (137 when it was killed for memory, 143 when it was cancelled)
  124  its time limit passed
  125  viv failed, not the command; also when the sandbox ended under it
  126  the program is there and cannot be run
  127  there is no such program

`viv local` and `viv image` end with 125 for whatever viv could not do.
`viv image check` ends with 1 when something is damaged.";

/// What went wrong, with all there is to say about it.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: u8,
    message: String,
    hint: Option<String>,
    docs: Option<String>,
}

impl Failure {
    pub(crate) fn new(exit: u8, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), hint: None, docs: None }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(USAGE, message)
    }

    /// With what to do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\nhint: {hint}")?;
        }
        if let Some(docs) = &self.docs {
            write!(f, "\nsee: {docs}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let happened = error.details.as_ref().and_then(|details| match error.code {
            ErrorCode::StaleHandle | ErrorCode::Gone => details.what.clone(),
            _ => None,
        });
        let message = match happened {
            Some(what) if !error.message.contains(&what) => format!("{}: {what}", error.message),
            Some(_) | None => error.message,
        };
        // On a command line nobody sends headers, so there it is said otherwise where keys are from.
        let said = error.hint.filter(|_| error.code != ErrorCode::Unauthenticated);
        let hint = said.or_else(|| hint(error.code).map(str::to_owned));
        Self { exit: exit_code(error.code), message, hint, docs: Some(error.docs) }
    }
}

impl From<&ClientError> for Failure {
    fn from(error: &ClientError) -> Self {
        match error {
            ClientError::Api { error, .. } => Self::from(ApiError::clone(error)),
            ClientError::Unexpected { .. } => {
                Self::new(FAILED, error.to_string()).hint("is that a daemon of viv, and of this version?")
            }
            ClientError::Address { .. } => Self::usage(error.to_string()),
            ClientError::Transport { url, source } => {
                let failure = Self::new(UNREACHABLE, format!("the daemon cannot be reached at {url}: {source}"));
                match source.kind() {
                    ErrorKind::ConnectionRefused if is_loopback(url) => failure.hint(START),
                    ErrorKind::ConnectionRefused => failure.hint("is the address right, and does the daemon run?"),
                    // Whether a change happened is not known.
                    _ => failure.hint("`viv ps` tells how things stand, once it can be reached"),
                }
            }
            ClientError::Interrupted { last, .. } => {
                let last = Self::from(&**last);
                Self { message: format!("{error}: {}", last.message), ..last }
            }
        }
    }
}

/// The exit code that goes with a code of the API.
pub(crate) fn exit_code(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::InvalidRequest => USAGE,
        ErrorCode::NotFound => NOT_FOUND,
        ErrorCode::Conflict
        | ErrorCode::NameTaken
        | ErrorCode::SnapshotInUse
        | ErrorCode::IdempotencyMismatch
        | ErrorCode::NotRunning
        | ErrorCode::LifecycleLocked
        | ErrorCode::AbsenceUnproven => CONFLICT,
        ErrorCode::Expired | ErrorCode::StaleHandle | ErrorCode::Gone => GONE,
        ErrorCode::Unauthenticated | ErrorCode::Forbidden | ErrorCode::QuotaExceeded | ErrorCode::TooManyRequests => {
            REFUSED
        }
        ErrorCode::ShuttingDown | ErrorCode::Draining => UNREACHABLE,
        ErrorCode::Timeout | ErrorCode::RequestTimeout => TIMEOUT,
        ErrorCode::MethodNotAllowed
        | ErrorCode::NotAcceptable
        | ErrorCode::PayloadTooLarge
        | ErrorCode::UnsupportedMedia
        | ErrorCode::Unsupported
        | ErrorCode::Internal
        | ErrorCode::ProviderUnavailable
        | ErrorCode::StoreUnavailable => FAILED,
    }
}

/// What helps on a command line, where the server had nothing to say.
fn hint(code: ErrorCode) -> Option<&'static str> {
    match code {
        ErrorCode::NotFound => Some("`viv ps --all` lists sandboxes"),
        ErrorCode::NotRunning => Some("`viv ensure` makes it run"),
        ErrorCode::NameTaken => Some("`viv ensure NAME` makes the one that has it run"),
        ErrorCode::SnapshotInUse => Some("`viv snapshot show` says who uses it"),
        ErrorCode::Unauthenticated => Some("set VIV_KEY, or VIV_DATA to the daemon's data folder"),
        ErrorCode::Forbidden => Some("use a key with a wider scope"),
        ErrorCode::QuotaExceeded => Some("`viv ps` shows what is in use, `viv rm` gives it back"),
        ErrorCode::Internal => Some("`viv logs --daemon` may say more"),
        ErrorCode::Unsupported => Some("`viv doctor` says what this machine can do, and why it cannot do the rest"),
        ErrorCode::Gone => Some("a deleted sandbox does not come back; `viv create` makes another"),
        ErrorCode::InvalidRequest
        | ErrorCode::MethodNotAllowed
        | ErrorCode::NotAcceptable
        | ErrorCode::RequestTimeout
        | ErrorCode::Conflict
        | ErrorCode::IdempotencyMismatch
        | ErrorCode::LifecycleLocked
        | ErrorCode::AbsenceUnproven
        | ErrorCode::Expired
        | ErrorCode::Timeout
        | ErrorCode::StaleHandle
        | ErrorCode::PayloadTooLarge
        | ErrorCode::UnsupportedMedia
        | ErrorCode::TooManyRequests
        | ErrorCode::ProviderUnavailable
        | ErrorCode::StoreUnavailable
        | ErrorCode::ShuttingDown
        | ErrorCode::Draining => None,
    }
}

/// Says what went wrong, and answers with the exit code: that of the failure, or this one.
pub(crate) fn report(error: &anyhow::Error, otherwise: u8) -> u8 {
    // A reader that went away, as in `viv … | head`, is not a failure.
    if is_broken_pipe(error) {
        return OK;
    }
    if let Some(failure) = error.downcast_ref::<ClientError>().map(Failure::from) {
        eprintln!("error: {failure}");
        return failure.exit;
    }
    eprintln!("error: {error:#}");
    error.downcast_ref::<Failure>().map_or(otherwise, |failure| failure.exit)
}

/// Whether whoever read standard output went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_api_says_is_said_with_its_hint_and_its_page() {
        let failure = Failure::from(ApiError::not_found("sandbox box"));
        assert_eq!(failure.exit, NOT_FOUND);
        assert_eq!(
            failure.to_string(),
            "sandbox box was not found\nhint: `viv ps --all` lists sandboxes\nsee: docs/errors/not_found.md"
        );
        let (one, two) = (viv_core::Generation(1), viv_core::Generation(2));
        let failure = Failure::from(ApiError::stale_handle(one, two, "it was lost and made again"));
        assert_eq!(failure.exit, GONE);
        assert!(failure.to_string().contains("it was lost and made again"), "{failure}");
    }

    #[test]
    fn every_exit_code_is_in_the_table() {
        let listed = |code: u8| TABLE.lines().any(|line| line.trim_start().starts_with(&format!("{code}  ")));
        for code in ErrorCode::ALL {
            assert!(listed(exit_code(*code)), "{code}");
        }
        for code in [OK, UNREACHABLE, TIMEOUT, NOT_THE_COMMAND, CANNOT_RUN, NO_PROGRAM] {
            assert!(listed(code), "{code}");
        }
    }

    #[test]
    fn a_reader_that_went_away_is_no_failure() {
        let gone = io::Error::from(ErrorKind::BrokenPipe);
        assert_eq!(report(&anyhow::Error::new(gone), FAILED), OK);
        assert_eq!(report(&Failure::new(GONE, "over").into(), FAILED), GONE);
        assert_eq!(report(&anyhow::anyhow!("something"), NOT_THE_COMMAND), NOT_THE_COMMAND);
    }
}
