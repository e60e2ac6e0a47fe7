//! Limits on this machine: which can be kept, which hold by default, and how they are changed.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use viv_core::SandboxId;
use viv_provider::{Capabilities, Capability, Mutation, ProviderError, ResourceLimits, UNLIMITED};

use super::{LocalProvider, Result, unavailable, unexpected};
use crate::cgroup::{BlockDevice, Controller, Layout};
use crate::linux;
use crate::shim::proto::{ShimReply, ShimRequest};

/// More than a build or a browser with some pages starts, threads included. Not many more: a bomb of them
/// stands in line before its neighbours, and each of the line waits for his turn among all (docs/limits.md).
const PROCESSES: u64 = 512;

/// What one sandbox may take of the machine's memory, so that it and the machine do not run out of it together.
const MEMORY_SHARE: u64 = 2;

/// Databases and servers ask for this much.
const OPEN_FILES: u64 = 65_536;

/// Everybody's share.
const CPU_WEIGHT: u64 = 100;

/// Why the limit of disk of what runs is not changed with the plain driver.
pub(super) const KEEPS_ITS_SIZE: &str = "with the plain driver a disk keeps the size it was made with";

/// Since when a v2 hierarchy knows bursts.
const BURST_SINCE: (u32, u32) = (5, 14);

/// What holds in a sandbox whose spec says nothing.
///
/// No part of a processor is kept from who could use it: the weight decides when there are not enough. A limit of disk
/// is not among them: with the plain driver it would make each sandbox a disk image of its own.
pub(super) fn defaults() -> ResourceLimits {
    ResourceLimits {
        cpu_weight: Some(CPU_WEIGHT),
        memory_bytes: machine_memory_bytes().map(|bytes| bytes / MEMORY_SHARE),
        processes: Some(PROCESSES),
        open_files: Some(open_files_max().map_or(OPEN_FILES, |most| most.min(OPEN_FILES))),
        ..ResourceLimits::default()
    }
}

fn machine_memory_bytes() -> Option<u64> {
    memory_bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// Which part of the machine's memory can be had.
#[expect(clippy::cast_precision_loss, reason = "a part of something")]
pub(super) fn memory_left() -> Option<f64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    Some(memory_bytes(&text, "MemAvailable:")? as f64 / memory_bytes(&text, "MemTotal:")?.max(1) as f64)
}

fn memory_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
}

/// What commands can be given at the most: the agent cannot raise what it was started with.
fn open_files_max() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Refuses limits that make no sense at all, or not on this machine.
pub(crate) fn check_here(limits: &ResourceLimits) -> Result<()> {
    limits.check()?;
    let most = open_files_max().unwrap_or(UNLIMITED);
    if limits.in_force().open_files.is_some_and(|asked| asked > most) {
        let what = format!("no process on this machine may have more than {most} open files");
        let hint = "raise the limit of who starts viv (`ulimit -Hn`, `LimitNOFILE=`), or ask for less".to_owned();
        return Err(ProviderError::Invalid { what, hint });
    }
    Ok(())
}

/// Declares what can be limited with these hierarchies.
pub(super) fn declare(mut all: Capabilities, layout: &Layout, data: &Path) -> Capabilities {
    use Capability as C;
    for (capability, controller) in [
        (C::LimitCpu, Controller::Cpu),
        (C::LimitCpuBurst, Controller::Cpu),
        (C::LimitMemory, Controller::Memory),
        (C::LimitProcesses, Controller::Pids),
        (C::LimitIoRead, Controller::Io),
        (C::LimitIoWrite, Controller::Io),
    ] {
        let why =
            if layout.has(controller) { why_not(layout, capability, data) } else { Some(layout.why_not(controller)) };
        all = match why {
            None => all.with(capability),
            Some(why) => all.without(capability, why),
        };
    }
    all.with(C::LimitOpenFiles).with(C::LimitsLive)
}

/// Why a limit cannot be kept although its controller is there.
fn why_not(layout: &Layout, capability: Capability, data: &Path) -> Option<String> {
    let v1 = |controller| layout.v1_of(controller);
    match capability {
        Capability::LimitCpuBurst => match v1(Controller::Cpu) {
            Some(mount) if mount.join("cpu.cfs_burst_us").exists() => None,
            Some(_) => Some("this kernel knows no bursts (no cpu.cfs_burst_us)".to_owned()),
            None if linux::version() >= Some(BURST_SINCE) => None,
            None => Some("this kernel knows no bursts (Linux 5.14 brought them)".to_owned()),
        },
        Capability::LimitIoRead | Capability::LimitIoWrite => {
            if let Err(why) = BlockDevice::under(data) {
                return Some(why.to_owned());
            }
            let mount = v1(Controller::Io)?;
            if !mount.join("blkio.throttle.read_bps_device").exists() {
                return Some("this kernel does not limit the speed of disks (no blkio.throttle)".to_owned());
            }
            let why = "with cgroup v1 the kernel writes what is cached on nobody's account; it takes cgroup v2";
            (capability == Capability::LimitIoWrite).then(|| why.to_owned())
        }
        _ => None,
    }
}

impl LocalProvider {
    /// What is asked for, with the defaults that can be kept here.
    pub(super) fn limits_for(&self, asked: &ResourceLimits) -> ResourceLimits {
        let capabilities = self.unprobed_capabilities();
        let defaults = self.shared.config.limits.only(|needed| capabilities.can(needed));
        asked.or(&defaults).in_force()
    }

    /// Refuses what cannot be kept rather than forgetting it (S5).
    pub(super) fn require_limits(&self, limits: &ResourceLimits) -> Result<()> {
        let capabilities = self.unprobed_capabilities();
        match limits.first_missing(|needed| capabilities.can(needed)) {
            Some(missing) => self.require(missing),
            None => Ok(()),
        }
    }

    pub(super) async fn change_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits> {
        self.require_limits(change)?;
        if change.disk_bytes.is_some() && self.shared.store.driver.copies_live() {
            let why = KEEPS_ITS_SIZE.to_owned();
            return Err(ProviderError::Unsupported { capability: Capability::LimitDiskLive, why });
        }
        let layer_bytes = self.left_for_layer(mutation, sandbox, change.disk_bytes).await?;
        let request = ShimRequest::SetLimits { mutation: mutation.clone(), change: change.clone(), layer_bytes };
        match self.ask_shim(mutation, sandbox, request).await? {
            ShimReply::Limits(limits) => Ok(limits),
            _ => Err(unexpected("the shim")),
        }
    }

    /// What is left of a new limit of disk, above layers that were saved.
    async fn left_for_layer(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        disk_bytes: Option<u64>,
    ) -> Result<Option<u64>> {
        let Some(limit) = disk_bytes.filter(|&bytes| bytes != UNLIMITED) else { return Ok(None) };
        let (sandbox, generation) = (sandbox.clone(), mutation.generation);
        self.blocking(move |this| {
            // Who means another generation, or none, hears that at the fence.
            let record = this.read_record(&sandbox)?.filter(|record| record.generation() == generation);
            let Some(made) = record.and_then(|record| record.made) else { return Ok(None) };
            let saved = this.shared.store.saved_bytes(&made.of).map_err(unavailable(Path::new("the layer store")))?;
            Ok(Some(limit.saturating_sub(saved)))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s1_defaults_bound_what_can_hurt_others() {
        let defaults = defaults();
        check_here(&defaults).unwrap();
        let machine = machine_memory_bytes().expect("a machine has memory");
        assert!(defaults.memory_bytes.is_some_and(|bytes| bytes < machine));
        assert!(defaults.processes.is_some() && defaults.open_files.is_some() && defaults.cpu_weight.is_some());
    }

    #[test]
    fn what_cannot_be_kept_is_declared_with_its_reason() {
        let none = declare(Capabilities::default(), &Layout::default(), Path::new("/"));
        for capability in [Capability::LimitCpu, Capability::LimitCpuBurst, Capability::LimitIoRead] {
            assert!(!none.can(capability) && none.missing[&capability].contains("not available"), "{capability:?}");
        }
        assert!(none.can(Capability::LimitOpenFiles), "that takes no cgroup");
    }
}
