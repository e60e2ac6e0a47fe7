//! What an execution wrote: its beginning and its end, within a bound.

use std::collections::VecDeque;

use viv_core::exec::{OutputEvent, Stream};

/// Kept of an execution that names no bound; plenty for what simulated programs say.
pub(super) const OUTPUT_BYTES_DEFAULT: u64 = 4 << 20;

/// Largest piece that a reader gets at once.
const CHUNK_BYTES_MAX: usize = 64 << 10;

#[derive(Debug, Clone)]
struct Chunk {
    offset: u64,
    stream: Stream,
    at_ms: u64,
    data: Vec<u8>,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }

    /// The part from an offset within it on.
    fn event_from(&self, offset: u64) -> OutputEvent {
        let data = self.data[(offset - self.offset) as usize..].to_vec();
        OutputEvent::Chunk { offset, stream: self.stream, at_ms: self.at_ms, data }
    }
}

/// Kept output. The first half of the bound goes to the beginning, the rest to the end.
#[derive(Debug, Clone)]
pub(super) struct Output {
    head: Vec<Chunk>,
    head_bytes_max: u64,
    tail: VecDeque<Chunk>,
    tail_bytes: u64,
    tail_bytes_max: u64,
    written: u64,
}

impl Output {
    pub(super) fn new(bytes_max: u64) -> Self {
        let head_bytes_max = bytes_max / 2;
        Self {
            head: Vec::new(),
            head_bytes_max,
            tail: VecDeque::new(),
            tail_bytes: 0,
            tail_bytes_max: bytes_max - head_bytes_max,
            written: 0,
        }
    }

    /// Bytes written so far, kept or not.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn write(&mut self, stream: Stream, at_ms: u64, data: &[u8]) {
        for piece in data.chunks(CHUNK_BYTES_MAX) {
            let room = self.head_bytes_max.saturating_sub(self.written) as usize;
            let (begin, rest) = piece.split_at(room.min(piece.len()));
            if !begin.is_empty() {
                self.head.push(Chunk { offset: self.written, stream, at_ms, data: begin.to_vec() });
                self.written += begin.len() as u64;
            }
            if !rest.is_empty() {
                self.tail.push_back(Chunk { offset: self.written, stream, at_ms, data: rest.to_vec() });
                self.written += rest.len() as u64;
                self.tail_bytes += rest.len() as u64;
                self.trim();
            }
        }
    }

    /// Forgets the oldest of the tail until it fits.
    fn trim(&mut self) {
        while self.tail_bytes > self.tail_bytes_max {
            let over = self.tail_bytes - self.tail_bytes_max;
            let Some(oldest) = self.tail.front_mut() else { return };
            let lost = over.min(oldest.data.len() as u64);
            oldest.data.drain(..lost as usize);
            oldest.offset += lost;
            if oldest.data.is_empty() {
                self.tail.pop_front();
            }
            self.tail_bytes -= lost;
        }
    }

    /// What a reader at this offset hears next, and where it stands then. `None` when there is nothing yet.
    pub(super) fn read(&self, offset: u64) -> Option<(OutputEvent, u64)> {
        if offset >= self.written {
            return None;
        }
        let is_before = |chunk: &Chunk| chunk.end() <= offset;
        let in_head = self.head.get(self.head.partition_point(is_before));
        let chunk = in_head.or_else(|| self.tail.get(self.tail.partition_point(is_before)));
        let Some(chunk) = chunk else {
            // A bound of nothing keeps nothing.
            return Some((OutputEvent::Cut { from: offset, to: self.written }, self.written));
        };
        if chunk.offset > offset {
            return Some((OutputEvent::Cut { from: offset, to: chunk.offset }, chunk.offset));
        }
        Some((chunk.event_from(offset), chunk.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(output: &Output, mut offset: u64) -> Vec<(u64, String)> {
        let mut told = Vec::new();
        while let Some((event, next)) = output.read(offset) {
            told.push(match event {
                OutputEvent::Chunk { offset, data, .. } => (offset, String::from_utf8(data).unwrap()),
                OutputEvent::Cut { from, to } => (from, format!("cut to {to}")),
                OutputEvent::End(_) => unreachable!("output does not know of ends"),
            });
            offset = next;
        }
        told
    }

    #[test]
    fn the_middle_is_cut_to_the_byte() {
        let mut output = Output::new(10);
        for piece in ["0123", "4567", "89ab", "cdef"] {
            output.write(Stream::Stdout, 0, piece.as_bytes());
        }
        let text = |told: &[(u64, &str)]| told.iter().map(|&(at, t)| (at, t.to_owned())).collect::<Vec<_>>();
        assert_eq!(told(&output, 0), text(&[(0, "0123"), (4, "4"), (5, "cut to 11"), (11, "b"), (12, "cdef")]));
        assert_eq!(told(&output, 7), text(&[(7, "cut to 11"), (11, "b"), (12, "cdef")]));
        assert_eq!(told(&output, 13), text(&[(13, "def")]));
        assert_eq!(told(&output, 16), []);
    }

    #[test]
    fn a_bound_of_nothing_keeps_nothing() {
        let mut output = Output::new(0);
        output.write(Stream::Stderr, 0, b"lost");
        assert_eq!(told(&output, 1), [(1, "cut to 4".to_owned())]);
    }
}
