//! Limits as data: what an instance may use, and who was killed for using more.
//!
//! The same words are used to ask for limits and to change them:
//!
//! | said | when it is made | when it is changed | when it is looked at |
//! |---|---|---|---|
//! | a number | this much | this much | this much |
//! | [`UNLIMITED`] | none | none from now on | |
//! | nothing | the provider's default | as it was | none |

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::capability::Capability;
use crate::id::ExecutionId;
use crate::spec::Invalid;

/// No limit, said aloud. As text it is `"unlimited"`.
pub const UNLIMITED: u64 = u64::MAX;

/// Over which time a processor limit is kept. The kernel's own default.
pub const CPU_PERIOD_US: u64 = 100_000;

/// What a kernel takes as a processor limit, in thousandths: it counts in whole milliseconds of its period.
const CPU_MILLIS: std::ops::RangeInclusive<u64> = 10..=1_000_000;

/// What a kernel takes as a weight.
const CPU_WEIGHT: std::ops::RangeInclusive<u64> = 1..=10_000;

/// An agent and a shell fit; with less, an instance dies while it is made.
pub const MEMORY_BYTES_MIN: u64 = 16 << 20;

/// The agent's own threads and a command fit.
pub const PROCESSES_MIN: u64 = 8;

/// With less, what waits for its turn cannot even be killed for minutes.
pub const IO_BPS_MIN: u64 = 1 << 20;

/// Standard streams and what a dynamic loader opens.
pub const OPEN_FILES_MIN: u64 = 16;

/// Limits. What `None` means is told by where it stands: see the module.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceLimits {
    /// Thousandths of one processor.
    #[serde(with = "number_or_word")]
    pub cpu_millis: Option<u64>,
    /// Share of the processors when there are not enough for all, against 100 of who says nothing.
    #[serde(with = "number_or_word")]
    pub cpu_weight: Option<u64>,
    /// Processor time beyond the limit that may be used at once, if it was left unused before; at most what the limit
    /// gives in [`CPU_PERIOD_US`].
    #[serde(with = "number_or_word")]
    pub cpu_burst_us: Option<u64>,
    /// Memory, files in memory included.
    #[serde(with = "number_or_word")]
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    #[serde(with = "number_or_word")]
    pub processes: Option<u64>,
    /// Disk.
    #[serde(with = "number_or_word")]
    pub disk_bytes: Option<u64>,
    /// Bytes per second read from disk.
    #[serde(with = "number_or_word")]
    pub io_read_bps: Option<u64>,
    /// Bytes per second written to disk.
    #[serde(with = "number_or_word")]
    pub io_write_bps: Option<u64>,
    /// Descriptors of one process.
    #[serde(with = "number_or_word")]
    pub open_files: Option<u64>,
}

impl ResourceLimits {
    /// None of anything, said aloud.
    pub fn unlimited() -> Self {
        Self::default().each(&Self::default(), |_, _| Some(UNLIMITED))
    }

    /// What each takes.
    pub fn needs(&self) -> [(Capability, Option<u64>); 9] {
        [
            (Capability::LimitCpu, self.cpu_millis),
            (Capability::LimitCpu, self.cpu_weight),
            (Capability::LimitCpuBurst, self.cpu_burst_us),
            (Capability::LimitMemory, self.memory_bytes),
            (Capability::LimitProcesses, self.processes),
            (Capability::LimitDisk, self.disk_bytes),
            (Capability::LimitIoRead, self.io_read_bps),
            (Capability::LimitIoWrite, self.io_write_bps),
            (Capability::LimitOpenFiles, self.open_files),
        ]
    }

    /// The first that is asked for and not declared. To ask for no limit takes nothing.
    pub fn first_missing(&self, can: impl Fn(Capability) -> bool) -> Option<Capability> {
        let asked = |limit: Option<u64>| limit.is_some_and(|limit| limit != UNLIMITED);
        self.needs().into_iter().find(|&(needed, limit)| asked(limit) && !can(needed)).map(|(needed, _)| needed)
    }

    /// Without those that are not declared.
    #[must_use]
    pub fn only(&self, can: impl Fn(Capability) -> bool) -> Self {
        let only = |limit: Option<u64>, needed| limit.filter(|_| can(needed));
        Self {
            cpu_millis: only(self.cpu_millis, Capability::LimitCpu),
            cpu_weight: only(self.cpu_weight, Capability::LimitCpu),
            cpu_burst_us: only(self.cpu_burst_us, Capability::LimitCpuBurst),
            memory_bytes: only(self.memory_bytes, Capability::LimitMemory),
            processes: only(self.processes, Capability::LimitProcesses),
            disk_bytes: only(self.disk_bytes, Capability::LimitDisk),
            io_read_bps: only(self.io_read_bps, Capability::LimitIoRead),
            io_write_bps: only(self.io_write_bps, Capability::LimitIoWrite),
            open_files: only(self.open_files, Capability::LimitOpenFiles),
        }
    }

    /// What this says, and `other` where it says nothing.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        self.each(other, Option::or)
    }

    /// As it is looked at: what has no limit says nothing.
    #[must_use]
    pub fn in_force(&self) -> Self {
        self.each(self, |limit, _| limit.filter(|&limit| limit != UNLIMITED))
    }

    fn each(&self, other: &Self, pick: impl Fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            cpu_millis: pick(self.cpu_millis, other.cpu_millis),
            cpu_weight: pick(self.cpu_weight, other.cpu_weight),
            cpu_burst_us: pick(self.cpu_burst_us, other.cpu_burst_us),
            memory_bytes: pick(self.memory_bytes, other.memory_bytes),
            processes: pick(self.processes, other.processes),
            disk_bytes: pick(self.disk_bytes, other.disk_bytes),
            io_read_bps: pick(self.io_read_bps, other.io_read_bps),
            io_write_bps: pick(self.io_write_bps, other.io_write_bps),
            open_files: pick(self.open_files, other.open_files),
        }
    }

    /// Refuses limits, as they would be in force, under which nothing can live or that no kernel takes.
    pub fn check(&self) -> Result<(), Invalid> {
        let limits = self.in_force();
        let within = |what: &str, limit: Option<u64>, range: std::ops::RangeInclusive<u64>, hint: &str| {
            if limit.is_none_or(|limit| range.contains(&limit)) {
                return Ok(());
            }
            let bounds = match *range.end() {
                u64::MAX => format!("at least {}", range.start()),
                end => format!("between {} and {end}", range.start()),
            };
            Err(Invalid { what: format!("{what} must be {bounds}"), hint: hint.to_owned() })
        };
        let at_least = |least: u64| least..=u64::MAX;
        within("a processor limit in thousandths", limits.cpu_millis, CPU_MILLIS, "500 is half a processor")?;
        within("a processor weight", limits.cpu_weight, CPU_WEIGHT, "100 is everybody's, 200 twice as much")?;
        within("a memory limit in bytes", limits.memory_bytes, at_least(MEMORY_BYTES_MIN), "leave it out")?;
        within("a limit of processes", limits.processes, at_least(PROCESSES_MIN), "leave it out")?;
        within("a disk limit in bytes", limits.disk_bytes, at_least(1), "leave it out")?;
        for bps in [limits.io_read_bps, limits.io_write_bps] {
            within("a limit of bytes per second", bps, at_least(IO_BPS_MIN), "leave it out")?;
        }
        within("a limit of open files", limits.open_files, at_least(OPEN_FILES_MIN), "leave it out")?;
        check_burst(&limits)
    }
}

fn check_burst(limits: &ResourceLimits) -> Result<(), Invalid> {
    let Some(burst_us) = limits.cpu_burst_us else { return Ok(()) };
    let invalid = |what: String, hint: &str| Err(Invalid { what, hint: hint.to_owned() });
    let Some(millis) = limits.cpu_millis else {
        return invalid("a burst goes beyond a processor limit, and there is none".to_owned(), "name a limit too");
    };
    let quota_us = millis.saturating_mul(CPU_PERIOD_US) / 1000;
    if burst_us == 0 || burst_us > quota_us {
        let what = format!("with {millis} thousandths of a processor, a burst must be between 1 and {quota_us} µs");
        return invalid(what, "it is at most as long as what the limit gives in a tenth of a second");
    }
    Ok(())
}

/// Who was killed for memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomKill {
    /// The process's name, where the kernel's log may be read. The process chose it.
    pub process: Option<String>,
    /// Its pid inside, where that is known.
    pub pid: Option<u32>,
    /// Whose first process it was, if it was one.
    pub execution: Option<ExecutionId>,
    /// When it was noticed, wall time, for display.
    pub at_ms: u64,
}

/// [`UNLIMITED`] is a word to people and programs: not every reader of numbers takes one so large.
mod number_or_word {
    use super::{Deserialize, Deserializer, Serialize, Serializer, UNLIMITED};

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        Unlimited,
    }

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Said {
        Number(u64),
        Word(Word),
    }

    #[expect(clippy::ref_option, reason = "the signature is serde's")]
    pub(super) fn serialize<S: Serializer>(limit: &Option<u64>, serializer: S) -> Result<S::Ok, S::Error> {
        limit
            .map(|limit| if limit == UNLIMITED { Said::Word(Word::Unlimited) } else { Said::Number(limit) })
            .serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
        Ok(Option::<Said>::deserialize(deserializer)?.map(|said| match said {
            Said::Number(limit) => limit,
            Said::Word(Word::Unlimited) => UNLIMITED,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_told_by_the_other() {
        let asked = ResourceLimits { processes: Some(64), memory_bytes: Some(UNLIMITED), ..ResourceLimits::default() };
        let default =
            ResourceLimits { processes: Some(4096), memory_bytes: Some(1 << 30), ..ResourceLimits::default() };
        let default = ResourceLimits { open_files: Some(1024), ..default };
        let force = asked.or(&default).in_force();
        assert_eq!(force, ResourceLimits { processes: Some(64), open_files: Some(1024), ..ResourceLimits::default() });
    }

    #[test]
    fn unlimited_is_a_word_in_text() {
        let limits = ResourceLimits { cpu_millis: Some(500), disk_bytes: Some(UNLIMITED), ..ResourceLimits::default() };
        let text = serde_json::to_string(&limits).unwrap();
        assert!(text.contains("\"disk_bytes\":\"unlimited\"") && text.contains("\"cpu_millis\":500"), "{text}");
        assert_eq!(serde_json::from_str::<ResourceLimits>(&text).unwrap(), limits);
        // As older versions wrote them.
        let old: ResourceLimits = serde_json::from_str("{\"cpu_millis\":null,\"memory_bytes\":5}").unwrap();
        assert_eq!(old, ResourceLimits { memory_bytes: Some(5), ..ResourceLimits::default() });
        assert!(serde_json::from_str::<ResourceLimits>("{\"processes\":\"many\"}").is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let none = ResourceLimits::default;
        let bad = [
            ResourceLimits { cpu_millis: Some(9), ..none() },
            ResourceLimits { cpu_weight: Some(10_001), ..none() },
            ResourceLimits { cpu_burst_us: Some(10), ..none() },
            ResourceLimits { cpu_millis: Some(500), cpu_burst_us: Some(50_001), ..none() },
            ResourceLimits { memory_bytes: Some(0), ..none() },
            ResourceLimits { processes: Some(PROCESSES_MIN - 1), ..none() },
            ResourceLimits { disk_bytes: Some(0), ..none() },
            ResourceLimits { io_read_bps: Some(1), ..none() },
            ResourceLimits { io_write_bps: Some(1), ..none() },
            ResourceLimits { open_files: Some(3), ..none() },
        ];
        for limits in bad {
            assert!(matches!(limits.check(), Err(Invalid { .. })), "{limits:?}");
        }
        ResourceLimits { cpu_millis: Some(500), cpu_burst_us: Some(50_000), ..none() }.check().unwrap();
        ResourceLimits::unlimited().check().unwrap();
        assert_eq!(ResourceLimits::unlimited().first_missing(|_| false), None);
    }
}
