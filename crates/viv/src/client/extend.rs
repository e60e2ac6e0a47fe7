//! `viv extend`

use std::process::ExitCode;

use viv_api::bound::{LifetimeMs, SandboxRef};
use viv_api::sandbox::ExtendSandbox;

use super::Daemon;
use super::new::wrong_span;
use crate::text::{parse_span, span};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// Time from now, such as 30m or 2h
    #[arg(value_parser = parse_span)]
    span: u64,
    /// Exactly then, also when that is earlier; otherwise a later deadline stays
    #[arg(long)]
    exactly: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let ms = LifetimeMs::new(args.span).map_err(wrong_span)?;
    let change = if args.exactly { ExtendSandbox::ExactlyMs(ms) } else { ExtendSandbox::AtLeastMs(ms) };
    let deadline = daemon.sandbox(&args.sandbox).extend(change)?;
    daemon.answer(&deadline, || format!("ends in {}", span(deadline.remaining_ms)))
}
