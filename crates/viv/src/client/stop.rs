//! `viv stop`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::sandbox::{FailedSave, Sandbox, Status, StopSandbox};

use super::new::wrong;
use super::progress::Waiting;
use super::{Daemon, ensure, rm};
use crate::fail::{FAILED, Failure};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ids or names
    #[arg(required = true)]
    sandboxes: Vec<SandboxRef>,
    /// How long to wait for each; 0 does not wait, it stops all the same
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
    /// Of one that could not be saved: try again now
    #[arg(long, conflicts_with = "discard")]
    retry: bool,
    /// Of one that could not be saved: give up what was not, and keep what was saved before
    #[arg(long)]
    discard: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    let failed_save = match (args.retry, args.discard) {
        (true, _) => Some(FailedSave::Retry),
        (false, true) => Some(FailedSave::Discard),
        (false, false) => None,
    };
    rm::each(&args.sandboxes, |sandbox| {
        let stopped = {
            let _waiting = Waiting::on(format!("stopping {sandbox}"));
            daemon.sandbox(sandbox).stop(&StopSandbox { wait_ms, failed_save })?
        };
        let is_done = matches!(stopped, Change::Done(_));
        let sandbox = stopped.into_sandbox();
        daemon.answer(&sandbox, || format!("{}  {}", sandbox.id, sandbox.status))?;
        if sandbox.status == Status::SaveFailed {
            return Err(not_saved(&sandbox).into());
        }
        Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, "stopped"))
    })
}

/// Its processes have ended, its files are kept, and somebody has to do something.
pub(super) fn not_saved(sandbox: &Sandbox) -> Failure {
    let why = sandbox.cause.as_ref().map_or_else(String::new, |cause| format!(": {}", cause.message));
    let message = format!("{} could not be saved; its processes have ended, and its files are kept{why}", sandbox.id);
    let hint = format!("make room, then `viv stop --retry {0}`; or `viv stop --discard {0}` gives them up", sandbox.id);
    Failure::new(FAILED, message).hint(hint)
}
