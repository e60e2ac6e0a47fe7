//! Executions: start, list, look at, signal, resize, cancel.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use futures_util::StreamExt;
use viv_api::bound::{GenerationNumber, IdempotencyKey};
use viv_api::error::{ApiError, ErrorCode};
use viv_api::execution::{Execution, ExecutionState, SendSignal, StartExecution, Terminal};
use viv_api::header::NDJSON;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{ListAllExecutions, ListExecutions, OfGeneration, StartQuery};
use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::execution::Execution as Row;
use viv_core::lifecycle::{EntryKind, Memory, Phase, Sandbox};
use viv_core::{ExecutionId, Generation, SandboxId};
use viv_engine::{Aim, EngineError, Handle, QueueRequest, Which};
use viv_provider::ProviderError;
use viv_store::{EXECUTIONS_KEPT_MAX, ExecutionQuery};

use super::page_limit;
use super::sandboxes::READY_WAIT;
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Json, Params, Query, Repeatable, Target};
use crate::refusal::{Answer, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::{UntilEnd, regardless};

/// How long a command may run when nothing was said (X1).
const LIMIT_MS_DEFAULT: u64 = 5 * 60 * 1000;

/// How long a sandbox may take to say what runs in it, for a list of all.
const LOOK_WITHIN: Duration = Duration::from_secs(2);

/// What is said about an execution that may go wrong everywhere.
pub(super) const USUAL: [ErrorCode; 3] = [ErrorCode::NotRunning, ErrorCode::Timeout, ErrorCode::LifecycleLocked];

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("executions", id, need, summary).of_sandbox().fails(&USUAL);
    let start_op = op("startExecution", Need::Change, "Run a command")
        .query::<StartQuery>()
        .json::<StartExecution>()
        .repeatable()
        .gives::<Execution>(
            201,
            "It started, or could not, or waits: each is a state. Followed, an ExecutionStarted in the first line and one \
             OutputLine in each after it; the last one is the end.",
        )
        .or_streams(NDJSON)
        .fails(&[ErrorCode::Unsupported, ErrorCode::QuotaExceeded, ErrorCode::Draining]);
    table.on(Method::Post, path::EXECUTIONS, start, start_op);
    let list_op = op("listExecutions", Need::Read, "List executions, oldest first")
        .query::<ListExecutions>()
        .cursor("^[0-9]{1,15}\\.exe_[a-z0-9]{1,48}$")
        .gives_page::<Execution>("A page of them.");
    table.on(Method::Get, path::EXECUTIONS, list, list_op);
    let all_op =
        Op::new("executions", "listAllExecutions", Need::Read, "List executions of all sandboxes, newest first")
            .query::<ListAllExecutions>()
            .cursor("^[0-9]{1,15}\\.exe_[a-z0-9]{1,48}$")
            .gives_page::<Execution>("A page of them.");
    table.on(Method::Get, path::ALL_EXECUTIONS, list_all, all_op);
    let get_op = op("getExecution", Need::Read, "How an execution stands")
        .query::<OfGeneration>()
        .gives::<Execution>(200, "The execution.");
    table.on(Method::Get, path::EXECUTION, get, get_op);
    let signal_op = op("signalExecution", Need::Change, "Send a signal to its first process")
        .query::<OfGeneration>()
        .json::<SendSignal>()
        .gives_nothing("It was sent.");
    table.on(Method::Post, path::SIGNAL, signal, signal_op);
    let resize_op = op("resizeExecution", Need::Change, "Change the size of its terminal")
        .query::<OfGeneration>()
        .json::<Terminal>()
        .gives_nothing("It has that size.")
        .fails(&[ErrorCode::Unsupported]);
    table.on(Method::Post, path::RESIZE, resize, resize_op);
    let cancel_op = op("cancelExecution", Need::Change, "End its whole tree")
        .query::<OfGeneration>()
        .gives::<Execution>(200, "It ended; what had ended before keeps its outcome.");
    table.on(Method::Post, path::CANCEL, cancel, cancel_op);
}

/// Whether what a handle holds is frozen, for how its executions are told.
pub(super) async fn is_frozen(state: &ServerState, handle: &Handle) -> bool {
    let Ok(Some(record)) = state.engine().store().get(handle.sandbox()).await else { return false };
    // Services are started by the daemon: what they were told to run is known from the record.
    for service in &record.spec.services {
        if let Some(run) = record.services.get(&service.name) {
            let argv = service.argv.clone();
            let spec = ExecSpec { argv, cwd: service.cwd.clone(), user: service.user.clone(), ..ExecSpec::default() };
            state.executions().remember(&record.id, &run.execution, &spec, true);
        }
    }
    matches!(record.phase, Phase::Frozen { .. })
}

async fn shown(state: &ServerState, handle: &Handle, status: &ExecStatus, frozen: bool) -> Answer<Execution> {
    let row = state.engine().execution_row(handle.sandbox(), &status.id).await?;
    Ok(show::execution(state, handle.sandbox(), handle.generation(), status, frozen, row.as_ref()))
}

/// The id of what a repeatable request starts: the same for the same key, in the same instance.
fn id_for(sandbox: &SandboxId, generation: Generation, key: &str) -> ExecutionId {
    let hash = blake3::hash(format!("{sandbox}\n{generation}\n{key}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_bytes()[..16]);
    ExecutionId::from_bytes(bytes)
}

async fn start(
    State(state): State<ServerState>,
    target: Target,
    Repeatable(key): Repeatable,
    Query(query): Query<StartQuery>,
    until_end: UntilEnd,
    Json(body): Json<StartExecution>,
) -> Answer {
    // What goes wrong until here is an error as ever: a stream begins with what was started.
    let started = begin(&state, &target, key.as_ref(), query.generation, &body).await?;
    if query.follow {
        return Ok(super::output::from_start(state, target.of(started.sandbox.clone()), started, until_end));
    }
    Ok(show::json(StatusCode::CREATED, &started))
}

/// Starts it, or puts it into the queue. Whoever asked may go away meanwhile.
async fn begin(
    state: &ServerState,
    target: &Target,
    key: Option<&IdempotencyKey>,
    named: Option<GenerationNumber>,
    body: &StartExecution,
) -> Answer<Execution> {
    let generation = target.generation(state, named).await?;
    let spec = body.to_spec(LIMIT_MS_DEFAULT);
    if let Some(queue_ms) = body.queue_ms {
        let key = key.map(IdempotencyKey::as_str);
        return queue(state, target, key, named, body, spec, queue_ms.get()).await;
    }
    let handle = match state.engine().work_in(&target.project, &target.which, generation).await {
        // Only who says so wakes it (L4). It is another generation then, unless it was frozen.
        Err(EngineError::NotRunning { sandbox, .. }) if body.wake => {
            wake(state, target, Aim::at(sandbox.clone(), generation)).await?;
            state.engine().wait_ready(&sandbox, READY_WAIT.min(state.bounds().wait_max)).await?;
            state.engine().work_in(&target.project, &Which::Id(sandbox), None).await?
        }
        found => found?,
    }
    .used_by(target.caller.actor());
    let id = match key {
        Some(key) => id_for(handle.sandbox(), handle.generation(), key.as_str()),
        None => handle.new_execution(),
    };
    let (starting, asked, named, by) = (handle.clone(), spec.clone(), id.clone(), target.caller.actor());
    let is_repeatable = key.is_some();
    let started = regardless(async move {
        match starting.execute_by(&named, &asked, by).await {
            // The id is made from the key, so only another command can have it.
            Err(EngineError::Provider(ProviderError::Conflict { .. })) if is_repeatable => Err(mismatch()),
            answer => answer.map_err(crate::refusal::Refusal::from),
        }
    });
    let status = started.await?;
    state.executions().remember(handle.sandbox(), &id, &spec, body.detach);
    state.tally().executed(handle.sandbox());
    state.engine().metrics().count(&viv_engine::metrics::family::EXECUTIONS, &[]);
    let by = target.caller.actor().who;
    let shown = show::execution(state, handle.sandbox(), handle.generation(), &status, false, None);
    Ok(Execution { by: Some(by), ..shown })
}

fn mismatch() -> crate::refusal::Refusal {
    ApiError::new(ErrorCode::IdempotencyMismatch, "the key was used before with another command")
        .hint("use a new key for a new request, or repeat the first one as it was")
        .into()
}

/// Puts it into the queue. Its id is the same in whichever instance it will be started.
async fn queue(
    state: &ServerState,
    target: &Target,
    key: Option<&str>,
    named: Option<GenerationNumber>,
    body: &StartExecution,
    spec: ExecSpec,
    wait_ms: u64,
) -> Answer<Execution> {
    let generation = target.generation(state, named).await?;
    let sandbox = target.living(state, named).await?.sandbox().clone();
    let id = match key {
        Some(key) => id_for(&sandbox, Generation(0), key),
        None => state.engine().new_execution(),
    };
    let running_max = body.running_max.map(viv_api::bound::RunningMax::get);
    let by = target.caller.actor();
    let request = QueueRequest { id: id.clone(), generation, spec: spec.clone(), wait_ms, running_max, by };
    let (engine, project, which) = (state.engine().clone(), target.project.clone(), Which::Id(sandbox.clone()));
    let asked = request.clone();
    let queued = regardless(async move { Ok::<_, EngineError>(engine.queue_execution(&project, &which, asked).await) });
    let row = match queued.await? {
        // Only who says so wakes it (L4).
        Err(EngineError::NotRunning { sandbox, .. }) if body.wake => {
            wake(state, target, Aim::at(sandbox.clone(), generation)).await?;
            let (engine, project) = (state.engine().clone(), target.project.clone());
            let request = QueueRequest { generation: None, ..request };
            regardless(async move { engine.queue_execution(&project, &Which::Id(sandbox), request).await }).await?
        }
        Err(EngineError::IdempotencyMismatch { .. }) => return Err(mismatch()),
        row => row?,
    };
    state.executions().remember(&sandbox, &id, &spec, body.detach);
    state.tally().executed(&sandbox);
    Ok(show::recorded(state, &row))
}

async fn wake(state: &ServerState, target: &Target, aim: Aim) -> Answer<()> {
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    regardless(async move { engine.ensure(aim, EntryKind::Ensure, by).await }).await.map(drop)
}

/// What ran in an instance that is gone, by the row or by the record (X5).
fn past(state: &ServerState, record: &Sandbox, row: Option<&Row>, execution: &ExecutionId) -> Option<Execution> {
    if let Some(row) = row {
        return Some(show::recorded(state, row));
    }
    let lost = record.lost_executions.iter().find(|lost| lost.status.id == *execution)?;
    Some(show::execution(state, &record.id, lost.generation, &lost.status, false, None))
}

async fn list(State(state): State<ServerState>, target: Target, Query(query): Query<ListExecutions>) -> Answer {
    let record = target.record(&state, query.generation).await?;
    let after = match &query.cursor {
        None => None,
        Some(cursor) => {
            let parts = cursor.as_str().split_once('.');
            let parsed = parts.and_then(|(at_ms, id)| Some((at_ms.parse().ok()?, id.parse().ok()?)));
            let wrong = || invalid("there is no page after that", "give what the page before gave as next");
            Some(parsed.ok_or_else(wrong)?)
        }
    };
    let looked = state.engine().look_into(&target.project, &target.which, Some(record.generation)).await;
    let recorded = ExecutionQuery {
        sandbox: Some(record.id.clone()),
        // All that are kept of one, with room for those that are open.
        limit: 2 * EXECUTIONS_KEPT_MAX as usize,
        ..ExecutionQuery::default()
    };
    let rows = state.engine().execution_rows(&recorded).await?.items;
    let rows: BTreeMap<ExecutionId, Row> = rows.into_iter().map(|row| (row.id.clone(), row)).collect();
    let lost = record.lost_executions.iter();
    let mut all: BTreeMap<ExecutionId, Execution> = lost
        .map(|lost| {
            let shown = show::execution(&state, &record.id, lost.generation, &lost.status, false, None);
            (lost.status.id.clone(), shown)
        })
        .collect();
    all.extend(rows.iter().map(|(id, row)| (id.clone(), show::recorded(&state, row))));
    match looked {
        Ok(_) if is_dumped(&record) => {}
        Ok(handle) => {
            let frozen = matches!(record.phase, Phase::Frozen { .. });
            let told = handle.executions().await?;
            learn(&state, &record, &rows, &told);
            for status in told {
                let (id, row) = (status.id.clone(), rows.get(&status.id));
                let status = record.execution(status);
                let shown = show::execution(&state, &record.id, handle.generation(), &status, frozen, row);
                all.insert(id, shown);
            }
        }
        // What ran when it was saved is all that there is to tell (X5).
        Err(EngineError::NotRunning { .. }) if !all.is_empty() => {}
        Err(error) => return Err(error.into()),
    }
    let place = |one: &Execution| (one.started_at_ms.or(one.asked_at_ms).unwrap_or(0), one.id.clone());
    let mut all: Vec<Execution> = all.into_values().collect();
    all.retain(|one| query.state.is_none_or(|state| one.state == state));
    all.sort_by_key(place);
    let limit = page_limit(query.limit);
    let mut rest = all.into_iter().filter(|one| after.as_ref().is_none_or(|after| place(one) > *after));
    let items: Vec<Execution> = rest.by_ref().take(limit).collect();
    let more = rest.next().is_some();
    let next = items.last().filter(|_| more).map(|last| {
        let (at_ms, id) = place(last);
        format!("{at_ms}.{id}")
    });
    Ok(show::ok(&Page { items, next }))
}

/// Writes down what is news to the rows, if anything is.
fn learn(state: &ServerState, record: &Sandbox, rows: &BTreeMap<ExecutionId, Row>, told: &[ExecStatus]) {
    let is_news = |status: &&ExecStatus| rows.get(&status.id).is_some_and(Row::is_open) && status.state.is_final();
    let news: Vec<ExecStatus> = told.iter().filter(is_news).cloned().collect();
    state.engine().learnt(record, &news);
}

/// How many sandboxes are asked at once what runs in them.
const ASKED_AT_ONCE: usize = 16;

async fn list_all(State(state): State<ServerState>, caller: Caller, Query(query): Query<ListAllExecutions>) -> Answer {
    let asked = ExecutionQuery {
        project: caller.sees().cloned(),
        open: query.state.is_some_and(|state| !state.is_final()),
        queued: query.state == Some(ExecutionState::Queued),
        after: query.cursor.map(|cursor| cursor.to_string()),
        limit: page_limit(query.limit),
        ..ExecutionQuery::default()
    };
    let page = state.engine().execution_rows(&asked).await?;
    // Those that run by their rows are asked for; who does not answer in time is told by what was learnt last.
    let open = page.items.iter().filter(|row| row.is_open() && row.may_run());
    let sandboxes: BTreeSet<SandboxId> = open.map(|row| row.sandbox.clone()).collect();
    let looks = sandboxes.into_iter().map(|sandbox| {
        let state = state.clone();
        async move {
            let record = state.engine().store().get(&sandbox).await.ok().flatten()?;
            let which = Which::Id(sandbox.clone());
            let handle = state.engine().look_into(&record.project, &which, Some(record.generation)).await.ok()?;
            let told = tokio::time::timeout(LOOK_WITHIN, handle.executions()).await.ok()?.ok()?;
            Some((sandbox, (record, told)))
        }
    });
    let told: Vec<_> = futures_util::stream::iter(looks).buffer_unordered(ASKED_AT_ONCE).collect().await;
    let told: BTreeMap<SandboxId, (Sandbox, Vec<ExecStatus>)> = told.into_iter().flatten().collect();
    let items = page.items.iter().map(|row| {
        let found = told.get(&row.sandbox).filter(|_| row.is_open() && row.may_run());
        let status = found.and_then(|(record, all)| Some((record, all.iter().find(|status| status.id == row.id)?)));
        let Some((record, status)) = status else { return show::recorded(&state, row) };
        if status.state.is_final() {
            state.engine().learnt(record, std::slice::from_ref(status));
        }
        let frozen = matches!(record.phase, Phase::Frozen { .. });
        let status = record.execution(status.clone());
        show::execution(&state, &record.id, row.generation, &status, frozen, Some(row))
    });
    let items = items.filter(|one| query.state.is_none_or(|state| one.state == state)).collect();
    Ok(show::ok(&Page { items, next: page.next }))
}

/// Whether those inside stand still until they end or are let go, so that nobody there answers. What runs is suspended
/// then, and its row says so (X5).
fn is_dumped(record: &Sandbox) -> bool {
    matches!(record.phase, Phase::Hibernating { .. }) && record.memory == Some(Memory::Saving)
}

/// How often one is looked for again that was put to rest, or woken, while it was asked for.
const LOOKS_MAX: usize = 3;

async fn get(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let mut record = target.record(&state, query.generation).await?;
    for _ in 1..LOOKS_MAX {
        let answer = look(&state, &target, &record, &execution).await;
        if answer.is_ok() {
            return answer;
        }
        let now = target.record(&state, query.generation).await?;
        if now.version == record.version {
            return answer;
        }
        record = now;
    }
    look(&state, &target, &record, &execution).await
}

async fn look(state: &ServerState, target: &Target, record: &Sandbox, execution: &ExecutionId) -> Answer {
    let row = state.engine().execution_row(&record.id, execution).await?;
    // What waits, and what ran in an instance that is gone, is told by who remembers it (X5).
    // What was suspended goes on in the instance that its memory was restored into.
    let restored = matches!(record.memory, Some(Memory::Restored { .. }));
    let goes_on = |row: &Row| restored && row.status().is_some_and(|status| status.state == ExecState::Suspended);
    let runs = |row: &Row| !is_dumped(record) && row.may_run() && row.generation == record.generation;
    let here = row.as_ref().is_none_or(|row| goes_on(row) || runs(row));
    let lost = row.is_none() && record.lost_executions.iter().any(|lost| lost.status.id == *execution);
    if (!here || lost)
        && let Some(past) = past(state, record, row.as_ref(), execution)
    {
        return Ok(show::ok(&past));
    }
    let told = async {
        let handle = state.engine().look_into(&target.project, &target.which, Some(record.generation)).await?;
        handle.execution(execution).await
    };
    let status = match told.await {
        Ok(status) => record.execution(status),
        // Nobody runs it any more, or not yet again, or it was forgotten there.
        Err(
            EngineError::NotRunning { .. }
            | EngineError::Provider(ProviderError::NotFound { .. } | ProviderError::Absent),
        ) if row.is_some() => {
            return Ok(show::ok(&past(state, record, row.as_ref(), execution)));
        }
        Err(error) => return Err(error.into()),
    };
    let is_news = |row: &&Row| row.is_open() && (status.state.is_final() || row.generation != record.generation);
    if let Some(row) = row.as_ref().filter(is_news) {
        learn(state, record, &BTreeMap::from([(execution.clone(), row.clone())]), std::slice::from_ref(&status));
    }
    let frozen = matches!(record.phase, Phase::Frozen { .. });
    let shown = show::execution(state, &record.id, record.generation, &status, frozen, row.as_ref());
    Ok(show::ok(&shown))
}

async fn signal(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
    Json(body): Json<SendSignal>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    let handle = handle.used_by(target.caller.actor());
    regardless(async move { handle.signal(&execution, body.signal.get() as i32).await }).await?;
    Ok(show::nothing())
}

async fn resize(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
    Json(body): Json<Terminal>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    regardless(async move { handle.resize(&execution, body.into()).await }).await?;
    Ok(show::nothing())
}

async fn cancel(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let generation = target.generation(&state, query.generation).await?;
    let record = target.record(&state, query.generation).await?;
    let (engine, sandbox, id) = (state.engine().clone(), record.id.clone(), execution.clone());
    if let Some(row) = regardless(async move { engine.cancel_queued(&sandbox, &id).await }).await? {
        return Ok(show::ok(&show::recorded(&state, &row)));
    }
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    let handle = handle.used_by(target.caller.actor());
    let ending = handle.clone();
    let status = regardless(async move { ending.cancel(&execution).await }).await?;
    Ok(show::ok(&shown(&state, &handle, &status, false).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_is_the_same_execution_only_in_the_same_instance() {
        let (one, other): (SandboxId, SandboxId) = ("sbx_1".parse().unwrap(), "sbx_2".parse().unwrap());
        let id = id_for(&one, Generation(1), "k");
        assert_eq!(id, id_for(&one, Generation(1), "k"));
        for different in
            [id_for(&other, Generation(1), "k"), id_for(&one, Generation(2), "k"), id_for(&one, Generation(1), "l")]
        {
            assert_ne!(id, different);
        }
    }
}
