//! `viv cleanup`

use std::fmt::Write as _;
use std::process::ExitCode;

use viv_api::cleanup::{BeginCleanup, Cleanup};

use super::table::{Table, clean};
use super::{Daemon, width};

/// Clean up now: leftovers of what failed or is lost, and what is past its time
///
/// The daemon does the same by itself every five minutes. Persistent sandboxes are saved, never lost; who is in use is
/// left alone.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also put idle sandboxes to rest until every quota has a fifth left: persistent ones first, then who was not used
    /// for longest
    #[arg(long)]
    emergency: bool,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let done = daemon.client.clean_up(&BeginCleanup { emergency: args.emergency, dry_run: args.dry_run })?;
    daemon.answer(&done, || shown(&done))
}

fn shown(done: &Cleanup) -> String {
    let mut text = String::new();
    if !done.items.is_empty() {
        let mut table = Table::new(&["SANDBOX", "LAYER", "ACTION", "OUTCOME", "WHY"]);
        for item in &done.items {
            let why =
                item.message.as_ref().map_or_else(|| item.why.clone(), |failed| format!("{}: {failed}", item.why));
            table.row([
                item.sandbox.to_string(),
                item.layer.clone(),
                item.action.clone(),
                item.outcome.clone(),
                clean(&why),
            ]);
        }
        text = table.render(width());
    }
    let _ = writeln!(text, "found {}, done {}, failed {}", done.found, done.done, done.failed);
    text
}
