//! No crash inside has a program of the host run or a core left (S1).
//!
//! What becomes of a core is said by `core_pattern`, one file for the whole machine, so these are only run where
//! `VIV_TEST_CORE_PATTERN` says that the machine is there for it: in the guest of `make cgroups`.
#![allow(missing_docs, reason = "tests")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use support::user::User;
use support::{Ground, eventually};
use viv_core::exec::ExecState;

const PATTERN: &str = "/proc/sys/kernel/core_pattern";

/// Ways to crash, as people and the hostile do: plainly, asking for core dumps first, and again in a child.
const CRASHES: [&str; 5] = [
    "kill -SEGV $$",
    "ulimit -c unlimited; kill -ABRT $$",
    "ulimit -H -c unlimited; ulimit -S -c unlimited; kill -SYS $$",
    "sh -c 'kill -BUS $$'; kill -ILL $$",
    // By the calls themselves, in their numbers on x86_64, which the guest is: the memory is made dumpable, too.
    "exec perl -e 'syscall(157, 4, 1, 0, 0, 0); my $limit = pack(\"QQ\", 1 << 30, 1 << 30); syscall(160, 4, $limit); kill SEGV => $$; sleep 9'",
];

/// A program of the host that gets cores, for as long as a test takes.
struct Handler {
    folder: tempfile::TempDir,
    before: String,
}

impl Handler {
    /// `None` where the machine is not to be touched.
    fn install() -> Option<Self> {
        if std::env::var_os("VIV_TEST_CORE_PATTERN").is_none() {
            eprintln!("PASSED OVER: core_pattern is the whole machine's (make cgroups runs this)");
            return None;
        }
        let folder = tempfile::Builder::new().prefix("viv-core-").tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = folder.path().join("handler");
        let script = format!("#!/bin/sh\ncat >/dev/null\necho \"$1\" >> {}/ran\n", folder.path().display());
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let before = fs::read_to_string(PATTERN).unwrap();
        fs::write(PATTERN, format!("|{} %P", program.display())).unwrap();
        Some(Self { folder, before })
    }

    fn ran(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.folder.path().join("ran")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// A crash on the host goes to it: it works, and whatever came before has been through the kernel.
    fn assert_takes_only_the_hosts(&self) {
        let before = self.ran();
        assert_eq!(before.len(), 0, "the host's program ran for {before:?}");
        let mut child =
            Command::new("sh").args(["-c", "kill -SEGV $$"]).current_dir(self.folder.path()).spawn().unwrap();
        let pid = child.id();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SEGV.as_raw()));
        eventually("the host's own core", || !self.ran().is_empty());
        assert_eq!(self.ran(), [pid], "not by the host's crash alone");
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        fs::write(PATTERN, &self.before).unwrap();
    }
}

async fn crash_inside() {
    let ground = Ground::new();
    let sandbox = ground.create(Duration::from_secs(600)).await;
    for script in CRASHES {
        let (text, status) = sandbox.run(script).await;
        assert!(matches!(status.state, ExecState::Signalled { .. }), "{script}: {:?} {text}", status.state);
    }
    let (found, _) = sandbox.run("find / -xdev -name 'core*' -size +3k -newer /.vivarium/identity.json -type f").await;
    assert_eq!(found, "", "a core is left");
    // The agent itself has blocked what could be sent to it, so its limit has to do.
    let limits = fs::read_to_string(format!("/proc/{}/limits", sandbox.agent_pid())).unwrap();
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>(), ["1", "1", "bytes"]);
    sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_a_crash_inside_runs_no_program_of_the_host() {
    let Some(handler) = Handler::install() else { return };
    crash_inside().await;
    handler.assert_takes_only_the_hosts();
}

#[tokio::test]
#[ignore = "run by the test below, as an ordinary user"]
async fn inside_crash() {
    crash_inside().await;
}

#[test]
fn s1_nor_does_one_in_an_ordinary_users_sandbox() {
    let users = [Some(User::new()), User::with_one_id(), User::with_cgroups()];
    for user in users.iter().flatten() {
        let Some(handler) = Handler::install() else { return };
        user.run_inside("inside_crash", &[]);
        handler.assert_takes_only_the_hosts();
    }
}

/// Newer kernels can hand cores to whoever listens on a socket of the host, and no limit keeps them from it (seen with
/// 7.2: the whole core of a crash inside). That is said.
#[test]
fn s1_a_socket_for_cores_is_told() {
    let Some(handler) = Handler::install() else { return };
    let path = handler.folder.path().join("socket");
    if let Err(error) = fs::write(PATTERN, format!("@{}", path.display())) {
        return eprintln!("PASSED OVER: this kernel knows no sockets for cores: {error}");
    }
    let output = Command::new(support::VIV).args(["doctor", "--json"]).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = told["findings"].as_array().unwrap().iter().find(|finding| finding["what"] == "core dumps").unwrap();
    assert_eq!(finding["state"], "degraded", "{told}");
}

/// What is left where cores are files.
#[tokio::test]
async fn s1_a_crash_inside_leaves_no_core() {
    let Some(handler) = Handler::install() else { return };
    fs::write(PATTERN, "core").unwrap();
    crash_inside().await;
    let folder = Path::new("/tmp");
    assert!(!folder.join("core").exists(), "a core of the host's");
    drop(handler);
}
