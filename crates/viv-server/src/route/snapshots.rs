//! Snapshots: made, listed, looked at, begun with, removed, and as files (L11, L12).

use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde::Serialize;
use viv_api::bound::{ForkCount, IdempotencyKey};
use viv_api::error::ErrorCode;
use viv_api::header::BYTES;
use viv_api::page::Page;
use viv_api::path;
use viv_api::query::{ImportSnapshot, ListSnapshots, OfGeneration};
use viv_api::sandbox::{CreatePolicy, CreateSandbox, Sandbox};
use viv_api::snapshot::{CreateSnapshot, Fork, Forked, ResetSandbox, RollbackSandbox, Snapshot};
use viv_core::SnapshotId;
use viv_core::lifecycle::Phase;
use viv_core::spec::{Policy, Project};
use viv_engine::{EngineError, ForkRequest, ForkedFrom, KeyedBy, NewSnapshot, RollbackRequest, View};
use viv_store::SnapshotQuery;

use super::sandboxes::{READY_WAIT, shown, wait};
use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::body::Upload;
use crate::extract::{Json, MaybeJson, Params, Query, Repeatable, Target, body_hash, has_type, unsupported_media};
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::{bytes, regardless};

/// What a cursor of a list of snapshots looks like.
const CURSOR: &str = "^[0-9]{1,15}\\.snp_[a-z0-9]{1,48}$";

/// What can go wrong where a new instance is to be.
const MAKING: [ErrorCode; 7] = [
    ErrorCode::NotFound,
    ErrorCode::Conflict,
    ErrorCode::NotRunning,
    ErrorCode::AbsenceUnproven,
    ErrorCode::LifecycleLocked,
    ErrorCode::QuotaExceeded,
    ErrorCode::Timeout,
];

pub(super) fn tell(table: &mut impl Table) {
    of_sandboxes(table);
    let op = |id, need, summary| Op::new("snapshots", id, need, summary);
    let list_op = op("listSnapshots", Need::Read, "List all snapshots, newest first")
        .query::<ListSnapshots>()
        .cursor(CURSOR)
        .gives_page::<Snapshot>("A page of them.");
    table.on(Method::Get, path::SNAPSHOTS, list_all, list_op);
    let import_op = op("importSnapshot", Need::Change, "Read a snapshot from a file")
        .query::<ImportSnapshot>()
        .bytes(BYTES)
        .gives::<Snapshot>(201, "It is there.")
        .fails(&[ErrorCode::Unsupported, ErrorCode::Conflict, ErrorCode::QuotaExceeded, ErrorCode::Timeout]);
    table.on(Method::Post, path::SNAPSHOTS, import, import_op);
    let get_op = op("getSnapshot", Need::Read, "Look at a snapshot")
        .gives::<Snapshot>(200, "The snapshot, as it is now.")
        .fails(&[ErrorCode::NotFound]);
    table.on(Method::Get, path::SNAPSHOT, get, get_op);
    let remove_op = op("removeSnapshot", Need::Change, "Remove a snapshot that nobody uses")
        .gives_nothing("It is not there.")
        .fails(&[ErrorCode::NotFound, ErrorCode::SnapshotInUse, ErrorCode::Conflict, ErrorCode::Timeout]);
    table.on(Method::Delete, path::SNAPSHOT, remove, remove_op);
    let fork_op = op("forkSnapshot", Need::Change, "Make sandboxes that begin with a snapshot")
        .maybe_json::<Fork>()
        .repeatable()
        .gives::<Forked>(201, "They are ready.")
        .gives::<Forked>(200, "This request was made before; this is what it made, as it is now.")
        .gives::<Forked>(202, "They are being made.")
        .fails(&MAKING)
        .fails(&[ErrorCode::NameTaken, ErrorCode::Gone, ErrorCode::Unsupported]);
    table.on(Method::Post, path::SNAPSHOT_FORK, fork_snapshot, fork_op);
    let export_op = op("exportSnapshot", Need::Read, "A snapshot as one file")
        .gives_stream("The file.", BYTES)
        .fails(&[ErrorCode::NotFound, ErrorCode::Unsupported, ErrorCode::Conflict, ErrorCode::Timeout])
        .fails(&[ErrorCode::QuotaExceeded]);
    table.on(Method::Get, path::SNAPSHOT_EXPORT, export, export_op);
}

fn of_sandboxes(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("snapshots", id, need, summary).of_sandbox();
    let make_op = op("createSnapshot", Need::Change, "Make a snapshot of a sandbox")
        .query::<OfGeneration>()
        .maybe_json::<CreateSnapshot>()
        .repeatable()
        .gives::<Snapshot>(201, "It is there.")
        .gives::<Snapshot>(200, "This request was made before; this is what it made, as it is now.")
        .fails(&[ErrorCode::NotRunning, ErrorCode::QuotaExceeded, ErrorCode::Unsupported, ErrorCode::Timeout])
        .fails(&[ErrorCode::Expired]);
    table.on(Method::Post, path::SANDBOX_SNAPSHOTS, make, make_op);
    let list_op = op("listSandboxSnapshots", Need::Read, "List the snapshots of a sandbox, newest first")
        .query::<ListSnapshots>()
        .cursor(CURSOR)
        .gives_page::<Snapshot>("A page of them.");
    table.on(Method::Get, path::SANDBOX_SNAPSHOTS, list_of, list_op);
    let rollback_op = op("rollbackSandbox", Need::Change, "Make a sandbox go on from a snapshot")
        .query::<OfGeneration>()
        .json::<RollbackSandbox>()
        .gives::<Sandbox>(200, "It is ready.")
        .gives::<Sandbox>(202, "It is on its way.")
        .fails(&MAKING);
    table.on(Method::Post, path::ROLLBACK, rollback, rollback_op);
    let reset_op = op("resetSandbox", Need::Change, "Make a sandbox begin anew")
        .query::<OfGeneration>()
        .maybe_json::<ResetSandbox>()
        .gives::<Sandbox>(200, "It is ready.")
        .gives::<Sandbox>(202, "It is on its way.")
        .fails(&MAKING);
    table.on(Method::Post, path::RESET, reset, reset_op);
    let fork_op = op("forkSandbox", Need::Change, "Make sandboxes that begin where another one is")
        .query::<OfGeneration>()
        .maybe_json::<Fork>()
        .repeatable()
        .gives::<Forked>(201, "They are ready.")
        .gives::<Forked>(200, "This request was made before; this is what it made, as it is now.")
        .gives::<Forked>(202, "They are being made.")
        .fails(&MAKING)
        .fails(&[ErrorCode::NameTaken, ErrorCode::Unsupported, ErrorCode::Expired]);
    table.on(Method::Post, path::FORK, fork_sandbox, fork_op);
}

async fn make(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Repeatable(key): Repeatable,
    MaybeJson(body): MaybeJson<CreateSnapshot>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let key = keyed(key, aim.sandbox().as_str(), &body);
    let (name, labels) = (body.name.map(Into::into), body.labels.to_map());
    let new = NewSnapshot { name, labels, by: target.caller.actor(), key };
    let engine = state.engine().clone();
    let made = regardless(async move { engine.make_snapshot(aim, new).await }).await?;
    let status = if made.fresh { StatusCode::CREATED } else { StatusCode::OK };
    Ok(show::json(status, &Snapshot::from(made.row)))
}

/// A request is the same when it is about the same, with the same body.
fn keyed(key: Option<IdempotencyKey>, about: &str, body: &impl Serialize) -> Option<KeyedBy> {
    key.map(|key| KeyedBy { key: key.to_string(), body_hash: body_hash(&(about, body)) })
}

async fn list_of(State(state): State<ServerState>, target: Target, Query(query): Query<ListSnapshots>) -> Answer {
    // Those of what was deleted are there for as long as somebody needs them.
    let record = target.record(&state, None).await?;
    let asked = SnapshotQuery { project: Some(record.project), sandbox: Some(record.id), ..asked(query) };
    listed(&state, &asked).await
}

async fn list_all(State(state): State<ServerState>, caller: Caller, Query(query): Query<ListSnapshots>) -> Answer {
    listed(&state, &SnapshotQuery { project: caller.sees().cloned(), ..asked(query) }).await
}

fn asked(query: ListSnapshots) -> SnapshotQuery {
    SnapshotQuery {
        after: query.cursor.map(|cursor| cursor.to_string()),
        limit: super::page_limit(query.limit),
        ..SnapshotQuery::default()
    }
}

async fn listed(state: &ServerState, query: &SnapshotQuery) -> Answer {
    let listing = state.engine().snapshots(query).await?;
    let items: Vec<Snapshot> = listing.items.into_iter().map(Snapshot::from).collect();
    Ok(show::ok(&Page { items, next: listing.next }))
}

async fn get(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id: SnapshotId = params.get("snapshot")?;
    let (row, used_by) = state.engine().snapshot(caller.sees(), &id).await?;
    Ok(show::ok(&Snapshot { used_by, ..Snapshot::from(row) }))
}

async fn remove(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id: SnapshotId = params.get("snapshot")?;
    let (engine, by, project) = (state.engine().clone(), caller.actor(), caller.sees().cloned());
    regardless(async move { engine.remove_snapshot(project.as_ref(), &id, &by).await }).await?;
    Ok(show::nothing())
}

async fn rollback(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<RollbackSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let request =
        RollbackRequest { snapshot: (&body.snapshot).into(), discard: body.discard, by: target.caller.actor() };
    let engine = state.engine().clone();
    let view = regardless(async move { engine.rollback(aim, request).await }).await?;
    ready(&state, view, wait(&state, body.wait_ms, READY_WAIT)).await
}

async fn reset(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<ResetSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let view = regardless(async move { engine.reset(aim, by).await }).await?;
    ready(&state, view, wait(&state, body.wait_ms, READY_WAIT)).await
}

async fn ready(state: &ServerState, view: View, how_long: Duration) -> Answer {
    let id = view.sandbox.id.clone();
    let view = if how_long.is_zero() { view } else { state.engine().wait_ready(&id, how_long).await? };
    let status = if view.sandbox.phase == Phase::Ready { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(show::json(status, &shown(state, view).await?))
}

async fn fork_sandbox(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Repeatable(key): Repeatable,
    MaybeJson(body): MaybeJson<Fork>,
) -> Answer {
    let (record, aim) = target.aimed(&state, query.generation).await?;
    if record.deleted || record.is_over() {
        return Err(crate::refusal::gone(&record.id, &record.cause));
    }
    let key = keyed(key, record.id.as_str(), &body);
    Box::pin(fork(&state, &target.caller, record.project, ForkedFrom::Sandbox(aim), body, key)).await
}

async fn fork_snapshot(
    State(state): State<ServerState>,
    caller: Caller,
    params: Params,
    Repeatable(key): Repeatable,
    MaybeJson(body): MaybeJson<Fork>,
) -> Answer {
    let id: SnapshotId = params.get("snapshot")?;
    let (row, _) = state.engine().snapshot(caller.sees(), &id).await?;
    let key = keyed(key, id.as_str(), &body);
    Box::pin(fork(&state, &caller, row.project, ForkedFrom::Snapshot(id), body, key)).await
}

async fn fork(
    state: &ServerState,
    caller: &Caller,
    project: Project,
    from: ForkedFrom,
    body: Fork,
    key: Option<KeyedBy>,
) -> Answer {
    let how_long = wait(state, body.wait_ms, READY_WAIT);
    let policy = body.policy.clone().map(|policy| to_policy(&body, policy));
    let request = ForkRequest {
        project,
        from,
        count: body.count.map_or(1, ForkCount::get) as usize,
        name: body.name.map(Into::into),
        policy,
        labels: body.labels.to_map(),
        memory: body.memory,
        by: caller.actor(),
        key,
    };
    let engine = state.engine().clone();
    let forked = regardless(async move { engine.fork(request).await }).await?;
    let until = tokio::time::Instant::now() + how_long;
    let mut sandboxes = Vec::with_capacity(forked.views.len());
    let (mut all_ready, mut under_way) = (true, false);
    for view in forked.views {
        let left = until.saturating_duration_since(tokio::time::Instant::now());
        let id = view.sandbox.id.clone();
        let view = if left.is_zero() {
            view
        } else {
            match state.engine().wait_ready(&id, left).await {
                // What did not come up is shown as it is, beside those that did.
                Err(EngineError::ShuttingDown) => return Err(EngineError::ShuttingDown.into()),
                Err(_) => {
                    let which = viv_engine::Which::Id(id);
                    state.engine().get(&view.sandbox.project, &which, "fork").await?
                }
                Ok(view) => view,
            }
        };
        all_ready &= view.sandbox.phase == Phase::Ready;
        under_way |=
            matches!(view.sandbox.phase, Phase::Provisioning { .. } | Phase::Verifying { .. } | Phase::Resuming { .. });
        sandboxes.push(shown(state, view).await?);
    }
    let status = match (all_ready, forked.fresh) {
        // What was made before is told as it is, tombstones too (L1).
        (_, false) if !under_way => StatusCode::OK,
        (true, _) => StatusCode::CREATED,
        (false, _) => StatusCode::ACCEPTED,
    };
    Ok(show::json(status, &Forked { snapshot: forked.snapshot, sandboxes }))
}

/// What was said, and otherwise what holds for a new sandbox of that name.
fn to_policy(body: &Fork, policy: CreatePolicy) -> Policy {
    CreateSandbox { name: body.name.clone(), policy, ..CreateSandbox::default() }.to_policy()
}

async fn export(State(state): State<ServerState>, caller: Caller, params: Params) -> Answer {
    let id: SnapshotId = params.get("snapshot")?;
    Ok(bytes(BYTES, state.engine().export_snapshot(caller.sees(), &id).await?))
}

async fn import(
    State(state): State<ServerState>,
    caller: Caller,
    Query(query): Query<ImportSnapshot>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    if !has_type(&headers, BYTES) {
        return Err(unsupported_media(BYTES));
    }
    let bounds = state.bounds();
    let (upload, file) = Upload::new(body, &headers, bounds.archive_bytes_max, bounds.body_idle)?;
    let engine = state.engine().clone();
    let (project, name, by) = (caller.project(), query.name.map(Into::into), caller.actor());
    let imported = engine.import_snapshot(project, name, by, file).await;
    Ok(show::json(StatusCode::CREATED, &Snapshot::from(upload.explain(imported)?)))
}
