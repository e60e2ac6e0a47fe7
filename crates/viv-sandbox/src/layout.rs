//! The data folder: what lies where.
//!
//! ```text
//!   <data>/
//!     fences/<sandbox>.json        outlives instances (L15)
//!     instances/<sandbox>/         one at a time: making this folder is the claim
//!       record.json                what was asked for
//!       shim.lock                  locked for as long as the shim or its guard lives
//!       shim.json  shim.sock  shim.log
//!       deadline.json  exit.json
//!       run/                       /.vivarium/run inside: socket, executions, output
//!       layers/                    writable layers of the root
//!       bundle/  runtime/          OCI bundle, state of the OCI runtime
//!     trash/                       instances on their way out
//!     agent/  images/
//! ```

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viv_core::{FencingToken, Generation, OperationId, OwnerMark, SandboxId};
use viv_provider::{InstanceRef, InstanceSpec};

use crate::durable;
use crate::rootfs::{IdRange, RootPlan};
use crate::runtime::Runtime;

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

    pub(crate) fn images(&self) -> PathBuf {
        self.0.join("images")
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
        socket = "shim.sock",
        log = "shim.log",
        deadline = "deadline.json",
        exit = "exit.json",
        run = "run",
        layers = "layers",
        bundle = "bundle",
        runtime = "runtime",
    }

    pub(crate) fn execution(&self, execution: &viv_core::ExecutionId) -> PathBuf {
        self.run().join(viv_agent::proto::EXECUTIONS).join(execution.as_str())
    }

    pub(crate) fn read_record(&self) -> io::Result<Option<InstanceRecord>> {
        durable::read_json(&self.record())
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
    pub(crate) ids: IdRange,
    pub(crate) root: RootPlan,
    pub(crate) agent: PathBuf,
    /// Below every cgroup hierarchy; the instance's own cgroup is a child of it.
    pub(crate) cgroup_prefix: String,
    pub(crate) create_budget_ms: u64,
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
