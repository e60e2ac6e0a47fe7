//! Create (L1): the intent commits before any provider call.

use std::collections::BTreeMap;

use viv_core::lifecycle::{Actor, NewSandbox, Sandbox};
use viv_core::planted::{Planted, is_planted};
use viv_core::spec::{Name, Policy, Project, SandboxSpec, check_pairs};
use viv_core::{SandboxId, SnapshotId};
use viv_store::{Change, Idempotency, StoreError};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::journal;
use crate::read::View;

/// A sandbox that somebody wants.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// Whose it is.
    pub project: Project,
    /// What it is called.
    pub name: Option<Name>,
    /// What its instances are made of.
    pub spec: SandboxSpec,
    /// By which rules it lives.
    pub policy: Policy,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// The snapshot that it begins with, instead of with its image.
    pub snapshot: Option<SnapshotId>,
    /// Who asks.
    pub by: Actor,
    /// The key under which the request can be repeated.
    pub key: Option<KeyedBy>,
}

/// A key that a client gave, with a hash of the body that came with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyedBy {
    /// The key.
    pub key: String,
    /// The hash.
    pub body_hash: [u8; 32],
}

/// What came of a create.
#[derive(Debug, Clone)]
pub struct Created {
    /// The sandbox.
    pub view: View,
    /// Whether this request made it; otherwise one before it with the same key did.
    pub fresh: bool,
}

impl Engine {
    /// Records a new sandbox, and answers before it is made: see [`Engine::wait_ready`].
    pub async fn create(&self, request: CreateRequest) -> Result<Created, EngineError> {
        self.make(None, request).await
    }

    /// The same under an id of the caller's: one that is there already is what this request made before.
    pub(crate) async fn create_as(&self, id: SandboxId, request: CreateRequest) -> Result<Created, EngineError> {
        self.make(Some(id), request).await
    }

    async fn make(&self, id: Option<SandboxId>, request: CreateRequest) -> Result<Created, EngineError> {
        let inner = &self.inner;
        let _entering = inner.begin_entry()?;
        let CreateRequest { project, name, spec, policy, labels, snapshot, by, key } = request;
        spec.check()?;
        policy.check()?;
        check_pairs("labels", &labels)?;
        if project.is_spares() {
            let what = format!("the project {project} is where spares are kept");
            return Err(EngineError::Invalid { what, hint: "choose another project".to_owned() });
        }
        if let Some(snapshot) = &snapshot {
            inner.good_snapshot(&project, snapshot).await?;
        }
        let now = inner.now();
        let idempotency = key.map(|KeyedBy { key, body_hash }| Idempotency {
            project: project.clone(),
            route: "sandboxes.create".to_owned(),
            key,
            body_hash,
            at_ms: now.ms,
            made: None,
        });
        let idempotency = idempotency.filter(|_| !is_planted(Planted::KeyForgotten));
        // Who has an id already did not get a spare's.
        let is_new = id.is_none();
        let id = id.unwrap_or_else(|| SandboxId::from_bytes((inner.draw)()));
        let made = id.clone();
        let named = name.clone();
        let new = NewSandbox { id, project: project.clone(), name, spec, policy, labels, origin: snapshot, by };
        let claimed = if is_new { inner.claim_spare(&new, idempotency.as_ref()).await } else { Ok(None) };
        let written = match claimed {
            Ok(Some(claimed)) => Ok(claimed),
            Ok(None) => inner.record_new(new, idempotency.clone()).await,
            Err(error) => Err(error),
        };
        let sandbox = match written {
            Ok(sandbox) => sandbox,
            Err(StoreError::Repeated(before)) => {
                if idempotency.is_some_and(|asked| asked.body_hash != before.body_hash) {
                    return Err(EngineError::IdempotencyMismatch { made: before.sandbox.to_string() });
                }
                let sandbox = inner.load(&before.sandbox).await?;
                return Ok(Created { view: inner.view(sandbox), fresh: false });
            }
            Err(StoreError::Conflict { found, .. }) if found > 0 => {
                let sandbox = inner.load(&made).await?;
                return Ok(Created { view: inner.view(sandbox), fresh: false });
            }
            Err(StoreError::NameTaken { by }) => {
                let name = named.map(|name| name.to_string()).unwrap_or_default();
                return Err(EngineError::NameTaken { name, by });
            }
            Err(other) => {
                inner.doubt(&other, &made);
                return Err(other.into());
            }
        };
        inner.reached("create.committed");
        inner.committed(&sandbox);
        Ok(Created { view: inner.view(sandbox), fresh: true })
    }
}

impl Inner {
    /// Records a sandbox that is to be made. Its lease comes with the first effect; the token is not part of the intent.
    async fn record_new(&self, new: NewSandbox, idempotency: Option<Idempotency>) -> Result<Sandbox, StoreError> {
        let now = self.now();
        let sandbox = Sandbox::create(new, now.moment());
        let change = Change {
            quota: self.quota(&sandbox),
            lines: vec![journal::created(&sandbox, now.ms)],
            sandbox: sandbox.clone(),
            idempotency,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        Box::pin(self.write(change)).await.map(|()| sandbox)
    }
}
