//! `viv top`
//!
//! ```text
//!   events ──poke──► looker ──what there is──┐
//!   keys ────────────────────────────────────┼──► View (pure) ──lines──► the terminal
//!   signals, answers to what was asked for ──┘       └──► Ask: stop, logs, diagnosis, in a thread of their own
//! ```
//!
//! What is looked at is bounded: one page of sandboxes, and the figures of some of them, in turn. Looking is nobody's
//! activity, and wakes nothing.

mod live;
mod look;
mod view;

use std::process::ExitCode;

use clap::ValueEnum;
use viv_api::bound::LabelFilter;

use super::table::{NONE, Table, age};
use super::{Daemon, now_ms, print, print_json, terminal, width};
use crate::text::bytes;
use look::{Look, Seen};

/// Show what sandboxes use, live
///
/// On a terminal until `q`: sorted by a column at a key, with stop, logs and diagnosis of the one that is marked; `?`
/// lists the keys. Elsewhere, and with --once or --json, a table. CPU is since the look before: 100 is one whole
/// processor. Looking is no activity.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only those with this label
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// By which column
    #[arg(long, value_enum, default_value_t = Sort::Cpu)]
    sort: Sort,
    /// Look once
    #[arg(long)]
    once: bool,
}

/// By which column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sort {
    Name,
    Status,
    Age,
    Cpu,
    Memory,
    Probed,
    Task,
    Cause,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let look = Look { client: daemon.client.clone(), labels: args.label.clone() };
    if !args.once && !daemon.json && terminal::is_interactive() {
        return live::run(&look, args.sort);
    }
    let mut seen = look.at_all()?;
    view::sort(&mut seen, args.sort, false);
    if daemon.json {
        for one in seen.iter().filter_map(|one| one.resources.as_ref()) {
            print_json(one)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    print(&shown(&seen, now_ms()))
}

fn shown(seen: &[Seen], now_ms: u64) -> String {
    let mut table = Table::new(&["ID", "NAME", "CPU%", "MEMORY", "PROCS", "READ", "WRITTEN", "RUNS", "OPS"]);
    let none = || NONE.to_owned();
    for Seen { sandbox, resources, .. } in seen {
        let Some(resources) = resources else { continue };
        let usage = resources.usage.clone().unwrap_or_default();
        table.row([
            sandbox.id.to_string(),
            sandbox.name.clone().unwrap_or_else(none),
            usage.cpu_percent.map_or_else(none, |percent| format!("{percent:.1}")),
            usage.memory_bytes.map_or_else(none, bytes),
            usage.processes.map_or_else(none, |count| count.to_string()),
            usage.io_read_bytes.map_or_else(none, bytes),
            usage.io_write_bytes.map_or_else(none, bytes),
            age(now_ms, resources.running_since_at_ms),
            resources.operations.total().to_string(),
        ]);
    }
    table.render(width())
}
