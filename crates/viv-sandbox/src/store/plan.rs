//! From layers to a root.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viv_provider::Integrity;

use super::Store;
use super::disk;
use super::layer::{LayerForm, LayerId, LayerMeta, OpenedLayer, PARTS};
use super::view::View;
use crate::rootfs::{HostBase, Lower, Part, ROOT, RootPlan, Writable};

/// What something lies on, for as long as this is kept.
pub(crate) struct Below {
    pub(crate) path: PathBuf,
    _view: Option<View>,
    _opened: Vec<OpenedLayer>,
}

/// What a root is made of below its writable layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MadeOf {
    /// What is below all layers.
    pub(crate) base: Base,
    /// Layers of the image, the topmost first.
    pub(crate) image: Vec<LayerId>,
    /// Layers that were saved above the image, the topmost first.
    pub(crate) saved: Vec<LayerId>,
    /// What the image says about the environment.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
}

/// What is below all layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Base {
    /// The machine's own userland, as it is when it is mounted.
    Host,
    /// A folder of somebody else's.
    Directory { path: PathBuf },
    /// Nothing: the layers are all there is.
    Nothing,
}

impl MadeOf {
    pub(crate) fn base(base: Base) -> Self {
        Self { base, image: Vec::new(), saved: Vec::new(), env: BTreeMap::new() }
    }

    /// All layers, the topmost first.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &LayerId> {
        self.saved.iter().chain(&self.image)
    }

    /// The same with one more layer saved on top.
    pub(crate) fn with(&self, layer: LayerId) -> Self {
        let mut more = self.clone();
        more.saved.insert(0, layer);
        more
    }
}

/// A part and what of it is not in layers.
struct BasePart {
    name: &'static str,
    at: PathBuf,
    lower: Option<PathBuf>,
}

fn base_parts(base: &Base, host: &HostBase) -> Vec<BasePart> {
    let root = |lower| BasePart { name: ROOT, at: PathBuf::from("/"), lower };
    match base {
        Base::Nothing => vec![root(None)],
        Base::Directory { path } => vec![root(Some(path.clone()))],
        Base::Host => {
            let trees = host.trees.iter().map(|name| {
                let at = Path::new("/").join(name);
                BasePart { name, at: at.clone(), lower: Some(at) }
            });
            std::iter::once(root(Some(host.skeleton.clone()))).chain(trees).collect()
        }
    }
}

impl Store {
    /// The layers of a root, checked to be there and whole.
    pub(crate) fn need_layers(&self, of: &MadeOf) -> io::Result<Vec<LayerMeta>> {
        let mut metas = Vec::new();
        for layer in of.layers() {
            let meta = self.need_layer(layer)?;
            if meta.integrity == Integrity::Damaged {
                return Err(io::Error::new(io::ErrorKind::InvalidData, format!("the layer {layer} is damaged")));
            }
            metas.push(meta);
        }
        Ok(metas)
    }

    /// What the shim is to mount.
    pub(crate) fn root_plan(&self, of: &MadeOf, host: &HostBase, writable: Writable) -> io::Result<RootPlan> {
        let metas = self.need_layers(of)?;
        let parts = base_parts(&of.base, host);
        check_parts(&metas, &parts)?;
        let parts = parts.into_iter().map(|part| {
            let in_layers = metas.iter().filter(|meta| meta.parts.iter().any(|name| name == part.name));
            let folder = |meta: &LayerMeta| self.sealed_folder(&meta.id);
            let mut lowers: Vec<_> = in_layers
                .map(|meta| match meta.form {
                    LayerForm::Folder => Lower::Folder(folder(meta).join(PARTS).join(part.name)),
                    LayerForm::Disk => Lower::Disk(folder(meta).join(disk::FILE)),
                })
                .chain(part.lower.map(Lower::Folder))
                .collect();
            if lowers.is_empty() {
                lowers.push(Lower::Folder(self.empty()));
            }
            Part { name: part.name.to_owned(), at: part.at, lowers }
        });
        Ok(RootPlan { writable, parts: parts.collect() })
    }

    /// What lies below the layers that were saved, of one part.
    pub(crate) fn below_saved(&self, of: &MadeOf, part: &str) -> io::Result<Below> {
        let metas = of.image.iter().map(|layer| self.need_layer(layer)).collect::<io::Result<Vec<_>>>()?;
        let having = metas.iter().filter(|meta| meta.parts.iter().any(|name| name == part));
        let opened = having.map(|meta| self.open_layer(meta)).collect::<io::Result<Vec<_>>>()?;
        let base = base_parts(&of.base, &self.host).into_iter().find(|base| base.name == part);
        let mut folders: Vec<PathBuf> = opened.iter().map(|layer| layer.part(part)).collect();
        folders.extend(base.and_then(|base| base.lower));
        let view = if folders.len() > 1 { Some(View::mount(&folders)?) } else { None };
        let path = match &view {
            Some(view) => view.path(),
            None => folders.pop().unwrap_or_else(|| self.empty()),
        };
        Ok(Below { path, _view: view, _opened: opened })
    }

    /// For each part: the folders that it is made of, topmost first, with `top` above them.
    pub(crate) fn part_folders(
        &self,
        top: &OpenedLayer,
        top_parts: &[String],
        of: &MadeOf,
        host: &HostBase,
        opened: &mut Vec<OpenedLayer>,
    ) -> io::Result<Vec<(&'static str, Vec<PathBuf>)>> {
        // Not whether they are whole: what stands on something damaged is worth saving all the same.
        let metas = of.layers().map(|layer| self.need_layer(layer)).collect::<io::Result<Vec<_>>>()?;
        let first = opened.len();
        for meta in &metas {
            opened.push(self.open_layer(meta)?);
        }
        let mut parts = Vec::new();
        for part in base_parts(&of.base, host) {
            let mut folders = Vec::new();
            if top_parts.iter().any(|name| name == part.name) {
                folders.push(top.part(part.name));
            }
            for (meta, layer) in metas.iter().zip(&opened[first..]) {
                if meta.parts.iter().any(|name| name == part.name) {
                    folders.push(layer.part(part.name));
                }
            }
            folders.extend(part.lower);
            // An overlay without a writable layer wants two.
            folders.push(self.empty());
            if folders.len() < 2 {
                folders.push(self.empty());
            }
            parts.push((part.name, folders));
        }
        Ok(parts)
    }
}

/// A layer may change a folder that is one of the userland's on the machine it comes from, and a link on this one.
fn check_parts(metas: &[LayerMeta], parts: &[BasePart]) -> io::Result<()> {
    for meta in metas {
        if let Some(strange) = meta.parts.iter().find(|name| parts.iter().all(|part| part.name != name.as_str())) {
            let what = format!("the layer {} changes /{strange}, which is not a folder of its own here", meta.id);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
    }
    Ok(())
}
