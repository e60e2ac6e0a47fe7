//! The layer store: what sandboxes are made of, and what is saved of them.
//!
//! ```text
//!   <data>/
//!     store.json        which driver; chosen once
//!     store.lock        shared by who builds or refers, exclusive by who collects (store.gate: who waits for that)
//!     snapshots/<snp>.json   memory/<snp>/   images/<name>.json   downloads/
//!     pool.btrfs        the pool, where the driver is `btrfs` and the data folder is not on one
//!     layers/           (the pool is mounted here)
//!       active/<sandbox>.<generation>/   writable: parts/ work/, or disk.img
//!       sealed/<layer>/  sealed/<layer>.json
//!       seed/             on btrfs: what writable layers begin with, see `seed`
//!       tmp/              being built: nothing in it counts
//!       trash/            on its way out
//!       empty/            what is below everything
//!       ballast           room that is given back when there is none left: see `shim::space`
//! ```
//!
//! A root is an overlay: the instance's writable layer, above layers that were
//! saved, above layers of an image, above a base. Layers are immutable, named,
//! and referred to by the records of instances, snapshots and images. What
//! nobody refers to is collected.
//!
//! **Crash safety.** A layer is there when its file is. That is written after
//! its content was synced, surveyed and moved in place, and before any record
//! that refers to it; a record goes before its layers do. So whatever a crash
//! leaves is either whole, or nothing refers to it.
//!
//! **Who may collect.** Whoever builds a layer, or reads a record in order to
//! refer to the layers in it, holds `store.lock` shared until its own record is
//! in place. Collecting holds it exclusively, so it sees all references, and
//! may take everything in `tmp` for left behind.

pub(crate) mod active;
pub(crate) mod check;
pub(crate) mod collect;
pub(crate) mod disk;
pub(crate) mod driver;
pub(crate) mod error;
pub(crate) mod image;
pub(crate) mod layer;
pub(crate) mod numbers;
pub(crate) mod oci;
pub(crate) mod plan;
pub(crate) mod pool;
pub(crate) mod project;
pub(crate) mod seal;
mod seed;
pub(crate) mod snapshot;
pub(crate) mod tidy;
pub(crate) mod transfer;
pub(crate) mod view;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viv_layer::Marks;

use crate::durable;
use crate::layout::DataDir;
use crate::lock::lock_file;
use crate::ordinary::{Standing, why_one_id};
use crate::rootfs::HostBase;
use crate::trash;
use driver::{Driver, DriverKind, is_btrfs};

/// Whoever collects holds the lock for as long as it takes to read all records and to rename what goes.
const SHARED_WITHIN: Duration = Duration::from_secs(10);

/// Whoever builds a layer may hold the lock for minutes; collecting can wait for the next time. Everybody else waits
/// meanwhile, so it is short: who only makes a record is out by then.
const EXCLUSIVE_WITHIN: Duration = Duration::from_millis(30);

/// What is built for longer than this is worth a look whether anybody still does.
const LEFT_AFTER: Duration = Duration::from_secs(600);

/// Making a pool takes seconds.
const CHOOSE_WITHIN: Duration = Duration::from_secs(60);

/// Longer than collecting holds them, unless whoever does was stopped in the middle.
const STUCK_AFTER: Duration = Duration::from_millis(500);

/// How layers are to be kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreConfig {
    /// Which driver; by default `btrfs` where the data folder is on one, and `plain` elsewhere.
    pub driver: Option<DriverKind>,
    /// Size of the pool that is made where `btrfs` is asked for elsewhere.
    pub pool_bytes: Option<u64>,
}

/// What was chosen when the store was made. Another choice would not find the layers.
#[derive(Debug, Serialize, Deserialize)]
struct Chosen {
    version: u32,
    driver: DriverKind,
    pool: bool,
    /// Where overlays keep their marks: those of root are none to a user's, and the other way round.
    #[serde(default)]
    marks: Marks,
    /// How many ids there are in the namespace that they were written in; `None` for all. With others their owners
    /// would be others, too.
    #[serde(default)]
    ids: Option<u32>,
}

const VERSION: u32 = 1;

/// The layer store of a data folder. Any number of processes may use it at a time.
#[derive(Debug)]
pub(crate) struct Store {
    data: DataDir,
    layers: PathBuf,
    host: HostBase,
    pub(crate) driver: Driver,
}

/// Keeps others from collecting, or from building, until dropped.
#[derive(Debug)]
pub(crate) struct StoreLock {
    _file: File,
}

impl Store {
    /// Opens the store of a data folder, making it if there is none.
    pub(crate) fn open(data: &DataDir, config: StoreConfig, host: HostBase) -> io::Result<Self> {
        let layers = data.layers();
        seed::make_layers_folder(&layers)?;
        let chosen = choose(data, config)?;
        if chosen.pool {
            pool::mount(&data.pool(), config.pool_bytes, &layers)?;
        }
        for folder in ["active", "sealed", "tmp", "trash", "empty"] {
            // Layers hold set-id files under unmapped ids: nobody else may come near. What is below everything is a
            // part of roots, so anyone may look into that.
            let mode = if folder == "empty" { 0o755 } else { 0o700 };
            DirBuilder::new().recursive(true).mode(mode).create(layers.join(folder))?;
        }
        for folder in [data.snapshots(), data.images(), data.downloads(), data.memory()] {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let driver = Driver::open(chosen.driver, &layers)?;
        Ok(Self { data: data.clone(), layers, host, driver })
    }

    /// Whether somebody died while taking things apart, or, some time ago, while building them.
    pub(crate) fn has_trash(&self) -> bool {
        let entries = |folder: &str| fs::read_dir(self.layers.join(folder)).into_iter().flatten().flatten();
        let is_old = |entry: fs::DirEntry| {
            let changed = entry.metadata().and_then(|found| found.modified());
            changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_AFTER))
        };
        entries("trash").next().is_some() || entries("tmp").any(is_old)
    }

    pub(crate) fn active(&self) -> PathBuf {
        self.layers.join("active")
    }

    pub(crate) fn sealed(&self) -> PathBuf {
        self.layers.join("sealed")
    }

    pub(crate) fn empty(&self) -> PathBuf {
        self.layers.join("empty")
    }

    pub(crate) fn data(&self) -> &DataDir {
        &self.data
    }

    /// Held while a layer is built, or while the layers of a record are about to be referred to by another.
    pub(crate) fn lock_shared(&self) -> io::Result<StoreLock> {
        // Whoever wants to collect closes the gate, so that it gets a turn although others come and go all the time.
        drop(lock_file(&self.data.store_gate(), false, SHARED_WITHIN)?);
        lock_file(&self.data.store_lock(), false, SHARED_WITHIN).map(|file| StoreLock { _file: file })
    }

    /// Held while what nobody refers to is taken away; `None` while somebody builds.
    pub(crate) fn lock_exclusive(&self) -> io::Result<Option<StoreLock>> {
        let locked = lock_file(&self.data.store_gate(), true, EXCLUSIVE_WITHIN)
            .and_then(|_gate| lock_file(&self.data.store_lock(), true, EXCLUSIVE_WITHIN));
        match locked {
            Ok(file) => Ok(Some(StoreLock { _file: file })),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A name in `tmp` that nobody else has.
    pub(crate) fn new_place(&self) -> PathBuf {
        self.layers.join("tmp").join(unique())
    }

    /// An empty folder for a layer that is being built.
    pub(crate) fn new_layer_folder(&self) -> io::Result<PathBuf> {
        let place = self.new_place();
        // Not a subvolume on btrfs either: all of these have different numbers (`seed`).
        driver::make_folder(&place)?;
        Ok(place)
    }

    /// Takes something out of sight in one step, and then apart.
    pub(crate) fn discard(&self, path: &Path) -> io::Result<()> {
        self.hide(path)?.map_or(Ok(()), |hidden| self.take_apart(&hidden))
    }

    /// Takes something out of sight in one step. What this answers is left to be taken apart.
    pub(crate) fn hide(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        // Those go in one step by themselves, and sealed ones cannot be moved.
        if self.driver.is_subvolume(path) {
            return self.driver.remove(path).map(|()| None);
        }
        let trash = self.layers.join("trash").join(unique());
        match fs::rename(path, &trash) {
            Ok(()) => Ok(Some(trash)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes apart what was hidden.
    pub(crate) fn take_apart(&self, hidden: &Path) -> io::Result<()> {
        trash::take_apart(hidden, |folder| self.driver.remove(folder))
    }

    /// What a process left that died while it took things apart.
    pub(crate) fn empty_trash(&self) {
        trash::empty(&self.layers.join("trash"), |folder| self.driver.remove(folder));
    }

    /// Writes everything out that is not on disk yet.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.layers)?)?)
    }

    /// Has the kernel count anew what sandboxes have on disk, if it lost count.
    pub(crate) fn recount(&self) -> io::Result<()> {
        self.driver.recount(&self.layers)
    }

    pub(crate) fn tmp(&self) -> PathBuf {
        self.layers.join("tmp")
    }
}

/// Whoever holds everybody else up holds nobody any more. Only for who knows that it can do nothing: an owner that was
/// killed while it was frozen, perhaps in the middle of collecting (J8). Those who build let others build.
pub(crate) fn renew_locks(data: &DataDir) -> io::Result<()> {
    for path in [data.store_gate(), data.store_lock()] {
        match lock_file(&path, false, STUCK_AFTER) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => fs::remove_file(&path)?,
            taken => drop(taken?),
        }
    }
    Ok(())
}

fn choose(data: &DataDir, config: StoreConfig) -> io::Result<Chosen> {
    let (file, marks) = (data.store(), Marks::of_this_process());
    let ids = match Standing::of_this_process()? {
        Standing::Mapped { ids } => Some(ids),
        Standing::Root | Standing::Ordinary => None,
    };
    // Two who open a new folder at once choose the same.
    let _lock = if file.exists() { None } else { Some(lock_file(&data.store_gate(), true, CHOOSE_WITHIN)?) };
    if let Some(chosen) = durable::read_json::<Chosen>(&file)? {
        if chosen.version != VERSION {
            let what = format!("the layer store has version {}, this program knows {VERSION}", chosen.version);
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        if config.driver.is_some_and(|asked| asked != chosen.driver) {
            let what = format!(
                "layers are kept by the {} driver here, and cannot be found by another: use another data folder",
                chosen.driver
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if chosen.marks != marks {
            let whose = match chosen.marks {
                Marks::Trusted => "root of a machine",
                Marks::User => "an ordinary user",
            };
            let what = format!("its layers were written by {whose}, who alone can use them: use another data folder");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        if chosen.ids != ids {
            let (before, now) = (count_of(chosen.ids), count_of(ids));
            let why = why_one_id().map(|why| format!(" ({why})")).unwrap_or_default();
            let what = format!(
                "its layers were written with {before}, and there are {now} now{why}: their owners would not be the same"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        return Ok(chosen);
    }
    if marks == Marks::User && config.driver == Some(DriverKind::Btrfs) {
        let what = "the btrfs driver takes root of the machine: use the plain one";
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    // Subvolumes are an ordinary user's to make, not to limit, nor everywhere to remove.
    let native = marks == Marks::Trusted && is_btrfs(&data.layers())?;
    let driver = config.driver.unwrap_or(if native { DriverKind::Btrfs } else { DriverKind::Plain });
    let chosen = Chosen { version: VERSION, driver, pool: driver == DriverKind::Btrfs && !native, marks, ids };
    if chosen.pool {
        // A pool that cannot be made is not chosen.
        pool::mount(&data.pool(), config.pool_bytes, &data.layers())?;
    }
    durable::replace_json(&file, &chosen)?;
    Ok(chosen)
}

fn count_of(ids: Option<u32>) -> String {
    ids.map_or_else(|| "all ids".to_owned(), |ids| format!("{ids} ids"))
}

/// A name that nobody else gives.
pub(crate) fn unique() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("{}.{}.{}", std::process::id(), crate::shim::now_wall_ms(), COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j8_who_was_frozen_while_it_collected_holds_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::new(folder.path().to_owned());
        let builds = lock_file(&data.store_gate(), false, Duration::ZERO).unwrap();
        let stuck = lock_file(&data.store_lock(), true, Duration::ZERO).unwrap();
        assert!(lock_file(&data.store_lock(), false, Duration::ZERO).is_err());
        renew_locks(&data).unwrap();
        drop(lock_file(&data.store_lock(), false, Duration::ZERO).unwrap());
        // Who builds held nobody up, and is waited for by who collects.
        assert!(lock_file(&data.store_gate(), true, Duration::ZERO).is_err());
        drop((builds, stuck));
    }
}
