//! Tasks: commands in a sandbox that end in exactly one way, and end when they are told to (K1 to K7).

use serde::{Deserialize, Serialize};
use viv_core::exec::ExecSpec;
use viv_core::task::StepChanges;
use viv_core::{ExecutionId, SandboxId, TaskId};

use crate::bound::{
    Argument, Argv, BoundError, CommandEnv, EffectName, ExecutionMs, FileMode, FileText, GitReference, GitUrl, Note,
    Path, ReportsMax, SandboxRef, TaskEffects, TaskFiles, TaskMs, TaskSteps, UserName, WaitMs,
};
use crate::execution::ExecutionState;
use crate::sandbox::CreateSandbox;

/// A task to run.
///
/// Answered with 201 at once, when it is durable; with `wait_ms`, when it is over, or that long has passed. It names a
/// sandbox that is there, or of what one is made; with a name, that which has it is used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "create": {"image": "host", "labels": {"agent": "coder"}},
    "argv": ["./agent.sh", "fix the build"],
    "limits": {"inactivity_ms": 60_000, "total_ms": 300_000},
    "effects": [{"name": "push"}],
    "keep_alive": true
})))]
#[serde(default, deny_unknown_fields)]
pub struct CreateTask {
    /// The sandbox that it runs in, which is made to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxRef>,
    /// Of what one is made, when none is named. With `keep_alive` it is persistent unless said otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub create: Option<Box<CreateSandbox>>,
    /// Program and arguments: the one step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Argv>,
    /// Several steps, one after the other, instead.
    pub steps: TaskSteps,
    /// Added to the environment of every step. Values are not told back (S6).
    pub env: CommandEnv,
    /// Where steps start; where the source is, or the sandbox's working directory, when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom; root of the sandbox when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// A repository that is cloned before the first step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<TaskSource>,
    /// Files that are written before the first step.
    pub files: TaskFiles,
    /// When it ends against its will.
    pub limits: TaskLimits,
    /// What it may do to the world, through `viv gate` (K5).
    pub effects: TaskEffects,
    /// Variables that only a command behind the gate is handed. Values are not told back (S6).
    pub credentials: CommandEnv,
    /// Whether its sandbox stays when it is over, so that it can be continued (K6).
    pub keep_alive: bool,
    /// How long to wait until it is over; at once when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TaskStep {
    /// Program and arguments.
    pub argv: Argv,
    /// Added to the environment. Values are not told back (S6).
    #[serde(default)]
    pub env: CommandEnv,
    /// Where it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// It is ended after this long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_ms: Option<ExecutionMs>,
}

/// A repository that is cloned inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TaskSource {
    /// From where, as seen from inside: a URL, a folder or a bundle.
    pub git: GitUrl,
    /// What is checked out; what the repository says when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<GitReference>,
    /// Where to; `/workspace/source` when absent. What is there already stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<Path>,
}

/// A file that a task brings along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TaskFile {
    /// Where it goes.
    pub path: Path,
    /// What is in it.
    pub text: FileText,
    /// Permission bits; 0644 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<FileMode>,
}

/// When a task ends against its will (K4). 0 is never. When it is continued, what is absent is as it was.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TaskLimits {
    /// Nothing was heard of it for so long; 60 s when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inactivity_ms: Option<TaskMs>,
    /// In all, from when it is taken up; 5 minutes when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_ms: Option<TaskMs>,
    /// Each step that says nothing itself; not limited when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_ms: Option<TaskMs>,
    /// So many steps reported by `viv step`; 1,000 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reports_max: Option<ReportsMax>,
}

/// Something that a task may do to the world.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TaskEffect {
    /// What it is called.
    pub name: EffectName,
    /// Whether it may be done again after it was done.
    #[serde(default)]
    pub repeatable: bool,
}

/// Stop a task. Durable before it is answered; acknowledged, with 200, when everything of it was seen to be gone (K2).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"wait_ms": 5_000})))]
#[serde(default, deny_unknown_fields)]
pub struct StopTask {
    /// How long to wait for that: 0 does not wait, nothing is the server's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

/// Say that a task should not have been ended, or take that back: false positives of stops and limits are counted (O2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"mistaken": true, "why": "it was waiting for a long build"})))]
#[serde(deny_unknown_fields)]
pub struct MarkTask {
    /// Whether it should not have been.
    pub mistaken: bool,
    /// In words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<Note>,
}

/// Go on with a task that is over and whose sandbox was kept (K6). What is not said is as it was: without a command the
/// same steps are run, with what is said of them here. A command that is given brings all of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({"argv": ["./agent.sh", "--resume", "now the tests"]})))]
#[serde(default, deny_unknown_fields)]
pub struct ContinueTask {
    /// Program and arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Argv>,
    /// Several steps instead.
    pub steps: TaskSteps,
    /// Added to the environment of these steps.
    pub env: CommandEnv,
    /// Where they start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Path>,
    /// As whom.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<UserName>,
    /// When it ends against its will.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<TaskLimits>,
    /// Whether its sandbox stays after that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_alive: Option<bool>,
    /// How long to wait until it is over; at once when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<WaitMs>,
}

impl CreateTask {
    /// One command of these words, with everything else by default.
    pub fn of<T: Into<String>>(words: impl IntoIterator<Item = T>) -> Result<Self, BoundError> {
        let words = words.into_iter().map(Argument::new).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { argv: Some(Argv::new(words)?), ..Self::default() })
    }

    /// Its steps, as a provider is told them.
    pub fn to_steps(&self) -> Vec<ExecSpec> {
        let limit_ms = self.limits.step_ms.map(TaskMs::get).filter(|ms| *ms > 0);
        steps(self.argv.as_ref(), &self.steps, (&self.env, self.cwd.as_ref(), self.user.as_ref()), limit_ms)
    }
}

impl ContinueTask {
    /// Its steps, as a provider is told them; none are those that it had.
    pub fn to_steps(&self) -> Vec<ExecSpec> {
        let limit_ms = self.step_ms().filter(|ms| *ms > 0);
        steps(self.argv.as_ref(), &self.steps, (&self.env, self.cwd.as_ref(), self.user.as_ref()), limit_ms)
    }

    /// What is said anew of those that it had.
    pub fn to_changes(&self) -> StepChanges {
        StepChanges {
            env: self.env.to_map(),
            cwd: self.cwd.as_ref().map(Path::to_string),
            user: self.user.as_ref().map(UserName::to_string),
            limit_ms: self.step_ms(),
        }
    }

    fn step_ms(&self) -> Option<u64> {
        self.limits.as_ref().and_then(|limits| limits.step_ms).map(TaskMs::get)
    }
}

fn steps(
    argv: Option<&Argv>,
    steps: &TaskSteps,
    (env, cwd, user): (&CommandEnv, Option<&Path>, Option<&UserName>),
    limit_ms: Option<u64>,
) -> Vec<ExecSpec> {
    let spec = |argv: &Argv, own: Option<&TaskStep>| {
        let mut all = env.to_map();
        all.extend(own.map(|step| step.env.to_map()).unwrap_or_default());
        ExecSpec {
            argv: argv.to_vec(),
            env: all,
            cwd: own.and_then(|step| step.cwd.as_ref()).or(cwd).map(Path::to_string),
            user: user.map(UserName::to_string),
            limit_ms: own.and_then(|step| step.limit_ms).map(ExecutionMs::get).or(limit_ms),
            ..ExecSpec::default()
        }
    };
    argv.map(|argv| spec(argv, None))
        .into_iter()
        .chain(steps.get().iter().map(|step| spec(&step.argv, Some(step))))
        .collect()
}

impl TaskLimits {
    /// As they are said.
    pub fn to_core(&self) -> viv_core::task::SaidLimits {
        viv_core::task::SaidLimits {
            inactivity_ms: self.inactivity_ms.map(TaskMs::get),
            total_ms: self.total_ms.map(TaskMs::get),
            reports_max: self.reports_max.map(ReportsMax::get),
        }
    }
}

/// Where a task is (K1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It waits for its turn.
    Queued,
    /// Its sandbox is made ready, and filled.
    Preparing,
    /// A step runs.
    Running,
    /// And an effect of it, through the gate.
    Committing,
    /// Every step exited with 0.
    Succeeded,
    /// One did not, or could not be started.
    Failed,
    /// Somebody stopped it.
    Stopped,
    /// It took too long.
    TimedOut,
    /// It was silent for too long.
    Inactive,
    /// It reported too many steps.
    StepLimit,
    /// It ended, and whether an effect of it happened is not known.
    EffectUnknown,
    /// Its sandbox was lost under it.
    Lost,
}

macro_rules! states {
    ($($name:ident),+) => {
        impl From<viv_core::task::TaskState> for TaskState {
            fn from(state: viv_core::task::TaskState) -> Self {
                match state {
                    $(viv_core::task::TaskState::$name => Self::$name,)+
                }
            }
        }

        impl From<TaskState> for viv_core::task::TaskState {
            fn from(state: TaskState) -> Self {
                match state {
                    $(TaskState::$name => Self::$name,)+
                }
            }
        }
    };
}

states!(
    Queued,
    Preparing,
    Running,
    Committing,
    Succeeded,
    Failed,
    Stopped,
    TimedOut,
    Inactive,
    StepLimit,
    EffectUnknown,
    Lost
);

impl TaskState {
    /// Whether nothing of it runs, and nothing will.
    pub fn is_final(self) -> bool {
        viv_core::task::TaskState::from(self).is_final()
    }

    /// As the API writes it.
    pub fn as_str(self) -> &'static str {
        viv_core::task::TaskState::from(self).as_str()
    }
}

impl std::fmt::Display for TaskState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for TaskState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = viv_core::task::TaskState::ALL;
        let found = all.into_iter().find(|state| state.as_str() == text);
        found.map(Into::into).ok_or_else(|| {
            let words: Vec<&str> = all.iter().map(|state| state.as_str()).collect();
            format!("it is one of {}", words.join(", "))
        })
    }
}

/// How a run came by its sandbox (K6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskCame {
    /// It was made, or resumed, for it.
    Made,
    /// It was there, and was probed.
    Reused,
    /// The one of the run before was not there any more: it was made again, from what was saved of it if anything was.
    Recreated,
}

/// A task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Task {
    /// Its id.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: TaskId,
    /// Whose it is.
    pub project: String,
    /// Where it runs; it need not be there yet, or any more.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub sandbox: SandboxId,
    /// In which generation of it.
    pub generation: Option<u64>,
    /// Where it is.
    pub state: TaskState,
    /// What it ended as, or is about to.
    pub ending: Option<TaskEnding>,
    /// Who wants it to stop.
    pub stop: Option<TaskStopAsked>,
    /// Which run this is: each `continue` is another.
    pub run: u32,
    /// Its steps in this run.
    pub steps: Vec<TaskStepShown>,
    /// Which of them is next, or runs.
    pub step: u32,
    /// How this run came by its sandbox.
    pub came: Option<TaskCame>,
    /// Whether its sandbox stays.
    pub keep_alive: bool,
    /// The agent's own session, if it told (K6).
    pub session: Option<String>,
    /// Steps that the agent reported in this run.
    pub reported: u64,
    /// What it said last about them.
    pub note: Option<String>,
    /// Silent for so long ends it.
    pub inactivity_ms: Option<u64>,
    /// So long in all ends it.
    pub total_ms: Option<u64>,
    /// So many steps reported end it.
    pub reports_max: Option<u64>,
    /// When it has to be over.
    pub deadline_at_ms: Option<u64>,
    /// What it may do to the world.
    pub effects: Vec<TaskEffect>,
    /// What it did, or tried to.
    pub grants: Vec<TaskGrant>,
    /// The names of what is handed out behind the gate; the values are not told (S6).
    pub credentials: Vec<String>,
    /// When it was made.
    pub created_at_ms: u64,
    /// Who made it.
    pub created_by: String,
    /// Somebody's word that this run should not have been ended (O2).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<TaskMark>,
    /// When what happened in this run (K7).
    pub times: TaskTimes,
}

/// Somebody's word that a task should not have been ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskMark {
    /// Whose.
    pub by: String,
    /// Since when.
    pub at_ms: u64,
    /// In words.
    pub why: Option<String>,
}

/// What a task ended as, or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskEnding {
    /// As what; an effect of which nothing is known makes it `effect_unknown`.
    pub outcome: TaskState,
    /// Why, as a stable word.
    pub cause: String,
    /// In words.
    pub message: Option<String>,
    /// Since when.
    pub at_ms: u64,
}

/// Who wanted a task to stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskStopAsked {
    /// Who.
    pub by: String,
    /// When it was durable.
    pub at_ms: u64,
    /// The effect that it found in flight: it is acknowledged when that has ended, or its tree was killed (K5).
    pub effect_in_flight: Option<String>,
}

/// A step, as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskStepShown {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its execution, once it is about to be started.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub execution: Option<ExecutionId>,
    /// Since when.
    pub started_at_ms: Option<u64>,
    /// How it ended.
    pub ended: Option<ExecutionState>,
    /// The code, of what exited.
    pub exit_code: Option<i32>,
}

/// An effect that was granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskGrant {
    /// Which.
    pub effect: String,
    /// In which run.
    pub run: u32,
    /// Since when.
    pub at_ms: u64,
    /// When its outcome was known, or given up.
    pub ended_at_ms: Option<u64>,
    /// `in_flight`, `done`, `failed` or `unknown`.
    pub outcome: String,
    /// Why it failed.
    pub what: Option<String>,
}

/// When what happened in a run (K7).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskTimes {
    /// It was asked for.
    pub requested_at_ms: u64,
    /// It was taken up.
    pub taken_up_at_ms: Option<u64>,
    /// Its sandbox was ready and filled.
    pub prepared_at_ms: Option<u64>,
    /// Its first step ran.
    pub started_at_ms: Option<u64>,
    /// It wrote something for the first time.
    pub output_at_ms: Option<u64>,
    /// Its way out was cut.
    pub cut_at_ms: Option<u64>,
    /// Everything that it started was seen to be gone.
    pub killed_at_ms: Option<u64>,
    /// And its sandbox too, unless that stays: its state is final.
    pub confirmed_at_ms: Option<u64>,
}

/// What happened to a task in this run, in order (K7).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskTimeline {
    /// Which.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub task: TaskId,
    /// Which run.
    pub run: u32,
    /// Where it is.
    pub state: TaskState,
    /// What happened.
    pub moments: Vec<TaskMoment>,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskMoment {
    /// When.
    pub at_ms: u64,
    /// How long after it was requested.
    pub after_ms: u64,
    /// `requested`, `taken_up`, `prepared`, `started`, `output`, `effect_granted`, `effect_ended`, `stop_requested`,
    /// `ending`, `cut`, `killed` or `confirmed`.
    pub what: String,
    /// More about it.
    pub about: Option<String>,
}

impl Task {
    /// What happened in this run, in order.
    pub fn timeline(&self) -> TaskTimeline {
        let times = &self.times;
        let mut moments: Vec<(u64, &str, Option<String>)> = vec![(times.requested_at_ms, "requested", None)];
        let came = self.came.map(|came| match came {
            TaskCame::Made => "made".to_owned(),
            TaskCame::Reused => "reused".to_owned(),
            TaskCame::Recreated => "recreated".to_owned(),
        });
        let plain = [
            (times.taken_up_at_ms, "taken_up", None),
            (times.prepared_at_ms, "prepared", came),
            (times.started_at_ms, "started", None),
            (times.output_at_ms, "output", None),
        ];
        moments.extend(plain.into_iter().filter_map(|(at_ms, what, about)| Some((at_ms?, what, about))));
        for grant in self.grants.iter().filter(|grant| grant.run == self.run) {
            moments.push((grant.at_ms, "effect_granted", Some(grant.effect.clone())));
            let ended = grant
                .ended_at_ms
                .map(|at_ms| (at_ms, "effect_ended", Some(format!("{}: {}", grant.effect, grant.outcome))));
            moments.extend(ended);
        }
        moments.extend(self.stop.as_ref().map(|stop| (stop.at_ms, "stop_requested", Some(format!("by {}", stop.by)))));
        let ending = self.ending.as_ref();
        moments.extend(ending.map(|end| (end.at_ms, "ending", Some(format!("{}: {}", end.outcome, end.cause)))));
        let state = self.state.is_final().then(|| self.state.to_string());
        let last = [
            (times.cut_at_ms, "cut", None),
            (times.killed_at_ms, "killed", None),
            (times.confirmed_at_ms, "confirmed", state),
        ];
        moments.extend(last.into_iter().filter_map(|(at_ms, what, about)| Some((at_ms?, what, about))));
        // Those of one moment stay in the order in which they are told here.
        moments.sort_by_key(|(at_ms, ..)| *at_ms);
        let moment = |(at_ms, what, about): (u64, &str, Option<String>)| TaskMoment {
            at_ms,
            after_ms: at_ms.saturating_sub(times.requested_at_ms),
            what: what.to_owned(),
            about,
        };
        let moments = moments.into_iter().map(moment).collect();
        TaskTimeline { task: self.id.clone(), run: self.run, state: self.state, moments }
    }
}
