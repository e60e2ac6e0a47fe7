//! What is left on the machine is found and cleared away, whatever kind it is, and nothing else is touched (J1).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::Signal;
use serde_json::Value;
use support::daemon::run;
use support::restart::{House, create, instance_folder};
use support::{Ground, Sandbox, eventually, fresh_bytes, is_alive, kill, mutation};
use viv_api::client::Client;
use viv_api::query::ListEvents;
use viv_api::reconcile::{Orphan, Reconcile};
use viv_api::sandbox::{EnsureSandbox, Phase, StopSandbox};
use viv_core::{EndCause, OwnerMark, SandboxId};
use viv_provider::{Finding, FindingKind, InstanceSpec, InstanceState, Provider, SweptAs};
use viv_sandbox::cgroup::Layout;

const LIFETIME: Duration = Duration::from_secs(600);

/// What is left is seen by then.
const FOUND_WITHIN: Duration = Duration::from_secs(30);

/// And all of it, with some of everything, on a loaded machine.
const CLEARED_WITHIN: Duration = Duration::from_secs(120);

/// The v2 hierarchy, or `None` with a word.
fn v2() -> Option<PathBuf> {
    let found = Layout::detect().unwrap().v2;
    if found.is_none() {
        eprintln!("PASSED OVER: there is no cgroup v2 here");
    }
    found
}

/// A process that does nothing, in a cgroup; ended with the test at the latest.
struct Sleeper(Child);

impl Sleeper {
    fn in_cgroup(cgroup: &Path) -> Self {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).unwrap();
        Self(child)
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Mounted(PathBuf);

impl Mounted {
    fn at(path: &Path) -> Self {
        fs::create_dir_all(path).unwrap();
        mount("none", path, "tmpfs", MountFlags::empty(), None).unwrap();
        Self(path.to_owned())
    }

    fn is_there(&self) -> bool {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        // A space stands there as its number.
        let place = self.0.to_str().unwrap().replace(' ', "\\040");
        mounts.lines().any(|line| line.split(' ').nth(4) == Some(&place))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// A freezer of the first kind, which holds even the dead: its processes are there, with their signal, until it thaws.
struct Frozen(PathBuf);

impl Frozen {
    /// All that runs in a sandbox; `None` with a word where there is no such freezer.
    fn all_of(prefix: &str, sandbox: &SandboxId) -> Option<Self> {
        let layout = Layout::detect().unwrap();
        let Some(mount) = layout.mounts().find(|mount| mount.ends_with("freezer")) else {
            eprintln!("PASSED OVER: there is no freezer that holds the dead");
            return None;
        };
        let switch = mount.join(prefix).join(sandbox.as_str()).join("freezer.state");
        fs::write(&switch, "FROZEN").unwrap();
        eventually("it is frozen", || fs::read_to_string(&switch).unwrap().trim() == "FROZEN");
        Some(Self(switch))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // It is gone with what it held, unless the test failed.
        let _ = fs::write(&self.0, "THAWED");
    }
}

/// Kills shim and guard at once, so that neither sees to the end of the other.
fn kill_supervisors(shim: u32, guard: u32) {
    kill(guard, Signal::STOP);
    kill(shim, Signal::KILL);
    kill(guard, Signal::KILL);
    eventually("shim and guard are gone", || !is_alive(shim) && !is_alive(guard));
}

/// A container of somebody else's, with a mount of its own, in a cgroup among ours; ended with the test at the latest.
struct Container {
    folder: tempfile::TempDir,
    name: String,
}

impl Container {
    fn run(cgroup: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("viv-test-runc-").tempdir().unwrap();
        let shared = ["usr", "bin", "lib", "lib64"].map(|name| format!("/{name}"));
        let bound = shared.iter().filter(|path| Path::new(path).exists());
        let bound = bound.map(|path| {
            serde_json::json!({ "destination": path, "source": path, "type": "bind", "options": ["rbind", "ro"] })
        });
        let mounts: Vec<Value> = [
            serde_json::json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
            serde_json::json!({ "destination": "/tmp", "type": "tmpfs", "source": "tmpfs" }),
        ]
        .into_iter()
        .chain(bound)
        .collect();
        let config = serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": { "uid": 0, "gid": 0 },
                "args": ["/bin/sh", "-c", "echo theirs > /tmp/file; exec sleep 600"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "root": { "path": "rootfs" },
            "mounts": mounts,
            "linux": {
                "cgroupsPath": cgroup,
                "namespaces": [{ "type": "pid" }, { "type": "mount" }, { "type": "ipc" }, { "type": "uts" }],
            },
        });
        fs::create_dir(folder.path().join("rootfs")).unwrap();
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let container = Self { folder, name: format!("viv-test-{}", support::hex(&fresh_bytes()[8..])) };
        let done = container.runc(&["run", "-d", "--bundle", container.folder.path().to_str().unwrap()]);
        assert!(done.success(), "runc: {done}");
        eventually("it has written its file", || container.is_well());
        container
    }

    /// A verb of runc about it. What it runs has our output if nobody says otherwise, and would keep it open.
    fn runc(&self, words: &[&str]) -> std::process::ExitStatus {
        let mut runc = Command::new("runc");
        runc.arg("--root").arg(self.folder.path().join("state")).args(words).arg(&self.name);
        runc.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap()
    }

    /// It runs, and what it wrote on its own mount is there.
    fn is_well(&self) -> bool {
        let mut runc = Command::new("runc");
        runc.arg("--root").arg(self.folder.path().join("state")).args(["exec", &self.name, "cat", "/tmp/file"]);
        runc.output().unwrap().stdout == b"theirs\n"
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.runc(&["delete", "--force"]);
    }
}

async fn audit(ground: &Ground) -> Vec<Finding> {
    ground.provider.audit().await.unwrap()
}

/// What is found of this kind that names this. What is just ending is not among what is left, so it is looked for until
/// it is there.
async fn found(ground: &Ground, kind: FindingKind, what: &str) -> Vec<Finding> {
    let until = Instant::now() + FOUND_WITHIN;
    loop {
        let all = audit(ground).await;
        let found: Vec<_> = all.iter().filter(|one| one.kind == kind && one.what.contains(what)).cloned().collect();
        if !found.is_empty() {
            return found;
        }
        assert!(Instant::now() < until, "{kind} {what}: {all:#?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A sandbox that was here and is not any more: a fence remembers it.
async fn gone(ground: &Ground) -> SandboxId {
    let sandbox = ground.create(LIFETIME).await;
    sandbox.destroy().await;
    sandbox.id.clone()
}

/// Clears away what is of this kind and names this, and answers what was found.
async fn found_and_cleared(ground: &Ground, kind: FindingKind, what: &str) -> Finding {
    let found = found(ground, kind, what).await;
    assert_eq!(found.len(), 1, "{kind} {what}: {found:#?}");
    let swept = ground.provider.sweep(&found).await.unwrap();
    assert_eq!(swept.len(), 1);
    assert_eq!(swept[0].outcome, SweptAs::Gone, "{swept:?}");
    let again = audit(ground).await;
    assert!(!again.iter().any(|one| one.kind == kind && one.what == found[0].what), "{again:#?}");
    // It is not cleared twice.
    assert_eq!(ground.provider.sweep(&found).await.unwrap()[0].outcome, SweptAs::NotLeftOver);
    found[0].clone()
}

async fn assert_well(sandbox: &Sandbox<'_>) {
    assert_eq!(sandbox.run("echo well").await.0, "well\n");
}

#[tokio::test]
async fn j1_a_healthy_ground_has_nothing_left() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    gone(&ground).await;
    let found = audit(&ground).await;
    // What is remembered of the one that is gone; whoever has its record knows whether that is needed.
    assert!(found.iter().all(|one| one.kind == FindingKind::Fence) && found.len() == 1, "{found:#?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn j1_half_made_folders_sockets_leases_and_layers_go() {
    let ground = Ground::new();
    let alive = ground.create(LIFETIME).await;
    let gone = gone(&ground).await;
    let instances = ground.data.join("instances");

    let new = instances.join(format!(".new-{gone}"));
    fs::create_dir(&new).unwrap();
    found_and_cleared(&ground, FindingKind::HalfMade, ".new-").await;
    assert!(!new.exists());
    let half = instances.join(SandboxId::from_bytes(fresh_bytes()).as_str());
    fs::create_dir(&half).unwrap();
    fs::write(half.join("shim.lock"), "").unwrap();
    drop(UnixListener::bind(half.join("shim.sock")).unwrap());
    found_and_cleared(&ground, FindingKind::HalfMade, half.to_str().unwrap()).await;
    assert!(!half.exists());

    // A socket on which somebody listens is somebody's, and files that we do not know stay.
    let (left, held) = (instances.join("left.sock"), instances.join("held.sock"));
    drop(UnixListener::bind(&left).unwrap());
    let _listener = UnixListener::bind(&held).unwrap();
    let foreign = instances.join("README");
    fs::write(&foreign, "not ours").unwrap();
    found_and_cleared(&ground, FindingKind::Socket, "left.sock").await;
    assert!(!left.exists() && held.exists());

    let lease = ground.data.join("ids/536870912");
    symlink(gone.as_str(), &lease).unwrap();
    found_and_cleared(&ground, FindingKind::Lease, "536870912").await;
    assert!(fs::symlink_metadata(&lease).is_err());

    let layers = ground.data.join("layers");
    for place in ["tmp/left", "active/left", "sealed/left"] {
        fs::create_dir(layers.join(place)).unwrap();
        found_and_cleared(&ground, FindingKind::Layer, place).await;
        assert!(!layers.join(place).exists());
    }

    found_and_cleared(&ground, FindingKind::Fence, gone.as_str()).await;
    assert!(foreign.exists() && held.exists());
    assert_eq!(audit(&ground).await, [], "and nothing else is left");
    assert_well(&alive).await;
    fs::remove_file(&foreign).unwrap();
    fs::remove_file(&held).unwrap();
    alive.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn j1_stray_cgroups_and_mounts_go_and_those_of_others_stay() {
    let Some(v2) = v2() else { return };
    let ground = Ground::new();
    let alive = ground.create(LIFETIME).await;
    let gone = gone(&ground).await;
    let prefix = v2.join(&ground.cgroup_prefix);

    // Of a sandbox of another data folder, and of who knows whom.
    let (others, foreign) = (prefix.join(SandboxId::from_bytes(fresh_bytes()).as_str()), prefix.join("foreign"));
    let ours = prefix.join(gone.as_str());
    for cgroup in [&others, &foreign, &ours] {
        fs::create_dir_all(cgroup).unwrap();
    }
    let (mut left, mut theirs) = (Sleeper::in_cgroup(&ours), Sleeper::in_cgroup(&others));
    found_and_cleared(&ground, FindingKind::Cgroup, ours.to_str().unwrap()).await;
    eventually("what ran in it ended", || left.has_ended());
    assert!(!ours.exists() && others.exists() && foreign.exists() && !theirs.has_ended());

    let place = ground.data.join("trash/left behind");
    let (stray, beside) = (Mounted::at(&place), Mounted::at(&ground.folder().join("beside")));
    found_and_cleared(&ground, FindingKind::Mount, "left behind").await;
    assert!(!stray.is_there() && beside.is_there());

    assert_well(&alive).await;
    drop(theirs);
    eventually("its process is gone", || fs::remove_dir(&others).is_ok());
    fs::remove_dir(&foreign).unwrap();
    drop((stray, beside));
    alive.destroy().await;
    let _ = fs::remove_dir(&place);
    ground.assert_nothing_left();
}

#[tokio::test]
async fn j1_shims_and_agents_without_each_other_are_ended() {
    let Some(v2) = v2() else { return };
    let ground = Ground::new();
    let alive = ground.create(LIFETIME).await;

    // Stopped, a shim does not notice that its agent is gone.
    let lost = ground.create(LIFETIME).await;
    let (shim, guard, agent) = (lost.shim_pid(), lost.guard_pid(), lost.agent_pid());
    kill(guard, Signal::STOP);
    kill(shim, Signal::STOP);
    kill(agent, Signal::KILL);
    eventually("the agent is gone", || !is_alive(agent));
    found_and_cleared(&ground, FindingKind::Supervisor, lost.id.as_str()).await;
    eventually("shim and guard are gone", || !is_alive(shim) && !is_alive(guard));
    let state = lost.state().await;
    assert!(matches!(&state, InstanceState::Ended(ended) if ended.cause == EndCause::SupervisorLost), "{state:?}");
    lost.destroy().await;

    // Its folder was taken away under it.
    let homeless = ground.create(LIFETIME).await;
    let (shim, agent) = (homeless.shim_pid(), homeless.agent_pid());
    let aside = ground.folder().join("aside");
    fs::rename(homeless.folder(), &aside).unwrap();
    found_and_cleared_any(&ground, FindingKind::Supervisor, homeless.id.as_str()).await;
    eventually("shim and agent are gone", || !is_alive(shim) && !is_alive(agent));
    fs::rename(&aside, homeless.folder()).unwrap();
    homeless.destroy().await;

    // Shim and guard are killed at once. The kernel kills the agent with them, and a freezer holds it all the same.
    let held = ground.create(LIFETIME).await;
    if let Some(frozen) = Frozen::all_of(&ground.cgroup_prefix, &held.id) {
        let agent = held.agent_pid();
        kill_supervisors(held.shim_pid(), held.guard_pid());
        assert!(is_alive(agent), "an agent without shim");
        found_and_cleared(&ground, FindingKind::Unsupervised, held.id.as_str()).await;
        eventually("the agent is gone", || !is_alive(agent));
        assert!(matches!(held.state().await, InstanceState::Ended(_)));
        drop(frozen);
    }
    held.destroy().await;

    // The same, and something that is not the agent's child lives on.
    let orphaned = ground.create(LIFETIME).await;
    let mut left = Sleeper::in_cgroup(&v2.join(&ground.cgroup_prefix).join(orphaned.id.as_str()));
    kill_supervisors(orphaned.shim_pid(), orphaned.guard_pid());
    assert!(!left.has_ended());
    found_and_cleared(&ground, FindingKind::Unsupervised, orphaned.id.as_str()).await;
    eventually("what ran ended", || left.has_ended());
    assert!(matches!(orphaned.state().await, InstanceState::Ended(_)));
    orphaned.destroy().await;

    assert_well(&alive).await;
    alive.destroy().await;
    ground.assert_nothing_left();
}

/// The same where one thing shows in several processes.
async fn found_and_cleared_any(ground: &Ground, kind: FindingKind, what: &str) {
    let is_it = |one: &&Finding| one.kind == kind && one.what.contains(what);
    let found = found(ground, kind, what).await;
    let swept = ground.provider.sweep(&found).await.unwrap();
    assert!(swept.iter().all(|one| one.outcome == SweptAs::Gone), "{swept:?}");
    let again = audit(ground).await;
    assert!(!again.iter().any(|one| is_it(&one)), "{again:#?}");
}

fn said(house: &House, words: &[&str], code: i32) -> Value {
    let output = house.viv().args(words).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn kinds(report: &Value) -> BTreeSet<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    report["items"].as_array().unwrap().iter().map(|item| (text(&item["kind"]), text(&item["outcome"]))).collect()
}

fn pair(kind: &str, outcome: &str) -> (String, String) {
    (kind.to_owned(), outcome.to_owned())
}

/// What the daemon compares by itself when it begins is over: what is planted after it is left for who is asked.
fn has_begun(client: &Client) {
    eventually("it has compared everything once", || {
        let all = client.reconcilers().unwrap().items;
        let looks = |name: &str| all.iter().any(|one| one.name == name && one.runs_total > 0);
        looks("full") && looks("provider-sync")
    });
}

/// By the verbs of the daemon, and in the journal.
#[tokio::test]
async fn j2_audit_tells_reconcile_puts_right_and_both_are_journaled() {
    let house = House::with_config("[reconcile]\nprovider_sync_s = 3600\norphan_grace_s = 0");
    let daemon = house.start();
    let client = daemon.client();
    has_begun(&client);
    let ours = create(&client);
    let report = said(&house, &["audit"], 0);
    assert_eq!((&report["found"], &report["dry_run"]), (&0.into(), &true.into()), "{report:#}");

    // An instance that no record knows, one of somebody else, and a half-made folder.
    let (stray, other) = (SandboxId::from_bytes(fresh_bytes()), SandboxId::from_bytes(fresh_bytes()));
    let marks: [OwnerMark; 2] = [house.owner_mark().await, "somebody-else".parse().unwrap()];
    for (sandbox, mark) in [&stray, &other].into_iter().zip(&marks) {
        house.provider().create(&mutation(1, 1), sandbox, mark, &InstanceSpec::host(600_000)).await.unwrap();
    }
    let half = house.provider_folder().join("instances").join(SandboxId::from_bytes(fresh_bytes()).as_str());
    fs::create_dir(&half).unwrap();
    let reported = [pair("half_made", "reported"), pair("instance", "reported")].into();
    for words in [&["audit"][..], &["reconcile", "--dry-run"]] {
        let report = said(&house, words, 0);
        assert_eq!(kinds(&report), reported, "{report:#}");
    }
    assert!(half.exists(), "an audit changes nothing");
    let figures = client.metrics().unwrap();
    assert!(figures.contains("\nviv_orphans_found_total 1\n"), "what is left is counted, once: {figures}");
    // The first one sees it once, the second agrees.
    let report = said(&house, &["reconcile"], 0);
    assert_eq!(kinds(&report), [pair("half_made", "done"), pair("instance", "left")].into(), "{report:#}");
    assert!(!half.exists());
    let report = said(&house, &["reconcile"], 0);
    assert_eq!(kinds(&report), [pair("instance", "done")].into(), "{report:#}");
    // What remembers it is of no use to anybody, since nothing else does.
    let report = said(&house, &["reconcile"], 0);
    assert_eq!(kinds(&report), [pair("fence", "done")].into(), "{report:#}");
    let report = said(&house, &["audit"], 0);
    assert_eq!(report["found"], 0, "{report:#}");
    let words = house.viv().arg("audit").output().unwrap();
    assert_eq!(support::stdout(&words), "nothing is left over, and nothing is missing");

    // All of it is told, and the others are as they were.
    let mut lines = Vec::new();
    let mut query = ListEvents::default();
    loop {
        let page = client.events(&query).unwrap();
        lines.extend(page.items.into_iter().map(|event| event.kind));
        if !page.more {
            break;
        }
        query.after = Some(page.next_after.to_string().parse().unwrap());
    }
    for kind in ["audit.started", "audit.found", "audit.item", "audit.completed"] {
        assert!(lines.iter().any(|line| line == kind), "{kind}: {lines:?}");
        assert!(lines.iter().any(|line| *line == kind.replace("audit", "reconcile")), "{kind}: {lines:?}");
    }
    let foreign = viv_provider::InstanceRef { sandbox: other.clone(), generation: viv_core::Generation(1) };
    assert_eq!(house.provider().observe(&foreign).await.unwrap().state, InstanceState::Running);
    house.provider().destroy(&mutation(1, 1), &other).await.unwrap();
    client.sandbox(&ours.id).delete(None).unwrap();
    support::restart::settled(&client, &ours.id);
    house.assert_nothing_left();
}

/// What was planted: something of every kind, and beside it what is not ours.
struct Planted {
    /// Instances that no record knows: whole, without its agent, without its supervisors.
    strays: [SandboxId; 3],
    /// Recorded as ready, and never made.
    record: SandboxId,
    /// A spare that no class wants.
    spare: SandboxId,
    /// What it would be wrong to find after a reconciliation.
    paths: Vec<PathBuf>,
    mount: Mounted,
    left: Sleeper,
    /// Of the one without supervisors, where it can be held.
    agent: Option<(Frozen, u32)>,
    foreign: SandboxId,
    foreign_paths: Vec<PathBuf>,
    foreign_mount: Mounted,
    foreign_process: Sleeper,
}

/// Changes the store by hand, beside the daemon.
fn by_hand(house: &House, sql: &str) {
    let mut sqlite = Command::new("sqlite3");
    let done = sqlite.args(["-cmd", ".timeout 20000"]).arg(house.data.join("viv.db")).arg(sql).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

/// Pids of its shim, its guard and its agent.
fn pids_of(house: &House, sandbox: &SandboxId) -> [u32; 3] {
    let folder = instance_folder(house, sandbox);
    let identity: Value = serde_json::from_slice(&fs::read(folder.join("shim.json")).unwrap()).unwrap();
    let pid_of = |who: &str| identity[who]["pid"].as_u64().unwrap() as u32;
    [pid_of("shim"), pid_of("guard"), fs::read_to_string(folder.join("init.pid")).unwrap().trim().parse().unwrap()]
}

async fn plant(house: &House, v2: &Path, spare: &SandboxId) -> Planted {
    let (provider, folder) = (house.provider(), house.provider_folder());
    let marks: [OwnerMark; 2] = [house.owner_mark().await, "somebody-else".parse().unwrap()];
    let fresh = || SandboxId::from_bytes(fresh_bytes());
    let (strays, gone, foreign) = ([fresh(), fresh(), fresh()], fresh(), fresh());
    for (sandbox, mark) in strays.iter().chain([&gone]).map(|one| (one, &marks[0])).chain([(&foreign, &marks[1])]) {
        provider.create(&mutation(1, 1), sandbox, mark, &InstanceSpec::host(600_000)).await.unwrap();
    }
    provider.destroy(&mutation(1, 1), &gone).await.unwrap();

    // Shim and guard are killed at once. What is not the agent's child lives on, and so does the agent where it is held.
    let prefix = v2.join(&house.cgroup_prefix);
    let left = Sleeper::in_cgroup(&prefix.join(strays[2].as_str()));
    let [shim, guard, agent] = pids_of(house, &strays[2]);
    let frozen = Frozen::all_of(&house.cgroup_prefix, &strays[2]);
    kill_supervisors(shim, guard);
    let agent = frozen.map(|frozen| (frozen, agent));
    assert!(agent.iter().all(|(_, agent)| is_alive(*agent)), "an agent without shim");

    let (half, socket) = (folder.join("instances").join(fresh().as_str()), folder.join("instances/left.sock"));
    fs::create_dir(&half).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    let (cgroup, lease) = (prefix.join(gone.as_str()), folder.join("ids/536870912"));
    fs::create_dir(&cgroup).unwrap();
    symlink(gone.as_str(), &lease).unwrap();
    let layer = folder.join("layers/sealed/left");
    fs::create_dir(&layer).unwrap();
    let mount = Mounted::at(&folder.join("trash/left behind"));

    // A record of what was never made, a spare that nobody keeps, and a lock on what never was.
    let record = fresh();
    by_hand(
        house,
        &format!(
            "INSERT INTO sandboxes SELECT '{record}', project, NULL, phase, phase_since, deleted, may_live, version, \
             created_at, NULL, active_at, shrunk, json_set(record, '$.id', '{record}') FROM sandboxes WHERE id = '{spare}'; \
             UPDATE sandboxes SET project = 'viv-spares', record = json_set(record, '$.project', 'viv-spares') \
             WHERE id = '{spare}'; \
             INSERT INTO leases SELECT '{gone}', kind, epoch, expires_at, token + 1000, \
             json_set(lease, '$.sandbox', '{gone}', '$.token', token + 1000) FROM leases WHERE sandbox = '{spare}' LIMIT 1;"
        ),
    );

    let (readme, others) = (folder.join("instances/README"), prefix.join("foreign"));
    fs::write(&readme, "not ours").unwrap();
    fs::create_dir(&others).unwrap();
    Planted {
        strays,
        record,
        spare: spare.clone(),
        paths: vec![half, socket, cgroup, lease, layer],
        mount,
        left,
        agent,
        foreign,
        foreign_process: Sleeper::in_cgroup(&others),
        foreign_paths: vec![readme, others],
        foreign_mount: Mounted::at(&house.data.with_file_name("beside")),
    }
}

/// Audits until it tells this: what is just ending is not among what is left.
async fn audited(house: &House, so: impl Fn(&Value) -> bool) {
    let until = Instant::now() + CLEARED_WITHIN;
    loop {
        let report = said(house, &["audit"], 0);
        if so(&report) {
            return;
        }
        assert!(Instant::now() < until, "{report:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Every kind that issue 9 names, on one daemon.
#[tokio::test]
async fn j1_something_of_every_kind_is_told_by_audit_removed_by_reconcile_and_nothing_else_is_touched() {
    let Some(v2) = v2() else { return };
    let house = House::with_config("[reconcile]\nprovider_sync_s = 3600\norphan_grace_s = 0\ntidy_s = 3600");
    let daemon = house.start();
    let client = daemon.client();
    has_begun(&client);
    // Others who live beside us: a daemon on another folder, and somebody's container, both in cgroups among ours.
    let mut neighbours = House::with_config("");
    neighbours.cgroup_prefix.clone_from(&house.cgroup_prefix);
    let neighbour = neighbours.start();
    let theirs = create(&neighbour.client());
    let container = Container::run(&format!("/{}/container", house.cgroup_prefix));
    let (ours, spare) = (create(&client), create(&client));
    let mut planted = plant(&house, &v2, &spare.id).await;
    let all = "instance record half_made unsupervised mount cgroup layer socket spare lease lock fence";
    let wanted: BTreeSet<_> = all.split(' ').map(|kind| pair(kind, "reported")).collect();
    audited(&house, |report| kinds(report) == wanted).await;
    // Stopped, a shim does not notice that its agent is gone. Nor does it answer, so not all that there is is listed, and
    // what is missing from the list is not called so.
    let [shim, guard, agent] = pids_of(&house, &planted.strays[1]);
    kill(guard, Signal::STOP);
    kill(shim, Signal::STOP);
    kill(agent, Signal::KILL);
    audited(&house, |report| {
        let kinds = kinds(report);
        kinds.contains(&pair("supervisor", "reported")) && !kinds.contains(&pair("record", "reported"))
    })
    .await;
    assert!(planted.paths.iter().all(|path| fs::symlink_metadata(path).is_ok()), "an audit changes nothing");
    assert!(planted.mount.is_there() && !planted.left.has_ended());

    // Two listings have to agree on instances, and what remembers them goes after them.
    let until = Instant::now() + CLEARED_WITHIN;
    loop {
        said(&house, &["reconcile"], 0);
        let report = said(&house, &["audit"], 0);
        if report["found"] == 0 {
            break;
        }
        assert!(Instant::now() < until, "{report:#}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(planted.paths.iter().all(|path| fs::symlink_metadata(path).is_err()), "{:?}", planted.paths);
    eventually("what ran in them ended", || planted.left.has_ended());
    eventually("agents too", || planted.agent.iter().all(|(_, agent)| !is_alive(*agent)));
    assert!(!planted.mount.is_there());
    // A spare is in no list.
    for sandbox in planted.strays.iter().chain([&planted.spare]) {
        let instance = viv_provider::InstanceRef { sandbox: sandbox.clone(), generation: viv_core::Generation(1) };
        assert_eq!(house.provider().observe(&instance).await.unwrap().state, InstanceState::Absent);
    }
    assert_eq!(support::restart::settled(&client, &planted.record).phase, Phase::Lost);

    // What is not ours, and what is and lives, is as it was.
    let foreign = viv_provider::InstanceRef { sandbox: planted.foreign.clone(), generation: viv_core::Generation(1) };
    assert_eq!(house.provider().observe(&foreign).await.unwrap().state, InstanceState::Running);
    assert!(planted.foreign_paths.iter().all(|path| path.exists()));
    assert!(planted.foreign_mount.is_there() && !planted.foreign_process.has_ended());
    assert!(container.is_well(), "somebody's container, with its mount");
    drop(container);
    let seen = neighbour.client().sandbox(&theirs.id).verify().unwrap();
    assert_eq!((seen.phase, seen.generation), (Phase::Ready, theirs.generation), "somebody else's sandbox");
    neighbour.client().sandbox(&theirs.id).delete(None).unwrap();
    support::restart::settled(&neighbour.client(), &theirs.id);
    let seen = client.sandbox(&ours.id).verify().unwrap();
    assert_eq!((seen.phase, seen.generation), (Phase::Ready, ours.generation));

    let Planted { foreign, foreign_paths, foreign_process, foreign_mount, mount, record, .. } = planted;
    drop((foreign_process, foreign_mount, mount));
    fs::remove_file(&foreign_paths[0]).unwrap();
    // Before the last sandbox goes, which takes our cgroup along.
    eventually("its process is gone", || fs::remove_dir(&foreign_paths[1]).is_ok());
    let _ = fs::remove_dir(house.provider_folder().join("trash/left behind"));
    house.provider().destroy(&mutation(1, 1), &foreign).await.unwrap();
    for sandbox in [&ours.id, &record] {
        client.sandbox(sandbox).delete(None).unwrap();
        support::restart::settled(&client, sandbox);
    }
    neighbours.assert_nothing_left();
    house.assert_nothing_left();
}

/// Reconciliations one after the other, without any grace, beside creates, saves, wakes and deletes.
#[test]
fn j1_nothing_that_is_being_made_or_saved_is_collected_however_often_it_is_looked() {
    const ROUNDS: usize = 3;
    let house = House::with_config("[reconcile]\nprovider_sync_s = 1\norphan_grace_s = 0\ntidy_s = 1");
    let daemon = house.start();
    let client = daemon.client();
    let is_over = AtomicBool::new(false);
    let (runs, taken) = std::thread::scope(|scope| {
        let reconciling = scope.spawn(|| {
            let (mut runs, mut taken) = (0, Vec::new());
            while !is_over.load(Ordering::SeqCst) {
                let report = client.reconcile(&Reconcile { dry_run: false }).unwrap();
                taken.extend(report.items.into_iter().filter(|item| item.outcome == "done"));
                runs += 1;
            }
            (runs, taken)
        });
        let live = |number: usize| {
            let request = serde_json::json!({ "name": format!("kept-{number}") });
            let kept = client.create(&serde_json::from_value(request).unwrap(), None).unwrap().into_sandbox();
            for round in 0..ROUNDS {
                let sandbox = client.sandbox(&kept.id);
                let (_, end) = run(&sandbox, &format!("echo {round} >> /workspace/rounds && sync /workspace/rounds"));
                assert_eq!(end.exit_code, Some(0), "{end:?}");
                let brief = create(&client);
                let saved = sandbox.stop(&StopSandbox::default()).unwrap().into_sandbox();
                assert_eq!(saved.phase, Phase::Hibernated, "{saved:#?}");
                client.sandbox(&brief.id).delete(None).unwrap();
                let back = sandbox.ensure(&EnsureSandbox::default()).unwrap().into_sandbox();
                assert_eq!((back.phase, back.generation.0), (Phase::Ready, round as u64 + 2), "{back:#?}");
            }
            let (said, _) = run(&client.sandbox(&kept.id), "cat /workspace/rounds");
            assert_eq!(said, "0\n1\n2\n", "nothing of it was taken");
            client.sandbox(&kept.id).delete(None).unwrap();
            support::restart::settled(&client, &kept.id);
        };
        let living: Vec<_> = (0..2).map(|number| scope.spawn(move || live(number))).collect();
        let lived: Vec<_> = living.into_iter().map(ScopedJoinHandle::join).collect();
        is_over.store(true, Ordering::SeqCst);
        let reconciled = reconciling.join().unwrap();
        for one in lived {
            one.unwrap();
        }
        reconciled
    });
    assert!(runs >= ROUNDS, "they ran beside: {runs}");
    // Layers of what was deleted, and what remembers it, are left by the ordinary course of things.
    let wrong = |item: &&Orphan| !matches!(item.kind.as_str(), "layer" | "fence" | "lock");
    let wrong: Vec<&Orphan> = taken.iter().filter(wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    house.assert_nothing_left();
}
