//! Sealed layers: what they are called, where they lie, what is known about them.
//!
//! ```text
//!   sealed/<id>/parts/root/…    overlay's own format, ids as inside
//!   sealed/<id>/parts/usr/…     changes of a folder of the host's userland
//!   sealed/<id>/disk.img        or: a filesystem that holds `parts`
//!   sealed/<id>.json            a layer is there when this is
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};
use viv_core::SnapshotId;
use viv_layer::{Digest, Survey};
use viv_provider::Integrity;

use super::disk::{self, MountedDisk};
use super::{Store, unique};
use crate::durable;
use crate::lock::lock_file;

/// The folder of a layer that holds its parts.
pub(crate) const PARTS: &str = "parts";

/// The folder beside it in which overlays do their work.
pub(crate) const WORK: &str = "work";

/// Longest id; a file name can have 255 bytes.
const ID_BYTES_MAX: usize = 120;

/// Putting a layer in place takes some milliseconds.
const PUT_WITHIN: Duration = Duration::from_secs(8);

/// The name of a layer: safe as a file name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(crate) struct LayerId(String);

impl LayerId {
    /// A new one, for what a snapshot saves. Each attempt has its own.
    pub(crate) fn for_snapshot(id: &SnapshotId) -> io::Result<Self> {
        format!("{id}-{}", unique().replace('.', "-")).parse()
    }

    /// The snapshot that it was sealed for, if it was for one.
    pub(crate) fn snapshot(&self) -> Option<SnapshotId> {
        self.0.split_once('-')?.0.parse().ok()
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LayerId {
    type Err = io::Error;

    fn from_str(text: &str) -> io::Result<Self> {
        let safe = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
        if text.is_empty() || text.len() > ID_BYTES_MAX || !text.bytes().all(safe) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{text:?} is not the name of a layer")));
        }
        Ok(Self(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for LayerId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// How a layer's content lies on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LayerForm {
    /// In its folder.
    Folder,
    /// In a filesystem in a file.
    Disk,
}

/// What is known about a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LayerMeta {
    pub(crate) id: LayerId,
    pub(crate) form: LayerForm,
    /// Names of its parts: `root`, and folders of the host that it changes.
    pub(crate) parts: Vec<String>,
    /// Of all its parts, taken when it was sealed.
    pub(crate) survey: Survey,
    /// Of everything in it, once it was hashed.
    pub(crate) content: Option<Digest>,
    pub(crate) integrity: Integrity,
    pub(crate) sealed_at_ms: u64,
    /// No inode in it has a higher number, where that is known and matters: see `seed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) highest_inode: Option<u64>,
}

/// A layer whose parts can be read.
#[derive(Debug)]
pub(crate) struct OpenedLayer {
    folder: PathBuf,
    _disk: Option<MountedDisk>,
}

impl OpenedLayer {
    /// Opens the folder of a sealed layer.
    pub(crate) fn open(folder: &Path, form: LayerForm) -> io::Result<Self> {
        Self::with(folder, form, MountedDisk::mount_sealed)
    }

    /// Opens the folder of an instance's layer that nobody writes to any more.
    pub(crate) fn open_active(folder: &Path, form: LayerForm) -> io::Result<Self> {
        Self::with(folder, form, |file| MountedDisk::mount_alone(file, true))
    }

    fn with(folder: &Path, form: LayerForm, mount: impl Fn(&Path) -> io::Result<MountedDisk>) -> io::Result<Self> {
        match form {
            LayerForm::Folder => Ok(Self { folder: folder.to_owned(), _disk: None }),
            LayerForm::Disk => {
                let disk = mount(&folder.join(disk::FILE))?;
                Ok(Self { folder: disk.path(), _disk: Some(disk) })
            }
        }
    }

    pub(crate) fn parts(&self) -> PathBuf {
        self.folder.join(PARTS)
    }

    pub(crate) fn part(&self, name: &str) -> PathBuf {
        self.parts().join(name)
    }
}

/// The names of the parts in a folder. Parts are mounted, so a link in the place of one would show what it leads to.
pub(crate) fn part_names(parts: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(parts)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a part is not a folder"));
        }
        let name = entry.file_name().into_string();
        names.push(name.map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "a part has a strange name"))?);
    }
    names.sort_unstable();
    Ok(names)
}

impl Store {
    pub(crate) fn sealed_folder(&self, layer: &LayerId) -> PathBuf {
        self.sealed().join(layer.as_str())
    }

    fn meta_file(&self, layer: &LayerId) -> PathBuf {
        self.sealed().join(format!("{layer}.json"))
    }

    /// What is known about a layer; `None` when there is no such layer.
    pub(crate) fn layer(&self, layer: &LayerId) -> io::Result<Option<LayerMeta>> {
        durable::read_json(&self.meta_file(layer))
    }

    /// The same for one that has to be there.
    pub(crate) fn need_layer(&self, layer: &LayerId) -> io::Result<LayerMeta> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, format!("the layer {layer} is missing"));
        self.layer(layer)?.ok_or_else(missing)
    }

    pub(crate) fn write_layer(&self, meta: &LayerMeta) -> io::Result<()> {
        durable::replace_json(&self.meta_file(&meta.id), meta)
    }

    /// Changes what is known about a layer, if it is still there.
    pub(crate) fn update_layer(&self, id: &LayerId, change: impl FnOnce(&mut LayerMeta)) -> io::Result<()> {
        let _lock = lock_file(&self.sealed().join(".lock"), true, PUT_WITHIN)?;
        let Some(mut meta) = self.layer(id)? else { return Ok(()) };
        let before = meta.clone();
        change(&mut meta);
        if meta == before { Ok(()) } else { self.write_layer(&meta) }
    }

    /// A layer that is there and whole.
    pub(crate) fn whole_layer(&self, id: &LayerId) -> io::Result<Option<LayerMeta>> {
        Ok(self.layer(id)?.filter(|meta| meta.integrity != Integrity::Damaged))
    }

    pub(crate) fn open_layer(&self, meta: &LayerMeta) -> io::Result<OpenedLayer> {
        OpenedLayer::open(&self.sealed_folder(&meta.id), meta.form)
    }

    /// Puts a finished folder in place as a layer. It is on disk, and was looked at, before this.
    pub(crate) fn put_layer(&self, folder: &Path, meta: &LayerMeta) -> io::Result<()> {
        let meta = &self.numbered(folder, meta)?;
        let place = self.sealed_folder(&meta.id);
        // Between the move and the file it looks as if somebody had died here.
        let _lock = lock_file(&self.sealed().join(".lock"), true, PUT_WITHIN)?;
        match fs::symlink_metadata(&place) {
            Ok(_) => match self.layer(&meta.id)? {
                Some(there) if there.integrity != Integrity::Damaged => {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                // What somebody stands on stays below him, whatever is wrong with it. Nobody new stands on it.
                Some(_) if self.users_of_layer(&meta.id)? > 0 => {
                    let what = format!("{} is damaged, and sandboxes that use it are still there", meta.id);
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
                }
                // Not what it was, or left by a process that died here: without its file it is no layer. It is taken
                // apart with the rest of the trash.
                Some(_) | None => {
                    self.hide_layer(&meta.id)?;
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        durable::rename(folder, &place)?;
        // Only now, because what is read-only cannot be moved.
        self.driver.seal(&place)?;
        self.write_layer(meta)
    }

    /// Takes a layer out of sight: its file first, so that it is never there in part.
    pub(crate) fn hide_layer(&self, layer: &LayerId) -> io::Result<Option<PathBuf>> {
        match fs::remove_file(self.meta_file(layer)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        self.hide(&self.sealed_folder(layer))
    }

    /// The names of all layers, in their order.
    pub(crate) fn layer_names(&self) -> io::Result<Vec<LayerId>> {
        let mut all: Vec<LayerId> = Vec::new();
        for entry in fs::read_dir(self.sealed())? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".json")) else { continue };
            // Dotted ones are files on their way to their name.
            all.extend(name.parse::<LayerId>().ok());
        }
        all.sort_unstable();
        Ok(all)
    }

    /// All layers, with what cannot be read about some.
    pub(crate) fn layers(&self) -> io::Result<Vec<(LayerId, io::Result<LayerMeta>)>> {
        let mut all = Vec::new();
        for id in self.layer_names()? {
            let meta = match self.layer(&id) {
                // It was dropped meanwhile.
                Ok(None) => continue,
                Ok(Some(meta)) => Ok(meta),
                Err(error) => Err(error),
            };
            all.push((id, meta));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s4_no_layer_is_called_like_a_path() {
        for bad in ["", ".", "..", "a/b", "../x", "A", "a.json", "\0", &"x".repeat(200)] {
            assert!(bad.parse::<LayerId>().is_err(), "{bad:?}");
            assert!(serde_json::from_value::<LayerId>(serde_json::json!(bad)).is_err(), "{bad:?}");
        }
        assert!("sha256-0123abc".parse::<LayerId>().is_ok());
    }
}
