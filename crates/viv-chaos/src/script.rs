//! What a test orders of listings and ends: all of them from now on, or each by its number, and not only those that are
//! drawn.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use viv_provider::{Page, ProviderError};

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
