//! What can be asked about schedules.

use std::collections::BTreeMap;

use serde_json::json;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::Actor;
use viv_core::schedule::{MissedRuns, SCHEDULES_MAX, Schedule};
use viv_core::spec::Project;
use viv_core::{SandboxId, ScheduleId};
use viv_cron::{Expression, Zone};
use viv_store::{JournalFilter, JournalLine, ScheduleListing, ScheduleQuery, StoreError};

use super::{line, whens};
use crate::engine::{Engine, Inner};
use crate::error::EngineError;
use crate::inside::FromInside;

/// Lines of a sandbox's journal among which its last removal of a schedule is looked for: more than come between a
/// request and its repetition.
const REMOVED_AMONG: usize = 64;

/// What a schedule is made of.
#[derive(Debug, Clone)]
pub struct NewSchedule {
    /// When.
    pub cron: String,
    /// By which clock.
    pub zone: String,
    /// What.
    pub command: ExecSpec,
    /// What becomes of occurrences at which no daemon was there.
    pub missed: MissedRuns,
    /// Whether it comes due.
    pub enabled: bool,
}

/// What is to be otherwise; what is not said stays.
#[derive(Debug, Clone, Default)]
pub struct ScheduleChange {
    /// When.
    pub cron: Option<String>,
    /// By which clock.
    pub zone: Option<String>,
    /// What.
    pub command: CommandChange,
    /// What becomes of occurrences at which no daemon was there.
    pub missed: Option<MissedRuns>,
    /// Whether it comes due.
    pub enabled: Option<bool>,
}

/// What is to be otherwise about a command; what is not said stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandChange {
    /// Program and arguments.
    pub argv: Option<Vec<String>>,
    /// All that is added to the environment.
    pub env: Option<BTreeMap<String, String>>,
    /// Where it starts.
    pub cwd: Option<String>,
    /// As whom.
    pub user: Option<String>,
    /// How long it may take.
    pub limit_ms: Option<u64>,
}

impl CommandChange {
    fn made(&self, command: &ExecSpec) -> ExecSpec {
        let Self { argv, env, cwd, user, limit_ms } = self.clone();
        ExecSpec {
            argv: argv.unwrap_or_else(|| command.argv.clone()),
            env: env.unwrap_or_else(|| command.env.clone()),
            cwd: cwd.or_else(|| command.cwd.clone()),
            user: user.or_else(|| command.user.clone()),
            limit_ms: limit_ms.or(command.limit_ms),
            ..command.clone()
        }
    }
}

/// Refuses what is never due.
fn check(cron: &str, zone: &str, now_ms: u64) -> Result<(Expression, Zone), EngineError> {
    let refused = |what: String| EngineError::Invalid {
        what,
        hint: "minute hour day-of-month month day-of-week, as in '*/15 9-17 * * mon-fri', or @hourly, @daily"
            .to_owned(),
    };
    let expression = Expression::parse(cron).map_err(|error| refused(error.to_string()))?;
    let zone = Zone::named(zone)
        .map_err(|error| EngineError::Invalid { what: error.to_string(), hint: "leave it out for UTC".to_owned() })?;
    if viv_cron::next_after(&expression, &zone, now_ms).is_none() {
        return Err(refused(format!("{cron:?} never comes: no such day is in any month")));
    }
    Ok((expression, zone))
}

fn check_command(command: &ExecSpec) -> Result<(), EngineError> {
    if command.argv.first().is_none_or(String::is_empty) {
        let (what, hint) = ("a schedule runs a command, and there is none", "give a program and its arguments");
        return Err(EngineError::Invalid { what: what.to_owned(), hint: hint.to_owned() });
    }
    Ok(())
}

impl Inner {
    /// An id that sorts by when it was made.
    fn new_schedule_id(&self, now_ms: u64) -> ScheduleId {
        let mut bytes = (self.draw)();
        bytes[..6].copy_from_slice(&now_ms.to_be_bytes()[2..]);
        ScheduleId::from_bytes(bytes)
    }
}

impl Engine {
    /// Makes a schedule of a sandbox. Answers when it is durable.
    pub async fn create_schedule(
        &self,
        sandbox: &SandboxId,
        new: NewSchedule,
        by: Actor,
    ) -> Result<Schedule, EngineError> {
        let id = self.inner.new_schedule_id(self.inner.clock.now_ms());
        self.create_schedule_as(id, sandbox, new, by).await
    }

    /// The same for somebody inside, who asks again when nobody answered: one request makes one schedule.
    pub async fn create_schedule_inside(&self, asked: &FromInside, new: NewSchedule) -> Result<Schedule, EngineError> {
        let (id, sandbox) = (asked.schedule_id(), &asked.sandbox.id);
        if let Some(made) = self.schedule_of(sandbox, &id).await? {
            return Ok(made);
        }
        self.check_inside(asked)?;
        match self.create_schedule_as(id.clone(), sandbox, new, asked.actor()).await {
            // Who was told of it before may have been slow, and not dead.
            Err(error @ EngineError::Gone { .. }) => self.schedule_of(sandbox, &id).await?.ok_or(error),
            done => done,
        }
    }

    /// A schedule of this sandbox; another one's is none.
    async fn schedule_of(&self, sandbox: &SandboxId, id: &ScheduleId) -> Result<Option<Schedule>, EngineError> {
        let found = self.inner.store.schedule(id).await?;
        Ok(found.filter(|found| found.sandbox == *sandbox))
    }

    async fn create_schedule_as(
        &self,
        id: ScheduleId,
        sandbox: &SandboxId,
        new: NewSchedule,
        by: Actor,
    ) -> Result<Schedule, EngineError> {
        let inner = &self.inner;
        let now_ms = inner.clock.now_ms();
        let NewSchedule { cron, zone, command, missed, enabled } = new;
        let (expression, zone) = check(&cron, &zone, now_ms)?;
        check_command(&command)?;
        let record = inner.load(sandbox).await?;
        let mut schedule = Schedule {
            id,
            project: record.project.clone(),
            sandbox: record.id.clone(),
            version: 1,
            cron: expression.as_str().to_owned(),
            zone: zone.name().to_owned(),
            command,
            missed,
            enabled,
            made_by: by.clone(),
            made_at_ms: now_ms,
            next_at_ms: None,
            waiting: Vec::new(),
            run: None,
            last: None,
            runs: 0,
            skipped: 0,
        };
        let next = whens(&schedule);
        schedule.enable(enabled, now_ms, &*next);
        let data = json!({ "cron": schedule.cron, "zone": schedule.zone, "missed": missed });
        let lines = vec![line(&schedule, "schedule.created", by, now_ms, data)];
        match inner.store.put_schedule(inner.epoch, schedule.clone(), lines, SCHEDULES_MAX).await {
            Ok(()) => {}
            // The id is new, so it is its sandbox that is gone.
            Err(StoreError::Conflict { .. }) => {
                let record = inner.load(sandbox).await?;
                return Err(EngineError::Gone { sandbox: record.id.clone(), cause: Box::new(record.cause) });
            }
            Err(other) => return Err(other.into()),
        }
        inner.reached("schedule.created");
        inner.schedules.bell.notify_one();
        Ok(schedule)
    }

    /// A schedule, of this project if one is named.
    pub async fn schedule(&self, project: Option<&Project>, id: &ScheduleId) -> Result<Schedule, EngineError> {
        let found = self.inner.store.schedule(id).await?;
        // Nothing reaches from one project into another, not even the knowledge that it is there.
        let ours = found.filter(|found| project.is_none_or(|project| found.project == *project));
        ours.ok_or_else(|| EngineError::NoSchedule { which: id.clone() })
    }

    /// A page of schedules.
    pub async fn schedules(&self, query: &ScheduleQuery) -> Result<ScheduleListing, EngineError> {
        Ok(self.inner.store.schedules(query).await?)
    }

    /// Changes a schedule. A run that is under way goes on as it was.
    pub async fn change_schedule(
        &self,
        id: &ScheduleId,
        change: &ScheduleChange,
        by: Actor,
    ) -> Result<Schedule, EngineError> {
        let inner = &self.inner;
        let before = self.schedule(None, id).await?;
        let (cron, zone) = (change.cron.as_ref().unwrap_or(&before.cron), change.zone.as_ref().unwrap_or(&before.zone));
        let (expression, zone) = check(cron, zone, inner.clock.now_ms())?;
        check_command(&change.command.made(&before.command))?;
        let changed = inner.amend_schedule(id, |schedule, now_ms| {
            expression.as_str().clone_into(&mut schedule.cron);
            zone.name().clone_into(&mut schedule.zone);
            let command = change.command.made(&schedule.command);
            let is_other = command != schedule.command;
            schedule.command = command;
            schedule.missed = change.missed.unwrap_or(schedule.missed);
            let enabled = change.enabled.unwrap_or(schedule.enabled);
            let next = whens(schedule);
            // What is due already stays due, unless that was changed.
            if change.cron.is_some() || change.zone.is_some() || enabled != schedule.enabled {
                schedule.enable(enabled, now_ms, &*next);
            }
            // What it is may hold a secret, so only that it changed is told (S6).
            let (cron, zone) = (&schedule.cron, &schedule.zone);
            let data = json!({ "cron": cron, "zone": zone, "enabled": enabled, "command_changed": is_other });
            Some(vec![line(schedule, "schedule.changed", by.clone(), now_ms, data)])
        });
        changed.await?.ok_or_else(|| EngineError::NoSchedule { which: id.clone() })
    }

    /// Takes a schedule away. A run that is under way goes on to its end.
    pub async fn remove_schedule(&self, id: &ScheduleId, by: Actor) -> Result<Schedule, EngineError> {
        self.remove_schedule_with(id, by, json!({})).await
    }

    /// The same for somebody inside, who asks again when nobody answered. Those of other sandboxes are none.
    pub async fn remove_schedule_inside(&self, asked: &FromInside, id: &ScheduleId) -> Result<(), EngineError> {
        let missing = || EngineError::NoSchedule { which: id.clone() };
        let data = json!({ "request": asked.request });
        match self.schedule_of(&asked.sandbox.id, id).await? {
            Some(_) => {
                self.check_inside(asked)?;
                self.remove_schedule_with(id, asked.actor(), data).await.map(drop)
            }
            None if self.was_removed_by(asked, id).await? => Ok(()),
            None => Err(missing()),
        }
    }

    /// Whether it was this very request, told once before, that took a schedule away. The journal knows.
    async fn was_removed_by(&self, asked: &FromInside, id: &ScheduleId) -> Result<bool, EngineError> {
        let filter = JournalFilter { sandbox: Some(asked.sandbox.id.clone()), ..JournalFilter::default() };
        let lines = self.inner.store.journal_tail(None, &filter, REMOVED_AMONG).await?;
        let (id, request) = (json!(id), json!(asked.request));
        Ok(lines.iter().any(|JournalLine { line, .. }| {
            line.kind == "schedule.removed" && line.data["schedule"] == id && line.data["request"] == request
        }))
    }

    async fn remove_schedule_with(
        &self,
        id: &ScheduleId,
        by: Actor,
        data: serde_json::Value,
    ) -> Result<Schedule, EngineError> {
        let inner = &self.inner;
        let schedule = self.schedule(None, id).await?;
        let line = line(&schedule, "schedule.removed", by, inner.clock.now_ms(), data);
        if !inner.store.remove_schedule(inner.epoch, id, line).await? {
            return Err(EngineError::NoSchedule { which: id.clone() });
        }
        inner.schedules.bell.notify_one();
        // Nobody sees to what runs for it any more, and it has an end all the same (X1).
        if let Some(run) = schedule.run.as_ref().filter(|run| run.outcome.is_none()) {
            inner.follow_run(&schedule, run);
        }
        Ok(schedule)
    }

    /// Takes all schedules of a sandbox away, as a reset does (L12). Answers how many there were.
    pub async fn clear_schedules(&self, sandbox: &SandboxId, by: &Actor) -> Result<u64, EngineError> {
        let query =
            ScheduleQuery { sandbox: Some(sandbox.clone()), limit: SCHEDULES_MAX as usize, ..ScheduleQuery::default() };
        let mut cleared = 0;
        for schedule in self.schedules(&query).await?.items {
            match self.remove_schedule(&schedule.id, by.clone()).await {
                Ok(_) => cleared += 1,
                Err(EngineError::NoSchedule { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(cleared)
    }

    /// Runs it now, beside its times: see [`Schedule::run`] for how it goes.
    pub async fn run_schedule(&self, id: &ScheduleId, by: Actor) -> Result<Schedule, EngineError> {
        let inner = &self.inner;
        inner.check_open()?;
        let mut busy = false;
        let changed = inner.amend_schedule(id, |schedule, now_ms| {
            busy = !schedule.ask(now_ms);
            let execution = schedule.run.as_ref().map(|run| run.execution.clone());
            Some(vec![line(schedule, "schedule.asked", by.clone(), now_ms, json!({ "execution": execution }))])
        });
        let schedule = changed.await?.ok_or_else(|| EngineError::NoSchedule { which: id.clone() })?;
        if busy {
            return Err(EngineError::ScheduleBusy { which: id.clone() });
        }
        self.start_run(id);
        Ok(schedule)
    }
}
