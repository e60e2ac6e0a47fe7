//! What is as it is now: counted when somebody asks, from records and from what the engine keeps anyway.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use viv_core::SandboxId;
use viv_core::exec::ExecState;
use viv_core::lifecycle::{Cause, Phase, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_core::task::TaskState;
use viv_provider::InstanceRef;
use viv_store::{ExecutionQuery, ListQuery, PhaseCounts, Quota, Sums, TaskQuery};

use super::{Family, Metrics, family};
use crate::breaker::BreakerKind;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::gate::Gate;

/// Records read at once.
const PAGE: usize = 1_000;

/// How long a count of records is good: many who ask at once cost one.
const CENSUS_MS: u64 = 2_000;

/// How late what is put to rest by itself may be before it counts as stuck.
const REST_LATE_MS: u64 = 60_000;

/// How often a sandbox that was not used for long is asked what runs in it.
const ASKED_EVERY_MS: u64 = 60_000;

/// Sandboxes that are named with an alert; the others are counted.
const NAMED_MAX: usize = 10;

/// Those that live, counted: in proportion to them, and a quota bounds that.
#[derive(Debug, Clone, Default)]
pub(crate) struct Census {
    pub(crate) at_ms: u64,
    pub(crate) sums: Sums,
    pub(crate) overdue: u64,
    pub(crate) no_progress: u64,
    pub(crate) save_failed: u64,
    pub(crate) kill_failed: u64,
    /// Some of them, by the family that counts them: who is told wants to know whom to look at.
    pub(crate) whom: BTreeMap<&'static str, Vec<SandboxId>>,
    /// How much is in use of each quota in the project that has least left of it, in the order of [`OF_PROJECTS`].
    pub(crate) project_ratios: [Option<f64>; OF_PROJECTS.len()],
}

/// The quotas of projects, as they are told: of each, the project that has least left.
const OF_PROJECTS: [&str; 5] =
    ["project_sandboxes", "project_cpu_millis", "project_memory_bytes", "project_disk_bytes", "project_processes"];

/// What is in use of a quota (L18).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaUsed {
    /// Its name.
    pub name: &'static str,
    /// What there is.
    pub used: u64,
    /// What there may be; nothing is any amount.
    pub max: Option<u64>,
}

impl Census {
    fn name(&mut self, family: &'static Family, record: &Sandbox) {
        let named = self.whom.entry(family.name).or_default();
        if named.len() < NAMED_MAX && !named.contains(&record.id) {
            named.push(record.id.clone());
        }
    }
}

impl QuotaUsed {
    /// All quotas, of one project or of all.
    pub fn all(quota: &Quota, in_project: bool, sandboxes: u64, sums: &Sums) -> Vec<Self> {
        let (count_max, max) = if in_project {
            (quota.project_max, quota.project_sums_max)
        } else {
            (quota.total_max, quota.total_sums_max)
        };
        let one = |name, used, max| Self { name, used, max };
        vec![
            one("sandboxes", sandboxes, (count_max < u64::MAX).then_some(count_max)),
            one("cpu_millis", sums.cpu_millis, max.cpu_millis),
            one("memory_bytes", sums.memory_bytes, max.memory_bytes),
            one("disk_bytes", sums.disk_bytes, max.disk_bytes),
            one("processes", sums.processes, max.processes),
        ]
    }

    /// What part of it is in use; nothing where there is no limit.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.max.map(|max| if max == 0 { 1.0 } else { float(self.used) / float(max) })
    }
}

impl Engine {
    /// The figures, as they were last.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// Brings the figures up to now.
    pub async fn gather(&self) -> Result<&Metrics, EngineError> {
        self.inner.gather().await?;
        Ok(&self.inner.metrics)
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn float(count: u64) -> f64 {
    count as f64
}

impl Inner {
    /// Brings the figures up to now.
    pub(crate) async fn gather(&self) -> Result<(), EngineError> {
        let metrics = &self.metrics;
        self.feed.lock().await.catch_up(self.store.as_ref(), metrics).await?;
        let counted = self.store.count(None).await?;
        let spares = self.gather_spares().await?;
        metrics.clear(&family::SANDBOXES);
        for (phase, count) in &counted {
            let spare = spares.get(phase).copied().unwrap_or_default();
            metrics.set(&family::SANDBOXES, &[phase.as_str()], float(count.saturating_sub(spare)));
        }
        let living =
            |counts: &PhaseCounts| PhaseName::MAY_LIVE.iter().filter_map(|phase| counts.get(phase)).sum::<u64>();
        let active = living(&counted);
        // Spares count for quotas, and are there because they should be.
        metrics.set(&family::ACTIVE, &[], float(active.saturating_sub(living(&spares))));
        let census = self.census().await?;
        metrics.set(&family::STUCK, &["overdue"], float(census.overdue));
        metrics.set(&family::STUCK, &["no_progress"], float(census.no_progress));
        metrics.set(&family::SAVE_FAILED, &[], float(census.save_failed));
        metrics.set(&family::KILL_FAILED, &[], float(census.kill_failed));
        for quota in QuotaUsed::all(&self.config.quota, false, active, &census.sums) {
            metrics.set(&family::QUOTA_USED, &[quota.name], float(quota.used));
            if let (Some(max), Some(ratio)) = (quota.max, quota.ratio()) {
                metrics.set(&family::QUOTA_LIMIT, &[quota.name], float(max));
                metrics.set(&family::QUOTA_RATIO, &[quota.name], ratio);
            }
        }
        for (name, ratio) in OF_PROJECTS.iter().zip(census.project_ratios) {
            if let Some(ratio) = ratio {
                metrics.set(&family::QUOTA_RATIO, &[name], ratio);
            }
        }
        self.gather_work().await?;
        self.gather_subscriptions().await?;
        self.gather_parts();
        Ok(())
    }

    /// Tasks that live, and commands that wait: in proportion to them.
    async fn gather_work(&self) -> Result<(), EngineError> {
        let living: Vec<TaskState> = TaskState::ALL.into_iter().filter(|state| !state.is_final()).collect();
        let mut counts: BTreeMap<TaskState, u64> = living.iter().map(|state| (*state, 0)).collect();
        let mut asked = TaskQuery { states: living, limit: PAGE, ..TaskQuery::default() };
        loop {
            let listed = self.store.tasks(&asked).await?;
            for task in &listed.items {
                *counts.entry(task.state).or_default() += 1;
            }
            asked.after = listed.next;
            if asked.after.is_none() {
                break;
            }
        }
        for (state, count) in counts {
            self.metrics.set(&family::TASKS_LIVING, &[state.as_str()], float(count));
        }
        let mut asked = ExecutionQuery { queued: true, limit: PAGE, ..ExecutionQuery::default() };
        let mut queued = 0;
        loop {
            let listed = self.store.executions(&asked).await?;
            queued += listed.items.len() as u64;
            asked.after = listed.next;
            if asked.after.is_none() {
                break;
            }
        }
        self.metrics.set(&family::EXECUTIONS_QUEUED, &[], float(queued));
        Ok(())
    }

    /// Spares by class, and how many are in each phase.
    async fn gather_spares(&self) -> Result<PhaseCounts, EngineError> {
        if !self.spares.is_kept() {
            return Ok(PhaseCounts::new());
        }
        for one in self.spare_statuses().await? {
            let name = one.class.name.as_str();
            self.metrics.set(&family::SPARES, &[name, "ready"], float(one.ready.len() as u64));
            self.metrics.set(&family::SPARES, &[name, "making"], float(one.making));
            self.metrics.set(&family::SPARES, &[name, "target"], f64::from(one.target));
        }
        Ok(self.store.count(Some(&Project::spares())).await?)
    }

    /// Those that live, counted now or a moment ago.
    async fn census(&self) -> Result<Census, EngineError> {
        let now_ms = self.clock.now_ms();
        let last = self.last_census.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(last) = last.filter(|last| now_ms.saturating_sub(last.at_ms) < CENSUS_MS) {
            return Ok(last);
        }
        let mut census = Census { at_ms: now_ms, ..Census::default() };
        let mut projects: BTreeMap<Project, (u64, Sums)> = BTreeMap::new();
        let mut asked =
            ListQuery { phases: PhaseName::MAY_LIVE.to_vec(), deleted: true, limit: PAGE, ..ListQuery::default() };
        loop {
            let listed = self.store.list(&asked).await?;
            for record in &listed.items {
                self.count_in(&mut census, record, now_ms);
                if !record.is_spare() {
                    let (count, sums) = projects.entry(record.project.clone()).or_default();
                    *count += 1;
                    *sums = sums.plus(&Sums::of(&record.spec.limits, &self.config.quota.weights));
                }
                if self.is_silent_for_long(record, now_ms).await {
                    census.no_progress += 1;
                    census.name(&family::STUCK, record);
                }
            }
            asked.after = listed.next;
            if asked.after.is_none() {
                break;
            }
        }
        for (count, sums) in projects.into_values() {
            let used = QuotaUsed::all(&self.config.quota, true, count, &sums);
            for (most, quota) in census.project_ratios.iter_mut().zip(used) {
                *most = [*most, quota.ratio()].into_iter().flatten().reduce(f64::max);
            }
        }
        *self.last_census.lock().unwrap_or_else(PoisonError::into_inner) = Some(census.clone());
        Ok(census)
    }

    /// How many live, and what they take together, counted now.
    pub(crate) async fn living_now(&self) -> Result<(u64, Sums), EngineError> {
        *self.last_census.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let counted = self.store.count(None).await?;
        let count = PhaseName::MAY_LIVE.iter().filter_map(|phase| counted.get(phase)).sum();
        Ok((count, self.census().await?.sums))
    }

    fn count_in(&self, census: &mut Census, record: &Sandbox, now_ms: u64) {
        census.sums = census.sums.plus(&Sums::of(&record.spec.limits, &self.config.quota.weights));
        let (overdue, no_progress) = (is_overdue(record, now_ms), self.has_no_progress(record, now_ms));
        let save_failed = matches!(record.phase, Phase::Hibernating { save_failed: true, .. });
        let in_end = matches!(record.phase, Phase::Stopping { .. });
        let kill_failed = in_end && record.cause.cause == Cause::KillFailed;
        census.overdue += u64::from(overdue);
        census.no_progress += u64::from(no_progress);
        census.save_failed += u64::from(save_failed);
        census.kill_failed += u64::from(kill_failed);
        let counted = [
            (overdue || no_progress, &family::STUCK),
            (save_failed, &family::SAVE_FAILED),
            (kill_failed, &family::KILL_FAILED),
        ];
        for (_, family) in counted.into_iter().filter(|(is_counted, _)| *is_counted) {
            census.name(family, record);
        }
    }

    /// Whether it runs for longer than is usual with nobody doing anything, and nothing is going to put it to rest. Who
    /// said that it is to stay awake, or declared what runs in it, does not wonder.
    pub(crate) fn has_no_progress(&self, record: &Sandbox, now_ms: u64) -> bool {
        let Some(alerts) = &self.config.alerts else { return false };
        let since_ms = record.active_at_ms.max(record.phase_since_ms);
        record.phase == Phase::Ready
            && now_ms.saturating_sub(since_ms) > alerts.stuck_after.as_millis() as u64
            && record.spec.services.is_empty()
            && !record.keep_awake.values().any(|lease| lease.until_ms > now_ms)
            && self.idle_at_ms(record).is_none_or(|at_ms| at_ms.saturating_add(REST_LATE_MS) < now_ms)
    }

    /// Whether a command runs in it that nobody waits for by now, and that says nothing: it spins, or hangs. Only who was
    /// not used for long is asked, and not at every look.
    async fn is_silent_for_long(&self, record: &Sandbox, now_ms: u64) -> bool {
        let Some(alerts) = &self.config.alerts else { return false };
        let stuck_after_ms = alerts.stuck_after.as_millis() as u64;
        let since_ms = record.active_at_ms.max(record.phase_since_ms);
        let is_long = |since_ms: u64| now_ms.saturating_sub(since_ms) > stuck_after_ms;
        if record.phase != Phase::Ready || !is_long(since_ms) {
            return false;
        }
        let mut silent = self.silent.lock().await;
        if let Some((asked_ms, verdict)) = silent.get(&record.id)
            && now_ms.saturating_sub(*asked_ms) < stuck_after_ms.min(ASKED_EVERY_MS)
        {
            return *verdict;
        }
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let asked = self.call_agent(&record.id, self.config.budgets.probe, self.provider.executions(&instance)).await;
        let mut verdict = false;
        for one in asked.unwrap_or_default() {
            if one.state != ExecState::Running || one.detached || !is_long(one.started_at_ms) {
                continue;
            }
            let heard = if one.output_bytes > 0 { self.last_words(&instance, &one).await } else { None };
            verdict |= is_long(heard.and_then(|heard| heard.last_at_ms).unwrap_or(one.started_at_ms));
        }
        if silent.len() >= PAGE {
            silent.clear();
        }
        silent.insert(record.id.clone(), (now_ms, verdict));
        verdict
    }

    /// What needs no store.
    fn gather_parts(&self) {
        let (metrics, now_ms) = (&self.metrics, self.clock.now_ms());
        metrics.set(&family::DRIVERS, &[], float(self.drivers.len() as u64));
        metrics.set(&family::WATCHED, &[], float(self.watches.len() as u64));
        metrics.set(&family::ALARMS, &[], float(self.timer.len() as u64));
        metrics.set(&family::KNOWN, &[], float(self.knowledge.len() as u64));
        let provider = self.breaker.status(self.provider.name(), now_ms);
        let outside = self.outside.status(now_ms).iter().filter(|one| one.open).count();
        metrics.set(&family::BREAKER_OPEN, &[kind(BreakerKind::Provider)], f64::from(u8::from(provider.open)));
        metrics.set(&family::BREAKER_OPEN, &[kind(BreakerKind::Webhook)], float(outside as u64));
        let gates_off = Gate::ALL.into_iter().filter(|gate| !self.config.gates.is_on_everywhere(*gate)).count();
        metrics.set(&family::GATES_OFF, &[], float(gates_off as u64));
        metrics.set(&family::BREAKER_OPENED, &[], float(provider.opened));
        if let Some(counts) = self.trace_counts() {
            metrics.set(&family::SPANS_SENT, &[], float(counts.sent));
            metrics.set(&family::SPANS_DROPPED, &[], float(counts.dropped));
        }
        let groups = self.store.groups();
        metrics.set(&family::STORE_GROUPS, &[], float(groups.count));
        metrics.set(&family::STORE_GROUPED, &[], float(groups.writes));
        metrics.set(&family::GROUP_LAST, &["last"], float(groups.last));
        metrics.set(&family::GROUP_LAST, &["max"], float(groups.max));
        metrics.set(&family::ORPHANS, &[], float(self.reconcilers.suspects.len() as u64));
        let statuses = self.reconciler_statuses();
        let bad = statuses.iter().filter(|status| status.is_bad(now_ms)).count();
        metrics.set(&family::RECONCILERS_BAD, &[], float(bad as u64));
        for status in statuses {
            if let Some(at_ms) = status.last_at_ms {
                metrics.set(&family::RECONCILER_LAST, &[status.name.as_str()], float(at_ms / 1000));
            }
        }
    }
}

fn kind(kind: BreakerKind) -> &'static str {
    match kind {
        BreakerKind::Provider => "provider",
        BreakerKind::Webhook => "webhook",
    }
}

/// Whether a phase that should have ended by now has not.
pub(crate) fn is_overdue(record: &Sandbox, now_ms: u64) -> bool {
    record.phase.work().is_some_and(|work| work.overdue || work.deadline_at_ms < now_ms)
}
