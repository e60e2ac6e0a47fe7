//! Parts of an output: its last lines, or those with something in them. Looked for here, so that only they travel.

use std::collections::VecDeque;

use async_trait::async_trait;
use viv_core::exec::{ExecStatus, OutputEvent, Stream};
use viv_provider::{OutputStream, ProviderError};

/// How much of the end of an output is looked at for its last lines.
pub(super) const TAIL_BYTES: u64 = 1 << 20;

/// Most lines that are found; whoever wants more goes on after the last one.
const FOUND_MAX: usize = 1_000;

/// Most bytes of them together.
const FOUND_BYTES_MAX: usize = 1 << 20;

/// Longest line that is looked at as a whole; of a longer one, piece after piece.
const LINE_BYTES_MAX: usize = 64 << 10;

/// An output that is not read from anybody who runs.
pub(super) struct Told(pub(super) VecDeque<OutputEvent>);

#[async_trait]
impl OutputStream for Told {
    async fn next(&mut self) -> Result<Option<OutputEvent>, ProviderError> {
        Ok(self.0.pop_front())
    }
}

/// Where the last so many lines begin, of what there is.
pub(super) async fn tail_offset(source: &mut dyn OutputStream, lines: u64) -> Result<u64, ProviderError> {
    // Where each of the last lines begins.
    let mut begins: VecDeque<u64> = VecDeque::new();
    let mut at_begin = true;
    let mut note = |offset: u64| {
        begins.push_back(offset);
        if begins.len() as u64 > lines {
            begins.pop_front();
        }
    };
    let mut end = 0;
    while let Some(event) = source.next().await? {
        match event {
            OutputEvent::Chunk { offset, data, .. } => {
                for (at, byte) in data.iter().enumerate() {
                    if at_begin {
                        note(offset + at as u64);
                    }
                    at_begin = *byte == b'\n';
                }
                end = offset + data.len() as u64;
            }
            OutputEvent::Cut { to, .. } => {
                at_begin = true;
                end = to;
            }
            OutputEvent::End(_) => break,
        }
    }
    Ok(begins.front().copied().unwrap_or(end))
}

/// A line that is being put together. Both streams are one text, as on a terminal; it is of the stream it began in.
struct Line {
    offset: u64,
    stream: Stream,
    at_ms: u64,
    data: Vec<u8>,
}

/// The lines with this text in them, and the end.
pub(super) async fn found(
    source: &mut dyn OutputStream,
    text: &str,
) -> Result<(VecDeque<OutputEvent>, Option<ExecStatus>), ProviderError> {
    let mut found = Found { text: text.as_bytes().to_vec(), lines: VecDeque::new(), bytes: 0 };
    let mut line: Option<Line> = None;
    let mut end = None;
    while let Some(event) = source.next().await? {
        match event {
            OutputEvent::Chunk { offset, stream, at_ms, data } => {
                let mut at = offset;
                for piece in data.split_inclusive(|byte| *byte == b'\n') {
                    let open = line.get_or_insert(Line { offset: at, stream, at_ms, data: Vec::new() });
                    open.data.extend_from_slice(piece);
                    at += piece.len() as u64;
                    if piece.ends_with(b"\n") || open.data.len() >= LINE_BYTES_MAX {
                        found.take(line.take());
                    }
                }
            }
            OutputEvent::Cut { .. } => found.take(line.take()),
            OutputEvent::End(status) => end = Some(status),
        }
        // The end is still wanted; what is between is not.
        if found.is_full() && end.is_none() {
            line = None;
        }
    }
    found.take(line);
    Ok((found.lines, end))
}

struct Found {
    text: Vec<u8>,
    lines: VecDeque<OutputEvent>,
    bytes: usize,
}

impl Found {
    fn is_full(&self) -> bool {
        self.lines.len() >= FOUND_MAX || self.bytes >= FOUND_BYTES_MAX
    }

    fn take(&mut self, line: Option<Line>) {
        let Some(Line { offset, stream, at_ms, data }) = line else { return };
        if !self.is_full() && data.windows(self.text.len()).any(|window| window == self.text) {
            self.bytes += data.len();
            self.lines.push_back(OutputEvent::Chunk { offset, stream, at_ms, data });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pieces: &[&str]) -> Told {
        let mut offset = 0;
        let chunk = |piece: &&str| {
            let data = piece.as_bytes().to_vec();
            let event = OutputEvent::Chunk { offset, stream: Stream::Stdout, at_ms: 0, data };
            offset += piece.len() as u64;
            event
        };
        Told(pieces.iter().map(chunk).collect())
    }

    #[tokio::test]
    async fn x2_the_last_lines_begin_where_they_do() {
        for (pieces, lines, begin) in [
            (&["one\ntwo\nthree\n"][..], 1, 8),
            (&["one\ntwo\nthree\n"], 2, 4),
            (&["one\ntwo\nthree\n"], 9, 0),
            (&["one\ntw", "o\nthr", "ee"], 1, 8),
            (&["one\ntw", "o\nthr", "ee"], 2, 4),
            (&[], 3, 0),
        ] {
            assert_eq!(tail_offset(&mut told(pieces), lines).await.unwrap(), begin, "{lines} of {pieces:?}");
        }
    }

    #[tokio::test]
    async fn x2_lines_are_found_over_pieces_with_their_places() {
        let (lines, end) = found(&mut told(&["an err", "or here\nnothing\nand err", "or"]), "error").await.unwrap();
        let shown: Vec<(u64, String)> = lines
            .iter()
            .map(|line| match line {
                OutputEvent::Chunk { offset, data, .. } => (*offset, String::from_utf8(data.clone()).unwrap()),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(shown, [(0, "an error here\n".to_owned()), (22, "and error".to_owned())]);
        assert!(end.is_none());
        let many: String = "error\n".repeat(5_000);
        assert_eq!(found(&mut told(&[&many]), "error").await.unwrap().0.len(), FOUND_MAX);
    }
}
