//! `viv timeline`

use std::collections::BTreeSet;
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

    /// With every step on the way from one phase to the next, every command and every change of a file; JSON has them
    /// always
    #[arg(long)]
    steps: bool,
}

/// What tells of a step within a phase.
const STEP: &str = "sandbox.advanced";

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let mut table = Table::new(&["WHEN", "GEN", "PHASE", "AFTER", "WHAT"]);
    let mut work = Work::default();
    for entry in handle.timeline_all() {
        let entry = entry?;
        if daemon.json {
            print_json(&entry)?;
        } else if args.steps {
            table.row(row(&entry));
        } else if entry.kind != STEP && !work.takes(&entry) {
            work.put_down(&mut table);
            table.row(row(&entry));
        }
    }
    work.put_down(&mut table);
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(entry: &TimelineEntry) -> [String; 5] {
    let none = || NONE.to_owned();
    let what = if entry.message.is_empty() { &entry.kind } else { &entry.message };
    [
        clock(entry.at_ms),
        entry.generation.map_or_else(none, |generation| generation.to_string()),
        entry.to.map_or_else(none, |to| to.to_string()),
        entry.took_ms.map_or_else(none, span),
        format!("{what}, by {}", entry.by),
    ]
}

/// What was done in a sandbox between two lines of its life: one row, however much it was.
#[derive(Default)]
struct Work {
    first: Option<TimelineEntry>,
    by: BTreeSet<String>,
    started: u64,
    ended: u64,
    cancelled: u64,
    signalled: u64,
    files: u64,
}

impl Work {
    /// Whether this was done inside, and is counted.
    fn takes(&mut self, entry: &TimelineEntry) -> bool {
        match entry.kind.as_str() {
            "execution.started" => self.started += 1,
            "execution.ended" => self.ended += 1,
            "execution.cancel_asked" => self.cancelled += 1,
            "execution.signalled" => self.signalled += 1,
            kind if kind.starts_with("file.") => self.files += 1,
            _ => return false,
        }
        // Who told of an end did not do it.
        if entry.kind != "execution.ended" {
            self.by.insert(entry.by.clone());
        }
        self.first.get_or_insert_with(|| entry.clone());
        true
    }

    fn put_down(&mut self, table: &mut Table) {
        let work = std::mem::take(self);
        let Some(first) = &work.first else { return };
        let counted = [
            (work.started, "command started", "commands started"),
            (work.ended, "command ended", "commands ended"),
            (work.cancelled, "cancelled", "cancelled"),
            (work.signalled, "signal", "signals"),
            (work.files, "change of files", "changes of files"),
        ];
        let some = counted.into_iter().filter(|(count, ..)| *count > 0);
        let parts = some.map(|(count, one, more)| format!("{count} {}", if count == 1 { one } else { more }));
        let mut what = parts.collect::<Vec<_>>().join(", ");
        if !work.by.is_empty() {
            what = format!("{what}, by {}", work.by.into_iter().collect::<Vec<_>>().join(" and "));
        }
        let [when, generation, phase, after, _] = row(first);
        table.row([when, generation, phase, after, what]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(seq: u64, kind: &str, by: &str) -> TimelineEntry {
        TimelineEntry {
            seq,
            at_ms: seq,
            kind: kind.to_owned(),
            generation: None,
            from: None,
            to: None,
            took_ms: None,
            cause: None,
            by: by.to_owned(),
            message: String::new(),
        }
    }

    #[test]
    fn o7_what_is_done_inside_is_one_row_between_two_of_its_life() {
        let mut table = Table::new(&["WHEN", "GEN", "PHASE", "AFTER", "WHAT"]);
        let mut work = Work::default();
        let kinds = ["execution.started", "execution.ended", "file.written", "file.moved", "execution.started"];
        for (seq, kind) in (0..).zip(kinds) {
            assert!(work.takes(&entry(seq, kind, if seq == 1 { "provider" } else { "key:a" })));
        }
        assert!(!work.takes(&entry(9, "sandbox.moved", "engine")));
        work.put_down(&mut table);
        work.put_down(&mut table);
        let shown = table.render(None);
        assert!(shown.contains("2 commands started, 1 command ended, 2 changes of files, by key:a"), "{shown}");
        assert_eq!(shown.lines().count(), 2, "one row, and nothing for nothing: {shown}");
    }
}
