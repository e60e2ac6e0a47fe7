//! Making an instance.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use viv_core::{OwnerMark, SandboxId};
use viv_provider::{
    Capability, Image, InstanceRef, InstanceSpec, InstanceState, Mutation, Observation, Provider, ProviderError,
};

use super::look::LOOK_EVERY;
use super::{LocalProvider, Result, unavailable, within};
use crate::durable;
use crate::fence::Fences;
use crate::layout::{DataDir, InstanceDir, InstanceRecord};
use crate::process;
use crate::rootfs::RootPlan;
use crate::shim::proto::{LINE_BYTES_MAX, Started};
use crate::wait::readable_within;

/// What stands before the name of a folder that is being filled.
const NEW: &str = ".new-";

/// What the kernel takes as a processor limit, in thousandths: it counts in hundredths of a second.
const CPU_MILLIS: std::ops::RangeInclusive<u64> = 10..=1_000_000;

/// Longest record; environment and labels are what can make it long.
const RECORD_BYTES_MAX: usize = 512 << 10;

/// The shim keeps to the budget by itself; this much later it is given up on.
const GRACE: Duration = Duration::from_secs(2);

/// What came of claiming the instance's folder.
enum Claim {
    /// It is ours, with the lock that the shim will hold.
    New(File),
    /// The same operation was here before.
    Repeated(Box<InstanceRecord>),
}

impl LocalProvider {
    pub(super) async fn create_instance(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        owner: &OwnerMark,
        spec: &InstanceSpec,
    ) -> Result<Observation> {
        let instance = InstanceRef { sandbox: sandbox.clone(), generation: mutation.generation };
        let record = {
            let (mutation, instance, owner, spec) = (mutation.clone(), instance.clone(), owner.clone(), spec.clone());
            self.blocking(move |this| this.plan_record(&mutation, instance, owner, spec)).await?
        };
        let (mutation_, budget_ms) = (mutation.clone(), mutation.budget_ms);
        // Not bound by the budget from here on: a claim is always followed by a shim or by its removal.
        let repeated = self
            .blocking(move |this| match this.claim(&mutation_, &record)? {
                Claim::New(lock) => this.start_shim(&record, lock).map(|()| None),
                Claim::Repeated(record) => Ok(Some(record)),
            })
            .await?;
        match repeated {
            None => self.look(&instance).await,
            Some(record) => within(budget_ms, "the shim", self.await_created(&record)).await,
        }
    }

    fn plan_record(
        &self,
        mutation: &Mutation,
        instance: InstanceRef,
        owner: OwnerMark,
        spec: InstanceSpec,
    ) -> Result<InstanceRecord> {
        self.check(&spec)?;
        let root = match &spec.image {
            Image::Host => self.shared.host.clone(),
            Image::Directory { path } => RootPlan { lowers: vec![directory(path)?], trees: Vec::new() },
            Image::Named { name } => return Err(ProviderError::NotFound { what: format!("image {name:?}") }),
        };
        let config = &self.shared.config;
        let record = InstanceRecord {
            instance,
            owner,
            operation: mutation.operation.clone(),
            token: mutation.token,
            spec,
            boot_id: process::boot_id().map_err(unavailable(Path::new("/proc")))?,
            runtime: config.runtime.clone(),
            ids: config.ids,
            root,
            agent: self.shared.agent.clone(),
            cgroup_prefix: config.cgroup_prefix.clone(),
            create_budget_ms: mutation.budget_ms,
        };
        match serde_json::to_vec(&record) {
            Ok(text) if text.len() <= RECORD_BYTES_MAX => Ok(record),
            Ok(_) | Err(_) => {
                let what = format!("environment and labels together are longer than {RECORD_BYTES_MAX} bytes");
                Err(invalid(what, "put large values into files"))
            }
        }
    }

    /// Refuses what cannot be kept rather than forgetting it (S5).
    fn check(&self, spec: &InstanceSpec) -> Result<()> {
        let limits = &spec.limits;
        let wanted = [
            (limits.cpu_millis, Capability::LimitCpu),
            (limits.memory_bytes, Capability::LimitMemory),
            (limits.processes, Capability::LimitProcesses),
            (limits.disk_bytes, Capability::LimitDisk),
        ];
        let capabilities = self.capabilities();
        for (limit, capability) in wanted {
            if limit.is_some() && !capabilities.can(capability) {
                let why = capabilities.missing.get(&capability).cloned().unwrap_or_default();
                return Err(ProviderError::Unsupported { capability, why });
            }
            if limit == Some(0) {
                return Err(invalid(
                    format!("a limit of 0 ({capability:?}) leaves nothing to run with"),
                    "leave it out",
                ));
            }
        }
        if limits.cpu_millis.is_some_and(|millis| !CPU_MILLIS.contains(&millis)) {
            let what = format!(
                "a processor limit must be between {} and {} thousandths",
                CPU_MILLIS.start(),
                CPU_MILLIS.end()
            );
            return Err(invalid(what, "500 is half a processor"));
        }
        if !spec.workdir.starts_with('/')
            || spec.workdir.contains('\0')
            || spec.workdir.split('/').any(|part| part == "..")
        {
            let what = format!("the working directory {:?} is not an absolute path without ..", spec.workdir);
            return Err(invalid(what, "name one like /workspace"));
        }
        if spec.lifetime_ms == 0 {
            return Err(invalid("a lifetime of 0 ms is over before it begins".to_owned(), "name at least 1"));
        }
        Ok(())
    }

    /// Claims the folder under the fence's lock. The intent is on disk before anything exists.
    fn claim(&self, mutation: &Mutation, record: &InstanceRecord) -> Result<Claim> {
        let mut fence = self.fence(record.sandbox())?;
        fence.admit_create(mutation)?;
        if let Some(found) = self.read_record(record.sandbox())? {
            fence.raise(mutation)?;
            return if found.instance == record.instance && found.operation == record.operation {
                Ok(Claim::Repeated(Box::new(found)))
            } else {
                Err(ProviderError::Conflict { what: format!("{} is still there", found.instance) })
            };
        }
        fence.begin(mutation)?;
        self.make_folder(record).map(Claim::New).map_err(unavailable(self.dir(record.sandbox()).path()))
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
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
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

fn directory(path: &str) -> Result<std::path::PathBuf> {
    let hint = "name the absolute path of a folder that holds a root filesystem";
    if !path.starts_with('/') {
        return Err(invalid(format!("{path:?} is not an absolute path"), hint));
    }
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(path.into()),
        Ok(_) => Err(invalid(format!("{path:?} is not a folder"), hint)),
        Err(error) => Err(ProviderError::NotFound { what: format!("{path:?} ({error})") }),
    }
}

fn invalid(what: String, hint: &str) -> ProviderError {
    ProviderError::Invalid { what, hint: hint.to_owned() }
}
