//! `viv task`

use std::fmt::Write as _;
use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Subcommand;
use viv_api::ErrorCode;
use viv_api::bound::{
    Argument, Argv, CommandEnv, EffectName, FileText, GitReference, GitUrl, MomentMs, Note, Path, ReportsMax,
    SandboxRef, SearchText, TailLines, TaskEffects, TaskFiles, TaskMs, TaskRef, TaskSteps, UserName, WaitMs,
};
use viv_api::execution::{ExecutionState, OutputLine, OutputStream};
use viv_api::query::ListTasks;
use viv_api::task::{
    ContinueTask, CreateTask, MarkTask, StopTask, Task, TaskEffect, TaskFile, TaskLimits, TaskSource, TaskState,
    TaskStep, TaskTimeline,
};

use super::attach::ago;
use super::new::{NewArgs, once, variables, wrong};
use super::progress::Waiting;
use super::table::{Facts, NONE, Table, age, clean, clock};
use super::{Daemon, now_ms, print, print_json, rm, width};
use crate::fail::{FAILED, Failure, NOT_THE_COMMAND, OK, SIGNAL_BASE, TIMEOUT};
use crate::text::{parse_span, span};

/// Between two looks whether a step has begun.
const EVERY: Duration = Duration::from_millis(100);

/// SIGTERM.
const TERMINATE: u8 = 15;

/// The widest bar of a timeline.
const BAR: u64 = 40;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Run(Box<Run>),
    /// List tasks, newest first
    Ls {
        /// Only those of this sandbox
        #[arg(long)]
        sandbox: Option<SandboxRef>,
        /// Only those in this state; repeat it for more
        #[arg(long, value_name = "STATE")]
        state: Vec<TaskState>,
    },
    /// Show a task
    Show {
        /// Its id
        task: TaskRef,
    },
    /// Stop tasks, and say when everything of them is gone
    Stop {
        /// Their ids
        #[arg(required = true)]
        tasks: Vec<TaskRef>,
        /// How long to wait for each; 0 does not wait, it stops all the same
        #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "30s")]
        wait: u64,
    },
    Continue(Box<Continue>),
    /// Show what a task wrote
    Logs {
        /// Its id
        task: TaskRef,
        /// Which step: the first one is 0; all of them when not said
        #[arg(long)]
        step: Option<u32>,
        /// The first byte of the step's output to show
        #[arg(long, requires = "step", default_value_t = 0)]
        offset: u64,
        /// Only the last so many lines of each step
        #[arg(long, value_name = "LINES", conflicts_with = "offset")]
        tail: Option<TailLines>,
        /// Only what was written in the last so long: 30s, 10m, 2h
        #[arg(long, value_name = "SPAN", value_parser = parse_span)]
        since: Option<u64>,
        /// Only lines of what there is that have this in them, at most 1,000 of each step
        #[arg(long, value_name = "TEXT", conflicts_with_all = ["tail", "follow"])]
        search: Option<SearchText>,
        /// Go on with what comes
        #[arg(long, short)]
        follow: bool,
    },
    /// Say that a task should not have been stopped, or ended by a limit
    ///
    /// `viv stats --slo` counts it among false positives.
    Mark {
        /// Its id
        task: TaskRef,
        /// It was a mistake
        #[arg(long, required_unless_present = "right", conflicts_with = "right")]
        mistaken: bool,
        /// It was none after all: takes a mark back
        #[arg(long)]
        right: bool,
        /// In words
        #[arg(long, value_name = "TEXT", requires = "mistaken")]
        why: Option<Note>,
    },
    /// Show what happened to a task, and when
    Timeline {
        /// Its id
        task: TaskRef,
    },
}

/// Run commands in a sandbox that end in exactly one way, and end when they are told to
///
/// It is followed until it is over, and ends with the code of its command; Ctrl-C leaves it running. Without
/// `--keep-alive` its sandbox ends with it.
#[derive(clap::Args)]
struct Run {
    /// Run in this sandbox, which is made to run, instead of in a new one
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<SandboxRef>,
    #[command(flatten)]
    new: NewArgs,
    #[command(flatten)]
    how: How,
    /// A repository that is cloned before the first step, as seen from inside
    #[arg(long, value_name = "URL")]
    source: Option<GitUrl>,
    /// What is checked out of it
    #[arg(long, value_name = "REFERENCE", requires = "source")]
    reference: Option<GitReference>,
    /// Where it goes; /workspace/source when not said
    #[arg(long, value_name = "PATH", requires = "source")]
    source_path: Option<Path>,
    /// A file of ours that is written before the first step
    #[arg(long, value_name = "PATH=FILE")]
    file: Vec<String>,
    /// Something that it may do to the world, through `viv gate`; with `:again` more than once
    #[arg(long, value_name = "EFFECT[:again]")]
    effect: Vec<String>,
    /// A variable that only commands behind the gate are handed: NAME=VALUE, or NAME for the value that it has here
    #[arg(long, value_name = "NAME=VALUE")]
    credential: Vec<String>,
    /// Keep its sandbox, so that it can be continued
    #[arg(long)]
    keep_alive: bool,
}

/// Go on with a task that is over and was kept alive
///
/// Its sandbox is probed and used again; one that is not there any more is made again, which is said.
#[derive(clap::Args)]
struct Continue {
    /// Its id
    task: TaskRef,
    /// Let its sandbox end with it this time
    #[arg(long)]
    let_end: bool,
    #[command(flatten)]
    how: How,
}

/// What is run, and for how long.
#[derive(clap::Args)]
struct How {
    /// A step, run by a shell; repeat it for more, one after the other
    #[arg(long, value_name = "COMMAND", conflicts_with = "command")]
    step: Vec<String>,
    /// End it when nothing was heard of it for so long; 60 s when not said, 0 never
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    inactivity: Option<u64>,
    /// End it after so long in all; 5 minutes when not said, 0 never
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    timeout: Option<u64>,
    /// End each step after so long
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    step_timeout: Option<u64>,
    /// End it when it has reported so many steps; 1,000 when not said, 0 never
    #[arg(long, value_name = "COUNT")]
    steps_max: Option<ReportsMax>,
    /// As whom; root of the sandbox when not said
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<UserName>,
    /// Where steps start
    #[arg(long, value_name = "PATH")]
    cwd: Option<Path>,
    /// Say its id, and do not follow it
    #[arg(long, short)]
    detach: bool,
    /// Program and arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl How {
    fn argv(&self) -> anyhow::Result<Option<Argv>> {
        if self.command.is_empty() {
            return Ok(None);
        }
        Ok(Some(argv(&self.command)?))
    }

    fn steps(&self) -> anyhow::Result<TaskSteps> {
        let step = |line: &String| -> anyhow::Result<TaskStep> {
            let argv = argv(&["/bin/sh".to_owned(), "-c".to_owned(), line.clone()])?;
            Ok(TaskStep { argv, env: CommandEnv::default(), cwd: None, limit_ms: None })
        };
        let steps = self.step.iter().map(step).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(TaskSteps::new(steps).map_err(wrong)?)
    }

    fn limits(&self) -> anyhow::Result<TaskLimits> {
        let ms = |said: Option<u64>| said.map(TaskMs::new).transpose().map_err(wrong);
        Ok(TaskLimits {
            inactivity_ms: ms(self.inactivity)?,
            total_ms: ms(self.timeout)?,
            step_ms: ms(self.step_timeout)?,
            reports_max: self.steps_max,
        })
    }
}

fn argv(words: &[String]) -> anyhow::Result<Argv> {
    let words = words.iter().cloned().map(Argument::new).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    Ok(Argv::new(words).map_err(wrong)?)
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match args.verb {
        Verb::Run(args) => begin(*args, daemon),
        Verb::Ls { sandbox, state } => list(ListTasks { sandbox, state, ..ListTasks::default() }, daemon),
        Verb::Show { task } => {
            let task = daemon.client.task(&task)?;
            daemon.answer(&task, || show(&task))
        }
        Verb::Stop { tasks, wait } => stop(&tasks, wait, daemon),
        Verb::Continue(args) => go_on(&args, daemon),
        Verb::Logs { task, step, offset, tail, since, search, follow } => {
            logs(daemon, &task, step, &Part { offset, tail, since: since.map(ago), search, follow })
        }
        Verb::Mark { task, mistaken, right: _, why } => {
            let task = daemon.client.mark_task(&task, &MarkTask { mistaken, why })?;
            let marked = if task.mark.is_some() { "marked as mistaken" } else { "not marked" };
            daemon.answer(&task, || format!("{}  {}  {marked}", task.id, task.state))
        }
        Verb::Timeline { task } => {
            let timeline = daemon.client.task_timeline(&task)?;
            daemon.answer(&timeline, || picture(&timeline))
        }
    }
}

fn begin(args: Run, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    if args.how.command.is_empty() && args.how.step.is_empty() {
        return Err(Failure::usage("a task runs a command, and there is none").hint("viv task run -- COMMAND").into());
    }
    let (command, steps, limits) = (args.how.argv()?, args.how.steps()?, args.how.limits()?);
    let create = match &args.sandbox {
        Some(_) => None,
        None => Some(Box::new(args.new.request(None, None)?)),
    };
    let source = args.source.map(|git| TaskSource { git, reference: args.reference, path: args.source_path });
    let request = CreateTask {
        sandbox: args.sandbox,
        create,
        argv: command,
        steps,
        env: CommandEnv::default(),
        cwd: args.how.cwd.clone(),
        user: args.how.user.clone(),
        source,
        files: files(&args.file)?,
        limits,
        effects: effects(&args.effect)?,
        credentials: CommandEnv::new(variables(&args.credential)?).map_err(wrong)?,
        keep_alive: args.keep_alive,
        wait_ms: None,
    };
    let task = once(None, |key| daemon.client.run_task(&request, Some(key)))?;
    attend(daemon, &task, args.how.detach)
}

fn files(words: &[String]) -> anyhow::Result<TaskFiles> {
    let file = |word: &String| -> anyhow::Result<TaskFile> {
        let Some((path, ours)) = word.split_once('=') else {
            return Err(Failure::usage(format!("{word:?} is not PATH=FILE")).into());
        };
        let read = std::fs::read_to_string(ours);
        let text = read.map_err(|error| Failure::usage(format!("{ours} cannot be read as text: {error}")))?;
        Ok(TaskFile { path: Path::new(path).map_err(wrong)?, text: FileText::new(text).map_err(wrong)?, mode: None })
    };
    Ok(TaskFiles::new(words.iter().map(file).collect::<anyhow::Result<_>>()?).map_err(wrong)?)
}

fn effects(words: &[String]) -> anyhow::Result<TaskEffects> {
    let effect = |word: &String| -> anyhow::Result<TaskEffect> {
        let (name, repeatable) = word.strip_suffix(":again").map_or((word.as_str(), false), |name| (name, true));
        Ok(TaskEffect { name: EffectName::new(name).map_err(wrong)?, repeatable })
    };
    Ok(TaskEffects::new(words.iter().map(effect).collect::<anyhow::Result<_>>()?).map_err(wrong)?)
}

fn go_on(args: &Continue, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let limits = args.how.limits()?;
    let request = ContinueTask {
        argv: args.how.argv()?,
        steps: args.how.steps()?,
        env: CommandEnv::default(),
        cwd: args.how.cwd.clone(),
        user: args.how.user.clone(),
        limits: (limits != TaskLimits::default()).then_some(limits),
        keep_alive: args.let_end.then_some(false),
        wait_ms: None,
    };
    let task = daemon.client.continue_task(&args.task, &request)?;
    attend(daemon, &task, args.how.detach)
}

/// Says its id, or follows it to its end.
fn attend(daemon: &Daemon, task: &Task, detach: bool) -> anyhow::Result<ExitCode> {
    if detach {
        return daemon.answer(task, || task.id.to_string());
    }
    eprintln!("viv: {}", task.id);
    let id = TaskRef::from(&task.id);
    let over = follow(daemon, &id, task.run, &Part { follow: true, ..Part::default() })?;
    if daemon.json {
        print_json(&over)?;
    }
    let (code, why) = verdict(&over);
    if let Some(why) = why {
        eprintln!("viv: {} {why}", over.id);
    }
    Ok(ExitCode::from(code))
}

/// Shows what it writes until it is over.
fn follow(daemon: &Daemon, id: &TaskRef, run: u32, part: &Part) -> anyhow::Result<Task> {
    let mut step = 0;
    loop {
        let task = daemon.client.task(id)?;
        let is_over = task.state.is_final() || task.run != run;
        match task.steps.get(step as usize) {
            Some(shown) if shown.started_at_ms.is_some() => {
                read(daemon, id, step, part)?;
                step += 1;
            }
            _ if is_over => return Ok(task),
            Some(_) | None => thread::sleep(EVERY),
        }
    }
}

/// Which part of an output is shown.
#[derive(Default)]
struct Part {
    offset: u64,
    tail: Option<TailLines>,
    since: Option<MomentMs>,
    search: Option<SearchText>,
    follow: bool,
}

/// Shows what a step wrote.
fn read(daemon: &Daemon, id: &TaskRef, step: u32, part: &Part) -> anyhow::Result<()> {
    let mut output = daemon.client.task_logs(id, step, part.offset, part.follow);
    if let Some(lines) = part.tail {
        output = output.tail(lines);
    }
    if let Some(moment) = part.since {
        output = output.since(moment);
    }
    if let Some(text) = &part.search {
        output = output.search(text.clone());
    }
    for line in output {
        let line = match line {
            // It was never started.
            Err(error) if error.code() == Some(ErrorCode::NotRunning) => return Ok(()),
            line => line?,
        };
        if daemon.json {
            print_json(&line)?;
            continue;
        }
        match line {
            OutputLine::Chunk(chunk) => {
                let data = chunk.data().unwrap_or_default();
                let written = match chunk.stream {
                    OutputStream::Stdout => io::stdout().lock().write_all(&data).and_then(|()| io::stdout().flush()),
                    OutputStream::Stderr => io::stderr().lock().write_all(&data),
                };
                written?;
            }
            OutputLine::Cut(cut) => eprintln!("viv: {} bytes of output were not kept", cut.cut.to - cut.cut.from),
            OutputLine::End(_) | OutputLine::Alive(_) => {}
        }
    }
    Ok(())
}

fn logs(daemon: &Daemon, id: &TaskRef, step: Option<u32>, part: &Part) -> anyhow::Result<ExitCode> {
    if let Some(step) = step {
        read(daemon, id, step, part)?;
        return Ok(ExitCode::SUCCESS);
    }
    let task = daemon.client.task(id)?;
    if part.follow {
        follow(daemon, id, task.run, part)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (step, _) in (0..).zip(&task.steps).filter(|(_, shown)| shown.execution.is_some()) {
        read(daemon, id, step, part)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit code that goes with how it ended, and why if that says too little.
fn verdict(task: &Task) -> (u8, Option<String>) {
    let ending = task.ending.as_ref();
    let message = ending.and_then(|ending| ending.message.clone()).map_or_else(String::new, |what| format!(": {what}"));
    let why = Some(format!("{}{message}", task.state));
    match task.state {
        TaskState::Failed => {
            let code = task.steps.iter().filter_map(|step| step.exit_code).find(|code| *code != 0);
            (code.map_or(FAILED, |code| code as u8), why)
        }
        TaskState::Stopped => (SIGNAL_BASE + TERMINATE, why),
        TaskState::TimedOut | TaskState::Inactive | TaskState::StepLimit => (TIMEOUT, why),
        TaskState::EffectUnknown => {
            let unknown: Vec<&str> =
                task.grants.iter().filter(|grant| grant.outcome == "unknown").map(|grant| &*grant.effect).collect();
            (FAILED, Some(format!("ended, and whether it did {} is not known{message}", unknown.join(", "))))
        }
        TaskState::Lost => (NOT_THE_COMMAND, why),
        TaskState::Succeeded
        | TaskState::Queued
        | TaskState::Preparing
        | TaskState::Running
        | TaskState::Committing => (OK, None),
    }
}

fn stop(tasks: &[TaskRef], wait: u64, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(wait).map_err(wrong)?);
    rm::each(tasks, |id| {
        let task = {
            let _waiting = Waiting::on(format!("stopping {id}"));
            daemon.client.stop_task(id, &StopTask { wait_ms })?
        };
        daemon.answer(&task, || stopped(&task))?;
        Ok(if task.state.is_final() || wait == 0 { ExitCode::SUCCESS } else { ExitCode::from(TIMEOUT) })
    })
}

/// What a stop came to: what was terminated, and when it was seen to be gone.
fn stopped(task: &Task) -> String {
    let mut text = format!("{}  {}", task.id, task.state);
    let asked = task.stop.as_ref();
    if let (Some(asked), Some(killed_at_ms)) = (asked, task.times.killed_at_ms) {
        // What had ended by itself was not terminated.
        let terminated = |ended: &ExecutionState| matches!(ended, ExecutionState::Cancelled | ExecutionState::Lost);
        let count = task.steps.iter().filter(|step| step.ended.as_ref().is_some_and(terminated)).count();
        let gone = span(killed_at_ms.saturating_sub(asked.at_ms));
        let _ = write!(text, "  {count} execution(s) terminated, seen gone {gone} after the stop");
    }
    if let (Some(effect), false) = (asked.and_then(|stop| stop.effect_in_flight.as_ref()), task.state.is_final()) {
        let _ = write!(text, "  effect_in_flight: {effect}");
    }
    text
}

fn list(query: ListTasks, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut table = Table::new(&["ID", "STATE", "AGE", "RUN", "STEP", "SANDBOX", "COMMAND"]);
    let now_ms = now_ms();
    for task in daemon.client.tasks_all(query) {
        let task = task?;
        if daemon.json {
            print_json(&task)?;
            continue;
        }
        let at = (task.step as usize).min(task.steps.len().saturating_sub(1));
        let command = task.steps.get(at).map(|step| step.argv.join(" ")).unwrap_or_default();
        table.row([
            task.id.to_string(),
            task.state.to_string(),
            age(now_ms, Some(task.times.requested_at_ms)),
            task.run.to_string(),
            format!("{}/{}", at + 1, task.steps.len()),
            task.sandbox.to_string(),
            clean(&command),
        ]);
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn show(task: &Task) -> String {
    let now_ms = now_ms();
    let mut facts = Facts::default();
    facts.add("id", task.id.to_string());
    facts.add("state", task.state.to_string());
    let ending = task.ending.as_ref().map(|ending| {
        let message = ending.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
        format!("{} ({}){message}", ending.outcome, ending.cause)
    });
    facts.maybe(if task.state.is_final() { "cause" } else { "ending" }, ending);
    let marked = task.mark.as_ref().map(|mark| {
        let why = mark.why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        format!("yes, says {}{why}", mark.by)
    });
    facts.maybe("mistaken", marked);
    facts.maybe("stopped by", task.stop.as_ref().map(|stop| stop.by.clone()));
    facts.add("sandbox", task.sandbox.to_string());
    facts.maybe("generation", task.generation.map(|generation| generation.to_string()));
    facts.add("keep alive", if task.keep_alive { "yes" } else { "no" });
    facts.add("run", task.run.to_string());
    facts.maybe(
        "sandbox was",
        task.timeline().moments.into_iter().find(|moment| moment.what == "prepared").and_then(|moment| moment.about),
    );
    facts.maybe("session", task.session.clone());
    for (number, step) in task.steps.iter().enumerate() {
        let ended = match (step.ended, step.exit_code) {
            (Some(_), Some(code)) => format!(" (exited {code})"),
            (Some(ended), None) => format!(" ({ended:?})").to_lowercase(),
            (None, _) => String::new(),
        };
        facts.add(&format!("step {number}"), format!("{}{ended}", step.argv.join(" ")));
    }
    let reported =
        format!("{}{}", task.reported, task.note.as_ref().map_or_else(String::new, |note| format!(", {note}")));
    facts.add("reported", reported);
    for grant in &task.grants {
        let what = grant.what.as_ref().map_or_else(String::new, |what| format!(" ({what})"));
        facts.add("effect", format!("{}: {}{what}", grant.effect, grant.outcome));
    }
    facts.maybe("credentials", (!task.credentials.is_empty()).then(|| task.credentials.join(" ")));
    let limit = |ms: Option<u64>| ms.map_or_else(|| NONE.to_owned(), span);
    facts.add("limits", format!("silent {}, in all {}", limit(task.inactivity_ms), limit(task.total_ms)));
    facts.add("made", format!("{} ago by {}", age(now_ms, Some(task.created_at_ms)), task.created_by));
    facts.render()
}

/// A timeline as a picture: what happened when, and how far that is along the way.
fn picture(timeline: &TaskTimeline) -> String {
    let whole_ms = timeline.moments.iter().map(|moment| moment.after_ms).max().unwrap_or(0).max(1);
    let mut table = Table::new(&["WHEN", "AFTER", "WHAT", ""]);
    for moment in &timeline.moments {
        let about = moment.about.as_ref().map_or_else(String::new, |about| format!(" ({about})"));
        let along = (moment.after_ms * BAR / whole_ms) as usize;
        let bar = format!("{}●", "─".repeat(along));
        table.row([clock(moment.at_ms), format!("{} ms", moment.after_ms), format!("{}{about}", moment.what), bar]);
    }
    table.render(width())
}
