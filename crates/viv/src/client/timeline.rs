//! `viv timeline`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::sandbox::TimelineEntry;

use super::table::{NONE, Table, clock};
use super::{Daemon, print, print_json, width};
use crate::text::span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,

    /// With every step on the way from one phase to the next; JSON has them always
    #[arg(long)]
    steps: bool,
}

/// What tells of a step within a phase.
const STEP: &str = "sandbox.advanced";

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let mut table = Table::new(&["WHEN", "GEN", "PHASE", "AFTER", "WHAT"]);
    for entry in handle.timeline_all() {
        let entry = entry?;
        if daemon.json {
            print_json(&entry)?;
        } else if args.steps || entry.kind != STEP {
            table.row(row(&entry));
        }
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(entry: &TimelineEntry) -> [String; 5] {
    let none = || NONE.to_owned();
    let cause = entry.cause.as_ref().map_or_else(String::new, |cause| format!(", by {}", cause.by));
    let what = if entry.message.is_empty() { &entry.kind } else { &entry.message };
    [
        clock(entry.at_ms),
        entry.generation.map_or_else(none, |generation| generation.to_string()),
        entry.to.map_or_else(none, |to| to.to_string()),
        entry.took_ms.map_or_else(none, span),
        format!("{what}{cause}"),
    ]
}
