//! Errors as the protocol has them, and how the kernel's become those.

use std::io;

use rustix::io::Errno;
use viv_agent::proto::{AgentError, ErrorCode};

/// What a request comes to.
pub(crate) type Result<T> = std::result::Result<T, AgentError>;

/// An error with a message.
pub(crate) fn error(code: ErrorCode, message: impl Into<String>) -> AgentError {
    AgentError { code, message: message.into(), current: None }
}

/// [`ErrorCode::Invalid`].
pub(crate) fn invalid(message: impl Into<String>) -> AgentError {
    error(ErrorCode::Invalid, message)
}

/// The kernel said no to `what`.
pub(crate) fn refused(what: &str, errno: Errno) -> AgentError {
    let code = match errno {
        Errno::NOENT | Errno::SRCH => ErrorCode::NotFound,
        Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR | Errno::ISDIR | Errno::BUSY => ErrorCode::Conflict,
        Errno::XDEV | Errno::LOOP | Errno::INVAL | Errno::NAMETOOLONG => ErrorCode::Invalid,
        Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN => ErrorCode::Exhausted,
        _ => ErrorCode::Failed,
    };
    error(code, format!("{what}: {}", words(errno)))
}

/// As [`refused`], from the standard library's error.
pub(crate) fn refused_io(what: &str, cause: &io::Error) -> AgentError {
    match cause.raw_os_error() {
        Some(errno) => refused(what, Errno::from_raw_os_error(errno)),
        None => error(ErrorCode::Failed, format!("{what}: {cause}")),
    }
}

/// What an errno means, in words and without its number.
pub(crate) fn words(errno: Errno) -> String {
    let text = io::Error::from(errno).to_string();
    let plain = text.split(" (os error").next().unwrap_or_default();
    let mut characters = plain.chars();
    characters.next().map_or_else(String::new, |first| first.to_lowercase().chain(characters).collect())
}

/// For the agent's log, which is its standard error.
pub(crate) fn say(what: &str) {
    use std::io::Write;
    // There is nobody to tell when the log cannot be written.
    let _ = writeln!(io::stderr().lock(), "agent: {what}");
}
