//! Connections: bounded in number, in what they may say before they are heard, and in how long they may be silent.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;
use tower::ServiceExt;
use viv_api::error::{ApiError, ErrorCode};

use crate::config::Bounds;
use crate::guard::{Ending, Peer};

/// Most headers of one request.
const HEADERS_MAX: usize = 100;

/// How long to wait after the machine had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until `shutdown`; then takes no more, ends streams, and lets what is in flight end for a while.
/// Sandboxes are none of its business: they run on.
pub async fn serve(listener: TcpListener, router: Router, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    serve_within(listener, router, Bounds::default(), shutdown).await
}

/// [`serve`] with other bounds than those that ship.
pub async fn serve_within(
    listener: TcpListener,
    router: Router,
    bounds: Bounds,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let room = Arc::new(Semaphore::new(bounds.connections_max));
    let (end, ending) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = std::pin::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => match room.clone().try_acquire_owned() {
                Ok(permit) => {
                    let connection = Connection { router: router.clone(), peer: Peer(peer), ending: ending.clone() };
                    connections.spawn(connection.serve(stream, bounds, permit));
                }
                Err(_) => {
                    connections.spawn(turn_away(stream, bounds.connections_max));
                }
            },
            Err(error) => {
                // Whoever was about to connect went away, or there is no descriptor left: neither is the end.
                tracing::warn!(component = "server", %error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    end.send_replace(true);
    let drained = tokio::time::timeout(bounds.drain, async { while connections.join_next().await.is_some() {} });
    if drained.await.is_err() {
        tracing::warn!(component = "server", left = connections.len(), "requests did not end in time and were cut off");
        connections.shutdown().await;
    }
    Ok(())
}

struct Connection {
    router: Router,
    peer: Peer,
    ending: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(self, stream: TcpStream, bounds: Bounds, _permit: OwnedSemaphorePermit) {
        // Small answers shall not wait for more to come.
        let _ = stream.set_nodelay(true);
        let Self { router, peer, mut ending } = self;
        let told = Ending(ending.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(told.clone());
            router.clone().oneshot(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(bounds.header_within)
            .max_buf_size(bounds.header_bytes_max)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(Impatient::new(stream, bounds.write_idle)), service);
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = async { drop(ending.wait_for(|ending| *ending).await) } => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(component = "server", peer = %peer.0, %error, "a connection broke");
        }
    }
}

/// Says that there is no room, to who may not even have asked yet.
async fn turn_away(mut stream: TcpStream, max: usize) {
    let error = ApiError::new(ErrorCode::TooManyRequests, format!("{max} connections are open already"));
    let body = serde_json::to_string(&error.hint("try again in a moment").into_body()).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let said = async {
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        stream.shutdown().await
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), said).await;
}

/// A connection whose other end has to read: when it takes nothing for this long, it is over.
struct Impatient {
    stream: TcpStream,
    patience: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Impatient {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, patience, waiting: None }
    }

    /// What came of a try to write: time runs while there is no room, and starts anew when there was.
    fn tried<T>(&mut self, tried: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.waiting = None;
            return tried;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(waiting.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the reader does not read")))
    }
}

impl AsyncRead for Impatient {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Impatient {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.tried(tried, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.tried(tried, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
