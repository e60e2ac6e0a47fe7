//! `viv rollback`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, SnapshotRef, WaitMs};
use viv_api::client::Change;
use viv_api::snapshot::RollbackSandbox;

use super::new::{check, wrong};
use super::progress::Waiting;
use super::{Daemon, ensure};
use crate::text::parse_span;

/// Make a sandbox go on from a snapshot, under the same id
///
/// What runs in it is ended, and what it is now is saved first, as an automatic snapshot; --discard throws that away.
/// It runs then, as a new generation; its policy stays as it is.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// The snapshot's id
    snapshot: SnapshotRef,
    /// Throw away what it is now
    #[arg(long)]
    discard: bool,
    /// How long to wait until it is ready; 0 does not wait
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    let request = RollbackSandbox { snapshot: args.snapshot.clone(), discard: args.discard, wait_ms };
    let back = {
        let _waiting = Waiting::on(format!("{} goes back to {}", args.sandbox, args.snapshot));
        daemon.sandbox(&args.sandbox).rollback(&request)?
    };
    let is_done = matches!(back, Change::Done(_));
    let sandbox = back.into_sandbox();
    daemon.answer(&sandbox, || format!("{}  {}  generation {}", sandbox.id, sandbox.status, sandbox.generation))?;
    if is_done {
        check(&sandbox)?;
    }
    Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, "ready"))
}
