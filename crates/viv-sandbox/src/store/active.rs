//! Writable layers of instances.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use viv_provider::{DiskUsage, InstanceRef};

use super::Store;
use super::disk::{self, MountedDisk};
use super::driver::{Driver, PlainLimits};
use super::layer::{LayerForm, LayerId, LayerMeta, PARTS, WORK};
use super::plan::MadeOf;
use crate::rootfs::Writable;

/// What a writable layer begins with.
pub(crate) enum Start<'a> {
    /// Nothing.
    Empty,
    /// All that a sealed layer holds, which is then not below it any more.
    Layer(&'a LayerId),
    /// All that a living one holds; its `parts` are in this folder.
    Living(&'a Path),
}

impl Store {
    pub(crate) fn active_folder(&self, instance: &InstanceRef) -> PathBuf {
        // With the generation, so that whoever is late never meets the next one's.
        self.active().join(format!("{}.{}", instance.sandbox, instance.generation))
    }

    /// In which form a new writable layer will be.
    pub(crate) fn form_for(&self, limit_bytes: Option<u64>) -> LayerForm {
        match (&self.driver, limit_bytes) {
            (Driver::Plain { limits: Ok(PlainLimits::Projects) } | Driver::Btrfs { .. }, _)
            | (Driver::Plain { .. }, None) => LayerForm::Folder,
            (Driver::Plain { limits: Ok(PlainLimits::Disks) | Err(_) }, Some(_)) => LayerForm::Disk,
        }
    }

    /// Where the shim will find it.
    pub(crate) fn writable(&self, instance: &InstanceRef, form: LayerForm) -> Writable {
        let folder = self.active_folder(instance);
        match form {
            LayerForm::Folder => Writable::Folder(folder),
            LayerForm::Disk => Writable::Disk(folder.join(disk::FILE)),
        }
    }

    /// Whether an instance made of these starts with a clone of the topmost layer, instead of having it below.
    pub(crate) fn clones_on_restore(&self, of: &MadeOf) -> bool {
        match (&self.driver, of.saved.first()) {
            // In constant time, and chains do not grow. What was brought in is a folder, and stays below.
            (Driver::Btrfs { .. }, Some(top)) => self.driver.is_subvolume(&self.sealed_folder(top)),
            (Driver::Btrfs { .. }, None) | (Driver::Plain { .. }, _) => false,
        }
    }

    /// What layers hold that were saved.
    pub(crate) fn saved_bytes(&self, of: &MadeOf) -> io::Result<u64> {
        of.saved.iter().try_fold(0_u64, |sum, layer| Ok(sum.saturating_add(self.need_layer(layer)?.survey.disk_bytes)))
    }

    /// What is left of a limit above layers that were saved. A sandbox that is full gets a little to start with; one
    /// that holds more than its limit is refused.
    pub(crate) fn left_of_limit(&self, of: &MadeOf, limit_bytes: u64) -> io::Result<u64> {
        let saved = self.saved_bytes(of)?;
        if saved > limit_bytes.saturating_add(disk::BYTES_MIN) {
            return Err(too_full(saved, limit_bytes));
        }
        Ok(limit_bytes.saturating_sub(saved).max(disk::BYTES_MIN.min(limit_bytes)))
    }

    /// Makes a writable layer. `of` is what will be below it.
    pub(crate) fn make_active(
        &self,
        instance: &InstanceRef,
        start: &Start<'_>,
        of: &MadeOf,
        limit_bytes: Option<u64>,
    ) -> io::Result<()> {
        let folder = self.active_folder(instance);
        let make = || match &self.driver {
            Driver::Btrfs { .. } => self.make_numbered(&folder, of),
            Driver::Plain { .. } if limit_bytes.is_some() => self.driver.make_limited(&folder),
            Driver::Plain { .. } => self.driver.make(&folder),
        };
        match (self.form_for(limit_bytes), start) {
            (LayerForm::Folder, Start::Empty) => make()?,
            (LayerForm::Folder, Start::Layer(layer)) => self.driver.snapshot(&self.sealed_folder(layer), &folder)?,
            (LayerForm::Folder, Start::Living(source)) if self.driver.copies_live() => {
                make()?;
                viv_layer::copy(&source.join(PARTS), &folder.join(PARTS))?;
            }
            (LayerForm::Folder, Start::Living(source)) => self.driver.snapshot(source, &folder)?,
            (LayerForm::Disk, _) => return self.make_disk(&folder, start, of, limit_bytes),
        }
        // What it was cloned from may have been mounted, and limited. Its own limit is set when it is mounted.
        viv_layer::remove(&folder.join(WORK))?;
        self.driver.unlimit(&folder)?;
        let (Some(limit), Some(counted)) = (limit_bytes, self.driver.counted(&folder)) else { return Ok(()) };
        let (used, left) = (counted.referenced_bytes, self.left_of_limit(of, limit)?);
        if used > left.saturating_add(disk::BYTES_MIN) { Err(too_full(used, left)) } else { Ok(()) }
    }

    fn make_disk(&self, folder: &Path, start: &Start<'_>, of: &MadeOf, limit_bytes: Option<u64>) -> io::Result<()> {
        let bytes = self.left_of_limit(of, limit_bytes.unwrap_or(u64::MAX))?.max(disk::BYTES_MIN);
        DirBuilder::new().mode(0o755).create(folder)?;
        let file = folder.join(disk::FILE);
        disk::make(&file, bytes)?;
        let Start::Living(source) = start else { return Ok(()) };
        let disk = MountedDisk::mount_alone(&file, false)?;
        viv_layer::copy(&source.join(PARTS), &disk.path().join(PARTS))?;
        disk.sync()
    }

    /// Takes the writable layer of an instance that has ended out of sight; it is left to be taken apart.
    pub(crate) fn hide_active(&self, instance: &InstanceRef) -> io::Result<Option<PathBuf>> {
        self.hide(&self.active_folder(instance))
    }

    /// What a writable layer holds: its own, and what it shares with layers that it was cloned from.
    pub(crate) fn count_active(&self, writable: &Writable) -> io::Result<DiskUsage> {
        let mut usage = DiskUsage::default();
        match writable {
            Writable::Disk(file) => usage.own_bytes = fs::metadata(file)?.blocks() * 512,
            Writable::Folder(folder) => match self.driver.counted(folder) {
                Some(counted) => {
                    let mut counted = counted;
                    if self.driver.counts_late() {
                        self.sync()?;
                        counted = self.driver.counted(folder).unwrap_or(counted);
                    }
                    usage.own_bytes = counted.exclusive_bytes;
                    usage.shared_bytes = counted.referenced_bytes.saturating_sub(counted.exclusive_bytes);
                }
                None if folder.join(PARTS).exists() => {
                    usage.own_bytes = viv_layer::survey(&folder.join(PARTS))?.disk_bytes;
                }
                None => {}
            },
        }
        Ok(usage)
    }

    /// What a layer would give back if nobody else referred to it.
    pub(crate) fn count_layer(&self, meta: &LayerMeta) -> u64 {
        self.driver
            .counted(&self.sealed_folder(&meta.id))
            .map_or(meta.survey.disk_bytes, |counted| counted.exclusive_bytes)
    }
}

fn too_full(saved_bytes: u64, limit_bytes: u64) -> io::Error {
    let what = format!("{saved_bytes} bytes are in use already, of {limit_bytes}");
    io::Error::new(io::ErrorKind::QuotaExceeded, what)
}
