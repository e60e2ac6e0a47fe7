//! `viv doctor`: what this machine can do, and why it cannot do the rest.

use std::io::{self, Write};
use std::process::ExitCode;

use viv_provider::Provider;

use crate::place::Place;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    place: Place,
    /// For programs
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let provider = args.place.open()?;
    let (capabilities, driver) = (provider.capabilities(), provider.driver());
    let mut out = io::stdout().lock();
    if args.json {
        let all = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "layers": driver.to_string(),
            "capabilities": capabilities,
        });
        writeln!(out, "{all:#}")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "viv {}, layers kept by the {driver} driver", env!("CARGO_PKG_VERSION"))?;
    for capability in &capabilities.has {
        writeln!(out, "  yes  {}", word(*capability)?)?;
    }
    for (capability, why) in &capabilities.missing {
        writeln!(out, "  no   {}: {why}", word(*capability)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn word(capability: viv_provider::Capability) -> anyhow::Result<String> {
    Ok(serde_json::to_value(capability)?.as_str().unwrap_or_default().replace('_', " "))
}
