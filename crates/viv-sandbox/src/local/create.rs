//! Making an instance.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use viv_core::{OwnerMark, SandboxId, SnapshotId};
use viv_provider::{
    Capability, Image, InstanceRef, InstanceSpec, InstanceState, Mutation, Observation, ProviderError, Recall,
};

use super::chores::Chore;
use super::limits::check_here;
use super::look::LOOK_EVERY;
use super::memory::Memory;
use super::save::{outdated, store_failed};
use super::{LocalProvider, Result, unavailable, within};
use crate::durable;
use crate::fence::Fences;
use crate::layout::{DataDir, InstanceDir, InstanceRecord, Made};
use crate::process;
use crate::rootfs::IdRange;
use crate::runtime::{Kernel, PATH};
use crate::shim::proto::{LINE_BYTES_MAX, Started};
use crate::store::active::Start;
use crate::store::layer::{LayerForm, LayerId};
use crate::store::plan::{Base, MadeOf};
use crate::store::snapshot::HeldSnapshot;
use crate::wait::readable_within;

/// What stands before the name of a folder that is being filled.
pub(super) const NEW: &str = ".new-";

/// Longest record; environment and labels are what can make it long.
const RECORD_BYTES_MAX: usize = 512 << 10;

/// The shim keeps to the budget by itself; this much later it is given up on.
const GRACE: Duration = Duration::from_secs(2);

/// What came of claiming the instance's folder.
enum Claim {
    /// It is ours, with the lock that the shim will hold.
    New { record: Box<InstanceRecord>, lock: File, clone_of: Option<LayerId> },
    /// The same operation was here before.
    Repeated(Box<InstanceRecord>),
}

/// What a new instance is made from.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    /// The image that its spec names.
    Image,
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A living instance.
    Living(InstanceRef),
}

/// Who asked for what.
#[derive(Debug, Clone)]
struct Order {
    mutation: Mutation,
    instance: InstanceRef,
    owner: OwnerMark,
    spec: InstanceSpec,
    origin: Origin,
}

impl LocalProvider {
    pub(super) async fn create_instance(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
        origin: Origin,
    ) -> Result<Observation> {
        self.find_runtime().await?;
        self.check_network(spec).await?;
        self.check(spec)?;
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        let order = Order {
            mutation: mutation.clone(),
            instance: instance.clone(),
            owner: owner.clone(),
            spec: InstanceSpec { limits: self.limits_for(&spec.limits), ..spec.clone() },
            origin,
        };
        // Not bound by the budget from here on: a claim is always followed by a shim or by its removal.
        let repeated = self.blocking(move |this| this.carry_out(&order)).await?;
        match repeated {
            None => self.look(&instance).await,
            Some(record) => within(mutation.budget_ms, "the shim", self.await_created(&record)).await,
        }
    }

    /// Makes the instance; answers with the record of one that the same operation made before.
    ///
    /// With memory if there is one and that is wanted. When it cannot be restored, nothing is left of the attempt, and
    /// the instance begins with the files of the same moment, unless memory is required.
    fn carry_out(&self, order: &Order) -> Result<Option<Box<InstanceRecord>>> {
        let store = &self.shared.store;
        if let Origin::Snapshot(id) = &order.origin {
            // Not for those who are refused anyway: it may take long. Before the memory is looked for, which does not go
            // with layers that were merged.
            self.fence(&order.instance.sandbox)?.admit_create(&order.mutation)?;
            if store.bound_depth(id, order.spec.limits.disk_bytes).map_err(store_failed)? {
                self.later(Chore::Collect);
            }
        }
        let recall = &order.spec.recall;
        match recall {
            Recall::GivenUp { why } => {
                self.note_not_restored(&order.origin, why);
                return self.carry_out_with(order, &Memory::None);
            }
            Recall::Never => return self.carry_out_with(order, &Memory::None),
            Recall::IfPossible | Recall::Required => {}
        }
        let memory = self.memory_for(&order.origin, &order.spec.network.egress)?;
        match (recall, &memory) {
            (Recall::Required, Memory::None) => return Err(not_remembered("it was saved without it")),
            (Recall::Required, Memory::Left(why)) => {
                self.note_not_restored(&order.origin, why);
                return Err(not_remembered(why));
            }
            (Recall::IfPossible | Recall::Never | Recall::GivenUp { .. }, _)
            | (Recall::Required, Memory::Restored(_)) => {}
        }
        match (self.carry_out_with(order, &memory), memory) {
            (Err(error), Memory::Restored(_)) => {
                let why = crate::shim::chain(&error);
                // Who is late, or whom somebody else came before, says nothing about the memory.
                let refused = matches!(
                    error,
                    ProviderError::Fenced { .. }
                        | ProviderError::StaleGeneration { .. }
                        | ProviderError::Conflict { .. }
                );
                if !refused {
                    self.note_not_restored(&order.origin, &why);
                }
                match recall {
                    Recall::Required => Err(error),
                    Recall::IfPossible | Recall::Never | Recall::GivenUp { .. } => {
                        self.carry_out_with(order, &Memory::Left(why))
                    }
                }
            }
            (outcome, _) => outcome,
        }
    }

    fn carry_out_with(&self, order: &Order, memory: &Memory) -> Result<Option<Box<InstanceRecord>>> {
        let store = &self.shared.store;
        // Until there is a record that refers to them, this keeps the layers.
        let layers = store.lock_shared().map_err(unavailable(Path::new("the layer store")))?;
        match self.claim(order, memory)? {
            Claim::Repeated(record) => Ok(Some(record)),
            Claim::New { record, lock, clone_of } => {
                let made = self.make_active(&record, &order.origin, clone_of.as_ref()).and_then(|()| {
                    match record.made.as_ref().and_then(|made| made.of.saved.first()) {
                        Some(layer) if record.memory.is_some() && clone_of.is_none() => {
                            store.keep_numbers(&record.instance, layer).map_err(store_failed)
                        }
                        Some(_) | None => Ok(()),
                    }
                });
                if let Err(error) = made {
                    drop(lock);
                    self.clear_failed(&record)?;
                    return Err(error);
                }
                drop(layers);
                self.start_shim(&record, lock).map(|()| None)
            }
        }
    }

    fn plan_record(&self, order: &Order, made: Made, ids: IdRange, memory: &Memory) -> Result<InstanceRecord> {
        let (config, found) = (&self.shared.config, self.runtime()?);
        let mut spec = order.spec.clone();
        for (name, value) in &made.of.env {
            spec.env.entry(name.clone()).or_insert_with(|| value.clone());
        }
        let mut lacks = self.unprobed_capabilities().lacks();
        let budget_ms = order.mutation.budget_ms;
        // There has to be time left for the files alone.
        let (restored, create_budget_ms) = match memory {
            Memory::Restored(restored) if order.spec.recall == Recall::Required => (Some(restored), budget_ms),
            Memory::Restored(restored) => (Some(restored), budget_ms / 2),
            Memory::None | Memory::Left(_) => (None, budget_ms),
        };
        if let Memory::Left(why) = memory {
            lacks.insert(Capability::SaveMemory, format!("its memory was not restored: {why}"));
        }
        let record = InstanceRecord {
            instance: order.instance.clone(),
            owner: order.owner.clone(),
            operation: order.mutation.operation.clone(),
            token: order.mutation.token,
            spec,
            boot_id: process::boot_id().map_err(unavailable(Path::new("/proc")))?,
            runtime: found.runtime.clone(),
            kernel: found.kernel,
            hardening: config.hardening,
            lacks,
            ids,
            made: Some(made),
            agent: restored.map_or_else(|| self.shared.agent.clone(), |restored| restored.agent.clone()),
            cgroup_prefix: config.cgroup_prefix.clone(),
            cgroup_layout: Some(self.shared.layout.clone()),
            create_budget_ms,
            memory: restored.map(|restored| restored.plan.clone()),
        };
        match serde_json::to_vec(&record) {
            Ok(text) if text.len() <= RECORD_BYTES_MAX => Ok(record),
            Ok(_) | Err(_) => {
                let what = format!("environment and labels together are longer than {RECORD_BYTES_MAX} bytes");
                Err(invalid(what, "put large values into files"))
            }
        }
    }

    /// What it will be made of: the layers below, the one that its writable layer starts with, and a snapshot that is
    /// not removed before this is dropped.
    fn plan_made(&self, order: &Order) -> Result<(Made, Option<LayerId>, Option<HeldSnapshot>)> {
        let store = &self.shared.store;
        let mut start_with = None;
        let (of, parent, held) = match &order.origin {
            Origin::Image => (self.image(&order.spec.image)?, None, None),
            Origin::Snapshot(id) => {
                let held = store.hold_snapshot(id).map_err(unavailable(Path::new("the snapshot's record")))?;
                let held = held.ok_or_else(|| ProviderError::NotFound { what: id.to_string() })?;
                let mut of = held.record.of.clone();
                // Also the one that will be cloned, and so is not below any more.
                store.check_saved(&of).map_err(store_failed)?;
                store.need_layers(&of).map_err(store_failed)?;
                if store.clones_on_restore(&of) {
                    start_with = Some(of.saved.remove(0));
                }
                (of, Some(id.clone()), Some(held))
            }
            Origin::Living(source) => {
                // Whether there was a later one is not asked: that would take a second fence.
                let record = self.read_record(&source.sandbox)?.ok_or(ProviderError::Absent)?;
                if record.instance != *source {
                    let (asked, current) = (source.generation, record.generation());
                    return Err(ProviderError::StaleGeneration { asked, current });
                }
                let made = record.made.ok_or_else(outdated)?;
                (made.of, made.parent, None)
            }
        };
        let form = store.form_for(order.spec.limits.disk_bytes);
        let writable = store.writable(&order.instance, form);
        let plan = store.root_plan(&of, &self.shared.host, writable).map_err(store_failed)?;
        let limit_bytes = match (form, order.spec.limits.disk_bytes) {
            (LayerForm::Folder, Some(limit)) => Some(store.left_of_limit(&of, limit).map_err(store_failed)?),
            (LayerForm::Folder | LayerForm::Disk, _) => None,
        };
        let fresh = matches!(order.origin, Origin::Image);
        Ok((Made { of, plan, parent, fresh, limit_bytes }, start_with, held))
    }

    fn image(&self, image: &Image) -> Result<MadeOf> {
        match image {
            Image::Host => Ok(MadeOf::base(Base::Host)),
            Image::Directory { path } => Ok(MadeOf::base(Base::Directory { path: directory(path)? })),
            Image::Named { name } => self.shared.store.made_of_image(name).map_err(ProviderError::from),
        }
    }

    /// The writable layer. What it starts with stands still for as long as that has to be copied.
    fn make_active(&self, record: &InstanceRecord, origin: &Origin, clone_of: Option<&LayerId>) -> Result<()> {
        let store = &self.shared.store;
        let of = &record.made.as_ref().ok_or_else(outdated)?.of;
        let limit_bytes = record.spec.limits.disk_bytes;
        let make =
            |start: &Start<'_>| store.make_active(&record.instance, start, of, limit_bytes).map_err(store_failed);
        match (origin, clone_of) {
            (Origin::Living(source), _) => self
                .with_living(source, record.create_budget_ms, |folder| make(&Start::Living(folder)))
                .map(|((), _)| ()),
            (Origin::Image | Origin::Snapshot(_), Some(layer)) => make(&Start::Layer(layer)),
            (Origin::Image | Origin::Snapshot(_), None) => make(&Start::Empty),
        }
    }

    /// Refuses what cannot be kept rather than forgetting it (S5).
    fn check(&self, spec: &InstanceSpec) -> Result<()> {
        self.require_limits(&spec.limits)?;
        check_here(&self.limits_for(&spec.limits))?;
        if !spec.workdir.starts_with('/')
            || spec.workdir.contains('\0')
            || spec.workdir.split('/').any(|part| part == "..")
        {
            let what = format!("the working directory {:?} is not an absolute path without ..", spec.workdir);
            return Err(invalid(what, "name one like /workspace"));
        }
        if spec.packages {
            self.check_packages()?;
        }
        if spec.lifetime_ms == 0 {
            return Err(invalid("a lifetime of 0 ms is over before it begins".to_owned(), "name at least 1"));
        }
        Ok(())
    }

    /// Refuses what would not work: files change hands between ids, and the agent has to be guarded in other ways.
    fn check_packages(&self) -> Result<()> {
        if self.shared.config.ids.count() == 1 {
            let what = "there is one id only, so no file can belong to anybody else".to_owned();
            return Err(invalid(what, "have root give you subordinate ids (/etc/subuid, /etc/subgid)"));
        }
        match self.runtime()?.kernel {
            Kernel::Host => Ok(()),
            Kernel::Gvisor => {
                let what = "this runtime's sandboxes install no packages: how the agent is kept apart there takes ids";
                Err(invalid(what.to_owned(), "use the embedded runtime or runc, or an image that has the packages"))
            }
        }
    }

    /// Claims the folder under the fence's lock. The intent is on disk before anything exists.
    fn claim(&self, order: &Order, memory: &Memory) -> Result<Claim> {
        let (mutation, sandbox) = (&order.mutation, &order.instance.sandbox);
        let mut fence = self.fence(sandbox)?;
        fence.admit_create(mutation)?;
        if let Some(found) = self.read_record(sandbox)? {
            fence.raise(mutation)?;
            return if found.instance == order.instance && found.operation == mutation.operation {
                Ok(Claim::Repeated(Box::new(found)))
            } else {
                Err(ProviderError::Conflict { what: format!("{} is still there", found.instance) })
            };
        }
        let (made, clone_of, _held) = self.plan_made(order)?;
        let ids = &self.shared.ids;
        let range = match memory {
            Memory::Restored(restored) => self.take_remembered(sandbox, restored.plan.ids)?,
            Memory::None | Memory::Left(_) => ids.take(sandbox).map_err(unavailable(&self.shared.data.ids()))?,
        };
        let range = range.ok_or_else(no_ids)?;
        let claimed = (|| {
            let record = self.plan_record(order, made, range, memory)?;
            fence.begin(mutation)?;
            let lock = self.make_folder(&record).map_err(unavailable(self.dir(sandbox).path()))?;
            Ok(Claim::New { record: Box::new(record), lock, clone_of })
        })();
        if claimed.is_err() {
            ids.give_back(sandbox, range);
        }
        claimed
    }

    /// Fills a folder and puts it in place in one step, locked.
    fn make_folder(&self, record: &InstanceRecord) -> io::Result<File> {
        let data = &self.shared.data;
        let new = InstanceDir::new(data.instances().join(format!("{NEW}{}", record.sandbox())));
        if new.path().exists() {
            // Left by a process that died here; the fence's lock says that it is gone.
            fs::remove_dir_all(new.path())?;
        }
        DirBuilder::new().mode(0o700).create(new.path())?;
        durable::replace_json_unsynced(&new.record(), record)?;
        let lock = File::options().create_new(true).append(true).open(new.lock())?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(new.path(), data.instance(record.sandbox()).path())?;
        Ok(lock)
    }

    /// Starts the shim and answers when the instance runs. If it does not, nothing is left (J5).
    fn start_shim(&self, record: &InstanceRecord, lock: File) -> Result<()> {
        let dir = self.dir(record.sandbox());
        let outcome = self.run_shim(&dir, record, lock);
        match outcome {
            Ok(Started::Running) => Ok(()),
            Ok(Started::Failed { what }) => {
                self.clear_failed(record)?;
                Err(ProviderError::Failed { what })
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.clear_failed(record)?;
                Err(ProviderError::TimedOut { what: "the shim", after_ms: record.create_budget_ms })
            }
            Err(error) => {
                self.clear_failed(record)?;
                Err(ProviderError::Failed { what: format!("the shim could not be started: {error}") })
            }
        }
    }

    fn run_shim(&self, dir: &InstanceDir, record: &InstanceRecord, lock: File) -> io::Result<Started> {
        let log = File::options().create(true).append(true).open(dir.log())?;
        let mut child = Command::new(&self.shared.config.shim_exe)
            .arg(crate::shim::VERB)
            .arg(dir.path())
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::from(lock))
            .stdout(Stdio::piped())
            .stderr(Stdio::from(log))
            // Signals for the daemon's group are not for shims.
            .process_group(0)
            .spawn()?;
        let stdout = child.stdout.take().expect("piped");
        let patience = Duration::from_millis(record.create_budget_ms) + GRACE;
        let mut line = Vec::new();
        let mut stdout = BufReader::new(stdout);
        let answers = readable_within(stdout.get_ref(), patience)?;
        if !answers {
            let _ = child.kill();
        }
        // The first process hands over to the shim and ends, before the shim says how it went.
        child.wait()?;
        if !answers {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stdout.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            return Err(io::Error::other("it ended without a word"));
        }
        Ok(serde_json::from_slice(&line)?)
    }

    fn clear_failed(&self, record: &InstanceRecord) -> Result<()> {
        self.remove_instance(&record.instance, |_, _| Ok(()))
    }

    /// The same operation again: waits for what the first one started.
    async fn await_created(&self, record: &InstanceRecord) -> Result<Observation> {
        loop {
            let seen = self.look(&record.instance).await?;
            match &seen.state {
                InstanceState::Creating => tokio::time::sleep(LOOK_EVERY).await,
                InstanceState::Absent => return Err(ProviderError::Absent),
                InstanceState::Running
                | InstanceState::Frozen
                | InstanceState::Ending { .. }
                | InstanceState::Ended(_) => return Ok(seen),
            }
        }
    }
}

/// Folders that a process left while it filled them. They are filled under
/// the fence's lock, so whoever holds it sees only those that were left.
pub(super) fn remove_abandoned(data: &DataDir, fences: &Fences) {
    let Ok(entries) = fs::read_dir(data.instances()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(sandbox) = name.to_str().and_then(|name| name.strip_prefix(NEW)?.parse().ok()) else { continue };
        if let Ok(_locked) = fences.lock(&sandbox) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn not_remembered(why: &str) -> ProviderError {
    ProviderError::Failed { what: format!("its memory was not restored: {why}") }
}

fn no_ids() -> ProviderError {
    let what = "every range of ids that sandboxes may be mapped to is taken: destroy what is not needed".to_owned();
    ProviderError::Exhausted { limit: "ids", what }
}

fn directory(path: &str) -> Result<std::path::PathBuf> {
    let hint = "name the absolute path of a folder that holds a root filesystem";
    if !path.starts_with('/') {
        return Err(invalid(format!("{path:?} is not an absolute path"), hint));
    }
    match fs::canonicalize(path).and_then(|path| Ok((fs::metadata(&path)?, path))) {
        Ok((found, path)) if found.is_dir() => Ok(path),
        Ok(_) => Err(invalid(format!("{path:?} is not a folder"), hint)),
        Err(error) => Err(ProviderError::NotFound { what: format!("{path:?} ({error})") }),
    }
}

fn invalid(what: String, hint: &str) -> ProviderError {
    ProviderError::Invalid { what, hint: hint.to_owned() }
}
