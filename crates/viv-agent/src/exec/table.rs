//! All executions, by id and by process.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Pid;
use viv_agent::proto::ErrorCode;
use viv_core::exec::{ExecState, ExecStatus};
use viv_core::{ExecutionId, SandboxId};

use crate::agent::reserve::Work;
use crate::agent::{Agent, Deadline, lock, spawn};
use crate::error::{Result, error, say};
use crate::exec::cgroup::Removal;
use crate::exec::end::{self, Ending};
use crate::exec::{Execution, kill};
use crate::sys::{self, Exit};

/// Most executions that run at once: each costs a process and a few descriptors.
pub(crate) const RUNNING_MAX: usize = 1024;

/// Most transient executions that are remembered after their end with nobody reading them. As many as can run: whoever
/// starts them reads them at once, and those that all end together are all still to be read.
const PASSING_MAX: usize = RUNNING_MAX;

/// Children reaped in one go: a workload can have more end than are reaped, for ever, and others wait for the main thread.
const REAPED_AT_ONCE_MAX: usize = 128;

/// How often a cgroup that looks busy though its last process just ended is tried again.
const SWEEP_TRIES: u32 = 6;

/// What a child of ours is to its execution.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The first process, in a cgroup of its own.
    Leader,
    /// The first process, known by its tag.
    Tagged,
    Monitor,
}

/// All executions.
#[derive(Default)]
pub(crate) struct Executions {
    known: Mutex<Known>,
    /// Held while a process is started, so that its end is not reaped before it is known.
    pub(crate) children: Mutex<HashMap<Pid, (Arc<Execution>, Role)>>,
    lingering: Mutex<Lingering>,
}

#[derive(Default)]
struct Known {
    by_id: BTreeMap<ExecutionId, Arc<Execution>>,
    /// Oldest end first.
    ended: VecDeque<ExecutionId>,
    /// Transient ones that ended and were not read yet, and until when they are kept; oldest end first.
    passing: VecDeque<(Arc<Execution>, Deadline)>,
}

impl Known {
    fn running(&self) -> usize {
        self.by_id.len() - self.ended.len() - self.passing.len()
    }
}

/// Cgroups of ended executions, in which something may live on.
#[derive(Default)]
struct Lingering {
    executions: Vec<Arc<Execution>>,
    tries_left: u32,
}

/// What came of entering a new execution.
pub(crate) enum Entered {
    New(Arc<Execution>),
    Known(Arc<Execution>),
}

impl Executions {
    /// Enters a new one, or finds the one that has its id already.
    pub(crate) fn enter(&self, make: Execution) -> Result<Entered> {
        let mut known = lock(&self.known);
        if let Some(existing) = known.by_id.get(&make.id()) {
            return if existing.digest == make.digest {
                Ok(Entered::Known(Arc::clone(existing)))
            } else {
                Err(error(ErrorCode::Conflict, format!("{} was started with another spec", make.id())))
            };
        }
        if known.running() >= RUNNING_MAX {
            return Err(error(ErrorCode::Exhausted, format!("{RUNNING_MAX} executions run already")));
        }
        let execution = Arc::new(make);
        known.by_id.insert(execution.id(), Arc::clone(&execution));
        Ok(Entered::New(execution))
    }

    /// It could not even be tried, so its id is free again.
    pub(crate) fn withdraw(&self, execution: &Execution) {
        lock(&self.known).by_id.remove(&execution.id());
        let _ = std::fs::remove_dir_all(execution.dir());
    }

    pub(crate) fn get(&self, id: &ExecutionId) -> Result<Arc<Execution>> {
        let found = lock(&self.known).by_id.get(id).map(Arc::clone);
        found.ok_or_else(|| error(ErrorCode::NotFound, format!("there is no execution {id}")))
    }

    /// All that are told of, which the transient are not.
    pub(crate) fn list(&self) -> Vec<ExecStatus> {
        self.all().iter().filter(|execution| !execution.transient).map(|execution| execution.status()).collect()
    }

    fn all(&self) -> Vec<Arc<Execution>> {
        lock(&self.known).by_id.values().map(Arc::clone).collect()
    }

    /// How many run, and how many are known.
    pub(crate) fn count(&self) -> (u64, u64) {
        let known = lock(&self.known);
        (known.running() as u64, known.by_id.len() as u64)
    }

    /// One more has ended; the oldest are forgotten when there are too many.
    pub(crate) fn note_ended(&self, agent: &Agent, execution: &Execution) {
        let mut forgotten = Vec::new();
        let mut known = lock(&self.known);
        if execution.transient {
            let kept = known.by_id.get(&execution.id()).map(Arc::clone);
            known.passing.extend(kept.map(|kept| (kept, Deadline::after(agent.config.transient_kept_ms))));
            // The main thread has to know when to forget it.
            agent.wake.ring();
        } else {
            known.ended.push_back(execution.id());
        }
        while known.ended.len() > agent.config.ended_executions_max
            && let Some(oldest) = known.ended.pop_front()
        {
            forgotten.extend(known.by_id.remove(&oldest));
        }
        if known.passing.len() > PASSING_MAX
            // One that is being read is whole until that is done.
            && let Some(oldest) = known.passing.iter().position(|(passing, _)| !passing.is_followed())
            && let Some((oldest, _)) = known.passing.remove(oldest)
        {
            forgotten.extend(known.by_id.remove(&oldest.id()));
        }
        drop(known);
        forgotten.iter().for_each(remove_output);
    }

    /// Somebody heard of its end. A transient one is forgotten then, unless others are still reading.
    pub(crate) fn note_read(&self, execution: &Arc<Execution>) {
        if !execution.transient || execution.is_followed() {
            return;
        }
        let mut known = lock(&self.known);
        let Some(place) = known.passing.iter().position(|(other, _)| Arc::ptr_eq(other, execution)) else { return };
        known.passing.remove(place);
        known.by_id.remove(&execution.id());
        drop(known);
        remove_output(execution);
    }

    /// Forgets transient ones that nobody read in time; returns the time to the next. Those that are being read stay
    /// until that is done.
    pub(crate) fn forget_transient(&self, agent: &Agent) -> Option<Duration> {
        let mut forgotten = Vec::new();
        let mut known = lock(&self.known);
        let mut left = None;
        while let Some((oldest, deadline)) = known.passing.front_mut() {
            let due = deadline.left();
            if !due.is_zero() {
                left = Some(due);
                break;
            }
            if oldest.is_followed() {
                *deadline = Deadline::after(agent.config.transient_kept_ms);
                known.passing.rotate_left(1);
                continue;
            }
            let id = oldest.id();
            known.passing.pop_front();
            forgotten.extend(known.by_id.remove(&id));
        }
        drop(known);
        forgotten.iter().for_each(remove_output);
        left
    }

    /// Reaps children that ended: PID 1 inherits all orphans. True when there may be more.
    pub(crate) fn reap(&self, agent: &'static Agent) -> bool {
        for _ in 0..REAPED_AT_ONCE_MAX {
            let mut children = lock(&self.children);
            let Some((pid, exit)) = sys::reap_one() else { return false };
            let owner = children.remove(&pid);
            drop(children);
            lock(&self.lingering).tries_left = SWEEP_TRIES;
            match owner {
                Some((execution, Role::Leader)) => {
                    self.linger(&execution);
                    execution.leader_exited(agent, exit);
                }
                Some((execution, Role::Tagged)) => execution.leader_exited(agent, exit),
                Some((execution, Role::Monitor)) => monitor_ended(agent, execution, exit),
                None => {}
            }
        }
        true
    }

    /// Its cgroup is to be removed as soon as it is empty.
    pub(crate) fn linger(&self, execution: &Arc<Execution>) {
        let mut lingering = lock(&self.lingering);
        if !lingering.executions.iter().any(|other| Arc::ptr_eq(other, execution)) {
            lingering.executions.push(Arc::clone(execution));
        }
        lingering.tries_left = SWEEP_TRIES;
    }

    /// Whether its cgroup is known to be empty for good. Waits for a removal that is being made.
    pub(crate) fn is_cgroup_empty(&self, execution: &Execution) -> bool {
        let _lingering = lock(&self.lingering);
        execution.cgroup_empty.load(Ordering::Acquire)
    }

    /// Removes cgroups in which nothing lives any more. Nothing is done
    /// between the deaths of children; after one, a few tries, because the
    /// kernel takes a moment to see a cgroup empty. Returns when to try again.
    pub(crate) fn sweep_cgroups(&self, agent: &Agent) -> Option<Duration> {
        let mut lingering = lock(&self.lingering);
        if lingering.tries_left == 0 || lingering.executions.is_empty() {
            return None;
        }
        let cgroup = agent.control.cgroup()?;
        lingering.executions.retain(|execution| match cgroup.remove(execution.id().as_str()) {
            Removal::Removed => {
                // Under the lock, so that whoever misses the cgroup learns why.
                execution.cgroup_empty.store(true, Ordering::Release);
                false
            }
            Removal::Absent => false,
            Removal::Busy => true,
        });
        lingering.tries_left -= 1;
        let next = Duration::from_millis(2 << (SWEEP_TRIES - lingering.tries_left));
        (!lingering.executions.is_empty() && lingering.tries_left > 0).then_some(next)
    }

    /// This sandbox is the copy of another one, and so are all executions.
    pub(crate) fn copied_into(&self, sandbox: &SandboxId) {
        let mut known = lock(&self.known);
        let mut names = HashMap::new();
        for (before, execution) in std::mem::take(&mut known.by_id) {
            let id = execution.rename_into(sandbox);
            names.insert(before, id.clone());
            known.by_id.insert(id, execution);
        }
        for ended in &mut known.ended {
            if let Some(id) = names.remove(ended) {
                *ended = id;
            }
        }
        drop(known);
        // Not under that lock: who ends takes its own first, and then that one.
        self.all().iter().for_each(|execution| execution.keep_renamed());
    }

    /// The clocks of executions stood still.
    pub(crate) fn postpone_deadlines(&self, by_ms: u64) {
        for execution in self.all() {
            if let Some(deadline) = &mut lock(&execution.inner).deadline {
                deadline.postpone(by_ms);
            }
        }
    }

    /// The clocks of executions stood still while the supervisor was away, or since an execution started.
    pub(crate) fn postpone_deadlines_away(&self, away_ms: u64) {
        for execution in self.all() {
            if let Some(deadline) = &mut lock(&execution.inner).deadline {
                deadline.postpone(away_ms.min(deadline.age_ms()));
            }
        }
    }

    /// Ends what was over its time limit at that moment; returns the time to the next limit.
    pub(crate) fn check_deadlines(&self, agent: &'static Agent, seen_ms: u64) -> Option<Duration> {
        let mut nearest: Option<Duration> = None;
        for execution in self.all() {
            let mut inner = lock(&execution.inner);
            if inner.state != Some(ExecState::Running) || inner.ending.is_some() {
                continue;
            }
            let Some(deadline) = &mut inner.deadline else { continue };
            let left = deadline.left_at(seen_ms);
            if left.is_zero() {
                inner.deadline = None;
                drop(inner);
                end_in_background(agent, execution);
            } else {
                nearest = Some(nearest.map_or(left, |nearest| nearest.min(left)));
            }
        }
        nearest
    }
}

fn remove_output(execution: &Arc<Execution>) {
    if let Err(cause) = std::fs::remove_dir_all(execution.dir()) {
        say(&format!("output of {} not removed: {cause}", execution.id()));
    }
}

fn end_in_background(agent: &'static Agent, execution: Arc<Execution>) {
    let theirs = Arc::clone(&execution);
    let work = move || drop(end::end(agent, &theirs, Ending::TimedOut));
    if spawn("time limit", work).is_err() {
        agent.reserve.push(agent, Work::End(execution, Ending::TimedOut));
    }
}

fn monitor_ended(agent: &'static Agent, execution: Arc<Execution>, exit: Exit) {
    if exit == Exit::Code(0) {
        return execution.tree_gone();
    }
    // Somebody killed the monitor, and what it kept together is ours now.
    say(&format!("the monitor of {} was killed", execution.id()));
    let work = move || {
        kill::end_unowned(agent);
        execution.tree_gone();
    };
    if spawn("orphans", work).is_err() {
        agent.end_everything("orphans cannot be ended");
    }
}
