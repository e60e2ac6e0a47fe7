//! The same product for who is not root: the conformance suite, and what is missing is said.
#![allow(missing_docs, reason = "tests")]

#[path = "support/making.rs"]
#[expect(unused_macros, unused_imports, reason = "there is one driver for users")]
mod making;
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use making::{Tar, docker_archive, refused};
use serde_json::Value;
use support::user::User;
use support::{Ground, LocalWorld, Sandbox};
use tar::EntryType;
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_core::{EndCause, ExecutionId, OperationId, SandboxId, SnapshotId};
use viv_provider::conformance::{cases, run_named};
use viv_provider::{Capability as C, InstanceRef, InstanceSpec, InstanceState, Provider, SaveRequest};

/// Which cases the ignored test runs.
const THEMES: &str = "VIV_TEST_THEMES";

/// Runs the cases of some themes, in a namespace of an ordinary user.
#[test]
#[ignore = "run by the tests below, as an ordinary user"]
fn inside_conformance() {
    let themes = std::env::var(THEMES).unwrap();
    let mut failed = Vec::new();
    let mut ran = 0;
    for case in cases().iter().filter(|case| themes.split(' ').any(|theme| theme_of(case.name) == theme)) {
        ran += 1;
        let outcome = catch_unwind(AssertUnwindSafe(|| run_named(case.name, async { LocalWorld(Ground::new()) })));
        println!("{} {}", if outcome.is_ok() { "ok  " } else { "FAIL" }, case.name);
        if outcome.is_err() {
            failed.push(case.name);
        }
    }
    assert!(ran > 0, "there are no cases of {themes}");
    assert!(failed.is_empty(), "of {ran} cases failed: {failed:?}");
}

fn theme_of(case: &str) -> &str {
    case.split_once("::").unwrap().0
}

/// One test per theme, so that they run side by side.
macro_rules! themes {
    ($($theme:ident),* $(,)?) => {
        const ALL: &[&str] = &[$(stringify!($theme)),*];

        mod conformance {
            $(
                #[test]
                fn $theme() {
                    super::User::new().run_inside("inside_conformance", &[(super::THEMES, stringify!($theme))]);
                }
            )*
        }
    };
}

themes! {
    lifecycle, fencing, listing, deadline, executions, control, output, terminal, ended, freeze, files, watches, archives,
    ports, requests, saves, restores, forks, snapshots, transfers, removal, disk, limits, network, probes,
}

#[test]
fn no_theme_is_left_out() {
    for case in cases() {
        assert!(ALL.contains(&theme_of(case.name)), "{} is not run as an ordinary user", case.name);
    }
}

/// What a smaller run of the suite covers: everything that depends on ids, marks and cgroups.
const BASICS: &str = "lifecycle executions files requests saves restores";

fn passed_over(why: &str) {
    eprintln!("passed over: {why}");
}

#[test]
fn conformance_with_one_id() {
    let Some(user) = User::with_one_id() else { return passed_over("only root can choose the ids of a user") };
    user.run_inside("inside_conformance", &[(THEMES, BASICS)]);
}

#[test]
fn conformance_with_a_delegated_cgroup() {
    let Some(user) = User::with_cgroups() else { return passed_over("only root can delegate a cgroup here") };
    user.run_inside("inside_conformance", &[(THEMES, "lifecycle control freeze saves forks deadline")]);
    user.assert_no_cgroup_left();
}

#[test]
#[ignore = "run by the test below, as an ordinary user"]
fn inside_limits() {
    run(async {
        let ground = Ground::new();
        let capabilities = ground.provider.capabilities();
        for capability in
            [C::LimitCpu, C::LimitMemory, C::LimitProcesses, C::Freeze, C::ProvenKill, C::SaveLive, C::Fork]
        {
            assert!(capabilities.can(capability), "{capability:?}: {:?}", capabilities.missing);
        }
        let mut spec = InstanceSpec::host(600_000);
        spec.limits.memory_bytes = Some(64 << 20);
        spec.limits.processes = Some(40);
        spec.limits.cpu_millis = Some(500);
        let sandbox = ground.create_from(spec).await;
        let (_, status) = sandbox.run("exec perl -e '$x = \"a\" x (256 << 20); sleep 1000'").await;
        assert_eq!(status.state, ExecState::OomKilled);
        let (text, _) = sandbox.run("for i in $(seq 100); do sleep 1000 & done 2>&1; echo none").await;
        assert!(text.contains("Resource temporarily unavailable") || text.contains("Cannot fork"), "{text}");
        let usage = ground.provider.observe(&sandbox.instance()).await.unwrap().usage.unwrap();
        assert!(usage.memory_bytes.is_some() && usage.processes.is_some() && usage.oom_kills == Some(1), "{usage:?}");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    });
}

#[test]
fn l18_limits_hold_in_a_delegated_cgroup() {
    let Some(user) = User::with_cgroups() else { return passed_over("only root can delegate a cgroup here") };
    user.run_inside("inside_limits", &[]);
    user.assert_no_cgroup_left();
}

/// The suite's own cases, all of which are about limits that are there.
#[test]
fn conformance_of_limits_in_a_delegated_cgroup() {
    let Some(user) = User::with_cgroups() else { return passed_over("only root can delegate a cgroup here") };
    user.run_inside("inside_conformance", &[(THEMES, "limits")]);
    user.assert_no_cgroup_left();
}

#[test]
fn s5_limits_that_cannot_be_kept_are_refused() {
    let user = User::new();
    let output = user.viv().args(["local", "run", "--memory", "64", "--", "true"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("delegated"), "{error}");
    assert_eq!(user.say(&["local", "ls"]), "", "something was made of it");
}

/// Every call is a process with a namespace of its own, and all of them mean the same sandbox.
#[test]
fn what_one_process_made_others_use_save_and_remove() {
    let user = User::new();
    let say = |arguments: &[&str]| user.say(arguments).trim().to_owned();
    let sandbox = say(&["local", "create"]);
    assert!(user.home().join(".local/share/viv/local").is_dir(), "it is not where a user's data goes");
    let script = "mkdir -p /etc/a/b; echo one > /etc/a/b/c; rm -r /etc/ssl; mkdir /etc/ssl; rm /etc/passwd; id -u";
    assert_eq!(say(&["local", "exec", &sandbox, "--", "sh", "-c", script]), "0");
    assert!(say(&["local", "ls"]).contains("running"));
    assert!(say(&["local", "disk", &sandbox]).contains("its own"));
    let snapshot = say(&["local", "save", &sandbox]);
    let second = say(&["local", "restore", &snapshot]);
    let look = "cat /etc/a/b/c; ls -A /etc/ssl; ls /etc/passwd 2>/dev/null; true";
    assert_eq!(say(&["local", "exec", &second, "--", "sh", "-c", look]), "one", "what was removed is there again");
    for sandbox in [&sandbox, &second] {
        assert_eq!(say(&["local", "rm", sandbox]), *sandbox);
    }
    say(&["local", "drop", &snapshot]);
    assert_eq!(say(&["local", "ls"]), "");
}

/// An image with marks, several owners and a device.
fn image(user: &User) -> PathBuf {
    let mut bottom = Tar::with_shell();
    bottom.folder("d/").file("d/below", "").file("gone", "").file_of(33, "of-other", "x");
    bottom.folder("dev/").device(EntryType::Char, "dev/null", (1, 3));
    // What is left out is nothing under its other names too, and in the place of what was there before.
    bottom
        .folder("devices/")
        .device(EntryType::Block, "devices/disk", (8, 0))
        .hard_link("devices/again", "devices/disk");
    bottom.file("devices/file", "x").hard_link("devices/file", "devices/again");
    let mut top = Tar::new();
    top.file(".wh.gone", "").folder("d/").file("d/.wh..wh..opq", "").file("d/above", "");
    docker_archive(&[bottom.bytes(), top.bytes()], &[], "example/image:1").write(&user.home().join("tmp/image.tar"))
}

#[test]
fn images_of_several_owners_and_layers_run() {
    let user = User::new();
    let path = image(&user);
    user.say(&["local", "image", "import", path.to_str().unwrap()]);
    let script = "ls -A /d /devices; ls /gone 2>/dev/null; stat -c %u:%g /of-other; touch /bin/new && echo writable";
    let seen = user.say(&["local", "run", "--image", "example/image:1", "--", "/bin/sh", "-c", script]);
    assert_eq!(seen, "/d:\nabove\n\n/devices:\n33:33\nwritable\n");
    let found: Value = serde_json::from_str(&user.say(&["local", "image", "check", "--deep", "--json"])).unwrap();
    assert_eq!(found["damage"], Value::Array(Vec::new()), "{found}");

    let Some(user) = User::with_one_id() else { return passed_over("only root can choose the ids of a user") };
    let path = image(&user);
    let error = refused(user.viv().args(["local", "image", "import", path.to_str().unwrap()]));
    assert!(error.contains("belongs to user 33") && error.contains("given that many ids"), "{error}");
    assert_eq!(user.say(&["local", "image", "ls"]), "");
}

/// Where a snapshot is handed over.
const FILE: &str = "VIV_TEST_FILE";

/// Takes a folder away and makes it anew, hides a file, and has files of several owners.
async fn change(ground: &Ground, instance: &InstanceRef) {
    let script = "rm -r /etc/ssl; mkdir /etc/ssl; echo one > /etc/ssl/one; rm /etc/hosts; echo data > /srv-data; \
                  setfattr -n user.overlay.opaque -v y /etc/ssl 2>/dev/null; true";
    assert_eq!(ground.run(instance, 1, script).await.0, "");
    let spec = ExecSpec { user: Some("user".to_owned()), ..support::sh("echo mine > /home/user/mine") };
    let execution = ExecutionId::from_bytes(support::fresh_bytes());
    ground.provider.execute(&support::mutation(1, 1), &instance.sandbox, &execution, &spec).await.unwrap();
    let mut output = ground.provider.attach(instance, &execution, 0, true).await.unwrap();
    while let Some(event) = output.next().await.unwrap() {
        if let OutputEvent::End(status) = event {
            assert_eq!(status.state, ExecState::Exited { code: 0 });
            break;
        }
    }
}

async fn assert_changed(ground: &Ground, instance: &InstanceRef) {
    let look = "ls -A /etc/ssl; ls /etc/hosts 2>/dev/null; stat -c %u:%g /etc/ssl/one /home/user/mine";
    assert_eq!(ground.run(instance, 1, look).await.0, "one\n0:0\n1000:1000\n");
}

async fn save_and_export(ground: &Ground, sandbox: &Sandbox<'_>, file: &Path) {
    let request = SaveRequest { snapshot: SnapshotId::from_bytes(support::fresh_bytes()), live: false, memory: false };
    ground.provider.save(&support::mutation(1, 1), &sandbox.id, &request).await.unwrap();
    ground.provider.export_snapshot(&request.snapshot, file).unwrap();
    sandbox.destroy().await;
}

async fn import_and_restore<'g>(ground: &'g Ground, file: &Path) -> Sandbox<'g> {
    let id = SnapshotId::from_bytes(support::fresh_bytes());
    let operation = OperationId::from_bytes(support::fresh_bytes());
    ground.provider.import_snapshot(file, &id, &ground.owner, &operation).unwrap();
    let sandbox = SandboxId::from_bytes(support::fresh_bytes());
    let spec = InstanceSpec::host(600_000);
    ground.provider.restore(&support::mutation(1, 1), &sandbox, &ground.owner, &spec, &id).await.unwrap();
    Sandbox { ground, id: sandbox }
}

#[test]
#[ignore = "run by the test below, as an ordinary user"]
fn inside_export() {
    run(async {
        let ground = Ground::new();
        let sandbox = ground.create(Duration::from_secs(600)).await;
        change(&ground, &sandbox.instance()).await;
        save_and_export(&ground, &sandbox, Path::new(&std::env::var(FILE).unwrap())).await;
    });
}

#[test]
#[ignore = "run by the test below, as an ordinary user"]
fn inside_import() {
    run(async {
        let ground = Ground::new();
        let sandbox = import_and_restore(&ground, Path::new(&std::env::var(FILE).unwrap())).await;
        assert_changed(&ground, &sandbox.instance()).await;
        sandbox.destroy().await;
    });
}

/// A snapshot of an ordinary user's is one of root's and the other way round: marks and ids travel as what they mean.
#[test]
fn snapshots_travel_between_users_and_root() {
    if !rustix::process::geteuid().is_root() {
        return passed_over("it takes root to be both");
    }
    let user = User::new();
    let (first, second) = (user.home().join("tmp/first"), user.home().join("tmp/second"));
    user.run_inside("inside_export", &[(FILE, first.to_str().unwrap())]);
    run(async {
        let ground = Ground::new();
        let sandbox = import_and_restore(&ground, &first).await;
        assert_changed(&ground, &sandbox.instance()).await;
        sandbox.destroy().await;

        let sandbox = ground.create(Duration::from_secs(600)).await;
        change(&ground, &sandbox.instance()).await;
        save_and_export(&ground, &sandbox, &second).await;
    });
    std::fs::set_permissions(&second, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    user.run_inside("inside_import", &[(FILE, second.to_str().unwrap())]);
}

#[test]
fn a_folder_of_root_is_not_taken_for_a_users() {
    let user = User::new();
    say_nothing(&user.say(&["local", "ls"]));
    if rustix::process::geteuid().is_root() {
        let data = user.home().join(".local/share/viv");
        let output = Command::new(support::VIV).args(["local", "ls", "--data"]).arg(data).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("ordinary user"), "{error}");
    }
}

fn say_nothing(text: &str) {
    assert_eq!(text, "");
}

#[test]
fn doctor_says_what_a_user_has_and_how_to_have_more() {
    let user = User::new();
    let told: Value = serde_json::from_str(&user.say(&["doctor", "--json"])).unwrap();
    let state = |told: &Value, what: &str| {
        let all = told["findings"].as_array().unwrap();
        all.iter().find(|finding| finding["what"] == what).unwrap_or_else(|| panic!("{what}: {told}"))["state"].clone()
    };
    assert_eq!(state(&told, "user namespaces"), "ok");
    assert_eq!(state(&told, "overlay filesystems"), "ok");
    assert_eq!(state(&told, "disk limits"), "missing");
    assert!(told["capabilities"]["missing"]["limit_disk"].as_str().is_some_and(|why| !why.is_empty()), "{told}");
    for finding in told["findings"].as_array().unwrap() {
        assert_eq!(finding["state"] == "ok", finding["remedy"].is_null(), "{finding}");
    }
    if let Some(user) = User::with_one_id() {
        let told: Value = serde_json::from_str(&user.say(&["doctor", "--json"])).unwrap();
        assert_eq!(state(&told, "ids for sandboxes"), "degraded");
        assert_eq!(state(&told, "cgroups"), "missing");
        let text = user.say(&["doctor"]);
        assert!(text.contains("/etc/subuid gives vivtest no ids") && text.contains("usermod --add-subuids"), "{text}");
    }
    if let Some(user) = User::with_cgroups() {
        let told: Value = serde_json::from_str(&user.say(&["doctor", "--json"])).unwrap();
        assert_eq!(state(&told, "cgroups"), "ok");
    }
}

#[test]
fn who_may_not_make_namespaces_is_told_so() {
    let Some(user) = User::without_namespaces() else { return passed_over("only root can take that away") };
    for verb in [["local", "ls"], ["image", "ls"], ["doctor", "--json"]] {
        let output = user.viv().args(verb).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{error}");
        assert!(error.contains("does not let you make a user namespace") && error.contains("hint: "), "{error}");
    }
    let output = user.viv().arg("doctor").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("no   user namespaces"), "{text}");
}

/// The process that was started is the one that runs: no other pid, and signals and exit codes are its own.
#[test]
fn entering_changes_nothing_for_who_started_it() {
    let user = User::new();
    let output = user.viv().args(["unshare", "--", "sh", "-c", "id -u; exit 7"]).output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout), (Some(7), &b"0\n"[..]));
    let output =
        user.viv().args(["local", "run", "--", "sh", "-c", "echo out; echo err >&2; exit 9"]).output().unwrap();
    assert_eq!(output.status.code(), Some(9));
    assert_eq!((&*output.stdout, &*output.stderr), (&b"out\n"[..], &b"err\n"[..]));

    let mut child = user.viv().args(["local", "run", "--", "sleep", "1000"]).spawn().unwrap();
    let lists = || user.say(&["local", "ls"]).contains("running");
    support::eventually("it runs", lists);
    support::kill(child.id(), rustix::process::Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(130), "it did not hear of it");
    assert_eq!(user.say(&["local", "ls"]), "", "the sandbox is left");
}

/// Without cgroups there is still nothing that outlives its shim, and nothing is called ended before.
#[test]
#[ignore = "run by the test below, as an ordinary user"]
fn inside_lost() {
    run(async {
        let ground = Ground::new();
        for who in ["shim", "both"] {
            let sandbox = ground.create(Duration::from_secs(600)).await;
            sandbox.start("trap '' TERM; (setsid sleep 1000 &) ; sleep 1000").await;
            let before = ground.processes();
            let agent = sandbox.agent_pid();
            if who == "both" {
                support::kill(sandbox.guard_pid(), rustix::process::Signal::KILL);
            }
            support::kill(sandbox.shim_pid(), rustix::process::Signal::KILL);
            let ended = loop {
                match sandbox.state().await {
                    InstanceState::Ended(ended) => break ended,
                    _ => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            };
            assert!(!support::is_alive(agent), "it is called ended and runs");
            assert_eq!(ended.cause, EndCause::SupervisorLost);
            support::eventually("nothing runs", || before.iter().all(|&pid| !support::is_alive(pid)));
            sandbox.destroy().await;
        }
        ground.assert_nothing_left();
    });
}

#[test]
fn l5_without_cgroups_nothing_outlives_its_shim() {
    User::new().run_inside("inside_lost", &[]);
}

/// Takes itself out of others' sight, and starts one that does the same and leaves the session.
const HIDE: &str = r#"
    my ($nap, $call) = @ARGV; $| = 1;
    syscall($call, 4, 0, 0, 0, 0) == 0 or die "prctl: $!";
    if (!fork) { fork and exit; require POSIX; POSIX::setsid(); $0 = $nap; print "ready\n"; sleep 1000; }
    sleep 1000;
"#;

/// The number of the call.
const PRCTL: u32 = if cfg!(target_arch = "x86_64") { 157 } else { 167 };

#[test]
#[ignore = "run by the test below, as an ordinary user"]
fn inside_hidden() {
    run(async {
        let ground = Ground::new();
        let sandbox = ground.create(Duration::from_secs(600)).await;
        let nap = format!("viv-hidden-{}", std::process::id());
        let argv = ["perl", "-e", HIDE, &nap, &PRCTL.to_string()].map(str::to_owned).to_vec();
        let execution = sandbox.start_spec(&ExecSpec { argv, ..ExecSpec::default() }).await;
        let mut output = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
        assert!(matches!(output.next().await.unwrap(), Some(OutputEvent::Chunk { data, .. }) if data == b"ready\n"));
        let name = || {
            let mut pids = support::pids();
            pids.find(|pid| {
                std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(nap.as_bytes()))
            })
        };
        assert!(name().is_some(), "it does not run");
        let (seen, _) =
            sandbox.run("grep -l . /proc/[0-9]*/stat 2>/dev/null | wc -l; ls -d /proc/[0-9]* | wc -l").await;
        let counts: Vec<u32> = seen.lines().map(|line| line.parse().unwrap()).collect();
        assert!(counts[0] < counts[1], "nothing is hidden here: {seen}");
        let status = ground.provider.cancel(&support::mutation(1, 1), &sandbox.id, &execution).await.unwrap();
        assert_eq!(status.state, ExecState::Cancelled);
        assert_eq!(name(), None, "it is called ended and runs");
        assert_eq!(sandbox.run("echo still here").await.0, "still here\n");
        sandbox.destroy().await;
        ground.assert_nothing_left();
    });
}

/// With one id, processes that want it are hidden from one another, but not from the agent.
#[test]
fn x3_who_hides_is_ended_too() {
    let Some(user) = User::with_one_id() else { return passed_over("only root can choose the ids of a user") };
    user.run_inside("inside_hidden", &[]);
}

#[test]
fn p6_runtimes_run_for_users_too_or_say_why_not() {
    let user = User::new();
    let error = refused(user.viv().args(["local", "--runtime", "runsc", "run", "--", "true"]));
    assert!(error.contains("works for root only") && error.contains("hint: "), "{error}");
    assert_eq!(user.say(&["local", "--runtime", "runc", "run", "--", "id", "-u"]), "0\n");
    if let Some(user) = User::with_one_id() {
        assert_eq!(user.say(&["local", "--runtime", "runc", "run", "--", "id", "-u"]), "0\n");
    }
    if let Some(user) = User::with_cgroups() {
        assert_eq!(user.say(&["local", "--runtime", "runc", "run", "--processes", "50", "--", "id", "-u"]), "0\n");
        user.assert_no_cgroup_left();
    }
}

/// Has a runtime that is a script make a sandbox, and fail at it. What it said, and which of its naps are left.
fn fail_with(user: &User, script: &str) -> (String, impl Fn() -> Vec<u32> + use<>) {
    // A number that no other test sleeps for.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let nap = format!("98{}{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let runtime = user.home().join("tmp/runtime");
    let script = format!("#!/bin/sh\nNAP={nap}\n[ \"$1\" = --version ] && echo fake && exit\n{script}\n");
    std::fs::write(&runtime, script).unwrap();
    std::fs::set_permissions(&runtime, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let error = refused(user.viv().args(["local", "--runtime", runtime.to_str().unwrap(), "run", "--", "true"]));
    let naps = move |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(format!("{nap}\0").as_bytes()))
    };
    (error, move || support::pids().filter(&naps).collect())
}

#[test]
fn j5_a_runtime_that_fails_leaves_no_process() {
    let (error, naps) = fail_with(&User::new(), "setsid sh -c \"sleep $NAP & sleep $NAP\" &\nexit 1");
    assert!(error.contains("the runtime failed"), "{error}");
    assert_eq!(naps(), Vec::<u32>::new());
}

/// The runtime has started something and told nobody when its shim is killed: the guard finds that by its mounts.
#[test]
fn j5_a_shim_killed_while_it_creates_leaves_no_process() {
    let user = User::new();
    let (error, naps) = fail_with(&user, "setsid sh -c \"sleep $NAP & sleep $NAP\" &\nkill -9 $PPID\nsleep $NAP");
    assert!(!error.is_empty());
    support::eventually("nothing of it runs", || naps().is_empty());
    assert_eq!(user.say(&["local", "ls"]), "", "the sandbox is left");
}

fn run(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(work);
}
