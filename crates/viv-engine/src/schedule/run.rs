//! One run: the sandbox is woken, the command is run, the sandbox goes back.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use viv_core::ScheduleId;
use viv_core::exec::OutputEvent;
use viv_core::execution::Place;
use viv_core::lifecycle::{EntryKind, Event, Phase, RestAt, Sandbox};
use viv_core::schedule::{Run, RunOutcome, SCHEDULES_MAX, Schedule, SkipReason};
use viv_provider::{InstanceState, ProviderError};
use viv_store::ScheduleQuery;

use super::{STORE_PAUSE, actor, line};
use crate::aim::Aim;
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::handle::{Handle, not_running};
use crate::read::Which;
use crate::standing::Standing;

/// How long a sandbox may take to come up for a run.
const READY_WITHIN: Duration = Duration::from_secs(5 * 60);

/// How long to wait before asking again who did not answer; it doubles up to the second one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// Goes on with the run of a schedule until it is accounted for.
pub(super) async fn run(engine: Engine, id: ScheduleId) {
    let inner = &engine.inner;
    // The semaphore is never closed.
    let Ok(_place) = inner.schedules.places.acquire().await else { return };
    while let Err(error) = engine.go_on(&id).await {
        inner.heed(&error);
        tracing::warn!(component = "schedule", schedule = %id, %error, "goes on in a moment");
        inner.pause(STORE_PAUSE).await;
        if inner.is_ending() {
            return;
        }
    }
    // Taken out before the bell, so that what waits for its turn finds nobody at work.
    inner.schedules.lock().remove(&id);
    inner.schedules.bell.notify_one();
}

impl Engine {
    async fn go_on(&self, id: &ScheduleId) -> Result<(), EngineError> {
        let inner = &self.inner;
        let Some(schedule) = inner.store.schedule(id).await? else { return Ok(()) };
        let Some(run) = schedule.run.clone() else { return Ok(()) };
        let (outcome, run) = match run.outcome.clone() {
            Some(outcome) => (outcome, run),
            None => match self.carry_out(&schedule, run).await? {
                Some(done) => done,
                None => return Ok(()),
            },
        };
        inner.reached("schedule.ended");
        // Known before the sandbox goes back: after that nobody could find out any more.
        self.note_run(id, &run, |kept| kept.outcome = Some(outcome.clone())).await?;
        inner.reached("schedule.outcome");
        self.go_back(&schedule, &run).await?;
        inner.reached("schedule.back");
        let finished = inner.amend_schedule(id, |kept, now_ms| {
            if kept.run.as_ref().is_none_or(|kept| kept.execution != run.execution) {
                return None;
            }
            let generation = kept.run.as_ref().and_then(|run| run.generation);
            let data = json!({ "at_ms": run.at_ms, "execution": run.execution, "result": outcome });
            let kind =
                if matches!(outcome, RunOutcome::Skipped { .. }) { "schedule.skipped" } else { "schedule.ended" };
            let mut line = line(kept, kind, actor(id), now_ms, data);
            line.generation = generation;
            kept.finish(outcome.clone(), now_ms);
            Some(vec![line])
        });
        finished.await?;
        inner.reached("schedule.recorded");
        Ok(())
    }

    /// Writes something down about the run that is under way, if it still is.
    async fn note_run(&self, id: &ScheduleId, run: &Run, note: impl Fn(&mut Run)) -> Result<(), EngineError> {
        let noted = self.inner.amend_schedule(id, |schedule, _| {
            let kept = schedule.run.as_mut().filter(|kept| kept.execution == run.execution)?;
            note(kept);
            Some(Vec::new())
        });
        noted.await.map(drop)
    }

    /// Wakes the sandbox, starts the command, and waits for its end. `None` when nobody wants to know it: the sandbox is
    /// gone, or the schedule was removed.
    async fn carry_out(&self, schedule: &Schedule, mut run: Run) -> Result<Option<(RunOutcome, Run)>, EngineError> {
        let inner = &self.inner;
        let id = &schedule.sandbox;
        if let Some(generation) = run.generation
            && let Standing::Over(what) = self.inner.standing(&schedule.sandbox, generation).await?
        {
            return Ok(Some((RunOutcome::Lost { what }, run)));
        }
        let record = match inner.load(id).await {
            Err(EngineError::NotFound { .. }) => return Ok(None),
            found => found?,
        };
        if run.entered_at_ms.is_none() {
            run.woken_from = self.wakes_from(schedule, &record).await?;
            run.entered_at_ms = Some(inner.clock.now_ms());
            let (woken_from, entered_at_ms) = (run.woken_from, run.entered_at_ms);
            self.note_run(&schedule.id, &run, |kept| {
                (kept.woken_from, kept.entered_at_ms) = (woken_from, entered_at_ms);
            })
            .await?;
        }
        inner.reached("schedule.entering");
        let not_started = |what: String, run: Run| Ok(Some((RunOutcome::NotStarted { what }, run)));
        // What was begun before a drain is seen to its end; nothing else begins (L21).
        match inner.begin_entry() {
            Ok(_entering) => {
                match inner.enter(&Aim::from(id), EntryKind::Schedule, actor(&schedule.id)).await {
                    Ok(entered) => {
                        // The entry itself counts as activity (L4): from then on it is somebody else's.
                        let at_ms = entered.sandbox().entry.map_or(0, |entry| entry.at_ms);
                        run.entered_at_ms = run.entered_at_ms.max(Some(at_ms));
                    }
                    Err(EngineError::Held { .. }) => {
                        return Ok(Some((RunOutcome::Skipped { why: SkipReason::Held }, run)));
                    }
                    Err(EngineError::Gone { .. } | EngineError::NotFound { .. }) => return Ok(None),
                    Err(error @ (EngineError::Quota { .. } | EngineError::Locked(_))) => {
                        return not_started(error.to_string(), run);
                    }
                    Err(other) => return Err(other),
                }
            }
            Err(EngineError::Draining) if run.generation.is_none() => {
                return Ok(Some((RunOutcome::Skipped { why: SkipReason::Draining }, run)));
            }
            Err(EngineError::Draining) => {}
            Err(other) => return Err(other),
        }
        inner.reached("schedule.entered");
        match self.wait_ready(id, READY_WITHIN).await {
            Ok(_) => {}
            Err(error @ (EngineError::ShuttingDown | EngineError::Store(_))) => return Err(error),
            Err(EngineError::Gone { .. }) => return Ok(None),
            Err(error) if run.generation.is_some() => return Ok(Some(self.given_up(schedule, run, &error))),
            Err(error) => return not_started(error.to_string(), run),
        }
        let handle = match self.work_in(&schedule.project, &Which::Id(id.clone()), run.generation).await {
            Ok(handle) => handle,
            Err(error @ (EngineError::ShuttingDown | EngineError::Store(_))) => return Err(error),
            Err(EngineError::Gone { .. }) => return Ok(None),
            Err(error) if run.generation.is_some() => return Ok(Some(self.given_up(schedule, run, &error))),
            Err(error) => return not_started(error.to_string(), run),
        };
        run.generation = Some(handle.generation());
        let (generation, entered_at_ms) = (run.generation, run.entered_at_ms);
        self.note_run(&schedule.id, &run, |kept| (kept.generation, kept.entered_at_ms) = (generation, entered_at_ms))
            .await?;
        inner.reached("schedule.starting");
        let outcome = self.execute_run(schedule, &run, &handle).await?;
        Ok(outcome.map(|outcome| (outcome, run)))
    }

    /// A daemon before this one may have started it in an instance that does not answer, and may do so again: its run is
    /// over, and its end is listened for all the same (X1).
    fn given_up(&self, schedule: &Schedule, run: Run, why: &EngineError) -> (RunOutcome, Run) {
        self.inner.follow_run(schedule, &run);
        (RunOutcome::Lost { what: why.to_string() }, run)
    }

    /// Where the sandbox is that has to be woken for this; where another run of it found it, if there is one.
    async fn wakes_from(&self, schedule: &Schedule, record: &Sandbox) -> Result<Option<RestAt>, EngineError> {
        Ok(match &record.phase {
            Phase::Frozen { .. } => Some(RestAt::Frozen),
            Phase::Hibernating { .. } | Phase::Hibernated { .. } => Some(RestAt::Hibernated),
            Phase::Provisioning { .. }
            | Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Resuming { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => self.other_runs(schedule).await?.into_iter().find_map(|other| other.woken_from),
        })
    }

    /// Runs of other schedules in the same sandbox that are under way.
    async fn other_runs(&self, schedule: &Schedule) -> Result<Vec<Run>, EngineError> {
        let query = ScheduleQuery {
            sandbox: Some(schedule.sandbox.clone()),
            limit: SCHEDULES_MAX as usize,
            ..ScheduleQuery::default()
        };
        let all = self.inner.store.schedules(&query).await?.items;
        let others = all.into_iter().filter(|other| other.id != schedule.id).filter_map(|other| other.run);
        Ok(others.filter(|run| run.outcome.is_none()).collect())
    }

    /// Starts the command, which was perhaps started before, and waits for its end. `None` when it is not wanted any more.
    async fn execute_run(
        &self,
        schedule: &Schedule,
        run: &Run,
        handle: &Handle,
    ) -> Result<Option<RunOutcome>, EngineError> {
        let inner = &self.inner;
        let mut pause = PAUSE.0;
        let mut started = false;
        loop {
            // What was removed starts nothing any more, however long it took until it could be.
            if !started && !self.is_wanted(schedule, run).await? {
                inner.follow_run(schedule, run);
                return Ok(None);
            }
            let asked = if started {
                self.follow(run, handle).await
            } else {
                // Nobody finds it idle between this look and the start: that is no use that would be written down (L6).
                let _awake = inner.knowledge.keep_from_rest(&schedule.sandbox).await;
                let record = inner.load(&schedule.sandbox).await?;
                if record.generation == handle.generation() && matches!(record.phase, Phase::Frozen { .. }) {
                    Err(not_running(&record))
                } else {
                    let asked = handle.execute_unattended(&run.execution, &schedule.command).await;
                    asked.map(|status| RunOutcome::of(&status.state))
                }
            };
            if asked.is_ok() && !started {
                inner.reached("schedule.started");
            }
            match asked {
                Ok(Some(outcome)) => return Ok(Some(outcome)),
                Ok(None) => {
                    (started, pause) = (true, PAUSE.0);
                    continue;
                }
                // The id is of this run alone: it was started, and the command was changed since.
                Err(EngineError::Provider(ProviderError::Conflict { .. })) if !started => {
                    started = true;
                    continue;
                }
                Err(EngineError::Provider(
                    error @ (ProviderError::Invalid { .. }
                    | ProviderError::Unsupported { .. }
                    | ProviderError::Exhausted { .. }
                    | ProviderError::Outdated { .. }
                    | ProviderError::NotFound { .. }),
                )) => return Ok(Some(RunOutcome::NotStarted { what: error.to_string() })),
                // It was put to rest before the command could be started: the run enters once more, and wakes it.
                Err(
                    error @ (EngineError::NotRunning { .. }
                    | EngineError::Provider(ProviderError::NotRunning { state: InstanceState::Frozen })),
                ) if !started => {
                    inner.pause(pause).await;
                    return Err(error);
                }
                Err(EngineError::Provider(error)) => {
                    tracing::debug!(component = "schedule", schedule = %schedule.id, %error, "asks again");
                }
                Err(other) => return Err(other),
            }
            // Nothing is concluded from silence (T7): only from what the record says.
            if let Standing::Over(what) = self.inner.standing(&schedule.sandbox, handle.generation()).await? {
                return Ok(Some(RunOutcome::Lost { what }));
            }
            inner.pause(pause).await;
            pause = (pause * 2).min(PAUSE.1);
            if inner.is_ending() {
                return Err(EngineError::ShuttingDown);
            }
        }
    }

    /// Whether its schedule is there and still has this run.
    async fn is_wanted(&self, schedule: &Schedule, run: &Run) -> Result<bool, EngineError> {
        let kept = self.inner.store.schedule(&schedule.id).await?;
        Ok(kept.and_then(|kept| kept.run).is_some_and(|kept| kept.execution == run.execution))
    }

    /// Waits for the end of a command that was started; `None` when the stream ended without it.
    async fn follow(&self, run: &Run, handle: &Handle) -> Result<Option<RunOutcome>, EngineError> {
        let mut output = handle.attach(&run.execution, u64::MAX, true).await?;
        loop {
            match output.next().await.map_err(EngineError::Provider)? {
                Some(OutputEvent::End(status)) => return Ok(RunOutcome::of(&status.state)),
                Some(OutputEvent::Chunk { .. } | OutputEvent::Cut { .. }) => {}
                None => {
                    let status = handle.execution(&run.execution).await?;
                    return Ok(RunOutcome::of(&status.state));
                }
            }
        }
    }

    /// Who was woken for this run goes back, unless somebody else used it or another run is under way in it. That is read
    /// where the decision is made, under the record's compare-and-set.
    async fn go_back(&self, schedule: &Schedule, run: &Run) -> Result<(), EngineError> {
        let inner = &self.inner;
        let (Some(to), Some(woken_at_ms)) = (run.woken_from, run.entered_at_ms) else { return Ok(()) };
        if !self.other_runs(schedule).await?.is_empty() {
            return Ok(());
        }
        let used_at_ms = inner.knowledge.used_at_ms(&schedule.sandbox, inner.clock.now_ms()).unwrap_or(0);
        let rest = Event::Rest { to, woken_at_ms, used_at_ms, by: actor(&schedule.id) };
        match inner.apply(&schedule.sandbox, &rest).await {
            Ok(_) | Err(EngineError::NotFound { .. } | EngineError::Gone { .. } | EngineError::Held { .. }) => Ok(()),
            Err(other) => Err(other),
        }
    }
}

impl Inner {
    /// Listens for the end of what was perhaps begun for a run that nobody sees to any more.
    pub(super) fn follow_run(self: &Arc<Self>, schedule: &Schedule, run: &Run) {
        if let Some(generation) = run.generation {
            let (project, sandbox) = (schedule.project.clone(), schedule.sandbox.clone());
            self.follow_end(Place { project, sandbox, generation }, run.execution.clone());
        }
    }
}
