//! The words of Vivarium that every other crate shares.
//!
//! Architecture invariant: this crate does no I/O, reads no clock, draws no
//! random number and knows no async runtime. Time and randomness are arguments.
#![forbid(unsafe_code)]

pub mod cause;
pub mod exec;
pub mod file;
pub mod id;

pub use cause::EndCause;
pub use id::{ExecutionId, FencingToken, Generation, IdError, OperationId, OwnerMark, SandboxId, SnapshotId};
