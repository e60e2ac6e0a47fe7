//! Gates from the configuration file and `VIV_GATE_*` (O9).

use std::collections::BTreeMap;
use std::ffi::OsString;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::json;
use viv_core::lifecycle::Actor;
use viv_engine::{Engine, Gate, GateSetting, Gates, SetBy};
use viv_store::{NewLine, StoreError};

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
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> anyhow::Result<BTreeMap<Gate, GateSetting>> {
    let mut settings = BTreeMap::new();
    for (name, text) in file {
        let setting = match text {
            GateText::Switch(on) => GateSetting { percent: if *on { 100 } else { 0 }, ..GateSetting::default() },
            GateText::Percent(percent) => GateSetting { percent: *percent, ..GateSetting::default() },
            GateText::Table { percent, projects } => {
                GateSetting { percent: *percent, projects: projects.clone(), ..GateSetting::default() }
            }
        };
        settings.insert(named(name)?, GateSetting { set_by: SetBy::File, ..setting });
    }
    let setting = |percent| GateSetting { percent, set_by: SetBy::Environment, ..GateSetting::default() };
    for (variable, value) in environment {
        // Whatever else is there is nobody's business here, and need not be text.
        let (variable, value) = (variable.to_string_lossy(), value.to_string_lossy());
        let Some(name) = variable.strip_prefix("VIV_GATE_") else { continue };
        let percent = match value.as_ref() {
            "on" | "true" | "1" => 100,
            "off" | "false" | "0" => 0,
            other => other.trim_end_matches('%').parse().with_context(|| {
                format!("{variable} is {value:?}\nhint: it is on, off, or of how many sandboxes in a hundred it is on")
            })?,
        };
        settings.insert(named(&name.to_ascii_lowercase())?, setting(percent));
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

/// Says and journals which gates are switched otherwise than when that was last journaled, also by a daemon before this
/// one: what was written down and the line about it are one transaction.
pub(super) async fn tell(engine: &Engine, gates: &Gates) {
    for gate in Gate::ALL {
        if let Err(error) = tell_one(engine, gate, &gates.setting(gate)).await {
            tracing::error!(component = "serve", gate = gate.name(), %error, "a switched gate could not be journaled");
        }
    }
}

async fn tell_one(engine: &Engine, gate: Gate, setting: &GateSetting) -> Result<(), StoreError> {
    let (name, kept) = (gate.name(), format!("gate.{}", gate.name()));
    let switched = json!({ "percent": setting.percent, "projects": setting.projects });
    let switched = (!setting.is_on_everywhere()).then(|| switched.to_string());
    if engine.store().meta(&kept).await? == switched {
        return Ok(());
    }
    tracing::warn!(component = "serve", gate = name, %setting, "a gate was switched");
    let (percent, projects, set_by) = (setting.percent, &setting.projects, setting.set_by.as_str());
    let line = NewLine {
        at_ms: engine.now_ms(),
        project: None,
        sandbox: None,
        generation: None,
        kind: "gate.switched".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("serve"),
        data: json!({ "gate": name, "percent": percent, "projects": projects, "set_by": set_by }),
    };
    engine.store().put_meta(engine.epoch(), &kept, switched.as_deref(), line).await
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn o9_the_environment_goes_over_the_file() {
        let file = BTreeMap::from([
            ("breaker".to_owned(), GateText::Switch(false)),
            ("quota".to_owned(), GateText::Percent(20)),
        ]);
        let not_text = OsString::from_vec(vec![0xff, b'=']);
        let environment =
            [("VIV_GATE_BREAKER".into(), "on".into()), ("ODD".into(), not_text.clone()), (not_text, "off".into())];
        let settings = settings(&file, environment.into_iter()).unwrap();
        assert_eq!((settings[&Gate::Breaker].percent, settings[&Gate::Breaker].set_by), (100, SetBy::Environment));
        assert_eq!((settings[&Gate::Quota].percent, settings[&Gate::Quota].set_by), (20, SetBy::File));
        assert_eq!(settings.len(), 2);
    }

    #[test]
    fn odd_gates_are_refused() {
        for (name, value) in [("VIV_GATE_NO_SUCH", "on"), ("VIV_GATE_BREAKER", "maybe"), ("VIV_GATE_BREAKER", "101")] {
            let environment = [(name.into(), value.into())];
            assert!(settings(&BTreeMap::new(), environment.into_iter()).is_err(), "{name}={value}");
        }
    }
}
