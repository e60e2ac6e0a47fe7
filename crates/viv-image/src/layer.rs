//! A layer as a tar stream that is checked while it is read.

use std::io::{self, Read};

use crate::decode::{Bounds, Decoder, Exceeded};
use crate::digest::{Digest, Hasher, HashingReader};
use crate::image::LayerDescriptor;

/// Pieces in which the rest of a layer is read.
const DRAIN_BYTES: usize = 64 << 10;

/// A layer that is not what its descriptor says.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The blob's bytes are others.
    #[error("layer {expected} has other content: {found}")]
    WrongDigest {
        /// In the manifest.
        expected: Digest,
        /// Read.
        found: Digest,
    },
    /// The bytes after decompression are others than the configuration promises.
    #[error("layer {digest} decompresses to {found} instead of {expected}")]
    WrongDiffId {
        /// Which layer.
        digest: Digest,
        /// In the configuration.
        expected: Digest,
        /// Read.
        found: Digest,
    },
    /// The blob is longer or shorter than the manifest says.
    #[error("layer {digest} should have {expected_bytes} bytes and has {found}")]
    WrongSize {
        /// Which layer.
        digest: Digest,
        /// In the manifest.
        expected_bytes: u64,
        /// Read, or that there were more.
        found: String,
    },
    /// A bomb, or more than the caller has room for.
    #[error("layer {digest} is too large: {problem}")]
    TooLarge {
        /// Which layer.
        digest: Digest,
        /// Which bound.
        problem: String,
    },
    /// It could not be read, or is not compressed as its type says.
    #[error("layer {digest} cannot be read")]
    Read {
        /// Which layer.
        digest: Digest,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl LayerError {
    fn into_io(self) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, self)
    }

    /// Takes back what [`VerifiedLayer`]'s `Read` had to wrap.
    fn from_io(digest: Digest, error: io::Error) -> Self {
        match error.downcast::<Self>() {
            Ok(error) => error,
            Err(source) => Self::Read { digest, source },
        }
    }
}

/// The tar stream of a layer. The last read, the one that would answer that nothing is left, fails instead if the
/// blob or what it decompresses to is not what was promised: **what was read before is not trustworthy until then**.
pub struct VerifiedLayer<R: Read> {
    decoder: Decoder<HashingReader<Sized64<R>>>,
    descriptor: LayerDescriptor,
    bounds: Bounds,
    decoded: Hasher,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reading,
    Verified,
    /// It failed once, and must not succeed when it is read again.
    Failed,
}

/// Opens a layer's blob for unpacking.
pub fn open_layer<R: Read>(
    raw: R,
    descriptor: &LayerDescriptor,
    bounds: Bounds,
) -> Result<VerifiedLayer<R>, LayerError> {
    let raw = HashingReader::new(Sized64 { inner: raw, left: descriptor.size });
    let decoder = Decoder::new(raw, descriptor.compression)
        .map_err(|source| LayerError::Read { digest: descriptor.digest, source })?;
    Ok(VerifiedLayer {
        decoder,
        descriptor: descriptor.clone(),
        bounds,
        decoded: Hasher::default(),
        state: State::Reading,
    })
}

impl<R: Read> VerifiedLayer<R> {
    /// Reads what is left, and checks. A tar reader stops at the end mark, before the end of the stream: without this
    /// call a layer is not verified.
    pub fn finish(mut self) -> Result<(), LayerError> {
        let mut buffer = vec![0; DRAIN_BYTES];
        loop {
            match self.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(LayerError::from_io(self.descriptor.digest, error)),
            }
        }
    }

    fn read_some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(buffer)?;
        if count == 0 {
            self.verify().map_err(LayerError::into_io)?;
            self.state = State::Verified;
            return Ok(0);
        }
        self.decoded.update(&buffer[..count]);
        self.bounds.check(self.decoder.raw().hasher().count(), self.decoded.count()).map_err(|problem: Exceeded| {
            LayerError::TooLarge { digest: self.descriptor.digest, problem: problem.to_string() }.into_io()
        })?;
        Ok(count)
    }

    fn verify(&mut self) -> Result<(), LayerError> {
        let digest = self.descriptor.digest;
        self.decoder.drain_raw().map_err(|source| LayerError::Read { digest, source })?;
        let raw = self.decoder.raw().hasher().clone();
        let wrong_size = |found| LayerError::WrongSize { digest, expected_bytes: self.descriptor.size, found };
        if raw.count() > self.descriptor.size {
            return Err(wrong_size("more".to_owned()));
        }
        if raw.count() < self.descriptor.size {
            return Err(wrong_size(raw.count().to_string()));
        }
        let found = raw.finish();
        if found != digest {
            return Err(LayerError::WrongDigest { expected: digest, found });
        }
        let found = std::mem::take(&mut self.decoded).finish();
        if found != self.descriptor.diff_id {
            return Err(LayerError::WrongDiffId { digest, expected: self.descriptor.diff_id, found });
        }
        Ok(())
    }
}

impl<R: Read> Read for VerifiedLayer<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.state {
            State::Verified => return Ok(0),
            State::Failed => return Err(io::Error::other("this layer failed its check before")),
            State::Reading if buffer.is_empty() => return Ok(0),
            State::Reading => {}
        }
        let result = self.read_some(buffer);
        if result.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::Interrupted) {
            self.state = State::Failed;
        }
        result
    }
}

/// Ends one byte after the promised length: enough to see that there is more, however much that is.
struct Sized64<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Sized64<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = self.left.saturating_add(1).min(buffer.len() as u64) as usize;
        if self.left == u64::MAX || room == 0 {
            return Ok(0);
        }
        let count = self.inner.read(&mut buffer[..room])?;
        // One too many leaves the mark that nothing more is read.
        self.left = self.left.checked_sub(count as u64).unwrap_or(u64::MAX);
        Ok(count)
    }
}
