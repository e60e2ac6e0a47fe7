//! What every request goes through: it makes sense as a request, there is room for it, and no panic gets out.

use std::net::{IpAddr, SocketAddr};
use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, Response};
use axum::middleware::Next;
use axum::response::IntoResponse;
use futures_util::FutureExt;
use tokio::sync::watch;
use tracing::Instrument;
use viv_api::error::{ApiError, ErrorCode};
use viv_engine::metrics::family;

use crate::refusal::{Refusal, internal, invalid};
use crate::state::ServerState;
use crate::trace;

/// Under which word a request stands in the log; told with every answer.
const REQUEST_ID: &str = "viv-request";

/// Who is at the other end; put there by who accepted the connection.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// Rings when the server ends, so that streams do; put there by who accepted the connection.
#[derive(Debug, Clone)]
pub(crate) struct Ending(pub(crate) watch::Receiver<bool>);

impl Peer {
    /// The address, by which peers are told apart. Addresses of one network's IPv6 users are one: they have many.
    pub(crate) fn address(self) -> IpAddr {
        match self.0.ip() {
            IpAddr::V6(address) => match address.to_ipv4_mapped() {
                Some(mapped) => mapped.into(),
                None => IpAddr::V6((u128::from(address) & !u128::from(u64::MAX)).into()),
            },
            v4 @ IpAddr::V4(_) => v4,
        }
    }
}

/// A short random word.
pub(crate) fn word() -> String {
    let mut bytes = [0; 8];
    // Without randomness a request has the same word as another one, which is no reason to fail.
    let _ = getrandom::fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) async fn guard(State(state): State<ServerState>, request: Request, next: Next) -> Response<Body> {
    let id = word();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned());
    let began = std::time::Instant::now();
    let verb = verb(&method);
    let span = trace::request(&state, &request, (verb, route.as_deref()), &id);
    let answered = match admitted(&state, &request) {
        Ok(_room) => {
            AssertUnwindSafe(next.run(request)).catch_unwind().instrument(span.clone()).await.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                internal(&format!("{method} {path} panicked: {text}")).into_response()
            })
        }
        Err(refusal) => refusal.into_response(),
    };
    tracing::debug!(component = "server", request = id, %method, path, status = answered.status().as_u16(), "answered");
    trace::answered(&span, answered.status());
    let metrics = state.engine().metrics();
    metrics.observe(&family::HTTP_SECONDS, &[verb], began.elapsed().as_secs_f64());
    let code = answered.status();
    metrics.count(&family::HTTP_REQUESTS, &[verb, route.as_deref().unwrap_or("none"), code.as_str()]);
    let mut answered = answered;
    if let Ok(value) = HeaderValue::from_str(&id) {
        answered.headers_mut().insert(REQUEST_ID, value);
    }
    answered
}

/// The word for a method; anybody can make up others.
fn verb(method: &Method) -> &'static str {
    [Method::GET, Method::POST, Method::PUT, Method::DELETE]
        .iter()
        .zip(["GET", "POST", "PUT", "DELETE"])
        .find_map(|(known, word)| (known == method).then_some(word))
        .unwrap_or("other")
}

fn admitted<'s>(state: &'s ServerState, request: &Request) -> Result<tokio::sync::SemaphorePermit<'s>, Refusal> {
    let uri = request.uri();
    if !is_well_encoded(uri.path()) || !is_well_encoded(uri.query().unwrap_or_default()) {
        let hint = "percent-encode as UTF-8: two hexadecimal digits after every percent sign";
        return Err(invalid("the address is not encoded properly", hint));
    }
    state.requests().try_acquire().map_err(|_| {
        let max = state.bounds().requests_max;
        let error = ApiError::new(ErrorCode::TooManyRequests, format!("{max} requests are being answered already"));
        Refusal(error.hint("try again in a moment"))
    })
}

/// Whether what stands behind the percent signs is UTF-8 without NUL.
fn is_well_encoded(text: &str) -> bool {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
            let (Some(high), Some(low)) = (digit(), digit()) else { return false };
            bytes.push((high * 16 + low) as u8);
        } else {
            bytes.push(byte);
        }
    }
    std::str::from_utf8(&bytes).is_ok()
}

/// There is nothing at this path.
pub(crate) async fn no_such_path() -> Refusal {
    Refusal(ApiError::not_found("this path").hint("/v1/openapi.json tells what there is"))
}

/// There is something at this path, and not with this method.
pub(crate) async fn no_such_method() -> Refusal {
    let error = ApiError::new(ErrorCode::MethodNotAllowed, "this path has no such method");
    Refusal(error.hint("the header Allow tells which it has"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s5_encodings_that_make_no_sense_are_seen() {
        for good in ["", "/a", "/%41%c3%bc", "a=%25", "+"] {
            assert!(is_well_encoded(good), "{good}");
        }
        for bad in ["%", "%4", "%zz", "%ff", "%c3", "%c3a", "%+4"] {
            assert!(!is_well_encoded(bad), "{bad}");
        }
    }

    #[test]
    fn peers_of_one_ipv6_network_are_one() {
        let peer = |text: &str| Peer(text.parse().unwrap()).address();
        assert_eq!(peer("[2001:db8::1]:5"), peer("[2001:db8::ffff:2]:9"));
        assert_ne!(peer("[2001:db8::1]:5"), peer("[2001:db8:0:1::1]:5"));
        assert_eq!(peer("[::ffff:192.0.2.1]:5"), peer("192.0.2.1:7"));
        assert_ne!(peer("192.0.2.1:5"), peer("192.0.2.2:5"));
    }
}
