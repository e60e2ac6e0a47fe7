//! `viv snapshot`

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use viv_api::bound::{IdempotencyKey, LabelFilter, Labels, SandboxName, SandboxRef, SnapshotRef};
use viv_api::query::ImportSnapshot;
use viv_api::snapshot::{CreateSnapshot, Snapshot, SnapshotIntegrity, SnapshotKind, SnapshotState};
use viv_core::SnapshotId;

use super::new::{once, wrong};
use super::progress::Waiting;
use super::table::{Facts, NONE, Table, age, ago};
use super::{Daemon, now_ms, print, print_json, width};
use crate::fail::{self, FAILED};
use crate::text::bytes;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Make a snapshot of a sandbox, and say its id
    ///
    /// What runs stands still for the copy and runs on; how long, and how much was copied, is said. Of a sandbox that
    /// is saved already nothing is copied: that state is kept.
    Create {
        /// Id or name
        sandbox: SandboxRef,
        /// What it is called, for people
        #[arg(long)]
        name: Option<SandboxName>,
        /// A label
        #[arg(long, short, value_name = "KEY=VALUE")]
        label: Vec<LabelFilter>,
        /// Asked again with the same key and the same options, no second one is made
        #[arg(long, value_name = "KEY")]
        idempotency_key: Option<IdempotencyKey>,
    },
    /// List snapshots: of one sandbox, or all that the key may see
    ///
    /// OWN is what removing it would free; the rest is shared with others.
    Ls {
        /// Id or name
        sandbox: Option<SandboxRef>,
        /// Only ids, for scripts
        #[arg(long, short)]
        quiet: bool,
    },
    /// Show a snapshot, and who begins with it
    Show {
        /// Its id
        snapshot: SnapshotRef,
    },
    /// Remove snapshots that nobody uses
    Rm {
        /// Ids
        #[arg(required = true)]
        snapshots: Vec<SnapshotRef>,
    },
    /// Show which snapshot was made from which
    Tree {
        /// Id or name; all snapshots that the key may see when not said
        sandbox: Option<SandboxRef>,
    },
    /// Write a snapshot to one file, for another installation
    Export {
        /// Its id
        snapshot: SnapshotRef,
        /// Where to; - is standard output
        file: PathBuf,
    },
    /// Read a snapshot from a file, and say its id
    Import {
        /// Where from; - is standard input
        file: PathBuf,
        /// What it is called, for people
        #[arg(long)]
        name: Option<SandboxName>,
    },
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    match args.verb {
        Verb::Create { sandbox, name, label, idempotency_key } => {
            create(&sandbox, name, label, idempotency_key, daemon)
        }
        Verb::Ls { sandbox, quiet } => list(sandbox.as_ref(), quiet, daemon),
        Verb::Show { snapshot } => show(&snapshot, daemon),
        Verb::Rm { snapshots } => remove(&snapshots, daemon),
        Verb::Tree { sandbox } => tree(sandbox.as_ref(), daemon),
        Verb::Export { snapshot, file } => export(&snapshot, &file, daemon),
        Verb::Import { file, name } => import(&file, name, daemon),
    }
}

fn create(
    sandbox: &SandboxRef,
    name: Option<SandboxName>,
    label: Vec<LabelFilter>,
    key: Option<IdempotencyKey>,
    daemon: &Daemon,
) -> anyhow::Result<ExitCode> {
    let labels: BTreeMap<_, _> = label.into_iter().map(|label| (label.key, label.value)).collect();
    let request = CreateSnapshot { name, labels: Labels::new(labels).map_err(wrong)? };
    let made = {
        let _waiting = Waiting::on(format!("saving {sandbox}"));
        once(key, |key| daemon.sandbox(sandbox).make_snapshot(&request, Some(key)))?
    };
    if let (Some(size), Some(took), Some(paused), Some(copied)) =
        (made.size_bytes, made.took_ms, made.paused_ms, made.copied_bytes)
        && !daemon.json
    {
        let (size, copied) = (bytes(size), bytes(copied));
        eprintln!("{size} in {took} ms: {paused} ms standing still, {copied} copied");
    }
    daemon.answer(&made, || made.id.to_string())
}

/// Those of a sandbox, or all.
fn all(sandbox: Option<&SandboxRef>, daemon: &Daemon) -> anyhow::Result<Vec<Snapshot>> {
    let found: Result<Vec<_>, _> = match sandbox {
        Some(sandbox) => daemon.sandbox(sandbox).snapshots_all().collect(),
        None => daemon.client.snapshots_all().collect(),
    };
    Ok(found?)
}

fn list(sandbox: Option<&SandboxRef>, quiet: bool, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut table = Table::new(&["ID", "KIND", "NAME", "AGE", "SIZE", "OWN", "STATE", "SANDBOX"]);
    for snapshot in all(sandbox, daemon)? {
        if daemon.json {
            print_json(&snapshot)?;
        } else if quiet {
            print(snapshot.id.as_str())?;
        } else {
            table.row(row(&snapshot, now_ms()));
        }
    }
    if daemon.json || quiet { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(snapshot: &Snapshot, now_ms: u64) -> [String; 8] {
    let size = |size: Option<u64>| size.map_or_else(|| NONE.to_owned(), bytes);
    [
        snapshot.id.to_string(),
        kind(snapshot.kind).to_owned(),
        snapshot.name.clone().unwrap_or_else(|| NONE.to_owned()),
        age(now_ms, Some(snapshot.created_at_ms)),
        size(snapshot.size_bytes),
        size(snapshot.own_bytes),
        state(snapshot).to_owned(),
        snapshot.sandbox.as_ref().map_or_else(|| NONE.to_owned(), ToString::to_string),
    ]
}

fn kind(kind: SnapshotKind) -> &'static str {
    match kind {
        SnapshotKind::Auto => "auto",
        SnapshotKind::Manual => "manual",
        SnapshotKind::Fork => "fork",
        SnapshotKind::Imported => "imported",
    }
}

/// How far it is, and once it is there, whether it is whole.
fn state(snapshot: &Snapshot) -> &'static str {
    match (snapshot.state, snapshot.integrity) {
        (SnapshotState::Saving, _) => "saving",
        (SnapshotState::Removing, _) => "removing",
        (SnapshotState::Ready, Some(SnapshotIntegrity::Verified)) if snapshot.memory_damage.is_some() => {
            "memory DAMAGED"
        }
        (SnapshotState::Ready, Some(SnapshotIntegrity::Verified)) => "verified",
        (SnapshotState::Ready, Some(SnapshotIntegrity::Damaged)) => "DAMAGED",
        (SnapshotState::Ready, Some(SnapshotIntegrity::Pending) | None) => "unhashed",
    }
}

fn show(snapshot: &SnapshotRef, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let shown = daemon.client.snapshot(&snapshot.into())?;
    daemon.answer(&shown, || facts(&shown, now_ms()))
}

fn facts(shown: &Snapshot, now_ms: u64) -> String {
    let mut facts = Facts::default();
    facts.add("snapshot", shown.id.to_string());
    facts.maybe("name", shown.name.clone());
    facts.add("kind", kind(shown.kind));
    facts.add("state", state(shown));
    let memory = match &shown.memory_damage {
        Some(why) => format!("DAMAGED: {why}; its files are what they were"),
        None => "saved with it".to_owned(),
    };
    facts.maybe("memory", shown.memory.then_some(memory));
    let of = shown.sandbox.as_ref().map(|sandbox| format!("{sandbox}, generation {}", shown.generation));
    facts.maybe("of", of);
    facts.maybe("parent", shown.parent.as_ref().map(ToString::to_string));
    facts.add("made", format!("{} by {}", ago(now_ms, shown.created_at_ms), shown.by));
    facts.maybe("size", shown.size_bytes.map(bytes));
    facts.maybe("its own", shown.own_bytes.map(bytes));
    if let (Some(took), Some(paused), Some(copied)) = (shown.took_ms, shown.paused_ms, shown.copied_bytes) {
        facts.add("cost", format!("{took} ms: {paused} ms standing still, {} copied", bytes(copied)));
    }
    let labels: Vec<String> = shown.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    facts.maybe("labels", (!labels.is_empty()).then(|| labels.join(", ")));
    let users: Vec<String> = shown.used_by.iter().map(ToString::to_string).collect();
    facts.add("used by", if users.is_empty() { "nobody".to_owned() } else { users.join(", ") });
    facts.render()
}

fn remove(snapshots: &[SnapshotRef], daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut worst = ExitCode::SUCCESS;
    for snapshot in snapshots {
        let removed = daemon.client.remove_snapshot(&snapshot.into()).map_err(anyhow::Error::from);
        let said =
            removed.and_then(|()| daemon.answer(&serde_json::json!({ "removed": snapshot }), || snapshot.to_string()));
        match said {
            Ok(_) => {}
            Err(error) if fail::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                let code = ExitCode::from(fail::report(&error, FAILED));
                if worst == ExitCode::SUCCESS {
                    worst = code;
                }
            }
        }
    }
    Ok(worst)
}

fn tree(sandbox: Option<&SandboxRef>, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let all = all(sandbox, daemon)?;
    if daemon.json {
        for snapshot in &all {
            print_json(snapshot)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    print(&drawn(&all))
}

/// Which came from which, the oldest first. Whose parent is gone, or of another sandbox, stands at the left.
fn drawn(all: &[Snapshot]) -> String {
    let known: BTreeSet<&SnapshotId> = all.iter().map(|snapshot| &snapshot.id).collect();
    let mut below: BTreeMap<Option<&SnapshotId>, Vec<&Snapshot>> = BTreeMap::new();
    for snapshot in all {
        below.entry(snapshot.parent.as_ref().filter(|parent| known.contains(parent))).or_default().push(snapshot);
    }
    for children in below.values_mut() {
        children.sort_by_key(|snapshot| (snapshot.created_at_ms, snapshot.id.clone()));
    }
    let mut text = String::new();
    // Not by recursion: a chain may be long.
    let mut ahead: Vec<(&Snapshot, Option<(String, bool)>)> =
        below.get(&None).into_iter().flatten().rev().map(|snapshot| (*snapshot, None)).collect();
    while let Some((snapshot, place)) = ahead.pop() {
        let (stem, branch) = match &place {
            None => (String::new(), ""),
            Some((stem, true)) => (stem.clone(), "└─ "),
            Some((stem, false)) => (stem.clone(), "├─ "),
        };
        let name = snapshot.name.as_ref().map(|name| format!("  {name}")).unwrap_or_default();
        let of = snapshot.sandbox.as_ref().map(|sandbox| format!("  of {sandbox}@{}", snapshot.generation));
        let line = format!(
            "{stem}{branch}{}  {}{name}  {}{}",
            snapshot.id,
            kind(snapshot.kind),
            state(snapshot),
            of.unwrap_or_default()
        );
        text.push_str(&super::table::clean(&line));
        text.push('\n');
        let further = match &place {
            None => String::new(),
            Some((stem, true)) => format!("{stem}   "),
            Some((stem, false)) => format!("{stem}│  "),
        };
        let children = below.get(&Some(&snapshot.id)).map(Vec::as_slice).unwrap_or_default();
        for (at, child) in children.iter().enumerate().rev() {
            ahead.push((child, Some((further.clone(), at + 1 == children.len()))));
        }
    }
    text
}

fn export(snapshot: &SnapshotRef, file: &Path, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut download = {
        let _waiting = Waiting::on(format!("packing {snapshot}"));
        daemon.client.export_snapshot(&snapshot.into())?
    };
    if file == Path::new("-") {
        let mut out = io::stdout().lock();
        io::copy(&mut download, &mut out)?;
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    // It has its name when it is whole.
    let mut part = file.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = (|| {
        let mut out = File::create(&part).with_context(|| format!("cannot write {}", part.display()))?;
        let count = io::copy(&mut download, &mut out)?;
        out.sync_all()?;
        std::fs::rename(&part, file).with_context(|| format!("cannot name {}", file.display()))?;
        anyhow::Ok(count)
    })();
    let count = written.inspect_err(|_| {
        let _ = std::fs::remove_file(&part);
    })?;
    eprintln!("{}", bytes(count));
    let answer = serde_json::json!({ "snapshot": snapshot, "file": file, "bytes": count });
    daemon.answer(&answer, || file.display().to_string())
}

fn import(file: &Path, name: Option<SandboxName>, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let query = ImportSnapshot { name };
    let imported = {
        let _waiting = Waiting::on(format!("reading {}", file.display()));
        if file == Path::new("-") {
            daemon.client.import_snapshot(&query, &mut io::stdin().lock())?
        } else {
            let mut from = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
            daemon.client.import_snapshot(&query, &mut from)?
        }
    };
    daemon.answer(&imported, || imported.id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(id: &str, parent: Option<&str>, at: u64) -> Snapshot {
        serde_json::from_value(serde_json::json!({
            "id": format!("snp_{id}"), "project": "default", "sandbox": "sbx_1", "generation": 1,
            "parent": parent.map(|parent| format!("snp_{parent}")), "kind": "manual", "name": null, "labels": {},
            "state": "ready", "created_at_ms": at, "by": "key", "size_bytes": 2048, "own_bytes": 1024,
            "integrity": "verified", "paused_ms": 3, "took_ms": 20, "copied_bytes": 0, "observed_at_ms": 1,
        }))
        .expect("a snapshot")
    }

    #[test]
    fn l11_a_tree_shows_what_was_made_from_what() {
        let all = [
            snapshot("d", Some("b"), 4),
            snapshot("c", Some("a"), 3),
            snapshot("b", Some("a"), 2),
            snapshot("a", Some("gone"), 1),
            snapshot("e", None, 5),
        ];
        let line = |id: &str| format!("snp_{id}  manual  verified  of sbx_1@1\n");
        let expected = [
            line("a"),
            format!("├─ {}", line("b")),
            format!("│  └─ {}", line("d")),
            format!("└─ {}", line("c")),
            line("e"),
        ];
        assert_eq!(drawn(&all), expected.concat());
    }

    #[test]
    fn o1_a_line_says_what_it_costs_and_whether_it_is_whole() {
        let damaged = Snapshot { integrity: Some(SnapshotIntegrity::Damaged), ..snapshot("a", None, 40_000) };
        let cells = row(&damaged, 100_000);
        assert_eq!(cells[1..7], ["manual", "-", "1m", "2.0 KiB", "1.0 KiB", "DAMAGED"].map(str::to_owned));
        assert!(facts(&damaged, 100_000).contains("used by   nobody"), "{}", facts(&damaged, 100_000));
    }
}
