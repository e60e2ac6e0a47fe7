//! Simulated worlds in which everything goes wrong, and what must hold in them (P1).
//!
//! ```text
//!   World (a seed) ── clients: create, ensure, freeze, thaw, hibernate, stop, delete, read, use
//!      │            ├─ damage: instances crash, hang, lose their root, vanish
//!      │            └─ the daemon crashes and another one begins
//!      ▼
//!   the same Engine as ever, on tokio's paused clock
//!      ├── FaultyProvider ──► SimProvider     answers lost, late, repeated; listings cut short
//!      └── MemoryStore                        writes fail before or after their effect
//! ```
//!
//! A seed replays exactly: nothing here reads a real clock or draws a real random number, and the runtime has one
//! thread. What must hold is checked after every step ([`Violation`]); at the end faults stop, and everything has to
//! come to rest, with not one change at the provider from then on (P3).
#![forbid(unsafe_code)]

mod faulty;
mod rng;
mod snapshots;
mod world;

pub use faulty::{Damage, Fault, FaultyProvider};
pub use rng::Rng;
pub use world::{Plan, Report, Violation, run};
