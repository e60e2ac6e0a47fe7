//! Ending an instance, and removing every trace of it.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, pidfd_send_signal};
use viv_core::{EndCause, SandboxId};
use viv_provider::{Ended, InstanceRef, Mutation, ProviderError};

use super::chores::Chore;
use super::look::LOOK_EVERY;
use super::memory::part_with_memory;
use super::{LocalProvider, Result, shim_client, unavailable, within};
use crate::cgroup::InstanceCgroups;
use crate::durable;
use crate::fence::{Admit, LockedFence};
use crate::layout::{DataDir, InstanceDir, PinnedDir};
use crate::process;
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::shim::{ShimIdentity, first, now_wall_ms};
use crate::store::layer::LayerMeta;
use crate::trash::take_apart;

/// A shim that has not ended its instance by then is not asked any more. It takes milliseconds; one that cannot kill
/// something says so every few seconds.
const SHIM_WITHIN: Duration = Duration::from_secs(6);

/// How long a shim may hold on after that, before it is killed, and may take to die.
const LOCK_WITHIN: Duration = Duration::from_secs(8);
const PATIENCE: Duration = Duration::from_secs(2);

/// How long killed processes may take to be gone, with the fence held.
const KILL_WITHIN: Duration = Duration::from_secs(3);

impl LocalProvider {
    pub(super) async fn destroy_instance(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        within(mutation.budget_ms, "ending the instance", async {
            let there = {
                let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
                self.blocking(move |this| this.admit_destroy(&mutation, &sandbox)).await?
            };
            if !there {
                return Ok(());
            }
            self.ask_to_end(sandbox, &ShimRequest::Destroy { mutation: mutation.clone() }).await?;
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            self.blocking(move |this| this.finish_destroy(&mutation, &sandbox)).await
        })
        .await
    }

    /// Raises the fence, and answers whether there is something to end.
    fn admit_destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<bool> {
        let mut fence = self.fence(sandbox)?;
        fence.admit_end(mutation, Admit::Destroy)?;
        match self.current(sandbox, &fence)? {
            None => fence.bury(mutation, destroyed()).map(|()| false),
            Some(found) if found.generation != mutation.generation => {
                Err(ProviderError::StaleGeneration { asked: mutation.generation, current: found.generation })
            }
            Some(_) => Ok(true),
        }
    }

    /// Which instance the folder is, if there is one. A record that a power cut left unreadable is of the generation
    /// that the fence has: no other can have been begun.
    fn current(&self, sandbox: &SandboxId, fence: &LockedFence) -> Result<Option<InstanceRef>> {
        match self.read_record(sandbox) {
            Ok(record) => Ok(record.map(|record| record.instance)),
            Err(error) => match fence.fence() {
                Some(fence) if self.dir(sandbox).path().exists() => {
                    Ok(Some(InstanceRef { sandbox: sandbox.clone(), generation: fence.generation }))
                }
                Some(_) | None => Err(error),
            },
        }
    }

    /// The shim's way first: it knows its children. Refusals count; silence does not.
    pub(super) async fn ask_to_end(&self, sandbox: &SandboxId, request: &ShimRequest) -> Result<()> {
        match tokio::time::timeout(SHIM_WITHIN, shim_client::ask(&self.dir(sandbox), request)).await {
            Ok(Ok(ShimReply::Error(error))) => match ProviderError::from(error) {
                // It is ending already, for another reason.
                ProviderError::Expired | ProviderError::NotRunning { .. } => Ok(()),
                refused => Err(refused),
            },
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn finish_destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        self.remove_instance(&instance, |fence, dir| {
            // Its own end, if it had one before this.
            let ended: Option<Ended> = durable::read_json(&dir.exit()).ok().flatten();
            let ended = ended.unwrap_or_else(destroyed);
            let mut bury = || {
                fence.admit_destroy(mutation)?;
                fence.bury(mutation, ended.clone())
            };
            match bury() {
                // What it kept for writing down its own end is of no use any more, and may be all the room there is.
                Err(ProviderError::Unavailable { source, .. })
                    if durable::is_full(&source) && fs::remove_file(dir.reserve()).is_ok() =>
                {
                    bury()
                }
                buried => buried,
            }
        })
    }

    /// Ends by force what is left of one instance and removes its folder. Another one of the same sandbox, made by
    /// somebody who was faster, is not touched: what is waited for and killed is what was opened under the fence, and
    /// cgroups and folder, whose names all generations share, are touched only under the fence with a second look.
    ///
    /// `last` is the last word at the fence before the folder goes.
    pub(super) fn remove_instance(
        &self,
        instance: &InstanceRef,
        last: impl FnOnce(&mut LockedFence, &InstanceDir) -> Result<()>,
    ) -> Result<()> {
        let Some((pinned, mut fence, _lock)) = self.end_by_force(instance)? else { return Ok(()) };
        let sandbox = &instance.sandbox;
        last(&mut fence, pinned.dir())?;
        let hidden = self.shared.store.hide_active(instance).map_err(not_ended)?;
        let record = pinned.dir().read_record().ok().flatten();
        if let Some(plan) = record.as_ref().and_then(|record| record.memory.as_ref()) {
            part_with_memory(pinned.dir(), plan);
        }
        let ids = record.map(|record| record.ids);
        let trash = discard(&self.shared.data, &self.dir(sandbox))?;
        if let Some(range) = ids {
            self.shared.ids.give_back(sandbox, range);
        }
        // Only now, since who removes a snapshot of it looks whether it is there. When in doubt, somebody looks.
        let is_all_held = self.are_layers_held(pinned.dir()).unwrap_or(false);
        // Taking a large sandbox apart takes its time, in which nobody waits for the fence.
        drop(fence);
        if let Some(hidden) = hidden {
            self.shared.store.take_apart(&hidden).map_err(unavailable(&hidden))?;
        }
        if !is_all_held {
            self.later(Chore::Collect);
        }
        trash.map_or(Ok(()), |trash| take_apart(&trash, viv_layer::remove).map_err(unavailable(&trash)))
    }

    /// Whether nothing is left to be collected once the instance is gone.
    fn are_layers_held(&self, dir: &InstanceDir) -> io::Result<bool> {
        let sealed: Option<LayerMeta> = durable::read_json(&dir.sealed())?;
        match dir.read_record()?.and_then(|record| record.made) {
            Some(made) => self.shared.store.are_held(&made, sealed.as_ref()),
            None => Ok(sealed.is_none()),
        }
    }

    /// Ends what is left of one instance, and shows that nothing of it runs. What comes with it keeps it so; `None` when
    /// there is no such instance any more.
    fn end_by_force(&self, instance: &InstanceRef) -> Result<Option<(PinnedDir, LockedFence, Option<File>)>> {
        let sandbox = &instance.sandbox;
        let pinned = {
            let fence = self.fence(sandbox)?;
            if self.current(sandbox, &fence)?.as_ref() != Some(instance) {
                return Ok(None);
            }
            PinnedDir::open(&self.dir(sandbox)).map_err(not_ended)?
        };
        let Some(pinned) = pinned else { return Ok(None) };
        let lock = take_lock(pinned.dir()).map_err(not_ended)?;
        let fence = self.fence(sandbox)?;
        if self.current(sandbox, &fence)?.as_ref() != Some(instance) {
            return Ok(None);
        }
        let cgroups = self.cgroups_of(sandbox);
        if cgroups.exist() {
            cgroups.kill(KILL_WITHIN).map_err(not_ended)?;
            cgroups.remove().map_err(not_ended)?;
        }
        first::end(pinned.dir(), KILL_WITHIN).map_err(not_ended)?;
        Ok(Some((pinned, fence, lock)))
    }

    /// Shows that nothing of an instance runs any more, whoever held it, and keeps how it ended.
    pub(super) fn prove_ended(&self, instance: &InstanceRef) -> Result<PinnedDir> {
        let (pinned, _fence, _lock) = self.end_by_force(instance)?.ok_or(ProviderError::Absent)?;
        if !pinned.dir().exit().exists() {
            // Its shim was killed, or the machine stopped; a look says the same as long as nobody has written it down.
            let record = pinned.dir().read_record().map_err(not_ended)?.ok_or(ProviderError::Absent)?;
            let rebooted = process::boot_id().map_err(not_ended)? != record.boot_id;
            let cause = if rebooted { EndCause::Rebooted } else { EndCause::SupervisorLost };
            let ended = Ended { cause, at_ms: pinned.changed_at_ms() };
            let dir = pinned.dir();
            durable::replace_json_from_reserve(&dir.exit(), &ended, &dir.reserve()).map_err(not_ended)?;
        }
        Ok(pinned)
    }

    /// The cgroups of whatever instance a sandbox has.
    pub(super) fn cgroups_of(&self, sandbox: &SandboxId) -> InstanceCgroups {
        if let Ok(Some(record)) = self.read_record(sandbox) {
            return self.cgroups(&record);
        }
        let path = format!("{}/{sandbox}", self.shared.config.cgroup_prefix);
        InstanceCgroups::new(self.shared.layout.clone(), path)
    }

    /// What a power cut left: folders that nobody holds and that say nothing readable about themselves.
    pub(super) fn remove_unreadable(&self) {
        let Ok(entries) = fs::read_dir(self.shared.data.instances()) else { return };
        for entry in entries.flatten() {
            let Some(sandbox) = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok()) else {
                continue;
            };
            // Anything else that cannot be read may be somebody's sandbox, written by a later version or on a bad disk.
            if !is_torn(&self.dir(&sandbox)) {
                continue;
            }
            let Ok(fence) = self.fence(&sandbox) else { continue };
            // Under the fence once more: it may have been on its way out, and the next one be there by now.
            if !is_torn(&self.dir(&sandbox)) {
                continue;
            }
            let held = File::open(self.dir(&sandbox).lock())
                .is_ok_and(|lock| flock(lock, FlockOperation::NonBlockingLockExclusive).is_err());
            if !held
                && !self.cgroups_of(&sandbox).exist()
                && let Ok(Some(trash)) = discard(&self.shared.data, &self.dir(&sandbox))
            {
                drop(fence);
                let _ = take_apart(&trash, viv_layer::remove);
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "goes into map_err")]
fn not_ended(error: io::Error) -> ProviderError {
    // There may be room later: nothing is given up for that (T7).
    if durable::is_full(&error) {
        return ProviderError::Exhausted { limit: "disk", what: format!("its end could not be written down: {error}") };
    }
    ProviderError::Failed { what: format!("it could not be ended: {error}") }
}

/// Whether a record is as a power cut leaves one that had not been written out: missing, empty, or zeros.
pub(super) fn is_torn(dir: &InstanceDir) -> bool {
    match fs::read(dir.record()) {
        Ok(content) => content.iter().all(|&byte| byte == 0),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

fn destroyed() -> Ended {
    Ended { cause: EndCause::Destroyed, at_ms: now_wall_ms() }
}

/// Holds the lock that a living shim holds, killing the shim if it does not
/// let go. Its death takes the agent along, and with it everything inside.
fn take_lock(dir: &InstanceDir) -> io::Result<Option<File>> {
    let lock = match File::open(dir.lock()) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let started = Instant::now();
    let mut killed = false;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
        if started.elapsed() >= LOCK_WITHIN {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its shim does not end"));
        }
        // A shim that has just answered is about to let go.
        if !killed && started.elapsed() >= PATIENCE {
            killed = kill_shim(dir)?;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Kills shim and guard; false when it is not known yet who they are.
fn kill_shim(dir: &InstanceDir) -> io::Result<bool> {
    let Some(identity) = durable::read_json::<ShimIdentity>(&dir.identity())? else { return Ok(false) };
    for process in [identity.guard, identity.shim] {
        if let Some(pidfd) = process.open()? {
            match pidfd_send_signal(&pidfd, Signal::KILL) {
                // It ended while it was looked for.
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(true)
}

/// Takes the folder out of sight in one step; it is left to be taken apart.
pub(super) fn discard(data: &DataDir, dir: &InstanceDir) -> Result<Option<PathBuf>> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = dir.path().file_name().expect("an instance's folder has a name").to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let trash = data.trash().join(format!("{name}.{}.{count}", std::process::id()));
    match fs::rename(dir.path(), &trash) {
        Ok(()) => Ok(Some(trash)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unavailable(dir.path())(error)),
    }
}
