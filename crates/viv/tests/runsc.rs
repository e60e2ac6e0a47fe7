//! What is different when gVisor is the kernel inside, beyond what the conformance suite asks.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use support::{Ground, SOON, eventually, kill, mutation, sh, stdout};
use viv_core::EndCause;
use viv_core::exec::{ExecState, TtySize};
use viv_provider::{Capability, InstanceSpec, InstanceState, Provider, ProviderError};
use viv_sandbox::{Kernel, Runtime};

fn ground() -> Ground {
    Ground::with_runtime(Runtime::Binary("runsc".into()))
}

#[tokio::test]
async fn s1_workloads_talk_to_another_kernel() {
    let ground = ground();
    assert_eq!(ground.provider.runtime().unwrap().kernel, Kernel::Gvisor);
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (inside, _) = sandbox.run("uname -v").await;
    let host = Command::new("uname").arg("-v").output().unwrap();
    assert_ne!(inside.trim(), stdout(&host));
    // What runs on the host in its place has no rights there, and is in the instance's cgroups.
    let sentry = std::fs::metadata(format!("/proc/{}", sandbox.agent_pid())).unwrap();
    assert_ne!(sentry.uid(), 0);
    let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", sandbox.agent_pid())).unwrap();
    for line in cgroups.lines() {
        assert!(line.ends_with(&format!("/{}/{}", ground.cgroup_prefix, sandbox.id)), "{line}");
    }
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// The agent shares its kernel with workloads that may be root: none of them gets at it.
#[tokio::test]
async fn s1_root_inside_cannot_touch_the_agent() {
    let ground = ground();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let follower = sandbox.start("echo kept; sleep 1000").await;
    let script = r#"
        for signal in KILL STOP TERM; do kill -$signal 1 && echo "signalled $signal"; done
        for link in /proc/1/fd/*; do
            case $(readlink $link) in
                *.log|host:*) (: >> $link) && echo "opened $link"; cat $link >/dev/null && echo "read $link";;
            esac
        done
        (: > /proc/1/mem) && echo "opened its memory"
        cat /.vivarium/run/agent.json && echo "read its configuration"
        grep -E '^Cap(Prm|Eff|Bnd)' /proc/self/status | grep -v '0000000000000000$' && echo "has capabilities"
        cd /proc/1/root && echo "entered its root"
        prlimit --pid 1 --nofile=10:10 && echo "limited it"
        echo done
    "#;
    let (text, status) = sandbox.run(&format!("{{ {script} }} 2>/dev/null")).await;
    assert_eq!(text, "done\n");
    assert_eq!(status.state, ExecState::Exited { code: 0 });
    ground.provider.cancel(&mutation(1, 1), &sandbox.id, &follower).await.unwrap();
    let (text, _) = sandbox.output(&follower).await;
    assert_eq!(text, "kept\n");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Without cgroups inside, a command's processes are known by a group that they cannot leave.
#[tokio::test]
async fn x3_what_left_its_session_and_its_parent_is_found() {
    let ground = ground();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let stubborn = "trap '' TERM HUP; (setsid sh -c 'sleep 1000 & exit' &); (setsid sleep 1001 &); sleep 1000";
    let execution = sandbox.start(stubborn).await;
    let neighbour = sandbox.start("(setsid sleep 1002 &); sleep 1003").await;
    let count = r#"for p in /proc/[0-9]*; do
            c=$(tr '\0' ' ' < $p/cmdline)
            case $c in "sleep 100"*) echo "$c";; esac
        done 2>/dev/null | sort | uniq -c | tr -s ' \n' ' '"#;
    let mut seen = String::new();
    let until = std::time::Instant::now() + SOON;
    while seen != " 2 sleep 1000 1 sleep 1001 1 sleep 1002 1 sleep 1003 " {
        assert!(std::time::Instant::now() < until, "not all came up: {seen}");
        seen = sandbox.run(count).await.0;
    }
    let ended = ground.provider.cancel(&mutation(1, 1), &sandbox.id, &execution).await.unwrap();
    assert_eq!(ended.state, ExecState::Cancelled);
    assert_eq!(sandbox.run(count).await.0, " 1 sleep 1002 1 sleep 1003 ");
    let ended = ground.provider.cancel(&mutation(1, 1), &sandbox.id, &neighbour).await.unwrap();
    assert_eq!(ended.state, ExecState::Cancelled);
    assert_eq!(sandbox.run(count).await.0, "");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

/// Files made inside have on disk the ids that they have inside, so that any runtime can go on with them.
#[tokio::test]
async fn l5_what_is_saved_goes_on_with_another_runtime() {
    let ground = ground();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let mut make = sh("cd /tmp; echo one > a; chmod 750 a; ln a d; ln -s /workspace/b c");
    make.user = Some("1000".to_owned());
    let execution = sandbox.start_spec(&make).await;
    let (text, status) = sandbox.output(&execution).await;
    assert_eq!((text.as_str(), status.state), ("", ExecState::Exited { code: 0 }));
    let (text, status) = sandbox.run("echo two > /workspace/b").await;
    assert_eq!((text.as_str(), status.state), ("", ExecState::Exited { code: 0 }));
    let snapshot = viv_core::SnapshotId::from_bytes(support::fresh_bytes());
    let request = viv_provider::SaveRequest { snapshot: snapshot.clone(), live: false, memory: false };
    ground.provider.save(&mutation(1, 1), &sandbox.id, &request).await.unwrap();
    let embedded = ground.reopen();
    let id = viv_core::SandboxId::from_bytes(support::fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    embedded.restore(&mutation(1, 1), &id, &ground.owner, &spec, &snapshot).await.unwrap();
    let instance = viv_provider::InstanceRef { sandbox: id.clone(), generation: viv_core::Generation::FIRST };
    let look = "uname -v; cd /tmp; stat -c '%u %a %h %n' a; cat c; stat -c %u /workspace/b";
    let (text, _) = ground.run(&instance, 1, look).await;
    let (kernel, rest) = text.split_once('\n').unwrap();
    assert_eq!(kernel, stdout(&Command::new("uname").arg("-v").output().unwrap()));
    assert_eq!(rest, "1000 750 2 a\ntwo\n0\n");
    embedded.destroy(&mutation(1, 1), &id).await.unwrap();
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l18_memory_is_limited_and_its_end_is_told() {
    let ground = ground();
    let mut spec = InstanceSpec::host(600_000);
    spec.limits.memory_bytes = Some(128 << 20);
    spec.limits.cpu_millis = Some(1500);
    let sandbox = ground.create_from(spec).await;
    sandbox.start("exec tail -n 1 /dev/zero").await;
    // The host sees one program with all of the memory: gVisor's kernel.
    let ended = tokio::time::timeout(SOON, ground.provider.wait_end(&sandbox.instance())).await.unwrap().unwrap();
    assert_eq!(ended.cause, EndCause::OomKilled);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn l8_nothing_is_left_when_shim_or_kernel_is_killed() {
    let ground = ground();
    for (victim, cause) in [("shim", EndCause::SupervisorLost), ("sentry", EndCause::Signalled { signal: 9 })] {
        let sandbox = ground.create(Duration::from_secs(600)).await;
        sandbox.start("sleep 1000").await;
        kill(if victim == "shim" { sandbox.shim_pid() } else { sandbox.agent_pid() }, Signal::KILL);
        eventually("nothing runs", || ground.processes().is_empty());
        let InstanceState::Ended(ended) = sandbox.state().await else { panic!("it has not ended") };
        assert_eq!(ended.cause, cause, "{victim}");
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s2_there_is_no_network_but_loopback() {
    let ground = ground();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let (text, _) = sandbox.run("bash -c ': < /dev/tcp/192.0.2.1/80' 2>&1").await;
    assert!(text.contains("No route") || text.contains("unreachable"), "{text}");
    let (text, _) = sandbox.run("bash -c ': < /dev/tcp/127.0.0.1/9' 2>&1").await;
    assert!(text.contains("refused"), "{text}");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn a_terminal_is_the_commands_own() {
    let ground = ground();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let mut spec = sh("tty; : > $(tty) && echo mine");
    spec.tty = Some(TtySize { rows: 24, cols: 80 });
    let execution = sandbox.start_spec(&spec).await;
    let (text, _) = sandbox.output(&execution).await;
    assert_eq!(text, "/dev/pts/0\r\nmine\r\n");
    // And what scripts take for granted with pipes.
    let (text, _) = sandbox.run("echo out > /dev/stdout; echo err > /dev/stderr").await;
    assert_eq!(text, "out\nerr\n");
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn p6_what_it_lacks_is_declared_and_refused() {
    let ground = ground();
    let capabilities = ground.provider.capabilities();
    for capability in [Capability::ProvenKill, Capability::LimitProcesses] {
        assert!(!capabilities.can(capability));
        assert!(capabilities.missing[&capability].contains("gVisor"), "{:?}", capabilities.missing);
    }
    let mut spec = InstanceSpec::host(600_000);
    spec.limits.processes = Some(100);
    let id = viv_core::SandboxId::from_bytes(support::fresh_bytes());
    let refused = ground.provider.create(&mutation(1, 1), &id, &ground.owner, &spec).await;
    assert!(matches!(refused, Err(ProviderError::Unsupported { capability: Capability::LimitProcesses, .. })));
    ground.assert_nothing_left();
}

#[test]
fn s5_a_runtime_that_is_not_there_is_told_with_a_hint() {
    let ground = Ground::new();
    for (runtime, what) in [
        ("no-such-runtime", "there is no runtime no-such-runtime"),
        ("/etc/passwd", "/etc/passwd is not an executable file"),
    ] {
        for verb in [vec!["local", "run", "true"], vec!["doctor"]] {
            let output = ground.verb(verb[0]).args(&verb[1..]).env("VIV_RUNTIME", runtime).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{verb:?} {runtime}");
            assert!(said.contains(what) && said.contains("hint: "), "{verb:?} {runtime}: {said}");
        }
    }
    // What makes nothing needs none.
    let output = ground.viv().arg("ls").env("VIV_RUNTIME", "no-such-runtime").output().unwrap();
    assert!(output.status.success());
    ground.assert_nothing_left();
}
