//! Starting a command.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use rustix::pty::OpenptFlags;
use viv_agent::output::Log;
use viv_agent::proto::{AgentError, ErrorCode, Fence};
use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, Stream};

use crate::agent::{Agent, lock};
use crate::error::{Result, error, refused, refused_io, sentence, words};
use crate::exec::cgroup::Cgroup;
use crate::exec::handshake::{self, Handshake, KeptBy, Started, Unheard};
use crate::exec::kill::Held;
use crate::exec::plan::{NoPlan, Plan};
use crate::exec::pump::{Entry, Source};
use crate::exec::stdin::End;
use crate::exec::table::{Entered, Role};
use crate::exec::tag::Tag;
use crate::exec::user::{Account, Database};
use crate::exec::{Execution, Process, child, monitor, set_size};
use crate::sys::{self, Cloned, Keeper};

/// How long a repeated start waits for the first one: until that is done or has been given up.
const START_PATIENCE: Duration = handshake::PATIENCE.saturating_add(Duration::from_secs(5));

/// Why a command does not run.
enum NotStarted {
    /// For its own sake; this is its final state.
    Failed(String),
    /// For ours; it can be tried again.
    Refused(AgentError),
    /// It was cancelled before it ran.
    Cancelled,
}

impl From<Unheard> for NotStarted {
    fn from(unheard: Unheard) -> Self {
        match unheard {
            Unheard::Late => {
                Self::Failed(format!("it could not be started within {} seconds", handshake::PATIENCE.as_secs()))
            }
            Unheard::Cancelled => Self::Cancelled,
        }
    }
}

impl From<NoPlan> for NotStarted {
    fn from(no_plan: NoPlan) -> Self {
        match no_plan {
            NoPlan::Invalid(error) => Self::Refused(error),
            NoPlan::Failed(what) => Self::Failed(what),
        }
    }
}

fn refuse(what: &str) -> impl Fn(Errno) -> NotStarted {
    move |errno| NotStarted::Refused(refused(what, errno))
}

fn refuse_io(what: &str) -> impl Fn(std::io::Error) -> NotStarted {
    move |cause| NotStarted::Refused(refused_io(what, &cause))
}

/// Starts an execution, or finds it started.
pub(crate) fn start(agent: &'static Agent, fence: &Fence, id: ExecutionId, spec: &ExecSpec) -> Result<ExecStatus> {
    agent.fencing.check(fence)?;
    let folder = if spec.transient { viv_agent::proto::TRANSIENT } else { viv_agent::proto::EXECUTIONS };
    let dir = agent.places.run.join(folder).join(id.as_str());
    let execution = match agent.executions.enter(Execution::new(id, digest(spec), dir, spec))? {
        Entered::New(execution) => execution,
        Entered::Known(execution) => {
            // Somebody else is at it, or it has long been done.
            execution.wait_until(START_PATIENCE, |inner| inner.state.is_some());
            return Ok(execution.status());
        }
    };
    match launch(agent, &execution, spec) {
        Ok(()) => Ok(execution.status()),
        Err(NotStarted::Failed(what)) => Ok(never_ran(agent, &execution, ExecState::Failed { what: sentence(what) })),
        Err(NotStarted::Cancelled) => Ok(never_ran(agent, &execution, ExecState::Cancelled)),
        Err(NotStarted::Refused(refusal)) => {
            execution.set_never_ran(ExecState::Failed { what: refusal.message.clone() });
            agent.executions.withdraw(&execution);
            Err(refusal)
        }
    }
}

fn never_ran(agent: &Agent, execution: &Execution, state: ExecState) -> ExecStatus {
    execution.set_never_ran(state);
    agent.executions.note_ended(agent, execution);
    execution.status()
}

fn digest(spec: &ExecSpec) -> [u64; 2] {
    let json = serde_json::to_vec(spec).unwrap_or_default();
    [0_u8, 1].map(|salt| {
        let mut hasher = DefaultHasher::new();
        (salt, &json).hash(&mut hasher);
        hasher.finish()
    })
}

fn launch(agent: &'static Agent, execution: &Arc<Execution>, spec: &ExecSpec) -> std::result::Result<(), NotStarted> {
    make_dir(agent, execution)?;
    let account = Database::read(&agent.places.root).find(spec.user.as_deref()).map_err(NotStarted::Failed)?;
    let mut plan = Plan::new(agent, spec, &account)?;
    let seat = agent.pump.prepare(agent).map_err(refuse_io("output"))?;
    let bytes_max = spec.output_bytes_max.unwrap_or(agent.config.output_bytes_max);
    let log = Log::create(&execution.dir(), bytes_max).map_err(refuse_io("output"))?;
    let stdio = Stdio::open(spec, &account).map_err(refuse("standard input and output"))?;
    let (report, report_child) = pipe_with(PipeFlags::CLOEXEC).map_err(refuse("pipe"))?;
    plan.stdio = stdio.child.each_ref().map(AsRawFd::as_raw_fd);
    plan.report = report_child.as_raw_fd();
    let oom_kills = agent.control.oom_kills();

    let (started, ties) = if let Some(cgroup) = agent.control.cgroup() {
        (spawn_in_cgroup(agent, execution, &plan, cgroup)?, None)
    } else if agent.origin.has_subreapers {
        let (started, ties) = spawn_monitor(agent, execution, &mut plan)?;
        (started, Some(ties))
    } else {
        (spawn_tagged(agent, execution, &mut plan)?, None)
    };
    // The child's ends must be its alone, or their closing would go unseen.
    drop((report_child, stdio.child));
    let running = await_exec(agent, execution, spec, &started, ties, &report).and_then(|(process, link)| {
        execution.input.open(stdio.input);
        if execution.set_running(process, stdio.terminal, spec.limit_ms, oom_kills) {
            Ok(link)
        } else {
            execution.input.close();
            Err(NotStarted::Cancelled)
        }
    });
    let link = match running {
        Ok(link) => link,
        // It may be anywhere before its exec, even if it failed; none of it is left behind.
        Err(why) => match started.abandon(agent, execution) {
            Ok(()) => return Err(why),
            Err(unverifiable) => return Err(NotStarted::Failed(unverifiable.message)),
        },
    };
    let mut sources = stdio.sources;
    sources.extend(link.map(|link| Source::link(Arc::new(link))));
    seat.add(Entry::new(Arc::clone(execution), log, sources));
    // A quick command may have ended before the pump knew of it.
    if lock(&execution.inner).leader_exit.is_some() {
        agent.pump.finish(execution);
    }
    agent.wake.ring();
    Ok(())
}

fn make_dir(agent: &Agent, execution: &Execution) -> std::result::Result<(), NotStarted> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(execution.dir()) {
        Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Err(NotStarted::Refused(error(
            ErrorCode::Conflict,
            format!("{} ran here before this agent did", execution.id()),
        ))),
        // Somebody unmounted what we share with the host. That is our trouble, and nothing that was asked for.
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            Err(NotStarted::Refused(error(ErrorCode::Failed, "the directory for its output is gone")))
        }
        made => made.map_err(refuse_io("directory for its output")),
    }?;
    if agent.origin.keeper == Keeper::Seen {
        // With what is in it: root inside sees it open, but may not open it again.
        let id = Some(agent.config.keeper_id);
        std::os::unix::fs::chown(execution.dir(), id, id).map_err(refuse_io("directory for its output"))?;
    }
    Ok(())
}

/// Both ends of everything that a command reads and writes.
struct Stdio {
    child: [OwnedFd; 3],
    input: Option<End>,
    sources: Vec<Source>,
    terminal: Option<Arc<OwnedFd>>,
}

impl Stdio {
    fn open(spec: &ExecSpec, account: &Account) -> rustix::io::Result<Self> {
        match spec.tty {
            None => Self::pipes(spec.stdin),
            Some(size) => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let master = rustix::pty::openpt(flags)?;
                rustix::pty::unlockpt(&master)?;
                let slave = other_end(&master, flags)?;
                // Without the right to give it away, the command is the same user as we are.
                let _ = rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(account.uid)), None);
                set_size(&master, size)?;
                set_nonblocking(&master)?;
                if !spec.stdin {
                    rustix::io::write(&master, &[super::stdin::END_OF_TRANSMISSION])?;
                }
                Self::on_terminal(Arc::new(master), &slave, spec.stdin)
            }
        }
    }

    fn on_terminal(master: Arc<OwnedFd>, slave: &OwnedFd, stdin: bool) -> rustix::io::Result<Self> {
        let again = || rustix::io::fcntl_dupfd_cloexec(slave, 3);
        Ok(Self {
            child: [again()?, again()?, again()?],
            input: stdin.then(|| End::Terminal(Arc::clone(&master))),
            sources: vec![Source::output(Stream::Stdout, Arc::clone(&master))],
            terminal: Some(master),
        })
    }

    fn pipes(stdin: bool) -> rustix::io::Result<Self> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC);
        let ((stdin_child, input), (output, output_child), (errors, errors_child)) = (pipe()?, pipe()?, pipe()?);
        for ours in [&input, &output, &errors] {
            set_nonblocking(ours)?;
        }
        let sources = [(Stream::Stdout, output), (Stream::Stderr, errors)];
        Ok(Self {
            child: [stdin_child, output_child, errors_child],
            // Without input the other end closes here, and the command reads end-of-file: /dev/null may not exist.
            input: stdin.then_some(End::Pipe(input)),
            sources: sources.into_iter().map(|(stream, fd)| Source::output(stream, Arc::new(fd))).collect(),
            terminal: None,
        })
    }
}

/// The command's end of a terminal.
fn other_end(master: &OwnedFd, flags: OpenptFlags) -> rustix::io::Result<OwnedFd> {
    match rustix::pty::ioctl_tiocgptpeer(master, flags) {
        // gVisor knows it by name only. The name is the kernel's: nobody inside can mount anything there.
        Err(Errno::NOTTY) => {
            let name = rustix::pty::ptsname(master, Vec::new())?;
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::open(name.as_c_str(), flags, rustix::fs::Mode::empty())
        }
        opened => opened,
    }
}

fn set_nonblocking(fd: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// Waits until the child has become its command.
fn await_exec(
    agent: &Agent,
    execution: &Execution,
    spec: &ExecSpec,
    started: &Started,
    ties: Option<Ties>,
    report: &OwnedFd,
) -> std::result::Result<(Process, Option<OwnedFd>), NotStarted> {
    let mut handshake = Handshake::new(execution);
    let tree = started.tree();
    let (process, link) = match ties {
        None => (Process { leader: Some(Arc::clone(&started.first)), pid: started.pid, tree }, None),
        Some(ties) => {
            let (pid, leader) = release_leader(&mut handshake, &ties)?;
            (Process { leader: Some(Arc::new(leader)), pid, tree }, Some(ties.link))
        }
    };
    let mut failure = [0; child::REPORT_BYTES];
    if handshake.hear(report, &mut failure)? {
        let workdir = spec.cwd.as_deref().unwrap_or(&agent.config.workdir);
        let user = spec.user.as_deref().unwrap_or("root");
        return Err(NotStarted::Failed(child::explain(failure, &spec.argv[0], workdir, user)));
    }
    Ok((process, link))
}

fn spawn_in_cgroup(
    agent: &Agent,
    execution: &Arc<Execution>,
    plan: &Plan,
    cgroup: Arc<Cgroup>,
) -> std::result::Result<Started, NotStarted> {
    let name = execution.id();
    let name = name.as_str();
    let dir = cgroup.make(name).map_err(refuse_io("cgroup of the execution"))?;
    let cloned = {
        let _ids = cgroup.as_keeper().map_err(refuse_io("cgroup of the execution"))?;
        clone_registered(agent, execution, Role::Leader, Some(&dir), CommandItself(plan))
    };
    match cloned {
        Ok((pid, first)) => Ok(Started { pid, first: Arc::new(first), kept_by: KeptBy::Cgroup { cgroup, dir } }),
        Err(cause) => {
            cgroup.remove(name);
            Err(NotStarted::Refused(no_process(&cause)))
        }
    }
}

fn spawn_tagged(
    agent: &Agent,
    execution: &Arc<Execution>,
    plan: &mut Plan,
) -> std::result::Result<Started, NotStarted> {
    if !plan.set_groups {
        let why = "this kernel has neither cgroups nor subreapers, and groups cannot be set";
        return Err(NotStarted::Refused(error(ErrorCode::Unsupported, why)));
    }
    let tag = Tag::new().map_err(refuse_io("group of the execution"))?;
    plan.groups.push(tag.gid());
    let (pid, first) = clone_registered(agent, execution, Role::Tagged, None, CommandItself(plan))
        .map_err(|cause| NotStarted::Refused(no_process(&cause)))?;
    Ok(Started { pid, first: Arc::new(first), kept_by: KeptBy::Tag(tag) })
}

/// What connects us to a monitor and to the leader below it, which waits to be told to go.
struct Ties {
    go: OwnedFd,
    link: OwnedFd,
}

fn spawn_monitor(
    agent: &Agent,
    execution: &Arc<Execution>,
    plan: &mut Plan,
) -> std::result::Result<(Started, Ties), NotStarted> {
    let (go_child, go) = pipe_with(PipeFlags::CLOEXEC).map_err(refuse("pipe"))?;
    let (link, link_child) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(refuse("socket to the monitor"))?;
    plan.go = Some(go_child.as_raw_fd());
    let plan = &*plan;
    let keeper_id = agent.config.keeper_id;
    let in_child = Monitor { plan, link: link_child.as_raw_fd(), keeper_id };
    let (pid, first) = clone_registered(agent, execution, Role::Monitor, None, in_child)
        .map_err(|cause| NotStarted::Refused(no_process(&cause)))?;
    drop((go_child, link_child));
    Ok((Started { pid, first: Arc::new(first), kept_by: KeptBy::Monitor }, Ties { go, link }))
}

/// Waits for the leader to be there, and lets it go on.
fn release_leader(handshake: &mut Handshake<'_>, ties: &Ties) -> std::result::Result<(Pid, Held), NotStarted> {
    let mut message = [0; monitor::MESSAGE_BYTES];
    let leader = match handshake.hear(&ties.link, &mut message)?.then(|| monitor::Message::decode(message)) {
        Some(Some(monitor::Message::Leader(pid))) => Pid::from_raw(pid),
        _ => None,
    };
    let lost = || NotStarted::Refused(error(ErrorCode::Failed, "the monitor of the execution did not come up"));
    let pid = leader.ok_or_else(lost)?;
    // The leader waits for us and only the monitor could reap it, so this is it.
    let leader = Held::open(pid).map_err(refuse("the first process"))?;
    rustix::io::write(&ties.go, b"!").map_err(refuse("the first process"))?;
    set_nonblocking(&ties.link).map_err(refuse("socket to the monitor"))?;
    Ok((pid, leader))
}

fn no_process(cause: &std::io::Error) -> AgentError {
    match cause.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN) => error(ErrorCode::Exhausted, "the sandbox has no process left"),
        Some(errno) => error(ErrorCode::Failed, format!("no process could be started: {}", words(errno))),
        None => error(ErrorCode::Failed, "no process could be started"),
    }
}

/// What a new process does; it never comes back.
trait InChild {
    fn run(self) -> !;
}

struct CommandItself<'p>(&'p Plan);

impl InChild for CommandItself<'_> {
    fn run(self) -> ! {
        child::run(self.0)
    }
}

struct Monitor<'p> {
    plan: &'p Plan,
    link: RawFd,
    keeper_id: u32,
}

impl InChild for Monitor<'_> {
    fn run(self) -> ! {
        monitor::run(self.plan, self.link, self.keeper_id)
    }
}

#[expect(unsafe_code, reason = "the one place that starts processes")]
fn clone_registered(
    agent: &Agent,
    execution: &Arc<Execution>,
    role: Role,
    cgroup: Option<&OwnedFd>,
    in_child: impl InChild,
) -> std::io::Result<(Pid, Held)> {
    let mut children = lock(&agent.executions.children);
    // SAFETY: both users of this run code that keeps to async-signal-safe calls and ends in exec or exit.
    match unsafe { sys::clone_process(cgroup.map(AsFd::as_fd)) }? {
        Cloned::Child => in_child.run(),
        Cloned::Parent { pid, pidfd } => {
            children.insert(pid, (Arc::clone(execution), role));
            Ok((pid, Held::of_child(pid, pidfd)))
        }
    }
}
