//! What changes the life of a sandbox: ensure, stop, extend, limits, activity, leases. An intent first, then waiting.

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::bound::LeaseName;
use viv_api::error::ErrorCode;
use viv_api::limits::{Limits, LimitsInForce};
use viv_api::path;
use viv_api::query::OfGeneration;
use viv_api::sandbox::{
    Activity, Deadline, EnsureSandbox, ExtendSandbox, FailedSave, KeepAwake, ReportActivity, Sandbox, StopSandbox,
    TakeKeepAwake,
};
use viv_core::lifecycle::{EntryKind, Phase};

use super::sandboxes::{END_WAIT, READY_WAIT, ended, shown, wait};
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::extract::{Json, MaybeJson, Params, Query, Target};
use crate::refusal::{Answer, internal};
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, summary| Op::new("lifecycle", id, Need::Change, summary).of_sandbox().query::<OfGeneration>();
    let ensure_op = op("ensureSandbox", "Make a sandbox run")
        .maybe_json::<EnsureSandbox>()
        .gives::<Sandbox>(200, "It is ready, and that was checked.")
        .gives::<Sandbox>(202, "It is on its way.")
        .fails(&[
            ErrorCode::NotRunning,
            ErrorCode::AbsenceUnproven,
            ErrorCode::LifecycleLocked,
            ErrorCode::QuotaExceeded,
            ErrorCode::Timeout,
            ErrorCode::Draining,
        ]);
    table.on(Method::Post, path::ENSURE, ensure, ensure_op);
    let stop_op = op("stopSandbox", "Stop a sandbox")
        .maybe_json::<StopSandbox>()
        .gives::<Sandbox>(200, "It has stopped.")
        .gives::<Sandbox>(202, "It is being stopped.")
        .fails(&[ErrorCode::LifecycleLocked]);
    table.on(Method::Post, path::STOP, stop, stop_op);
    let works = [ErrorCode::NotRunning, ErrorCode::Timeout, ErrorCode::LifecycleLocked, ErrorCode::Unsupported];
    let extend_op = op("extendSandbox", "Move the hard deadline")
        .json::<ExtendSandbox>()
        .gives::<Deadline>(200, "The deadline, as whoever keeps it says.")
        .fails(&[ErrorCode::Expired])
        .fails(&works);
    table.on(Method::Post, path::EXTEND, extend, extend_op);
    let limits_op = op("setLimits", "Change limits of what runs, or of what rests for when it goes on")
        .json::<Limits>()
        .gives::<LimitsInForce>(200, "All limits in force.")
        .fails(&[ErrorCode::QuotaExceeded])
        .fails(&works);
    table.on(Method::Put, path::LIMITS, set_limits, limits_op);
    let activity_op = op("reportActivity", "Say that a sandbox is in use")
        .maybe_json::<ReportActivity>()
        .gives::<Activity>(200, "When it was last in use.");
    table.on(Method::Post, path::ACTIVITY, activity, activity_op);
    let take_op = op("takeKeepAwake", "Keep a sandbox from idling")
        .json::<TakeKeepAwake>()
        .gives::<KeepAwake>(200, "The lease.")
        .fails(&[ErrorCode::QuotaExceeded]);
    table.on(Method::Put, path::KEEP_AWAKE, keep_awake, take_op);
    let release_op = op("releaseKeepAwake", "Let a sandbox idle again").gives_nothing("There is no such lease now.");
    table.on(Method::Delete, path::KEEP_AWAKE, let_sleep, release_op);
}

async fn ensure(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<EnsureSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let (engine, by, id) = (state.engine().clone(), target.caller.actor(), aim.sandbox().clone());
    let view = regardless(async move { engine.ensure(aim, EntryKind::Ensure, by).await }).await?;
    let how_long = wait(&state, body.wait_ms, READY_WAIT);
    let view = if how_long.is_zero() { view } else { state.engine().wait_ready(&id, how_long).await? };
    let status = if view.sandbox.phase == Phase::Ready { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(show::json(status, &shown(&state, view).await?))
}

async fn stop(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<StopSandbox>,
) -> Answer {
    let (record, aim) = target.aimed(&state, query.generation).await?;
    if record.deleted {
        return Err(crate::refusal::gone(&record.id, &record.cause));
    }
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let view = regardless(async move {
        match body.failed_save {
            None => engine.stop(aim, by).await,
            Some(FailedSave::Retry) => engine.retry_save(aim, by).await,
            Some(FailedSave::Discard) => engine.discard(aim, by).await,
        }
    });
    let view = view.await?;
    ended(&state, view, wait(&state, body.wait_ms, END_WAIT)).await
}

async fn extend(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<ExtendSandbox>,
) -> Answer {
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().look_into(&target.project, &target.which, generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let deadline = regardless(async move { engine.extend(&handle, body.into(), &by).await }).await?;
    let expires_at_ms = state.engine().now_ms().saturating_add(deadline.remaining_ms);
    Ok(show::ok(&Deadline { remaining_ms: deadline.remaining_ms, expires_at_ms, revision: deadline.revision }))
}

async fn set_limits(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    Json(body): Json<Limits>,
) -> Answer {
    let generation = target.generation(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let change = body.into();
    let limited = async move { engine.limit(&target.project, &target.which, generation, &change, &by).await };
    let in_force = regardless(limited).await?;
    Ok(show::ok(&LimitsInForce::from(&in_force)))
}

async fn activity(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(_): MaybeJson<ReportActivity>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let view = state.engine().activity(aim).await?;
    Ok(show::ok(&Activity { last_activity_at_ms: view.sandbox.active_at_ms }))
}

async fn keep_awake(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
    Json(body): Json<TakeKeepAwake>,
) -> Answer {
    let lease: LeaseName = params.get("lease")?;
    let aim = target.living(&state, query.generation).await?;
    let (engine, by, name) = (state.engine().clone(), target.caller.actor(), lease.to_string());
    let view = regardless(async move {
        let reason = body.reason.as_ref().map_or("", |reason| reason.as_str());
        engine.keep_awake(aim, &name, body.ttl_ms.get(), reason, by).await
    });
    let record = view.await?.sandbox;
    let taken = record.keep_awake.get(lease.as_str()).and_then(|held| show::keep_awake(lease.as_str(), held));
    Ok(show::ok(&taken.ok_or_else(|| internal("a lease that was taken is not there"))?))
}

async fn let_sleep(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
) -> Answer {
    let lease: LeaseName = params.get("lease")?;
    let aim = target.living(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    regardless(async move { engine.let_sleep(aim, lease.as_str(), by).await }).await?;
    Ok(show::nothing())
}
