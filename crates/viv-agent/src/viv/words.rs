//! Arguments, one after the other, and text for people.

use std::collections::VecDeque;
use std::ffi::OsString;

use super::{Failure, USAGE};

/// What is left of the command line.
#[derive(Debug)]
pub(super) struct Words(VecDeque<String>);

impl Words {
    pub(super) fn new(arguments: Vec<OsString>) -> Result<Self, Failure> {
        let text = |word: OsString| word.into_string().map_err(|_| Failure::usage("an argument is no text"));
        arguments.into_iter().map(text).collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn next(&mut self) -> Option<String> {
        self.0.pop_front()
    }

    /// The value of a flag: behind its `=`, or the next word.
    pub(super) fn value(&mut self, word: &str) -> Result<String, Failure> {
        match split(word) {
            (_, Some(value)) => Ok(value.to_owned()),
            (flag, None) => self.next().ok_or_else(|| Failure::usage(format!("{flag} wants a value"))),
        }
    }

    /// All that is left.
    pub(super) fn rest(self) -> Vec<String> {
        self.0.into()
    }
}

/// A flag, and what stands behind its `=`.
pub(super) fn split(word: &str) -> (&str, Option<&str>) {
    match word.split_once('=') {
        Some((flag, value)) if word.starts_with("--") => (flag, Some(value)),
        _ => (word, None),
    }
}

/// Reads a span of time: `90s`, `1h30m`, `500ms`; a number alone is seconds.
pub(super) fn parse_span(text: &str) -> Result<u64, Failure> {
    let bad = || {
        let message = format!("{text:?} is no span of time");
        Failure::new(USAGE, message, "write it like 90s, 5m, 1h30m or 500ms")
    };
    viv_core::span::parse_span(text).ok_or_else(bad)
}

/// A span of time in its largest unit or two.
pub(super) fn span(ms: u64) -> String {
    let seconds = ms / 1000;
    match (seconds / 86_400, seconds / 3600, seconds / 60) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{}m", minutes % 60),
        (days, ..) => format!("{days}d"),
    }
}

/// Text that moves no cursor and colours nothing.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Rows under their heads, aligned.
pub(super) fn table<const N: usize>(heads: [&str; N], rows: Vec<[String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(heads.map(str::to_owned)).chain(rows).collect();
    let widths: [usize; N] =
        std::array::from_fn(|at| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default());
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_as_outside() {
        for (text, ms) in [("90", 90_000), ("1h30m", 5_400_000), ("500ms", 500), ("2d", 172_800_000)] {
            assert_eq!(parse_span(text), Ok(ms));
        }
        assert!(parse_span("5x").is_err());
        assert_eq!([0, 61_000, 7_260_000, 172_800_000].map(span), ["0s", "1m1s", "2h1m", "2d"].map(str::to_owned));
    }

    #[test]
    fn rows_are_aligned_and_harmless() {
        let rows = vec![["a".to_owned(), "bb".to_owned()], ["ccc".to_owned(), String::new()]];
        assert_eq!(table(["X", "Y"], rows), "X    Y\na    bb\nccc\n");
        assert_eq!(clean("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
    }
}
