//! Where Vivarium keeps what it knows.
//!
//! ```text
//!   engine ──► Store ──┬── SqliteStore   one file, one owner, one writer thread
//!                      ├── MemoryStore   for simulation: the same answers, no file
//!                      └── Postgres      (later)
//! ```
//!
//! - A record and the journal's line about its change are written in one transaction; the record by compare-and-set on
//!   its version ([`Store::commit`]). What was acknowledged survives `kill -9` and power loss.
//! - One process owns a store ([`Store::own`]). Every write carries the [`Epoch`] that it was given, and is refused
//!   once somebody else took over: who was frozen and thaws can do no harm (J8).
//! - Leases carry fencing tokens that grow over the whole store and all its owners (L15).
//!
//! Architecture invariant: nothing here decides anything about sandboxes; `viv-core` does.
#![forbid(unsafe_code)]

pub mod conformance;
pub mod error;
pub mod execution;
pub mod journal;
pub mod memory;
mod page;
pub mod record;
mod rules;
pub mod sqlite;
pub mod store;
pub mod subscription;
pub mod task;

pub use error::StoreError;
pub use execution::{EXECUTIONS_KEPT_MAX, ExecutionListing, ExecutionQuery, KeptBytes};
pub use journal::{Cursor, JournalFilter, JournalLine, JournalPage, JournalSearch, NewLine};
pub use memory::MemoryStore;
pub use record::{
    ApiKey, Change, Groups, Idempotency, KeyScope, Lease, LeaseKind, ListQuery, Listing, Owner, PhaseCounts, Quota,
    Remembered, ScheduleListing, ScheduleQuery, SnapshotListing, SnapshotQuery, Sums, SumsMax, Weights,
};
pub use rules::{Grant, grant};
pub use sqlite::SqliteStore;
pub use store::{Epoch, Store};
pub use subscription::{
    LETTERS_DEAD_MAX, LetterQuery, Replay, Settled, Standing, SubscriptionListing, SubscriptionQuery, Subscriptions,
};
pub use task::{TaskListing, TaskOutput, TaskQuery};
