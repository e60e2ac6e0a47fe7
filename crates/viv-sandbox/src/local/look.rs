//! Looking: what is there, and how is it?

use std::fs::{self, File};
use std::io;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use viv_core::{EndCause, OwnerMark, SandboxId};
use viv_provider::{
    Ended, InstanceRef, InstanceState, Listed, Observation, ObservedVia, Page, PageRequest, ProviderError,
};

use super::{LocalProvider, Result, shim_client, socket, unavailable, unexpected, within};
use crate::durable;
use crate::layout::{InstanceDir, InstanceRecord};
use crate::process;
use crate::shim::now_wall_ms;
use crate::shim::proto::{ShimReply, ShimRequest};

/// How long a shim may take to answer a look. It answers in microseconds, except while it creates.
const LOOK_WITHIN_MS: u64 = 10_000;

/// How long the lock of a dying shim may outlive its socket.
const DYING_WITHIN: Duration = Duration::from_secs(5);

/// Looking again for something that is about to change.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Instances on one page of a listing, unless asked for fewer.
const PAGE_MAX: usize = 256;

impl LocalProvider {
    pub(super) async fn look(&self, instance: &InstanceRef) -> Result<Observation> {
        let sandbox = instance.sandbox.clone();
        let record = self.blocking(move |this| this.read_record(&sandbox)).await?;
        match record {
            Some(record) if record.instance == *instance => self.look_at(&record).await,
            Some(_) | None => Ok(observation(instance, InstanceState::Absent, ObservedVia::Record)),
        }
    }

    /// Looks at an instance that has a folder.
    pub(super) async fn look_at(&self, record: &InstanceRecord) -> Result<Observation> {
        let dir = self.dir(record.sandbox());
        let asked = async { Ok(shim_client::ask(&dir, &ShimRequest::Status).await) };
        let error = match within(LOOK_WITHIN_MS, "the shim", asked).await? {
            Ok(ShimReply::Status(status)) if status.instance == record.instance => {
                let mut seen = observation(&record.instance, status.state, ObservedVia::Supervisor);
                seen.deadline = Some(status.deadline);
                seen.usage = Some(status.usage);
                return Ok(seen);
            }
            Ok(_) => return Err(unexpected("the shim")),
            Err(error) => error,
        };
        if !socket::is_refused(&error) {
            return Err(ProviderError::Unavailable { what: format!("the shim of {}", record.instance), source: error });
        }
        let state = self.state_without_shim(record).await?;
        Ok(observation(&record.instance, state, ObservedVia::Record))
    }

    /// What holds when nobody answers on the shim's socket.
    async fn state_without_shim(&self, record: &InstanceRecord) -> Result<InstanceState> {
        let until = tokio::time::Instant::now() + DYING_WITHIN;
        loop {
            let dir = self.dir(record.sandbox());
            let boot_id = record.boot_id.clone();
            let found = self.blocking(move |_| read_end(&dir, &boot_id).map_err(unavailable(dir.path()))).await?;
            match found {
                Found::Ended(ended) => return Ok(InstanceState::Ended(ended)),
                Found::Gone => return Ok(InstanceState::Absent),
                Found::ShimLives { listens: false } => return Ok(InstanceState::Creating),
                // It has begun to end, or is about to listen.
                Found::ShimLives { listens: true } if tokio::time::Instant::now() >= until => {
                    return Ok(InstanceState::Creating);
                }
                Found::ShimLives { listens: true } => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Makes sense of a failed call to a shim or an agent by looking.
    pub(super) async fn why_unreachable(&self, instance: &InstanceRef, error: io::Error) -> ProviderError {
        if !socket::is_refused(&error) {
            return ProviderError::Unavailable { what: format!("the supervisor of {instance}"), source: error };
        }
        match self.look(instance).await {
            Ok(Observation { state: InstanceState::Absent, .. }) => ProviderError::Absent,
            Ok(Observation { state: InstanceState::Running, .. }) => {
                ProviderError::Unavailable { what: format!("the agent of {instance}"), source: error }
            }
            Ok(Observation { state, .. }) => ProviderError::NotRunning { state },
            Err(error) => error,
        }
    }

    pub(super) fn read_record(&self, sandbox: &SandboxId) -> Result<Option<InstanceRecord>> {
        let dir = self.dir(sandbox);
        dir.read_record().map_err(unavailable(&dir.record()))
    }

    pub(super) async fn wait_for_end(&self, instance: &InstanceRef) -> Result<Ended> {
        loop {
            let asked = instance.clone();
            if let Some(ended) = self.blocking(move |this| this.ended_for_ever(&asked)).await? {
                return Ok(ended);
            }
            // The answer comes when it ends; a connection that ends without one means that the shim was killed.
            let told = shim_client::ask(&self.dir(&instance.sandbox), &ShimRequest::Wait).await;
            if let Ok(ShimReply::Ended(ended)) = told {
                return Ok(ended);
            }
            match self.look(instance).await?.state {
                InstanceState::Ended(ended) => return Ok(ended),
                // It was destroyed just now: the tombstone tells.
                InstanceState::Absent => {}
                InstanceState::Creating
                | InstanceState::Running
                | InstanceState::Frozen
                | InstanceState::Ending { .. } => {
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            }
        }
    }

    /// The end of an instance that has no folder any more; `None` while it has one.
    fn ended_for_ever(&self, instance: &InstanceRef) -> Result<Option<Ended>> {
        let locked = self.fence(&instance.sandbox)?;
        let Some(fence) = locked.fence().filter(|fence| fence.generation >= instance.generation) else {
            return Err(ProviderError::Absent);
        };
        if fence.generation > instance.generation {
            return Err(ProviderError::StaleGeneration { asked: instance.generation, current: fence.generation });
        }
        match (&fence.tombstone, self.read_record(&instance.sandbox)?) {
            (Some(ended), _) => Ok(Some(ended.clone())),
            (None, Some(_)) => Ok(None),
            // Its create failed, or never came to anything.
            (None, None) => Err(ProviderError::Absent),
        }
    }

    pub(super) async fn list_instances(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page> {
        let limit = page.limit.unwrap_or(PAGE_MAX).clamp(1, PAGE_MAX);
        let names = self.blocking(Self::instance_names).await?;
        let mut listed = Page::default();
        for name in names.into_iter().filter(|name| page.cursor.as_ref().is_none_or(|cursor| name > cursor)) {
            if listed.items.len() == limit {
                listed.next = listed.items.last().map(|item: &Listed| item.instance.sandbox.to_string());
                break;
            }
            let Ok(sandbox) = name.parse::<SandboxId>() else { continue };
            let record = self.blocking(move |this| this.read_record(&sandbox)).await;
            let record = match record {
                Ok(Some(record)) if record.owner == *owner => record,
                // Another's, or destroyed while we were listing.
                Ok(_) => continue,
                Err(error) => {
                    listed.unreadable.push(format!("{name}: {error}"));
                    continue;
                }
            };
            match self.look_at(&record).await {
                Ok(Observation { state: InstanceState::Absent, .. }) => {}
                Ok(Observation { state, instance, .. }) => {
                    listed.items.push(Listed { instance, owner: record.owner, state, labels: record.spec.labels });
                }
                Err(error) => listed.unreadable.push(format!("{name}: {error}")),
            }
        }
        Ok(listed)
    }

    fn instance_names(&self) -> Result<Vec<String>> {
        let folder = self.shared.data.instances();
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(&folder)? {
                names.extend(entry?.file_name().into_string().ok());
            }
            names.sort_unstable();
            Ok(names)
        };
        read().map_err(unavailable(&folder))
    }
}

/// An extension that came too late is told so, whether or not the shim was still there to say it.
pub(super) fn expired_if_so(error: ProviderError) -> ProviderError {
    match error {
        ProviderError::NotRunning { state: InstanceState::Ended(Ended { cause: EndCause::Expired, .. }) } => {
            ProviderError::Expired
        }
        other => other,
    }
}

fn observation(instance: &InstanceRef, state: InstanceState, via: ObservedVia) -> Observation {
    Observation { instance: instance.clone(), state, deadline: None, usage: None, observed_at_ms: now_wall_ms(), via }
}

enum Found {
    Ended(Ended),
    ShimLives { listens: bool },
    Gone,
}

/// Reads the end from the folder, once nobody holds the lock any more.
fn read_end(dir: &InstanceDir, boot_id: &str) -> io::Result<Found> {
    let rebooted = process::boot_id()? != boot_id;
    let lock = match File::open(dir.lock()) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Gone),
        Err(error) => return Err(error),
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Ok(Found::ShimLives { listens: dir.socket().exists() });
        }
        Err(error) => return Err(error.into()),
    }
    if let Some(ended) = durable::read_json::<Ended>(&dir.exit())? {
        return Ok(Found::Ended(ended));
    }
    if !dir.path().exists() {
        return Ok(Found::Gone);
    }
    let cause = if rebooted { EndCause::Rebooted } else { EndCause::SupervisorLost };
    Ok(Found::Ended(Ended { cause, at_ms: now_wall_ms() }))
}
