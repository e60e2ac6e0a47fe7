//! From a writable layer to a sealed one: on disk, and looked at, before anybody is told (L10).

use std::fs;
use std::io;
use std::path::Path;
use std::time::Instant;

use viv_agent::proto::Identity;
use viv_layer::Survey;
use viv_provider::{InstanceRef, Integrity};

use super::Store;
use super::disk::{self, MountedDisk};
use super::layer::{LayerForm, LayerId, LayerMeta, OpenedLayer, PARTS, WORK, part_names};
use super::plan::MadeOf;
use super::view::View;
use crate::rootfs::{HostBase, ROOT, Writable};
use crate::shim::now_wall_ms;
use crate::wait::elapsed_us;

/// A layer that can be put in place, and what it took.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) meta: LayerMeta,
    pub(crate) flush_us: u64,
    pub(crate) copied_bytes: u64,
}

/// Whose writable layer, and what is below it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) instance: &'a InstanceRef,
    pub(crate) of: &'a MadeOf,
    pub(crate) host: &'a HostBase,
}

impl Store {
    /// Writes out and checks the layer of an instance that has ended, where it is. Nothing is moved yet.
    pub(crate) fn finish_stopped(
        &self,
        source: Source<'_>,
        writable: &Writable,
        layer: LayerId,
    ) -> io::Result<Finished> {
        let folder = self.active_folder(source.instance);
        let form = match writable {
            Writable::Folder(_) => LayerForm::Folder,
            Writable::Disk(_) => LayerForm::Disk,
        };
        let flush = Instant::now();
        match form {
            LayerForm::Folder => {
                viv_layer::remove(&folder.join(WORK))?;
                self.sync()?;
            }
            LayerForm::Disk => {
                // Mounted writable once, so that after a power cut its journal is played before it is read only.
                let disk = MountedDisk::mount_alone(&folder.join(disk::FILE), false)?;
                viv_layer::remove(&disk.path().join(WORK))?;
                disk.sync()?;
                drop(disk);
                self.sync()?;
            }
        }
        let flush_us = elapsed_us(flush);
        let opened = OpenedLayer::open_active(&folder, form)?;
        let before = viv_layer::survey(&opened.parts())?;
        let meta = meta(layer, form, &opened, before)?;
        self.check_mounts(source, &opened, &meta)?;
        // Whatever still wrote to it would have been lost, or be there in half.
        same(&meta.survey, &viv_layer::survey(&opened.parts())?, "something still writes to it")?;
        Ok(Finished { meta, flush_us, copied_bytes: 0 })
    }

    /// Puts a layer in place that [`Store::finish_stopped`] has finished. Repeating it after a crash goes on where
    /// that was: the caller has kept `meta`.
    pub(crate) fn seal_stopped(&self, instance: &InstanceRef, meta: &LayerMeta) -> io::Result<()> {
        let (active, place) = (self.active_folder(instance), self.sealed_folder(&meta.id));
        if let Some(sealed) = self.layer(&meta.id)? {
            if sealed.integrity == Integrity::Damaged {
                let what = "what it was sealed as is damaged by now";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            return Ok(());
        }
        if active.exists() {
            return self.put_layer(&active, meta);
        }
        // It was moved, and then the machine or the process stopped.
        fs::symlink_metadata(&place)?;
        self.driver.seal(&place)?;
        self.write_layer(meta)
    }

    /// Fills `place` with what a living instance holds right now, while it stands still. `living` is the folder that
    /// holds its parts.
    pub(crate) fn copy_live(&self, living: &Path, place: &Path) -> io::Result<(Option<Survey>, u64)> {
        if !self.driver.copies_live() {
            self.driver.snapshot(living, place)?;
            viv_layer::remove(&place.join(WORK))?;
            return Ok((None, 0));
        }
        self.driver.make(place)?;
        let copied = viv_layer::copy(&living.join(PARTS), &place.join(PARTS))?;
        Ok((Some(copied.survey), copied.copied_bytes))
    }

    /// Writes out and checks a layer that was made by [`Store::copy_live`].
    pub(crate) fn finish_live(
        &self,
        source: Source<'_>,
        place: &Path,
        copied: &(Option<Survey>, u64),
        layer: LayerId,
    ) -> io::Result<Finished> {
        let flush = Instant::now();
        self.sync()?;
        let flush_us = elapsed_us(flush);
        let opened = OpenedLayer::open(place, LayerForm::Folder)?;
        let found = viv_layer::survey(&opened.parts())?;
        if let Some(expected) = &copied.0 {
            same(expected, &found, "the copy is not what was copied")?;
        }
        let meta = meta(layer, LayerForm::Folder, &opened, found)?;
        self.check_mounts(source, &opened, &meta)?;
        Ok(Finished { meta, flush_us, copied_bytes: copied.1 })
    }

    /// Shows that a layer mounts above what is below it, and holds the identity of its instance.
    pub(crate) fn check_mounts(&self, source: Source<'_>, layer: &OpenedLayer, meta: &LayerMeta) -> io::Result<()> {
        let mut below = Vec::new();
        for (part, folders) in self.part_folders(layer, &meta.parts, source.of, source.host, &mut below)? {
            let view = View::mount(&folders)?;
            if part == ROOT {
                let InstanceRef { sandbox, generation } = source.instance;
                let expected = Identity { sandbox: sandbox.clone(), generation: *generation };
                let found = view.identity()?;
                if found != expected {
                    let what = format!("it holds the identity of {}@{}", found.sandbox, found.generation);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
            } else {
                fs::read_dir(view.path())?;
            }
        }
        Ok(())
    }
}

fn meta(id: LayerId, form: LayerForm, opened: &OpenedLayer, survey: Survey) -> io::Result<LayerMeta> {
    let parts = part_names(&opened.parts())?;
    let integrity = Integrity::Pending;
    Ok(LayerMeta {
        id,
        form,
        parts,
        survey,
        content: None,
        integrity,
        sealed_at_ms: now_wall_ms(),
        highest_inode: None,
    })
}

fn same(one: &Survey, other: &Survey, otherwise: &str) -> io::Result<()> {
    if one.same_structure(other) {
        return Ok(());
    }
    let what = format!("{otherwise}: {} entries before, {} after", one.entries, other.entries);
    Err(io::Error::new(io::ErrorKind::InvalidData, what))
}
