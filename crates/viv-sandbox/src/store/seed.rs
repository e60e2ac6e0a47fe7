//! Inode numbers that no two files of a sandbox share, on btrfs.
//!
//! ```text
//!   layers/                one subvolume: all layers that were brought in or merged are folders here
//!   layers/seed/number     a file with a high number
//!   layers/active/<…>/     a snapshot of the seed, if anything below is on the same filesystem
//! ```
//!
//! The numbers of every subvolume begin anew, and overlayfs shows those of one filesystem as they are. So a file of a
//! writable layer could have the number of one below, and programs that tell files apart by it pass over folders.
//! Nothing sets a number, but a subvolume goes on after the highest that is in it. So a writable layer begins as a
//! snapshot of the *seed*, in which one file has a higher number than all that will be below. What is saved of it, and
//! made from that, keeps its numbers.
//!
//! Moving the seed on takes a file for each number, some 20 µs. Whoever brings layers in does it at the end, for as many
//! as that took itself.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::Store;
use super::driver::{Driver, is_btrfs, make_subvolume};
use super::layer::LayerMeta;
use super::plan::{Base, MadeOf};
use crate::lock::lock_file;
use crate::sys::btrfs;

/// The file of the seed that has the highest number.
const NUMBER: &str = "number";

/// Moving the seed on takes that long for some 100,000 files; others wait meanwhile.
const MOVE_WITHIN: Duration = Duration::from_secs(30);

/// Numbers ahead, so that the few files that the store itself writes do not have the seed moved on each time.
const AHEAD: u64 = 256;

/// Whoever makes a sandbox waits for no more than these, which is a second. A machine's own subvolume can have had
/// millions of files; the next ones go on from there.
const AT_ONCE_MAX: u64 = 50_000;

/// Makes the folder of all layers, with numbers of its own where that is to be had: those of a machine's own subvolume
/// may be in the millions.
pub(super) fn make_layers_folder(layers: &Path) -> io::Result<()> {
    let folder = layers.parent().filter(|_| !layers.exists());
    if folder.is_some_and(|folder| is_btrfs(folder).unwrap_or(false)) && make_subvolume(layers).is_ok() {
        return fs::set_permissions(layers, std::os::unix::fs::PermissionsExt::from_mode(0o700));
    }
    DirBuilder::new().recursive(true).mode(0o700).create(layers)
}

impl Store {
    fn seed(&self) -> PathBuf {
        self.layers.join("seed")
    }

    /// Makes a writable layer whose files have other numbers than those that will be below it.
    pub(super) fn make_numbered(&self, folder: &Path, of: &MadeOf) -> io::Result<()> {
        let above = self.highest_below(of)?;
        if above == 0 {
            return make_subvolume(folder);
        }
        self.move_seed(above, AT_ONCE_MAX)?;
        self.driver.snapshot(&self.seed(), folder)
    }

    /// A layer that was just made, with what its numbers go up to. Writable layers begin above those from now on, however
    /// many they are. What was a writable layer itself has its numbers.
    pub(super) fn numbered(&self, folder: &Path, meta: &LayerMeta) -> io::Result<LayerMeta> {
        let mut meta = meta.clone();
        if matches!(self.driver, Driver::Btrfs { .. }) && !self.driver.is_subvolume(folder) {
            let highest = btrfs::highest_inode(File::open(folder)?)?;
            self.move_seed(highest, u64::MAX)?;
            meta.highest_inode = Some(highest);
        }
        Ok(meta)
    }

    /// The highest number of what will be below on the same filesystem; 0 if nothing is.
    fn highest_below(&self, of: &MadeOf) -> io::Result<u64> {
        let (mut highest, mut folders) = (0, Vec::new());
        for layer in of.layers() {
            match self.need_layer(layer)?.highest_inode {
                Some(known) => highest = highest.max(known),
                // A subvolume, from before this was kept in mind.
                None => folders.push(self.sealed_folder(layer)),
            }
        }
        match &of.base {
            Base::Host => {
                folders.push(self.host.skeleton.clone());
                folders.extend(self.host.trees.iter().map(|name| Path::new("/").join(name)));
            }
            Base::Directory { path } => folders.push(path.clone()),
            Base::Nothing => {}
        }
        let ours = btrfs::filesystem_name(File::open(&self.layers)?)?;
        let mut seen = Vec::new();
        for folder in folders {
            let opened = File::open(&folder)?;
            // Each subvolume has a device number of its own.
            let device = opened.metadata()?.dev();
            if seen.contains(&device) || !is_btrfs(&folder)? || btrfs::filesystem_name(&opened)? != ours {
                continue;
            }
            seen.push(device);
            highest = highest.max(btrfs::highest_inode(&opened)?);
        }
        Ok(highest)
    }

    /// Sees to it that what is made in a snapshot of the seed has numbers above this one, or at least `at_once` further
    /// than before.
    fn move_seed(&self, above: u64, at_once: u64) -> io::Result<()> {
        let seed = self.seed();
        let number = || match fs::symlink_metadata(seed.join(NUMBER)) {
            Ok(found) => Ok(found.ino()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        };
        if number()? >= above {
            return Ok(());
        }
        let _lock = lock_file(&self.data().seed_lock(), true, MOVE_WITHIN)?;
        let now = number()?;
        if now >= above {
            return Ok(());
        }
        if !seed.exists() {
            make_subvolume(&seed)?;
        }
        let wanted = above.saturating_add(AHEAD).min(now.saturating_add(at_once));
        // Each takes a number with it. The last one stays.
        let folder = File::open(&seed)?;
        let unnamed = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        while File::from(openat(&folder, ".", unnamed, Mode::RUSR)?).metadata()?.ino() < wanted {}
        let next = seed.join("next");
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        gone_is_fine(fs::remove_file(&next))?;
        openat(CWD, &next, flags | OFlags::EXCL, Mode::RUSR)?;
        fs::rename(&next, seed.join(NUMBER))
    }
}

fn gone_is_fine(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
