//! Gates from the configuration file and `VIV_GATE_*` (O9).

use std::collections::BTreeMap;

use anyhow::{Context, bail};
use serde::Deserialize;
use viv_engine::{Gate, GateSetting};

/// How a gate is written in the file: `true`, `false`, a percentage, or a table with projects.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum GateText {
    Switch(bool),
    Percent(u8),
    Table {
        #[serde(default = "everybody")]
        percent: u8,
        #[serde(default)]
        projects: BTreeMap<viv_core::spec::Project, u8>,
    },
}

fn everybody() -> u8 {
    100
}

/// All settings: those of the file, and over them those of the environment.
pub(super) fn settings(
    file: &BTreeMap<String, GateText>,
    environment: impl Iterator<Item = (String, String)>,
) -> anyhow::Result<BTreeMap<Gate, GateSetting>> {
    let mut settings = BTreeMap::new();
    for (name, text) in file {
        let setting = match text {
            GateText::Switch(on) => GateSetting { percent: if *on { 100 } else { 0 }, ..GateSetting::default() },
            GateText::Percent(percent) => GateSetting { percent: *percent, ..GateSetting::default() },
            GateText::Table { percent, projects } => GateSetting { percent: *percent, projects: projects.clone() },
        };
        settings.insert(named(name)?, setting);
    }
    for (variable, value) in environment {
        let Some(name) = variable.strip_prefix("VIV_GATE_") else { continue };
        let percent = match value.as_str() {
            "on" | "true" | "1" => 100,
            "off" | "false" | "0" => 0,
            other => other.trim_end_matches('%').parse().with_context(|| {
                format!("{variable} is {value:?}\nhint: it is on, off, or of how many sandboxes in a hundred it is on")
            })?,
        };
        settings.insert(named(&name.to_ascii_lowercase())?, GateSetting { percent, ..GateSetting::default() });
    }
    if let Some((gate, _)) = settings
        .iter()
        .find(|(_, setting)| setting.percent > 100 || setting.projects.values().any(|percent| *percent > 100))
    {
        bail!("the gate {} is on for more than 100 %", gate.name());
    }
    Ok(settings)
}

fn named(name: &str) -> anyhow::Result<Gate> {
    Gate::named(name).with_context(|| {
        let all: Vec<&str> = Gate::ALL.into_iter().map(Gate::name).collect();
        format!("there is no gate {name:?}\nhint: there are {}", all.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o9_the_environment_goes_over_the_file() {
        let file = BTreeMap::from([
            ("breaker".to_owned(), GateText::Switch(false)),
            ("quota".to_owned(), GateText::Percent(20)),
        ]);
        let environment = [("VIV_GATE_BREAKER".to_owned(), "on".to_owned()), ("PATH".to_owned(), "/".to_owned())];
        let settings = settings(&file, environment.into_iter()).unwrap();
        assert_eq!(settings[&Gate::Breaker].percent, 100);
        assert_eq!(settings[&Gate::Quota].percent, 20);
    }

    #[test]
    fn odd_gates_are_refused() {
        for (name, value) in [("VIV_GATE_NO_SUCH", "on"), ("VIV_GATE_BREAKER", "maybe"), ("VIV_GATE_BREAKER", "101")] {
            let environment = [(name.to_owned(), value.to_owned())];
            assert!(settings(&BTreeMap::new(), environment.into_iter()).is_err(), "{name}={value}");
        }
    }
}
