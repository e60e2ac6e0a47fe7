//! From a tar stream to a layer's blob.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use flate2::write::GzEncoder;
use tempfile::NamedTempFile;

use super::WriteError;
use crate::blobs::{BlobDir, WRITE_PREFIX};
use crate::decode::Compression;
use crate::digest::Hasher;
use crate::files::sync_folder;
use crate::image::LayerDescriptor;

const BUFFER_BYTES: usize = 128 << 10;
/// What zstd itself calls normal.
const ZSTD_LEVEL: i32 = 3;

/// Takes the bytes of a tar, and makes a blob of them. The same bytes make the same blob. Dropped before
/// [`LayerWriter::finish`], it leaves nothing.
pub struct LayerWriter {
    encoder: Encoder,
    diff: Hasher,
    blobs: BlobDir,
    compression: Compression,
}

enum Encoder {
    Plain(Sink),
    Gzip(GzEncoder<Sink>),
    Zstd(zstd::stream::write::Encoder<'static, Sink>),
}

/// The blob's file, hashed as it is written.
struct Sink {
    file: BufWriter<NamedTempFile<File>>,
    hasher: Hasher,
}

impl LayerWriter {
    /// Begins a layer that ends up among the blobs.
    pub fn new(blobs: &BlobDir, compression: Compression) -> Result<Self, WriteError> {
        let file = tempfile::Builder::new().prefix(WRITE_PREFIX).tempfile_in(blobs.folder()).map_err(failed)?;
        let sink = Sink { file: BufWriter::with_capacity(BUFFER_BYTES, file), hasher: Hasher::default() };
        let encoder = match compression {
            Compression::None => Encoder::Plain(sink),
            // No name and no time in the header: the same bytes in make the same bytes out.
            Compression::Gzip => Encoder::Gzip(GzEncoder::new(sink, flate2::Compression::default())),
            Compression::Zstd => Encoder::Zstd(zstd::stream::write::Encoder::new(sink, ZSTD_LEVEL).map_err(failed)?),
        };
        Ok(Self { encoder, diff: Hasher::default(), blobs: blobs.clone(), compression })
    }

    /// Ends the layer: on disk, under its digest.
    pub fn finish(self) -> Result<(LayerDescriptor, PathBuf), WriteError> {
        let sink = match self.encoder {
            Encoder::Plain(sink) => sink,
            Encoder::Gzip(encoder) => encoder.finish().map_err(failed)?,
            Encoder::Zstd(encoder) => encoder.finish().map_err(failed)?,
        };
        let file = sink.file.into_inner().map_err(|error| failed(error.into_error()))?;
        let size = sink.hasher.count();
        let digest = sink.hasher.finish();
        let path = self.blobs.path(&digest);
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        sync_folder(self.blobs.folder()).map_err(failed)?;
        Ok((LayerDescriptor { digest, diff_id: self.diff.finish(), size, compression: self.compression }, path))
    }
}

fn failed(source: io::Error) -> WriteError {
    WriteError::Io { what: "the layer".to_owned(), source }
}

impl Write for LayerWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = match &mut self.encoder {
            Encoder::Plain(sink) => sink.write(bytes),
            Encoder::Gzip(encoder) => encoder.write(bytes),
            Encoder::Zstd(encoder) => encoder.write(bytes),
        }?;
        self.diff.update(&bytes[..count]);
        Ok(count)
    }

    /// Does nothing: flushing a compressor makes larger blobs, and only the end matters.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.hasher.update(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::decode::Bounds;
    use crate::{Digest, open_layer};

    #[test]
    fn what_is_written_reads_back_and_is_the_same_each_time() {
        let folder = tempfile::tempdir().unwrap();
        let blobs = BlobDir::open(folder.path()).unwrap();
        let content: Vec<u8> = (0..300_000u32).flat_map(|number| (number / 7).to_le_bytes()).collect();
        for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
            let write = || {
                let mut writer = LayerWriter::new(&blobs, compression).unwrap();
                writer.write_all(&content).unwrap();
                writer.finish().unwrap()
            };
            let (layer, path) = write();
            assert_eq!(write().0, layer);
            assert_eq!(layer.diff_id, Digest::of(&content));
            let mut read = Vec::new();
            let mut reader = open_layer(File::open(path).unwrap(), &layer, Bounds::default()).unwrap();
            io::Read::read_to_end(&mut reader, &mut read).unwrap();
            assert_eq!(read, content);
            assert!(blobs.get(&layer.digest, layer.size).unwrap().is_some());
        }
    }

    #[test]
    fn a_layer_that_is_given_up_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let blobs = BlobDir::open(folder.path()).unwrap();
        let mut writer = LayerWriter::new(&blobs, Compression::Gzip).unwrap();
        writer.write_all(b"something").unwrap();
        drop(writer);
        assert_eq!(std::fs::read_dir(blobs.folder()).unwrap().count(), 0);
        assert_eq!(blobs.sweep(Duration::ZERO).unwrap(), 0);
    }
}
