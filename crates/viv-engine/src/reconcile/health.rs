//! Probes what was read and is stale. A probe is an observation: only its finding moves the phase (T3).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{AcquireError, Semaphore, SemaphorePermit};
use viv_core::SandboxId;
use viv_core::lifecycle::{Event, Finding, Phase};
use viv_provider::InstanceRef;

use super::{ReconcilerName, Report};
use crate::engine::Inner;
use crate::error::EngineError;

/// How many are probed at a time that nobody waits for, so that a long listing is no storm.
const AT_ONCE: usize = 8;

/// And that somebody waits for: those do not stand in line behind what was only read (J7). More than are asked for at a
/// time, and few enough that they are no storm either; who comes after so many that hang waits for one look and one probe.
const ASKED_AT_ONCE: usize = 64;

/// How long to wait before what is lost is looked for again, after a look that nobody answered.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// A check, for who waits for it. Its semaphores have no permits, and are closed when something is so. Unlike with
/// `tokio::sync::watch`, which wakes those who wait in a random order, they go on in the order in which they came: a
/// simulated world replays exactly.
#[derive(Debug)]
struct Check {
    done: Semaphore,
    /// Somebody waits for it, who does not stand in line.
    wanted: Semaphore,
}

impl Check {
    async fn is_done(&self) {
        let _ = self.done.acquire().await;
    }
}

/// Which checks are under way.
#[derive(Debug)]
pub(crate) struct Health {
    under_way: Mutex<HashMap<SandboxId, Arc<Check>>>,
    permits: Semaphore,
    asked_permits: Semaphore,
}

impl Default for Health {
    fn default() -> Self {
        let (permits, asked_permits) = (Semaphore::new(AT_ONCE), Semaphore::new(ASKED_AT_ONCE));
        Self { under_way: Mutex::default(), permits, asked_permits }
    }
}

impl Health {
    /// Waits for the turn of this check, which comes sooner once somebody waits for it.
    async fn turn(&self, check: &Check) -> Result<SemaphorePermit<'_>, AcquireError> {
        tokio::select! {
            biased;
            permit = self.permits.acquire() => permit,
            _ = check.wanted.acquire() => self.asked_permits.acquire().await,
        }
    }
}

/// A check that is under way until this is dropped, also by a panic: the next one begins anew.
struct UnderWay {
    inner: Arc<Inner>,
    sandbox: SandboxId,
    check: Arc<Check>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.inner.health.under_way.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.sandbox);
        self.check.done.close();
    }
}

/// Whether somebody waits for a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    Nobody,
    Caller,
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
        drop(self.begin_check(sandbox, For::Nobody));
    }

    /// Checks it now, and answers when that is done. What began before it was asked for may have seen what is not so
    /// any more: that one is waited for, and the next one counts, which all share who asked meanwhile (T3).
    pub(crate) async fn check_health(self: &Arc<Self>, sandbox: &SandboxId) {
        let (check, begun) = self.begin_check(sandbox, For::Caller);
        check.is_done().await;
        if begun == Begun::Before {
            // Whoever began this one did so after the other had ended, and so after it was asked for here.
            let (check, _) = self.begin_check(sandbox, For::Caller);
            check.is_done().await;
        }
    }

    /// Checks it when its turn has come, and answers when that is done.
    pub(crate) async fn check_in_turn(self: &Arc<Self>, sandbox: &SandboxId) {
        let (check, _) = self.begin_check(sandbox, For::Nobody);
        check.is_done().await;
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
            self.check_health(sandbox).await;
        };
        // Without an answer in time nothing is known, and nothing follows.
        let _ = tokio::time::timeout(self.config.budgets.call, looked_for).await;
        Ok(())
    }

    /// The check that is under way, or a new one. It runs by itself, so that a reader who goes away does not end it.
    fn begin_check(self: &Arc<Self>, sandbox: &SandboxId, waits: For) -> (Arc<Check>, Begun) {
        let mut under_way = self.health.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let before = under_way.get(sandbox).cloned();
        let begun = if before.is_some() { Begun::Before } else { Begun::Now };
        let check = before.unwrap_or_else(|| Arc::new(Check { done: Semaphore::new(0), wanted: Semaphore::new(0) }));
        if waits == For::Caller {
            check.wanted.close();
        }
        if begun == Begun::Before {
            return (check, begun);
        }
        under_way.insert(sandbox.clone(), check.clone());
        let under_way = UnderWay { inner: self.clone(), sandbox: sandbox.clone(), check: check.clone() };
        tokio::spawn(async move {
            let UnderWay { inner, sandbox, check } = &under_way;
            let began_ms = inner.clock.now_ms();
            let _permit = inner.health.turn(check).await;
            let report = inner.check_once(sandbox).await;
            let times = (began_ms, inner.clock.now_ms());
            inner.reconcilers.record(ReconcilerName::Health, &report, times, None);
        });
        (check, begun)
    }

    async fn check_once(self: &Arc<Self>, sandbox: &SandboxId) -> Result<Report, EngineError> {
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
