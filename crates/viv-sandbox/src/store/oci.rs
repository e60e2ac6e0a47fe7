//! Snapshots and images as OCI images, for everybody else's tools.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use viv_core::SnapshotId;
use viv_image::{
    BlobDir, Compression, ImageConfig, LayerDescriptor, LayerWriter, OutgoingImage, Platform, Reference, Registry,
};
use viv_layer::{Form, Packer};

use super::Store;
use super::error::{StoreError, Tried};
use super::image::{ImageProgress, OnProgress};
use super::layer::{OpenedLayer, part_names};
use super::plan::{Base, MadeOf};
use super::transfer::write_beside;
use crate::rootfs::{HostBase, ROOT};

type Result<T> = std::result::Result<T, StoreError>;

/// Where commands are looked for, in an image that does not say.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What is to be made into an OCI image.
#[derive(Debug, Clone)]
pub enum ExportSource {
    /// A snapshot, with all that it stands on.
    Snapshot(SnapshotId),
    /// An image.
    Image(String),
}

/// Where it is to go.
#[derive(Clone, Copy)]
pub enum Destination<'a> {
    /// One file, which `docker load` and OCI tools read.
    Archive(&'a Path),
    /// A folder in OCI's layout.
    Layout(&'a Path),
    /// A registry.
    Registry(&'a Registry, &'a Reference),
}

impl Store {
    /// Writes an OCI image; answers the digest of its manifest.
    pub(crate) fn export_oci(
        &self,
        source: &ExportSource,
        name: Option<Reference>,
        destination: Destination<'_>,
        host: &HostBase,
        progress: OnProgress<'_>,
    ) -> Result<String> {
        // Others must not collect the layers meanwhile, nor take what is written for left behind.
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let (of, config) = match source {
            ExportSource::Snapshot(id) => (self.need_snapshot(id)?.of, ImageConfig::default()),
            ExportSource::Image(image) => {
                let record = self.image(image)?;
                let config = if record.raw.is_empty() {
                    ImageConfig::default()
                } else {
                    ImageConfig::from_json(record.raw.as_bytes()).map_err(|error| StoreError::Damaged {
                        what: format!("the configuration of {image} cannot be read: {error}"),
                    })?
                };
                (self.made_of_image(image)?, config)
            }
        };
        let scratch = self.new_place();
        fs::create_dir(&scratch).tried(|| "cannot make a scratch folder".to_owned())?;
        let exported = (|| {
            let layers = self.pack_layers(&of, host, &BlobDir::open(&scratch)?)?;
            let image = OutgoingImage { config: complete(config, &of, &layers), layers, name };
            match destination {
                Destination::Archive(path) => {
                    let mut written = Ok(());
                    let file = write_beside(path, |out| {
                        written = viv_image::write_archive(&image, out);
                        if written.is_ok() { Ok(()) } else { Err(io::Error::other("it cannot be written")) }
                    });
                    written?;
                    file.tried(|| format!("cannot write {}", path.display()))?;
                }
                Destination::Layout(folder) => viv_image::write_layout(&image, folder)?,
                Destination::Registry(registry, reference) => {
                    registry.push(reference, &image, &|told| progress(ImageProgress::Fetching(told)))?;
                }
            }
            Ok(image.digest()?.to_string())
        })();
        self.discard_left(&scratch);
        exported
    }

    /// All layers as blobs, the bottom first.
    fn pack_layers(&self, of: &MadeOf, host: &HostBase, blobs: &BlobDir) -> Result<Vec<(LayerDescriptor, PathBuf)>> {
        let mut packed = Vec::new();
        if let Some(parts) = base_parts(&of.base, host) {
            packed.push(pack(blobs, &parts)?);
        }
        let metas = self.need_layers(of).tried(|| "cannot read the layers".to_owned())?;
        for meta in metas.iter().rev() {
            let opened = self.open_layer(meta).tried(|| format!("cannot open layer {}", meta.id))?;
            packed.push(pack(blobs, &parts_of(&opened)?)?);
        }
        Ok(packed)
    }
}

/// What an image of a machine's own userland, or of a folder, has to bring along to stand for itself.
fn base_parts(base: &Base, host: &HostBase) -> Option<Vec<(String, PathBuf)>> {
    match base {
        Base::Nothing => None,
        Base::Directory { path } => Some(vec![(String::new(), path.clone())]),
        Base::Host => {
            let trees = host.trees.iter().map(|name| ((*name).to_owned(), Path::new("/").join(name)));
            Some(std::iter::once((String::new(), host.skeleton.clone())).chain(trees).collect())
        }
    }
}

/// Where in the image the parts of a layer go. The root comes first: it has the folders that the others fill.
fn parts_of(layer: &OpenedLayer) -> Result<Vec<(String, PathBuf)>> {
    let names = part_names(&layer.parts()).tried(|| "cannot look into a layer".to_owned())?;
    let mut parts: Vec<_> = names
        .into_iter()
        .map(|name| {
            let folder = layer.part(&name);
            (if name == ROOT { String::new() } else { name }, folder)
        })
        .collect();
    parts.sort();
    Ok(parts)
}

fn pack(blobs: &BlobDir, parts: &[(String, PathBuf)]) -> Result<(LayerDescriptor, PathBuf)> {
    let mut writer = LayerWriter::new(blobs, Compression::Gzip)?;
    let packing = (|| -> io::Result<()> {
        let mut packer = Packer::new(&mut writer, Form::Oci);
        for (prefix, folder) in parts {
            packer.tree(prefix, folder)?;
        }
        packer.finish()?.flush()
    })();
    packing.tried(|| "cannot pack a layer".to_owned())?;
    Ok(writer.finish()?)
}

/// The configuration of an image, whose layers were packed anew.
fn complete(mut config: ImageConfig, of: &MadeOf, layers: &[(LayerDescriptor, PathBuf)]) -> ImageConfig {
    let here = Platform::host();
    if config.architecture.is_empty() {
        config.architecture = here.architecture;
        config.os = here.os;
    }
    if config.env.is_empty() {
        config.env = of.env.clone().into_iter().collect();
    }
    if !config.env.iter().any(|(name, _)| name == "PATH") {
        config.env.push(("PATH".to_owned(), PATH.to_owned()));
    }
    if config.cmd.is_empty() && config.entrypoint.is_empty() {
        config.cmd = vec!["/bin/sh".to_owned()];
    }
    config.diff_ids = layers.iter().map(|(layer, _)| layer.diff_id).collect();
    config
}
