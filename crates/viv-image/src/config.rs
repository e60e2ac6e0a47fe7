//! The configuration of an image: how to run it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::digest::Digest;
use crate::document::DocumentError;
use crate::limits::{CONFIG_BYTES_MAX, LAYERS_MAX};
use crate::platform::Platform;

/// How an image wants to be run, and what its layers are called when decompressed.
///
/// What is not understood here (health checks, history, …) is kept and written again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// `amd64`, …; empty if the image does not say.
    pub architecture: String,
    /// `v7` of `arm`.
    pub variant: Option<String>,
    /// `linux`; empty if the image does not say.
    pub os: String,
    /// Environment, in order.
    pub env: Vec<(String, String)>,
    /// Folder to start in.
    pub workdir: Option<String>,
    /// `user`, `uid`, `user:group`, …
    pub user: Option<String>,
    /// What is always run.
    pub entrypoint: Vec<String>,
    /// Its arguments, or what is run if there is no entrypoint.
    pub cmd: Vec<String>,
    /// Words about the image.
    pub labels: BTreeMap<String, String>,
    /// `8080/tcp`, …
    pub ports: Vec<String>,
    /// The layers' content, bottom first.
    pub diff_ids: Vec<Digest>,
    /// When it was made, as the image says.
    pub created: Option<String>,
    /// The bytes it was read from, empty if it was made here: what is written again for all that is not above.
    pub raw: Vec<u8>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    created: Option<String>,
    #[serde(default)]
    config: Option<RawRun>,
    rootfs: RawRootfs,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RawRun {
    #[serde(default)]
    env: Option<Vec<String>>,
    #[serde(default)]
    working_dir: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    entrypoint: Option<Vec<String>>,
    #[serde(default)]
    cmd: Option<Vec<String>>,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    exposed_ports: Option<BTreeMap<String, Value>>,
}

#[derive(Deserialize)]
struct RawRootfs {
    #[serde(default)]
    diff_ids: Option<Vec<String>>,
}

impl ImageConfig {
    /// Reads a configuration.
    pub fn from_json(bytes: &[u8]) -> Result<Self, DocumentError> {
        const WHAT: &str = "configuration";
        if bytes.len() as u64 > CONFIG_BYTES_MAX {
            return Err(DocumentError::TooLong { what: WHAT, limit_bytes: CONFIG_BYTES_MAX });
        }
        let raw: Raw = serde_json::from_slice(bytes).map_err(|source| DocumentError::Json { what: WHAT, source })?;
        let run = raw.config.unwrap_or_default();
        let diff_ids = raw.rootfs.diff_ids.unwrap_or_default();
        if diff_ids.len() > LAYERS_MAX {
            return Err(DocumentError::TooMany { what: "list of layers", limit: LAYERS_MAX });
        }
        let diff_ids = diff_ids
            .iter()
            .map(|text| text.parse().map_err(|source| DocumentError::Digest { what: WHAT, source }))
            .collect::<Result<_, _>>()?;
        let config = Self {
            architecture: raw.architecture.unwrap_or_default(),
            variant: filled(raw.variant),
            os: raw.os.unwrap_or_default(),
            env: run.env.unwrap_or_default().into_iter().map(split_variable).collect(),
            workdir: filled(run.working_dir),
            user: filled(run.user),
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            labels: run.labels.unwrap_or_default(),
            ports: run.exposed_ports.unwrap_or_default().into_keys().collect(),
            diff_ids,
            created: filled(raw.created),
            raw: bytes.to_vec(),
        };
        config.check_nul()?;
        Ok(config)
    }

    /// What it is made for.
    pub fn platform(&self) -> Platform {
        Platform { os: self.os.clone(), architecture: self.architecture.clone(), variant: self.variant.clone() }
    }

    /// The configuration to write: the bytes it was read from if nothing was changed, so that its digest stays.
    pub fn to_json(&self) -> Vec<u8> {
        let before = Self::from_json(&self.raw).ok();
        if before.as_ref() == Some(self) {
            return self.raw.clone();
        }
        let mut all = match serde_json::from_slice(&self.raw) {
            Ok(Value::Object(all)) => all,
            _ => Map::new(),
        };
        let mut run = match all.remove("config") {
            Some(Value::Object(run)) => run,
            _ => Map::new(),
        };
        self.put_run(&mut run);
        put(&mut all, "architecture", Some(json!(self.architecture)));
        put(&mut all, "os", Some(json!(self.os)));
        put(&mut all, "variant", self.variant.as_ref().map(|variant| json!(variant)));
        put(&mut all, "created", self.created.as_ref().map(|created| json!(created)));
        put(&mut all, "config", Some(Value::Object(run)));
        put(&mut all, "rootfs", Some(json!({"type": "layers", "diff_ids": self.diff_ids})));
        let history = history(all.remove("history"), before.as_ref().map_or(0, |old| old.diff_ids.len()), self);
        put(&mut all, "history", Some(history));
        serde_json::to_vec(&Value::Object(all)).expect("a JSON value is JSON")
    }

    fn put_run(&self, run: &mut Map<String, Value>) {
        let some = |list: &Vec<String>| (!list.is_empty()).then(|| json!(list));
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let ports: BTreeMap<&str, Value> = self.ports.iter().map(|port| (port.as_str(), json!({}))).collect();
        put(run, "Env", some(&env));
        put(run, "WorkingDir", self.workdir.as_ref().map(|workdir| json!(workdir)));
        put(run, "User", self.user.as_ref().map(|user| json!(user)));
        put(run, "Entrypoint", some(&self.entrypoint));
        put(run, "Cmd", some(&self.cmd));
        put(run, "Labels", (!self.labels.is_empty()).then(|| json!(self.labels)));
        put(run, "ExposedPorts", (!ports.is_empty()).then(|| json!(ports)));
    }

    /// No program takes a NUL in its arguments or environment, and those who cut there would read something else.
    fn check_nul(&self) -> Result<(), DocumentError> {
        let has = |text: &str| text.contains('\0');
        if self.env.iter().any(|(name, value)| has(name) || has(value)) {
            return Err(DocumentError::Nul("variable"));
        }
        if self.entrypoint.iter().chain(&self.cmd).any(|word| has(word)) {
            return Err(DocumentError::Nul("command"));
        }
        if self.workdir.as_deref().is_some_and(has) || self.user.as_deref().is_some_and(has) {
            return Err(DocumentError::Nul("folder or user"));
        }
        Ok(())
    }
}

/// An empty text means as much as none.
fn filled(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

fn split_variable(text: String) -> (String, String) {
    match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.to_owned()),
        None => (text, String::new()),
    }
}

fn put(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    match value {
        Some(value) => map.insert(key.to_owned(), value),
        None => map.remove(key),
    };
}

/// A history with an entry for each layer: readers compare the numbers. Layers that were added get a line of ours;
/// if layers were taken away, what was said of the old ones is dropped.
fn history(old: Option<Value>, layers_before: usize, config: &ImageConfig) -> Value {
    let mut entries = match old {
        Some(Value::Array(entries)) => entries,
        _ => Vec::new(),
    };
    let told = entries.iter().filter(|entry| entry.get("empty_layer") != Some(&json!(true))).count();
    if told != layers_before || config.diff_ids.len() < told {
        entries.clear();
    }
    let told = if entries.is_empty() { 0 } else { told };
    // A time is not required, but umoci fails without; one of the clock would make each image a different one.
    let created = config.created.as_deref().unwrap_or("1970-01-01T00:00:00Z");
    for _ in told..config.diff_ids.len() {
        entries.push(json!({"created": created, "created_by": "vivarium"}));
    }
    Value::Array(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBIAN: &str = r#"{
        "architecture": "amd64", "os": "linux", "created": "2024-01-01T00:00:00Z",
        "config": {"Env": ["PATH=/bin", "A=b=c", "BARE"], "Cmd": ["bash"], "Entrypoint": null, "WorkingDir": "",
                   "ExposedPorts": {"80/tcp": {}}, "Labels": {"a": "b"}, "StopSignal": "SIGINT"},
        "rootfs": {"type": "layers",
                   "diff_ids": ["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]},
        "history": [{"created_by": "ADD"}, {"created_by": "CMD", "empty_layer": true}]
    }"#;

    #[test]
    fn what_was_not_changed_is_written_as_it_was() {
        let config = ImageConfig::from_json(DEBIAN.as_bytes()).unwrap();
        assert_eq!(config.env[1], ("A".to_owned(), "b=c".to_owned()));
        assert_eq!((config.workdir.as_deref(), config.cmd.as_slice()), (None, ["bash".to_owned()].as_slice()));
        assert_eq!(config.ports, ["80/tcp"]);
        assert_eq!(config.to_json(), DEBIAN.as_bytes());
    }

    #[test]
    fn a_change_keeps_what_is_not_understood_and_tells_of_the_new_layer() {
        let mut config = ImageConfig::from_json(DEBIAN.as_bytes()).unwrap();
        config.cmd = vec!["sh".to_owned()];
        config.diff_ids.push(Digest::of(b"more"));
        let written = config.to_json();
        let again = ImageConfig::from_json(&written).unwrap();
        assert_eq!((again.cmd.clone(), again.diff_ids.clone()), (config.cmd.clone(), config.diff_ids.clone()));
        let value: Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(value["config"]["StopSignal"], "SIGINT");
        assert_eq!(value["history"].as_array().unwrap().len(), 3);
        assert_eq!(again.to_json(), written);
    }

    #[test]
    fn one_that_is_made_here_reads_back() {
        let config = ImageConfig {
            architecture: "amd64".to_owned(),
            os: "linux".to_owned(),
            env: vec![("A".to_owned(), "1".to_owned())],
            user: Some("nobody".to_owned()),
            diff_ids: vec![Digest::of(b"x")],
            ..ImageConfig::default()
        };
        let again = ImageConfig::from_json(&config.to_json()).unwrap();
        assert_eq!(ImageConfig { raw: Vec::new(), ..again }, config);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "[]", "{}", r#"{"rootfs": {"diff_ids": ["md5:1"]}}"#, r#"{"rootfs": 1}"#] {
            assert!(ImageConfig::from_json(text.as_bytes()).is_err(), "{text}");
        }
        let nul = r#"{"rootfs": {}, "config": {"Cmd": ["a\u0000b"]}}"#;
        assert!(matches!(ImageConfig::from_json(nul.as_bytes()), Err(DocumentError::Nul("command"))));
    }
}
