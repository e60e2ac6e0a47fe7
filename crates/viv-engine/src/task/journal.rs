//! Lines about tasks. What they run, bring along or are handed is nobody's business (S6).

use serde_json::{Value, json};
use viv_core::lifecycle::Actor;
use viv_core::task::{Task, TaskEvent, TaskExecution};
use viv_store::NewLine;

use super::actor;

/// A line about a task.
pub(super) fn line(task: &Task, kind: &str, by: Actor, now_ms: u64, mut data: Value) -> NewLine {
    data["task"] = json!(task.id);
    data["run"] = json!(task.run);
    NewLine {
        at_ms: now_ms,
        project: Some(task.project.clone()),
        sandbox: Some(task.sandbox.clone()),
        generation: task.generation,
        kind: kind.to_owned(),
        from: None,
        to: None,
        cause: None,
        by,
        data,
    }
}

/// What is told about a change.
pub(super) fn lines(before: &Task, next: &Task, event: &TaskEvent, now_ms: u64) -> Vec<NewLine> {
    let us = || actor(&next.id);
    let by = match event {
        TaskEvent::Stop { by } | TaskEvent::Marked { by, .. } => by.clone(),
        _ => us(),
    };
    let mut lines = Vec::new();
    let mut tell = |kind: &str, by: Actor, data: Value| lines.push(line(next, kind, by, now_ms, data));
    match event {
        TaskEvent::TakenUp => tell("task.taken_up", us(), json!({ "deadline_ms": next.deadline_ms })),
        TaskEvent::Entered { came, .. } => tell("task.entered", us(), json!({ "came": came })),
        TaskEvent::Moved { to } => tell("task.moved", us(), json!({ "from": before.sandbox, "to": to })),
        TaskEvent::Prepared => tell("task.prepared", us(), json!({})),
        TaskEvent::Started { execution } => tell("task.started", us(), json!({ "execution": execution })),
        TaskEvent::StepEnded { step, ended } => tell("task.step_ended", us(), json!({ "step": step, "ended": ended })),
        TaskEvent::Stop { .. } => {
            let in_flight = next.stop.as_ref().and_then(|stop| stop.effect_in_flight.clone());
            tell("task.stop_requested", by.clone(), json!({ "effect_in_flight": in_flight }));
        }
        TaskEvent::Marked { mistaken, why, .. } => {
            let data = json!({ "mistaken": mistaken, "state": next.state, "why": why });
            tell("task.marked", by.clone(), data);
        }
        TaskEvent::Killed { .. } => {
            let ended = |one: &TaskExecution| json!({ "execution": one.id, "ended": one.ended });
            let ended: Vec<Value> = next.executions.iter().map(ended).collect();
            tell("task.killed", us(), json!({ "executions": next.executions.len(), "ended": ended }));
        }
        TaskEvent::Starting { .. }
        | TaskEvent::PrepareEnded { .. }
        | TaskEvent::Output
        | TaskEvent::Reported { .. }
        | TaskEvent::Asked { .. }
        | TaskEvent::EffectEnded { .. }
        | TaskEvent::LimitPassed { .. }
        | TaskEvent::NotPrepared { .. }
        | TaskEvent::Gone { .. }
        | TaskEvent::Cut
        | TaskEvent::Confirmed
        | TaskEvent::Continued { .. } => {}
    }
    for (at, grant) in next.grants.iter().enumerate() {
        let was = before.grants.get(at);
        if was.is_none() {
            tell("task.effect_granted", us(), json!({ "effect": grant.effect, "grant": grant.request }));
        } else if was.is_some_and(|was| was.outcome != grant.outcome) {
            let data = json!({ "effect": grant.effect, "grant": grant.request, "result": grant.outcome });
            tell("task.effect_ended", us(), data);
        }
    }
    if let Some(ending) = next.ending.as_ref().filter(|_| before.ending.is_none()) {
        let data = json!({ "outcome": ending.outcome, "cause": ending.cause, "message": ending.message });
        tell("task.ending", by, data);
    }
    if next.state.is_final() && !before.state.is_final() {
        tell("task.ended", us(), json!({ "state": next.state, "cause": next.ending.as_ref().map(|end| end.cause) }));
    }
    lines
}
