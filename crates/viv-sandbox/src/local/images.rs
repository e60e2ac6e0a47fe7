//! Images, transfers, and the care of the store: what is not about one instance. All of it blocks.

use std::io;
use std::path::Path;

use viv_core::{OperationId, OwnerMark, SnapshotId};
use viv_image::{Reference, Registry};
use viv_provider::Snapshot;

use super::LocalProvider;
use crate::shim::space::DiskReserve;
use crate::store::check::Checked;
use crate::store::driver::{DriverKind, LimitedBy};
use crate::store::error::{StoreError, Tried};
use crate::store::image::{ImageRecord, OnProgress};
use crate::store::oci::{Destination, ExportSource};
use crate::store::transfer::Exported;

type Result<T> = std::result::Result<T, StoreError>;

impl LocalProvider {
    /// All images by name, with what cannot be read about some.
    pub fn images(&self) -> io::Result<Vec<(String, io::Result<ImageRecord>)>> {
        self.shared.store.images()
    }

    /// One image.
    pub fn image_record(&self, name: &str) -> Result<ImageRecord> {
        self.shared.store.image(name)
    }

    /// Brings in a root filesystem, an OCI archive or layout, or what `docker save` wrote. `which` is the image's name
    /// in an archive that holds several.
    pub fn import_image(
        &self,
        path: &Path,
        name: Option<&str>,
        which: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<ImageRecord> {
        self.shared.store.import_image(path, name, which, progress)
    }

    /// Fetches an image from its registry.
    pub fn pull_image(
        &self,
        registry: &Registry,
        reference: &Reference,
        name: Option<&str>,
        progress: OnProgress<'_>,
    ) -> Result<ImageRecord> {
        self.shared.store.pull_image(registry, reference, name, progress)
    }

    /// Takes an image's name away, and what nothing else needs of it.
    pub fn remove_image(&self, name: &str, force: bool) -> Result<()> {
        self.shared.store.remove_image(name, force)
    }

    /// Writes a snapshot to one file, for another machine.
    pub fn export_snapshot(&self, snapshot: &SnapshotId, to: &Path) -> Result<Exported> {
        self.shared.store.export_snapshot(snapshot, to)
    }

    /// Reads a snapshot that another machine wrote.
    pub fn import_snapshot(
        &self,
        from: &Path,
        snapshot: &SnapshotId,
        owner: &OwnerMark,
        operation: &OperationId,
    ) -> Result<Snapshot> {
        self.shared.store.import_snapshot(from, snapshot, owner, operation, None, &self.shared.host)
    }

    /// Writes a snapshot or an image as an OCI image; answers the digest of its manifest.
    pub fn export_oci(
        &self,
        source: &ExportSource,
        name: Option<Reference>,
        destination: Destination<'_>,
        progress: OnProgress<'_>,
    ) -> Result<String> {
        self.shared.store.export_oci(source, name, destination, &self.shared.host, progress)
    }

    /// Looks whether the store is as it should be; with `deep`, at the content of every file too.
    pub fn check_store(&self, deep: bool) -> Result<Checked> {
        self.shared.store.check(deep).tried(|| "the store cannot be checked".to_owned())
    }

    /// How layers are kept.
    pub fn driver(&self) -> DriverKind {
        self.shared.store.driver.kind()
    }

    /// How the disks of sandboxes are limited; `None` where they cannot be, and the capability says why.
    pub fn limited_by(&self) -> Option<LimitedBy> {
        self.shared.store.driver.limited_by().ok()
    }

    /// What is kept free of the disk that all sandboxes share; `None` where it cannot be looked at.
    pub fn disk_reserve(&self) -> Option<DiskReserve> {
        DiskReserve::of(&self.shared.data).ok()
    }
}
