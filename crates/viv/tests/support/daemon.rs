//! A real daemon for tests: a data folder and a cgroup of its own, killed and started again at will.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viv_api::client::{Client, Location, SandboxHandle};
use viv_api::diagnosis::HostView;
use viv_api::sandbox::{CreateSandbox, Sandbox, Status};
use viv_core::SandboxId;
use viv_sandbox::cgroup::Layout;

use super::{SOON, eventually_quietly, eventually_within, fresh_bytes, hex, kill, pids, viv_binary};

/// How long a daemon may take to start, or a sandbox to be made, with all tests at once.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon on ground of its own.
pub struct Daemon {
    /// Its data folder.
    pub data: PathBuf,
    pub cgroup_prefix: String,
    arguments: Vec<String>,
    child: Option<Child>,
    client: Option<Client>,
    _folder: tempfile::TempDir,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With more arguments of `viv serve`.
    pub fn start_with(arguments: &[&str]) -> Self {
        let mut daemon = Self::prepare(arguments);
        daemon.run(&[]);
        daemon
    }

    /// The ground alone, on which nothing runs yet.
    pub fn prepare(arguments: &[&str]) -> Self {
        super::pass_over_unless_root();
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        let cgroup_prefix = format!("viv-test-{}", hex(&fresh_bytes()[8..]));
        let data = folder.path().canonicalize().unwrap().join("data");
        fs::create_dir(&data).unwrap();
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        Self { data, cgroup_prefix, arguments, child: None, client: None, _folder: folder }
    }

    /// Starts the process, with more environment, and waits until it listens.
    pub fn run(&mut self, env: &[(&str, &str)]) {
        self.spawn(env);
        let file = self.data.join("daemon.json");
        let until = Instant::now() + PATIENCE;
        while !file.exists() {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
                panic!("the daemon ended: {status}\n{}", self.log());
            }
            assert!(Instant::now() < until, "the daemon does not listen\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.connect();
    }

    /// Starts the process and does not wait for anything.
    pub fn spawn(&mut self, env: &[(&str, &str)]) {
        assert!(self.child.is_none(), "it runs already");
        // What a killed one left would be taken for the new one's.
        let _ = fs::remove_file(self.data.join("daemon.json"));
        self.client = None;
        let log = File::options().create(true).append(true).open(self.log_file()).unwrap();
        let mut command = self.viv();
        command.args(["serve", "--listen", "127.0.0.1:0", "--cgroup-prefix", &self.cgroup_prefix]);
        command.args(&self.arguments).envs(env.iter().copied());
        self.child = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    fn connect(&mut self) {
        let text = fs::read(self.data.join("daemon.json")).unwrap();
        let daemon: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let key = fs::read_to_string(self.data.join("key")).unwrap();
        let location = Location::new(daemon["url"].as_str().unwrap()).key(key.trim()).name("test");
        self.client = Some(Client::locate(location).unwrap());
    }

    /// The binary as a user of this daemon calls it.
    pub fn viv(&self) -> Command {
        let mut command = Command::new(viv_binary());
        // Whoever runs the tests may have settings of her own.
        let ours = |name: &OsString| name.to_string_lossy().starts_with("VIV_");
        for name in std::env::vars_os().map(|(name, _)| name).filter(ours) {
            command.env_remove(name);
        }
        command.env("VIV_DATA", &self.data).env("XDG_CONFIG_HOME", &self.data);
        command
    }

    pub fn client(&self) -> &Client {
        self.client.as_ref().expect("it listens")
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        kill(self.pid(), Signal::KILL);
        self.wait();
    }

    /// Asks it to end, and waits for that.
    pub fn end(&mut self) {
        kill(self.pid(), Signal::TERM);
        let status = self.wait();
        assert!(status.success(), "it ended as {status}\n{}", self.log());
    }

    /// Waits for an end that was asked for, or comes by itself at a failpoint.
    pub fn wait(&mut self) -> ExitStatus {
        self.client = None;
        let mut child = self.child.take().expect("it runs");
        let mut status = None;
        let ended = eventually_quietly(|| {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        if !ended {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the daemon did not end\n{}", self.log());
        }
        status.expect("it ended")
    }

    /// Starts again on the same folder.
    pub fn restart(&mut self) {
        self.run(&[]);
    }

    fn log_file(&self) -> PathBuf {
        self.data.with_extension("log")
    }

    /// What it said on standard error.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// A sandbox that is ready.
    pub fn create(&self) -> Sandbox {
        self.create_from(&CreateSandbox::default())
    }

    pub fn create_from(&self, request: &CreateSandbox) -> Sandbox {
        let made = self.client().create(request, None).unwrap().into_sandbox();
        assert_eq!(made.status, Status::Ready, "{made:#?}");
        made
    }

    pub fn sandbox(&self, id: &SandboxId) -> SandboxHandle<'_> {
        self.client().sandbox(id)
    }

    /// Where its parts are, as the diagnosis tells an operator.
    pub fn host(&self, id: &SandboxId) -> HostView {
        self.sandbox(id).diagnosis().unwrap().host.expect("an admin is told")
    }

    /// Waits until it is shown like this.
    pub fn wait_for(&self, id: &SandboxId, what: &str, so: impl Fn(&Sandbox) -> bool) -> Sandbox {
        let mut seen = None;
        let until = Instant::now() + PATIENCE;
        loop {
            let now = self.sandbox(id).get().unwrap();
            if so(&now) {
                return now;
            }
            assert!(Instant::now() < until, "not so after {PATIENCE:?}: {what}: {now:#?}\nbefore: {seen:#?}");
            seen = Some(now.status);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Deletes it and sees that it is over.
    pub fn remove(&self, id: &SandboxId) {
        let over = self.sandbox(id).delete(None).unwrap().into_sandbox();
        assert_eq!((over.status, over.deleted), (Status::Stopped, true), "{over:#?}");
    }

    /// The folder of the provider.
    pub fn provider_folder(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    /// Folders of instances: each is one at the provider.
    pub fn instances(&self) -> Vec<PathBuf> {
        entries(&self.provider_folder().join("instances"))
    }

    /// Folders of ours in any cgroup hierarchy.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let layout = Layout::detect().unwrap();
        layout.mounts().map(|mount| mount.join(&self.cgroup_prefix)).filter(|path| path.exists()).collect()
    }

    /// Pids of shims on this ground and of everything in our cgroups; the daemon is none of them.
    pub fn processes(&self) -> BTreeSet<u32> {
        let folder = self.provider_folder();
        let folder = folder.to_string_lossy();
        pids()
            .filter(|pid| {
                let told = |file| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
                String::from_utf8_lossy(&told("cmdline")).contains(&*folder)
                    || String::from_utf8_lossy(&told("cgroup")).contains(&self.cgroup_prefix)
            })
            .collect()
    }

    /// Nothing is left of any sandbox: no process, cgroup, mount or folder (L20).
    pub fn assert_nothing_left(&self) {
        eventually_within(SOON, "no process is left", || self.processes().is_empty());
        eventually_within(SOON, "no cgroup is left", || self.cgroups().is_empty());
        let folder = self.provider_folder();
        let pool = format!(" {} ", folder.join("layers").display());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let ours = |line: &&str| line.contains(&*folder.to_string_lossy()) && !line.contains(&pool);
        let left: Vec<_> = mounts.lines().filter(ours).collect();
        assert!(left.is_empty(), "mounts are left: {left:#?}");
        for name in ["instances", "trash", "layers/active", "layers/trash"] {
            let mut left = Vec::new();
            // Taking apart goes on in the background.
            let gone = eventually_quietly(|| {
                left = entries(&folder.join(name));
                left.is_empty()
            });
            assert!(gone, "folders are left: {left:?}");
        }
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

/// A test that fails leaves its daemon and its sandboxes; they are not left to the next one.
impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.log());
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let until = Instant::now() + SOON;
        while Instant::now() < until {
            let (processes, cgroups) = (self.processes(), self.cgroups());
            if processes.is_empty() && cgroups.is_empty() {
                break;
            }
            for below in cgroups.iter().flat_map(|cgroup| entries(cgroup)) {
                let _ = fs::write(below.join("freezer.state"), "THAWED");
                let _ = fs::remove_dir(below);
            }
            for pid in processes {
                kill(pid, Signal::KILL);
            }
            for cgroup in cgroups {
                let _ = fs::remove_dir(cgroup);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = rustix::mount::unmount(self.provider_folder().join("layers"), rustix::mount::UnmountFlags::DETACH);
    }
}
