//! Webhooks: subscriptions to the journal, to which events are sent (O6).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use viv_core::{SandboxId, WebhookId};

use crate::bound::{EventKinds, Labels, Note, ProjectName, SandboxRef, SecretOverlapMs, Sequence, WebhookUrl};
use crate::event::Event;

/// A webhook to make. Answered with 201 when it is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "url": "https://example.com/hooks/viv", "kinds": ["sandbox.moved", "task"], "labels": {"team": "search"}
})))]
#[serde(deny_unknown_fields)]
pub struct CreateSubscription {
    /// To where events are sent. Only its scheme and host are told back.
    pub url: WebhookUrl,
    /// What it is for, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Which kinds of events: `sandbox.moved`, or `sandbox` for all that begin so. Any when there are none.
    #[serde(default)]
    pub kinds: EventKinds,
    /// Only those about this sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxRef>,
    /// Only those about sandboxes with all of these labels.
    #[serde(default)]
    pub labels: Labels,
    /// Of which project; the caller's when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<ProjectName>,
    /// Of all projects and of the installation, alerts among them. Takes the scope `admin`.
    #[serde(default)]
    pub all_projects: bool,
    /// Also those after this place in the journal, as far as they are kept; from now on when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Sequence>,
}

/// What is to be otherwise about a webhook; what is not said stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"kinds": ["sandbox"], "enabled": true})))]
#[serde(default, deny_unknown_fields)]
pub struct ChangeSubscription {
    /// To where events are sent, those that wait too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<WebhookUrl>,
    /// What it is for, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<Note>,
    /// Which kinds of events.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kinds: Option<EventKinds>,
    /// Only those about sandboxes with all of these labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<Labels>,
    /// Whether events are sent. Those that happen while they are not are sent later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// A webhook without its secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Subscription {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: WebhookId,
    /// Of which project; absent when it is of all.
    pub project: Option<String>,
    /// Scheme, host and port of its URL: the rest is often a secret (S6).
    pub destination: String,
    /// What it is for.
    pub note: Option<String>,
    /// Which kinds of events; any when there are none.
    pub kinds: Vec<String>,
    /// Only those about this sandbox.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub sandbox: Option<SandboxId>,
    /// Only those about sandboxes with all of these labels.
    pub labels: BTreeMap<String, String>,
    /// Whether events are sent.
    pub enabled: bool,
    /// When it was made.
    pub created_at_ms: u64,
    /// By whom.
    pub created_by: String,
    /// Until when the secret before is signed with too.
    pub secret_before_until_ms: Option<u64>,
    /// Its place in the journal: what lies before was sent, waits or is dead.
    pub after: u64,
    /// Events that wait to be sent.
    pub waiting: u64,
    /// Events that are not tried any more.
    pub dead: u64,
}

/// A webhook with its secret, which is told this once.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedSubscription {
    /// The webhook.
    pub webhook: Subscription,
    /// With what deliveries are signed: HMAC-SHA256 of the seconds, a dot and the body.
    pub secret: String,
}

impl std::fmt::Debug for CreatedSubscription {
    /// Without the secret: what is printed ends up in logs (S6).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreatedSubscription").field("webhook", &self.webhook).finish_non_exhaustive()
    }
}

/// How a secret is replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"overlap_ms": 3_600_000})))]
#[serde(default, deny_unknown_fields)]
pub struct RotateSecret {
    /// How long the secret before is signed with too; a day when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlap_ms: Option<SecretOverlapMs>,
}

/// What is to be sent once more: what is dead, unless a place is named.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"after": 120})))]
#[serde(default, deny_unknown_fields)]
pub struct ReplayEvents {
    /// Everything after this place in the journal, as far as it is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Sequence>,
    /// This one of those that are dead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seq: Option<Sequence>,
}

/// What is sent once more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Replayed {
    /// The webhook as it stands now.
    pub webhook: Subscription,
    /// How many events that were dead are sent again; those after a place are not known yet.
    pub revived: u64,
}

/// An event that is to be sent, or that is not tried any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventDelivery {
    /// Its place in the journal.
    pub seq: u64,
    /// What is sent as `Vivarium-Delivery`, the same each time.
    pub delivery: String,
    /// About which sandbox: those about one are sent one after the other.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub sandbox: Option<SandboxId>,
    /// Since when it waits.
    pub since_at_ms: u64,
    /// How often it was tried.
    pub attempts: u32,
    /// When it is tried next; absent when it is dead.
    pub next_at_ms: Option<u64>,
    /// Why it was not taken the last time.
    pub last_error: Option<String>,
    /// Since when it is dead.
    pub dead_at_ms: Option<u64>,
}

/// What came of a test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TriedSubscription {
    /// Whether it was taken.
    pub taken: bool,
    /// Why not.
    pub why: Option<String>,
}

/// What a webhook gets as its body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SentEvent {
    /// The same each time that it is sent: who has seen it can leave it.
    pub delivery: String,
    /// By which webhook.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub webhook: WebhookId,
    /// What happened.
    pub event: Event,
}
