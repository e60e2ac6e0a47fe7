//! An instance and how time goes over it.
//!
//! ```text
//!   Running ⇄ Frozen
//!      └────┬────┘
//!           ▼ the deadline, or a save that is not live
//!         Ended          and destroying removes it from every phase
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::task::Poll;

use viv_core::exec::{ExecSpec, ExecStatus, TRANSIENT_KEPT_MS};
use viv_core::file::{FileStat, Unpacked};
use viv_core::{EndCause, ExecutionId, OperationId, OwnerMark, RequestId, SnapshotId};

use super::execution::{Execution, Host};
use super::lifecycle::Origin;
use super::tree::Tree;
use crate::conformance::program::Program;
use crate::error::ProviderError;
use crate::instance::{
    Deadline, DeadlineChange, DiskUsage, Ended, InstanceRef, InstanceSpec, InstanceState, Listed, Observation,
    ObservedVia, Usage,
};
use crate::limits::ResourceLimits;
use crate::provider::InsideRequest;

/// Answers that are kept for repeated operations; a repetition comes within seconds, not within hundreds of changes.
const ANSWERS_KEPT_MAX: usize = 256;

/// Executions that are remembered; then the oldest that ended is forgotten.
const EXECUTIONS_KEPT_MAX: usize = 512;

/// The memory that a simulated process is said to use.
const PROCESS_MEMORY_BYTES: u64 = 1 << 20;

/// How it stands.
#[derive(Debug, Clone)]
enum Phase {
    Running,
    Frozen { since_ms: u64 },
    Ended(Ended),
}

/// What a mutation answered.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    Done,
    Deadline(Deadline),
    Limits(ResourceLimits),
    Stat(FileStat),
    Unpacked(Unpacked),
}

/// An instance.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) reference: InstanceRef,
    pub(super) owner: OwnerMark,
    /// The snapshot that it was made from, or that what it was forked from was.
    pub(super) parent: Option<SnapshotId>,
    spec: InstanceSpec,
    phase: Phase,
    /// Absent where nobody keeps deadlines.
    deadline_at_ms: Option<u64>,
    revision: u64,
    pub(super) tree: Tree,
    /// Oldest first.
    executions: Vec<Execution>,
    answers: VecDeque<(OperationId, Kept)>,
    pids: u32,
    /// Who hears what is asked inside: the latest.
    listener: u64,
    /// By which listener a request was heard last.
    heard: BTreeMap<ExecutionId, u64>,
    /// It has no way out any more.
    pub(super) is_cut: bool,
}

impl Instance {
    pub(super) fn new(
        reference: InstanceRef,
        owner: OwnerMark,
        spec: InstanceSpec,
        deadline_at_ms: Option<u64>,
        origin: Origin,
    ) -> Self {
        let Origin { tree, executions, parent } = origin;
        let spec = InstanceSpec { limits: spec.limits.in_force(), ..spec };
        // The first process of an instance is its init, so commands come after it.
        let pids = 1 + executions.len() as u32;
        Self {
            reference,
            owner,
            parent,
            spec,
            phase: Phase::Running,
            deadline_at_ms,
            revision: 1,
            tree,
            executions,
            answers: VecDeque::new(),
            pids,
            listener: 0,
            heard: BTreeMap::new(),
            is_cut: false,
        }
    }

    pub(super) fn state(&self) -> InstanceState {
        match &self.phase {
            Phase::Running => InstanceState::Running,
            Phase::Frozen { .. } => InstanceState::Frozen,
            Phase::Ended(ended) => InstanceState::Ended(ended.clone()),
        }
    }

    pub(super) fn ended(&self) -> Option<&Ended> {
        match &self.phase {
            Phase::Running | Phase::Frozen { .. } => None,
            Phase::Ended(ended) => Some(ended),
        }
    }

    /// Refuses unless it runs.
    pub(super) fn need_running(&self) -> Result<(), ProviderError> {
        match self.phase {
            Phase::Running => Ok(()),
            Phase::Frozen { .. } | Phase::Ended(_) => Err(ProviderError::NotRunning { state: self.state() }),
        }
    }

    /// Refuses when it has ended.
    pub(super) fn need_alive(&self) -> Result<(), ProviderError> {
        match self.phase {
            Phase::Running | Phase::Frozen { .. } => Ok(()),
            Phase::Ended(_) => Err(ProviderError::NotRunning { state: self.state() }),
        }
    }

    fn deadline(&self, now_ms: u64) -> Option<Deadline> {
        let at_ms = self.deadline_at_ms.filter(|_| self.ended().is_none())?;
        Some(Deadline { remaining_ms: at_ms.saturating_sub(now_ms), revision: self.revision })
    }

    pub(super) fn observe(&self, now_ms: u64, with_usage: bool) -> Observation {
        Observation {
            instance: self.reference.clone(),
            state: self.state(),
            deadline: self.deadline(now_ms),
            usage: with_usage.then(|| self.usage()),
            limits: Some(self.spec.limits.clone()),
            lacks: BTreeMap::new(),
            observed_at_ms: now_ms,
            via: ObservedVia::Supervisor,
        }
    }

    fn processes(&self) -> u64 {
        match self.phase {
            Phase::Running | Phase::Frozen { .. } => {
                1 + self.executions.iter().filter(|one| !one.is_final()).count() as u64
            }
            Phase::Ended(_) => 0,
        }
    }

    fn memory_bytes(&self) -> u64 {
        let held =
            self.executions.iter().filter(|one| !one.is_final()).map(|one| match Program::parse(&one.spec.argv) {
                Some(Program::HoldMemory { mib }) => mib << 20,
                Some(_) | None => 0,
            });
        self.processes() * PROCESS_MEMORY_BYTES + held.sum::<u64>()
    }

    fn usage(&self) -> Usage {
        Usage {
            cpu_us: Some(0),
            memory_bytes: Some(self.memory_bytes()),
            processes: Some(self.processes()),
            oom_kills: Some(0),
            oom_last: None,
        }
    }

    pub(super) fn disk_usage(&self) -> DiskUsage {
        let own_bytes = self.tree.own_bytes();
        DiskUsage { own_bytes, shared_bytes: self.tree.bytes() - own_bytes, limit_bytes: self.tree.bytes_max() }
    }

    pub(super) fn listed(&self) -> Listed {
        Listed {
            instance: self.reference.clone(),
            owner: self.owner.clone(),
            state: self.state(),
            labels: self.spec.labels.clone(),
        }
    }

    /// Everything that is due until now happens, in its order.
    pub(super) fn settle(&mut self, now_ms: u64) {
        self.forget_transient(now_ms);
        while self.ended().is_none() {
            let expiry = self.deadline_at_ms.filter(|at| *at <= now_ms);
            let next = self.next_due().filter(|(at, _)| *at <= now_ms);
            match (expiry, next) {
                (None, None) => return,
                (Some(at), None) => self.end(at, EndCause::Expired),
                (Some(at), Some((due, _))) if at <= due => self.end(at, EndCause::Expired),
                (_, Some((due, index))) => {
                    let (execution, mut host) = self.at(index, due);
                    execution.happen(&mut host);
                }
            }
        }
    }

    /// The execution to which something happens first. The frozen have no clock.
    fn next_due(&self) -> Option<(u64, usize)> {
        match self.phase {
            Phase::Running => {}
            Phase::Frozen { .. } | Phase::Ended(_) => return None,
        }
        self.executions.iter().enumerate().filter_map(|(index, one)| Some((one.due_ms()?, index))).min()
    }

    /// An execution with what it needs of the rest.
    fn at(&mut self, index: usize, now_ms: u64) -> (&mut Execution, Host<'_>) {
        let host = Host {
            now_ms,
            tree: &mut self.tree,
            env: &self.spec.env,
            workdir: &self.spec.workdir,
            open_files: self.spec.limits.open_files,
        };
        (&mut self.executions[index], host)
    }

    /// It ends, with all that runs in it.
    pub(super) fn end(&mut self, at_ms: u64, cause: EndCause) {
        if self.ended().is_some() {
            return;
        }
        let lost_to = cause.to_string();
        self.executions.retain(|one| !one.spec.transient);
        for execution in &mut self.executions {
            execution.lose(at_ms, &lost_to);
        }
        self.phase = Phase::Ended(Ended { cause, at_ms });
    }

    pub(super) fn extend(&mut self, now_ms: u64, change: DeadlineChange) -> Result<Deadline, ProviderError> {
        if self.ended().is_some_and(|ended| ended.cause == EndCause::Expired) {
            return Err(ProviderError::Expired);
        }
        self.need_alive()?;
        let at_ms = self.deadline_at_ms.unwrap_or(now_ms);
        let moved_ms = match change {
            DeadlineChange::AtLeastMs(ms) => at_ms.max(now_ms.saturating_add(ms)),
            DeadlineChange::ExactlyMs(ms) => now_ms.saturating_add(ms),
        };
        if moved_ms != at_ms {
            self.deadline_at_ms = Some(moved_ms);
            self.revision += 1;
        }
        Ok(Deadline { remaining_ms: moved_ms.saturating_sub(now_ms), revision: self.revision })
    }

    pub(super) fn set_limits(&mut self, change: &ResourceLimits) -> Result<ResourceLimits, ProviderError> {
        self.need_alive()?;
        let limits = change.or(&self.spec.limits).in_force();
        limits.check()?;
        let used = self.memory_bytes();
        if limits.memory_bytes.is_some_and(|bytes| bytes < used) {
            return Err(ProviderError::Conflict { what: format!("{used} bytes of memory are in use") });
        }
        self.tree.set_bytes_max(limits.disk_bytes);
        self.spec.limits = limits.clone();
        Ok(limits)
    }

    pub(super) fn freeze(&mut self, now_ms: u64) -> Result<(), ProviderError> {
        match self.phase {
            Phase::Running => {
                self.phase = Phase::Frozen { since_ms: now_ms };
                Ok(())
            }
            Phase::Frozen { .. } => Ok(()),
            Phase::Ended(_) => self.need_alive(),
        }
    }

    pub(super) fn thaw(&mut self, now_ms: u64) -> Result<(), ProviderError> {
        match self.phase {
            Phase::Running => Ok(()),
            Phase::Frozen { since_ms } => {
                for execution in &mut self.executions {
                    execution.thaw(now_ms, now_ms.saturating_sub(since_ms));
                }
                self.phase = Phase::Running;
                Ok(())
            }
            Phase::Ended(_) => self.need_alive(),
        }
    }

    pub(super) fn execute(
        &mut self,
        now_ms: u64,
        id: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus, ProviderError> {
        if let Some(known) = self.executions.iter().find(|one| one.id == *id) {
            if known.spec == *spec {
                return Ok(known.status());
            }
            return Err(ProviderError::Conflict { what: format!("{id} is another command") });
        }
        self.need_running()?;
        if spec.argv.first().is_none_or(String::is_empty) {
            let hint = "give at least a program".to_owned();
            return Err(ProviderError::Invalid { what: "the command is empty".to_owned(), hint });
        }
        self.make_room()?;
        if self.spec.limits.processes.is_some_and(|most| self.processes() >= most) {
            let what = "the sandbox has no process left".to_owned();
            return Err(ProviderError::Exhausted { limit: "processes", what });
        }
        self.pids += 1;
        let host = Host {
            now_ms,
            tree: &mut self.tree,
            env: &self.spec.env,
            workdir: &self.spec.workdir,
            open_files: self.spec.limits.open_files,
        };
        let execution = Execution::start(id.clone(), spec.clone(), self.pids, host);
        let status = execution.status();
        self.executions.push(execution);
        Ok(status)
    }

    /// Those that nobody read in time.
    fn forget_transient(&mut self, now_ms: u64) {
        let is_due = |ended_at_ms: u64| ended_at_ms.saturating_add(TRANSIENT_KEPT_MS) <= now_ms;
        self.executions.retain(|one| !(one.spec.transient && one.status().ended_at_ms.is_some_and(is_due)));
    }

    /// Somebody heard of its end.
    pub(super) fn note_read(&mut self, id: &ExecutionId) {
        self.executions.retain(|one| !(one.id == *id && one.spec.transient && one.is_final()));
    }

    fn make_room(&mut self) -> Result<(), ProviderError> {
        if self.executions.len() < EXECUTIONS_KEPT_MAX {
            return Ok(());
        }
        let Some(oldest) = self.executions.iter().position(Execution::is_final) else {
            let what = format!("{EXECUTIONS_KEPT_MAX} run");
            return Err(ProviderError::Exhausted { limit: "executions", what });
        };
        self.executions.remove(oldest);
        Ok(())
    }

    pub(super) fn executions(&self) -> &[Execution] {
        &self.executions
    }

    pub(super) fn execution(&self, id: &ExecutionId) -> Result<&Execution, ProviderError> {
        self.executions.iter().find(|one| one.id == *id).ok_or_else(|| ProviderError::NotFound { what: id.to_string() })
    }

    /// An execution that is to be changed, with what it needs of the rest.
    pub(super) fn execution_mut(
        &mut self,
        id: &ExecutionId,
        now_ms: u64,
    ) -> Result<(&mut Execution, Host<'_>), ProviderError> {
        let index = self.executions.iter().position(|one| one.id == *id);
        let index = index.ok_or_else(|| ProviderError::NotFound { what: id.to_string() })?;
        Ok(self.at(index, now_ms))
    }

    /// What an operation answered before.
    pub(super) fn recall(&self, operation: &OperationId) -> Option<&Kept> {
        self.answers.iter().find(|(known, _)| known == operation).map(|(_, kept)| kept)
    }

    pub(super) fn remember(&mut self, operation: OperationId, kept: Kept) {
        if self.answers.len() == ANSWERS_KEPT_MAX {
            self.answers.pop_front();
        }
        self.answers.push_back((operation, kept));
    }

    /// Somebody listens to what is asked inside, and nobody else does any more.
    pub(super) fn begin_listening(&mut self) -> u64 {
        self.listener += 1;
        self.listener
    }

    /// What a listener hears next; `None` when that is nothing ever again.
    pub(super) fn next_request(&mut self, listener: u64) -> Poll<Option<InsideRequest>> {
        if self.listener != listener || self.ended().is_some() {
            return Poll::Ready(None);
        }
        let mut asking = self.executions.iter().filter_map(|one| Some((&one.id, one.asks()?)));
        if asking.clone().any(|(id, _)| self.heard.get(id) == Some(&listener)) || self.need_running().is_err() {
            return Poll::Pending;
        }
        let Some((id, body)) = asking.next() else { return Poll::Pending };
        let again = self.heard.insert(id.clone(), listener).is_some();
        Poll::Ready(Some(InsideRequest { id: request_of(id), again, body: body.to_owned() }))
    }

    pub(super) fn answer_request(
        &mut self,
        now_ms: u64,
        request: &RequestId,
        answer: &str,
    ) -> Result<(), ProviderError> {
        self.need_running()?;
        let asked = |one: &Execution| one.asks().is_some() && request_of(&one.id) == *request;
        let Some(index) = self.executions.iter().position(asked) else {
            return Err(ProviderError::NotFound { what: format!("whoever asked for {request}") });
        };
        let (execution, mut host) = self.at(index, now_ms);
        execution.answered(&mut host, answer);
        Ok(())
    }
}

/// A command asks once, so its id is that of what it asks for.
fn request_of(execution: &ExecutionId) -> RequestId {
    let body = execution.as_str().trim_start_matches(ExecutionId::PREFIX);
    format!("{}{body}", RequestId::PREFIX).parse().expect("made of an id")
}
