//! Cleanup in layers (J2): what is unwell and not new, what failed or is lost and nobody's, what is past its time, and, when little is left of a
//! quota, what is idle.
//!
//! ```text
//!   records ──► plan (pure) ──► each: is it in use? ──► step, unless somebody used it since ──► journal
//! ```
//!
//! Instances are removed, never records or snapshots of persistent sandboxes: those are saved, and run again when somebody
//! wants them. Whether something runs in a sandbox is asked before anything is done to it, and without an answer nothing
//! is (T7). A cleanup says what it found before it does anything, and a dry run stops there.

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

/// What is to be done about these records. Pure; in the order in which it is done.
pub(crate) fn plan(
    kind: CleanupKind,
    records: &[Sandbox],
    quotas: &dyn Fn(u64, &Sums) -> Vec<QuotaUsed>,
    sums_of: &dyn Fn(&Sandbox) -> Sums,
    config: &CleanupConfig,
    now_ms: u64,
) -> Vec<CleanupItem> {
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
                let missed = record.expires_at_ms.is_some_and(|at_ms| now_ms > at_ms.saturating_add(MISSED_MS));
                let age_s = now_ms.saturating_sub(record.created_at_ms) / 1000;
                if missed {
                    found.push(item(record, "its hard deadline has passed".to_owned()));
                } else if config.age_max.is_some_and(|max| old(record.created_at_ms, max)) {
                    found.push(item(record, format!("{age_s} s old")));
                }
            }
            found
        }
        CleanupKind::Emergency => {
            let all = spares.iter().chain(&records);
            let living = all.filter(|record| PhaseName::MAY_LIVE.contains(&record.phase.name()));
            let (mut count, mut sums) =
                living.fold((0_u64, Sums::default()), |(count, sums), record| (count + 1, sums.plus(&sums_of(record))));
            let mut idle: Vec<&Sandbox> = records.into_iter().filter(is_up).collect();
            idle.retain(|record| old(record.active_at_ms.max(record.phase_since_ms), config.emergency_idle));
            // Least harm first: nothing of what is saved is lost. Then who was not used for longest.
            idle.sort_by_key(|record| (!record.policy.persistent, record.active_at_ms));
            let mut found = Vec::new();
            for record in spares.into_iter().filter(is_up).chain(idle) {
                let tight = quotas(count, &sums).into_iter().find(|quota| is_tight(quota, config.emergency_above));
                let Some(tight) = tight else { break };
                let max = tight.max.unwrap_or_default();
                let used = format!("{} of {max} {} are in use", tight.used, tight.name);
                let idle_s = now_ms.saturating_sub(record.active_at_ms) / 1000;
                found.push(if record.is_spare() {
                    item(record, format!("a spare, and {used}"))
                } else {
                    item(record, format!("not used for {idle_s} s, and {used}"))
                });
                count = count.saturating_sub(1);
                sums = minus(&sums, &sums_of(record));
            }
            found
        }
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
fn is_tight(quota: &QuotaUsed, above: f64) -> bool {
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

impl Engine {
    /// Cleans up by these layers, or says what would be done.
    pub async fn cleanup(&self, kinds: &[CleanupKind], dry_run: bool, by: Actor) -> Result<CleanupReport, EngineError> {
        self.inner.cleanup(kinds, dry_run, by).await
    }
}

/// The layers that are due, as a reconciler.
pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let Some(config) = inner.config.cleanup else { return Ok(Report::default()) };
    let (now_ms, mut kinds) =
        (inner.clock.now_ms(), vec![CleanupKind::Unhealthy, CleanupKind::Leftovers, CleanupKind::Emergency]);
    let aged_at_ms = inner.cleanups.aged_at_ms.load(Ordering::Relaxed);
    if now_ms.saturating_sub(aged_at_ms) >= config.age_period.as_millis() as u64 {
        inner.cleanups.aged_at_ms.store(now_ms, Ordering::Relaxed);
        kinds.insert(2, CleanupKind::Age);
    }
    let report = inner.cleanup(&kinds, false, Actor::part("cleanup")).await?;
    Ok(Report { found: report.found(), did: report.done(), failed: report.failed() })
}

impl Inner {
    async fn cleanup(
        self: &Arc<Self>,
        kinds: &[CleanupKind],
        dry_run: bool,
        by: Actor,
    ) -> Result<CleanupReport, EngineError> {
        let config = self.config.cleanup.unwrap_or_default();
        let records = self.living().await?;
        if kinds.contains(&CleanupKind::Unhealthy) && !dry_run {
            self.look_at_the_unseen(&records, &config);
        }
        let quota = &self.config.quota;
        let quotas = |count: u64, sums: &Sums| QuotaUsed::all(quota, false, count, sums);
        let sums_of = |record: &Sandbox| Sums::of(&record.spec.limits, &quota.weights);
        let mut items: Vec<CleanupItem> = Vec::new();
        for kind in kinds {
            let found = plan(*kind, &records, &quotas, &sums_of, &config, self.clock.now_ms());
            // One is enough, whoever found it first.
            items.extend(
                found
                    .into_iter()
                    .filter(|new| !items.iter().any(|item| item.sandbox == new.sandbox))
                    .collect::<Vec<_>>(),
            );
        }
        if dry_run || items.is_empty() {
            return Ok(CleanupReport { items });
        }
        let names: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
        let told = |kind: &str, data| whole(kind, by.clone(), self.clock.now_ms(), data);
        let started = told("cleanup.started", json!({ "layers": names, "found": items.len() }));
        self.store.append(self.epoch, vec![started]).await?;
        for item in &mut items {
            let record = records.iter().find(|record| record.id == item.sandbox);
            item.outcome = match record {
                Some(record) => self.clean(record, item, &by).await,
                None => CleanupOutcome::InUse,
            };
            if self.is_ending() {
                break;
            }
        }
        let report = CleanupReport { items };
        let data =
            json!({ "layers": names, "found": report.found(), "done": report.done(), "failed": report.failed() });
        self.store.append(self.epoch, vec![whole("cleanup.completed", by, self.clock.now_ms(), data)]).await?;
        Ok(report)
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
    async fn clean(self: &Arc<Self>, record: &Sandbox, item: &CleanupItem, by: &Actor) -> CleanupOutcome {
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
            CleanupKind::Age => self.put_to_rest(record, ENDED_MS).await,
            CleanupKind::Emergency => {
                let idle = self.config.cleanup.unwrap_or_default().emergency_idle;
                self.put_to_rest(record, ENDED_MS.max(idle.as_millis() as u64)).await
            }
        };
        let outcome = match done {
            Ok(true) => CleanupOutcome::Done,
            Ok(false) => CleanupOutcome::InUse,
            Err(error) => CleanupOutcome::Failed(crate::effect::in_words(&error)),
        };
        let data = json!({
            "layer": item.kind.as_str(),
            "action": item.action.as_str(),
            "why": item.why,
            "outcome": match &outcome {
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
        outcome
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

    /// Puts it to rest as if its window were over, unless it is in use: by its record, by what runs in it, or by who
    /// comes until it is written down (L6). Whether it was; without an answer about what runs, nothing is done (T7).
    pub(crate) async fn put_to_rest(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        if seen.phase == Phase::Ready {
            let Some(used_at_ms) = self.used_at_ms(seen).await else {
                let what = "it does not say whether something runs in it".to_owned();
                return Err(EngineError::Invalid { what, hint: format!("viv doctor {}", seen.id) });
            };
            // What runs uses it now, what ended used it until then.
            if self.clock.now_ms().saturating_sub(used_at_ms) < idle_ms {
                return Ok(false);
            }
        }
        for _ in 0..RACES_MAX {
            let before = self.load(&seen.id).await?;
            if before.active_at_ms > seen.active_at_ms || before.generation != seen.generation {
                return Ok(false);
            }
            let at = self.moment();
            let mut hurried = before.clone();
            (hurried.policy.idle_ms, hurried.policy.hibernate_ms) = (0, 0);
            let event = Event::Idle { freezes: false };
            let Stepped::Accepted(accepted) = step(&hurried, &event, at) else { return Ok(false) };
            let Accepted { mut next, happened } = *accepted;
            next.policy = before.policy.clone();
            let line = journal::line(&event, &before, &next, happened, at.now_ms);
            match self.commit(next, vec![line], None, Some(before.active_at_ms), Vec::new()).await {
                Ok(_) => return Ok(true),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(&seen.id))
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

#[cfg(test)]
mod tests {
    use viv_core::lifecycle::{Moment, NewSandbox, Timings};
    use viv_core::spec::{Policy, SandboxSpec};
    use viv_store::Quota;

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
        let quota = Quota::of(max, max);
        let quotas = |count: u64, sums: &Sums| QuotaUsed::all(&quota, false, count, sums);
        let found = plan(kind, records, &quotas, &|_| Sums::default(), config, now_ms);
        let number = |item: &CleanupItem| (1..=255).find(|id| SandboxId::from_bytes([*id; 16]) == item.sandbox);
        found.iter().filter_map(number).collect()
    }

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
    }
}
