//! The local provider: real, isolated Linux sandboxes on one machine with nothing else installed.
//!
//! ```text
//!   LocalProvider (daemon)        viv shim (one per instance)            viv agent (PID 1 inside)
//!   ───────────────────────       ──────────────────────────────         ────────────────────────
//!   fence file, instance dir ──►  cgroups, root, bundle, runtime    ──►  commands, files, ports
//!        │   lifecycle, JSON lines      ▲ deadline, death, kill               ▲
//!        └──────── shim.sock ───────────┘ control connection ─────────────────┤
//!        └──────── run/agent.sock ────────────────────────────────────────────┘
//! ```
//!
//! - [`local`] is the provider; any process may open one on the same data folder.
//! - [`shim`] is what `viv shim` runs. It outlives whoever started it.
//! - [`runtime`] makes the container: libcontainer in a helper process
//!   (`viv oci-run`), or a named OCI runtime binary.
//! - [`ordinary`] is how those who are not root come to be root of something;
//!   [`machine`] says what this machine gives them.
//! - [`cgroup`], `rootfs` and `bundle` are what the shim builds from.
//!
//! Architecture invariant: no state lives only in the provider. What it knows
//! is in the data folder, in the shim, or in the kernel.

#[macro_use]
mod note;

mod agent_image;
mod bundle;
pub mod cgroup;
pub mod checkpoint;
mod durable;
mod fence;
#[doc(hidden)]
pub mod fuzzing;
mod hardening;
mod ids;
mod layout;
mod linux;
pub mod local;
mod lock;
pub mod machine;
pub mod network;
pub mod ordinary;
pub mod process;
mod rootfs;
pub mod runtime;
pub mod shim;
mod store;
mod sys;
#[cfg(test)]
mod test_disk;
mod trash;
mod wait;

pub use hardening::Hardening;
pub use ids::IdPool;
pub use local::{Criu, KeepMemory, LocalConfig, LocalProvider, OpenError, Tidier, TidyTurn};
pub use rootfs::IdRange;
pub use runtime::{Found, Kernel, Runtime, RuntimeError};
pub use shim::space::DiskReserve;
pub use store::StoreConfig;
pub use store::check::Checked;
pub use store::collect::Collected;
pub use store::driver::{DriverKind, LimitedBy};
pub use store::error::StoreError;
pub use store::image::{ImageProgress, ImageRecord, OnProgress, RunConfig};
pub use store::oci::{Destination, ExportSource};
pub use store::tidy::Tidied;
pub use store::transfer::Exported;
