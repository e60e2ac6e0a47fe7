//! `viv ps`

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use viv_api::bound::{LabelFilter, PageLimit, SandboxName};
use viv_api::query::ListSandboxes;
use viv_api::sandbox::{Sandbox, Status};

use super::table::{NONE, Table, age};
use super::{Daemon, clear, now_ms, print, print_json, width};

/// Between two looks.
const EVERY: Duration = Duration::from_secs(2);
/// The label that says which kind of agent uses a sandbox.
const AGENT: &str = "agent";
/// What stands above the columns.
const HEAD: [&str; 9] = ["ID", "NAME", "STATUS", "AGE", "USED", "PROBED", "AGENT", "TASK", "LABELS"];
/// Fewer round trips; a page of this size is still small.
const PAGE: u64 = 500;

/// List sandboxes
///
/// USED is how long ago it was in use, PROBED how old the evidence is that it works, AGENT what the label `agent` says,
/// TASK which task is at work in it; where there is none of these, the column is left out. `--json` has all that is known.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also those that stopped for good
    #[arg(long, short)]
    all: bool,
    /// Only those with this label; all of them, when there are several
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// Only those with this status
    #[arg(long)]
    status: Option<Status>,
    /// Only the one with this name
    #[arg(long)]
    name: Option<SandboxName>,
    /// Only ids, for scripts
    #[arg(long, short)]
    quiet: bool,
    /// Look again every two seconds
    #[arg(long, short)]
    watch: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    loop {
        let done = once(args, daemon)?;
        if !args.watch {
            return Ok(done);
        }
        thread::sleep(EVERY);
        if !daemon.json {
            clear()?;
        }
    }
}

fn once(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let query = ListSandboxes {
        limit: Some(PageLimit::nearest(PAGE)),
        label: args.label.clone(),
        status: args.status,
        name: args.name.clone(),
        all: args.all,
        ..ListSandboxes::default()
    };
    let mut table = Table::new(&HEAD);
    for sandbox in daemon.client.list_all(query) {
        let sandbox = sandbox?;
        if daemon.json {
            print_json(&sandbox)?;
        } else if args.quiet {
            print(sandbox.id.as_str())?;
        } else {
            table.row(row(&sandbox, now_ms()));
        }
    }
    table.leave_out_empty(&["AGENT", "TASK"]);
    if daemon.json || args.quiet { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(sandbox: &Sandbox, now_ms: u64) -> [String; 9] {
    let others = sandbox.labels.iter().filter(|(key, _)| *key != AGENT);
    let labels: Vec<_> = others.map(|(key, value)| format!("{key}={value}")).collect();
    [
        sandbox.id.to_string(),
        sandbox.name.clone().unwrap_or_else(|| NONE.to_owned()),
        sandbox.status.to_string(),
        age(now_ms, Some(sandbox.created_at_ms)),
        age(now_ms, sandbox.last_activity_at_ms),
        age(now_ms, sandbox.evidence.latest_at_ms()),
        sandbox.labels.get(AGENT).cloned().unwrap_or_else(|| NONE.to_owned()),
        sandbox.task.as_ref().map_or_else(|| NONE.to_owned(), ToString::to_string),
        labels.join(","),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::show::tests::sandbox;

    #[test]
    fn o1_a_line_says_status_age_activity_evidence_agent_and_task() {
        let mut table = Table::new(&HEAD);
        table.row(row(&sandbox(), 100_000));
        assert_eq!(
            table.render(Some(82)),
            "ID                              NAME  STATUS  AGE    USED  PROBED  AGENT  TASK  L…\n\
             sbx_01h2xcejqtf2nbrexx3vqjhp41  box   ready   1m39s  1m    5s      coder  -     t…\n"
        );
        table.leave_out_empty(&["AGENT", "TASK"]);
        assert!(
            table
                .render(None)
                .starts_with("ID                              NAME  STATUS  AGE    USED  PROBED  AGENT  LABELS\n")
        );
    }
}
