//! `viv activity` and `viv keep-awake`

use std::process::ExitCode;

use viv_api::bound::{LeaseName, Note, SandboxRef, TtlMs};
use viv_api::sandbox::{ReportActivity, TakeKeepAwake};

use super::new::wrong;
use super::table::{ago, until};
use super::{Daemon, now_ms};
use crate::text::parse_span;

/// What a lease is called when it is not said.
const LEASE: &str = "cli";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    /// By what, for people
    #[arg(long)]
    reason: Option<Note>,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let activity = daemon.sandbox(&args.sandbox).activity(&ReportActivity { reason: args.reason })?;
    daemon.answer(&activity, || format!("active {}", ago(now_ms(), activity.last_activity_at_ms)))
}

#[derive(clap::Args)]
pub(crate) struct KeepAwakeArgs {
    /// Id or name
    sandbox: SandboxRef,
    /// For how long, such as 2m
    #[arg(value_parser = parse_span, required_unless_present = "release")]
    span: Option<u64>,
    /// The lease's name; taken again under the same name, it counts from now
    #[arg(long, default_value = LEASE)]
    lease: LeaseName,
    /// Why, for people
    #[arg(long)]
    reason: Option<Note>,
    /// Give the lease back
    #[arg(long, conflicts_with_all = ["span", "reason"])]
    release: bool,
}

pub(super) fn keep_awake(args: KeepAwakeArgs, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let Some(span) = args.span else {
        handle.release(&args.lease)?;
        return Ok(ExitCode::SUCCESS);
    };
    let request = TakeKeepAwake { ttl_ms: TtlMs::new(span).map_err(wrong)?, reason: args.reason };
    let lease = handle.keep_awake(&args.lease, &request)?;
    daemon.answer(&lease, || format!("{} ends {}", lease.lease, until(now_ms(), lease.expires_at_ms)))
}
