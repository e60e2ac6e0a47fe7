//! Where the local provider keeps its things: options that several verbs share.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::Context;
use clap::ValueEnum;
use viv_sandbox::ordinary::{self, EnterError, Standing};
use viv_sandbox::{DriverKind, LocalConfig, LocalProvider, Runtime, StoreConfig};

/// Whose sandboxes made by hand are.
pub(crate) const OWNER: &str = "by-hand";

#[derive(clap::Args)]
pub(crate) struct Place {
    /// Name of our cgroup
    #[arg(long, env = "VIV_CGROUP_PREFIX", default_value = "vivarium", global = true, hide = true)]
    cgroup_prefix: String,
    /// OCI runtime to use instead of the embedded one, by name or path: runsc (gVisor), runc
    #[arg(long, env = "VIV_RUNTIME", hide_env_values = true, global = true)]
    runtime: Option<PathBuf>,
    /// CRIU that saves the memory of sandboxes, instead of the machine's own
    #[arg(long, env = "VIV_CRIU", hide_env_values = true, global = true)]
    criu: Option<OsString>,
    /// How layers are kept; chosen once for a data folder, by default what its filesystem is good for
    #[arg(long, env = "VIV_LAYERS", hide_env_values = true, global = true)]
    layers: Option<Layers>,
    /// Size in MiB of the file that `--layers btrfs` uses where the data folder is not on btrfs
    #[arg(long, env = "VIV_POOL_MIB", hide_env_values = true, global = true)]
    pool: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Layers {
    /// Subvolumes: snapshots and forks of running sandboxes in constant time
    Btrfs,
    /// Folders, on any filesystem
    Plain,
}

/// Our own binary, looked up before the namespace in which it has that path is left.
static THIS: OnceLock<PathBuf> = OnceLock::new();

/// Enters the namespace in which an ordinary user is root, and keeps what would be lost on the way.
pub(crate) fn enter() -> Result<Standing, EnterError> {
    if let Ok(this) = std::env::current_exe() {
        let _ = THIS.set(this);
    }
    ordinary::enter()
}

/// Our own binary, once [`enter`] was called.
pub(crate) fn own_binary() -> anyhow::Result<PathBuf> {
    THIS.get().cloned().context("cannot find my own binary")
}

impl Place {
    /// The CRIU that somebody named; what is set to nothing is not set.
    fn criu_named(&self) -> Option<PathBuf> {
        self.criu.as_ref().filter(|named| !named.is_empty()).map(PathBuf::from)
    }

    /// The provider that keeps its things in this folder.
    pub(crate) fn open(self, data: PathBuf) -> anyhow::Result<LocalProvider> {
        let mut config = LocalConfig::new(data, own_binary()?);
        config.criu = self.criu_named();
        // Nobody replaces one by the next.
        config.keeps_snapshots = true;
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        place: Place,
    }

    #[test]
    fn a_criu_that_is_set_to_nothing_is_not_set() {
        let criu = |named: &str| Line::try_parse_from(["viv", "--criu", named]).expect("it is read").place.criu_named();
        assert_eq!(criu(""), None);
        assert_eq!(criu("/usr/sbin/criu"), Some(PathBuf::from("/usr/sbin/criu")));
    }
}
