//! What an image is: a configuration and layers.

use crate::config::ImageConfig;
use crate::decode::Compression;
use crate::digest::Digest;
use crate::document::{Descriptor, DocumentError, Manifest, OCI_CONFIG, OCI_MANIFEST};
use crate::platform::Platform;

/// One layer, as it is kept and as it is meant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct LayerDescriptor {
    /// Of the blob, as it is kept and sent.
    pub digest: Digest,
    /// Of the tar inside: what names the content.
    pub diff_id: Digest,
    /// Length of the blob.
    pub size: u64,
    /// How the blob is packed.
    pub compression: Compression,
}

/// An image whose documents are here and checked; its layers may be elsewhere.
#[derive(Debug, Clone)]
pub struct Image {
    /// Of the manifest.
    pub digest: Digest,
    /// How to run it.
    pub config: ImageConfig,
    /// Bottom first.
    pub layers: Vec<LayerDescriptor>,
}

impl Image {
    /// Puts together what a manifest and its configuration say, and checks that they agree.
    pub(crate) fn assemble(
        digest: Digest,
        manifest: &Manifest,
        config: &[u8],
        wanted: &Platform,
    ) -> Result<Self, DocumentError> {
        let config = ImageConfig::from_json(config)?;
        if wanted.suits(&config.platform()).is_none() {
            return Err(DocumentError::Platform {
                wanted: wanted.clone(),
                available: crate::digest::shorten(&config.platform().to_string()),
            });
        }
        if manifest.layers.len() != config.diff_ids.len() {
            return Err(DocumentError::LayerCount { layers: manifest.layers.len(), diff_ids: config.diff_ids.len() });
        }
        let layers = manifest
            .layers
            .iter()
            .zip(&config.diff_ids)
            .map(|((blob, compression), &diff_id)| {
                if *compression == Compression::None && blob.digest != diff_id {
                    return Err(DocumentError::PlainLayer(blob.digest, diff_id));
                }
                Ok(LayerDescriptor { digest: blob.digest, diff_id, size: blob.size, compression: *compression })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { digest, config, layers })
    }
}

/// The manifest of an image as we write it: the same bytes for the same image.
pub(crate) fn manifest_json(config: &[u8], layers: &[LayerDescriptor]) -> Vec<u8> {
    #[derive(serde::Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Written {
        schema_version: u32,
        media_type: &'static str,
        config: Descriptor,
        layers: Vec<Descriptor>,
    }
    let written = Written {
        schema_version: 2,
        media_type: OCI_MANIFEST,
        config: Descriptor {
            media_type: OCI_CONFIG.to_owned(),
            digest: Digest::of(config).to_string(),
            size: config.len() as u64,
            ..Descriptor::default()
        },
        layers: layers
            .iter()
            .map(|layer| Descriptor {
                media_type: layer.compression.media_type().to_owned(),
                digest: layer.digest.to_string(),
                size: layer.size,
                ..Descriptor::default()
            })
            .collect(),
    };
    serde_json::to_vec(&written).expect("strings and numbers are JSON")
}
