//! `viv top`

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use viv_api::ErrorCode;
use viv_api::bound::{LabelFilter, SandboxRef};
use viv_api::query::ListSandboxes;
use viv_api::resources::Resources;
use viv_api::sandbox::Sandbox;

use super::table::{NONE, Table, age};
use super::{Daemon, clear, now_ms, print, print_json, width};
use crate::text::bytes;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(2);

/// Show what sandboxes use
///
/// On a terminal again and again, until Ctrl-C. CPU is since the look before: 100 is one whole processor.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only those with this label
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// Look once
    #[arg(long)]
    once: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let again = !args.once && !daemon.json && io::stdout().is_terminal();
    loop {
        let found = look(args, daemon)?;
        if again {
            clear()?;
        }
        if daemon.json {
            for (_, resources) in &found {
                print_json(resources)?;
            }
        } else {
            print(&shown(&found, now_ms()))?;
        }
        if !again {
            return Ok(ExitCode::SUCCESS);
        }
        thread::sleep(EVERY);
    }
}

fn look(args: &Args, daemon: &Daemon) -> anyhow::Result<Vec<(Sandbox, Resources)>> {
    let query = ListSandboxes { label: args.label.clone(), ..ListSandboxes::default() };
    let mut found = Vec::new();
    for sandbox in daemon.client.list_all(query) {
        let sandbox = sandbox?;
        match daemon.client.sandbox(SandboxRef::from(&sandbox.id)).resources() {
            Ok(resources) => found.push((sandbox, resources)),
            Err(error) => match error.code() {
                // It does not run, or not any more: it uses nothing.
                Some(ErrorCode::NotRunning | ErrorCode::NotFound | ErrorCode::Gone | ErrorCode::StaleHandle) => {}
                // One that does not answer must not hide the others.
                Some(ErrorCode::Timeout | ErrorCode::ProviderUnavailable) => {
                    eprintln!("viv: {}: {error}", sandbox.id);
                }
                Some(_) | None => return Err(error.into()),
            },
        }
    }
    Ok(found)
}

fn shown(found: &[(Sandbox, Resources)], now_ms: u64) -> String {
    let mut table = Table::new(&["ID", "NAME", "CPU%", "MEMORY", "PROCS", "READ", "WRITTEN", "RUNS", "OPS"]);
    let none = || NONE.to_owned();
    for (sandbox, resources) in found {
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
            (resources.operations.executions + resources.operations.file_calls).to_string(),
        ]);
    }
    table.render(width())
}
