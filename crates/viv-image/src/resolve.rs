//! From an index to the image for a machine, wherever the documents are.

use crate::digest::Digest;
use crate::document::{self, Blob, Descriptor, Document, DocumentError, check_digest, choose};
use crate::image::Image;
use crate::limits::{CONFIG_BYTES_MAX, INDEX_DEPTH_MAX, MANIFEST_BYTES_MAX};
use crate::platform::Platform;

/// What kind of document is wanted: registries keep them in different places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    Manifest,
    Config,
}

impl Want {
    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Config => "configuration",
        }
    }

    pub(crate) fn limit_bytes(self) -> u64 {
        match self {
            Self::Manifest => MANIFEST_BYTES_MAX,
            Self::Config => CONFIG_BYTES_MAX,
        }
    }
}

/// Where documents are read. The answer is checked here, not there.
pub(crate) trait Documents {
    type Error: From<DocumentError>;

    /// Reads a document of at most [`Want::limit_bytes`].
    fn read(&self, want: Want, blob: &Blob) -> Result<Vec<u8>, Self::Error>;
}

/// Follows a descriptor down to an image.
pub(crate) fn follow<D: Documents>(documents: &D, start: &Descriptor, wanted: &Platform) -> Result<Image, D::Error> {
    let blob = Blob { digest: start.digest(Want::Manifest.what())?, size: start.size };
    let bytes = read_checked(documents, Want::Manifest, &blob)?;
    follow_document(documents, blob.digest, &bytes, wanted)
}

/// Follows a document, whose digest is checked already, down to an image.
pub(crate) fn follow_document<D: Documents>(
    documents: &D,
    digest: Digest,
    bytes: &[u8],
    wanted: &Platform,
) -> Result<Image, D::Error> {
    let mut digest = digest;
    let mut parsed = document::parse(bytes)?;
    for _ in 0..INDEX_DEPTH_MAX {
        match parsed {
            Document::Manifest(manifest) => {
                let config = read_checked(documents, Want::Config, &manifest.config)?;
                return Ok(Image::assemble(digest, &manifest, &config, wanted)?);
            }
            Document::Index(entries) => {
                let entry = choose(entries.iter(), wanted)?;
                let blob = Blob { digest: entry.digest(Want::Manifest.what())?, size: entry.size };
                let bytes = read_checked(documents, Want::Manifest, &blob)?;
                digest = blob.digest;
                parsed = document::parse(&bytes)?;
            }
        }
    }
    Err(DocumentError::Depth.into())
}

fn read_checked<D: Documents>(documents: &D, want: Want, blob: &Blob) -> Result<Vec<u8>, D::Error> {
    let what = want.what();
    if blob.size > want.limit_bytes() {
        return Err(DocumentError::TooLong { what, limit_bytes: want.limit_bytes() }.into());
    }
    let bytes = documents.read(want, blob)?;
    if bytes.len() as u64 != blob.size {
        let found_bytes = bytes.len() as u64;
        return Err(DocumentError::WrongSize { what, expected_bytes: blob.size, found_bytes }.into());
    }
    check_digest(what, &bytes, blob.digest)?;
    Ok(bytes)
}
