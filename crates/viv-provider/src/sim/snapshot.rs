//! Saving, keeping, restoring and forking.
//!
//! ```text
//!   (free) ──save──► kept ──remove──► removed     and no id ever comes back
//!      └───────remove (never was)───────▲
//! ```

use viv_core::planted::{Planted, is_planted};
use viv_core::{EndCause, OperationId, OwnerMark, SandboxId, SnapshotId};

use super::execution::Execution;
use super::lifecycle::{Origin, PAGE_ITEMS_MAX, page_of};
use super::state::State;
use super::tree::Tree;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{
    InstanceRef, InstanceSpec, Integrity, Mutation, Observation, Page, PageRequest, Recall, SaveCost, SaveRequest,
    Snapshot, SnapshotSeen,
};

/// The ways to make a snapshot. Without any of them there are none to look at; then the first one is what is missed.
const SAVES: [Capability; 3] = [Capability::SaveStopped, Capability::SaveLive, Capability::SaveMemory];

type Result<T> = std::result::Result<T, ProviderError>;

/// A snapshot with its content.
#[derive(Debug)]
pub(super) struct Saved {
    snapshot: Snapshot,
    /// Which one saved it.
    operation: OperationId,
    tree: Tree,
    /// With memory: what ran, to run on.
    executions: Vec<Execution>,
    /// It is not what was saved any more.
    damaged: bool,
}

impl State {
    pub(super) fn save(&mut self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        if request.memory {
            self.require(Capability::SaveMemory)?;
        }
        self.require(if request.live { Capability::SaveLive } else { Capability::SaveStopped })?;
        let now_ms = self.now_ms;
        self.change(mutation, sandbox)?;
        if let Some(saved) = self.snapshots.get(&request.snapshot)
            && saved.operation == mutation.operation
        {
            return Ok(saved.snapshot.clone());
        }
        let instance = self.instances.get_mut(sandbox).ok_or(ProviderError::Absent)?;
        if request.live || request.memory {
            instance.need_alive()?;
        }
        if let Some(why) = self.dumps_fail.as_ref().filter(|_| request.memory) {
            return Err(ProviderError::Failed { what: format!("its memory cannot be saved: {why}") });
        }
        if self.snapshots.contains_key(&request.snapshot) || self.removed.contains(&request.snapshot) {
            return Err(ProviderError::Conflict { what: format!("{} is or was another snapshot", request.snapshot) });
        }
        let executions = if request.memory { instance.executions().to_vec() } else { Vec::new() };
        if !request.live {
            instance.end(now_ms, EndCause::Saved);
        }
        let snapshot = Snapshot {
            id: request.snapshot.clone(),
            source: instance.reference.clone(),
            owner: instance.owner.clone(),
            parent: instance.parent.clone(),
            size_bytes: instance.tree.bytes(),
            memory: request.memory,
            live: request.live,
            created_at_ms: now_ms,
            // No time passes within a call, and content is shared.
            cost: SaveCost::default(),
        };
        let tree = instance.tree.copied(None);
        let saved = Saved {
            snapshot: snapshot.clone(),
            operation: mutation.operation.clone(),
            tree,
            executions,
            damaged: false,
        };
        self.snapshots.insert(request.snapshot.clone(), saved);
        Ok(snapshot)
    }

    /// Refuses where nothing can be saved.
    fn require_snapshots(&self) -> Result<()> {
        if SAVES.into_iter().any(|save| self.capabilities.can(save)) {
            return Ok(());
        }
        self.require(SAVES[0])
    }

    /// A snapshot that is there.
    fn saved(&self, snapshot: &SnapshotId) -> Result<&Saved> {
        self.snapshots.get(snapshot).ok_or_else(|| ProviderError::NotFound { what: snapshot.to_string() })
    }

    /// What was saved is not what is there any more. Whether there was anything.
    pub(super) fn damage_snapshot(&mut self, snapshot: &SnapshotId) -> bool {
        self.snapshots.get_mut(snapshot).map(|saved| saved.damaged = true).is_some()
    }

    /// Instances that were made from a snapshot.
    fn users<'s>(&'s self, snapshot: &'s SnapshotId) -> impl Iterator<Item = &'s InstanceRef> {
        let made_from = move |instance: &&super::instance::Instance| instance.parent.as_ref() == Some(snapshot);
        self.instances.values().filter(made_from).map(|instance| &instance.reference)
    }

    fn seen(&self, saved: &Saved) -> SnapshotSeen {
        SnapshotSeen {
            snapshot: saved.snapshot.clone(),
            integrity: if saved.damaged { Integrity::Damaged } else { Integrity::Verified },
            memory_damage: None,
            own_bytes: saved.tree.own_bytes(),
            used_by: self.users(&saved.snapshot.id).cloned().collect(),
        }
    }

    pub(super) fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
        self.require_snapshots()?;
        Ok(self.seen(self.saved(snapshot)?))
    }

    pub(super) fn snapshots(&self, owner: &OwnerMark, page: &PageRequest) -> Result<Page<SnapshotSeen>> {
        self.require_snapshots()?;
        let after: Option<SnapshotId> = page.cursor.as_deref().map(str::parse).transpose()?;
        let limit = page.limit.unwrap_or(PAGE_ITEMS_MAX).clamp(1, PAGE_ITEMS_MAX);
        let items: Vec<_> = self
            .snapshots
            .iter()
            .filter(|(id, saved)| saved.snapshot.owner == *owner && Some(*id) > after.as_ref())
            .take(limit + 1)
            .map(|(_, saved)| self.seen(saved))
            .collect();
        Ok(page_of(items, limit, |item| item.snapshot.id.to_string()))
    }

    pub(super) fn remove_snapshot(
        &mut self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<()> {
        self.require_snapshots()?;
        self.fences.admit_token(sandbox, mutation.token)?;
        let conflict = |why: String| Err(ProviderError::Conflict { what: format!("{snapshot} {why}") });
        match self.snapshots.get(snapshot) {
            Some(saved) if saved.snapshot.source.sandbox != *sandbox => {
                return conflict(format!("is of {}", saved.snapshot.source.sandbox));
            }
            Some(_) | None => {}
        }
        if let Some(user) = self.users(snapshot).next() {
            return conflict(format!("is used by {user}"));
        }
        self.snapshots.remove(snapshot);
        self.removed.insert(snapshot.clone());
        Ok(())
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
            let saved = state.saved(snapshot)?;
            if saved.damaged && !is_planted(Planted::DamagedIsBegunWith) {
                return Err(ProviderError::Failed { what: format!("{snapshot} is damaged") });
            }
            let mut executions = match &spec.recall {
                Recall::IfPossible => saved.executions.clone(),
                Recall::Required if saved.snapshot.memory => saved.executions.clone(),
                Recall::Required => {
                    return Err(ProviderError::Failed { what: format!("{snapshot} was saved without its memory") });
                }
                Recall::Never | Recall::GivenUp { .. } => Vec::new(),
            };
            for execution in &mut executions {
                if saved.snapshot.source.sandbox != *sandbox {
                    execution.id = execution.id.copied_into(sandbox);
                }
                execution.wake_up(state.now_ms.saturating_sub(saved.snapshot.created_at_ms));
            }
            let tree = saved.tree.copied(spec.limits.in_force().disk_bytes);
            Ok(Origin { tree, executions, parent: Some(snapshot.clone()) })
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
            let tree = source.tree.copied(spec.limits.in_force().disk_bytes);
            Ok(Origin { tree, executions: Vec::new(), parent: source.parent.clone() })
        })
    }
}
