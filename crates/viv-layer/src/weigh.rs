//! What a tree takes on disk of what was changed lately, a part at a time.
//!
//! For somebody in a hurry, who looks at several trees in turns and may stop before the end. Unlike a survey it sorts
//! nothing and keeps no names: a folder is read where it was left, by the cookie of its last entry. So what is kept is
//! a few words for each level, however many entries a sandbox has put into one folder.

use std::io;
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, RawDir, SeekFrom, Stat, seek, statat};
use rustix::io::Errno;

use crate::trail::Trail;

/// Folders that are open at a time.
const WINDOW: usize = 16;

/// What is read of a folder at once. After each folder in it the rest is read again, so it is no more than some names.
const NAMES_BYTES: usize = 4096;

/// What was found so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weight {
    /// What the changed entries take on disk; of a file with several names each is a part.
    pub bytes: u64,
    /// How many were changed.
    pub entries: u64,
}

/// Weighs one tree.
pub struct Weigher {
    trail: Trail,
    /// Where to read on, for each folder of the trail.
    cookies: Vec<u64>,
    changed_since_s: i64,
    weight: Weight,
}

impl Weigher {
    /// Will count entries whose inode was changed at that second or later: what nobody inside can set back.
    pub fn new(folder: &Path, changed_since_s: i64) -> io::Result<Self> {
        let trail = Trail::new(folder, WINDOW)?;
        Ok(Self { trail, cookies: vec![0], changed_since_s, weight: Weight::default() })
    }

    /// Looks at some more entries, about as many as said; true when there are no more.
    ///
    /// Who moves folders about meanwhile may end it early, with an error. What was counted counts.
    pub fn weigh(&mut self, entries: u64) -> io::Result<bool> {
        let mut looked = 0;
        while looked < entries {
            let Some(cookie) = self.cookies.last().copied() else { return Ok(true) };
            seek(self.trail.here(), SeekFrom::Start(cookie))?;
            match self.read_some(&mut looked)? {
                Read::Folder(folder) => {
                    self.trail.enter(folder)?;
                    self.cookies.push(0);
                }
                Read::Some => {}
                Read::End => {
                    self.cookies.pop();
                    self.trail.leave()?;
                }
            }
        }
        Ok(false)
    }

    /// What was found so far.
    pub fn weight(&self) -> Weight {
        self.weight
    }

    /// Reads on in the last folder: up to one that is to be entered, or as far as the buffer goes.
    fn read_some(&mut self, looked: &mut u64) -> io::Result<Read> {
        let mut buffer = [MaybeUninit::uninit(); NAMES_BYTES];
        let mut names = RawDir::new(self.trail.here(), &mut buffer);
        let cookie = self.cookies.last_mut().expect("a trail has a last folder");
        let mut read = Read::End;
        while let Some(entry) = names.next() {
            let entry = entry?;
            read = Read::Some;
            *cookie = entry.next_entry_cookie();
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                *looked += 1;
                let found = match statat(self.trail.here(), entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                    // It went since it was listed.
                    Err(Errno::NOENT) => None,
                    found => Some(found?),
                };
                if let Some(found) = found {
                    self.weight.add(&found, self.changed_since_s);
                    if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                        match self.trail.open(entry.file_name()) {
                            Ok(folder) => return Ok(Read::Folder(folder)),
                            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                            Err(error) => return Err(error.into()),
                        }
                    }
                }
            }
            if names.is_buffer_empty() {
                break;
            }
        }
        Ok(read)
    }
}

enum Read {
    Folder(std::os::fd::OwnedFd),
    Some,
    End,
}

impl Weight {
    #[allow(clippy::useless_conversion, reason = "the widths of these fields differ between architectures")]
    fn add(&mut self, found: &Stat, changed_since_s: i64) {
        if i64::from(found.st_ctime) < changed_since_s {
            return;
        }
        let names = u64::from(found.st_nlink).max(1);
        let is_folder = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let bytes = (found.st_blocks as u64).saturating_mul(512);
        // A folder's links are its own and those of the folders in it.
        self.bytes = self.bytes.saturating_add(if is_folder { bytes } else { bytes / names });
        self.entries += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weigh(folder: &Path, since_s: i64, step: u64) -> Weight {
        let mut weigher = Weigher::new(folder, since_s).unwrap();
        while !weigher.weigh(step).unwrap() {}
        weigher.weight()
    }

    #[test]
    fn everything_is_counted_once_however_small_the_steps() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path();
        let mut deep = top.to_owned();
        for level in 0..3 * WINDOW {
            deep.push("below");
            std::fs::create_dir(&deep).unwrap();
            std::fs::write(deep.join("file"), vec![7; 5000 + level]).unwrap();
        }
        std::fs::create_dir(top.join("wide")).unwrap();
        for number in 0..500 {
            let name = format!("{}{number}", "x".repeat(100));
            std::fs::create_dir(top.join("wide").join(&name)).unwrap();
            std::fs::write(top.join("wide").join(name + ".file"), "x").unwrap();
        }
        std::os::unix::fs::symlink("/", top.join("link")).unwrap();
        let expected = 2 * (3 * WINDOW as u64) + 1 + 1000 + 1;
        let all = weigh(top, i64::MIN, u64::MAX);
        assert_eq!(all.entries, expected);
        assert!(all.bytes >= 3 * WINDOW as u64 * 5000, "{all:?}");
        for step in [1, 7, 1000] {
            // What a file takes can change when it is written out.
            assert_eq!(weigh(top, i64::MIN, step).entries, expected, "in steps of {step}");
        }
        assert_eq!(weigh(top, i64::MAX, 100), Weight::default(), "nothing was changed after that");
    }

    #[test]
    fn names_of_one_file_are_parts_of_it() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("one"), vec![7; 1 << 20]).unwrap();
        for name in ["two", "three", "four"] {
            std::fs::hard_link(place.path().join("one"), place.path().join(name)).unwrap();
        }
        let four = weigh(place.path(), 0, 10);
        assert_eq!(four.entries, 4);
        assert!((1 << 20..2 << 20).contains(&four.bytes), "{four:?}");
    }
}
