//! Webhooks.

use ureq::http::Method;

use super::http::Call;
use super::sandbox::pages;
use super::{Client, Result};
use crate::bound::WebhookRef;
use crate::page::Page;
use crate::path::{self, fill};
use crate::query::{self, encode};
use crate::subscription::{
    ChangeSubscription, CreateSubscription, CreatedSubscription, EventDelivery, ReplayEvents, Replayed, RotateSecret,
    Subscription, TriedSubscription,
};

impl Client {
    /// Makes a webhook. Its secret is told this once.
    pub fn create_webhook(&self, request: &CreateSubscription) -> Result<CreatedSubscription> {
        self.http.ask(Call::post(path::WEBHOOKS).json(request))
    }

    /// All webhooks, part by part.
    pub fn webhooks_all(&self) -> impl Iterator<Item = Result<Subscription>> + '_ {
        pages(None, |cursor| -> Result<Page<Subscription>> {
            let query = query::PageQuery { cursor, limit: None };
            self.http.ask(Call::get(path::WEBHOOKS.to_owned() + &encode(&query)))
        })
    }

    /// A webhook.
    pub fn webhook(&self, webhook: &WebhookRef) -> Result<Subscription> {
        self.http.ask(Call::get(fill(path::WEBHOOK, &[webhook.as_str()])))
    }

    /// Changes a webhook; what is not said stays.
    pub fn change_webhook(&self, webhook: &WebhookRef, change: &ChangeSubscription) -> Result<Subscription> {
        self.http.ask(Call::new(Method::PUT, fill(path::WEBHOOK, &[webhook.as_str()])).json(change))
    }

    /// Takes a webhook away, with what it has not sent.
    pub fn remove_webhook(&self, webhook: &WebhookRef) -> Result<()> {
        self.http.tell(Call::new(Method::DELETE, fill(path::WEBHOOK, &[webhook.as_str()])))
    }

    /// Gives it another secret, which is told this once.
    pub fn rotate_webhook(&self, webhook: &WebhookRef, request: &RotateSecret) -> Result<CreatedSubscription> {
        self.http.ask(Call::post(fill(path::WEBHOOK_ROTATE, &[webhook.as_str()])).json(request))
    }

    /// Sends events once more.
    pub fn replay_webhook(&self, webhook: &WebhookRef, request: &ReplayEvents) -> Result<Replayed> {
        self.http.ask(Call::post(fill(path::WEBHOOK_REPLAY, &[webhook.as_str()])).json(request))
    }

    /// Sends an event that is none, and says what came of it.
    pub fn test_webhook(&self, webhook: &WebhookRef) -> Result<TriedSubscription> {
        self.http.ask(Call::post(fill(path::WEBHOOK_TEST, &[webhook.as_str()])))
    }

    /// Its events that wait, or are dead, part by part.
    pub fn webhook_deliveries(
        &self,
        webhook: &WebhookRef,
        dead: bool,
    ) -> impl Iterator<Item = Result<EventDelivery>> + '_ {
        let path = fill(path::WEBHOOK_DELIVERIES, &[webhook.as_str()]);
        pages(None, move |cursor| -> Result<Page<EventDelivery>> {
            let query = query::ListDeliveries { cursor, limit: None, dead };
            self.http.ask(Call::get(path.clone() + &encode(&query)))
        })
    }
}
