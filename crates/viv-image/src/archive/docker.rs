//! Docker's own archives: `manifest.json` names a configuration and tars for each image.
//!
//! There is no manifest to take a digest from; such an image gets that of the manifest that we would write for it.

use std::collections::HashMap;
use std::io::Read;

use serde::Deserialize;

use super::tar_index::TarIndex;
use super::{ArchiveError, BlobReader, list, same_name};
use crate::decode::{Compression, MAGIC_LEN, Magic, sniff};
use crate::digest::{Digest, Hasher};
use crate::document::{Blob, DocumentError, Manifest};
use crate::image::{Image, LayerDescriptor, manifest_json};
use crate::limits::{CONFIG_BYTES_MAX, INDEX_ENTRIES_MAX, LAYERS_MAX, MANIFEST_BYTES_MAX};
use crate::platform::Platform;

pub(super) struct DockerArchive {
    images: Vec<DockerImage>,
    layers: HashMap<Digest, BlobReader>,
}

struct DockerImage {
    names: Vec<String>,
    config: Vec<u8>,
    manifest: Manifest,
    digest: Digest,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

impl DockerArchive {
    pub(super) fn open(tar: &TarIndex) -> Result<Self, ArchiveError> {
        const WHAT: &str = "manifest.json";
        let listed = tar.read(WHAT, WHAT, MANIFEST_BYTES_MAX)?;
        let listed: Vec<Listed> =
            serde_json::from_slice(&listed).map_err(|source| DocumentError::Json { what: WHAT, source })?;
        if listed.len() > INDEX_ENTRIES_MAX {
            return Err(DocumentError::TooMany { what: WHAT, limit: INDEX_ENTRIES_MAX }.into());
        }
        let mut archive = Self { images: Vec::new(), layers: HashMap::new() };
        for listed in listed {
            archive.add(tar, listed)?;
        }
        Ok(archive)
    }

    fn add(&mut self, tar: &TarIndex, listed: Listed) -> Result<(), ArchiveError> {
        let config = tar.read(&listed.config, "configuration", CONFIG_BYTES_MAX)?;
        let diff_ids = crate::config::ImageConfig::from_json(&config)?.diff_ids;
        let paths = listed.layers.unwrap_or_default();
        if paths.len() > LAYERS_MAX {
            return Err(DocumentError::TooMany { what: "list of layers", limit: LAYERS_MAX }.into());
        }
        if paths.len() != diff_ids.len() {
            return Err(DocumentError::LayerCount { layers: paths.len(), diff_ids: diff_ids.len() }.into());
        }
        let mut layers = Vec::new();
        for (path, diff_id) in paths.iter().zip(diff_ids) {
            let reader = tar.find(path).ok_or_else(|| ArchiveError::Missing(crate::digest::shorten(path)))?;
            let layer = describe(reader.clone(), diff_id)?;
            self.layers.insert(layer.digest, reader);
            layers.push(layer);
        }
        let manifest = Manifest {
            config: Blob { digest: Digest::of(&config), size: config.len() as u64 },
            layers: layers
                .iter()
                .map(|layer| (Blob { digest: layer.digest, size: layer.size }, layer.compression))
                .collect(),
        };
        let digest = Digest::of(&manifest_json(&config, &layers));
        self.images.push(DockerImage { names: listed.repo_tags.unwrap_or_default(), config, manifest, digest });
        Ok(())
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.images.iter().flat_map(|image| image.names.iter().cloned()).collect()
    }

    pub(super) fn image(&self, name: Option<&str>, platform: &Platform) -> Result<Image, ArchiveError> {
        let found = match (name, self.images.as_slice()) {
            (Some(wanted), images) => {
                images.iter().find(|image| image.names.iter().any(|found| same_name(found, wanted))).ok_or_else(
                    || ArchiveError::NoSuchName { wanted: wanted.to_owned(), available: list(&self.names()) },
                )?
            }
            (None, []) => return Err(ArchiveError::NoImage),
            (None, [only]) => only,
            (None, _) => return Err(ArchiveError::SeveralImages(list(&self.names()))),
        };
        Ok(Image::assemble(found.digest, &found.manifest, &found.config, platform)?)
    }

    pub(super) fn layer(&self, digest: Digest) -> Option<BlobReader> {
        self.layers.get(&digest).cloned()
    }
}

/// What a layer of an archive is called. A plain tar has the name that the configuration gives it, and is checked when
/// it is unpacked; a compressed one has to be read for its name.
fn describe(mut reader: BlobReader, diff_id: Digest) -> Result<LayerDescriptor, ArchiveError> {
    let size = reader.remaining();
    let mut start = Vec::new();
    reader.clone().take(MAGIC_LEN as u64).read_to_end(&mut start)?;
    match sniff(&start) {
        Magic::Known(Compression::None) => {
            Ok(LayerDescriptor { digest: diff_id, diff_id, size, compression: Compression::None })
        }
        Magic::Known(compression) => {
            let mut hasher = Hasher::default();
            let mut buffer = vec![0; 64 << 10];
            loop {
                match reader.read(&mut buffer)? {
                    0 => break,
                    count => hasher.update(&buffer[..count]),
                }
            }
            Ok(LayerDescriptor { digest: hasher.finish(), diff_id, size, compression })
        }
        Magic::Xz | Magic::Bzip2 => Err(DocumentError::LayerType("a tar packed with xz or bzip2".to_owned()).into()),
    }
}
