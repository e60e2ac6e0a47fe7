//! A snapshot as one file, for another machine.
//!
//! ```text
//!   zstd( tar( snapshot.json, layers/0/<part>/…, layers/1/<part>/…, … ) )
//! ```
//!
//! The topmost layer comes first. Layers are in overlay's own format, exactly:
//! whiteouts, opaque folders, owners, times, attributes, hard links, holes,
//! devices, names of any bytes. `snapshot.json` says what each layer is and
//! what its content hashes to, so a file that was changed on its way is
//! refused. A snapshot of the `host` image does not carry that machine's
//! userland: it is put above the one of the machine that reads it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use viv_core::{OperationId, OwnerMark, SnapshotId};
use viv_image::Platform;
use viv_layer::{Digest, Form, Packer, Survey};
use viv_provider::{InstanceRef, Integrity, SaveCost, Snapshot};

use super::Store;
use super::error::{StoreError, Tried};
use super::layer::{LayerForm, LayerId, LayerMeta, PARTS, part_names};
use super::plan::{Base, MadeOf};
use super::seal::Source;
use super::snapshot::{SnapshotFile, SnapshotRecord};
use crate::rootfs::{HostBase, ROOT, Writable};
use crate::shim::now_wall_ms;
use crate::wait::elapsed_us;

type Result<T> = std::result::Result<T, StoreError>;

const FORMAT: &str = "vivarium-snapshot";
const VERSION: u32 = 1;

/// The name of the description in the file, and the longest one that is read.
const HEADER: &str = "snapshot.json";
const HEADER_BYTES_MAX: u64 = 8 << 20;

/// Most layers: an image's and a snapshot's together.
const LAYERS_MAX: usize = 600;

/// How hard to pack: fast, since most of what is in a sandbox has been packed before or is small.
const LEVEL: i32 = 3;

/// What is in the file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u32,
    snapshot: Snapshot,
    /// Whether it stands on a machine's own userland.
    on_host: bool,
    architecture: String,
    env: BTreeMap<String, String>,
    /// The topmost first.
    layers: Vec<HeaderLayer>,
}

#[derive(Debug, Serialize, Deserialize)]
struct HeaderLayer {
    /// Whether it is the image's, not the snapshot's.
    of_image: bool,
    survey: Survey,
    content: Digest,
}

/// What an export came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// Layers in the file.
    pub layers: usize,
    /// Length of the file.
    pub bytes: u64,
}

impl Store {
    /// The record of a snapshot that has to be there.
    pub(crate) fn need_snapshot(&self, id: &SnapshotId) -> Result<SnapshotRecord> {
        match self.read_snapshot(id).tried(|| format!("cannot read the record of {id}"))? {
            Some(SnapshotFile::Kept(record)) => Ok(*record),
            Some(SnapshotFile::Removed { .. }) | None => Err(StoreError::NotFound { what: id.to_string() }),
        }
    }

    /// Writes a snapshot to a file, which is there whole or not at all.
    pub(crate) fn export_snapshot(&self, id: &SnapshotId, to: &Path) -> Result<Exported> {
        // Nobody collects a layer, or takes what is built here for left behind, before the file is written.
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        self.export_locked(id, to)
    }

    /// The same to a file without a name, which goes with whoever holds it.
    pub(crate) fn export_nameless(&self, id: &SnapshotId) -> Result<File> {
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let place = self.new_place();
        let written = self.export_locked(id, &place);
        let opened =
            written.and_then(|_| File::open(&place).tried(|| format!("cannot read what was exported of {id}")));
        // Its name is of no use any more, whatever came of it.
        let _ = fs::remove_file(&place);
        opened
    }

    /// An empty file without a name, on the disk of the store.
    pub(crate) fn nameless(&self) -> Result<File> {
        let cannot = || "cannot make a file".to_owned();
        // Nobody takes it for left behind before it has lost its name.
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let place = self.new_place();
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&place).tried(cannot)?;
        fs::remove_file(&place).tried(cannot)?;
        Ok(file)
    }

    fn export_locked(&self, id: &SnapshotId, to: &Path) -> Result<Exported> {
        let record = self.need_snapshot(id)?;
        let metas = self.need_layers(&record.of).tried(|| format!("cannot read the layers of {id}"))?;
        let cannot = || format!("cannot export {id}");
        let mut folders = Vec::new();
        let mut layers = Vec::new();
        for (index, meta) in metas.iter().enumerate() {
            let opened = self.open_layer(meta).tried(cannot)?;
            let content = match meta.content {
                Some(content) => content,
                None => viv_layer::content(&opened.parts()).tried(cannot)?,
            };
            let of_image = index >= record.of.saved.len();
            layers.push(HeaderLayer { of_image, survey: meta.survey.clone(), content });
            folders.push((opened.parts(), Some(opened)));
        }
        // A folder of this machine's goes along, as a layer at the bottom; only its userland does not.
        let bottom = match &record.of.base {
            Base::Directory { path } => Some(self.directory_as_layer(path)?),
            Base::Host | Base::Nothing => None,
        };
        if let Some(place) = &bottom {
            let parts = place.join(PARTS);
            let survey = viv_layer::survey(&parts).tried(cannot)?;
            layers.push(HeaderLayer { of_image: true, survey, content: viv_layer::content(&parts).tried(cannot)? });
            folders.push((parts, None));
        }
        let header = Header {
            format: FORMAT.to_owned(),
            version: VERSION,
            snapshot: record.snapshot.clone(),
            on_host: record.of.base == Base::Host,
            architecture: Platform::host().architecture,
            env: record.of.env.clone(),
            layers,
        };
        let written = write_beside(to, |out| {
            let mut encoder = zstd::Encoder::new(out, LEVEL)?;
            encoder.include_checksum(true)?;
            let mut packer = Packer::new(encoder, Form::Native);
            packer.file(HEADER, &serde_json::to_vec(&header)?)?;
            for (index, ((parts, _), layer)) in folders.iter().zip(&header.layers).enumerate() {
                let found = packer.tree(&format!("layers/{index}"), parts)?;
                if !found.same_structure(&layer.survey) {
                    let what = "a layer is not what it was when it was saved";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
            }
            packer.finish()?.finish()?;
            Ok(())
        });
        if let Some(place) = bottom {
            self.discard_left(&place);
        }
        let bytes = written.tried(|| format!("cannot write {}", to.display()))?;
        Ok(Exported { layers: header.layers.len(), bytes })
    }

    fn directory_as_layer(&self, path: &Path) -> Result<std::path::PathBuf> {
        let place = self.new_layer_folder().tried(|| "cannot make a layer".to_owned())?;
        let root = place.join(PARTS).join(ROOT);
        let copied = fs::create_dir(place.join(PARTS)).and_then(|()| viv_layer::copy(path, &root));
        if let Err(source) = copied {
            self.discard_left(&place);
            return Err(StoreError::Io { what: format!("cannot copy {}", path.display()), source });
        }
        Ok(place)
    }

    /// Reads a snapshot from a file, under a new id: as one of this instance, or of the one that it was of.
    pub(crate) fn import_snapshot(
        &self,
        from: &Path,
        id: &SnapshotId,
        owner: &OwnerMark,
        operation: &OperationId,
        instance: Option<&InstanceRef>,
        host: &HostBase,
    ) -> Result<Snapshot> {
        let started = std::time::Instant::now();
        self.need_unused(id)?;
        let header = read_header(from)?;
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let place = self.new_place();
        fs::create_dir(&place).tried(|| "cannot make a folder to unpack into".to_owned())?;
        let imported = (|| {
            self.unpack_file(from, &place)?;
            need_folder(&place.join("layers"))?;
            let mut of = MadeOf {
                base: if header.on_host { Base::Host } else { Base::Nothing },
                image: Vec::new(),
                saved: Vec::new(),
                env: header.env.clone(),
            };
            for (index, layer) in header.layers.iter().enumerate() {
                let id = self.take_in(&place.join("layers").join(index.to_string()), layer)?;
                if layer.of_image { &mut of.image } else { &mut of.saved }.push(id);
            }
            self.record_import(&header, id, owner, operation, instance, of, host, started)
        })();
        self.discard_left(&place);
        imported
    }

    fn need_unused(&self, id: &SnapshotId) -> Result<()> {
        match self.read_snapshot(id).tried(|| format!("cannot read the record of {id}"))? {
            None => Ok(()),
            Some(_) => Err(StoreError::Conflict {
                what: format!("{id} is, or was, another snapshot"),
                hint: "leave the id out to get a fresh one",
            }),
        }
    }

    fn unpack_file(&self, from: &Path, place: &Path) -> Result<()> {
        let room = self.room()?.total_bytes_max;
        let mut bounds = viv_layer::Bounds::default();
        bounds.bytes_max = bounds.bytes_max.min(room);
        unpack_within(from, place, &bounds)
    }

    /// Makes a layer of an unpacked folder, if it is what the file says. It is called after its content.
    fn take_in(&self, unpacked: &Path, layer: &HeaderLayer) -> Result<LayerId> {
        let cannot = || "cannot keep a layer".to_owned();
        let folder = self.new_layer_folder().tried(cannot)?;
        let parts = folder.join(PARTS);
        let taken = (|| {
            need_folder(unpacked)?;
            fs::rename(unpacked, &parts).tried(|| "the file does not hold all layers that it says".to_owned())?;
            self.sync().tried(cannot)?;
            let survey = viv_layer::survey(&parts).tried(cannot)?;
            let content = viv_layer::content(&parts).tried(cannot)?;
            if !survey.same_structure(&layer.survey) || content != layer.content {
                return Err(StoreError::Damaged { what: "a layer is not what the file says it is".to_owned() });
            }
            let id: LayerId = format!("b3-{content}").parse().tried(cannot)?;
            let meta = LayerMeta {
                id: id.clone(),
                form: LayerForm::Folder,
                parts: part_names(&parts).tried(cannot)?,
                survey,
                content: Some(content),
                integrity: Integrity::Verified,
                sealed_at_ms: now_wall_ms(),
                highest_inode: None,
            };
            match self.put_layer(&folder, &meta) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => result.tried(cannot)?,
            }
            Ok(id)
        })();
        self.discard_left(&folder);
        taken
    }

    #[expect(clippy::too_many_arguments, reason = "the one place where everything about an import comes together")]
    fn record_import(
        &self,
        header: &Header,
        id: &SnapshotId,
        owner: &OwnerMark,
        operation: &OperationId,
        instance: Option<&InstanceRef>,
        of: MadeOf,
        host: &HostBase,
        started: std::time::Instant,
    ) -> Result<Snapshot> {
        let top = of
            .saved
            .first()
            .ok_or_else(|| StoreError::Damaged { what: "the file holds no layer of the snapshot itself".to_owned() })?;
        let cannot = || format!("cannot use the layers of {id} on this machine");
        let meta = self.need_layer(top).tried(cannot)?;
        let mut below = of.clone();
        below.saved.remove(0);
        let source = Source { instance: &header.snapshot.source, of: &below, host };
        let opened = self.open_layer(&meta).tried(cannot)?;
        self.check_mounts(source, &opened, &meta).tried(cannot)?;
        // As a restore will ask: every part has its place in a root.
        self.root_plan(&of, host, Writable::Folder(self.empty())).tried(cannot)?;
        let snapshot = Snapshot {
            id: id.clone(),
            owner: owner.clone(),
            source: instance.unwrap_or(&header.snapshot.source).clone(),
            // Whatever the file says of these.
            size_bytes: self.saved_bytes(&of).tried(cannot)?,
            memory: false,
            // It is not on this machine, or not known to be the same.
            parent: None,
            cost: SaveCost { total_us: elapsed_us(started), ..SaveCost::default() },
            ..header.snapshot.clone()
        };
        let record = SnapshotRecord { snapshot: snapshot.clone(), operation: operation.clone(), of };
        // Somebody else may have used the id since it was looked at.
        let _lock = self.lock_id(id).tried(|| format!("cannot lock {id}"))?;
        self.need_unused(id)?;
        self.write_snapshot(&record).tried(|| format!("cannot record {id}"))?;
        Ok(snapshot)
    }
}

fn unpack_within(from: &Path, place: &Path, bounds: &viv_layer::Bounds) -> Result<()> {
    let mut stream = open(from)?;
    viv_layer::unpack(&mut stream, place, Form::Native, bounds)?;
    // The checksum of the whole comes at the end; more than padding must not be there.
    let mut rest = Vec::new();
    stream.take(1 << 20).read_to_end(&mut rest).tried(|| format!("cannot read {}", from.display()))?;
    if rest.iter().any(|&byte| byte != 0) {
        return Err(StoreError::Damaged { what: format!("{} goes on after its end", from.display()) });
    }
    Ok(())
}

/// What an import does with a file before it looks at what is in the layers: how many it says there are. For fuzzing.
pub(crate) fn taken_apart(from: &Path, place: &Path, bounds: &viv_layer::Bounds) -> Result<usize> {
    let header = read_header(from)?;
    unpack_within(from, place, bounds)?;
    need_folder(&place.join("layers"))?;
    Ok(header.layers.len())
}

/// A link in the place of a folder would be followed, to anywhere on this machine.
fn need_folder(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) | Err(_) => {
            Err(StoreError::Damaged { what: "the file does not hold the layers that it says".to_owned() })
        }
    }
}

fn open(from: &Path) -> Result<impl Read> {
    let cannot = || format!("cannot read {}", from.display());
    let file = File::open(from).tried(cannot)?;
    zstd::Decoder::new(file).tried(cannot)
}

/// Reads what a file says about itself: its first entry.
fn read_header(from: &Path) -> Result<Header> {
    let strange = |why: &str| StoreError::Invalid {
        what: format!("{} is not an exported snapshot: {why}", from.display()),
        hint: "`viv local export` makes them; images are for `viv image import`",
    };
    let mut archive = tar::Archive::new(open(from)?.take(2 * HEADER_BYTES_MAX));
    let mut entries = archive.entries().map_err(|error| strange(&error.to_string()))?;
    let entry = entries.next().ok_or_else(|| strange("it is empty"))?.map_err(|error| strange(&error.to_string()))?;
    if *entry.path_bytes() != *HEADER.as_bytes() {
        return Err(strange("it does not begin with a description"));
    }
    let mut text = Vec::new();
    entry.take(HEADER_BYTES_MAX).read_to_end(&mut text).map_err(|error| strange(&error.to_string()))?;
    let header: Header = serde_json::from_slice(&text).map_err(|error| strange(&error.to_string()))?;
    if header.format != FORMAT || header.version != VERSION {
        return Err(strange("another format or version"));
    }
    if header.layers.len() > LAYERS_MAX {
        return Err(strange("too many layers"));
    }
    if header.env.iter().any(|(name, value)| name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')) {
        return Err(strange("an environment that cannot be"));
    }
    let here = Platform::host().architecture;
    if header.architecture != here {
        return Err(StoreError::Invalid {
            what: format!("{} is of a machine with {}, this one is {here}", from.display(), header.architecture),
            hint: "import it on such a machine",
        });
    }
    Ok(header)
}

/// Writes a file in one step; answers its length.
pub(crate) fn write_beside(to: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<u64> {
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = to.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_string_lossy();
    let beside = folder.join(format!(".{name}.{}", std::process::id()));
    let written = (|| {
        let mut file = io::BufWriter::with_capacity(1 << 20, File::create(&beside)?);
        write(&mut file)?;
        let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        fs::rename(&beside, to)?;
        File::open(folder)?.sync_all()?;
        Ok(file.metadata()?.len())
    })();
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}
