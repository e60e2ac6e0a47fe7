//! Forks: new sandboxes from a snapshot, or from what a sandbox is at this moment. All of them, or none.

use std::collections::BTreeMap;
use std::sync::Arc;

use viv_core::lifecycle::{Actor, NewSandbox, Phase, Sandbox};
use viv_core::snapshot::{FORKS_MAX, ForkPlan, Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::{Name, Policy, Project, SandboxSpec, check_pairs};
use viv_core::{SandboxId, SnapshotId};
use viv_provider::{Capability, ProviderError};
use viv_store::{Change, Idempotency, StoreError};

use super::make::NewSnapshot;
use super::repeat::{Made, first, making};
use crate::aim::Aim;
use crate::command::KeyedBy;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::journal;
use crate::read::View;

/// What is forked.
#[derive(Debug, Clone)]
pub enum ForkedFrom {
    /// What this sandbox is now.
    Sandbox(Aim),
    /// This snapshot.
    Snapshot(SnapshotId),
}

/// Sandboxes that somebody wants to begin where another one is.
#[derive(Debug, Clone)]
pub struct ForkRequest {
    /// In whose project.
    pub project: Project,
    /// From what.
    pub from: ForkedFrom,
    /// How many.
    pub count: usize,
    /// What they are called: this and a number, or this if it is one. Without, they have no names.
    pub name: Option<Name>,
    /// By which rules they live; those of the sandbox that they come from when absent (L16).
    pub policy: Option<Policy>,
    /// Free labels, beside those that they get from where they come.
    pub labels: BTreeMap<String, String>,
    /// Whether what runs goes on in each of them, with its memory.
    pub memory: bool,
    /// Who asks.
    pub by: Actor,
    /// The key under which the request can be repeated.
    pub key: Option<KeyedBy>,
}

/// What came of a fork.
#[derive(Debug, Clone)]
pub struct Forked {
    /// What they begin with.
    pub snapshot: SnapshotId,
    /// They, as they were recorded: see [`Engine::wait_ready`].
    pub views: Vec<View>,
    /// Whether this request made them; otherwise one before it with the same key did.
    pub fresh: bool,
}

impl Engine {
    /// Records new sandboxes that begin where another one is, and answers before they are made.
    pub async fn fork(&self, request: ForkRequest) -> Result<Forked, EngineError> {
        let inner = &self.inner;
        inner.check_open()?;
        if request.count == 0 || request.count > FORKS_MAX {
            let what = format!("{} is no number of forks", request.count);
            return Err(EngineError::Invalid { what, hint: format!("between 1 and {FORKS_MAX} at once") });
        }
        let keyed = inner.keyed(request.key.clone(), route(&request.from), &request.project);
        if let Some(before) = inner.made_before(keyed.as_ref()).await? {
            return inner.forked_again(before).await;
        }
        let source = match &request.from {
            ForkedFrom::Sandbox(aim) => {
                let source = inner.load(aim.sandbox()).await?;
                // What is saved of it is that generation's, whatever comes after it.
                inner.check_aim(aim, &source)?;
                Some(source)
            }
            ForkedFrom::Snapshot(snapshot) => {
                let row = inner.good_snapshot(&request.project, snapshot).await?;
                match &row.sandbox {
                    Some(sandbox) => inner.store.get(sandbox).await?,
                    None => None,
                }
            }
        };
        if request.memory {
            inner.need_memory(&request, source.as_ref()).await?;
        }
        let plan = inner.plan(&request, source.as_ref())?;
        let ids = plan.ids.clone();
        // What is saved already is not saved again.
        let saved = match (&request.from, source.map(|source| source.phase)) {
            (ForkedFrom::Snapshot(snapshot), _) => Some(snapshot.clone()),
            (ForkedFrom::Sandbox(_), Some(Phase::Hibernated { snapshot })) => Some(snapshot),
            (ForkedFrom::Sandbox(_), _) => None,
        };
        let is_saved = saved.is_some();
        let snapshot = saved.unwrap_or_else(|| SnapshotId::from_bytes((inner.draw)()));
        let keyed = making(keyed, &Made { snapshot: snapshot.clone(), sandboxes: ids.clone() });
        let begun = match &request.from {
            ForkedFrom::Sandbox(aim) if !is_saved => {
                let new = NewSnapshot { name: None, labels: BTreeMap::new(), by: request.by.clone(), key: None };
                let kind = SnapshotKind::Fork;
                inner.begin_live(aim, &snapshot, kind, &new, Some(plan), keyed.as_ref()).await.map(drop)
            }
            ForkedFrom::Sandbox(_) | ForkedFrom::Snapshot(_) => {
                inner.fork_saved(&snapshot, &plan, keyed.as_ref()).await
            }
        };
        if let Err(before) = first(begun, keyed.as_ref())? {
            return inner.forked_again(before).await;
        }
        inner.reached("fork.committed");
        Ok(Forked { snapshot, views: inner.views(&ids).await?, fresh: true })
    }
}

/// Where a key is looked for: each way of forking has its own.
fn route(from: &ForkedFrom) -> &'static str {
    match from {
        ForkedFrom::Sandbox(_) => "sandboxes.fork",
        ForkedFrom::Snapshot(_) => "snapshots.fork",
    }
}

impl Inner {
    fn plan(&self, request: &ForkRequest, source: Option<&Sandbox>) -> Result<ForkPlan, EngineError> {
        let names = match &request.name {
            None => Vec::new(),
            Some(name) if request.count == 1 => vec![name.clone()],
            Some(name) => {
                (1..=request.count).map(|at| format!("{name}-{at}").parse()).collect::<Result<Vec<Name>, _>>()?
            }
        };
        let mut labels = source.map(|source| source.labels.clone()).unwrap_or_default();
        labels.extend(request.labels.clone());
        check_pairs("labels", &labels)?;
        let default = || Policy::default_for(request.name.as_ref());
        // A tombstone has nothing left to tell.
        let living = source.filter(|source| !source.is_over());
        let policy = request.policy.clone();
        let policy = policy.or_else(|| living.map(|source| source.policy.clone())).unwrap_or_else(default);
        policy.check()?;
        Ok(ForkPlan {
            ids: (0..request.count).map(|_| SandboxId::from_bytes((self.draw)())).collect(),
            names,
            spec: source.map_or_else(SandboxSpec::default, |source| source.spec.clone()),
            policy,
            labels,
            by: request.by.clone(),
            memory: request.memory,
        })
    }

    /// Refuses to fork a memory that is not there, and cannot be saved.
    async fn need_memory(&self, request: &ForkRequest, source: Option<&Sandbox>) -> Result<(), EngineError> {
        if let Some(why) = self.no_memory() {
            let (capability, why) = (Capability::SaveMemory, why.to_string());
            return Err(EngineError::Provider(ProviderError::Unsupported { capability, why }));
        }
        let saved = match (&request.from, source.map(|source| &source.phase)) {
            (ForkedFrom::Snapshot(snapshot), _) | (ForkedFrom::Sandbox(_), Some(Phase::Hibernated { snapshot })) => {
                snapshot
            }
            // It runs, and is saved with it.
            (ForkedFrom::Sandbox(_), _) => return Ok(()),
        };
        if self.snapshot_row(None, saved).await?.memory.is_some() {
            return Ok(());
        }
        let what = format!("{saved} was saved without memory");
        Err(EngineError::Invalid { what, hint: "fork one that runs, or was hibernated with its memory".to_owned() })
    }

    /// What a request before this one makes, or made.
    async fn forked_again(self: &Arc<Self>, made: Made) -> Result<Forked, EngineError> {
        let Made { snapshot, sandboxes } = made;
        let row = self.wait_saved(&snapshot).await?;
        // It came to nothing, and its key is free again; else they are there, also when the snapshot was removed since.
        if let (None, Some(first)) = (row, sandboxes.first())
            && self.store.get(first).await?.is_none()
        {
            return Err(EngineError::NoSnapshot { which: snapshot });
        }
        Ok(Forked { views: self.views(&sandboxes).await?, snapshot, fresh: false })
    }

    async fn views(self: &Arc<Self>, ids: &[SandboxId]) -> Result<Vec<View>, EngineError> {
        let mut views = Vec::with_capacity(ids.len());
        for id in ids {
            views.push(self.view(self.load(id).await?));
        }
        Ok(views)
    }

    /// They begin with a snapshot that is there, in one transaction, with the key under which they were asked for.
    async fn fork_saved(
        self: &Arc<Self>,
        snapshot: &SnapshotId,
        plan: &ForkPlan,
        keyed: Option<&Idempotency>,
    ) -> Result<(), EngineError> {
        let _entering = self.begin_entry()?;
        let row = self.snapshot_row(None, snapshot).await?;
        if row.state != SnapshotState::Ready {
            return Err(EngineError::NoSnapshot { which: snapshot.clone() });
        }
        let mut changes = self.forks(&row, plan);
        if let Some(first) = changes.first_mut() {
            first.idempotency = keyed.cloned();
        }
        let made: Vec<Sandbox> = changes.iter().map(|change| change.sandbox.clone()).collect();
        let committed = self.store.commit_all(self.epoch, changes).await;
        let committed = committed.inspect_err(|error| made.iter().for_each(|one| self.doubt(error, &one.id)));
        committed.map_err(|error| match error {
            StoreError::NameTaken { by } => {
                let name = plan.names.first().map(Name::to_string).unwrap_or_default();
                EngineError::NameTaken { name, by }
            }
            other => other.into(),
        })?;
        for sandbox in &made {
            self.committed(sandbox);
        }
        Ok(())
    }

    /// The records of a fork, which all begin now.
    pub(super) fn forks(&self, row: &Snapshot, plan: &ForkPlan) -> Vec<Change> {
        let now = self.now();
        let one = |(index, id): (usize, &SandboxId)| {
            let new = NewSandbox {
                id: id.clone(),
                project: row.project.clone(),
                name: plan.names.get(index).cloned(),
                spec: plan.spec.clone(),
                policy: plan.policy.clone(),
                labels: plan.labels.clone(),
                origin: Some(row.id.clone()),
                by: plan.by.clone(),
            };
            let sandbox = Sandbox::create(new, now.moment());
            let sandbox = match row.memory.as_ref().filter(|_| plan.memory) {
                Some(memory) => sandbox.with_memory(&row.id, memory),
                None => sandbox,
            };
            let lines = vec![journal::created(&sandbox, now.ms)];
            let quota = self.quota(&sandbox);
            Change { sandbox, lines, idempotency: None, quota, unused_since_ms: None, snapshots: Vec::new() }
        };
        plan.ids.iter().enumerate().map(one).collect()
    }
}
