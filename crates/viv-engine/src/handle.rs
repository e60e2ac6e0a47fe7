//! What a client holds: a sandbox and a generation of it, checked before it is used (T4, T5).

use std::time::Duration;

use serde_json::json;
use viv_core::exec::{ExecSpec, ExecState, ExecStatus, TtySize};
use viv_core::execution::{Execution, Place, Queued, START_UNKNOWN, Stage};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::lifecycle::{Actor, EntryKind, Phase, Sandbox};
use viv_core::spec::Project;
use viv_core::{ExecutionId, Generation, OperationId, SandboxId};
use viv_provider::{
    ByteReader, Dialled, FileWrite, InstanceRef, LogPart, Mutation, Obstacle, OutputStream, ProviderError, WatchStream,
    Whereabouts,
};
use viv_store::StoreError;

use crate::deeds::{self, Deed, Heard, told_path};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::gate::Gate;
use crate::idle::InUse;
use crate::incoming;
use crate::metrics::family;
use crate::read::{Which, check_generation, has_instance};

type Result<T> = std::result::Result<T, EngineError>;

/// One generation of a sandbox, to be used.
#[derive(Debug, Clone)]
pub struct Handle {
    engine: Engine,
    project: Project,
    instance: InstanceRef,
    /// Who uses it, for the journal (O7).
    by: Actor,
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
        if sandbox.phase != Phase::Ready && !inner.is_gated(Gate::EntryOnlyResume, &sandbox.id) {
            sandbox = Box::pin(self.wake_for_handle(sandbox)).await?;
        }
        let gated = inner.config.gates.is_on(Gate::ProbeBeforeUse, &sandbox.project, &sandbox.id);
        if sandbox.phase == Phase::Ready && gated && !inner.knowledge.has_probed(&sandbox) {
            let view = self.verify(&sandbox.id).await?;
            if !inner.is_seen_well(&view) {
                return Err(view.unfit());
            }
            sandbox = view.sandbox;
            check_generation(&sandbox, generation)?;
        }
        if sandbox.phase != Phase::Ready {
            return Err(not_running(&sandbox));
        }
        Ok(self.handle(&sandbox))
    }

    /// Switched off, whoever comes with a handle brings back what rests (O9).
    async fn wake_for_handle(&self, sandbox: Sandbox) -> Result<Sandbox> {
        let entered = self.ensure(&sandbox.id, EntryKind::Gateway, Actor::part("engine")).await;
        match entered {
            Ok(_) => Ok(self.wait_ready(&sandbox.id, self.inner.config.budgets.make).await?.sandbox),
            Err(_) => Ok(sandbox),
        }
    }

    pub(crate) async fn found(
        &self,
        project: &Project,
        which: &Which,
        generation: Option<Generation>,
    ) -> Result<Sandbox> {
        let sandbox = self.inner.find(project, which).await?;
        if self.inner.config.gates.is_on(Gate::GenerationCheck, &sandbox.project, &sandbox.id) {
            check_generation(&sandbox, generation)?;
        }
        if sandbox.is_over() || sandbox.deleted {
            return Err(EngineError::Gone { sandbox: sandbox.id.clone(), cause: Box::new(sandbox.cause) });
        }
        Ok(sandbox)
    }

    pub(crate) fn handle(&self, sandbox: &Sandbox) -> Handle {
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        Handle { engine: self.clone(), project: sandbox.project.clone(), instance, by: Actor::part("engine") }
    }
}

/// Whether an answer is missing, rather than a refusal.
fn is_unanswered(error: &EngineError) -> bool {
    matches!(error, EngineError::Provider(ProviderError::TimedOut { .. } | ProviderError::Unavailable { .. }))
}

pub(crate) fn not_running(sandbox: &Sandbox) -> EngineError {
    let cause = Box::new(sandbox.cause.clone());
    EngineError::NotRunning { sandbox: sandbox.id.clone(), phase: sandbox.phase.name(), cause }
}

impl Handle {
    /// Whose it is.
    pub fn sandbox(&self) -> &SandboxId {
        &self.instance.sandbox
    }

    /// The same for this user: what is done with it is written down as theirs.
    #[must_use]
    pub fn used_by(self, by: Actor) -> Self {
        Self { by, ..self }
    }

    /// Something was done with it (O7).
    async fn did(&self, kind: &'static str, cause: Option<&'static str>, data: serde_json::Value) {
        let Self { engine, project, instance, by } = self;
        engine.inner.tell(Deed { project, instance, by, kind, cause, data }).await;
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

    /// Has the provider take in what comes from a client.
    async fn take_in<T, F>(&self, content: ByteReader, take: impl FnOnce(ByteReader) -> F) -> Result<T>
    where
        F: Future<Output = std::result::Result<T, ProviderError>>,
    {
        let inner = &self.engine.inner;
        let taken = incoming::take_in(content, inner.config.budgets.save, take).await;
        if matches!(taken, Err(ProviderError::TimedOut { .. })) {
            inner.signal_health(self.sandbox());
        }
        taken.map_err(EngineError::Provider)
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
        self.execute_by(execution, spec, Actor::part("engine")).await
    }

    /// The same for somebody. One in the foreground is written down a moment later, a detached one before it is started
    /// (X1).
    pub async fn execute_by(&self, execution: &ExecutionId, spec: &ExecSpec, by: Actor) -> Result<ExecStatus> {
        let inner = &self.engine.inner;
        let now_ms = inner.clock.now_ms();
        let budget_ms = inner.config.budgets.call.as_millis() as u64;
        let starting_in = Some(self.generation());
        let until_ms = now_ms.saturating_add(budget_ms);
        let queued = Queued { spec: Box::new(spec.clone()), until_ms, running_max: None, starting_in };
        let row = Execution::asked(execution.clone(), self.place(), spec, by, now_ms, Stage::Queued(queued));
        if spec.detached {
            inner.check_open()?;
            self.intend(&row).await?;
        }
        let started = self.start(execution, spec).await;
        match &started {
            Ok(_) if spec.transient => {}
            Ok(status) => inner.note_execution(crate::execution::started(row, status.clone(), inner.clock.now_ms())),
            Err(error) if spec.detached => {
                let state = match error {
                    EngineError::Provider(ProviderError::TimedOut { .. } | ProviderError::Unavailable { .. }) => {
                        ExecState::Lost { cause: START_UNKNOWN.to_owned() }
                    }
                    other => ExecState::Failed { what: crate::effect::in_words(other) },
                };
                let mut row = row;
                row.end(state, inner.clock.now_ms(), true);
                inner.note_execution(row);
            }
            Err(_) => {}
        }
        started
    }

    /// Writes down that it is to be started here; one that is known already is left as it is.
    async fn intend(&self, row: &Execution) -> Result<()> {
        let inner = &self.engine.inner;
        // What is started now waits for nobody, so it takes no place in the queue.
        match inner.store.put_execution(inner.epoch, row.clone(), u64::MAX).await {
            Ok(()) | Err(StoreError::Conflict { .. }) => Ok(()),
            Err(other) => {
                let other = EngineError::from(other);
                inner.heed(&other);
                Err(other)
            }
        }
    }

    fn place(&self) -> Place {
        Place { project: self.project.clone(), sandbox: self.sandbox().clone(), generation: self.generation() }
    }

    /// Starts a command, and writes nothing down.
    pub(crate) async fn start(&self, execution: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus> {
        self.engine.inner.check_open()?;
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        let inner = &self.engine.inner;
        let started = self.call(inner.execute(&mutation, self.sandbox(), execution, spec)).await?;
        // What the provider tells may be less than what was asked.
        let told = ExecStatus { argv: spec.told_argv(), detached: spec.detached, ..started.clone() };
        inner.saw_start(&self.project, &self.instance, &self.by, &told).await;
        Ok(started)
    }

    /// Starts a command that nobody is there for, so it is no use of the sandbox by anybody.
    pub(crate) async fn execute_unattended(&self, execution: &ExecutionId, spec: &ExecSpec) -> Result<ExecStatus> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.execute(&mutation, self.sandbox(), execution, spec)).await
    }

    /// A fresh id for a command.
    pub fn new_execution(&self) -> ExecutionId {
        ExecutionId::from_bytes((self.engine.inner.draw)())
    }

    /// How a command stands.
    pub async fn execution(&self, execution: &ExecutionId) -> Result<ExecStatus> {
        let status = self.call(self.engine.inner.provider.execution(&self.instance, execution)).await?;
        self.engine.inner.saw(&status).await;
        Ok(status)
    }

    /// All commands that are still known.
    pub async fn executions(&self) -> Result<Vec<ExecStatus>> {
        let all = self.call(self.engine.inner.provider.executions(&self.instance)).await?;
        for status in &all {
            self.engine.inner.saw(status).await;
        }
        Ok(all)
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
        let output = self.call(self.engine.inner.provider.attach(&self.instance, execution, offset, follow)).await?;
        Ok(Box::new(Heard { engine: self.engine.clone(), output }))
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
        self.call(self.engine.inner.provider.signal(&mutation, self.sandbox(), execution, signal)).await?;
        self.did("execution.signalled", None, json!({ "execution": execution, "signal": signal })).await;
        Ok(())
    }

    /// Changes the size of a terminal.
    pub async fn resize(&self, execution: &ExecutionId, size: TtySize) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.resize(&mutation, self.sandbox(), execution, size)).await
    }

    /// Ends a command with its whole tree.
    pub async fn cancel(&self, execution: &ExecutionId) -> Result<ExecStatus> {
        let (inner, mutation) = (&self.engine.inner, self.mutation().await?);
        // What it wrote until now: whoever writes on within five seconds was not at its end (O2).
        let before = self.call(inner.provider.execution(&self.instance, execution)).await.ok();
        let (asked_ms, began) = (inner.clock.now_ms(), tokio::time::Instant::now());
        let answer = self.call(inner.provider.cancel(&mutation, self.sandbox(), execution)).await;
        inner.metrics.observe(&family::CANCELLATION_SECONDS, &[], began.elapsed().as_secs_f64());
        inner.metrics.count(&family::CANCELLATIONS, &[if answer.is_ok() { "ended" } else { "failed" }]);
        let took_ms = inner.clock.now_ms().saturating_sub(asked_ms);
        let mut data = json!({ "execution": execution, "took_ms": took_ms });
        let cause = match &answer {
            Ok(status) => {
                let wrote = before.map(|before| status.output_bytes.saturating_sub(before.output_bytes));
                data["wrote_bytes"] = json!(wrote);
                deeds::ended(&status.state).0
            }
            // Nobody saw it end: that is told, and counted.
            Err(error) if is_unanswered(error) => {
                data["message"] = json!(error.to_string());
                "unanswered"
            }
            Err(_) => return answer,
        };
        self.did("execution.cancel_asked", Some(cause), data).await;
        if let Ok(status) = &answer {
            inner.note_statuses(&self.place(), std::slice::from_ref(status));
            inner.saw(status).await;
        }
        answer
    }

    /// Somebody was told how a command ended.
    pub fn heard(&self, status: &ExecStatus) {
        if status.state.is_final() {
            self.engine.inner.note_statuses(&self.place(), std::slice::from_ref(status));
        }
    }

    /// Cuts the way out, at once and for what is under way too; what runs goes on without.
    pub(crate) async fn cut_network(&self) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.set_network(&mutation, self.sandbox(), false)).await
    }

    /// Connects again what was cut.
    pub(crate) async fn connect_network(&self) -> Result<()> {
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.set_network(&mutation, self.sandbox(), true)).await
    }

    /// Reads a part of a file.
    pub async fn file_read(&self, path: &str, offset: u64, length: Option<u64>) -> Result<ByteReader> {
        self.call(self.engine.inner.provider.file_read(&self.instance, path, offset, length)).await
    }

    /// Replaces a file. Takes as long as its content takes to come.
    pub async fn file_write(&self, file: &FileWrite, content: ByteReader) -> Result<FileStat> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        let provider = &self.engine.inner.provider;
        let stat =
            self.take_in(content, |content| provider.file_write(&mutation, self.sandbox(), file, content)).await?;
        self.did("file.written", None, json!({ "path": told_path(&file.path), "bytes": stat.size_bytes })).await;
        Ok(stat)
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
        self.call(self.engine.inner.provider.file_mkdir(&mutation, self.sandbox(), path)).await?;
        self.did("file.folder_made", None, json!({ "path": told_path(path) })).await;
        Ok(())
    }

    /// Moves a path.
    pub async fn file_move(&self, from: &str, to: &str) -> Result<()> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.file_move(&mutation, self.sandbox(), from, to)).await?;
        self.did("file.moved", None, json!({ "path": told_path(from), "to": told_path(to) })).await;
        Ok(())
    }

    /// Removes a path.
    pub async fn file_remove(&self, path: &str) -> Result<()> {
        let _using = self.active().await?;
        let mutation = self.mutation().await?;
        self.call(self.engine.inner.provider.file_remove(&mutation, self.sandbox(), path)).await?;
        self.did("file.removed", None, json!({ "path": told_path(path) })).await;
        Ok(())
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
        let provider = &self.engine.inner.provider;
        let put = |archive| provider.archive_put(&mutation, self.sandbox(), path, bounds, archive);
        let unpacked = self.take_in(archive, put).await?;
        let data = json!({ "path": told_path(path), "entries": unpacked.entries, "bytes": unpacked.bytes });
        self.did("file.unpacked", None, data).await;
        Ok(unpacked)
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
