//! What goes in and out of an execution: output as lines of JSON, input as bytes.

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Response, StatusCode};
use viv_api::error::ErrorCode;
use viv_api::execution::{Execution, ExecutionStarted, InputTaken, OutputAlive, OutputEnd, OutputLine};
use viv_api::header::{BYTES, NDJSON};
use viv_api::path;
use viv_api::query::{InputQuery, OfGeneration, OutputQuery};
use viv_core::exec::{ExecState, ExecStatus, OutputEvent};
use viv_core::execution::Execution as Row;
use viv_core::{ExecutionId, Generation, SandboxId};
use viv_engine::{Engine, EngineError, Handle};
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
    Ok(lines(&state.clone(), until_end, |out| told(state, target, execution, query, source, out)))
}

/// The answer to a start that is followed: what was started, and its output from the first byte on.
///
/// The start is over by now, and nothing of the execution hangs on who reads here (X2). What goes wrong from here on ends
/// the stream without its last line: the reader knows the id, attaches with it, and is told why.
pub(super) fn from_start(
    state: ServerState,
    target: Target,
    started: Execution,
    until_end: UntilEnd,
) -> Response<Body> {
    let mut response = lines(&state.clone(), until_end, |out| async move {
        let (execution, sandbox) = (started.id.clone(), started.sandbox.clone());
        let mut reader = Reader::of(&state, &sandbox, &execution);
        if out.give(line(&ExecutionStarted { started: Box::new(started) })).await.is_err() {
            return;
        }
        let query = OutputQuery { follow: true, ..OutputQuery::default() };
        match open(&state, &target, None, &execution, &query).await {
            Ok(source) => {
                reader.hears = false;
                told(state, target, execution, query, source, out).await;
            }
            Err(refusal) => broke_off(&sandbox, &refusal.0),
        }
    });
    *response.status_mut() = StatusCode::CREATED;
    response
}

/// Lines of an output, and signs of life between them.
fn lines<F>(state: &ServerState, until_end: UntilEnd, make: impl FnOnce(Pieces) -> F) -> Response<Body>
where
    F: Future<Output = ()> + Send + 'static,
{
    let clock = state.clone();
    let alive = move || line(&OutputLine::Alive(OutputAlive { alive_at_ms: clock.engine().now_ms() })).into();
    pieces(NDJSON, (state.bounds().heartbeat, alive), until_end, make)
}

/// Where an output comes from.
enum Source {
    /// Nowhere yet.
    Queued(Row),
    /// Nobody who could be asked now: it stands still with its sandbox.
    Resting(Row),
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
            Err(error) => {
                // Nobody inside answers while memory is saved. Who follows waits for it.
                let row = state.engine().execution_row(handle.sandbox(), execution).await?;
                let row = row.filter(|row| query.follow && query.search.is_none() && row.is_open());
                return match row {
                    Some(row) if state.engine().is_at_rest(&row.sandbox).await? => Ok(Source::Resting(row)),
                    Some(_) | None => Err(error.into()),
                };
            }
        },
        Err(error @ EngineError::NotRunning { .. }) => error,
        Err(error) => return Err(error.into()),
    };
    let aim = target.living(state, None).await?;
    let Some(row) = state.engine().execution_row(aim.sandbox(), execution).await? else { return Err(refused.into()) };
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

/// Hands on what comes, after what has to be waited for. What stands still, with its memory or frozen, has not ended: who
/// follows it is told no end, and hears more when it goes on (X5).
async fn told(
    state: ServerState,
    target: Target,
    execution: ExecutionId,
    mut query: OutputQuery,
    mut source: Source,
    out: Pieces,
) {
    let follows = query.follow && query.search.is_none();
    let engine = state.engine();
    loop {
        let (sandbox, is_queued) = match source {
            Source::Queued(row) | Source::Resting(row) if !follows => return give_row(&state, &row, &out).await,
            Source::Queued(row) => (row.sandbox, true),
            Source::Resting(row) => (row.sandbox, false),
            Source::Handle { handle, source, frozen } => {
                let copy = Copy { state: &state, handle: &handle, frozen, follows, out: &out };
                if copy.is_told(&execution, source, &mut query).await {
                    return;
                }
                (handle.sandbox().clone(), false)
            }
            Source::Row { row, mut source } => {
                while let Ok(Some(event)) = source.next().await {
                    go_on_after(&mut query, &event);
                    if out.give(line(&OutputLine::from_event(event, |_| show::recorded(&state, &row)))).await.is_err() {
                        return;
                    }
                }
                if !follows || !row.is_open() {
                    return give_row(&state, &row, &out).await;
                }
                (row.sandbox, false)
            }
        };
        let goes_on = if is_queued {
            engine.wait_started(&sandbox, &execution).await.map(|_| true)
        } else {
            engine.wait_awake(&sandbox, &execution).await
        };
        match goes_on {
            Ok(true) => {}
            // It broke off. The reader attaches again, and is told why.
            Ok(false) => return,
            Err(error) => return broke_off(&sandbox, &error),
        }
        source = match open(&state, &target, None, &execution, &query).await {
            Ok(source) => source,
            // The same.
            Err(_) => return,
        };
    }
}

fn broke_off(sandbox: &SandboxId, error: &impl std::fmt::Display) {
    tracing::debug!(component = "server", %sandbox, %error, "output broke off");
}

/// Whoever opens it again begins after this.
fn go_on_after(query: &mut OutputQuery, event: &OutputEvent) {
    let offset = match event {
        OutputEvent::Chunk { offset, data, .. } => offset + data.len() as u64,
        OutputEvent::Cut { to, .. } => *to,
        OutputEvent::End(_) => return,
    };
    (query.offset, query.tail) = (Some(viv_api::bound::Offset::nearest(offset)), None);
}

/// The last line of an output that nobody runs.
async fn give_row(state: &ServerState, row: &Row, out: &Pieces) {
    let end = OutputEnd { end: Box::new(show::recorded(state, row)) };
    // Nobody is left to be told that nobody reads.
    let _ = out.give(line(&OutputLine::End(end))).await;
}

/// Who hears how it ends, for as long as he reads. If he leaves before, the daemon listens in his place, so that its end is
/// told though nobody asks (O7, X1).
struct Reader {
    engine: Engine,
    sandbox: SandboxId,
    execution: ExecutionId,
    hears: bool,
}

impl Reader {
    fn of(state: &ServerState, sandbox: &SandboxId, execution: &ExecutionId) -> Self {
        let (sandbox, execution) = (sandbox.clone(), execution.clone());
        Self { engine: state.engine().clone(), sandbox, execution, hears: true }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.hears {
            self.engine.hear_out(self.sandbox.clone(), self.execution.clone());
        }
    }
}

/// From who runs it to who reads it.
struct Copy<'a> {
    state: &'a ServerState,
    handle: &'a Handle,
    frozen: bool,
    follows: bool,
    out: &'a Pieces,
}

impl Copy<'_> {
    /// Hands on what comes. Whether there is nothing more to tell, or nobody to tell it to; else it stands still, or the
    /// source failed, and the stream ends without its last line unless it goes on.
    async fn is_told(
        &self,
        execution: &ExecutionId,
        mut source: Box<dyn OutputStream>,
        query: &mut OutputQuery,
    ) -> bool {
        let mut reader = Reader::of(self.state, self.handle.sandbox(), execution);
        reader.hears = self.follows;
        loop {
            let event = match source.next().await {
                Ok(Some(event)) => event,
                Ok(None) => return true,
                Err(error) => {
                    broke_off(self.handle.sandbox(), &error);
                    return false;
                }
            };
            go_on_after(query, &event);
            let piece = match event {
                OutputEvent::End(status) => {
                    let end = self.end(&status).await;
                    reader.hears &= !status.state.is_final();
                    if self.follows && !end.state.is_final() {
                        return false;
                    }
                    OutputLine::End(OutputEnd { end: Box::new(end) })
                }
                chunk @ (OutputEvent::Chunk { .. } | OutputEvent::Cut { .. }) => {
                    OutputLine::from_event(chunk, |_| unreachable!("it is no end"))
                }
            };
            if self.out.give(line(&piece)).await.is_err() {
                return true;
            }
        }
    }

    /// An end as it is known. Who ran it does not know what the record does: that it goes on with its memory, or that it
    /// does not (X5).
    async fn end(&self, status: &ExecStatus) -> Execution {
        let Self { state, handle, frozen, .. } = self;
        handle.heard(status);
        let row = state.engine().execution_row(handle.sandbox(), &status.id).await.ok().flatten();
        let recorded = row.as_ref().filter(|row| match status.state {
            ExecState::Running | ExecState::Suspended => !row.is_open(),
            ExecState::Lost { .. } => row.status().is_some_and(|status| status.state == ExecState::Suspended),
            ExecState::Exited { .. }
            | ExecState::Signalled { .. }
            | ExecState::OomKilled
            | ExecState::Failed { .. }
            | ExecState::Cancelled
            | ExecState::TimedOut => false,
        });
        match recorded {
            Some(row) => show::recorded(state, row),
            None => show::execution(state, handle.sandbox(), handle.generation(), status, *frozen, row.as_ref()),
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
