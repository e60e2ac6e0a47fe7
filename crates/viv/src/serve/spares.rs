//! `[spares]` in the configuration (L19).

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Duration;

use anyhow::Context;
use serde::Deserialize;
use viv_api::bound::{ImageName, Path};
use viv_api::limits::Limits;
use viv_api::sandbox::{CreateSandbox, Network};
use viv_engine::{SpareClass, SparesConfig};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SparesPart {
    /// How old one may become before another takes its place.
    age_max_s: Option<NonZeroU64>,
    /// As many are kept as were asked for in this time, within the bounds of their class.
    window_s: Option<NonZeroU64>,
    /// How often each is probed while nobody has it.
    probe_every_s: Option<NonZeroU64>,
    /// Of which kinds, by name.
    classes: BTreeMap<String, ClassPart>,
}

/// Sandboxes that are kept ready; whoever asks for one with the same settings gets it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClassPart {
    /// At least this many are kept.
    min: u32,
    /// And at most; as many as the least, and one, when not said.
    max: Option<u32>,
    /// The rest is as in a request, and is read like one.
    #[serde(flatten)]
    made_of: toml::Table,
}

/// What the sandboxes of a class are made of, in the words of a create.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct MadeOf {
    image: ImageName,
    limits: Limits,
    network: Network,
    workdir: Option<Path>,
    packages: bool,
}

impl SparesPart {
    /// Over what ships.
    pub(super) fn config(&self) -> anyhow::Result<SparesConfig> {
        let ships = SparesConfig::default();
        let seconds =
            |said: Option<NonZeroU64>, ships: Duration| said.map_or(ships, |said| Duration::from_secs(said.get()));
        let classes = self
            .classes
            .iter()
            .map(|(name, part)| part.class(name).with_context(|| format!("[spares.classes.{name}] is not right")));
        let config = SparesConfig {
            classes: classes.collect::<anyhow::Result<_>>()?,
            window: seconds(self.window_s, ships.window),
            age_max: seconds(self.age_max_s, ships.age_max),
            probe_every: seconds(self.probe_every_s, ships.probe_every),
            period: ships.period,
        };
        config.check()?;
        Ok(config)
    }
}

impl ClassPart {
    fn class(&self, name: &str) -> anyhow::Result<SpareClass> {
        let made_of = serde_json::to_value(&self.made_of)?;
        let MadeOf { image, limits, network, workdir, packages } = viv_api::request::parse_value(&made_of)?;
        let made_of = CreateSandbox { image, limits, network, workdir, packages, ..CreateSandbox::default() };
        let max = self.max.unwrap_or(self.min.max(1));
        Ok(SpareClass { name: name.to_owned(), spec: made_of.to_spec(), min: self.min, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l19_a_class_is_made_of_what_a_create_says() {
        let text = r#"
            age_max_s = 60
            [classes.small]
            min = 2
            max = 8
            limits = { memory_bytes = 268435456 }
            network = { egress = "all" }
            [classes.plain]
        "#;
        let config = toml::from_str::<SparesPart>(text).unwrap().config().unwrap();
        assert_eq!(config.age_max, Duration::from_secs(60));
        let [plain, small] = &config.classes[..] else { panic!("{config:?}") };
        assert_eq!((plain.min, plain.max, &plain.spec), (0, 1, &CreateSandbox::default().to_spec()));
        let asked = CreateSandbox { limits: small_limits(), network: open(), ..CreateSandbox::default() };
        assert_eq!((small.min, small.max, &small.spec), (2, 8, &asked.to_spec()));
    }

    fn small_limits() -> Limits {
        serde_json::from_str(r#"{"memory_bytes": 268435456}"#).unwrap()
    }

    fn open() -> Network {
        serde_json::from_str(r#"{"egress": "all"}"#).unwrap()
    }

    #[test]
    fn l19_what_cannot_be_kept_is_refused() {
        for bad in [
            "[classes.a]\nmin = 3\nmax = 2",
            "[classes.a]\n[classes.b]",
            "[classes.a]\nmax = 5000",
            "[classes.a]\nmax = 0",
            "[classes.a]\nenv = { A = \"b\" }",
            "[classes.a]\nlimits = { memory = 1 }",
        ] {
            assert!(toml::from_str::<SparesPart>(bad).unwrap().config().is_err(), "{bad}");
        }
    }
}
