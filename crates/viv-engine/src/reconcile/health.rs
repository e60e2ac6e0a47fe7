//! Probes what was read and is stale. A probe is an observation: only its finding moves the phase (T3).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use viv_core::SandboxId;
use viv_core::lifecycle::{Event, Finding, Phase};
use viv_provider::InstanceRef;

use super::{ReconcilerName, Report};
use crate::engine::Inner;
use crate::error::EngineError;

/// How many are probed at a time, so that a long listing is no storm.
const AT_ONCE: usize = 8;

/// How long to wait before what is lost is looked for again, after a look that nobody answered.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Closed when a check is done. Unlike with `tokio::sync::watch`, which wakes those who wait in a random order, they go on
/// in the order in which they came: a simulated world replays exactly.
type Done = Arc<Semaphore>;

/// Which checks are under way.
#[derive(Debug)]
pub(crate) struct Health {
    under_way: Mutex<HashMap<SandboxId, Done>>,
    permits: Semaphore,
}

impl Default for Health {
    fn default() -> Self {
        Self { under_way: Mutex::default(), permits: Semaphore::new(AT_ONCE) }
    }
}

/// A check that is under way until this is dropped, also by a panic: the next one begins anew.
struct UnderWay {
    inner: Arc<Inner>,
    sandbox: SandboxId,
    done: Done,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.inner.health.under_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.sandbox);
        self.done.close();
    }
}

/// Whether a check began for who asks, or for somebody before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    Now,
    Before,
}

impl Inner {
    /// Something is stale or odd about it: it is checked soon, by somebody else.
    pub(crate) fn signal_health(self: &Arc<Self>, sandbox: &SandboxId) {
        if self.is_ending() {
            return;
        }
        drop(self.begin_check(sandbox));
    }

    /// Checks it now, and answers when that is done. What began before it was asked for may have seen what is not so
    /// any more: that one is waited for, and the next one counts, which all share who asked meanwhile (T3).
    pub(crate) async fn check_health(self: &Arc<Self>, sandbox: &SandboxId) -> Result<(), EngineError> {
        let (done, begun) = self.begin_check(sandbox);
        // It has no permits, so this ends when it is closed.
        let _ = done.acquire().await;
        if begun == Begun::Before {
            // Whoever began this one did so after the other had ended, and so after it was asked for here.
            let (done, _) = self.begin_check(sandbox);
            let _ = done.acquire().await;
        }
        Ok(())
    }

    /// Looks for what is lost before anything is done about it: who was silent may be there all the same, and then it is
    /// verified and kept (T7, L15). Without an answer in time, who looks for what is lost finds it later.
    pub(crate) async fn look_for_lost(self: &Arc<Self>, sandbox: &SandboxId) -> Result<(), EngineError> {
        let record = self.load(sandbox).await?;
        if record.phase != Phase::Lost {
            return Ok(());
        }
        let instance = InstanceRef { sandbox: record.id, generation: record.generation };
        let looked_for = async {
            // A call that is lost, or refused by the breaker, is no look.
            while let Err(error) = self.call(sandbox, self.config.budgets.probe, self.provider.observe(&instance)).await
                && error.is_transient()
                && !self.is_ending()
            {
                self.pause(LOOK_AGAIN).await;
            }
            self.check_health(sandbox).await
        };
        tokio::time::timeout(self.config.budgets.call, looked_for).await.unwrap_or(Ok(()))
    }

    /// The check that is under way, or a new one. It runs by itself, so that a reader who goes away does not end it.
    fn begin_check(self: &Arc<Self>, sandbox: &SandboxId) -> (Done, Begun) {
        let mut under_way = self.health.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(done) = under_way.get(sandbox) {
            return (done.clone(), Begun::Before);
        }
        let done = Arc::new(Semaphore::new(0));
        under_way.insert(sandbox.clone(), done.clone());
        let (inner, sandbox) = (self.clone(), sandbox.clone());
        let check = UnderWay { inner, sandbox, done: done.clone() };
        tokio::spawn(async move {
            let UnderWay { inner, sandbox, .. } = &check;
            let began_ms = inner.clock.now_ms();
            let report = inner.check_once(sandbox).await;
            let times = (began_ms, inner.clock.now_ms());
            inner.reconcilers.record(ReconcilerName::Health, &report, times, None);
        });
        (done, Begun::Now)
    }

    async fn check_once(self: &Arc<Self>, sandbox: &SandboxId) -> Result<Report, EngineError> {
        let _permit = self.health.permits.acquire().await;
        let record = self.load(sandbox).await?;
        let looked_at = match &record.phase {
            Phase::Ready | Phase::Lost | Phase::Frozen { .. } => true,
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Hibernating { .. }
            | Phase::Hibernated { .. }
            | Phase::Resuming { .. }
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => false,
        };
        if !looked_at {
            return Ok(Report::default());
        }
        if self.look_at_instance(&record, record.generation).await? {
            return Ok(Report { found: 1, did: 1, failed: 0 });
        }
        if record.phase != Phase::Ready {
            return Ok(Report::default());
        }
        let evidence = self.probe(&record, record.generation).await?;
        if evidence.finding() == Some(Finding::Ok) {
            return Ok(Report::default());
        }
        self.apply(sandbox, &Event::Probed { generation: record.generation, evidence }).await?;
        Ok(Report { found: 1, did: 1, failed: 0 })
    }
}
