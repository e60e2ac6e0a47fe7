//! What puts a sandbox to rest by hand, and takes it out of it: freeze, thaw, hibernate.

use axum::extract::State;
use axum::http::StatusCode;
use viv_api::error::ErrorCode;
use viv_api::path;
use viv_api::query::OfGeneration;
use viv_api::sandbox::{RestSandbox, Sandbox};
use viv_core::lifecycle::Phase;

use super::sandboxes::{END_WAIT, READY_WAIT, ended, shown, wait};
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::extract::{MaybeJson, Query, Target};
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, summary| {
        let op = Op::new("lifecycle", id, Need::Change, summary).of_sandbox().query::<OfGeneration>();
        op.maybe_json::<RestSandbox>().fails(&[ErrorCode::NotRunning, ErrorCode::LifecycleLocked])
    };
    let freeze_op = op("freezeSandbox", "Make a sandbox stand still, with its memory")
        .gives::<Sandbox>(200, "It stands still.")
        .gives::<Sandbox>(202, "It is on its way.")
        .fails(&[ErrorCode::Unsupported]);
    table.on(Method::Post, path::FREEZE, freeze, freeze_op);
    let thaw_op = op("thawSandbox", "Let a frozen sandbox go on")
        .gives::<Sandbox>(200, "It is ready, and that was checked.")
        .gives::<Sandbox>(202, "It is on its way.")
        .fails(&[ErrorCode::AbsenceUnproven]);
    table.on(Method::Post, path::THAW, thaw, thaw_op);
    let hibernate_op = op("hibernateSandbox", "Save a sandbox; whatever may wake it still does")
        .gives::<Sandbox>(200, "It is saved, and nothing runs.")
        .gives::<Sandbox>(202, "It is being saved.");
    table.on(Method::Post, path::HIBERNATE, hibernate, hibernate_op);
}

async fn freeze(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<RestSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let view = regardless(async move { engine.freeze(aim, by).await }).await?;
    ended(&state, view, wait(&state, body.wait_ms, END_WAIT)).await
}

async fn thaw(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<RestSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let (engine, by, id) = (state.engine().clone(), target.caller.actor(), aim.sandbox().clone());
    let view = regardless(async move { engine.thaw(aim, by).await }).await?;
    let how_long = wait(&state, body.wait_ms, READY_WAIT);
    let view = if how_long.is_zero() { view } else { state.engine().wait_ready(&id, how_long).await? };
    let status = if view.sandbox.phase == Phase::Ready { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(show::json(status, &shown(&state, view).await?))
}

async fn hibernate(
    State(state): State<ServerState>,
    target: Target,
    Query(query): Query<OfGeneration>,
    MaybeJson(body): MaybeJson<RestSandbox>,
) -> Answer {
    let aim = target.living(&state, query.generation).await?;
    let (engine, by) = (state.engine().clone(), target.caller.actor());
    let view = regardless(async move { engine.hibernate(aim, by).await }).await?;
    ended(&state, view, wait(&state, body.wait_ms, END_WAIT)).await
}
