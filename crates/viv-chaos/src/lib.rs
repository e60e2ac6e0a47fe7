//! Simulated worlds in which everything goes wrong, and what must hold in them (P1).
//!
//! ```text
//!   World (a seed) ── clients: every verb, racing, with old handles and keys
//!      │            ├─ damage: instances end, hang, lose their root, are denied
//!      │            └─ daemons are restarted, killed at any call, or away for a while
//!      ▼
//!   the same Engine as ever, on tokio's paused clock
//!      │  Line: what a daemon reaches, which can be cut or held
//!      ├── FaultyProvider ──► SimProvider     calls lost, late, repeated; listings stale or cut short; ends unheard
//!      └── FaultyStore ─────► MemoryStore     calls fail before or after their effect, are slow, find the disk full
//! ```
//!
//! Each seed has its own mixture ([`Plan`]). A seed replays exactly: nothing here reads a real clock or draws a real
//! random number, and the runtime has one thread. What must hold is in one table ([`INVARIANTS`]), and looked at with
//! everything that is written, after every step and with every answer; at the end faults stop, and everything has to
//! come to rest, with not one change at the provider from then on (P3).
#![forbid(unsafe_code)]

mod at_once;
mod bugs;
mod clients;
mod differential;
mod faulty;
mod invariants;
mod line;
mod plan;
mod rng;
mod shrink;
mod snapshots;
mod store;
mod store_subscriptions;
mod sweep;
mod tasks;
mod trials;
mod world;

pub use bugs::{BUGS, Bug};
pub use faulty::{Damage, Fault, FaultyProvider};
pub use invariants::{INVARIANTS, Invariant, Violation, When};
pub use plan::{Deed, Plan, StoreKind, Trouble, Without};
pub use rng::Rng;
pub use shrink::shrink;
pub use sweep::{Sweep, sweep, sweep_of};
pub use trials::{IN_WORLDS, TRIALS, Trial, off, trial};
pub use world::{Report, run};
