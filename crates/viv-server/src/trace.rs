//! The span of a request: it goes on from that of who asked, where that is told (`traceparent`).

use axum::extract::Request;
use axum::http::StatusCode;
use tracing::field::{Empty, display};
use tracing::{Span, info_span};
use viv_core::SandboxId;
use viv_engine::TraceParent;

use crate::state::ServerState;

/// Where W3C says that a trace comes from.
const TRACEPARENT: &str = "traceparent";

/// The span of a request, which stands in the log under `id`. Of its path, only the template and ids are told.
pub(crate) fn request(
    state: &ServerState,
    request: &Request,
    (verb, route): (&'static str, Option<&str>),
    id: &str,
) -> Span {
    let span = info_span!(
        parent: None,
        "request",
        otel.name = match route {
            Some(route) => format!("{verb} {route}"),
            None => verb.to_owned(),
        },
        otel.kind = "server",
        http.request.method = verb,
        http.route = route,
        http.response.status_code = Empty,
        viv.request = id,
        viv.sandbox = Empty,
        otel.status_code = Empty,
    );
    if span.is_disabled() {
        return span;
    }
    if let Some(sandbox) = route.and_then(|route| sandbox_in(route, request.uri().path())) {
        span.record("viv.sandbox", display(sandbox));
    }
    // A header twice, or one that makes no sense, is as good as none.
    let mut headers = request.headers().get_all(TRACEPARENT).iter();
    let parent = headers.next().filter(|_| headers.next().is_none()).and_then(|value| value.to_str().ok());
    if let (Some(traces), Some(parent)) = (state.engine().tracing(), parent)
        && let Ok(parent) = parent.trim().parse::<TraceParent>()
    {
        traces.follow(&span, &parent);
    }
    span
}

/// The request that is being answered is about this sandbox, which its path does not name.
pub(crate) fn about(sandbox: &SandboxId) {
    Span::current().record("viv.sandbox", display(sandbox));
}

/// The answer begins.
pub(crate) fn answered(span: &Span, status: StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}

/// The sandbox that a path names by its id.
fn sandbox_in(route: &str, path: &str) -> Option<SandboxId> {
    let mut parts = route.split('/').zip(path.split('/'));
    parts.find_map(|(name, part)| if name == "{sandbox}" { part.parse().ok() } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o4_only_ids_of_sandboxes_are_told() {
        let route = "/v1/sandboxes/{sandbox}/files";
        let id = SandboxId::from_bytes([7; 16]).to_string();
        assert_eq!(sandbox_in(route, &format!("/v1/sandboxes/{id}/files")).unwrap().to_string(), id);
        assert_eq!(sandbox_in(route, "/v1/sandboxes/some-name/files"), None);
        assert_eq!(sandbox_in("/v1/keys/{key}", "/v1/keys/key_1"), None);
    }
}
