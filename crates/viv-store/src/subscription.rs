//! Subscriptions and their letters (O6): what is asked of every store.

use async_trait::async_trait;
use viv_core::WebhookId;
use viv_core::spec::Project;
use viv_core::subscription::{Letter, Subscription};

use crate::error::StoreError;
use crate::journal::{Cursor, NewLine};
use crate::store::Epoch;

type Result<T> = std::result::Result<T, StoreError>;

/// Letters of one subscription that are dead and kept: of more, the oldest are forgotten. What they are about is in the
/// journal for its time all the same, from which everything can be sent again.
pub const LETTERS_DEAD_MAX: u64 = 1_000;

/// Which subscriptions to list: in the order of their ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubscriptionQuery {
    /// Of this project.
    pub project: Option<Project>,
    /// After this one.
    pub after: Option<WebhookId>,
    /// At most this many.
    pub limit: usize,
}

impl SubscriptionQuery {
    /// The word for how many there may be, in [`StoreError::Quota`].
    pub const LIMIT: &'static str = "webhooks";
}

/// A page of subscriptions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubscriptionListing {
    /// The rows, each with how it stands.
    pub items: Vec<(Subscription, Standing)>,
    /// Where to go on.
    pub next: Option<WebhookId>,
}

/// How a subscription stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its place in the journal: what lies before was looked at.
    pub cursor: Cursor,
    /// Letters that wait.
    pub waiting: u64,
    /// Letters that are dead.
    pub dead: u64,
}

/// Which letters to read: oldest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LetterQuery {
    /// Of whom.
    pub of: WebhookId,
    /// Those that are dead, or those that wait.
    pub dead: bool,
    /// After this place.
    pub after: Cursor,
    /// At most this many.
    pub limit: usize,
}

/// What came of a letter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    /// It was taken.
    Taken(Cursor),
    /// It was not, and is so now: it waits longer, or is dead.
    Kept(Letter),
}

/// What is to be sent once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// All that are dead.
    Dead,
    /// This one that is dead.
    One(Cursor),
    /// Everything after this place. What waits after it is dropped, since it is found again.
    After(Cursor),
}

/// The part of a store that keeps subscriptions. The rules of [`crate::Store`] hold here too.
#[async_trait]
pub trait Subscriptions: Send + Sync {
    /// Writes a subscription with the lines about it, by compare-and-set on its version: 1 is a new one, whose place is
    /// `from`; that of one that is there stays. `SubscriptionConflict` when the stored version is not one less, `Quota`
    /// when a new one would be more than this many of all.
    async fn put_subscription(
        &self,
        epoch: Epoch,
        row: Subscription,
        from: Cursor,
        lines: Vec<NewLine>,
        max: u64,
    ) -> Result<()>;

    /// A subscription, and how it stands.
    async fn subscription(&self, id: &WebhookId) -> Result<Option<(Subscription, Standing)>>;

    /// A page of them.
    async fn subscriptions(&self, query: &SubscriptionQuery) -> Result<SubscriptionListing>;

    /// Takes one away with its letters, and a line about it. Whether it was there; without it there is no line.
    async fn remove_subscription(&self, epoch: Epoch, id: &WebhookId, line: NewLine) -> Result<bool>;

    /// Moves the place of one from here to there, and writes the letters for what lies between; one that is there
    /// already begins anew. Whether it was: not when its place is another, or it is gone.
    async fn put_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        (from, to): (Cursor, Cursor),
        letters: Vec<Letter>,
    ) -> Result<bool>;

    /// Letters, oldest first.
    async fn letters(&self, query: &LetterQuery) -> Result<Vec<Letter>>;

    /// Writes down what came of letters, with lines about it; those that are gone stay so. Of those that are dead, the
    /// latest [`LETTERS_DEAD_MAX`] are kept.
    async fn settle_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        settled: Vec<Settled>,
        lines: Vec<NewLine>,
    ) -> Result<()>;

    /// Sends again. Answers how many letters that makes, where that is known now; nothing when there is no such
    /// subscription.
    async fn replay(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        what: Replay,
        now_ms: u64,
        line: NewLine,
    ) -> Result<Option<u64>>;
}

/// What the stored version has to be for this row to be written.
pub(crate) fn expected_version(row: &Subscription) -> Result<u64> {
    row.version.checked_sub(1).ok_or_else(|| StoreError::Corrupt {
        what: format!("{} was to be written with version 0; the first one is 1", row.id),
    })
}

/// Refuses one more.
pub(crate) fn check_count(used: u64, max: u64) -> Result<()> {
    if used < max { Ok(()) } else { Err(StoreError::Quota { limit: SubscriptionQuery::LIMIT, used, max }) }
}

/// A page of those that are left, which are in order.
pub(crate) fn page(rest: impl Iterator<Item = (Subscription, Standing)>, limit: usize) -> SubscriptionListing {
    let mut rest = rest.peekable();
    let items: Vec<_> = rest.by_ref().take(limit).collect();
    let next = items.last().filter(|_| rest.peek().is_some()).map(|(last, _)| last.id.clone());
    SubscriptionListing { items, next }
}
