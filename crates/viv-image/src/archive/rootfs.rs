//! A tar of a root filesystem: no image, only files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::{ArchiveError, kind};
use crate::decode::{BoundedDecoder, Bounds};
use crate::digest::{Digest, Hasher};
use crate::files::{Links, open_regular};

/// Pieces in which the rest is read.
const DRAIN_BYTES: usize = 64 << 10;

/// The decompressed tar, hashed as it is read.
pub struct TarStream {
    decoder: BoundedDecoder<File>,
    hasher: Hasher,
}

/// Opens a tar, plain or compressed with gzip or zstd.
pub fn open_tar(path: &Path, bounds: Bounds) -> Result<TarStream, ArchiveError> {
    let file =
        open_regular(path, Links::Follow).map_err(|source| ArchiveError::Read { path: path.to_owned(), source })?;
    let compression = kind::compression_of(&file)?;
    Ok(TarStream { decoder: BoundedDecoder::new(file, compression, bounds)?, hasher: Hasher::default() })
}

impl TarStream {
    /// Reads what is left, and answers the digest of the whole, uncompressed: what a layer calls its diff id.
    pub fn finish(mut self) -> Result<Digest, ArchiveError> {
        let mut buffer = vec![0; DRAIN_BYTES];
        loop {
            match self.read(&mut buffer) {
                Ok(0) => return Ok(self.hasher.finish()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for TarStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}
