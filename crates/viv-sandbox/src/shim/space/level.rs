//! When the disk has to be looked at again, and when somebody has to be judged: numbers alone.
//!
//! ```text
//!   free   ─────────────╲                          roomy: all is well, and this is what a fall is measured from
//!   2 × reserve ─────────╲──────────────
//!   reserve ──────────────╲───────────── floor     below it: judged
//!                          ╲___ ended
//!   an eighth of the rest ──────╲─────── floor     what is left may be used; who takes nearly all of it is judged too
//! ```
//!
//! Who is judged is whoever took most **since the disk was last roomy or somebody was last judged**. So a disk that is
//! full of old things, or that others than sandboxes fill, ends nobody.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::store::driver::is_btrfs;
use crate::sys::btrfs;

/// The part of a disk that is kept free, as a divisor.
const RESERVE_SHARE: u64 = 20;

/// No more than this is kept free, however large the disk: it is what can be written while a watcher wakes up.
const RESERVE_BYTES_MAX: u64 = 2 << 30;

/// The same for files.
const RESERVE_INODES_MAX: u64 = 50_000;

/// What is less than this part of the reserve is next to nothing, as a divisor.
const GONE_SHARE: u64 = 8;

/// What is left below the reserve may be used but for this part, as a divisor: those who need little get it.
const REST_SHARE: u64 = 8;

/// Where there is a little more than the reserve one day and a little less the next, nobody is judged for the little.
const MATTERS_SHARE: u64 = 8;

/// Less than this part of the reserve is nothing to take, as a divisor: where that is all that was left, whoever takes it
/// only wants to write something. A part of the ballast is several times as much.
const NOTHING_SHARE: u64 = 64;

/// What can be taken in a second by writing: memory is written to first, and then the disk sets the pace.
const BYTES_PER_S: u64 = 2 << 30;
const INODES_PER_S: u64 = 100_000;

/// How often the disk is looked at: one call of the kernel each.
const LOOK_AFTER_MIN: Duration = Duration::from_millis(20);
const LOOK_AFTER_MAX: Duration = Duration::from_secs(5);

/// How much there is of something, and how much of it sandboxes can still take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Amount {
    pub(super) total: u64,
    pub(super) free: u64,
}

impl Amount {
    /// What is to be kept free of so much.
    fn reserve(self, most: u64) -> u64 {
        (self.total / RESERVE_SHARE).min(most)
    }
}

/// What a filesystem has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Room {
    pub(super) bytes: Amount,
    /// `None` where files are not numbered in advance.
    pub(super) inodes: Option<Amount>,
}

impl Room {
    /// Of the filesystem that a folder is on.
    pub(super) fn of(folder: &Path) -> io::Result<Self> {
        let found = rustix::fs::statvfs(folder)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        // Whoever took it is found by when it was taken, so it is not to be seen only when it is written out.
        let promised = if is_btrfs(folder)? { btrfs::promised_bytes(File::open(folder)?).unwrap_or(0) } else { 0 };
        Ok(Self {
            bytes: Amount { total: bytes(found.f_blocks), free: bytes(found.f_bavail).saturating_sub(promised) },
            // Btrfs has none.
            inodes: (found.f_files > 0).then_some(Amount { total: found.f_files, free: found.f_favail }),
        })
    }
}

impl Room {
    /// What is to be kept free.
    pub(super) fn reserves(&self) -> (u64, Option<u64>) {
        let inodes = self.inodes.map(|inodes| inodes.reserve(RESERVE_INODES_MAX));
        (self.bytes.reserve(RESERVE_BYTES_MAX), inodes)
    }

    /// Whether next to nothing is left: a writer that is seen in time leaves most of the reserve.
    pub(super) fn is_gone(&self, what: Scarce) -> bool {
        let (amount, most) = match (what, self.inodes) {
            (Scarce::Inodes, Some(inodes)) => (inodes, RESERVE_INODES_MAX),
            (Scarce::Inodes, None) | (Scarce::Bytes, _) => (self.bytes, RESERVE_BYTES_MAX),
        };
        amount.free < amount.reserve(most) / GONE_SHARE
    }
}

/// What runs out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scarce {
    Bytes,
    Inodes,
}

/// There is less than there has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fallen {
    pub(super) what: Scarce,
    /// What was taken since that second.
    pub(super) by: u64,
    pub(super) since_s: i64,
}

/// How it stands with bytes and files.
#[derive(Debug)]
pub(super) struct Levels {
    bytes: Level,
    inodes: Option<Level>,
}

#[derive(Debug)]
struct Level {
    reserve_max: u64,
    per_s: u64,
    /// Below it somebody is judged.
    floor: u64,
    /// What there was, and when, from where a fall is measured.
    free_before: u64,
    since_s: i64,
}

impl Levels {
    pub(super) fn new(room: &Room, now_s: i64) -> Self {
        Self {
            bytes: Level::new(room.bytes, RESERVE_BYTES_MAX, BYTES_PER_S, now_s),
            inodes: room.inodes.map(|inodes| Level::new(inodes, RESERVE_INODES_MAX, INODES_PER_S, now_s)),
        }
    }

    /// Takes in what is found, and says whether somebody has to be judged for it.
    pub(super) fn look(&mut self, room: &Room, now_s: i64) -> Option<Fallen> {
        let bytes = self.bytes.look(room.bytes, now_s);
        let inodes = self.inodes.as_mut().zip(room.inodes).and_then(|(level, inodes)| level.look(inodes, now_s));
        let fallen = |what| move |(by, since_s)| Fallen { what, by, since_s };
        bytes.map(fallen(Scarce::Bytes)).or(inodes.map(fallen(Scarce::Inodes)))
    }

    /// Somebody was judged, and this was left: who goes on is measured from there.
    pub(super) fn judged(&mut self, room: &Room, now_s: i64) {
        self.bytes.begin(room.bytes, now_s);
        if let (Some(level), Some(inodes)) = (&mut self.inodes, room.inodes) {
            level.begin(inodes, now_s);
        }
    }

    /// Whether there is so much that some of it can be put aside.
    pub(super) fn is_roomy(&self, room: &Room) -> bool {
        room.bytes.free >= 2 * room.bytes.reserve(self.bytes.reserve_max)
    }

    /// How long it takes at least until somebody has to be judged.
    pub(super) fn patience(&self, room: &Room) -> Duration {
        let inodes = self.inodes.as_ref().zip(room.inodes).map(|(level, inodes)| level.patience(inodes));
        let shorter = inodes.unwrap_or(Duration::MAX).min(self.bytes.patience(room.bytes));
        shorter.clamp(LOOK_AFTER_MIN, LOOK_AFTER_MAX)
    }
}

impl Level {
    fn new(amount: Amount, reserve_max: u64, per_s: u64, now_s: i64) -> Self {
        let mut level = Self { reserve_max, per_s, floor: 0, free_before: 0, since_s: now_s };
        level.begin(amount, now_s);
        level
    }

    /// What happened before does not count.
    fn begin(&mut self, amount: Amount, now_s: i64) {
        let reserve = amount.reserve(self.reserve_max);
        self.floor = if amount.free < reserve { amount.free / REST_SHARE } else { reserve };
        (self.free_before, self.since_s) = (amount.free, now_s);
    }

    /// What was taken and since when, if it is too much.
    fn look(&mut self, amount: Amount, now_s: i64) -> Option<(u64, i64)> {
        let reserve = amount.reserve(self.reserve_max);
        if amount.free >= 2 * reserve {
            self.begin(amount, now_s);
        } else if amount.free > self.free_before {
            // What was taken before was given back.
            (self.free_before, self.since_s) = (amount.free, now_s);
        }
        if amount.free >= reserve {
            self.floor = reserve;
        }
        if amount.free >= self.floor {
            return None;
        }
        let fallen_by = self.free_before.saturating_sub(amount.free);
        let matters = if self.floor == reserve { MATTERS_SHARE } else { NOTHING_SHARE };
        if fallen_by < reserve / matters {
            self.begin(amount, now_s);
            return None;
        }
        Some((fallen_by, self.since_s))
    }

    fn patience(&self, amount: Amount) -> Duration {
        Duration::from_millis(amount.free.saturating_sub(self.floor).saturating_mul(1000) / self.per_s)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::test_disk::TestDisk;

    #[test]
    fn s1_what_is_promised_and_not_written_yet_is_not_free_on_btrfs() {
        let disk = match TestDisk::mount(&["mkfs.btrfs", "-q"], &[]) {
            Ok(disk) => disk,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return eprintln!("mounting takes root"),
            Err(error) => panic!("{error}"),
        };
        let free = || Room::of(disk.path()).unwrap().bytes.free;
        let (before, written) = (free(), 64 << 20);
        File::create(disk.path().join("file")).unwrap().write_all(&vec![7; written]).unwrap();
        let taken = before - free();
        // Whether it was written out by now or not.
        assert!(taken >= written as u64 && taken < 2 * written as u64, "{taken} of {written}");
    }

    const GIB: u64 = 1 << 30;

    #[expect(clippy::cast_precision_loss, reason = "a few GiB")]
    fn room(free_gib: f64) -> Room {
        let bytes = Amount { total: 100 * GIB, free: (free_gib * GIB as f64) as u64 };
        Room { bytes, inodes: Some(Amount { total: 1_000_000, free: 900_000 }) }
    }

    #[test]
    fn s1_a_fall_is_measured_from_when_there_was_room() {
        let mut levels = Levels::new(&room(50.0), 10);
        assert_eq!(levels.look(&room(40.0), 11), None);
        assert_eq!(levels.look(&room(3.0), 12), None, "there is less room, and still the reserve");
        let fallen = levels.look(&room(1.5), 13).unwrap();
        assert_eq!((fallen.what, fallen.since_s), (Scarce::Bytes, 11));
        assert_eq!(fallen.by, 77 * GIB / 2, "from 40 to 1.5");
    }

    #[test]
    fn s1_after_a_judgement_most_of_what_is_left_may_be_used() {
        let mut levels = Levels::new(&room(50.0), 10);
        assert!(levels.look(&room(1.0), 11).is_some());
        levels.judged(&room(1.0), 12);
        assert_eq!(levels.look(&room(1.0), 13), None, "nothing falls");
        assert_eq!(levels.look(&room(0.2), 14), None);
        let fallen = levels.look(&room(0.1), 15).unwrap();
        assert_eq!(fallen.since_s, 12);
        // With room again it is as before.
        levels.judged(&room(0.1), 16);
        assert_eq!(levels.look(&room(2.5), 17), None);
        assert!(levels.look(&room(1.9), 18).is_some());
    }

    #[test]
    fn s1_a_disk_that_was_full_before_is_nobodys_fault() {
        let mut levels = Levels::new(&room(0.5), 10);
        assert_eq!(levels.look(&room(0.5), 11), None);
        assert_eq!(levels.look(&room(0.0), 12).unwrap().by, GIB / 2);
        levels.judged(&room(0.0), 13);
        assert_eq!(levels.look(&room(0.0), 14), None, "there is nothing left to fall");
    }

    #[test]
    fn s1_who_takes_next_to_nothing_of_next_to_nothing_is_not_judged() {
        let mut levels = Levels::new(&room(50.0), 10);
        assert!(levels.look(&room(0.01), 11).is_some());
        levels.judged(&room(0.01), 12);
        assert_eq!(levels.look(&room(0.0001), 13), None, "10 MiB of a reserve of 2 GiB");
        assert_eq!(levels.look(&room(0.0), 14), None);
        // What is given back counts, and so does who takes that.
        levels.judged(&room(0.25), 15);
        assert_eq!(levels.look(&room(0.01), 16).unwrap().since_s, 15);
    }

    #[test]
    fn s1_a_disk_that_stays_about_as_full_is_nobodys_fault() {
        let mut levels = Levels::new(&room(2.1), 10);
        for day in 0..10 {
            assert_eq!(levels.look(&room(1.95), 20 + day), None);
            assert_eq!(levels.look(&room(2.1), 20 + day), None);
        }
        assert_eq!(levels.look(&room(1.5), 40).unwrap().what, Scarce::Bytes);
    }

    #[test]
    fn s1_files_run_out_as_well() {
        let few = |free| Room { inodes: Some(Amount { total: 10_000, free }), ..room(50.0) };
        let mut levels = Levels::new(&few(9_000), 10);
        assert_eq!(levels.look(&few(600), 11), None);
        assert_eq!(levels.look(&few(400), 12), Some(Fallen { what: Scarce::Inodes, by: 8_600, since_s: 10 }));
    }

    #[test]
    fn looks_come_as_often_as_the_room_demands() {
        let levels = Levels::new(&room(50.0), 10);
        assert_eq!(levels.patience(&room(50.0)), LOOK_AFTER_MAX);
        assert_eq!(levels.patience(&room(4.0)), Duration::from_secs(1));
        assert_eq!(levels.patience(&room(2.0)), LOOK_AFTER_MIN);
        let few = Room { inodes: Some(Amount { total: 1_000_000, free: 70_000 }), ..room(50.0) };
        assert_eq!(levels.patience(&few), Duration::from_millis(200));
    }
}
