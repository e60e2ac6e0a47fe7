//! The output of an execution, taken up again where it broke off (X2).

use viv_core::{ExecutionId, Generation};

use super::http::Call;
use super::stream::{Lines, Patience};
use super::{Client, ClientError, Result};
use crate::bound::{MomentMs, Offset, SandboxRef, SearchText, TailLines};
use crate::execution::{OutputChunk, OutputCut, OutputEnd, OutputLine, Range};
use crate::query::{OutputQuery, encode};
use crate::{header, path};

/// The output of an execution: every byte from an offset on, once, in order; what was not kept as a cut; the end at
/// last. Signs of life are not told.
///
/// A connection that breaks is made again at the byte after the last one. An error is the last item.
pub struct Output<'a> {
    client: &'a Client,
    /// Where it is read.
    path: String,
    generation: Option<Generation>,
    follow: bool,
    /// Where the next byte stands.
    offset: u64,
    lines: Option<Lines>,
    patience: Patience,
    over: bool,
    /// Where to begin, until something was read.
    tail: Option<TailLines>,
    search: Option<SearchText>,
    since: Option<MomentMs>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        client: &'a Client,
        sandbox: &SandboxRef,
        generation: Option<Generation>,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Self {
        Self::of(client, path::fill(path::OUTPUT, &[sandbox.as_str(), execution.as_str()]), generation, offset, follow)
    }

    pub(super) fn of(
        client: &'a Client,
        path: String,
        generation: Option<Generation>,
        offset: u64,
        follow: bool,
    ) -> Self {
        Self {
            client,
            path,
            generation,
            follow,
            offset,
            lines: None,
            patience: Patience::default(),
            over: false,
            tail: None,
            search: None,
            since: None,
        }
    }

    /// From the first byte on, over the connection that started it.
    pub(super) fn started(
        client: &'a Client,
        sandbox: &SandboxRef,
        generation: Option<Generation>,
        execution: &ExecutionId,
        lines: Lines,
    ) -> Self {
        Self { lines: Some(lines), ..Self::new(client, sandbox, generation, execution, 0, true) }
    }

    /// From the last so many lines on.
    #[must_use]
    pub fn tail(self, lines: TailLines) -> Self {
        Self { tail: Some(lines), ..self }
    }

    /// Only lines with this in them, of what there is.
    #[must_use]
    pub fn search(self, text: SearchText) -> Self {
        Self { search: Some(text), ..self }
    }

    /// Only what was written then or later.
    #[must_use]
    pub fn since(self, moment: MomentMs) -> Self {
        Self { since: Some(moment), ..self }
    }

    /// Where the next byte stands: where another reader would have to begin.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    fn connect(&self) -> Result<Lines> {
        let query = OutputQuery {
            // From the end, or from a place.
            offset: self.tail.is_none().then(|| Offset::nearest(self.offset)),
            follow: self.follow,
            tail: self.tail,
            search: self.search.clone(),
            since_ms: self.since,
            generation: None,
        };
        let mut call = Call::get(self.path.clone() + &encode(&query)).streams(header::NDJSON);
        call.generation = self.generation;
        let url = self.client.http.url(&call.path);
        Ok(Lines::new(url, self.client.http.send(call)?))
    }

    /// The next line, over one connection or the next.
    fn read(&mut self) -> Result<OutputLine> {
        loop {
            match self.read_once() {
                Ok(Some(line)) => return Ok(line),
                Ok(None) => {}
                Err(error) => {
                    self.lines = None;
                    self.patience.bear("an output", error)?;
                }
            }
        }
    }

    fn read_once(&mut self) -> Result<Option<OutputLine>> {
        if self.lines.is_none() {
            self.lines = Some(self.connect()?);
        }
        let lines = self.lines.as_mut().expect("connected just now");
        let eof = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        let text = lines.next()?.ok_or_else(|| lines.broken(eof()))?;
        let line = parse(&text).map_err(|why| ClientError::Unexpected {
            url: self.client.http.url(&self.path),
            status: 200,
            found: why,
        })?;
        if let OutputLine::End(OutputEnd { end }) = &line
            && self.follow
            && !end.state.is_final()
        {
            // It goes on, and whoever follows is there until it ends.
            return Err(lines.broken(eof()));
        }
        Ok(self.advance(line))
    }

    /// Gives what is new of a line.
    fn advance(&mut self, line: OutputLine) -> Option<OutputLine> {
        self.patience.renew();
        if !matches!(line, OutputLine::Alive(_)) {
            self.tail = None;
        }
        match line {
            OutputLine::Chunk(chunk) => self.advance_chunk(&chunk).map(OutputLine::Chunk),
            OutputLine::Cut(OutputCut { cut: Range { from, to } }) => {
                let from = from.max(self.offset);
                (from < to).then(|| {
                    self.offset = to;
                    OutputLine::Cut(OutputCut { cut: Range { from, to } })
                })
            }
            OutputLine::End(OutputEnd { end }) => {
                self.over = true;
                Some(OutputLine::End(OutputEnd { end }))
            }
            OutputLine::Alive(_) => None,
        }
    }

    fn advance_chunk(&mut self, chunk: &OutputChunk) -> Option<OutputChunk> {
        let mut data = chunk.data()?;
        // Servers begin exactly at the offset. Should one begin earlier, nothing is told twice.
        let known = usize::try_from(self.offset.saturating_sub(chunk.offset)).unwrap_or(usize::MAX);
        if known >= data.len() {
            return None;
        }
        let offset = chunk.offset + known as u64;
        data.drain(..known);
        self.offset = offset + data.len() as u64;
        Some(OutputChunk::new(offset, chunk.stream, chunk.at_ms, data))
    }
}

fn parse(text: &str) -> std::result::Result<OutputLine, String> {
    let line = serde_json::from_str(text).map_err(|_| text.chars().take(200).collect::<String>())?;
    match line {
        OutputLine::Chunk(chunk) if chunk.data().is_none() => Err("a chunk without bytes".to_owned()),
        line @ (OutputLine::Chunk(_) | OutputLine::Cut(_) | OutputLine::End(_) | OutputLine::Alive(_)) => Ok(line),
    }
}

impl Iterator for Output<'_> {
    type Item = Result<OutputLine>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let line = self.read();
        self.over |= line.is_err();
        Some(line)
    }
}
