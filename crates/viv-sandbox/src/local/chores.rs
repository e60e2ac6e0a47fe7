//! What can wait, done in the background by one thread at a time.
//!
//! Each chore costs what its own subject costs: hashing one snapshot does not read the records of all others. Only
//! collecting does that, and it is asked for when something may be left that nothing refers to. What another process
//! left undone when it ended is found by the first chore of each process, which looks at everything.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viv_core::SnapshotId;

use super::LocalProvider;
use crate::store::tidy::{Looks, Tidied};
use crate::trash;

/// How long somebody else who tidies is waited for. Gigabytes are hashed in seconds.
const TIDY_WITHIN: Duration = Duration::from_secs(60);

/// How long to wait before what could not be done is tried again; it doubles up to the second one, and then waits for whoever
/// comes next, or tidies regularly.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(32));

/// Something to be done.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Chore {
    /// Whatever there is.
    Everything,
    /// Hash what was saved, and shorten what it stands on.
    Snapshot(SnapshotId),
    /// Take away what nothing refers to.
    Collect,
}

/// What waits to be done. The first chore of a process is everything.
#[derive(Debug)]
pub(super) struct Chores {
    waiting: Mutex<Waiting>,
    /// Told when nobody is at it any more.
    over: Condvar,
}

#[derive(Debug)]
struct Waiting {
    chores: BTreeSet<Chore>,
    is_someone_at_it: bool,
    /// What could not be done is tried again in a moment, by this one alone.
    is_someone_pausing: bool,
}

impl Default for Chores {
    fn default() -> Self {
        let chores = BTreeSet::from([Chore::Everything]);
        let waiting = Waiting { chores, is_someone_at_it: false, is_someone_pausing: false };
        Self { waiting: Mutex::new(waiting), over: Condvar::new() }
    }
}

impl Chores {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers it. True when nobody is at it, and the caller has to see to it.
    fn add(&self, chore: Chore) -> bool {
        let mut waiting = self.lock();
        waiting.chores.insert(chore);
        !std::mem::replace(&mut waiting.is_someone_at_it, true)
    }

    /// The next one; with none left, nobody is at it any more.
    fn next(&self) -> Option<Chore> {
        let mut waiting = self.lock();
        let next = waiting.chores.pop_first();
        waiting.is_someone_at_it = next.is_some();
        if next.is_none() {
            self.over.notify_all();
        }
        next
    }

    /// What waits has to wait for the next one.
    fn give_up(&self) {
        self.lock().is_someone_at_it = false;
        self.over.notify_all();
    }

    /// Puts back what could not be done. True when the caller, who is willing to, is who tries it again in a moment.
    fn put_back(&self, not_now: Vec<Chore>, is_willing: bool) -> bool {
        let mut waiting = self.lock();
        let tries_again = is_willing && !not_now.is_empty();
        waiting.chores.extend(not_now);
        tries_again && !std::mem::replace(&mut waiting.is_someone_pausing, true)
    }

    /// For who does everything, and so whatever waits.
    fn take_all(&self) -> BTreeSet<Chore> {
        std::mem::take(&mut self.lock().chores)
    }

    /// After a pause: true when something waits that nobody is at.
    fn take_up(&self) -> bool {
        let mut waiting = self.lock();
        waiting.is_someone_pausing = false;
        let is_left = !waiting.chores.is_empty() && !waiting.is_someone_at_it;
        waiting.is_someone_at_it |= is_left;
        is_left
    }

    /// Whether something waits that nobody is at, as it could not be done when it was tried.
    fn has_failed(&self) -> bool {
        let waiting = self.lock();
        !waiting.chores.is_empty() && !waiting.is_someone_at_it
    }

    /// Waits until nobody is at it.
    fn wait(&self) {
        let waited = self.over.wait_while(self.lock(), |waiting| waiting.is_someone_at_it);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Says that nobody is at it any more if that ended badly. Otherwise the last look for the next chore has said so.
struct AtIt<'a>(&'a Chores);

impl Drop for AtIt<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.give_up();
        }
    }
}

/// What came of a turn of who tidies regularly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TidyTurn {
    /// Nothing came or went since the whole store was looked at: only trash was emptied.
    Trash,
    /// The whole store was looked at.
    Everything(Tidied),
}

/// Tidies regularly. To look at the whole store means to read a record for each snapshot, layer and instance, and where
/// nothing came or went since the last time there is nothing to find. What goes on inside a record that stays, as when its
/// hash was not written, and what only gets older, is found by a look at everything now and then.
pub struct Tidier {
    provider: LocalProvider,
    all_every: Duration,
    /// When the whole store was last looked at, and how it looked before that.
    last: Option<(Instant, Looks)>,
}

impl Tidier {
    /// Looks at everything at least this often.
    pub fn new(provider: LocalProvider, all_every: Duration) -> Self {
        Self { provider, all_every, last: None }
    }

    /// Does what there is to do now. Blocks.
    pub fn turn(&mut self) -> TidyTurn {
        let shared = &self.provider.shared;
        // Before anything is read: what comes meanwhile is seen by the next turn.
        let looks = shared.store.looks();
        if let (Some((at, before)), Ok(now)) = (&self.last, &looks)
            && at.elapsed() < self.all_every
            && before == now
            && !shared.chores.has_failed()
        {
            trash::empty(&shared.data.trash(), viv_layer::remove);
            return match shared.store.tidy_trash() {
                Ok(()) => TidyTurn::Trash,
                Err(error) => TidyTurn::Everything(Tidied::failing(format!("counting: {error}"))),
            };
        }
        let began = Instant::now();
        let done = self.provider.tidy();
        // What could not be done, or has to wait for somebody who builds, is tried again at the next turn.
        self.last = looks.ok().filter(|_| done.is_whole()).map(|looks| (began, looks));
        TidyTurn::Everything(done)
    }
}

impl LocalProvider {
    /// Does what can wait: hashes what was saved, shortens chains of layers, takes away what nothing refers to. Blocks.
    pub fn tidy(&self) -> Tidied {
        let chores = &self.shared.chores;
        // They are ours, and hold what this would wait for.
        chores.wait();
        let waiting = chores.take_all();
        let done = self.tidy_everything();
        if !done.is_whole() {
            chores.put_back(waiting.into_iter().collect(), false);
        }
        done
    }

    fn tidy_everything(&self) -> Tidied {
        let shared = &self.shared;
        trash::empty(&shared.data.trash(), viv_layer::remove);
        let mut done = shared.store.tidy(TIDY_WITHIN);
        if let Err(error) = shared.ids.sweep(&shared.data, &shared.fences) {
            done.failed.push(format!("giving back ids: {error}"));
        }
        done
    }

    /// Has something done in the background.
    pub(super) fn later(&self, chore: Chore) {
        if !self.shared.chores.add(chore) {
            return;
        }
        let this = self.clone();
        let work = move || {
            let chores = &this.shared.chores;
            let mut pauses = std::iter::successors(Some(AGAIN.0), |pause| (*pause < AGAIN.1).then(|| *pause * 2));
            loop {
                let at_it = AtIt(chores);
                let mut not_now = Vec::new();
                while let Some(chore) = chores.next() {
                    not_now.extend(this.do_chore(chore));
                }
                drop(at_it);
                // Somebody builds, or something is wrong for now.
                let pause = pauses.next();
                if !chores.put_back(not_now, pause.is_some()) {
                    return;
                }
                std::thread::sleep(pause.unwrap_or_default());
                if !chores.take_up() {
                    return;
                }
            }
        };
        // Without a thread it waits until the next time.
        if std::thread::Builder::new().name("viv-tidy".to_owned()).spawn(work).is_err() {
            self.shared.chores.give_up();
        }
    }

    /// Answers with what could not be done now.
    fn do_chore(&self, chore: Chore) -> Option<Chore> {
        let store = &self.shared.store;
        match chore {
            Chore::Everything => {
                let done = self.tidy_everything();
                if !done.failed.is_empty() {
                    return Some(Chore::Everything);
                }
                return done.collected.is_none().then_some(Chore::Collect);
            }
            Chore::Snapshot(id) => match store.tidy_snapshot(&id, TIDY_WITHIN) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(_) => return Some(Chore::Snapshot(id)),
            },
            Chore::Collect => {}
        }
        // What fails, as a record that cannot be read makes it do, is not to be tried at every turn.
        store.collect().is_ok_and(|collected| collected.is_none()).then_some(Chore::Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_at_it_and_does_also_what_comes_meanwhile() {
        let chores = Chores::default();
        assert!(chores.add(Chore::Collect));
        assert_eq!(chores.next(), Some(Chore::Everything));
        assert!(!chores.add(Chore::Collect), "somebody is at it");
        assert_eq!((chores.next(), chores.next()), (Some(Chore::Collect), None));
        assert!(chores.add(Chore::Collect), "nobody is at it any more");
        chores.give_up();
        assert!(chores.add(Chore::Collect), "nor after one who failed");
    }

    #[test]
    fn what_could_not_be_done_is_tried_again_by_one() {
        let chores = Chores::default();
        assert!(chores.add(Chore::Collect));
        while chores.next().is_some() {}
        assert!(!chores.has_failed());
        assert!(chores.put_back(vec![Chore::Collect], true) && chores.has_failed());
        assert!(!chores.put_back(vec![Chore::Everything], true), "somebody waits for that already");
        assert!(chores.take_up() && !chores.has_failed(), "it is at it");
        while chores.next().is_some() {}
        assert!(!chores.put_back(Vec::new(), true), "nothing is left");
        assert!(chores.put_back(vec![Chore::Collect], true));
        assert!(chores.add(Chore::Everything), "whoever comes next does it sooner");
        assert!(!chores.take_up(), "and is at it");
        while chores.next().is_some() {}
        assert!(!chores.put_back(vec![Chore::Collect], false) && chores.has_failed(), "nobody is willing");
        assert_eq!(chores.take_all(), BTreeSet::from([Chore::Collect]));
        assert!(!chores.has_failed(), "who does everything does that too");
    }
}
