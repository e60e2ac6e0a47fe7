//! `viv report`: all that somebody needs who was not there, in one folder (O8).

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use serde::Serialize;
use viv_api::bound::SandboxRef;
use viv_api::event::Event;
use viv_api::query::{ListEvents, ListLogs, SandboxLogQuery, StatsQuery};
use viv_core::SandboxId;

use super::{Daemon, now_ms, print};
use crate::fail::Failure;
use crate::text::parse_span;

/// How long what goes on inside is looked at.
const SAMPLE_MS: u64 = 2_000;

/// Sandboxes that are told one by one; more of them are in the events.
const SANDBOXES_MAX: usize = 50;

/// Write a bundle for whoever was not there: diagnosis, timeline, logs, figures, alerts and build
///
/// Of one sandbox, or of all to which something happened lately. Nothing is changed; no secret is in it, but what commands
/// wrote may be.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    #[arg(required_unless_present = "since")]
    sandbox: Option<SandboxRef>,
    /// Of everything in the last so long: 30m, 2h, 1d
    #[arg(long, value_name = "SPAN", value_parser = parse_span)]
    since: Option<u64>,
    /// Where to write it, a folder that is not there yet [default: viv-report-TIME]
    #[arg(long, short, value_name = "DIR")]
    output: Option<PathBuf>,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let now_ms = now_ms();
    let folder = args.output.clone().unwrap_or_else(|| format!("viv-report-{}", now_ms / 1000).into());
    let mut about: Vec<SandboxId> = Vec::new();
    if let Some(sandbox) = &args.sandbox {
        about.push(daemon.sandbox(sandbox).get()?.id);
    }
    let from_ms = args.since.map_or(0, |since_ms| now_ms.saturating_sub(since_ms));
    let events = events(args.sandbox.as_ref(), from_ms, daemon)?;
    if args.sandbox.is_none() {
        let named: BTreeSet<&SandboxId> = events.iter().rev().filter_map(|event| event.sandbox.as_ref()).collect();
        about.extend(named.into_iter().take(SANDBOXES_MAX).cloned());
    }
    fs::DirBuilder::new().mode(0o700).create(&folder).map_err(|error| {
        Failure::usage(format!("cannot make {}: {error}", folder.display())).hint("name a folder that is not there yet")
    })?;
    let report = Report { folder: folder.clone() };
    report.json("version.json", daemon.client.version())?;
    report.json("doctor.json", daemon.client.doctor())?;
    report.json("alerts.json", daemon.client.alerts())?;
    report.json("stats.json", daemon.client.stats(&StatsQuery { slo: true }))?;
    report.json("reconcilers.json", daemon.client.reconcilers())?;
    report.json(
        "daemon-log.json",
        daemon.client.logs(&ListLogs { sandbox: args.sandbox.clone(), ..ListLogs::default() }),
    )?;
    report.text("metrics.txt", daemon.client.metrics())?;
    report.lines("events.jsonl", &events)?;
    for id in &about {
        let handle = daemon.client.sandbox(id);
        fs::create_dir(folder.join(id.as_str()))?;
        let at = |name: &str| format!("{id}/{name}");
        report.json(&at("diagnosis.json"), handle.diagnosis_over(SAMPLE_MS))?;
        report.json(&at("timeline.json"), handle.timeline_all().collect::<Result<Vec<_>, _>>())?;
        report.json(&at("executions.json"), handle.executions_all().collect::<Result<Vec<_>, _>>())?;
        report.json(&at("resources.json"), handle.resources())?;
        report.json(&at("logs.json"), handle.logs(&SandboxLogQuery::default()))?;
    }
    if daemon.json {
        return super::print_json(&serde_json::json!({ "folder": folder, "sandboxes": about }));
    }
    print(&format!("{}\n", folder.display()))
}

/// The events in question, oldest first.
fn events(sandbox: Option<&SandboxRef>, from_ms: u64, daemon: &Daemon) -> anyhow::Result<Vec<Event>> {
    let (mut found, mut query) = (Vec::new(), ListEvents { sandbox: sandbox.cloned(), ..ListEvents::default() });
    loop {
        let page = daemon.client.events(&query)?;
        found.extend(page.items.into_iter().filter(|event| event.at_ms >= from_ms));
        let before = query.after.map_or(0, viv_api::bound::Sequence::get);
        if !page.more || page.next_after <= before {
            return Ok(found);
        }
        query.after = Some(viv_api::bound::Sequence::nearest(page.next_after));
    }
}

/// A folder that is being filled. What could not be had says why in its place.
struct Report {
    folder: PathBuf,
}

impl Report {
    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path: &Path = &self.folder.join(name);
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn json<T: Serialize, E: std::fmt::Display>(&self, name: &str, what: Result<T, E>) -> anyhow::Result<()> {
        let text = match what {
            Ok(what) => serde_json::to_string_pretty(&what)?,
            Err(error) => serde_json::json!({ "not_available": error.to_string() }).to_string(),
        };
        self.write(name, &(text + "\n"))
    }

    fn text<E: std::fmt::Display>(&self, name: &str, what: Result<String, E>) -> anyhow::Result<()> {
        self.write(name, &what.unwrap_or_else(|error| format!("not available: {error}\n")))
    }

    fn lines(&self, name: &str, all: &[impl Serialize]) -> anyhow::Result<()> {
        let mut text = String::new();
        for one in all {
            writeln!(text, "{}", serde_json::to_string(one)?)?;
        }
        self.write(name, &text)
    }
}
