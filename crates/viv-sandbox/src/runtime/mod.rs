//! Making the container from a bundle.
//!
//! Both ways run in a helper process that ends when the container runs: the
//! shim stays small, and libcontainer, which must not clone from a threaded
//! process and changes its caller's surroundings, gets a process of its own.
//! The shim is the subreaper, so the container's first process becomes its child.
//!
//! What is held as that process depends on the runtime: the agent itself, or
//! with gVisor the sentry, the program that is the kernel of everything
//! inside. Either way its end is the end of the sandbox.

mod embedded;
mod probe;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viv_provider::Capability;

pub use embedded::{EmbeddedError, run as run_embedded};
pub use probe::{Found, RuntimeError};

/// The verb of the binary that runs [`run_embedded`].
pub const EMBEDDED_VERB: &str = "oci-run";

/// Where the shim, and so the runtime, finds programs.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Who makes the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Runtime {
    /// libcontainer, in this binary.
    Embedded,
    /// An OCI runtime by name or path: `runc`, `crun`, `runsc`.
    Binary(PathBuf),
}

/// The kernel that those inside talk to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// The host's own.
    #[default]
    Host,
    /// gVisor's, a program on the host.
    Gvisor,
}

impl Kernel {
    /// What cannot be had with it, and why.
    pub(crate) fn lacks(self) -> &'static [(Capability, &'static str)] {
        match self {
            Self::Host => &[],
            Self::Gvisor => &[
                (
                    Capability::ProvenKill,
                    "gVisor's kernel has neither cgroups for commands nor descriptors of processes: a command's \
                     processes are found by looking",
                ),
                (
                    Capability::EgressAll,
                    "gVisor takes over the interfaces that are there when it starts, and ours comes later",
                ),
                (Capability::LimitProcesses, "the host sees the threads of gVisor's kernel, not the processes inside"),
            ],
        }
    }

    /// Whether what the host has open can be handed to those inside.
    pub(crate) fn takes_descriptors(self) -> bool {
        match self {
            Self::Host => true,
            Self::Gvisor => false,
        }
    }

    /// Options that the runtime is called with, before its verb.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Host => &[],
            // - the agent's socket is made inside and reached from outside;
            // - files are written to the host's layer, or nothing could be saved, and at once: whoever copies
            //   the layer, or kills the sandbox, finds what those inside have written;
            // - no interface but loopback, as in a network namespace that nobody has set up.
            Self::Gvisor => &["--host-uds=create", "--overlay2=none", "--file-access=shared", "--network=none"],
        }
    }
}

impl Runtime {
    /// The command that makes and starts the container `id` from a bundle and
    /// leaves the pid of its first process in `pid_file`.
    pub(crate) fn command(
        &self,
        kernel: Kernel,
        bundle: &Path,
        state: &Path,
        id: &str,
        pid_file: &Path,
    ) -> Vec<OsString> {
        let mut argv: Vec<OsString> = Vec::new();
        match self {
            Self::Embedded => {
                argv.extend(["/proc/self/exe".into(), EMBEDDED_VERB.into(), "--root".into(), state.into()]);
            }
            Self::Binary(path) => {
                argv.extend([path.into(), "--root".into(), state.into()]);
                argv.extend(kernel.options().iter().map(OsString::from));
                argv.extend(["run".into(), "--detach".into()]);
            }
        }
        argv.extend(["--bundle".into(), bundle.into(), "--pid-file".into(), pid_file.into(), id.into()]);
        argv
    }
}
