//! What each error means, when it comes and what to do: from here the pages in `docs/errors` are written.

use std::fmt::Write as _;

use viv_core::Generation;

use crate::error::{ApiError, ErrorCode, ErrorDetails};
use crate::sandbox::{Phase, Status};

/// What there is to say about a code.
#[derive(Debug, Clone)]
pub struct Entry {
    /// When it comes.
    pub when: &'static str,
    /// What to do about it.
    pub then: &'static str,
    /// One as it may come.
    pub example: ApiError,
}

/// What there is to say about this code.
pub fn entry(code: ErrorCode) -> Entry {
    let (when, then) = words(code);
    Entry { when, then, example: example(code) }
}

/// When it comes, and what to do.
#[expect(clippy::too_many_lines, reason = "a table")]
fn words(code: ErrorCode) -> (&'static str, &'static str) {
    match code {
        ErrorCode::InvalidRequest => (
            "The request cannot be understood or breaks a bound: no JSON, an unknown field or parameter, a text of the wrong shape, a number out of range, an id that is none. Nothing was changed.",
            "`details.field` says where. Correct it; the same request again gets the same answer.",
        ),
        ErrorCode::Unauthenticated => (
            "There is no key with the request, or it is unknown, expired or revoked. The answer does not tell which.",
            "Send `Authorization: Bearer KEY`. Locally, `viv` finds the key in the data folder (`VIV_DATA`); elsewhere set `VIV_KEY`.",
        ),
        ErrorCode::Forbidden => (
            "The key is good and its scope does not allow this: a `read_only` key cannot change anything, a `project` key sees one project and no keys.",
            "Use a key with a wider scope; `viv key create` makes one, with an `admin` key.",
        ),
        ErrorCode::NotFound => (
            "There is no such path, sandbox, snapshot, execution, file, lease or key that this key may see. What belongs to another project is answered the same.",
            "Look at the list. `details.what` says what was looked for.",
        ),
        ErrorCode::MethodNotAllowed => {
            ("The path exists and does not have this method.", "The header `Allow` lists those that it has.")
        }
        ErrorCode::NotAcceptable => (
            "The header `Accept` asks for a form that this path cannot answer in.",
            "Leave the header out, or name the form that the API document gives.",
        ),
        ErrorCode::RequestTimeout => (
            "The request, headers or body, did not arrive in time. Nothing was changed; only of an archive a part may have been unpacked.",
            "Send it again, over a better connection or in smaller parts.",
        ),
        ErrorCode::Conflict => (
            "Something else is in the way: a directory where a file is to be, input after the end of input, a signal to what has ended, less memory than is in use.",
            "`details.what` says what. Look, and decide again.",
        ),
        ErrorCode::NameTaken => (
            "Another sandbox of the project has this name. A name is free again when its sandbox was deleted.",
            "Use that sandbox (`viv ensure NAME`), delete it, or choose another name.",
        ),
        ErrorCode::SnapshotInUse => (
            "The snapshot cannot be removed: sandboxes begin with it, or are to go back to it. What is in use is not deleted, also when the sandbox that it is of was (L11).",
            "`details.used_by` says who. Delete those, or leave it: what nobody needs and nobody asked for goes by itself.",
        ),
        ErrorCode::IdempotencyMismatch => (
            "The same `Idempotency-Key` came with another request before. Keys are kept for 24 hours, that of a create also until the sandbox ended (L1).",
            "Send the first request's body again to get its answer, or use a new key for a new request.",
        ),
        ErrorCode::NotRunning => (
            "The sandbox is there and does not run: it is being made or ended, frozen, hibernated, lost, failed or stopped. An execution does not start it by itself (L4).",
            "`details.status` says what it is. `viv ensure` makes it run; an execution with `wake` does so first.",
        ),
        ErrorCode::LifecycleLocked => (
            "A transition of this sandbox is under way, by somebody who holds its lock, and this would cross it (L15).",
            "`details` say who, since when and until when. Try again after `Retry-After`, or wait with `wait_ms`.",
        ),
        ErrorCode::AbsenceUnproven => (
            "A new instance was asked for, and it could not be shown that the old one is gone: whoever runs it does not answer. Two at once must never be, so none is made (L15).",
            "Try again after `Retry-After`. If its machine is gone for good, delete the sandbox. `viv show --diagnosis` says what was seen.",
        ),
        ErrorCode::Expired => (
            "The sandbox's hard deadline has passed, so it cannot be extended any more: what expired does not come back that way (L5, L9).",
            "`viv ensure` makes a persistent one run again from what was saved; an ephemeral one is made anew.",
        ),
        ErrorCode::Timeout => (
            "The sandbox did not answer in time. What was asked for may or may not have happened. That is no reason to replace it: one that is busy or stopped from inside looks the same (T7).",
            "Look: `viv show --verify`. Repeat what is safe to repeat, with the same `Idempotency-Key` where there was one.",
        ),
        ErrorCode::StaleHandle => (
            "The request names a generation that is over. The sandbox was made again since, and what the request relies on (processes, memory, perhaps files) may not be there (T5).",
            "`details.current_generation` is the current one, `details.what` what happened. Look at the sandbox, then use the new generation.",
        ),
        ErrorCode::Gone => {
            ("The sandbox was deleted. That is for ever: no request brings it back (L9).", "Make another one.")
        }
        ErrorCode::PayloadTooLarge => (
            "The body is larger than this path takes, or an archive has more entries, bytes or swelling than it may (S4).",
            "`details.quota` and `details.limit` say which bound. Send less, or in parts.",
        ),
        ErrorCode::UnsupportedMedia => (
            "The body comes in a form that this path does not take, or says a wrong one in `Content-Type`.",
            "Requests are `application/json`, files and input `application/octet-stream`, archives `application/x-tar`.",
        ),
        ErrorCode::Unsupported => (
            "The provider cannot do this on this machine, and does not pretend to: a limit that the kernel cannot keep, a terminal, watching files.",
            "`details.capability` says what is missing, and `viv doctor` why and how to have it. Ask without it.",
        ),
        ErrorCode::QuotaExceeded => (
            "A quota is used up: sandboxes of the project or of the whole installation, processors, memory, disk or processes. It is counted from what there is, with what is still being ended (L18).",
            "`details` say which, how high it is and how much is in use. Delete what is not needed, or have the quota raised.",
        ),
        ErrorCode::TooManyRequests => {
            ("This key sends more requests than it may, or too many are waiting.", "Try again after `Retry-After`.")
        }
        ErrorCode::Internal => (
            "A mistake of the server's. No request should bring this about; if yours does, it is a bug.",
            "`details.request` finds it in `viv logs --daemon`. Please report it.",
        ),
        ErrorCode::ProviderUnavailable => (
            "Whoever runs the sandboxes cannot be reached, so nothing is known about them right now. Nothing is taken for gone (T7).",
            "Try again after `Retry-After`. `viv doctor` says what is wrong.",
        ),
        ErrorCode::StoreUnavailable => (
            "The record cannot be written: the disk is full or failing, or the database does not answer. What is not written is not acknowledged, so nothing was changed.",
            "Make room, or look at the disk; `viv doctor` and `/ready` say what is wrong.",
        ),
        ErrorCode::Draining => (
            "The daemon is being drained: it takes no new work, and every sandbox is saved or finished (L21). Looking is still possible.",
            "Use another one, or try again after `Retry-After`; `viv undrain` ends it, `viv drain --status` says how far it is.",
        ),
        ErrorCode::ShuttingDown => (
            "The daemon is ending. Sandboxes run on, and are found again when it is back.",
            "Try again after `Retry-After`.",
        ),
    }
}

/// One as it may come.
fn example(code: ErrorCode) -> ApiError {
    let details = ErrorDetails::default;
    let new = |message: &str| ApiError::new(code, message);
    match code {
        ErrorCode::InvalidRequest => ApiError::invalid(
            "name",
            "a name must be small letters, digits and hyphens, without a hyphen at either end",
        ),
        ErrorCode::Unauthenticated => {
            new("a key is needed, and this one is not good").hint("send Authorization: Bearer KEY")
        }
        ErrorCode::Forbidden => new("this key may only read").hint("use a key with the scope project or admin"),
        ErrorCode::NotFound => ApiError::not_found("sandbox build-agent").hint("viv ps --all lists those there are"),
        ErrorCode::MethodNotAllowed => new("this path has no PUT"),
        ErrorCode::NotAcceptable => new("this path answers in application/json"),
        ErrorCode::RequestTimeout => new("the request's body did not arrive within 30 s"),
        ErrorCode::Conflict => new("/workspace/src is a directory")
            .hint("write to a file in it, or remove it first")
            .details(ErrorDetails { what: Some("/workspace/src".to_owned()), ..details() }),
        ErrorCode::NameTaken => new("sbx_01h2xcejqtf2nbrexx3vqjhp41 has the name build-agent")
            .hint("viv ensure build-agent makes it run")
            .details(ErrorDetails { what: Some("sbx_01h2xcejqtf2nbrexx3vqjhp41".to_owned()), ..details() }),
        ErrorCode::SnapshotInUse => new("snp_01h2xcejqtf2nbrexx3vqjhp41 is in use")
            .hint("delete those who begin with it first: viv rm")
            .details(ErrorDetails { used_by: Some(vec!["sbx_01h2xcejqtf2nbrexx3vqjhp41".to_owned()]), ..details() }),
        ErrorCode::IdempotencyMismatch => {
            new("this idempotency key came with another request before").hint("use a new key for a new request")
        }
        ErrorCode::NotRunning => new("the sandbox is hibernated")
            .hint("viv ensure build-agent makes it run")
            .details(ErrorDetails { status: Some(Status::Hibernated), phase: Some(Phase::Hibernated), ..details() }),
        ErrorCode::LifecycleLocked => {
            new("the sandbox is being saved").hint("try again in a moment").details(ErrorDetails {
                phase: Some(Phase::Hibernating),
                holder: Some("daemon-1".to_owned()),
                since_at_ms: Some(1_794_736_800_000),
                expires_at_ms: Some(1_794_736_830_000),
                ..details()
            })
        }
        ErrorCode::AbsenceUnproven => new("it could not be shown that generation 3 is gone")
            .hint("try again when the provider answers; viv doctor says whether it does"),
        ErrorCode::Expired => new("the sandbox has expired")
            .hint("viv ensure build-agent makes it run again")
            .details(ErrorDetails { status: Some(Status::Hibernated), ..details() }),
        ErrorCode::Timeout => new("the agent did not answer within 10 s").hint("look with viv show --verify"),
        ErrorCode::StaleHandle => {
            ApiError::stale_handle(Generation(1), Generation(2), "it was lost (oom_killed) and made again")
        }
        ErrorCode::Gone => new("the sandbox was deleted").details(ErrorDetails {
            status: Some(Status::Stopped),
            what: Some("user_delete".to_owned()),
            ..details()
        }),
        ErrorCode::PayloadTooLarge => new("the body is larger than 1048576 bytes").details(ErrorDetails {
            quota: Some("body_bytes".to_owned()),
            limit: Some(1_048_576),
            ..details()
        }),
        ErrorCode::UnsupportedMedia => new("this path takes application/json"),
        ErrorCode::Unsupported => new("this machine cannot limit the speed of writing: cgroup v1 counts it for nobody")
            .hint("leave io_write_bps out")
            .details(ErrorDetails { capability: Some("limit_io_write".to_owned()), ..details() }),
        ErrorCode::QuotaExceeded => {
            ApiError::quota_exceeded("sandboxes of project default", 20, 20).hint("delete what is not needed: viv ps")
        }
        ErrorCode::TooManyRequests => {
            new("too many requests").details(ErrorDetails { retry_after_ms: Some(1_000), ..details() })
        }
        ErrorCode::Internal => new("something went wrong here")
            .hint("viv logs --daemon says more about req_01h2xcejqtf2nbrexx3vqjhp41")
            .details(ErrorDetails { request: Some("req_01h2xcejqtf2nbrexx3vqjhp41".to_owned()), ..details() }),
        ErrorCode::ProviderUnavailable => {
            new("the provider cannot be reached").details(ErrorDetails { retry_after_ms: Some(5_000), ..details() })
        }
        ErrorCode::StoreUnavailable => {
            new("the record cannot be written").hint("viv doctor says what is wrong with the disk")
        }
        ErrorCode::ShuttingDown => new("the daemon is ending"),
        ErrorCode::Draining => new("the daemon is being drained and takes no new work").hint("viv undrain ends it"),
    }
}

/// The page about a code.
pub fn page(code: ErrorCode) -> String {
    let Entry { when, then, example } = entry(code);
    let status = code.status();
    let mut page = format!("# {code}\n\n**Status {status}** {}", reason(status));
    if let Some(seconds) = code.retry_after_s() {
        let _ = write!(page, " · `Retry-After: {seconds}` or more");
    }
    let example = serde_json::to_string_pretty(&example.into_body()).expect("an error is JSON");
    let _ = write!(
        page,
        "\n\n## When\n\n{when}\n\n## What to do\n\n{then}\n\n## Example\n\n```json\n{example}\n```\n\n\
         [All errors](README.md). This page is written from `crates/viv-api/src/catalogue.rs`.\n"
    );
    page
}

/// The page about all codes.
pub fn index() -> String {
    let mut page = "# Errors\n\nEvery error of the API has one shape: `{\"error\": {\"code\", \"message\", \"hint\", \
                    \"docs\", \"details\"}}`. The code is one of these and will not change its meaning; the message \
                    is for people and may. `hint` and `details` are there when there is something to say.\n\n\
                    | status | code | when |\n|---|---|---|\n"
        .to_owned();
    for &code in ErrorCode::ALL {
        let when = entry(code).when;
        let first = when.split_once(". ").map_or(when.trim_end_matches('.'), |(first, _)| first);
        let _ = writeln!(page, "| {} | [`{code}`]({code}.md) | {first} |", code.status());
    }
    page.push_str("\nThis page is written from `crates/viv-api/src/catalogue.rs`: ");
    page.push_str("`UPDATE=1 cargo test -p viv-api --test error_pages`.\n");
    page
}

/// What HTTP calls a status.
fn reason(status: u16) -> &'static str {
    match status {
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        406 => "Not Acceptable",
        408 => "Request Timeout",
        409 => "Conflict",
        410 => "Gone",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "",
    }
}
