//! Images in files and folders.
//!
//! ```text
//!   folder ──────────────► blobs by name of digest ─┐
//!   tar ─────────► Tar ──► sections of the file ────┼─► index.json ──► Image
//!   tar.gz, .zst ► scratch ──► as tar ──────────────┘   manifest.json ─┘ (Docker's)
//! ```
//!
//! A compressed archive is decompressed into a file without a name in the scratch folder, so that blobs can be read in
//! any order; nothing of it is left when the archive is dropped or the process dies.

mod docker;
mod kind;
mod oci;
mod rootfs;
mod tar_index;
mod walk;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use kind::{Kind, detect};
pub use rootfs::{TarStream, open_tar};

use self::docker::DockerArchive;
use self::oci::OciLayout;
use self::tar_index::TarIndex;
use crate::decode::{BoundedDecoder, Bounds, Compression, Exceeded};
use crate::digest::Digest;
use crate::document::DocumentError;
use crate::files::{Links, open_regular};
use crate::image::{Image, LayerDescriptor};
use crate::limits::{ARCHIVE_ENTRIES_MAX, ARCHIVE_NAME_BYTES_MAX};
use crate::platform::Platform;
use crate::reference::Reference;

/// An archive that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The path itself.
    #[error("{} cannot be read", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something inside, or the scratch folder.
    #[error("the archive cannot be read")]
    Io(#[source] io::Error),
    /// No tar, or a broken one.
    #[error("this is no tar archive, or a damaged one")]
    NotTar,
    /// A compression that is not read.
    #[error("archives compressed with {format} are not read")]
    Packed {
        /// Which.
        format: &'static str,
        /// What decompresses it.
        command: &'static str,
    },
    /// A folder without `oci-layout`.
    #[error("the folder is no OCI image layout")]
    NotALayout,
    /// A tar without an image.
    #[error("the archive holds no image")]
    NoImage,
    /// More entries than an image archive has.
    #[error("the archive has more than {ARCHIVE_ENTRIES_MAX} entries")]
    TooManyEntries,
    /// A name that no image archive has.
    #[error("the archive has a name of more than {ARCHIVE_NAME_BYTES_MAX} bytes")]
    LongName,
    /// Files with holes, in a format that blobs never have.
    #[error("the archive has sparse entries")]
    Sparse,
    /// A bomb, or more than the caller has room for.
    #[error("the archive is too large: {0}")]
    TooLarge(String),
    /// Something that a document names.
    #[error("the archive lacks {0}")]
    Missing(String),
    /// The name that was asked for.
    #[error("the archive has no image {wanted:?}, only {available}")]
    NoSuchName {
        /// Asked for.
        wanted: String,
        /// There.
        available: String,
    },
    /// No name was asked for.
    #[error("the archive has several images: {0}")]
    SeveralImages(String),
    /// One of its documents is wrong.
    #[error("the archive's image is not valid")]
    Document(#[from] DocumentError),
}

impl ArchiveError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Packed { command, .. } => Some(format!("decompress it first, with {command}")),
            Self::SeveralImages(_) => Some("say which one by its name".to_owned()),
            Self::NoImage => Some("if it is a root filesystem, import it as one".to_owned()),
            Self::NotALayout => Some("a layout has the files oci-layout and index.json".to_owned()),
            _ => None,
        }
    }
}

impl From<io::Error> for ArchiveError {
    fn from(error: io::Error) -> Self {
        match error.downcast::<Exceeded>() {
            Ok(exceeded) => Self::TooLarge(exceeded.to_string()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Self::NotTar,
            Err(error) => Self::Io(error),
        }
    }
}

/// An archive or layout, open.
pub struct Archive {
    content: Content,
}

enum Content {
    Oci(OciLayout),
    Docker(DockerArchive),
}

impl Archive {
    /// Opens a layout, or an archive of one, or one of Docker's. `scratch` is a folder that is written to only if the
    /// archive is compressed, within `bounds`.
    pub fn open(path: &Path, scratch: &Path, bounds: Bounds) -> Result<Self, ArchiveError> {
        let read = |source| ArchiveError::Read { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(read)?.is_dir() {
            return Ok(Self { content: Content::Oci(OciLayout::open_folder(path)?) });
        }
        let file = open_regular(path, Links::Follow).map_err(read)?;
        let file = match kind::compression_of(&file)? {
            Compression::None => file,
            compression => decompress(&file, compression, scratch, bounds)?,
        };
        let index = TarIndex::new(file)?;
        let content = if index.has("oci-layout") {
            Content::Oci(OciLayout::open_tar(index)?)
        } else if index.has("manifest.json") {
            Content::Docker(DockerArchive::open(&index)?)
        } else {
            return Err(ArchiveError::NoImage);
        };
        Ok(Self { content })
    }

    /// What the images in it are called. Some have no name, and are not listed.
    pub fn names(&self) -> Vec<String> {
        let mut names = match &self.content {
            Content::Oci(layout) => layout.names(),
            Content::Docker(archive) => archive.names(),
        };
        names.dedup();
        names
    }

    /// One of the images: by name, or the only one.
    pub fn image(&self, name: Option<&str>, platform: &Platform) -> Result<Image, ArchiveError> {
        match &self.content {
            Content::Oci(layout) => layout.image(name, platform),
            Content::Docker(archive) => archive.image(name, platform),
        }
    }

    /// The bytes of a layer as they lie there, not checked: [`crate::open_layer`] does that.
    pub fn layer(&self, layer: &LayerDescriptor) -> Result<BlobReader, ArchiveError> {
        let reader = match &self.content {
            Content::Oci(layout) => layout.blob(layer.digest)?,
            Content::Docker(archive) => archive.layer(layer.digest),
        };
        reader.ok_or_else(|| missing(layer.digest))
    }
}

fn missing(digest: Digest) -> ArchiveError {
    ArchiveError::Missing(digest.to_string())
}

/// Decompresses into a file without a name.
fn decompress(file: &File, compression: Compression, scratch: &Path, bounds: Bounds) -> Result<File, ArchiveError> {
    let mut unpacked =
        tempfile::tempfile_in(scratch).map_err(|source| ArchiveError::Read { path: scratch.to_owned(), source })?;
    io::copy(&mut BoundedDecoder::new(file, compression, bounds)?, &mut unpacked)?;
    Ok(unpacked)
}

/// A part of a file, read without moving the file's own position: several can be read at once.
#[derive(Debug, Clone)]
pub struct BlobReader {
    file: Arc<File>,
    position: u64,
    end: u64,
}

impl BlobReader {
    /// How much is left.
    pub fn remaining(&self) -> u64 {
        self.end - self.position
    }
}

impl Read for BlobReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = (buffer.len() as u64).min(self.remaining()) as usize;
        let count = self.file.read_at(&mut buffer[..room], self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

/// Whether a name in an archive is the one that was asked for, as it stands or as Docker would read both.
fn same_name(found: &str, wanted: &str) -> bool {
    let parse = |name: &str| name.parse::<Reference>().ok();
    found == wanted || parse(found).is_some_and(|found| parse(wanted) == Some(found))
}

/// Names for people.
fn list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 16;
    if names.is_empty() {
        return "some without a name".to_owned();
    }
    let shown: Vec<String> = names.iter().take(SHOWN_MAX).map(|name| crate::digest::shorten(name)).collect();
    shown.join(", ")
}
