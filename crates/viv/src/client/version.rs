//! `viv version`

use std::process::ExitCode;

use super::{Daemon, print, print_json};
use crate::settings::Global;

/// This program's version, and the daemon's if there is one to ask. That there is none is no failure.
pub(super) fn run(global: &Global) -> anyhow::Result<ExitCode> {
    let client = env!("CARGO_PKG_VERSION");
    let daemon = Daemon::connect(global).ok().and_then(|daemon| daemon.client.version().ok());
    if global.json {
        return print_json(&serde_json::json!({ "version": client, "daemon": daemon }));
    }
    let daemon = daemon.map_or_else(
        || "daemon: not reached".to_owned(),
        |daemon| format!("daemon: {} ({}), provider {}", daemon.version, daemon.commit, daemon.provider),
    );
    print(&format!("viv {client}\n{daemon}"))
}
