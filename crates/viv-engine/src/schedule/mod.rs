//! Schedules (L17): one sleep until the soonest is due, and a task for each run under way.
//!
//! ```text
//!   soonest due (store) ──sleep──► come_due ──commit──► run: enter ─► wait ─► start ─► end ─► go back ─► done
//!            ▲                      (run, or left out)   │ each step durable before the next
//!            └─────────────── bell ──────────────────────┘
//! ```
//!
//! Invariants:
//!
//! - Nothing is looked at per schedule per tick: the store tells the soonest time, and a bell that it has changed.
//! - What was decided about an occurrence is durable before anything is done about it, so a daemon that dies leaves a row
//!   that says where to go on.
//! - A run never wakes who was stopped by a user, and brings back nobody who is gone (L9).

mod command;
mod run;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use viv_core::ScheduleId;
use viv_core::lifecycle::Actor;
use viv_core::schedule::{RunOutcome, SCHEDULES_MAX, Schedule, SkipReason};
use viv_cron::{Expression, Zone, next_after};
use viv_store::{NewLine, StoreError};

use crate::engine::{Engine, Inner};
use crate::error::EngineError;

pub use command::{CommandChange, NewSchedule, ScheduleChange};

/// How many that are due are taken at a time.
const BATCH: usize = 64;

/// Most runs under way at once; the others wait for their turn.
const RUNS_MAX: usize = 64;

/// How long to wait before a store that failed is asked again.
const STORE_PAUSE: Duration = Duration::from_millis(500);

/// How often a change is tried again because somebody else changed the schedule first.
const RACES_MAX: usize = 16;

/// What is kept in memory of schedules: nothing that the store does not have.
#[derive(Debug)]
pub(crate) struct Schedules {
    /// Rings when the soonest may be sooner.
    bell: Notify,
    running: Mutex<BTreeMap<ScheduleId, AbortHandle>>,
    places: Semaphore,
}

impl Default for Schedules {
    fn default() -> Self {
        Self { bell: Notify::new(), running: Mutex::default(), places: Semaphore::new(RUNS_MAX) }
    }
}

impl Schedules {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ScheduleId, AbortHandle>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn end(&self) {
        for task in std::mem::take(&mut *self.lock()).into_values() {
            task.abort();
        }
    }
}

/// Who does what a schedule asks for.
pub(crate) fn actor(schedule: &ScheduleId) -> Actor {
    Actor::part(&format!("schedule:{schedule}"))
}

/// Takes up the runs that were under way, and waits for those that come due.
pub(crate) async fn spawn(engine: &Engine) -> Result<(), EngineError> {
    for schedule in engine.inner.store.running_schedules().await? {
        engine.start_run(&schedule);
    }
    tokio::spawn(keep(engine.clone()));
    Ok(())
}

async fn keep(engine: Engine) {
    let inner = &engine.inner;
    let mut ending = inner.ending();
    loop {
        let kept = engine.keep_once().await;
        let wait_ms = match &kept {
            Ok(next_ms) => *next_ms,
            Err(error) => {
                inner.heed(error);
                tracing::warn!(component = "schedule", %error, "looks again in a moment");
                Some(inner.clock.now_ms().saturating_add(STORE_PAUSE.as_millis() as u64))
            }
        };
        let due = async {
            match wait_ms {
                Some(at_ms) => tokio::time::sleep_until(inner.clock.at(at_ms)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = ending.wait_for(|ending| *ending) => return,
            // A permit that was left only makes this look once more. After a failure nobody is heard for a moment.
            () = inner.schedules.bell.notified(), if kept.is_ok() => {}
            () = due => {}
        }
    }
}

impl Engine {
    /// Takes up those that are due, and answers when the next one is.
    async fn keep_once(&self) -> Result<Option<u64>, EngineError> {
        let inner = &self.inner;
        loop {
            let now_ms = inner.clock.now_ms();
            let due = inner.store.due_schedules(now_ms, BATCH).await?;
            for schedule in &due {
                self.come_due(schedule).await?;
            }
            if due.len() < BATCH {
                return Ok(inner.store.next_schedule_ms().await?);
            }
        }
    }

    /// Its time has come.
    async fn come_due(&self, id: &ScheduleId) -> Result<(), EngineError> {
        let inner = &self.inner;
        let draining = inner.is_draining();
        let changed = inner.amend_schedule(id, |schedule, now_ms| {
            let was_idle = schedule.run.is_none();
            let next = whens(schedule);
            let mut lines = Vec::new();
            for left in schedule.come_due(now_ms, &*next) {
                let data = json!({ "at_ms": left.at_ms, "count": left.count, "why": left.why.as_str() });
                lines.push(line(schedule, "schedule.skipped", actor(&schedule.id), now_ms, data));
            }
            if let Some(run) = schedule.run.clone().filter(|_| was_idle) {
                let data = json!({ "at_ms": run.at_ms, "reason": run.reason, "execution": run.execution });
                lines.push(line(schedule, "schedule.due", actor(&schedule.id), now_ms, data));
                if draining {
                    schedule.finish(RunOutcome::Skipped { why: SkipReason::Draining }, now_ms);
                    schedule.waiting.clear();
                    let data = json!({ "at_ms": run.at_ms, "why": SkipReason::Draining.as_str() });
                    lines.push(line(schedule, "schedule.skipped", actor(&schedule.id), now_ms, data));
                }
            }
            Some(lines)
        });
        let changed = changed.await?;
        inner.reached("schedule.due");
        if changed.is_some_and(|schedule| schedule.run.is_some()) {
            self.start_run(id);
        }
        Ok(())
    }

    /// Goes on with the run of a schedule, unless somebody does.
    pub(crate) fn start_run(&self, schedule: &ScheduleId) {
        let inner = &self.inner;
        if inner.is_ending() {
            return;
        }
        let mut running = inner.schedules.lock();
        if running.get(schedule).is_some_and(|task| !task.is_finished()) {
            return;
        }
        let task = tokio::spawn(run::run(self.clone(), schedule.clone())).abort_handle();
        running.insert(schedule.clone(), task);
    }
}

impl Inner {
    /// The one way by which a schedule changes: load, change, compare-and-set with its lines. The closure is asked again
    /// after a race; `None` is no change, and so is a schedule that is as it was. Answers with what is there then.
    pub(crate) async fn amend_schedule(
        &self,
        id: &ScheduleId,
        mut change: impl FnMut(&mut Schedule, u64) -> Option<Vec<NewLine>>,
    ) -> Result<Option<Schedule>, EngineError> {
        for _ in 0..RACES_MAX {
            let Some(before) = self.store.schedule(id).await? else { return Ok(None) };
            let mut next = before.clone();
            let lines = change(&mut next, self.clock.now_ms());
            let Some(lines) = lines.filter(|_| next != before) else { return Ok(Some(before)) };
            next.version += 1;
            let put = self.store.put_schedule(self.epoch, next.clone(), lines, SCHEDULES_MAX).await;
            match put.map_err(EngineError::from) {
                Ok(()) => {
                    self.schedules.bell.notify_one();
                    return Ok(Some(next));
                }
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => {
                    self.heed(&other);
                    return Err(other);
                }
            }
        }
        Err(EngineError::Store(StoreError::Unavailable { what: format!("{id} changes faster than it can be read") }))
    }
}

/// When a schedule is due after a moment. One that cannot be read any more never is: it was checked when it was made.
pub(crate) fn whens(schedule: &Schedule) -> Box<dyn Fn(u64) -> Option<u64> + Send> {
    match (Expression::parse(&schedule.cron), Zone::named(&schedule.zone)) {
        (Ok(expression), Ok(zone)) => Box::new(move |after_ms| next_after(&expression, &zone, after_ms)),
        (expression, zone) => {
            let (id, cron) = (&schedule.id, expression.err());
            tracing::error!(component = "schedule", schedule = %id, ?cron, zone = ?zone.err(), "cannot be read");
            Box::new(|_| None)
        }
    }
}

/// A line about a schedule. What it runs is nobody's business (S6).
pub(crate) fn line(schedule: &Schedule, kind: &str, by: Actor, now_ms: u64, mut data: serde_json::Value) -> NewLine {
    data["schedule"] = json!(schedule.id);
    NewLine {
        at_ms: now_ms,
        project: Some(schedule.project.clone()),
        sandbox: Some(schedule.sandbox.clone()),
        generation: schedule.run.as_ref().and_then(|run| run.generation),
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data,
    }
}
