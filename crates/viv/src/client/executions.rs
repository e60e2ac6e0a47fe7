//! `viv executions`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::client::ClientError;
use viv_api::execution::{Execution, ExecutionState};
use viv_api::query::ListAllExecutions;

use super::table::{NONE, Table, age};
use super::{Daemon, now_ms, print, print_json, width};
use crate::text::span;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    sandbox: Option<SandboxRef>,
    /// Of all sandboxes, newest first
    #[arg(long, short)]
    all: bool,
    /// Only those in this state: `queued`, `running`, `suspended`, `exited`, `signalled`, `oom_killed`, `failed`,
    /// `cancelled`, `timed_out` or `lost`
    #[arg(long, value_name = "STATE", value_parser = state)]
    state: Option<ExecutionState>,
    /// Show at most this many
    #[arg(long, short = 'n', value_name = "N")]
    limit: Option<usize>,
}

fn state(text: &str) -> Result<ExecutionState, String> {
    let parsed = serde_json::from_value(serde_json::Value::String(text.replace('-', "_")));
    parsed.map_err(|_| format!("there is no state {text}"))
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let Args { sandbox, state, limit, .. } = args;
    let wanted = |execution: &Execution| state.is_none_or(|state| execution.state == state);
    let all: Box<dyn Iterator<Item = Result<Execution, ClientError>>> = match sandbox {
        Some(sandbox) => {
            let handle = daemon.sandbox(sandbox);
            // Those of one sandbox are a few pages, and its handle does not outlive this.
            Box::new(handle.executions_all().collect::<Vec<_>>().into_iter())
        }
        None => Box::new(daemon.client.executions_all(ListAllExecutions { state: *state, ..Default::default() })),
    };
    let all = all.filter(|execution| execution.as_ref().map_or(true, wanted)).take(limit.unwrap_or(usize::MAX));
    let mut of_one = Table::new(&["ID", "STATE", "EXIT", "STARTED", "TOOK", "COMMAND"]);
    let mut of_all = Table::new(&["SANDBOX", "ID", "STATE", "EXIT", "STARTED", "TOOK", "COMMAND"]);
    for execution in all {
        let execution = execution?;
        if daemon.json {
            print_json(&execution)?;
            continue;
        }
        let row = row(&execution, now_ms());
        if sandbox.is_some() {
            of_one.row(row);
        } else {
            let [id, state, exit, started, took, command] = row;
            of_all.row([execution.sandbox.to_string(), id, state, exit, started, took, command]);
        }
    }
    if daemon.json {
        return Ok(ExitCode::SUCCESS);
    }
    print(&if sandbox.is_some() { of_one.render(width()) } else { of_all.render(width()) })
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
        age(now_ms, execution.started_at_ms.or(execution.asked_at_ms)),
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
