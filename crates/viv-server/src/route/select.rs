//! Parts of an output: its last lines, or those with something in them. Looked for here, so that only they travel.

use std::collections::VecDeque;

use async_trait::async_trait;
use viv_api::bound::{MomentMs, Offset};
use viv_api::query::OutputQuery;
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

/// Only what was written at a moment or later.
pub(super) struct Younger {
    source: Box<dyn OutputStream>,
    since_ms: u64,
    /// A gap before the first piece that is young enough: nobody knows when that was written.
    gap: Option<OutputEvent>,
    next: VecDeque<OutputEvent>,
    begun: bool,
}

impl Younger {
    /// Of this, if a moment was named.
    pub(super) fn of(source: Box<dyn OutputStream>, since_ms: Option<MomentMs>) -> Box<dyn OutputStream> {
        match since_ms.map(MomentMs::get) {
            None => source,
            Some(since_ms) => Box::new(Self { source, since_ms, gap: None, next: VecDeque::new(), begun: false }),
        }
    }

    fn take(&mut self, event: OutputEvent) {
        match &event {
            OutputEvent::Chunk { at_ms, .. } if !self.begun && *at_ms < self.since_ms => self.gap = None,
            OutputEvent::Cut { .. } if !self.begun => self.gap = Some(event),
            OutputEvent::Chunk { .. } => {
                self.begun = true;
                self.next.extend(self.gap.take());
                self.next.push_back(event);
            }
            OutputEvent::Cut { .. } | OutputEvent::End(_) => self.next.push_back(event),
        }
    }
}

#[async_trait]
impl OutputStream for Younger {
    async fn next(&mut self) -> Result<Option<OutputEvent>, ProviderError> {
        loop {
            if let Some(event) = self.next.pop_front() {
                return Ok(Some(event));
            }
            match self.source.next().await? {
                Some(event) => self.take(event),
                None => return Ok(None),
            }
        }
    }
}

/// What there is of an output that nobody runs, as it is asked for: its end, the lines with something in them, or all
/// from an offset on.
pub(super) async fn told(all: impl Fn(u64) -> VecDeque<OutputEvent>, query: &OutputQuery) -> VecDeque<OutputEvent> {
    let offset = match query.tail {
        Some(lines) => tail_offset(&mut Told(all(0)), lines.get()).await.unwrap_or(0),
        None => query.offset.map_or(0, Offset::get),
    };
    let mut source = Younger::of(Box::new(Told(all(offset))), query.since_ms);
    if let Some(text) = &query.search {
        return found(source.as_mut(), text.as_str()).await.map(|(lines, _)| lines).unwrap_or_default();
    }
    let mut events = VecDeque::new();
    while let Ok(Some(event)) = source.next().await {
        events.push_back(event);
    }
    events
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
        let chunk = |(at_ms, piece): (u64, &&str)| {
            let data = piece.as_bytes().to_vec();
            let event = OutputEvent::Chunk { offset, stream: Stream::Stdout, at_ms, data };
            offset += piece.len() as u64;
            event
        };
        Told((0..).zip(pieces).map(chunk).collect())
    }

    async fn text(mut source: Box<dyn OutputStream>) -> String {
        let mut text = String::new();
        while let Some(event) = source.next().await.unwrap() {
            match event {
                OutputEvent::Chunk { data, .. } => text.push_str(std::str::from_utf8(&data).unwrap()),
                OutputEvent::Cut { from, to } => text += &["[", &from.to_string(), "..", &to.to_string(), "]"].concat(),
                OutputEvent::End(_) => text.push('.'),
            }
        }
        text
    }

    #[tokio::test]
    async fn x2_what_is_older_is_left_out_with_its_gaps() {
        let since = |moment_ms: u64| Some(MomentMs::new(moment_ms).unwrap());
        let all = || {
            let mut all = told(&["a", "b", "c", "d"]);
            all.0.insert(1, OutputEvent::Cut { from: 1, to: 1 });
            all.0.insert(4, OutputEvent::Cut { from: 3, to: 3 });
            Box::new(all)
        };
        assert_eq!(text(Younger::of(all(), None)).await, "a[1..1]bc[3..3]d");
        assert_eq!(text(Younger::of(all(), since(0))).await, "a[1..1]bc[3..3]d");
        assert_eq!(text(Younger::of(all(), since(1))).await, "[1..1]bc[3..3]d");
        assert_eq!(text(Younger::of(all(), since(2))).await, "c[3..3]d");
        assert_eq!(text(Younger::of(all(), since(9))).await, "");
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
