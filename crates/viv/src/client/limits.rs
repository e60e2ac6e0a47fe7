//! `viv limits`

use std::process::ExitCode;

use viv_api::bound::{SandboxRef, WaitMs};
use viv_api::client::{ClientError, SandboxHandle};
use viv_api::error::ErrorCode;
use viv_api::limits::{Limits, LimitsInForce};
use viv_api::resources::{Resources, Usage};
use viv_api::sandbox::{EnsureSandbox, Sandbox, Status, StopSandbox};

use super::Daemon;
use super::new::{check, wrong};
use super::progress::Waiting;
use super::stop::not_saved;
use super::table::Facts;
use crate::fail::{FAILED, Failure, TIMEOUT};
use crate::local::limits::LimitArgs;
use crate::text::{bytes, micros};

/// How no limit is said.
const UNLIMITED: &str = "unlimited";

/// How long it may take to be saved, and how long to go on.
const RESTART_WITHIN_MS: u64 = 60_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    #[command(flatten)]
    limits: LimitArgs,
    /// Where a limit cannot be changed while it runs, as that of a disk: save it, and have it go on with the new one;
    /// what runs in it ends
    #[arg(long)]
    restart: bool,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let change = Limits::try_from(args.limits).map_err(wrong)?;
    if change != Limits::default() {
        match handle.set_limits(&change) {
            Err(refused) if refused.code() == Some(ErrorCode::Unsupported) => {
                if !args.restart {
                    return Err(of_its_next(refused, &handle.get()?));
                }
                restarted(&handle, &change, &refused)?;
            }
            set => {
                set?;
            }
        }
    }
    let resources = handle.resources()?;
    daemon.answer(&resources, || shown(&resources))
}

/// It cannot be changed while it runs: what could be done instead is said.
fn of_its_next(refused: ClientError, sandbox: &Sandbox) -> anyhow::Error {
    if !sandbox.policy.persistent {
        return refused.into();
    }
    let hint = "with `--restart` it is saved, and goes on with the new limit; what runs in it ends".to_owned();
    Failure::new(FAILED, refused.to_string()).hint(hint).into()
}

/// Saves it, changes what it will go on with, and has it go on, also with what it had if that is refused.
fn restarted(handle: &SandboxHandle<'_>, change: &Limits, refused: &ClientError) -> anyhow::Result<()> {
    let sandbox = handle.get()?;
    if !sandbox.policy.persistent {
        let message = format!("{refused}; and nothing of {} would be saved", sandbox.id);
        return Err(Failure::new(FAILED, message).hint("make one with the limit that it needs".to_owned()).into());
    }
    let wait_ms = Some(WaitMs::new(RESTART_WITHIN_MS).map_err(wrong)?);
    let stopped = {
        let _waiting = Waiting::on(format!("saving {}", sandbox.id));
        handle.stop(&StopSandbox { wait_ms, failed_save: None })?.into_sandbox()
    };
    match stopped.status {
        Status::Hibernated => {}
        Status::SaveFailed => return Err(not_saved(&stopped).into()),
        status => {
            let message = format!("{} is not saved yet: {status}; its limits are as they were", sandbox.id);
            let hint = format!("say it once more when it is, then `viv ensure {}`", sandbox.id);
            return Err(Failure::new(TIMEOUT, message).hint(hint).into());
        }
    }
    let set = handle.set_limits(change);
    let again = {
        let _waiting = Waiting::on(format!("making {} run", sandbox.id));
        handle.ensure(&EnsureSandbox { wait_ms })?.into_sandbox()
    };
    set?;
    check(&again)
}

fn shown(resources: &Resources) -> String {
    let LimitsInForce {
        cpu_millis,
        cpu_weight,
        cpu_burst_us,
        memory_bytes,
        processes,
        disk_bytes,
        io_read_bps,
        io_write_bps,
        open_files,
    } = resources.limits;
    let usage = resources.usage.clone().unwrap_or_default();
    // What rests gets from the machine what nobody said.
    let none = if resources.usage.is_some() { UNLIMITED } else { "not said" };
    let limit = |limit: Option<u64>, shown: fn(u64) -> String| limit.map_or_else(|| none.to_owned(), shown);
    let used = |used: Option<String>| used.map_or_else(String::new, |used| format!("  ({used} in use)"));
    let plain = |number: u64| number.to_string();
    let speed = |bps: u64| format!("{}/s", bytes(bps));
    let mut facts = Facts::default();
    let cpus = limit(cpu_millis, |millis| format!("{}.{:03}", millis / 1000, millis % 1000));
    facts.add("cpus", cpus + &used(usage.cpu_percent.map(|percent| format!("{percent:.0} %"))));
    facts.maybe("cpu weight", cpu_weight.map(plain));
    facts.maybe("cpu burst", cpu_burst_us.map(micros));
    facts.add("memory", limit(memory_bytes, bytes) + &used(usage.memory_bytes.map(bytes)));
    facts.add("processes", limit(processes, plain) + &used(usage.processes.map(plain)));
    facts.add("disk", limit(disk_bytes, bytes) + &used(resources.disk.map(|disk| bytes(disk.own_bytes))));
    facts.add("io read", limit(io_read_bps, speed));
    facts.add("io write", limit(io_write_bps, speed));
    facts.add("open files", limit(open_files, plain));
    facts.maybe("killed for memory", killed(&usage));
    for (capability, why) in &resources.lacks {
        facts.add("without", format!("{}: {why}", capability.replace('_', " ")));
    }
    facts.render()
}

/// How often, and who last.
fn killed(usage: &Usage) -> Option<String> {
    let kills = usage.oom_kills.filter(|&kills| kills > 0)?;
    let last = usage.oom_last.as_ref().and_then(|last| last.process.clone());
    Some(last.map_or_else(|| kills.to_string(), |process| format!("{kills}, last {process}")))
}
