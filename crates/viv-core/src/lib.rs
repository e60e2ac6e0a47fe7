//! The words of Vivarium that every other crate shares, and the life of a sandbox as a pure state machine.
//!
//! Architecture invariant: this crate does no I/O, reads no clock, draws no
//! random number and knows no async runtime. Time and randomness are arguments.
#![forbid(unsafe_code)]

pub mod capability;
pub mod cause;
pub mod exec;
pub mod execution;
pub mod fence;
pub mod file;
pub mod hook;
pub mod id;
pub mod identity;
pub mod inside;
pub mod lifecycle;
pub mod limits;
pub mod planted;
pub mod schedule;
pub mod service;
pub mod snapshot;
pub mod span;
pub mod spec;
pub mod subscription;
pub mod task;

pub use cause::EndCause;
pub use id::{
    ExecutionId, FencingToken, Generation, IdError, OperationId, OwnerMark, RequestId, SandboxId, ScheduleId,
    SnapshotId, TaskId, WebhookId,
};
pub use identity::Identity;
