//! Reconcilers: each takes no input, compares store and provider, is idempotent, never retries inside itself, and says
//! how it went. They run on a signal and on a period.

mod expiry;
mod health;
pub(crate) mod provider_sync;
mod retention;
mod snapshots;
mod stuck;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use viv_provider::FindingKind;

use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::metrics::{Metrics, family};

pub(crate) use health::Health;
use provider_sync::Suspects;

/// The place of this one among those that run on a period.
const SNAPSHOTS_BELL: usize = 4;

/// And of this one, where there are spares.
const SPARES_BELL: usize = 5;

/// This one has its hour, and rings once more at the start.
const FULL_BELL: usize = 8;

/// Which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReconcilerName {
    /// Records without instances, instances without records (J1).
    ProviderSync,
    /// Hard deadlines whose end was not pushed.
    Expiry,
    /// Transient phases past their deadline.
    Stuck,
    /// What is probed because it was read and stale.
    Health,
    /// What nobody used for its window (L5).
    Idle,
    /// Snapshots that are too many, too old, or nobody's (L11).
    Snapshots,
    /// Old lines, keys and tombstones (J9).
    Retention,
    /// As many spares as there should be (L19).
    Spares,
    /// Whether somebody has to be told (O5).
    Alerts,
    /// What failed, is past its time, or has to make room (J2).
    Cleanup,
    /// Records, instances, the machine and the store, compared both ways (J2).
    Full,
}

impl ReconcilerName {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::ProviderSync,
        Self::Expiry,
        Self::Stuck,
        Self::Health,
        Self::Idle,
        Self::Snapshots,
        Self::Retention,
        Self::Spares,
        Self::Alerts,
        Self::Cleanup,
        Self::Full,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ProviderSync => "provider-sync",
            Self::Expiry => "expiry",
            Self::Stuck => "stuck",
            Self::Health => "health",
            Self::Idle => "idle",
            Self::Snapshots => "snapshots",
            Self::Retention => "retention",
            Self::Spares => "spares",
            Self::Alerts => "alerts",
            Self::Cleanup => "cleanup",
            Self::Full => "full",
        }
    }
}

/// How a reconciler stands, for an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReconcilerStatus {
    /// Which.
    pub name: ReconcilerName,
    /// How often it ran.
    pub runs: u64,
    /// When it last ended.
    pub last_at_ms: Option<u64>,
    /// How long that took.
    pub took_ms: u64,
    /// What it found in the last run.
    pub found: u64,
    /// What it did about it.
    pub did: u64,
    /// What it could not do.
    pub failed: u64,
    /// Why the last run failed as a whole.
    pub error: Option<String>,
    /// When it runs next, unless it is signalled.
    pub next_at_ms: Option<u64>,
    /// How far apart its runs are; without, it has no time of its own.
    pub period_ms: Option<u64>,
}

impl ReconcilerStatus {
    /// One that has not run yet.
    fn new(name: ReconcilerName) -> Self {
        Self {
            name,
            runs: 0,
            last_at_ms: None,
            took_ms: 0,
            found: 0,
            did: 0,
            failed: 0,
            error: None,
            next_at_ms: None,
            period_ms: None,
        }
    }

    /// Whether its last run failed, or it should have run long ago (J3). One without a time of its own runs for one
    /// sandbox, and what failed then is known of that.
    pub fn is_bad(&self, now_ms: u64) -> bool {
        let has_failed = self.error.is_some() || self.failed > 0;
        self.next_at_ms.is_some() && (has_failed || self.is_overdue(now_ms))
    }

    /// Whether it is far past its time: by two periods.
    pub fn is_overdue(&self, now_ms: u64) -> bool {
        let latest_ms = self.next_at_ms.zip(self.period_ms);
        latest_ms.is_some_and(|(next_ms, period_ms)| now_ms > next_ms.saturating_add(period_ms.saturating_mul(2)))
    }
}

/// What came of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) found: u64,
    pub(crate) did: u64,
    pub(crate) failed: u64,
}

/// What is kept between runs.
#[derive(Debug, Default)]
pub(crate) struct Reconcilers {
    statuses: Mutex<BTreeMap<ReconcilerName, ReconcilerStatus>>,
    bells: [Notify; 9],
    /// Whether somebody keeps spares.
    keeps_spares: std::sync::atomic::AtomicBool,
    metrics: Metrics,
    pub(crate) suspects: Suspects,
    /// What was left on the machine, as of the last look.
    pub(crate) left: Mutex<BTreeSet<(FindingKind, String)>>,
    pub(crate) strays: snapshots::Strays,
}

impl Reconcilers {
    /// Those whose runs are counted there.
    pub(crate) fn telling(metrics: &Metrics) -> Self {
        Self { metrics: metrics.clone(), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReconcilerName, ReconcilerStatus>> {
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was saved of this sandbox before may be of no use any more.
    pub(crate) fn tidy_snapshots_of(&self, sandbox: &viv_core::SandboxId) {
        self.strays.touch(sandbox);
        self.bells[SNAPSHOTS_BELL].notify_one();
    }

    /// A spare was claimed, is ready, or is of no use any more.
    pub(crate) fn look_at_spares(&self) {
        if self.keeps_spares.load(std::sync::atomic::Ordering::Relaxed) {
            self.bells[SPARES_BELL].notify_one();
        }
    }

    /// Asks for everything to be compared with everything now (J2).
    pub(crate) fn compare_everything(&self) {
        self.bells[FULL_BELL].notify_one();
    }

    /// Asks all to run now, but for the one that compares everything: that is done at the start, and has its hour.
    pub(crate) fn signal_all(&self) {
        // Who asks wants to know of all of them, and not of what changed.
        self.strays.want_all();
        for bell in &self.bells[..FULL_BELL] {
            bell.notify_one();
        }
    }

    /// It is to run at this period from now on: one that hangs in its first run is overdue as any other (J3).
    fn expect(&self, name: ReconcilerName, period_ms: u64, now_ms: u64) {
        let mut statuses = self.lock();
        let status = statuses.entry(name).or_insert_with(|| ReconcilerStatus::new(name));
        (status.next_at_ms, status.period_ms) = (Some(now_ms.saturating_add(period_ms)), Some(period_ms));
    }

    pub(crate) fn record(
        &self,
        name: ReconcilerName,
        report: &Result<Report, EngineError>,
        (began_ms, now_ms): (u64, u64),
        next_at_ms: Option<u64>,
    ) {
        let took_ms = now_ms.saturating_sub(began_ms);
        self.metrics.count(&family::RECONCILER_RUNS, &[name.as_str()]);
        self.metrics.observe_ms(&family::RECONCILER_SECONDS, &[name.as_str()], took_ms);
        if report.as_ref().is_ok_and(|report| report.failed > 0) || report.is_err() {
            self.metrics.count(&family::RECONCILER_FAILURES, &[name.as_str()]);
        }
        let mut statuses = self.lock();
        let status = statuses.entry(name).or_insert_with(|| ReconcilerStatus::new(name));
        status.runs += 1;
        status.last_at_ms = Some(now_ms);
        status.took_ms = took_ms;
        status.next_at_ms = next_at_ms;
        match report {
            Ok(Report { found, did, failed }) => {
                (status.found, status.did, status.failed, status.error) = (*found, *did, *failed, None);
            }
            Err(error) => status.error = Some(crate::effect::in_words(error)),
        }
    }
}

impl Engine {
    /// How all reconcilers stand: those that have a period from the start, and others once they ran.
    pub fn reconcilers(&self) -> Vec<ReconcilerStatus> {
        self.inner.reconciler_statuses()
    }

    /// Asks all reconcilers to run now.
    pub fn reconcile(&self) {
        self.inner.reconcilers.signal_all();
    }
}

impl Inner {
    pub(crate) fn reconciler_statuses(&self) -> Vec<ReconcilerStatus> {
        self.reconcilers.lock().values().cloned().collect()
    }
}

/// Starts them.
pub(crate) fn spawn(inner: &Arc<Inner>) {
    let periods = inner.config.periods;
    let alerts = inner.config.alerts.as_ref().map(|alerts| (ReconcilerName::Alerts, alerts.period));
    let cleanup = inner.config.cleanup.map(|cleanup| (ReconcilerName::Cleanup, cleanup.period));
    let full = inner.config.cleanup.map(|cleanup| (ReconcilerName::Full, cleanup.full_period));
    let spares = inner.spares.is_kept().then_some((ReconcilerName::Spares, inner.config.spares.period));
    inner.reconcilers.keeps_spares.store(spares.is_some(), std::sync::atomic::Ordering::Relaxed);
    let periodic = [
        (ReconcilerName::ProviderSync, periods.provider_sync),
        (ReconcilerName::Expiry, periods.expiry),
        (ReconcilerName::Stuck, periods.stuck),
        (ReconcilerName::Retention, periods.retention),
        (ReconcilerName::Snapshots, periods.snapshots),
    ];
    for (at, (name, period)) in periodic.into_iter().chain(spares).chain(alerts).chain(cleanup).chain(full).enumerate()
    {
        let at = if name == ReconcilerName::Full { FULL_BELL } else { at };
        let inner = inner.clone();
        let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        inner.reconcilers.expect(name, period_ms, inner.clock.now_ms());
        // A run that panics is a mistake of ours, and no reason not to run again (J3).
        tokio::spawn(async move {
            while let Err(error) = tokio::spawn(run(inner.clone(), name, period, at)).await {
                if inner.is_ending() || error.is_cancelled() {
                    return;
                }
                tracing::error!(component = "reconcile", reconciler = name.as_str(), "panicked, and runs again");
                if name == ReconcilerName::Snapshots {
                    // What it was to look at is forgotten with the run.
                    inner.reconcilers.strays.want_all();
                }
                let failed = Err(EngineError::Invalid { what: "it panicked".to_owned(), hint: String::new() });
                let now_ms = inner.clock.now_ms();
                inner.reconcilers.record(name, &failed, (now_ms, now_ms), Some(now_ms.saturating_add(period_ms)));
            }
        });
    }
}

async fn run(inner: Arc<Inner>, name: ReconcilerName, period: Duration, bell: usize) {
    let mut ending = inner.ending();
    loop {
        tokio::select! {
            biased;
            _ = ending.wait_for(|ending| *ending) => return,
            () = inner.reconcilers.bells[bell].notified() => {}
            () = tokio::time::sleep(period) => {}
        }
        let began_ms = inner.clock.now_ms();
        let report = match name {
            ReconcilerName::ProviderSync => provider_sync::run(&inner).await,
            ReconcilerName::Expiry => expiry::run(&inner).await,
            ReconcilerName::Stuck => stuck::run(&inner).await,
            ReconcilerName::Retention => retention::run(&inner).await,
            ReconcilerName::Snapshots => snapshots::run(&inner).await,
            ReconcilerName::Spares => crate::spare::run(&inner).await,
            ReconcilerName::Alerts => crate::alert::run(&inner).await,
            ReconcilerName::Cleanup => crate::cleanup::run(&inner).await,
            ReconcilerName::Full => crate::audit::run(&inner).await,
            // These have no period: one runs for what was read, the other for an alarm.
            ReconcilerName::Health | ReconcilerName::Idle => Ok(Report::default()),
        };
        if let Err(error) = &report {
            tracing::warn!(component = "reconcile", reconciler = name.as_str(), %error, "did not run through");
        }
        let now_ms = inner.clock.now_ms();
        let next_ms = now_ms + u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        inner.reconcilers.record(name, &report, (began_ms, now_ms), Some(next_ms));
    }
}
