//! All executions, by id and by process.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Pid;
use viv_agent::proto::ErrorCode;
use viv_core::ExecutionId;
use viv_core::exec::{ExecState, ExecStatus};

use crate::agent::reserve::Work;
use crate::agent::{Agent, lock, spawn};
use crate::error::{Result, error, say};
use crate::exec::cgroup::Removal;
use crate::exec::end::{self, Ending};
use crate::exec::{Execution, kill};
use crate::sys::{self, Exit};

/// Most executions that run at once: each costs a process and a few descriptors.
pub(crate) const RUNNING_MAX: usize = 1024;

/// How often a cgroup that looks busy though its last process just ended is tried again.
const SWEEP_TRIES: u32 = 6;

/// What a child of ours is to its execution.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Leader,
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
        if let Some(existing) = known.by_id.get(&make.id) {
            return if existing.digest == make.digest {
                Ok(Entered::Known(Arc::clone(existing)))
            } else {
                Err(error(ErrorCode::Conflict, format!("{} was started with another spec", make.id)))
            };
        }
        if known.by_id.len() - known.ended.len() >= RUNNING_MAX {
            return Err(error(ErrorCode::Exhausted, format!("{RUNNING_MAX} executions run already")));
        }
        let execution = Arc::new(make);
        known.by_id.insert(execution.id.clone(), Arc::clone(&execution));
        Ok(Entered::New(execution))
    }

    /// It could not even be tried, so its id is free again.
    pub(crate) fn withdraw(&self, execution: &Execution) {
        lock(&self.known).by_id.remove(&execution.id);
        let _ = std::fs::remove_dir_all(&execution.dir);
    }

    pub(crate) fn get(&self, id: &ExecutionId) -> Result<Arc<Execution>> {
        let found = lock(&self.known).by_id.get(id).map(Arc::clone);
        found.ok_or_else(|| error(ErrorCode::NotFound, format!("there is no execution {id}")))
    }

    pub(crate) fn list(&self) -> Vec<ExecStatus> {
        self.all().iter().map(|execution| execution.status()).collect()
    }

    fn all(&self) -> Vec<Arc<Execution>> {
        lock(&self.known).by_id.values().map(Arc::clone).collect()
    }

    /// How many run, and how many are known.
    pub(crate) fn count(&self) -> (u64, u64) {
        let known = lock(&self.known);
        ((known.by_id.len() - known.ended.len()) as u64, known.by_id.len() as u64)
    }

    /// One more has ended; the oldest are forgotten when there are too many.
    pub(crate) fn note_ended(&self, agent: &Agent, id: &ExecutionId) {
        let mut forgotten = Vec::new();
        let mut known = lock(&self.known);
        known.ended.push_back(id.clone());
        while known.ended.len() > agent.config.ended_executions_max
            && let Some(oldest) = known.ended.pop_front()
        {
            forgotten.extend(known.by_id.remove(&oldest));
        }
        drop(known);
        for execution in forgotten {
            if let Err(cause) = std::fs::remove_dir_all(&execution.dir) {
                say(&format!("output of {} not removed: {cause}", execution.id));
            }
        }
    }

    /// Reaps every child that ended: PID 1 inherits all orphans.
    pub(crate) fn reap(&self, agent: &'static Agent) {
        loop {
            let mut children = lock(&self.children);
            let Some((pid, exit)) = sys::reap_one() else { break };
            let owner = children.remove(&pid);
            drop(children);
            lock(&self.lingering).tries_left = SWEEP_TRIES;
            match owner {
                Some((execution, Role::Leader)) => {
                    self.linger(&execution);
                    execution.leader_exited(agent, exit);
                }
                Some((execution, Role::Monitor)) => monitor_ended(agent, execution, exit),
                None => {}
            }
        }
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
        lingering.executions.retain(|execution| match cgroup.remove(execution.id.as_str()) {
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

    /// Ends what is over its time limit; returns the time to the next limit.
    pub(crate) fn check_deadlines(&self, agent: &'static Agent) -> Option<Duration> {
        let mut nearest: Option<Duration> = None;
        for execution in self.all() {
            let mut inner = lock(&execution.inner);
            if inner.state != Some(ExecState::Running) || inner.ending.is_some() {
                continue;
            }
            let Some(deadline) = &mut inner.deadline else { continue };
            let left = deadline.left();
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
    say(&format!("the monitor of {} was killed", execution.id));
    let work = move || {
        kill::end_unowned(agent);
        execution.tree_gone();
    };
    if spawn("orphans", work).is_err() {
        agent.end_everything("orphans cannot be ended");
    }
}
