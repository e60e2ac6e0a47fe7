//! Options that all verbs share, and where else they come from.
//!
//! In rising order: `/etc/viv/config.toml`, the user's `viv/config.toml`, the file of `--config`, the environment, the
//! command line. Who says nothing anywhere finds the daemon of this machine by what it left in its data folder:
//! `daemon.json` says where it listens, `key` is a key for it.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

use crate::fail::{Failure, REFUSED, UNREACHABLE};

/// The machine's configuration.
const MACHINE: &str = "/etc/viv/config.toml";
/// What the daemon says about itself, in its data folder.
const DAEMON: &str = "daemon.json";
/// The key for whoever may read it, in the daemon's data folder.
const KEY: &str = "key";
/// In the data folder: where sandboxes made by hand (`viv local`) are.
pub(crate) const BY_HAND: &str = "local";
/// In the data folder: where the daemon's provider keeps its own, and images.
pub(crate) const DAEMONS: &str = "sandboxes";
/// What helps when there is no daemon.
pub(crate) const START: &str = "start it with: viv serve";

#[derive(clap::Args, Clone, Default)]
#[command(next_help_heading = "Options of all verbs")]
pub(crate) struct Global {
    /// For programs: JSON on standard output, one object a line where there are several
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Where the daemon listens; by default what it left in the data folder
    #[arg(long, global = true, env = "VIV_URL", hide_env_values = true, value_name = "URL")]
    url: Option<String>,
    /// Key to show to it; others see it in the list of processes, so rather use the environment
    #[arg(long, global = true, env = "VIV_KEY", hide_env_values = true, value_name = "KEY")]
    key: Option<String>,
    /// Data folder [default: /var/lib/viv; for users: ~/.local/share/viv]
    #[arg(long, global = true, env = "VIV_DATA", hide_env_values = true, value_name = "DIR")]
    data: Option<PathBuf>,
    /// One more configuration file; it wins over the machine's and the user's
    #[arg(long, global = true, env = "VIV_CONFIG", hide_env_values = true, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// A configuration file. Other tables in it belong to others.
#[derive(Default, Deserialize)]
struct File {
    #[serde(default)]
    client: Client,
}

/// `[client]` in a configuration file.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Client {
    /// Where the daemon listens.
    url: Option<String>,
    /// A file that holds the key.
    key_file: Option<PathBuf>,
    /// Certificates of those to believe about `https`, in PEM.
    ca_file: Option<PathBuf>,
    /// The project of new keys.
    project: Option<String>,
}

/// `daemon.json`; it may hold more.
#[derive(Deserialize)]
struct Daemon {
    url: String,
}

/// Whom to talk to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Where it listens.
    pub(crate) url: String,
    /// What to show to it.
    pub(crate) key: Option<String>,
    /// The project of new keys, if one was configured.
    pub(crate) project: Option<String>,
    /// Certificates of those to believe about `https`, if some were configured.
    pub(crate) ca_file: Option<PathBuf>,
}

impl Global {
    /// Whoever means the daemon of this data folder, whatever else is said.
    pub(crate) fn of_folder(data: PathBuf) -> Self {
        Self { data: Some(data), ..Self::default() }
    }

    /// The data folder.
    pub(crate) fn data(&self) -> anyhow::Result<PathBuf> {
        self.data.clone().map_or_else(default_data, Ok)
    }

    /// The data folder, if one was named.
    pub(crate) fn data_named(&self) -> Option<&PathBuf> {
        self.data.as_ref()
    }

    /// Where configuration may be, each over those before it.
    pub(crate) fn config_files(&self) -> Vec<PathBuf> {
        let user = folder("XDG_CONFIG_HOME", ".config").map(|folder| folder.join("viv/config.toml"));
        [Some(PathBuf::from(MACHINE)), user, self.config.clone()].into_iter().flatten().collect()
    }

    /// Where sandboxes made by hand are.
    pub(crate) fn by_hand(&self) -> anyhow::Result<PathBuf> {
        Ok(self.data()?.join(BY_HAND))
    }

    /// Where the daemon's provider keeps what is its own.
    pub(crate) fn daemons(&self) -> anyhow::Result<PathBuf> {
        Ok(self.data()?.join(DAEMONS))
    }

    /// Whom to talk to.
    pub(crate) fn target(&self) -> anyhow::Result<Target> {
        let client = self.configured()?;
        // Who names a data folder means the daemon that has it, also when a file names another one.
        let configured = if self.data.is_some() { None } else { client.url };
        let named = self.url.clone().or(configured);
        let is_named = named.is_some();
        let url = match named {
            Some(url) => url,
            None => self.found()?,
        };
        let url = checked(&url)?;
        let key = match (&self.key, &client.key_file) {
            (Some(key), _) => Some(key.clone()),
            (None, Some(file)) => Some(read_key(file)?.with_context(|| format!("there is no {}", file.display()))?),
            // The key of this machine's daemon is shown to nobody else.
            (None, None) if !is_named || is_loopback(&url) => match self.data() {
                Ok(data) => read_key(&data.join(KEY))?,
                Err(_) => None,
            },
            (None, None) => None,
        };
        Ok(Target { url, key, project: client.project, ca_file: client.ca_file })
    }

    /// Where the daemon of this data folder says that it listens.
    fn found(&self) -> anyhow::Result<String> {
        let data = self.data()?;
        let path = data.join(DAEMON);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let message = format!("no daemon runs on {}", data.display());
                return Err(Failure::new(UNREACHABLE, message).hint(START).into());
            }
            Err(error) => {
                let message = format!("cannot read {}: {error}", path.display());
                return Err(Failure::new(REFUSED, message).hint("name the daemon with VIV_URL and VIV_KEY").into());
            }
        };
        let daemon: Daemon =
            serde_json::from_slice(&text).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(daemon.url)
    }

    /// All files, one over the other.
    fn configured(&self) -> anyhow::Result<Client> {
        let mut all = Client::default();
        let user = folder("XDG_CONFIG_HOME", ".config").map(|folder| folder.join("viv/config.toml"));
        for path in [Some(PathBuf::from(MACHINE)), user].into_iter().flatten() {
            if let Some(text) = read_config(&path)? {
                all = all.under(parse(&text, &path)?);
            }
        }
        if let Some(path) = &self.config {
            let missing = || {
                let failure = Failure::usage(format!("there is no {}", path.display()));
                failure.hint("--config or VIV_CONFIG names a file with a configuration")
            };
            all = all.under(parse(&read_config(path)?.ok_or_else(missing)?, path)?);
        }
        Ok(all)
    }
}

impl Client {
    /// With what stands in a file that wins.
    fn under(self, over: Self) -> Self {
        Self {
            url: over.url.or(self.url),
            key_file: over.key_file.or(self.key_file),
            ca_file: over.ca_file.or(self.ca_file),
            project: over.project.or(self.project),
        }
    }
}

fn read_config(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        // A file that others may not read is not for them.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(Failure::usage(format!("cannot read {}: {error}", path.display())).into()),
    }
}

fn parse(text: &str, path: &Path) -> anyhow::Result<Client> {
    let file: File = toml::from_str(text).map_err(|error| {
        let message = format!("{} is not right: {}", path.display(), error.to_string().trim_end());
        Failure::usage(message).hint("[client] takes url, key_file, ca_file and project")
    })?;
    Ok(file.client)
}

fn read_key(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(key) => Ok(Some(key.trim().to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let message = format!("cannot read the key in {}: {error}", path.display());
            Err(Failure::new(REFUSED, message).hint("set VIV_KEY, or be who runs the daemon").into())
        }
    }
}

/// The address without a slash at its end, if it is one.
fn checked(url: &str) -> Result<String, Failure> {
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    match rest.map(|rest| rest.trim_end_matches('/')) {
        Some(host) if !host.is_empty() && !host.contains(['/', '?', '#', '@', ' ']) => {
            Ok(url.trim_end_matches('/').to_owned())
        }
        Some(_) | None => Err(Failure::usage(format!("{url:?} is not an address of a daemon"))
            .hint("write it like http://127.0.0.1:7711")),
    }
}

/// Whether an address is on this machine.
pub(crate) fn is_loopback(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let rest = rest.split_once('/').map_or(rest, |(host, _)| host);
    let host = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or(rest, |(host, _)| host),
        None => rest.split_once(':').map_or(rest, |(host, _)| host),
    };
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The machine's place for root of it, or of a container; for everybody else one of their own.
fn default_data() -> anyhow::Result<PathBuf> {
    // In a user's namespace one may be root, and root of the machine is nobody there.
    let is_root = rustix::process::geteuid().is_root();
    if is_root && fs::metadata("/var/lib").is_ok_and(|found| found.uid() == 0) {
        return Ok("/var/lib/viv".into());
    }
    folder("XDG_DATA_HOME", ".local/share")
        .map(|folder| folder.join("viv"))
        .context("cannot tell where data is kept\nhint: set HOME, or name a folder with --data")
}

/// A folder of the user's, by a variable or below the home.
fn folder(variable: &str, otherwise: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable).or_else(|| Some(absolute("HOME")?.join(otherwise)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lie_one_over_the_other_and_tables_of_others_are_left_alone() {
        let path = Path::new("config.toml");
        let machine = parse("[serve]\nlisten = 1\n[client]\nurl = \"http://a\"\nproject = \"p\"\n", path).unwrap();
        let user = parse("[client]\nurl = \"http://b\"\n", path).unwrap();
        let both = machine.under(user);
        assert_eq!((both.url.as_deref(), both.project.as_deref()), (Some("http://b"), Some("p")));
        assert_eq!(parse("", path).unwrap(), Client::default());
    }

    #[test]
    fn s5_a_file_that_is_wrong_says_where() {
        let error = parse("[client]\nurll = \"x\"\n", Path::new("config.toml")).unwrap_err().to_string();
        assert!(error.contains("config.toml") && error.contains("urll") && error.contains("hint: "), "{error}");
    }

    #[test]
    fn addresses_are_checked_and_told_apart() {
        assert_eq!(checked("http://127.0.0.1:7711/").unwrap(), "http://127.0.0.1:7711");
        for wrong in ["127.0.0.1:7711", "http://", "ftp://a", "http://a/b", "http://u@a", ""] {
            assert!(checked(wrong).is_err(), "{wrong}");
        }
        for here in ["http://127.0.0.1:1", "http://localhost", "http://[::1]:7711", "https://127.9.9.9"] {
            assert!(is_loopback(here), "{here}");
        }
        for there in
            ["http://10.0.0.1:1", "http://localhost.example.org", "http://[2001:db8::1]:1", "http://127.0.0.1.nip:1"]
        {
            assert!(!is_loopback(there), "{there}");
        }
    }

    #[test]
    fn s6_the_key_of_this_machine_is_shown_to_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(KEY), "vk_secret\n").unwrap();
        let global = |url: Option<&str>| Global {
            url: url.map(str::to_owned),
            data: Some(folder.path().to_owned()),
            ..Global::default()
        };
        assert_eq!(global(Some("http://192.0.2.1:7711")).target().unwrap().key, None);
        assert_eq!(global(Some("http://127.0.0.1:7711")).target().unwrap().key.as_deref(), Some("vk_secret"));
        let nobody = global(None).target().unwrap_err();
        assert!(nobody.to_string().ends_with("hint: start it with: viv serve"), "{nobody}");
        fs::write(folder.path().join(DAEMON), r#"{"url": "http://127.0.0.1:7712", "pid": 1}"#).unwrap();
        let found = global(None).target().unwrap();
        assert_eq!((found.url.as_str(), found.key.as_deref()), ("http://127.0.0.1:7712", Some("vk_secret")));
    }
}
