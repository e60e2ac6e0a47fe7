//! Drain: begin, look at, end (L21). For keys of the installation.

use std::time::Duration;

use axum::extract::State;
use viv_api::bound::WaitMs;
use viv_api::daemon::{BeginDrain, Drain};
use viv_api::path;
use viv_engine::DrainStatus;

use crate::api::{Method, Op, Table};
use crate::auth::{Caller, Need};
use crate::extract::MaybeJson;
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::regardless;

/// How long executions may go on when nothing was said.
const GRACE_MS_DEFAULT: u64 = 60_000;

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, summary| Op::new("daemon", id, Need::Admin, summary);
    let begin_op = op("beginDrain", "Take no new work, and save or finish every sandbox")
        .maybe_json::<BeginDrain>()
        .gives::<Drain>(200, "How it stands.");
    table.on(Method::Post, path::DRAIN, begin, begin_op);
    table.on(Method::Get, path::DRAIN, get, op("getDrain", "How a drain stands").gives::<Drain>(200, "How it stands."));
    table.on(Method::Delete, path::DRAIN, end, op("endDrain", "Take new work again").gives::<Drain>(200, "It does."));
}

fn shown(status: &DrainStatus) -> Drain {
    Drain {
        draining: status.draining,
        since_at_ms: status.since_ms,
        grace_until_ms: status.grace_until_ms,
        left: status.left.iter().map(ToString::to_string).collect(),
        instances: status.instances,
        drained: status.is_drained(),
    }
}

async fn begin(State(state): State<ServerState>, caller: Caller, MaybeJson(body): MaybeJson<BeginDrain>) -> Answer {
    let grace = Duration::from_millis(body.grace_ms.map_or(GRACE_MS_DEFAULT, WaitMs::get));
    let (engine, by) = (state.engine().clone(), caller.actor());
    Ok(show::ok(&shown(&regardless(async move { engine.drain(grace, by).await }).await?)))
}

async fn get(State(state): State<ServerState>) -> Answer {
    Ok(show::ok(&shown(&state.engine().drain_status().await?)))
}

async fn end(State(state): State<ServerState>, caller: Caller) -> Answer {
    let (engine, by) = (state.engine().clone(), caller.actor());
    Ok(show::ok(&shown(&regardless(async move { engine.undrain(by).await }).await?)))
}
