//! Errors as they are answered: one shape, whatever went wrong.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use viv_api::error::{ApiError, ErrorCode, ErrorDetails};
use viv_core::lifecycle::{Caused, Finding, PhaseName};
use viv_core::task::TaskDenial;
use viv_engine::EngineError;
use viv_store::StoreError;

use crate::show;

/// Why a request was not answered as asked.
#[derive(Debug)]
pub(crate) struct Refusal(pub(crate) ApiError);

/// What a handler answers.
pub(crate) type Answer<T = Response<Body>> = Result<T, Refusal>;

impl IntoResponse for Refusal {
    fn into_response(self) -> Response<Body> {
        let Self(error) = self;
        let wait_s = error.details.as_ref().and_then(|details| details.retry_after_ms).map(|ms| ms.div_ceil(1000));
        let retry_after_s = wait_s.or(error.code.retry_after_s());
        let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let code = error.code;
        let mut response = show::json(status, &error.into_body());
        let headers = response.headers_mut();
        if let Some(seconds) = retry_after_s {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if code == ErrorCode::Unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        Self(told(error))
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        EngineError::from(error).into()
    }
}

/// A request that makes no sense.
pub(crate) fn invalid(message: impl Into<String>, hint: impl Into<String>) -> Refusal {
    Refusal(ApiError::new(ErrorCode::InvalidRequest, message).hint(hint))
}

/// What the key does not allow.
pub(crate) fn forbidden(message: impl Into<String>, hint: impl Into<String>) -> Refusal {
    Refusal(ApiError::new(ErrorCode::Forbidden, message).hint(hint))
}

/// A mistake of ours: the details go to the log under a word that the caller is given.
pub(crate) fn internal(what: &str) -> Refusal {
    let request = crate::guard::word();
    tracing::error!(component = "server", request, what, "a mistake of the server's");
    let details = ErrorDetails { request: Some(request), ..ErrorDetails::default() };
    let error = ApiError::new(ErrorCode::Internal, "the server made a mistake")
        .hint("viv logs --daemon says more; look for the word in details.request");
    Refusal(error.details(details))
}

/// It was deleted, or ended for good.
pub(crate) fn gone(what: impl std::fmt::Display, cause: &Caused) -> Refusal {
    let code = cause.cause.code();
    let details = ErrorDetails {
        what: Some(code.to_owned()),
        status: Some(viv_api::sandbox::Status::Stopped),
        ..ErrorDetails::default()
    };
    let error = ApiError::new(ErrorCode::Gone, format!("{what} is gone: {code}"));
    Refusal(error.hint("nothing brings it back; make a new one with viv create").details(details))
}

fn not_running(message: String, phase: PhaseName, what: Option<String>) -> ApiError {
    let hint = match phase {
        PhaseName::Provisioning | PhaseName::Verifying | PhaseName::Resuming => "viv ensure waits until it is ready",
        PhaseName::Hibernating | PhaseName::Hibernated | PhaseName::Frozen => {
            "viv ensure makes it run, and so does viv exec --wake"
        }
        PhaseName::Lost | PhaseName::Failed => "viv ensure makes it run",
        PhaseName::Ready | PhaseName::Stopping | PhaseName::Stopped => "viv show says how it stands",
    };
    let phase = Some(phase.into());
    let details = ErrorDetails { phase, what, ..ErrorDetails::default() };
    ApiError::new(ErrorCode::NotRunning, message).hint(hint).details(details)
}

/// What a caller is told. What only an operator may know goes to the log.
fn told(error: EngineError) -> ApiError {
    let message = error.to_string();
    let details = ErrorDetails::default();
    match error {
        EngineError::NotFound { which } => none_of("sandbox", &which, "viv ps"),
        EngineError::NoWebhook { which } => none_of("webhook", &which, "viv webhook ls"),
        EngineError::NoSchedule { which } => none_of("schedule", &which, "viv schedule ls"),
        EngineError::ScheduleBusy { .. } | EngineError::TaskBusy { .. } => {
            ApiError::new(ErrorCode::Conflict, message).hint("wait until it has ended")
        }
        EngineError::NoTask { which } => none_of("task", &which, "viv task ls"),
        EngineError::TaskDenied { why, .. } => ApiError::new(ErrorCode::Conflict, message).hint(task_hint(why)),
        EngineError::Draining => ApiError::new(ErrorCode::Draining, message)
            .hint("viv drain --status says how far it is, viv undrain ends it"),
        EngineError::Gone { sandbox, cause } => gone(sandbox, &cause).0,
        EngineError::StaleHandle { asked, current, cause, .. } => {
            ApiError::stale_handle(asked, current, cause.cause.code())
        }
        EngineError::NotRunning { phase, cause, .. } => {
            not_running(message, phase, Some(cause.cause.code().to_owned()))
        }
        EngineError::Unfit { finding: Finding::Timeout, .. } => {
            ApiError::new(ErrorCode::Timeout, message).hint("viv show --verify looks again")
        }
        EngineError::Unfit { what, .. } => {
            let details = ErrorDetails { what: Some(what), ..details };
            let error = ApiError::new(ErrorCode::NotRunning, message).details(details);
            error.hint("it is being looked after: viv ensure waits until it is ready")
        }
        EngineError::Held { .. } => ApiError::new(ErrorCode::NotRunning, message).hint("viv ensure makes it run"),
        EngineError::AbsenceUnproven { what, .. } => {
            let details = ErrorDetails { what: Some(what), ..details };
            ApiError::new(ErrorCode::AbsenceUnproven, message).hint("try again; viv show says more").details(details)
        }
        EngineError::NotReady { sandbox, phase, what } => {
            let details = ErrorDetails { phase: Some(phase.into()), what: Some(what), ..details };
            let hint =
                format!("viv timeline {sandbox} says what was tried; then viv ensure {sandbox} or viv rm {sandbox}");
            ApiError::new(ErrorCode::Conflict, message).hint(hint).details(details)
        }
        EngineError::NameTaken { by, .. } => {
            let details = ErrorDetails { what: Some(by.to_string()), ..details };
            let hint = "use the one that has it (viv ensure NAME), or another name";
            ApiError::new(ErrorCode::NameTaken, message).hint(hint).details(details)
        }
        EngineError::IdempotencyMismatch { .. } => {
            let hint = "use a new key for a new request, or repeat the first one as it was";
            ApiError::new(ErrorCode::IdempotencyMismatch, message).hint(hint)
        }
        EngineError::Quota { limit, used, max } => {
            ApiError::quota_exceeded(limit, max, used).hint("remove what is not needed (viv ps, viv rm)")
        }
        EngineError::NoSnapshot { which } => none_of("snapshot", &which, "viv snapshot ls"),
        EngineError::SnapshotInUse { by, .. } => {
            let used_by = Some(by.iter().map(ToString::to_string).collect());
            let details = ErrorDetails { used_by, ..details };
            let hint = "remove those who begin with it first (viv rm)";
            ApiError::new(ErrorCode::SnapshotInUse, message).hint(hint).details(details)
        }
        EngineError::SnapshotDamaged { .. } => {
            ApiError::new(ErrorCode::Conflict, message).hint("use another one: viv snapshot ls")
        }
        EngineError::NotSaved { what, .. } => {
            let details = ErrorDetails { what: Some(what), ..details };
            let hint = "nothing was kept of it; viv events says more";
            ApiError::new(ErrorCode::Conflict, message).hint(hint).details(details)
        }
        EngineError::Locked(lease) => {
            let details = ErrorDetails {
                holder: Some(lease.holder),
                since_at_ms: Some(lease.since_ms),
                expires_at_ms: Some(lease.expires_at_ms),
                ..details
            };
            ApiError::new(ErrorCode::LifecycleLocked, message).hint("try again in a moment").details(details)
        }
        EngineError::Refused { hint, .. } => ApiError::new(ErrorCode::Conflict, message).hint(hint),
        EngineError::Invalid { what, hint } => ApiError::new(ErrorCode::InvalidRequest, what).hint(hint),
        EngineError::Provider(error) => {
            tracing::debug!(component = "server", code = error.code(), %error, "the provider refused");
            helpful(error.into())
        }
        EngineError::BreakerOpen { retry_ms, .. } => {
            let details = ErrorDetails { retry_after_ms: Some(retry_ms), ..details };
            let error = ApiError::new(ErrorCode::ProviderUnavailable, message).details(details);
            error.hint("viv doctor says what is wrong")
        }
        EngineError::Store(StoreError::Superseded) | EngineError::ShuttingDown => {
            ApiError::new(ErrorCode::ShuttingDown, "the daemon is ending").hint("try again in a moment")
        }
        EngineError::Store(error) => {
            tracing::error!(component = "server", %error, "the store failed");
            ApiError::new(ErrorCode::StoreUnavailable, "the record cannot be read or written now")
                .hint("viv logs --daemon says more; nothing was changed")
        }
    }
}

fn none_of(kind: &str, which: &impl std::fmt::Display, listed_by: &str) -> ApiError {
    ApiError::not_found(format!("the {kind} {which}")).hint(format!("{listed_by} lists those that there are"))
}

fn task_hint(why: TaskDenial) -> &'static str {
    match why {
        TaskDenial::Over | TaskDenial::Ending | TaskDenial::NotRunning => "viv task show says how it stands",
        TaskDenial::NotOver => "wait until it is over, or stop it with viv task stop",
        TaskDenial::Undeclared => "declare it when the task is made: viv task run --effect",
        TaskDenial::DoneBefore => "say so when the task is made, if it may be done again",
        TaskDenial::Unknown => "look whether it was done, and run another task for what is left",
        TaskDenial::Busy => "wait until that has ended",
        TaskDenial::TooMany => "run another task",
        TaskDenial::NoGrant => "viv gate asks for one",
        TaskDenial::NotKept => "run another task; with --keep-alive it can be continued",
        TaskDenial::NotEnded => "what was stopped or passed a limit can be marked; viv task show says which it was",
    }
}

/// Every error helps; what a provider refuses comes without a hint now and then.
fn helpful(error: ApiError) -> ApiError {
    if error.hint.is_some() {
        return error;
    }
    let hint = match error.code {
        ErrorCode::NotFound => "look at what there is, with ls or viv exec ls",
        ErrorCode::Expired => "nothing brings it back; make a new one with viv create",
        ErrorCode::QuotaExceeded => "make room, or ask for less; viv doctor SANDBOX says what is full",
        _ => "viv show says how the sandbox stands",
    };
    error.hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l15_an_absence_that_was_not_seen_is_a_conflict_of_its_own() {
        let what = "the provider did not answer".to_owned();
        let error = EngineError::AbsenceUnproven { sandbox: "sbx_1".parse().unwrap(), what: what.clone() };
        let told = told(error);
        assert_eq!((told.code.as_str(), told.status()), ("absence_unproven", 409));
        assert_eq!(told.details.and_then(|details| details.what), Some(what));
    }
}
