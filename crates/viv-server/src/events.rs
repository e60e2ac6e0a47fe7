//! Events as they are sent to who subscribed to them (O6).

use std::sync::Arc;
use std::time::Duration;

use viv_api::subscription::SentEvent;
use viv_core::subscription::{Patience, Subscription};
use viv_engine::SubscriptionConfig;
use viv_store::JournalLine;

use crate::private::Private;
use crate::show;
use crate::webhook::{WebhookConfig, webhooks};

/// How events are sent. Whoever subscribed to one project is told no place on the host, as over the API (S6).
pub fn events(
    config: &WebhookConfig,
    private_places: &[String],
    patience: Patience,
    within: Duration,
) -> SubscriptionConfig {
    let private = Private::new(private_places);
    let body = move |of: &Subscription, delivery: &str, line: JournalLine| {
        let mut event = show::event(line);
        if of.project.is_some() {
            private.event(&mut event);
        }
        let sent = SentEvent { delivery: delivery.to_owned(), webhook: of.id.clone(), event };
        serde_json::to_vec(&sent).unwrap_or_default()
    };
    SubscriptionConfig { send: webhooks(config), body: Arc::new(body), patience, within }
}
