//! The provider on this machine.
//!
//! One file per group of verbs. Any number of processes may use one data
//! folder at a time: what they must agree on is in the fence files, in the
//! instance folders and in the shims.

mod agent_client;
mod audit;
mod chores;
mod connect;
mod create;
mod destroy;
mod execute;
mod files;
mod images;
pub(crate) mod limits;
mod look;
mod memory;
mod output;
mod probe;
mod processes;
mod requests;
mod room;
mod save;
mod shim_client;
pub(crate) mod socket;
mod transfer;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, Generation, Identity, OwnerMark, RequestId, SandboxId, SnapshotId};
use viv_provider::{
    ByteReader, Capabilities, Capability, Deadline, DeadlineChange, Dialled, DiskUsage, Ended, FileWrite, Finding,
    FullPlace, InstanceRef, InstanceSpec, LogPart, Mutation, Observation, Obstacle, OutputStream, Page, PageRequest,
    ProcessSeen, Provider, ProviderError, RequestStream, ResourceLimits, SaveRequest, Snapshot, SnapshotSeen, Swept,
    WatchStream, Whereabouts,
};

use chores::{Chore, Chores};
pub use chores::{Tidier, TidyTurn};
use create::Origin;
pub use memory::Criu;
use save::Listing;

use crate::LimitedBy;
use crate::agent_image;
use crate::cgroup::{InstanceCgroups, Layout};
use crate::fence::{Admit, Fences, Raised};
use crate::hardening::Hardening;
use crate::ids::{IdPool, Ids};
use crate::layout::{DataDir, InstanceDir, InstanceRecord};
use crate::ordinary::Standing;
use crate::rootfs::{HostBase, IdRange};
use crate::runtime::{Found, Runtime, RuntimeError};
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::store::{Store, StoreConfig};

type Result<T> = std::result::Result<T, ProviderError>;

/// How a local provider is set up.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Where everything is kept. One installation, one folder.
    pub data_dir: PathBuf,
    /// The binary whose `shim` verb holds instances.
    pub shim_exe: PathBuf,
    /// Who makes containers.
    pub runtime: Runtime,
    /// Name of our cgroup in each hierarchy; several parts may be joined by `/`.
    pub cgroup_prefix: String,
    /// The ids of the host that sandboxes are mapped to. Of no use to an ordinary user, whose sandboxes have the ids of
    /// the user's own namespace.
    pub ids: IdPool,
    /// How layers are kept.
    pub store: StoreConfig,
    /// On. The other is for the escape suite only.
    pub hardening: Hardening,
    /// What holds in a sandbox whose spec says nothing. Those that the machine cannot keep are left out.
    pub limits: ResourceLimits,
    /// The CRIU that saves memory; by default the machine's own, if there is one.
    pub criu: Option<PathBuf>,
    /// What becomes of the memory of what runs.
    pub keep_memory: KeepMemory,
    /// Off. On where snapshots stay until somebody removes them, though their sandbox is saved again: then what is dumped
    /// shares pages with the dump that it went on from.
    pub keeps_snapshots: bool,
    /// Off. On for who took over from an owner that was killed and is not gone, since it is frozen: what that one has
    /// locked may be locked for ever, so the locks of fences begin anew. It can do nothing any more, and nobody else
    /// takes them.
    pub renew_locks: bool,
}

/// Whether memory is saved, and how it is brought back where CRIU and the kernel leave a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepMemory {
    /// It is not saved.
    Off,
    /// All of it is there before anything goes on.
    Eager,
    /// Much of it is brought while it is used already.
    Lazy,
}

impl LocalConfig {
    /// What ships: everything in one folder, containers by the embedded runtime.
    pub fn new(data_dir: PathBuf, shim_exe: PathBuf) -> Self {
        Self {
            data_dir,
            shim_exe,
            runtime: Runtime::Embedded,
            cgroup_prefix: "vivarium".to_owned(),
            ids: IdPool::default(),
            store: StoreConfig::default(),
            hardening: Hardening::On,
            limits: limits::defaults(),
            criu: None,
            keep_memory: KeepMemory::Lazy,
            keeps_snapshots: false,
            renew_locks: false,
        }
    }
}

/// Why a local provider cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A folder cannot be made or read.
    #[error("the data folder {} cannot be used", .path.display())]
    DataDir {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This process is neither root nor has it entered a namespace in which it is.
    #[error("this process is not root, and not in a user namespace of its own")]
    NotEntered,
    /// The prefix would lead elsewhere.
    #[error("{0:?} is not a cgroup name")]
    CgroupPrefix(String),
}

/// The provider on this machine. Cheap to clone.
#[derive(Clone)]
pub struct LocalProvider {
    shared: Arc<Shared>,
}

struct Shared {
    config: LocalConfig,
    data: DataDir,
    fences: Fences,
    ids: Ids,
    layout: Layout,
    agent: PathBuf,
    host: HostBase,
    store: Store,
    chores: Chores,
    /// Looked at when it is needed first: most verbs make nothing.
    runtime: OnceLock<std::result::Result<Found, RuntimeError>>,
    egress: connect::Cache,
    criu: memory::Cache,
    /// What the first page of the last listing of what was saved found.
    listing: Mutex<Option<Arc<Listing>>>,
}

impl LocalProvider {
    /// Opens a data folder, making it if need be. Blocks for some milliseconds.
    pub fn open(mut config: LocalConfig) -> std::result::Result<Self, OpenError> {
        let name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\0', '\n']);
        if !config.cgroup_prefix.split('/').all(name) {
            return Err(OpenError::CgroupPrefix(config.cgroup_prefix));
        }
        let path = config.data_dir.clone();
        let standing = Standing::of_this_process()
            .map_err(|source| OpenError::DataDir { path: "/proc/self/uid_map".into(), source })?;
        match standing {
            Standing::Root => {}
            Standing::Mapped { ids } => {
                config.ids = IdPool::Shared(IdRange { base: 0, count: ids.min(IdRange::COUNT) });
            }
            Standing::Ordinary => return Err(OpenError::NotEntered),
        }
        Self::set_up(config).map_err(|source| OpenError::DataDir { path, source })
    }

    fn set_up(mut config: LocalConfig) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&config.data_dir)?;
        config.data_dir = fs::canonicalize(&config.data_dir)?;
        // What sandboxes write is nobody else's to read, and their locks nobody else's to hold.
        fs::set_permissions(&config.data_dir, fs::Permissions::from_mode(0o700))?;
        let data = DataDir::new(config.data_dir.clone());
        for folder in [data.instances(), data.trash(), data.host(), data.agent()] {
            // Layers hold set-id files of mapped users under their unmapped ids: nobody else may come near.
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        }
        let fences = Fences::open(data.fences())?;
        if config.renew_locks {
            fences.renew_locks()?;
            crate::store::renew_locks(&data)?;
        }
        let ids = Ids::open(data.ids(), config.ids)?;
        let agent = agent_image::install(&data.agent())?;
        let host = HostBase::open(&data.host(), config.ids.count())?;
        let store = Store::open(&data, config.store, host.clone())?;
        let layout = Layout::detect()?;
        layout.settle();
        create::remove_abandoned(&data, &fences);
        let this = Self {
            shared: Arc::new(Shared {
                config,
                data,
                fences,
                ids,
                layout,
                agent,
                host,
                store,
                chores: Chores::default(),
                runtime: OnceLock::new(),
                egress: connect::Cache::default(),
                criu: memory::Cache::default(),
                listing: Mutex::default(),
            }),
        };
        this.remove_unreadable();
        // Taking apart what somebody left may take long, and whoever opens a folder wants something else.
        if this.shared.store.has_trash() || fs::read_dir(this.shared.data.trash())?.next().is_some() {
            this.later(Chore::Everything);
        }
        Ok(this)
    }

    /// Who makes containers, or why nobody can. Blocks for some milliseconds the first time.
    pub fn runtime(&self) -> std::result::Result<&Found, RuntimeError> {
        let found = self.shared.runtime.get_or_init(|| self.shared.config.runtime.find());
        found.as_ref().map_err(Clone::clone)
    }

    /// The same where it delays nobody.
    async fn find_runtime(&self) -> Result<()> {
        self.blocking(|this| Ok(this.runtime().map(|_| ())?)).await
    }

    /// All but whether sandboxes can be connected and their memory saved, which takes a while to find out.
    fn unprobed_capabilities(&self) -> Capabilities {
        use Capability as C;
        let mut all = Capabilities::default();
        for capability in [C::Extend, C::HardDeadline, C::Tty, C::FileWatch, C::Ports, C::Requests] {
            all = all.with(capability);
        }
        all = all.with(C::EndPushed).with(C::Usage);
        let store = &self.shared.store;
        all = all.with(C::SaveStopped).with(C::Restore).with(C::Transfer);
        for capability in [C::SaveLive, C::Fork] {
            all = match self.shared.layout.v2 {
                Some(_) => all.with(capability),
                None => all.without(capability, format!("{CANNOT_HOLD}: {}", self.shared.layout.why_no_v2())),
            };
        }
        all = match store.driver.limited_by() {
            Ok(_) => all.with(C::LimitDisk),
            Err(why) => all.without(C::LimitDisk, why),
        };
        all = match store.driver.limited_by() {
            Ok(LimitedBy::QuotaGroup) => all.with(C::LimitDiskLive),
            Ok(LimitedBy::ProjectQuota | LimitedBy::OwnFilesystem) => {
                all.without(C::LimitDiskLive, limits::KEEPS_ITS_SIZE)
            }
            Err(why) => all.without(C::LimitDiskLive, why),
        };
        for capability in [C::Freeze, C::ProvenKill] {
            all = match self.shared.layout.v2 {
                Some(_) => all.with(capability),
                None => all.without(capability, self.shared.layout.why_no_v2()),
            };
        }
        all = limits::declare(all, &self.shared.layout, &self.shared.config.data_dir);
        // Without a runtime nothing is made at all, and whoever tries hears why.
        let lacks = self.runtime().map_or(&[][..], |found| found.kernel.lacks());
        lacks.iter().fold(all, |all, (capability, why)| all.without(*capability, *why))
    }

    /// The same, with whether they can be connected.
    fn capabilities_with_egress(&self) -> Capabilities {
        let all = self.unprobed_capabilities();
        // What the runtime cannot do is missing already.
        if all.missing.contains_key(&Capability::EgressAll) {
            return all;
        }
        match self.why_no_egress() {
            None => all.with(Capability::EgressAll),
            Some(why) => all.without(Capability::EgressAll, why),
        }
    }

    fn dir(&self, sandbox: &SandboxId) -> InstanceDir {
        self.shared.data.instance(sandbox)
    }

    fn cgroups(&self, record: &InstanceRecord) -> InstanceCgroups {
        let layout = record.cgroup_layout.as_ref().unwrap_or(&self.shared.layout);
        InstanceCgroups::new(layout.clone(), record.cgroup())
    }

    /// Runs what touches the disk where it delays nobody.
    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce(&Self) -> Result<T> + Send + 'static) -> Result<T> {
        let this = self.clone();
        match tokio::task::spawn_blocking(move || work(&this)).await {
            Ok(result) => result,
            Err(panicked) => Err(ProviderError::Failed { what: format!("a worker ended: {panicked}") }),
        }
    }

    /// The generation that a sandbox is at, also of one whose shim does not answer.
    pub async fn generation(&self, sandbox: &SandboxId) -> Result<Option<Generation>> {
        let sandbox = sandbox.clone();
        self.blocking(move |this| Ok(this.read_record(&sandbox)?.map(|record| record.generation()))).await
    }

    /// Admits a change of the current instance at its fence.
    async fn admit(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<Raised> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.blocking(move |this| this.fence(&sandbox)?.admit(&mutation)).await
    }

    /// Admits an end, also where there is no room to write that down.
    async fn admit_end(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        let (mutation, sandbox) = (mutation.clone(), sandbox.clone());
        self.blocking(move |this| this.fence(&sandbox)?.admit_end(&mutation, Admit::Change)).await
    }

    /// Admits a change that the agent will make. A newer token is told to the shim first, so that whoever was
    /// admitted before, and is late, is refused there too.
    async fn admit_for_agent(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        if self.admit(mutation, sandbox).await? == Raised::Yes {
            let request = ShimRequest::Raise { mutation: mutation.clone() };
            // Without a shim there is nothing to be late for; what follows finds that out.
            if let Ok(ShimReply::Error(error)) = shim_client::ask(&self.dir(sandbox), &request).await {
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn fence(&self, sandbox: &SandboxId) -> Result<crate::fence::LockedFence> {
        self.shared
            .fences
            .lock(sandbox)
            .map_err(|source| ProviderError::Unavailable { what: "the fence file".to_owned(), source })
    }

    /// Has the shim do something to the instance.
    async fn ask_shim(&self, mutation: &Mutation, sandbox: &SandboxId, request: ShimRequest) -> Result<ShimReply> {
        within(mutation.budget_ms, "the shim", async {
            self.admit(mutation, sandbox).await?;
            let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
            match shim_client::ask(&self.dir(sandbox), &request).await {
                Ok(ShimReply::Error(error)) => Err(error.into()),
                Ok(reply) => Ok(reply),
                Err(error) => Err(self.why_unreachable(&instance, error).await),
            }
        })
        .await
    }
}

/// Gives up after a while, and says so.
async fn within<T>(budget_ms: u64, what: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(Duration::from_millis(budget_ms), work).await {
        Ok(result) => result,
        Err(_) => Err(ProviderError::TimedOut { what, after_ms: budget_ms }),
    }
}

fn unavailable(what: &Path) -> impl FnOnce(io::Error) -> ProviderError {
    let what = what.display().to_string();
    move |source| ProviderError::Unavailable { what, source }
}

impl From<RuntimeError> for ProviderError {
    fn from(error: RuntimeError) -> Self {
        Self::Invalid { what: error.to_string(), hint: error.hint().to_owned() }
    }
}

fn unexpected(who: &str) -> ProviderError {
    ProviderError::Failed { what: format!("{who} answered something else than was asked") }
}

/// Why a running instance cannot be copied.
const CANNOT_HOLD: &str = "files are copied, and without a v2 cgroup nothing can be made to stand still";

#[async_trait]
impl Provider for LocalProvider {
    fn name(&self) -> &'static str {
        "local"
    }

    fn memory_left(&self) -> Option<f64> {
        limits::memory_left()
    }

    fn short_of_room(&self) -> Option<String> {
        let reserve = self.disk_reserve().filter(|reserve| reserve.free_bytes < reserve.bytes)?;
        let (left, kept) = (reserve.free_bytes >> 20, reserve.bytes >> 20);
        Some(format!("{left} MiB are left of it, and {kept} MiB are to be kept free"))
    }

    fn saves_memory_by(&self) -> Option<String> {
        self.criu_known().ok().map(|criu| criu.to_string())
    }

    fn capabilities(&self) -> Capabilities {
        let all = self.capabilities_with_egress();
        match self.criu_known() {
            Ok(_) => all.with(Capability::SaveMemory),
            Err(why) => all.without(Capability::SaveMemory, why),
        }
    }

    async fn look_again(&self) -> Capabilities {
        let looked = self.blocking(|this| {
            // What it says is known afterwards.
            let _ = this.criu();
            Ok(this.capabilities())
        });
        // A worker that ended has shown nothing new.
        looked.await.unwrap_or_else(|_| self.capabilities())
    }

    fn looks_again_after(&self) -> Option<Duration> {
        self.criu_again_after()
    }

    async fn create(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        self.create_instance(mutation, sandbox, owner, spec, Origin::Image).await
    }

    async fn observe(&self, instance: &InstanceRef) -> Result<Observation> {
        self.look(instance).await
    }

    async fn list(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page> {
        self.list_instances(owner, page).await
    }

    async fn wait_end(&self, instance: &InstanceRef) -> Result<Ended> {
        self.wait_for_end(instance).await
    }

    async fn destroy(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.destroy_instance(mutation, sandbox).await
    }

    async fn extend(&self, mutation: &Mutation, sandbox: &SandboxId, change: DeadlineChange) -> Result<Deadline> {
        let request = ShimRequest::Extend { mutation: mutation.clone(), change };
        match self.ask_shim(mutation, sandbox, request).await {
            Ok(ShimReply::Deadline(deadline)) => Ok(deadline),
            Ok(_) => Err(unexpected("the shim")),
            Err(error) => Err(look::expired_if_so(error)),
        }
    }

    async fn set_limits(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        change: &ResourceLimits,
    ) -> Result<ResourceLimits> {
        self.change_limits(mutation, sandbox, change).await
    }

    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.require(Capability::Freeze)?;
        let request = ShimRequest::Freeze { mutation: mutation.clone() };
        self.ask_shim(mutation, sandbox, request).await.map(|_| ())
    }

    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        self.require(Capability::Freeze)?;
        let request = ShimRequest::Thaw { mutation: mutation.clone() };
        self.ask_shim(mutation, sandbox, request).await.map(|_| ())
    }

    async fn set_network(&self, mutation: &Mutation, sandbox: &SandboxId, connected: bool) -> Result<()> {
        let request = ShimRequest::Connect { mutation: mutation.clone(), connected };
        self.ask_shim(mutation, sandbox, request).await.map(|_| ())
    }

    async fn save(&self, mutation: &Mutation, sandbox: &SandboxId, request: &SaveRequest) -> Result<Snapshot> {
        self.save_instance(mutation, sandbox, request).await
    }

    async fn snapshot(&self, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
        self.look_at_snapshot(snapshot).await
    }

    async fn snapshots(&self, owner: &OwnerMark, page: PageRequest) -> Result<Page<SnapshotSeen>> {
        self.list_snapshots(owner, page).await
    }

    async fn remove_snapshot(&self, mutation: &Mutation, sandbox: &SandboxId, snapshot: &SnapshotId) -> Result<()> {
        self.forget_snapshot(mutation, sandbox, snapshot).await
    }

    async fn export_snapshot(&self, snapshot: &SnapshotId) -> Result<ByteReader> {
        self.export_to_stream(snapshot).await
    }

    async fn import_snapshot(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        snapshot: &SnapshotId,
        file: ByteReader,
    ) -> Result<Snapshot> {
        self.import_from_stream(mutation, sandbox, owner, snapshot, file).await
    }

    async fn disk_usage(&self, instance: &InstanceRef) -> Result<DiskUsage> {
        self.count_disk(instance).await
    }

    async fn restore(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        snapshot: &SnapshotId,
    ) -> Result<Observation> {
        self.create_instance(mutation, sandbox, owner, spec, Origin::Snapshot(snapshot.clone())).await
    }

    async fn fork(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        source: &InstanceRef,
    ) -> Result<Observation> {
        self.require(Capability::Fork)?;
        self.create_instance(mutation, sandbox, owner, spec, Origin::Living(source.clone())).await
    }

    async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus> {
        self.start_execution(mutation, sandbox, execution, spec).await
    }

    fn probe_spec(&self, nonce: &str) -> ExecSpec {
        probe::spec(nonce)
    }

    fn ask_spec(&self, body: &str) -> ExecSpec {
        requests::spec(body)
    }

    async fn identity(&self, instance: &InstanceRef) -> Result<Identity> {
        self.read_identity(instance).await
    }

    async fn whereabouts(&self, instance: &InstanceRef) -> Result<Whereabouts> {
        self.find_parts(instance).await
    }

    async fn processes(&self, instance: &InstanceRef) -> Result<Vec<ProcessSeen>> {
        self.see_processes(instance).await
    }

    async fn full_places(&self, instance: &InstanceRef) -> Result<Vec<FullPlace>> {
        self.see_full_places(instance).await
    }

    async fn log_tail(&self, instance: &InstanceRef, bytes_max: u64) -> Result<Vec<LogPart>> {
        self.read_logs(instance, bytes_max).await
    }

    async fn memory_obstacles(&self, instance: &InstanceRef) -> Result<Vec<Obstacle>> {
        self.find_obstacles(instance).await
    }

    async fn execution(&self, instance: &InstanceRef, execution: &ExecutionId) -> Result<ExecStatus> {
        self.execution_status(instance, execution).await
    }

    async fn executions(&self, instance: &InstanceRef) -> Result<Vec<ExecStatus>> {
        self.list_executions(instance).await
    }

    async fn attach(
        &self,
        instance: &InstanceRef,
        execution: &ExecutionId,
        offset: u64,
        follow: bool,
    ) -> Result<Box<dyn OutputStream>> {
        self.attach_output(instance, execution, offset, follow).await
    }

    async fn write_stdin(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        offset: u64,
        data: &[u8],
    ) -> Result<u64> {
        self.give_stdin(mutation, sandbox, execution, offset, data, false).await
    }

    async fn close_stdin(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<()> {
        self.give_stdin(mutation, sandbox, execution, 0, &[], true).await.map(|_| ())
    }

    async fn signal(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        signal: i32,
    ) -> Result<()> {
        self.signal_execution(mutation, sandbox, execution, signal).await
    }

    async fn resize(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        size: TtySize,
    ) -> Result<()> {
        self.resize_terminal(mutation, sandbox, execution, size).await
    }

    async fn cancel(&self, mutation: &Mutation, sandbox: &SandboxId, execution: &ExecutionId) -> Result<ExecStatus> {
        self.cancel_execution(mutation, sandbox, execution).await
    }

    async fn file_read(
        &self,
        instance: &InstanceRef,
        path: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<ByteReader> {
        self.read_file(instance, path, offset, length).await
    }

    async fn file_write(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        file: &FileWrite,
        content: ByteReader,
    ) -> Result<FileStat> {
        self.write_file(mutation, sandbox, file, content).await
    }

    async fn file_stat(&self, instance: &InstanceRef, path: &str) -> Result<FileStat> {
        self.stat_file(instance, path).await
    }

    async fn file_list(&self, instance: &InstanceRef, path: &str, depth: u32) -> Result<DirListing> {
        self.list_files(instance, path, depth).await
    }

    async fn file_mkdir(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.make_directory(mutation, sandbox, path).await
    }

    async fn file_move(&self, mutation: &Mutation, sandbox: &SandboxId, from: &str, to: &str) -> Result<()> {
        self.move_file(mutation, sandbox, from, to).await
    }

    async fn file_remove(&self, mutation: &Mutation, sandbox: &SandboxId, path: &str) -> Result<()> {
        self.remove_file(mutation, sandbox, path).await
    }

    async fn file_watch(&self, instance: &InstanceRef, path: &str, recursive: bool) -> Result<Box<dyn WatchStream>> {
        self.watch_files(instance, path, recursive).await
    }

    async fn archive_get(&self, instance: &InstanceRef, path: &str) -> Result<ByteReader> {
        self.get_archive(instance, path).await
    }

    async fn archive_put(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        path: &str,
        bounds: ArchiveBounds,
        archive: ByteReader,
    ) -> Result<Unpacked> {
        self.put_archive(mutation, sandbox, path, bounds, archive).await
    }

    async fn dial(&self, instance: &InstanceRef, port: u16) -> Result<Box<dyn Dialled>> {
        self.dial_port(instance, port).await
    }

    async fn audit(&self) -> Result<Vec<Finding>> {
        self.find_left().await
    }

    async fn sweep(&self, findings: &[Finding]) -> Result<Vec<Swept>> {
        self.sweep_left(findings).await
    }

    async fn requests(&self, instance: &InstanceRef) -> Result<Box<dyn RequestStream>> {
        self.hear_requests(instance).await
    }

    async fn answer_request(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        request: &RequestId,
        answer: &str,
    ) -> Result<()> {
        self.give_answer(mutation, sandbox, request, answer).await
    }
}
