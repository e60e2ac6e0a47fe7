//! OCI image layouts, in folders and in archives.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::tar_index::TarIndex;
use super::{ArchiveError, BlobReader, list, missing, same_name};
use crate::digest::Digest;
use crate::document::{self, Blob, Descriptor, Document, DocumentError, choose};
use crate::files::{Links, open_regular, read_bounded};
use crate::image::Image;
use crate::limits::MANIFEST_BYTES_MAX;
use crate::platform::Platform;
use crate::resolve::{Documents, Want, follow};

/// The standard's name of an image; often only the tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The whole name, written by containerd and Docker.
const FULL_NAME: &str = "io.containerd.image.name";

pub(super) struct OciLayout {
    blobs: Blobs,
    entries: Vec<Descriptor>,
}

enum Blobs {
    Folder(PathBuf),
    Tar(TarIndex),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mark {
    image_layout_version: String,
}

impl OciLayout {
    pub(super) fn open_folder(folder: &Path) -> Result<Self, ArchiveError> {
        Self::open(Blobs::Folder(folder.to_owned()))
    }

    pub(super) fn open_tar(tar: TarIndex) -> Result<Self, ArchiveError> {
        Self::open(Blobs::Tar(tar))
    }

    fn open(blobs: Blobs) -> Result<Self, ArchiveError> {
        const MARK_BYTES_MAX: u64 = 4 << 10;
        let mark = blobs.read("oci-layout", "oci-layout", MARK_BYTES_MAX)?;
        let mark: Mark =
            serde_json::from_slice(&mark).map_err(|source| DocumentError::Json { what: "oci-layout", source })?;
        if !mark.image_layout_version.starts_with("1.") {
            return Err(ArchiveError::NotALayout);
        }
        let index = blobs.read("index.json", "index", MANIFEST_BYTES_MAX)?;
        match document::parse(&index)? {
            Document::Index(entries) => Ok(Self { blobs, entries }),
            Document::Manifest(_) => Err(DocumentError::Ambiguous.into()),
        }
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.entries.iter().filter_map(name_of).map(str::to_owned).collect()
    }

    pub(super) fn image(&self, name: Option<&str>, platform: &Platform) -> Result<Image, ArchiveError> {
        let candidates: Vec<&Descriptor> = match name {
            Some(wanted) => self.entries.iter().filter(|entry| is_called(entry, wanted)).collect(),
            None => self.entries.iter().collect(),
        };
        match (candidates.as_slice(), name) {
            ([], Some(wanted)) => {
                Err(ArchiveError::NoSuchName { wanted: wanted.to_owned(), available: list(&self.names()) })
            }
            ([], None) => Err(ArchiveError::NoImage),
            ([entry], _) => follow(self, entry, platform),
            (several, _) => {
                // One image for several platforms may stand here without an index of its own.
                let first = name_of(several[0]);
                if name.is_none() && several.iter().any(|entry| name_of(entry) != first) {
                    return Err(ArchiveError::SeveralImages(list(&self.names())));
                }
                follow(self, choose(several.iter().copied(), platform)?, platform)
            }
        }
    }

    pub(super) fn blob(&self, digest: Digest) -> Result<Option<BlobReader>, ArchiveError> {
        self.blobs.find(&format!("blobs/sha256/{}", digest.hex()))
    }
}

fn name_of(entry: &Descriptor) -> Option<&str> {
    entry.annotation(FULL_NAME).or_else(|| entry.annotation(REF_NAME))
}

fn is_called(entry: &Descriptor, wanted: &str) -> bool {
    [FULL_NAME, REF_NAME].iter().filter_map(|key| entry.annotation(key)).any(|found| same_name(found, wanted))
}

impl Documents for OciLayout {
    type Error = ArchiveError;

    fn read(&self, want: Want, blob: &Blob) -> Result<Vec<u8>, ArchiveError> {
        let limit_bytes = want.limit_bytes();
        let reader = self.blob(blob.digest)?.ok_or_else(|| missing(blob.digest))?;
        read_bounded(reader, limit_bytes)?
            .ok_or_else(|| DocumentError::TooLong { what: want.what(), limit_bytes }.into())
    }
}

impl Blobs {
    /// A file by a name that is ours, or made of a digest.
    fn find(&self, name: &str) -> Result<Option<BlobReader>, ArchiveError> {
        match self {
            Self::Tar(tar) => Ok(tar.find(name)),
            Self::Folder(folder) => {
                let path = folder.join(name);
                match open_regular(&path, Links::Refuse) {
                    Ok(file) => {
                        let end = file.metadata()?.len();
                        Ok(Some(BlobReader { file: Arc::new(file), position: 0, end }))
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(ArchiveError::Read { path, source }),
                }
            }
        }
    }

    fn read(&self, name: &str, what: &'static str, limit_bytes: u64) -> Result<Vec<u8>, ArchiveError> {
        let reader = self.find(name)?.ok_or_else(|| ArchiveError::Missing(name.to_owned()))?;
        read_bounded(reader, limit_bytes)?.ok_or_else(|| DocumentError::TooLong { what, limit_bytes }.into())
    }
}
