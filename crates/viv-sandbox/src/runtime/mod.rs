//! Making the container from a bundle.
//!
//! Both ways run in a helper process that ends when the container runs: the
//! shim stays small, and libcontainer, which must not clone from a threaded
//! process and changes its caller's surroundings, gets a process of its own.
//! The shim is the subreaper, so the container's first process becomes its child.

mod embedded;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use embedded::{EmbeddedError, run as run_embedded};

/// The verb of the binary that runs [`run_embedded`].
pub const EMBEDDED_VERB: &str = "oci-run";

/// Who makes the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Runtime {
    /// libcontainer, in this binary.
    Embedded,
    /// An OCI runtime by name or path: `runc`, `crun`, `runsc`.
    Binary(PathBuf),
}

impl Runtime {
    /// The command that makes and starts the container `id` from a bundle and
    /// leaves the pid of its first process in `pid_file`.
    pub(crate) fn command(&self, bundle: &Path, state: &Path, id: &str, pid_file: &Path) -> Vec<OsString> {
        let mut argv: Vec<OsString> = Vec::new();
        match self {
            Self::Embedded => {
                argv.extend(["/proc/self/exe".into(), EMBEDDED_VERB.into(), "--root".into(), state.into()]);
            }
            Self::Binary(path) => {
                argv.extend([path.into(), "--root".into(), state.into(), "run".into(), "--detach".into()]);
            }
        }
        argv.extend(["--bundle".into(), bundle.into(), "--pid-file".into(), pid_file.into(), id.into()]);
        argv
    }
}
