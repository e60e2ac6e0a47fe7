//! The ladder of idling: ready, frozen, then saved or ended (L5). A sandbox has one alarm for it, among its others; when
//! it rings, activity is asked for, and read once more in the transaction that decides (L6).

use std::sync::Arc;

use viv_core::SandboxId;
use viv_core::exec::ExecState;
use viv_core::lifecycle::{Accepted, Event, Phase, Sandbox, Stepped, step};
use viv_core::planted::{Planted, is_planted};
use viv_provider::InstanceRef;
use viv_store::StoreError;

use crate::engine::{Inner, RACES_MAX, too_fast};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::journal;
use crate::reconcile::{ReconcilerName, Report};

/// Activity is written down at most this often; so long after a window has passed nothing in it can be missing.
pub(crate) const ACTIVITY_GRAIN_MS: u64 = 1_000;

/// Something is being done in a sandbox, for as long as this is held.
pub(crate) struct InUse {
    inner: Arc<Inner>,
    sandbox: SandboxId,
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.inner.knowledge.end_use(&self.sandbox, self.inner.clock.now_ms());
    }
}

impl Inner {
    /// When the next rung is due, unless it is used until then.
    pub(crate) fn idle_at_ms(&self, record: &Sandbox) -> Option<u64> {
        Some(record.idle_at_ms(self.freezes)?.saturating_add(ACTIVITY_GRAIN_MS))
    }

    /// From now on it is in use. Written down at most once a second; whether it was.
    pub(crate) async fn begin_use(self: &Arc<Self>, sandbox: &SandboxId) -> Result<(InUse, bool), EngineError> {
        let now_ms = self.clock.now_ms();
        let news = self.knowledge.begin_use(sandbox, now_ms, ACTIVITY_GRAIN_MS);
        let using = InUse { inner: self.clone(), sandbox: sandbox.clone() };
        if news {
            // Before it is written: whoever is dropped in between leaves it called used, and its record is read before it
            // is called anything else.
            self.roster.used(sandbox, now_ms);
            self.store.touch(self.epoch, sandbox, now_ms).await?;
        }
        Ok((using, news))
    }

    /// Somebody looked at it, which is not use (L6): switched off, it is (O9).
    pub(crate) fn looked_at(&self, record: &Sandbox) {
        let now_ms = self.clock.now_ms();
        let counts = !self.is_gated(Gate::ActivityFilter, &record.id) || is_planted(Planted::ProbeIsActivity);
        if !record.is_over() && counts {
            self.knowledge.begin_use(&record.id, now_ms, ACTIVITY_GRAIN_MS);
            self.knowledge.end_use(&record.id, now_ms);
        }
    }

    /// By its record, nobody used it for its window. Whether anything came of looking closer: it goes down a rung, or
    /// it is in use, and that is written down.
    pub(crate) async fn look_at_idle(self: &Arc<Self>, record: &Sandbox) -> Result<bool, EngineError> {
        let began_ms = self.clock.now_ms();
        // What a schedule begins is no use that the store would know of, so from this look to the commit none may.
        let Some(_alone) = self.knowledge.looks_for_rest(&record.id) else { return Ok(false) };
        if !is_planted(Planted::IdleUnread) {
            let used_at_ms = if record.phase == Phase::Ready {
                self.used_at_ms(record).await
            } else {
                // Nothing runs in it, and it may have been used until it was frozen, later than is written down.
                Some(self.knowledge.used_at_ms(&record.id, began_ms).unwrap_or(0))
            };
            let Some(used_at_ms) = used_at_ms else {
                // Whether something runs in it is not known, so nothing follows (T7). Whoever does not answer is
                // looked at.
                self.signal_health(&record.id);
                return Ok(false);
            };
            if used_at_ms > record.active_at_ms {
                self.roster.used(&record.id, used_at_ms);
                self.store.touch(self.epoch, &record.id, used_at_ms).await?;
                let used = Sandbox { active_at_ms: used_at_ms, ..record.clone() };
                if self.idle_at_ms(&used).is_none_or(|at_ms| at_ms > self.clock.now_ms()) {
                    return Ok(true);
                }
            }
        }
        let moved = self.go_down(&record.id).await;
        if !matches!(moved, Ok(false)) {
            let report = match &moved {
                Ok(_) => Ok(Report { found: 1, did: 1, failed: 0 }),
                Err(_) => Ok(Report { found: 1, did: 0, failed: 1 }),
            };
            self.reconcilers.record(ReconcilerName::Idle, &report, (began_ms, self.clock.now_ms()), None);
        }
        moved
    }

    /// When it was last used, as far as the record does not know it: what runs in the foreground uses it now, what ended
    /// used it until then (L6). `None` when nobody can tell.
    pub(crate) async fn used_at_ms(self: &Arc<Self>, record: &Sandbox) -> Option<u64> {
        if let Some(used_at_ms) = self.knowledge.used_at_ms(&record.id, self.clock.now_ms()) {
            // It is in use at this moment: nobody has to be asked.
            if used_at_ms >= self.clock.now_ms() {
                return Some(used_at_ms);
            }
        }
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let asked = self.call(&record.id, self.config.budgets.probe, self.provider.executions(&instance)).await;
        let executions = asked.ok()?;
        for status in &executions {
            self.saw(status).await;
        }
        let now_ms = self.clock.now_ms();
        let filtered = self.is_gated(Gate::ActivityFilter, &record.id);
        let foreground = executions.iter().filter(|execution| !execution.detached || !filtered);
        let last_ms = foreground.filter_map(|execution| match execution.state {
            ExecState::Running => Some(now_ms),
            ExecState::Exited { .. }
            | ExecState::Signalled { .. }
            | ExecState::OomKilled
            | ExecState::Failed { .. }
            | ExecState::Cancelled
            | ExecState::TimedOut
            | ExecState::Suspended
            | ExecState::Lost { .. } => execution.ended_at_ms.map(|at_ms| at_ms.min(now_ms)),
        });
        let known_ms = self.knowledge.used_at_ms(&record.id, now_ms).unwrap_or(0);
        Some(last_ms.max().unwrap_or(0).max(known_ms))
    }

    /// The decision, on the record as it is now: who was used since it was read is not idle, and the store sees to it
    /// that nobody is between this look and the commit.
    async fn go_down(self: &Arc<Self>, sandbox: &SandboxId) -> Result<bool, EngineError> {
        let event = Event::Idle { freezes: self.freezes };
        for _ in 0..RACES_MAX {
            let before = self.load(sandbox).await?;
            let now = self.now();
            let is_idle = self.idle_at_ms(&before).is_some_and(|at_ms| at_ms <= now.ms);
            let used = self.knowledge.used_at_ms(sandbox, now.ms).is_some_and(|at_ms| at_ms > before.active_at_ms);
            if (!is_idle || used) && !is_planted(Planted::IdleUnread) {
                return Ok(false);
            }
            let Stepped::Accepted(accepted) = step(&before, &event, now.moment()) else { return Ok(false) };
            let Accepted { next, happened } = *accepted;
            let line = journal::line(&event, &before, &next, happened, now.ms);
            match self.commit(next, vec![line], None, Some(before.active_at_ms), Vec::new()).await {
                Ok(_) => return Ok(true),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(sandbox))
    }
}
