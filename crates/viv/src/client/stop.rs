//! `viv stop`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::sandbox::StopSandbox;

use super::new::wrong;
use super::progress::Waiting;
use super::{Daemon, ensure, rm};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ids or names
    #[arg(required = true)]
    sandboxes: Vec<SandboxRef>,
    /// How long to wait for each; 0 does not wait, it stops all the same
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    rm::each(&args.sandboxes, |sandbox| {
        let stopped = {
            let _waiting = Waiting::on(format!("stopping {sandbox}"));
            daemon.sandbox(sandbox).stop(&StopSandbox { wait_ms })?
        };
        let is_done = matches!(stopped, Change::Done(_));
        let sandbox = stopped.into_sandbox();
        daemon.answer(&sandbox, || format!("{}  {}", sandbox.id, sandbox.status))?;
        Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, "stopped"))
    })
}
