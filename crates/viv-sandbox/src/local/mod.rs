//! The provider on this machine.
//!
//! One file per group of verbs. Any number of processes may use one data
//! folder at a time: what they must agree on is in the fence files, in the
//! instance folders and in the shims.

mod agent_client;
mod create;
mod destroy;
mod execute;
mod files;
mod images;
mod look;
mod output;
mod save;
mod shim_client;
mod socket;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use viv_core::exec::{ExecSpec, ExecStatus, TtySize};
use viv_core::file::{ArchiveBounds, DirListing, FileStat, Unpacked};
use viv_core::{ExecutionId, Generation, OwnerMark, SandboxId, SnapshotId};
use viv_provider::{
    ByteReader, Capabilities, Capability, Deadline, DeadlineChange, Dialled, DiskUsage, Ended, FileWrite, InstanceRef,
    InstanceSpec, Mutation, Observation, OutputStream, Page, PageRequest, Provider, ProviderError, SaveRequest,
    Snapshot, SnapshotSeen, WatchStream,
};

use create::Origin;

use crate::agent_image;
use crate::cgroup::{Controller, InstanceCgroups, Layout};
use crate::fence::{Fences, Raised};
use crate::layout::{DataDir, InstanceDir, InstanceRecord};
use crate::rootfs::{HostBase, IdRange};
use crate::runtime::Runtime;
use crate::shim::proto::{ShimReply, ShimRequest};
use crate::store::tidy::Tidied;
use crate::store::{Store, StoreConfig};
use crate::trash;

type Result<T> = std::result::Result<T, ProviderError>;

/// How long somebody else who tidies is waited for. Gigabytes are hashed in seconds.
const TIDY_WITHIN: Duration = Duration::from_secs(60);

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
    /// The ids of the host that sandboxes are mapped to.
    pub ids: IdRange,
    /// How layers are kept.
    pub store: StoreConfig,
}

impl LocalConfig {
    /// What ships: everything in one folder, containers by the embedded runtime.
    pub fn new(data_dir: PathBuf, shim_exe: PathBuf) -> Self {
        Self {
            data_dir,
            shim_exe,
            runtime: Runtime::Embedded,
            cgroup_prefix: "vivarium".to_owned(),
            // High enough that no distribution hands it out, on a boundary that is easy to read.
            ids: IdRange { base: 0x2000_0000, count: IdRange::COUNT },
            store: StoreConfig::default(),
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
    layout: Layout,
    agent: PathBuf,
    host: HostBase,
    store: Store,
    tidying: AtomicBool,
}

impl LocalProvider {
    /// Opens a data folder, making it if need be. Blocks for some milliseconds.
    pub fn open(config: LocalConfig) -> std::result::Result<Self, OpenError> {
        let name = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\0', '\n']);
        if !config.cgroup_prefix.split('/').all(name) {
            return Err(OpenError::CgroupPrefix(config.cgroup_prefix));
        }
        let path = config.data_dir.clone();
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
        let agent = agent_image::install(&data.agent())?;
        let host = HostBase::open(&data.host())?;
        let store = Store::open(&data, config.store)?;
        let layout = Layout::detect()?;
        create::remove_abandoned(&data, &fences);
        let this = Self {
            shared: Arc::new(Shared {
                config,
                data,
                fences,
                layout,
                agent,
                host,
                store,
                tidying: AtomicBool::new(false),
            }),
        };
        this.remove_unreadable();
        // Taking apart what somebody left may take long, and whoever opens a folder wants something else.
        if this.shared.store.has_trash() || fs::read_dir(this.shared.data.trash())?.next().is_some() {
            this.tidy_later();
        }
        Ok(this)
    }

    /// Does what can wait: hashes what was saved, shortens chains of layers, takes away what nothing refers to. Blocks.
    pub fn tidy(&self) -> Tidied {
        self.tidy_within(TIDY_WITHIN)
    }

    fn tidy_within(&self, within: Duration) -> Tidied {
        trash::empty(&self.shared.data.trash(), viv_layer::remove);
        self.shared.store.tidy(within)
    }

    /// The same in a thread of its own, one at a time.
    fn tidy_later(&self) {
        if self.shared.tidying.swap(true, Ordering::AcqRel) {
            return;
        }
        let this = self.clone();
        let started = std::thread::Builder::new().name("viv-tidy".to_owned()).spawn(move || {
            let _done = Done(&this);
            // What goes wrong is found again by the next one, or by a check.
            let _ = this.tidy_within(Duration::ZERO);
        });
        if started.is_err() {
            drop(Done(self));
        }
    }

    fn dir(&self, sandbox: &SandboxId) -> InstanceDir {
        self.shared.data.instance(sandbox)
    }

    fn cgroups(&self, record: &InstanceRecord) -> InstanceCgroups {
        InstanceCgroups::new(self.shared.layout.clone(), record.cgroup())
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

/// Says that nobody tidies any more, however that ended.
struct Done<'a>(&'a LocalProvider);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.shared.tidying.store(false, Ordering::Release);
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

fn unexpected(who: &str) -> ProviderError {
    ProviderError::Failed { what: format!("{who} answered something else than was asked") }
}

/// Why a running instance cannot be copied.
const CANNOT_HOLD: &str =
    "the layer store copies, and without a cgroup v2 hierarchy nothing can be made to stand still";

fn unsupported<T>(capability: Capability, why: &str) -> Result<T> {
    Err(ProviderError::Unsupported { capability, why: why.to_owned() })
}

#[async_trait]
impl Provider for LocalProvider {
    fn name(&self) -> &'static str {
        "local"
    }

    fn capabilities(&self) -> Capabilities {
        use Capability as C;
        let mut all = Capabilities::default();
        for capability in [C::Extend, C::HardDeadline, C::Tty, C::FileWatch, C::Ports, C::EndPushed, C::Usage] {
            all = all.with(capability);
        }
        let store = &self.shared.store;
        all = all.with(C::SaveStopped).with(C::Restore).without(C::SaveMemory, "memory is not saved yet");
        for capability in [C::SaveLive, C::Fork] {
            all = match self.shared.layout.v2 {
                Some(_) => all.with(capability),
                None => all.without(capability, CANNOT_HOLD),
            };
        }
        all = match store.driver.why_no_limit() {
            None => all.with(C::LimitDisk),
            Some(why) => all.without(C::LimitDisk, why),
        };
        for capability in [C::Freeze, C::ProvenKill] {
            all = match self.shared.layout.v2 {
                Some(_) => all.with(capability),
                None => all.without(capability, "no cgroup v2 hierarchy is mounted"),
            };
        }
        for (capability, controller) in [
            (C::LimitCpu, Controller::Cpu),
            (C::LimitMemory, Controller::Memory),
            (C::LimitProcesses, Controller::Pids),
        ] {
            all = if self.shared.layout.has(controller) {
                all.with(capability)
            } else {
                all.without(capability, format!("the {} cgroup controller is not available", controller.name()))
            };
        }
        all
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

    async fn freeze(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        if self.shared.layout.v2.is_none() {
            return unsupported(Capability::Freeze, "no cgroup v2 hierarchy is mounted");
        }
        let request = ShimRequest::Freeze { mutation: mutation.clone() };
        self.ask_shim(mutation, sandbox, request).await.map(|_| ())
    }

    async fn thaw(&self, mutation: &Mutation, sandbox: &SandboxId) -> Result<()> {
        if self.shared.layout.v2.is_none() {
            return unsupported(Capability::Freeze, "no cgroup v2 hierarchy is mounted");
        }
        let request = ShimRequest::Thaw { mutation: mutation.clone() };
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
}
