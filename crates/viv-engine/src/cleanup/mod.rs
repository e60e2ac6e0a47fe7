//! Cleanup in layers (J2): what is unwell and not new, what failed or is lost and nobody's, what is past its time, and,
//! when little is left of a quota, what is idle.
//!
//! ```text
//!   records ──► plan (pure) ──► each: is it in use? ──► step, unless somebody used it since ──► journal
//! ```
//!
//! Instances are removed, never records or snapshots of persistent sandboxes: those are saved, and run again when somebody
//! wants them. Whether something runs in a sandbox is asked before anything is done to it, and without an answer nothing
//! is (T7). A cleanup says what it found before it does anything, and a dry run stops there, when it has asked the same.
//!
//! In an emergency, who turns out to be in use makes no room, so the next one is looked for until there is room or everybody
//! was tried once.

mod act;
mod plan;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Phase, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_store::{ListQuery, NewLine, Sums};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::journal;
use crate::metrics::QuotaUsed;
use crate::reconcile::Report;

pub(crate) use plan::is_tight;
use plan::{Known, plan_all};

/// Records read at once.
const PAGE: usize = 1_000;

/// Most sandboxes that are named in the line that says what was found: a line is read by people and sent to subscribers,
/// and each sandbox has one of its own.
const TOLD_MAX: usize = 100;

/// How cleanups are made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CleanupConfig {
    /// How often leftovers are looked for.
    pub period: Duration,
    /// How often ages are looked at.
    pub age_period: Duration,
    /// How often everything is compared with everything.
    pub full_period: Duration,
    /// How long what is lost or has failed, and is not persistent, is left for somebody to look at.
    pub leftover_after: Duration,
    /// How long what is unwell is left to come back.
    pub unhealthy_after: Duration,
    /// And how old it has to be: who looks at what is new sees what is wrong with it.
    pub unhealthy_age: Duration,
    /// How old a sandbox may become; nothing is as old as its deadline allows.
    pub age_max: Option<Duration>,
    /// Above this part of a quota, what is idle has to go.
    pub emergency_above: f64,
    /// Who was used in this time is not idle, however little is left.
    pub emergency_idle: Duration,
    /// Below this part of the machine's memory, what is frozen and kept with its memory goes to disk.
    pub memory_below: f64,
    /// How often that is looked at.
    pub memory_period: Duration,
}

impl Default for CleanupConfig {
    fn default() -> Self {
        Self {
            period: Duration::from_secs(300),
            age_period: Duration::from_secs(900),
            full_period: Duration::from_secs(3600),
            leftover_after: Duration::from_secs(600),
            unhealthy_after: Duration::from_secs(60),
            unhealthy_age: Duration::from_secs(600),
            age_max: None,
            emergency_above: 0.8,
            emergency_idle: Duration::from_secs(60),
            memory_below: 0.1,
            memory_period: Duration::from_secs(5),
        }
    }
}

/// Which layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CleanupKind {
    /// What does not answer, or is found unwell, and is not new.
    Unhealthy,
    /// Leftovers of what failed or is lost.
    Leftovers,
    /// What is past its time.
    Age,
    /// What is idle, until there is room.
    Emergency,
}

impl CleanupKind {
    /// All of them, in the order of harm: what a layer makes go is not needed by the next ones.
    pub const ALL: [Self; 4] = [Self::Unhealthy, Self::Leftovers, Self::Age, Self::Emergency];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unhealthy => "unhealthy",
            Self::Leftovers => "leftovers",
            Self::Age => "age",
            Self::Emergency => "emergency",
        }
    }
}

/// What somebody who cleans up by hand asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CleanupOrder {
    /// By which layers; they run in the order of [`CleanupKind::ALL`].
    pub kinds: Vec<CleanupKind>,
    /// Only say what would be done.
    pub dry_run: bool,
    /// How old a sandbox may be this time, instead of what is set.
    pub age_max: Option<Duration>,
}

impl CleanupOrder {
    /// By these layers.
    pub fn by(kinds: &[CleanupKind]) -> Self {
        Self { kinds: kinds.to_vec(), ..Self::default() }
    }

    /// And only to say what would be done.
    #[must_use]
    pub fn dry(self) -> Self {
        Self { dry_run: true, ..self }
    }
}

/// What is to be done with a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CleanupAction {
    /// It is saved, and runs again when somebody wants it.
    Hibernate,
    /// It ends.
    Stop,
}

impl CleanupAction {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hibernate => "hibernate",
            Self::Stop => "stop",
        }
    }
}

/// What came of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CleanupOutcome {
    /// It is to be done.
    Planned,
    /// It has begun, and goes on by itself.
    Done,
    /// Somebody uses it, so it was left alone.
    InUse,
    /// It could not be done, and why.
    Failed(String),
}

impl CleanupOutcome {
    /// Whether the room that it takes is made, or will be.
    fn makes_room(&self) -> bool {
        match self {
            Self::Planned | Self::Done => true,
            Self::InUse | Self::Failed(_) => false,
        }
    }
}

/// One sandbox that a cleanup found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CleanupItem {
    /// Which.
    pub sandbox: SandboxId,
    /// Whose.
    pub project: Project,
    /// By which layer.
    pub kind: CleanupKind,
    /// What is to be done.
    pub action: CleanupAction,
    /// Why, in words.
    pub why: String,
    /// What came of it.
    pub outcome: CleanupOutcome,
}

/// What a cleanup found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// One by one.
    pub items: Vec<CleanupItem>,
}

impl CleanupReport {
    fn count(&self, is: impl Fn(&CleanupOutcome) -> bool) -> u64 {
        self.items.iter().filter(|item| is(&item.outcome)).count() as u64
    }

    /// How many were found.
    pub fn found(&self) -> u64 {
        self.items.len() as u64
    }

    /// How many were done.
    pub fn done(&self) -> u64 {
        self.count(|outcome| *outcome == CleanupOutcome::Done)
    }

    /// How many could not be.
    pub fn failed(&self) -> u64 {
        self.count(|outcome| matches!(outcome, CleanupOutcome::Failed(_)))
    }
}

/// When ages were last looked at.
#[derive(Debug, Default)]
pub(crate) struct Cleanups {
    aged_at_ms: AtomicU64,
}

/// What is told before anything is done.
fn found(items: &[CleanupItem]) -> serde_json::Value {
    let told = items.iter().take(TOLD_MAX).map(|item| {
        json!({
            "sandbox": item.sandbox,
            "project": item.project,
            "layer": item.kind.as_str(),
            "action": item.action.as_str(),
            "why": item.why,
        })
    });
    let untold = items.len().saturating_sub(TOLD_MAX);
    json!({ "found": items.len(), "items": told.collect::<Vec<_>>(), "untold": untold })
}

/// One cleanup, from its beginning to its end.
struct Round<'r> {
    order: &'r CleanupOrder,
    config: CleanupConfig,
    by: &'r Actor,
}

impl Engine {
    /// Cleans up by these layers, or says what would be done. Journaled, whatever is found (J2).
    pub async fn cleanup(&self, order: &CleanupOrder, by: Actor) -> Result<CleanupReport, EngineError> {
        // Whoever asks may name them in any order, and twice.
        let kinds = CleanupKind::ALL.into_iter().filter(|kind| order.kinds.contains(kind)).collect();
        let order = &CleanupOrder { kinds, ..order.clone() };
        self.inner.tell_of_cleanup("started", order, &by, json!({})).await?;
        let cleaned = self.inner.cleanup(order, &by, true).await;
        if let Err(error) = &cleaned {
            let data = json!({ "error": crate::effect::in_words(error) });
            self.inner.tell_of_cleanup("completed", order, &by, data).await?;
        }
        cleaned
    }
}

/// The layers that are due, as a reconciler.
pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let Some(config) = inner.config.cleanup else { return Ok(Report::default()) };
    let now_ms = inner.clock.now_ms();
    let aged_at_ms = inner.cleanups.aged_at_ms.load(Ordering::Relaxed);
    let is_aging = now_ms.saturating_sub(aged_at_ms) >= config.age_period.as_millis() as u64;
    if is_aging {
        inner.cleanups.aged_at_ms.store(now_ms, Ordering::Relaxed);
    }
    let due = |kind: &CleanupKind| match kind {
        CleanupKind::Unhealthy | CleanupKind::Leftovers | CleanupKind::Emergency => true,
        CleanupKind::Age => is_aging,
    };
    let kinds: Vec<CleanupKind> = CleanupKind::ALL.into_iter().filter(due).collect();
    inner.reached("cleanup.due");
    let report = inner.cleanup(&CleanupOrder::by(&kinds), &Actor::part("cleanup"), false).await?;
    Ok(Report { found: report.found(), did: report.done(), failed: report.failed() })
}

impl Inner {
    /// Of what was begun by hand, `started` is told already. What begins by itself every few minutes and finds nothing is
    /// not told at all: the journal would be full of it.
    async fn cleanup(
        self: &Arc<Self>,
        order: &CleanupOrder,
        by: &Actor,
        by_hand: bool,
    ) -> Result<CleanupReport, EngineError> {
        let mut config = self.config.cleanup.unwrap_or_default();
        config.age_max = order.age_max.or(config.age_max);
        let round = Round { order, config, by };
        let records = self.living().await?;
        if order.kinds.contains(&CleanupKind::Unhealthy) && !order.dry_run {
            self.look_at_the_unseen(&records, &config);
        }
        let mut items = self.planned(&order.kinds, &records, &[], &config).await?;
        if !by_hand && items.is_empty() {
            return Ok(CleanupReport { items });
        }
        if !by_hand {
            self.tell_of_cleanup("started", order, by, json!({})).await?;
        }
        self.carry_out(&records, &mut items, &round).await?;
        // Who is in use, or could not be asked, makes no room: others are looked for in their place. Each is tried once, so
        // there are no more rounds than sandboxes.
        while order.kinds.contains(&CleanupKind::Emergency)
            && items.iter().any(|item| !item.outcome.makes_room())
            && !self.is_ending()
        {
            let mut more = self.planned(&[CleanupKind::Emergency], &records, &items, &config).await?;
            if more.is_empty() {
                break;
            }
            self.carry_out(&records, &mut more, &round).await?;
            items.extend(more);
        }
        let report = CleanupReport { items };
        let data = json!({ "found": report.found(), "done": report.done(), "failed": report.failed() });
        self.tell_of_cleanup("completed", order, by, data).await?;
        Ok(report)
    }

    /// Tells what was found, and does it one by one; in a dry run, only asks who is in use.
    async fn carry_out(
        self: &Arc<Self>,
        records: &[Sandbox],
        items: &mut [CleanupItem],
        round: &Round<'_>,
    ) -> Result<(), EngineError> {
        let Round { order, config, by } = round;
        self.tell_of_cleanup("found", order, by, found(items)).await?;
        for item in items {
            let Some(record) = records.iter().find(|record| record.id == item.sandbox) else { continue };
            item.outcome = if order.dry_run {
                self.would_clean(record, item, config).await
            } else {
                self.clean(record, item, config, by).await
            };
            self.tell_of_item(record, item, by).await;
            if self.is_ending() {
                break;
            }
        }
        Ok(())
    }

    /// What is to be done by these layers, beside what is done or was tried.
    async fn planned(
        &self,
        kinds: &[CleanupKind],
        records: &[Sandbox],
        before: &[CleanupItem],
        config: &CleanupConfig,
    ) -> Result<Vec<CleanupItem>, EngineError> {
        let ids: Vec<SandboxId> = records.iter().map(|record| record.id.clone()).collect();
        let at_work: BTreeSet<SandboxId> = self.store.tasks_at_work(&ids).await?.into_keys().collect();
        let quota = &self.config.quota;
        let known = Known {
            at_work: &at_work,
            leaving: &BTreeSet::new(),
            tried: &BTreeSet::new(),
            quotas: &|in_project, count, sums| QuotaUsed::all(quota, in_project, count, sums),
            sums_of: &|record| Sums::of(&record.spec.limits, &quota.weights),
            config,
            now_ms: self.clock.now_ms(),
        };
        Ok(plan_all(kinds, records, before, &known))
    }

    /// A line about all of it.
    async fn tell_of_cleanup(
        &self,
        what: &str,
        order: &CleanupOrder,
        by: &Actor,
        mut data: serde_json::Value,
    ) -> Result<(), EngineError> {
        let layers: Vec<&str> = order.kinds.iter().map(|kind| kind.as_str()).collect();
        (data["layers"], data["dry_run"]) = (json!(layers), json!(order.dry_run));
        let line = whole(&format!("cleanup.{what}"), by.clone(), self.clock.now_ms(), data);
        self.store.append(self.epoch, vec![line]).await?;
        Ok(())
    }

    /// And about one of them. What was done is done, whether or not that can be told.
    async fn tell_of_item(&self, record: &Sandbox, item: &CleanupItem, by: &Actor) {
        let data = json!({
            "layer": item.kind.as_str(),
            "action": item.action.as_str(),
            "why": item.why,
            "outcome": match &item.outcome {
                CleanupOutcome::Planned => "planned",
                CleanupOutcome::Done => "done",
                CleanupOutcome::InUse => "in_use",
                CleanupOutcome::Failed(_) => "failed",
            },
        });
        let line = journal::noted(record, "cleanup.item", by.clone(), self.clock.now_ms(), data);
        if let Err(error) = self.store.append(self.epoch, vec![line]).await {
            tracing::warn!(component = "cleanup", sandbox = %record.id, %error, "what was done could not be journaled");
        }
    }

    /// What runs and was not looked at since the last cleanup is probed, beside this one: what is wrong with what nobody
    /// reads is found too, and the next cleanup sees it.
    fn look_at_the_unseen(self: &Arc<Self>, records: &[Sandbox], config: &CleanupConfig) {
        let (now_ms, period_ms) = (self.clock.now_ms(), config.period.as_millis() as u64);
        for record in records.iter().filter(|record| record.phase == Phase::Ready) {
            if self.knowledge.evidence(record, now_ms).age_ms(now_ms).is_none_or(|age_ms| age_ms >= period_ms) {
                self.signal_health(&record.id);
            }
        }
    }

    async fn living(&self) -> Result<Vec<Sandbox>, EngineError> {
        let mut asked = ListQuery { phases: PhaseName::MAY_LIVE.to_vec(), limit: PAGE, ..ListQuery::default() };
        let mut records = Vec::new();
        loop {
            let listed = self.store.list(&asked).await?;
            records.extend(listed.items);
            asked.after = listed.next;
            if asked.after.is_none() {
                return Ok(records);
            }
        }
    }
}

/// A line about all of it.
fn whole(kind: &str, by: Actor, now_ms: u64, data: serde_json::Value) -> NewLine {
    NewLine {
        at_ms: now_ms,
        project: None,
        sandbox: None,
        generation: None,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data,
    }
}
