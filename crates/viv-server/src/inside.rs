//! What those inside a sandbox ask for, answered in the words of the API.
//!
//! Invariants: what is asked is read as strictly as a body of HTTP; it reaches the sandbox that it came from and nothing
//! else; an answer tells what that sandbox's own schedules are, and no value of their environment; credentials of a task
//! are told with a grant, and otherwise never (S6).

use std::sync::Arc;

use serde::Serialize;
use viv_api::bound::ScheduleRef;
use viv_api::error::{ApiError, ErrorCode};
use viv_api::inside::{AskGate, EndEffect, GateGrant, InsideAnswer, InsideRequest, ReportStep};
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
        InsideRequest::TaskStep(report) => told(step(engine, asked, report).await),
        InsideRequest::TaskGate(gate) => told(grant(engine, asked, &gate).await),
        InsideRequest::TaskEffectEnded(end) => told(effect_ended(engine, asked, end).await),
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

/// Runs are few.
fn run_of(run: viv_api::bound::RunNumber) -> u32 {
    u32::try_from(run.get()).unwrap_or(u32::MAX)
}

async fn step(engine: &Engine, asked: &FromInside, report: ReportStep) -> Result<(), Refusal> {
    let ReportStep { task, run, steps, note, session } = report;
    let said = (note.map(|note| note.to_string()), session.map(|session| session.to_string()));
    engine.report_inside(asked, (&task.id(), run_of(run)), steps.get(), said).await?;
    Ok(())
}

async fn grant(engine: &Engine, asked: &FromInside, gate: &AskGate) -> Result<GateGrant, Refusal> {
    let effect = gate.effect.as_ref().map(viv_api::bound::EffectName::as_str);
    let granted = engine.gate_inside(asked, (&gate.task.id(), run_of(gate.run)), effect).await?;
    Ok(GateGrant { grant: granted.grant.to_string(), env: granted.credentials })
}

async fn effect_ended(engine: &Engine, asked: &FromInside, end: EndEffect) -> Result<(), Refusal> {
    let EndEffect { task, run, grant, failed } = end;
    let failed = failed.map(|failed| failed.to_string());
    engine.effect_ended_inside(asked, (&task.id(), run_of(run)), &grant.id(), failed).await?;
    Ok(())
}
