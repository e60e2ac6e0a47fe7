//! Images: names for layers that were brought in.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viv_image::{
    Archive, BlobDir, Bounds, Image, ImageConfig, Kind, LayerDescriptor, Platform, Progress, Reference, Registry,
};
use viv_layer::Form;
use viv_provider::Integrity;

use super::Store;
use super::error::{StoreError, Tried};
use super::layer::{LayerForm, LayerId, LayerMeta, PARTS, part_names};
use super::plan::{Base, MadeOf};
use crate::durable;
use crate::lock::lock_file;
use crate::rootfs::ROOT;
use crate::shim::now_wall_ms;

type Result<T> = std::result::Result<T, StoreError>;

/// Longest name; written into a file's name, each byte may take three.
const NAME_BYTES_MAX: usize = 80;

/// Longest description of an image that is kept: a configuration is at most this long.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// Giving and taking a name takes as long as reading all records.
const NAMES_WITHIN: Duration = Duration::from_secs(30);

/// Attempts to have all layers at hand at one moment, while others collect.
const PULL_TRIES: usize = 4;

/// What is kept about an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// What it is called here.
    pub name: String,
    /// Digest of its manifest, or of the archive it was made from.
    pub digest: String,
    /// Its layers, the topmost first.
    pub layers: Vec<String>,
    /// What its layers take on disk, whoever else has them.
    pub size_bytes: u64,
    /// When it was brought in.
    pub imported_at_ms: u64,
    /// How it wants to be run.
    pub run: RunConfig,
    /// Its configuration as it came, to be written again.
    #[serde(default)]
    pub(crate) raw: String,
}

/// How an image wants to be run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Which processor it is for.
    pub architecture: String,
    /// Environment of commands.
    pub env: BTreeMap<String, String>,
    /// Where commands start.
    pub workdir: Option<String>,
    /// As whom.
    pub user: Option<String>,
    /// What is always run.
    pub entrypoint: Vec<String>,
    /// Its arguments, or what is run without one.
    pub cmd: Vec<String>,
    /// Ports it says it listens on.
    pub ports: Vec<String>,
    /// Words about it.
    pub labels: BTreeMap<String, String>,
}

impl RunConfig {
    fn of(config: &ImageConfig) -> Self {
        Self {
            architecture: config.architecture.clone(),
            // What no process could be started with is left out.
            env: config
                .env
                .iter()
                .filter(|(name, value)| !(name.contains('\0') || value.contains('\0')))
                .cloned()
                .collect(),
            workdir: config.workdir.clone(),
            user: config.user.clone(),
            entrypoint: config.entrypoint.clone(),
            cmd: config.cmd.clone(),
            ports: config.ports.clone(),
            labels: config.labels.clone(),
        }
    }
}

/// What is done to bring an image in, as it is done.
#[derive(Debug, Clone)]
pub enum ImageProgress {
    /// A layer is on its way.
    Fetching(Progress),
    /// A layer is unpacked.
    Unpacking {
        /// Which, from 1.
        layer: usize,
        /// Of how many.
        of: usize,
    },
    /// A layer is here already.
    Shared {
        /// Which, from 1.
        layer: usize,
        /// Of how many.
        of: usize,
    },
}

/// Told of progress; answers whether to go on.
pub type OnProgress<'a> = &'a dyn Fn(ImageProgress) -> ControlFlow<()>;

impl ImageRecord {
    pub(crate) fn layer_ids(&self) -> io::Result<Vec<LayerId>> {
        self.layers.iter().map(|layer| layer.parse()).collect()
    }
}

/// Refuses a name that could not be typed or shown again.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@".contains(&byte);
    if name.is_empty()
        || name.len() > NAME_BYTES_MAX
        || !name.bytes().all(plain)
        || !name.as_bytes()[0].is_ascii_alphanumeric()
    {
        return Err(StoreError::Invalid {
            what: format!("{name:?} is not a name for an image"),
            hint: "use up to 80 letters, digits and . _ - / : @, beginning with a letter or digit",
        });
    }
    if name == "host" {
        return Err(StoreError::Invalid {
            what: "host is this machine's own userland".to_owned(),
            hint: "give the image another name with --name",
        });
    }
    Ok(())
}

fn file_name(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => text.push(char::from(byte)),
            other => {
                let _ = write!(text, "%{other:02x}");
            }
        }
    }
    format!("{text}.json")
}

impl Store {
    fn image_file(&self, name: &str) -> PathBuf {
        self.data().images().join(file_name(name))
    }

    /// What is kept under a name. Names of registries can be given as people write them.
    pub(crate) fn image(&self, name: &str) -> Result<ImageRecord> {
        check_name(name)?;
        let mut names = vec![name.to_owned()];
        names.extend(name.parse::<Reference>().ok().map(|reference| reference.familiar()));
        for name in names {
            let found = durable::read_json_within(&self.image_file(&name), RECORD_BYTES_MAX);
            if let Some(record) = found.tried(|| format!("cannot read the record of image {name}"))? {
                return Ok(record);
            }
        }
        Err(StoreError::NotFound { what: format!("image {name:?}") })
    }

    /// What a sandbox of an image is made of.
    pub(crate) fn made_of_image(&self, name: &str) -> Result<MadeOf> {
        let record = self.image(name)?;
        let image = record.layer_ids().tried(|| format!("cannot read the layers of {name}"))?;
        Ok(MadeOf { base: Base::Nothing, image, saved: Vec::new(), env: record.run.env })
    }

    /// All images by name, with what cannot be read about some.
    pub(crate) fn images(&self) -> io::Result<Vec<(String, io::Result<ImageRecord>)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.data().images())? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') || Path::new(&name).extension().is_none_or(|kind| kind != "json") {
                continue;
            }
            match durable::read_json_within::<ImageRecord>(&entry.path(), RECORD_BYTES_MAX) {
                Ok(None) => {}
                Ok(Some(record)) => all.push((record.name.clone(), Ok(record))),
                Err(error) => all.push((name, Err(error))),
            }
        }
        all.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(all)
    }

    /// Brings in a root filesystem, an OCI archive or layout, or what `docker save` wrote.
    pub(crate) fn import_image(
        &self,
        path: &Path,
        name: Option<&str>,
        which: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<ImageRecord> {
        match viv_image::detect(path)? {
            Kind::RootfsTar => self.import_rootfs(path, name, progress),
            Kind::OciLayout | Kind::OciArchive | Kind::DockerArchive => {
                self.import_archive(path, name, which, progress)
            }
        }
    }

    fn import_rootfs(&self, path: &Path, name: Option<&str>, progress: OnProgress<'_>) -> Result<ImageRecord> {
        let stem = || {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            file.split(".tar").next().unwrap_or_default().to_owned()
        };
        let name = name.map_or_else(stem, str::to_owned);
        check_name(&name)?;
        tell(progress, ImageProgress::Unpacking { layer: 1, of: 1 })?;
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let mut stream = viv_image::open_tar(path, self.room()?)?;
        let place = self.new_layer_folder().tried(|| "cannot make a layer".to_owned())?;
        let unpacked = (|| {
            self.unpack_into(&place, &mut stream)?;
            let digest = stream.finish()?;
            let id = self.put_unpacked(&place, &layer_id(&digest)?)?;
            let run = RunConfig { architecture: Platform::host().architecture, ..RunConfig::default() };
            self.write_image(&name, &digest.to_string(), &[id], run, String::new())
        })();
        self.discard_left(&place);
        unpacked
    }

    fn import_archive(
        &self,
        path: &Path,
        name: Option<&str>,
        which: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<ImageRecord> {
        let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
        let scratch = self.new_place();
        fs::create_dir(&scratch).tried(|| "cannot make a scratch folder".to_owned())?;
        let imported = (|| {
            let archive = Archive::open(path, &scratch, self.room()?)?;
            let image = archive.image(which, &Platform::host())?;
            let name = match (name, which, archive.names().as_slice()) {
                (Some(name), ..) | (None, Some(name), _) => name.to_owned(),
                (None, None, [only]) => familiar(only),
                (None, None, _) => {
                    return Err(StoreError::Invalid {
                        what: "the archive does not say what the image is called".to_owned(),
                        hint: "name it with --name",
                    });
                }
            };
            check_name(&name)?;
            self.add_image(&name, &image, progress, |layer| Ok(Box::new(archive.layer(layer)?)))
        })();
        self.discard_left(&scratch);
        imported
    }

    /// Fetches an image from its registry. What is here already, whole or in part, is not fetched again.
    pub(crate) fn pull_image(
        &self,
        registry: &Registry,
        reference: &Reference,
        name: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<ImageRecord> {
        let name = name.map_or_else(|| reference.familiar(), str::to_owned);
        check_name(&name)?;
        let image = registry.resolve(reference, &Platform::host())?;
        // Whatever the tag means by the time that a layer is fetched, the image is this one.
        let pinned = reference.clone().with_digest(image.digest);
        let blobs = BlobDir::open(&self.data().downloads())?;
        let mut tries = 0;
        loop {
            tries += 1;
            for layer in self.missing(&image)? {
                registry.fetch(&pinned, &layer, &blobs, &|told| progress(ImageProgress::Fetching(told)))?;
            }
            let _lock = self.lock_shared().tried(|| "cannot lock the store".to_owned())?;
            // Nobody collected one meanwhile, so from here on all are kept.
            let missing = self.missing(&image)?;
            if tries < PULL_TRIES && missing.iter().any(|layer| !blobs.path(&layer.digest).exists()) {
                continue;
            }
            let open = |layer: &LayerDescriptor| -> Result<Box<dyn Read>> {
                let path = blobs.path(&layer.digest);
                Ok(Box::new(File::open(&path).tried(|| format!("cannot open {}", path.display()))?))
            };
            let record = self.add_image(&name, &image, progress, open)?;
            for layer in &image.layers {
                blobs.remove(&layer.digest)?;
            }
            return Ok(record);
        }
    }

    fn missing(&self, image: &Image) -> Result<Vec<LayerDescriptor>> {
        let mut missing = Vec::new();
        for layer in &image.layers {
            let id = layer_id(&layer.diff_id)?;
            if self.whole_layer(&id).tried(|| format!("cannot look for layer {id}"))?.is_none() {
                missing.push(layer.clone());
            }
        }
        Ok(missing)
    }

    /// Unpacks the layers that are not here, and then gives the whole its name.
    fn add_image(
        &self,
        name: &str,
        image: &Image,
        progress: OnProgress<'_>,
        open: impl Fn(&LayerDescriptor) -> Result<Box<dyn Read>>,
    ) -> Result<ImageRecord> {
        let mut layers = Vec::new();
        for (index, layer) in image.layers.iter().enumerate() {
            let id = layer_id(&layer.diff_id)?;
            let (number, of) = (index + 1, image.layers.len());
            if self.whole_layer(&id).tried(|| format!("cannot look for layer {id}"))?.is_some() {
                tell(progress, ImageProgress::Shared { layer: number, of })?;
            } else {
                tell(progress, ImageProgress::Unpacking { layer: number, of })?;
                self.add_layer(layer, open(layer)?)?;
            }
            layers.insert(0, id);
        }
        let raw = String::from_utf8_lossy(&image.config.raw).into_owned();
        self.write_image(name, &image.digest.to_string(), &layers, RunConfig::of(&image.config), raw)
    }

    fn add_layer(&self, layer: &LayerDescriptor, raw: impl Read) -> Result<LayerId> {
        let place = self.new_layer_folder().tried(|| "cannot make a layer".to_owned())?;
        let added = (|| {
            let mut stream = viv_image::open_layer(raw, layer, self.room()?)?;
            self.unpack_into(&place, &mut stream)?;
            // Only now is it known that all of it was what was promised.
            stream.finish()?;
            self.put_unpacked(&place, &layer_id(&layer.diff_id)?)
        })();
        self.discard_left(&place);
        added
    }

    fn unpack_into(&self, place: &Path, stream: impl Read) -> Result<()> {
        let root = place.join(PARTS).join(ROOT);
        fs::create_dir_all(&root).tried(|| "cannot make a layer".to_owned())?;
        let mut bounds = viv_layer::Bounds::default();
        bounds.bytes_max = bounds.bytes_max.min(self.room()?.total_bytes_max);
        viv_layer::unpack(stream, &root, Form::Oci, &bounds)?;
        Ok(())
    }

    /// Puts an unpacked layer in place; one that somebody else has put there meanwhile is as good.
    fn put_unpacked(&self, place: &Path, id: &LayerId) -> Result<LayerId> {
        let put = || -> io::Result<()> {
            self.sync()?;
            let parts = place.join(PARTS);
            let meta = LayerMeta {
                id: id.clone(),
                form: LayerForm::Folder,
                parts: part_names(&parts)?,
                survey: viv_layer::survey(&parts)?,
                content: None,
                integrity: Integrity::Pending,
                sealed_at_ms: now_wall_ms(),
                highest_inode: None,
            };
            match self.put_layer(place, &meta) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                result => result,
            }
        };
        put().tried(|| format!("cannot keep layer {id}"))?;
        Ok(id.clone())
    }

    fn write_image(
        &self,
        name: &str,
        digest: &str,
        layers: &[LayerId],
        run: RunConfig,
        raw: String,
    ) -> Result<ImageRecord> {
        let _lock = self.lock_images()?;
        let mut size_bytes = 0;
        for layer in layers {
            let meta = self.need_layer(layer).tried(|| format!("cannot read layer {layer}"))?;
            size_bytes += meta.survey.disk_bytes;
        }
        let record = ImageRecord {
            name: name.to_owned(),
            digest: digest.to_owned(),
            layers: layers.iter().map(ToString::to_string).collect(),
            size_bytes,
            imported_at_ms: now_wall_ms(),
            run,
            raw,
        };
        durable::replace_json_within(&self.image_file(name), &record, RECORD_BYTES_MAX)
            .tried(|| format!("cannot record image {name}"))?;
        Ok(record)
    }

    /// Takes an image's name away. Its layers go when nothing else refers to them; one that sandboxes or snapshots
    /// stand on is refused, unless forced, and then lives on without a name.
    pub(crate) fn remove_image(&self, name: &str, force: bool) -> Result<()> {
        let _lock = self.lock_images()?;
        let record = self.image(name)?;
        let references = self.references().tried(|| "cannot read the records".to_owned())?;
        let layers = record.layer_ids().tried(|| format!("cannot read the layers of {name}"))?;
        if let Some(user) = references.image_users(&layers).first()
            && !force
        {
            return Err(StoreError::Conflict {
                what: format!("{} is in use by {user}", record.name),
                hint: "remove that first, or use --force to take only the name away",
            });
        }
        fs::remove_file(self.image_file(&record.name)).tried(|| format!("cannot remove {}", record.name))?;
        Ok(())
    }

    /// Held while a name is given or taken.
    fn lock_images(&self) -> Result<File> {
        let file = self.data().images().join(".lock");
        lock_file(&file, true, NAMES_WITHIN).tried(|| "cannot lock the names of images".to_owned())
    }

    /// What there is room for.
    pub(crate) fn room(&self) -> Result<Bounds> {
        let found = rustix::fs::statvfs(self.sealed()).tried(|| "cannot look at the disk".to_owned())?;
        let bounds = Bounds::default();
        // Not the last of it: those who run need some as well.
        let free = found.f_bavail * found.f_frsize / 10 * 9;
        Ok(Bounds { total_bytes_max: bounds.total_bytes_max.min(free), ..bounds })
    }

    /// Removes a place that was not used up.
    pub(crate) fn discard_left(&self, place: &Path) {
        if place.exists() {
            // If it does not go now, it is collected later.
            let _ = self.discard(place);
        }
    }
}

/// A layer is called after its content, so that images share it.
fn layer_id(digest: &viv_image::Digest) -> Result<LayerId> {
    format!("sha256-{}", digest.hex()).parse().tried(|| "cannot name a layer".to_owned())
}

fn familiar(name: &str) -> String {
    name.parse::<Reference>().map_or_else(|_| name.to_owned(), |reference| reference.familiar())
}

fn tell(progress: OnProgress<'_>, told: ImageProgress) -> Result<()> {
    match progress(told) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(StoreError::Registry(viv_image::RegistryError::Cancelled)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s4_names_of_images_are_no_paths() {
        for bad in ["", "..", "/x", "a b", "a\0", "host", &"x".repeat(81)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert_eq!(file_name("docker.io/library/debian:12"), "docker.io%2flibrary%2fdebian%3a12.json");
        assert_eq!(file_name("a/../b"), "a%2f..%2fb.json");
    }
}
