//! Images that are made here: layers, and whole images for others to read.

mod layer_writer;
mod layout;

use std::io;
use std::path::PathBuf;

pub use layer_writer::LayerWriter;
pub use layout::{write_archive, write_layout};

use crate::config::ImageConfig;
use crate::digest::Digest;
use crate::image::{LayerDescriptor, manifest_json};
use crate::limits::{CONFIG_BYTES_MAX, LAYERS_MAX};
use crate::reference::Reference;

/// An image with its layers at hand.
#[derive(Debug, Clone)]
pub struct OutgoingImage {
    /// How to run it. Its diff ids are those of the layers.
    pub config: ImageConfig,
    /// Bottom first, each with the file that holds its blob.
    pub layers: Vec<(LayerDescriptor, PathBuf)>,
    /// What it is called in archives.
    pub name: Option<Reference>,
}

/// An image that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The file system, or where the archive goes.
    #[error("{what} cannot be written")]
    Io {
        /// Which part.
        what: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A layer's file.
    #[error("the layer in {} cannot be read", path.display())]
    Layer {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A layer's file holds something else than its descriptor says.
    #[error("the file of layer {expected} holds {found}")]
    WrongLayer {
        /// In the descriptor.
        expected: Digest,
        /// In the file.
        found: Digest,
    },
    /// A layer's file is longer or shorter than its descriptor says.
    #[error("the file of layer {digest} has {found_bytes} bytes instead of {expected_bytes}")]
    WrongSize {
        /// Which layer.
        digest: Digest,
        /// In the descriptor.
        expected_bytes: u64,
        /// In the file.
        found_bytes: u64,
    },
    /// The configuration tells of other layers.
    #[error("the configuration does not list the layers of the image")]
    OtherLayers,
    /// More than is read again.
    #[error("the image has too many layers, or too long a configuration")]
    TooLarge,
    /// The folder has something in it.
    #[error("{} is not empty", .0.display())]
    NotEmpty(PathBuf),
}

/// The documents of an image.
pub(crate) struct Documents {
    pub(crate) config: Vec<u8>,
    pub(crate) config_digest: Digest,
    pub(crate) manifest: Vec<u8>,
    pub(crate) manifest_digest: Digest,
}

impl OutgoingImage {
    /// The digest of the manifest that is written: the same for the same image.
    pub fn digest(&self) -> Result<Digest, WriteError> {
        Ok(self.documents()?.manifest_digest)
    }

    pub(crate) fn documents(&self) -> Result<Documents, WriteError> {
        if !self.layers.iter().map(|(layer, _)| layer.diff_id).eq(self.config.diff_ids.iter().copied()) {
            return Err(WriteError::OtherLayers);
        }
        let config = self.config.to_json();
        if self.layers.len() > LAYERS_MAX || config.len() as u64 > CONFIG_BYTES_MAX {
            return Err(WriteError::TooLarge);
        }
        let layers: Vec<LayerDescriptor> = self.layers.iter().map(|(layer, _)| layer.clone()).collect();
        let manifest = manifest_json(&config, &layers);
        Ok(Documents { config_digest: Digest::of(&config), manifest_digest: Digest::of(&manifest), config, manifest })
    }
}
