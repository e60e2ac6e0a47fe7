//! Limits, written to whichever hierarchy has their controller, before anything runs or while it does.
//!
//! | limit | v2 | v1 |
//! |---|---|---|
//! | processors | `cpu.max`, `cpu.max.burst`, `cpu.weight` | `cpu.cfs_quota_us`, `cpu.cfs_burst_us`, `cpu.shares` |
//! | memory, swap included | `memory.max`, `memory.swap.max` | `memory.limit_in_bytes`, `memory.memsw.limit_in_bytes` |
//! | processes | `pids.max` | `pids.max` |
//! | disk speed | `io.max` | `blkio.throttle.*_bps_device` |
//!
//! `memory.oom.group` stays off: the kernel kills one process, not the
//! sandbox, unless that process is PID 1.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use viv_provider::ResourceLimits;
use viv_provider::limits::CPU_PERIOD_US;

use super::device::BlockDevice;
use super::{Controller, InstanceCgroups};

/// Weight of who asks for none, and what v1 counts for it.
const WEIGHT: u64 = 100;
const SHARES: u64 = 1024;

/// Why limits were not set. Nothing is changed then.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// More memory is in use, and cannot be given back.
    #[error("{used_bytes} bytes of memory are in use, and they cannot be given back")]
    MemoryInUse {
        /// How much.
        used_bytes: u64,
    },
    /// Asked for, and there is nothing to set it with.
    #[error("{0}")]
    Missing(&'static str),
    /// The kernel does not take it.
    #[error("{} does not take {text:?}", .path.display())]
    Refused {
        /// Which file.
        path: PathBuf,
        /// What it was given.
        text: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, LimitError>;

impl InstanceCgroups {
    /// Sets all limits of cgroups that are new. `folder` lies where the instance's files are.
    pub fn limit(&self, limits: &ResourceLimits, folder: &Path) -> Result<()> {
        self.limit_memory(limits.memory_bytes)?;
        self.limit_cpu(limits)?;
        self.limit_processes(limits.processes)?;
        // What is new has none, and not every disk can be told so.
        if limits.io_read_bps.or(limits.io_write_bps).is_some() { self.limit_io(limits, folder) } else { Ok(()) }
    }

    /// Changes limits that are in force: to all that are new, or to none.
    pub fn change_limits(&self, now: &ResourceLimits, new: &ResourceLimits, folder: &Path) -> Result<()> {
        // First what can be refused for a reason; if the rest goes wrong, something is strange, and what was is put back.
        if now.memory_bytes != new.memory_bytes {
            self.limit_memory(new.memory_bytes)?;
        }
        self.limit_the_rest(new, folder).inspect_err(|_| {
            let _ = self.limit_memory(now.memory_bytes);
            let _ = self.limit_the_rest(now, folder);
        })
    }

    /// Gives what dies all that it can use to do so: who waits for his turn at a disk does not hear that he is killed.
    pub fn unthrottle(&self, folder: &Path) {
        let _ = self.limit_cpu(&ResourceLimits::default());
        let _ = self.limit_io(&ResourceLimits::default(), folder);
    }

    fn limit_the_rest(&self, limits: &ResourceLimits, folder: &Path) -> Result<()> {
        self.limit_cpu(limits)?;
        self.limit_processes(limits.processes)?;
        self.limit_io(limits, folder)
    }

    fn limit_cpu(&self, limits: &ResourceLimits) -> Result<()> {
        let weight = limits.cpu_weight.unwrap_or(WEIGHT);
        let quota_us = limits.cpu_millis.map(|millis| millis.saturating_mul(CPU_PERIOD_US) / 1000);
        let (folder, files, quota, weight) = match self.side(Controller::Cpu) {
            Some(Side::V1(folder)) => {
                let quota = quota_us.map_or("-1".to_owned(), |us| us.to_string());
                (folder, ["cpu.cfs_quota_us", "cpu.cfs_burst_us", "cpu.shares"], quota, weight * SHARES / WEIGHT)
            }
            Some(Side::V2(folder)) => {
                let quota = quota_us.map_or("max".to_owned(), |us| us.to_string());
                let quota = format!("{quota} {CPU_PERIOD_US}");
                (folder, ["cpu.max", "cpu.max.burst", "cpu.weight"], quota, weight)
            }
            None if limits.cpu_millis.or(limits.cpu_weight).is_some() => {
                return Err(LimitError::Missing("the cpu cgroup controller is not available"));
            }
            None => return Ok(()),
        };
        let [quota_file, burst_file, weight_file] = files.map(|file| folder.join(file));
        if limits.cpu_millis.or(limits.cpu_weight).is_none() && !quota_file.exists() {
            return Ok(());
        }
        // A burst is never more than the quota, not even between two writes.
        if burst_file.exists() {
            set(&burst_file, "0")?;
        }
        set(&quota_file, &quota)?;
        if let Some(burst_us) = limits.cpu_burst_us {
            set(&burst_file, &burst_us.to_string())?;
        }
        set(&weight_file, &weight.to_string())
    }

    fn limit_processes(&self, processes: Option<u64>) -> Result<()> {
        match self.side(Controller::Pids) {
            Some(Side::V1(folder) | Side::V2(folder)) => {
                set_if(processes, &folder.join("pids.max"), &or_max(processes))
            }
            None if processes.is_some() => Err(LimitError::Missing("the pids cgroup controller is not available")),
            None => Ok(()),
        }
    }

    fn limit_memory(&self, bytes: Option<u64>) -> Result<()> {
        let busy = |error: LimitError| match error {
            LimitError::Refused { source, .. } if source.raw_os_error() == Some(libc::EBUSY) => self.memory_in_use(),
            other => other,
        };
        match self.side(Controller::Memory) {
            Some(Side::V1(folder)) => limit_memory_v1(&folder, bytes).map_err(busy),
            Some(Side::V2(folder)) => self.limit_memory_v2(&folder, bytes),
            None if bytes.is_some() => Err(LimitError::Missing("the memory cgroup controller is not available")),
            None => Ok(()),
        }
    }

    fn limit_memory_v2(&self, folder: &Path, bytes: Option<u64>) -> Result<()> {
        if let Some(bytes) = bytes {
            // Here the kernel would kill rather than refuse, so what can be given back is taken before it is asked.
            let used = self.usage().memory_bytes.unwrap_or(0);
            if used > bytes {
                let _ = set(&folder.join("memory.reclaim"), &(used - bytes).to_string());
            }
            if self.usage().memory_bytes.is_some_and(|used| used > bytes) {
                return Err(self.memory_in_use());
            }
        }
        let swap = folder.join("memory.swap.max");
        if swap.exists() {
            set(&swap, if bytes.is_some() { "0" } else { "max" })?;
        }
        set_if(bytes, &folder.join("memory.max"), &or_max(bytes))
    }

    fn memory_in_use(&self) -> LimitError {
        LimitError::MemoryInUse { used_bytes: self.usage().memory_bytes.unwrap_or(0) }
    }

    fn limit_io(&self, limits: &ResourceLimits, folder: &Path) -> Result<()> {
        let asked = limits.io_read_bps.or(limits.io_write_bps).is_some();
        let Some(side) = self.side(Controller::Io) else {
            let why = "the io cgroup controller is not available";
            return if asked { Err(LimitError::Missing(why)) } else { Ok(()) };
        };
        let device = match BlockDevice::under(folder) {
            Ok(device) => device,
            Err(why) if asked => return Err(LimitError::Missing(why)),
            Err(_) => return Ok(()),
        };
        match side {
            Side::V1(folder) => {
                for (file, bps) in [("read", limits.io_read_bps), ("write", limits.io_write_bps)] {
                    let file = folder.join(format!("blkio.throttle.{file}_bps_device"));
                    if bps.is_some() || file.exists() {
                        set(&file, &format!("{device} {}", bps.unwrap_or(0)))?;
                    }
                }
                Ok(())
            }
            Side::V2(folder) => {
                let file = folder.join("io.max");
                if !asked && !file.exists() {
                    return Ok(());
                }
                let (read, write) = (or_max(limits.io_read_bps), or_max(limits.io_write_bps));
                set(&file, &format!("{device} rbps={read} wbps={write}"))
            }
        }
    }

    /// The folder that has a controller.
    fn side(&self, controller: Controller) -> Option<Side> {
        if let Some(folder) = self.v1_folder(controller) {
            return Some(Side::V1(folder));
        }
        self.v2().filter(|_| self.layout.v2_has(controller)).map(Side::V2)
    }
}

/// Which hierarchy has it.
enum Side {
    V1(PathBuf),
    V2(PathBuf),
}

/// Memory alone must never be allowed more than memory and swap together.
fn limit_memory_v1(folder: &Path, bytes: Option<u64>) -> Result<()> {
    let text = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
    let (memory, with_swap) = (folder.join("memory.limit_in_bytes"), folder.join("memory.memsw.limit_in_bytes"));
    let Some(now) = fs::read_to_string(&with_swap).ok().and_then(|now| now.trim().parse::<u64>().ok()) else {
        return set(&memory, &text);
    };
    if bytes.is_none_or(|bytes| bytes > now) {
        set(&with_swap, &text)?;
        return set(&memory, &text);
    }
    let before = fs::read_to_string(&memory).unwrap_or_default();
    set(&memory, &text)?;
    set(&with_swap, &text).inspect_err(|_| {
        let _ = set(&memory, before.trim());
    })
}

fn or_max(limit: Option<u64>) -> String {
    limit.map_or("max".to_owned(), |limit| limit.to_string())
}

/// Lifts a limit only where there could be one: a controller may not have been handed down to us.
fn set_if(limit: Option<u64>, path: &Path, text: &str) -> Result<()> {
    if limit.is_some() || path.exists() { set(path, text) } else { Ok(()) }
}

/// Writes to a file that is there.
fn set(path: &Path, text: &str) -> Result<()> {
    let written = File::options().write(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| LimitError::Refused { path: path.to_owned(), text: text.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::super::Layout;
    use super::*;

    const FILES: [&str; 13] = [
        "v1/cpu/x/cpu.cfs_quota_us",
        "v1/cpu/x/cpu.cfs_burst_us",
        "v1/cpu/x/cpu.shares",
        "v1/memory/x/memory.limit_in_bytes",
        "v1/memory/x/memory.memsw.limit_in_bytes",
        "v1/pids/x/pids.max",
        "v2/x/cpu.max",
        "v2/x/cpu.max.burst",
        "v2/x/cpu.weight",
        "v2/x/memory.max",
        "v2/x/memory.swap.max",
        "v2/x/pids.max",
        "v2/cgroup.controllers",
    ];

    /// Folders that look like both kinds of hierarchy.
    fn ground() -> (tempfile::TempDir, InstanceCgroups, InstanceCgroups) {
        let ground = tempfile::tempdir().unwrap();
        for file in FILES {
            let file = ground.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        fs::write(ground.path().join("v2/cgroup.controllers"), "cpu memory pids\n").unwrap();
        let v1 = ["cpu", "memory", "pids"].map(|name| (ground.path().join("v1").join(name), [name.to_owned()].into()));
        let v1 = Layout { v1: v1.into(), ..Layout::default() };
        let v2 = Layout { v2: Some(ground.path().join("v2")), ..Layout::default() };
        let path = || "x".to_owned();
        (ground, InstanceCgroups::new(v1, path()), InstanceCgroups::new(v2, path()))
    }

    /// Files are not emptied before they are written, like the kernel's; so what was longer is cut here.
    fn read(ground: &tempfile::TempDir, file: &str) -> String {
        fs::read_to_string(ground.path().join(file)).unwrap()
    }

    fn clear(ground: &tempfile::TempDir) {
        for file in FILES.iter().filter(|file| !file.ends_with("controllers")) {
            fs::write(ground.path().join(file), "").unwrap();
        }
    }

    fn some() -> ResourceLimits {
        ResourceLimits {
            cpu_millis: Some(1500),
            cpu_weight: Some(200),
            cpu_burst_us: Some(50_000),
            memory_bytes: Some(64 << 20),
            processes: Some(99),
            ..ResourceLimits::default()
        }
    }

    #[test]
    fn limits_are_written_in_the_words_of_each_hierarchy() {
        let (ground, v1, v2) = ground();
        v1.limit(&some(), ground.path()).unwrap();
        assert_eq!(read(&ground, "v1/cpu/x/cpu.cfs_quota_us"), "150000");
        assert_eq!(read(&ground, "v1/cpu/x/cpu.cfs_burst_us"), "50000");
        assert_eq!(read(&ground, "v1/cpu/x/cpu.shares"), "2048");
        assert_eq!(read(&ground, "v1/memory/x/memory.limit_in_bytes"), "67108864");
        assert_eq!(read(&ground, "v1/pids/x/pids.max"), "99");
        v2.limit(&some(), ground.path()).unwrap();
        assert_eq!(read(&ground, "v2/x/cpu.max"), "150000 100000");
        assert_eq!(read(&ground, "v2/x/cpu.max.burst"), "50000");
        assert_eq!(read(&ground, "v2/x/cpu.weight"), "200");
        assert_eq!(read(&ground, "v2/x/memory.max"), "67108864");
        assert_eq!(read(&ground, "v2/x/memory.swap.max"), "0");
        assert_eq!(read(&ground, "v2/x/pids.max"), "99");
    }

    #[test]
    fn what_is_lifted_is_written_too() {
        let (ground, v1, v2) = ground();
        for cgroups in [&v1, &v2] {
            cgroups.limit(&some(), ground.path()).unwrap();
            clear(&ground);
            cgroups.change_limits(&some(), &ResourceLimits::default(), ground.path()).unwrap();
        }
        assert_eq!(read(&ground, "v2/x/cpu.max"), "max 100000");
        assert_eq!(read(&ground, "v2/x/cpu.weight"), "100");
        assert_eq!(read(&ground, "v2/x/memory.max"), "max");
        assert_eq!(read(&ground, "v2/x/memory.swap.max"), "max");
        assert_eq!(read(&ground, "v2/x/pids.max"), "max");
    }

    #[test]
    fn what_cannot_be_kept_is_refused_and_what_is_not_asked_for_is_not_missed() {
        let ground = tempfile::tempdir().unwrap();
        let none = InstanceCgroups::new(Layout::default(), "x".to_owned());
        none.limit(&ResourceLimits::default(), ground.path()).unwrap();
        none.unthrottle(ground.path());
        let asked = [
            ResourceLimits { cpu_weight: Some(5), ..ResourceLimits::default() },
            ResourceLimits { memory_bytes: Some(5), ..ResourceLimits::default() },
            ResourceLimits { processes: Some(5), ..ResourceLimits::default() },
            ResourceLimits { io_read_bps: Some(5), ..ResourceLimits::default() },
        ];
        for limits in asked {
            assert!(matches!(none.limit(&limits, ground.path()), Err(LimitError::Missing(_))), "{limits:?}");
        }
    }

    #[test]
    fn with_v2_less_memory_than_is_used_is_refused_before_the_kernel_kills() {
        let (ground, _, v2) = ground();
        fs::write(ground.path().join("v2/x/memory.current"), "70000000\n").unwrap();
        fs::write(ground.path().join("v2/x/memory.reclaim"), "").unwrap();
        let refused = v2.change_limits(&ResourceLimits::default(), &some(), ground.path());
        assert!(matches!(refused, Err(LimitError::MemoryInUse { used_bytes: 70_000_000 })), "{refused:?}");
        assert_eq!(read(&ground, "v2/x/memory.reclaim"), (70_000_000 - (64 << 20)).to_string());
        assert_eq!(read(&ground, "v2/x/memory.max"), "", "nothing was changed");
        assert_eq!(read(&ground, "v2/x/cpu.max"), "", "nothing was changed");
    }

    #[test]
    fn memory_and_swap_together_are_never_less_than_memory_alone() {
        let (ground, _, _) = ground();
        let folder = ground.path().join("v1/memory/x");
        fs::write(folder.join("memory.memsw.limit_in_bytes"), "100").unwrap();
        fs::write(folder.join("memory.limit_in_bytes"), "100").unwrap();
        limit_memory_v1(&folder, Some(200)).unwrap();
        assert_eq!(read(&ground, "v1/memory/x/memory.memsw.limit_in_bytes"), "200");
        assert_eq!(read(&ground, "v1/memory/x/memory.limit_in_bytes"), "200");
        limit_memory_v1(&folder, Some(150)).unwrap();
        assert_eq!(read(&ground, "v1/memory/x/memory.memsw.limit_in_bytes"), "150");
        assert_eq!(read(&ground, "v1/memory/x/memory.limit_in_bytes"), "150");
    }
}
