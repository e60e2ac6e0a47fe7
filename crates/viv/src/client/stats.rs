//! `viv stats`

use std::process::ExitCode;

use viv_api::query::StatsQuery;
use viv_api::stats::{QuotaUse, Stats};

use super::table::{Facts, Table};
use super::{Daemon, alerts};
use crate::text::{bytes, span};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also how the targets are met
    #[arg(long)]
    slo: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let stats = daemon.client.stats(&StatsQuery { slo: args.slo })?;
    // What is wrong stands first; without it the figures are still worth telling.
    let alerts =
        if daemon.json { Vec::new() } else { daemon.client.alerts().map(|page| page.items).unwrap_or_default() };
    daemon.answer(&stats, || alerts::firing(&alerts) + &shown(&stats))
}

/// A quota's name, and what is in use of it.
fn in_use(quota: &QuotaUse) -> (String, String) {
    let amount = |count: u64| match quota.name.as_str() {
        "memory_bytes" | "disk_bytes" => bytes(count),
        _ => count.to_string(),
    };
    let max = quota.max.map(|max| format!(" of {}", amount(max))).unwrap_or_default();
    (quota.name.trim_end_matches("_bytes").replace('_', " "), format!("{}{max}", amount(quota.used)))
}

fn shown(stats: &Stats) -> String {
    let mut facts = Facts::default();
    for (name, count) in [
        ("active", stats.active),
        ("provisioning", stats.provisioning),
        ("terminating", stats.terminating),
        ("hibernated", stats.hibernated),
        ("spare", stats.spare),
        ("created in all", stats.created_total),
        ("destroyed in all", stats.destroyed_total),
        ("lost in all", stats.lost_total),
        ("failed in all", stats.failed_total),
    ] {
        facts.add(name, count.to_string());
    }
    for quota in &stats.quotas {
        let (name, used) = in_use(quota);
        // Quotas add up what may be used, and not what is.
        let word = if quota.name == "sandboxes" { "in use" } else { "promised" };
        facts.add(&format!("  {name} {word}"), used);
    }
    for project in stats.projects.iter().filter(|_| stats.projects.len() > 1) {
        let used: Vec<String> = project
            .quotas
            .iter()
            .map(|quota| {
                let (name, used) = in_use(quota);
                format!("{name} {used}")
            })
            .collect();
        facts.add(&format!("  in {}", project.project), used.join(", "));
    }
    for (status, count) in &stats.by_status {
        facts.add(&format!("  {status}"), count.to_string());
    }
    for bucket in &stats.ages {
        let name = bucket.up_to_ms.map_or_else(|| "  older".to_owned(), |ms| format!("  up to {} old", span(ms)));
        facts.add(&name, bucket.count.to_string());
    }
    let mut text = facts.render();
    if !stats.slo.is_empty() {
        let mut table = Table::new(&["TARGET", "WANTED", "COUNTED", "MET"]);
        for target in &stats.slo {
            let met = target.met.map_or("no data", |met| if met { "yes" } else { "NO" });
            table.row([
                target.name.clone(),
                target.target.clone(),
                format!("{} of {}", target.numerator, target.denominator),
                met.to_owned(),
            ]);
        }
        text.push('\n');
        text.push_str(&table.render(None));
    }
    text
}
