//! `viv fork`

use std::collections::BTreeMap;
use std::process::ExitCode;

use viv_api::bound::{ForkCount, IdempotencyKey, LabelFilter, Labels, SandboxName, SandboxRef, SnapshotRef, WaitMs};
use viv_api::sandbox::Status;
use viv_api::snapshot::Fork;

use super::new::{check, once, wrong};
use super::progress::Waiting;
use super::{Daemon, print, print_json};
use crate::fail::{Failure, TIMEOUT};
use crate::text::parse_span;

/// Make sandboxes that begin where another one is, or with a snapshot
///
/// What runs stands still for a moment and runs on; its files are copied, and with --memory its processes too, each fork
/// going on from the same instant. Each fork has an id of its own, lives by the same policy, and sees nothing of what
/// another one writes. There are all of them, or none.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name of a sandbox, or the id of a snapshot
    source: String,
    /// How many
    #[arg(long, short = 'n', default_value = "1")]
    count: ForkCount,
    /// What they are called: this, or this and a number if there are several
    #[arg(long)]
    name: Option<SandboxName>,
    /// Have what runs go on in each of them, with its memory
    #[arg(long)]
    memory: bool,
    /// A label, beside those of where they come from
    #[arg(long, short, value_name = "KEY=VALUE")]
    label: Vec<LabelFilter>,
    /// How long to wait until they are ready; 0 does not wait
    #[arg(long, value_name = "SPAN", value_parser = parse_span, default_value = "60s")]
    wait: u64,
    /// Asked again with the same key and the same options, no others are made
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<IdempotencyKey>,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let labels: BTreeMap<_, _> = args.label.into_iter().map(|label| (label.key, label.value)).collect();
    let request = Fork {
        count: Some(args.count),
        name: args.name,
        labels: Labels::new(labels).map_err(wrong)?,
        memory: args.memory,
        policy: None,
        wait_ms: Some(WaitMs::new(args.wait).map_err(wrong)?),
    };
    let forked = {
        let _waiting = Waiting::on(format!("forking {}", args.source));
        if let Ok(snapshot) = SnapshotRef::new(args.source.clone()) {
            once(args.idempotency_key, |key| daemon.client.fork_snapshot(&(&snapshot).into(), &request, Some(key)))?
        } else {
            let sandbox = SandboxRef::new(args.source.clone())
                .map_err(|error| Failure::usage(error.to_string()).hint("name a sandbox, or a snapshot (snp_…)"))?;
            once(args.idempotency_key, |key| daemon.sandbox(&sandbox).fork(&request, Some(key)))?
        }
    };
    if daemon.json {
        print_json(&forked)?;
    }
    for sandbox in &forked.sandboxes {
        if !daemon.json {
            print(sandbox.id.as_str())?;
        }
    }
    for sandbox in &forked.sandboxes {
        check(sandbox)?;
    }
    let ready = forked.sandboxes.iter().filter(|sandbox| sandbox.status == Status::Ready).count();
    if ready == forked.sandboxes.len() || args.wait == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("viv: {ready} of {} are ready; it goes on by itself", forked.sandboxes.len());
    Ok(ExitCode::from(TIMEOUT))
}
