//! Schedules: commands that are run in a sandbox at given times (L17).

use serde::{Deserialize, Serialize};
use viv_core::exec::ExecSpec;
use viv_core::{ExecutionId, SandboxId, ScheduleId};

use crate::bound::{Argument, Argv, BoundError, CommandEnv, CronText, ExecutionMs, Path, UserName, ZoneName};

/// What becomes of occurrences at which no daemon was there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum MissedRuns {
    /// They are left out.
    #[default]
    Skip,
    /// One run stands for all of them.
    Once,
    /// Each is run, one after the other: the latest 24 of the last day.
    All,
}

/// A schedule to make. Answered with 201 when it is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "cron": "*/15 9-17 * * mon-fri", "zone": "Europe/Berlin", "argv": ["sh", "-c", "./sync.sh"], "missed": "once"
})))]
#[serde(deny_unknown_fields)]
pub struct CreateSchedule {
    /// When: five fields (minute, hour, day of month, month, day of week), or a word like `@daily`.
    pub cron: CronText,
    /// By which clock: a name of the IANA database. UTC when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<ZoneName>,
    /// Program and arguments.
    pub argv: Argv,
    /// Added to the sandbox's own environment. Values are not told back (S6).
    #[serde(default)]
    pub env: CommandEnv,
    /// Where to start; the sandbox's working directory when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom; root of the sandbox when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// End a run after this long; five minutes when absent (X1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<ExecutionMs>,
    /// What becomes of occurrences at which no daemon was there.
    #[serde(default)]
    pub missed: MissedRuns,
    /// Whether it comes due; it does when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

impl CreateSchedule {
    /// A command of these words at these times, with everything else by default.
    pub fn of<T: Into<String>>(cron: &str, words: impl IntoIterator<Item = T>) -> Result<Self, BoundError> {
        let words = words.into_iter().map(Argument::new).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            cron: CronText::new(cron)?,
            zone: None,
            argv: Argv::new(words)?,
            env: CommandEnv::default(),
            cwd: None,
            user: None,
            limit_ms: None,
            missed: MissedRuns::default(),
            enabled: None,
        })
    }

    /// As a provider is told it. `default_limit_ms` is what holds when nothing was said.
    pub fn to_spec(&self, default_limit_ms: u64) -> ExecSpec {
        ExecSpec {
            argv: self.argv.to_vec(),
            env: self.env.to_map(),
            cwd: self.cwd.as_ref().map(Path::to_string),
            user: self.user.as_ref().map(UserName::to_string),
            limit_ms: Some(self.limit_ms.map_or(default_limit_ms, ExecutionMs::get)),
            ..ExecSpec::default()
        }
    }
}

/// What is to be otherwise about a schedule; what is not said stays. A run that is under way goes on as it was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"argv": ["sh", "-c", "./sync.sh --all"], "enabled": true})))]
#[serde(default, deny_unknown_fields)]
pub struct ChangeSchedule {
    /// When.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cron: Option<CronText>,
    /// By which clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<ZoneName>,
    /// Program and arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Argv>,
    /// All that is added to the sandbox's own environment: what was added before is not any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<CommandEnv>,
    /// Where to start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// End a run after this long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<ExecutionMs>,
    /// What becomes of occurrences at which no daemon was there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<MissedRuns>,
    /// Whether it comes due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// A schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Schedule {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: ScheduleId,
    /// Whose it is.
    pub project: String,
    /// Where it runs.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// When.
    pub cron: String,
    /// By which clock.
    pub zone: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The names of what is added to the environment; the values are not told (S6).
    pub env: Vec<String>,
    /// A run is ended after this long.
    pub limit_ms: Option<u64>,
    /// What becomes of occurrences at which no daemon was there.
    pub missed: MissedRuns,
    /// Whether it comes due.
    pub enabled: bool,
    /// When it was made.
    pub created_at_ms: u64,
    /// Who made it.
    pub created_by: String,
    /// When it is due next; nothing while it is disabled.
    pub next_at_ms: Option<u64>,
    /// What is under way.
    pub running: Option<ScheduleRun>,
    /// What came last.
    pub last: Option<ScheduleLast>,
    /// How many occurrences were run.
    pub runs: u64,
    /// How many were left out.
    pub skipped: u64,
}

/// A run that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScheduleRun {
    /// When it was due, or was asked for.
    pub at_ms: u64,
    /// Since when it is under way.
    pub began_at_ms: u64,
    /// Its execution, as soon as it is started.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
}

/// What came of an occurrence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ScheduleLast {
    /// When it was due, or was asked for.
    pub at_ms: u64,
    /// When it was settled.
    pub ended_at_ms: u64,
    /// Its execution, if it was started.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
    /// `exited`, `signalled`, `oom_killed`, `timed_out`, `cancelled`, `lost`, `not_started` or `skipped`.
    pub outcome: String,
    /// The code, of what exited.
    pub exit_code: Option<i32>,
    /// Why it was left out, was lost, or could not be started.
    pub why: Option<String>,
}
