//! What a test orders of listings, ends and changes: all of them from now on, or each by its number, and not only those
//! that are drawn.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use viv_core::SandboxId;
use viv_provider::{Page, ProviderError};

/// How one chosen change at provider or store goes (P4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// The daemon dies, and nothing of it has happened.
    CrashBefore,
    /// It is done, and the daemon dies before it could record that.
    CrashAfter,
    /// It is done, and nobody answers, or says that it was.
    Unanswered,
    /// It arrives twice.
    Twice,
    /// It is done at once, and answered later, in time.
    AnsweredLate,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::CrashBefore, Self::CrashAfter, Self::Unanswered, Self::Twice, Self::AnsweredLate];

    /// In words.
    pub fn word(self) -> &'static str {
        match self {
            Self::CrashBefore => "daemon dies before it",
            Self::CrashAfter => "daemon dies after it",
            Self::Unanswered => "done, not answered",
            Self::Twice => "arrives twice",
            Self::AnsweredLate => "done, answered late",
        }
    }
}

/// A change that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// The name of the call, as the trait of provider or store has it.
    pub call: &'static str,
    /// Whether it is a write of the store; else it is a change at the provider.
    pub is_write: bool,
    /// The effect that the record named then.
    pub effect: Option<&'static str>,
}

impl Point {
    /// In which ways it can go. Nothing arrives twice at a store: a write is a call, and no message.
    pub fn ways(&self) -> impl Iterator<Item = Way> {
        let is_write = self.is_write;
        Way::ALL.into_iter().filter(move |way| !is_write || *way != Way::Twice)
    }
}

/// Tells which effect the record of a sandbox names.
type Outstanding = Box<dyn Fn(&SandboxId) -> Option<&'static str> + Send + Sync>;

/// Changes of one daemon, counted from 0.
pub(crate) struct Calls {
    order: Option<(usize, Way)>,
    outstanding: Outstanding,
    seen: Mutex<Vec<Point>>,
}

impl Calls {
    pub(crate) fn new(order: Option<(usize, Way)>, outstanding: Outstanding) -> Self {
        Self { order, outstanding, seen: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Point>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that were asked for.
    pub(crate) fn seen(&self) -> Vec<Point> {
        self.lock().clone()
    }

    /// Counts one more, and tells how it goes if that was chosen.
    pub(crate) fn next(&self, call: &'static str, is_write: bool, about: Option<&SandboxId>) -> Option<Way> {
        let effect = about.and_then(|sandbox| (self.outstanding)(sandbox));
        let mut seen = self.lock();
        seen.push(Point { call, is_write, effect });
        let at = seen.len() - 1;
        self.order.filter(|(chosen, _)| *chosen == at).map(|(_, way)| way)
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("order", &self.order).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Every listing fails.
    fail: bool,
    /// No audit is answered.
    audits_hang: bool,
    /// Every listing is as it was so many listings ago.
    by: usize,
    told: VecDeque<Page>,
    listings: u64,
    ends: u64,
    /// Which listings are older, and by how many.
    stale: BTreeMap<u64, usize>,
    /// Which ends nobody hears of.
    unheard: BTreeSet<u64>,
}

impl Script {
    pub(crate) fn new(stale: BTreeMap<u64, usize>, unheard: BTreeSet<u64>) -> Self {
        Self { stale, unheard, ..Self::default() }
    }

    pub(crate) fn set_fail(&mut self, fail: bool) {
        self.fail = fail;
    }

    pub(crate) fn set_audits_hang(&mut self, hang: bool) {
        self.audits_hang = hang;
    }

    pub(crate) fn audits_hang(&self) -> bool {
        self.audits_hang
    }

    pub(crate) fn set_stale(&mut self, by: usize) {
        (self.by, self.told) = (by, VecDeque::new());
    }

    /// What a listing says, when all of them are to fail, or to be stale.
    pub(crate) fn as_it_was(&mut self, page: Page) -> Result<Page, ProviderError> {
        if self.fail {
            let source = std::io::Error::other("simulated");
            return Err(ProviderError::Unavailable { what: "a listing".to_owned(), source });
        }
        if self.by == 0 {
            return Ok(page);
        }
        self.told.push_back(page.clone());
        let surplus = self.told.len().saturating_sub(self.by + 1);
        self.told.drain(..surplus);
        Ok(self.told.front().cloned().unwrap_or(page))
    }

    /// How many listings and ends there were.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.listings, self.ends)
    }

    /// By how many this listing is older than it should be.
    pub(crate) fn age(&mut self) -> Option<usize> {
        self.listings += 1;
        self.stale.get(&(self.listings - 1)).copied()
    }

    /// Whether nobody hears of this end.
    pub(crate) fn is_unheard(&mut self) -> bool {
        self.ends += 1;
        self.unheard.contains(&(self.ends - 1))
    }
}
