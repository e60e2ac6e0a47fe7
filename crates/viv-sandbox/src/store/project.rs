//! A project for a writable layer: how `plain` limits a folder where the filesystem counts projects.
//!
//! The folder of the layer has a project of its own and hands it on to all that is made in it, so the folder is the only
//! record of it. Sealed layers keep theirs, without a limit; nobody else gets it while anything is charged to it.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::rand::{GetRandomFlags, getrandom};

use super::disk::BYTES_PER_INODE;
use crate::sys::quota::{self, Charged, Limit};

/// Ours begin here: those that people give by hand, and other programs count up, are small.
const FIRST: u32 = 1 << 30;

/// xfs keeps some space for each number that was ever used, so they are drawn from few as long as that will do.
const DRAWN_FROM_BITS: u32 = 16;

/// After so many that were taken, they are drawn from twice as many.
const TRIES_PER_BIT: u32 = 16;

/// From this many they are drawn at last: more than there can be layers.
const DRAWN_FROM_BITS_MAX: u32 = 28;

/// Whether layers in this folder can each have a project.
pub(crate) fn are_usable(layers: &Path) -> io::Result<bool> {
    let layers = File::open(layers)?;
    // Only who may limit projects may ask about them, which root of a user namespace may not.
    let may_limit = quota::is_enforced(&layers) && quota::charged(&layers, FIRST).is_ok();
    // What is in a project of somebody else's stays in that: nothing can be moved between two.
    Ok(may_limit && quota::handed_on(&layers)?.is_none())
}

/// Gives an empty folder a project that nobody else has.
pub(crate) fn begin(folder: &Path) -> io::Result<()> {
    let folder = File::open(folder)?;
    for bits in DRAWN_FROM_BITS..=DRAWN_FROM_BITS_MAX {
        for _ in 0..TRIES_PER_BIT {
            let project = draw(bits)?;
            if quota::charged(&folder, project)? != Charged::default() {
                continue;
            }
            quota::hand_on(&folder, project)?;
            // Two who draw the same at once both see two folders in it, and both draw again.
            let Charged { inodes, limit, .. } = quota::charged(&folder, project)?;
            if (inodes, limit) == (1, None) {
                return Ok(());
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "every project that was tried is somebody's"))
}

fn draw(bits: u32) -> io::Result<u32> {
    let mut bytes = [0; 4];
    getrandom(&mut bytes[..], GetRandomFlags::empty())?;
    Ok(FIRST | (u32::from_ne_bytes(bytes) & ((1 << bits) - 1)))
}

/// The project of a folder, if it is one of ours.
fn of(folder: &File) -> io::Result<Option<u32>> {
    let last = FIRST | ((1 << DRAWN_FROM_BITS_MAX) - 1);
    Ok(quota::handed_on(folder)?.filter(|project| (FIRST..=last).contains(project)))
}

/// Limits what a folder may hold, or takes its limit away.
pub(crate) fn limit(folder: &Path, bytes: Option<u64>) -> io::Result<()> {
    let folder = File::open(folder)?;
    match (of(&folder)?, bytes) {
        (Some(project), Some(bytes)) => {
            // As many as a filesystem of that size would have. Empty files take no space, and a filesystem that many
            // share has only so many.
            let limit = Limit { bytes, inodes: (bytes / BYTES_PER_INODE).max(1) };
            quota::limit(&folder, project, Some(limit))
        }
        (Some(project), None) => match quota::charged(&folder, project) {
            // Only what has one: the kernel would write a record of it otherwise.
            Ok(Charged { limit: Some(_), .. }) => quota::limit(&folder, project, None),
            Ok(Charged { limit: None, .. }) => Ok(()),
            // Somebody has turned quotas off meanwhile, and all limits with them.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            Err(error) => Err(error),
        },
        (None, None) => Ok(()),
        (None, Some(_)) => Err(io::Error::new(io::ErrorKind::NotFound, "its folder has no project to limit")),
    }
}

/// What is in a folder, by the filesystem's own count.
pub(crate) fn counted_bytes(folder: &Path) -> Option<u64> {
    let folder = File::open(folder).ok()?;
    let project = of(&folder).ok()??;
    Some(quota::charged(&folder, project).ok()?.bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::driver::{self, Driver, DriverKind, LimitedBy};
    use super::*;
    use crate::test_disk::{TestDisk, WITH_PROJECTS, eventually};

    #[test]
    fn every_layer_has_its_own_project_and_leaves_nothing_of_it() {
        for mkfs in WITH_PROJECTS {
            let Some(disk) = TestDisk::with_projects(mkfs) else { continue };
            let driver = Driver::open(DriverKind::Plain, disk.path()).unwrap();
            assert_eq!(driver.limited_by(), Ok(LimitedBy::ProjectQuota));
            let (one, other) = (disk.path().join("one"), disk.path().join("other"));
            let project = |folder: &Path| of(&File::open(folder).unwrap()).unwrap().unwrap();
            let found = |project| quota::charged(File::open(disk.path()).unwrap(), project).unwrap();
            for folder in [&one, &other] {
                driver.make_limited(folder).unwrap();
                driver::limit(folder, 64 << 20).unwrap();
                fs::write(folder.join("file"), vec![7; 100_000]).unwrap();
            }
            let (first, second) = (project(&one), project(&other));
            assert_ne!(first, second);
            assert_eq!(found(first).limit, Some(Limit { bytes: 64 << 20, inodes: 8192 }));
            let counted = driver.counted(&one).unwrap();
            assert!(counted.exclusive_bytes >= 100_000 && counted.referenced_bytes < 1 << 20, "{counted:?}");

            // What is sealed keeps its project, so that nobody else gets it.
            let sealed = disk.path().join("sealed");
            fs::rename(&one, &sealed).unwrap();
            driver.seal(&sealed).unwrap();
            driver.seal(&sealed).unwrap();
            assert_eq!((found(first).inodes, found(first).limit), (2, None));
            assert!(found(second).limit.is_some(), "another one's limit was taken away");
            for folder in [&sealed, &other] {
                driver.remove(folder).unwrap();
                driver.remove(folder).unwrap();
            }
            for project in [first, second] {
                eventually(|| found(project) == Charged::default());
            }
            // A layer without a limit has no project, and is none the worse.
            driver.make(&one).unwrap();
            driver.seal(&one).unwrap();
            assert!(driver.counted(&one).is_none() && driver::limit(&one, 1 << 20).is_err());
            driver.remove(&one).unwrap();
        }
    }

    /// Nothing could be moved from a project of ours into another.
    #[test]
    fn a_data_folder_in_a_project_of_somebody_elses_is_left_in_it() {
        for mkfs in WITH_PROJECTS {
            let Some(disk) = TestDisk::with_projects(mkfs) else { continue };
            let layers = disk.path().join("layers");
            fs::create_dir(&layers).unwrap();
            assert!(are_usable(&layers).unwrap());
            quota::hand_on(File::open(&layers).unwrap(), 5).unwrap();
            assert!(!are_usable(&layers).unwrap());
            let driver = Driver::open(DriverKind::Plain, &layers).unwrap();
            assert_eq!(driver.limited_by(), Ok(LimitedBy::OwnFilesystem));
        }
    }
}
