//! Errors: one shape, a closed list of codes.

use serde::{Deserialize, Serialize};
use viv_core::Generation;

use crate::bound::BoundError;
use crate::sandbox::{Phase, Status};

/// What went wrong: a closed list. Each has a status, a place in [`crate::catalogue`] and a page in `docs/errors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request makes no sense.
    InvalidRequest,
    /// There is no good key with it.
    Unauthenticated,
    /// The key does not allow it.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// This path has no such method.
    MethodNotAllowed,
    /// The answer cannot be given in the form that was asked for.
    NotAcceptable,
    /// The request did not arrive in time.
    RequestTimeout,
    /// Something else stands in the way.
    Conflict,
    /// Another sandbox has this name.
    NameTaken,
    /// Others begin with this snapshot.
    SnapshotInUse,
    /// The same idempotency key came with another request before.
    IdempotencyMismatch,
    /// The sandbox does not run now.
    NotRunning,
    /// A transition is under way that this would cross.
    LifecycleLocked,
    /// It could not be shown that the old instance is gone.
    AbsenceUnproven,
    /// The hard deadline has passed.
    Expired,
    /// The sandbox did not answer in time: it may or may not have happened.
    Timeout,
    /// The handle is of an older generation.
    StaleHandle,
    /// It was deleted, for ever.
    Gone,
    /// There is more of it than is taken.
    PayloadTooLarge,
    /// It comes in a form that is not taken.
    UnsupportedMedia,
    /// This machine or provider cannot do that.
    Unsupported,
    /// A quota is used up.
    QuotaExceeded,
    /// There are too many requests at once.
    TooManyRequests,
    /// A mistake of the server's.
    Internal,
    /// Whoever runs the sandboxes cannot be reached.
    ProviderUnavailable,
    /// The record cannot be written.
    StoreUnavailable,
    /// The daemon is ending.
    ShuttingDown,
    /// The daemon is being drained.
    Draining,
}

/// The body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// The error.
    pub error: ApiError,
}

/// An error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(example = json!({
    "code": "stale_handle",
    "message": "generation 1 of sbx_01h2xcejqtf2nbrexx3vqjhp41 is over; the current one is 2",
    "hint": "look at the sandbox and use its current generation",
    "docs": "docs/errors/stale_handle.md",
    "details": {"current_generation": 2, "what": "it was lost and made again"}
})))]
#[error("{message}")]
pub struct ApiError {
    /// A stable word.
    pub code: ErrorCode,
    /// What was wrong, for people.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Where it is explained.
    pub docs: String,
    /// More for programs, depending on the code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Box<ErrorDetails>>,
}

/// What programs may want to know about an error. Which are there depends on the code; the pages say which.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct ErrorDetails {
    /// `stale_handle`: the current generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub current_generation: Option<Generation>,
    /// `stale_handle`, `gone`: what happened. `not_found`, `conflict`: what was looked for, or is in the way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub what: Option<String>,
    /// `invalid_request`: where in the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// `not_running`, `expired`, `gone`: the sandbox in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
    /// `not_running`, `lifecycle_locked`: where its record stands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// `lifecycle_locked`: who holds the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// `lifecycle_locked`: since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_at_ms: Option<u64>,
    /// `lifecycle_locked`: until when, unless it is renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// `snapshot_in_use`: some of the sandboxes that begin with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_by: Option<Vec<String>>,
    /// `quota_exceeded`, `payload_too_large`: which limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// `quota_exceeded`, `payload_too_large`: how high it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// `quota_exceeded`: how much of it is in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
    /// `unsupported`: the capability that is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capability: Option<String>,
    /// `too_many_requests`, `provider_unavailable` and others that pass: when to try again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// `internal`: what to look for in the daemon's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

impl ErrorCode {
    /// All of them, by status.
    pub const ALL: &'static [Self] = &[
        Self::InvalidRequest,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::NotAcceptable,
        Self::RequestTimeout,
        Self::Conflict,
        Self::NameTaken,
        Self::SnapshotInUse,
        Self::IdempotencyMismatch,
        Self::NotRunning,
        Self::LifecycleLocked,
        Self::AbsenceUnproven,
        Self::Expired,
        Self::Timeout,
        Self::StaleHandle,
        Self::Gone,
        Self::PayloadTooLarge,
        Self::UnsupportedMedia,
        Self::Unsupported,
        Self::QuotaExceeded,
        Self::TooManyRequests,
        Self::Internal,
        Self::ProviderUnavailable,
        Self::StoreUnavailable,
        Self::ShuttingDown,
        Self::Draining,
    ];

    /// As the API writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::NotAcceptable => "not_acceptable",
            Self::RequestTimeout => "request_timeout",
            Self::Conflict => "conflict",
            Self::NameTaken => "name_taken",
            Self::SnapshotInUse => "snapshot_in_use",
            Self::IdempotencyMismatch => "idempotency_mismatch",
            Self::NotRunning => "not_running",
            Self::LifecycleLocked => "lifecycle_locked",
            Self::AbsenceUnproven => "absence_unproven",
            Self::Expired => "expired",
            Self::Timeout => "timeout",
            Self::StaleHandle => "stale_handle",
            Self::Gone => "gone",
            Self::PayloadTooLarge => "payload_too_large",
            Self::UnsupportedMedia => "unsupported_media",
            Self::Unsupported => "unsupported",
            Self::QuotaExceeded => "quota_exceeded",
            Self::TooManyRequests => "too_many_requests",
            Self::Internal => "internal",
            Self::ProviderUnavailable => "provider_unavailable",
            Self::StoreUnavailable => "store_unavailable",
            Self::ShuttingDown => "shutting_down",
            Self::Draining => "draining",
        }
    }

    /// The HTTP status that goes with it. Nothing that the content of a request can bring about is above 499 (S5):
    /// a sandbox that does not answer is `timeout` with 409, not 504, and 408 would make some clients repeat what
    /// may have happened.
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthenticated => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::NotAcceptable => 406,
            Self::RequestTimeout => 408,
            Self::Conflict
            | Self::NameTaken
            | Self::SnapshotInUse
            | Self::IdempotencyMismatch
            | Self::NotRunning
            | Self::LifecycleLocked
            | Self::AbsenceUnproven
            | Self::Expired
            | Self::Timeout => 409,
            Self::StaleHandle | Self::Gone => 410,
            Self::PayloadTooLarge => 413,
            Self::UnsupportedMedia => 415,
            Self::Unsupported => 422,
            Self::QuotaExceeded | Self::TooManyRequests => 429,
            Self::Internal => 500,
            Self::ProviderUnavailable | Self::StoreUnavailable | Self::ShuttingDown | Self::Draining => 503,
        }
    }

    /// Seconds for `Retry-After`, for those that pass by themselves.
    pub fn retry_after_s(self) -> Option<u64> {
        match self {
            Self::TooManyRequests | Self::StoreUnavailable | Self::ShuttingDown => Some(1),
            Self::LifecycleLocked => Some(2),
            Self::Draining => Some(30),
            Self::ProviderUnavailable | Self::AbsenceUnproven => Some(5),
            Self::InvalidRequest
            | Self::Unauthenticated
            | Self::Forbidden
            | Self::NotFound
            | Self::MethodNotAllowed
            | Self::NotAcceptable
            | Self::RequestTimeout
            | Self::Conflict
            | Self::NameTaken
            | Self::SnapshotInUse
            | Self::IdempotencyMismatch
            | Self::NotRunning
            | Self::Expired
            | Self::Timeout
            | Self::StaleHandle
            | Self::Gone
            | Self::PayloadTooLarge
            | Self::UnsupportedMedia
            | Self::Unsupported
            | Self::QuotaExceeded
            | Self::Internal => None,
        }
    }

    /// The page that explains it, from the root of the repository.
    pub fn docs(self) -> String {
        format!("docs/errors/{}.md", self.as_str())
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl ApiError {
    /// An error with a message for the caller. It must not hold what the caller may not know.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, docs: code.docs(), details: None }
    }

    /// With what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With more for programs.
    #[must_use]
    pub fn details(mut self, details: ErrorDetails) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    /// The HTTP status that goes with it.
    pub fn status(&self) -> u16 {
        self.code.status()
    }

    /// A handle of an older generation (T5). `what` is what happened since.
    pub fn stale_handle(asked: Generation, current: Generation, what: impl Into<String>) -> Self {
        let details =
            ErrorDetails { current_generation: Some(current), what: Some(what.into()), ..ErrorDetails::default() };
        Self::new(
            ErrorCode::StaleHandle,
            format!("generation {asked} is not the current one of this sandbox, which is {current}"),
        )
        .hint("look at the sandbox, and use the generation that it has now")
        .details(details)
    }

    /// Something that is not there.
    pub fn not_found(what: impl Into<String>) -> Self {
        let what = what.into();
        let details = ErrorDetails { what: Some(what.clone()), ..ErrorDetails::default() };
        Self::new(ErrorCode::NotFound, format!("{what} was not found")).details(details)
    }

    /// A request that makes no sense, at this field of it.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        let details = ErrorDetails { field: Some(field.into()), ..ErrorDetails::default() };
        Self::new(ErrorCode::InvalidRequest, message).details(details)
    }

    /// A quota that is used up (L18).
    pub fn quota_exceeded(quota: impl Into<String>, limit: u64, used: u64) -> Self {
        let quota = quota.into();
        let message = if used < limit {
            format!("not enough is left of {quota}: {used} of {limit} are in use")
        } else {
            format!("{quota} is used up: {used} of {limit}")
        };
        let details =
            ErrorDetails { quota: Some(quota), limit: Some(limit), used: Some(used), ..ErrorDetails::default() };
        Self::new(ErrorCode::QuotaExceeded, message).details(details)
    }

    /// As it is sent.
    pub fn into_body(self) -> ErrorBody {
        ErrorBody { error: self }
    }
}

impl From<BoundError> for ApiError {
    fn from(error: BoundError) -> Self {
        Self::new(ErrorCode::InvalidRequest, error.to_string())
    }
}

#[cfg(test)]
mod tests;
