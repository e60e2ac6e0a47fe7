//! The rules: one table for the daemon, Prometheus and the documentation.

use super::{AlertConfig, Window};
use crate::metrics::{Family, family};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Somebody should look.
    Warning,
    /// Somebody has to.
    Critical,
}

impl Severity {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
pub enum Measure {
    /// The sum of a gauge's series, now.
    Sum(&'static Family),
    /// The greatest of a gauge's series, now.
    Max(&'static Family),
    /// How much a counter grew in the window.
    Increase(&'static Family),
    /// What part of one counter's growth another one's is; nothing of nothing is 0.
    Share {
        /// Of these.
        part: &'static Family,
        /// Among these.
        of: &'static Family,
    },
}

impl PartialEq for Measure {
    fn eq(&self, other: &Self) -> bool {
        self.families().iter().map(|family| family.name).eq(other.families().iter().map(|family| family.name))
    }
}

impl Measure {
    /// What it is made of.
    pub fn families(&self) -> Vec<&'static Family> {
        match self {
            Self::Sum(family) | Self::Max(family) | Self::Increase(family) => vec![family],
            Self::Share { part, of } => vec![part, of],
        }
    }

    /// What it is, by these samples. Pure.
    pub fn value(&self, window: &Window, window_ms: u64) -> f64 {
        match self {
            Self::Sum(family) | Self::Max(family) => window.now(family),
            Self::Increase(family) => window.increase(family, window_ms),
            Self::Share { part, of } => {
                let of = window.increase(of, window_ms);
                if of > 0.0 { window.increase(part, window_ms) / of } else { 0.0 }
            }
        }
    }
}

/// When somebody is told.
#[derive(Debug, PartialEq)]
pub struct Rule {
    /// Its name.
    pub name: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What is measured.
    pub measure: Measure,
    /// It holds above this.
    pub above: f64,
    /// Over how long growth is measured.
    pub window_s: u64,
    /// How long it has to hold.
    pub for_s: u64,
    /// What that means.
    pub what: &'static str,
    /// The command to begin with.
    pub helps: &'static str,
}

/// What can be set differently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RuleSetting {
    /// Whether it is judged at all.
    pub enabled: bool,
    /// It holds above this.
    pub above: f64,
    /// Over how long growth is measured.
    pub window_ms: u64,
    /// How long it has to hold.
    pub for_ms: u64,
}

impl Rule {
    /// What ships.
    pub fn default_setting(&self) -> RuleSetting {
        RuleSetting { enabled: true, above: self.above, window_ms: self.window_s * 1000, for_ms: self.for_s * 1000 }
    }

    /// What is in force.
    pub fn setting(&self, config: &AlertConfig) -> Option<RuleSetting> {
        Some(config.rules.get(self.name).copied().unwrap_or_else(|| self.default_setting()))
    }

    /// In words, with numbers. Of what is greatest `most` says what it is, where that is known.
    pub fn words(&self, setting: &RuleSetting, value: f64, most: Option<&str>) -> String {
        match self.measure {
            Measure::Share { .. } => {
                let over = setting.window_ms / 60_000;
                let (value, above) = (value * 100.0, setting.above * 100.0);
                format!("{}: {value:.1} % in {over} min, more than {above:.1} %", self.what)
            }
            Measure::Max(_) => {
                let most = most.map_or(String::new(), |most| format!("{most}, "));
                // Rounded, the highest threshold would be all of it, of which nothing can be more.
                format!("{}: {most}{:.1} %, more than {:.1} %", self.what, value * 100.0, setting.above * 100.0)
            }
            Measure::Sum(_) | Measure::Increase(_) => {
                format!("{}: {value:.0}, more than {:.0}", self.what, setting.above)
            }
        }
    }

    /// The same as `PromQL`.
    pub fn expr(&self) -> String {
        let window = format!("{}s", self.window_s);
        let measured = match &self.measure {
            Measure::Sum(family) => format!("sum({})", family.name),
            Measure::Max(family) => format!("max({})", family.name),
            Measure::Increase(family) => format!("sum(increase({}[{window}]))", family.name),
            Measure::Share { part, of } => {
                format!("sum(increase({}[{window}])) / (sum(increase({}[{window}])) > 0)", part.name, of.name)
            }
        };
        format!("{measured} > {}", self.above)
    }
}

const QUARTER_S: u64 = 900;

/// All of them (O5, J3, L8, L10).
pub static RULES: &[Rule] = &[
    Rule {
        name: "sandbox_timeout_high",
        severity: Severity::Warning,
        measure: Measure::Share { part: &family::TIMEOUTS, of: &family::ENDS },
        above: 0.05,
        window_s: QUARTER_S,
        for_s: 60,
        what: "many sandboxes run into their hard deadline",
        helps: "viv events --cause expired",
    },
    Rule {
        name: "executions_timeout_high",
        severity: Severity::Warning,
        measure: Measure::Share { part: &family::EXECUTIONS_TIMED_OUT, of: &family::EXECUTIONS_ENDED },
        above: 0.05,
        window_s: QUARTER_S,
        for_s: 60,
        what: "many commands are ended because they took too long",
        helps: "viv events --kind execution.ended --cause timed_out",
    },
    Rule {
        name: "tasks_timeout_high",
        severity: Severity::Warning,
        measure: Measure::Share { part: &family::TASKS_TIMED_OUT, of: &family::TASKS_ALL },
        above: 0.05,
        window_s: QUARTER_S,
        for_s: 60,
        what: "many tasks are ended because they took too long",
        helps: "viv task ls --state timed_out",
    },
    Rule {
        name: "sandbox_leak_detected",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::ACTIVE),
        above: 20.0,
        window_s: 0,
        for_s: 300,
        what: "more sandboxes are active than there should be",
        helps: "viv ps",
    },
    Rule {
        name: "active_escalation",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::ACTIVE),
        above: 50.0,
        window_s: 0,
        for_s: 1_800,
        what: "far too many sandboxes are active, and that does not get better by itself",
        helps: "viv ps",
    },
    Rule {
        name: "sandbox_stuck",
        severity: Severity::Warning,
        measure: Measure::Sum(&family::STUCK),
        above: 0.0,
        window_s: 0,
        for_s: 60,
        what: "sandboxes do not go on",
        helps: "viv doctor SANDBOX",
    },
    Rule {
        name: "stop_failures_high",
        severity: Severity::Critical,
        measure: Measure::Share { part: &family::TERMINATIONS_FAILED, of: &family::TERMINATIONS },
        above: 0.10,
        window_s: QUARTER_S,
        for_s: 0,
        what: "many sandboxes do not end when they should",
        helps: "viv ps --status stopping",
    },
    Rule {
        name: "kill_failed",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::KILL_FAILED),
        above: 0.0,
        window_s: 0,
        for_s: 0,
        what: "what was to be ended is still there",
        helps: "viv doctor SANDBOX",
    },
    Rule {
        name: "save_failed",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::SAVE_FAILED),
        above: 0.0,
        window_s: 0,
        for_s: 0,
        what: "sandboxes could not be saved, and wait with their files kept",
        helps: "viv doctor SANDBOX",
    },
    Rule {
        name: "inactivity_high",
        severity: Severity::Warning,
        measure: Measure::Share { part: &family::TASKS_INACTIVE, of: &family::TASKS_ALL },
        above: 0.20,
        window_s: QUARTER_S,
        for_s: 60,
        what: "many tasks are ended because they say nothing",
        helps: "viv task ls --state inactive",
    },
    Rule {
        name: "orphans_found",
        severity: Severity::Warning,
        measure: Measure::Increase(&family::ORPHANS_FOUND),
        above: 0.0,
        window_s: QUARTER_S,
        for_s: 0,
        what: "something of ours was found that no record wants",
        helps: "viv audit",
    },
    Rule {
        name: "cleanup_failing",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::RECONCILERS_BAD),
        above: 0.0,
        window_s: 0,
        for_s: 120,
        what: "reconcilers fail, or do not run",
        helps: "viv doctor",
    },
    Rule {
        name: "provisioning_failing",
        severity: Severity::Critical,
        measure: Measure::Share { part: &family::PROVISIONS_FAILED, of: &family::PROVISIONS },
        above: 0.20,
        window_s: QUARTER_S,
        for_s: 0,
        what: "sandboxes cannot be brought up",
        helps: "viv ps --status failed",
    },
    Rule {
        name: "several_corrupted",
        severity: Severity::Critical,
        measure: Measure::Increase(&family::CORRUPTED),
        above: 2.0,
        window_s: 300,
        for_s: 0,
        what: "several sandboxes broke at once",
        helps: "viv doctor",
    },
    Rule {
        name: "quota_exhausted",
        severity: Severity::Critical,
        measure: Measure::Max(&family::QUOTA_RATIO),
        above: 0.999,
        window_s: 0,
        for_s: 0,
        what: "a quota is used up",
        helps: "viv stats",
    },
    Rule {
        name: "quota_high",
        severity: Severity::Warning,
        measure: Measure::Max(&family::QUOTA_RATIO),
        above: 0.80,
        window_s: 0,
        for_s: 300,
        what: "little is left of a quota",
        helps: "viv stats",
    },
    Rule {
        name: "breaker_open",
        severity: Severity::Critical,
        measure: Measure::Sum(&family::BREAKER_OPEN),
        above: 0.0,
        window_s: 0,
        for_s: 30,
        what: "somebody who is needed does not answer, and is left alone for a while",
        helps: "viv doctor",
    },
    Rule {
        name: "webhooks_failing",
        severity: Severity::Warning,
        measure: Measure::Sum(&family::WEBHOOKS_FAILING),
        above: 0.0,
        window_s: 0,
        for_s: 60,
        what: "events are not taken by who subscribed to them",
        helps: "viv webhook ls",
    },
    Rule {
        name: "webhook_dead_letters",
        severity: Severity::Critical,
        measure: Measure::Increase(&family::WEBHOOK_EVENTS_DIED),
        above: 0.0,
        window_s: QUARTER_S,
        for_s: 0,
        what: "events were not taken for so long that nobody tries any more",
        helps: "viv webhook ls",
    },
    Rule {
        name: "gate_off",
        severity: Severity::Warning,
        measure: Measure::Sum(&family::GATES_OFF),
        above: 0.0,
        window_s: 0,
        for_s: 0,
        what: "gates are off, or not on for everybody, and nothing else does what they do",
        helps: "viv version",
    },
];

/// A page that tells them all: a part of `docs/alerts.md` is made of it.
pub fn table() -> String {
    let mut text = String::from(
        "| alert | severity | holds when | for | what it says | begin with |\n|---|---|---|---|---|---|\n",
    );
    for rule in RULES {
        let row = format!(
            "| `{}` | {} | `{}` | {} s | {} | `{}` |\n",
            rule.name,
            rule.severity.as_str(),
            rule.expr(),
            rule.for_s,
            rule.what,
            rule.helps
        );
        text.push_str(&row);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alert::Sample;
    use crate::metrics::{Kind, Metrics};

    fn rule(name: &str) -> &'static Rule {
        RULES.iter().find(|rule| rule.name == name).unwrap()
    }

    fn holds(rule: &Rule, window: &Window) -> bool {
        rule.measure.value(window, rule.window_s * 1000) > rule.above
    }

    #[test]
    fn o5_gauges_are_summed_and_counters_grow() {
        for rule in RULES {
            for family in rule.measure.families() {
                let fits = match rule.measure {
                    Measure::Sum(_) | Measure::Max(_) => family.kind == Kind::Gauge,
                    // Without labels, so that the first one is seen as growth.
                    Measure::Increase(_) | Measure::Share { .. } => {
                        family.kind == Kind::Counter && family.labels.is_empty() && rule.window_s > 0
                    }
                };
                assert!(fits, "{} measures {}", rule.name, family.name);
            }
        }
    }

    #[test]
    fn o5_a_share_is_of_what_happened_in_its_window() {
        let (metrics, mut window) = (Metrics::default(), Window::default());
        let rule = rule("stop_failures_high");
        window.push(Sample::of(&metrics, 0));
        assert!(!holds(rule, &window), "nothing of nothing");
        metrics.add(&family::TERMINATIONS, &[], 10.0);
        metrics.add(&family::TERMINATIONS_FAILED, &[], 1.0);
        window.push(Sample::of(&metrics, 10_000));
        assert!(!holds(rule, &window), "10 % is not more than 10 %");
        metrics.add(&family::TERMINATIONS_FAILED, &[], 1.0);
        window.push(Sample::of(&metrics, 20_000));
        assert!(holds(rule, &window));
        window.push(Sample::of(&metrics, 30_000 + QUARTER_S * 1000));
        assert!(!holds(rule, &window), "that was before");
    }

    #[test]
    fn o5_each_rule_holds_and_does_not() {
        for rule in RULES {
            let (metrics, mut window) = (Metrics::default(), Window::default());
            window.push(Sample::of(&metrics, 0));
            assert!(!holds(rule, &window), "{}", rule.name);
            let labels = |family: &Family| vec!["x"; family.labels.len()];
            match rule.measure {
                Measure::Sum(family) | Measure::Max(family) => metrics.set(family, &labels(family), rule.above + 1.0),
                Measure::Increase(family) => metrics.add(family, &[], rule.above + 1.0),
                Measure::Share { part, of } => {
                    metrics.add(of, &[], 4.0);
                    metrics.add(part, &[], 2.0);
                }
            }
            window.push(Sample::of(&metrics, 15_000));
            assert!(holds(rule, &window), "{}", rule.name);
        }
    }
}
