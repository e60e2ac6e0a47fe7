//! `viv rm`

use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use viv_api::bound::{LabelFilter, SandboxRef, WaitMs};
use viv_api::client::Change;
use viv_api::query::ListSandboxes;

use super::new::wrong;
use super::progress::Waiting;
use super::{Daemon, ensure};
use crate::fail::{self, FAILED, Failure};
use crate::text::parse_span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Ids or names
    #[arg(required_unless_present_any = ["all", "label"], conflicts_with_all = ["all", "label"])]
    sandboxes: Vec<SandboxRef>,
    /// All that the key may see
    #[arg(long)]
    all: bool,
    /// All with this label
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// How long to wait for each; 0 does not wait, it is deleted all the same
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let wait_ms = Some(WaitMs::new(args.wait).map_err(wrong)?);
    let mut sandboxes = args.sandboxes.clone();
    if args.all || !args.label.is_empty() {
        let query = ListSandboxes { label: args.label.clone(), ..ListSandboxes::default() };
        for sandbox in daemon.client.list_all(query) {
            sandboxes.push(SandboxRef::from(sandbox?.id));
        }
        if sandboxes.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        confirm(sandboxes.len(), args.yes)?;
    }
    each(&sandboxes, |sandbox| {
        let deleted = {
            let _waiting = Waiting::on(format!("deleting {sandbox}"));
            daemon.sandbox(sandbox).delete(wait_ms)?
        };
        let is_done = matches!(deleted, Change::Done(_));
        let sandbox = deleted.into_sandbox();
        daemon.answer(&sandbox, || sandbox.id.to_string())?;
        Ok(ensure::verdict(&sandbox, is_done || args.wait == 0, "gone"))
    })
}

/// Asks, if somebody is there to answer.
fn confirm(count: usize, yes: bool) -> anyhow::Result<()> {
    if yes {
        return Ok(());
    }
    let refused = || Failure::usage(format!("{count} sandboxes would be deleted, for ever")).hint("say so with --yes");
    if !io::stdin().is_terminal() {
        return Err(refused().into());
    }
    eprint!("Delete {count} sandboxes, for ever? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(refused().into()) }
}

/// Does it for each, whatever becomes of the others, and ends with the code of the first that went wrong.
pub(super) fn each<T>(all: &[T], mut what: impl FnMut(&T) -> anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
    let mut worst = ExitCode::SUCCESS;
    for one in all {
        let code = match what(one) {
            Err(error) if fail::is_broken_pipe(&error) => return Err(error),
            Err(error) => ExitCode::from(fail::report(&error, FAILED)),
            Ok(code) => code,
        };
        if worst == ExitCode::SUCCESS {
            worst = code;
        }
    }
    Ok(worst)
}
