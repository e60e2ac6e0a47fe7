//! `[alerts]` in the configuration: how they are judged, and what differs from what ships.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Duration;

use anyhow::bail;
use serde::Deserialize;
use viv_engine::AlertConfig;
use viv_engine::alert::RULES;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct AlertsPart {
    /// How often they are judged.
    period_s: Option<NonZeroU64>,
    /// How long a rule must not hold before it is resolved.
    resolve_after_s: Option<u64>,
    /// How long a sandbox may run without progress before it counts as stuck.
    stuck_after_s: Option<u64>,
    /// By the name of the rule.
    rules: BTreeMap<String, RulePart>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RulePart {
    /// Whether it is judged at all.
    enabled: Option<bool>,
    /// It holds above this.
    above: Option<f64>,
    /// Over how long growth is measured.
    window_s: Option<NonZeroU64>,
    /// How long it has to hold.
    for_s: Option<u64>,
}

impl AlertsPart {
    /// Over what ships.
    pub(super) fn config(&self) -> anyhow::Result<AlertConfig> {
        let mut config = AlertConfig::default();
        let set = |known: &mut Duration, seconds: Option<u64>| {
            if let Some(seconds) = seconds {
                *known = Duration::from_secs(seconds);
            }
        };
        set(&mut config.period, self.period_s.map(NonZeroU64::get));
        set(&mut config.resolve_after, self.resolve_after_s);
        set(&mut config.stuck_after, self.stuck_after_s);
        for (name, part) in &self.rules {
            let Some(rule) = RULES.iter().find(|rule| rule.name == name) else {
                let names: Vec<&str> = RULES.iter().map(|rule| rule.name).collect();
                bail!("there is no alert {name:?}\nhint: one of {}", names.join(", "));
            };
            let mut setting = rule.default_setting();
            setting.enabled = part.enabled.unwrap_or(setting.enabled);
            setting.above = part.above.unwrap_or(setting.above);
            setting.window_ms = part.window_s.map_or(setting.window_ms, |seconds| seconds.get() * 1000);
            setting.for_ms = part.for_s.map_or(setting.for_ms, |seconds| seconds.saturating_mul(1000));
            config.rules.insert(name.clone(), setting);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o5_rules_are_set_by_name_and_the_others_are_as_they_ship() {
        let text =
            "period_s = 1\n[rules.sandbox_leak_detected]\nabove = 3\nfor_s = 2\n[rules.quota_high]\nenabled = false";
        let config = toml::from_str::<AlertsPart>(text).unwrap().config().unwrap();
        assert_eq!(config.period, Duration::from_secs(1));
        let leak = config.rules["sandbox_leak_detected"];
        assert!((leak.above - 3.0).abs() < f64::EPSILON && leak.for_ms == 2_000 && leak.enabled);
        assert!(!config.rules["quota_high"].enabled);
        assert_eq!(config.rules.len(), 2);
    }

    #[test]
    fn s5_an_alert_that_is_not_there_is_refused() {
        let wrong = toml::from_str::<AlertsPart>("[rules.leak]\nabove = 3").unwrap().config().unwrap_err();
        assert!(wrong.to_string().contains("sandbox_leak_detected"), "{wrong}");
    }
}
