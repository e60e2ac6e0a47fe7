//! What those inside a sandbox may ask for, and how they are answered: the same words as over HTTP, for less.
//!
//! Nothing here names a sandbox: it is the one that the request came from.

use serde::{Deserialize, Serialize};

use crate::bound::ScheduleRef;
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
