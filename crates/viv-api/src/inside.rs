//! What those inside a sandbox may ask for, and how they are answered: the same words as over HTTP, for less.
//!
//! Nothing here names a sandbox: it is the one that the request came from.

use serde::{Deserialize, Serialize};

use crate::bound::{EffectName, GrantRef, Note, ReportedSteps, RunNumber, ScheduleRef, SessionText, TaskRef};
use crate::error::ApiError;
use crate::schedule::CreateSchedule;

/// What is asked for, as JSON: `{"schedule_add": {…}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InsideRequest {
    /// Make a schedule. Answered with it.
    ScheduleAdd(Box<CreateSchedule>),
    /// List schedules. Answered with all that the sandbox has.
    ScheduleList(Nothing),
    /// Take one away. Answered with `null`.
    ScheduleRemove(RemoveSchedule),
    /// Say how far a task is. Answered with `null`.
    TaskStep(ReportStep),
    /// Ask for an effect of a task to begin. Answered with a [`GateGrant`].
    TaskGate(AskGate),
    /// Say what came of it. Answered with `null`.
    TaskEffectEnded(EndEffect),
}

/// How far a task is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReportStep {
    /// Which.
    pub task: TaskRef,
    /// Which run of it.
    pub run: RunNumber,
    /// How many steps more.
    pub steps: ReportedSteps,
    /// In words.
    #[serde(default)]
    pub note: Option<Note>,
    /// The agent's own session (K6).
    #[serde(default)]
    pub session: Option<SessionText>,
}

/// An effect that is to begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskGate {
    /// Of which task.
    pub task: TaskRef,
    /// Of which run of it.
    pub run: RunNumber,
    /// Which; the only one that it declared, when nothing is said.
    #[serde(default)]
    pub effect: Option<EffectName>,
}

/// An effect that may begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateGrant {
    /// The grant.
    pub grant: String,
    /// What its command alone is handed.
    pub env: std::collections::BTreeMap<String, String>,
}

/// What came of an effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndEffect {
    /// Of which task.
    pub task: TaskRef,
    /// Of which run of it.
    pub run: RunNumber,
    /// Which was granted.
    pub grant: GrantRef,
    /// Why it failed, if it did.
    #[serde(default)]
    pub failed: Option<Note>,
}

/// What needs no more words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// A schedule to take away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveSchedule {
    /// Its id.
    pub schedule: ScheduleRef,
}

/// What is answered, as JSON: `{"ok": …}` or `{"error": {…}}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InsideAnswer<T> {
    /// It was done, and is durable.
    Ok(T),
    /// It was not.
    Error(ApiError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_what_is_known_is_read() {
        let read = |text: &str| crate::request::parse::<InsideRequest>(text.as_bytes());
        assert!(read(r#"{"schedule_list": {}}"#).is_ok());
        assert!(read(r#"{"schedule_add": {"cron": "@daily", "argv": ["true"]}}"#).is_ok());
        assert!(read(r#"{"task_gate": {"task": "tsk_a", "run": 1}}"#).is_ok());
        for wrong in [
            "",
            "null",
            "[]",
            r#""schedule_list""#,
            r#"{"schedule_list": {"sandbox": "sbx_other"}}"#,
            r#"{"schedule_list": {}, "schedule_remove": {"schedule": "sch_a"}}"#,
            r#"{"schedule_add": {"cron": "@daily", "argv": ["true"], "sandbox": "sbx_other"}}"#,
            r#"{"schedule_add": {"cron": "@daily", "argv": []}}"#,
            r#"{"schedule_remove": {"schedule": "../sch_a"}}"#,
            r#"{"stop": {}}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
