//! What goes on, and what ends, when somebody dies (L5, J4, T3).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Ground, SOON, eventually, eventually_within, freezer, is_alive, kill, mutation, stdout};
use viv_core::EndCause;
use viv_core::exec::ExecState;
use viv_provider::{InstanceState, Provider, ProviderError};

/// Long enough for what is done before it passes, on a loaded machine.
const LIFETIME: Duration = Duration::from_secs(5);

/// A deadline is kept when the instance is gone within this of it, on a loaded machine.
const ON_TIME: Duration = Duration::from_secs(5);

/// A second or two, on a machine that runs four tests on two cores.
const SHORTLY: Duration = Duration::from_secs(5);

#[test]
fn j4_a_sandbox_outlives_its_creator_and_is_found_with_its_output_and_exit_code() {
    let ground = Ground::new();
    let script = "i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit 7";
    let mut creator = ground
        .viv()
        .args(["run", "--keep", "--", "/bin/sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(creator.stderr.take().unwrap());
    let mut next = || {
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        line.trim().split_once(": ").expect("a name").1.to_owned()
    };
    let (sandbox, execution) = (next(), next());
    let mut first = String::new();
    BufReader::new(creator.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert_eq!(first, "line 0\n");
    creator.kill().unwrap();
    creator.wait().unwrap();

    // A new process finds it, reads what was missed from the start, and gets the exit code.
    let listed = stdout(&ground.viv().arg("ls").output().unwrap());
    assert!(listed.contains(&sandbox) && listed.contains("running"), "{listed}");
    let logs = ground.viv().args(["logs", "--follow", &sandbox, &execution]).output().unwrap();
    let expected: String = (0..40).map(|i| format!("line {i}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&logs.stdout), expected);
    assert_eq!(logs.status.code(), Some(7));

    assert!(ground.viv().args(["rm", &sandbox]).status().unwrap().success());
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_the_deadline_holds_with_nobody_attached() {
    let ground = Ground::new();
    let started = Instant::now();
    let sandbox = stdout(&ground.viv().args(["create", "--lifetime", "5"]).output().unwrap());
    // The creator is gone. Nobody is connected while it expires: only the kernel's tables are looked at.
    eventually_within(SOON, "it runs", || !ground.processes().is_empty());
    eventually_within(LIFETIME + ON_TIME, "it is gone on time", || ground.processes().is_empty());
    assert!(started.elapsed() >= LIFETIME, "it ended early");

    let listed = stdout(&ground.viv().args(["ls", "--json"]).output().unwrap());
    assert!(listed.contains("\"cause\":\"expired\""), "{listed}");
    assert!(ground.viv().args(["rm", &sandbox]).status().unwrap().success());
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_the_deadline_holds_with_a_stopped_agent() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    let agent = sandbox.agent_pid();
    kill(agent, Signal::STOP);
    assert_eq!(sandbox.state().await, InstanceState::Running, "status asks the shim and not the agent");
    eventually_within(LIFETIME + ON_TIME, "it is gone on time", || !is_alive(agent));
    let ended = ground.provider.wait_end(&sandbox.instance()).await.unwrap();
    assert_eq!(ended.cause, EndCause::Expired);
    eventually("nothing runs", || ground.processes().is_empty());
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_the_deadline_holds_for_a_frozen_sandbox() {
    let ground = Ground::new();
    let sandbox = ground.create(LIFETIME).await;
    ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
    assert_eq!(ground.provider.wait_end(&sandbox.instance()).await.unwrap().cause, EndCause::Expired);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_when_the_shim_is_killed_nothing_is_left_running() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let execution = sandbox.start("trap '' TERM; (setsid sleep 1000 &) ; sleep 1000").await;
    let before = ground.processes();
    assert!(before.len() >= 3, "shim, agent and commands: {before:?}");
    kill(sandbox.shim_pid(), Signal::KILL);
    eventually_within(SHORTLY, "nothing runs", || before.iter().all(|&pid| !is_alive(pid)));
    eventually_within(SHORTLY, "no cgroup is left", || ground.cgroups().is_empty());

    let InstanceState::Ended(ended) = sandbox.state().await else { panic!("{:?}", sandbox.state().await) };
    assert_eq!(ended.cause, EndCause::SupervisorLost);
    let status = ground.provider.execution(&sandbox.instance(), &execution).await.unwrap();
    assert_eq!(status.state, ExecState::Lost { cause: "supervisor_lost".to_owned() });
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_a_killed_guard_is_replaced_and_guards() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let first = sandbox.guard_pid();
    kill(first, Signal::KILL);
    eventually("there is another guard", || sandbox.guard_pid() != first && is_alive(sandbox.guard_pid()));
    assert_eq!(sandbox.run("echo unharmed").await.0, "unharmed\n");
    kill(sandbox.shim_pid(), Signal::KILL);
    eventually_within(SHORTLY, "nothing runs", || ground.processes().is_empty());
    eventually_within(SHORTLY, "no cgroup is left", || ground.cgroups().is_empty());
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_with_shim_and_guard_killed_at_once_the_kernel_ends_the_rest() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.start("(setsid sleep 1000 &) ; sleep 1000").await;
    kill(sandbox.guard_pid(), Signal::STOP);
    kill(sandbox.shim_pid(), Signal::KILL);
    kill(sandbox.guard_pid(), Signal::KILL);
    eventually_within(SHORTLY, "nothing runs", || ground.processes().is_empty());
    let InstanceState::Ended(ended) = sandbox.state().await else { panic!("{:?}", sandbox.state().await) };
    assert_eq!(ended.cause, EndCause::SupervisorLost);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l5_when_the_shim_is_killed_a_stopped_agent_and_a_frozen_sandbox_end_too() {
    let ground = Ground::new();
    for freeze in [false, true] {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        sandbox.start("sleep 1000").await;
        if freeze {
            ground.provider.freeze(&mutation(1, 1), &sandbox.id).await.unwrap();
        } else {
            kill(sandbox.agent_pid(), Signal::STOP);
        }
        let before = ground.processes();
        kill(sandbox.shim_pid(), Signal::KILL);
        eventually_within(SHORTLY, "nothing runs", || before.iter().all(|&pid| !is_alive(pid)));
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn x6_when_the_agent_is_killed_the_shim_ends_the_rest_and_says_so() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.start("sleep 1000").await;
    let (provider, instance) = (ground.provider.clone(), sandbox.instance());
    let waiting = tokio::spawn(async move { provider.wait_end(&instance).await });
    kill(sandbox.agent_pid(), Signal::KILL);
    // Pushed: nobody asks again (T3).
    let ended = tokio::time::timeout(SOON, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(ended.cause, EndCause::Signalled { signal: 9 });
    eventually("nothing runs", || ground.processes().is_empty());
    eventually("no cgroup is left", || ground.cgroups().is_empty());
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l20_a_stopped_shim_does_not_keep_a_sandbox_from_being_destroyed() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    sandbox.start("sleep 1000").await;
    kill(sandbox.shim_pid(), Signal::STOP);
    sandbox.destroy().await;
    assert_eq!(sandbox.state().await, InstanceState::Absent);
    ground.assert_nothing_left();
}

#[tokio::test]
async fn t7_a_stopped_shim_is_silence_not_absence() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    kill(sandbox.shim_pid(), Signal::STOP);
    let seen = ground.provider.observe(&sandbox.instance()).await;
    assert!(matches!(seen, Err(ProviderError::TimedOut { .. })), "{seen:?}");
    let page = ground.provider.list(&ground.owner, viv_provider::PageRequest::default()).await.unwrap();
    assert!(page.is_partial(), "{page:?}");
    kill(sandbox.shim_pid(), Signal::CONT);
    assert_eq!(sandbox.state().await, InstanceState::Running);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Processes that cannot die (here in a frozen v1 cgroup, in life in uninterruptible I/O) are not called ended.
#[tokio::test]
async fn t7_what_cannot_be_killed_is_ending_and_not_ended() {
    let Some(freezer) = freezer::first_kind() else { return };
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    // Frozen from above: what was frozen by itself is thawed to be killed.
    let state = freezer.join(&ground.cgroup_prefix).join("freezer.state");
    std::fs::write(&state, "FROZEN").unwrap();
    kill(sandbox.shim_pid(), Signal::KILL);
    kill(sandbox.guard_pid(), Signal::KILL);
    eventually("both are gone", || !is_alive(sandbox.shim_pid()) && !is_alive(sandbox.guard_pid()));
    let seen = sandbox.state().await;
    assert!(matches!(seen, InstanceState::Ending { .. }), "{seen:?}");
    let refused = ground.provider.destroy(&mutation(1, 1), &sandbox.id).await;
    assert!(refused.is_err(), "a destroy that did not end it answered");
    std::fs::write(&state, "THAWED").unwrap();
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn j7_many_who_wait_do_not_keep_others_from_asking() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let mut waiting = Vec::new();
    for _ in 0..150 {
        let mut connection = UnixStream::connect(sandbox.folder().join("shim.sock")).unwrap();
        connection.write_all(b"{\"op\":\"wait\"}\n").unwrap();
        waiting.push(connection);
        assert_eq!(sandbox.state().await, InstanceState::Running);
    }
    let mut told = String::new();
    sandbox.destroy().await;
    BufReader::new(&waiting[0]).read_line(&mut told).unwrap();
    assert!(told.contains("destroyed"), "{told}");
    ground.assert_nothing_left();
}

/// The binary and the agent's file are replaced under running sandboxes, as an upgrade does.
#[tokio::test]
async fn j4_an_upgrade_leaves_running_sandboxes_alone() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("viv");
    std::fs::copy(support::VIV, &old).unwrap();
    let ground = Ground::with_shim(&old);
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let execution = sandbox.start("read line; echo got $line; exit 4").await;
    assert_eq!(sandbox.output(&execution).await.1.state, ExecState::Exited { code: 4 });

    std::fs::remove_file(&old).unwrap();
    for agent in std::fs::read_dir(ground.data.join("agent")).unwrap() {
        std::fs::remove_file(agent.unwrap().path()).unwrap();
    }
    let upgraded = ground.reopen();
    let seen = upgraded.observe(&sandbox.instance()).await.unwrap();
    assert_eq!(seen.state, InstanceState::Running);
    assert_eq!(sandbox.run("echo same sandbox").await.0, "same sandbox\n");
    let status = upgraded.execution(&sandbox.instance(), &execution).await.unwrap();
    assert_eq!(status.state, ExecState::Exited { code: 4 });
    upgraded.destroy(&mutation(1, 2), &sandbox.id).await.unwrap();
    ground.assert_nothing_left();
}

#[tokio::test]
async fn j5_a_create_that_fails_leaves_nothing_and_says_why() {
    let ground = Ground::with_runtime(viv_sandbox::Runtime::Binary("/no/such/runtime".into()));
    let id = viv_core::SandboxId::from_bytes(support::fresh_bytes());
    let spec = viv_provider::InstanceSpec::host(60_000);
    let error = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &spec).await.unwrap_err();
    assert!(error.to_string().contains("/no/such/runtime"), "{error}");
    ground.assert_nothing_left();
}

#[tokio::test]
async fn x6_a_command_killed_for_memory_is_told_from_one_killed_by_hand() {
    let ground = Ground::new();
    let mut spec = viv_provider::InstanceSpec::host(600_000);
    spec.limits.memory_bytes = Some(64 << 20);
    let sandbox = ground.create_from(spec).await;
    // The shell becomes the one that eats: tail keeps a line that never ends in memory.
    let (_, status) = sandbox.run("exec tail -n 1 /dev/zero").await;
    assert_eq!(status.state, ExecState::OomKilled);
    let (_, status) = sandbox.run("kill -9 $$").await;
    assert_eq!(status.state, ExecState::Signalled { signal: 9 });
    // The agent lives (incident 4).
    assert_eq!(sandbox.run("echo fine").await.0, "fine\n");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn x6_an_agent_killed_for_memory_is_told_from_one_killed_by_hand() {
    let ground = Ground::new();
    let mut spec = viv_provider::InstanceSpec::host(600_000);
    spec.limits.memory_bytes = Some(64 << 20);
    let sandbox = ground.create_from(spec).await;
    let eat = "until [ -e /workspace/go ]; do sleep 0.02; done; \
               while :; do for i in 1 2 3 4; do tail -n 1 /dev/zero & done; wait; done";
    sandbox.start(eat).await;
    // The kernel would choose one that eats; for once it shall choose PID 1 (incident 4), which it does when none
    // of the others has all of the memory.
    std::fs::write(format!("/proc/{}/oom_score_adj", sandbox.agent_pid()), "1000").unwrap();
    let go = viv_provider::FileWrite { path: "/workspace/go".to_owned(), ..Default::default() };
    // The agent may be gone before it answers.
    let _ = ground.provider.file_write(&mutation(1, 1), &sandbox.id, &go, Box::new(tokio::io::empty())).await;
    let ended = tokio::time::timeout(SOON, ground.provider.wait_end(&sandbox.instance())).await.unwrap().unwrap();
    assert_eq!(ended.cause, EndCause::OomKilled);
    eventually("nothing runs", || ground.processes().is_empty());
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// A late reader gets all that was kept although everything outside and inside has died.
#[tokio::test]
async fn x2_incident_16_output_is_read_after_everything_died() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let execution = sandbox.start("echo before; sleep 1000").await;
    let mut stream = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
    stream.next().await.unwrap().unwrap();
    kill(sandbox.shim_pid(), Signal::KILL);
    kill(sandbox.agent_pid(), Signal::KILL);
    let (text, status) = sandbox.output(&execution).await;
    assert_eq!(text, "before\n");
    assert!(matches!(status.state, ExecState::Lost { .. }), "{status:?}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}
