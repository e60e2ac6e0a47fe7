//! Executions: one command each, with everything that comes of it.
//!
//! ```text
//!   start ──► child / monitor ──► running ──leader exits──────────────► pump drains ──► final
//!                                    └─cancel, time limit──► tree gone ──►┘
//! ```
//!
//! A leader's exit ends its execution, and what it left in the background
//! lives on. A cancel or a time limit ends it only once its whole tree was
//! seen to be gone (X3).

pub(crate) mod attach;
pub(crate) mod cgroup;
pub(crate) mod child;
pub(crate) mod end;
pub(crate) mod handshake;
pub(crate) mod kill;
pub(crate) mod monitor;
pub(crate) mod plan;
pub(crate) mod pump;
pub(crate) mod start;
pub(crate) mod stdin;
pub(crate) mod table;
pub(crate) mod tag;
pub(crate) mod user;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use rustix::termios::Winsize;
use viv_agent::output;
use viv_agent::proto::ErrorCode;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, TtySize};
use viv_core::{ExecutionId, SandboxId};

use crate::agent::{Agent, Deadline, Wake, lock};
use crate::error::{Result, error, invalid, refused, refused_io, say};
use crate::sys::{self, Exit};

use end::Ending;

/// One execution.
pub(crate) struct Execution {
    /// What it is called, and with that where it is; both change when it is copied with its sandbox.
    place: Mutex<Place>,
    /// Tells two specs apart without keeping them.
    pub(crate) digest: [u64; 2],
    /// Whether it is forgotten once it has ended and was read.
    pub(crate) transient: bool,
    /// The beginning of its command, told with its status.
    argv: Vec<String>,
    /// Whether it is a service.
    pub(crate) detached: bool,
    pub(crate) started_at_ms: u64,
    /// Bytes of output so far.
    pub(crate) written: AtomicU64,
    /// Its standard input.
    pub(crate) input: stdin::Input,
    /// Whether its cgroup was seen to be empty, or removed, which only works for an empty one.
    pub(crate) cgroup_empty: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
    followers: Mutex<Vec<Weak<Follower>>>,
}

/// What an execution is called, and where its status and output are.
struct Place {
    id: ExecutionId,
    dir: PathBuf,
}

/// What changes under the lock.
struct Inner {
    /// `None` while it is being started.
    state: Option<ExecState>,
    ended_at_ms: Option<u64>,
    process: Option<Process>,
    terminal: Option<Arc<OwnedFd>>,
    deadline: Option<Deadline>,
    ending: Option<Ending>,
    /// Whether a thread is at killing it.
    killing: bool,
    leader_exit: Option<Exit>,
    /// Whether its monitor ended. Not part of `process`, since a quick one ends before that is known.
    monitor_ended: bool,
    /// Counter of memory kills at its start.
    oom_kills_before: Option<u64>,
    /// Whether a client sent SIGKILL itself.
    kill_requested: bool,
}

/// The processes of an execution.
pub(crate) struct Process {
    /// Gone with the leader: an ended execution holds no descriptor.
    pub(crate) leader: Option<Arc<kill::Held>>,
    pub(crate) pid: Pid,
    pub(crate) tree: Tree,
}

/// By what its processes are kept together.
#[derive(Clone, Copy)]
pub(crate) enum Tree {
    /// The cgroup named after it.
    Cgroup,
    /// A process of ours that inherits every orphan, and ends last of all.
    Monitor { pid: Pid },
    /// A group that only they are in.
    Tag(tag::Tag),
}

/// Somebody who waits for output or for the end.
pub(crate) struct Follower {
    pub(crate) wake: Wake,
    armed: AtomicBool,
}

impl Follower {
    /// From now on the next change wakes.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl Execution {
    pub(crate) fn new(id: ExecutionId, digest: [u64; 2], dir: PathBuf, spec: &ExecSpec) -> Self {
        let inner = Inner {
            state: None,
            ended_at_ms: None,
            process: None,
            terminal: None,
            deadline: None,
            ending: None,
            killing: false,
            leader_exit: None,
            monitor_ended: false,
            oom_kills_before: None,
            kill_requested: false,
        };
        Self {
            place: Mutex::new(Place { id, dir }),
            digest,
            transient: spec.transient,
            argv: spec.told_argv(),
            detached: spec.detached,
            started_at_ms: sys::wall_ms(),
            written: AtomicU64::new(0),
            input: stdin::Input::default(),
            cgroup_empty: AtomicBool::new(false),
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            followers: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn id(&self) -> ExecutionId {
        lock(&self.place).id.clone()
    }

    pub(crate) fn dir(&self) -> PathBuf {
        lock(&self.place).dir.clone()
    }

    /// It is the copy of another one, in the sandbox that this is now: it gets an id of its own, and its output goes on
    /// under that. Whoever has its files open goes on with them.
    fn rename_into(&self, sandbox: &SandboxId) -> ExecutionId {
        let mut place = lock(&self.place);
        let id = place.id.copied_into(sandbox);
        let dir = place.dir.with_file_name(id.as_str());
        match std::fs::rename(&place.dir, &dir) {
            Ok(()) => place.dir = dir,
            Err(cause) => say(&format!("output of {id} stays where it was: {cause}")),
        }
        place.id = id.clone();
        id
    }

    /// Its status on disk has its new id.
    fn keep_renamed(&self) {
        let inner = lock(&self.inner);
        if inner.state.is_some() {
            self.keep_status(&self.status_of(&inner));
        }
    }

    pub(crate) fn status(&self) -> ExecStatus {
        self.status_of(&lock(&self.inner))
    }

    fn status_of(&self, inner: &Inner) -> ExecStatus {
        let running = inner.process.as_ref().filter(|_| inner.leader_exit.is_none());
        ExecStatus {
            id: self.id(),
            state: inner.state.clone().unwrap_or(ExecState::Running),
            started_at_ms: self.started_at_ms,
            ended_at_ms: inner.ended_at_ms,
            output_bytes: self.written.load(Ordering::Acquire),
            stdin_bytes: self.input.taken_bytes(),
            pid: running.map(|process| process.pid.as_raw_nonzero().get() as u32),
            argv: self.argv.clone(),
            detached: self.detached,
        }
    }

    pub(crate) fn is_final(&self) -> bool {
        lock(&self.inner).state.as_ref().is_some_and(ExecState::is_final)
    }

    /// Waits until `ready` says so; false when it did not in time.
    fn wait_until(&self, patience: Duration, ready: impl Fn(&Inner) -> bool) -> bool {
        let deadline = Instant::now() + patience;
        let mut inner = lock(&self.inner);
        while !ready(&inner) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        true
    }

    /// Its command runs. The status is durable before anybody is told. False when it is to be ended already.
    fn set_running(
        &self,
        mut process: Process,
        terminal: Option<Arc<OwnedFd>>,
        limit: Option<u64>,
        oom: Option<u64>,
    ) -> bool {
        let mut inner = lock(&self.inner);
        if inner.ending.is_some() {
            return false;
        }
        if inner.leader_exit.is_some() {
            process.leader = None;
        }
        inner.process = Some(process);
        inner.terminal = terminal;
        inner.deadline = limit.map(Deadline::after);
        inner.oom_kills_before = oom;
        self.keep_status(&self.status_of(&inner));
        inner.state = Some(ExecState::Running);
        drop(inner);
        self.changed.notify_all();
        true
    }

    /// It never ran, and this is its final state.
    fn set_never_ran(&self, state: ExecState) {
        let mut inner = lock(&self.inner);
        inner.ended_at_ms = Some(sys::wall_ms());
        inner.state = Some(state);
        self.keep_status(&self.status_of(&inner));
        drop(inner);
        self.changed.notify_all();
    }

    fn keep_status(&self, status: &ExecStatus) {
        // Nobody reads it once the agent is gone.
        if self.transient {
            return;
        }
        if let Err(cause) = output::write_status(&self.dir(), status) {
            say(&format!("status of {} not kept: {cause}", self.id()));
        }
    }

    /// Its first process ended. The execution does too, unless it is being killed: then its tree must be gone first.
    pub(crate) fn leader_exited(self: &Arc<Self>, agent: &Agent, exit: Exit) {
        let mut inner = lock(&self.inner);
        if inner.leader_exit.is_some() {
            return;
        }
        inner.leader_exit = Some(exit);
        if let Some(process) = &mut inner.process {
            process.leader = None;
        }
        let finish = inner.ending.is_none();
        drop(inner);
        self.changed.notify_all();
        if finish {
            agent.pump.finish(self);
        }
    }

    /// The monitor ended, and everything below it before.
    pub(crate) fn tree_gone(&self) {
        lock(&self.inner).monitor_ended = true;
        self.changed.notify_all();
    }

    /// All output that was there at the end has been kept: the final status. Called by the pump.
    pub(crate) fn finalise(&self, agent: &Agent) {
        let mut inner = lock(&self.inner);
        if inner.state.as_ref().is_some_and(ExecState::is_final) {
            return;
        }
        let state = match (inner.ending, inner.leader_exit) {
            (Some(Ending::Cancelled), _) => ExecState::Cancelled,
            (Some(Ending::TimedOut), _) => ExecState::TimedOut,
            (None, Some(Exit::Code(code))) => ExecState::Exited { code },
            (None, Some(Exit::Signal(signal))) => {
                let oom_kills = agent.control.oom_kills();
                let grew = inner.oom_kills_before.zip(oom_kills).is_some_and(|(before, now)| now > before);
                if signal == libc::SIGKILL && grew && !inner.kill_requested {
                    ExecState::OomKilled
                } else {
                    ExecState::Signalled { signal }
                }
            }
            (None, None) => return say("an execution was to be finished whose leader lives"),
        };
        if state == ExecState::OomKilled {
            let pid = inner.process.as_ref().map(|process| process.pid.as_raw_nonzero().get() as u32);
            agent.control.report_oom_kill(&self.id(), pid);
        }
        let status = ExecStatus { state: state.clone(), ended_at_ms: Some(sys::wall_ms()), ..self.status_of(&inner) };
        self.keep_status(&status);
        // Counted as ended before anybody can hear of its end.
        agent.executions.note_ended(agent, self);
        inner.state = Some(state);
        inner.ended_at_ms = status.ended_at_ms;
        inner.deadline = None;
        inner.terminal = None;
        drop(inner);
        self.input.close();
        self.changed.notify_all();
        self.wake_followers();
    }

    /// Output came after the end, from what was left in the background, and now no more will come.
    pub(crate) fn keep_late_status(&self) {
        let inner = lock(&self.inner);
        if inner.state.as_ref().is_some_and(ExecState::is_final) {
            self.keep_status(&self.status_of(&inner));
        }
    }

    pub(crate) fn follow(&self) -> std::io::Result<Arc<Follower>> {
        let follower = Arc::new(Follower { wake: Wake::new()?, armed: AtomicBool::new(false) });
        let mut followers = lock(&self.followers);
        followers.retain(|other| other.strong_count() > 0);
        followers.push(Arc::downgrade(&follower));
        Ok(follower)
    }

    /// Whether somebody reads its output.
    pub(crate) fn is_followed(&self) -> bool {
        lock(&self.followers).iter().any(|follower| follower.strong_count() > 0)
    }

    pub(crate) fn wake_followers(&self) {
        for follower in lock(&self.followers).iter().filter_map(Weak::upgrade) {
            if follower.armed.swap(false, Ordering::SeqCst) {
                follower.wake.ring();
            }
        }
    }

    /// Signals the leader, and only it.
    pub(crate) fn signal(&self, signal: i32) -> Result<()> {
        if !(1..=64).contains(&signal) {
            return Err(invalid(format!("there is no signal {signal}")));
        }
        let mut inner = lock(&self.inner);
        let Some(leader) = inner.process.as_ref().and_then(|process| process.leader.clone()) else {
            return Err(error(ErrorCode::Conflict, "the execution has ended"));
        };
        inner.kill_requested |= signal == libc::SIGKILL;
        drop(inner);
        match leader.send(signal) {
            Err(cause) if cause.raw_os_error() == Some(libc::ESRCH) => {
                Err(error(ErrorCode::Conflict, "the execution has ended"))
            }
            sent => sent.map_err(|cause| refused_io("signal", &cause)),
        }
    }

    pub(crate) fn resize(&self, size: TtySize) -> Result<()> {
        let terminal = lock(&self.inner).terminal.clone();
        let Some(terminal) = terminal else {
            let why = if self.is_final() { "the execution has ended" } else { "it runs without a terminal" };
            return Err(error(ErrorCode::Conflict, why));
        };
        set_size(&terminal, size).map_err(|errno| refused("resize", errno))
    }
}

/// Sets the size of a terminal.
fn set_size(terminal: &OwnedFd, size: TtySize) -> rustix::io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(terminal, size)
}
