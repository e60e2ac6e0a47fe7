//! `viv version`

use std::process::ExitCode;

use viv_api::daemon::{Gate, Version};

use super::{Daemon, print, print_json};
use crate::COMMIT;
use crate::settings::Global;

/// This program's version, and the daemon's if there is one to ask. That there is none is no failure.
pub(super) fn run(global: &Global) -> anyhow::Result<ExitCode> {
    let client = env!("CARGO_PKG_VERSION");
    let daemon = Daemon::connect(global).ok().and_then(|daemon| daemon.client.version().ok());
    if global.json {
        return print_json(&serde_json::json!({ "version": client, "commit": COMMIT, "daemon": daemon }));
    }
    let daemon = daemon.map_or_else(
        || "daemon: not reached".to_owned(),
        |daemon| {
            let Version { version, commit, provider, .. } = &daemon;
            format!("daemon: {version} ({commit}), provider {provider}{}", gates(&daemon.gates))
        },
    );
    print(&format!("viv {client} ({COMMIT})\n{daemon}"))
}

/// The gates that are not on for everybody, each with where that was said (O9).
fn gates(gates: &[Gate]) -> String {
    let off: Vec<String> = gates.iter().filter(|gate| !gate.on).map(|gate| format!("\n{}", switched(gate))).collect();
    if off.is_empty() { format!("\ngates: all {} are on", gates.len()) } else { off.concat() }
}

fn switched(gate: &Gate) -> String {
    let others = match gate.except_projects.as_slice() {
        [] => String::new(),
        projects => format!(", otherwise for {}", projects.join(", ")),
    };
    let how = match gate.percent {
        None | Some(0) => "off".to_owned(),
        Some(100) => "on".to_owned(),
        Some(percent) => format!("on for {percent} %"),
    };
    format!("gate {}: {how}{others} ({})", gate.name, gate.set_by)
}
