//! Sandboxes: make, list, look at, delete.

use std::slice;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::bound::WaitMs;
use viv_api::error::ErrorCode;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{DeleteSandbox, GetSandbox, ListSandboxes};
use viv_api::sandbox::{CreateSandbox, Sandbox, Status};
use viv_core::lifecycle::{Phase, PhaseName};
use viv_engine::{CreateRequest, EngineError, KeyedBy, View};
use viv_store::ListQuery;

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::{Json, Query, Repeatable, Target, body_hash};
use crate::refusal::{Answer, Refusal};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

/// How long a create or an ensure waits when nothing was said.
pub(super) const READY_WAIT: Duration = Duration::from_secs(60);

/// How long a stop or a delete waits when nothing was said.
pub(super) const END_WAIT: Duration = Duration::from_secs(30);

pub(super) fn wait(state: &ServerState, asked: Option<WaitMs>, default: Duration) -> Duration {
    asked.map_or(default, |ms| Duration::from_millis(ms.get())).min(state.bounds().wait_max)
}

pub(super) fn tell(table: &mut impl Table) {
    let op = Op::new("sandboxes", "createSandbox", Need::Change, "Make a sandbox")
        .json::<CreateSandbox>()
        .repeatable()
        .gives::<Sandbox>(201, "It is ready.")
        .gives::<Sandbox>(200, "This request was made before; this is what it made, as it is now.")
        .gives::<Sandbox>(202, "It is being made.")
        .fails(&[
            ErrorCode::NameTaken,
            ErrorCode::Gone,
            ErrorCode::NotRunning,
            ErrorCode::QuotaExceeded,
            ErrorCode::NotFound,
            ErrorCode::Unsupported,
            ErrorCode::Conflict,
            ErrorCode::Draining,
        ]);
    table.on(Method::Post, path::SANDBOXES, create, op);
    let op = Op::new("sandboxes", "listSandboxes", Need::Read, "List sandboxes, newest first")
        .query::<ListSandboxes>()
        .cursor("^[0-9]{1,15}\\.sbx_[a-z0-9]{1,48}$")
        .gives_page::<Sandbox>("A page of them.");
    table.on(Method::Get, path::SANDBOXES, list, op);
    let op = Op::new("sandboxes", "getSandbox", Need::Read, "Look at a sandbox, also one that is over")
        .of_sandbox()
        .query::<GetSandbox>()
        .gives::<Sandbox>(200, "The sandbox.");
    table.on(Method::Get, path::SANDBOX, get, op);
    let op = Op::new("sandboxes", "deleteSandbox", Need::Change, "Delete a sandbox for ever")
        .of_sandbox()
        .query::<DeleteSandbox>()
        .gives::<Sandbox>(200, "Nothing is left of it but this.")
        .gives::<Sandbox>(202, "It is being taken away.")
        .fails(&[ErrorCode::LifecycleLocked]);
    table.on(Method::Delete, path::SANDBOX, delete, op);
}

async fn create(
    State(state): State<ServerState>,
    caller: Caller,
    Repeatable(key): Repeatable,
    Json(body): Json<CreateSandbox>,
) -> Answer {
    let key = key.map(|key| KeyedBy { key: key.to_string(), body_hash: body_hash(&body) });
    let how_long = wait(&state, body.wait_ms, READY_WAIT);
    let request = request(&caller, body, key);
    let engine = state.engine().clone();
    let made = regardless(async move { engine.create(request).await }).await?;
    crate::trace::about(&made.view.sandbox.id);
    let fresh = made.fresh;
    let is_over = made.view.sandbox.is_over() || made.view.sandbox.deleted;
    let view = if is_over || how_long.is_zero() {
        // What is left of it answers a repeated request, for ever (L1).
        made.view
    } else {
        match state.engine().wait_ready(&made.view.sandbox.id, how_long).await {
            // Somebody took it away, or put it to rest, meanwhile: then that is how it is.
            Err(EngineError::Gone { sandbox, .. } | EngineError::NotRunning { sandbox, .. }) => {
                let which = viv_engine::Which::Id(sandbox);
                state.engine().get(&made.view.sandbox.project, &which, "create").await?
            }
            waited => waited?,
        }
    };
    let status = match (&view.sandbox.phase, fresh) {
        (Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. }, _) => StatusCode::ACCEPTED,
        (_, true) => StatusCode::CREATED,
        (_, false) => StatusCode::OK,
    };
    Ok(show::json(status, &shown(&state, view).await?))
}

fn request(caller: &Caller, body: CreateSandbox, key: Option<KeyedBy>) -> CreateRequest {
    CreateRequest {
        project: caller.project(),
        spec: body.to_spec(),
        policy: body.to_policy(),
        snapshot: body.snapshot.as_ref().map(Into::into),
        labels: body.labels.to_map(),
        name: body.name.map(Into::into),
        by: caller.actor(),
        key,
    }
}

/// A sandbox as it is shown.
pub(super) async fn shown(state: &ServerState, view: View) -> Result<Sandbox, Refusal> {
    let task = state.engine().tasks_at_work(slice::from_ref(&view.sandbox.id)).await?.into_values().next();
    Ok(show::sandbox(view, task, state.engine().provider().name()))
}

/// Several of them, with the tasks that are at work in them.
pub(super) async fn all_shown(state: &ServerState, views: Vec<View>) -> Result<Vec<Sandbox>, Refusal> {
    let ids: Vec<_> = views.iter().map(|view| view.sandbox.id.clone()).collect();
    let mut at_work = state.engine().tasks_at_work(&ids).await?;
    let provider = state.engine().provider().name();
    let shown = views.into_iter().map(|view| {
        let task = at_work.remove(&view.sandbox.id);
        show::sandbox(view, task, provider)
    });
    Ok(shown.collect())
}

async fn list(State(state): State<ServerState>, caller: Caller, Query(query): Query<ListSandboxes>) -> Answer {
    let over_too = query.all || query.status == Some(Status::Stopped);
    let phases = match query.status {
        Some(status) => vec![phase_of(status)],
        None if over_too => Vec::new(),
        None => PhaseName::ALL.into_iter().filter(|phase| *phase != PhaseName::Stopped).collect(),
    };
    let asked = ListQuery {
        project: caller.sees().cloned(),
        labels: query.label.into_iter().map(|label| (label.key.to_string(), label.value.to_string())).collect(),
        phases,
        name: query.name.map(Into::into),
        deleted: over_too,
        after: query.cursor.map(|cursor| cursor.to_string()),
        limit: super::page_limit(query.limit),
    };
    let (views, next) = state.engine().list(&asked).await?;
    let items = all_shown(&state, views).await?.into_iter();
    // Ready and unverified are one phase, told apart by the age of evidence.
    let items = items.filter(|sandbox| query.status.is_none_or(|status| sandbox.status == status)).collect();
    Ok(show::ok(&Page { items, next }))
}

fn phase_of(status: Status) -> PhaseName {
    match status {
        Status::Provisioning => PhaseName::Provisioning,
        Status::Verifying => PhaseName::Verifying,
        Status::Ready | Status::Unverified => PhaseName::Ready,
        Status::Frozen => PhaseName::Frozen,
        Status::Hibernating | Status::SaveFailed => PhaseName::Hibernating,
        Status::Hibernated => PhaseName::Hibernated,
        Status::Resuming => PhaseName::Resuming,
        Status::Lost => PhaseName::Lost,
        Status::Failed => PhaseName::Failed,
        Status::Stopping => PhaseName::Stopping,
        Status::Stopped => PhaseName::Stopped,
    }
}

async fn get(State(state): State<ServerState>, target: Target, Query(query): Query<GetSandbox>) -> Answer {
    let record = target.record(&state, query.generation).await?;
    let engine = state.engine();
    let view = engine.get(&record.project, &viv_engine::Which::Id(record.id.clone()), &target.client).await?;
    let view = if query.verify && !record.is_over() { engine.verify(&record.id).await? } else { view };
    let is_ready = view.sandbox.phase == Phase::Ready;
    let mut sandbox = shown(&state, view).await?;
    if is_ready {
        sandbox.executions_running = running(&state, &target).await;
    }
    Ok(show::ok(&sandbox))
}

/// How many executions run, if that can be told: it is not worth failing for.
async fn running(state: &ServerState, target: &Target) -> Option<u64> {
    let handle = state.engine().look_into(&target.project, &target.which, None).await.ok()?;
    handle.running().await.ok()
}

async fn delete(State(state): State<ServerState>, target: Target, Query(query): Query<DeleteSandbox>) -> Answer {
    let (_, aim) = target.aimed(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let view = regardless(async move { engine.delete(aim, by).await }).await?;
    ended(&state, view, wait(&state, query.wait_ms, END_WAIT)).await
}

/// Waits for an end, and tells how far it is.
pub(super) async fn ended(state: &ServerState, view: View, how_long: Duration) -> Answer {
    let id = view.sandbox.id.clone();
    let view = if how_long.is_zero() { view } else { state.engine().wait_settled(&id, how_long).await? };
    let is_settled = view.sandbox.phase.work().is_none() && view.sandbox.due_at_ms().is_none();
    let status = if is_settled { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(show::json(status, &shown(state, view).await?))
}
