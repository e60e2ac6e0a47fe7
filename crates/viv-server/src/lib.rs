//! The HTTP API on the engine: the only crate that knows HTTP.
//!
//! ```text
//!   serve       connections: bounded in number, in headers, in time ── hyper
//!     └─ guard      every request: an id, an encoding that makes sense, room for one more, no panic gets out
//!         └─ api        one table: path, method, who may, what comes and goes ──► router and OpenAPI document
//!             └─ auth       key, scope, rate, room for its share, no place of the host in what others are told
//!                 └─ route::*   one file per group of routes ──► Engine
//!   show        records as they are shown, in one place
//!   inside      what those inside a sandbox ask for: the same words, errors and bounds, without HTTP
//!   webhook     signed requests of hooks to somebody outside, for the engine, which knows no HTTP
//!   stream      what goes on: output, events, changes of files; pulled by the reader, so nothing piles up here
//! ```
//!
//! Invariants:
//!
//! - An intent is recorded by a task of its own, so whoever asked may go away (L1).
//! - Reads never count as activity (T9).
//! - Every error has one shape and a code of a closed list; none above 499 comes from what a request says (S5).
//! - The document is made from the table that the router is made from.
#![forbid(unsafe_code)]

mod address;
mod api;
mod auth;
mod body;
mod config;
mod events;
mod executions;
mod extract;
mod guard;
mod inside;
mod log;
mod openapi;
mod private;
mod rate;
mod refusal;
mod room;
mod route;
mod serve;
mod show;
mod state;
mod stream;
mod tally;
mod trace;
mod webhook;

pub use address::{AddressRange, NoRange};
pub use auth::{KeyError, NewKey};
pub use config::{Bounds, Build, Rate, ServerConfig};
pub use events::events;
pub use guard::Peer;
pub use inside::inside;
pub use log::LogRing;
pub use openapi::document;
pub use serve::{serve, serve_within};
pub use state::ServerState;
pub use webhook::{WebhookConfig, webhooks};

/// The whole API.
pub fn router(state: ServerState) -> axum::Router {
    let bounded = axum::middleware::from_fn_with_state(state.clone(), guard::guard);
    route::all(&state).into_router().layer(bounded).with_state(state)
}
