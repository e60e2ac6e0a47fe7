//! Create (L1): the intent commits before any provider call.

use std::collections::BTreeMap;

use viv_core::lifecycle::{Actor, NewSandbox, Sandbox};
use viv_core::spec::{Name, Policy, Project, SandboxSpec, check_pairs};
use viv_core::{SandboxId, SnapshotId};
use viv_store::{Change, Idempotency, StoreError};

use crate::engine::Engine;
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
        self.create_as(SandboxId::from_bytes((self.inner.draw)()), request).await
    }

    /// The same under an id of the caller's: one that is there already is what this request made before.
    pub(crate) async fn create_as(&self, id: SandboxId, request: CreateRequest) -> Result<Created, EngineError> {
        let inner = &self.inner;
        let _entering = inner.begin_entry()?;
        let CreateRequest { project, name, spec, policy, labels, snapshot, by, key } = request;
        spec.check()?;
        policy.check()?;
        check_pairs("labels", &labels)?;
        if let Some(snapshot) = &snapshot {
            inner.good_snapshot(&project, snapshot).await?;
        }
        let at = inner.moment();
        let idempotency = key.map(|KeyedBy { key, body_hash }| Idempotency {
            project: project.clone(),
            route: "sandboxes.create".to_owned(),
            key,
            body_hash,
            at_ms: at.now_ms,
            made: None,
        });
        let made = id.clone();
        let named = name.clone();
        let new = NewSandbox { id, project: project.clone(), name, spec, policy, labels, origin: snapshot, by };
        // The lease comes with the first effect; its token is not part of the intent.
        let sandbox = Sandbox::create(new, at);
        let quota = inner.quota(&sandbox);
        let lines = vec![journal::created(&sandbox, at.now_ms)];
        let change = Change {
            sandbox: sandbox.clone(),
            lines,
            idempotency: idempotency.clone(),
            quota,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        match Box::pin(inner.write(change)).await {
            Ok(()) => {}
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
        }
        inner.reached("create.committed");
        inner.committed(&sandbox);
        Ok(Created { view: inner.view(sandbox), fresh: true })
    }
}
