//! How messages travel: a length, a kind, a payload.
//!
//! ```text
//!   ┌────────────┬──────┬───────────────┐
//!   │ u32, big   │ kind │ payload       │      kind: 1 json, 2 data, 3 end of data
//!   │ endian     │ u8   │ (length many) │
//!   └────────────┴──────┴───────────────┘
//! ```
//!
//! The payload of a data frame of an attached execution starts with a
//! [`ChunkHeader`]; elsewhere it is just bytes. This module only turns bytes
//! into frames and back; the two ends bring their own sockets.

use viv_core::exec::Stream;

/// Length and kind.
pub const HEADER_BYTES: usize = 5;

/// Longest JSON payload: a listing of some ten thousand files.
pub const JSON_BYTES_MAX: usize = 8 << 20;

/// Longest data payload; also what readers should aim for.
pub const DATA_BYTES_MAX: usize = 256 << 10;

/// What a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message.
    Json,
    /// Bytes.
    Data,
    /// No more bytes.
    End,
}

/// Why bytes are not a frame. The connection is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No such kind.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// Longer than its kind may be.
    #[error("frame of {0} bytes is too long")]
    Length(usize),
}

/// Header of a frame.
pub fn encode_header(kind: Kind, length: usize) -> [u8; HEADER_BYTES] {
    debug_assert!(length <= limit(kind), "a frame longer than its peer will take");
    let [a, b, c, d] = (length as u32).to_be_bytes();
    let kind = match kind {
        Kind::Json => 1,
        Kind::Data => 2,
        Kind::End => 3,
    };
    [a, b, c, d, kind]
}

/// Kind and payload length of a header.
pub fn decode_header(header: [u8; HEADER_BYTES]) -> Result<(Kind, usize), FrameError> {
    let [a, b, c, d, kind] = header;
    let kind = match kind {
        1 => Kind::Json,
        2 => Kind::Data,
        3 => Kind::End,
        other => return Err(FrameError::Kind(other)),
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > limit(kind) {
        return Err(FrameError::Length(length));
    }
    Ok((kind, length))
}

fn limit(kind: Kind) -> usize {
    match kind {
        Kind::Json => JSON_BYTES_MAX,
        Kind::Data => DATA_BYTES_MAX,
        Kind::End => 0,
    }
}

/// Stands before the bytes of a chunk of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Who wrote it.
    pub stream: Stream,
    /// Where its first byte stands in the execution's whole output.
    pub offset: u64,
    /// Wall time at which it was read from the command.
    pub at_ms: u64,
}

impl ChunkHeader {
    /// Its length.
    pub const BYTES: usize = 17;

    /// As bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0] = match self.stream {
            Stream::Stdout => 1,
            Stream::Stderr => 2,
        };
        out[1..9].copy_from_slice(&self.offset.to_be_bytes());
        out[9..].copy_from_slice(&self.at_ms.to_be_bytes());
        out
    }

    /// From the front of a payload, with the rest of it.
    pub fn decode(payload: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = payload.split_first_chunk::<{ Self::BYTES }>()?;
        let stream = match head[0] {
            1 => Stream::Stdout,
            2 => Stream::Stderr,
            _ => return None,
        };
        let (offset, at_ms) = head[1..].split_first_chunk::<8>()?;
        let at_ms = <[u8; 8]>::try_from(at_ms).ok()?;
        Some((Self { stream, offset: u64::from_be_bytes(*offset), at_ms: u64::from_be_bytes(at_ms) }, rest))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_come_back(length in 0..=DATA_BYTES_MAX) {
            prop_assert_eq!(decode_header(encode_header(Kind::Data, length)), Ok((Kind::Data, length)));
        }

        #[test]
        fn no_header_breaks_the_decoder(header: [u8; HEADER_BYTES]) {
            if let Ok((kind, length)) = decode_header(header) {
                prop_assert_eq!(encode_header(kind, length), header);
            }
        }

        #[test]
        fn chunk_headers_come_back(offset: u64, at_ms: u64, err: bool, rest: Vec<u8>) {
            let header = ChunkHeader { stream: if err { Stream::Stderr } else { Stream::Stdout }, offset, at_ms };
            let payload = [header.encode().as_slice(), &rest].concat();
            prop_assert_eq!(ChunkHeader::decode(&payload), Some((header, rest.as_slice())));
        }
    }
}
