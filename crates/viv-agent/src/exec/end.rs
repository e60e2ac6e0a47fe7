//! Ending an execution against its will: TERM, grace, KILL, and proof (X3).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use viv_agent::proto::ErrorCode;
use viv_core::exec::{ExecState, ExecStatus};

use crate::agent::{Agent, lock};
use crate::error::{Result, error, say};
use crate::exec::cgroup::{Cgroup, Removal, is_populated, pids};
use crate::exec::kill::{self, KILL_PATIENCE, LOOK_EVERY};
use crate::exec::tag::Tag;
use crate::exec::{Execution, Tree};

/// What SIGTERM gets before SIGKILL.
const GRACE: Duration = Duration::from_millis(500);

/// From the end of the tree to the final status: reaping and draining, both quick.
const FINISH_PATIENCE: Duration = Duration::from_secs(5);

/// For one that is still being started to be given up: killing takes longest, and that twice below a monitor.
const START_PATIENCE: Duration = FINISH_PATIENCE.saturating_add(KILL_PATIENCE).saturating_add(KILL_PATIENCE);

/// Why it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Cancelled,
    TimedOut,
}

/// What is to be done, as found under the lock.
enum Task {
    /// This thread kills it.
    Kill,
    /// It ends, by itself or by another thread.
    Await,
    /// It ended; only what it left behind is to be killed.
    Leftovers,
}

/// Ends an execution and its whole tree. If it had ended already, its state stays as it was.
pub(crate) fn end(agent: &Agent, execution: &Arc<Execution>, ending: Ending) -> Result<ExecStatus> {
    give_up_start(execution, ending);
    if !execution.wait_until(START_PATIENCE, |inner| inner.state.is_some()) {
        return Err(error(ErrorCode::Failed, "it is still being started, and will be ended then"));
    }
    match task(execution, ending) {
        Task::Kill => {
            let gone = kill_tree(agent, execution);
            lock(&execution.inner).killing = false;
            gone?;
            // The leader was killed with the rest; its exit is about to be reaped.
            if !execution.wait_until(FINISH_PATIENCE, |inner| inner.leader_exit.is_some()) {
                return Err(unverifiable(agent, execution, "its first process was never reaped"));
            }
            agent.pump.finish(execution);
            await_final(execution)
        }
        Task::Await => {
            let status = await_final(execution)?;
            if matches!(status.state, ExecState::Cancelled | ExecState::TimedOut) {
                return Ok(status);
            }
            kill_tree(agent, execution).map(|()| status)
        }
        Task::Leftovers => kill_tree(agent, execution).map(|()| execution.status()),
    }
}

/// One that is still being started never runs: whoever starts it ends what is there of it.
fn give_up_start(execution: &Execution, ending: Ending) {
    let mut inner = lock(&execution.inner);
    if inner.state.is_none() {
        inner.ending.get_or_insert(ending);
    }
}

fn task(execution: &Execution, ending: Ending) -> Task {
    let mut inner = lock(&execution.inner);
    if inner.state.as_ref().is_some_and(ExecState::is_final) {
        return Task::Leftovers;
    }
    let ended_by_itself = inner.leader_exit.is_some() && inner.ending.is_none();
    if inner.killing || ended_by_itself {
        return Task::Await;
    }
    inner.ending.get_or_insert(ending);
    inner.killing = true;
    inner.deadline = None;
    Task::Kill
}

fn await_final(execution: &Execution) -> Result<ExecStatus> {
    let patience = GRACE + KILL_PATIENCE + FINISH_PATIENCE;
    if execution.wait_until(patience, |inner| inner.state.as_ref().is_some_and(ExecState::is_final)) {
        Ok(execution.status())
    } else {
        Err(error(ErrorCode::Failed, format!("{} did not end in time", execution.id())))
    }
}

/// Kills every process of the execution; it returns well only when that was seen.
fn kill_tree(agent: &Agent, execution: &Arc<Execution>) -> Result<()> {
    let tree = lock(&execution.inner).process.as_ref().map(|process| process.tree);
    match tree {
        None => Ok(()),
        Some(Tree::Monitor { pid }) => kill_below_monitor(agent, execution, pid),
        Some(Tree::Cgroup) => kill_in_cgroup(agent, execution),
        Some(Tree::Tag(tag)) => kill_tagged(tag).map_err(|cause| unverifiable(agent, execution, &cause.to_string())),
    }
}

fn kill_in_cgroup(agent: &Agent, execution: &Arc<Execution>) -> Result<()> {
    if agent.executions.is_cgroup_empty(execution) {
        return Ok(());
    }
    let Some(cgroup) = agent.control.cgroup() else {
        return Err(unverifiable(agent, execution, "its cgroup cannot be reached any more"));
    };
    let dir = match cgroup.open(execution.id().as_str()) {
        // Removed just now by the main thread, which only works when nothing is in it. If that was not
        // us, its processes may be elsewhere: this may be another cgroup than the one it was started in.
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound && agent.executions.is_cgroup_empty(execution) => {
            return Ok(());
        }
        dir => dir.map_err(|cause| unverifiable(agent, execution, &cause.to_string()))?,
    };
    kill_cgroup(&cgroup, &dir).map_err(|cause| unverifiable(agent, execution, &cause.to_string()))?;
    // Nothing gets in there after its start.
    execution.cgroup_empty.store(true, Ordering::Release);
    if cgroup.remove(execution.id().as_str()) == Removal::Busy {
        agent.executions.linger(execution);
        agent.wake.ring();
    }
    Ok(())
}

fn kill_cgroup(cgroup: &Cgroup, dir: &OwnedFd) -> std::io::Result<()> {
    kill::signal_cgroup(dir, libc::SIGTERM)?;
    let grace_end = Instant::now() + GRACE;
    while is_populated(dir)? {
        if Instant::now() >= grace_end {
            return kill_cgroup_now(cgroup, dir);
        }
        std::thread::sleep(2 * LOOK_EVERY);
    }
    Ok(())
}

pub(super) fn kill_cgroup_now(cgroup: &Cgroup, dir: &OwnedFd) -> std::io::Result<()> {
    let at_once = cgroup.kill(dir)?;
    let mut deadline = Instant::now() + KILL_PATIENCE;
    let mut left = pids(dir)?.len();
    while is_populated(dir)? {
        if Instant::now() >= deadline {
            // Dying takes a turn on a processor, and on a busy machine a thousand take a while. They become fewer, or
            // something is wrong.
            let now = pids(dir)?.len();
            if now >= left {
                return Err(std::io::Error::other("processes outlive SIGKILL"));
            }
            (left, deadline) = (now, Instant::now() + KILL_PATIENCE);
        }
        if !at_once {
            kill::signal_cgroup(dir, libc::SIGKILL)?;
        }
        // Waiting for a notification instead takes ten times as long: the kernel limits their rate.
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

fn kill_below_monitor(agent: &Agent, execution: &Execution, monitor: rustix::process::Pid) -> Result<()> {
    let gone = |patience| execution.wait_until(patience, |inner| inner.monitor_ended);
    // Its pid is only its own until then.
    if gone(Duration::ZERO) {
        return Ok(());
    }
    let cannot_look = |cause: std::io::Error| unverifiable(agent, execution, &cause.to_string());
    kill::signal_below(monitor, libc::SIGTERM).map_err(cannot_look)?;
    if gone(GRACE) {
        return Ok(());
    }
    let deadline = Instant::now() + KILL_PATIENCE;
    while Instant::now() < deadline {
        kill::kill_below(monitor).map_err(cannot_look)?;
        // The monitor ends when nothing is left below it.
        if gone(20 * LOOK_EVERY) {
            return Ok(());
        }
    }
    Err(unverifiable(agent, execution, "processes outlive SIGKILL"))
}

fn kill_tagged(tag: Tag) -> std::io::Result<()> {
    kill::signal_tagged(tag, libc::SIGTERM)?;
    let grace_end = Instant::now() + GRACE;
    while kill::is_any_tagged(tag)? {
        if Instant::now() >= grace_end {
            return kill_tagged_now(tag);
        }
        // A look goes through all of `/proc`, so not as often as elsewhere.
        std::thread::sleep(10 * LOOK_EVERY);
    }
    Ok(())
}

pub(super) fn kill_tagged_now(tag: Tag) -> std::io::Result<()> {
    let deadline = Instant::now() + KILL_PATIENCE;
    while kill::kill_tagged(tag)? > 0 {
        if Instant::now() >= deadline {
            return Err(std::io::Error::other("processes outlive SIGKILL"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Only the end of the sandbox is proof now, and the supervisor is told so.
pub(super) fn unverifiable(agent: &Agent, execution: &Execution, why: &str) -> viv_agent::proto::AgentError {
    say(&format!("{} cannot be shown to have ended: {why}", execution.id()));
    agent.control.report_unverifiable(agent, &format!("execution {}", execution.id()));
    error(ErrorCode::Failed, format!("{} cannot be shown to have ended: {why}", execution.id()))
}
