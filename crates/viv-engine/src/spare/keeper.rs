//! Keeps as many spares as there should be: makes, probes and gives up.

use std::sync::Arc;

use viv_core::SandboxId;
use viv_core::lifecycle::{Actor, Desired, NewSandbox, Sandbox};
use viv_core::spec::{LIFETIME_MS_MAX, Policy, Project};
use viv_store::{Change, StoreError, Sums};

use super::claim::{is_broken, wants_a_probe};
use super::{Pool, SpareClass, is_ready, size};
use crate::cleanup::is_tight;
use crate::engine::Inner;
use crate::error::EngineError;
use crate::journal;
use crate::metrics::QuotaUsed;
use crate::reconcile::Report;

/// How many are made at a time: a machine that makes all of them at once has no time for anybody else.
const AT_ONCE: usize = 4;

/// The first wait after one that did not come up; it doubles.
const FAILED_PAUSE_MS: u64 = 1_000;

/// The longest such wait.
const FAILED_PAUSE_MS_MAX: u64 = 300_000;

/// After there was no room for a spare, this long passes before it is tried again.
const FULL_PAUSE_MS: u64 = 30_000;

/// Looks once.
pub(crate) async fn run(inner: &Arc<Inner>) -> Result<Report, EngineError> {
    let mut round = Round { inner, report: Report::default(), making: 0, going: 0 };
    round.look().await?;
    Ok(round.report)
}

struct Round<'i> {
    inner: &'i Arc<Inner>,
    report: Report,
    /// How many are on their way, of all classes.
    making: usize,
    /// How many are ending.
    going: usize,
}

impl Round<'_> {
    async fn look(&mut self) -> Result<(), EngineError> {
        let records = self.inner.spare_records().await?;
        let mut kept: Vec<Vec<Sandbox>> = self.inner.config.spares.classes.iter().map(|_| Vec::new()).collect();
        for record in records {
            if record.desired == Desired::Gone {
                self.going += 1;
                continue;
            }
            let class = self.inner.config.spares.class_of(&record);
            match (self.why_not(&record, class), class) {
                (Some(why), _) => self.give_up(&record.id, why).await?,
                (None, Some(class)) => kept[class].push(record),
                (None, None) => {}
            }
        }
        self.make_room(&mut kept).await?;
        self.making = kept.iter().flatten().filter(|record| !is_ready(record)).count();
        for (class, records) in kept.into_iter().enumerate() {
            self.look_at_class(class, records).await?;
        }
        Ok(())
    }

    /// Why this one is of no use.
    fn why_not(&mut self, record: &Sandbox, class: Option<usize>) -> Option<&'static str> {
        let (inner, now_ms) = (self.inner, self.inner.clock.now_ms());
        let Some(class) = class else { return Some("no class wants it") };
        if is_broken(record) {
            let mut state = inner.spares.lock();
            let pool = &mut state.pools[class];
            pool.broken += 1;
            pool.failures = pool.failures.saturating_add(1);
            let pause_ms = FAILED_PAUSE_MS.saturating_mul(1 << (pool.failures - 1).min(16)).min(FAILED_PAUSE_MS_MAX);
            pool.not_before_ms = now_ms.saturating_add(pause_ms);
            return Some("it is broken");
        }
        if inner.is_draining() {
            return Some("the daemon is drained");
        }
        let is_old = now_ms.saturating_sub(record.created_at_ms) >= inner.config.spares.age_max.as_millis() as u64;
        is_old.then_some("it is old")
    }

    async fn give_up(&mut self, id: &SandboxId, why: &str) -> Result<(), EngineError> {
        self.report.found += 1;
        if self.inner.give_up(id, why).await? {
            self.report.did += 1;
            self.going += 1;
        }
        Ok(())
    }

    /// Gives up one for each who waits for room; the largest class first.
    async fn make_room(&mut self, kept: &mut [Vec<Sandbox>]) -> Result<(), EngineError> {
        let waiting = self.inner.spares.lock().waiting;
        while self.going < waiting {
            let Some(largest) = kept.iter_mut().max_by_key(|records| records.len()) else { return Ok(()) };
            let Some(record) = largest.pop() else { return Ok(()) };
            self.give_up(&record.id, "somebody needs its room").await?;
        }
        Ok(())
    }

    async fn look_at_class(&mut self, class: usize, mut records: Vec<Sandbox>) -> Result<(), EngineError> {
        let (inner, now_ms) = (self.inner, self.inner.clock.now_ms());
        let every_ms = inner.config.spares.probe_every.as_millis() as u64;
        let target = {
            let state = inner.spares.lock();
            inner.spare_target(&state.pools[class], &inner.config.spares.classes[class], now_ms) as usize
        };
        while records.len() > target {
            // The oldest is the first that would be too old.
            let record = records.remove(0);
            self.give_up(&record.id, "fewer are enough").await?;
        }
        for record in records.iter().filter(|record| is_ready(record)) {
            let probed_at_ms =
                inner.knowledge.has_probed(record).then(|| inner.knowledge.evidence(record, now_ms).at_ms()).flatten();
            if wants_a_probe(record, probed_at_ms, every_ms, now_ms) {
                inner.probe_spare(&record.id);
            }
            if probed_at_ms.is_some() && !inner.knowledge.has_ended(record) {
                // Who was to claim it and did not is not waited for.
                inner.spares.lock().offer(Some(class), &record.id, true);
            }
        }
        for _ in records.len()..target {
            if self.making >= AT_ONCE || !inner.may_make_spares(class) || !self.make(class).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Records one more. Whether there was room.
    async fn make(&mut self, class: usize) -> Result<bool, EngineError> {
        let inner = self.inner;
        let Ok(_entering) = inner.begin_entry() else { return Ok(false) };
        self.report.found += 1;
        let now = inner.now();
        if !inner.has_room_for_spare(class).await? {
            inner.spares.lock().held_until_ms = now.ms.saturating_add(FULL_PAUSE_MS);
            return Ok(false);
        }
        let new = NewSandbox {
            id: SandboxId::from_bytes((inner.draw)()),
            project: Project::spares(),
            name: None,
            spec: inner.config.spares.classes[class].spec.clone(),
            policy: policy(),
            labels: std::collections::BTreeMap::new(),
            origin: None,
            by: Actor::part("spares"),
        };
        let sandbox = Sandbox::create(new, now.moment());
        let change = Change {
            quota: inner.quota(&sandbox),
            lines: vec![journal::spare_created(&sandbox, now.ms)],
            sandbox: sandbox.clone(),
            idempotency: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        match Box::pin(inner.write(change)).await {
            Ok(()) => {
                inner.committed(&sandbox);
                (self.making, self.report.did) = (self.making + 1, self.report.did + 1);
                Ok(true)
            }
            Err(StoreError::Quota { .. }) => {
                let held_until_ms = now.ms.saturating_add(FULL_PAUSE_MS);
                inner.spares.lock().held_until_ms = held_until_ms;
                Ok(false)
            }
            Err(other) => {
                inner.doubt(&other, &sandbox.id);
                Err(other.into())
            }
        }
    }
}

/// A spare lives for as long as it can, and is put to rest by nobody: the keeper sees to its age.
fn policy() -> Policy {
    Policy {
        persistent: false,
        lifetime_ms: LIFETIME_MS_MAX,
        idle_ms: LIFETIME_MS_MAX,
        hibernate_ms: LIFETIME_MS_MAX,
        ..Policy::default_for(None)
    }
}

impl Inner {
    /// Spares that are of no use and do not end.
    pub(crate) async fn useless_spares(&self) -> Result<Vec<SandboxId>, EngineError> {
        let stay = self.spare_records().await?.into_iter().filter(|record| record.desired != Desired::Gone);
        let useless = stay.filter(|record| is_broken(record) || self.config.spares.class_of(record).is_none());
        Ok(useless.map(|record| record.id).collect())
    }

    /// Whether one more leaves as much as an emergency wants to be free. Else it would be given up there, made again, and
    /// given up, for ever (J2).
    async fn has_room_for_spare(&self, class: usize) -> Result<bool, EngineError> {
        let Some(cleanup) = self.config.cleanup else { return Ok(true) };
        let (count, sums) = self.living_now().await?;
        let quota = &self.config.quota;
        let one = Sums::of(&self.config.spares.classes[class].spec.limits, &quota.weights);
        let used = QuotaUsed::all(quota, false, count + 1, &sums.plus(&one));
        Ok(!used.iter().any(|quota| is_tight(quota, cleanup.emergency_above)))
    }

    pub(super) fn spare_target(&self, pool: &Pool, class: &SpareClass, now_ms: u64) -> u32 {
        let window_ms = self.config.spares.window.as_millis() as u64;
        size::target(class.min, class.max, &pool.asked_at_ms, window_ms, now_ms)
    }

    fn may_make_spares(&self, class: usize) -> bool {
        let (now_ms, state) = (self.clock.now_ms(), self.spares.lock());
        state.waiting == 0 && now_ms >= state.held_until_ms && now_ms >= state.pools[class].not_before_ms
    }

    /// Probes one beside the round, and looks again when it is known how it is.
    fn probe_spare(self: &Arc<Self>, id: &SandboxId) {
        if !self.spares.lock().checking.insert(id.clone()) {
            return;
        }
        let (inner, id) = (self.clone(), id.clone());
        tokio::spawn(async move {
            inner.check_in_turn(&id).await;
            inner.spares.lock().checking.remove(&id);
            inner.reconcilers.look_at_spares();
        });
    }
}
