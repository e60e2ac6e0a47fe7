//! What is as it is now: counted when somebody asks, from what the store and the engine count anyway.

use std::collections::BTreeMap;

use viv_core::lifecycle::PhaseName;
use viv_core::spec::Project;
use viv_core::task::TaskState;
use viv_store::{ExecutionQuery, PhaseCounts, Quota, Sums, TaskQuery};

use super::wrong::Whom;
use super::{Family, Metrics, family};
use crate::breaker::BreakerKind;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::gate::Gate;

/// Records read at once.
const PAGE: usize = 1_000;

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

    /// In words, with numbers; those of a project, or of all.
    fn words(&self, project: Option<&Project>) -> String {
        let of_whom = project.map_or(String::new(), |project| format!(" of the project {project}"));
        format!("{} {} of {}{of_whom}", self.name, self.used, self.max.unwrap_or_default())
    }

    /// What part of it is in use; nothing where there is no limit.
    pub(crate) fn ratio(&self) -> Option<f64> {
        self.max.map(|max| if max == 0 { 1.0 } else { float(self.used) / float(max) })
    }
}

/// What is known beside the figures: labels may not say it, since users choose what it is about, and who is told wants to
/// know.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    /// Some of those that are counted as wrong.
    pub(crate) whom: Whom,
    /// What a family has most of, with numbers.
    pub(crate) most: Most,
}

/// Of a family, in words, what is greatest.
pub(crate) type Most = BTreeMap<&'static str, String>;

/// Looks for the greatest of what belongs to one family.
#[derive(Debug, Default)]
struct Greatest(Option<(f64, String)>);

impl Greatest {
    /// What comes first stays, where others are as great.
    fn look(&mut self, number: f64, words: impl FnOnce() -> String) {
        if self.0.as_ref().is_none_or(|(greatest, _)| number > *greatest) {
            self.0 = Some((number, words()));
        }
    }

    fn name(self, most: &mut Most, family: &'static Family) {
        most.extend(self.0.map(|(_, words)| (family.name, words)));
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
pub(super) fn float(count: u64) -> f64 {
    count as f64
}

impl Inner {
    /// Brings the figures up to now, and tells what they cannot.
    pub(crate) async fn gather(&self) -> Result<Gathered, EngineError> {
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
        let whom = self.gather_wrong().await?;
        let (mut most, mut tightest) = (Most::new(), Greatest::default());
        for quota in QuotaUsed::all(&self.config.quota, false, active, &self.roster.sums()) {
            metrics.set(&family::QUOTA_USED, &[quota.name], float(quota.used));
            if let (Some(max), Some(ratio)) = (quota.max, quota.ratio()) {
                metrics.set(&family::QUOTA_LIMIT, &[quota.name], float(max));
                metrics.set(&family::QUOTA_RATIO, &[quota.name], ratio);
                tightest.look(ratio, || quota.words(None));
            }
        }
        // All projects may have as much, so who has most of something has least left of it.
        let (count, sums) = self.roster.most_of_a_project();
        let of_projects = QuotaUsed::all(&self.config.quota, true, count, &sums).into_iter();
        for ((name, quota), project) in OF_PROJECTS.iter().zip(of_projects).zip(self.roster.whose_is_most()) {
            if let Some(ratio) = quota.ratio() {
                metrics.set(&family::QUOTA_RATIO, &[name], ratio);
                tightest.look(ratio, || quota.words(project.as_ref()));
            }
        }
        tightest.name(&mut most, &family::QUOTA_RATIO);
        self.gather_work().await?;
        self.gather_subscriptions().await?;
        self.gather_parts();
        Ok(Gathered { whom, most })
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

    /// How many live, and what they take together.
    pub(crate) async fn living_now(&self) -> Result<(u64, Sums), EngineError> {
        let counted = self.store.count(None).await?;
        let count = PhaseName::MAY_LIVE.iter().filter_map(|phase| counted.get(phase)).sum();
        Ok((count, self.roster.sums()))
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
