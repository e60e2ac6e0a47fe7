//! The data folder: what lies where.
//!
//! ```text
//!   <data>/
//!     fences/<sandbox>.json        outlives instances (L15)
//!     instances/<sandbox>/         one at a time: making this folder is the claim
//!       record.json                what was asked for
//!       shim.lock                  locked for as long as the shim or its guard lives
//!       shim.json  shim.sock  shim.log
//!       init.json  init.pid        the container's first process
//!       deadline.json  exit.json
//!       agent.log  restore.log     of one whose memory was restored
//!       run/                       /.vivarium/run inside: socket, executions, output
//!       memory/                    what was dumped of its memory, until it is a snapshot's
//!       sealed.json                which layer its writable one became, when it was saved
//!       resolv.conf                what names are resolved by inside, when there is a network
//!       bundle/  runtime/          OCI bundle, state of the OCI runtime
//!     memory/<snapshot>/           the memory of a snapshot that has it: see `checkpoint`
//!     ids/<first id>               whose range of the host's ids it is: see `ids`
//!     trash/                       instances on their way out
//!     agent/  host/
//!     space.fifo                   held by the shim that watches the disk: see `shim::space`
//!     layers/ …                    what they are made of: see `store`
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viv_core::{FencingToken, Generation, OperationId, OwnerMark, SandboxId, SnapshotId};
use viv_provider::{Capability, InstanceRef, InstanceSpec};

use crate::cgroup::Layout;
use crate::durable;
use crate::hardening::Hardening;
use crate::rootfs::{IdRange, RootPlan};
use crate::runtime::{Kernel, Runtime};
use crate::store::plan::MadeOf;

/// The data folder of a local provider.
#[derive(Debug, Clone)]
pub(crate) struct DataDir(PathBuf);

impl DataDir {
    pub(crate) fn new(root: PathBuf) -> Self {
        Self(root)
    }

    pub(crate) fn fences(&self) -> PathBuf {
        self.0.join("fences")
    }

    pub(crate) fn instances(&self) -> PathBuf {
        self.0.join("instances")
    }

    pub(crate) fn trash(&self) -> PathBuf {
        self.0.join("trash")
    }

    pub(crate) fn agent(&self) -> PathBuf {
        self.0.join("agent")
    }

    /// What is made of the machine's own userland.
    pub(crate) fn host(&self) -> PathBuf {
        self.0.join("host")
    }

    pub(crate) fn ids(&self) -> PathBuf {
        self.0.join("ids")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.0.join("images")
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.0.join("snapshots")
    }

    /// What is kept of the memory of a snapshot.
    pub(crate) fn memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    pub(crate) fn downloads(&self) -> PathBuf {
        self.0.join("downloads")
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.0.join("layers")
    }

    /// Held by whoever watches the disk: see `shim::space`.
    pub(crate) fn space_pipe(&self) -> PathBuf {
        self.0.join("space.fifo")
    }

    /// Room that is given back when there is none left. On the disk that layers are on.
    pub(crate) fn ballast(&self) -> PathBuf {
        self.layers().join("ballast")
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.0.join("pool.btrfs")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.0.join("store.json")
    }

    pub(crate) fn store_gate(&self) -> PathBuf {
        self.0.join("store.gate")
    }

    pub(crate) fn store_lock(&self) -> PathBuf {
        self.0.join("store.lock")
    }

    /// Held by whoever moves the seed of layers on: see `store::seed`.
    pub(crate) fn seed_lock(&self) -> PathBuf {
        self.0.join("seed.lock")
    }

    pub(crate) fn instance(&self, sandbox: &SandboxId) -> InstanceDir {
        InstanceDir(self.instances().join(sandbox.as_str()))
    }
}

/// The folder of one instance.
#[derive(Debug, Clone)]
pub(crate) struct InstanceDir(PathBuf);

macro_rules! paths {
    ($($name:ident = $file:literal),* $(,)?) => {
        $(pub(crate) fn $name(&self) -> PathBuf {
            self.0.join($file)
        })*
    };
}

impl InstanceDir {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    paths! {
        record = "record.json",
        lock = "shim.lock",
        identity = "shim.json",
        first = "init.json",
        first_pid = "init.pid",
        socket = "shim.sock",
        log = "shim.log",
        agent_log = "agent.log",
        deadline = "deadline.json",
        exit = "exit.json",
        reserve = ".reserve",
        run = "run",
        sealed = "sealed.json",
        saving = "save.lock",
        memory = "memory",
        dumping = "dumping",
        memory_live = "memory-live",
        unpacked = "unpacked",
        bundle = "bundle",
        runtime = "runtime",
        resolv_conf = "resolv.conf",
    }

    pub(crate) fn execution(&self, execution: &viv_core::ExecutionId) -> PathBuf {
        self.run().join(viv_agent::proto::EXECUTIONS).join(execution.as_str())
    }

    pub(crate) fn read_record(&self) -> io::Result<Option<InstanceRecord>> {
        durable::read_json(&self.record())
    }
}

/// The folder of one instance, held open: its files stay the same ones when the name is taken by another.
#[derive(Debug)]
pub(crate) struct PinnedDir {
    dir: InstanceDir,
    folder: File,
}

impl PinnedDir {
    /// `None` when there is none.
    pub(crate) fn open(dir: &InstanceDir) -> io::Result<Option<Self>> {
        match File::open(dir.path()) {
            Ok(folder) => {
                let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string());
                Ok(Some(Self { dir: InstanceDir(path), folder }))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn dir(&self) -> &InstanceDir {
        &self.dir
    }

    /// Whether the folder that has the name now is this one.
    pub(crate) fn is_still(&self, dir: &InstanceDir) -> bool {
        let same = || -> io::Result<bool> {
            let (this, named) = (self.folder.metadata()?, std::fs::metadata(dir.path())?);
            Ok((this.dev(), this.ino()) == (named.dev(), named.ino()))
        };
        same().unwrap_or(false)
    }

    /// Wall time of the last change in it.
    pub(crate) fn changed_at_ms(&self) -> u64 {
        let changed = self.folder.metadata().and_then(|found| found.modified());
        changed.map_or(0, |at| at.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64))
    }
}

/// What was asked for: all that the shim needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InstanceRecord {
    pub(crate) instance: InstanceRef,
    pub(crate) owner: OwnerMark,
    pub(crate) operation: OperationId,
    pub(crate) token: FencingToken,
    pub(crate) spec: InstanceSpec,
    pub(crate) boot_id: String,
    pub(crate) runtime: Runtime,
    #[serde(default)]
    pub(crate) kernel: Kernel,
    pub(crate) ids: IdRange,
    #[serde(default)]
    pub(crate) hardening: Hardening,
    /// What this machine could not give it.
    #[serde(default)]
    pub(crate) lacks: BTreeMap<Capability, String>,
    /// `None` in one that an older version made; those cannot be saved.
    #[serde(default)]
    pub(crate) made: Option<Made>,
    pub(crate) agent: PathBuf,
    /// Below every cgroup hierarchy; the instance's own cgroup is a child of it.
    pub(crate) cgroup_prefix: String,
    /// Where its cgroups are; `None` in one that an older version made, where they are below the hierarchies' roots.
    #[serde(default)]
    pub(crate) cgroup_layout: Option<Layout>,
    pub(crate) create_budget_ms: u64,
    /// The memory that it begins with.
    #[serde(default)]
    pub(crate) memory: Option<MemoryPlan>,
}

/// What an instance is restored from beside its filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryPlan {
    /// Where it is kept.
    pub(crate) folder: PathBuf,
    pub(crate) criu: PathBuf,
    /// Of which instance it is.
    pub(crate) of: InstanceRef,
    /// What its ids were mapped to then.
    pub(crate) ids: IdRange,
    /// Whether its pages may be brought while it runs.
    #[serde(default)]
    pub(crate) lazy: bool,
}

/// What an instance is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Made {
    pub(crate) of: MadeOf,
    pub(crate) plan: RootPlan,
    /// The snapshot that it, or what it was forked from, was made from.
    pub(crate) parent: Option<SnapshotId>,
    /// Whether it is made of an image alone, so that nobody inside has changed anything yet.
    pub(crate) fresh: bool,
    /// What its writable layer may hold, where the layer's filesystem can be told.
    pub(crate) limit_bytes: Option<u64>,
}

impl InstanceRecord {
    pub(crate) fn sandbox(&self) -> &SandboxId {
        &self.instance.sandbox
    }

    pub(crate) fn generation(&self) -> Generation {
        self.instance.generation
    }

    pub(crate) fn cgroup(&self) -> String {
        format!("{}/{}", self.cgroup_prefix, self.sandbox())
    }
}
