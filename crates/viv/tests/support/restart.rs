//! A data folder on which real daemons come, are killed, and come again.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viv_api::client::{Client, Location};
use viv_api::query::ListSandboxes;
use viv_api::sandbox::{CreateSandbox, Phase, Sandbox, Status};
use viv_core::{OwnerMark, SandboxId};
use viv_provider::{Listed, PageRequest, Provider};
use viv_sandbox::cgroup::Layout;
use viv_sandbox::{LocalConfig, LocalProvider};
use viv_store::{SqliteStore, Store};

use super::base;
use super::daemon::PATIENCE;
use super::disk::Disk;
use super::freezer;
use super::{VIV, eventually, eventually_quietly, eventually_within, fresh_bytes, hex, is_alive, kill};
use super::{pass_over_unless_root, pids, remove_for_good, viv_binary};

/// A data folder, with a cgroup of its own.
pub struct House {
    pub data: PathBuf,
    pub cgroup_prefix: String,
    arguments: Vec<String>,
    config: PathBuf,
    count: AtomicU32,
    folder: tempfile::TempDir,
}

impl House {
    pub fn new() -> Self {
        Self::with_config("")
    }

    /// Its daemons read this configuration.
    pub fn with_config(text: &str) -> Self {
        let house = Self::with_arguments(&["--layers", "plain"]);
        house.configure(text);
        house
    }

    /// Its daemons are started with more arguments of `viv serve`.
    pub fn with_arguments(arguments: &[&str]) -> Self {
        pass_over_unless_root();
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        let data = folder.path().canonicalize().unwrap().join("data");
        Self::made(folder, data, arguments)
    }

    /// Its data folder is on this disk, its records are not: what is full then is what sandboxes are made of.
    pub fn on_disk(disk: &Disk) -> Self {
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        let data = disk.path().canonicalize().unwrap().join("data");
        let house = Self::made(folder, data, &["--layers", "plain"]);
        house.keep_records_in(house.folder.path());
        house
    }

    /// All that is its own is on this disk, its records too.
    pub fn wholly_on_disk(disk: &Disk) -> Self {
        pass_over_unless_root();
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        let data = disk.path().canonicalize().unwrap().join("data");
        Self::made(folder, data, &["--layers", "plain"])
    }

    /// The same on btrfs, whose quota groups are on, with the driver for that.
    pub fn on_btrfs(disk: &Disk) -> Self {
        pass_over_unless_root();
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        let data = disk.path().canonicalize().unwrap().join("data");
        Self::made(folder, data, &["--layers", "btrfs"])
    }

    fn made(folder: tempfile::TempDir, data: PathBuf, arguments: &[&str]) -> Self {
        fs::create_dir(&data).unwrap();
        base::lend(&data.join("sandboxes"));
        let config = folder.path().join("config.toml");
        fs::write(&config, "").unwrap();
        let cgroup_prefix = format!("viv-test-{}", hex(&fresh_bytes()[8..]));
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        Self { data, cgroup_prefix, arguments, config, count: AtomicU32::new(0), folder }
    }

    /// A daemon that serves.
    pub fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    /// One that kills itself at this point.
    pub fn start_to_die(&self, failpoint: &str) -> Daemon {
        self.start_with(&[("VIV_FAILPOINT", failpoint)])
    }

    pub fn start_with(&self, env: &[(&str, &str)]) -> Daemon {
        let mut daemon = self.spawn(&[], env);
        daemon.wait_until_it_serves();
        daemon
    }

    /// One that waits for its turn.
    pub fn stand_by(&self) -> Daemon {
        let mut daemon = self.spawn(&["--standby"], &[]);
        eventually("it stands by", || daemon.said().contains("standing by") || !daemon.is_running());
        daemon
    }

    pub fn spawn(&self, args: &[&str], env: &[(&str, &str)]) -> Daemon {
        let log = self.folder.path().join(format!("daemon-{}.log", self.count.fetch_add(1, Ordering::Relaxed)));
        // On loopback, unless somebody said otherwise.
        let is_told = self.arguments.iter().any(|word| word == "--listen");
        let listen: &[&str] = if is_told { &[] } else { &["--listen", "127.0.0.1:0"] };
        let child = self
            .viv()
            .args(["serve", "--cgroup-prefix", &self.cgroup_prefix])
            .args(listen)
            .args(&self.arguments)
            .args(args)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Daemon { child, log, data: self.data.clone() }
    }

    /// The binary as a user of its daemons calls it.
    pub fn viv(&self) -> Command {
        let mut command = Command::new(viv_binary());
        // Whoever runs the tests may have settings of her own.
        let ours = |name: &OsString| ["VIV_", "OTEL_"].iter().any(|ours| name.to_string_lossy().starts_with(ours));
        for name in std::env::vars_os().map(|(name, _)| name).filter(ours) {
            command.env_remove(name);
        }
        command.env("VIV_DATA", &self.data).env("VIV_CONFIG", &self.config).env("XDG_CONFIG_HOME", &self.data);
        command
    }

    /// What its daemons said on standard error, one after the other.
    pub fn said(&self) -> String {
        let logs = (0..self.count.load(Ordering::Relaxed)).map(|number| format!("daemon-{number}.log"));
        logs.map(|log| fs::read_to_string(self.folder.path().join(log)).unwrap_or_default()).collect()
    }

    /// The folder of the provider.
    pub fn provider_folder(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    /// Folders of instances: each is one at the provider.
    pub fn instance_folders(&self) -> Vec<PathBuf> {
        entries(&self.provider_folder().join("instances"))
    }

    /// The daemon's provider, seen by somebody else.
    pub fn provider(&self) -> LocalProvider {
        let mut config = LocalConfig::new(self.provider_folder(), VIV.into());
        config.cgroup_prefix.clone_from(&self.cgroup_prefix);
        LocalProvider::open(config).unwrap()
    }

    /// What the daemon's own instances carry.
    pub async fn owner_mark(&self) -> OwnerMark {
        let store = SqliteStore::open(&self.data.join("viv.db")).unwrap();
        store.meta("owner_mark").await.unwrap().expect("a daemon was here").parse().unwrap()
    }

    /// What the provider has of ours.
    pub async fn instances(&self) -> Vec<Listed> {
        let page = self.provider().list(&self.owner_mark().await, PageRequest::default()).await.unwrap();
        assert!(page.next.is_none() && !page.is_partial(), "{page:?}");
        page.items
    }

    /// The file with the records is there instead, as it is when a disk is mounted for it.
    pub fn keep_records_in(&self, folder: &Path) {
        let file = folder.join("viv.db");
        File::create(&file).unwrap();
        std::os::unix::fs::symlink(file, self.data.join("viv.db")).unwrap();
    }

    /// What daemons that start from now on read.
    pub fn configure(&self, text: &str) {
        fs::write(&self.config, text).unwrap();
    }

    /// Pids of shims and of everything in our cgroups.
    pub fn processes(&self) -> BTreeSet<u32> {
        let place = self.provider_folder().to_string_lossy().into_owned();
        let is_ours = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&place) || cgroups.contains(&self.cgroup_prefix)
        };
        pids().filter(is_ours).filter(|&pid| pid != std::process::id()).collect()
    }

    /// Folders of ours in any cgroup hierarchy.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let layout = Layout::detect().unwrap();
        layout.mounts().map(|mount| mount.join(&self.cgroup_prefix)).filter(|path| path.exists()).collect()
    }

    /// No process, cgroup, mount, folder or layer is left of any sandbox (L20). Taking apart goes on in the background.
    pub fn assert_nothing_left(&self) {
        eventually("no process is left", || self.processes().is_empty());
        eventually("no cgroup is left", || self.cgroups().is_empty());
        let folder = self.provider_folder();
        let pool = format!(" {} ", folder.join("layers").display());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let ours = |line: &&str| line.contains(&*folder.to_string_lossy()) && !line.contains(&pool);
        let left: Vec<_> = mounts.lines().filter(ours).collect();
        assert!(left.is_empty(), "mounts are left: {left:#?}");
        for name in ["instances", "trash", "layers/active", "layers/tmp", "layers/trash"] {
            let mut left = Vec::new();
            // What held many files takes a while on a loaded machine.
            let until = Instant::now() + 2 * PATIENCE;
            while Instant::now() < until {
                left = entries(&folder.join(name));
                left.retain(|path| !path.ends_with(".lock"));
                if left.is_empty() {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            assert!(left.is_empty(), "folders are left: {left:?}");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// A test that fails leaves its sandboxes; they are not left to the next one.
impl Drop for House {
    fn drop(&mut self) {
        eventually_quietly(|| {
            let (processes, cgroups) = (self.processes(), self.cgroups());
            let all_gone = processes.is_empty() && cgroups.is_empty();
            for below in cgroups.iter().flat_map(|cgroup| entries(cgroup)) {
                // What is frozen does not die before it thaws.
                let _ = fs::write(below.join("freezer.state"), "THAWED");
                let _ = fs::write(below.join("cgroup.kill"), "1");
                let _ = fs::remove_dir(below);
            }
            for pid in processes {
                kill(pid, Signal::KILL);
            }
            for cgroup in cgroups {
                let _ = fs::remove_dir(cgroup);
            }
            all_gone
        });
        let _ = rustix::mount::unmount(self.provider_folder().join("layers"), rustix::mount::UnmountFlags::DETACH);
        base::take_back(&self.provider_folder());
        remove_for_good(&self.data);
    }
}

/// A daemon; killed when this goes.
pub struct Daemon {
    child: Child,
    log: PathBuf,
    data: PathBuf,
}

impl Daemon {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said on standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Where this very daemon listens, once it does.
    fn url(&self) -> Option<String> {
        let daemon: serde_json::Value = serde_json::from_slice(&fs::read(self.data.join("daemon.json")).ok()?).ok()?;
        (daemon["pid"] == self.pid()).then(|| daemon["url"].as_str().unwrap().to_owned())
    }

    pub fn serves(&self) -> bool {
        self.url().is_some()
    }

    pub fn wait_until_it_serves(&mut self) {
        eventually_within(PATIENCE, "it serves", || {
            assert!(self.is_running(), "it ended: {}", self.said());
            self.serves()
        });
    }

    pub fn client(&self) -> Client {
        let key = fs::read_to_string(self.data.join("key")).unwrap();
        let location = Location::new(self.url().expect("it serves")).key(key.trim()).name("test");
        Client::locate(location).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal);
    }

    /// Waits until it is over.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        eventually_within(PATIENCE, "it ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// It was killed, by itself or by somebody.
    pub fn assert_killed(&mut self) {
        let status = self.wait();
        assert_eq!(status.signal(), Some(9), "{status}: {}", self.said());
    }

    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.assert_killed();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("daemon {} said: {}", self.pid(), self.said());
        }
        let _ = self.child.kill();
        // A frozen one would not die before it thaws.
        eventually_quietly(|| self.child.try_wait().is_ok_and(|ended| ended.is_some()) || !is_alive(self.pid()));
    }
}

/// All that are not deleted, stopped ones too.
pub fn all(client: &Client) -> Vec<Sandbox> {
    let query = ListSandboxes { all: true, ..ListSandboxes::default() };
    client.list_all(query).map(|one| one.unwrap()).filter(|one| !one.deleted).collect()
}

/// A new sandbox that is ready.
pub fn create(client: &Client) -> Sandbox {
    let made = client.create(&CreateSandbox::default(), None).unwrap().into_sandbox();
    assert_eq!((made.phase, made.status), (Phase::Ready, Status::Ready), "{made:?}");
    made
}

/// Waits until nothing goes on with it any more.
pub fn settled(client: &Client, sandbox: &SandboxId) -> Sandbox {
    let mut last = None;
    eventually_within(PATIENCE, "it settles", || {
        let now = client.sandbox(sandbox).get().unwrap();
        let rests = match now.phase {
            // Evidence of the daemon before it may be too old: a read has it probed.
            Phase::Ready => now.status == Status::Ready,
            Phase::Stopped | Phase::Lost | Phase::Frozen | Phase::Hibernated | Phase::Failed => true,
            Phase::Provisioning | Phase::Verifying | Phase::Hibernating | Phase::Resuming | Phase::Stopping => false,
        };
        last = Some(now);
        rests
    });
    last.unwrap()
}

/// Where a shim's folder is.
pub fn instance_folder(house: &House, sandbox: &SandboxId) -> PathBuf {
    house.provider_folder().join("instances").join(sandbox.as_str())
}

/// Pid of a sandbox's shim.
pub fn shim_pid(house: &House, sandbox: &SandboxId) -> u32 {
    let text = fs::read(instance_folder(house, sandbox).join("shim.json")).unwrap();
    let identity: serde_json::Value = serde_json::from_slice(&text).unwrap();
    identity["shim"]["pid"].as_u64().unwrap() as u32
}

/// A cgroup in which a daemon can be frozen from outside.
pub struct Freezer {
    cgroup: PathBuf,
    kind: FreezerKind,
}

/// What becomes of those who are killed while frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreezerKind {
    /// They are gone at once (cgroup v2).
    LetsDie,
    /// They are gone when they thaw (the first kind).
    HoldsTheDead,
}

impl Freezer {
    /// `None`, told on standard error, where there is none of that kind.
    #[track_caller]
    pub fn find(kind: FreezerKind) -> Option<Self> {
        let mount = match kind {
            FreezerKind::LetsDie => freezer::second_kind()?,
            FreezerKind::HoldsTheDead => freezer::first_kind()?,
        };
        let cgroup = mount.join(format!("viv-test-{}", hex(&fresh_bytes()[8..])));
        fs::create_dir(&cgroup).unwrap();
        Some(Self { cgroup, kind })
    }

    /// Only this daemon: its shims are elsewhere.
    pub fn freeze(&self, daemon: &Daemon) {
        fs::write(self.cgroup.join("cgroup.procs"), daemon.pid().to_string()).unwrap();
        match self.kind {
            FreezerKind::LetsDie => fs::write(self.cgroup.join("cgroup.freeze"), "1").unwrap(),
            FreezerKind::HoldsTheDead => fs::write(self.cgroup.join("freezer.state"), "FROZEN").unwrap(),
        }
        eventually("it is frozen", || match self.kind {
            FreezerKind::LetsDie => fs::read_to_string(self.cgroup.join("cgroup.events")).unwrap().contains("frozen 1"),
            FreezerKind::HoldsTheDead => {
                fs::read_to_string(self.cgroup.join("freezer.state")).unwrap().trim() == "FROZEN"
            }
        });
    }

    pub fn thaw(&self) {
        let _ = match self.kind {
            FreezerKind::LetsDie => fs::write(self.cgroup.join("cgroup.freeze"), "0"),
            FreezerKind::HoldsTheDead => fs::write(self.cgroup.join("freezer.state"), "THAWED"),
        };
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        for pid in fs::read_to_string(self.cgroup.join("cgroup.procs")).unwrap_or_default().lines() {
            kill(pid.parse().unwrap(), Signal::KILL);
        }
        eventually_quietly(|| fs::remove_dir(&self.cgroup).is_ok());
    }
}
