//! What goes in and out of an execution: output as lines of JSON, input as bytes.

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use viv_api::error::ErrorCode;
use viv_api::execution::{Execution, InputTaken, OutputAlive, OutputEnd, OutputLine};
use viv_api::header::{BYTES, NDJSON};
use viv_api::path;
use viv_api::query::{InputQuery, OfGeneration, OutputQuery};
use viv_core::exec::OutputEvent;
use viv_core::execution::Execution as Row;
use viv_core::{ExecutionId, Generation};
use viv_engine::{EngineError, Handle};
use viv_provider::{OutputStream, ProviderError};

use super::executions::{USUAL, is_frozen};
use super::select::{TAIL_BYTES, Told, Younger, found, tail_offset};
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
    let source = open(&state, &target, generation, &execution, &query).await?;
    let clock = state.clone();
    let alive = move || line(&OutputLine::Alive(OutputAlive { alive_at_ms: clock.engine().now_ms() })).into();
    let every = state.bounds().heartbeat;
    Ok(pieces(NDJSON, (every, alive), until_end, |out| told(state, target, query, source, out)))
}

/// Where an output comes from.
enum Source {
    /// Nowhere yet.
    Queued(Row),
    /// Who runs it, or what was kept of an instance that is still there.
    Handle { handle: Handle, source: Box<dyn OutputStream>, frozen: bool },
    /// What is kept of one whose instance is gone; nothing, if that is what there is.
    Row { row: Row, source: Told },
}

/// Finds an output: at who runs it, or ran it and is still there; else by its row.
async fn open(
    state: &ServerState,
    target: &Target,
    generation: Option<Generation>,
    execution: &ExecutionId,
    query: &OutputQuery,
) -> Answer<Source> {
    let refused = match state.engine().look_into(&target.project, &target.which, generation).await {
        Ok(handle) => match begin(&handle, execution, query).await {
            Ok(source) => {
                let frozen = is_frozen(state, &handle).await;
                return Ok(Source::Handle { handle, source, frozen });
            }
            Err(error @ EngineError::Provider(ProviderError::NotFound { .. } | ProviderError::Absent)) => error,
            Err(error) => return Err(error.into()),
        },
        Err(error @ EngineError::NotRunning { .. }) => error,
        Err(error) => return Err(error.into()),
    };
    let sandbox = target.living(state, None).await?;
    let Some(row) = state.engine().execution_row(&sandbox, execution).await? else { return Err(refused.into()) };
    if row.queued().is_some() {
        return Ok(Source::Queued(row));
    }
    let kept = state.engine().kept_output(&row.sandbox, execution).await?.unwrap_or_default();
    let mut events = super::select::told(|offset| kept.since(offset).collect(), query).await;
    // Of what is not there at all, not even its cut is known.
    let offset = query.offset.map_or(0, viv_api::bound::Offset::get);
    let missing = row.status().map(|status| status.output_bytes).filter(|bytes| *bytes > offset);
    if let Some(to) = missing.filter(|_| kept.events.is_empty() && query.search.is_none()) {
        events.push_back(OutputEvent::Cut { from: offset, to });
    }
    Ok(Source::Row { row, source: Told(events) })
}

/// Attaches where it is asked for.
pub(super) async fn begin(
    handle: &Handle,
    execution: &ExecutionId,
    query: &OutputQuery,
) -> Result<Box<dyn OutputStream>, EngineError> {
    let offset = query.offset.map_or(0, viv_api::bound::Offset::get);
    if let Some(text) = &query.search {
        let mut source = Younger::of(handle.attach(execution, offset, false).await?, query.since_ms);
        let (mut lines, end) = found(source.as_mut(), text.as_str()).await.map_err(EngineError::Provider)?;
        lines.extend(end.map(OutputEvent::End));
        return Ok(Box::new(Told(lines)));
    }
    let offset = match query.tail {
        None => offset,
        Some(lines) => {
            let bytes = handle.execution(execution).await?.output_bytes;
            let mut source = handle.attach(execution, bytes.saturating_sub(TAIL_BYTES), false).await?;
            tail_offset(source.as_mut(), lines.get()).await.map_err(EngineError::Provider)?
        }
    };
    Ok(Younger::of(handle.attach(execution, offset, query.follow).await?, query.since_ms))
}

/// Hands on what comes, after what has to be waited for.
async fn told(state: ServerState, target: Target, query: OutputQuery, source: Source, out: Pieces) {
    let source = match source {
        Source::Queued(row) if query.follow && query.search.is_none() => {
            if let Err(error) = state.engine().wait_started(&row.sandbox, &row.id).await {
                return tracing::debug!(component = "server", %error, "output broke off");
            }
            match open(&state, &target, None, &row.id, &query).await {
                Ok(source) => source,
                // The reader attaches again, and is told why.
                Err(_) => return,
            }
        }
        source => source,
    };
    match source {
        Source::Queued(row) => give_row(&state, &row, &out).await,
        Source::Handle { handle, source, frozen } => copied(state, handle, source, frozen, out).await,
        Source::Row { row, mut source } => {
            while let Ok(Some(event)) = source.next().await {
                if out.give(line(&OutputLine::from_event(event, |_| show::recorded(&state, &row)))).await.is_err() {
                    return;
                }
            }
            give_row(&state, &row, &out).await;
        }
    }
}

/// The last line of an output that nobody runs.
async fn give_row(state: &ServerState, row: &Row, out: &Pieces) {
    let end = OutputEnd { end: Box::new(show::recorded(state, row)) };
    // Nobody is left to be told that nobody reads.
    let _ = out.give(line(&OutputLine::End(end))).await;
}

/// Hands on what comes. A source that fails ends the stream without its last line: the reader attaches again.
async fn copied(state: ServerState, handle: Handle, mut source: Box<dyn OutputStream>, frozen: bool, out: Pieces) {
    loop {
        match source.next().await {
            Ok(Some(event)) => {
                let row = match &event {
                    OutputEvent::End(status) => {
                        handle.heard(status);
                        let row = state.engine().execution_row(handle.sandbox(), &status.id).await;
                        row.ok().flatten()
                    }
                    OutputEvent::Chunk { .. } | OutputEvent::Cut { .. } => None,
                };
                let end = |status| -> Execution {
                    show::execution(&state, handle.sandbox(), handle.generation(), &status, frozen, row.as_ref())
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
    let data = whole(body, &headers, state.bounds().input_bytes_max, state.bounds()).await?;
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
