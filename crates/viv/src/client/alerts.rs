//! `viv alerts`

use std::process::ExitCode;

use viv_api::alert::{Alert, AlertState};
use viv_api::daemon::Severity;

use super::table::{NONE, Table, age};
use super::{Daemon, now_ms, print, print_json, width};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Those that are quiet too
    #[arg(long, short)]
    all: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let mut alerts = daemon.client.alerts()?.items;
    alerts.retain(|alert| args.all || alert.state != AlertState::Inactive);
    if daemon.json {
        for alert in &alerts {
            print_json(alert)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    if alerts.is_empty() {
        eprintln!("no alert fires");
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["ALERT", "STATE", "SEVERITY", "SINCE", "WHAT", "BEGIN WITH"]);
    for alert in &alerts {
        table.row([
            alert.name.clone(),
            state(alert.state).to_owned(),
            severity(alert.severity).to_owned(),
            alert.since_at_ms.map_or_else(|| NONE.to_owned(), |at_ms| age(now_ms(), Some(at_ms))),
            alert.message.clone(),
            alert.command.clone(),
        ]);
    }
    print(&table.render(width()))
}

/// What fires, a line each, to stand above other figures.
pub(super) fn firing(alerts: &[Alert]) -> String {
    let firing = alerts.iter().filter(|alert| alert.state == AlertState::Firing);
    let lines = firing.map(|alert| format!("{}: {}: {}\n", severity(alert.severity), alert.name, alert.message));
    lines.collect()
}

fn state(state: AlertState) -> &'static str {
    match state {
        AlertState::Inactive => "quiet",
        AlertState::Pending => "pending",
        AlertState::Firing => "FIRING",
    }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
        Severity::Critical => "critical",
    }
}
