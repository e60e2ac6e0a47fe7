//! What refers to layers, and taking away what nothing refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use viv_core::{SandboxId, SnapshotId};
use viv_provider::{InstanceRef, Integrity};

use super::Store;
use super::layer::{LayerId, LayerMeta};
use super::snapshot::{SnapshotFile, SnapshotRecord};
use super::tidy::is_long;
use crate::checkpoint::MemoryDir;
use crate::durable;
use crate::layout::Made;

/// How many memories that could not be saved or restored are kept for a look.
const FAILED_MAX: usize = 3;

/// Everything that refers to layers.
#[derive(Debug, Default)]
pub(crate) struct References {
    layers: BTreeMap<LayerId, usize>,
    instances: BTreeSet<InstanceRef>,
    made_from: BTreeMap<SnapshotId, Vec<InstanceRef>>,
    /// Who stands on which layers of an image.
    images: BTreeMap<Vec<LayerId>, Vec<String>>,
    /// Snapshots that stand on so many layers that those are to be merged: whoever reads all records meets them too.
    long: Vec<SnapshotRecord>,
}

impl References {
    /// Instances that were made from a snapshot and are there.
    pub(crate) fn made_from(&self, snapshot: &SnapshotId) -> Vec<InstanceRef> {
        self.made_from.get(snapshot).cloned().unwrap_or_default()
    }

    /// Who stands on an image that is made of these.
    pub(crate) fn image_users(&self, layers: &[LayerId]) -> &[String] {
        // Sandboxes of the machine's own userland stand on no layers at all.
        if layers.is_empty() { &[] } else { self.images.get(layers).map_or(&[], Vec::as_slice) }
    }

    /// The writable layers of instances that are there.
    pub(crate) fn active_folders(&self, store: &Store) -> BTreeSet<PathBuf> {
        self.instances.iter().map(|instance| store.active_folder(instance)).collect()
    }

    /// How many refer to a layer.
    pub(crate) fn of(&self, layer: &LayerId) -> usize {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    /// Snapshots whose layers are to be merged.
    pub(super) fn into_long(self) -> Vec<SnapshotRecord> {
        self.long
    }

    fn add<'a>(&mut self, layers: impl IntoIterator<Item = &'a LayerId>) {
        // A root may have a layer twice; that is one reference all the same.
        for layer in layers.into_iter().collect::<BTreeSet<_>>() {
            *self.layers.entry(layer.clone()).or_default() += 1;
        }
    }
}

/// What was taken away.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Sealed layers that nothing referred to.
    pub layers: u64,
    /// What they held.
    pub bytes: u64,
    /// Writable layers without an instance, and what was left half built.
    pub leftovers: u64,
}

impl Collected {
    pub(crate) fn plus(self, more: Self) -> Self {
        Self {
            layers: self.layers + more.layers,
            bytes: self.bytes + more.bytes,
            leftovers: self.leftovers + more.leftovers,
        }
    }
}

impl Store {
    /// Reads all records. One that cannot be read fails this: it might refer to anything (T7).
    pub(crate) fn references(&self) -> io::Result<References> {
        let mut found = References::default();
        self.read_references(&mut found, Err)?;
        Ok(found)
    }

    /// The same for a look: what cannot be read is left out.
    pub(crate) fn readable_references(&self) -> io::Result<References> {
        let mut found = References::default();
        self.read_references(&mut found, |_| Ok(()))?;
        Ok(found)
    }

    /// Instances that were made from a snapshot. All of theirs have to be readable.
    pub(crate) fn users_of(&self, snapshot: &SnapshotId) -> io::Result<Vec<InstanceRef>> {
        let mut found = References::default();
        self.read_instances(&mut found, &Err)?;
        Ok(found.made_from(snapshot))
    }

    /// How many instances stand on a layer.
    pub(crate) fn users_of_layer(&self, layer: &LayerId) -> io::Result<usize> {
        let mut found = References::default();
        self.read_instances(&mut found, &Err)?;
        Ok(found.of(layer))
    }

    /// Whether others surely hold all layers that an instance refers to. This looks at a few records, however many
    /// there are: at the snapshot that it was made from, at the one that its own layer was sealed for, and at images.
    pub(crate) fn are_held(&self, made: &Made, sealed: Option<&LayerMeta>) -> io::Result<bool> {
        let sealed = sealed.map(|meta| &meta.id);
        let mut held = BTreeSet::new();
        for id in made.parent.iter().cloned().chain(sealed.and_then(LayerId::snapshot)) {
            if let Some(SnapshotFile::Kept(record)) = self.read_snapshot(&id)? {
                held.extend(record.of.layers().cloned());
            }
        }
        let are_all_in = |held: &BTreeSet<_>| made.of.layers().chain(sealed).all(|layer| held.contains(layer));
        if are_all_in(&held) {
            return Ok(true);
        }
        // Images are few.
        for (_, record) in self.images()? {
            held.extend(record.and_then(|record| record.layer_ids())?);
        }
        Ok(are_all_in(&held))
    }

    fn read_references(
        &self,
        found: &mut References,
        unreadable: impl Fn(io::Error) -> io::Result<()>,
    ) -> io::Result<()> {
        self.read_instances(found, &unreadable)?;
        for (id, file) in self.all_snapshots()? {
            match file {
                Ok(SnapshotFile::Kept(record)) => {
                    found.add(record.of.layers());
                    found.images.entry(record.of.image.clone()).or_default().push(id.to_string());
                    if is_long(&record) {
                        found.long.push(*record);
                    }
                }
                Ok(SnapshotFile::Removed { .. }) => {}
                Err(error) => unreadable(error)?,
            }
        }
        for (_, record) in self.images()? {
            match record.and_then(|record| record.layer_ids()) {
                Ok(layers) => found.add(&layers),
                Err(error) => unreadable(error)?,
            }
        }
        Ok(())
    }

    fn read_instances(
        &self,
        found: &mut References,
        unreadable: &impl Fn(io::Error) -> io::Result<()>,
    ) -> io::Result<()> {
        for entry in fs::read_dir(self.data().instances())? {
            let name = entry?.file_name();
            let Some(sandbox) = name.to_str().and_then(|name| name.parse::<SandboxId>().ok()) else { continue };
            let dir = self.data().instance(&sandbox);
            let read =
                || -> io::Result<_> { Ok((dir.read_record()?, durable::read_json::<LayerMeta>(&dir.sealed())?)) };
            let (record, sealed) = match read() {
                Ok((Some(record), sealed)) => (record, sealed),
                Ok((None, _)) => continue,
                Err(error) => {
                    unreadable(error)?;
                    continue;
                }
            };
            found.instances.insert(record.instance.clone());
            let Some(made) = record.made else { continue };
            found.add(made.of.layers().chain(sealed.iter().map(|meta| &meta.id)));
            found.images.entry(made.of.image).or_default().push(record.instance.to_string());
            if let Some(parent) = made.parent {
                found.made_from.entry(parent).or_default().push(record.instance);
            }
        }
        Ok(())
    }

    /// Takes away what nothing refers to; `None` while somebody builds.
    pub(crate) fn collect(&self) -> io::Result<Option<Collected>> {
        Ok(self.collect_and_tell()?.map(|(collected, _)| collected))
    }

    /// The same, and what was read for it: reading all records is what costs, so nobody does it twice.
    ///
    /// While they are read, nobody begins a sandbox or a snapshot. So of layers, which are as many as snapshots, only the
    /// names are looked at here.
    pub(super) fn collect_and_tell(&self) -> io::Result<Option<(Collected, References)>> {
        let Some(lock) = self.lock_exclusive()? else { return Ok(None) };
        let references = self.references()?;
        // A pool has a journal of its own: what referred to a layer must be gone for good before the layer is. Records
        // of snapshots are written out as they are written.
        for folder in [self.data().instances(), self.data().images()] {
            fs::File::open(folder)?.sync_all()?;
        }
        let (mut collected, mut hidden) = (Collected::default(), Vec::new());
        for id in self.layer_names()? {
            if references.of(&id) > 0 {
                continue;
            }
            collected.layers += 1;
            collected.bytes += self.layer(&id).ok().flatten().map_or(0, |meta| meta.survey.disk_bytes);
            hidden.extend(self.hide_layer(&id)?);
        }
        for entry in fs::read_dir(self.sealed())? {
            let name = entry?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<LayerId>().ok()) else { continue };
            // Without its file it is no layer yet; an instance that is being saved may have said that it will be one.
            if references.of(&id) == 0 && self.layer(&id)?.is_none() {
                collected.leftovers += 1;
                hidden.extend(self.hide(&self.sealed_folder(&id))?);
            }
        }
        for folder in [self.sealed(), self.data().snapshots(), self.data().images()] {
            collected.leftovers += remove_half_written(&folder)?;
        }
        collected.leftovers += self.forget_memory()?;
        let instances = references.active_folders(self);
        for folder in [self.active(), self.tmp()] {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if !instances.contains(&path) {
                    collected.leftovers += 1;
                    hidden.extend(self.hide(&path)?);
                }
            }
        }
        drop(lock);
        // Nobody waits for this part.
        for path in hidden {
            self.take_apart(&path)?;
        }
        self.empty_trash();
        Ok(Some((collected, references)))
    }

    /// Removes the memory of snapshots that are not there any more, or never came to be. The last few that could not be
    /// saved or restored stay for a look, for as long as anything else of their sandbox does.
    fn forget_memory(&self) -> io::Result<u64> {
        let (mut removed, mut failed) = (0, Vec::new());
        for entry in fs::read_dir(self.data().memory())? {
            let entry = entry?;
            let id = entry.file_name().to_str().and_then(|name| name.parse::<SnapshotId>().ok());
            let kept = id.map(|id| self.read_snapshot(&id)).transpose()?.flatten();
            if matches!(kept, Some(SnapshotFile::Kept(record)) if record.snapshot.memory) {
                continue;
            }
            let dir = MemoryDir::new(entry.path());
            if let Ok(tried) = dir.failed_at()
                && self.has_sandbox_of(&dir)?
            {
                failed.push((tried, entry.path()));
                continue;
            }
            fs::remove_dir_all(entry.path())?;
            removed += 1;
        }
        failed.sort();
        for (_, path) in failed.iter().rev().skip(FAILED_MAX) {
            fs::remove_dir_all(path)?;
            removed += 1;
        }
        Ok(removed)
    }

    /// Whether anything is there of the sandbox whose memory this is.
    fn has_sandbox_of(&self, dir: &MemoryDir) -> io::Result<bool> {
        let Ok(instance) = dir.of() else { return Ok(false) };
        let sandbox = &instance.sandbox;
        if self.data().instance(sandbox).path().exists() {
            return Ok(true);
        }
        let is_its = |file: io::Result<SnapshotFile>| matches!(file, Ok(SnapshotFile::Kept(record)) if record.snapshot.source.sandbox == *sandbox);
        Ok(self.all_snapshots()?.any(|(_, file)| is_its(file)))
    }

    /// Whether a snapshot is whole, with all that it stands on, and what removing it would free.
    pub(crate) fn condition(&self, record: &SnapshotRecord, references: &References) -> (Integrity, u64) {
        let (mut integrity, mut own_bytes) = (Integrity::Verified, 0);
        for layer in record.of.layers() {
            let Ok(Some(meta)) = self.layer(layer) else { return (Integrity::Damaged, 0) };
            integrity = match (integrity, meta.integrity) {
                (Integrity::Damaged, _) | (_, Integrity::Damaged) => Integrity::Damaged,
                (Integrity::Pending, _) | (_, Integrity::Pending) => Integrity::Pending,
                (Integrity::Verified, Integrity::Verified) => Integrity::Verified,
            };
            if record.of.saved.contains(layer) && references.of(layer) <= 1 {
                own_bytes += self.count_layer(&meta);
            }
        }
        (integrity, own_bytes)
    }
}

/// Files that somebody began to write beside the one they were to replace. Whoever does that in the store holds its
/// lock, so these were left.
fn remove_half_written(folder: &Path) -> io::Result<u64> {
    let mut removed = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if durable::is_half_written(&entry.file_name()) {
            fs::remove_file(entry.path())?;
            removed += 1;
        }
    }
    Ok(removed)
}
