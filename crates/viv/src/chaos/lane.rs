//! A data folder of its own, on which a daemon with chaos runs, and another one as soon as that is gone.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;

use super::harm::signal;
use crate::place;
use crate::serve::chaos::OrderText;
use crate::settings::Global;

/// How long something may take that a daemon does on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

/// How often it is looked whether the daemon is there.
const LOOK: Duration = Duration::from_millis(20);

/// Listings, sweeps and the like every second: nobody waits for minutes here.
const CONFIG: &str = "\
[reconcile]
provider_sync_s = 1
orphan_grace_s = 2
expiry_s = 1
stuck_s = 1
snapshots_all_s = 60
tidy_s = 5
";

/// What the daemons of a lane are started with.
struct Setup {
    binary: PathBuf,
    folder: PathBuf,
    cgroup_prefix: String,
    seed: u64,
    /// Only what is ordered goes wrong; otherwise it is drawn.
    ordered: bool,
}

struct Keeper {
    child: Child,
    /// Of the next one.
    clock_ms: i64,
    over: bool,
    starts: u32,
}

/// One.
pub(super) struct Lane {
    pub(super) data: PathBuf,
    pub(super) cgroup_prefix: String,
    setup: Arc<Setup>,
    keeper: Arc<Mutex<Keeper>>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    /// In this folder, which is made.
    pub(super) fn open(folder: &Path, seed: u64, ordered: bool) -> anyhow::Result<Self> {
        let data = folder.join("data");
        fs::create_dir_all(&data).with_context(|| format!("cannot make {}", data.display()))?;
        fs::create_dir_all(folder.join("orders"))?;
        fs::write(folder.join("config.toml"), CONFIG)?;
        let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let cgroup_prefix = format!("viv-chaos-{}-{name}", std::process::id());
        let binary = place::own_binary()?;
        let setup = Setup { binary, folder: folder.to_owned(), cgroup_prefix: cgroup_prefix.clone(), seed, ordered };
        let child = setup.start(&[], 0)?;
        let keeper = Arc::new(Mutex::new(Keeper { child, clock_ms: 0, over: false, starts: 1 }));
        let setup = Arc::new(setup);
        let (keeps, sets) = (keeper.clone(), setup.clone());
        let thread = thread::Builder::new().name("keeper".to_owned()).spawn(move || keep(&keeps, &sets))?;
        let lane = Self { data, cgroup_prefix, setup, keeper, thread: Some(thread) };
        lane.wait_until_served()?;
        Ok(lane)
    }

    /// As its clients are set up.
    pub(super) fn global(&self) -> Global {
        Global::of_folder(self.data.clone())
    }

    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many daemons there were.
    pub(super) fn starts(&self) -> u32 {
        self.keeper().starts
    }

    /// Who serves, by what it left in its folder.
    fn serving(&self) -> Option<u32> {
        let told: serde_json::Value = serde_json::from_slice(&fs::read(self.data.join("daemon.json")).ok()?).ok()?;
        u32::try_from(told["pid"].as_u64()?).ok()
    }

    pub(super) fn wait_until_served(&self) -> anyhow::Result<()> {
        let is_served = wait(|| self.serving() == Some(self.keeper().child.id()));
        ensure!(is_served, "no daemon serves; {} says why", self.setup.folder.join("daemon.log").display());
        Ok(())
    }

    /// Kills the daemon; the next one's clock shows so much more.
    pub(super) fn kill(&self, clock_ms: i64) {
        let mut keeper = self.keeper();
        keeper.clock_ms = clock_ms;
        let _ = keeper.child.kill();
    }

    /// The daemon stands still, and one that stood by takes over.
    pub(super) fn replace(&self) -> anyhow::Result<()> {
        let mut keeper = self.keeper();
        let clock_ms = keeper.clock_ms;
        let standby = self.setup.start(&["--standby"], clock_ms)?;
        let id = standby.id();
        let mut stopped = std::mem::replace(&mut keeper.child, standby);
        keeper.starts += 1;
        let _ = signal(stopped.id(), Signal::STOP);
        let took_over = wait(|| self.serving() == Some(id));
        let _ = stopped.kill();
        let _ = stopped.wait();
        ensure!(took_over, "the standby did not take over");
        Ok(())
    }

    /// Orders that calls go wrong, and waits until the daemon knows.
    pub(super) fn order(&self, call: &str, turn: &str, times: u32) -> anyhow::Result<()> {
        let folder = self.setup.folder.join("orders");
        let text = serde_json::to_vec(&OrderText { call: call.to_owned(), turn: turn.to_owned(), times })?;
        fs::write(folder.join("order.new"), text)?;
        fs::rename(folder.join("order.new"), folder.join("order.json"))?;
        ensure!(wait(|| !folder.join("order.json").exists()), "the daemon takes no orders");
        Ok(())
    }

    /// What is not carried out yet is not any more.
    pub(super) fn take_back(&self) -> anyhow::Result<()> {
        self.order("", "", 0)
    }

    /// How many calls of this daemon went as ordered.
    pub(super) fn carried_out(&self) -> u64 {
        let text = fs::read_to_string(self.setup.folder.join("orders/carried-out")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Ends the daemon, in order.
    pub(super) fn close(&mut self) {
        {
            let mut keeper = self.keeper();
            keeper.over = true;
            let _ = signal(keeper.child.id(), Signal::TERM);
            let _ = keeper.child.wait();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.close();
    }
}

impl Setup {
    fn start(&self, more: &[&str], clock_ms: i64) -> anyhow::Result<Child> {
        let log = OpenOptions::new().create(true).append(true).open(self.folder.join("daemon.log"))?;
        let mut command = Command::new(&self.binary);
        // Whoever runs this may have settings of her own.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("VIV_")) {
            command.env_remove(name);
        }
        command
            .args(["serve", "--listen", "127.0.0.1:0", "--layers", "plain", "--save-memory", "off"])
            .args(["--cgroup-prefix", &self.cgroup_prefix])
            .arg("--data")
            .arg(self.folder.join("data"))
            .arg("--config")
            .arg(self.folder.join("config.toml"))
            .env("XDG_CONFIG_HOME", &self.folder)
            .arg(format!("--chaos={}", self.seed))
            .arg(format!("--chaos-clock-ms={clock_ms}"))
            .args(more);
        if self.ordered {
            command.arg("--chaos-orders").arg(self.folder.join("orders"));
        }
        let child = command.stdin(Stdio::null()).stdout(File::open("/dev/null")?).stderr(log).spawn();
        child.context("cannot start a daemon")
    }
}

/// Starts another daemon whenever there is none.
fn keep(keeper: &Mutex<Keeper>, setup: &Setup) {
    loop {
        {
            let mut keeper = keeper.lock().unwrap_or_else(PoisonError::into_inner);
            if keeper.over {
                return;
            }
            if !matches!(keeper.child.try_wait(), Ok(None))
                && let Ok(child) = setup.start(&[], keeper.clock_ms)
            {
                keeper.child = child;
                keeper.starts += 1;
            }
        }
        thread::sleep(LOOK);
    }
}

/// Whether it became so.
pub(super) fn wait(so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + SOON;
    while !so() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(LOOK);
    }
    true
}
