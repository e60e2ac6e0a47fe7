//! How a daemon is set up: from a file, the environment and flags, each over the one before.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use serde::Deserialize;
use tracing::level_filters::LevelFilter;
use viv_engine::Periods;
use viv_store::SumsMax;

use super::alerts::AlertsPart;
use super::cleanup::CleanupPart;
use super::gates::GateText;
use super::spares::SparesPart;
use super::traces::TracesPart;
use super::webhooks::WebhooksPart;

/// The daemon's part of the configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct FileConfig {
    pub(super) server: ServerPart,
    pub(super) sandboxes: SandboxesPart,
    pub(super) quota: QuotaPart,
    pub(super) retention: RetentionPart,
    pub(super) reconcile: ReconcilePart,
    pub(super) hooks: HooksPart,
    pub(super) webhooks: WebhooksPart,
    pub(super) alerts: AlertsPart,
    pub(super) cleanup: CleanupPart,
    pub(super) spares: SparesPart,
    pub(super) traces: TracesPart,
    pub(super) gates: BTreeMap<String, GateText>,
    /// The client's part is the client's.
    #[serde(rename = "client")]
    _client: Option<toml::Table>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ServerPart {
    /// Where to listen.
    pub(super) listen: Option<SocketAddr>,
    /// Where everything is kept.
    pub(super) data: Option<PathBuf>,
    /// What is said on standard error.
    pub(super) log: Option<LogLevel>,
    /// How many wrong keys an address may send at once. Behind a proxy everybody has the same one.
    pub(super) wrong_keys_max: Option<u32>,
    /// And how many more in a second, for ever.
    pub(super) wrong_keys_per_s: Option<u32>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SandboxesPart {
    /// How many there may be (L18).
    pub(super) max: Option<u64>,
    /// How many of them in one project.
    pub(super) max_per_project: Option<u64>,
    /// OCI runtime to use instead of the embedded one.
    pub(super) runtime: Option<PathBuf>,
    /// CRIU that saves memory, instead of the machine's own.
    pub(super) criu: Option<PathBuf>,
    /// Whether memory is saved.
    pub(super) save_memory: Option<SaveMemory>,
    /// Whether memory is brought back while it is used already.
    pub(super) lazy_restore: Option<LazyRestore>,
    /// How layers are kept: `btrfs` or `plain`.
    pub(super) layers: Option<String>,
    /// Size in MiB of the pool file for btrfs.
    pub(super) pool_mib: Option<u64>,
    /// Name of our cgroup.
    pub(super) cgroup_prefix: Option<String>,
}

/// Whether the memory of sandboxes is saved whose policy asks for it (L13).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum SaveMemory {
    /// Where it can be.
    #[default]
    Auto,
    /// The daemon does not start where it cannot be.
    On,
    /// Never.
    Off,
}

/// Whether what was saved is brought back while it is used already (L13).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(super) enum LazyRestore {
    /// Where CRIU and the kernel can, and there is enough of it.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// What living sandboxes may be allowed to use together (L18).
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct QuotaPart {
    /// In all projects.
    pub(super) total: SumsPart,
    /// In one.
    pub(super) per_project: SumsPart,
}

/// The most that their limits may add up to.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SumsPart {
    /// Thousandths of one processor.
    pub(super) cpu_millis: Option<u64>,
    /// Memory in MiB.
    pub(super) memory_mib: Option<u64>,
    /// Disk in MiB.
    pub(super) disk_mib: Option<u64>,
    /// Processes and threads.
    pub(super) processes: Option<u64>,
}

impl From<SumsPart> for SumsMax {
    fn from(part: SumsPart) -> Self {
        let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
        Self {
            cpu_millis: part.cpu_millis,
            memory_bytes: bytes(part.memory_mib),
            disk_bytes: bytes(part.disk_mib),
            processes: part.processes,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct HooksPart {
    /// Whether webhooks may go to private addresses and to the machine itself.
    pub(super) private_addresses: bool,
    /// Or to these of them.
    pub(super) private_ranges: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RetentionPart {
    /// For how many days journal, keys of requests and tombstones are kept (J9): a day at least, since keys hold for so
    /// long whatever became of their sandbox (L1).
    pub(super) keep_days: Option<NonZeroU64>,
}

impl RetentionPart {
    /// How long that is.
    pub(super) fn keep(&self) -> Option<Duration> {
        self.keep_days.map(|days| Duration::from_secs(days.get().saturating_mul(24 * 3600)))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "units come last in names")]
pub(super) struct ReconcilePart {
    /// How often what the provider has is compared with what is recorded (J1).
    pub(super) provider_sync_s: Option<NonZeroU64>,
    /// How long an instance without a record is left alone.
    pub(super) orphan_grace_s: Option<u64>,
    /// How often hard deadlines are looked at whose end was not pushed.
    pub(super) expiry_s: Option<NonZeroU64>,
    /// How often transient phases are looked at that take too long.
    pub(super) stuck_s: Option<NonZeroU64>,
    /// How often all snapshots are compared with what the provider has (L11).
    pub(super) snapshots_all_s: Option<NonZeroU64>,
    /// How often leftovers of those who were killed are taken away, and what nothing refers to (J2).
    pub(super) tidy_s: Option<NonZeroU64>,
    /// How often the whole store is looked at for them although nothing came or went in it.
    pub(super) tidy_all_s: Option<NonZeroU64>,
}

/// How often leftovers are looked for when nothing is said (J2).
const TIDY_S: u64 = 300;

/// And how often everywhere, whatever changed: as often as all snapshots are compared.
const TIDY_ALL_S: u64 = 3600;

impl ReconcilePart {
    /// How often leftovers are taken away.
    pub(super) fn tidy(&self) -> Duration {
        Duration::from_secs(self.tidy_s.map_or(TIDY_S, NonZeroU64::get))
    }

    /// How often the whole store is looked at for them at least.
    pub(super) fn tidy_all(&self) -> Duration {
        Duration::from_secs(self.tidy_all_s.map_or(TIDY_ALL_S, NonZeroU64::get))
    }

    /// Over what ships.
    pub(super) fn apply(&self, periods: &mut Periods) {
        let set = |period: &mut Duration, seconds: Option<u64>| {
            if let Some(seconds) = seconds {
                *period = Duration::from_secs(seconds);
            }
        };
        set(&mut periods.provider_sync, self.provider_sync_s.map(NonZeroU64::get));
        set(&mut periods.orphan_grace, self.orphan_grace_s);
        set(&mut periods.expiry, self.expiry_s.map(NonZeroU64::get));
        set(&mut periods.stuck, self.stuck_s.map(NonZeroU64::get));
        set(&mut periods.snapshots_all, self.snapshots_all_s.map(NonZeroU64::get));
    }
}

/// Reads the files, the later ones over the earlier ones, table by table; those that are not there are skipped.
pub(super) fn read(files: &[PathBuf]) -> anyhow::Result<FileConfig> {
    let mut all = toml::Table::new();
    for path in files {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let file: toml::Table = toml::from_str(&text).with_context(|| format!("{} is not right", path.display()))?;
        // Misspelt words are told with the file that they are in.
        file.clone().try_into::<FileConfig>().with_context(|| format!("{} is not right", path.display()))?;
        for (name, value) in file {
            match (all.get_mut(&name), value) {
                (Some(toml::Value::Table(known)), toml::Value::Table(more)) => known.extend(more),
                (_, value) => {
                    all.insert(name, value);
                }
            }
        }
    }
    Ok(all.try_into()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_everything_is_understood() {
        let text = r#"
            [server]
            listen = "127.0.0.1:7711"
            data = "/srv/viv"
            log = "info"
            [sandboxes]
            max = 100
            max_per_project = 10
            layers = "plain"
            criu = "/opt/criu"
            save_memory = "on"
            lazy_restore = "off"
            [quota]
            total = { cpu_millis = 8000, memory_mib = 16384, processes = 4096 }
            per_project = { memory_mib = 2048, disk_mib = 10240 }
            [retention]
            keep_days = 3
            [reconcile]
            provider_sync_s = 30
            orphan_grace_s = 120
            snapshots_all_s = 600
            tidy_all_s = 1200
            [hooks]
            private_ranges = ["10.0.0.0/8"]
            [webhooks]
            attempts_max = 5
            [traces]
            endpoint = "http://127.0.0.1:4318"
            [gates]
            breaker = false
            quota = 50
            two_listings = { percent = 100, projects = { test = 0 } }
            [client]
            url = "http://127.0.0.1:7711"
        "#;
        let config: FileConfig = toml::from_str(text).unwrap();
        assert_eq!((config.sandboxes.max, config.sandboxes.save_memory), (Some(100), Some(SaveMemory::On)));
        assert_eq!(config.sandboxes.lazy_restore, Some(LazyRestore::Off));
        let in_project = SumsMax { memory_bytes: Some(2 << 30), disk_bytes: Some(10 << 30), ..SumsMax::default() };
        assert_eq!(SumsMax::from(config.quota.per_project), in_project);
        assert_eq!(SumsMax::from(config.quota.total).cpu_millis, Some(8000));
        assert_eq!(config.gates.len(), 3);
        let mut periods = Periods::default();
        config.reconcile.apply(&mut periods);
        assert_eq!(periods.provider_sync, Duration::from_secs(30));
        assert_eq!(periods.orphan_grace, Duration::from_secs(120));
        assert_eq!(periods.snapshots_all, Duration::from_secs(600));
        assert_eq!(periods.stuck, Periods::default().stuck);
        assert_eq!(config.reconcile.tidy(), Duration::from_secs(TIDY_S));
        assert_eq!(config.reconcile.tidy_all(), Duration::from_secs(1200));
    }

    #[test]
    fn looking_without_a_pause_is_refused() {
        assert!(toml::from_str::<FileConfig>("[reconcile]\nprovider_sync_s = 0").is_err());
    }

    #[test]
    fn l1_what_was_answered_is_kept_for_a_day_at_least() {
        let keep = |text: &str| toml::from_str::<FileConfig>(text).map(|config| config.retention.keep());
        assert!(keep("[retention]\nkeep_days = 0").is_err());
        assert_eq!(keep("[retention]\nkeep_days = 1").unwrap(), Some(Duration::from_secs(24 * 3600)));
        assert!(keep("[retention]\nkeep_days = 9223372036854775807").unwrap() > Some(Duration::from_secs(1 << 62)));
        assert_eq!(keep("").unwrap(), None);
    }

    #[test]
    fn a_misspelt_word_is_refused() {
        assert!(toml::from_str::<FileConfig>("[quota.per_project]\nmemory = 1").is_err());
        assert!(toml::from_str::<FileConfig>("[server]\nlisten_on = \"x\"").is_err());
    }
}
