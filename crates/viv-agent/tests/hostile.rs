//! A workload that holds things up, a request that is far too long, a replica that was overtaken.

mod common;

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::*;
use viv_agent::frame::{self, Kind};
use viv_agent::proto::*;
use viv_core::FencingToken;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::file::ArchiveBounds;

/// Of `fcntl`, and not in `libc`: which signal tells of somebody who waits.
const F_SETSIG: i32 = 10;

/// A program that nobody can open, and so run, while this is held: the kernel lets them wait.
struct HeldProgram {
    path: PathBuf,
    _lease: std::fs::File,
}

impl HeldProgram {
    #[expect(unsafe_code, reason = "leases have no safe interface")]
    fn new(agent: &TestAgent) -> Self {
        let path = agent.dir.path().join("held");
        std::fs::copy("/bin/true", &path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        let lease = std::fs::File::open(&path).unwrap();
        // SAFETY: plain numbers about a descriptor that is open. The signal is one that is ignored by default.
        let set = |command, value: i32| unsafe { libc::fcntl(lease.as_raw_fd(), command, value) } == 0;
        assert!(set(F_SETSIG, libc::SIGURG));
        // A process that is just being started from here may still have the file open for writing.
        eventually("the lease", || set(libc::F_SETLEASE, libc::F_WRLCK));
        Self { path, _lease: lease }
    }

    fn spec(&self) -> ExecSpec {
        spec(&[self.path.to_str().unwrap()])
    }
}

/// Nothing of the execution is there any more, and the agent is well.
fn assert_clean(agent: &TestAgent, id: &viv_core::ExecutionId) {
    eventually("no process", || agent.descendants().is_empty());
    if let Some(cgroup) = &agent.cgroup {
        eventually("no cgroup", || !std::fs::exists(cgroup.join(id.as_str())).unwrap());
    }
    let Answer::Health(health) = agent.call(&Request::Health).unwrap() else { panic!() };
    assert_eq!((health.running, health.known), (0, 1));
    assert_eq!(agent.shell("echo well").stdout(), "well\n");
}

#[test]
fn a_start_that_is_held_up_is_given_up() {
    let each: Vec<_> = killings()
        .into_iter()
        .map(|killing| {
            std::thread::spawn(move || {
                let agent = TestAgent::start(killing);
                let held = HeldProgram::new(&agent);
                let id = new_id();
                let status = agent.exec_start(&id, &held.spec()).unwrap();
                let what = "it could not be started within 10 seconds".to_owned();
                assert_eq!(status.state, ExecState::Failed { what });
                assert_eq!(viv_agent::output::read_status(&agent.exec_dir(&id)).unwrap(), Some(status.clone()));
                assert_eq!(agent.cancel(&id), status);
                assert_clean(&agent, &id);
            })
        })
        .collect();
    for thread in each {
        thread.join().unwrap();
    }
}

#[test]
fn a_start_that_is_held_up_can_be_cancelled() {
    for killing in killings() {
        let agent = TestAgent::start(killing);
        let held = HeldProgram::new(&agent);
        let id = new_id();
        let mut starter = agent.connect();
        starter.send(&Request::ExecStart { fence: fence(), id: id.clone(), spec: held.spec() });
        // With a cgroup only the leader, without also the monitor.
        let processes = if killing == Killing::Cgroup { 1 } else { 2 };
        eventually("the child", || agent.descendants().len() == processes);
        // As if that were not enough, everything is stopped, as a workload with the same id could.
        for pid in agent.descendants() {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        }
        let begin = Instant::now();
        assert_eq!(agent.cancel(&id).state, ExecState::Cancelled);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        let Answer::Exec(status) = starter.reply().unwrap() else { panic!() };
        assert_eq!((status.state, status.pid), (ExecState::Cancelled, None));
        assert_clean(&agent, &id);
    }
}

#[test]
fn nothing_of_a_request_comes_back_at_length() {
    let agent = TestAgent::start(Killing::Subreaper);
    let long = "x".repeat(100_000);
    let longer = "x".repeat(5 << 20);
    let failing = [
        spec(&[&long]),
        spec(&[&format!("/{long}")]),
        ExecSpec { cwd: Some(format!("/{longer}")), ..spec(&["true"]) },
        ExecSpec { user: Some(longer.clone()), ..spec(&["true"]) },
        ExecSpec { user: Some(format!("0:{longer}")), ..spec(&["true"]) },
    ];
    for spec in failing {
        let id = new_id();
        let status = agent.exec_start(&id, &spec).unwrap();
        let ExecState::Failed { what } = &status.state else { panic!("{status:?}") };
        assert!(what.len() <= 1024, "{}", what.len());
        assert_eq!(viv_agent::output::read_status(&agent.exec_dir(&id)).unwrap(), Some(status));
    }
    let paths = ["PATH".to_owned()].map(|key| (key, ":".repeat(4 << 20))).into();
    let refused = [
        spec(&["true", &longer]),
        ExecSpec { argv: vec![long.clone(); 20], ..ExecSpec::default() },
        ExecSpec { cwd: Some(longer.clone()), ..spec(&["true"]) },
        ExecSpec { env: paths, ..spec(&["true"]) },
    ];
    for spec in refused {
        let refusal = agent.exec_start(&new_id(), &spec).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::Invalid);
        assert!(refusal.message.len() <= 1024, "{}", refusal.message.len());
    }
    let refusal = agent.call(&Request::FileStat { path: longer }).unwrap_err();
    assert!(refusal.message.len() <= 1024);
    let Answer::Execs(list) = agent.call(&Request::ExecList).unwrap() else { panic!() };
    assert_eq!(list.len(), 5);
}

fn newer_fence() -> Fence {
    Fence { token: FencingToken(11), ..fence() }
}

/// A newer replica shows itself.
fn overtake(agent: &TestAgent) {
    agent.call(&Request::FileMkdir { fence: newer_fence(), path: "/newer".to_owned() }).unwrap();
}

fn finish(client: &mut Client) -> Result<Answer, AgentError> {
    // It may have been refused, and the connection closed.
    let _ = client.stream.write_all(&frame::encode_header(Kind::End, 0));
    client.reply()
}

#[test]
fn a_file_of_an_overtaken_replica_is_not_put_in_place() {
    let agent = TestAgent::start(Killing::Subreaper);
    std::fs::write(agent.root().join("f"), "before").unwrap();
    let mut client = agent.connect();
    client.send(&Request::FileWrite { fence: fence(), path: "/f".to_owned(), mode: None, user: None });
    client.send_data(b"after").unwrap();
    let names = || std::fs::read_dir(agent.root()).unwrap().count();
    eventually("a draft", || names() == 3);
    overtake(&agent);
    let refusal = finish(&mut client).unwrap_err();
    assert_eq!((refusal.code, refusal.current), (ErrorCode::Fenced, Some(11)));
    assert_eq!(std::fs::read(agent.root().join("f")).unwrap(), b"before");
    // The file, the directory of the newer one, and where commands start: no draft.
    assert_eq!(names(), 3);
}

#[test]
fn an_archive_of_an_overtaken_replica_is_left_off() {
    let agent = TestAgent::start(Killing::Subreaper);
    let mut builder = tar::Builder::new(Vec::new());
    for (kind, name) in [
        (tar::EntryType::Regular, "one"),
        (tar::EntryType::Directory, "two"),
        (tar::EntryType::Regular, "three/four"),
        (tar::EntryType::Regular, "one"),
    ] {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(0);
        builder.append_data(&mut header, name, std::io::empty()).unwrap();
    }
    let archive = builder.into_inner().unwrap();
    let mut client = agent.connect();
    let bounds = ArchiveBounds { entries_max: 10, bytes_max: 1 << 20, ratio_max: 10 };
    client.send(&Request::ArchivePut { fence: fence(), path: "/x".to_owned(), bounds });
    // The first entry is one block, and the parser wants no more to make it.
    client.send_data(&archive[..512]).unwrap();
    eventually("the first entry", || std::fs::exists(agent.root().join("x/one")).unwrap());
    overtake(&agent);
    let _ = client.send_data(&archive[512..]);
    assert_eq!(finish(&mut client).unwrap_err().code, ErrorCode::Fenced);
    let names: Vec<_> = std::fs::read_dir(agent.root().join("x")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["one"]);
}

#[test]
fn input_of_an_overtaken_replica_is_not_passed_on() {
    let agent = TestAgent::start(Killing::Subreaper);
    let id = agent.start_exec(&ExecSpec { stdin: true, ..spec(&["cat"]) });
    let mut client = agent.connect();
    client.send(&Request::ExecStdin { fence: fence(), id: id.clone(), offset: 0, close: true });
    client.send_data(b"one\n").unwrap();
    eventually("the first line", || agent.attach(&id, 0, false).stdout() == "one\n");
    overtake(&agent);
    let _ = client.send_data(b"two\n");
    assert_eq!(finish(&mut client).unwrap_err().code, ErrorCode::Fenced);
    let status = agent.status(&id);
    assert_eq!((status.stdin_bytes, status.state), (4, ExecState::Running));
    // An empty upload that only closes is a change too.
    let close = Request::ExecStdin { fence: newer_fence(), id: id.clone(), offset: 4, close: true };
    agent.connect().upload(&close, b"").unwrap();
    let output = agent.output(&id);
    assert_eq!((output.stdout().as_str(), output.state()), ("one\n", ExecState::Exited { code: 0 }));
}
