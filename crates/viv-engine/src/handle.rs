//! What a client holds: a sandbox and a generation of it, checked before it is used (T4, T5).

use std::time::Duration;

use viv_core::exec::{ExecSpec, ExecState, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::lifecycle::{Finding, Phase, Sandbox, Status};
use viv_core::spec::Project;
use viv_core::{ExecutionId, Generation, OperationId, SandboxId};
use viv_provider::{
    ByteReader, Dialled, FileWrite, InstanceRef, LogPart, Mutation, Obstacle, OutputStream, ProviderError, WatchStream,
    Whereabouts,
};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::idle::InUse;
use crate::read::{Which, check_generation, has_instance};

type Result<T> = std::result::Result<T, EngineError>;

/// One generation of a sandbox, to be used.
#[derive(Debug, Clone)]
pub struct Handle {
    engine: Engine,
    instance: InstanceRef,
}

impl Engine {
    /// A handle to look at what is there, alive or ended: executions, output, files. Not activity.
    pub async fn look_into(&self, project: &Project, which: &Which, generation: Option<Generation>) -> Result<Handle> {
        let sandbox = self.found(project, which, generation).await?;
        if !has_instance(&sandbox) {
            return Err(not_running(&sandbox));
        }
        Ok(self.handle(&sandbox))
    }

    /// A handle to work with: it is ready, and was seen to be since this daemon began (T4). Activity, once used.
    pub async fn work_in(&self, project: &Project, which: &Which, generation: Option<Generation>) -> Result<Handle> {
        let inner = &self.inner;
        let mut sandbox = self.found(project, which, generation).await?;
        let gated = inner.config.gates.is_on(Gate::ProbeBeforeUse, &sandbox.project, &sandbox.id);
        if sandbox.phase == Phase::Ready && gated && !inner.knowledge.has_probed(&sandbox) {
            let view = self.verify(&sandbox.id).await?;
            // A check that could not be made or recorded is no evidence: it does not open the door.
            if view.status != Status::Ready {
                let finding = view.evidence.finding().unwrap_or(Finding::Timeout);
                let what = view.evidence.complaint().unwrap_or_else(|| view.sandbox.phase.name().as_str().to_owned());
                return Err(EngineError::Unfit { sandbox: view.sandbox.id, finding, what });
            }
            sandbox = view.sandbox;
            check_generation(&sandbox, generation)?;
        }
        if sandbox.phase != Phase::Ready {
            return Err(not_running(&sandbox));
        }
        Ok(self.handle(&sandbox))
    }

    async fn found(&self, project: &Project, which: &Which, generation: Option<Generation>) -> Result<Sandbox> {
        let sandbox = self.inner.find(project, which).await?;
        if self.inner.config.gates.is_on(Gate::GenerationCheck, &sandbox.project, &sandbox.id) {
            check_generation(&sandbox, generation)?;
        }
        if sandbox.is_over() || sandbox.deleted {
            return Err(EngineError::Gone { sandbox: sandbox.id.clone(), cause: Box::new(sandbox.cause) });
        }
        Ok(sandbox)
    }

    fn handle(&self, sandbox: &Sandbox) -> Handle {
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        Handle { engine: self.clone(), instance }
    }
}

fn not_running(sandbox: &Sandbox) -> EngineError {
    let cause = Box::new(sandbox.cause.clone());
    EngineError::NotRunning { sandbox: sandbox.id.clone(), phase: sandbox.phase.name(), cause }
}

impl Handle {
    /// Whose it is.
    pub fn sandbox(&self) -> &SandboxId {
        &self.instance.sandbox
    }

    /// Which generation.
    pub fn generation(&self) -> Generation {
        self.instance.generation
    }

    /// What goes with a change.
    pub(crate) async fn mutation(&self) -> Result<Mutation> {
        let inner = &self.engine.inner;
        let operation = OperationId::from_bytes((inner.draw)());
        self.mutation_as(operation).await
    }

    async fn mutation_as(&self, operation: OperationId) -> Result<Mutation> {
        let inner = &self.engine.inner;
        let token = inner.token(self.sandbox()).await?;
        let budget_ms = inner.config.budgets.call.as_millis() as u64;
        Ok(Mutation { operation, generation: self.instance.generation, token, budget_ms })
    }

    /// A call that is bounded in time. What failed because of where the sandbox is gets looked at (G3).
    async fn call<T>(&self, call: impl Future<Output = std::result::Result<T, ProviderError>>) -> Result<T> {
        self.call_within(self.engine.inner.config.budgets.call, call).await
    }

    async fn call_within<T>(
        &self,
        budget: Duration,
        call: impl Future<Output = std::result::Result<T, ProviderError>>,
    ) -> Result<T> {
        let inner = &self.engine.inner;
        let answer = inner.call_agent(self.sandbox(), budget, call).await;
        answer.map_err(|error| {
            match &error {
                ProviderError::Absent
                | ProviderError::NotRunning { .. }
                | ProviderError::Expired
                | ProviderError::TimedOut { .. }
                | ProviderError::Unavailable { .. }
                | ProviderError::StaleGeneration { .. } => inner.signal_health(self.sandbox()),
                ProviderError::Fenced { .. }
                | ProviderError::NotFound { .. }
                | ProviderError::Conflict { .. }
                | ProviderError::Invalid { .. }
                | ProviderError::Exhausted { .. }
                | ProviderError::Unsupported { .. }
                | ProviderError::Outdated { .. }
                | ProviderError::Failed { .. } => {}
            }
            EngineError::Provider(error)
        })
    }

    /// It is used from here on, until what this answers is dropped (L6).
    ///
    /// What is idle may be put to rest at the same moment. The two are put into an order by the store: either this was
    /// written first, and it is not idle; or it rests by now, and is found so here. What was not written because it was a
    /// moment ago keeps it awake all the same.
    async fn active(&self) -> Result<InUse> {
        let inner = &self.engine.inner;
        let (using, written) = inner.begin_use(self.sandbox()).await?;
        if written {
            let record = inner.load(self.sandbox()).await?;
            let rests = matches!(record.phase, Phase::Frozen { .. } | Phase::Hibernating { .. });
            if rests && record.generation == self.instance.generation {
                return Err(not_running(&record));
            }
        }
        Ok(using)
    }

    /// Starts a command. The id is the caller's, so a repeated call finds what the first one started.
    pub async fn execute(&self, execution: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus> {
        self.engine.inner.check_open()?;
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.execute(&mutation, self.sandbox(), execution, spec)).await
    }

    /// Starts a command that nobody is there for, so it is no use of the sandbox by anybody.
    pub(crate) async fn execute_unattended(&self, execution: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.execute(&mutation, self.sandbox(), execution, spec)).await
    }

    /// A fresh id for a command.
    pub fn new_execution(&self) -> ExecutionId {
        ExecutionId::from_bytes((self.engine.inner.draw)())
    }

    /// How a command stands.
    pub async fn execution(&self, execution: &ExecutionId) -> Result<ExecStatus> {
        self.call(self.engine.inner.provider.execution(&self.instance, execution)).await
    }

    /// All commands that are still known.
    pub async fn executions(&self) -> Result<Vec<ExecStatus>> {
        self.call(self.engine.inner.provider.executions(&self.instance)).await
    }

    /// How many commands run, for a reader of the status: he waits no longer than for a probe, and an agent that is
    /// silent for so long is looked at.
    pub async fn running(&self) -> Result<u64> {
        let inner = &self.engine.inner;
        let all = self.call_within(inner.config.budgets.probe, inner.provider.executions(&self.instance)).await?;
        Ok(all.iter().filter(|execution| execution.state == ExecState::Running).count() as u64)
    }

    /// Output from an offset on.
    pub async fn attach(&self, execution: &ExecutionId, offset: u64, follow: bool) -> Result<Box<dyn OutputStream>> {
        self.call(self.engine.inner.provider.attach(&self.instance, execution, offset, follow)).await
    }

    /// Gives input; answers how many bytes were taken in all.
    pub async fn write_stdin(&self, execution: &ExecutionId, offset: u64, data: &[u8]) -> Result<u64> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.write_stdin(&mutation, self.sandbox(), execution, offset, data)).await
    }

    /// Closes the input.
    pub async fn close_stdin(&self, execution: &ExecutionId) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.close_stdin(&mutation, self.sandbox(), execution)).await
    }

    /// Sends a signal.
    pub async fn signal(&self, execution: &ExecutionId, signal: i32) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.signal(&mutation, self.sandbox(), execution, signal)).await
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, execution: &ExecutionId, size: TtySize) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.resize(&mutation, self.sandbox(), execution, size)).await
    }

    /// Ends a command with its whole tree.
    pub async fn cancel(&self, execution: &ExecutionId) -> Result<ExecStatus> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.cancel(&mutation, self.sandbox(), execution)).await
    }

    /// Reads a part of a file.
    pub async fn file_read(&self, path: &str, offset: u64, length: Option<u64>) -> Result<ByteReader> {
        self.call(self.engine.inner.provider.file_read(&self.instance, path, offset, length)).await
    }

    /// Replaces a file. Takes as long as its content takes to come.
    pub async fn file_write(&self, file: &FileWrite, content: ByteReader) -> Result<FileStat> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        let written = self.engine.inner.provider.file_write(&mutation, self.sandbox(), file, content).await;
        written.map_err(EngineError::Provider)
    }

    /// Looks at a path.
    pub async fn file_stat(&self, path: &str) -> Result<FileStat> {
        self.call(self.engine.inner.provider.file_stat(&self.instance, path)).await
    }

    /// Lists a directory.
    pub async fn file_list(&self, path: &str, depth: u32) -> Result<DirListing> {
        self.call(self.engine.inner.provider.file_list(&self.instance, path, depth)).await
    }

    /// Makes a directory.
    pub async fn file_mkdir(&self, path: &str) -> Result<()> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.file_mkdir(&mutation, self.sandbox(), path)).await
    }

    /// Moves a path.
    pub async fn file_move(&self, from: &str, to: &str) -> Result<()> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.file_move(&mutation, self.sandbox(), from, to)).await
    }

    /// Removes a path.
    pub async fn file_remove(&self, path: &str) -> Result<()> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.file_remove(&mutation, self.sandbox(), path)).await
    }

    /// Tells about changes.
    pub async fn file_watch(&self, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>> {
        self.call(self.engine.inner.provider.file_watch(&self.instance, path, recursive)).await
    }

    /// A tar archive of a path.
    pub async fn archive_get(&self, path: &str) -> Result<ByteReader> {
        self.call(self.engine.inner.provider.archive_get(&self.instance, path)).await
    }

    /// Unpacks a tar archive. Takes as long as it takes to come.
    pub async fn archive_put(&self, path: &str, bounds: ArchiveBounds, archive: ByteReader) -> Result<Unpacked> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        let unpacked = self.engine.inner.provider.archive_put(&mutation, self.sandbox(), path, bounds, archive).await;
        unpacked.map_err(EngineError::Provider)
    }

    /// Connects to a port inside.
    pub async fn dial(&self, port: u16) -> Result<Box<dyn Dialled>> {
        let _using = self.active().await?;
        self.call(self.engine.inner.provider.dial(&self.instance, port)).await
    }

    /// Where its parts are, for an operator to look for herself.
    pub async fn whereabouts(&self) -> Result<Whereabouts> {
        self.call(self.engine.inner.provider.whereabouts(&self.instance)).await
    }

    /// What is in the way of saving its memory.
    pub async fn memory_obstacles(&self) -> Result<Vec<Obstacle>> {
        self.call(self.engine.inner.provider.memory_obstacles(&self.instance)).await
    }

    /// What its supervisor and agent said.
    pub async fn log_tail(&self, bytes_max: u64) -> Result<Vec<LogPart>> {
        self.call(self.engine.inner.provider.log_tail(&self.instance, bytes_max)).await
    }
}
