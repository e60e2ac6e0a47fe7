//! What those inside a sandbox ask for, answered in the words of the API.
//!
//! Invariants: what is asked is read as strictly as a body of HTTP; it reaches the sandbox that it came from and nothing
//! else; an answer tells what that sandbox's own schedules are, and no value of their environment (S6).

use std::sync::Arc;

use serde::Serialize;
use viv_api::bound::ScheduleRef;
use viv_api::error::{ApiError, ErrorCode};
use viv_api::inside::{InsideAnswer, InsideRequest};
use viv_api::schedule::{CreateSchedule, Schedule};
use viv_core::schedule::SCHEDULES_MAX;
use viv_engine::{Engine, FromInside, Inside};
use viv_store::ScheduleQuery;

use crate::refusal::Refusal;
use crate::route::schedules::{shown, wanted};

/// Longest answer: a sandbox's agent takes no more.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Who answers those inside.
pub fn inside() -> Inside {
    Inside(Arc::new(|engine: Engine, asked: FromInside| Box::pin(async move { answer(&engine, &asked).await })))
}

async fn answer(engine: &Engine, asked: &FromInside) -> String {
    let request = match viv_api::request::parse::<InsideRequest>(asked.body.as_bytes()) {
        Ok(request) => request,
        Err(error) if error.hint.is_some() => return refused(error),
        Err(error) => return refused(error.hint("viv --help says what can be asked for inside a sandbox")),
    };
    match request {
        InsideRequest::ScheduleAdd(new) => told(add(engine, asked, &new).await),
        InsideRequest::ScheduleList(_) => told(list(engine, asked).await),
        InsideRequest::ScheduleRemove(which) => told(remove(engine, asked, &which.schedule).await),
    }
}

fn told<T: Serialize>(done: Result<T, Refusal>) -> String {
    let value = match done {
        Ok(value) => value,
        Err(Refusal(error)) => return refused(fitting(error)),
    };
    let text = serde_json::to_string(&InsideAnswer::Ok(value)).unwrap_or_default();
    // The agent has it in a string of JSON, in which some characters take two.
    if text.is_empty() || text.len() > ANSWER_BYTES_MAX / 2 {
        let error = ApiError::new(ErrorCode::PayloadTooLarge, "the answer is too long for the inside of a sandbox");
        return refused(error.hint("viv schedule ls outside of it shows them all"));
    }
    text
}

fn refused(error: ApiError) -> String {
    let answer: InsideAnswer<()> = InsideAnswer::Error(error);
    serde_json::to_string(&answer).unwrap_or_default()
}

/// Hints that help inside: no operator is there.
fn fitting(error: ApiError) -> ApiError {
    match error.code {
        ErrorCode::QuotaExceeded => error.hint("viv schedule rm takes one away"),
        ErrorCode::Draining | ErrorCode::ShuttingDown | ErrorCode::StoreUnavailable => error.hint("try again later"),
        _ => error,
    }
}

async fn add(engine: &Engine, asked: &FromInside, new: &CreateSchedule) -> Result<Schedule, Refusal> {
    Ok(shown(&engine.create_schedule_inside(asked, wanted(new)).await?))
}

async fn list(engine: &Engine, asked: &FromInside) -> Result<Vec<Schedule>, Refusal> {
    let sandbox = Some(asked.sandbox.id.clone());
    let query = ScheduleQuery { sandbox, limit: SCHEDULES_MAX as usize, ..ScheduleQuery::default() };
    Ok(engine.schedules(&query).await?.items.iter().map(shown).collect())
}

async fn remove(engine: &Engine, asked: &FromInside, which: &ScheduleRef) -> Result<(), Refusal> {
    Ok(engine.remove_schedule_inside(asked, &which.id()).await?)
}
