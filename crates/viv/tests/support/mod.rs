//! Ground for tests on the real binary: a data folder, an owner and a cgroup of their own each.
#![allow(dead_code, unreachable_pub, reason = "every test binary uses a part of this")]

pub mod base;
pub mod criu;
pub mod daemon;
pub mod diagnosed;
pub mod disk;
pub mod freezer;
pub mod held;
pub mod lazy;
pub mod receiver;
pub mod restart;
pub mod user;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use viv_core::exec::{ExecSpec, ExecStatus, OutputEvent};
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, OwnerMark, SandboxId};
use viv_provider::conformance::World;
use viv_provider::{InstanceRef, InstanceSpec, InstanceState, Mutation, Provider, ProviderError};
use viv_sandbox::cgroup::Layout;
use viv_sandbox::{DriverKind, LocalConfig, LocalProvider, Runtime, StoreConfig};

/// The binary under test.
pub const VIV: &str = env!("CARGO_BIN_EXE_viv");

/// The same where this test was started as an ordinary user, who may not come near the other.
pub fn viv_binary() -> PathBuf {
    std::env::var_os("VIV_TEST_BINARY").map_or_else(|| VIV.into(), PathBuf::from)
}

/// How long anything that should happen soon may take on a loaded machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Enough for what the tests write, several at a time.
const POOL_BYTES: u64 = 768 << 20;

/// A provider on ground of its own.
pub struct Ground {
    pub provider: LocalProvider,
    pub owner: OwnerMark,
    pub data: PathBuf,
    pub cgroup_prefix: String,
    _folder: tempfile::TempDir,
}

impl Ground {
    pub fn new() -> Self {
        Self::with_runtime(Runtime::Embedded)
    }

    /// Shims are this binary.
    pub fn with_shim(shim_exe: &Path) -> Self {
        Self::with(|config| shim_exe.clone_into(&mut config.shim_exe))
    }

    pub fn with_runtime(runtime: Runtime) -> Self {
        Self::with(|config| config.runtime = runtime)
    }

    /// Layers in a btrfs pool of this ground's own.
    pub fn on_btrfs() -> Self {
        Self::on_btrfs_with(|_| ())
    }

    pub fn on_btrfs_with(change: impl FnOnce(&mut LocalConfig)) -> Self {
        Self::with(|config| {
            config.store = StoreConfig { driver: Some(DriverKind::Btrfs), pool_bytes: Some(POOL_BYTES) };
            change(config);
        })
    }

    /// With either driver, by name.
    pub fn on(driver: DriverKind) -> Self {
        match driver {
            DriverKind::Btrfs => Self::on_btrfs(),
            DriverKind::Plain => Self::new(),
        }
    }

    /// In memory, for tests that save very often and lose processes, not power.
    pub fn in_memory(driver: DriverKind) -> Self {
        Self::at(Path::new("/dev/shm"), |config| {
            config.store = StoreConfig { driver: Some(driver), pool_bytes: Some(POOL_BYTES) };
        })
    }

    pub fn with(change: impl FnOnce(&mut LocalConfig)) -> Self {
        Self::at(&std::env::temp_dir(), change)
    }

    pub fn at(place: &Path, change: impl FnOnce(&mut LocalConfig)) -> Self {
        pass_over_unless_root();
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir_in(place).unwrap();
        let name = hex(&fresh_bytes()[8..]);
        let cgroup_prefix = format!("viv-test-{name}");
        let data = folder.path().join("local");
        let mut config = LocalConfig::new(data.clone(), viv_binary());
        config.cgroup_prefix.clone_from(&cgroup_prefix);
        change(&mut config);
        base::lend(&data);
        let provider = LocalProvider::open(config).unwrap();
        let owner = format!("test-{name}").parse().unwrap();
        Self { provider, owner, data, cgroup_prefix, _folder: folder }
    }

    /// Another provider on the same ground, as a daemon that starts again has it.
    pub fn reopen(&self) -> LocalProvider {
        let mut config = LocalConfig::new(self.data.clone(), viv_binary());
        config.cgroup_prefix.clone_from(&self.cgroup_prefix);
        LocalProvider::open(config).unwrap()
    }

    /// A running sandbox.
    pub async fn create(&self, lifetime: Duration) -> Sandbox<'_> {
        self.create_from(InstanceSpec::host(lifetime.as_millis() as u64)).await
    }

    pub async fn create_from(&self, spec: InstanceSpec) -> Sandbox<'_> {
        let id = SandboxId::from_bytes(fresh_bytes());
        let seen = self.provider.create(&mutation(1, 1), &id, &self.owner, &spec).await.unwrap();
        assert_eq!(seen.state, InstanceState::Running);
        Sandbox { ground: self, id }
    }

    /// The binary as a user calls it, on this ground.
    pub fn viv(&self) -> Command {
        self.verb("local")
    }

    /// The same with another verb than `local`.
    pub fn verb(&self, verb: &str) -> Command {
        let mut command = Command::new(viv_binary());
        command.arg(verb).env("VIV_DATA", self.folder()).env("VIV_CGROUP_PREFIX", &self.cgroup_prefix);
        command
    }

    /// The data folder of `viv`, in which the provider has its own.
    pub fn folder(&self) -> &Path {
        self.data.parent().unwrap()
    }

    /// The same for `viv local image`.
    pub fn viv_image(&self) -> Command {
        let mut command = Command::new(viv_binary());
        command.args(["local", "image"]).env("VIV_DATA", self.folder()).env("VIV_CGROUP_PREFIX", &self.cgroup_prefix);
        command
    }

    /// Folders of ours in any cgroup hierarchy.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        let layout = Layout::detect().unwrap();
        layout.mounts().map(|mount| mount.join(&self.cgroup_prefix)).filter(|path| path.exists()).collect()
    }

    /// Pids of shims on this ground and of everything in our cgroups.
    pub fn processes(&self) -> BTreeSet<u32> {
        let mut found: BTreeSet<u32> = pids()
            .filter(|pid| {
                fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&*self.data.to_string_lossy()))
            })
            .filter(|&pid| pid != std::process::id())
            .collect();
        found.extend(pids().filter(|pid| {
            fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&self.cgroup_prefix))
        }));
        found
    }

    /// Nothing is left: no process, cgroup, mount or instance folder (L20).
    pub fn assert_nothing_left(&self) {
        eventually("no process is left", || self.processes().is_empty());
        eventually("no cgroup is left", || self.cgroups().is_empty());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let pool = format!(" {} ", self.data.join("layers").display());
        let ours = |line: &&str| line.contains(&*self.data.to_string_lossy()) && !line.contains(&pool);
        let left: Vec<_> = mounts.lines().filter(ours).collect();
        assert!(left.is_empty(), "mounts are left: {left:#?}");
        for folder in ["instances", "trash", "layers/active", "layers/trash"] {
            let mut left = Vec::new();
            // Taking apart goes on in the background, and what others left who were killed is taken apart by who tidies.
            let gone = eventually_quietly(|| {
                left = fs::read_dir(self.data.join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
                if !left.is_empty() {
                    self.provider.tidy();
                }
                left.is_empty()
            });
            assert!(gone, "folders are left: {left:?}");
        }
    }
}

/// What is shown for root is shown for ordinary users by `ordinary_user`, which needs nobody's help.
fn pass_over_unless_root() {
    if rustix::process::geteuid().is_root() {
        return;
    }
    let why = "this test makes sandboxes as root";
    // There each test is a process of its own.
    assert!(std::env::var_os("NEXTEST").is_some(), "{why}: `cargo nextest run` passes over it");
    eprintln!("passed over: {why}");
    std::process::exit(0);
}

impl Ground {
    /// Runs a shell script to its end in any instance, with any token: all output, and how it ended.
    pub async fn run(&self, instance: &InstanceRef, token: u64, script: &str) -> (String, ExecStatus) {
        let execution = ExecutionId::from_bytes(fresh_bytes());
        let mutation = mutation(instance.generation.0, token);
        self.provider.execute(&mutation, &instance.sandbox, &execution, &sh(script)).await.unwrap();
        self.output(instance, &execution).await
    }

    async fn output(&self, instance: &InstanceRef, execution: &ExecutionId) -> (String, ExecStatus) {
        let mut stream = self.provider.attach(instance, execution, 0, true).await.unwrap();
        let mut text = Vec::new();
        loop {
            match stream.next().await.unwrap().expect("an end comes before nothing") {
                OutputEvent::Chunk { data, .. } => text.extend(data),
                OutputEvent::Cut { from, to } => panic!("output was cut from {from} to {to}"),
                OutputEvent::End(status) => return (String::from_utf8_lossy(&text).into_owned(), status),
            }
        }
    }

    /// No layer is left either: for tests that removed all they saved.
    pub fn assert_no_layer_left(&self) {
        let mut left = Vec::new();
        let collected = eventually_quietly(|| {
            // Whoever hashes what was saved last keeps this from collecting.
            self.provider.tidy();
            left = ["sealed", "tmp", "trash", "active"]
                .iter()
                .flat_map(|folder| fs::read_dir(self.data.join("layers").join(folder)).unwrap())
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.file_name().is_some_and(|name| name != ".lock"))
                .collect();
            left.is_empty()
        });
        assert!(collected, "layers are left: {left:#?}");
    }
}

/// A test that fails leaves its sandboxes; they are not left to the next one.
impl Drop for Ground {
    fn drop(&mut self) {
        // The pool goes with the ground; whoever still uses it, in a namespace of his own, keeps it until he is done.
        let _ = rustix::mount::unmount(self.data.join("layers"), rustix::mount::UnmountFlags::DETACH);
        if std::thread::panicking() {
            // Where there are thousands, one by one is too slow: more come than are killed.
            for cgroup in self.cgroups() {
                for below in fs::read_dir(&cgroup).into_iter().flatten().flatten() {
                    let _ = fs::write(below.path().join("cgroup.kill"), "1");
                }
            }
            for pid in self.processes() {
                kill(pid, rustix::process::Signal::KILL);
            }
            let until = Instant::now() + SOON;
            while !self.cgroups().is_empty() && Instant::now() < until {
                for cgroup in self.cgroups() {
                    for below in fs::read_dir(&cgroup).into_iter().flatten().flatten() {
                        let _ = fs::remove_dir(below.path());
                    }
                    let _ = fs::remove_dir(cgroup);
                }
            }
        }
        base::take_back(&self.data);
        remove_for_good(self.folder());
    }
}

/// Removes a folder in which somebody may still be tidying up: what is made meanwhile would keep it from going.
fn remove_for_good(folder: &Path) {
    eventually_quietly(|| match fs::remove_dir_all(folder) {
        Ok(()) => true,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    });
}

/// A sandbox on some ground, at generation 1 with token 1.
pub struct Sandbox<'g> {
    pub ground: &'g Ground,
    pub id: SandboxId,
}

impl Sandbox<'_> {
    pub fn instance(&self) -> InstanceRef {
        InstanceRef { sandbox: self.id.clone(), generation: Generation::FIRST }
    }

    pub fn folder(&self) -> PathBuf {
        self.ground.data.join("instances").join(self.id.as_str())
    }

    /// Pid of the agent, as the host sees it.
    pub fn agent_pid(&self) -> u32 {
        fs::read_to_string(self.folder().join("init.pid")).unwrap().trim().parse().unwrap()
    }

    pub fn shim_pid(&self) -> u32 {
        self.pid_of("shim")
    }

    pub fn guard_pid(&self) -> u32 {
        self.pid_of("guard")
    }

    fn pid_of(&self, who: &str) -> u32 {
        let identity: serde_json::Value =
            serde_json::from_slice(&fs::read(self.folder().join("shim.json")).unwrap()).unwrap();
        identity[who]["pid"].as_u64().unwrap() as u32
    }

    pub async fn state(&self) -> InstanceState {
        self.ground.provider.observe(&self.instance()).await.unwrap().state
    }

    /// Starts a shell script.
    pub async fn start(&self, script: &str) -> ExecutionId {
        self.start_spec(&sh(script)).await
    }

    pub async fn start_spec(&self, spec: &ExecSpec) -> ExecutionId {
        self.try_start(spec).await.unwrap()
    }

    /// The same where it may be refused.
    pub async fn try_start(&self, spec: &ExecSpec) -> Result<ExecutionId, ProviderError> {
        let execution = ExecutionId::from_bytes(fresh_bytes());
        self.ground.provider.execute(&mutation(1, 1), &self.id, &execution, spec).await.map(|_| execution)
    }

    /// Runs a shell script to its end: all output, and how it ended.
    pub async fn run(&self, script: &str) -> (String, ExecStatus) {
        let execution = self.start(script).await;
        self.output(&execution).await
    }

    pub async fn output(&self, execution: &ExecutionId) -> (String, ExecStatus) {
        self.ground.output(&self.instance(), execution).await
    }

    pub async fn destroy(&self) {
        self.ground.provider.destroy(&mutation(1, 1), &self.id).await.unwrap();
    }
}

/// The local provider as the conformance suite wants it.
pub struct LocalWorld(pub Ground);

#[async_trait::async_trait]
impl World for LocalWorld {
    fn provider(&self) -> Arc<dyn Provider> {
        Arc::new(self.0.provider.clone())
    }

    fn owner(&self) -> OwnerMark {
        self.0.owner.clone()
    }

    fn spec(&self) -> InstanceSpec {
        InstanceSpec::host(600_000)
    }

    fn fresh_bytes(&self) -> [u8; 16] {
        fresh_bytes()
    }

    async fn pass(&self, ms: u64) {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    fn now_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
    }

    async fn finish(&self) {
        self.0.assert_nothing_left();
        self.0.assert_no_layer_left();
    }
}

pub fn mutation(generation: u64, token: u64) -> Mutation {
    Mutation {
        operation: OperationId::from_bytes(fresh_bytes()),
        generation: Generation(generation),
        token: FencingToken(token),
        budget_ms: 30_000,
    }
}

pub fn sh(script: &str) -> ExecSpec {
    ExecSpec { argv: vec!["/bin/sh".into(), "-c".into(), script.into()], ..ExecSpec::default() }
}

/// Unique in this process by a count, and between processes by the kernel.
pub fn fresh_bytes() -> [u8; 16] {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()).unwrap();
    bytes[..8].copy_from_slice(&COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    bytes
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Waits until it is so, or fails.
pub fn eventually(what: &str, so: impl FnMut() -> bool) {
    eventually_within(SOON, what, so);
}

/// Waits until it is so, and answers whether it came to that.
pub fn eventually_quietly(mut so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + SOON;
    while !so() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

pub fn eventually_within(within: Duration, what: &str, mut so: impl FnMut() -> bool) {
    let until = Instant::now() + within;
    while !so() {
        assert!(Instant::now() < until, "not so after {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn pids() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])))
}

pub fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    // Gone before we came is as good.
    let _ = rustix::process::kill_process(pid, signal);
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Runs the named test of this binary again in a mount namespace of its own, prepared by a shell script.
///
/// `VIV_TEST_GROUND` tells the test that it is there.
pub fn again_in_namespace(test: &str, prepare: &str) {
    let this = std::env::current_exe().unwrap();
    let script = format!("set -e\n{prepare}\nexec \"$0\" --exact \"$1\" --nocapture");
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "/bin/sh", "-c", &script])
        .arg(this)
        .arg(test)
        .env("VIV_TEST_GROUND", "prepared")
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

pub fn is_in_namespace() -> bool {
    std::env::var_os("VIV_TEST_GROUND").is_some()
}

/// Only the v2 hierarchy, at the usual place.
pub const PURE_V2: &str = "umount -R -l /sys/fs/cgroup\nmount -t cgroup2 none /sys/fs/cgroup";

/// No cgroups at all.
pub const NO_CGROUPS: &str = "umount -R -l /sys/fs/cgroup";

pub fn exists(path: impl AsRef<Path>) -> bool {
    path.as_ref().exists()
}

/// Chance that can be repeated: the seed is printed, and taken from the variable of that name.
#[derive(Clone)]
pub struct Chance(Arc<AtomicU64>);

impl Chance {
    pub fn from_env(variable: &str) -> Self {
        let seed = std::env::var(variable).ok().and_then(|text| text.parse().ok());
        let seed = seed.unwrap_or_else(|| u64::from_be_bytes(fresh_bytes()[8..].try_into().unwrap()));
        eprintln!("{variable}={seed}");
        Self(Arc::new(AtomicU64::new(seed)))
    }

    pub fn below(&self, bound: u64) -> u64 {
        // SplitMix64.
        let mut x = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}
