//! What can be asked about subscriptions.

use std::collections::BTreeMap;

use serde_json::json;
use viv_core::hook::Secret;
use viv_core::lifecycle::Actor;
use viv_core::spec::Project;
use viv_core::subscription::{Letter, SUBSCRIPTIONS_MAX, Subscription};
use viv_core::{SandboxId, WebhookId};
use viv_store::{
    Cursor, JournalLine, LetterQuery, NewLine, Replay, Standing, StoreError, SubscriptionListing, SubscriptionQuery,
};

use super::{SubscriptionConfig, Tried, line};
use crate::engine::{Engine, RACES_MAX};
use crate::error::EngineError;

/// What every secret begins with, so that one that leaked is found.
const SECRET_PREFIX: &str = "whsec_";

/// What a subscription is made of.
#[derive(Debug, Clone)]
pub struct NewSubscription {
    /// Whose lines; `None` is those of all projects and of the installation.
    pub project: Option<Project>,
    /// To where.
    pub url: String,
    /// What it is for, for people.
    pub note: Option<String>,
    /// Which kinds; empty is any.
    pub kinds: Vec<String>,
    /// Only about this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Only about sandboxes with all of these labels.
    pub labels: BTreeMap<String, String>,
    /// From which place on; from now on when absent.
    pub after: Option<u64>,
}

/// What is to be otherwise; what is not said stays.
#[derive(Debug, Clone, Default)]
pub struct SubscriptionChange {
    /// To where.
    pub url: Option<String>,
    /// What it is for, for people.
    pub note: Option<String>,
    /// Which kinds.
    pub kinds: Option<Vec<String>>,
    /// Only about sandboxes with all of these labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// Whether letters are sent.
    pub enabled: Option<bool>,
}

impl Engine {
    fn subscription_config(&self) -> Result<&SubscriptionConfig, EngineError> {
        self.inner.config.subscriptions.as_ref().ok_or_else(|| EngineError::Invalid {
            what: "this daemon sends events to nobody".to_owned(),
            hint: "follow them instead: viv events --follow".to_owned(),
        })
    }

    fn new_secret(&self) -> Secret {
        let bytes = [(self.inner.draw)(), (self.inner.draw)()].concat();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Secret::new(format!("{SECRET_PREFIX}{hex}"))
    }

    /// Makes a subscription. Answers when it is durable.
    pub async fn create_subscription(
        &self,
        new: NewSubscription,
        by: Actor,
    ) -> Result<(Subscription, Standing), EngineError> {
        self.subscription_config()?;
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let mut bytes = (inner.draw)();
        // An id that sorts by when it was made.
        bytes[..6].copy_from_slice(&now_ms.to_be_bytes()[2..]);
        let newest = *inner.store.tail().borrow();
        let from = new.after.map_or(newest, |after| Cursor(after).min(newest));
        let row = Subscription {
            id: WebhookId::from_bytes(bytes),
            project: new.project,
            version: 1,
            url: new.url,
            note: new.note,
            secret: self.new_secret(),
            secret_before: None,
            kinds: new.kinds,
            sandbox: new.sandbox,
            labels: new.labels,
            enabled: true,
            made_by: by.clone(),
            made_at_ms: now_ms,
        };
        let lines = vec![line(&row, "webhook.created", by, now_ms, json!({ "kinds": row.kinds }))];
        inner.store.put_subscription(inner.epoch, row.clone(), from, lines, SUBSCRIPTIONS_MAX).await?;
        self.keep_subscription(&row.id);
        Ok((row, Standing { cursor: from, ..Standing::default() }))
    }

    /// A subscription, if who asks may see it.
    pub async fn subscription(
        &self,
        project: Option<&Project>,
        id: &WebhookId,
    ) -> Result<(Subscription, Standing), EngineError> {
        let found = self.inner.store.subscription(id).await?;
        let seen = found.filter(|(row, _)| project.is_none_or(|project| row.project.as_ref() == Some(project)));
        seen.ok_or_else(|| EngineError::NoWebhook { which: id.clone() })
    }

    /// A page of them.
    pub async fn subscriptions(&self, query: &SubscriptionQuery) -> Result<SubscriptionListing, EngineError> {
        Ok(self.inner.store.subscriptions(query).await?)
    }

    /// Changes one; what is not said stays. Letters that wait go to where it leads then.
    pub async fn change_subscription(
        &self,
        id: &WebhookId,
        change: &SubscriptionChange,
        by: Actor,
    ) -> Result<(Subscription, Standing), EngineError> {
        self.amend_subscription(id, |row, now_ms| {
            let SubscriptionChange { url, note, kinds, labels, enabled } = change.clone();
            let what: Vec<&str> = [
                ("url", url.is_some()),
                ("note", note.is_some()),
                ("kinds", kinds.is_some()),
                ("labels", labels.is_some()),
                ("enabled", enabled.is_some()),
            ]
            .into_iter()
            .filter_map(|(name, is_said)| is_said.then_some(name))
            .collect();
            row.url = url.unwrap_or_else(|| row.url.clone());
            row.note = note.or_else(|| row.note.clone());
            row.kinds = kinds.unwrap_or_else(|| row.kinds.clone());
            row.labels = labels.unwrap_or_else(|| row.labels.clone());
            row.enabled = enabled.unwrap_or(row.enabled);
            let data = json!({ "changed": what, "enabled": row.enabled });
            line(row, "webhook.changed", by.clone(), now_ms, data)
        })
        .await
    }

    /// Gives it another secret. The one before is signed with too for so long, so that who receives can change over.
    pub async fn rotate_subscription(
        &self,
        id: &WebhookId,
        overlap_ms: u64,
        by: Actor,
    ) -> Result<(Subscription, Standing), EngineError> {
        let secret = self.new_secret();
        self.amend_subscription(id, |row, now_ms| {
            let until_ms = now_ms.saturating_add(overlap_ms);
            let before = std::mem::replace(&mut row.secret, secret.clone());
            row.secret_before = (overlap_ms > 0).then_some((before, until_ms));
            line(row, "webhook.rotated", by.clone(), now_ms, json!({ "overlap_ms": overlap_ms }))
        })
        .await
    }

    async fn amend_subscription(
        &self,
        id: &WebhookId,
        mut change: impl FnMut(&mut Subscription, u64) -> NewLine,
    ) -> Result<(Subscription, Standing), EngineError> {
        let inner = &self.inner;
        for _ in 0..RACES_MAX {
            let (mut row, standing) = self.subscription(None, id).await?;
            let line = change(&mut row, inner.clock.now_ms());
            row.version += 1;
            let put = inner.store.put_subscription(inner.epoch, row.clone(), Cursor(0), vec![line], SUBSCRIPTIONS_MAX);
            match put.await {
                Ok(()) => {
                    self.keep_subscription(id);
                    return Ok((row, standing));
                }
                Err(StoreError::SubscriptionConflict { .. }) => {}
                Err(other) => return Err(other.into()),
            }
        }
        Err(EngineError::Store(StoreError::Unavailable { what: format!("{id} changes faster than it can be read") }))
    }

    /// Takes one away, with what it has not sent.
    pub async fn remove_subscription(&self, id: &WebhookId, by: Actor) -> Result<(), EngineError> {
        let (row, standing) = self.subscription(None, id).await?;
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let data = json!({ "waiting": standing.waiting, "dead": standing.dead });
        inner.store.remove_subscription(inner.epoch, id, line(&row, "webhook.removed", by, now_ms, data)).await?;
        if let Some(keeper) = inner.subscribed.lock().remove(id) {
            keeper.task.abort();
        }
        Ok(())
    }

    /// Letters that wait, or are dead.
    pub async fn letters(&self, query: &LetterQuery) -> Result<Vec<Letter>, EngineError> {
        Ok(self.inner.store.letters(query).await?)
    }

    /// Sends again. How many letters that makes, where that is known now.
    pub async fn replay(&self, id: &WebhookId, what: Replay, by: Actor) -> Result<u64, EngineError> {
        let (row, _) = self.subscription(None, id).await?;
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let what = match what {
            Replay::After(after) => Replay::After(after.min(*inner.store.tail().borrow())),
            Replay::Dead | Replay::One(_) => what,
        };
        let data = match what {
            Replay::Dead => json!({ "what": "dead" }),
            Replay::One(Cursor(seq)) => json!({ "what": "dead", "seq": seq }),
            Replay::After(Cursor(after)) => json!({ "what": "after", "after": after }),
        };
        let line = line(&row, "webhook.replayed", by, now_ms, data);
        let again = inner.store.replay(inner.epoch, id, what, now_ms, line).await?;
        let again = again.ok_or_else(|| EngineError::NoWebhook { which: id.clone() })?;
        self.keep_subscription(id);
        Ok(again)
    }

    /// Sends a line that is in no journal, once and now. Why it was not taken, if it was not.
    pub async fn try_subscription(&self, id: &WebhookId, by: Actor) -> Result<Option<String>, EngineError> {
        let config = self.subscription_config()?;
        let (row, _) = self.subscription(None, id).await?;
        let (inner, now_ms) = (&self.inner, self.inner.clock.now_ms());
        let line = line(&row, "webhook.test", by, now_ms, json!({ "message": "a test, which is in no journal" }));
        let delivery = format!("{id}-test-{now_ms}");
        let body = (config.body)(&row, &delivery, JournalLine { cursor: Cursor(0), line });
        Ok(match inner.send(config, &row, delivery, None, body).await {
            Tried::Taken => None,
            Tried::Failed(why) => Some(why),
            Tried::Later(at_ms) => {
                let wait_s = at_ms.saturating_sub(now_ms).div_ceil(1000);
                Some(format!("failed too often, and is not asked for {wait_s} s"))
            }
        })
    }
}
