//! Cleanup in layers (J2): what is unwell and not new, what failed or is lost and nobody's, what is past its time, and, when little is left of a
//! quota, what is idle.
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

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use viv_core::SandboxId;
use viv_core::lifecycle::{Accepted, Actor, Cause, Desired, Event, Phase, PhaseName, Sandbox, Stepped, step};
use viv_core::spec::Project;
use viv_store::{ListQuery, NewLine, StoreError, Sums};

use crate::engine::{Applied, Engine, Inner, RACES_MAX, too_fast};
use crate::error::EngineError;
use crate::journal;
use crate::metrics::QuotaUsed;
use crate::reconcile::Report;

/// Records read at once.
const PAGE: usize = 1_000;

/// A hard deadline that passed this long ago was missed by who should have seen to it.
const MISSED_MS: u64 = 60_000;

/// A command that ended this long ago is over: what runs counts as used now.
const ENDED_MS: u64 = 1_000;

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

/// What a plan is made from, beside the records.
pub(crate) struct Known<'k> {
    /// In which a task is at work: neither their age nor that nothing runs in them at this moment ends them.
    pub(crate) at_work: &'k BTreeSet<SandboxId>,
    /// Who goes already, by another layer or a plan before: an emergency needs nobody in their place.
    pub(crate) leaving: &'k BTreeSet<SandboxId>,
    /// Who was tried and stays.
    pub(crate) tried: &'k BTreeSet<SandboxId>,
    /// What is in use of the quotas of one project, or of all together, by so many of this size.
    pub(crate) quotas: &'k dyn Fn(bool, u64, &Sums) -> Vec<QuotaUsed>,
    pub(crate) sums_of: &'k dyn Fn(&Sandbox) -> Sums,
    pub(crate) config: &'k CleanupConfig,
    pub(crate) now_ms: u64,
}

impl Known<'_> {
    /// Whether there is nothing to find out about it any more.
    fn is_settled(&self, sandbox: &SandboxId) -> bool {
        self.leaving.contains(sandbox) || self.tried.contains(sandbox)
    }
}

/// Whether somebody said that it is to stay awake, by a lease that holds (L7).
fn is_kept_awake(record: &Sandbox, now_ms: u64) -> bool {
    record.keep_awake.values().any(|lease| lease.until_ms > now_ms)
}

/// Whether its hard deadline was missed by who should have seen to it.
fn is_past_deadline(record: &Sandbox, now_ms: u64) -> bool {
    record.expires_at_ms.is_some_and(|at_ms| now_ms > at_ms.saturating_add(MISSED_MS))
}

/// What is to be done about these records. Pure; in the order in which it is done.
pub(crate) fn plan(kind: CleanupKind, records: &[Sandbox], known: &Known<'_>) -> Vec<CleanupItem> {
    let (config, now_ms) = (known.config, known.now_ms);
    let old = |since_ms: u64, after: Duration| now_ms.saturating_sub(since_ms) >= after.as_millis() as u64;
    let item = |record: &Sandbox, why: String| CleanupItem {
        sandbox: record.id.clone(),
        project: record.project.clone(),
        kind,
        action: if record.policy.persistent { CleanupAction::Hibernate } else { CleanupAction::Stop },
        why,
        outcome: CleanupOutcome::Planned,
    };
    let is_up = |record: &&Sandbox| matches!(record.phase, Phase::Ready | Phase::Frozen { .. });
    // Spares have a keeper of their own, who sees to what is broken or old; in an emergency they are the first to go.
    let (spares, records): (Vec<&Sandbox>, Vec<&Sandbox>) = records.iter().partition(|record| record.is_spare());
    match kind {
        CleanupKind::Unhealthy => {
            let is_old = |record: &&Sandbox| {
                is_unwell(record)
                    && old(record.phase_since_ms, config.unhealthy_after)
                    && old(record.created_at_ms, config.unhealthy_age)
            };
            let why = |record: &Sandbox| {
                let found = record.evidence.complaint().or_else(|| record.cause.message.clone());
                let since_s = now_ms.saturating_sub(record.phase_since_ms) / 1000;
                format!("unwell for {since_s} s: {}", found.unwrap_or_else(|| "no answer".to_owned()))
            };
            records.into_iter().filter(is_old).map(|record| item(record, why(record))).collect()
        }
        CleanupKind::Leftovers => {
            let is_left = |record: &&Sandbox| {
                let is_over = matches!(record.phase, Phase::Lost | Phase::Failed { work: None });
                is_over && !record.policy.persistent && old(record.phase_since_ms, config.leftover_after)
            };
            let why = |record: &Sandbox| {
                let since_s = now_ms.saturating_sub(record.phase_since_ms) / 1000;
                format!("{} for {since_s} s, and not persistent", record.phase.name().as_str())
            };
            records.into_iter().filter(is_left).map(|record| item(record, why(record))).collect()
        }
        CleanupKind::Age => {
            let mut found = Vec::new();
            for record in records.into_iter().filter(is_up) {
                let age_s = now_ms.saturating_sub(record.created_at_ms) / 1000;
                let is_old = config.age_max.is_some_and(|max| old(record.created_at_ms, max));
                if is_past_deadline(record, now_ms) {
                    found.push(item(record, "its hard deadline has passed".to_owned()));
                } else if is_old && !known.at_work.contains(&record.id) {
                    found.push(item(record, format!("{age_s} s old")));
                }
            }
            found
        }
        CleanupKind::Emergency => {
            let is_asked = |record: &&Sandbox| is_up(record) && !known.is_settled(&record.id);
            let mut idle: Vec<&Sandbox> = records.iter().copied().filter(is_asked).collect();
            idle.retain(|record| old(record.active_at_ms.max(record.phase_since_ms), config.emergency_idle));
            idle.retain(|record| !known.at_work.contains(&record.id) && !is_kept_awake(record, now_ms));
            // Least harm first: nothing of what is saved is lost. Then who was not used for longest.
            idle.sort_by_key(|record| (!record.policy.persistent, record.active_at_ms));
            let all: Vec<&Sandbox> = spares.iter().chain(&records).copied().collect();
            let first: Vec<&Sandbox> = spares.iter().copied().filter(is_asked).chain(idle.iter().copied()).collect();
            let mut given: Vec<(&Sandbox, String)> = until_there_is_room(&all, &first, false, known);
            // Then project by project: what is free elsewhere is no use to it.
            let projects: BTreeSet<&Project> = records.iter().map(|record| &record.project).collect();
            for project in projects {
                let of = |record: &&&Sandbox| record.project == *project;
                let stay = |record: &&&Sandbox| of(record) && !given.iter().any(|(gone, _)| gone.id == record.id);
                let living: Vec<&Sandbox> = records.iter().filter(stay).copied().collect();
                let idle: Vec<&Sandbox> = idle.iter().filter(stay).copied().collect();
                let more = until_there_is_room(&living, &idle, true, known);
                given.extend(more);
            }
            given.into_iter().map(|(record, why)| item(record, why)).collect()
        }
    }
}

/// The same for several layers, in their order, after what is done or was tried before: who goes by one is not needed by
/// the next, and one is enough, whoever found it first.
fn plan_all(kinds: &[CleanupKind], records: &[Sandbox], before: &[CleanupItem], known: &Known<'_>) -> Vec<CleanupItem> {
    let (room, none): (Vec<&CleanupItem>, Vec<&CleanupItem>) =
        before.iter().partition(|item| item.outcome.makes_room());
    let ids = |items: Vec<&CleanupItem>| items.into_iter().map(|item| item.sandbox.clone()).collect::<BTreeSet<_>>();
    let (mut leaving, tried) = (ids(room), ids(none));
    let mut items: Vec<CleanupItem> = Vec::new();
    for kind in kinds {
        let found = plan(*kind, records, &Known { leaving: &leaving, tried: &tried, ..*known });
        for new in found {
            if !tried.contains(&new.sandbox) && leaving.insert(new.sandbox.clone()) {
                items.push(new);
            }
        }
    }
    items
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

/// Which of the first have to go until no quota is tight, in their order, and why: those of one project, or of all.
fn until_there_is_room<'r>(
    all: &[&'r Sandbox],
    first: &[&'r Sandbox],
    in_project: bool,
    known: &Known<'_>,
) -> Vec<(&'r Sandbox, String)> {
    let goes = |record: &Sandbox| is_leaving(record) || known.leaving.contains(&record.id);
    let stays = |record: &&&Sandbox| PhaseName::MAY_LIVE.contains(&record.phase.name()) && !goes(record);
    let living = all.iter().filter(stays);
    let (mut count, mut sums) =
        living.fold((0_u64, Sums::default()), |(count, sums), record| (count + 1, sums.plus(&(known.sums_of)(record))));
    let mut found = Vec::new();
    for record in first {
        let quotas = (known.quotas)(in_project, count, &sums);
        let Some(tight) = quotas.into_iter().find(|quota| is_tight(quota, known.config.emergency_above)) else { break };
        let of_whom = if in_project { " of its project" } else { "" };
        let used = format!("{} of {} {}{of_whom} are in use", tight.used, tight.max.unwrap_or_default(), tight.name);
        let idle_s = known.now_ms.saturating_sub(record.active_at_ms) / 1000;
        let why = if record.is_spare() {
            format!("a spare, and {used}")
        } else {
            format!("not used for {idle_s} s, and {used}")
        };
        found.push((*record, why));
        count = count.saturating_sub(1);
        sums = minus(&sums, &(known.sums_of)(record));
    }
    found
}

/// Whether it is on its way out, and in time: the room that it takes is as good as made, or every look until it is gone
/// would have others make way for it.
fn is_leaving(record: &Sandbox) -> bool {
    match &record.phase {
        Phase::Hibernating { save_failed, work, .. } => !save_failed && !work.overdue,
        Phase::Stopping { work } => !work.overdue,
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Lost
        | Phase::Failed { .. }
        | Phase::Stopped => false,
    }
}

/// Whether it is lost because it was found unwell, or did not answer: something of it may run. Nobody waits for it.
fn is_unwell(record: &Sandbox) -> bool {
    record.phase == Phase::Lost
        && matches!(record.cause.cause, Cause::ProbeFailed | Cause::Unresponsive)
        && record.desired == Desired::Running
        && record.entry.is_none()
}

#[expect(clippy::cast_precision_loss, reason = "a part of something")]
pub(crate) fn is_tight(quota: &QuotaUsed, above: f64) -> bool {
    quota.max.is_some_and(|max| quota.used as f64 > max as f64 * above)
}

fn minus(all: &Sums, one: &Sums) -> Sums {
    Sums {
        cpu_millis: all.cpu_millis.saturating_sub(one.cpu_millis),
        memory_bytes: all.memory_bytes.saturating_sub(one.memory_bytes),
        disk_bytes: all.disk_bytes.saturating_sub(one.disk_bytes),
        processes: all.processes.saturating_sub(one.processes),
    }
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

    /// One of them, unless it is in use.
    async fn clean(
        self: &Arc<Self>,
        record: &Sandbox,
        item: &CleanupItem,
        config: &CleanupConfig,
        by: &Actor,
    ) -> CleanupOutcome {
        let done = match item.kind {
            CleanupKind::Unhealthy | CleanupKind::Leftovers | CleanupKind::Age | CleanupKind::Emergency
                if record.is_spare() =>
            {
                // Whoever claimed it meanwhile has it.
                self.give_up(&record.id, &item.why).await
            }
            CleanupKind::Unhealthy => self.give_up_unwell(record, by).await,
            CleanupKind::Leftovers => {
                let stopped = self.apply(&record.id, &Event::Stop { by: by.clone() }).await;
                stopped.map(|_| true)
            }
            CleanupKind::Age if is_past_deadline(record, self.clock.now_ms()) => self.ask_for_its_end(record).await,
            CleanupKind::Age => self.put_to_rest_without_task(record, ENDED_MS).await,
            CleanupKind::Emergency => self.put_to_rest_without_task(record, idle_ms(config)).await,
        };
        match done {
            Ok(true) => CleanupOutcome::Done,
            Ok(false) => CleanupOutcome::InUse,
            Err(error) => CleanupOutcome::Failed(crate::effect::in_words(&error)),
        }
    }

    /// What would come of one, as far as can be told without doing it: who is in use is asked, and nothing else is done.
    async fn would_clean(
        self: &Arc<Self>,
        record: &Sandbox,
        item: &CleanupItem,
        config: &CleanupConfig,
    ) -> CleanupOutcome {
        let idle_ms = match item.kind {
            CleanupKind::Unhealthy | CleanupKind::Leftovers => return CleanupOutcome::Planned,
            CleanupKind::Age if is_past_deadline(record, self.clock.now_ms()) => return CleanupOutcome::Planned,
            CleanupKind::Age => ENDED_MS,
            CleanupKind::Emergency => idle_ms(config),
        };
        if record.is_spare() {
            return CleanupOutcome::Planned;
        }
        match self.is_unused(record, idle_ms).await {
            Ok(is_unused) if is_unused && !is_kept_awake(record, self.clock.now_ms()) => CleanupOutcome::Planned,
            Ok(_) => CleanupOutcome::InUse,
            Err(error) => CleanupOutcome::Failed(crate::effect::in_words(&error)),
        }
    }

    /// Ends what is unwell, unless it came back, or somebody came for it, meanwhile.
    async fn give_up_unwell(self: &Arc<Self>, seen: &Sandbox, by: &Actor) -> Result<bool, EngineError> {
        // It may answer by now: then it is verified and kept (T7).
        self.look_for_lost(&seen.id).await?;
        let before = self.load(&seen.id).await?;
        if !is_unwell(&before) || before.phase_since_ms != seen.phase_since_ms {
            return Ok(false);
        }
        let given_up = self.apply(&seen.id, &Event::Unhealthy { by: by.clone() }).await?;
        Ok(matches!(given_up, Applied::Changed(_)))
    }

    /// What has come to its hard deadline has ended, whatever was done in it, or its arbiter knows of a later one (T6, L5).
    /// Whether it had ended; without an answer nothing is known (T7).
    async fn ask_for_its_end(self: &Arc<Self>, seen: &Sandbox) -> Result<bool, EngineError> {
        if self.look_at_expiry(seen).await? {
            return Ok(true);
        }
        let record = self.load(&seen.id).await?;
        if is_past_deadline(&record, self.clock.now_ms()) {
            let what = "its provider does not say when it ends".to_owned();
            return Err(EngineError::Invalid { what, hint: format!("viv doctor {}", seen.id) });
        }
        Ok(false)
    }

    /// The same as [`Self::put_to_rest`], unless a task is at work in it by now: between its steps nothing runs.
    async fn put_to_rest_without_task(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        let at_work = self.store.tasks_at_work(std::slice::from_ref(&seen.id)).await?;
        if at_work.is_empty() { self.put_to_rest(seen, idle_ms).await } else { Ok(false) }
    }

    /// Whether nothing was done in it for so long, by what runs in it.
    async fn is_unused(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        if seen.phase != Phase::Ready {
            return Ok(true);
        }
        let Some(used_at_ms) = self.used_at_ms(seen).await else {
            let what = "it does not say whether something runs in it".to_owned();
            return Err(EngineError::Invalid { what, hint: format!("viv doctor {}", seen.id) });
        };
        // What runs uses it now, what ended used it until then.
        Ok(self.clock.now_ms().saturating_sub(used_at_ms) >= idle_ms)
    }

    /// Puts it to rest as if its window were over, unless it is in use: by its record, by what runs in it, or by who
    /// comes until it is written down (L6). Whether it was; without an answer about what runs, nothing is done (T7).
    pub(crate) async fn put_to_rest(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        let Some(_alone) = self.knowledge.looks_for_rest(&seen.id) else { return Ok(false) };
        if !self.is_unused(seen, idle_ms).await? {
            return Ok(false);
        }
        for _ in 0..RACES_MAX {
            let before = self.load(&seen.id).await?;
            if before.active_at_ms > seen.active_at_ms || before.generation != seen.generation {
                return Ok(false);
            }
            let now = self.now();
            let mut hurried = before.clone();
            (hurried.policy.idle_ms, hurried.policy.hibernate_ms) = (0, 0);
            let event = Event::Idle { freezes: false };
            let Stepped::Accepted(accepted) = step(&hurried, &event, now.moment()) else { return Ok(false) };
            let Accepted { mut next, happened } = *accepted;
            next.policy = before.policy.clone();
            let line = journal::line(&event, &before, &next, happened, now.ms);
            match self.commit(next, vec![line], None, Some(before.active_at_ms), Vec::new()).await {
                Ok(_) => return Ok(true),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(&seen.id))
    }
}

/// For how long nothing may have been done in what an emergency makes go.
fn idle_ms(config: &CleanupConfig) -> u64 {
    ENDED_MS.max(config.emergency_idle.as_millis() as u64)
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

#[cfg(test)]
mod tests {
    use viv_core::lifecycle::{HibernateStep, KeepAwake, Moment, NewSandbox, Timings, Work};
    use viv_core::limits::ResourceLimits;
    use viv_core::spec::{Policy, SandboxSpec};
    use viv_store::{Quota, SumsMax};

    use super::*;

    fn record(id: u8, persistent: bool, phase: Phase, active_at_ms: u64) -> Sandbox {
        let new = NewSandbox {
            id: SandboxId::from_bytes([id; 16]),
            project: Project::default(),
            name: None,
            spec: SandboxSpec::default(),
            policy: Policy { persistent, ..Policy::default_for(None) },
            labels: std::collections::BTreeMap::new(),
            origin: None,
            by: Actor::part("test"),
        };
        let mut record = Sandbox::create(new, Moment { now_ms: 0, timings: &Timings::default(), no_memory: None });
        (record.phase, record.phase_since_ms, record.active_at_ms) = (phase, active_at_ms, active_at_ms);
        record
    }

    fn planned(kind: CleanupKind, records: &[Sandbox], max: u64, config: &CleanupConfig, now_ms: u64) -> Vec<u8> {
        planned_by(kind, records, Quota::of(max, max), &[], config, now_ms)
    }

    fn planned_by(
        kind: CleanupKind,
        records: &[Sandbox],
        quota: Quota,
        at_work: &[u8],
        config: &CleanupConfig,
        now_ms: u64,
    ) -> Vec<u8> {
        planned_after(&[kind], records, &[], quota, at_work, config, now_ms)
    }

    fn planned_after(
        kinds: &[CleanupKind],
        records: &[Sandbox],
        before: &[CleanupItem],
        quota: Quota,
        at_work: &[u8],
        config: &CleanupConfig,
        now_ms: u64,
    ) -> Vec<u8> {
        let known = Known {
            at_work: &at_work.iter().map(|id| SandboxId::from_bytes([*id; 16])).collect(),
            leaving: &BTreeSet::new(),
            tried: &BTreeSet::new(),
            quotas: &|in_project, count, sums| QuotaUsed::all(&quota, in_project, count, sums),
            sums_of: &|record| Sums::of(&record.spec.limits, &quota.weights),
            config,
            now_ms,
        };
        let found = plan_all(kinds, records, before, &known);
        let number = |item: &CleanupItem| (1..=255).find(|id| SandboxId::from_bytes([*id; 16]) == item.sandbox);
        found.iter().filter_map(number).collect()
    }

    /// One that was tried before, with what came of it.
    fn tried(record: &Sandbox, outcome: CleanupOutcome) -> CleanupItem {
        CleanupItem {
            sandbox: record.id.clone(),
            project: record.project.clone(),
            kind: CleanupKind::Emergency,
            action: CleanupAction::Hibernate,
            why: String::new(),
            outcome,
        }
    }

    #[test]
    fn j2_emergency_spares_who_is_idle_where_leftovers_make_room() {
        let config = CleanupConfig::default();
        let (now_ms, quota) = (3_600_000, Quota::of(5, 5));
        let records = [
            record(1, false, Phase::Lost, 0),
            record(2, false, Phase::Lost, 0),
            record(3, true, Phase::Ready, 10),
            record(4, true, Phase::Ready, 20),
            record(5, true, Phase::Ready, 30),
        ];
        let planned = |kinds: &[CleanupKind], before: &[CleanupItem]| {
            planned_after(kinds, &records, before, quota, &[], &config, now_ms)
        };
        assert_eq!(planned(&CleanupKind::ALL, &[]), [1, 2], "three of five are left");
        assert_eq!(planned(&[CleanupKind::Emergency], &[]), [3], "alone, it does not know of leftovers");
        // And where none of them could be made to go, somebody idle is.
        let stay = [&records[0], &records[1]].map(|record| tried(record, CleanupOutcome::Failed(String::new())));
        assert_eq!(planned(&[CleanupKind::Emergency], &stay), [3]);
    }

    #[test]
    fn j2_emergency_goes_on_to_the_next_where_who_was_tried_stays() {
        let (config, quota) = (CleanupConfig::default(), Quota::of(5, 5));
        let records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
        let planned = |before: &[CleanupItem]| {
            planned_after(&[CleanupKind::Emergency], &records, before, quota, &[], &config, 120_000)
        };
        let first = |outcome| tried(&records[0], outcome);
        assert_eq!(planned(&[]), [1]);
        assert_eq!(planned(&[first(CleanupOutcome::Done)]), [0; 0], "there is room");
        assert_eq!(planned(&[first(CleanupOutcome::InUse)]), [2]);
        let all: Vec<CleanupItem> = records.iter().map(|record| tried(record, CleanupOutcome::InUse)).collect();
        assert_eq!(planned(&all), [0; 0], "everybody was tried");
    }

    #[test]
    fn j2_l7_emergency_leaves_alone_who_is_kept_awake() {
        let (config, quota) = (CleanupConfig::default(), Quota::of(5, 5));
        let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
        let until_ms = 200_000;
        records[0].keep_awake.insert("thinking".to_owned(), KeepAwake { reason: String::new(), until_ms });
        let planned = |now_ms| planned_by(CleanupKind::Emergency, &records, quota, &[], &config, now_ms);
        assert_eq!(planned(120_000), [2]);
        assert_eq!(planned(until_ms), [1], "its lease is over");
    }

    /// A sum that can be limited: its name, and a sandbox's limits and a quota of so much of it.
    type Summed = (&'static str, fn(u64) -> ResourceLimits, fn(u64) -> SumsMax);

    const SUMS: [Summed; 4] = [
        (
            "cpu_millis",
            |of| ResourceLimits { cpu_millis: Some(of), ..ResourceLimits::default() },
            |of| SumsMax { cpu_millis: Some(of), ..SumsMax::default() },
        ),
        (
            "memory_bytes",
            |of| ResourceLimits { memory_bytes: Some(of), ..ResourceLimits::default() },
            |of| SumsMax { memory_bytes: Some(of), ..SumsMax::default() },
        ),
        (
            "disk_bytes",
            |of| ResourceLimits { disk_bytes: Some(of), ..ResourceLimits::default() },
            |of| SumsMax { disk_bytes: Some(of), ..SumsMax::default() },
        ),
        (
            "processes",
            |of| ResourceLimits { processes: Some(of), ..ResourceLimits::default() },
            |of| SumsMax { processes: Some(of), ..SumsMax::default() },
        ),
    ];

    #[test]
    fn j2_emergency_takes_who_is_idle_by_least_harm_until_there_is_room() {
        let config = CleanupConfig::default();
        let records = [
            record(1, false, Phase::Ready, 10),
            record(2, true, Phase::Ready, 500),
            record(3, true, Phase::Ready, 20),
            record(4, false, Phase::Ready, 119_000),
            record(5, false, Phase::Lost, 0),
        ];
        assert_eq!(planned(CleanupKind::Emergency, &records, 5, &config, 120_000), [3], "to four of five");
        assert_eq!(
            planned(CleanupKind::Emergency, &records, 2, &config, 120_000),
            [3, 2, 1],
            "who was used is not idle"
        );
        assert_eq!(planned(CleanupKind::Emergency, &records, 100, &config, 120_000), [0; 0], "there is room");
    }

    #[test]
    fn j2_l18_emergency_makes_room_in_a_project_that_has_none_and_leaves_the_others_alone() {
        let config = CleanupConfig::default();
        let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
        for other in &mut records[3..] {
            other.project = "other".parse().unwrap();
        }
        let emergency = CleanupKind::Emergency;
        assert_eq!(planned_by(emergency, &records, Quota::of(100, 3), &[], &config, 120_000), [1], "to two of three");
        assert_eq!(
            planned_by(emergency, &records, Quota::of(100, 3), &[1], &config, 120_000),
            [2],
            "a task is at work"
        );
        assert_eq!(planned_by(emergency, &records, Quota::of(100, 100), &[], &config, 120_000), [0; 0]);
    }

    #[test]
    fn j2_emergency_does_not_have_others_make_way_for_who_is_leaving() {
        let (config, emergency) = (CleanupConfig::default(), CleanupKind::Emergency);
        let work = |overdue| {
            let operation = "op_1".parse().unwrap();
            Work { operation, attempt: 1, deadline_at_ms: 0, retry_at_ms: 0, overdue }
        };
        let saving =
            |save_failed, overdue| Phase::Hibernating { step: HibernateStep::Save, save_failed, work: work(overdue) };
        let planned = |leaves: Phase| {
            let mut records = [1, 2, 3, 4, 5].map(|id| record(id, true, Phase::Ready, u64::from(id)));
            records[4].phase = leaves;
            planned(emergency, &records, 5, &config, 120_000)
        };
        assert_eq!(planned(Phase::Ready), [1]);
        for leaves in [saving(false, false), Phase::Stopping { work: work(false) }] {
            assert_eq!(planned(leaves), [0; 0], "four of five stay");
        }
        // Nobody knows when these are gone.
        for stays in [saving(true, false), saving(false, true), Phase::Stopping { work: work(true) }] {
            assert_eq!(planned(stays), [1]);
        }
    }

    #[test]
    fn j2_l18_emergency_makes_room_in_each_sum_by_what_each_takes_of_it() {
        let (config, emergency) = (CleanupConfig::default(), CleanupKind::Emergency);
        for (name, limits, max) in SUMS {
            // By least harm these go as 3, 2, 1: who was used last, and is not saved, at last.
            let sized = [(1, false, 30, 40), (2, true, 20, 35), (3, true, 10, 15), (4, true, 119_000, 10)];
            let records = sized.map(|(id, persistent, active_at_ms, size)| {
                let mut record = record(id, persistent, Phase::Ready, active_at_ms);
                record.spec.limits = limits(size);
                record
            });
            let planned = |quota: Quota| planned_by(emergency, &records, quota, &[], &config, 120_000);
            let all = |of: u64| Quota { total_sums_max: max(of), ..Quota::of(100, 100) };
            assert_eq!(planned(all(125)), [0; 0], "{name}: 100 of 125 are four fifths, and not more");
            assert_eq!(planned(all(124)), [3], "{name}: 85 of 124 are left");
            assert_eq!(planned(all(106)), [3, 2], "{name}: 85 of 106 are still too much, and 50 are not");
            assert_eq!(planned(all(20)), [3, 2, 1], "{name}: who was used is not idle");
            let project = Quota { project_sums_max: max(106), ..Quota::of(100, 100) };
            assert_eq!(planned(project), [3, 2], "{name} of a project");
        }
    }

    #[test]
    fn j2_leftovers_are_not_persistent_and_were_left_for_a_while() {
        let config = CleanupConfig::default();
        let records = [
            record(1, false, Phase::Lost, 0),
            record(2, true, Phase::Lost, 0),
            record(3, false, Phase::Failed { work: None }, 500_000),
            record(4, false, Phase::Ready, 0),
        ];
        assert_eq!(planned(CleanupKind::Leftovers, &records, 100, &config, 600_000), [1]);
        assert_eq!(planned(CleanupKind::Leftovers, &records, 100, &config, 1_100_000), [1, 3]);
    }

    #[test]
    fn j2_age_is_a_deadline_that_was_missed_or_what_was_set() {
        let mut config = CleanupConfig::default();
        let mut records = [record(1, false, Phase::Ready, 0), record(2, true, Phase::Ready, 0)];
        records[0].expires_at_ms = Some(1_000);
        assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 2_000), [0; 0], "who sees to it does");
        assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 62_000), [1]);
        config.age_max = Some(Duration::from_secs(60));
        assert_eq!(planned(CleanupKind::Age, &records, 100, &config, 62_000), [1, 2]);
        let (age, quota) = (CleanupKind::Age, Quota::of(100, 100));
        let at_work = planned_by(age, &records, quota, &[1, 2], &config, 62_000);
        assert_eq!(at_work, [1], "a task keeps what is old, and no deadline");
    }
}
