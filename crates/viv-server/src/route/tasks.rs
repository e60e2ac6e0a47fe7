//! Tasks: run, list, look at, stop, go on, read (K1 to K7).

use std::collections::VecDeque;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::bound::{Named, StepNumber, TaskRef};
use viv_api::error::ErrorCode;
use viv_api::execution::{Execution, ExecutionState, OutputAlive, OutputLine};
use viv_api::header::NDJSON;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{ListTasks, OutputQuery};
use viv_api::sandbox::CreateSandbox;
use viv_api::task::{
    ContinueTask, CreateTask, MarkTask, StopTask, Task, TaskCame, TaskEffect, TaskEnding, TaskGrant, TaskMark,
    TaskStepShown, TaskStopAsked, TaskTimeline, TaskTimes,
};
use viv_core::TaskId;
use viv_core::exec::{ExecState, ExecStatus, OutputEvent, Stream};
use viv_core::task as core;
use viv_engine::{EngineError, Handle, Which};
use viv_provider::OutputStream;
use viv_store::{TaskOutput, TaskQuery};

use super::output::begin;
use super::page_limit;
use super::sandboxes::wait;
use super::select::told;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Json, MaybeJson, Params, Query, Repeatable, body_hash, found};
use crate::refusal::{Answer, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::{Pieces, UntilEnd, line, pieces, regardless};

/// How long a stop waits to be acknowledged when nothing was said: twice what it may take (K2).
const STOP_WAIT: Duration = Duration::from_secs(10);

/// Where a source goes when nothing was said.
const SOURCE_PATH: &str = "/workspace/source";

/// Of what was kept of an output, told at once.
const PIECE_BYTES: usize = 32 << 10;

const CURSOR: &str = "^[0-9]{1,15}\\.tsk_[a-z0-9]{1,48}$";

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("tasks", id, need, summary);
    let run_op = op("runTask", Need::Change, "Run a task")
        .json::<CreateTask>()
        .repeatable()
        .gives::<Task>(201, "It is durable, and is carried out by itself.")
        .gives::<Task>(200, "This request was made before; this is what it made, as it is now.")
        .fails(&[ErrorCode::NotFound, ErrorCode::Gone, ErrorCode::Conflict, ErrorCode::Draining]);
    table.on(Method::Post, path::TASKS, run, run_op);
    let list_op = op("listTasks", Need::Read, "List tasks, newest first")
        .query::<ListTasks>()
        .cursor(CURSOR)
        .gives_page::<Task>("A page of them.")
        .fails(&[ErrorCode::NotFound]);
    table.on(Method::Get, path::TASKS, list, list_op);
    let one = |id, need, summary| op(id, need, summary).fails(&[ErrorCode::NotFound]);
    let get_op = one("getTask", Need::Read, "Look at a task").gives::<Task>(200, "The task.");
    table.on(Method::Get, path::TASK, get, get_op);
    let stop_op = one("stopTask", Need::Change, "Stop a task")
        .maybe_json::<StopTask>()
        .gives::<Task>(200, "It is over: everything of it was seen to be gone.")
        .gives::<Task>(202, "That it is to stop is durable; it is being carried out.");
    table.on(Method::Post, path::TASK_STOP, stop, stop_op);
    let continue_op = one("continueTask", Need::Change, "Go on with a task that is over")
        .maybe_json::<ContinueTask>()
        .gives::<Task>(202, "It is durable, and is carried out by itself.")
        .fails(&[ErrorCode::Conflict, ErrorCode::Draining]);
    table.on(Method::Post, path::TASK_CONTINUE, go_on, continue_op);
    let mark_op = one("markTask", Need::Change, "Say that a task should not have been ended, or take that back")
        .json::<MarkTask>()
        .gives::<Task>(200, "It is durable.")
        .fails(&[ErrorCode::Conflict]);
    table.on(Method::Post, path::TASK_MARK, mark, mark_op);
    let timeline_op = one("getTaskTimeline", Need::Read, "What happened to a task in its last run, in order")
        .gives::<TaskTimeline>(200, "What happened.");
    table.on(Method::Get, path::TASK_TIMELINE, timeline, timeline_op);
    let logs_op = one("getTaskLogs", Need::Read, "What a step of a task wrote, from an offset on")
        .query::<OutputQuery>()
        .gives_stream("One OutputLine as JSON in each line; the last one is the end.", NDJSON)
        .fails(&[ErrorCode::NotRunning, ErrorCode::Timeout, ErrorCode::Gone, ErrorCode::StaleHandle]);
    table.on(Method::Get, path::TASK_LOGS, logs, logs_op);
}

/// The id of what a repeatable request makes: the same for the same key in the same project.
fn id_for(project: &str, key: &str) -> TaskId {
    let hash = blake3::hash(format!("task\n{project}\n{key}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_bytes()[..16]);
    TaskId::from_bytes(bytes)
}

fn hex(hash: [u8; 32]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Of what a sandbox is made for a task.
fn make(body: &CreateSandbox, keep_alive: bool) -> Box<core::MakeSandbox> {
    let mut policy = body.to_policy();
    // What is to be gone on with is saved when it ends (K6).
    if keep_alive && body.policy.persistent.is_none() {
        policy.persistent = true;
    }
    Box::new(core::MakeSandbox {
        name: body.name.clone().map(Into::into),
        spec: body.to_spec(),
        policy,
        labels: body.labels.to_map(),
        snapshot: body.snapshot.as_ref().map(Into::into),
    })
}

async fn run(
    State(state): State<ServerState>,
    caller: Caller,
    Repeatable(key): Repeatable,
    Json(body): Json<CreateTask>,
) -> Answer {
    if body.argv.is_some() && !body.steps.get().is_empty() {
        return Err(invalid("a task has one command, or steps", "leave one of argv and steps out"));
    }
    if body.sandbox.is_some() && body.create.is_some() {
        return Err(invalid("a task runs in a sandbox that is there, or in one that is made", "leave one of them out"));
    }
    let mut project = caller.project();
    let sandbox = match &body.sandbox {
        None => None,
        Some(named) => {
            let (of, which) = found(&state, &caller, named).await?;
            let record = state.engine().get(&of, &which, "task").await?.sandbox;
            if record.deleted || record.is_over() {
                return Err(crate::refusal::gone(&record.id, &record.cause));
            }
            project = of;
            Some(record.id)
        }
    };
    let (keyed, hash) = (key.is_some(), key.as_ref().map(|_| hex(body_hash(&body))));
    let id = key.map_or_else(|| state.engine().new_task_id(), |key| id_for(project.as_str(), key.as_str()));
    let built_of =
        sandbox.is_none().then(|| make(body.create.as_deref().unwrap_or(&CreateSandbox::default()), body.keep_alive));
    let effects = body.effects.get().iter();
    let effects: Vec<_> = effects
        .map(|effect| core::EffectRule { name: effect.name.to_string(), repeatable: effect.repeatable })
        .collect();
    let files = body.files.get().iter().map(|file| core::TaskFile {
        path: file.path.to_string(),
        content: file.text.to_string(),
        mode: file.mode.as_ref().map(viv_api::bound::FileMode::bits),
    });
    let new = core::NewTask {
        id,
        project,
        sandbox,
        make: built_of,
        files: files.collect(),
        source: body.source.as_ref().map(|source| core::GitSource {
            url: source.git.to_string(),
            reference: source.reference.as_ref().map(ToString::to_string),
            path: source.path.as_ref().map_or_else(|| SOURCE_PATH.to_owned(), ToString::to_string),
        }),
        steps: body.to_steps(),
        limits: body.limits.to_core().over(core::TaskLimits::default()),
        effects,
        credentials: body.credentials.to_map(),
        keep_alive: body.keep_alive,
        by: caller.actor(),
        body_hash: hash,
    };
    let engine = state.engine().clone();
    let made = regardless(async move { engine.create_task(viv_engine::CreateTask { new, keyed }).await }).await?;
    let status = if made.fresh { StatusCode::CREATED } else { StatusCode::OK };
    let how_long = wait(&state, body.wait_ms, Duration::ZERO);
    let task = if how_long.is_zero() { made.task } else { over(&state, &made.task.id, how_long).await? };
    Ok(show::json(status, &shown(&task)))
}

/// Waits until it is over.
async fn over(state: &ServerState, id: &TaskId, how_long: Duration) -> Answer<core::Task> {
    Ok(state.engine().wait_task(id, how_long, |task| task.state.is_final()).await?)
}

async fn list(State(state): State<ServerState>, caller: Caller, Query(query): Query<ListTasks>) -> Answer {
    let after = match &query.cursor {
        None => None,
        Some(cursor) => {
            let parts = cursor.as_str().split_once('.');
            let parsed = parts.and_then(|(at_ms, id)| Some((at_ms.parse().ok()?, id.parse().ok()?)));
            let wrong = || invalid("there is no page after that", "give what the page before gave as next");
            Some(parsed.ok_or_else(wrong)?)
        }
    };
    let sandbox = match &query.sandbox {
        None => None,
        Some(named) => Some(match named.named() {
            // Tasks outlive their sandboxes, and may be there before them.
            Named::Id(id) => id,
            Named::Name(_) => {
                let (project, which) = found(&state, &caller, named).await?;
                state.engine().get(&project, &which, "task").await?.sandbox.id
            }
        }),
    };
    let asked = TaskQuery {
        project: caller.sees().cloned(),
        sandbox,
        states: query.state.into_iter().map(Into::into).collect(),
        after,
        limit: page_limit(query.limit),
    };
    let page = state.engine().tasks(&asked).await?;
    let next = page.next.map(|(at_ms, id)| format!("{at_ms}.{id}"));
    Ok(show::ok(&Page { items: page.items.iter().map(shown).collect(), next }))
}

/// The task that is meant, if the caller may see it.
async fn meant(state: &ServerState, caller: &Caller, params: &Params) -> Answer<core::Task> {
    let id: TaskRef = params.get("task")?;
    Ok(state.engine().task(caller.sees(), &id.id()).await?)
}

async fn get(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    Ok(show::ok(&shown(&meant(&state, &caller, &params).await?)))
}

async fn timeline(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    Ok(show::ok(&shown(&meant(&state, &caller, &params).await?).timeline()))
}

async fn stop(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    MaybeJson(body): MaybeJson<StopTask>,
) -> Answer {
    let id = meant(&state, &caller, &params).await?.id;
    let (engine, by, of) = (state.engine().clone(), caller.actor(), id.clone());
    let task = regardless(async move { engine.stop_task(&of, by).await }).await?;
    let how_long = wait(&state, body.wait_ms, STOP_WAIT);
    let task = if how_long.is_zero() { task } else { over(&state, &id, how_long).await? };
    let status = if task.state.is_final() { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(show::json(status, &shown(&task)))
}

async fn go_on(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    MaybeJson(body): MaybeJson<ContinueTask>,
) -> Answer {
    if body.argv.is_some() && !body.steps.get().is_empty() {
        return Err(invalid("a task has one command, or steps", "leave one of argv and steps out"));
    }
    let id = meant(&state, &caller, &params).await?.id;
    let request = viv_engine::ContinueTask {
        steps: body.to_steps(),
        changes: body.to_changes(),
        limits: body.limits.as_ref().map(viv_api::task::TaskLimits::to_core).unwrap_or_default(),
        keep_alive: body.keep_alive,
        by: caller.actor(),
    };
    let (engine, of) = (state.engine().clone(), id.clone());
    let task = regardless(async move { engine.continue_task(&of, request).await }).await?;
    let how_long = wait(&state, body.wait_ms, Duration::ZERO);
    let task = if how_long.is_zero() { task } else { over(&state, &id, how_long).await? };
    Ok(show::json(StatusCode::ACCEPTED, &shown(&task)))
}

async fn mark(State(state): State<ServerState>, caller: Caller, params: Params, Json(body): Json<MarkTask>) -> Answer {
    let id = meant(&state, &caller, &params).await?.id;
    let (engine, by, why) = (state.engine().clone(), caller.actor(), body.why.map(|why| why.to_string()));
    let task = regardless(async move { engine.mark_task(&id, by, body.mistaken, why).await }).await?;
    Ok(show::ok(&shown(&task)))
}

async fn logs(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    Query(query): Query<OutputQuery>,
    until_end: UntilEnd,
) -> Answer {
    let step: StepNumber = params.get("step")?;
    let task = meant(&state, &caller, &params).await?;
    let execution = task.executions.iter().find(|one| one.step.map(u64::from) == Some(step.get()));
    let Some(execution) = execution.cloned() else {
        let error = viv_api::error::ApiError::new(
            ErrorCode::NotRunning,
            format!("step {} of {} has not begun", step.get(), task.id),
        );
        return Err(error.hint("viv task show says how it stands").into());
    };
    let which = Which::Id(task.sandbox.clone());
    let live = match state.engine().look_into(&task.project, &which, Some(execution.generation)).await {
        Ok(handle) => begin(&handle, &execution.id, &query).await.map(|source| (handle, source)),
        Err(error) => Err(error),
    };
    let clock = state.clone();
    let alive = move || line(&OutputLine::Alive(OutputAlive { alive_at_ms: clock.engine().now_ms() })).into();
    let every = state.bounds().heartbeat;
    match live {
        Ok((handle, source)) => Ok(pieces(NDJSON, (every, alive), until_end, |out| copied(state, handle, source, out))),
        // It ends with its sandbox, and what was kept of it is told then.
        Err(error) if !task.state.is_final() && execution.ended.is_none() && !is_gone(&error) => Err(error.into()),
        Err(_) => Ok(pieces(NDJSON, (every, alive), until_end, |out| kept(state, task, execution, query, out))),
    }
}

fn is_gone(error: &EngineError) -> bool {
    matches!(error, EngineError::Gone { .. } | EngineError::NotFound { .. } | EngineError::StaleHandle { .. })
}

/// Hands on what comes. A source that fails ends the stream without its last line: the reader attaches again.
async fn copied(state: ServerState, handle: Handle, mut source: Box<dyn OutputStream>, out: Pieces) {
    while let Ok(Some(event)) = source.next().await {
        let is_last = matches!(event, OutputEvent::End(_));
        let end = |status: ExecStatus| -> Execution {
            show::execution(&state, handle.sandbox(), handle.generation(), &status, false, None)
        };
        if out.give(line(&OutputLine::from_event(event, end))).await.is_err() || is_last {
            return;
        }
    }
}

/// What was kept of an output, from an offset on.
fn stored(kept: Option<&TaskOutput>, offset: u64, at_ms: u64) -> VecDeque<OutputEvent> {
    let Some(kept) = kept else { return VecDeque::new() };
    let cut = (offset < kept.offset).then_some(OutputEvent::Cut { from: offset, to: kept.offset });
    let from = offset.max(kept.offset);
    let data = kept.data.get((from - kept.offset) as usize..).unwrap_or_default();
    let chunk = |(at, piece): (u64, &[u8])| OutputEvent::Chunk {
        offset: from + at * PIECE_BYTES as u64,
        stream: Stream::Stdout,
        at_ms,
        data: piece.to_vec(),
    };
    cut.into_iter().chain((0..).zip(data.chunks(PIECE_BYTES)).map(chunk)).collect()
}

/// What was kept of an output whose sandbox is gone. When a part of it was written is not known any more: all of it is
/// told as written at its end.
async fn kept(state: ServerState, task: core::Task, execution: core::TaskExecution, query: OutputQuery, out: Pieces) {
    let Ok(kept) = state.engine().task_output(&task.id, &execution.id).await else { return };
    let at_ms = task.times.killed_at_ms.or(execution.started_at_ms).unwrap_or(0);
    let end = kept.as_ref().map_or(0, |kept| kept.offset + kept.data.len() as u64);
    for event in told(|offset| stored(kept.as_ref(), offset, at_ms), &query).await {
        if out.give(line(&OutputLine::from_event(event, |_| unreachable!("nothing kept is an end")))).await.is_err() {
            return;
        }
    }
    let cause = || "its sandbox ended".to_owned();
    let status = ExecStatus {
        id: execution.id.clone(),
        state: execution
            .ended
            .clone()
            .unwrap_or_else(|| ended_with(&task).unwrap_or(ExecState::Lost { cause: cause() })),
        started_at_ms: execution.started_at_ms.unwrap_or(task.times.requested_at_ms),
        ended_at_ms: task.times.killed_at_ms,
        output_bytes: end,
        stdin_bytes: 0,
        pid: None,
        argv: Vec::new(),
        detached: false,
    };
    let last = show::execution(&state, &task.sandbox, execution.generation, &status, false, None);
    let _ = out.give(line(&OutputLine::from_event(OutputEvent::End(status), |_| last))).await;
}

/// What was killed with its task was cancelled.
fn ended_with(task: &core::Task) -> Option<ExecState> {
    task.times.killed_at_ms.map(|_| ExecState::Cancelled)
}

/// A task as it is shown.
pub(crate) fn shown(task: &core::Task) -> Task {
    let steps = task.steps.iter().zip(0_u32..).map(|(step, index)| {
        let execution = task.executions.iter().find(|one| one.step == Some(index));
        let ended = execution.and_then(|one| one.ended.as_ref());
        TaskStepShown {
            argv: step.told_argv(),
            execution: execution.map(|one| one.id.clone()),
            started_at_ms: execution.and_then(|one| one.started_at_ms),
            ended: ended.map(state_of),
            exit_code: match ended {
                Some(ExecState::Exited { code }) => Some(*code),
                _ => None,
            },
        }
    });
    let times = &task.times;
    Task {
        id: task.id.clone(),
        project: task.project.to_string(),
        sandbox: task.sandbox.clone(),
        generation: task.generation.map(|generation| generation.0),
        state: task.state.into(),
        ending: task.ending.as_ref().map(|ending| TaskEnding {
            outcome: ending.outcome.into(),
            cause: ending.cause.as_str().to_owned(),
            message: ending.message.clone(),
            at_ms: ending.at_ms,
        }),
        stop: task.stop.as_ref().map(|stop| TaskStopAsked {
            by: stop.by.to_string(),
            at_ms: stop.at_ms,
            effect_in_flight: stop.effect_in_flight.clone(),
        }),
        run: task.run,
        steps: steps.collect(),
        step: task.step,
        came: task.came.map(|came| match came {
            core::Came::Made => TaskCame::Made,
            core::Came::Reused => TaskCame::Reused,
            core::Came::Recreated => TaskCame::Recreated,
        }),
        keep_alive: task.keep_alive,
        session: task.session.clone(),
        reported: task.reported,
        note: task.note.clone(),
        inactivity_ms: task.limits.inactivity_ms,
        total_ms: task.limits.total_ms,
        reports_max: task.limits.reports_max,
        deadline_at_ms: task.deadline_ms,
        effects: task.effects.iter().filter_map(effect).collect(),
        grants: task.grants.iter().map(grant).collect(),
        credentials: task.credentials.keys().cloned().collect(),
        created_at_ms: task.made_at_ms,
        created_by: task.made_by.to_string(),
        mark: task.mark.as_ref().map(|mark| TaskMark {
            by: mark.by.to_string(),
            at_ms: mark.at_ms,
            why: mark.why.clone(),
        }),
        times: TaskTimes {
            requested_at_ms: times.requested_at_ms,
            taken_up_at_ms: times.taken_up_at_ms,
            prepared_at_ms: times.prepared_at_ms,
            started_at_ms: times.started_at_ms,
            output_at_ms: times.output_at_ms,
            cut_at_ms: times.cut_at_ms,
            killed_at_ms: times.killed_at_ms,
            confirmed_at_ms: times.confirmed_at_ms,
        },
    }
}

fn effect(rule: &core::EffectRule) -> Option<TaskEffect> {
    Some(TaskEffect { name: rule.name.parse().ok()?, repeatable: rule.repeatable })
}

fn grant(grant: &core::Grant) -> TaskGrant {
    TaskGrant {
        effect: grant.effect.clone(),
        run: grant.run,
        at_ms: grant.at_ms,
        ended_at_ms: grant.ended_at_ms,
        outcome: grant.outcome.as_str().to_owned(),
        what: match &grant.outcome {
            core::EffectOutcome::Failed { what } => Some(what.clone()),
            core::EffectOutcome::InFlight | core::EffectOutcome::Done | core::EffectOutcome::Unknown => None,
        },
    }
}

fn state_of(state: &ExecState) -> ExecutionState {
    match state {
        ExecState::Running => ExecutionState::Running,
        ExecState::Suspended => ExecutionState::Suspended,
        ExecState::Exited { .. } => ExecutionState::Exited,
        ExecState::Signalled { .. } => ExecutionState::Signalled,
        ExecState::OomKilled => ExecutionState::OomKilled,
        ExecState::Failed { .. } => ExecutionState::Failed,
        ExecState::Cancelled => ExecutionState::Cancelled,
        ExecState::TimedOut => ExecutionState::TimedOut,
        ExecState::Lost { .. } => ExecutionState::Lost,
    }
}
