//! Audit and reconciliation by hand: both ways, report-only or acting, each item journaled (J1, J2).
//!
//! What the provider has and nobody wants, what is recorded and not there, and what was left on the machine. Instances
//! and records go the way of `provider-sync`, with its grace and its two listings: by hand it runs once more for that,
//! and what runs by itself leaves them to it. What was left is cleared away by the provider, which looks at each once
//! more.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde_json::json;
use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, PhaseName};
use viv_provider::{Finding, FindingKind, InstanceRef, InstanceState, ProviderError, SweptAs};
use viv_store::{ListQuery, NewLine};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::metrics::family;
use crate::reconcile::{Report, provider_sync};

/// How many records are read at a time.
const PAGE: usize = 500;

/// More than this are counted, and not told one by one.
const ITEMS_MAX: usize = 10_000;

/// What was found, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditReport {
    /// Whether anything was done about it.
    pub acted: bool,
    /// When it began.
    pub began_at_ms: u64,
    /// When it was over.
    pub ended_at_ms: u64,
    /// Whether the provider told of all its instances. If not, nothing is called missing (T7).
    pub complete: bool,
    /// What was found.
    pub items: Vec<AuditItem>,
    /// What was found beyond those.
    pub more: u64,
}

/// One thing that does not belong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditItem {
    /// `instance`, `record`, or what the provider calls it.
    pub kind: String,
    /// Which.
    pub what: String,
    /// Of which sandbox, if that is known.
    pub sandbox: Option<SandboxId>,
    /// What shows it.
    pub why: String,
    /// What became of it.
    pub outcome: AuditOutcome,
}

/// What became of an item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditOutcome {
    /// It was only reported.
    Reported,
    /// It was put right.
    Done,
    /// It is left for now, and why.
    Left(String),
    /// It could not be put right.
    Failed(String),
}

impl AuditOutcome {
    /// The word for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Done => "done",
            Self::Left(_) => "left",
            Self::Failed(_) => "failed",
        }
    }

    /// What there is to say about it.
    pub fn message(&self) -> Option<&str> {
        match self {
            Self::Reported | Self::Done => None,
            Self::Left(why) | Self::Failed(why) => Some(why),
        }
    }
}

/// What is done about what is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    /// Nothing.
    Report,
    /// Everything that can be: somebody asked.
    PutRight,
    /// What nobody else sees to. A listing of this one beside that of `provider-sync`, as at the start, would make two of
    /// one moment, and two are to agree because time went by between them (J1).
    PutRightWhatIsLeft,
}

impl Engine {
    /// Compares records, provider and machine, and tells what does not belong; with `act`, puts it right.
    pub async fn audit(&self, act: bool, by: Actor) -> Result<AuditReport, EngineError> {
        if act {
            // What was saved is put right too, in the next minute.
            self.inner.reconcilers.strays.want_all();
        }
        self.compare(if act { Deed::PutRight } else { Deed::Report }, by).await
    }

    async fn compare(&self, deed: Deed, by: Actor) -> Result<AuditReport, EngineError> {
        let inner = &self.inner;
        let act = deed != Deed::Report;
        let word = if act { "reconcile" } else { "audit" };
        let began_at_ms = inner.clock.now_ms();
        inner.note(word, "started", &by, None, json!({})).await?;
        let looked = async { Ok((inner.look_for_orphans().await?, inner.look_into_store().await?)) };
        let (mut found, mut held) = match looked.await {
            Ok(found) => found,
            Err(error) => {
                let words = crate::effect::in_words(&error);
                inner.note(word, "completed", &by, None, json!({ "error": words })).await?;
                return Err(error);
            }
        };
        let items = found.items.len() + held.len();
        inner.note(word, "found", &by, None, json!({ "items": items, "complete": found.complete })).await?;
        if act {
            inner.put_right(&mut found, deed).await?;
            inner.put_store_right(&mut held).await;
        }
        found.items.extend(held.into_iter().map(|(_, item)| item));
        let more = found.items.len().saturating_sub(ITEMS_MAX) as u64;
        found.items.truncate(ITEMS_MAX);
        for item in &found.items {
            let data = json!({ "kind": item.kind, "what": item.what, "why": item.why,
                               "outcome": item.outcome.as_str(), "message": item.outcome.message() });
            inner.note(word, "item", &by, item.sandbox.clone(), data).await?;
        }
        let count = |wanted: &str| found.items.iter().filter(|item| item.outcome.as_str() == wanted).count();
        let data = json!({ "found": found.items.len(), "done": count("done"), "left": count("left"),
                           "failed": count("failed"), "more": more });
        inner.note(word, "completed", &by, None, data).await?;
        let ended_at_ms = inner.clock.now_ms();
        Ok(AuditReport { acted: act, began_at_ms, ended_at_ms, complete: found.complete, items: found.items, more })
    }
}

/// Everything at once, as a reconciler (J2).
pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let engine = Engine { inner: inner.clone() };
    let report = engine.compare(Deed::PutRightWhatIsLeft, Actor::part("full")).await?;
    let count = |wanted: &str| report.items.iter().filter(|item| item.outcome.as_str() == wanted).count() as u64;
    Ok(Report { found: report.items.len() as u64 + report.more, did: count("done"), failed: count("failed") })
}

/// Items in this order: instances, records, what the provider found.
struct Found {
    complete: bool,
    items: Vec<AuditItem>,
    instances: Vec<InstanceRef>,
    left: Vec<Finding>,
}

impl Inner {
    async fn note(
        &self,
        word: &str,
        what: &str,
        by: &Actor,
        sandbox: Option<SandboxId>,
        data: serde_json::Value,
    ) -> Result<(), EngineError> {
        let line = NewLine {
            at_ms: self.clock.now_ms(),
            project: None,
            sandbox,
            generation: None,
            kind: format!("{word}.{what}"),
            from: None,
            to: None,
            cause: None,
            by: by.clone(),
            data,
        };
        self.store.append(self.epoch, vec![line]).await?;
        Ok(())
    }

    async fn look_for_orphans(self: &Arc<Self>) -> Result<Found, EngineError> {
        let listed = provider_sync::list(self).await?;
        let (mut items, mut instances) = (Vec::new(), Vec::new());
        for item in &listed.items {
            let record = self.store.get(&item.instance.sandbox).await?;
            // One that has ended since it was listed, and whose sandbox has gone on, is nothing that was left.
            if provider_sync::is_left_over(record.as_ref(), &item.instance) && !self.is_gone(&item.instance).await {
                let why = if record.is_none() { "it has no record" } else { "its sandbox has gone on to another one" };
                items.push(instance(&item.instance, why));
                instances.push(item.instance.clone());
            }
        }
        if listed.complete {
            let there: HashSet<&SandboxId> = listed.items.iter().map(|item| &item.instance.sandbox).collect();
            self.find_missing(&there, &mut items).await?;
        }
        let left = self.find_left().await?;
        self.count_left(&left);
        items.extend(left.iter().map(|finding| AuditItem {
            kind: finding.kind.to_string(),
            what: finding.what.clone(),
            sandbox: finding.sandbox.clone(),
            why: finding.why.clone(),
            outcome: AuditOutcome::Reported,
        }));
        Ok(Found { complete: listed.complete, items, instances, left })
    }

    /// Whether it was seen that it is not there any more.
    async fn is_gone(&self, instance: &InstanceRef) -> bool {
        let seen = self.call(&instance.sandbox, self.config.budgets.call, self.provider.observe(instance)).await;
        seen.is_ok_and(|seen| seen.state == InstanceState::Absent)
    }

    /// Records that should have an instance and were not listed.
    async fn find_missing(&self, there: &HashSet<&SandboxId>, items: &mut Vec<AuditItem>) -> Result<(), EngineError> {
        let phases = vec![PhaseName::Ready, PhaseName::Frozen, PhaseName::Verifying];
        let mut query = ListQuery { phases, deleted: true, limit: PAGE, ..ListQuery::default() };
        loop {
            let page = self.store.list(&query).await?;
            for record in page.items.iter().filter(|record| !there.contains(&record.id)) {
                items.push(AuditItem {
                    kind: "record".to_owned(),
                    what: format!("{}@{}", record.id, record.generation),
                    sandbox: Some(record.id.clone()),
                    why: "the provider has no instance of it".to_owned(),
                    outcome: AuditOutcome::Reported,
                });
            }
            let Some(next) = page.next else { return Ok(()) };
            query.after = Some(next);
        }
    }

    /// What the provider found on the machine, without fences that somebody may still need: those of sandboxes that are
    /// recorded, also as deleted, and those that were touched within the grace.
    async fn find_left(&self) -> Result<Vec<Finding>, EngineError> {
        let all = self.within("an audit", self.config.budgets.sweep, self.provider.audit()).await;
        let all = all.map_err(EngineError::Provider)?;
        let grace_ms = self.config.periods.orphan_grace.as_millis() as u64;
        let old_ms = self.clock.now_ms().saturating_sub(grace_ms);
        let mut left = Vec::new();
        for finding in all {
            if let (FindingKind::Fence, Some(sandbox)) = (finding.kind, &finding.sandbox) {
                let is_young = finding.changed_at_ms.is_none_or(|at_ms| at_ms > old_ms);
                if is_young || self.store.get(sandbox).await?.is_some() {
                    continue;
                }
            }
            left.push(finding);
        }
        Ok(left)
    }

    async fn put_right(self: &Arc<Self>, found: &mut Found, deed: Deed) -> Result<(), EngineError> {
        let first_left = found.items.len() - found.left.len();
        if deed == Deed::PutRightWhatIsLeft {
            for item in &mut found.items[..first_left] {
                item.outcome = AuditOutcome::Left("provider-sync sees to it".to_owned());
            }
        } else {
            self.sync(&mut found.items[..first_left], &found.instances).await?;
        }
        let swept = self.within("a sweep", self.config.budgets.sweep, self.provider.sweep(&found.left)).await;
        for (index, item) in found.items[first_left..].iter_mut().enumerate() {
            item.outcome = match &swept {
                Err(error) => AuditOutcome::Failed(error.to_string()),
                Ok(swept) => match swept.get(index).map(|swept| &swept.outcome) {
                    Some(SweptAs::Gone) => AuditOutcome::Done,
                    Some(SweptAs::NotLeftOver) => AuditOutcome::Left("it is no left-over any more".to_owned()),
                    Some(SweptAs::Failed(why)) => AuditOutcome::Failed(why.clone()),
                    None => AuditOutcome::Left("the provider clears nothing away".to_owned()),
                },
            };
        }
        Ok(())
    }

    /// Instances and records: as it is done on a period, so nothing is collected sooner (J1).
    async fn sync(self: &Arc<Self>, items: &mut [AuditItem], instances: &[InstanceRef]) -> Result<(), EngineError> {
        let synced = provider_sync::run(self).await;
        for (index, item) in items.iter_mut().enumerate() {
            item.outcome = match (&synced, instances.get(index), &item.sandbox) {
                (Err(error), ..) => AuditOutcome::Failed(crate::effect::in_words(error)),
                (Ok(_), Some(instance), _) => self.after_collecting(instance).await,
                (Ok(_), None, Some(sandbox)) => self.after_looking(sandbox).await?,
                (Ok(_), None, None) => AuditOutcome::Left("it names no sandbox".to_owned()),
            };
        }
        Ok(())
    }

    /// Counts what was not found the last time. Fences and layers are left by the ordinary course of things: those of
    /// records that were forgotten, and what is shared until its last user goes.
    fn count_left(&self, left: &[Finding]) {
        let is_told = |finding: &&Finding| !matches!(finding.kind, FindingKind::Fence | FindingKind::Layer);
        let now: BTreeSet<(FindingKind, String)> =
            left.iter().filter(is_told).map(|finding| (finding.kind, finding.what.clone())).collect();
        let mut before = self.reconcilers.left.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in now.difference(&before) {
            self.metrics.count(&family::ORPHANS_FOUND, &[]);
        }
        *before = now;
    }

    /// What the provider says in time (J7). What was left is about no sandbox, so no breaker counts it.
    async fn within<T>(
        &self,
        what: &'static str,
        budget: Duration,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        let late = |_| ProviderError::TimedOut { what, after_ms: budget.as_millis() as u64 };
        tokio::time::timeout(budget, call).await.map_err(late)?
    }

    /// What became of an instance by a run of `provider-sync`.
    async fn after_collecting(&self, instance: &InstanceRef) -> AuditOutcome {
        match self.within("a look at it", self.config.budgets.call, self.provider.observe(instance)).await {
            Ok(seen) if seen.state == InstanceState::Absent => AuditOutcome::Done,
            Ok(_) => AuditOutcome::Left("it stays until the grace has passed and two listings agree".to_owned()),
            Err(error) => AuditOutcome::Failed(error.to_string()),
        }
    }

    /// The same of a record.
    async fn after_looking(&self, sandbox: &SandboxId) -> Result<AuditOutcome, EngineError> {
        let is_lost = self.store.get(sandbox).await?.is_none_or(|record| {
            !matches!(record.phase.name(), PhaseName::Ready | PhaseName::Frozen | PhaseName::Verifying)
        });
        let why = "it was looked at, and is there or cannot be seen".to_owned();
        Ok(if is_lost { AuditOutcome::Done } else { AuditOutcome::Left(why) })
    }
}

fn instance(instance: &InstanceRef, why: &str) -> AuditItem {
    AuditItem {
        kind: "instance".to_owned(),
        what: instance.to_string(),
        sandbox: Some(instance.sandbox.clone()),
        why: why.to_owned(),
        outcome: AuditOutcome::Reported,
    }
}
