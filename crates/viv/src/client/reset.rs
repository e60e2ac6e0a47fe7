//! `viv reset`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::snapshot::ResetSandbox;

use super::new::{check, wrong};
use super::progress::Waiting;
use super::{Daemon, ensure};
use crate::fail::Failure;
use crate::text::parse_span;

/// Make a sandbox begin anew: what runs in it and all its snapshots go
///
/// Its name, what it is made of and its policy stay. Snapshots that others begin with stay for as long as they do.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// Say that all it holds may be thrown away
    #[arg(long, short)]
    yes: bool,
    /// How long to wait until it is ready; 0 does not wait
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    if !args.yes {
        let message = format!("all that {} holds would be thrown away, with its snapshots", args.sandbox);
        return Err(Failure::usage(message).hint("say so with --yes").into());
    }
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    let reset = {
        let _waiting = Waiting::on(format!("{} begins anew", args.sandbox));
        daemon.sandbox(&args.sandbox).reset(&ResetSandbox { wait_ms })?
    };
    let is_done = matches!(reset, Change::Done(_));
    let sandbox = reset.into_sandbox();
    daemon.answer(&sandbox, || format!("{}  {}  generation {}", sandbox.id, sandbox.status, sandbox.generation))?;
    if is_done {
        check(&sandbox)?;
    }
    Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, "ready"))
}
