//! Answers that go on. The reader pulls: what it does not read is not made, so nothing piles up for it.
//!
//! A stream ends by itself when there is no more, and without a last word when the server ends; the reader goes on
//! later from where it was.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderValue, Response, header};
use futures_util::stream;
use tokio::sync::{mpsc, watch};
use tokio_util::io::ReaderStream;
use tracing::Instrument;
use viv_provider::ByteReader;

use crate::guard::Ending;
use crate::refusal::Answer;
use crate::state::ServerState;

/// Pieces that wait between who makes them and who reads them.
const WAITING_MAX: usize = 16;

/// Bytes of a file in one piece.
const PIECE_BYTES: usize = 64 << 10;

/// Rings when the server ends.
#[derive(Debug)]
pub(crate) struct UntilEnd(Option<watch::Receiver<bool>>);

impl FromRequestParts<ServerState> for UntilEnd {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &ServerState) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get::<Ending>().map(|ending| ending.0.clone())))
    }
}

impl UntilEnd {
    /// Answers when the server ends.
    async fn ended(&mut self) {
        match &mut self.0 {
            // An error means that whoever accepted the connection is gone, and that is the end too.
            Some(ending) => drop(ending.wait_for(|ending| *ending).await),
            None => std::future::pending().await,
        }
    }
}

/// An answer of this type that never comes from a cache.
pub(crate) fn answer(media: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Some proxies would rather wait for more.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Bytes as they come.
pub(crate) fn bytes(media: &'static str, reader: ByteReader) -> Response<Body> {
    answer(media, Body::from_stream(ReaderStream::with_capacity(reader, PIECE_BYTES)))
}

/// Pieces from a task that makes them, with a sign of life when there are none for a while.
///
/// The task lives as long as somebody reads: `make` is dropped where it waits when nobody does, or the server ends.
pub(crate) fn pieces<F>(
    media: &'static str,
    (every, alive): (Duration, impl Fn() -> Bytes + Send + 'static),
    mut until_end: UntilEnd,
    make: impl FnOnce(Pieces) -> F,
) -> Response<Body>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    let making = make(Pieces(sender.clone()));
    tokio::spawn(async move {
        tokio::select! {
            () = making => {}
            () = sender.closed() => {}
            () = until_end.ended() => {}
        }
    });
    let body = stream::unfold((receiver, alive), move |(mut receiver, alive)| async move {
        let piece = match tokio::time::timeout(every, receiver.recv()).await {
            Ok(piece) => piece?,
            Err(_) => alive(),
        };
        Some((Ok::<_, Infallible>(piece), (receiver, alive)))
    });
    answer(media, Body::from_stream(body))
}

/// Where the pieces of a stream go.
#[derive(Debug, Clone)]
pub(crate) struct Pieces(mpsc::Sender<Bytes>);

/// Nobody reads any more.
#[derive(Debug)]
pub(crate) struct Left;

impl Pieces {
    /// Gives one, and waits while the reader is slow.
    pub(crate) async fn give(&self, piece: impl Into<Bytes>) -> Result<(), Left> {
        self.0.send(piece.into()).await.map_err(|_| Left)
    }
}

/// One line of JSON.
pub(crate) fn line(what: &impl serde::Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(what).unwrap_or_default();
    line.push(b'\n');
    line
}

/// One server-sent event. JSON has no line breaks, so its data is one line.
pub(crate) fn event(id: Option<u64>, kind: &str, data: &impl serde::Serialize) -> Vec<u8> {
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    let data = serde_json::to_string(data).unwrap_or_default();
    format!("{id}event: {kind}\ndata: {data}\n\n").into_bytes()
}

/// A comment, by which readers of events see that the stream lives.
pub(crate) fn comment() -> Bytes {
    Bytes::from_static(b": alive\n\n")
}

/// Does something that must not end with who asked for it: an intent that is half recorded (L1).
pub(crate) async fn regardless<T, E>(work: impl Future<Output = Result<T, E>> + Send + 'static) -> Answer<T>
where
    T: Send + 'static,
    E: Into<crate::refusal::Refusal> + Send + 'static,
{
    match tokio::spawn(work.in_current_span()).await {
        Ok(answer) => answer.map_err(Into::into),
        Err(error) => Err(crate::refusal::internal(&format!("a task failed: {error}"))),
    }
}
