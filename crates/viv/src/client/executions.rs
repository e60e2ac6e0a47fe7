//! `viv executions`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::execution::{Execution, ExecutionState};

use super::table::{NONE, Table, age};
use super::{Daemon, now_ms, print, print_json, width};
use crate::text::span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let mut table = Table::new(&["ID", "STATE", "EXIT", "STARTED", "TOOK", "COMMAND"]);
    for execution in handle.executions_all() {
        let execution = execution?;
        if daemon.json {
            print_json(&execution)?;
        } else {
            table.row(row(&execution, now_ms()));
        }
    }
    if daemon.json { Ok(ExitCode::SUCCESS) } else { print(&table.render(width())) }
}

fn row(execution: &Execution, now_ms: u64) -> [String; 6] {
    let exit = match (execution.exit_code, execution.signal) {
        (Some(code), _) => code.to_string(),
        (None, Some(signal)) => format!("sig {signal}"),
        (None, None) => NONE.to_owned(),
    };
    let took = execution.started_at_ms.map(|started_at_ms| {
        let until = execution.ended_at_ms.unwrap_or(now_ms);
        span(until.saturating_sub(started_at_ms))
    });
    [
        execution.id.to_string(),
        word(execution.state).to_owned(),
        exit,
        age(now_ms, execution.started_at_ms),
        took.unwrap_or_else(|| NONE.to_owned()),
        execution.argv.join(" "),
    ]
}

fn word(state: ExecutionState) -> &'static str {
    match state {
        ExecutionState::Queued => "queued",
        ExecutionState::Running => "running",
        ExecutionState::Suspended => "suspended",
        ExecutionState::Exited => "exited",
        ExecutionState::Signalled => "signalled",
        ExecutionState::OomKilled => "oom_killed",
        ExecutionState::Failed => "failed",
        ExecutionState::Cancelled => "cancelled",
        ExecutionState::TimedOut => "timed_out",
        ExecutionState::Lost => "lost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::session::tests::execution;

    #[test]
    fn an_execution_is_one_line() {
        let row = row(&execution(), 61_000);
        assert_eq!(row[1..], ["exited", "0", "1m", "2s", "sh -c echo hi"]);
    }

    #[test]
    fn words_are_those_of_the_api() {
        for state in [ExecutionState::OomKilled, ExecutionState::TimedOut, ExecutionState::Queued] {
            assert_eq!(serde_json::to_value(state).unwrap(), word(state));
        }
    }
}
