//! The words of the HTTP API: every path, request, response and error, and a blocking client that speaks them.
//!
//! The server and all clients share these types, so neither can drift from the other. Rules of the house:
//!
//! - JSON with `snake_case` names. Times are wall clock milliseconds since 1970 (`…_at_ms`), spans are `…_ms`.
//! - A request with a field that nobody knows is refused: a misspelt option must not be ignored in silence.
//!   An answer may have more fields than an older client knows.
//! - What is bounded is a type of its own ([`bound`]), so it is checked where it is parsed, and the schema in the
//!   `OpenAPI` document is made from the same numbers.
//! - Every error has one shape and a code of a closed list ([`ErrorCode`]), each with a page in `docs/errors`.
//!
//! Architecture invariant: nothing here knows a store, an engine or a web framework, and nothing reads the
//! environment or the clock.
#![forbid(unsafe_code)]

pub mod alert;
pub mod bound;
pub mod catalogue;
pub mod checkpoint;
mod convert;
pub mod daemon;
pub mod diagnosis;
pub mod error;
pub mod event;
pub mod execution;
pub mod file;
pub mod header;
pub mod inside;
pub mod key;
pub mod limits;
pub mod page;
pub mod path;
pub mod query;
pub mod reconcile;
pub mod request;
pub mod resources;
pub mod sandbox;
pub mod schedule;
pub mod service;
pub mod snapshot;
pub mod spare;
pub mod stats;
pub mod subscription;
pub mod task;

#[cfg(feature = "client")]
pub mod cleanup;
pub mod client;
#[cfg(feature = "openapi")]
pub mod openapi;
#[cfg(feature = "provider")]
pub mod provider;

#[cfg(feature = "client")]
pub use client::{Client, ClientError};
pub use error::{ApiError, ErrorBody, ErrorCode, ErrorDetails};
pub use page::Page;
