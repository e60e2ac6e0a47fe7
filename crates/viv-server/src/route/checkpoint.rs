//! What is in the way of saving the memory of a sandbox. A read: it changes nothing (T9).

use axum::extract::State;
use viv_api::checkpoint::{CheckpointCheck, Obstacle};
use viv_api::error::ErrorCode;
use viv_api::path;
use viv_api::query::OfGeneration;
use viv_provider::ObstacleEffect;

use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::extract::{Query, Target};
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;

pub(super) fn tell(table: &mut impl Table) {
    let check_op = Op::new("looks", "checkCheckpoint", Need::Read, "What is in the way of saving its memory")
        .of_sandbox()
        .query::<OfGeneration>()
        .gives::<CheckpointCheck>(200, "What is in the way, and who holds it.")
        .fails(&[ErrorCode::NotRunning, ErrorCode::Timeout]);
    table.on(Method::Get, path::CHECKPOINT, check, check_op);
}

async fn check(State(state): State<ServerState>, target: Target, Query(query): Query<OfGeneration>) -> Answer {
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().look_into(&target.project, &target.which, generation).await?;
    let found = handle.memory_obstacles().await?;
    let shown = |one: viv_provider::Obstacle| Obstacle {
        what: one.what,
        pid: one.pid,
        command: one.command,
        execution: one.execution,
    };
    let (prevents, rest): (Vec<_>, Vec<_>) = found.into_iter().partition(|one| match one.effect {
        ObstacleEffect::Prevents => true,
        ObstacleEffect::Closed => false,
    });
    let obstacles: Vec<Obstacle> = prevents.into_iter().map(shown).collect();
    let closes = rest.into_iter().map(shown).collect();
    let (sandbox, generation) = (handle.sandbox().clone(), handle.generation());
    Ok(show::ok(&CheckpointCheck { sandbox, generation, can: obstacles.is_empty(), obstacles, closes }))
}
