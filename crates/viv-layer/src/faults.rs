//! What went wrong, and at which entry.

use std::io;

/// How much of a path a message shows: paths may be longer than any screen.
const SHOWN_BYTES_MAX: usize = 200;

/// A path for people: escaped, since it may hold any byte, and bounded.
pub(crate) fn shown(path: &[u8]) -> String {
    if path.is_empty() {
        return ".".into();
    }
    if path.len() <= SHOWN_BYTES_MAX {
        return path.escape_ascii().to_string();
    }
    format!("{}…", path[..SHOWN_BYTES_MAX].escape_ascii())
}

/// Says where an error happened. The kind stays: callers tell a full disk by it.
pub(crate) fn at(path: &[u8], cause: impl Into<io::Error>) -> io::Error {
    let cause = cause.into();
    io::Error::new(cause.kind(), format!("{}: {cause}", shown(path)))
}

/// A tree that cannot be what it claims, or cannot be said in the form that is asked for.
pub(crate) fn invalid(path: &[u8], why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} {why}", shown(path)))
}
