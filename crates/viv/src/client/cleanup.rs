//! `viv cleanup`

use std::fmt::Write as _;
use std::process::ExitCode;

use viv_api::bound::CleanupAgeMs;
use viv_api::cleanup::{BeginCleanup, Cleanup, CleanupLayer};

use super::table::{Table, clean};
use super::{Daemon, width};
use crate::text::parse_span;

/// Clean up now: leftovers of what failed or is lost, and what is past its time
///
/// The daemon does the same by itself every five minutes. Persistent sandboxes are saved, never lost; who is in use is
/// left alone.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this layer, and others that are named so: unhealthy, leftovers, age, emergency
    #[arg(long = "layer", value_name = "NAME", value_parser = parse_layer)]
    layers: Vec<CleanupLayer>,
    /// Whatever is older than this goes this time, by the layer age, unless it is in use
    #[arg(long, value_name = "SPAN", value_parser = parse_age)]
    older_than: Option<CleanupAgeMs>,
    /// Also put idle sandboxes to rest until every quota has a fifth left: persistent ones first, then who was not used
    /// for longest
    #[arg(long)]
    emergency: bool,
    /// Only say what would be done
    #[arg(long)]
    dry_run: bool,
}

fn parse_layer(text: &str) -> Result<CleanupLayer, String> {
    let known = CleanupLayer::ALL.into_iter().find(|layer| layer.as_str() == text);
    known.ok_or_else(|| format!("the layers are {}", CleanupLayer::ALL.map(CleanupLayer::as_str).join(", ")))
}

fn parse_age(text: &str) -> Result<CleanupAgeMs, String> {
    CleanupAgeMs::new(parse_span(text)?).map_err(|error| error.to_string())
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let asked = BeginCleanup {
        layers: args.layers.clone(),
        age_max_ms: args.older_than,
        emergency: args.emergency,
        dry_run: args.dry_run,
    };
    let done = daemon.client.clean_up(&asked)?;
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
