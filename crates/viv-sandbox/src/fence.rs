//! The fence of a sandbox: who may still change it, whatever became of its instances (L15).
//!
//! A file for each sandbox that ever was, holding the highest token seen, the
//! highest generation made, and whether that one was destroyed. It is read and
//! replaced under a lock, and on disk before anything is done in its name.
//! Fences are removed by the retention of tombstones, never by a destroy.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use viv_core::fence::{self, Intent, Standing};
use viv_core::{FencingToken, Generation, SandboxId};
use viv_provider::{Ended, Mutation, ProviderError};

use crate::durable;
use crate::lock::{lock_bucket, renew_buckets};

/// Locks are shared by sandboxes, so that their number is bounded.
const LOCKS: u64 = 64;

/// Space for writing fences on a full disk, so that it can be emptied by destroying.
const RESERVE: &str = ".reserve";

/// A process that holds a lock for this long is stopped or stuck, and delays others no longer (J7).
const LOCK_WITHIN: Duration = Duration::from_secs(10);

/// What is known about a sandbox for ever.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fence {
    pub(crate) token: FencingToken,
    pub(crate) generation: Generation,
    /// How the instance of `generation` ended, once it was destroyed. It is never made again.
    pub(crate) tombstone: Option<Ended>,
}

impl Fence {
    fn rule(&self) -> fence::Fence {
        let standing = if self.tombstone.is_some() { Standing::Buried } else { Standing::Made };
        fence::Fence { token: self.token, last: Some((self.generation, standing)) }
    }
}

/// All fences of a data folder.
#[derive(Debug, Clone)]
pub(crate) struct Fences {
    folder: PathBuf,
}

/// One fence, locked until dropped.
pub(crate) struct LockedFence {
    path: PathBuf,
    reserve: PathBuf,
    fence: Option<Fence>,
    _lock: File,
}

/// Whether a token was newer than all before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Raised {
    Yes,
    No,
}

/// What an instance is ended for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admit {
    /// A change of it, as by [`LockedFence::admit`].
    Change,
    /// As by [`LockedFence::admit_destroy`].
    Destroy,
}

impl Fences {
    pub(crate) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        // On a disk that is full already there is none, and a destroy has to do without.
        let _ = durable::make_reserve(&folder.join(RESERVE));
        Ok(Self { folder })
    }

    /// Whoever holds a lock now holds nobody any more. Only for who knows that it can do nothing.
    pub(crate) fn renew_locks(&self) -> io::Result<()> {
        renew_buckets(&self.folder, LOCKS)
    }

    /// Takes the lock and reads. Waits while another holds it, which nobody
    /// does for longer than a write to disk unless it was stopped.
    pub(crate) fn lock(&self, sandbox: &SandboxId) -> io::Result<LockedFence> {
        let lock = lock_bucket(&self.folder, sandbox.as_str(), LOCKS, LOCK_WITHIN)?;
        let path = self.folder.join(format!("{sandbox}.json"));
        let fence = durable::read_json(&path)?;
        Ok(LockedFence { path, reserve: self.folder.join(RESERVE), fence, _lock: lock })
    }
}

impl LockedFence {
    pub(crate) fn fence(&self) -> Option<&Fence> {
        self.fence.as_ref()
    }

    /// The fence as the rule has it.
    fn rule(&self) -> Option<fence::Fence> {
        self.fence.as_ref().map(Fence::rule)
    }

    fn check(&self, intent: Intent, mutation: &Mutation) -> Result<(), ProviderError> {
        Ok(fence::admit(self.rule().as_ref(), intent, mutation.generation, mutation.token)?)
    }

    /// Admits a change of the current instance, raising the token.
    pub(crate) fn admit(&mut self, mutation: &Mutation) -> Result<Raised, ProviderError> {
        self.check(Intent::Change, mutation)?;
        let is_newer = self.fence.as_ref().is_some_and(|fence| mutation.token > fence.token);
        self.raise(mutation)?;
        Ok(if is_newer { Raised::Yes } else { Raised::No })
    }

    /// Admits making the generation that the mutation names. Older ones and
    /// one that was destroyed are refused.
    pub(crate) fn admit_create(&mut self, mutation: &Mutation) -> Result<(), ProviderError> {
        self.check(Intent::Make, mutation)
    }

    /// Admits ending the generation that the mutation names.
    pub(crate) fn admit_destroy(&mut self, mutation: &Mutation) -> Result<(), ProviderError> {
        self.check(Intent::End, mutation)?;
        self.raise(mutation)
    }

    /// Admits ending the current instance, or the one that the mutation names, whatever comes after that. Where there is
    /// no room to write it down, it is admitted all the same: ending takes none, and who waits for room runs on (L8).
    pub(crate) fn admit_end(&mut self, mutation: &Mutation, admit: Admit) -> Result<(), ProviderError> {
        let admitted = match admit {
            Admit::Change => self.admit(mutation).map(drop),
            Admit::Destroy => self.admit_destroy(mutation),
        };
        match admitted {
            // Only what was checked is written down.
            Err(ProviderError::Unavailable { source, .. }) if durable::is_full(&source) => Ok(()),
            admitted => admitted,
        }
    }

    /// Admits a change of what outlives instances, raising the token.
    pub(crate) fn admit_any_generation(&mut self, mutation: &Mutation) -> Result<(), ProviderError> {
        if let Some(fence) = self.rule() {
            fence::admit_token(&fence, mutation.token)?;
        }
        self.raise(mutation)
    }

    /// Remembers a new generation.
    pub(crate) fn begin(&mut self, mutation: &Mutation) -> Result<(), ProviderError> {
        self.store(Fence { token: mutation.token, generation: mutation.generation, tombstone: None })
    }

    /// Remembers that the mutation's generation is gone for ever. What is buried stays as it was.
    pub(crate) fn bury(&mut self, mutation: &Mutation, ended: Ended) -> Result<(), ProviderError> {
        let before = self.rule();
        if before.and_then(|before| before.last) == Some((mutation.generation, Standing::Buried)) {
            return Ok(());
        }
        let after = fence::Fence::buried(before.as_ref(), mutation.generation, mutation.token);
        match after.last {
            Some((generation, Standing::Buried)) if before != Some(after) => {
                self.store(Fence { token: after.token, generation, tombstone: Some(ended) })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Remembers a newer token.
    pub(crate) fn raise(&mut self, mutation: &Mutation) -> Result<(), ProviderError> {
        match &self.fence {
            Some(fence) if mutation.token > fence.token => {
                let raised = Fence { token: mutation.token, ..fence.clone() };
                self.store(raised)
            }
            Some(_) | None => Ok(()),
        }
    }

    fn store(&mut self, fence: Fence) -> Result<(), ProviderError> {
        if self.fence.as_ref() != Some(&fence) {
            durable::replace_json_from_reserve(&self.path, &fence, &self.reserve)
                .map_err(|source| ProviderError::Unavailable { what: "the fence file".to_owned(), source })?;
            self.fence = Some(fence);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use viv_core::{EndCause, OperationId};

    use super::*;
    use crate::test_disk::SmallDisk;

    fn destroyed() -> Ended {
        Ended { cause: EndCause::Destroyed, at_ms: 1 }
    }

    fn mutation(generation: u64, token: u64) -> Mutation {
        Mutation {
            operation: OperationId::from_bytes([0; 16]),
            generation: Generation(generation),
            token: FencingToken(token),
            budget_ms: 1000,
        }
    }

    #[test]
    fn l15_a_late_create_and_a_late_destroy_are_refused_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let fences = Fences::open(folder.path().join("fences")).unwrap();
        let sandbox = SandboxId::from_bytes([7; 16]);
        let lock = || fences.lock(&sandbox).unwrap();

        lock().admit_create(&mutation(1, 1)).unwrap();
        lock().begin(&mutation(1, 1)).unwrap();
        lock().admit_destroy(&mutation(1, 2)).unwrap();
        lock().bury(&mutation(1, 2), destroyed()).unwrap();
        assert!(matches!(lock().admit_create(&mutation(1, 2)), Err(ProviderError::StaleGeneration { .. })));
        lock().admit_create(&mutation(2, 3)).unwrap();
        lock().begin(&mutation(2, 3)).unwrap();

        assert!(matches!(lock().admit_create(&mutation(1, 1)), Err(ProviderError::Fenced { .. })));
        assert!(matches!(lock().admit_destroy(&mutation(1, 1)), Err(ProviderError::Fenced { .. })));
        assert!(matches!(lock().admit_destroy(&mutation(1, 3)), Err(ProviderError::StaleGeneration { .. })));
        assert!(matches!(lock().admit(&mutation(2, 2)), Err(ProviderError::Fenced { .. })));
        assert_eq!(lock().admit(&mutation(2, 3)).unwrap(), Raised::No);
        assert_eq!(lock().admit(&mutation(2, 9)).unwrap(), Raised::Yes);
        // A destroy that began before does not lower what came after.
        lock().bury(&mutation(2, 4), destroyed()).unwrap();
        assert!(matches!(lock().admit_create(&mutation(3, 8)), Err(ProviderError::Fenced { .. })));
    }

    #[test]
    fn j8_a_lock_that_a_frozen_owner_holds_holds_nobody_who_renews_it() {
        let folder = tempfile::tempdir().unwrap();
        let fences = Fences::open(folder.path().to_owned()).unwrap();
        let sandbox = SandboxId::from_bytes([9; 16]);
        let _held = fences.lock(&sandbox).unwrap();
        let again = || lock_bucket(folder.path(), sandbox.as_str(), LOCKS, Duration::ZERO);
        assert_eq!(again().unwrap_err().kind(), io::ErrorKind::TimedOut);
        fences.renew_locks().unwrap();
        let _mine = again().unwrap();
        assert_eq!(again().unwrap_err().kind(), io::ErrorKind::TimedOut, "the new one holds others");
    }

    #[test]
    fn l8_an_end_is_admitted_on_a_full_disk_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let Some(small) = SmallDisk::mount(folder.path()) else { return };
        let fences = Fences::open(folder.path().join("fences")).unwrap();
        let sandbox = SandboxId::from_bytes([6; 16]);
        let lock = || fences.lock(&sandbox).unwrap();
        lock().begin(&mutation(2, 1)).unwrap();
        fs::remove_file(folder.path().join("fences").join(RESERVE)).unwrap();
        small.fill();
        let refused = lock().admit(&mutation(2, 2));
        assert!(matches!(&refused, Err(ProviderError::Unavailable { .. })), "{refused:?}");
        lock().admit_end(&mutation(2, 2), Admit::Change).unwrap();
        lock().admit_end(&mutation(2, 2), Admit::Destroy).unwrap();
        // Who is late, or means another one, is refused with or without room.
        for admit in [Admit::Change, Admit::Destroy] {
            let late = lock().admit_end(&mutation(2, 0), admit);
            assert!(matches!(late, Err(ProviderError::Fenced { .. })), "{late:?}");
            let stale = lock().admit_end(&mutation(1, 2), admit);
            assert!(matches!(stale, Err(ProviderError::StaleGeneration { .. })), "{stale:?}");
        }
    }

    #[test]
    fn l15_destroying_what_never_was_keeps_a_late_create_out() {
        let folder = tempfile::tempdir().unwrap();
        let fences = Fences::open(folder.path().to_owned()).unwrap();
        let sandbox = SandboxId::from_bytes([8; 16]);
        fences.lock(&sandbox).unwrap().admit_destroy(&mutation(1, 5)).unwrap();
        fences.lock(&sandbox).unwrap().bury(&mutation(1, 5), destroyed()).unwrap();
        let late = fences.lock(&sandbox).unwrap().admit_create(&mutation(1, 5));
        assert!(matches!(late, Err(ProviderError::StaleGeneration { .. })));
    }
}
