//! The letters of one subscription, in lanes: those about one sandbox one after the other.

use std::collections::{BTreeMap, BTreeSet};

use viv_core::SandboxId;
use viv_core::subscription::Letter;

type Lane = Option<SandboxId>;

/// The letters that wait. Whoever takes one has to say what came of it before the next of its lane is given.
#[derive(Debug, Default)]
pub(super) struct Desk {
    lanes: BTreeMap<Lane, BTreeMap<u64, Letter>>,
    /// Heads of lanes of which nothing is under way, by when they are due.
    idle: BTreeSet<(u64, u64, Lane)>,
    /// Lanes of which something is.
    busy: BTreeSet<Lane>,
    count: usize,
}

impl Desk {
    /// How many there are, those under way too.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    fn head(&self, lane: &Lane) -> Option<(u64, u64, Lane)> {
        let (_, head) = self.lanes.get(lane)?.first_key_value()?;
        Some((head.next_at_ms, head.cursor, lane.clone()))
    }

    /// One more, or one that is otherwise now.
    pub(super) fn put(&mut self, letter: Letter) {
        let lane = letter.sandbox.clone();
        let before = self.head(&lane);
        let replaced = self.lanes.entry(lane.clone()).or_default().insert(letter.cursor, letter);
        self.count += usize::from(replaced.is_none());
        self.set_idle(before, &lane);
    }

    fn set_idle(&mut self, before: Option<(u64, u64, Lane)>, lane: &Lane) {
        before.map(|before| self.idle.remove(&before));
        if let Some(head) = self.head(lane).filter(|_| !self.busy.contains(lane)) {
            self.idle.insert(head);
        }
    }

    /// The oldest of a lane whose time has come, the one that has waited longest first.
    pub(super) fn take_due(&mut self, now_ms: u64) -> Option<Letter> {
        let (_, cursor, lane) = self.idle.first().filter(|(at_ms, ..)| *at_ms <= now_ms).cloned()?;
        self.idle.pop_first();
        let letter = self.lanes.get(&lane)?.get(&cursor).cloned();
        self.busy.insert(lane);
        letter
    }

    /// One that was taken is not under way any more, and gone unless it is put again.
    pub(super) fn done(&mut self, letter: &Letter) {
        let lane = &letter.sandbox;
        let before = self.head(lane);
        self.busy.remove(lane);
        if let Some(letters) = self.lanes.get_mut(lane) {
            self.count -= usize::from(letters.remove(&letter.cursor).is_some());
            if letters.is_empty() {
                self.lanes.remove(lane);
            }
        }
        self.set_idle(before, lane);
    }

    /// When the next one is due of which nothing is under way.
    pub(super) fn next_ms(&self) -> Option<u64> {
        self.idle.first().map(|(at_ms, ..)| *at_ms)
    }

    /// Since when the oldest waits.
    pub(super) fn oldest_ms(&self) -> Option<u64> {
        self.lanes.values().flat_map(BTreeMap::values).map(|letter| letter.since_ms).min()
    }

    /// How often one was tried, at most. Only heads are.
    pub(super) fn attempts_max(&self) -> u32 {
        let heads = self.lanes.values().filter_map(|lane| lane.values().next());
        heads.map(|letter| letter.attempts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(cursor: u64, lane: &str, next_at_ms: u64) -> Letter {
        Letter { next_at_ms, ..Letter::new(cursor, Some(format!("sbx_{lane}").parse().unwrap()), 0) }
    }

    #[test]
    fn o6_lanes_are_in_order_and_do_not_wait_for_each_other() {
        let mut desk = Desk::default();
        for (cursor, lane) in [(1, "a"), (2, "b"), (3, "a"), (4, "b")] {
            desk.put(letter(cursor, lane, 0));
        }
        assert_eq!(desk.len(), 4);
        let first = desk.take_due(0).unwrap();
        let second = desk.take_due(0).unwrap();
        assert_eq!((first.cursor, second.cursor), (1, 2));
        assert_eq!(desk.take_due(0), None, "both lanes are busy");
        desk.done(&first);
        desk.put(Letter { next_at_ms: 50, attempts: 1, ..first });
        assert_eq!((desk.take_due(10), desk.next_ms()), (None, Some(50)), "what comes after it waits with it");
        desk.done(&second);
        assert_eq!(desk.take_due(10).map(|letter| letter.cursor), Some(4), "and nobody else does");
        assert_eq!(desk.take_due(50).map(|letter| (letter.cursor, letter.attempts)), Some((1, 1)));
        assert_eq!((desk.len(), desk.attempts_max()), (3, 1));
    }

    #[test]
    fn o6_what_comes_before_the_head_goes_first() {
        let mut desk = Desk::default();
        desk.put(letter(5, "a", 9));
        desk.put(letter(3, "a", 1));
        assert_eq!(desk.next_ms(), Some(1));
        let first = desk.take_due(9).unwrap();
        assert_eq!(first.cursor, 3);
        desk.put(letter(7, "a", 0));
        assert_eq!(desk.next_ms(), None, "its lane is busy");
        desk.done(&first);
        assert_eq!(desk.take_due(9).map(|letter| letter.cursor), Some(5));
        assert_eq!(desk.oldest_ms(), Some(0));
    }
}
