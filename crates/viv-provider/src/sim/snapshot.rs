//! Saving, restoring and forking.

use viv_core::{OperationId, OwnerMark, SandboxId, SnapshotId};

use super::execution::Execution;
use super::lifecycle::Origin;
use super::state::State;
use super::tree::Tree;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{InstanceRef, InstanceSpec, Mutation, Observation, SaveRequest, Snapshot};

/// Why executions are lost to a save that is not live (X5).
const CAUSE_SAVED: &str = "saved";

type Result<T> = std::result::Result<T, ProviderError>;

/// A snapshot with its content.
#[derive(Debug)]
pub(super) struct Saved {
    snapshot: Snapshot,
    /// Which one saved it.
    operation: OperationId,
    at_ms: u64,
    tree: Tree,
    /// With memory: what ran, to run on.
    executions: Vec<Execution>,
}

impl State {
    pub(super) fn save(&mut self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        if request.memory {
            self.require(Capability::SaveMemory)?;
        }
        self.require(if request.live { Capability::SaveLive } else { Capability::SaveStopped })?;
        let now_ms = self.now_ms;
        self.change(mutation, sandbox)?;
        if let Some(saved) = self.snapshots.get(&request.snapshot) {
            if saved.operation == mutation.operation {
                return Ok(saved.snapshot.clone());
            }
            return Err(ProviderError::Conflict { what: format!("{} is another snapshot", request.snapshot) });
        }
        let instance = self.instances.get_mut(sandbox).ok_or(ProviderError::Absent)?;
        if request.live || request.memory {
            instance.need_alive()?;
        }
        let executions = if request.memory { instance.executions().to_vec() } else { Vec::new() };
        if !request.live {
            instance.lose_executions(now_ms, CAUSE_SAVED);
        }
        let snapshot = Snapshot {
            id: request.snapshot.clone(),
            source: instance.reference.clone(),
            size_bytes: instance.tree.bytes(),
            memory: request.memory,
        };
        let tree = instance.tree.copied(None);
        let operation = mutation.operation.clone();
        let saved = Saved { snapshot: snapshot.clone(), operation, at_ms: now_ms, tree, executions };
        self.snapshots.insert(request.snapshot.clone(), saved);
        Ok(snapshot)
    }

    pub(super) fn restore(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation> {
        self.require(Capability::Restore)?;
        self.make(mutation, sandbox, owner, spec, |state| {
            let saved = state.snapshots.get(snapshot);
            let saved = saved.ok_or_else(|| ProviderError::NotFound { what: snapshot.to_string() })?;
            let mut executions = saved.executions.clone();
            for execution in &mut executions {
                execution.wake_up(state.now_ms.saturating_sub(saved.at_ms));
            }
            Ok(Origin { tree: saved.tree.copied(spec.limits.disk_bytes), executions })
        })
    }

    pub(super) fn fork(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation> {
        self.require(Capability::Fork)?;
        self.make(mutation, sandbox, owner, spec, |state| {
            let source = state.read(source)?;
            source.need_alive()?;
            Ok(Origin { tree: source.tree.copied(spec.limits.disk_bytes), executions: Vec::new() })
        })
    }
}
