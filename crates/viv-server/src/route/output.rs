//! What goes in and out of an execution: output as lines of JSON, input as bytes.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use viv_api::error::ErrorCode;
use viv_api::execution::{Execution, InputTaken, OutputAlive, OutputLine};
use viv_api::header::{BYTES, NDJSON};
use viv_api::path;
use viv_api::query::{InputQuery, OfGeneration, OutputQuery};
use viv_core::ExecutionId;
use viv_engine::Handle;
use viv_provider::OutputStream;

use super::executions::{USUAL, is_frozen};
use crate::api::{Method, Op, Table};
use crate::auth::Need;
use crate::body::whole;
use crate::extract::{Params, Query, Target, has_type, unsupported_media};
use crate::refusal::Answer;
use crate::show;
use crate::state::ServerState;
use crate::stream::{Pieces, UntilEnd, line, pieces, regardless};

pub(super) fn tell(table: &mut impl Table) {
    let op = |id, need, summary| Op::new("executions", id, need, summary).of_sandbox().fails(&USUAL);
    let output_op = op("getOutput", Need::Read, "What an execution wrote, from an offset on")
        .query::<OutputQuery>()
        .gives_stream("One OutputLine as JSON in each line; the last one is the end.", NDJSON);
    table.on(Method::Get, path::OUTPUT, output, output_op);
    let input_op = op("giveInput", Need::Change, "Give an execution something to read")
        .query::<InputQuery>()
        .bytes(BYTES)
        .gives::<InputTaken>(200, "How much was taken in all.");
    table.on(Method::Post, path::INPUT, input, input_op);
    let close_op = op("closeInput", Need::Change, "There is no more to read")
        .query::<OfGeneration>()
        .gives_nothing("It is closed.")
        .fails(&[ErrorCode::Conflict]);
    table.on(Method::Post, path::INPUT_CLOSE, close, close_op);
}

async fn output(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OutputQuery>,
    until_end: UntilEnd,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().look_into(&target.project, &target.which, generation).await?;
    let offset = query.offset.map_or(0, viv_api::bound::Offset::get);
    let source = handle.attach(&execution, offset, query.follow).await?;
    let frozen = is_frozen(&state, &handle).await;
    let clock = state.clone();
    let alive = move || line(&OutputLine::Alive(OutputAlive { alive_at_ms: clock.engine().now_ms() })).into();
    let every = state.bounds().heartbeat;
    Ok(pieces(NDJSON, (every, alive), until_end, |out| copied(state, handle, source, frozen, out)))
}

/// Hands on what comes. A source that fails ends the stream without its last line: the reader attaches again.
async fn copied(state: ServerState, handle: Handle, mut source: Box<dyn OutputStream>, frozen: bool, out: Pieces) {
    loop {
        match source.next().await {
            Ok(Some(event)) => {
                let end = |status| -> Execution {
                    show::execution(&state, handle.sandbox(), handle.generation(), &status, frozen)
                };
                if out.give(line(&OutputLine::from_event(event, end))).await.is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(component = "server", sandbox = %handle.sandbox(), %error, "output broke off");
                return;
            }
        }
    }
}

async fn input(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<InputQuery>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    if !has_type(&headers, BYTES) {
        return Err(unsupported_media(BYTES));
    }
    let data = whole(body, &headers, state.bounds().input_bytes_max, state.bounds().body_idle).await?;
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    let offset = query.offset.get();
    let taken = regardless(async move { handle.write_stdin(&execution, offset, &data).await });
    Ok(show::ok(&InputTaken { stdin_bytes: taken.await? }))
}

async fn close(
    State(state): State<ServerState>,
    target: Target,
    params: Params,
    Query(query): Query<OfGeneration>,
) -> Answer {
    let execution: ExecutionId = params.get("execution")?;
    let generation = target.generation(&state, query.generation).await?;
    let handle = state.engine().work_in(&target.project, &target.which, generation).await?;
    regardless(async move { handle.close_stdin(&execution).await }).await?;
    Ok(show::nothing())
}
