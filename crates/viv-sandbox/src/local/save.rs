//! Saving, and what is saved.
//!
//! ```text
//!   stopped   end, prove it ─► flush ─► survey, mount, survey ─► (fence) intent, seal by rename ─► record
//!   live      flush ─► stand still, copy, run on ─► flush ─► survey, mount ─► (fence) put in place ─► record
//! ```
//!
//! The record is what is acknowledged. It is written under the sandbox's fence
//! after a second look at it, so a delete in the middle of a save leaves no
//! record, and nothing that refers to the layer (L11).

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viv_core::{SandboxId, SnapshotId};
use viv_provider::{
    Capability, DiskUsage, InstanceRef, InstanceState, Integrity, Mutation, Page, PageRequest, ProviderError, SaveCost,
    SaveRequest, Snapshot, SnapshotSeen,
};

use super::chores::Chore;
use super::memory::{keep_run, remove_if_there};
use super::shim_client::Held;
use super::{LocalProvider, Result, unavailable, within};
use crate::checkpoint::MemoryDir;
use crate::durable;
use crate::layout::{InstanceRecord, Made};
use crate::lock::lock_file;
use crate::shim::now_wall_ms;
use crate::shim::proto::{ShimError, ShimRequest};
use crate::store::collect::References;
use crate::store::layer::{LayerId, LayerMeta};
use crate::store::seal::{Finished, Source};
use crate::store::snapshot::{SnapshotFile, SnapshotRecord};
use crate::wait::elapsed_us;

/// Snapshots on one page of a listing, unless asked for fewer.
const PAGE_MAX: usize = 256;

/// For how long what the first page of a listing found is good for the others: a listing of 100,000 takes less, and who
/// pauses for longer is told the present again.
const LISTING_KEPT: Duration = Duration::from_secs(60);

/// A listing that goes over several pages. What is there, and what of it was shared or in use, is read for the first page
/// and not again for each of the others; who comes meanwhile is in the next listing.
pub(super) struct Listing {
    at: Instant,
    /// In their order.
    ids: Vec<SnapshotId>,
    references: References,
}

impl Listing {
    /// Who comes after this one.
    fn after(&self, cursor: Option<&str>) -> impl Iterator<Item = SnapshotId> + '_ {
        let from = cursor.map_or(0, |cursor| self.ids.partition_point(|id| id.as_str() <= cursor));
        self.ids.iter().skip(from).cloned()
    }
}

impl LocalProvider {
    pub(super) async fn save_instance(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &SaveRequest,
    ) -> Result<Snapshot> {
        if request.memory {
            self.require_memory().await?;
        }
        self.require(if request.live { Capability::SaveLive } else { Capability::SaveStopped })?;
        within(mutation.budget_ms, "saving", async {
            if request.live {
                self.admit(mutation, sandbox).await?;
            } else {
                // Its processes end whether there is room to save what they leave or not (L8).
                self.admit_end(mutation, sandbox).await?;
            }
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            let known = self.known_snapshot(mutation, request).await;
            if let Ok(Some(known)) = known {
                return Ok(known);
            }
            let (live, request) = (request.live, request.clone());
            if live {
                // So that an instance that has ended is told as such, whatever else is wrong.
                self.check_alive(&instance).await?;
            }
            known?;
            if request.memory && !live {
                self.dump(mutation, &instance, &request.snapshot).await?;
            } else if !live {
                self.ask_to_end(sandbox, &ShimRequest::EndToSave { mutation: mutation.clone() }).await?;
            }
            let mutation = mutation.clone();
            self.blocking(move |this| {
                let saved = if live {
                    this.save_live(&mutation, &instance, &request)
                } else {
                    this.save_stopped(&mutation, &instance, &request)
                };
                this.later(saved.as_ref().map_or(Chore::Collect, |saved| Chore::Snapshot(saved.id.clone())));
                saved
            })
            .await
        })
        .await
    }

    pub(super) async fn check_alive(&self, instance: &InstanceRef) -> Result<()> {
        match self.look(instance).await?.state {
            InstanceState::Running | InstanceState::Frozen => Ok(()),
            InstanceState::Absent => Err(ProviderError::Absent),
            state @ (InstanceState::Creating | InstanceState::Ending { .. } | InstanceState::Ended(_)) => {
                Err(ProviderError::NotRunning { state })
            }
        }
    }

    pub(super) fn require(&self, capability: Capability) -> Result<()> {
        let capabilities = self.unprobed_capabilities();
        if capabilities.can(capability) {
            return Ok(());
        }
        let why = capabilities.missing.get(&capability).cloned().unwrap_or_default();
        Err(ProviderError::Unsupported { capability, why })
    }

    /// What the same operation has saved already.
    async fn known_snapshot(&self, mutation: &Mutation, request: &SaveRequest) -> Result<Option<Snapshot>> {
        let (mutation, request) = (mutation.clone(), request.clone());
        self.blocking(move |this| this.saved_before(&mutation, &request)).await
    }

    fn saved_before(&self, mutation: &Mutation, request: &SaveRequest) -> Result<Option<Snapshot>> {
        match self.shared.store.read_snapshot(&request.snapshot).map_err(records_unreadable)? {
            None => Ok(None),
            Some(SnapshotFile::Kept(record)) if record.operation == mutation.operation => Ok(Some(record.snapshot)),
            Some(SnapshotFile::Kept(_)) => {
                Err(ProviderError::Conflict { what: format!("{} is another snapshot", request.snapshot) })
            }
            Some(SnapshotFile::Removed { .. }) => {
                Err(ProviderError::Conflict { what: format!("{} was removed", request.snapshot) })
            }
        }
    }

    fn save_stopped(&self, mutation: &Mutation, instance: &InstanceRef, request: &SaveRequest) -> Result<Snapshot> {
        let started = Instant::now();
        let pinned = self.prove_ended(instance)?;
        let dir = pinned.dir();
        let _saving = lock_file(&dir.saving(), true, Duration::from_millis(mutation.budget_ms))
            .map_err(unavailable(&dir.saving()))?;
        if let Some(known) = self.saved_before(mutation, request)? {
            return Ok(known);
        }
        let (record, made) = self.record_to_save(instance)?;
        let memory = MemoryDir::new(dir.memory());
        if !request.memory {
            // It was dumped and given up, and the files may need the room; what CRIU said stays.
            remove_if_there(&memory.kept()).map_err(save_failed)?;
        }
        // A create that failed may have been followed by another one of the same generation.
        if !pinned.is_still(&self.dir(&instance.sandbox)) {
            return Err(ProviderError::Absent);
        }
        let store = &self.shared.store;
        let _layers = store.lock_shared().map_err(store_failed)?;
        let kept: Option<LayerMeta> = durable::read_json(&dir.sealed()).map_err(save_failed)?;
        let mut cost = SaveCost::default();
        let (meta, is_new) = if let Some(meta) = kept {
            // It was sealed before, or was about to be when the process stopped.
            (meta, false)
        } else {
            let source = Source { instance, of: &made.of, host: &self.shared.host };
            let layer = LayerId::for_snapshot(&request.snapshot).map_err(store_failed)?;
            let finished = store.finish_stopped(source, &made.plan.writable, layer).map_err(save_failed)?;
            cost.flush_us = finished.flush_us;
            (finished.meta, true)
        };
        let memory_bytes =
            if request.memory { Some(self.finish_stopped_memory(dir, &record, &request.snapshot)?) } else { None };
        let put = || {
            if !pinned.is_still(&self.dir(&instance.sandbox)) {
                return Err(io::Error::other("it is not there any more"));
            }
            if memory_bytes.is_some() {
                self.put_memory(&memory, &request.snapshot)?;
            }
            if is_new {
                // From here on the layer is where this says, whatever happens.
                durable::replace_json(&dir.sealed(), &meta)?;
            }
            store.seal_stopped(instance, &meta)
        };
        self.commit(mutation, request, &record, &made, (&meta, cost, memory_bytes), started, put)
    }

    fn save_live(&self, mutation: &Mutation, instance: &InstanceRef, request: &SaveRequest) -> Result<Snapshot> {
        let started = Instant::now();
        let dir = self.dir(&instance.sandbox);
        let saving = lock_file(&dir.saving(), true, Duration::from_millis(mutation.budget_ms));
        let _saving = match saving {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.why_absent(instance)),
            saving => saving.map_err(unavailable(&dir.saving()))?,
        };
        if let Some(known) = self.saved_before(mutation, request)? {
            return Ok(known);
        }
        let (record, made) = self.record_to_save(instance)?;
        let store = &self.shared.store;
        let _layers = store.lock_shared().map_err(store_failed)?;
        // Most of what is dirty is written out while it still runs.
        let flush = Instant::now();
        store.sync().map_err(save_failed)?;
        let flushed_us = elapsed_us(flush);
        let place = store.new_place();
        let memory = MemoryDir::new(dir.memory_live());
        let saved = (|| {
            let budget_ms = left_ms(mutation, started);
            let copy = |living: &Path| store.copy_live(living, &place).map_err(save_failed);
            let (copied, paused_us) = if request.memory {
                let dumping = self.prepare_live_dump(mutation, &record, &memory)?;
                let within = Duration::from_millis(budget_ms);
                self.with_held(
                    instance,
                    || Held::ask_for(&dir, &dumping, within),
                    |living| {
                        keep_run(&dir, &memory).map_err(save_failed)?;
                        copy(living)
                    },
                )?
            } else {
                self.with_living(instance, budget_ms, copy)?
            };
            let memory_bytes = request.memory.then(|| self.finish_memory(&memory, &record, true)).transpose()?;
            let source = Source { instance, of: &made.of, host: &self.shared.host };
            let layer = LayerId::for_snapshot(&request.snapshot).map_err(store_failed)?;
            let Finished { meta, flush_us, copied_bytes } =
                store.finish_live(source, &place, &copied, layer).map_err(save_failed)?;
            let cost = SaveCost { flush_us: flushed_us + flush_us, paused_us, total_us: 0, copied_bytes };
            let put = || {
                if memory_bytes.is_some() {
                    self.put_memory(&memory, &request.snapshot)?;
                }
                store.put_layer(&place, &meta)
            };
            self.commit(mutation, request, &record, &made, (&meta, cost, memory_bytes), started, put)
        })();
        if saved.is_err() {
            let _ = store.discard(&place);
            let _ = fs::remove_dir_all(memory.path());
        }
        saved
    }

    fn record_to_save(&self, instance: &InstanceRef) -> Result<(InstanceRecord, Made)> {
        let record = self.need_record(instance)?;
        let made = record.made.clone().ok_or_else(outdated)?;
        Ok((record, made))
    }

    /// Puts the layer in place and writes the record, unless somebody was faster or it is too late.
    #[expect(clippy::too_many_arguments, reason = "the one place where everything about a save comes together")]
    fn commit(
        &self,
        mutation: &Mutation,
        request: &SaveRequest,
        record: &InstanceRecord,
        made: &Made,
        (meta, cost, memory_bytes): (&LayerMeta, SaveCost, Option<u64>),
        started: Instant,
        put: impl FnOnce() -> io::Result<()>,
    ) -> Result<Snapshot> {
        let store = &self.shared.store;
        let mut fence = self.fence(record.sandbox())?;
        fence.admit(mutation)?;
        let _lock = store.lock_id(&request.snapshot).map_err(records_unreadable)?;
        if let Some(known) = self.saved_before(mutation, request)? {
            return Ok(known);
        }
        put().map_err(save_failed)?;
        let of = made.of.with(meta.id.clone());
        let mut size_bytes = meta.survey.disk_bytes + memory_bytes.unwrap_or(0);
        for layer in &made.of.saved {
            size_bytes += store.need_layer(layer).map_err(store_failed)?.survey.disk_bytes;
        }
        let cost = SaveCost { total_us: elapsed_us(started), ..cost };
        let snapshot = Snapshot {
            id: request.snapshot.clone(),
            source: record.instance.clone(),
            owner: record.owner.clone(),
            parent: made.parent.clone(),
            size_bytes,
            memory: memory_bytes.is_some(),
            live: request.live,
            created_at_ms: now_wall_ms(),
            cost,
        };
        let operation = mutation.operation.clone();
        let kept = SnapshotRecord { snapshot: snapshot.clone(), operation, of };
        store.write_snapshot(&kept).map_err(save_failed)?;
        Ok(snapshot)
    }

    /// Does something with the writable layer of a living instance, which stands still where that is needed. Answers
    /// also for how long it did.
    pub(super) fn with_living<T>(
        &self,
        instance: &InstanceRef,
        budget_ms: u64,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<(T, u64)> {
        let dir = self.dir(&instance.sandbox);
        self.with_held(instance, || Held::take(&dir, instance, budget_ms), work)
    }

    /// The same, when something else is done on the way to its standing still.
    fn with_held<T>(
        &self,
        instance: &InstanceRef,
        take: impl FnOnce() -> io::Result<std::result::Result<Held, ShimError>>,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<(T, u64)> {
        // This runs on a thread for what blocks, so waiting for a look here delays nobody.
        tokio::runtime::Handle::current().block_on(self.check_alive(instance))?;
        let lost = |source| ProviderError::Unavailable { what: format!("the shim of {instance}"), source };
        let since = Instant::now();
        let held = take().map_err(lost)??;
        // What the kernel can share it does from where the store lies, not by way of the shim.
        let store = &self.shared.store;
        let active = store.active_folder(instance);
        let done = work(if store.driver.copies_live() { &held.writable } else { &active })?;
        // Only now is it certain that nobody wrote meanwhile.
        held.release().map_err(lost)??;
        Ok((done, elapsed_us(since)))
    }

    pub(super) async fn look_at_snapshot(&self, id: &SnapshotId) -> Result<SnapshotSeen> {
        self.require(Capability::SaveStopped)?;
        let id = id.clone();
        self.blocking(move |this| match this.shared.store.read_snapshot(&id).map_err(records_unreadable)? {
            Some(SnapshotFile::Kept(record)) => Ok(this.seen(*record, &this.references()?)),
            Some(SnapshotFile::Removed { .. }) | None => Err(ProviderError::NotFound { what: id.to_string() }),
        })
        .await
    }

    pub(super) async fn list_snapshots(
        &self,
        owner: &viv_core::OwnerMark,
        page: PageRequest,
    ) -> Result<Page<SnapshotSeen>> {
        self.require(Capability::SaveStopped)?;
        let owner = owner.clone();
        self.blocking(move |this| {
            let limit = page.limit.unwrap_or(PAGE_MAX).clamp(1, PAGE_MAX);
            let listing = this.listing_of(page.cursor.is_some())?;
            let mut listed = Page::default();
            let mut last = None;
            for (id, file) in this.shared.store.read_snapshots(listing.after(page.cursor.as_deref())) {
                match file {
                    Ok(SnapshotFile::Kept(record)) if record.snapshot.owner == owner => {
                        if listed.items.len() == limit {
                            listed.next = last;
                            break;
                        }
                        listed.items.push(this.seen(*record, &listing.references));
                        last = Some(id.to_string());
                    }
                    Ok(SnapshotFile::Kept(_) | SnapshotFile::Removed { .. }) => {}
                    Err(error) => listed.unreadable.push(format!("{id}: {error}")),
                }
            }
            if listed.next.is_none() {
                this.listing().take();
            }
            Ok(listed)
        })
        .await
    }

    /// What a page of a listing is told by: of the first one, or one that goes on where that one ended.
    fn listing_of(&self, goes_on: bool) -> Result<Arc<Listing>> {
        if let Some(listing) = self.listing().clone().filter(|listing| goes_on && listing.at.elapsed() < LISTING_KEPT) {
            return Ok(listing);
        }
        let ids = self.shared.store.snapshot_ids().map_err(records_unreadable)?;
        let listing = Arc::new(Listing { at: Instant::now(), ids, references: self.references()? });
        *self.listing() = Some(listing.clone());
        Ok(listing)
    }

    fn listing(&self) -> MutexGuard<'_, Option<Arc<Listing>>> {
        self.shared.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn references(&self) -> Result<References> {
        self.shared.store.readable_references().map_err(records_unreadable)
    }

    fn seen(&self, record: SnapshotRecord, references: &References) -> SnapshotSeen {
        let store = &self.shared.store;
        let (mut integrity, mut own_bytes) = store.condition(&record, references);
        if integrity == Integrity::Damaged
            && let Ok(Some(SnapshotFile::Kept(now))) = store.read_snapshot(&record.snapshot.id)
            && now.of != record.of
        {
            // Its layers were merged since its record was read.
            (integrity, own_bytes) = store.condition(&now, references);
        }
        let mut memory_damage = None;
        if record.snapshot.memory {
            own_bytes += self.own_memory_bytes(&record.snapshot.id);
            // Not being able to look is not damage.
            memory_damage = store.check_memory(&record.snapshot.id, false).ok().flatten();
        }
        let used_by = references.made_from(&record.snapshot.id);
        SnapshotSeen { snapshot: record.snapshot, integrity, memory_damage, own_bytes, used_by }
    }

    pub(super) async fn forget_snapshot(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        id: &SnapshotId,
    ) -> Result<()> {
        self.require(Capability::SaveStopped)?;
        let (mutation, sandbox, id) = (mutation.clone(), sandbox.clone(), id.clone());
        within(
            mutation.budget_ms,
            "removing the snapshot",
            self.clone().blocking(move |this| {
                this.remove_record(&mutation, &sandbox, &id)?;
                // What it held goes in the background.
                this.later(Chore::Collect);
                Ok(())
            }),
        )
        .await
    }

    fn remove_record(&self, mutation: &Mutation, sandbox: &SandboxId, id: &SnapshotId) -> Result<()> {
        let store = &self.shared.store;
        // What is written here is not taken for left behind by somebody who collects.
        let _layers = store.lock_shared().map_err(store_failed)?;
        let mut fence = self.fence(sandbox)?;
        fence.admit_any_generation(mutation)?;
        // Saves commit under this lock too, so one on its way is either seen by now or comes too late.
        let _lock = store.lock_id(id).map_err(records_unreadable)?;
        match store.read_snapshot(id) {
            Ok(Some(SnapshotFile::Removed { .. })) => return Ok(()),
            Ok(Some(SnapshotFile::Kept(record))) if record.snapshot.source.sandbox != *sandbox => {
                return Err(ProviderError::Conflict { what: format!("{id} is of {}", record.snapshot.source.sandbox) });
            }
            Ok(Some(SnapshotFile::Kept(_)) | None) => {}
            // What nobody can make sense of can at least be removed.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {}
            Err(error) => return Err(records_unreadable(error)),
        }
        let in_use = || Ok(store.users_of(id)?.into_iter().next());
        match store.remove_snapshot(id, sandbox, in_use).map_err(records_unreadable)? {
            None => Ok(()),
            Some(user) => Err(ProviderError::Conflict { what: format!("{user} was made from {id} and is there") }),
        }
    }

    pub(super) async fn count_disk(&self, instance: &InstanceRef) -> Result<DiskUsage> {
        let instance = instance.clone();
        self.blocking(move |this| {
            let record = this.need_record(&instance)?;
            let made = record.made.as_ref().ok_or_else(outdated)?;
            let store = &this.shared.store;
            let sealed: Option<LayerMeta> =
                durable::read_json(&this.dir(&instance.sandbox).sealed()).map_err(store_failed)?;
            let mut usage = match sealed {
                // A snapshot has it too, so destroying the instance frees nothing.
                Some(meta) => DiskUsage { shared_bytes: meta.survey.disk_bytes, ..DiskUsage::default() },
                None => store.count_active(&made.plan.writable).map_err(store_failed)?,
            };
            for layer in made.of.layers() {
                usage.shared_bytes += store.need_layer(layer).map_err(store_failed)?.survey.disk_bytes;
            }
            usage.limit_bytes = record.spec.limits.disk_bytes;
            Ok(usage)
        })
        .await
    }
}

/// What is left of a budget.
fn left_ms(mutation: &Mutation, started: Instant) -> u64 {
    mutation.budget_ms.saturating_sub(elapsed_us(started) / 1000).max(1)
}

#[expect(clippy::needless_pass_by_value, reason = "goes into map_err")]
pub(super) fn save_failed(error: io::Error) -> ProviderError {
    if durable::is_full(&error) {
        return ProviderError::Exhausted { limit: "disk", what: format!("saving failed: {error}") };
    }
    ProviderError::Failed { what: format!("saving failed, and its files are kept as they are: {error}") }
}

#[expect(clippy::needless_pass_by_value, reason = "goes into map_err")]
pub(super) fn store_failed(error: io::Error) -> ProviderError {
    match error.kind() {
        _ if durable::is_full(&error) => ProviderError::Exhausted { limit: "disk", what: error.to_string() },
        // Ours, not the kernel's word of the same kind.
        io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => ProviderError::Invalid {
            what: error.to_string(),
            hint: "make it anew on this machine, or restore it on one like that it comes from".to_owned(),
        },
        _ => ProviderError::Failed { what: format!("the layer store: {error}") },
    }
}

fn records_unreadable(source: io::Error) -> ProviderError {
    ProviderError::Unavailable { what: "the records of snapshots".to_owned(), source }
}

pub(super) fn outdated() -> ProviderError {
    ProviderError::Outdated { what: "it was made before there were layers".to_owned() }
}
