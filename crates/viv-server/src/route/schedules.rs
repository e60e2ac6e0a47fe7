//! Schedules: make, list, look at, change, remove, run now (L17).

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::bound::{Argv, CommandEnv, ExecutionMs, ScheduleRef};
use viv_api::error::ErrorCode;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{OfGeneration, PageQuery};
use viv_api::schedule::{ChangeSchedule, CreateSchedule, MissedRuns, Schedule, ScheduleLast, ScheduleRun};
use viv_core::schedule as core;
use viv_core::{SandboxId, ScheduleId};
use viv_engine::{CommandChange, NewSchedule, ScheduleChange};
use viv_store::ScheduleQuery;

use super::page_limit;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Json, Params, Query, Target};
use crate::refusal::{Answer, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

/// How long a run may take when nothing was said (X1).
const LIMIT_MS_DEFAULT: u64 = 5 * 60 * 1000;

/// The clock when nothing was said.
const ZONE_DEFAULT: &str = "UTC";

const CURSOR: &str = "^sch_[a-z0-9]{1,48}$";

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("schedules", id, need, summary);
    let create_op = op("createSchedule", Need::Change, "Make a schedule of a sandbox")
        .of_sandbox()
        .query::<OfGeneration>()
        .json::<CreateSchedule>()
        .gives::<Schedule>(201, "It is durable, and comes due by itself.")
        .fails(&[ErrorCode::QuotaExceeded]);
    table.on(Method::Post, path::SANDBOX_SCHEDULES, create, create_op);
    let list_op = op("listSandboxSchedules", Need::Read, "List the schedules of a sandbox, oldest first")
        .of_sandbox()
        .query::<PageQuery>()
        .cursor(CURSOR)
        .gives_page::<Schedule>("A page of them.");
    table.on(Method::Get, path::SANDBOX_SCHEDULES, list_of, list_op);
    let list_op = op("listSchedules", Need::Read, "List all schedules, oldest first")
        .query::<PageQuery>()
        .cursor(CURSOR)
        .gives_page::<Schedule>("A page of them.");
    table.on(Method::Get, path::SCHEDULES, list, list_op);
    let one = |id, need, summary| op(id, need, summary).fails(&[ErrorCode::NotFound]);
    let get_op = one("getSchedule", Need::Read, "Look at a schedule").gives::<Schedule>(200, "The schedule.");
    table.on(Method::Get, path::SCHEDULE, get, get_op);
    let change_op = one("changeSchedule", Need::Change, "Change a schedule, switch it on or off")
        .json::<ChangeSchedule>()
        .gives::<Schedule>(200, "The schedule as it is now.");
    table.on(Method::Put, path::SCHEDULE, change, change_op);
    let remove_op = one("removeSchedule", Need::Change, "Take a schedule away").gives_nothing("It is gone.");
    table.on(Method::Delete, path::SCHEDULE, remove, remove_op);
    let run_op = one("runSchedule", Need::Change, "Run a schedule now, beside its times")
        .gives::<Schedule>(202, "Its run is on its way.")
        .fails(&[ErrorCode::Conflict, ErrorCode::Draining]);
    table.on(Method::Post, path::SCHEDULE_RUN, run, run_op);
}

fn missed(missed: MissedRuns) -> core::MissedRuns {
    match missed {
        MissedRuns::Skip => core::MissedRuns::Skip,
        MissedRuns::Once => core::MissedRuns::Once,
        MissedRuns::All => core::MissedRuns::All,
    }
}

/// A schedule as it is asked for, here and from inside.
pub(crate) fn wanted(body: &CreateSchedule) -> NewSchedule {
    let limit_ms = body.limit_ms.map_or(LIMIT_MS_DEFAULT, ExecutionMs::get);
    NewSchedule {
        cron: body.cron.to_string(),
        zone: body.zone.as_ref().map_or_else(|| ZONE_DEFAULT.to_owned(), ToString::to_string),
        command: body.to_spec(limit_ms),
        missed: missed(body.missed),
        enabled: body.enabled.unwrap_or(true),
    }
}

/// A schedule as it is shown.
pub(crate) fn shown(schedule: &core::Schedule) -> Schedule {
    Schedule {
        id: schedule.id.clone(),
        project: schedule.project.to_string(),
        sandbox: schedule.sandbox.clone(),
        cron: schedule.cron.clone(),
        zone: schedule.zone.clone(),
        argv: schedule.command.argv.clone(),
        env: schedule.command.env.keys().cloned().collect(),
        limit_ms: schedule.command.limit_ms,
        missed: match schedule.missed {
            core::MissedRuns::Skip => MissedRuns::Skip,
            core::MissedRuns::Once => MissedRuns::Once,
            core::MissedRuns::All => MissedRuns::All,
        },
        enabled: schedule.enabled,
        created_at_ms: schedule.made_at_ms,
        created_by: schedule.made_by.to_string(),
        next_at_ms: schedule.next_at_ms,
        running: schedule.run.as_ref().map(|run| ScheduleRun {
            at_ms: run.at_ms,
            began_at_ms: run.began_at_ms,
            execution: run.generation.map(|_| run.execution.clone()),
        }),
        last: schedule.last.as_ref().map(last),
        runs: schedule.runs,
        skipped: schedule.skipped,
    }
}

fn last(last: &core::LastRun) -> ScheduleLast {
    let (exit_code, why) = match &last.outcome {
        core::RunOutcome::Exited { code } => (Some(*code), None),
        core::RunOutcome::Signalled { signal } => (None, Some(format!("signal {signal}"))),
        core::RunOutcome::Lost { what } | core::RunOutcome::NotStarted { what } => (None, Some(what.clone())),
        core::RunOutcome::Skipped { why } => (None, Some(why.as_str().to_owned())),
        core::RunOutcome::OomKilled | core::RunOutcome::TimedOut | core::RunOutcome::Cancelled => (None, None),
    };
    ScheduleLast {
        at_ms: last.at_ms,
        ended_at_ms: last.ended_at_ms,
        execution: last.execution.clone(),
        outcome: last.outcome.as_str().to_owned(),
        exit_code,
        why,
    }
}

async fn create(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<CreateSchedule>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let new = wanted(&body);
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let made = regardless(async move { engine.create_schedule(aim.sandbox(), new, by).await }).await?;
    Ok(show::json(StatusCode::CREATED, &shown(&made)))
}

async fn page(state: &ServerState, caller: &Caller, sandbox: Option<SandboxId>, query: PageQuery) -> Answer {
    let wrong = || invalid("there is no page after that", "give what the page before gave as next");
    let after = query.cursor.map(|cursor| cursor.as_str().parse::<ScheduleId>().map_err(|_| wrong())).transpose()?;
    let asked = ScheduleQuery { project: caller.sees().cloned(), sandbox, after, limit: page_limit(query.limit) };
    let found = state.engine().schedules(&asked).await?;
    let items = found.items.iter().map(shown).collect();
    Ok(show::ok(&Page { items, next: found.next.map(|next| next.to_string()) }))
}

async fn list_of(State(state): State<ServerState>, target: Target, Query(query): Query<PageQuery>) -> Answer {
    let sandbox = target.record(&state, None).await?.id;
    page(&state, &target.caller, Some(sandbox), query).await
}

async fn list(State(state): State<ServerState>, caller: Caller, Query(query): Query<PageQuery>) -> Answer {
    page(&state, &caller, None, query).await
}

/// The schedule that is meant, if the caller may see it.
async fn found(state: &ServerState, caller: &Caller, params: &Params) -> Answer<core::Schedule> {
    let id: ScheduleRef = params.get("schedule")?;
    Ok(state.engine().schedule(caller.sees(), &id.id()).await?)
}

async fn get(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    Ok(show::ok(&shown(&found(&state, &caller, &params).await?)))
}

async fn change(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    Json(body): Json<ChangeSchedule>,
) -> Answer {
    let id = found(&state, &caller, &params).await?.id;
    let change = ScheduleChange {
        cron: body.cron.as_ref().map(ToString::to_string),
        zone: body.zone.as_ref().map(ToString::to_string),
        command: CommandChange {
            argv: body.argv.as_ref().map(Argv::to_vec),
            env: body.env.as_ref().map(CommandEnv::to_map),
            cwd: body.cwd.as_ref().map(ToString::to_string),
            user: body.user.as_ref().map(ToString::to_string),
            limit_ms: body.limit_ms.map(ExecutionMs::get),
        },
        missed: body.missed.map(missed),
        enabled: body.enabled,
    };
    let (engine, by) = (state.engine().clone(), caller.actor());
    let changed = regardless(async move { engine.change_schedule(&id, &change, by).await }).await?;
    Ok(show::ok(&shown(&changed)))
}

async fn remove(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id = found(&state, &caller, &params).await?.id;
    let (engine, by) = (state.engine().clone(), caller.actor());
    regardless(async move { engine.remove_schedule(&id, by).await }).await?;
    Ok(show::nothing())
}

async fn run(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id = found(&state, &caller, &params).await?.id;
    let (engine, by) = (state.engine().clone(), caller.actor());
    let asked = regardless(async move { engine.run_schedule(&id, by).await }).await?;
    Ok(show::json(StatusCode::ACCEPTED, &shown(&asked)))
}
