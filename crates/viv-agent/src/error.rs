//! Errors as the protocol has them, and how the kernel's become those.

use std::io;

use rustix::io::Errno;
use viv_agent::proto::{AgentError, ErrorCode};

/// What a request comes to.
pub(crate) type Result<T> = std::result::Result<T, AgentError>;

/// Longest name that is quoted from a request: enough to know which one was meant.
const QUOTED_CHARS_MAX: usize = 200;

/// Longest sentence about what went wrong. Hundreds of them fit into one answer, and one always into a status.
pub(crate) const SENTENCE_BYTES_MAX: usize = 1024;

/// An error with a message.
pub(crate) fn error(code: ErrorCode, message: impl Into<String>) -> AgentError {
    AgentError { code, message: sentence(message.into()), current: None }
}

/// Cuts a sentence that grew too long.
pub(crate) fn sentence(mut text: String) -> String {
    const MARK: &str = "…";
    if text.len() > SENTENCE_BYTES_MAX {
        let room = SENTENCE_BYTES_MAX - MARK.len();
        let end = (0..=room).rev().find(|&at| text.is_char_boundary(at)).unwrap_or_default();
        text.truncate(end);
        text.push_str(MARK);
    }
    text
}

/// A name from a request, in quotes, for a sentence.
pub(crate) fn quoted(name: &str) -> String {
    match name.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
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
    let what = what.char_indices().nth(QUOTED_CHARS_MAX).map_or(what, |(end, _)| &what[..end]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_request_is_quoted_at_length() {
        assert_eq!(quoted("a\"b"), "\"a\\\"b\"");
        let long = "ä".repeat(1 << 20);
        assert_eq!(quoted(&long).chars().count(), QUOTED_CHARS_MAX + 3);
        assert!(quoted(&long).ends_with("ä\"…"));
        assert!(refused(&long, Errno::NOTDIR).message.ends_with("ä: not a directory"));
        let message = invalid(long).message;
        assert!(message.len() <= SENTENCE_BYTES_MAX && message.ends_with("ä…"), "{}", message.len());
        assert_eq!(sentence("x".repeat(SENTENCE_BYTES_MAX)).len(), SENTENCE_BYTES_MAX);
    }
}
