//! Subscriptions as data: to whom the journal's lines are sent, and what is still to be sent (O6).
//!
//! A subscription has a place in the journal. What lies before it was looked at: each line that is wanted has become a
//! [`Letter`], in the same transaction in which the place moved. A letter is there until it was taken, or is dead.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::hook::Secret;
use crate::id::{SandboxId, WebhookId};
use crate::lifecycle::Actor;
use crate::spec::Project;

/// Most subscriptions of an installation: each is looked after by somebody.
pub const SUBSCRIPTIONS_MAX: u64 = 100;

/// How long the secret before is signed with too when nothing is said: who receives has so long to change over.
pub const ROTATION_MS_DEFAULT: u64 = 24 * 3600 * 1000;

/// Lines about subscriptions themselves are sent to none: one that fails would go on telling that it failed.
const OWN_KINDS: &str = "webhook.";

/// To whom lines are sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    /// Its id.
    pub id: WebhookId,
    /// Whose lines; `None` is those of all projects and of the installation.
    pub project: Option<Project>,
    /// Grows with each change.
    pub version: u64,
    /// To where.
    pub url: String,
    /// What it is for, for people.
    #[serde(default)]
    pub note: Option<String>,
    /// With what letters are signed.
    pub secret: Secret,
    /// With what they are signed beside it, and until when.
    #[serde(default)]
    pub secret_before: Option<(Secret, u64)>,
    /// Kinds that are wanted: `sandbox.moved`, or `sandbox` for all of those. Empty is any.
    #[serde(default)]
    pub kinds: Vec<String>,
    /// Only about this sandbox.
    #[serde(default)]
    pub sandbox: Option<SandboxId>,
    /// Only about sandboxes with all of these labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether letters are sent. Who is switched off misses nothing: its place stays where it was.
    pub enabled: bool,
    /// Who made it.
    pub made_by: Actor,
    /// When.
    pub made_at_ms: u64,
}

impl Subscription {
    /// Whether a line of this kind, about this sandbox, is wanted; labels are looked at apart ([`Self::wants_labels`]).
    pub fn wants(&self, kind: &str, sandbox: Option<&SandboxId>) -> bool {
        let is_of = |wanted: &String| {
            kind.strip_prefix(wanted.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        !kind.starts_with(OWN_KINDS)
            && (self.kinds.is_empty() || self.kinds.iter().any(is_of))
            && self.sandbox.as_ref().is_none_or(|wanted| Some(wanted) == sandbox)
    }

    /// Whether lines about a sandbox with these labels are wanted.
    pub fn wants_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    /// The secrets that are signed with now, the newest first.
    pub fn secrets(&self, now_ms: u64) -> Vec<Secret> {
        let before = self.secret_before.as_ref().filter(|(_, until_ms)| now_ms < *until_ms);
        std::iter::once(&self.secret).chain(before.map(|(secret, _)| secret)).cloned().collect()
    }
}

/// A line that is to be sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Letter {
    /// Its place in the journal.
    pub cursor: u64,
    /// About which sandbox: those about one are sent one after the other.
    pub sandbox: Option<SandboxId>,
    /// Since when it waits.
    pub since_ms: u64,
    /// How often it was tried.
    pub attempts: u32,
    /// When it is tried next.
    pub next_at_ms: u64,
    /// Why it was not taken the last time.
    pub why: Option<String>,
    /// Since when nobody tries any more.
    pub dead_at_ms: Option<u64>,
}

impl Letter {
    /// One that is to be sent at once.
    pub fn new(cursor: u64, sandbox: Option<SandboxId>, now_ms: u64) -> Self {
        Self { cursor, sandbox, since_ms: now_ms, attempts: 0, next_at_ms: now_ms, why: None, dead_at_ms: None }
    }

    /// The same when it is sent again.
    pub fn id(&self, of: &WebhookId) -> String {
        format!("{of}-{}", self.cursor)
    }

    /// What becomes of it when it was not taken.
    #[must_use]
    pub fn failed(&self, why: String, now_ms: u64, jitter: u8, patience: &Patience) -> Self {
        let attempts = self.attempts.saturating_add(1);
        let is_over = attempts >= patience.attempts_max || now_ms.saturating_sub(self.since_ms) >= patience.age_ms_max;
        let dead_at_ms = is_over.then_some(now_ms);
        let next_at_ms = now_ms.saturating_add(patience.pause_ms(attempts, jitter));
        Self { attempts, next_at_ms, why: Some(why), dead_at_ms, ..self.clone() }
    }
}

/// How long is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// The pause after the first failure; it doubles.
    pub pause_ms_first: u64,
    /// Up to this.
    pub pause_ms_max: u64,
    /// How often it is tried.
    pub attempts_max: u32,
    /// For how long.
    pub age_ms_max: u64,
}

impl Default for Patience {
    /// With these pauses the last of its attempts is about 9 hours after the first.
    fn default() -> Self {
        Self { pause_ms_first: 1_000, pause_ms_max: 3_600_000, attempts_max: 20, age_ms_max: 24 * 3_600_000 }
    }
}

impl Patience {
    /// The pause after so many attempts, up to a quarter longer by chance, so that many do not come at once.
    pub fn pause_ms(&self, attempts: u32, jitter: u8) -> u64 {
        let doubled = 1_u64.checked_shl(attempts.saturating_sub(1)).unwrap_or(u64::MAX);
        let pause_ms = self.pause_ms_first.saturating_mul(doubled).min(self.pause_ms_max);
        pause_ms.saturating_add(pause_ms.saturating_mul(u64::from(jitter)) / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscription() -> Subscription {
        Subscription {
            id: WebhookId::from_bytes([1; 16]),
            project: None,
            version: 1,
            url: "https://example.com".to_owned(),
            note: None,
            secret: Secret::new("new"),
            secret_before: None,
            kinds: Vec::new(),
            sandbox: None,
            labels: BTreeMap::new(),
            enabled: true,
            made_by: Actor::part("test"),
            made_at_ms: 0,
        }
    }

    #[test]
    fn o6_kinds_are_whole_words_and_its_own_are_never_sent() {
        let any = subscription();
        assert!(any.wants("sandbox.moved", None) && any.wants("alert.firing", None));
        assert!(!any.wants("webhook.dead", None), "it would tell itself for ever that it fails");
        let some = Subscription { kinds: vec!["sandbox".to_owned(), "alert.firing".to_owned()], ..any };
        for (kind, wanted) in
            [("sandbox.moved", true), ("sandboxes.moved", false), ("alert.firing", true), ("alert.resolved", false)]
        {
            assert_eq!(some.wants(kind, None), wanted, "{kind}");
        }
        let own = Subscription { kinds: vec!["webhook".to_owned()], ..subscription() };
        assert!(!own.wants("webhook.created", None));
    }

    #[test]
    fn o6_of_a_sandbox_and_of_labels() {
        let id: SandboxId = "sbx_1".parse().unwrap();
        let of_one = Subscription { sandbox: Some(id.clone()), ..subscription() };
        assert!(of_one.wants("sandbox.moved", Some(&id)));
        assert!(!of_one.wants("sandbox.moved", None) && !of_one.wants("a.b", Some(&"sbx_2".parse().unwrap())));
        let labels = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let labelled = Subscription { labels: labels(&[("team", "a")]), ..subscription() };
        assert!(labelled.wants_labels(&labels(&[("team", "a"), ("x", "y")])));
        assert!(!labelled.wants_labels(&labels(&[("team", "b")])) && !labelled.wants_labels(&labels(&[])));
    }

    #[test]
    fn o6_both_secrets_are_signed_with_until_the_older_one_is_over() {
        let mut rotated = subscription();
        rotated.secret_before = Some((Secret::new("old"), 100));
        assert_eq!(rotated.secrets(99), [Secret::new("new"), Secret::new("old")]);
        assert_eq!(rotated.secrets(100), [Secret::new("new")]);
    }

    #[test]
    fn o6_pauses_grow_and_a_letter_dies_of_attempts_or_age() {
        let patience = Patience { pause_ms_first: 10, pause_ms_max: 35, attempts_max: 4, age_ms_max: 1_000 };
        let pauses: Vec<u64> = (1..=4).map(|attempts| patience.pause_ms(attempts, 0)).collect();
        assert_eq!(pauses, [10, 20, 35, 35]);
        assert!(patience.pause_ms(1, u8::MAX) <= 12 && Patience::default().pause_ms(u32::MAX, 255) < 4_500_000);
        let mut letter = Letter::new(7, None, 0);
        for attempt in 1..4 {
            letter = letter.failed("down".to_owned(), 5, 0, &patience);
            assert_eq!((letter.attempts, letter.dead_at_ms), (attempt, None));
            assert_eq!(letter.next_at_ms, 5 + patience.pause_ms(attempt, 0));
            assert_eq!(letter.why.as_deref(), Some("down"));
        }
        assert_eq!(letter.failed("down".to_owned(), 6, 0, &patience).dead_at_ms, Some(6));
        // Who receives it tells by this whether it had it before.
        let (one, other) = (WebhookId::from_bytes([1; 16]), WebhookId::from_bytes([2; 16]));
        assert_eq!(letter.id(&one), Letter::new(7, None, 0).id(&one));
        assert!(letter.id(&one) != letter.id(&other) && letter.id(&one) != Letter::new(8, None, 0).id(&one));
        let old = Letter::new(8, None, 0).failed("down".to_owned(), 1_000, 0, &patience);
        assert_eq!((old.attempts, old.dead_at_ms), (1, Some(1_000)));
    }
}
