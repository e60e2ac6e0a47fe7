//! The verbs that speak to a daemon.
//!
//! Standard output is data: a table, an id, the command's own words, or JSON (`--json`: the types of `viv-api`, one
//! object a line). Everything else is on standard error.
//!
//! Architecture invariant: nothing here touches the local provider, and nobody enters a user namespace for it.

mod activity;
mod alerts;
mod attach;
mod backup;
mod cancel;
mod checkpoint;
mod cleanup;
mod cp;
mod create;
mod diagnose;
mod drain;
mod ensure;
mod events;
mod exec;
mod executions;
mod extend;
mod feed;
mod fork;
mod interrupt;
mod key;
mod kill;
mod limits;
mod logs;
pub(crate) mod new;
mod progress;
mod ps;
mod reconcile;
mod reconcilers;
mod report;
mod reset;
mod rest;
mod rm;
mod rollback;
mod run;
mod schedule;
pub(crate) mod selftest;
mod session;
mod show;
mod snapshot;
mod spares;
mod spec;
mod stats;
mod stop;
pub(crate) mod table;
mod task;
mod terminal;
mod timeline;
mod top;
mod version;
mod webhook;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Subcommand;
use serde::Serialize;
use viv_api::bound::SandboxRef;
use viv_api::client::{Client, Location, SandboxHandle};

pub(crate) use diagnose::diagnose;
pub(crate) use reconcilers::reconcilers;
pub(crate) use show::finding;

use crate::fail::{self, FAILED, NOT_THE_COMMAND};
use crate::settings::Global;

/// What a diagnosis calls this client.
const NAME: &str = "cli";

#[derive(Subcommand)]
pub(crate) enum Verb {
    Run(run::Args),
    /// Make a sandbox, and say its id when it is ready
    Create(create::Args),
    #[command(visible_alias = "ls")]
    Ps(ps::Args),
    /// Show a sandbox: what is wanted, where it stands, and what was checked when
    #[command(visible_alias = "inspect")]
    Show(show::Args),
    Exec(exec::Args),
    Attach(attach::Args),
    /// List the commands of a sandbox, or of all
    Executions(executions::Args),
    /// End a command with all that it started, or send it a signal
    Cancel(cancel::Args),
    /// Send a signal to a command's first process
    Kill(kill::Args),
    Cp(cp::Args),
    /// Show the logs of a sandbox, or the daemon's
    Logs(logs::Args),
    /// Show the built-in alerts that are pending or fire
    Alerts(alerts::Args),
    Cleanup(cleanup::Args),
    /// Show the sandboxes that are made ahead, so that nobody waits for them
    Spares,
    /// Show figures about all sandboxes
    Stats(stats::Args),
    Top(top::Args),
    /// Make a sandbox run: join it, wait for it, resume it or make it again
    Ensure(ensure::Args),
    /// Run what is at rest again: the same as ensure
    Resume(ensure::Args),
    /// Make sandboxes stand still, with their memory and without processor time
    Freeze(rest::Args),
    /// Let frozen sandboxes go on, and check that they do
    Thaw(rest::Args),
    /// Save sandboxes, so that nothing of them runs; unlike after a stop, whatever may wake them still does
    Hibernate(rest::Args),
    /// Look what is in the way of saving the memory of a sandbox
    Checkpoint(checkpoint::Args),
    /// Stop sandboxes; persistent ones are saved
    Stop(stop::Args),
    /// Make, list, show, remove, export and import snapshots
    Snapshot(snapshot::Args),
    Rollback(rollback::Args),
    Fork(fork::Args),
    Reset(reset::Args),
    /// Delete sandboxes, for ever
    Rm(rm::Args),
    /// Move a sandbox's hard deadline
    Extend(extend::Args),
    /// Show the journal: who did what, when, and why
    Events(events::Args),
    /// Show what happened to a sandbox
    Timeline(timeline::Args),
    Report(report::Args),
    /// Say that a sandbox is in use
    Activity(activity::Args),
    /// Keep a sandbox from idling for a while
    KeepAwake(activity::KeepAwakeArgs),
    /// Change what a sandbox may use while it runs, and show what is in force
    Limits(limits::Args),
    /// Run commands in sandboxes at given times
    Schedule(schedule::Args),
    /// Run, list, show, stop and continue tasks
    Task(task::Args),
    Drain(drain::Args),
    /// Take new work again after a drain
    Undrain,
    /// Find what belongs to nobody, or is missing, and only tell it
    Audit,
    Reconcile(reconcile::Args),
    /// Have events sent to URLs: make, list, show, change, remove, test, replay
    Webhook(webhook::Args),
    Backup(backup::Args),
    /// Make, list and revoke keys
    Key(key::Args),
    Selftest(selftest::Args),
    /// Show the version of this program, and of the daemon if it runs
    Version,
}

/// Does it, says what went wrong, and answers with the exit code.
pub(crate) fn run(verb: Verb, global: &Global) -> ExitCode {
    // Where a command's own code is passed on, ours must not be taken for it.
    let is_command = matches!(verb, Verb::Run(_) | Verb::Exec(_) | Verb::Attach(_));
    dispatch(verb, global).unwrap_or_else(|error| {
        let code = fail::report(&error, FAILED);
        ExitCode::from(if is_command && code != fail::OK { NOT_THE_COMMAND } else { code })
    })
}

fn dispatch(verb: Verb, global: &Global) -> anyhow::Result<ExitCode> {
    if let Verb::Version = verb {
        return version::run(global);
    }
    if let Verb::Selftest(args) = &verb {
        return selftest::run(args, global);
    }
    let daemon = Daemon::connect(global)?;
    match verb {
        Verb::Run(args) => run::run(args, &daemon),
        Verb::Create(args) => create::run(args, &daemon),
        Verb::Ps(args) => ps::run(&args, &daemon),
        Verb::Show(args) => show::run(&args, &daemon),
        Verb::Exec(args) => exec::run(args, &daemon),
        Verb::Attach(args) => attach::run(&args, &daemon),
        Verb::Executions(args) => executions::run(&args, &daemon),
        Verb::Cancel(args) => cancel::run(args, &daemon),
        Verb::Kill(args) => kill::run(args, &daemon),
        Verb::Cp(args) => cp::run(&args, &daemon),
        Verb::Logs(args) => logs::run(&args, &daemon),
        Verb::Alerts(args) => alerts::run(&args, &daemon),
        Verb::Cleanup(args) => cleanup::run(&args, &daemon),
        Verb::Spares => spares::run(&daemon),
        Verb::Stats(args) => stats::run(&args, &daemon),
        Verb::Top(args) => top::run(&args, &daemon),
        Verb::Ensure(args) | Verb::Resume(args) => ensure::run(&args, &daemon),
        Verb::Freeze(args) => rest::run(rest::Rest::Freeze, &args, &daemon),
        Verb::Thaw(args) => rest::run(rest::Rest::Thaw, &args, &daemon),
        Verb::Hibernate(args) => rest::run(rest::Rest::Hibernate, &args, &daemon),
        Verb::Stop(args) => stop::run(&args, &daemon),
        Verb::Snapshot(args) => snapshot::run(args, &daemon),
        Verb::Rollback(args) => rollback::run(&args, &daemon),
        Verb::Fork(args) => fork::run(args, &daemon),
        Verb::Reset(args) => reset::run(&args, &daemon),
        Verb::Rm(args) => rm::run(&args, &daemon),
        Verb::Extend(args) => extend::run(&args, &daemon),
        Verb::Events(args) => events::run(&args, &daemon),
        Verb::Timeline(args) => timeline::run(&args, &daemon),
        Verb::Report(args) => report::run(&args, &daemon),
        Verb::Checkpoint(args) => checkpoint::run(&args, &daemon),
        Verb::Activity(args) => activity::run(args, &daemon),
        Verb::KeepAwake(args) => activity::keep_awake(args, &daemon),
        Verb::Limits(args) => limits::run(args, &daemon),
        Verb::Schedule(args) => schedule::run(args, &daemon),
        Verb::Task(args) => task::run(args, &daemon),
        Verb::Backup(args) => backup::run(&args, &daemon),
        Verb::Drain(args) => drain::run(&args, &daemon),
        Verb::Undrain => drain::undrain(&daemon),
        Verb::Audit => reconcile::audit(&daemon),
        Verb::Reconcile(args) => reconcile::run(&args, &daemon),
        Verb::Webhook(args) => webhook::run(args, &daemon),
        Verb::Key(args) => key::run(args, &daemon),
        Verb::Version | Verb::Selftest(_) => unreachable!("finds its daemon itself, and was done before"),
    }
}

/// The daemon that is spoken to, and how its answers are shown.
pub(crate) struct Daemon {
    pub(crate) client: Client,
    json: bool,
    project: Option<String>,
}

impl Daemon {
    /// Whom the options, the environment and the files name. Nothing is sent yet.
    pub(crate) fn connect(global: &Global) -> anyhow::Result<Self> {
        let target = global.target()?;
        let mut location = Location::new(target.url).name(NAME);
        if let Some(key) = target.key {
            location = location.key(key);
        }
        if let Some(file) = target.ca_file {
            let pem = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            location = location.authorities_pem(pem);
        }
        Ok(Self { client: Client::locate(location)?, json: global.json, project: target.project })
    }

    fn sandbox(&self, sandbox: &SandboxRef) -> SandboxHandle<'_> {
        self.client.sandbox(sandbox.clone())
    }

    /// One answer: as JSON, or as this text.
    fn answer(&self, answer: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<ExitCode> {
        if self.json {
            return print_json(answer);
        }
        print(&text())
    }
}

/// Text, with an end of line if it has none.
pub(crate) fn print(text: &str) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.is_empty() && !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    // What is shown as it happens must not wait for more.
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// One object on a line.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<ExitCode> {
    print(&serde_json::to_string(value)?)
}

/// Wall clock, for ages.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// How many characters fit in a line, if somebody looks.
fn width() -> Option<usize> {
    let out = io::stdout();
    if !out.is_terminal() {
        return None;
    }
    rustix::termios::tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col)).filter(|&width| width > 0)
}

/// Clears the screen, for what is shown again and again; elsewhere a blank line keeps the parts apart.
fn clear() -> io::Result<()> {
    let mut out = io::stdout().lock();
    let between: &[u8] = if out.is_terminal() { b"\x1b[H\x1b[2J" } else { b"\n" };
    out.write_all(between)
}
