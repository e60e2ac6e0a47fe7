//! `viv ensure`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::sandbox::{EnsureSandbox, Sandbox};

use super::Daemon;
use super::new::{check, wrong};
use super::progress::Waiting;
use crate::fail::TIMEOUT;
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// How long to wait until it is ready; 0 does not wait
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    let ensured = {
        let _waiting = Waiting::on(format!("making {} run", args.sandbox));
        daemon.sandbox(&args.sandbox).ensure(&EnsureSandbox { wait_ms })?
    };
    let is_done = matches!(ensured, Change::Done(_));
    let sandbox = ensured.into_sandbox();
    daemon.answer(&sandbox, || format!("{}  {}", sandbox.id, sandbox.status))?;
    if is_done {
        check(&sandbox)?;
    }
    Ok(verdict(&sandbox, is_done || args.wait == 0, "ready"))
}

/// The exit code of a change that was waited for.
pub(super) fn verdict(sandbox: &Sandbox, is_done: bool, wanted: &str) -> ExitCode {
    if is_done {
        return ExitCode::SUCCESS;
    }
    eprintln!("viv: {} is not {wanted} yet: {}; it goes on by itself", sandbox.id, sandbox.status);
    ExitCode::from(TIMEOUT)
}
