//! What can wait: hashing, shortening chains, collecting.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use viv_core::SnapshotId;
use viv_image::{BlobDir, BlobError};
use viv_provider::Integrity;

use super::Store;
use super::collect::{Collected, References};
use super::layer::{LayerForm, LayerId, LayerMeta, OpenedLayer};
use super::snapshot::{SnapshotFile, SnapshotRecord};
use super::view::View;
use crate::lock::lock_file;
use crate::shim::now_wall_ms;

/// Saved layers above an image from which on they are merged into one. Each costs a lookup for every name that is not
/// found, and a mount some tens of microseconds.
const MERGE_FROM: usize = 8;

/// More than this are never mounted: if nothing merged them in the background, a restore does it first.
const DEPTH_MAX: usize = 24;

/// The same for a snapshot that has memory, and for whoever merges in the background: programs in it remember the numbers
/// of files, which a merge changes. So many are mounted in 2 ms.
const REMEMBERED_DEPTH_MAX: usize = 200;

/// How long a broken download is kept to be gone on with.
const DOWNLOAD_KEPT: Duration = Duration::from_secs(24 * 3600);

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tidied {
    /// Layers whose content was hashed.
    pub hashed: u64,
    /// Snapshots whose layers were merged.
    pub merged: u64,
    /// What was taken away; `None` when somebody was building.
    pub collected: Option<Collected>,
    /// What could not be done. The rest was.
    pub failed: Vec<String>,
}

/// How a store looked at some time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Looks(Vec<(u64, i64, i64)>);

/// From how many saved layers on those of a snapshot are merged, and more than how many are never mounted.
fn depths(record: &SnapshotRecord) -> (usize, usize) {
    if record.snapshot.memory { (REMEMBERED_DEPTH_MAX, REMEMBERED_DEPTH_MAX) } else { (MERGE_FROM, DEPTH_MAX) }
}

/// Whether so many layers are below it that they are to be merged.
pub(super) fn is_long(record: &SnapshotRecord) -> bool {
    record.of.saved.len() >= depths(record).0
}

impl Tidied {
    /// Nothing but this.
    pub(crate) fn failing(what: String) -> Self {
        Self { failed: vec![what], ..Self::default() }
    }

    /// Whether nothing was left undone.
    pub(crate) fn is_whole(&self) -> bool {
        self.failed.is_empty() && self.collected.is_some()
    }

    fn note<T>(&mut self, what: impl FnOnce() -> String, result: io::Result<T>) -> Option<T> {
        result.map_err(|error| self.failed.push(format!("{}: {error}", what()))).ok()
    }
}

impl Store {
    /// Does all of it. What cannot be done does not keep the rest from being done. Another who is at it is waited for
    /// so long.
    pub(crate) fn tidy(&self, within: Duration) -> Tidied {
        let mut done = Tidied::default();
        // First, because merging may need the room; and what is read for it is not read again.
        let collected = done.note(|| "collecting".to_owned(), self.collect_and_tell()).flatten();
        let (collected, read) = collected.map_or((None, None), |(collected, read)| (Some(collected), Some(read)));
        if let Some(_alone) = done.note(|| "waiting for somebody else who tidies".to_owned(), self.lock_tidying(within))
        {
            self.merge_long_chains(&mut done, read);
            self.hash_pending(&mut done);
        }
        done.note(|| "counting".to_owned(), self.recount());
        done.note(|| "sweeping downloads".to_owned(), self.sweep_downloads());
        done.collected = if done.merged == 0 {
            collected
        } else {
            let more = done.note(|| "collecting".to_owned(), self.collect()).flatten();
            collected.into_iter().chain(more).reduce(Collected::plus)
        };
        done
    }

    /// Does what there is to do about one snapshot. True when its layers were to be merged, so that some may be left
    /// over, whatever came of it.
    pub(crate) fn tidy_snapshot(&self, id: &SnapshotId, within: Duration) -> io::Result<bool> {
        let _alone = self.lock_tidying(within)?;
        let Some(SnapshotFile::Kept(mut record)) = self.read_snapshot(id)? else { return Ok(false) };
        let merged = is_long(&record).then(|| self.merge_layers(&record));
        if merged.is_some()
            && let Some(SnapshotFile::Kept(now)) = self.read_snapshot(id)?
        {
            record = now;
        }
        for layer in &record.of.saved {
            if self.layer(layer)?.is_some_and(|meta| meta.integrity == Integrity::Pending) {
                self.hash(layer)?;
            }
        }
        // What cannot be merged now is tried again by whoever looks at everything, and before it is too deep.
        Ok(merged.is_some())
    }

    /// One at a time does what takes long; others would do the same.
    fn lock_tidying(&self, within: Duration) -> io::Result<File> {
        lock_file(&self.tmp().with_file_name("tidy.lock"), true, within)
    }

    /// Removes what was fetched of images, in part or whole, and nobody went on with.
    fn sweep_downloads(&self) -> io::Result<()> {
        if fs::read_dir(self.data().downloads())?.next().is_none() {
            return Ok(());
        }
        let swept = (|| {
            let blobs = BlobDir::open(&self.data().downloads())?;
            blobs.sweep(DOWNLOAD_KEPT)?;
            for digest in blobs.digests()? {
                let age = fs::metadata(blobs.path(&digest)).and_then(|found| found.modified()).map(|at| at.elapsed());
                // Whoever unpacks it right now has it open, and fetches it again if it does not.
                if matches!(age, Ok(Ok(age)) if age >= DOWNLOAD_KEPT) {
                    blobs.remove(&digest)?;
                }
            }
            Ok(())
        })();
        swept.map_err(|error: BlobError| io::Error::other(error))
    }

    /// Hashes layers that were not hashed yet (L10).
    fn hash_pending(&self, done: &mut Tidied) {
        let Some(layers) = done.note(|| "hashing".to_owned(), self.layers()) else { return };
        for (id, meta) in layers {
            if meta.is_ok_and(|meta| meta.integrity == Integrity::Pending)
                && done.note(|| format!("hashing {id}"), self.hash(&id)).is_some()
            {
                done.hashed += 1;
            }
        }
    }

    fn hash(&self, id: &LayerId) -> io::Result<()> {
        // One at a time, so that whoever collects gets a turn.
        let _lock = self.lock_shared()?;
        let Some(meta) = self.layer(id)? else { return Ok(()) };
        let opened = self.open_layer(&meta)?;
        let (content, survey) = (viv_layer::content(&opened.parts())?, viv_layer::survey(&opened.parts())?);
        let (is_whole, looked_at) = (survey.same_structure(&meta.survey), meta.sealed_at_ms);
        self.update_layer(id, |meta| {
            // Somebody who checks may have been faster, or it was replaced.
            if meta.integrity == Integrity::Pending && meta.sealed_at_ms == looked_at {
                meta.content = is_whole.then_some(content);
                meta.integrity = if is_whole { Integrity::Verified } else { Integrity::Damaged };
            }
        })
    }

    fn merge_long_chains(&self, done: &mut Tidied, read: Option<References>) {
        let long = match read {
            Some(read) => read.into_long(),
            None => done.note(|| "merging".to_owned(), self.long_chains()).unwrap_or_default(),
        };
        for record in long {
            let id = &record.snapshot.id;
            // One that was changed or removed since it was read is left as it is.
            if done.note(|| format!("merging the layers of {id}"), self.merge_layers(&record)) == Some(true) {
                done.merged += 1;
            }
        }
    }

    /// For when collecting has to wait for somebody who builds, or cannot be done: what cannot be read is left out.
    fn long_chains(&self) -> io::Result<Vec<SnapshotRecord>> {
        let kept = self.all_snapshots()?.filter_map(|(_, file)| match file {
            Ok(SnapshotFile::Kept(record)) => Some(*record),
            Ok(SnapshotFile::Removed { .. }) | Err(_) => None,
        });
        Ok(kept.filter(is_long).collect())
    }

    /// What costs nothing to do: taking apart what is out of sight already, and seeing to it that disks are counted.
    pub(crate) fn tidy_trash(&self) -> io::Result<()> {
        self.empty_trash();
        self.recount()
    }

    /// How the folders look that tell of what is there: each record, layer and instance comes and goes by its name, so
    /// its folder is changed then. Two looks at the same store are equal when nothing came or went in between.
    pub(crate) fn looks(&self) -> io::Result<Looks> {
        use std::os::unix::fs::MetadataExt;
        let data = self.data();
        let folders = [
            data.instances(),
            data.snapshots(),
            data.images(),
            data.memory(),
            data.downloads(),
            self.sealed(),
            self.active(),
            self.tmp(),
        ];
        let look = |folder: PathBuf| fs::metadata(folder).map(|is| (is.ino(), is.mtime(), is.mtime_nsec()));
        folders.into_iter().map(look).collect::<io::Result<_>>().map(Looks)
    }

    /// Sees to it that a snapshot does not stand on more layers than are ever mounted, nor holds more than its limit
    /// only because of what was overwritten since. True when layers were to be merged.
    pub(crate) fn bound_depth(&self, id: &SnapshotId, limit_bytes: Option<u64>) -> io::Result<bool> {
        let Some(SnapshotFile::Kept(record)) = self.read_snapshot(id)? else { return Ok(false) };
        let half_full = match limit_bytes {
            Some(limit) if record.of.saved.len() > 1 && !record.snapshot.memory => {
                self.saved_bytes(&record.of)? > limit / 2
            }
            Some(_) | None => false,
        };
        let (_, depth_max) = depths(&record);
        if record.of.saved.len() > depth_max {
            self.merge_layers(&record)?;
        } else if half_full {
            // If there is no room to merge, what was asked for may fit all the same.
            let _ = self.merge_layers(&record);
        }
        Ok(half_full || record.of.saved.len() > depth_max)
    }

    /// Has a snapshot stand on one layer instead of many. Whoever uses the many keeps them; false when the snapshot
    /// was changed or removed meanwhile.
    fn merge_layers(&self, record: &SnapshotRecord) -> io::Result<bool> {
        let _lock = self.lock_shared()?;
        let place = self.new_layer_folder()?;
        let merged = (|| {
            let meta = self.merge_into(record, &place)?;
            let mut after = record.of.clone();
            after.saved = vec![meta.id.clone()];
            self.put_layer(&place, &meta)?;
            // If this does not come to pass, the new layer is collected.
            self.rewrite_snapshot(&record.snapshot.id, &record.of, &after)
        })();
        if merged.is_err() {
            let _ = self.discard(&place);
        }
        merged
    }

    fn merge_into(&self, record: &SnapshotRecord, place: &Path) -> io::Result<LayerMeta> {
        let metas = record.of.saved.iter().map(|layer| self.need_layer(layer)).collect::<io::Result<Vec<_>>>()?;
        let layers = metas.iter().map(|meta| self.open_layer(meta)).collect::<io::Result<Vec<_>>>()?;
        let target = OpenedLayer::open(place, LayerForm::Folder)?;
        fs::create_dir(target.parts())?;
        let names: BTreeSet<_> = metas.iter().flat_map(|meta| meta.parts.iter().cloned()).collect();
        let folders_of = |name: &String| {
            let having = metas.iter().zip(&layers).filter(|(meta, _)| meta.parts.contains(name));
            having.map(|(_, layer)| layer.part(name)).collect::<Vec<_>>()
        };
        for name in &names {
            let folders = folders_of(name);
            let folders: Vec<_> = folders.iter().map(PathBuf::as_path).collect();
            let below = self.below_saved(&record.of, name)?;
            viv_layer::merge_onto(&folders, &below.path, &target.part(name))?;
        }
        self.sync()?;
        for name in &names {
            let mut before = folders_of(name);
            before.push(self.empty());
            let (before, after) = (View::mount(&before)?, View::mount(&[target.part(name), self.empty()])?);
            if !viv_layer::survey(&before.path())?.same_structure(&viv_layer::survey(&after.path())?) {
                let what = format!("merging the layers of {} would change them", record.snapshot.id);
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
        let id: LayerId = format!("merged-{}", super::unique().replace('.', "-")).parse()?;
        let survey = viv_layer::survey(&target.parts())?;
        Ok(LayerMeta {
            id,
            form: LayerForm::Folder,
            parts: names.into_iter().collect(),
            survey,
            content: None,
            integrity: Integrity::Pending,
            sealed_at_ms: now_wall_ms(),
            highest_inode: None,
        })
    }
}
