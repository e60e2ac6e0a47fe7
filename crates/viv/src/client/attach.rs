//! `viv attach`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_core::ExecutionId;

use super::Daemon;
use super::interrupt::{Interrupts, Policy};
use super::session::{self, How};

/// Take up the output of a command again, also of one that ended
///
/// Ctrl-C leaves the command running.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// The command's id
    execution: ExecutionId,
    /// The first byte of output to show
    #[arg(long, default_value_t = 0)]
    offset: u64,
    /// Pass standard input in, after what the command was given so far
    #[arg(long, short)]
    interactive: bool,
    /// Show what there is, and do not wait for more
    #[arg(long)]
    no_follow: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let execution = daemon.sandbox(&args.sandbox).execution(args.execution.clone()).get()?;
    let tty = args.interactive && execution.tty;
    let how = How { offset: args.offset, follow: !args.no_follow, stdin: args.interactive, tty, ours: false };
    let interrupts = Interrupts::catch(&daemon.client, Policy::Leave)?;
    session::stay(daemon, &execution, &how, Some(&interrupts)).map(session::exit)
}
