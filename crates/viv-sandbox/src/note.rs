//! Words for the log of a shim, which lies on the disk that sandboxes can fill.

/// Writes a line to standard error. Unlike `eprintln!` it does not panic where there is no room for it: a shim that
/// watches a full disk, or ends what fills it, has to outlive that.
macro_rules! note {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}
