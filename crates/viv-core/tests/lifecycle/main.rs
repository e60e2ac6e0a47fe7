//! The life of a sandbox, proven on [`viv_core::lifecycle::step`] alone.
//!
//! - `explore`: every record that can be reached, by breadth-first search over a finite abstraction; `laws` is checked
//!   on each step of it.
//! - `edges`: what was reached equals the design's table. `diagram`: `docs/lifecycle.md` is made of it.
//! - `model`: random lives beside a provider that loses, repeats and delays, against a small model of what must hold.
//! - `incidents`: failures that happened elsewhere, one test each. `golden`: records are read as they were written.
//! - `services`: what is started, started again and given up, and what hooks hold up.
//!
//! `UPDATE=1` writes the committed files anew instead of comparing them.

mod diagram;
mod edges;
mod explore;
mod golden;
mod incidents;
mod laws;
mod model;
mod provider;
mod rest;
mod services;
mod setup;
mod status;
