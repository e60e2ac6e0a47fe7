//! `viv schedule`

use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use viv_api::bound::{
    Argument, Argv, CommandEnv, CronText, ExecutionMs, Path, SandboxRef, ScheduleRef, UserName, ZoneName,
};
use viv_api::schedule::{ChangeSchedule, CreateSchedule, MissedRuns, Schedule, ScheduleLast};

use super::new::{variables, wrong};
use super::table::{NONE, Table, age, until};
use super::{Daemon, now_ms, print, print_json, width};
use crate::fail::Failure;
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    #[command(visible_alias = "create")]
    Add(Add),
    Set(Box<Set>),
    /// List schedules: of a sandbox, or all
    Ls {
        /// Its id or name
        sandbox: Option<SandboxRef>,
    },
    /// Show a schedule
    Show {
        /// Its id
        schedule: ScheduleRef,
    },
    /// Take schedules away; a run that is under way goes on
    Rm {
        /// Their ids
        #[arg(required = true)]
        schedules: Vec<ScheduleRef>,
    },
    /// Let schedules come due again
    Enable {
        /// Their ids
        #[arg(required = true)]
        schedules: Vec<ScheduleRef>,
    },
    /// Keep schedules from coming due
    Disable {
        /// Their ids
        #[arg(required = true)]
        schedules: Vec<ScheduleRef>,
    },
    /// Run a schedule now, beside its times
    Run {
        /// Its id
        schedule: ScheduleRef,
    },
}

/// Run a command in a sandbox at given times
///
/// A sandbox that is frozen or hibernated wakes, runs it, and goes back. One that a user stopped is not woken.
#[derive(clap::Args)]
struct Add {
    /// When: 'minute hour day-of-month month day-of-week', or @hourly, @daily, @weekly, @monthly, @yearly
    #[arg(long, value_name = "CRON")]
    cron: CronText,
    /// By which clock, such as Europe/Berlin; UTC when not said
    #[arg(long, value_name = "ZONE")]
    zone: Option<ZoneName>,
    /// What becomes of times at which no daemon was there
    #[arg(long, value_enum, default_value_t = MissedArg::Skip)]
    missed: MissedArg,
    #[command(flatten)]
    how: How,
    /// Make it, and keep it from coming due
    #[arg(long)]
    disabled: bool,
    /// Its id or name
    sandbox: SandboxRef,
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// How a command runs.
#[derive(clap::Args)]
struct How {
    /// End a run after this long; a new one has 5 minutes when not said
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    timeout: Option<u64>,
    /// All that is added to the sandbox's environment: NAME=VALUE, or NAME for the value that it has here
    #[arg(long, short, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Where it starts; a new one in the sandbox's working directory when not said
    #[arg(long, value_name = "PATH")]
    cwd: Option<Path>,
    /// As whom; a new one as root of the sandbox when not said
    #[arg(long, short, value_name = "USER[:GROUP]")]
    user: Option<UserName>,
}

/// Change a schedule; what is not said stays
///
/// A run that is under way goes on as it was.
#[derive(clap::Args)]
struct Set {
    /// When: 'minute hour day-of-month month day-of-week', or @hourly, @daily, @weekly, @monthly, @yearly
    #[arg(long, value_name = "CRON")]
    cron: Option<CronText>,
    /// By which clock, such as Europe/Berlin
    #[arg(long, value_name = "ZONE")]
    zone: Option<ZoneName>,
    /// What becomes of times at which no daemon was there
    #[arg(long, value_enum)]
    missed: Option<MissedArg>,
    #[command(flatten)]
    how: How,
    /// Its id
    schedule: ScheduleRef,
    /// Program and arguments
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum MissedArg {
    /// They are left out
    Skip,
    /// One run stands for all of them
    Once,
    /// Each is run, one after the other: the latest 24 of the last day
    All,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match args.verb {
        Verb::Add(add) => self::add(add, daemon),
        Verb::Set(set) => self::set(*set, daemon),
        Verb::Ls { sandbox } => list(sandbox.as_ref(), daemon),
        Verb::Show { schedule } => {
            let schedule = daemon.client.schedule(&schedule)?;
            daemon.answer(&schedule, || show(&schedule))
        }
        Verb::Rm { schedules } => {
            for schedule in schedules {
                daemon.client.remove_schedule(&schedule)?;
                daemon.answer(&serde_json::json!({ "removed": schedule }), || schedule.to_string())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Verb::Enable { schedules } => switch(&schedules, true, daemon),
        Verb::Disable { schedules } => switch(&schedules, false, daemon),
        Verb::Run { schedule } => {
            let schedule = daemon.client.run_schedule(&schedule)?;
            daemon.answer(&schedule, || schedule.id.to_string())
        }
    }
}

impl From<MissedArg> for MissedRuns {
    fn from(missed: MissedArg) -> Self {
        match missed {
            MissedArg::Skip => Self::Skip,
            MissedArg::Once => Self::Once,
            MissedArg::All => Self::All,
        }
    }
}

fn argv(words: Vec<String>) -> anyhow::Result<Argv> {
    let words = words.into_iter().map(Argument::new).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    Ok(Argv::new(words).map_err(wrong)?)
}

fn limit(timeout: Option<u64>) -> anyhow::Result<Option<ExecutionMs>> {
    Ok(timeout.map(ExecutionMs::new).transpose().map_err(wrong)?)
}

fn set(set: Set, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let How { timeout, env, cwd, user } = set.how;
    let env = if env.is_empty() { None } else { Some(CommandEnv::new(variables(&env)?).map_err(wrong)?) };
    let change = ChangeSchedule {
        cron: set.cron,
        zone: set.zone,
        argv: if set.command.is_empty() { None } else { Some(argv(set.command)?) },
        env,
        cwd,
        user,
        limit_ms: limit(timeout)?,
        missed: set.missed.map(Into::into),
        enabled: None,
    };
    if change == ChangeSchedule::default() {
        let hint = "say what is to be otherwise: --cron, --zone, --missed, --timeout, --env, --cwd, --user, a command";
        return Err(Failure::usage("nothing is to be changed").hint(hint).into());
    }
    let schedule = daemon.client.change_schedule(&set.schedule, &change)?;
    daemon.answer(&schedule, || schedule.id.to_string())
}

fn add(add: Add, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let How { timeout, env, cwd, user } = add.how;
    let request = CreateSchedule {
        cron: add.cron,
        zone: add.zone,
        argv: argv(add.command)?,
        env: CommandEnv::new(variables(&env)?).map_err(wrong)?,
        cwd,
        user,
        limit_ms: limit(timeout)?,
        missed: add.missed.into(),
        enabled: Some(!add.disabled),
    };
    let schedule = daemon.sandbox(&add.sandbox).create_schedule(&request)?;
    daemon.answer(&schedule, || schedule.id.to_string())
}

fn switch(schedules: &[ScheduleRef], enabled: bool, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    for schedule in schedules {
        let change = ChangeSchedule { enabled: Some(enabled), ..ChangeSchedule::default() };
        let schedule = daemon.client.change_schedule(schedule, &change)?;
        daemon.answer(&schedule, || schedule.id.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn list(sandbox: Option<&SandboxRef>, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let all = match sandbox {
        Some(sandbox) => daemon.sandbox(sandbox).schedules_all().collect::<Result<Vec<_>, _>>()?,
        None => daemon.client.schedules_all().collect::<Result<Vec<_>, _>>()?,
    };
    let mut table = Table::new(&["ID", "SANDBOX", "CRON", "ZONE", "NEXT", "LAST", "AGO", "COMMAND"]);
    for schedule in &all {
        if daemon.json {
            print_json(schedule)?;
        } else {
            table.row(row(schedule, now_ms()));
        }
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(schedule: &Schedule, now_ms: u64) -> [String; 8] {
    let next = match schedule.next_at_ms {
        _ if schedule.running.is_some() => "running".to_owned(),
        Some(at_ms) => until(now_ms, at_ms),
        None => "disabled".to_owned(),
    };
    [
        schedule.id.to_string(),
        schedule.sandbox.to_string(),
        schedule.cron.clone(),
        schedule.zone.clone(),
        next,
        schedule.last.as_ref().map_or_else(|| NONE.to_owned(), outcome),
        age(now_ms, schedule.last.as_ref().map(|last| last.ended_at_ms)),
        super::table::clean(&schedule.argv.join(" ")),
    ]
}

fn outcome(last: &ScheduleLast) -> String {
    match (last.exit_code, &last.why) {
        (Some(code), _) => format!("{} {code}", last.outcome),
        (None, Some(why)) => format!("{} ({why})", last.outcome),
        (None, None) => last.outcome.clone(),
    }
}

fn show(schedule: &Schedule) -> String {
    let now_ms = now_ms();
    let mut lines = super::table::Facts::default();
    lines.add("id", schedule.id.to_string());
    lines.add("sandbox", schedule.sandbox.to_string());
    lines.add("cron", schedule.cron.clone());
    lines.add("zone", schedule.zone.clone());
    lines.add("command", super::table::clean(&schedule.argv.join(" ")));
    lines.maybe("environment", (!schedule.env.is_empty()).then(|| schedule.env.join(" ")));
    lines.maybe("limit", schedule.limit_ms.map(crate::text::span));
    lines.add(
        "missed",
        match schedule.missed {
            MissedRuns::Skip => "skip",
            MissedRuns::Once => "once",
            MissedRuns::All => "all",
        },
    );
    lines.add("made", format!("{} ago by {}", age(now_ms, Some(schedule.created_at_ms)), schedule.created_by));
    let next = schedule.next_at_ms.map(|at_ms| format!("{} ({})", until(now_ms, at_ms), super::table::clock(at_ms)));
    lines.add("next", next.unwrap_or_else(|| "disabled".to_owned()));
    let running = schedule.running.as_ref().map(|run| {
        let execution = run.execution.as_ref().map_or_else(|| "waking the sandbox".to_owned(), ToString::to_string);
        format!("{execution}, for {}", age(now_ms, Some(run.began_at_ms)))
    });
    lines.maybe("running", running);
    let last = schedule.last.as_ref().map(|last| {
        let execution = last.execution.as_ref().map_or_else(String::new, |execution| format!(", {execution}"));
        format!("{}, {} ago{execution}", outcome(last), age(now_ms, Some(last.ended_at_ms)))
    });
    lines.maybe("last", last);
    lines.add("runs", format!("{}, and {} left out", schedule.runs, schedule.skipped));
    lines.render()
}
