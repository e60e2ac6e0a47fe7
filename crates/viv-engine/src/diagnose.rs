//! Everything that is known of one sandbox, apart and together (T8), with what it means in words.

use std::collections::BTreeSet;
use std::sync::Arc;

use viv_core::hook::HookAction;
use viv_core::lifecycle::{Finding, Phase, Sandbox, Status};
use viv_core::snapshot::{Snapshot, SnapshotKind, SnapshotState};
use viv_core::spec::Project;
use viv_provider::{Observation, Whereabouts};
use viv_store::Lease;

use crate::breaker::destination;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::read::{View, Which, has_instance};

/// Snapshots that are told one by one; the others are counted.
const SNAPSHOTS_TOLD: usize = 10;

/// Everything that is known of one sandbox.
#[derive(Debug, Clone)]
pub struct Diagnosis {
    /// How it is.
    pub view: View,
    /// What the provider says right now; an error in words when it did not.
    pub provider: Result<Observation, String>,
    /// The latest state that was saved by itself, or gone back to.
    pub auto_saved: Option<Snapshot>,
    /// The snapshots that were asked for.
    pub kept: Kept,
    /// Its locks (L15).
    pub locks: Vec<Lease>,
    /// Where its parts are on the host.
    pub whereabouts: Option<Whereabouts>,
    /// When each client last looked.
    pub reads: Vec<(String, u64)>,
    /// What that means, and what helps.
    pub remarks: Vec<Remark>,
}

/// The snapshots of a sandbox that somebody asked for, and that are there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// The newest of them, newest first.
    pub newest: Vec<Snapshot>,
    /// How many there are.
    pub count: u64,
    /// What they hold beyond their images, as it was seen last; what they share is counted with each.
    pub size_bytes: u64,
}

/// One thing that is worth saying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// A stable word.
    pub code: &'static str,
    /// In words.
    pub what: String,
    /// A command that helps.
    pub helps: String,
}

impl Engine {
    /// Looks at everything. A read: it changes nothing but what is found changed (T9).
    pub async fn diagnose(&self, project: &Project, which: &Which) -> Result<Diagnosis, EngineError> {
        let inner = &self.inner;
        let sandbox = inner.find(project, which).await?;
        let locks = inner.store.leases(&sandbox.id).await?;
        let instance = viv_provider::InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let budget = inner.config.budgets.probe;
        let provider = inner.call(&sandbox.id, budget, inner.provider.observe(&instance)).await;
        let provider = provider.map_err(|error| crate::effect::in_words(&error));
        let whereabouts = if has_instance(&sandbox) {
            inner.call(&sandbox.id, budget, inner.provider.whereabouts(&instance)).await.ok()
        } else {
            None
        };
        let (auto_saved, kept) = inner.saved_states(&sandbox).await?;
        let reads = inner.knowledge.reads(&sandbox.id);
        let view = inner.view(sandbox);
        let mut remarks = remarks(&view);
        remarks.extend(inner.left_alone(&view.sandbox));
        Ok(Diagnosis { view, provider, auto_saved, kept, locks, whereabouts, reads, remarks })
    }
}

impl Inner {
    /// Whom its hooks go to and who is left alone for a while (J7).
    fn left_alone(&self, sandbox: &Sandbox) -> Vec<Remark> {
        let open = self.outside.status(self.clock.now_ms()).into_iter().filter(|breaker| breaker.open);
        let to = sandbox.spec.hooks.values().filter_map(|hook| match &hook.action {
            HookAction::Webhook { url, .. } => Some(destination(url)),
            HookAction::Command { .. } => None,
        });
        let to: BTreeSet<String> = to.collect();
        let about = open.filter(|breaker| to.contains(&breaker.destination)).map(|breaker| Remark {
            code: "webhook_left_alone",
            what: format!(
                "{} failed {} times in a row, and is asked again later",
                breaker.destination, breaker.failures
            ),
            helps: format!("viv timeline {}", sandbox.id),
        });
        about.collect()
    }

    /// What was saved of it: by itself, and because somebody asked.
    async fn saved_states(self: &Arc<Self>, sandbox: &Sandbox) -> Result<(Option<Snapshot>, Kept), EngineError> {
        let auto_saved = match &sandbox.saved {
            Some(saved) => {
                self.refresh_snapshot(saved).await;
                self.store.snapshot(saved).await?
            }
            None => None,
        };
        let mut newest = self.rows_of(&sandbox.id).await?;
        newest.retain(|row| row.kind == SnapshotKind::Manual && row.state == SnapshotState::Ready);
        let count = newest.len() as u64;
        let size_bytes = newest.iter().filter_map(|row| row.seen.as_ref()).map(|seen| seen.size_bytes).sum();
        newest.truncate(SNAPSHOTS_TOLD);
        Ok((auto_saved, Kept { newest, count, size_bytes }))
    }
}

fn remarks(view: &View) -> Vec<Remark> {
    let id = &view.sandbox.id;
    let mut remarks = Vec::new();
    let mut say = |code, what: String, helps: String| remarks.push(Remark { code, what, helps });
    let message = view.sandbox.cause.message.clone().unwrap_or_default();
    if view.status == Status::Unverified {
        let age = view.evidence.at_ms().map_or_else(
            || "it was not probed since the daemon began".to_owned(),
            |at_ms| format!("the last probe was {} s ago", view.now_ms.saturating_sub(at_ms) / 1000),
        );
        say("unverified", age, format!("viv show --verify {id}"));
    }
    match view.evidence.finding() {
        Some(Finding::Unhealthy) => {
            let what = view.evidence.complaint().unwrap_or_default();
            say("unhealthy", format!("a probe got a wrong answer: {what}"), format!("viv logs {id}"));
        }
        Some(Finding::Timeout) => {
            let what = "a probe got no answer: the agent hangs, is stopped or frozen".to_owned();
            say("no_answer", what, format!("viv show --verify {id}, or viv stop {id}"));
        }
        Some(Finding::Gone | Finding::Ok) | None => {}
    }
    if view.sandbox.phase.work().is_some_and(|work| work.overdue) {
        let what = format!("{} takes longer than it may: {message}", view.sandbox.phase.name().as_str());
        say("overdue", what, format!("viv timeline {id}"));
    }
    match &view.sandbox.phase {
        Phase::Lost => {
            let what =
                format!("its instance ended or cannot be reached: {} {message}", view.sandbox.cause.cause.code());
            say("lost", what, format!("viv ensure {id} makes a new one, viv rm {id} removes it"));
        }
        Phase::Failed { .. } => {
            let what = format!("it could not be brought up: {} {message}", view.sandbox.cause.cause.code());
            say("failed", what, format!("viv timeline {id}; then viv ensure {id} or viv rm {id}"));
        }
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => {}
    }
    remarks
}
