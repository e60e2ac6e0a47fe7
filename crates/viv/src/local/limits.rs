//! Limits in the words of a command line, and `viv local limit`.

use std::io::{self, Write};
use std::process::ExitCode;

use viv_api::bound::{
    BoundError, CpuBurstUs, CpuMillis, CpuWeight, DiskBytes, IoBps, MemoryBytes, OpenFiles, Processes,
};
use viv_api::limits::{Limit, Limits};
use viv_core::SandboxId;
use viv_provider::{InstanceRef, Observation, OomKill, Provider, ResourceLimits, UNLIMITED, Usage};

use super::{ByHand, mutation};
use crate::text::{bytes, micros, say, word};

/// How no limit is said.
const UNLIMITED_WORD: &str = "unlimited";

/// What may be limited. Nothing said is the provider's default, or what it was; `unlimited` is no limit.
#[derive(clap::Args, Default)]
pub(crate) struct LimitArgs {
    /// Limit of processors, such as 0.5
    #[arg(long, value_name = "N", value_parser = cpus)]
    cpus: Option<u64>,
    /// Share of the processors when there are not enough: 1 to 10000, against 100 of everybody else
    #[arg(long, value_name = "N", value_parser = number)]
    cpu_weight: Option<u64>,
    /// Milliseconds of a processor that may be used beyond the limit at once, if they were left before
    #[arg(long, value_name = "MS", value_parser = millis)]
    cpu_burst: Option<u64>,
    /// Limit of memory, such as 512M or 2G; without a unit it is MiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Limit of processes and threads
    #[arg(long, value_name = "N", value_parser = number)]
    processes: Option<u64>,
    /// Limit of disk, beyond the image; without a unit it is MiB
    #[arg(long, value_name = "SIZE", value_parser = size)]
    disk: Option<u64>,
    /// Limit of what is read from disk in a second
    #[arg(long, value_name = "SIZE", value_parser = size)]
    io_read: Option<u64>,
    /// Limit of what is written to disk in a second
    #[arg(long, value_name = "SIZE", value_parser = size)]
    io_write: Option<u64>,
    /// Limit of the files that one process may have open
    #[arg(long, value_name = "N", value_parser = number)]
    open_files: Option<u64>,
}

impl From<LimitArgs> for ResourceLimits {
    fn from(args: LimitArgs) -> Self {
        Self {
            cpu_millis: args.cpus,
            cpu_weight: args.cpu_weight,
            cpu_burst_us: args.cpu_burst,
            memory_bytes: args.memory,
            processes: args.processes,
            disk_bytes: args.disk,
            io_read_bps: args.io_read,
            io_write_bps: args.io_write,
            open_files: args.open_files,
        }
    }
}

/// The same for the API, whose bounds are checked.
impl TryFrom<LimitArgs> for Limits {
    type Error = BoundError;

    fn try_from(args: LimitArgs) -> Result<Self, BoundError> {
        Ok(Self {
            cpu_millis: limit(args.cpus, CpuMillis::new)?,
            cpu_weight: limit(args.cpu_weight, CpuWeight::new)?,
            cpu_burst_us: limit(args.cpu_burst, CpuBurstUs::new)?,
            memory_bytes: limit(args.memory, MemoryBytes::new)?,
            processes: limit(args.processes, Processes::new)?,
            disk_bytes: limit(args.disk, DiskBytes::new)?,
            io_read_bps: limit(args.io_read, IoBps::new)?,
            io_write_bps: limit(args.io_write, IoBps::new)?,
            open_files: limit(args.open_files, OpenFiles::new)?,
        })
    }
}

fn limit<T>(value: Option<u64>, number: impl Fn(u64) -> Result<T, BoundError>) -> Result<Option<Limit<T>>, BoundError> {
    match value {
        None => Ok(None),
        Some(UNLIMITED) => Ok(Some(Limit::UNLIMITED)),
        Some(value) => number(value).map(Limit::Number).map(Some),
    }
}

impl ByHand {
    /// All that is seen of a sandbox.
    pub(super) async fn inspect(&self, sandbox: SandboxId, json: bool) -> anyhow::Result<ExitCode> {
        let generation = self.generation(&sandbox).await?;
        let seen = self.provider.observe(&InstanceRef { sandbox, generation }).await?;
        if json {
            return say(serde_json::to_string(&seen)?);
        }
        let mut out = io::stdout().lock();
        writeln!(out, "instance    {}", seen.instance)?;
        writeln!(out, "state       {}", seen.state)?;
        if let Some(deadline) = seen.deadline {
            writeln!(out, "ends in     {} s", deadline.remaining_ms / 1000)?;
        }
        write_table(&mut out, &seen)?;
        Ok(ExitCode::SUCCESS)
    }

    /// Changes limits if any are named, and shows those in force.
    pub(super) async fn limit(&self, sandbox: SandboxId, args: LimitArgs, json: bool) -> anyhow::Result<ExitCode> {
        let generation = self.generation(&sandbox).await?;
        let change = ResourceLimits::from(args);
        if change != ResourceLimits::default() {
            self.provider.set_limits(&mutation(generation), &sandbox, &change).await?;
        }
        let seen = self.provider.observe(&InstanceRef { sandbox, generation }).await?;
        if json {
            return say(serde_json::to_string(&seen)?);
        }
        write_table(&mut io::stdout().lock(), &seen)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn write_table(out: &mut impl Write, seen: &Observation) -> io::Result<()> {
    let limits = seen.limits.clone().unwrap_or_default();
    let usage = seen.usage.clone().unwrap_or_default();
    let none = || UNLIMITED_WORD.to_owned();
    let plain = |limit: Option<u64>| limit.map_or_else(none, |limit| limit.to_string());
    let sized = |limit: Option<u64>| limit.map_or_else(none, bytes);
    let speed = |limit: Option<u64>| limit.map_or_else(none, |bps| format!("{}/s", bytes(bps)));
    let used = |used: Option<String>| used.map_or_else(String::new, |used| format!("  ({used} in use)"));
    let cpus = limits.cpu_millis.map_or_else(none, |millis| format!("{}.{:03}", millis / 1000, millis % 1000));
    let weight = limits.cpu_weight.map_or("100".to_owned(), |weight| weight.to_string());
    let burst = limits.cpu_burst_us.map_or("none".to_owned(), micros);
    writeln!(out, "cpus        {cpus}")?;
    writeln!(out, "cpu weight  {weight}")?;
    writeln!(out, "cpu burst   {burst}")?;
    writeln!(out, "memory      {}{}", sized(limits.memory_bytes), used(usage.memory_bytes.map(bytes)))?;
    writeln!(out, "processes   {}{}", plain(limits.processes), used(usage.processes.map(|count| count.to_string())))?;
    writeln!(out, "disk        {}", sized(limits.disk_bytes))?;
    writeln!(out, "io read     {}", speed(limits.io_read_bps))?;
    writeln!(out, "io write    {}", speed(limits.io_write_bps))?;
    writeln!(out, "open files  {}", plain(limits.open_files))?;
    if let Some(kills) = oom_line(&usage) {
        writeln!(out, "{kills}")?;
    }
    for (capability, why) in &seen.lacks {
        writeln!(out, "without {}: {why}", word(*capability))?;
    }
    Ok(())
}

/// Who was killed for memory, if anybody was.
fn oom_line(usage: &Usage) -> Option<String> {
    let kills = usage.oom_kills.filter(|&kills| kills > 0)?;
    let who = usage.oom_last.as_ref().map(|OomKill { process, pid, execution, .. }| {
        let process = process.as_deref().unwrap_or("a process");
        let pid = pid.map_or_else(String::new, |pid| format!(", pid {pid}"));
        let execution = execution.as_ref().map_or_else(String::new, |id| format!(", the first of {id}"));
        format!(", last {process}{pid}{execution}")
    });
    Some(format!("killed for memory: {kills}{}", who.unwrap_or_default()))
}

fn number(text: &str) -> Result<u64, String> {
    if text == UNLIMITED_WORD {
        return Ok(UNLIMITED);
    }
    text.parse().map_err(|_| format!("{text:?} is neither a number nor `{UNLIMITED_WORD}`"))
}

fn millis(text: &str) -> Result<u64, String> {
    let ms = number(text)?;
    Ok(if ms == UNLIMITED { UNLIMITED } else { ms.saturating_mul(1000) })
}

fn cpus(text: &str) -> Result<u64, String> {
    if text == UNLIMITED_WORD {
        return Ok(UNLIMITED);
    }
    let cpus: f64 = text.parse().map_err(|_| format!("{text:?} is neither a number nor `{UNLIMITED_WORD}`"))?;
    scaled(cpus, 1000.0, text)
}

fn size(text: &str) -> Result<u64, String> {
    if text == UNLIMITED_WORD {
        return Ok(UNLIMITED);
    }
    let bad = || format!("{text:?} is no size: write it like 512M or 2G, or `{UNLIMITED_WORD}`");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = match unit.to_ascii_lowercase().trim_end_matches("ib") {
        "b" => 1.0,
        "k" => 1024.0,
        "" | "m" => 1024.0 * 1024.0,
        "g" => 1024.0 * 1024.0 * 1024.0,
        "t" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return Err(bad()),
    };
    scaled(number.parse().map_err(|_| bad())?, unit, text)
}

/// A number times something, if it is one that can be meant.
fn scaled(number: f64, by: f64, text: &str) -> Result<u64, String> {
    let value = number * by;
    // Beyond 2^53 no whole number is exact, and no machine has that much of anything.
    if value.is_finite() && (0.0..9e15).contains(&value) {
        return Ok(value.round() as u64);
    }
    Err(format!("{text:?} is out of range"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("512", 512 << 20),
            ("512M", 512 << 20),
            ("2g", 2 << 30),
            ("1.5GiB", 3 << 29),
            ("64KiB", 65_536),
            ("9b", 9),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size("unlimited"), Ok(UNLIMITED));
        for text in ["", "M", "-1", "1e3", "12X", "1..2G", "99999999999T"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(cpus("0.5"), Ok(500));
        assert!(cpus("-1").is_err() && cpus("NaN").is_err() && cpus("inf").is_err());
        assert_eq!(millis("50"), Ok(50_000));
        assert!(number("many").is_err());
    }

    #[test]
    fn the_victim_is_named_as_far_as_it_is_known() {
        let mut usage = Usage { oom_kills: Some(0), ..Usage::default() };
        assert_eq!(oom_line(&usage), None);
        usage.oom_kills = Some(2);
        assert_eq!(oom_line(&usage).unwrap(), "killed for memory: 2");
        usage.oom_last = Some(OomKill { process: Some("tail".to_owned()), pid: None, execution: None, at_ms: 0 });
        assert_eq!(oom_line(&usage).unwrap(), "killed for memory: 2, last tail");
    }
}
