//! What can be asked for: one file per verb. Each is a durable intent first, and waiting is apart from it.

mod activity;
mod create;
mod delete;
mod ensure;
mod extend;
mod limits;
mod reset;
mod rest;
mod rollback;
mod stop;
mod wait;

pub use create::{CreateRequest, Created, KeyedBy};
