//! Where the local provider keeps its things: options that several verbs share.

use std::path::PathBuf;

use anyhow::Context;
use clap::ValueEnum;
use viv_sandbox::{DriverKind, LocalConfig, LocalProvider, Runtime, StoreConfig};

/// Whose sandboxes made by hand are.
pub(crate) const OWNER: &str = "by-hand";

#[derive(clap::Args)]
pub(crate) struct Place {
    /// Where sandboxes are kept
    #[arg(long, env = "VIV_DATA_DIR", default_value = "/var/lib/vivarium", global = true)]
    data: PathBuf,
    /// Name of our cgroup
    #[arg(long, env = "VIV_CGROUP_PREFIX", default_value = "vivarium", global = true, hide = true)]
    cgroup_prefix: String,
    /// OCI runtime binary to use instead of the embedded one, such as runc
    #[arg(long, env = "VIV_RUNTIME", global = true)]
    runtime: Option<PathBuf>,
    /// How layers are kept; chosen once for a data folder, by default what its filesystem is good for
    #[arg(long, env = "VIV_LAYERS", global = true)]
    layers: Option<Layers>,
    /// Size in MiB of the file that `--layers btrfs` uses where the data folder is not on btrfs
    #[arg(long, env = "VIV_POOL_MIB", global = true)]
    pool: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Layers {
    /// Subvolumes: snapshots and forks of running sandboxes in constant time
    Btrfs,
    /// Folders, on any filesystem
    Plain,
}

impl Place {
    pub(crate) fn open(self) -> anyhow::Result<LocalProvider> {
        let this = std::env::current_exe().context("cannot find my own binary")?;
        let mut config = LocalConfig::new(self.data, this);
        config.cgroup_prefix = self.cgroup_prefix;
        if let Some(binary) = self.runtime {
            config.runtime = Runtime::Binary(binary);
        }
        let driver = self.layers.map(|layers| match layers {
            Layers::Btrfs => DriverKind::Btrfs,
            Layers::Plain => DriverKind::Plain,
        });
        config.store = StoreConfig { driver, pool_bytes: self.pool.map(|mib| mib << 20) };
        Ok(LocalProvider::open(config)?)
    }
}
