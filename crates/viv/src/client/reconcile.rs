//! `viv audit` and `viv reconcile`

use std::fmt::Write;
use std::process::ExitCode;

use viv_api::reconcile::{Reconcile, Reconciled};

use super::Daemon;
use crate::fail;

/// Find what belongs to nobody, or is missing, and put it right
///
/// Compares records, the provider's instances and what lies on the machine: instances without a record, records without
/// an instance, half-made folders, shims and agents without each other, mounts, cgroups, layers, sockets, leases and
/// fences. What is not ours is not touched; an instance goes after its grace and two listings that agree. Exits with 1
/// if something could not be put right.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tell what would be put right, as `viv audit` does
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    look(args.dry_run, daemon)
}

pub(super) fn audit(daemon: &Daemon) -> anyhow::Result<ExitCode> {
    look(true, daemon)
}

fn look(dry_run: bool, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let report = daemon.client.reconcile(&Reconcile { dry_run })?;
    daemon.answer(&report, || words(&report))?;
    Ok(if report.failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(fail::FAILED) })
}

fn words(report: &Reconciled) -> String {
    let mut text = if report.found == 0 {
        "nothing is left over, and nothing is missing".to_owned()
    } else if report.dry_run {
        format!("{} found, nothing done", report.found)
    } else {
        format!("{} found: {} done, {} left, {} failed", report.found, report.done, report.left, report.failed)
    };
    if !report.complete {
        text.push_str("\nthe provider did not tell of all its instances: no record was called missing");
    }
    for item in &report.items {
        let message = item.message.as_ref().map_or_else(String::new, |message| format!(": {message}"));
        let _ = write!(text, "\n{:<8}  {:<12}  {}  ({}){message}", item.outcome, item.kind, item.what, item.why);
    }
    text
}
