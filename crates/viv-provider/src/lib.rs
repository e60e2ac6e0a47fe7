//! What Vivarium asks of whoever runs its sandboxes.
//!
//! ```text
//!   engine ──► Provider ──┬── local        a shim and an agent on this machine (viv-sandbox)
//!                         ├── sim          in memory, deterministic (here)
//!                         └── docker, kubernetes, hosted APIs (later)
//! ```
//!
//! - [`Provider`] is the trait; [`conformance`] is the suite that every
//!   implementation has to pass; [`sim`] is the one for simulation.
//! - A mutation carries a [`Mutation`]: operation id, generation, fencing token
//!   and a time budget. It is safe to repeat: the same operation does its work
//!   once and answers the same.
//! - Absence is something that was seen ([`InstanceState::Absent`]); an error
//!   is never absence (T7).
//!
//! Architecture invariant: nothing here knows HTTP, a database or a kernel.
#![forbid(unsafe_code)]

pub mod audit;
pub mod conformance;
pub mod error;
pub mod instance;
pub mod provider;
pub mod sim;

pub use audit::{Finding, FindingKind, Swept, SweptAs};
pub use error::ProviderError;
pub use instance::{
    Deadline, DeadlineChange, DiskUsage, Ended, FullPlace, InstanceRef, InstanceSpec, InstanceState, Integrity, Listed,
    LogPart, Mutation, Observation, ObservedVia, Obstacle, ObstacleEffect, Page, PageRequest, ProcessSeen, Recall,
    SaveCost, SaveRequest, Snapshot, SnapshotSeen, Usage, Whereabouts,
};
pub use provider::{
    ByteReader, Dialled, FileWrite, InsideRequest, OutputStream, Provider, RequestStream, WatchStream, probe,
};
pub use viv_core::capability::{self, Capabilities, Capability};
pub use viv_core::limits::{self, OomKill, ResourceLimits, UNLIMITED};
pub use viv_core::spec::{Egress, Image, Network};
