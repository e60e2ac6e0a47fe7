//! Hot spares (L19). For keys of the installation: they are nobody's.

use axum::extract::State;
use viv_api::page::Page;
use viv_api::path;
use viv_api::spare::{Spare, SpareClass};
use viv_engine::SpareStatus;

use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;

pub(super) fn tell(table: &mut impl Table) {
    let op = Op::new("daemon", "listSpares", Need::Admin, "The classes of hot spares and how they stand")
        .gives_page::<SpareClass>("All of them.");
    table.on(Method::Get, path::SPARES, spares, op);
}

async fn spares(State(state): State<ServerState>) -> Answer {
    let all = state.engine().spares().await?;
    Ok(show::ok(&Page::whole(all.into_iter().map(one).collect())))
}

fn one(status: SpareStatus) -> SpareClass {
    SpareClass {
        image: show::image(&status.class.spec.image),
        name: status.class.name,
        min: status.class.min,
        max: status.class.max,
        target: status.target,
        ready: status.ready.into_iter().map(|(id, made_at_ms)| Spare { id, made_at_ms }).collect(),
        making: status.making,
        claimed_total: status.claimed,
        missed_total: status.missed,
        broken_total: status.broken,
        held: status.held,
    }
}
