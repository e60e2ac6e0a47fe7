//! Drives sandboxes from what is recorded to what is wanted.
//!
//! ```text
//!   command ──► step ──► Store::commit ──► wake ──► driver (one per sandbox, only while there is work)
//!                             │                        │ outstanding(record) names one effect
//!                             ▼                        ▼
//!                         journal                 Provider ──► outcome ──► step ──► commit …
//!
//!   timer       one queue of all alarms: a driver is woken when its sandbox is due
//!   schedule    one sleep until the soonest schedule is due, a task for each run under way (L17)
//!   task        one driver per living task: prepare, run, end (K1)
//!   watch       one wait per living instance, for its end to be pushed
//!   roster      those that live, so that figures and deadlines cost what is due, not what lives
//!   idle        the next rung of the ladder, when nobody used it for its window (L5)
//!   listen      one wait per service of a ready sandbox, for its end to be told
//!   inside      one wait per sandbox that runs, for what those inside ask for
//!   execution   what is learnt about commands, written down beside the work; queues of those that wait (X1)
//!   health      probes what was read and is stale; reads themselves change nothing (T9)
//!   snapshots   one task per snapshot that is being made or removed; its row says what is outstanding
//!   reconcilers provider-sync · expiry · stuck · snapshots · retention · alerts · cleanup, on a signal and on a period
//!   trace       spans, for who traces: requests, effects, tasks, calls, executions
//!   memory      whether it is saved here: one look now and then, by which everything is decided (L13)
//!   metrics     figures: from the journal, from records, and from what goes by
//! ```
//!
//! Invariants:
//!
//! - What is done follows from the record alone: a driver that dies leaves nothing behind that the next one needs.
//! - An intent is durable before anything is done about it, and before it is answered.
//! - One driver per sandbox at a time; it performs one effect, records its outcome, and looks again.
//! - Nothing costs work per sandbox per tick: timers sleep, ends are pushed, evidence is gathered when asked for.
//! - Clock (tokio's, so it can be simulated), randomness, provider and store are handed in.
//!
//! Architecture invariant: nothing here knows HTTP, a terminal or an environment variable.
#![forbid(unsafe_code)]

mod adopt;
mod agenda;
mod aim;
pub mod alert;
mod audit;
mod audit_store;
mod backup;
mod breaker;
pub mod cleanup;
mod clock;
mod command;
mod config;
mod deeds;
mod diagnose;
mod drain;
mod driver;
mod effect;
mod engine;
mod error;
mod execution;
mod gate;
mod handle;
mod hook;
mod idle;
mod incoming;
mod inside;
mod journal;
mod knowledge;
mod listen;
mod memory;
pub mod metrics;
mod pressure;
mod probe;
mod read;
mod reconcile;
mod room;
mod roster;
mod schedule;
mod serve;
mod snapshot;
mod spare;
mod standing;
mod subscription;
mod symptom;
mod task;
mod timer;
mod token;
mod trace;
mod watch;

pub use aim::Aim;
pub use alert::{Alert, AlertConfig, AlertState};
pub use audit::{AuditItem, AuditOutcome, AuditReport};
pub use breaker::{BreakerKind, BreakerStatus, destination};
pub use cleanup::CleanupConfig;
pub use clock::Clock;
pub use command::{CreateRequest, Created, KeyedBy};
pub use config::{Budgets, EngineConfig, Failpoint, Periods};
pub use diagnose::{Diagnosis, Kept, Remark};
pub use drain::DrainStatus;
pub use engine::Engine;
pub use error::EngineError;
pub use execution::QueueRequest;
pub use gate::{Gate, GateSetting, Gates, SetBy};
pub use handle::Handle;
pub use hook::{Delivered, Delivery, Undelivered, Webhooks};
pub use inside::{AnswerInside, FromInside, Inside};
pub use read::{Resources, Stats, View, Which};
pub use reconcile::{ReconcilerName, ReconcilerStatus};
pub use schedule::{CommandChange, NewSchedule, ScheduleChange};
pub use snapshot::{ForkRequest, Forked, ForkedFrom, NewSnapshot, RollbackRequest, SnapshotMade};
pub use spare::{SpareClass, SpareStatus, SparesConfig};
pub use subscription::{EventBody, NewSubscription, SubscriptionChange, SubscriptionConfig};
pub use task::{ContinueTask, CreateTask, Granted, TaskMade};
pub use trace::{NotTraceParent, Told, TraceCounts, TraceParent, TraceReceiver, Traces, Tracing};
