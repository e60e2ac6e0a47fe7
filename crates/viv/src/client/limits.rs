//! `viv limits`

use std::process::ExitCode;

use viv_api::bound::SandboxRef;
use viv_api::limits::{Limits, LimitsInForce};
use viv_api::resources::{Resources, Usage};

use super::Daemon;
use super::new::wrong;
use super::table::Facts;
use crate::local::limits::LimitArgs;
use crate::text::{bytes, micros};

/// How no limit is said.
const UNLIMITED: &str = "unlimited";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Id or name
    sandbox: SandboxRef,
    #[command(flatten)]
    limits: LimitArgs,
}

pub(super) fn run(args: Args, daemon: &Daemon) -> anyhow::Result<ExitCode> {
    let handle = daemon.sandbox(&args.sandbox);
    let change = Limits::try_from(args.limits).map_err(wrong)?;
    if change != Limits::default() {
        handle.set_limits(&change)?;
    }
    let resources = handle.resources()?;
    daemon.answer(&resources, || shown(&resources))
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
    let limit = |limit: Option<u64>, shown: fn(u64) -> String| limit.map_or_else(|| UNLIMITED.to_owned(), shown);
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
