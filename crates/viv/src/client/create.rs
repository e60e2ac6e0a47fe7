//! `viv create`

use std::process::ExitCode;

use viv_api::bound::IdempotencyKey;
use viv_api::client::Change;

use super::new::{self, NewArgs};
use super::{Daemon, ensure};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    new: NewArgs,
    /// Save it when it stops, also without a name
    #[arg(long, conflicts_with = "ephemeral")]
    persistent: bool,
    /// Leave nothing when it stops, also with a name
    #[arg(long)]
    ephemeral: bool,
    /// How long to wait until it is ready; 0 does not wait [default: 60s]
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    wait: Option<u64>,
    /// Asked again with the same key and the same options, no second one is made
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<IdempotencyKey>,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let persistent = match (args.persistent, args.ephemeral) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        (false, false) => None,
    };
    let request = args.new.request(persistent, args.wait)?;
    let is_waited_for = args.wait != Some(0);
    let made = new::make(daemon, &request, args.idempotency_key)?;
    let is_done = matches!(made, Change::Done(_));
    let sandbox = made.into_sandbox();
    // It is said also when it did not become ready: whoever made it has to be able to look at it.
    daemon.answer(&sandbox, || sandbox.id.to_string())?;
    new::check(&sandbox)?;
    Ok(ensure::verdict(&sandbox, is_done || !is_waited_for, "ready"))
}
