//! Looking: what is there, and how is it?

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use viv_core::{EndCause, OwnerMark, SandboxId};
use viv_provider::{
    Ended, InstanceRef, InstanceState, Listed, Observation, ObservedVia, Page, PageRequest, ProviderError,
};

use super::{LocalProvider, Result, shim_client, socket, unavailable, unexpected, within};
use crate::cgroup::InstanceCgroups;
use crate::durable;
use crate::layout::{InstanceRecord, PinnedDir};
use crate::process;
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::shim::{first, now_wall_ms, stored_deadline};

/// How long a shim may take to answer a look. It answers in microseconds, except while it creates. Less than the ten seconds
/// that a caller waits, so that what is known without it is told.
const LOOK_WITHIN_MS: u64 = 8_000;

/// The same in a listing, where many are looked at.
const LIST_WITHIN_MS: u64 = 2_000;

/// Looks of a listing at a time.
const LOOKS_AT_ONCE: usize = 32;

/// How long the lock of a dying shim may outlive its socket before that is worth a word.
const DYING_WITHIN: Duration = Duration::from_millis(500);

/// Looking again for something that is about to change.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The longest pause between two such looks, when it takes longer than a moment; within what T3 allows for an end.
pub(super) const LOOK_EVERY_MAX: Duration = Duration::from_millis(250);

/// Instances on one page of a listing, unless asked for fewer.
const PAGE_MAX: usize = 256;

/// An instance that has a folder, held so that no later one is taken for it.
pub(super) struct Seen {
    record: InstanceRecord,
    pinned: PinnedDir,
}

impl LocalProvider {
    pub(super) async fn look(&self, instance: &InstanceRef) -> Result<Observation> {
        self.look_within(instance, LOOK_WITHIN_MS).await
    }

    async fn look_within(&self, instance: &InstanceRef, within_ms: u64) -> Result<Observation> {
        let until = tokio::time::Instant::now() + DYING_WITHIN;
        loop {
            let sandbox = instance.sandbox.clone();
            let seen = self.blocking(move |this| this.see(&sandbox)).await?;
            let Some(seen) = seen.filter(|seen| seen.record.instance == *instance) else {
                return Ok(observation(instance, InstanceState::Absent, ObservedVia::Record));
            };
            match self.look_at(seen, within_ms).await? {
                Look::Seen(observation) => return Ok(*observation),
                // It is about to listen, to let go, or its guard is cleaning up after it: ask again for a moment.
                Look::Unclear if tokio::time::Instant::now() >= until => {
                    let state = InstanceState::Ending { cause: EndCause::SupervisorLost };
                    return Ok(observation(instance, state, ObservedVia::Record));
                }
                Look::Unclear => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    fn see(&self, sandbox: &SandboxId) -> Result<Option<Seen>> {
        let dir = self.dir(sandbox);
        let read = || -> io::Result<Option<Seen>> {
            let Some(pinned) = PinnedDir::open(&dir)? else { return Ok(None) };
            Ok(pinned.dir().read_record()?.map(|record| Seen { record, pinned }))
        };
        read().map_err(unavailable(&dir.record()))
    }

    /// Looks once at an instance that has a folder.
    async fn look_at(&self, seen: Seen, within_ms: u64) -> Result<Look> {
        let instance = seen.record.instance.clone();
        let (in_record, lacks) = (seen.record.spec.limits.clone(), seen.record.lacks.clone());
        let dir = self.dir(&instance.sandbox);
        let asked = async { Ok(shim_client::ask(&dir, &ShimRequest::Status).await) };
        let answered = match within(within_ms, "the shim", asked).await {
            Ok(answered) => answered,
            // Who has to end it does not answer. That its time is up stands on disk.
            Err(silent) => {
                let path = seen.pinned.dir().deadline();
                let known = self.blocking(move |_| stored_deadline(&path).map_err(unavailable(&path))).await?;
                let Some(deadline) = known.filter(|deadline| deadline.remaining_ms == 0) else { return Err(silent) };
                let state = InstanceState::Ending { cause: EndCause::Expired };
                let mut seen = observation(&instance, state, ObservedVia::Record);
                (seen.deadline, seen.limits, seen.lacks) = (Some(deadline), Some(in_record), lacks);
                return Ok(Look::Seen(Box::new(seen)));
            }
        };
        let error = match answered {
            Ok(ShimReply::Status(status)) if status.instance == instance => {
                let mut seen = observation(&instance, status.state, ObservedVia::Supervisor);
                seen.deadline = Some(status.deadline);
                seen.usage = Some(status.usage);
                seen.limits = Some(status.limits.unwrap_or(in_record));
                seen.lacks = lacks;
                return Ok(Look::Seen(Box::new(seen)));
            }
            // The next generation answered in its place.
            Ok(ShimReply::Status(_)) => return Ok(Look::Unclear),
            Ok(ShimReply::Error(error)) => return Err(error.into()),
            Ok(_) => return Err(unexpected("the shim")),
            Err(error) => error,
        };
        if !socket::is_refused(&error) {
            return Err(ProviderError::Unavailable { what: format!("the shim of {instance}"), source: error });
        }
        let found = self
            .blocking(move |this| {
                let cgroups = this.cgroups_of(seen.record.sandbox());
                read_end(&seen, &cgroups).map_err(unavailable(seen.pinned.dir().path()))
            })
            .await?;
        Ok(match found {
            Some(state) => {
                let mut seen = observation(&instance, state, ObservedVia::Record);
                if seen.state != InstanceState::Absent {
                    (seen.limits, seen.lacks) = (Some(in_record), lacks);
                }
                Look::Seen(Box::new(seen))
            }
            None => Look::Unclear,
        })
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

    /// A connection for as long as it waits, and nothing else: no thread, and no look before something happens.
    pub(super) async fn wait_for_end(&self, instance: &InstanceRef) -> Result<Ended> {
        let mut pause = LOOK_EVERY;
        loop {
            let asked = instance.clone();
            if let Some(ended) = self.blocking(move |this| this.ended_for_ever(&asked)).await? {
                return Ok(ended);
            }
            // The answer comes when it ends; a connection that ends without one means that the shim was killed.
            match shim_client::ask(&self.dir(&instance.sandbox), &ShimRequest::Wait).await {
                Ok(ShimReply::Ended(ended)) => return Ok(ended),
                // Too many wait. Asking again and again would be worse than to say so.
                Ok(ShimReply::Error(error)) => return Err(error.into()),
                Ok(_) | Err(_) => {}
            }
            match self.look(instance).await?.state {
                InstanceState::Ended(ended) => return Ok(ended),
                // It was destroyed just now: the tombstone tells.
                InstanceState::Absent => {}
                // It does not listen yet, or a guard ends what is left of it.
                InstanceState::Creating
                | InstanceState::Running
                | InstanceState::Frozen
                | InstanceState::Ending { .. } => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LOOK_EVERY_MAX);
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
        let mut names =
            names.into_iter().filter(|name| page.cursor.as_ref().is_none_or(|cursor| name > cursor)).peekable();
        // In groups, so that one that does not answer delays the others once and not each (J7).
        while listed.items.len() < limit && names.peek().is_some() {
            let group = names.by_ref().take(LOOKS_AT_ONCE.min(limit - listed.items.len()));
            let mut looks = Vec::new();
            for name in group {
                let (this, owner) = (self.clone(), owner.clone());
                let shown = name.clone();
                looks.push((shown, tokio::spawn(async move { this.list_one(&name, &owner).await })));
            }
            for (name, look) in looks {
                match look.await {
                    Ok(Ok(Some(item))) => listed.items.push(item),
                    // Another's, or destroyed while we were listing.
                    Ok(Ok(None)) => {}
                    Ok(Err(error)) => listed.unreadable.push(format!("{name}: {error}")),
                    Err(panicked) => listed.unreadable.push(format!("{name}: {panicked}")),
                }
                listed.next = Some(name);
            }
        }
        if names.peek().is_none() {
            listed.next = None;
        }
        Ok(listed)
    }

    async fn list_one(&self, name: &str, owner: &OwnerMark) -> Result<Option<Listed>> {
        let Ok(sandbox) = name.parse::<SandboxId>() else { return Ok(None) };
        let record = self.blocking(move |this| this.read_record(&sandbox)).await?;
        let Some(record) = record.filter(|record| record.owner == *owner) else { return Ok(None) };
        let Observation { state, instance, .. } = self.look_within(&record.instance, LIST_WITHIN_MS).await?;
        if state == InstanceState::Absent {
            return Ok(None);
        }
        Ok(Some(Listed { instance, owner: record.owner, state, labels: record.spec.labels }))
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
    Observation {
        instance: instance.clone(),
        state,
        deadline: None,
        usage: None,
        limits: None,
        lacks: BTreeMap::new(),
        observed_at_ms: now_wall_ms(),
        via,
    }
}

/// What one look showed.
enum Look {
    Seen(Box<Observation>),
    Unclear,
}

/// Reads from the folder how an instance is whose shim does not answer. `None` when its lock is held although it has a
/// socket.
fn read_end(seen: &Seen, cgroups: &InstanceCgroups) -> io::Result<Option<InstanceState>> {
    let dir = seen.pinned.dir();
    // Recorded after it was proven, by the shim or its guard.
    if let Some(ended) = durable::read_json::<Ended>(&dir.exit())? {
        return Ok(Some(InstanceState::Ended(ended)));
    }
    let lock = match File::open(dir.lock()) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Some(InstanceState::Absent)),
        Err(error) => return Err(error),
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) if dir.socket().exists() => return Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Some(InstanceState::Creating)),
        Err(error) => return Err(error.into()),
    }
    // Between the first look and the lock its last holder may have recorded the end, or a destroy may have finished.
    if let Some(ended) = durable::read_json::<Ended>(&dir.exit())? {
        return Ok(Some(InstanceState::Ended(ended)));
    }
    if !dir.record().exists() {
        return Ok(Some(InstanceState::Absent));
    }
    let rebooted = process::boot_id()? != seen.record.boot_id;
    let cause = if rebooted { EndCause::Rebooted } else { EndCause::SupervisorLost };
    // Nobody holds it any more, and yet something of it may run: then it has not ended.
    if !cgroups.is_empty()? || first::lives(dir)? {
        return Ok(Some(InstanceState::Ending { cause }));
    }
    // Nobody was there to note the time; this is when it was last heard of.
    Ok(Some(InstanceState::Ended(Ended { cause, at_ms: seen.pinned.changed_at_ms() })))
}
