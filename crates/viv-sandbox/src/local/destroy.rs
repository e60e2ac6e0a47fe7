//! Ending an instance, and removing every trace of it.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, pidfd_send_signal};
use viv_core::{EndCause, SandboxId};
use viv_provider::{Ended, Mutation, ProviderError};

use super::look::LOOK_EVERY;
use super::{LocalProvider, Result, shim_client, unavailable, within};
use crate::cgroup::InstanceCgroups;
use crate::durable;
use crate::layout::{DataDir, InstanceDir, InstanceRecord};
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::shim::{ShimIdentity, now_wall_ms};

/// A shim that has not ended its instance by then is not asked any more. It takes milliseconds, and up to five
/// seconds with a process in uninterruptible I/O.
const SHIM_WITHIN: Duration = Duration::from_secs(6);

/// How long killed processes may take to be gone.
const FORCE_WITHIN: Duration = Duration::from_secs(10);

impl LocalProvider {
    pub(super) async fn destroy_instance(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        within(mutation.budget_ms, "ending the instance", async {
            let record = {
                let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
                self.blocking(move |this| this.admit_destroy(&mutation, &sandbox)).await?
            };
            let Some(record) = record else { return Ok(()) };
            self.ask_to_end(&record, mutation).await?;
            let mutation = mutation.clone();
            self.blocking(move |this| this.finish_destroy(&mutation, &record)).await
        })
        .await
    }

    /// Raises the fence, and answers what there is to end.
    fn admit_destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<Option<InstanceRecord>> {
        let mut fence = self.fence(sandbox)?;
        fence.admit_destroy(mutation)?;
        let record = self.read_record(sandbox)?;
        match &record {
            None => fence.bury(mutation, destroyed())?,
            Some(found) if found.generation() != mutation.generation => {
                let current = found.generation();
                return Err(ProviderError::StaleGeneration { asked: mutation.generation, current });
            }
            Some(_) => {}
        }
        Ok(record)
    }

    /// The shim's way first: it knows its children. Refusals count; silence does not.
    async fn ask_to_end(&self, record: &InstanceRecord, mutation: &Mutation) -> Result<()> {
        let request = ShimRequest::Destroy { mutation: mutation.clone() };
        let dir = self.dir(record.sandbox());
        match tokio::time::timeout(SHIM_WITHIN, shim_client::ask(&dir, &request)).await {
            Ok(Ok(ShimReply::Error(error))) => match ProviderError::from(error) {
                // It is ending already.
                ProviderError::Expired => Ok(()),
                refused => Err(refused),
            },
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn finish_destroy(&self, mutation: &Mutation, record: &InstanceRecord) -> Result<()> {
        let dir = self.dir(record.sandbox());
        // Under the fence: nobody makes the next generation while this one is on its way out.
        end_by_force(&dir, &self.cgroups(record), FORCE_WITHIN)?;
        let mut fence = self.fence(record.sandbox())?;
        match dir.read_record().map_err(unavailable(&dir.record()))? {
            Some(found) if found.instance == record.instance => {}
            // Another destroy was faster, and perhaps another create.
            Some(_) | None => return Ok(()),
        }
        // Its own end, if it had one before this.
        let ended = durable::read_json(&dir.exit()).map_err(unavailable(&dir.exit()))?;
        fence.bury(mutation, ended.unwrap_or_else(destroyed))?;
        let trash = discard(&self.shared.data, &dir)?;
        // Taking a large sandbox apart takes its time, in which nobody waits for the fence.
        drop(fence);
        trash.map_or(Ok(()), |trash| take_apart(&trash).map_err(unavailable(&trash)))
    }
}

fn destroyed() -> Ended {
    Ended { cause: EndCause::Destroyed, at_ms: now_wall_ms() }
}

/// Makes sure that nothing of the instance lives, with its shim or without.
/// When the shim is gone already, this only looks.
pub(super) fn end_by_force(dir: &InstanceDir, cgroups: &InstanceCgroups, within: Duration) -> Result<()> {
    let failed = |error: io::Error| ProviderError::Failed { what: format!("the instance could not be ended: {error}") };
    let until = Instant::now() + within;
    let Some(_lock) = take_lock(dir, until).map_err(failed)? else { return Ok(()) };
    if cgroups.exist() {
        cgroups.kill(until.saturating_duration_since(Instant::now())).map_err(failed)?;
        cgroups.remove().map_err(failed)?;
    }
    Ok(())
}

/// Holds the lock that a living shim holds, killing the shim if it does not
/// let go. Its death takes the agent along, and with it everything inside.
/// `None` when the folder is gone.
fn take_lock(dir: &InstanceDir, until: Instant) -> io::Result<Option<File>> {
    let lock = match File::open(dir.lock()) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // A shim that was just answered by is about to let go.
    let patience = Instant::now() + (until.saturating_duration_since(Instant::now()) / 4);
    let mut killed = false;
    loop {
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(lock)),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() >= until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its shim does not end"));
        }
        if !killed && Instant::now() >= patience {
            kill_shim(dir)?;
            killed = true;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn kill_shim(dir: &InstanceDir) -> io::Result<()> {
    let Some(identity) = durable::read_json::<ShimIdentity>(&dir.identity())? else { return Ok(()) };
    for process in [identity.guard, identity.shim] {
        if let Some(pidfd) = process.open()? {
            match pidfd_send_signal(&pidfd, Signal::KILL) {
                // It ended while it was looked for.
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Takes the folder out of sight in one step; it is left to be taken apart.
fn discard(data: &DataDir, dir: &InstanceDir) -> Result<Option<PathBuf>> {
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

/// Removes a folder that never became an instance.
pub(super) fn remove_folder(data: &DataDir, dir: &InstanceDir) -> Result<()> {
    let trash = discard(data, dir)?;
    trash.map_or(Ok(()), |trash| take_apart(&trash).map_err(unavailable(&trash)))
}

/// Another process that opens the data folder empties the trash too; whoever is faster, it is gone.
fn take_apart(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => Ok(()),
        result => result,
    }
}

/// What a process left that died while it took folders apart.
pub(super) fn empty_trash(data: &DataDir) {
    let Ok(entries) = fs::read_dir(data.trash()) else { return };
    for entry in entries.flatten() {
        let _ = take_apart(&entry.path());
    }
}
