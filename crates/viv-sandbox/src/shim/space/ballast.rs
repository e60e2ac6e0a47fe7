//! Room that is taken in advance, to be given back when there is none left.
//!
//! A watcher sees what is written soon enough, but not what is allocated in one call: `fallocate` takes all there is
//! in an instant. The ballast is what all others have then. It has several parts, since there may be several who do it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use super::level::Room;
use crate::store::driver::is_btrfs;
use crate::sys::btrfs;

/// How many parts it has. Each is given back once.
const PARTS: u64 = 4;

/// What one takes of a disk, as a divisor, and the most: of bytes, and of files where their number is bounded.
const SHARE: u64 = 256;
const BYTES_MAX: u64 = 64 << 20;
/// Few: the first sandbox of a data folder waits while they are made, and a large disk has its reserve.
const FILES_MAX: u64 = 16;

/// Where files are memory, nothing is put aside.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The file that has the bytes. It is made last: a part that has it is whole.
const BYTES: &str = "bytes";

/// What a part takes of this disk, as bytes and files.
fn part_of(room: &Room) -> (u64, u64) {
    let files = room.inodes.map_or(0, |inodes| (inodes.total / SHARE).min(FILES_MAX));
    ((room.bytes.total / SHARE).min(BYTES_MAX), files)
}

/// Has all of it be there. A disk that cannot allocate in advance has none.
pub(super) fn keep(folder: &Path, room: &Room) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if rustix::fs::statfs(folder)?.f_type as i64 == TMPFS_MAGIC {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "this disk is memory"));
    }
    (0..PARTS).try_for_each(|part| {
        let part = folder.join(part.to_string());
        let kept = keep_part(&part, room);
        if kept.is_err() {
            let _ = fs::remove_dir_all(&part);
        }
        kept
    })
}

fn keep_part(part: &Path, room: &Room) -> io::Result<()> {
    let (bytes, files) = part_of(room);
    if fs::metadata(part.join(BYTES)).is_ok_and(|found| found.len() == bytes) {
        return Ok(());
    }
    DirBuilder::new().recursive(true).create(part)?;
    for number in 0..files {
        File::options().create(true).append(true).open(part.join(number.to_string()))?;
    }
    let file = File::create(part.join(BYTES))?;
    Ok(fallocate(&file, FallocateFlags::empty(), 0, bytes)?)
}

/// What is there of it, in bytes.
pub(super) fn bytes_in(folder: &Path) -> u64 {
    let length = |part: u64| Some(fs::metadata(folder.join(part.to_string()).join(BYTES)).ok()?.len());
    (0..PARTS).filter_map(length).sum()
}

/// Gives one part back if there is less left than it holds; false when there is enough, or no part.
pub(super) fn give_back(folder: &Path, room: &Room) -> bool {
    let (bytes, files) = part_of(room);
    let is_short = room.bytes.free < bytes || room.inodes.is_some_and(|inodes| inodes.free < files);
    let given = is_short && (0..PARTS).any(|part| fs::remove_dir_all(folder.join(part.to_string())).is_ok());
    if given && is_btrfs(folder).unwrap_or(false) {
        // It helps as soon as it can, and no sooner.
        let _ = File::open(folder).and_then(btrfs::give_back_removed);
    }
    given
}
