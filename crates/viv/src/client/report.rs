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
use viv_api::sandbox::TimelineEntry;
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
        about = last_touched(events.iter().filter_map(|event| event.sandbox.as_ref()));
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
        let timeline = handle.timeline_all().collect::<Result<Vec<_>, _>>();
        report.json(&at("before-after.json"), timeline.as_ref().map(|all| before_and_after(all, from_ms)))?;
        report.json(&at("timeline.json"), timeline)?;
        report.json(&at("executions.json"), handle.executions_all().collect::<Result<Vec<_>, _>>())?;
        report.json(&at("resources.json"), handle.resources())?;
        report.json(&at("logs.json"), handle.logs(&SandboxLogQuery::default()))?;
    }
    if daemon.json {
        return super::print_json(&serde_json::json!({ "folder": folder, "sandboxes": about }));
    }
    print(&format!("{}\n", folder.display()))
}

/// Those to which something happened last, the latest first. What they are told of is oldest first.
fn last_touched<'s>(named: impl DoubleEndedIterator<Item = &'s SandboxId>) -> Vec<SandboxId> {
    let mut seen = BTreeSet::new();
    named.rev().filter(|id| seen.insert(*id)).take(SANDBOXES_MAX).cloned().collect()
}

/// How it was before what the report is about, and how it is after it: phase, generation, since when, and why. Without a
/// time in question, that is before the last change.
fn before_and_after(timeline: &[TimelineEntry], from_ms: u64) -> serde_json::Value {
    let mut changes: Vec<&TimelineEntry> = timeline.iter().filter(|entry| entry.to.is_some()).collect();
    changes.sort_by_key(|entry| entry.seq);
    let shown = |entry: Option<&&TimelineEntry>| match entry {
        Some(entry) => serde_json::json!({
            "phase": entry.to, "generation": entry.generation, "since_at_ms": entry.at_ms, "cause": entry.cause,
            "by": entry.by, "message": entry.message,
        }),
        // It was not there yet.
        None => serde_json::Value::Null,
    };
    let before = match from_ms {
        0 => changes.len().checked_sub(2).and_then(|at| changes.get(at)),
        _ => changes.iter().rev().find(|entry| entry.at_ms < from_ms),
    };
    serde_json::json!({ "before": shown(before), "after": shown(changes.last()) })
}

/// The events in question, oldest first.
fn events(sandbox: Option<&SandboxRef>, from_ms: u64, daemon: &Daemon) -> anyhow::Result<Vec<Event>> {
    let since_ms = (from_ms > 0).then(|| viv_api::bound::MomentMs::nearest(from_ms));
    let mut query = ListEvents { sandbox: sandbox.cloned(), since_ms, ..ListEvents::default() };
    let mut found = Vec::new();
    loop {
        let page = daemon.client.events(&query)?;
        found.extend(page.items);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o8_a_report_is_about_whom_something_happened_to_last() {
        let ids: Vec<SandboxId> = (0..60).rev().map(|id| SandboxId::from_bytes([id; 16])).collect();
        // The first of them is touched once more at the end.
        let about = last_touched(ids.iter().chain([&ids[0]]));
        assert_eq!(about.len(), SANDBOXES_MAX);
        assert_eq!((&about[0], &about[1]), (&ids[0], &ids[59]));
        assert!(!about.contains(&ids[1]), "it was the first of all, and not again");
    }

    #[test]
    fn o8_a_report_says_how_it_was_before_and_is_after() {
        let entry = |seq: u64, to: Option<&str>| {
            let entry = serde_json::json!({ "seq": seq, "at_ms": seq * 100, "kind": "sandbox.moved", "generation": 1,
                "from": null, "to": to, "took_ms": null, "cause": null, "by": "test", "message": "" });
            serde_json::from_value::<TimelineEntry>(entry).unwrap()
        };
        let all = [entry(1, Some("provisioning")), entry(2, Some("ready")), entry(3, Some("lost")), entry(4, None)];
        let phases = |from_ms: u64| {
            let states = before_and_after(&all, from_ms);
            (states["before"]["phase"].clone(), states["after"]["phase"].clone())
        };
        assert_eq!(phases(0), ("ready".into(), "lost".into()), "before the last change");
        assert_eq!(phases(150), ("provisioning".into(), "lost".into()), "before the time in question");
        assert_eq!(phases(50), (serde_json::Value::Null, "lost".into()), "it was not there yet");
    }
}
