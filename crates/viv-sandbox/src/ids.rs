//! Which ids of the host each sandbox is mapped to.
//!
//! Every sandbox has a range of its own, so that its processes and files have owners that no other sandbox has: what
//! gets out of one is a stranger to all others.
//!
//! A range is taken by a link `ids/<first id>` that leads to the sandbox's name. It is made in one step under the
//! sandbox's fence, before there is a record that says so, and goes after the instance's folder. One that a crash left
//! in between is found by whoever tidies. Layers hold the ids as they are inside, so that a sandbox that is restored
//! may get another range.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::PathBuf;

use viv_core::SandboxId;

use crate::fence::Fences;
use crate::layout::DataDir;
use crate::lock::spread;
use crate::rootfs::IdRange;

/// The ids that there are for sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdPool {
    /// A range for each: so many, one after the other.
    Each {
        /// The first id of the first one.
        first: u32,
        /// How many ranges there are.
        ranges: u32,
    },
    /// One range for all, where there are no more: those of an ordinary user's namespace.
    Shared(IdRange),
}

impl IdPool {
    /// How many ids a sandbox gets.
    pub(crate) fn count(self) -> u32 {
        match self {
            Self::Each { .. } => IdRange::COUNT,
            Self::Shared(range) => range.count,
        }
    }
}

impl Default for IdPool {
    /// Above what distributions hand out, below where programs begin to take ids for negative numbers.
    fn default() -> Self {
        let (first, end) = (0x2000_0000, 0x7fff_0000);
        Self::Each { first, ranges: (end - first) / IdRange::COUNT }
    }
}

/// Who has which range.
#[derive(Debug)]
pub(crate) struct Ids {
    folder: PathBuf,
    pool: IdPool,
}

impl Ids {
    pub(crate) fn open(folder: PathBuf, pool: IdPool) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self { folder, pool })
    }

    fn link(&self, range: IdRange) -> PathBuf {
        self.folder.join(range.base.to_string())
    }

    /// Takes a range for a sandbox that has none, under its fence; `None` when there is none left.
    pub(crate) fn take(&self, sandbox: &SandboxId) -> io::Result<Option<IdRange>> {
        let (first, ranges) = match self.pool {
            IdPool::Each { first, ranges } => (first, ranges),
            IdPool::Shared(range) => return Ok(Some(range)),
        };
        // Not from the first on, so that two installations on one machine seldom choose the same, and a sandbox gets
        // the one that it had before.
        let start = spread(sandbox.as_str(), ranges.into()) as u32;
        for nth in 0..ranges {
            let base = first + (start + nth) % ranges * IdRange::COUNT;
            let range = IdRange { base, count: IdRange::COUNT };
            let link = self.link(range);
            match symlink(sandbox.as_str(), &link) {
                Ok(()) => return Ok(Some(range)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    // Left by a process that died here; the fence says that it is gone.
                    if fs::read_link(&link).is_ok_and(|owner| owner.as_os_str() == sandbox.as_str()) {
                        return Ok(Some(range));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Takes this range for a sandbox that has none, under its fence; false when it is another's.
    pub(crate) fn take_this(&self, sandbox: &SandboxId, range: IdRange) -> io::Result<bool> {
        match self.pool {
            IdPool::Each { first, ranges } => {
                let nth =
                    range.base.checked_sub(first).map(|offset| (offset / IdRange::COUNT, offset % IdRange::COUNT));
                if range.count != IdRange::COUNT || !nth.is_some_and(|(nth, rest)| nth < ranges && rest == 0) {
                    return Ok(false);
                }
            }
            IdPool::Shared(shared) => return Ok(range == shared),
        }
        let link = self.link(range);
        match symlink(sandbox.as_str(), &link) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(fs::read_link(&link).is_ok_and(|owner| owner.as_os_str() == sandbox.as_str()))
            }
            Err(error) => Err(error),
        }
    }

    /// Gives a range back, under the fence of the sandbox that had it.
    pub(crate) fn give_back(&self, sandbox: &SandboxId, range: IdRange) {
        let link = self.link(range);
        if fs::read_link(&link).is_ok_and(|owner| owner.as_os_str() == sandbox.as_str()) {
            // If it stays, it is found by whoever tidies.
            let _ = fs::remove_file(link);
        }
    }

    /// All that are lent, and to whom.
    pub(crate) fn lent(&self) -> io::Result<Vec<(PathBuf, SandboxId)>> {
        let mut lent = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let link = entry?.path();
            let Ok(owner) = fs::read_link(&link) else { continue };
            if let Some(sandbox) = owner.to_str().and_then(|name| name.parse::<SandboxId>().ok()) {
                lent.push((link, sandbox));
            }
        }
        Ok(lent)
    }

    /// Gives back what belongs to nobody any more. How many were.
    pub(crate) fn sweep(&self, data: &DataDir, fences: &Fences) -> io::Result<u64> {
        let (mut swept, mut failed) = (0, None);
        for entry in fs::read_dir(&self.folder)? {
            let link = entry?.path();
            let Ok(owner) = fs::read_link(&link) else { continue };
            let Some(sandbox) = owner.to_str().and_then(|name| name.parse::<SandboxId>().ok()) else { continue };
            let dir = data.instance(&sandbox);
            if dir.path().exists() {
                continue;
            }
            let give_back = || {
                let _fence = fences.lock(&sandbox)?;
                // Whoever is about to make it holds the fence until there is a folder.
                if dir.path().exists() || fs::read_link(&link).is_ok_and(|now| now != owner) {
                    return Ok(0);
                }
                fs::remove_file(&link).map(|()| 1)
            };
            // One that cannot be looked at keeps no other.
            match give_back() {
                Ok(count) => swept += count,
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(swept), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(number: u8) -> SandboxId {
        SandboxId::from_bytes([number; 16])
    }

    #[test]
    fn s1_each_has_its_own_until_there_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let ids = Ids::open(folder.path().join("ids"), IdPool::Each { first: 1 << 20, ranges: 3 }).unwrap();
        let taken: Vec<_> = (1..=3).map(|number| ids.take(&sandbox(number)).unwrap().unwrap()).collect();
        let mut bases: Vec<_> = taken.iter().map(|range| range.base).collect();
        bases.sort_unstable();
        assert_eq!(bases, [1 << 20, (1 << 20) + (1 << 16), (1 << 20) + (2 << 16)]);
        assert_eq!(ids.take(&sandbox(4)).unwrap(), None);
        assert_eq!(ids.take(&sandbox(2)).unwrap(), Some(taken[1]), "left by itself");
        ids.give_back(&sandbox(4), taken[1]);
        assert_eq!(ids.take(&sandbox(4)).unwrap(), None, "it was another's");
        assert!(!ids.take_this(&sandbox(4), taken[1]).unwrap());
        ids.give_back(&sandbox(2), taken[1]);
        assert!(ids.take_this(&sandbox(4), taken[1]).unwrap());
        assert!(ids.take_this(&sandbox(4), taken[1]).unwrap(), "left by itself");
        for base in [taken[1].base + 1, (1 << 20) + (3 << 16), 1 << 16] {
            let strange = IdRange { base, count: IdRange::COUNT };
            assert!(!ids.take_this(&sandbox(4), strange).unwrap(), "{base} is none of ours");
        }
        assert_eq!(ids.take(&sandbox(4)).unwrap(), Some(taken[1]));
    }

    #[test]
    fn what_a_crash_left_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::new(folder.path().to_owned());
        let fences = Fences::open(data.fences()).unwrap();
        let ids = Ids::open(data.ids(), IdPool::Each { first: 1 << 20, ranges: 2 }).unwrap();
        for number in [1, 2] {
            ids.take(&sandbox(number)).unwrap().unwrap();
        }
        fs::create_dir_all(data.instance(&sandbox(2)).path()).unwrap();
        assert_eq!(ids.sweep(&data, &fences).unwrap(), 1);
        assert_eq!(ids.sweep(&data, &fences).unwrap(), 0);
        assert!(ids.take(&sandbox(3)).unwrap().is_some());
        assert_eq!(ids.take(&sandbox(1)).unwrap(), None);
    }

    #[test]
    fn the_default_pool_stays_within_what_programs_take_for_ids() {
        let IdPool::Each { first, ranges } = IdPool::default() else { panic!("one for each") };
        assert!(ranges > 20_000);
        assert!(u64::from(first) + u64::from(ranges) * u64::from(IdRange::COUNT) < 1 << 31);
    }
}
