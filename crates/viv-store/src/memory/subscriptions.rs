//! Subscriptions.

use async_trait::async_trait;
use viv_core::WebhookId;
use viv_core::subscription::{Letter, Subscription};

use super::{MemoryStore, Result, State};
use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::store::Epoch;
use crate::subscription::{
    self, LETTERS_DEAD_MAX, LetterQuery, Replay, Settled, Standing, SubscriptionListing, SubscriptionQuery,
    Subscriptions,
};

impl State {
    fn standing(&self, id: &WebhookId) -> Option<(Subscription, Standing)> {
        let (row, cursor) = self.subscriptions.get(id)?;
        let mut standing = Standing { cursor: *cursor, ..Standing::default() };
        for letter in self.letters_of(id) {
            let count = if letter.dead_at_ms.is_some() { &mut standing.dead } else { &mut standing.waiting };
            *count += 1;
        }
        Some((row.clone(), standing))
    }

    fn letters_of(&self, id: &WebhookId) -> impl Iterator<Item = &Letter> {
        let range = (id.clone(), Cursor(0))..=(id.clone(), Cursor(u64::MAX));
        self.letters.range(range).map(|(_, letter)| letter)
    }

    fn put_subscription(&mut self, row: Subscription, from: Cursor, lines: Vec<NewLine>, max: u64) -> Result<()> {
        let expected = subscription::expected_version(&row)?;
        let known = self.subscriptions.get(&row.id);
        let (found, cursor) = known.map_or((0, from), |(found, cursor)| (found.version, *cursor));
        if found != expected {
            return Err(StoreError::SubscriptionConflict { subscription: row.id, expected, found });
        }
        if found == 0 {
            subscription::check_count(self.subscriptions.len() as u64, max)?;
        }
        self.subscriptions.insert(row.id.clone(), (row, cursor));
        self.append(lines);
        Ok(())
    }

    fn put_letters(&mut self, id: &WebhookId, (from, to): (Cursor, Cursor), letters: Vec<Letter>) -> bool {
        let Some((_, cursor)) = self.subscriptions.get_mut(id).filter(|(_, cursor)| *cursor == from) else {
            return false;
        };
        *cursor = to;
        for letter in letters {
            self.letters.insert((id.clone(), Cursor(letter.cursor)), letter);
        }
        true
    }

    fn settle_letters(&mut self, id: &WebhookId, settled: Vec<Settled>, lines: Vec<NewLine>) {
        for one in settled {
            match one {
                Settled::Taken(cursor) => drop(self.letters.remove(&(id.clone(), cursor))),
                Settled::Kept(letter) => {
                    if let Some(known) = self.letters.get_mut(&(id.clone(), Cursor(letter.cursor))) {
                        *known = letter;
                    }
                }
            }
        }
        let dead = self.letters_of(id).filter(|letter| letter.dead_at_ms.is_some()).map(|letter| letter.cursor);
        let dead: Vec<u64> = dead.collect();
        for cursor in &dead[..dead.len().saturating_sub(LETTERS_DEAD_MAX as usize)] {
            self.letters.remove(&(id.clone(), Cursor(*cursor)));
        }
        self.append(lines);
    }

    fn replay(&mut self, id: &WebhookId, what: Replay, now_ms: u64, line: NewLine) -> Option<u64> {
        let (_, cursor) = self.subscriptions.get_mut(id)?;
        let again = match what {
            Replay::After(after) => {
                *cursor = after;
                self.letters.retain(|(of, at), letter| of != id || *at <= after || letter.dead_at_ms.is_some());
                0
            }
            Replay::Dead | Replay::One(_) => {
                let is_meant = |at: Cursor| matches!(what, Replay::Dead) || what == Replay::One(at);
                let meant = self
                    .letters
                    .iter_mut()
                    .filter(|((of, at), letter)| of == id && is_meant(*at) && letter.dead_at_ms.is_some());
                let mut again = 0;
                for (_, letter) in meant {
                    *letter = Letter::new(letter.cursor, letter.sandbox.clone(), now_ms);
                    again += 1;
                }
                again
            }
        };
        self.append(vec![line]);
        Some(again)
    }

    /// Forgets letters that died before a time: the lines they are about are forgotten too.
    pub(super) fn retain_letters(&mut self, before_ms: u64, limit: usize) -> usize {
        let old = self.letters.iter().filter(|(_, letter)| letter.dead_at_ms.is_some_and(|at_ms| at_ms < before_ms));
        let old: Vec<_> = old.map(|(place, _)| place.clone()).take(limit).collect();
        for place in &old {
            self.letters.remove(place);
        }
        old.len()
    }
}

#[async_trait]
impl Subscriptions for MemoryStore {
    async fn put_subscription(
        &self,
        epoch: Epoch,
        row: Subscription,
        from: Cursor,
        lines: Vec<NewLine>,
        max: u64,
    ) -> Result<()> {
        self.write("put_subscription", epoch, |state| state.put_subscription(row, from, lines, max))
    }

    async fn subscription(&self, id: &WebhookId) -> Result<Option<(Subscription, Standing)>> {
        self.call("subscription", |state| Ok(state.standing(id)))
    }

    async fn subscriptions(&self, query: &SubscriptionQuery) -> Result<SubscriptionListing> {
        self.call("subscriptions", |state| {
            let is_meant = |row: &Subscription| {
                query.project.as_ref().is_none_or(|project| row.project.as_ref() == Some(project))
                    && query.after.as_ref().is_none_or(|after| row.id > *after)
            };
            let meant = state.subscriptions.values().filter(|(row, _)| is_meant(row));
            Ok(subscription::page(meant.filter_map(|(row, _)| state.standing(&row.id)), query.limit))
        })
    }

    async fn remove_subscription(&self, epoch: Epoch, id: &WebhookId, line: NewLine) -> Result<bool> {
        self.write("remove_subscription", epoch, |state| {
            let removed = state.subscriptions.remove(id).is_some();
            if removed {
                state.letters.retain(|(of, _), _| of != id);
                state.append(vec![line]);
            }
            Ok(removed)
        })
    }

    async fn put_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        between: (Cursor, Cursor),
        letters: Vec<Letter>,
    ) -> Result<bool> {
        self.write("put_letters", epoch, |state| Ok(state.put_letters(id, between, letters)))
    }

    async fn letters(&self, query: &LetterQuery) -> Result<Vec<Letter>> {
        self.call("letters", |state| {
            let meant = state
                .letters_of(&query.of)
                .filter(|letter| letter.dead_at_ms.is_some() == query.dead && letter.cursor > query.after.0);
            Ok(meant.take(query.limit).cloned().collect())
        })
    }

    async fn settle_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        settled: Vec<Settled>,
        lines: Vec<NewLine>,
    ) -> Result<()> {
        self.write("settle_letters", epoch, |state| {
            state.settle_letters(id, settled, lines);
            Ok(())
        })
    }

    async fn replay(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        what: Replay,
        now_ms: u64,
        line: NewLine,
    ) -> Result<Option<u64>> {
        self.write("replay", epoch, |state| Ok(state.replay(id, what, now_ms, line)))
    }
}
