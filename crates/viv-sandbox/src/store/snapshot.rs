//! Records of snapshots.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viv_core::{OperationId, SandboxId, SnapshotId};
use viv_provider::Snapshot;

use super::Store;
use super::plan::MadeOf;
use crate::durable;
use crate::lock::{lock, lock_bucket};
use crate::shim::now_wall_ms;

/// Who restores a snapshot holds its record for as long as it takes to make a record of the instance.
const LOCK_WITHIN: Duration = Duration::from_secs(10);

/// What is kept about a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    pub(crate) snapshot: Snapshot,
    /// Which one saved it.
    pub(crate) operation: OperationId,
    /// What a root is made of that is made from it.
    pub(crate) of: MadeOf,
}

/// What is kept under a snapshot's id, for ever.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SnapshotFile {
    Kept(Box<SnapshotRecord>),
    /// It was removed; a save on its way under this id comes too late.
    Removed {
        sandbox: SandboxId,
        at_ms: u64,
    },
}

/// A record that is not removed while this is held.
#[derive(Debug)]
pub(crate) struct HeldSnapshot {
    pub(crate) record: SnapshotRecord,
    _lock: File,
}

/// Locks of ids that are about to be used, shared by many.
const BUCKETS: u64 = 16;

impl Store {
    /// Held while a record is written under an id for the first time, or for the last.
    pub(crate) fn lock_id(&self, id: &SnapshotId) -> io::Result<File> {
        lock_bucket(&self.data().snapshots(), id.as_str(), BUCKETS, LOCK_WITHIN)
    }

    fn snapshot_file(&self, id: &SnapshotId) -> PathBuf {
        self.data().snapshots().join(format!("{id}.json"))
    }

    pub(crate) fn read_snapshot(&self, id: &SnapshotId) -> io::Result<Option<SnapshotFile>> {
        durable::read_json(&self.snapshot_file(id))
    }

    /// Reads a record and keeps it from being removed; `None` when there is none, or no longer.
    pub(crate) fn hold_snapshot(&self, id: &SnapshotId) -> io::Result<Option<HeldSnapshot>> {
        let Some(lock) = self.lock_snapshot(id, false)? else { return Ok(None) };
        // Whoever removes it replaces the file under the lock, so what is read now stays.
        match self.read_snapshot(id)? {
            Some(SnapshotFile::Kept(record)) => Ok(Some(HeldSnapshot { record: *record, _lock: lock })),
            Some(SnapshotFile::Removed { .. }) | None => Ok(None),
        }
    }

    /// Locks the file that has the snapshot's name at that moment.
    fn lock_snapshot(&self, id: &SnapshotId, exclusive: bool) -> io::Result<Option<File>> {
        use std::os::unix::fs::MetadataExt;
        let path = self.snapshot_file(id);
        loop {
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(error),
            };
            lock(&file, exclusive, LOCK_WITHIN)?;
            let (locked, named) = (file.metadata()?, fs::metadata(&path)?);
            if locked.ino() == named.ino() {
                return Ok(Some(file));
            }
        }
    }

    pub(crate) fn write_snapshot(&self, record: &SnapshotRecord) -> io::Result<()> {
        let file = self.snapshot_file(&record.snapshot.id);
        durable::replace_json(&file, &SnapshotFile::Kept(Box::new(record.clone())))
    }

    /// Replaces what a snapshot is made of, if it is still there and still made of `before`.
    pub(crate) fn rewrite_snapshot(&self, id: &SnapshotId, before: &MadeOf, after: &MadeOf) -> io::Result<bool> {
        let Some(_lock) = self.lock_snapshot(id, true)? else { return Ok(false) };
        match self.read_snapshot(id)? {
            Some(SnapshotFile::Kept(mut record)) if record.of == *before => {
                record.of = after.clone();
                self.write_snapshot(&record).map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// Forgets a snapshot for good, unless `in_use` says so once nobody can begin to use it any more.
    pub(crate) fn remove_snapshot<T>(
        &self,
        id: &SnapshotId,
        sandbox: &SandboxId,
        in_use: impl FnOnce() -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        let _lock = self.lock_snapshot(id, true)?;
        if let Some(user) = in_use()? {
            return Ok(Some(user));
        }
        let removed = SnapshotFile::Removed { sandbox: sandbox.clone(), at_ms: now_wall_ms() };
        durable::replace_json(&self.snapshot_file(id), &removed)?;
        Ok(None)
    }

    /// All records, in the order of their ids, with what cannot be read about some. Each is read when it is asked for.
    pub(crate) fn all_snapshots(&self) -> io::Result<impl Iterator<Item = (SnapshotId, io::Result<SnapshotFile>)>> {
        Ok(self.read_snapshots(self.snapshot_ids()?))
    }

    /// The ids of all records, in their order.
    pub(crate) fn snapshot_ids(&self) -> io::Result<Vec<SnapshotId>> {
        let mut ids: Vec<SnapshotId> = Vec::new();
        for entry in fs::read_dir(self.data().snapshots())? {
            let name = entry?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.strip_suffix(".json")?.parse().ok()) else { continue };
            ids.push(id);
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// The records of these that are there, each read when it is asked for.
    pub(crate) fn read_snapshots(
        &self,
        ids: impl IntoIterator<Item = SnapshotId>,
    ) -> impl Iterator<Item = (SnapshotId, io::Result<SnapshotFile>)> {
        ids.into_iter().filter_map(|id| match self.read_snapshot(&id) {
            Ok(None) => None,
            Ok(Some(file)) => Some((id, Ok(file))),
            Err(error) => Some((id, Err(error))),
        })
    }
}
