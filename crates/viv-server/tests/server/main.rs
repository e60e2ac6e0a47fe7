//! The API in one process, on the provider and the store in memory.

mod auth;
mod bounds;
mod cleanup;
mod executions;
mod files;
mod generations;
mod journal;
mod lifecycle;
mod metrics;
mod openapi;
mod private;
mod schedules;
mod schemathesis;
mod services;
mod snapshots;
mod stream;
mod tasks;
mod webhooks;
mod world;
