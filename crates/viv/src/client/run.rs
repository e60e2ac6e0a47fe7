//! `viv run`: create, execute, delete.

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::{Change, SandboxHandle};
use viv_api::sandbox::{EnsureSandbox, Sandbox};

use super::Daemon;
use super::exec::CommandArgs;
use super::interrupt::{Interrupts, Policy};
use super::new::{self, NewArgs, fresh_key};
use super::progress::Waiting;
use super::session::{self, Begin, How};
use super::terminal;
use crate::fail::SIGNAL_BASE;

/// How long deleting is waited for: ending what runs takes 5 s at most (L8).
const DELETE_MS: u64 = 30_000;
/// How long a sandbox that is not ready yet is waited for at a time.
const ENSURE_MS: u64 = 30_000;

/// Run a command in a new sandbox, and delete the sandbox afterwards
///
/// Standard input is passed in. On a terminal the command gets one too. The first Ctrl-C cancels the command and deletes
/// the sandbox; a second one leaves without waiting for that.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    new: NewArgs,
    /// Leave the sandbox, and say its id on standard error
    #[arg(long)]
    keep: bool,
    /// Run on a terminal, also when standard input or output is none
    #[arg(long, short, overrides_with = "no_tty")]
    tty: bool,
    /// Run without a terminal, also on one
    #[arg(long, overrides_with = "tty")]
    no_tty: bool,
    #[command(flatten)]
    command: CommandArgs,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let tty = args.tty || (!args.no_tty && terminal::is_interactive());
    let start = args.command.request(true, tty)?;
    // What is deleted anyway need not be saved.
    let persistent = if args.keep { None } else { Some(false) };
    let request = args.new.request(persistent, None)?;
    // From here on an interrupt ends nothing by itself: what is being made is finished, and then removed.
    let interrupts = Interrupts::catch(&daemon.client, Policy::Cancel)?;
    let made = new::make(daemon, &request, None)?;
    let sandbox = made.clone().into_sandbox();
    if args.keep {
        eprintln!("sandbox: {}", sandbox.id);
    }
    let handle = daemon.client.sandbox(SandboxRef::from(&sandbox.id));
    let work = || -> anyhow::Result<u8> {
        let sandbox = ready(&handle, made)?;
        if let Some(signal) = interrupts.signal() {
            return Ok(SIGNAL_BASE + signal);
        }
        let execution = handle.clone().at(sandbox.generation).start(&start, Some(&fresh_key()?))?;
        if args.keep {
            eprintln!("execution: {}", execution.id);
        }
        let how = How { begin: Begin::Offset(0), since: None, follow: true, stdin: true, tty, ours: true };
        session::stay(daemon, &execution, &how, Some(&interrupts))
    };
    let outcome = work();
    if !args.keep {
        delete(&handle, &sandbox);
    }
    let code = outcome?;
    Ok(session::exit(interrupts.signal().map_or(code, |signal| SIGNAL_BASE + signal)))
}

/// Waits until it is ready; what is in transition is joined.
fn ready(handle: &SandboxHandle<'_>, mut made: Change) -> anyhow::Result<Sandbox> {
    loop {
        match made {
            Change::Done(sandbox) => {
                new::check(&sandbox)?;
                return Ok(*sandbox);
            }
            Change::Underway(sandbox) => new::check(&sandbox)?,
        }
        let _waiting = Waiting::on("making the sandbox");
        made = handle.ensure(&EnsureSandbox { wait_ms: Some(WaitMs::nearest(ENSURE_MS)) })?;
    }
}

/// The command's own end is what counts; a sandbox that stays is said.
fn delete(handle: &SandboxHandle<'_>, sandbox: &Sandbox) {
    let _waiting = Waiting::on("deleting the sandbox");
    match handle.delete(Some(WaitMs::nearest(DELETE_MS))) {
        Ok(Change::Done(_)) => {}
        Ok(Change::Underway(_)) => eprintln!("viv: {} is still being deleted; that goes on by itself", sandbox.id),
        Err(error) => {
            eprintln!("viv: {} could not be deleted: {error}\nhint: viv rm {}", sandbox.id, sandbox.id);
        }
    }
}
