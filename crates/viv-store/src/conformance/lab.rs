//! What cases are made of.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use viv_core::SandboxId;
use viv_core::lifecycle::{
    Actor, MakeStep, Moment, NewSandbox, Phase, PhaseName, ResumeStep, Sandbox, Timings, VerifyStep, Work,
};
use viv_core::spec::{Policy, Project, SandboxSpec};

use super::World;
use crate::error::StoreError;
use crate::journal::{Cursor, JournalFilter, JournalLine, NewLine};
use crate::record::{Change, Idempotency, ListQuery, Owner, Quota};
use crate::store::{Epoch, Store};

/// More than any case writes.
pub(super) const MANY: usize = 100_000;

/// A world, and an ownership of it.
pub struct Lab {
    /// What is tested.
    pub(super) store: Arc<dyn Store>,
    /// The ownership that cases write under.
    pub(super) epoch: Epoch,
    pub(super) world: Box<dyn World>,
    ids: AtomicU64,
}

impl Lab {
    /// Takes the world's store over.
    pub async fn new(world: Box<dyn World>) -> Self {
        let store = world.store();
        let epoch = store.own(owner("first")).await.expect("an empty store can be owned");
        Self { store, epoch, world, ids: AtomicU64::new(0) }
    }

    /// An id that no other call gave, in no order.
    pub(super) fn id(&self) -> SandboxId {
        let count = u128::from(self.ids.fetch_add(1, Ordering::Relaxed) + 1);
        SandboxId::from_bytes(count.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835).to_be_bytes())
    }

    /// A new record: being made, unnamed, in the default project, created at this time.
    pub(super) fn new_sandbox(&self, created_at_ms: u64) -> Sandbox {
        let new = NewSandbox {
            id: self.id(),
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: Policy::default_for(None),
            labels: BTreeMap::new(),
            origin: None,
            by: Actor::part("suite"),
        };
        let at = Moment { now_ms: created_at_ms, timings: &Timings::default(), no_memory: None };
        Sandbox::create(new, at)
    }

    /// One that has a name.
    pub(super) fn named(&self, created_at_ms: u64, name: &str) -> Sandbox {
        Sandbox { name: Some(name.parse().unwrap()), ..self.new_sandbox(created_at_ms) }
    }

    /// Writes a record with one line.
    pub(super) async fn commit(&self, sandbox: &Sandbox) -> Result<Cursor, StoreError> {
        self.store.commit(self.epoch, change(sandbox)).await
    }

    /// Writes a record that has to be taken.
    pub(super) async fn put(&self, sandbox: &Sandbox) -> Cursor {
        self.commit(sandbox).await.expect("a good commit")
    }

    /// Writes the next version of a record.
    pub(super) async fn put_next(&self, sandbox: &mut Sandbox, change: impl FnOnce(&mut Sandbox)) {
        change(sandbox);
        sandbox.version += 1;
        self.put(sandbox).await;
    }

    /// All lines.
    pub(super) async fn lines(&self) -> Vec<JournalLine> {
        self.store.journal(Cursor(0), &JournalFilter::default(), MANY).await.unwrap()
    }

    /// What is stored of a record.
    pub(super) async fn get(&self, sandbox: &Sandbox) -> Option<Sandbox> {
        self.store.get(&sandbox.id).await.unwrap()
    }
}

/// A phase with this name.
pub(super) fn phase(name: PhaseName) -> Phase {
    let work =
        Work { operation: "op_1".parse().unwrap(), attempt: 1, deadline_at_ms: 5_000, retry_at_ms: 0, overdue: false };
    let snapshot: viv_core::SnapshotId = "snp_1".parse().unwrap();
    match name {
        PhaseName::Provisioning => Phase::Provisioning { step: MakeStep::Make, rebuilds: 0, work },
        PhaseName::Verifying => Phase::Verifying {
            step: VerifyStep::Probe,
            rebuilds: 1,
            findings: 2,
            found_at_ms: 3,
            was_ready: true,
            work,
        },
        PhaseName::Ready => Phase::Ready,
        PhaseName::Frozen => Phase::Frozen { step: viv_core::lifecycle::FreezeStep::Freeze { work } },
        PhaseName::Hibernating => {
            Phase::Hibernating { step: viv_core::lifecycle::HibernateStep::Save, save_failed: true, work }
        }
        PhaseName::Hibernated => Phase::Hibernated { snapshot },
        PhaseName::Resuming => Phase::Resuming { step: ResumeStep::Clear, snapshot, rebuilds: 2, work },
        PhaseName::Lost => Phase::Lost,
        PhaseName::Failed => Phase::Failed { work: Some(work) },
        PhaseName::Stopping => Phase::Stopping { work },
        PhaseName::Stopped => Phase::Stopped,
    }
}

/// A change with one line, which tells the version.
pub(super) fn change(sandbox: &Sandbox) -> Change {
    Change {
        sandbox: sandbox.clone(),
        lines: vec![about(sandbox)],
        idempotency: None,
        quota: None,
        unused_since_ms: None,
        snapshots: Vec::new(),
    }
}

/// The same under a key.
pub(super) fn keyed(sandbox: &Sandbox, key: &str) -> Change {
    Change { idempotency: Some(idempotency(&sandbox.project, key)), ..change(sandbox) }
}

/// The same under limits.
pub(super) fn limited(sandbox: &Sandbox, total_max: u64, project_max: u64) -> Change {
    Change { quota: Some(Quota::of(total_max, project_max)), ..change(sandbox) }
}

/// A key for creating.
pub(super) fn idempotency(project: &Project, key: &str) -> Idempotency {
    Idempotency {
        project: project.clone(),
        route: "create".to_owned(),
        key: key.to_owned(),
        body_hash: [7; 32],
        at_ms: 1_000,
        made: None,
    }
}

/// A line about a version of a record.
pub(super) fn about(sandbox: &Sandbox) -> NewLine {
    NewLine {
        at_ms: sandbox.phase_since_ms,
        project: Some(sandbox.project.clone()),
        sandbox: Some(sandbox.id.clone()),
        generation: Some(sandbox.generation),
        kind: "sandbox.moved".to_owned(),
        from: None,
        to: Some(sandbox.phase.name()),
        cause: Some("requested".to_owned()),
        by: Actor::part("suite"),
        data: serde_json::json!({ "version": sandbox.version }),
    }
}

/// A line about nothing, at a time.
pub(super) fn note(at_ms: u64, text: &str) -> NewLine {
    NewLine {
        at_ms,
        project: None,
        sandbox: None,
        generation: None,
        kind: "note".to_owned(),
        from: None,
        to: None,
        cause: None,
        by: Actor::part("suite"),
        data: serde_json::json!({ "text": text }),
    }
}

/// An owner by this name.
pub(super) fn owner(name: &str) -> Owner {
    Owner { name: name.to_owned(), boot_id: "boot".to_owned(), pid: 1, start_ticks: 2, epoch: 0, since_ms: 3 }
}

/// A query for everything.
pub(super) fn everything() -> ListQuery {
    ListQuery { deleted: true, limit: MANY, ..ListQuery::default() }
}

/// Makes this many calls at once and gives their answers.
pub(super) async fn at_once<T, F>(count: usize, call: impl Fn(usize) -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let calls: Vec<_> = (0..count).map(|at| tokio::spawn(call(at))).collect();
    let mut answers = Vec::with_capacity(count);
    for call in calls {
        answers.push(call.await.expect("a call that does not panic"));
    }
    answers
}
