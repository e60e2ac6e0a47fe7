//! Decompression, told by content or by type, and bounded.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use serde::{Deserialize, Serialize};

use crate::limits::RATIO_FREE_BYTES;

/// Compressed bytes that are buffered.
const BUFFER_BYTES: usize = 64 << 10;
/// Largest window of zstd, as a power of two: 128 MiB, what its own command takes without being asked.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Frames that hold no data, `0x184D2A50` to `0x184D2A5F`; some writers begin with one.
const ZSTD_SKIPPABLE_TAIL: [u8; 3] = [0x2a, 0x4d, 0x18];
const XZ_MAGIC: [u8; 6] = [0xfd, b'7', b'z', b'X', b'Z', 0];
const BZIP2_MAGIC: [u8; 3] = *b"BZh";

/// How a layer or an archive is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// A plain tar.
    None,
    /// What Docker makes.
    Gzip,
    /// Faster and smaller.
    Zstd,
}

impl Compression {
    pub(crate) fn of_media_type(media_type: &str) -> Option<Self> {
        match media_type {
            "application/vnd.oci.image.layer.v1.tar" | "application/vnd.docker.image.rootfs.diff.tar" => {
                Some(Self::None)
            }
            "application/vnd.oci.image.layer.v1.tar+gzip" | "application/vnd.docker.image.rootfs.diff.tar.gzip" => {
                Some(Self::Gzip)
            }
            "application/vnd.oci.image.layer.v1.tar+zstd" | "application/vnd.docker.image.rootfs.diff.tar.zstd" => {
                Some(Self::Zstd)
            }
            _ => None,
        }
    }

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::None => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

/// What the first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Magic {
    Known(Compression),
    Xz,
    Bzip2,
}

pub(crate) const MAGIC_LEN: usize = 6;

pub(crate) fn sniff(start: &[u8]) -> Magic {
    if start.starts_with(&GZIP_MAGIC) {
        Magic::Known(Compression::Gzip)
    } else if start.starts_with(&ZSTD_MAGIC)
        || (start.len() >= 4 && start[0] & 0xf0 == 0x50 && start[1..4] == ZSTD_SKIPPABLE_TAIL)
    {
        Magic::Known(Compression::Zstd)
    } else if start.starts_with(&XZ_MAGIC) {
        Magic::Xz
    } else if start.starts_with(&BZIP2_MAGIC) {
        Magic::Bzip2
    } else {
        Magic::Known(Compression::None)
    }
}

/// How much may come out of a decompression: what fits on the caller's disk, and no bomb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Most bytes altogether.
    pub total_bytes_max: u64,
    /// Most bytes for each byte of input, after the first [`RATIO_FREE_BYTES`]. Gzip cannot exceed 1,032.
    pub ratio_max: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { total_bytes_max: 64 << 30, ratio_max: 500 }
    }
}

/// Which bound was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Exceeded {
    #[error("it decompresses to more than {0} bytes")]
    Total(u64),
    #[error("it decompresses to more than {0} times its size")]
    Ratio(u64),
}

impl Bounds {
    pub(crate) fn check(&self, read_bytes: u64, decoded_bytes: u64) -> Result<(), Exceeded> {
        if decoded_bytes > self.total_bytes_max {
            return Err(Exceeded::Total(self.total_bytes_max));
        }
        if decoded_bytes > RATIO_FREE_BYTES && decoded_bytes / self.ratio_max.max(1) > read_bytes {
            return Err(Exceeded::Ratio(self.ratio_max));
        }
        Ok(())
    }
}

/// Decompresses, without bounds; several gzip members or zstd frames in a row are one stream.
pub(crate) enum Decoder<R: Read> {
    Plain(BufReader<R>),
    Gzip(Box<MultiGzDecoder<BufReader<R>>>),
    Zstd(zstd::stream::read::Decoder<'static, BufReader<R>>),
}

impl<R: Read> Decoder<R> {
    pub(crate) fn new(raw: R, compression: Compression) -> io::Result<Self> {
        let raw = BufReader::with_capacity(BUFFER_BYTES, raw);
        Ok(match compression {
            Compression::None => Self::Plain(raw),
            Compression::Gzip => Self::Gzip(Box::new(MultiGzDecoder::new(raw))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(raw)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
                Self::Zstd(decoder)
            }
        })
    }

    /// What is decompressed. Some of it may lie in the buffer.
    pub(crate) fn raw(&self) -> &R {
        match self {
            Self::Plain(raw) => raw.get_ref(),
            Self::Gzip(decoder) => decoder.get_ref().get_ref(),
            Self::Zstd(decoder) => decoder.get_ref().get_ref(),
        }
    }

    /// Reads what follows the end of the compressed stream, and says how much there was.
    pub(crate) fn drain_raw(&mut self) -> io::Result<u64> {
        let raw = match self {
            Self::Plain(raw) => raw,
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zstd(decoder) => decoder.get_mut(),
        };
        let mut count = 0;
        loop {
            let available = raw.fill_buf()?.len();
            if available == 0 {
                return Ok(count);
            }
            raw.consume(available);
            count += available as u64;
        }
    }
}

impl<R: Read> Read for Decoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(raw) => raw.read(buffer),
            Self::Gzip(decoder) => decoder.read(buffer),
            Self::Zstd(decoder) => decoder.read(buffer),
        }
    }
}

/// Decompresses within bounds; reaching one is an [`io::Error`] that holds [`Exceeded`].
pub(crate) struct BoundedDecoder<R: Read> {
    decoder: Decoder<Counted<R>>,
    bounds: Bounds,
    decoded_bytes: u64,
}

impl<R: Read> BoundedDecoder<R> {
    pub(crate) fn new(raw: R, compression: Compression, bounds: Bounds) -> io::Result<Self> {
        Ok(Self { decoder: Decoder::new(Counted { inner: raw, count: 0 }, compression)?, bounds, decoded_bytes: 0 })
    }
}

impl<R: Read> Read for BoundedDecoder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.decoder.read(buffer)?;
        self.decoded_bytes += count as u64;
        self.bounds
            .check(self.decoder.raw().count, self.decoded_bytes)
            .map_err(|exceeded| io::Error::new(io::ErrorKind::InvalidData, exceeded))?;
        Ok(count)
    }
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.count += count as u64;
        Ok(count)
    }
}
