//! `viv checkpoint --check`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::checkpoint::Obstacle;

use super::Daemon;
use super::table::{NONE, Table};
use super::width;
use crate::fail::FAILED;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,

    /// Look what is in the way, and which process holds it; nothing inside is touched
    #[arg(long, required = true)]
    check: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let found = daemon.sandbox(&args.sandbox).check_checkpoint()?;
    daemon.answer(&found, || {
        let mut said = if found.can {
            format!("{}: nothing is known to be in the way of saving its memory", found.sandbox)
        } else {
            table("IN THE WAY", &found.obstacles)
        };
        if !found.closes.is_empty() {
            said = format!("{said}\n\n{}", table("CLOSED FIRST", &found.closes));
        }
        said
    })?;
    Ok(if found.can { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn table(what: &str, obstacles: &[Obstacle]) -> String {
    let mut table = Table::new(&["PID", "EXECUTION", "COMMAND", what]);
    for obstacle in obstacles {
        table.row(row(obstacle));
    }
    table.render(width()).trim_end().to_owned()
}

fn row(obstacle: &Obstacle) -> [String; 4] {
    let none = || NONE.to_owned();
    [
        obstacle.pid.map_or_else(none, |pid| pid.to_string()),
        obstacle.execution.as_ref().map_or_else(none, ToString::to_string),
        obstacle.command.clone().unwrap_or_else(none),
        obstacle.what.clone(),
    ]
}
