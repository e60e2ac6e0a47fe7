//! Headers with a meaning of ours.

/// Says that two requests are one ([`crate::bound::IdempotencyKey`]). For making sandboxes and snapshots, for forking,
/// and for starting an execution.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The generation that a call is about, as the query parameter `generation`; if both are given they must be equal.
/// Another one than the current is answered with 410 `stale_handle` (T5).
pub const GENERATION: &str = "viv-generation";

/// Who reads, for "each client's last read" in the diagnosis (T8): a name like `cli` or `dashboard`. It grants nothing.
pub const CLIENT: &str = "viv-client";

/// The last event that a reader of an event stream has seen; sent by browsers by themselves.
pub const LAST_EVENT_ID: &str = "last-event-id";

/// `Bearer viv_…`.
pub const AUTHORIZATION: &str = "authorization";

/// Seconds after which to try again; with 429 and 503.
pub const RETRY_AFTER: &str = "retry-after";

/// One JSON object per line: an execution's output.
pub const NDJSON: &str = "application/x-ndjson";

/// Server-sent events.
pub const EVENT_STREAM: &str = "text/event-stream";

/// Files and input.
pub const BYTES: &str = "application/octet-stream";

/// Archives.
pub const TAR: &str = "application/x-tar";
