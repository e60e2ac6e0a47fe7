//! How a command is confined, seen from inside it (S1).

mod common;

use common::*;
use rustix::process::Signal;
use viv_core::exec::{ExecSpec, ExecState, TtySize};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A line of a process's status, as a number of that base.
fn status_field(status: &str, field: &str, radix: u32) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    u64::from_str_radix(line.unwrap_or_else(|| panic!("no {field} in {status}")).trim(), radix).unwrap()
}

fn failure(agent: &TestAgent, spec: &ExecSpec) -> String {
    match agent.exec_start(&new_id(), spec).unwrap().state {
        ExecState::Failed { what } => what,
        other => panic!("{:?} is {other:?}", spec.argv),
    }
}

#[test]
fn s1_agent_and_command_have_filters() {
    let mine = std::fs::read_to_string("/proc/self/status").unwrap();
    let mine = status_field(&mine, "Seccomp_filters", 10);
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let inside = agent.shell("cat /proc/self/status").stdout();
        assert_eq!(status_field(&inside, "Seccomp_filters", 10), mine + 2);
        assert_eq!(status_field(&inside, "NoNewPrivs", 10), 1);
        // That of a connection may end while we look.
        let threads = std::fs::read_dir(format!("/proc/{}/task", agent.child.id())).unwrap();
        let read = |thread: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(thread?.path().join("status"));
        let statuses: Vec<_> = threads.filter_map(|thread| read(thread).ok()).collect();
        assert!(statuses.len() >= 2, "the main thread and the reserve are always there");
        for status in statuses {
            assert_eq!(status_field(&status, "Seccomp_filters", 10), mine + 1);
        }
    }
}

#[test]
fn only_the_configuration_does_without() {
    let agent = TestAgent::start_with(Killing::Subreaper, |config| config.confine = false);
    let inside = agent.shell("cat /proc/self/status").stdout();
    let mine = std::fs::read_to_string("/proc/self/status").unwrap();
    let same = |field, radix| assert_eq!(status_field(&inside, field, radix), status_field(&mine, field, radix));
    same("Seccomp_filters", 10);
    same("NoNewPrivs", 10);
    same("CapBnd", 16);
    same("CapEff", 16);
    // A configuration from before there was such a choice is one that confines.
    let json = r#"{"identity":{"sandbox":"sbx_a","generation":1},"token":1,"workdir":"/","keeper_id":0}"#;
    let config: viv_agent::proto::AgentConfig = serde_json::from_str(json).unwrap();
    assert!(config.confine && config.open_files.is_none());
}

#[test]
fn s1_without_filters_nothing_is_served() {
    // A kernel that takes none, as far as the agent can tell.
    let start = |confine: bool| {
        let dir = tempfile::tempdir().unwrap();
        let (home, run) = (dir.path().join("home"), dir.path().join("home/run"));
        std::fs::create_dir_all(&run).unwrap();
        let config = serde_json::json!({
            "identity": { "sandbox": "sbx_a", "generation": 1 },
            "token": 1, "workdir": "/", "keeper_id": 0, "confine": confine,
        });
        std::fs::write(run.join(viv_agent::proto::CONFIG), config.to_string()).unwrap();
        let mut command = std::process::Command::new("strace");
        command.args(["-f", "-o", "/dev/null", "-e", "trace=seccomp", "-e", "inject=seccomp:error=ENOSYS"]);
        command.arg(env!("CARGO_BIN_EXE_viv-agent")).arg("--home").arg(&home).arg("--root").arg(dir.path());
        let child = command.stdin(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        (child, run.join(viv_agent::proto::SOCKET), dir)
    };
    let (child, _socket, _dir) = start(true);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("the kernel takes no seccomp filter"), "{said}");
    // Only who asks for no filters does without.
    let (mut child, socket, _dir) = start(false);
    let mut answered = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    eventually("it serves", &mut answered);
    for pid in descendants(child.id()) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
    }
    child.wait().unwrap();
}

#[test]
fn s1_refused_with_the_usual_words() {
    let agent = TestAgent::start(Killing::Subreaper);
    for (attempt, said) in [
        ("unshare --user true", "Operation not permitted"),
        ("unshare --mount true", "Operation not permitted"),
        ("nsenter --mount=/proc/self/ns/mnt true", "Operation not permitted"),
        ("mount -t tmpfs none /mnt", "permission denied"),
        ("chroot / true", "Operation not permitted"),
    ] {
        let output = agent.shell(&format!("{attempt} 2>&1"));
        assert_ne!(output.state(), ExecState::Exited { code: 0 }, "{attempt}");
        assert!(output.stdout().contains(said), "{attempt}: {}", output.stdout());
    }
}

#[test]
fn s1_no_magic_link_becomes_a_working_directory() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let hidden = agent.root().join("hidden");
        std::os::unix::fs::symlink("/proc/self/root/tmp", &hidden).unwrap();
        let hidden = hidden.to_string_lossy().into_owned();
        let numbered = (0..64).map(|fd| format!("/proc/self/fd/{fd}"));
        let named = ["/proc/self/cwd", "/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/proc/thread-self/root/tmp"];
        for cwd in numbered.chain(named.map(str::to_owned)).chain([hidden]) {
            let what = failure(&agent, &ExecSpec { cwd: Some(cwd.clone()), ..spec(&["pwd"]) });
            let is_named = what.contains("a link of the kernel's own");
            assert!(
                is_named || what.ends_with("does not exist") || what.ends_with("permission denied"),
                "{cwd}: {what}"
            );
        }
        // Links of the ordinary kind are fine.
        let link = agent.root().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        let cwd = Some(link.to_string_lossy().into_owned());
        assert_eq!(agent.output(&agent.start_exec(&ExecSpec { cwd, ..spec(&["/bin/pwd"]) })).stdout(), "/tmp\n");
    }
}

#[test]
fn s1_nothing_of_the_agent_is_open_even_before_exec() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        // The agent has its root open, so by one of its descriptors this could be found.
        let probe = agent.root().join("probe");
        std::fs::write(&probe, "#!/bin/sh\necho found\n").unwrap();
        std::fs::set_permissions(&probe, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let of_root = |fd: &std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|to| to == agent.root());
        let fds = std::fs::read_dir(format!("/proc/{}/fd", agent.child.id())).unwrap().flatten();
        let fds: Vec<_> = fds.filter(of_root).map(|fd| fd.file_name().to_string_lossy().into_owned()).collect();
        assert!(!fds.is_empty(), "the test looks for nothing");
        for fd in fds {
            let what = failure(&agent, &spec(&[&format!("/proc/self/fd/{fd}/probe")]));
            assert!(what.starts_with("no such program"), "{what}");
        }
        let listed = agent.shell("ls /proc/self/fd").stdout();
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2", "3"], "3 is that of ls");
    }
}

#[test]
fn s1_limits_are_low_and_stay() {
    let agent = TestAgent::start_with(Killing::Subreaper, |config| {
        (config.open_files, config.processes) = (Some(100), Some(1600));
    });
    let limits = agent.shell("ulimit -Hn; ulimit -Sn; cat /proc/self/limits; ulimit -n 101").stdout();
    assert!(limits.starts_with("100\n100\n"), "{limits}");
    let of = |name: &str| {
        let line =
            limits.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {limits}"));
        line.split_whitespace().take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of("Max core file size"), ["1", "1"]);
    assert_eq!(of("Max processes"), ["1500", "1500"]);
    assert_eq!(of("Max nice priority"), ["0", "0"]);
    assert_eq!(of("Max realtime priority"), ["0", "0"]);
    assert!(of("Max locked memory").iter().all(|bytes| bytes.parse::<u64>().is_ok_and(|bytes| bytes <= 8 << 20)));
    // Whoever wants no core dumps is told that it is so; the limit stays where it means that.
    let script = "ulimit -c 0 && ulimit -c unlimited && grep 'core file' /proc/self/limits";
    let limits = agent.shell(script).stdout();
    assert_eq!(limits.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["1", "1"], "{limits}");
    let agent = TestAgent::start(Killing::Subreaper);
    let (soft, hard) = (agent.shell("ulimit -Sn").stdout(), agent.shell("ulimit -Hn").stdout());
    let found = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert_eq!(
        (soft.trim(), hard.trim()),
        (&*found.current.unwrap().to_string(), &*found.maximum.unwrap().to_string())
    );
}

#[test]
fn s1_no_core_is_dumped() {
    let agent = TestAgent::start(Killing::Subreaper);
    let dir = tempfile::tempdir().unwrap();
    let cwd = Some(dir.path().to_string_lossy().into_owned());
    let spec = ExecSpec { cwd, ..shell("ulimit -c unlimited; kill -SEGV $$") };
    let state = agent.output(&agent.start_exec(&spec)).state();
    assert_eq!(state, ExecState::Signalled { signal: libc::SIGSEGV });
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "something was dumped");
}

#[test]
fn s1_nobody_types_into_another_terminal() {
    let agent = TestAgent::start(Killing::Subreaper);
    let tty = Some(TtySize { rows: 24, cols: 80 });
    // TIOCSTI, the same with a bit that the kernel does not look at, TIOCLINUX, TIOCCONS, TIOCSETD.
    let script = "my $x = 'x'; for my $r (0x5412, 0x541C, 0x541D, 0x5423) { \
                  print syscall(16, 0, $r, $x) == -1 && $!{EPERM} ? 'no ' : 'yes ' } \
                  print syscall(16, 0, 0x100005412, $x) == -1 && $!{EPERM} ? 'no' : 'yes'";
    if cfg!(target_arch = "x86_64") {
        let output = agent.output(&agent.start_exec(&ExecSpec { tty, ..spec(&["perl", "-MErrno", "-e", script]) }));
        assert!(output.stdout().contains("no no no no no"), "{}", output.stdout());
    }
    // Each has a session and a terminal of its own, or none.
    let script = "readlink /proc/self/fd/0; cut -d ' ' -f 6 /proc/$$/stat; echo $$";
    let lines = |output: Output| output.stdout().lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    let first = agent.start_exec(&ExecSpec { tty, ..shell(&format!("{script}; exec sleep 1000")) });
    eventually("the first has spoken", || lines(agent.attach(&first, 0, false)).len() == 3);
    let one = lines(agent.attach(&first, 0, false));
    let two = lines(agent.output(&agent.start_exec(&ExecSpec { tty, ..shell(script) })));
    let none = lines(agent.shell(script));
    assert!(one[0].starts_with("/dev/pts/") && two[0].starts_with("/dev/pts/") && one[0] != two[0], "{one:?} {two:?}");
    assert!(none[0].starts_with("pipe:"), "{none:?}");
    for lines in [one, two, none] {
        assert_eq!(lines[1], lines[2], "it leads a session of its own");
    }
}

#[test]
fn s1_root_inside_has_no_capability() {
    if !is_root() {
        // There is nothing to be dropped.
        return;
    }
    let agent = TestAgent::start(Killing::Subreaper);
    let status = agent.shell("cat /proc/self/status").stdout();
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status_field(&status, field, 16), 0, "{field}");
    }
}
