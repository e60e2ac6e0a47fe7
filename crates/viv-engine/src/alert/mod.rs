//! Alerts (O5): rules over the figures, judged on a period.
//!
//! ```text
//!   inactive ──holds──► pending ──for so long──► firing ──does not hold, for so long──► inactive (resolved)
//!      ▲                   │ does not hold          ▲  │
//!      └───────────────────┘                        └──┘ holds again meanwhile
//! ```
//!
//! A rule is data ([`rule::RULES`]), and is judged from a window of samples without asking anybody. The same table is
//! written as rules for Prometheus ([`prometheus`]), so both say the same. What began to fire or resolved is a line of the
//! journal, and so an event for everybody who follows it. What was told to fire is written down with that line, so the next
//! daemon goes on from there: it resolves what does not hold any more, and says nothing twice.

pub mod prometheus;
mod rule;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use viv_core::SandboxId;
use viv_core::lifecycle::Actor;
use viv_store::NewLine;

pub use rule::{Measure, RULES, Rule, RuleSetting, Severity, table};
pub use window::{Sample, Window};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::metrics::{Gathered, family};
use crate::reconcile::Report;

/// How alerts are judged.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertConfig {
    /// How often.
    pub period: Duration,
    /// How long a rule must not hold before it is resolved, so that nobody is told twice of what comes and goes.
    pub resolve_after: Duration,
    /// How long a sandbox may run without progress before it counts as stuck.
    pub stuck_after: Duration,
    /// What differs from what ships, by the name of the rule.
    pub rules: BTreeMap<String, RuleSetting>,
}

impl Default for AlertConfig {
    fn default() -> Self {
        Self {
            period: Duration::from_secs(15),
            resolve_after: Duration::from_secs(60),
            stuck_after: Duration::from_secs(600),
            rules: BTreeMap::new(),
        }
    }
}

/// Where a rule stands.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum AlertState {
    /// It does not hold.
    #[default]
    Inactive,
    /// It holds, and not for long enough yet.
    Pending {
        /// Since when.
        since_ms: u64,
    },
    /// It fires.
    Firing {
        /// Since when.
        since_ms: u64,
        /// When it was last seen to hold.
        held_at_ms: u64,
    },
}

impl AlertState {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Inactive => "inactive",
            Self::Pending { .. } => "pending",
            Self::Firing { .. } => "firing",
        }
    }

    /// Since when it is so.
    pub fn since_ms(self) -> Option<u64> {
        match self {
            Self::Inactive => None,
            Self::Pending { since_ms } | Self::Firing { since_ms, .. } => Some(since_ms),
        }
    }

    /// Where it stands after one more look.
    #[must_use]
    pub fn after(self, holds: bool, now_ms: u64, for_ms: u64, resolve_after_ms: u64) -> Self {
        match self {
            Self::Firing { since_ms, .. } if holds => Self::Firing { since_ms, held_at_ms: now_ms },
            Self::Firing { held_at_ms, .. } if now_ms.saturating_sub(held_at_ms) < resolve_after_ms => self,
            Self::Inactive | Self::Pending { .. } if holds => {
                let since_ms = self.since_ms().unwrap_or(now_ms);
                if now_ms.saturating_sub(since_ms) >= for_ms {
                    Self::Firing { since_ms: now_ms, held_at_ms: now_ms }
                } else {
                    Self::Pending { since_ms }
                }
            }
            Self::Firing { .. } | Self::Inactive | Self::Pending { .. } => Self::Inactive,
        }
    }
}

/// An alert as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct Alert {
    /// Its rule.
    pub rule: &'static Rule,
    /// With what is set here.
    pub setting: RuleSetting,
    /// Where it stands.
    pub state: AlertState,
    /// What was measured last.
    pub value: f64,
    /// Some of the sandboxes that it is about, where it is about single ones. For those who run the installation.
    pub sandboxes: Vec<SandboxId>,
    /// Where it is about what is greatest, what that is. For the same people.
    pub most: Option<String>,
}

impl Alert {
    /// In words, with numbers.
    pub fn words(&self) -> String {
        self.rule.words(&self.setting, self.value, self.most.as_deref())
    }
}

/// What is kept between looks.
#[derive(Debug, Default)]
pub(crate) struct Alerts {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    window: Window,
    states: BTreeMap<&'static str, (AlertState, f64)>,
    /// What was told to fire, whether or not it is judged here.
    told: BTreeSet<&'static str>,
    /// Whom and what figures are about, by their family.
    about: Gathered,
}

impl Known {
    /// A rule as it is shown.
    fn alert(&self, rule: &'static Rule, setting: RuleSetting, state: AlertState, value: f64) -> Alert {
        let (sandboxes, most) = match state {
            AlertState::Inactive => (Vec::new(), None),
            AlertState::Pending { .. } | AlertState::Firing { .. } => (self.whom(rule), self.most(rule)),
        };
        Alert { rule, setting, state, value, sandboxes, most }
    }

    /// What is greatest of what a rule looks at.
    fn most(&self, rule: &Rule) -> Option<String> {
        rule.measure.families().into_iter().find_map(|family| self.about.most.get(family.name)).cloned()
    }

    /// Whom a rule is about.
    fn whom(&self, rule: &Rule) -> Vec<SandboxId> {
        let families = rule.measure.families().into_iter();
        families.filter_map(|family| self.about.whom.get(family.name)).flatten().cloned().collect()
    }
}

impl Alerts {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// All alerts that are judged here, those that are inactive too.
    pub fn alerts(&self) -> Vec<Alert> {
        let Some(config) = &self.inner.config.alerts else { return Vec::new() };
        let known = self.inner.alerts.lock();
        let shown = RULES.iter().filter_map(|rule| {
            let setting = rule.setting(config).filter(|setting| setting.enabled)?;
            let (state, value) = known.states.get(rule.name).copied().unwrap_or_default();
            Some(known.alert(rule, setting, state, value))
        });
        shown.collect()
    }
}

/// Under which name it is kept since when a rule fires, as far as that was told.
fn kept(rule: &Rule) -> String {
    format!("alert.{}", rule.name)
}

/// What a daemon before this one told to fire does so: nobody is told again, and who was told hears when it is over.
pub(crate) async fn take_up(inner: &Inner) -> Result<(), EngineError> {
    let Some(config) = &inner.config.alerts else { return Ok(()) };
    for rule in RULES {
        let Some(since) = inner.store.meta(&kept(rule)).await? else { continue };
        let held_at_ms = inner.clock.now_ms();
        let mut known = inner.alerts.lock();
        known.told.insert(rule.name);
        if rule.setting(config).is_some_and(|setting| setting.enabled) {
            // Who set it to something else than a time knows that it fires, at least.
            let since_ms = since.parse().unwrap_or(held_at_ms);
            known.states.insert(rule.name, (AlertState::Firing { since_ms, held_at_ms }, 0.0));
        }
    }
    Ok(())
}

/// One look: figures are brought up to now, every rule is judged, and what changed is journaled.
pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let Some(config) = &inner.config.alerts else { return Ok(Report::default()) };
    let about = inner.gather().await?;
    let now_ms = inner.clock.now_ms();
    let (mut report, mut news) = (Report::default(), Vec::new());
    let mut next = BTreeMap::new();
    {
        let mut known = inner.alerts.lock();
        known.about = about;
        known.window.push(Sample::of(&inner.metrics, now_ms));
        for rule in RULES {
            let Some(setting) = rule.setting(config) else { continue };
            let was_told = known.told.contains(rule.name);
            if !setting.enabled {
                // Nobody judges it any more, so nobody would say that it is over.
                if was_told {
                    news.push(known.alert(rule, setting, AlertState::Inactive, 0.0));
                }
                continue;
            }
            let value = rule.measure.value(&known.window, setting.window_ms);
            let (before, _) = known.states.get(rule.name).copied().unwrap_or_default();
            let resolve_after_ms = config.resolve_after.as_millis() as u64;
            let after = before.after(value > setting.above, now_ms, setting.for_ms, resolve_after_ms);
            let is_firing = matches!(after, AlertState::Firing { .. });
            report.found += u64::from(is_firing);
            if is_firing != was_told {
                news.push(known.alert(rule, setting, after, value));
            }
            next.insert(rule.name, (after, value));
        }
    }
    for alert in news {
        inner.tell_of_alert(&alert, now_ms).await?;
        report.did += 1;
    }
    let before = std::mem::replace(&mut inner.alerts.lock().states, next);
    let shown = inner.alerts.lock().states.clone();
    inner.metrics.clear(&family::ALERTS);
    for rule in RULES {
        let Some((state, value)) = shown.get(rule.name) else { continue };
        let was_firing = before.get(rule.name).is_some_and(|(state, _)| matches!(state, AlertState::Firing { .. }));
        match state {
            AlertState::Inactive => {}
            AlertState::Pending { .. } | AlertState::Firing { .. } => {
                let labels = [rule.name, rule.severity.as_str(), state.as_str()];
                inner.metrics.set(&family::ALERTS, &labels, 1.0);
            }
        }
        if matches!(state, AlertState::Firing { .. }) && !was_firing {
            inner.metrics.count(&family::ALERTS_FIRED, &[rule.name]);
            tracing::warn!(component = "alerts", alert = rule.name, value, "fires: {}", rule.what);
        }
    }
    Ok(report)
}

impl Inner {
    /// That it fires, or does not any more: written down and told in one transaction, before anything else is done about
    /// it. Who cannot write says the same at the next look, unless it was written and only the answer was lost.
    async fn tell_of_alert(&self, alert: &Alert, now_ms: u64) -> Result<(), EngineError> {
        let since = match alert.state {
            AlertState::Firing { since_ms, .. } => Some(since_ms.to_string()),
            AlertState::Inactive | AlertState::Pending { .. } => None,
        };
        let name = kept(alert.rule);
        if self.store.meta(&name).await?.is_some() != since.is_some() {
            self.store.put_meta(self.epoch, &name, since.as_deref(), line(alert, now_ms)).await?;
        }
        let told = &mut self.alerts.lock().told;
        if since.is_some() {
            told.insert(alert.rule.name)
        } else {
            told.remove(alert.rule.name)
        };
        Ok(())
    }
}

fn line(alert: &Alert, now_ms: u64) -> NewLine {
    let kind = match alert.state {
        AlertState::Firing { .. } => "alert.firing",
        AlertState::Inactive | AlertState::Pending { .. } => "alert.resolved",
    };
    NewLine {
        at_ms: now_ms,
        project: None,
        sandbox: None,
        generation: None,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("alerts"),
        data: json!({
            "alert": alert.rule.name,
            "severity": alert.rule.severity.as_str(),
            "value": alert.value,
            "above": alert.setting.above,
            "message": alert.words(),
            "helps": alert.rule.helps,
            "sandboxes": alert.sandboxes,
            "most": alert.most,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o5_an_alert_is_pending_before_it_fires_and_does_not_flap() {
        let (for_ms, resolve_ms) = (100, 50);
        let mut state = AlertState::default();
        let mut seen = Vec::new();
        for (now_ms, holds) in [
            (0, false),
            (10, true),
            (60, true),
            (70, false),
            (80, true),
            (179, true),
            (180, true),
            (200, false),
            (220, true),
            (260, false),
            (269, false),
            (270, false),
        ] {
            state = state.after(holds, now_ms, for_ms, resolve_ms);
            seen.push(state.as_str());
        }
        let (i, p, f) = ("inactive", "pending", "firing");
        assert_eq!(seen, [i, p, p, i, p, p, f, f, f, f, f, i]);
    }

    #[test]
    fn o5_what_needs_no_time_fires_at_once() {
        let state = AlertState::default().after(true, 5, 0, 10);
        assert_eq!(state, AlertState::Firing { since_ms: 5, held_at_ms: 5 });
    }
}
