//! `viv drain` and `viv undrain`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use viv_api::bound::WaitMs;
use viv_api::daemon::{BeginDrain, Drain};

use super::Daemon;
use super::new::wrong;
use super::progress::Waiting;
use crate::fail;
use crate::text::parse_span;

/// How often the daemon is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Take no new work, and save or finish every sandbox
///
/// Persistent sandboxes are saved; others are stopped once their commands have ended, or the grace has passed. It holds
/// over restarts of the daemon, until `viv undrain`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long commands in sandboxes that are not persistent may go on
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    grace: u64,
    /// How long to wait until it is drained; 0 does not wait, it goes on all the same
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "5m")]
    wait: u64,
    /// Only show how far it is
    #[arg(long)]
    status: bool,
}

pub(super) fn run(args: &Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    if args.status {
        let drain = daemon.client.drain_status()?;
        return daemon.answer(&drain, || words(&drain));
    }
    let grace_ms = Some(WaitMs::new(args.grace).map_err(wrong)?);
    let mut drain = daemon.client.drain(&BeginDrain { grace_ms })?;
    let until = Instant::now() + Duration::from_millis(args.wait);
    {
        let _waiting = Waiting::on("draining".to_owned());
        while drain.draining && !drain.drained && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
            drain = daemon.client.drain_status()?;
        }
    }
    daemon.answer(&drain, || words(&drain))?;
    Ok(if drain.drained || args.wait == 0 { ExitCode::SUCCESS } else { ExitCode::from(fail::TIMEOUT) })
}

pub(super) fn undrain(daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let drain = daemon.client.undrain()?;
    daemon.answer(&drain, || words(&drain))
}

fn words(drain: &Drain) -> String {
    if !drain.draining {
        return "not draining: new work is taken".to_owned();
    }
    if drain.drained {
        return "drained: everything is saved or finished, and nothing runs".to_owned();
    }
    let instances = drain.instances.map_or_else(|| "unknown".to_owned(), |count| count.to_string());
    let mut text = format!("draining: {} left, instances that run: {instances}", drain.left.len());
    for sandbox in &drain.left {
        text.push('\n');
        text.push_str(sandbox);
    }
    text
}
