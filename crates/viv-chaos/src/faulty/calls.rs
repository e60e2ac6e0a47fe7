//! Every call, through what goes wrong with it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, Identity, OwnerMark, RequestId, SandboxId, SnapshotId};
use viv_provider::{
    ByteReader, Capabilities, Deadline, DeadlineChange, Dialled, DiskUsage, Ended, FileWrite, Finding, FullPlace,
    InsideRequest, InstanceRef, InstanceSpec, InstanceState, LogPart, Mutation, Observation, Obstacle, OutputStream,
    Page, PageRequest, ProcessSeen, Provider, ProviderError, RequestStream, ResourceLimits, SaveRequest, Snapshot,
    SnapshotSeen, Swept, WatchStream, Whereabouts,
};

use crate::plan::Trouble;

use super::{Chance, Damage, FaultyProvider, Kept, Result, lock, unavailable};

/// How soon after a silence what happened meanwhile is told.
const HEARD_AGAIN: Duration = Duration::from_millis(250);

/// Says that it runs, unless it is not there at all.
fn pose(state: &mut InstanceState) {
    if *state != InstanceState::Absent {
        *state = InstanceState::Running;
    }
}

impl<P: Provider> FaultyProvider<P> {
    /// A new instance has no damage; one that is there already keeps what it has.
    async fn begins_well(&self, mutation: &Mutation, sandbox: &SandboxId) {
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        if matches!(self.inner.observe(&instance).await, Ok(Observation { state: InstanceState::Absent, .. })) {
            lock(&self.damage).remove(sandbox);
        }
    }
}

/// What goes wrong with a listing.
const LISTINGS: [Trouble; 4] = [Trouble::Lost, Trouble::Unavailable, Trouble::PartialListing, Trouble::StaleListing];

impl<P> FaultyProvider<P> {
    /// A listing, and what this makes of it.
    async fn made_of<T: Clone>(
        &self,
        name: &'static str,
        trouble: Option<Trouble>,
        mut page: Page<T>,
        kept: impl Fn(&mut Chance) -> &mut Kept<T>,
    ) -> Result<Page<T>> {
        match trouble {
            Some(Trouble::PartialListing) => {
                page.items.truncate(page.items.len() / 2);
                page.unreadable.push("simulated".to_owned());
                Ok(page)
            }
            Some(Trouble::StaleListing) => {
                let mut chance = lock(&self.chance);
                let count = kept(&mut chance).pages.len().max(1) as u64;
                let age = chance.rng.below(count) as usize;
                Ok(kept(&mut chance).older(age).unwrap_or(page))
            }
            Some(Trouble::Unavailable) => Err(unavailable()),
            Some(_) => self.timed_out(name).await,
            None => Ok(page),
        }
    }
}

/// What is asked inside, until this breaks: the next question is heard by who listens again.
struct Breaking<P> {
    inner: Box<dyn RequestStream>,
    provider: FaultyProvider<P>,
}

#[async_trait]
impl<P: Provider + Clone + 'static> RequestStream for Breaking<P> {
    async fn next(&mut self) -> Result<Option<InsideRequest>> {
        let breaks = self.provider.can(Trouble::BrokenStream)
            && self.provider.trouble("request", &[Trouble::BrokenStream]).is_some();
        if breaks || self.provider.is_down() {
            return Err(unavailable());
        }
        self.inner.next().await
    }
}

#[async_trait]
#[deny(
    clippy::missing_trait_methods,
    reason = "a call that is not forwarded would be answered by the default, and nobody would notice"
)]
impl<P: Provider + Clone + 'static> Provider for FaultyProvider<P> {
    fn name(&self) -> &str {
        if self.orders.is_some() { self.inner.name() } else { "faulty" }
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn look_again(&self) -> Capabilities {
        self.inner.look_again().await
    }

    fn looks_again_after(&self) -> Option<Duration> {
        self.inner.looks_again_after()
    }

    async fn create(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        self.begins_well(mutation, sandbox).await;
        let (mutation, sandbox, owner, spec) = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone());
        self.mutate("create", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, owner, spec) = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone());
            async move { inner.create(&mutation, &sandbox, &owner, &spec).await }
        })
        .await
    }

    async fn observe(&self, instance: &InstanceRef) -> Result<Observation> {
        let damage = self.damage_of(&instance.sandbox);
        if damage == Some(Damage::Denied) && !self.is_out_of_reach() {
            lock(&self.alone).answered();
            return Err(ProviderError::NotFound { what: "a thing of that name".to_owned() });
        }
        let asked = instance.clone();
        let seen = self.through_about("observe", &instance.sandbox, move |inner| {
            let instance = asked.clone();
            async move { inner.observe(&instance).await }
        });
        let mut seen = seen.await?;
        if damage == Some(Damage::Poses) {
            pose(&mut seen.state);
        }
        Ok(seen)
    }

    async fn list(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page> {
        let trouble = if self.is_silent() { Some(Trouble::Lost) } else { self.trouble("list", &LISTINGS) };
        self.traced("list", None, trouble.map_or("asked", Trouble::word));
        self.line
            .call(async {
                let is_first = page.cursor.is_none();
                if self.is_down() {
                    return Err(unavailable());
                }
                let mut page = self.inner.list(owner, page).await?;
                for item in &mut page.items {
                    if self.damage_of(&item.instance.sandbox) == Some(Damage::Poses) {
                        pose(&mut item.state);
                    }
                }
                if is_first && page.next.is_none() {
                    lock(&self.chance).listings.keep(page.clone());
                }
                page = lock(&self.script).as_it_was(page)?;
                let trouble = if self.partial.load(Ordering::SeqCst) { Some(Trouble::PartialListing) } else { trouble };
                if is_first && let Some(age) = lock(&self.script).age() {
                    return Ok(lock(&self.chance).listings.older(age).unwrap_or(page));
                }
                let listed = self.made_of("list", trouble, page, |chance| &mut chance.listings).await?;
                if self.keeps() {
                    let (now, mut chance) = (Instant::now(), lock(&self.chance));
                    for item in &listed.items {
                        chance.listed.entry(item.instance.sandbox.clone()).or_insert((now, 0)).1 += 1;
                    }
                }
                Ok(listed)
            })
            .await
    }

    async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended> {
        if self.trouble("wait_end", &[Trouble::UnheardEnd]).is_some() || lock(&self.script).is_unheard() {
            return std::future::pending().await;
        }
        let told = async {
            let ended = self.inner.wait_end(instance).await;
            // Nobody hears of it while no call arrives, or while it is said to run.
            while self.is_out_of_reach() || self.damage_of(&instance.sandbox) == Some(Damage::Poses) {
                tokio::time::sleep(HEARD_AGAIN).await;
            }
            ended
        };
        self.line.call(told).await
    }

    async fn destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("destroy", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.destroy(&mutation, &sandbox).await }
        })
        .await
    }

    async fn extend(&self, mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Result<Deadline> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("extend", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.extend(&mutation, &sandbox, change).await }
        })
        .await
    }

    async fn set_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits> {
        let (mutation, sandbox, change) = (mutation.clone(), sandbox.clone(), change.clone());
        self.mutate("set_limits", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, change) = (mutation.clone(), sandbox.clone(), change.clone());
            async move { inner.set_limits(&mutation, &sandbox, &change).await }
        })
        .await
    }

    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("freeze", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.freeze(&mutation, &sandbox).await }
        })
        .await
    }

    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.mutate("thaw", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
            async move { inner.thaw(&mutation, &sandbox).await }
        })
        .await
    }

    async fn save(&self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        let (mutation, sandbox, request) = (mutation.clone(), sandbox.clone(), request.clone());
        self.mutate("save", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, request) = (mutation.clone(), sandbox.clone(), request.clone());
            async move { inner.save(&mutation, &sandbox, &request).await }
        })
        .await
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
        let snapshot = snapshot.clone();
        self.through("snapshot", move |inner| {
            let snapshot = snapshot.clone();
            async move { inner.snapshot(&snapshot).await }
        })
        .await
    }

    async fn snapshots(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page<SnapshotSeen>> {
        let trouble = if self.is_silent() { Some(Trouble::Lost) } else { self.trouble("snapshots", &LISTINGS) };
        self.traced("snapshots", None, trouble.map_or("asked", Trouble::word));
        self.line
            .call(async {
                let is_first = page.cursor.is_none();
                if self.is_down() {
                    return Err(unavailable());
                }
                let page = self.inner.snapshots(owner, page).await?;
                if is_first && page.next.is_none() {
                    lock(&self.chance).saves.keep(page.clone());
                }
                if is_first && let Some(age) = lock(&self.script).age() {
                    return Ok(lock(&self.chance).saves.older(age).unwrap_or(page));
                }
                self.made_of("snapshots", trouble, page, |chance| &mut chance.saves).await
            })
            .await
    }

    async fn remove_snapshot(&self, mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()> {
        let (mutation, sandbox, snapshot) = (mutation.clone(), sandbox.clone(), snapshot.clone());
        self.mutate("remove_snapshot", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, snapshot) = (mutation.clone(), sandbox.clone(), snapshot.clone());
            async move { inner.remove_snapshot(&mutation, &sandbox, &snapshot).await }
        })
        .await
    }

    async fn disk_usage(&self, instance: &InstanceRef) -> Result<DiskUsage> {
        let asked = instance.clone();
        self.through_about("disk_usage", &instance.sandbox, move |inner| {
            let instance = asked.clone();
            async move { inner.disk_usage(&instance).await }
        })
        .await
    }

    async fn restore(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation> {
        self.begins_well(mutation, sandbox).await;
        let all = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone(), snapshot.clone());
        let keeps = self.keeps();
        self.mutate("restore", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, owner, spec, snapshot) = all.clone();
            let chance = self.chance.clone();
            async move {
                let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
                let was_there = inner.observe(&instance).await.is_ok_and(|seen| seen.state != InstanceState::Absent);
                let seen = inner.restore(&mutation, &sandbox, &owner, &spec, &snapshot).await?;
                let mut chance = lock(&chance);
                if keeps && !was_there && chance.damaged.contains(&snapshot) {
                    chance.begun_damaged = Some(format!("{instance} was begun with {snapshot}, which is damaged"));
                }
                Ok(seen)
            }
        })
        .await
    }

    async fn fork(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation> {
        let all = (mutation.clone(), sandbox.clone(), owner.clone(), spec.clone(), source.clone());
        self.mutate("fork", (sandbox.clone(), mutation.token), move |inner| {
            let (mutation, sandbox, owner, spec, source) = all.clone();
            async move { inner.fork(&mutation, &sandbox, &owner, &spec, &source).await }
        })
        .await
    }

    async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus> {
        if spec.transient && self.keeps() {
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            lock(&self.chance).probed.insert(instance, Instant::now());
        }
        self.agent(sandbox).await?;
        // Nobody's rest is disturbed by what is not remembered.
        if !spec.transient {
            self.mutations.fetch_add(1, Ordering::SeqCst);
        }
        let all = (mutation.clone(), sandbox.clone(), execution.clone(), spec.clone());
        let keeps = self.keeps();
        self.change_uncounted("execute", sandbox, move |inner| {
            let (mutation, sandbox, execution, spec) = all.clone();
            let this = self.clone();
            async move {
                // What goes on with its memory, or was started before, is found and not started.
                let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
                let is_there = inner.execution(&instance, &execution).await.is_ok();
                let status = inner.execute(&mutation, &sandbox, &execution, &spec).await?;
                if keeps && !is_there {
                    this.started(execution, mutation.generation);
                }
                Ok(status)
            }
        })
        .await
    }

    fn probe_spec(&self, nonce: &str) -> ExecSpec {
        self.inner.probe_spec(nonce)
    }

    fn ask_spec(&self, body: &str) -> ExecSpec {
        self.inner.ask_spec(body)
    }

    async fn identity(&self, instance: &InstanceRef) -> Result<Identity> {
        self.file(&instance.sandbox).await?;
        let instance = instance.clone();
        self.through("identity", move |inner| {
            let instance = instance.clone();
            async move { inner.identity(&instance).await }
        })
        .await
    }

    async fn whereabouts(&self, instance: &InstanceRef) -> Result<Whereabouts> {
        let instance = instance.clone();
        self.through("whereabouts", move |inner| {
            let instance = instance.clone();
            async move { inner.whereabouts(&instance).await }
        })
        .await
    }

    fn memory_left(&self) -> Option<f64> {
        self.inner.memory_left()
    }

    fn saves_memory_by(&self) -> Option<String> {
        self.inner.saves_memory_by()
    }

    fn short_of_room(&self) -> Option<String> {
        self.inner.short_of_room()
    }

    async fn memory_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        let instance = instance.clone();
        self.through("memory_obstacles", move |inner| {
            let instance = instance.clone();
            async move { inner.memory_obstacles(&instance).await }
        })
        .await
    }

    async fn log_tail(&self, instance: &InstanceRef, bytes_max: u64) -> Result<Vec<LogPart>> {
        let instance = instance.clone();
        self.through("log_tail", move |inner| {
            let instance = instance.clone();
            async move { inner.log_tail(&instance, bytes_max).await }
        })
        .await
    }

    async fn execution(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus> {
        let (instance, execution) = (instance.clone(), execution.clone());
        self.through("execution", move |inner| {
            let (instance, execution) = (instance.clone(), execution.clone());
            async move { inner.execution(&instance, &execution).await }
        })
        .await
    }

    async fn executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>> {
        let instance = instance.clone();
        self.through("executions", move |inner| {
            let instance = instance.clone();
            async move { inner.executions(&instance).await }
        })
        .await
    }

    async fn attach(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>> {
        self.agent(&instance.sandbox).await?;
        self.through_once("attach", self.inner.attach(instance, execution, offset, follow)).await
    }

    async fn write_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
    ) -> Result<u64> {
        self.agent(sandbox).await?;
        self.change_once("write_stdin", sandbox, self.inner.write_stdin(mutation, sandbox, execution, offset, data))
            .await
    }

    async fn close_stdin(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<()> {
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), execution.clone());
        self.change("close_stdin", sandbox, move |inner| {
            let (mutation, sandbox, execution) = all.clone();
            async move { inner.close_stdin(&mutation, &sandbox, &execution).await }
        })
        .await
    }

    async fn signal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), execution.clone());
        self.change("signal", sandbox, move |inner| {
            let (mutation, sandbox, execution) = all.clone();
            async move { inner.signal(&mutation, &sandbox, &execution, signal).await }
        })
        .await
    }

    async fn resize(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), execution.clone());
        self.change("resize", sandbox, move |inner| {
            let (mutation, sandbox, execution) = all.clone();
            async move { inner.resize(&mutation, &sandbox, &execution, size).await }
        })
        .await
    }

    async fn cancel(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<ExecStatus> {
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), execution.clone());
        self.change("cancel", sandbox, move |inner| {
            let (mutation, sandbox, execution) = all.clone();
            async move { inner.cancel(&mutation, &sandbox, &execution).await }
        })
        .await
    }

    async fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader> {
        self.file(&instance.sandbox).await?;
        self.through_once("file_read", self.inner.file_read(instance, path, offset, length)).await
    }

    async fn file_write(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat> {
        self.file(sandbox).await?;
        self.change_once("file_write", sandbox, self.inner.file_write(mutation, sandbox, file, content)).await
    }

    async fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        self.file(&instance.sandbox).await?;
        let all = (instance.clone(), path.to_owned());
        self.through("file_stat", move |inner| {
            let (instance, path) = all.clone();
            async move { inner.file_stat(&instance, &path).await }
        })
        .await
    }

    async fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        self.file(&instance.sandbox).await?;
        let all = (instance.clone(), path.to_owned());
        self.through("file_list", move |inner| {
            let (instance, path) = all.clone();
            async move { inner.file_list(&instance, &path, depth).await }
        })
        .await
    }

    async fn file_mkdir(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.change_once("file_mkdir", sandbox, self.inner.file_mkdir(mutation, sandbox, path)).await
    }

    async fn file_move(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.change_once("file_move", sandbox, self.inner.file_move(mutation, sandbox, from, to)).await
    }

    async fn file_remove(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.file(sandbox).await?;
        self.change_once("file_remove", sandbox, self.inner.file_remove(mutation, sandbox, path)).await
    }

    async fn file_watch(&self, instance: &InstanceRef, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>> {
        self.file(&instance.sandbox).await?;
        self.through_once("file_watch", self.inner.file_watch(instance, path, recursive)).await
    }

    async fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader> {
        self.file(&instance.sandbox).await?;
        self.through_once("archive_get", self.inner.archive_get(instance, path)).await
    }

    async fn archive_put(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked> {
        self.file(sandbox).await?;
        self.change_once("archive_put", sandbox, self.inner.archive_put(mutation, sandbox, path, bounds, archive)).await
    }

    async fn dial(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>> {
        self.agent(&instance.sandbox).await?;
        self.through_once("dial", self.inner.dial(instance, port)).await
    }

    async fn requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        self.agent(&instance.sandbox).await?;
        let inner = self.through_once("requests", self.inner.requests(instance)).await?;
        Ok(Box::new(Breaking { inner, provider: self.clone() }))
    }

    async fn answer_request(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        self.agent(sandbox).await?;
        let all = (mutation.clone(), sandbox.clone(), request.clone(), answer.to_owned());
        self.change("answer_request", sandbox, move |inner| {
            let (mutation, sandbox, request, answer) = all.clone();
            async move { inner.answer_request(&mutation, &sandbox, &request, &answer).await }
        })
        .await
    }

    async fn export_snapshot(&self, snapshot: &SnapshotId) -> Result<ByteReader> {
        self.through_once("export_snapshot", self.inner.export_snapshot(snapshot)).await
    }

    async fn import_snapshot(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        file: ByteReader,
    ) -> Result<Snapshot> {
        self.change_once(
            "import_snapshot",
            sandbox,
            self.inner.import_snapshot(mutation, sandbox, owner, snapshot, file),
        )
        .await
    }

    async fn processes(&self, instance: &InstanceRef) -> Result<Vec<ProcessSeen>> {
        let instance = instance.clone();
        self.through("processes", move |inner| {
            let instance = instance.clone();
            async move { inner.processes(&instance).await }
        })
        .await
    }

    async fn full_places(&self, instance: &InstanceRef) -> Result<Vec<FullPlace>> {
        let instance = instance.clone();
        self.through("full_places", move |inner| {
            let instance = instance.clone();
            async move { inner.full_places(&instance).await }
        })
        .await
    }

    async fn audit(&self) -> Result<Vec<Finding>> {
        if lock(&self.script).audits_hang() {
            return self.timed_out("audit").await;
        }
        self.through("audit", move |inner| async move { inner.audit().await }).await
    }

    async fn sweep(&self, findings: &[Finding]) -> Result<Vec<Swept>> {
        let findings = findings.to_vec();
        self.through("sweep", move |inner| {
            let findings = findings.clone();
            async move { inner.sweep(&findings).await }
        })
        .await
    }

    async fn set_network(&self, mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> Result<()> {
        let all = (mutation.clone(), sandbox.clone());
        self.change("set_network", sandbox, move |inner| {
            let (mutation, sandbox) = all.clone();
            async move { inner.set_network(&mutation, &sandbox, connected).await }
        })
        .await
    }
}
