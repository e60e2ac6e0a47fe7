//! The trait, verb by verb.

use std::io::Cursor;
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::AsyncReadExt;
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, Identity, OwnerMark, RequestId, SandboxId, SnapshotId};

use super::SimProvider;
use super::execution::Execution;
use super::instance::Instance;
use super::process::SIGNAL_MAX;
use super::stream::{SimOutput, SimRequests, SimWatch};
use super::tree::conflict;
use crate::capability::{Capabilities, Capability};
use crate::error::ProviderError;
use crate::instance::{
    Deadline, DeadlineChange, DiskUsage, Ended, InstanceRef, InstanceSpec, LogPart, Mutation, Observation, Obstacle,
    Page, PageRequest, SaveRequest, Snapshot, SnapshotSeen, Whereabouts,
};
use crate::limits::ResourceLimits;
use crate::provider::{ByteReader, Dialled, FileWrite, OutputStream, Provider, RequestStream, WatchStream};

/// Most that one upload may hold, because all of it is kept in memory.
const UPLOAD_BYTES_MAX: u64 = 256 << 20;

type Result<T> = std::result::Result<T, ProviderError>;

/// Reads an upload to its end.
async fn received(content: ByteReader) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = content.take(UPLOAD_BYTES_MAX + 1).read_to_end(&mut bytes).await;
    read.map_err(|error| ProviderError::Failed { what: format!("the upload broke off: {error}") })?;
    if bytes.len() as u64 > UPLOAD_BYTES_MAX {
        let what = format!("more than {UPLOAD_BYTES_MAX} bytes");
        return Err(ProviderError::Exhausted { limit: "upload", what });
    }
    Ok(bytes)
}

#[async_trait]
impl Provider for SimProvider {
    #[expect(clippy::unnecessary_literal_bound, reason = "the trait leaves the lifetime to the implementation")]
    fn name(&self) -> &str {
        "sim"
    }

    fn capabilities(&self) -> Capabilities {
        self.settled().capabilities.clone()
    }

    fn looks_again_after(&self) -> Option<Duration> {
        self.settled().looks_again_after
    }

    async fn create(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        self.change(|state| state.create(mutation, sandbox, owner, spec))
    }

    async fn observe(&self, instance: &InstanceRef) -> Result<Observation> {
        self.look(|state| Ok(state.observe(instance)))
    }

    async fn list(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page> {
        self.look(|state| state.list(owner, &page))
    }

    async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended> {
        self.wait(|state| state.end_of(instance).transpose()).await
    }

    async fn destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.change(|state| state.destroy(mutation, sandbox))
    }

    async fn extend(&self, mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Result<Deadline> {
        self.change(|state| {
            state.require(Capability::Extend)?;
            state.change_once(mutation, sandbox, |instance, now_ms| instance.extend(now_ms, change))
        })
    }

    async fn set_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits> {
        self.change(|state| {
            state.require(Capability::LimitsLive)?;
            state.require_limits(change)?;
            if change.disk_bytes.is_some() {
                state.require(Capability::LimitDiskLive)?;
            }
            state.change_once(mutation, sandbox, |instance, _| instance.set_limits(change))
        })
    }

    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.change(|state| {
            state.require(Capability::Freeze)?;
            state.change_once(mutation, sandbox, Instance::freeze)
        })
    }

    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.change(|state| {
            state.require(Capability::Freeze)?;
            state.change_once(mutation, sandbox, Instance::thaw)
        })
    }

    async fn set_network(&self, mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> Result<()> {
        self.change(|state| {
            if connected && state.connects_fail > 0 {
                state.connects_fail -= 1;
                let source = std::io::Error::other("simulated");
                return Err(ProviderError::Unavailable { what: "the network".to_owned(), source });
            }
            state.change_once(mutation, sandbox, |instance, _| {
                instance.is_cut = !connected;
                Ok(())
            })
        })
    }

    async fn save(&self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        self.change(|state| state.save(mutation, sandbox, request))
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
        self.look(|state| state.snapshot(snapshot))
    }

    async fn snapshots(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page<SnapshotSeen>> {
        self.look(|state| state.snapshots(owner, &page))
    }

    async fn remove_snapshot(&self, mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()> {
        self.change(|state| state.remove_snapshot(mutation, sandbox, snapshot))
    }

    async fn disk_usage(&self, instance: &InstanceRef) -> Result<DiskUsage> {
        self.look(|state| {
            state.require(Capability::Usage)?;
            Ok(state.read(instance)?.disk_usage())
        })
    }

    async fn restore(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation> {
        self.change(|state| state.restore(mutation, sandbox, owner, spec, snapshot))
    }

    async fn fork(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation> {
        self.change(|state| state.fork(mutation, sandbox, owner, spec, source))
    }

    async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus> {
        self.change(|state| {
            if spec.tty.is_some() {
                state.require(Capability::Tty)?;
            }
            let now_ms = state.now_ms;
            state.change(mutation, sandbox)?.execute(now_ms, execution, spec)
        })
    }

    async fn identity(&self, instance: &InstanceRef) -> Result<Identity> {
        self.look(|state| state.identity(instance))
    }

    /// Nothing of it is anywhere.
    async fn whereabouts(&self, instance: &InstanceRef) -> Result<Whereabouts> {
        self.look(|state| state.read(instance).map(|_| Whereabouts::default()))
    }

    /// Nobody keeps it, so nobody wrote anything down.
    async fn log_tail(&self, instance: &InstanceRef, _bytes_max: u64) -> Result<Vec<LogPart>> {
        self.look(|state| state.read(instance).map(|_| Vec::new()))
    }

    async fn execution(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus> {
        self.look(|state| Ok(state.read(instance)?.execution(execution)?.status()))
    }

    async fn executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>> {
        self.look(|state| {
            let all = state.read(instance)?.executions().iter();
            Ok(all.filter(|one| !one.spec.transient).map(Execution::status).collect())
        })
    }

    async fn attach(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>> {
        self.look(|state| state.read(instance)?.execution(execution).map(drop))?;
        Ok(Box::new(SimOutput {
            provider: self.clone(),
            instance: instance.clone(),
            execution: execution.clone(),
            offset,
            follow,
            is_over: false,
        }))
    }

    async fn write_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
    ) -> Result<u64> {
        self.change(|state| {
            let now_ms = state.now_ms;
            let instance = state.change(mutation, sandbox)?;
            instance.need_running()?;
            let (execution, mut host) = instance.execution_mut(execution, now_ms)?;
            execution.input(&mut host, offset, data)
        })
    }

    async fn close_stdin(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<()> {
        self.change(|state| {
            let now_ms = state.now_ms;
            let instance = state.change(mutation, sandbox)?;
            instance.need_running()?;
            let (execution, mut host) = instance.execution_mut(execution, now_ms)?;
            execution.close_input(&mut host);
            Ok(())
        })
    }

    async fn signal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()> {
        self.change(|state| {
            state.change_once(mutation, sandbox, |instance, now_ms| {
                instance.need_running()?;
                let (execution, mut host) = instance.execution_mut(execution, now_ms)?;
                if !(1..=SIGNAL_MAX).contains(&signal) {
                    let hint = format!("signals go from 1 to {SIGNAL_MAX}");
                    return Err(ProviderError::Invalid { what: format!("there is no signal {signal}"), hint });
                }
                execution.signal(&mut host, signal)
            })
        })
    }

    async fn resize(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()> {
        self.change(|state| {
            state.require(Capability::Tty)?;
            state.change_once(mutation, sandbox, |instance, now_ms| {
                instance.need_running()?;
                instance.execution_mut(execution, now_ms)?.0.resize(size)
            })
        })
    }

    async fn cancel(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<ExecStatus> {
        let until_ms = self.change(|state| {
            let now_ms = state.now_ms;
            let instance = state.change(mutation, sandbox)?;
            if !instance.execution(execution)?.is_final() {
                instance.need_running()?;
                let (execution, mut host) = instance.execution_mut(execution, now_ms)?;
                execution.cancel(&mut host);
            }
            Ok(now_ms.saturating_add(mutation.budget_ms))
        })?;
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        // Somebody else may freeze or destroy it meanwhile; the wait then ends by its budget or by the absence.
        self.wait(|state| match state.read(&instance).and_then(|found| found.execution(execution)) {
            Ok(found) if found.is_final() => Some(Ok(found.status())),
            Ok(_) if state.now_ms >= until_ms => {
                Some(Err(ProviderError::TimedOut { what: "cancel", after_ms: mutation.budget_ms }))
            }
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        })
        .await
    }

    async fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader> {
        let content = self.look(|state| state.file_read(instance, path, offset, length))?;
        Ok(Box::new(Cursor::new(content)))
    }

    async fn file_write(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat> {
        let content = received(content).await?;
        self.change(|state| state.file_write(mutation, sandbox, file, content))
    }

    async fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        self.look(|state| state.file_stat(instance, path))
    }

    async fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        self.look(|state| state.file_list(instance, path, depth))
    }

    async fn file_mkdir(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.change(|state| state.file_mkdir(mutation, sandbox, path))
    }

    async fn file_move(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        self.change(|state| state.file_move(mutation, sandbox, from, to))
    }

    async fn file_remove(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.change(|state| state.file_remove(mutation, sandbox, path))
    }

    async fn file_watch(&self, instance: &InstanceRef, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>> {
        let (path, next) = self.look(|state| {
            state.require(Capability::FileWatch)?;
            let tree = &state.read_running(instance)?.tree;
            let path = tree.resolve(path, true)?;
            if !tree.need(&path)?.is_dir() {
                return Err(conflict(&path, "is not a directory"));
            }
            Ok((path, tree.changed()))
        })?;
        Ok(Box::new(SimWatch { provider: self.clone(), instance: instance.clone(), path, recursive, next }))
    }

    async fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader> {
        let archive = self.look(|state| state.archive_get(instance, path))?;
        Ok(Box::new(Cursor::new(archive)))
    }

    async fn archive_put(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked> {
        let archive = received(archive).await?;
        self.change(|state| state.archive_put(mutation, sandbox, path, bounds, &archive))
    }

    async fn dial(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>> {
        self.look(|state| {
            state.require(Capability::Ports)?;
            state.read_running(instance)?;
            // No simulated program listens.
            Err(ProviderError::NotFound { what: format!("port {port}") })
        })
    }

    /// Nothing simulated is ever in the way.
    async fn memory_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        self.look(|state| {
            state.require(Capability::SaveMemory)?;
            state.read(instance)?.need_alive().map(|()| Vec::new())
        })
    }

    fn memory_left(&self) -> Option<f64> {
        self.settled().memory_left
    }

    async fn requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        let listener = self.change(|state| {
            state.require(Capability::Requests)?;
            state.read_running(instance)?;
            let found = state.instances.get_mut(&instance.sandbox).ok_or(ProviderError::Absent)?;
            Ok(found.begin_listening())
        })?;
        Ok(Box::new(SimRequests { provider: self.clone(), instance: instance.clone(), listener }))
    }

    async fn answer_request(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        self.change(|state| {
            state.require(Capability::Requests)?;
            state.change_once(mutation, sandbox, |instance, now_ms| instance.answer_request(now_ms, request, answer))
        })
    }
}
