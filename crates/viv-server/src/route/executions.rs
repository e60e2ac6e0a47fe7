//! Executions: start, list, look at, signal, resize, cancel.

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::error::{ApiError, ErrorCode};
use viv_api::execution::{Execution, SendSignal, StartExecution, Terminal};
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{ListExecutions, OfGeneration};
use viv_core::exec::{ExecSpec, ExecStatus};
use viv_core::lifecycle::{EntryKind, Phase};
use viv_core::{ExecutionId, Generation, SandboxId};
use viv_engine::{EngineError, Handle, Which};
use viv_provider::ProviderError;

use super::page_limit;
use super::sandboxes::READY_WAIT;
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::extract::{Json, Params, Query, Repeatable, Target};
use crate::refusal::{Answer, invalid};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

/// How long a command may run when nothing was said (X1).
const LIMIT_MS_DEFAULT: u64 = 5 * 60 * 1000;

/// What is said about an execution that may go wrong everywhere.
pub(super) const USUAL: [ErrorCode; 3] = [ErrorCode::NotRunning, ErrorCode::Timeout, ErrorCode::LifecycleLocked];

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("executions", id, need, summary).of_sandbox().fails(&USUAL);
    let start_op = op("startExecution", Need::Change, "Run a command")
        .query::<OfGeneration>()
        .json::<StartExecution>()
        .repeatable()
        .gives::<Execution>(201, "It started, or could not, which is a state.")
        .fails(&[ErrorCode::Unsupported, ErrorCode::QuotaExceeded, ErrorCode::Draining]);
    table.on(Method::Post, path::EXECUTIONS, start, start_op);
    let list_op = op("listExecutions", Need::Read, "List executions, oldest first")
        .query::<ListExecutions>()
        .cursor("^[0-9]{1,15}\\.exe_[a-z0-9]{1,48}$")
        .gives_page::<Execution>("A page of them.");
    table.on(Method::Get, path::EXECUTIONS, list, list_op);
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

fn shown(state: &ServerState, handle: &Handle, status: &ExecStatus, frozen: bool) -> Execution {
    show::execution(state, handle.sandbox(), handle.generation(), status, frozen)
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
    Query(query): Query<OfGeneration>,
    Json(body): Json<StartExecution>,
) -> Answer {
    let generation = target.generation(&state, query.generation).await?;
    let handle = match state.engine().work_in(&target.project, &target.which, generation).await {
        // Only who says so wakes it (L4). It is another generation then, unless it was frozen.
        Err(EngineError::NotRunning { sandbox, .. }) if body.wake => woken(&state, &target, sandbox).await?,
        found => found?,
    };
    let spec = body.to_spec(LIMIT_MS_DEFAULT);
    let id = match &key {
        Some(key) => id_for(handle.sandbox(), handle.generation(), key.as_str()),
        None => handle.new_execution(),
    };
    let (starting, asked, named) = (handle.clone(), spec.clone(), id.clone());
    let started = regardless(async move {
        match starting.execute(&named, &asked).await {
            // The id is made from the key, so only another command can have it.
            Err(EngineError::Provider(ProviderError::Conflict { .. })) if key.is_some() => {
                Err(ApiError::new(ErrorCode::IdempotencyMismatch, "the key was used before with another command")
                    .hint("use a new key for a new request, or repeat the first one as it was")
                    .into())
            }
            answer => answer.map_err(crate::refusal::Refusal::from),
        }
    });
    let status = started.await?;
    state.executions().remember(handle.sandbox(), &id, &spec, body.detach);
    state.tally().executed(handle.sandbox());
    state.engine().metrics().count(&viv_engine::metrics::family::EXECUTIONS, &[]);
    Ok(show::json(StatusCode::CREATED, &shown(&state, &handle, &status, false)))
}

async fn woken(state: &ServerState, target: &Target, sandbox: SandboxId) -> Answer<Handle> {
    let (engine, by, id) = (state.engine().clone(), target.caller.actor(), sandbox.clone());
    regardless(async move { engine.ensure(&id, EntryKind::Ensure, by).await }).await?;
    state.engine().wait_ready(&sandbox, READY_WAIT.min(state.bounds().wait_max)).await?;
    Ok(state.engine().work_in(&target.project, &Which::Id(sandbox), None).await?)
}

/// One of the list: it lives, has ended, or is remembered as lost.
struct Listed {
    generation: Generation,
    status: ExecStatus,
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
    let place = |one: &Listed| -> (u64, ExecutionId) { (one.status.started_at_ms, one.status.id.clone()) };
    let lost = record.lost_executions.iter().cloned();
    let mut all: Vec<Listed> = lost.map(|lost| Listed { generation: lost.generation, status: lost.status }).collect();
    match state.engine().look_into(&target.project, &target.which, Some(record.generation)).await {
        Ok(handle) => {
            let generation = handle.generation();
            let current = handle.executions().await?.into_iter();
            all.retain(|lost| lost.generation != generation);
            all.extend(current.map(|status| Listed { generation, status: record.execution(status) }));
        }
        // What ran when it was saved is all that there is to tell (X5).
        Err(EngineError::NotRunning { .. }) if !all.is_empty() => {}
        Err(error) => return Err(error.into()),
    }
    all.sort_by_key(place);
    let limit = page_limit(query.limit);
    let mut rest = all.iter().filter(|one| after.as_ref().is_none_or(|after| place(one) > *after));
    let part: Vec<&Listed> = rest.by_ref().take(limit).collect();
    let more = rest.next().is_some();
    let next = part.last().filter(|_| more).map(|last| format!("{}.{}", last.status.started_at_ms, last.status.id));
    let frozen = matches!(record.phase, Phase::Frozen { .. });
    let items = part.into_iter().map(|one| show::execution(&state, &record.id, one.generation, &one.status, frozen));
    Ok(show::ok(&Page { items: items.collect(), next }))
}

async fn get(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let record = target.record(&state, query.generation).await?;
    // What ran when it was saved is remembered, and told also while there is no instance (X5).
    if let Some(lost) = record.lost_executions.iter().find(|lost| lost.status.id == execution) {
        return Ok(show::ok(&show::execution(&state, &record.id, lost.generation, &lost.status, false)));
    }
    let handle = state.engine().look_into(&target.project, &target.which, Some(record.generation)).await?;
    let status = record.execution(handle.execution(&execution).await?);
    let frozen = matches!(record.phase, Phase::Frozen { .. });
    Ok(show::ok(&shown(&state, &handle, &status, frozen)))
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
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    let ending = handle.clone();
    let status = regardless(async move { ending.cancel(&execution).await }).await?;
    Ok(show::ok(&shown(&state, &handle, &status, false)))
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
