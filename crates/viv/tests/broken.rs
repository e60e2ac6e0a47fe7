//! What is heard of a sandbox that somebody broke from outside, by whoever asks with a deadline (T2, T3, T7).
//!
//! The table in `docs/probing.md` is what these show.
#![allow(missing_docs, reason = "tests")]

#[path = "support/making.rs"]
#[expect(unused_macros, unused_imports, reason = "drivers make no difference here")]
mod making;
mod support;

use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use making::Tar;
use rustix::process::Signal;
use support::{Ground, SOON, Sandbox, eventually, freezer, fresh_bytes, is_alive, kill, mutation};
use viv_core::exec::{ExecState, OutputEvent};
use viv_core::{EndCause, ExecutionId, Identity};
use viv_provider::{InstanceRef, InstanceState, Provider, ProviderError};
use viv_sandbox::{LocalProvider, Runtime};

/// The deadline of a probe (T2): of those that are expected to be silent.
const DEADLINE: Duration = Duration::from_secs(2);

/// What somebody heard who asked with a deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Heard {
    Well,
    /// It answered, and this is what was wrong.
    Refused(&'static str, String),
    Silence,
}

impl Heard {
    fn code(&self) -> &'static str {
        match self {
            Self::Well => "well",
            Self::Refused(code, _) => code,
            Self::Silence => "silence",
        }
    }
}

async fn heard<T: Debug>(within: Duration, asked: impl Future<Output = Result<T, ProviderError>>) -> Heard {
    match tokio::time::timeout(within, asked).await {
        Err(_) => Heard::Silence,
        Ok(Ok(_)) => Heard::Well,
        Ok(Err(error)) => Heard::Refused(error.code(), error.to_string()),
    }
}

/// All that a probe asks.
#[derive(Debug)]
struct Findings {
    observe: Heard,
    exec: Heard,
    list: Heard,
    identity: Heard,
}

impl Findings {
    /// Asks at once, with a deadline: long where an answer is expected, on a loaded machine too.
    async fn of(provider: &LocalProvider, instance: &InstanceRef, within: Duration) -> Self {
        let (observe, exec, list, identity) = tokio::join!(
            heard(within, provider.observe(instance)),
            heard(within, probe(provider, instance)),
            heard(within, provider.file_list(instance, "/workspace", 1)),
            heard(within, provider.identity(instance)),
        );
        Self { observe, exec, list, identity }
    }

    fn codes(&self) -> [&'static str; 4] {
        [&self.observe, &self.exec, &self.list, &self.identity].map(Heard::code)
    }
}

/// An exec probe to its end.
async fn probe(provider: &LocalProvider, instance: &InstanceRef) -> Result<(), ProviderError> {
    let (execution, nonce) = (ExecutionId::from_bytes(fresh_bytes()), support::hex(&fresh_bytes()));
    let mutation = mutation(instance.generation.0, 1);
    provider.execute(&mutation, &instance.sandbox, &execution, &provider.probe_spec(&nonce)).await?;
    let mut stream = provider.attach(instance, &execution, 0, true).await?;
    let mut written = Vec::new();
    loop {
        match stream.next().await? {
            Some(OutputEvent::Chunk { data, .. }) => written.extend(data),
            Some(OutputEvent::End(status)) => {
                assert_eq!(written.is_empty(), status.state != ExecState::Exited { code: 0 }, "{status:?}");
                if status.state == (ExecState::Exited { code: 0 }) {
                    assert_eq!(String::from_utf8_lossy(&written), format!("{nonce}\n"));
                    return Ok(());
                }
                return Err(ProviderError::Failed { what: format!("the probe is {:?}", status.state) });
            }
            Some(OutputEvent::Cut { .. }) | None => panic!("the output of a probe is not whole"),
        }
    }
}

impl Sandbox<'_> {
    async fn findings(&self, within: Duration) -> Findings {
        Findings::of(&self.ground.provider, &self.instance(), within).await
    }

    async fn assert_well(&self) {
        let found = self.findings(SOON).await;
        assert_eq!(found.codes(), ["well"; 4], "{found:#?}");
    }

    async fn assert_still_alive(&self) {
        let waited = heard(Duration::from_millis(200), self.ground.provider.wait_end(&self.instance())).await;
        assert_eq!(waited, Heard::Silence, "nothing ended");
    }
}

/// Descriptors and threads of this process.
fn held() -> (usize, usize) {
    let count = |folder| fs::read_dir(folder).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[tokio::test]
async fn t8_the_parts_of_a_sandbox_are_where_they_are_said_to_be() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let found = ground.provider.whereabouts(&sandbox.instance()).await.unwrap();
    assert_eq!(found.supervisor_pid, Some(sandbox.shim_pid()));
    assert_eq!(found.agent_pid, Some(sandbox.agent_pid()));
    assert_eq!(found.folder.as_deref().map(PathBuf::from), Some(sandbox.folder()));
    assert!(!found.cgroups.is_empty(), "{found:?}");
    let is_inside = |cgroup: &String| {
        let inside = fs::read_to_string(PathBuf::from(cgroup).join("cgroup.procs")).unwrap();
        inside.lines().any(|pid| pid == sandbox.agent_pid().to_string())
    };
    assert!(found.cgroups.iter().any(is_inside), "{found:?}");
    sandbox.run("echo from inside > /workspace/file").await;
    let view = PathBuf::from(found.root_view.unwrap());
    assert_eq!(fs::read_to_string(view.join("workspace/file")).unwrap(), "from inside\n");
    let root = found.root.unwrap();
    let through_shim = PathBuf::from(format!("/proc/{}/root{root}/workspace/file", sandbox.shim_pid()));
    assert_eq!(fs::read_to_string(through_shim).unwrap(), "from inside\n");

    kill(sandbox.agent_pid(), Signal::KILL);
    ground.provider.wait_end(&sandbox.instance()).await.unwrap();
    let until = Instant::now() + SOON;
    let found = loop {
        // It goes on for a moment after it told of the end.
        let found = ground.provider.whereabouts(&sandbox.instance()).await.unwrap();
        if found.supervisor_pid.is_none() {
            break found;
        }
        assert!(Instant::now() < until, "{found:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert_eq!((found.agent_pid, found.root, found.root_view), (None, None, None));
    assert_eq!((found.cgroups, found.folder.is_some()), (Vec::new(), true));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t8_logs_are_told_of_the_living_and_the_ended() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let log = sandbox.folder().join("shim.log");
    fs::write(&log, "first line\nsecond line\n").unwrap();
    let tail = async |bytes_max| {
        let parts = ground.provider.log_tail(&sandbox.instance(), bytes_max).await.unwrap();
        parts.into_iter().map(|part| format!("{}: {}", part.name, part.text)).collect::<String>()
    };
    assert_eq!(tail(1000).await, "shim: first line\nsecond line\n");
    assert_eq!(tail(15).await, "shim: second line\n");
    kill(sandbox.agent_pid(), Signal::KILL);
    ground.provider.wait_end(&sandbox.instance()).await.unwrap();
    assert!(tail(1000).await.contains("second line\n"));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Every probe leaves the sandbox as it was, on disk too.
#[tokio::test]
async fn t2_probes_leave_no_file() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    for _ in 0..20 {
        sandbox.assert_well().await;
    }
    let run = sandbox.folder().join("run");
    eventually("no output is kept", || fs::read_dir(run.join("transient")).unwrap().count() == 0);
    assert_eq!(fs::read_dir(run.join("exec")).unwrap().count(), 0);
    let cgroup = PathBuf::from(&ground.provider.whereabouts(&sandbox.instance()).await.unwrap().cgroups[0]);
    let below = || fs::read_dir(&cgroup).unwrap().flatten().filter(|entry| entry.path().is_dir()).count();
    eventually("no cgroup is kept", || below() == 0);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// An image that holds one file, and that is no program.
async fn probe_of_nothing(ground: Ground) {
    let folder = tempfile::tempdir().unwrap();
    let mut tar = Tar::new();
    ground.import(&tar.file("only", "no program\n").write(&folder.path().join("scratch.tar")), "scratch");
    let id = ground.sandbox_of("scratch");
    let sandbox = Sandbox { ground: &ground, id: id.parse().unwrap() };
    sandbox.assert_well().await;
    let found = ground.provider.identity(&sandbox.instance()).await.unwrap();
    let InstanceRef { sandbox: sandbox_id, generation } = sandbox.instance();
    assert_eq!(found, Identity { sandbox: sandbox_id, generation });
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t2_an_image_without_any_program_can_be_probed() {
    probe_of_nothing(Ground::new()).await;
}

#[tokio::test]
async fn t2_an_image_without_any_program_can_be_probed_in_gvisor() {
    probe_of_nothing(Ground::with_runtime(Runtime::Binary("runsc".into()))).await;
}

#[tokio::test]
async fn t3_a_stopped_agent_is_silence() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.assert_well().await;
    kill(sandbox.agent_pid(), Signal::STOP);
    let found = sandbox.findings(DEADLINE).await;
    assert_eq!(found.codes(), ["well", "silence", "silence", "silence"], "{found:#?}");
    sandbox.assert_still_alive().await;
    kill(sandbox.agent_pid(), Signal::CONT);
    sandbox.assert_well().await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Whoever gives up holds nothing any more, however many do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t3_whoever_gives_up_lets_go_of_everything() {
    const ASKERS: usize = 200;
    let ground = Ground::new();
    let (stopped, other) =
        (ground.create(Duration::from_secs(600)).await, ground.create(Duration::from_secs(600)).await);
    stopped.assert_well().await;
    let (fds, threads) = held();
    for pid in [stopped.agent_pid(), stopped.shim_pid()] {
        kill(pid, Signal::STOP);
        let askers: Vec<_> = (0..ASKERS)
            .map(|_| {
                let (provider, instance) = (ground.provider.clone(), stopped.instance());
                tokio::spawn(async move { Findings::of(&provider, &instance, DEADLINE).await })
            })
            .collect();
        // Nobody else is kept waiting by them.
        other.assert_well().await;
        for asker in askers {
            let found = asker.await.unwrap();
            let asked = if pid == stopped.agent_pid() { &found.codes()[1..] } else { &found.codes()[..1] };
            assert!(!asked.contains(&"well"), "{found:#?}");
        }
        let slack = ASKERS / 2;
        eventually("descriptors are closed", || held().0 < fds + slack);
        eventually("threads end", || held().1 < threads + slack);
        kill(pid, Signal::CONT);
        // All who knocked meanwhile are heard first, and they have gone.
        let until = Instant::now() + SOON;
        while stopped.findings(DEADLINE).await.codes() != ["well"; 4] && Instant::now() < until {}
        stopped.assert_well().await;
    }
    stopped.destroy().await;
    other.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t3_a_killed_agent_is_an_end() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    kill(sandbox.agent_pid(), Signal::KILL);
    let ended = tokio::time::timeout(SOON, ground.provider.wait_end(&sandbox.instance())).await.unwrap().unwrap();
    assert_eq!(ended.cause, EndCause::Signalled { signal: 9 });
    let found = sandbox.findings(SOON).await;
    assert_eq!(found.codes(), ["well", "not_running", "not_running", "not_running"], "{found:#?}");
    assert!(matches!(sandbox.state().await, InstanceState::Ended(_)));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t3_a_killed_shim_is_an_end() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (provider, instance) = (ground.provider.clone(), sandbox.instance());
    let waiting = tokio::spawn(async move { provider.wait_end(&instance).await });
    kill(sandbox.shim_pid(), Signal::KILL);
    let ended = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(ended.cause, EndCause::SupervisorLost);
    let found = sandbox.findings(SOON).await;
    assert_eq!(found.codes(), ["well", "not_running", "not_running", "not_running"], "{found:#?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// A stopped shim says nothing; the agent inside serves as before.
#[tokio::test]
async fn t3_a_stopped_shim_is_silence_of_the_shim_alone() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.assert_well().await;
    kill(sandbox.shim_pid(), Signal::STOP);
    let (provider, instance) = (&ground.provider, sandbox.instance());
    assert_eq!(heard(DEADLINE, provider.observe(&instance)).await, Heard::Silence);
    assert_eq!(heard(SOON, probe(provider, &instance)).await, Heard::Well);
    assert_eq!(heard(SOON, provider.identity(&instance)).await, Heard::Well);
    sandbox.assert_still_alive().await;
    kill(sandbox.shim_pid(), Signal::CONT);
    sandbox.assert_well().await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Frozen by hand: no wait, since nobody is going to thaw it.
async fn frozen_by_hand(freeze: (&str, &str), thaw: &str) {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.assert_well().await;
    let found = ground.provider.whereabouts(&sandbox.instance()).await.unwrap();
    let (name, content) = freeze;
    let switch = found.cgroups.iter().map(|cgroup| PathBuf::from(cgroup).join(name)).find(|path| path.exists());
    let switch = switch.expect("each sandbox has a cgroup in it");
    fs::write(&switch, content).unwrap();
    let found = sandbox.findings(SOON).await;
    assert_eq!(found.codes(), ["well", "failed", "failed", "failed"], "{found:#?}");
    let Heard::Refused(_, why) = found.identity else { unreachable!("just seen") };
    assert!(why.contains("frozen by somebody else"), "{why}");
    sandbox.assert_still_alive().await;
    fs::write(&switch, thaw).unwrap();
    sandbox.assert_well().await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t3_processes_frozen_by_hand_are_damage() {
    let Some(_) = freezer::second_kind() else { return };
    frozen_by_hand(("cgroup.freeze", "1"), "0").await;
}

#[tokio::test]
async fn t3_processes_frozen_by_hand_with_v1_are_damage() {
    let Some(_) = freezer::first_kind() else { return };
    frozen_by_hand(("freezer.state", "FROZEN"), "THAWED").await;
}

/// Frozen by a user is not damage, and is told as what it is.
#[tokio::test]
async fn t3_what_a_user_froze_is_frozen() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    let found = sandbox.findings(SOON).await;
    assert_eq!(found.codes(), ["well", "not_running", "not_running", "not_running"], "{found:#?}");
    assert_eq!(sandbox.state().await, InstanceState::Frozen);
    ground.provider.thaw(&mutation(1, 1), &sandbox.id).await.unwrap();
    sandbox.assert_well().await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

fn unmount(namespace_of: u32, at: &str) {
    let done = Command::new("nsenter")
        .args(["-t", &namespace_of.to_string(), "-m", "-p", "umount", "-l", at])
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[tokio::test]
async fn t3_a_root_that_was_unmounted_is_damage() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.assert_well().await;
    let found = ground.provider.whereabouts(&sandbox.instance()).await.unwrap();
    unmount(found.supervisor_pid.unwrap(), &found.root.clone().unwrap());
    let damaged = sandbox.findings(SOON).await;
    assert_eq!(damaged.identity.code(), "failed", "{damaged:#?}");
    assert_eq!(damaged.observe, Heard::Well, "{damaged:#?}");
    assert_eq!(ground.provider.whereabouts(&sandbox.instance()).await.unwrap().root, found.root, "its place is told");
    sandbox.assert_still_alive().await;
    assert!(is_alive(sandbox.agent_pid()));
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// In its own namespace the kernel lets nobody unmount the root itself, but what is mounted in it.
#[tokio::test]
async fn t3_what_was_unmounted_inside_is_damage() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.assert_well().await;
    unmount(sandbox.agent_pid(), "/.vivarium");
    let damaged = sandbox.findings(SOON).await;
    assert_eq!(damaged.codes(), ["well", "failed", "well", "well"], "{damaged:#?}");
    sandbox.assert_still_alive().await;
    sandbox.destroy().await;
    ground.assert_nothing_left();
}
