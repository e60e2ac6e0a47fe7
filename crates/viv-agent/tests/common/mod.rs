//! Runs the real agent as an ordinary process and talks to it.
#![allow(dead_code, reason = "every test binary uses a part of it")]

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use viv_agent::frame::{self, ChunkHeader, HEADER_BYTES, Kind};
use viv_agent::proto::*;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, Stream};
use viv_core::{ExecutionId, FencingToken, Generation};

/// Longest wait for anything that should happen at once.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// An id that no test runs anything as.
pub(crate) const KEEPER_ID: u32 = 64_999;

static COUNTER: AtomicU64 = AtomicU64::new(0);

fn unique() -> u64 {
    COUNTER.fetch_add(1, Ordering::Relaxed)
}

/// How the agent keeps trees together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Killing {
    Cgroup,
    Subreaper,
}

/// Both, or the one that this machine allows.
pub(crate) fn killings() -> Vec<Killing> {
    if cgroup_root().is_some() { vec![Killing::Cgroup, Killing::Subreaper] } else { vec![Killing::Subreaper] }
}

fn cgroup_root() -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    let roots = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(PathBuf::from);
    roots.into_iter().find(|root| is_root && root.join("cgroup.procs").exists())
}

/// Waits for something, and says what it was if it never came.
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !check() {
        assert!(Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A running agent. Everything of it goes when it is dropped.
pub(crate) struct TestAgent {
    pub(crate) child: Child,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) control: Option<Client>,
    pub(crate) cgroup: Option<PathBuf>,
}

impl TestAgent {
    pub(crate) fn start(killing: Killing) -> Self {
        Self::start_with(killing, |_| ())
    }

    pub(crate) fn start_with(killing: Killing, change: impl FnOnce(&mut AgentConfig)) -> Self {
        let mut agent = Self::start_without_control(change);
        let cgroup = (killing == Killing::Cgroup).then(|| agent.make_cgroup());
        let descriptors: Vec<_> = cgroup.iter().map(|path| (Descriptor::Cgroup, open_dir(path))).collect();
        agent.cgroup = cgroup;
        agent.take_control(descriptors).unwrap();
        agent
    }

    /// As PID 1 of namespaces of its own; needs root. Its pid here is that of the program that made these.
    pub(crate) fn start_as_init(killing: Killing) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc", env!("CARGO_BIN_EXE_viv-agent")]);
        let mut agent = Self::start_by(command, |_| ());
        agent.cgroup = (killing == Killing::Cgroup).then(|| agent.make_cgroup());
        if let (Some(cgroup), [init]) = (&agent.cgroup, agent.descendants().as_slice()) {
            std::fs::write(cgroup.join("cgroup.procs"), init.to_string()).unwrap();
        }
        let descriptors: Vec<_> = agent.cgroup.iter().map(|path| (Descriptor::Cgroup, open_dir(path))).collect();
        agent.take_control(descriptors).unwrap();
        agent
    }

    pub(crate) fn start_without_control(change: impl FnOnce(&mut AgentConfig)) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_viv-agent")), change)
    }

    fn start_by(mut command: Command, change: impl FnOnce(&mut AgentConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("home/run");
        std::fs::create_dir_all(&run).unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        let mut config = AgentConfig {
            identity: Identity { sandbox: "sbx_test".parse().unwrap(), generation: Generation(3) },
            token: FencingToken(10),
            env: [("FROM_CONFIG".to_owned(), "yes".to_owned())].into(),
            workdir: "/tmp".to_owned(),
            keeper_id: if rustix::process::geteuid().is_root() { KEEPER_ID } else { 0 },
            output_bytes_max: 64 << 20,
            ended_executions_max: 512,
            transient_kept_ms: 30_000,
            open_files: None,
            processes: None,
            confine: true,
            packages: false,
        };
        change(&mut config);
        std::fs::write(run.join(CONFIG), serde_json::to_vec(&config).unwrap()).unwrap();
        let child = command
            .args(["--home".as_ref(), dir.path().join("home").as_os_str()])
            .args(["--root".as_ref(), dir.path().join("root").as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Self { child, dir, control: None, cgroup: None };
        eventually("the socket", || UnixStream::connect(agent.socket()).is_ok());
        agent
    }

    /// The agent must live in it: the kernel wants the right to write in the common ancestor too.
    pub(crate) fn make_cgroup(&self) -> PathBuf {
        let name = format!("viv-test-agent-{}-{}", std::process::id(), unique());
        let path = cgroup_root().expect("a cgroup filesystem").join(name);
        std::fs::create_dir(&path).unwrap();
        for own in [&path, &path.join("cgroup.procs")] {
            std::os::unix::fs::chown(own, Some(KEEPER_ID), Some(KEEPER_ID)).unwrap();
        }
        std::fs::write(path.join("cgroup.procs"), self.child.id().to_string()).unwrap();
        path
    }

    pub(crate) fn take_control(&mut self, descriptors: Vec<(Descriptor, OwnedFd)>) -> Result<Hello, AgentError> {
        let mut control = self.connect();
        let (kinds, fds): (Vec<_>, Vec<_>) = descriptors.into_iter().unzip();
        control.send_with(
            &Request::Control { descriptors: kinds, hears: vec![AgentMessage::OOM_KILLED.to_owned()] },
            &fds,
        );
        let Answer::Hello(hello) = control.reply()? else { panic!("not a hello") };
        self.control = Some(control);
        Ok(hello)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("home/run").join(SOCKET)
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub(crate) fn exec_dir(&self, id: &ExecutionId) -> PathBuf {
        self.dir.path().join("home/run").join(EXECUTIONS).join(id.as_str())
    }

    pub(crate) fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Client { stream }
    }

    pub(crate) fn call(&self, request: &Request) -> Result<Answer, AgentError> {
        self.connect().call(request)
    }

    pub(crate) fn start_exec(&self, spec: &ExecSpec) -> ExecutionId {
        let id = new_id();
        let status = self.exec_start(&id, spec).unwrap();
        assert!(!matches!(status.state, ExecState::Failed { .. }), "{status:?}");
        id
    }

    pub(crate) fn exec_start(&self, id: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus, AgentError> {
        match self.call(&Request::ExecStart { fence: fence(), id: id.clone(), spec: spec.clone() })? {
            Answer::Exec(status) => Ok(status),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn status(&self, id: &ExecutionId) -> ExecStatus {
        match self.call(&Request::ExecStatus { id: id.clone() }).unwrap() {
            Answer::Exec(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn cancel(&self, id: &ExecutionId) -> ExecStatus {
        match self.call(&Request::ExecCancel { fence: fence(), id: id.clone() }).unwrap() {
            Answer::Exec(status) => status,
            other => panic!("{other:?}"),
        }
    }

    /// Follows to the end.
    pub(crate) fn output(&self, id: &ExecutionId) -> Output {
        self.attach(id, 0, true)
    }

    pub(crate) fn attach(&self, id: &ExecutionId, offset: u64, follow: bool) -> Output {
        let mut client = self.connect();
        client.call(&Request::ExecAttach { id: id.clone(), offset, follow }).unwrap();
        let mut output = Output::default();
        loop {
            match client.stream_item() {
                StreamItem::Chunk(header, data) => output.chunks.push((header, data)),
                StreamItem::Event(StreamEvent::Cut { from, to }) => output.cuts.push((from, to)),
                StreamItem::Event(StreamEvent::End(status)) => {
                    output.end = Some(status);
                    return output;
                }
            }
        }
    }

    /// Runs a shell script to its end.
    pub(crate) fn shell(&self, script: &str) -> Output {
        self.output(&self.start_exec(&shell(script)))
    }

    /// Every process below the agent that is not the agent's own monitor and not a zombie.
    pub(crate) fn descendants(&self) -> Vec<u32> {
        descendants(self.child.id())
    }

    pub(crate) fn memory_kib(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        // Its loss ends the agent and everything with it.
        drop(self.control.take());
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let deadline = Instant::now() + Duration::from_secs(6);
            while self.child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Some(cgroup) = &self.cgroup {
            remove_cgroup(cgroup);
        }
    }
}

/// Removes a cgroup and everything in it.
pub(crate) fn remove_cgroup(cgroup: &Path) {
    let deadline = Instant::now() + Duration::from_secs(6);
    while std::fs::exists(cgroup).unwrap_or(false) && Instant::now() < deadline {
        let _ = std::fs::write(cgroup.join("cgroup.kill"), "1");
        for entry in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
            let _ = std::fs::remove_dir(entry.path());
        }
        let _ = std::fs::remove_dir(cgroup);
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Every living process below a pid.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 1..].split_whitespace().collect();
        parents.push((pid, fields[1].parse::<u32>().unwrap(), fields[0] == "Z"));
    }
    let (mut found, mut waiting) = (Vec::new(), vec![root]);
    while let Some(parent) = waiting.pop() {
        for &(pid, _, zombie) in parents.iter().filter(|(_, p, _)| *p == parent) {
            waiting.push(pid);
            if !zombie {
                found.push(pid);
            }
        }
    }
    found
}

pub(crate) fn open_dir(path: &Path) -> OwnedFd {
    std::fs::File::open(path).unwrap().into()
}

pub(crate) fn new_id() -> ExecutionId {
    format!("exe_{}x{}", std::process::id(), unique()).parse().unwrap()
}

/// A fence that the agent accepts, with an operation of its own.
pub(crate) fn fence() -> Fence {
    Fence {
        operation: format!("op_{}x{}", std::process::id(), unique()).parse().unwrap(),
        generation: Generation(3),
        token: FencingToken(10),
    }
}

pub(crate) fn spec(argv: &[&str]) -> ExecSpec {
    ExecSpec { argv: argv.iter().map(|&text| text.to_owned()).collect(), ..ExecSpec::default() }
}

pub(crate) fn shell(script: &str) -> ExecSpec {
    spec(&["/bin/sh", "-c", script])
}

/// What an execution wrote.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) chunks: Vec<(ChunkHeader, Vec<u8>)>,
    pub(crate) cuts: Vec<(u64, u64)>,
    pub(crate) end: Option<ExecStatus>,
}

impl Output {
    pub(crate) fn state(&self) -> ExecState {
        self.end.clone().unwrap().state
    }

    pub(crate) fn text(&self, stream: Stream) -> String {
        let of_stream = self.chunks.iter().filter(|(header, _)| header.stream == stream);
        String::from_utf8_lossy(&of_stream.flat_map(|(_, data)| data.clone()).collect::<Vec<_>>()).into_owned()
    }

    pub(crate) fn stdout(&self) -> String {
        self.text(Stream::Stdout)
    }
}

#[derive(Debug)]
pub(crate) enum StreamItem {
    Chunk(ChunkHeader, Vec<u8>),
    Event(StreamEvent),
}

/// A connection.
pub(crate) struct Client {
    pub(crate) stream: UnixStream,
}

impl Client {
    pub(crate) fn send<T: Serialize>(&mut self, message: &T) {
        self.send_json(&serde_json::to_vec(message).unwrap());
    }

    pub(crate) fn send_json(&mut self, json: &[u8]) {
        self.stream.write_all(&frame::encode_header(Kind::Json, json.len())).unwrap();
        self.stream.write_all(json).unwrap();
    }

    pub(crate) fn send_with(&mut self, request: &Request, descriptors: &[OwnedFd]) {
        let json = serde_json::to_vec(request).unwrap();
        let header = frame::encode_header(Kind::Json, json.len());
        let fds: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let parts = [IoSlice::new(&header), IoSlice::new(&json)];
        let sent = sendmsg(&self.stream, &parts, &mut control, SendFlags::empty()).unwrap();
        assert_eq!(sent, header.len() + json.len());
    }

    pub(crate) fn call(&mut self, request: &Request) -> Result<Answer, AgentError> {
        self.send(request);
        self.reply()
    }

    pub(crate) fn frame(&mut self) -> io::Result<(Kind, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let (kind, length) = frame::decode_header(header).unwrap();
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload)?;
        Ok((kind, payload))
    }

    pub(crate) fn json<T: serde::de::DeserializeOwned>(&mut self) -> T {
        let (kind, payload) = self.frame().unwrap();
        assert_eq!(kind, Kind::Json);
        serde_json::from_slice(&payload).unwrap()
    }

    pub(crate) fn reply(&mut self) -> Result<Answer, AgentError> {
        match self.json() {
            Reply::Ok(answer) => Ok(answer),
            Reply::Error(error) => Err(error),
        }
    }

    pub(crate) fn stream_item(&mut self) -> StreamItem {
        match self.frame().unwrap() {
            (Kind::Data, payload) => {
                let (header, data) = ChunkHeader::decode(&payload).unwrap();
                StreamItem::Chunk(header, data.to_vec())
            }
            (Kind::Json, payload) => StreamItem::Event(serde_json::from_slice(&payload).unwrap()),
            (Kind::End, _) => panic!("an end that nobody asked for"),
        }
    }

    pub(crate) fn send_data(&mut self, data: &[u8]) -> io::Result<()> {
        for piece in data.chunks(100_000) {
            self.stream.write_all(&frame::encode_header(Kind::Data, piece.len()))?;
            self.stream.write_all(piece)?;
        }
        Ok(())
    }

    pub(crate) fn upload(&mut self, request: &Request, data: &[u8]) -> Result<Answer, AgentError> {
        self.send(request);
        // It may be refused before it was all sent; the reply says so.
        let _ = self.send_data(data).and_then(|()| self.stream.write_all(&frame::encode_header(Kind::End, 0)));
        self.reply()
    }

    /// Data up to the end, or the error in its place.
    pub(crate) fn download(&mut self) -> Result<Vec<u8>, AgentError> {
        let mut data = Vec::new();
        loop {
            match self.frame().unwrap() {
                (Kind::Data, payload) => data.extend(payload),
                (Kind::End, _) => return Ok(data),
                (Kind::Json, payload) => match serde_json::from_slice(&payload).unwrap() {
                    Reply::Error(error) => return Err(error),
                    Reply::Ok(answer) => panic!("{answer:?}"),
                },
            }
        }
    }
}
