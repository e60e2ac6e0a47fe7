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
//!
//! The two layers are also put around store and provider of a real daemon (`viv serve --chaos`, P5), where what goes wrong
//! is drawn or ordered ([`Orders`]). Without the feature `worlds` they are all that there is.
#![forbid(unsafe_code)]
#![cfg_attr(not(feature = "worlds"), expect(dead_code, reason = "some of it is for worlds only"))]

mod at_once;
#[cfg(feature = "worlds")]
mod bugs;
#[cfg(feature = "worlds")]
mod clients;
#[cfg(feature = "worlds")]
mod crash_points;
#[cfg(feature = "worlds")]
mod differential;
mod faulty;
#[cfg(feature = "worlds")]
mod invariants;
mod line;
mod orders;
#[cfg(feature = "worlds")]
mod panics;
mod plan;
mod rng;
mod script;
#[cfg(feature = "worlds")]
mod shrink;
#[cfg(feature = "worlds")]
mod snapshots;
mod store;
mod store_subscriptions;
#[cfg(feature = "worlds")]
mod sweep;
#[cfg(feature = "worlds")]
mod tasks;
#[cfg(feature = "worlds")]
mod trials;
#[cfg(feature = "worlds")]
mod world;

#[cfg(feature = "worlds")]
pub use bugs::{BUGS, Bug};
#[cfg(feature = "worlds")]
pub use crash_points::{Lived, live};
pub use faulty::{Damage, Fault, FaultyProvider};
#[cfg(feature = "worlds")]
pub use invariants::{INVARIANTS, Invariant, Violation, When};
pub use orders::{Moment, Order, Orders, Turn};
pub use plan::{Deed, Plan, StoreKind, Trouble, Without};
pub use rng::Rng;
pub use script::{Point, Way};
#[cfg(feature = "worlds")]
pub use shrink::shrink;
pub use store::FaultyStore;
#[cfg(feature = "worlds")]
pub use sweep::{Sweep, sweep, sweep_of};
#[cfg(feature = "worlds")]
pub use trials::{IN_WORLDS, TRIALS, Trial, off, trial};
#[cfg(feature = "worlds")]
pub use world::{FAULTS_MIN, Report, run};
