//! Subscriptions of the faulty store: nobody subscribes in a simulated world, so faults are all that is added.

use async_trait::async_trait;
use viv_core::WebhookId;
use viv_core::subscription::{Letter, Subscription};
use viv_store::{
    Cursor, Epoch, LetterQuery, NewLine, Replay, Settled, Standing, StoreError, SubscriptionListing, SubscriptionQuery,
    Subscriptions,
};

use crate::store::FaultyStore;

type Result<T> = std::result::Result<T, StoreError>;

#[async_trait]
impl Subscriptions for FaultyStore {
    async fn put_subscription(
        &self,
        epoch: Epoch,
        row: Subscription,
        from: Cursor,
        lines: Vec<NewLine>,
        max: u64,
    ) -> Result<()> {
        self.write("put_subscription", epoch, self.truth.put_subscription(epoch, row, from, lines, max)).await
    }

    async fn subscription(&self, id: &WebhookId) -> Result<Option<(Subscription, Standing)>> {
        self.read(self.truth.subscription(id)).await
    }

    async fn subscriptions(&self, query: &SubscriptionQuery) -> Result<SubscriptionListing> {
        self.read(self.truth.subscriptions(query)).await
    }

    async fn remove_subscription(&self, epoch: Epoch, id: &WebhookId, line: NewLine) -> Result<bool> {
        self.write("remove_subscription", epoch, self.truth.remove_subscription(epoch, id, line)).await
    }

    async fn put_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        between: (Cursor, Cursor),
        letters: Vec<Letter>,
    ) -> Result<bool> {
        self.write("put_letters", epoch, self.truth.put_letters(epoch, id, between, letters)).await
    }

    async fn letters(&self, query: &LetterQuery) -> Result<Vec<Letter>> {
        self.read(self.truth.letters(query)).await
    }

    async fn settle_letters(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        settled: Vec<Settled>,
        lines: Vec<NewLine>,
    ) -> Result<()> {
        self.write("settle_letters", epoch, self.truth.settle_letters(epoch, id, settled, lines)).await
    }

    async fn replay(
        &self,
        epoch: Epoch,
        id: &WebhookId,
        what: Replay,
        now_ms: u64,
        line: NewLine,
    ) -> Result<Option<u64>> {
        self.write("replay", epoch, self.truth.replay(epoch, id, what, now_ms, line)).await
    }
}
