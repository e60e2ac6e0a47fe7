//! One owner per sandbox, there only while there is work: it performs one effect, records its outcome, and looks again.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tracing::Instrument;
use viv_core::SandboxId;
use viv_core::lifecycle::{Effect, Event, PhaseName, Sandbox, Work, outstanding};
use viv_core::planted::{Planted, is_planted};

use crate::engine::{Applied, Inner, STORE_PAUSE_MS};
use crate::error::EngineError;
use crate::hook::timeout_hook_at_ms;
use crate::trace;

/// How long a sandbox waits for room before it is looked at again.
const ROOM_PAUSE_MS: u64 = 5_000;

/// All drivers that are at work.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    working: Mutex<BTreeMap<SandboxId, Arc<Driver>>>,
}

#[derive(Debug, Default)]
struct Driver {
    /// Something may have changed since it last looked.
    woken: AtomicBool,
    bell: Notify,
    task: Mutex<Option<AbortHandle>>,
}

impl Drivers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Arc<Driver>>> {
        self.working.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are at work.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Ends all of them, where they are.
    pub(crate) fn end(&self) {
        // In their order, so that a simulated world replays exactly.
        for driver in std::mem::take(&mut *self.lock()).into_values() {
            if let Some(task) = driver.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
                task.abort();
            }
        }
    }
}

/// Takes a driver out when it ends, also by a panic: the next wake starts another.
struct AtWork {
    inner: Arc<Inner>,
    sandbox: SandboxId,
    driver: Arc<Driver>,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut working = self.inner.drivers.lock();
        if working.get(&self.sandbox).is_some_and(|other| Arc::ptr_eq(other, &self.driver)) {
            working.remove(&self.sandbox);
        }
    }
}

impl Inner {
    /// Something may have changed: its driver looks, and is started for that if there is none.
    pub(crate) fn wake(self: &Arc<Self>, sandbox: &SandboxId) {
        if self.is_ending() {
            return;
        }
        let mut working = self.drivers.lock();
        if let Some(driver) = working.get(sandbox) {
            driver.woken.store(true, Ordering::SeqCst);
            driver.bell.notify_one();
            return;
        }
        let driver = Arc::new(Driver::default());
        working.insert(sandbox.clone(), driver.clone());
        let at_work = AtWork { inner: self.clone(), sandbox: sandbox.clone(), driver: driver.clone() };
        let task = tokio::spawn(drive(at_work)).abort_handle();
        *driver.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    /// Looks at the record once and does what it says. Whether it has to be looked at again at once.
    async fn look(self: &Arc<Self>, sandbox: &SandboxId, driver: &Driver) -> Result<bool, EngineError> {
        let Some(record) = self.store.get(sandbox).await? else { return Ok(false) };
        assert!(!(is_planted(Planted::DriverPanics) && record.phase.name() == PhaseName::Hibernating), "planted");
        // A write that the store did not answer for may have been done all the same: nobody heard of that yet.
        let is_news = self.knowledge.version(sandbox).is_some_and(|known| known < record.version);
        self.attend(&record);
        if is_news {
            self.tell_waiting(sandbox);
        }
        let now_ms = self.clock.now_ms();
        if record.due_at_ms().is_some_and(|due_ms| due_ms <= now_ms) {
            match self.apply(sandbox, &Event::Due).await {
                Ok(Applied::Changed(_)) => return Ok(true),
                Ok(Applied::Same(_)) => {}
                // It was asked for while it was on its way to sleep, and now there is no room: who asked is not
                // forgotten, and it is tried again (L18).
                Err(EngineError::Quota { .. }) => {
                    self.timer.set(sandbox, Some(now_ms.saturating_add(ROOM_PAUSE_MS)));
                    return Ok(false);
                }
                Err(other) => return Err(other),
            }
        }
        if record.lives_until_ms().is_some_and(|at_ms| at_ms <= now_ms) && self.look_at_expiry(&record).await? {
            return Ok(true);
        }
        if self.idle_at_ms(&record).is_some_and(|at_ms| at_ms <= now_ms) && self.look_at_idle(&record).await? {
            return Ok(true);
        }
        // One that cannot be performed now holds up nothing.
        let warns = timeout_hook_at_ms(&record).is_some_and(|at_ms| at_ms <= now_ms);
        if warns && Box::pin(self.warn(&record, driver)).await? {
            return Ok(true);
        }
        let Some((effect, work)) = outstanding(&record) else {
            self.asked_no_more(sandbox);
            return Ok(false);
        };
        // No wait is longer than the longest: what is farther away was written by a clock that was set back since.
        let waits_ms = work.retry_at_ms.saturating_sub(now_ms);
        if (1..=self.config.timings.backoff_ms_max).contains(&waits_ms) {
            return Ok(false);
        }
        // It is large, and most looks end before it.
        Box::pin(self.work(&record, &effect, work, driver)).await
    }

    /// Performs the hook that is due ahead of the deadline, unless there is no cause for it any more: a stop does not wait
    /// for it. What it started is found again by its id, or ends with the instance.
    async fn warn(self: &Arc<Self>, record: &Sandbox, driver: &Driver) -> Result<bool, EngineError> {
        let mut performed = pin!(self.on_timeout(record));
        loop {
            tokio::select! {
                biased;
                performed = &mut performed => return performed,
                // Mostly an alarm, and what it is for may come after the hook.
                () = driver.bell.notified() => {
                    if timeout_hook_at_ms(&self.load(&record.id).await?) != timeout_hook_at_ms(record) {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Performs the effect that is outstanding, unless the record turns to something else meanwhile.
    async fn work(
        self: &Arc<Self>,
        record: &Sandbox,
        effect: &Effect,
        work: &Work,
        driver: &Driver,
    ) -> Result<bool, EngineError> {
        let span = self.effect_span(record, effect);
        let mut performed = pin!(self.perform(record, effect, work).instrument(span.clone()));
        let deadline = self.clock.at(work.deadline_at_ms);
        let outcome = loop {
            tokio::select! {
                biased;
                outcome = &mut performed => {
                    trace::effect_ended(&span, &outcome);
                    break outcome?;
                }
                () = driver.bell.notified() => {
                    // The effect is dropped when the record does not want it any more: what is outstanding then
                    // names the same generation, so the provider's fence puts the two into an order.
                    let now = self.load(&record.id).await?;
                    if outstanding(&now).is_none_or(|(_, now)| now.operation != work.operation) {
                        trace::left(&span, "superseded", true);
                        return Ok(true);
                    }
                }
                () = tokio::time::sleep_until(deadline) => {
                    trace::left(&span, "overdue", false);
                    return Ok(true);
                }
            }
        };
        if let Some(outcome) = outcome {
            let event = Event::Done { operation: work.operation.clone(), outcome };
            self.reached(&format!("{}.after", effect.code()));
            self.apply(&record.id, &event).await?;
            self.reached(&format!("{}.recorded", effect.code()));
        }
        Ok(true)
    }
}

async fn drive(at_work: AtWork) {
    let AtWork { inner, sandbox, driver } = &at_work;
    loop {
        driver.woken.store(false, Ordering::SeqCst);
        match inner.look(sandbox, driver).await {
            Ok(true) => continue,
            Ok(false) => {}
            // The record is as it was, so it is looked at again; who waits is told by the record's own deadlines.
            Err(error) => {
                inner.heed(&error);
                tracing::warn!(component = "driver", sandbox = %sandbox, %error, "looks again in a moment");
                inner.pause(Duration::from_millis(STORE_PAUSE_MS)).await;
                if inner.is_ending() {
                    return;
                }
                continue;
            }
        }
        // Under the lock that a wake takes: either it finds this driver, or it starts another.
        let mut working = inner.drivers.lock();
        if !driver.woken.load(Ordering::SeqCst) {
            working.remove(sandbox);
            return;
        }
    }
}
