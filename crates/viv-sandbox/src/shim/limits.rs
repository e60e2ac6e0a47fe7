//! Changing limits of what runs: all that are new, or none.
//!
//! The order is the cgroups, which may refuse; the disk; what the agent reads
//! before it starts a command; and last the record, which makes it durable.
//! Whatever fails puts back what was before it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, unlinkat};
use viv_agent::proto::{AgentLimits, LIMITS};
use viv_core::OperationId;
use viv_provider::{Capability, ProviderError, ResourceLimits};

use super::chain;
use super::proto::{ShimError, ShimReply};
use super::serve::{EXTENSIONS_KEPT, FREEZE_WITHIN, Handled, Shim};
use crate::cgroup::LimitError;
use crate::durable;
use crate::local::limits::check_here;
use crate::rootfs::Writable;
use crate::sys::btrfs;

impl Shim {
    pub(super) fn set_limits(
        &mut self,
        operation: OperationId,
        change: &ResourceLimits,
        layer_bytes: Option<u64>,
    ) -> Result<Handled, ShimError> {
        let again = self.limit_changes.iter().find(|(known, _)| *known == operation);
        if let Some((_, limits)) = again {
            return Ok(Handled::Answer(ShimReply::Limits(limits.clone())));
        }
        let before = self.record.spec.limits.clone();
        let limits = change.or(&before).in_force();
        check_here(&limits).map_err(refused)?;
        self.require_limits(change)?;
        if limits != before {
            self.change_limits(&before, &limits, layer_bytes)?;
        }
        if self.limit_changes.len() == EXTENSIONS_KEPT {
            self.limit_changes.remove(0);
        }
        self.limit_changes.push((operation, limits.clone()));
        Ok(Handled::Answer(ShimReply::Limits(limits)))
    }

    /// Refuses what this very sandbox cannot be held to, whatever whoever asks could do with others.
    fn require_limits(&self, change: &ResourceLimits) -> Result<(), ShimError> {
        let why_not = |needed: Capability| {
            let kernel = self.record.kernel.lacks().iter().find(|(lacking, _)| *lacking == needed);
            kernel.map(|(_, why)| (*why).to_owned()).or_else(|| self.record.lacks.get(&needed).cloned())
        };
        match change.first_missing(|needed| why_not(needed).is_none()) {
            Some(capability) => {
                Err(ShimError::Unsupported { capability, why: why_not(capability).unwrap_or_default() })
            }
            None => Ok(()),
        }
    }

    /// Changes the cgroups. Who could fill memory faster than the kernel takes it away stands still meanwhile: we have
    /// one thread, and a deadline to keep.
    fn change_cgroups(&self, before: &ResourceLimits, limits: &ResourceLimits) -> Result<(), LimitError> {
        let lowers = limits.memory_bytes.is_some_and(|new| before.memory_bytes.is_none_or(|old| new < old));
        let holds = lowers && !self.frozen && self.cgroups.set_frozen(true, FREEZE_WITHIN).is_ok();
        let changed = self.cgroups.change_limits(before, limits, self.dir.path());
        if holds && let Err(error) = self.cgroups.set_frozen(false, FREEZE_WITHIN) {
            note!("it was to run again after its memory was limited: {error}");
        }
        changed
    }

    fn change_limits(
        &mut self,
        before: &ResourceLimits,
        limits: &ResourceLimits,
        layer_bytes: Option<u64>,
    ) -> Result<(), ShimError> {
        let disk = self.disk_to_change(before, limits)?;
        self.change_cgroups(before, limits).map_err(|error| not_set(&error))?;
        let layer_before = self.record.made.as_ref().and_then(|made| made.limit_bytes);
        let changed = disk.as_ref().map_or(Ok(()), |disk| btrfs::limit_referenced(disk, layer_bytes));
        let changed = changed.and_then(|()| {
            let mut record = self.record.clone();
            record.spec.limits = limits.clone();
            if let (Some(_), Some(made)) = (&disk, &mut record.made) {
                made.limit_bytes = layer_bytes;
            }
            self.tell_commands(limits)?;
            durable::replace_json(&self.dir.record(), &record)?;
            self.record = record;
            Ok(())
        });
        changed.map_err(|error| {
            let _ = self.cgroups.change_limits(limits, before, self.dir.path());
            if let Some(disk) = &disk {
                let _ = btrfs::limit_referenced(disk, layer_before);
            }
            let _ = self.tell_commands(before);
            ShimError::Failed { what: format!("the limits cannot be changed: {error}") }
        })
    }

    /// The writable layer, if its limit changes.
    fn disk_to_change(&self, before: &ResourceLimits, limits: &ResourceLimits) -> Result<Option<File>, ShimError> {
        if before.disk_bytes == limits.disk_bytes {
            return Ok(None);
        }
        match self.record.made.as_ref().map(|made| &made.plan.writable) {
            Some(Writable::Folder(folder)) => File::open(folder)
                .map(Some)
                .map_err(|error| ShimError::Failed { what: format!("its layer cannot be opened: {error}") }),
            Some(Writable::Disk(_)) | None => {
                let why = "its disk keeps the size that it was made with; restore or fork it with another".to_owned();
                Err(ShimError::Unsupported { capability: Capability::LimitDiskLive, why })
            }
        }
    }

    /// Commands that start from now on get the new limits of open files and processes. A file and no message, so that it holds as
    /// soon as this has been answered.
    fn tell_commands(&self, limits: &ResourceLimits) -> io::Result<()> {
        let folder = OwnedFd::from(File::open(self.dir.run())?);
        // The agent could have put anything at a name in its folder: nothing that is there is opened.
        let new = ".limits.new";
        let _ = unlinkat(&folder, new, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let told = AgentLimits { open_files: limits.open_files, processes: limits.processes };
        let mut file = File::from(openat(&folder, new, flags, Mode::RUSR)?);
        file.write_all(&serde_json::to_vec(&told)?)?;
        let keeper = self.record.ids.keeper_on_host();
        std::os::unix::fs::fchown(&file, Some(keeper), Some(keeper))?;
        renameat(&folder, new, &folder, LIMITS)?;
        Ok(())
    }
}

fn refused(error: ProviderError) -> ShimError {
    match error {
        ProviderError::Invalid { what, hint } => ShimError::Invalid { what, hint },
        other => ShimError::Failed { what: other.to_string() },
    }
}

fn not_set(error: &LimitError) -> ShimError {
    match error {
        LimitError::MemoryInUse { .. } => ShimError::Conflict { what: error.to_string() },
        LimitError::Missing(_) | LimitError::Refused { .. } => ShimError::Failed { what: chain(error) },
    }
}
