//! `viv cancel`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, Signal};
use viv_core::ExecutionId;

use super::Daemon;
use super::progress::Waiting;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// The command's id
    execution: ExecutionId,
    /// Send this signal to its first process instead
    #[arg(long, short, value_name = "NUMBER")]
    signal: Option<Signal>,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox).execution(args.execution);
    if let Some(signal) = args.signal {
        handle.signal(signal)?;
        return Ok(ExitCode::SUCCESS);
    }
    let ended = {
        let _waiting = Waiting::on("cancelling");
        handle.cancel()?
    };
    daemon.answer(&ended, || ended.id.to_string())
}
