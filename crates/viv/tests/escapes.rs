//! Nothing gets out (S1, S4).
//!
//! `viv-escape` makes its attempts inside a default sandbox, as root and as an
//! ordinary user; what comes from outside (working directories, users, paths of
//! the file API) is tried here. The control runs the same program without
//! hardening, where what is listed must get through: a suite that cannot fail
//! shows nothing.
#![allow(missing_docs, reason = "tests")]

#[path = "support/escape.rs"]
mod escape;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use escape::{PROGRAM, program};
use support::user::User;
use support::{Ground, Sandbox, fresh_bytes, hex, mutation, sh};
use viv_core::exec::{ExecSpec, ExecState, OutputEvent};
use viv_provider::{FileWrite, InstanceSpec, Provider};
use viv_sandbox::{Hardening, Runtime};

const LIFETIME: Duration = Duration::from_secs(600);

/// The program takes seconds; after this it hangs.
const PROGRAM_LIMIT_MS: u64 = 300_000;

/// What a suite must have tried to be called one. Those that the kernel does not have are not counted.
const ATTEMPTS_MIN: usize = 60;

/// Attempts that get through as root where nothing is hardened. They differ in what refuses them otherwise:
/// capabilities, filter, masks, read-only mounts, ids.
const OPEN_AS_ROOT: [&str; 44] = [
    "add-key",
    "agent-descriptors",
    "agent-environment",
    "agent-limits",
    "agent-mem",
    "agent-priority",
    "agent-root",
    "become-keeper",
    "become-other",
    "capabilities",
    "chroot",
    "clone-user",
    "clone3-user",
    "fanotify-unprivileged",
    "file-capabilities",
    "fsopen",
    "give-to-keeper",
    "hostname",
    "interface-down",
    "io-uring",
    "keeper-files",
    "keyctl",
    "mount-bind",
    "mount-proc",
    "mount-setattr",
    "mount-tmpfs",
    "netlink-audit",
    "netlink-netfilter",
    "new-privileges",
    "open-tree-clone",
    "perf-event",
    "pidfd-getfd",
    "process-vm-readv",
    "ptrace-seize",
    "route-new",
    "seccomp-status",
    "socket-packet",
    "socket-raw",
    "socket-vsock",
    "sysctl-net",
    "sysfs-any",
    "unshare-mount",
    "unshare-user",
    "userfaultfd",
];

/// The same for an ordinary user.
const OPEN_AS_USER: [&str; 7] =
    ["io-uring", "keyctl", "netlink-generic", "new-privileges", "seccomp-status", "set-user-id", "unshare-user"];

/// And for root inside who has the id of the agent, as it is for an ordinary user with one id. What is the agent's
/// is his then, so this is what is kept by covering, hiding and the filter for him alone.
const OPEN_WITH_ONE_ID: [&str; 63] = [
    "add-key",
    "agent-affinity",
    "agent-clear-refs",
    "agent-config",
    "agent-cwd",
    "agent-descriptor-open",
    "agent-descriptors",
    "agent-environment",
    "agent-io-priority",
    "agent-limits",
    "agent-maps",
    "agent-mem",
    "agent-mem-write",
    "agent-oom-score",
    "agent-pages",
    "agent-priority",
    "agent-robust-list",
    "agent-root",
    "agent-scheduler",
    "agent-socket",
    "agent-socket-replace",
    "agent-thread-limits",
    "agent-thread-oom-score",
    "capabilities",
    "chroot",
    "clone-user",
    "clone3-user",
    "fanotify-unprivileged",
    "file-capabilities",
    "fsopen",
    "hostname",
    "interface-down",
    "io-uring",
    "keyctl",
    "kill-agent",
    "mount-bind",
    "mount-proc",
    "mount-setattr",
    "mount-tmpfs",
    "netlink-audit",
    "netlink-netfilter",
    "new-privileges",
    "open-tree-clone",
    "output-forge",
    "output-of-others",
    "perf-event",
    "pidfd-getfd",
    "process-vm-readv",
    "ptrace-seize",
    "route-new",
    "run-enter",
    "run-list",
    "seccomp-status",
    "signal-agent-pidfd",
    "socket-packet",
    "socket-raw",
    "socket-vsock",
    "stop-agent",
    "sysctl-net",
    "sysfs-any",
    "unshare-mount",
    "unshare-user",
    "userfaultfd",
];

/// What root gets where packages may be installed, and nothing else: other ids than the agent's, files of any of them,
/// and a look at the empty folder that covers the agent's.
const OPEN_WITH_PACKAGES: [&str; 8] = [
    "become-other",
    "capabilities",
    "drop-groups",
    "give-to-keeper",
    "more-groups",
    "other-group",
    "run-enter",
    "run-list",
];

/// What is in the agent's own folder, and so is not there below the cover. Elsewhere whoever asks is kept from looking.
const COVERED: [&str; 4] = ["agent-config", "agent-socket", "output-forge", "output-of-others"];

/// What takes a second id to be tried.
const TAKES_IDS: [&str; 1] = ["set-user-id"];

/// A file below `/usr` that whoever runs an ignored test here cannot make.
const USR_FILE: &str = "VIV_TEST_USR_FILE";

/// Which ids there are for those.
const USERS: &str = "VIV_TEST_USERS";

/// What is there outside to be got at.
struct Outside {
    name: String,
    folder: tempfile::TempDir,
    /// Of whoever made it.
    usr_file: UsrFile,
    tcp: TcpListener,
    tcp6: Option<TcpListener>,
    _abstract: UnixListener,
}

const SECRET: &str = "the host's secret";

impl Outside {
    fn new() -> Self {
        let name = format!("viv-test-{}", hex(&fresh_bytes()[8..]));
        let folder = tempfile::Builder::new().prefix("viv-test-").tempdir().unwrap();
        fs::write(folder.path().join("secret"), SECRET).unwrap();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        Self {
            folder,
            usr_file: UsrFile::here(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            tcp6: TcpListener::bind("[::1]:0").ok(),
            _abstract: UnixListener::bind_addr(&address).unwrap(),
            name,
        }
    }

    fn secret(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    fn assert_untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"], "something was put beside it");
        assert_eq!(fs::read_to_string(self.secret()).unwrap(), SECRET);
        assert_eq!(fs::read_to_string(&self.usr_file.path).unwrap(), SECRET);
    }
}

/// A file that a sandbox of the `host` image sees.
struct UsrFile {
    path: PathBuf,
    is_ours: bool,
}

impl UsrFile {
    fn here() -> Self {
        std::env::var_os(USR_FILE).map_or_else(Self::new, |path| Self { path: path.into(), is_ours: false })
    }

    fn new() -> Self {
        let path = Path::new("/usr/local/share").join(format!("viv-test-{}", hex(&fresh_bytes()[8..])));
        fs::write(&path, SECRET).unwrap();
        Self { path, is_ours: true }
    }
}

impl Drop for UsrFile {
    fn drop(&mut self) {
        if self.is_ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Another sandbox, with one of everything that the first might find.
struct Neighbour<'g> {
    sandbox: Sandbox<'g>,
    name: String,
}

const NEIGHBOUR_KEY: u32 = 0x7669_7600;
const NEIGHBOUR_PORT: u16 = 7070;

impl<'g> Neighbour<'g> {
    async fn new(ground: &'g Ground) -> Self {
        let name = format!("viv-neighbour-{}", hex(&fresh_bytes()[8..]));
        let sandbox = ground.create(LIFETIME).await;
        let script = r#"
            use Socket; my ($name, $key, $port) = @ARGV; $| = 1;
            for my $path ("/tmp/$name", "/dev/shm/$name", "/dev/mqueue/$name") { open(my $f, '>', $path) or die "$path: $!"; }
            socket(T, PF_INET, SOCK_STREAM, 0) && bind(T, sockaddr_in($port, INADDR_ANY)) && listen(T, 5) or die "port: $!";
            socket(U, PF_UNIX, SOCK_STREAM, 0) && bind(U, pack_sockaddr_un("\0$name")) && listen(U, 5) or die "unix: $!";
            defined shmget($key, 4096, 01666) && defined semget($key, 1, 01666) && defined msgget($key, 01666) or die "ipc: $!";
            print "ready\n"; sleep 1000;
        "#;
        let argv = ["perl", "-e", script, &name, &NEIGHBOUR_KEY.to_string(), &NEIGHBOUR_PORT.to_string()];
        let spec = ExecSpec { argv: argv.map(str::to_owned).to_vec(), ..ExecSpec::default() };
        let execution = sandbox.start_spec(&spec).await;
        let mut output = ground.provider.attach(&sandbox.instance(), &execution, 0, true).await.unwrap();
        match output.next().await.unwrap() {
            Some(OutputEvent::Chunk { data, .. }) if data == b"ready\n" => {}
            other => panic!("{other:?}"),
        }
        Self { sandbox, name }
    }
}

async fn put(sandbox: &Sandbox<'_>, path: &str, mode: u32, user: &str, content: &[u8]) {
    let file = FileWrite { path: path.to_owned(), mode: Some(mode), user: Some(user.to_owned()) };
    let content = Box::new(std::io::Cursor::new(content.to_vec()));
    let stat = sandbox.ground.provider.file_write(&mutation(1, 1), &sandbox.id, &file, content).await.unwrap();
    assert_eq!(stat.mode, mode, "{path}");
}

/// What came of one attempt.
struct Made {
    name: String,
    tries: String,
    outcome: String,
    detail: String,
}

/// Puts the program into a sandbox with these users.
async fn install(sandbox: &Sandbox<'_>, users: &[&str]) {
    let content = fs::read(program()).unwrap();
    put(sandbox, "/tmp/viv-escape", 0o755, "0", &content).await;
    // One of each, to be run by the other: who runs it must stay who he is. Made inside, since the file API makes none.
    for user in users {
        let copy = format!("cp /tmp/viv-escape /tmp/set-id-{user} && chmod 6755 /tmp/set-id-{user}");
        let execution = sandbox.start_spec(&ExecSpec { user: Some((*user).to_owned()), ..sh(&copy) }).await;
        let (text, status) = sandbox.output(&execution).await;
        assert_eq!(status.state, ExecState::Exited { code: 0 }, "{text}");
        let stat =
            sandbox.ground.provider.file_stat(&sandbox.instance(), &format!("/tmp/set-id-{user}")).await.unwrap();
        assert_eq!((stat.mode, stat.uid.to_string().as_str()), (0o6755, *user));
    }
}

/// Runs the program, or only some attempts of it.
async fn attempt(
    sandbox: &Sandbox<'_>,
    outside: &Outside,
    neighbour: &Neighbour<'_>,
    user: &str,
    only: &[&str],
) -> Vec<Made> {
    let other = if user == "1000" { "0" } else { "1000" };
    let values = [
        ("HOST_TCP", outside.tcp.local_addr().unwrap().to_string()),
        ("HOST_TCP6", outside.tcp6.as_ref().map_or("none".to_owned(), |tcp| tcp.local_addr().unwrap().to_string())),
        ("HOST_ABSTRACT", outside.name.clone()),
        ("HOST_FILE", outside.secret().display().to_string()),
        ("HOST_USR_FILE", outside.usr_file.path.display().to_string()),
        ("SHIM_SOCKET", sandbox.folder().join("shim.sock").display().to_string()),
        ("SET_ID_PROGRAM", format!("/tmp/set-id-{other}")),
        ("NEIGHBOUR_PID", neighbour.sandbox.agent_pid().to_string()),
        ("NEIGHBOUR_KEY", NEIGHBOUR_KEY.to_string()),
        ("NEIGHBOUR_PORT", NEIGHBOUR_PORT.to_string()),
        ("NEIGHBOUR_NAME", neighbour.name.clone()),
    ];
    let env: BTreeMap<_, _> = values.into_iter().map(|(name, value)| (format!("VIV_ESCAPE_{name}"), value)).collect();
    let mut argv = vec!["/tmp/viv-escape".to_owned()];
    if !only.is_empty() {
        argv.extend(["--only".to_owned(), only.join(",")]);
    }
    let spec =
        ExecSpec { argv, env, user: Some(user.to_owned()), limit_ms: Some(PROGRAM_LIMIT_MS), ..ExecSpec::default() };
    let execution = sandbox.start_spec(&spec).await;
    let (text, status) = sandbox.output(&execution).await;
    assert_eq!(status.state, ExecState::Exited { code: 0 }, "as {user}: {text}");
    text.lines().map(read_line).collect()
}

fn read_line(line: &str) -> Made {
    let value: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("not a report: {line}"));
    let field = |name: &str| value[name].as_str().unwrap().to_owned();
    Made { name: field("name"), tries: field("tries"), outcome: field("outcome"), detail: field("detail") }
}

fn table<'m>(made: impl IntoIterator<Item = &'m Made>) -> String {
    let line = |made: &Made| format!("\n  {:<8} {:<26} {}: {}", made.outcome, made.name, made.tries, made.detail);
    made.into_iter().map(line).collect()
}

fn assert_all_refused(made: &[Made], who: &str) {
    let (missing, made): (Vec<_>, Vec<_>) = made.iter().partition(|made| made.outcome == "missing");
    let (refused, open): (Vec<_>, Vec<_>) = made.into_iter().partition(|made| made.outcome == "refused");
    println!("{who}: {} refused, {} not in this kernel{}", refused.len(), missing.len(), table(missing));
    assert!(open.is_empty(), "{who}: {} of {} got through:{}", open.len(), refused.len() + open.len(), table(open));
    assert!(refused.len() >= ATTEMPTS_MIN, "{who}: only {} attempts were made", refused.len());
}

const BOTH: [&str; 2] = ["0", "1000"];

async fn assert_nothing_gets_out(runtime: Runtime, users: &[&str]) {
    let outside = Outside::new();
    let ground = Ground::with_runtime(runtime);
    let sandbox = ground.create(LIFETIME).await;
    let neighbour = Neighbour::new(&ground).await;
    install(&sandbox, users).await;
    let mut all = Vec::new();
    for user in users {
        let mut made = attempt(&sandbox, &outside, &neighbour, user, &[]).await;
        made.retain(|made| users.len() > 1 || !TAKES_IDS.contains(&&*made.name));
        all.push((user, made));
    }
    for (user, made) in &all {
        assert_all_refused(made, &format!("as {user}"));
    }
    // Whatever was tried, all of this still works.
    outside.assert_untouched();
    for sandbox in [&sandbox, &neighbour.sandbox] {
        let (text, status) = sandbox.run("echo still here").await;
        assert_eq!((text.as_str(), status.state), ("still here\n", ExecState::Exited { code: 0 }));
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_every_attempt_is_refused() {
    assert_nothing_gets_out(Runtime::Embedded, &BOTH).await;
}

#[tokio::test]
async fn s1_every_attempt_is_refused_by_runc_too() {
    assert_nothing_gets_out(Runtime::Binary("runc".into()), &BOTH).await;
}

/// With what package managers need, the agent, the machine and the neighbours are as far away as ever.
#[tokio::test]
async fn s1_with_packages_root_gets_what_they_need_and_nothing_else() {
    let outside = Outside::new();
    let ground = Ground::new();
    let spec = InstanceSpec { packages: true, ..InstanceSpec::host(LIFETIME.as_millis() as u64) };
    let sandbox = ground.create_from(spec).await;
    let neighbour = Neighbour::new(&ground).await;
    install(&sandbox, &BOTH).await;
    let (text, _) =
        sandbox.run("ls -A /.vivarium/run; touch /.vivarium/run/file 2>&1; umount /.vivarium/run 2>&1").await;
    assert!(text.starts_with("touch: ") && text.contains("Read-only file system"), "{text}");
    let mut made = attempt(&sandbox, &outside, &neighbour, "0", &[]).await;
    for covered in made.iter_mut().filter(|made| COVERED.contains(&&*made.name)) {
        assert!(covered.detail.contains("No such file or directory"), "{}: {}", covered.name, covered.detail);
        covered.outcome = "refused".to_owned();
    }
    let opened: BTreeSet<_> = made.iter().filter(|made| made.outcome == "opened").map(|made| &*made.name).collect();
    let (known, others): (Vec<_>, Vec<_>) = made.iter().partition(|made| OPEN_WITH_PACKAGES.contains(&&*made.name));
    assert_eq!(opened, OPEN_WITH_PACKAGES.into_iter().collect(), "{}{}", table(known), table(others));
    let rest: Vec<_> = made.into_iter().filter(|made| !OPEN_WITH_PACKAGES.contains(&&*made.name)).collect();
    assert_all_refused(&rest, "as 0, with packages");
    // Others than root have nothing of it.
    assert_all_refused(&attempt(&sandbox, &outside, &neighbour, "1000", &[]).await, "as 1000, with packages");
    outside.assert_untouched();
    for sandbox in [&sandbox, &neighbour.sandbox] {
        let (text, status) = sandbox.run("echo still here").await;
        assert_eq!((text.as_str(), status.state), ("still here\n", ExecState::Exited { code: 0 }));
        sandbox.destroy().await;
    }
    ground.assert_nothing_left();
}

/// Every attempt, by an ordinary user of this machine.
#[tokio::test]
#[ignore = "run by the tests below, as an ordinary user"]
async fn inside_attempts() {
    let users = std::env::var(USERS).unwrap();
    assert_nothing_gets_out(Runtime::Embedded, &users.split(' ').collect::<Vec<_>>()).await;
}

/// Runs an ignored test of this file as another user, who can neither build the program nor write to `/usr`.
fn run_as(user: &User, test: &str, ids: &str) {
    let file = UsrFile::new();
    let copy = user.home().join("tmp/viv-escape");
    fs::copy(program(), &copy).unwrap();
    let paths = [(USR_FILE, file.path.to_str().unwrap()), (PROGRAM, copy.to_str().unwrap()), (USERS, ids)];
    user.run_inside(test, &paths);
    assert_eq!(fs::read_to_string(&file.path).unwrap(), SECRET);
}

fn with_one_id() -> Option<User> {
    let user = User::with_one_id();
    if user.is_none() {
        eprintln!("passed over: only root can choose the ids of a user");
    }
    user
}

#[test]
fn s1_every_attempt_is_refused_to_ordinary_users() {
    run_as(&User::new(), "inside_attempts", "0 1000");
}

#[test]
fn s1_every_attempt_is_refused_with_one_id() {
    let Some(user) = with_one_id() else { return };
    run_as(&user, "inside_attempts", "0");
}

/// Without hardening, what is listed gets through.
async fn assert_openings_are_found(listed: &[(&str, &[&str])]) {
    let outside = Outside::new();
    let ground = Ground::with(|config| config.hardening = Hardening::Off);
    let neighbour = Neighbour::new(&ground).await;
    let users: Vec<_> = listed.iter().map(|(user, _)| *user).collect();
    for (user, listed) in listed {
        // What gets through may change the sandbox, so each has its own.
        let sandbox = ground.create(LIFETIME).await;
        install(&sandbox, &users).await;
        let made = attempt(&sandbox, &outside, &neighbour, user, listed).await;
        let names: BTreeSet<_> = made.iter().map(|made| made.name.as_str()).collect();
        assert_eq!(names, listed.iter().copied().collect());
        let closed: Vec<_> = made.iter().filter(|made| made.outcome != "opened").collect();
        assert!(closed.is_empty(), "as {user}, without hardening, this was refused:{}", table(closed));
        sandbox.destroy().await;
    }
    // Namespaces are there even so.
    outside.assert_untouched();
    neighbour.sandbox.destroy().await;
    ground.assert_nothing_left();
}

#[tokio::test]
async fn s1_without_hardening_the_suite_finds_the_openings() {
    assert_openings_are_found(&[("0", &OPEN_AS_ROOT), ("1000", &OPEN_AS_USER)]).await;
}

#[tokio::test]
#[ignore = "run by the test below, as an ordinary user"]
async fn inside_openings() {
    assert_openings_are_found(&[("0", &OPEN_WITH_ONE_ID)]).await;
}

#[test]
fn s1_without_hardening_the_suite_finds_the_openings_of_one_id() {
    let Some(user) = with_one_id() else { return };
    run_as(&user, "inside_openings", "0");
}
