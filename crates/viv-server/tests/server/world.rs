//! A server on a provider and a store in memory, whose time is real time.

use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower::ServiceExt;
use viv_core::lifecycle::Actor;
use viv_core::spec::Project;
use viv_engine::{Clock, Engine, EngineConfig};
use viv_provider::sim::{SimClock, SimProvider};
use viv_server::{Bounds, LogRing, ServerConfig, ServerState, router, serve_within};
use viv_store::{KeyScope, MemoryStore, Owner, Store};

/// How long anything may take before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of the host, as it is told to the server.
pub(crate) const PRIVATE: &str = "/var/lib/somewhere";

/// How often the provider's clock is set to real time.
const TICK: Duration = Duration::from_millis(5);

/// Everything that a test talks to.
pub(crate) struct World {
    pub(crate) state: ServerState,
    pub(crate) engine: Engine,
    pub(crate) store: Arc<MemoryStore>,
    pub(crate) router: Router,
    pub(crate) bounds: Bounds,
    /// What the server tells as the daemon's log: nothing is in it that a test does not write.
    pub(crate) logs: LogRing,
    /// A key that may do everything.
    pub(crate) admin: String,
    ticking: JoinHandle<()>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.engine.shut_down();
        self.ticking.abort();
    }
}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) bytes: Vec<u8>,
}

impl Answered {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes)
            .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&self.bytes)))
    }

    /// The code of an error, whose shape is checked.
    pub(crate) fn code(&self) -> String {
        let body = self.json();
        let error = &body["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{body}");
        assert!(error["hint"].as_str().is_some_and(|text| !text.is_empty()), "an error helps: {body}");
        let code = error["code"].as_str().expect("a code");
        assert_eq!(error["docs"], json!(format!("docs/errors/{code}.md")));
        assert!(self.headers.contains_key("viv-request"));
        code.to_owned()
    }

    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", String::from_utf8_lossy(&self.bytes));
        self
    }
}

fn wall_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Bounds::default(), |_| {}).await
    }

    pub(crate) async fn with(bounds: Bounds, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let start_ms = wall_ms();
        let sim = SimClock::starting_at(start_ms);
        let provider = Arc::new(SimProvider::new(sim.clone()));
        let clock = Clock::showing(start_ms);
        let ticking = tokio::spawn(async move {
            loop {
                tokio::time::sleep(TICK).await;
                let passed_ms = clock.now_ms().saturating_sub(sim.now_ms());
                sim.advance(passed_ms);
            }
        });
        let store = Arc::new(MemoryStore::new());
        let owner = Owner {
            name: "test".to_owned(),
            boot_id: "boot".to_owned(),
            pid: 1,
            start_ticks: 1,
            epoch: 0,
            since_ms: start_ms,
        };
        let epoch = store.own(owner).await.expect("nobody else is here");
        let mut config = EngineConfig::new("viv-server-test".parse().expect("a mark"), "test");
        change(&mut config);
        let draw = || {
            let mut bytes = [0; 16];
            getrandom::fill(&mut bytes).expect("randomness");
            bytes
        };
        let engine =
            Engine::start(config, store.clone(), provider, epoch, clock, draw).await.expect("nothing is in the way");
        let config = ServerConfig { bounds, private_places: vec![PRIVATE.to_owned()], ..ServerConfig::default() };
        let logs = LogRing::default();
        let state = ServerState::new(engine.clone(), config, logs.clone()).await.expect("no keys yet");
        let first = state.first_key("first", Actor::part("test")).await.expect("a key").expect("the first");
        let router = router(state.clone());
        Self { state, engine, store, router, bounds, logs, admin: first.secret, ticking }
    }

    /// A key of a project.
    pub(crate) async fn key(&self, project: &str, read_only: bool) -> String {
        let project: Project = project.parse().expect("a project");
        let scope = if read_only { KeyScope::ReadOnly { project } } else { KeyScope::Project { project } };
        self.state.make_key("more", scope, Actor::part("test")).await.expect("a key").secret
    }

    /// Serves on loopback until the sender is used or dropped.
    pub(crate) async fn listen(&self) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("an address");
        let (end, ended) = oneshot::channel();
        let (router, bounds) = (self.router.clone(), self.bounds);
        let serving = tokio::spawn(async move {
            let shutdown = async { drop(ended.into_future().await) };
            serve_within(listener, router, bounds, shutdown).await.expect("serving");
        });
        (address, end, serving)
    }

    /// Sends a request, without reading the answer.
    pub(crate) async fn send(&self, request: Request<Body>) -> axum::response::Response {
        let sent = tokio::time::timeout(PATIENCE, self.router.clone().oneshot(request)).await;
        sent.expect("an answer in time").expect("infallible")
    }

    /// Sends a request and reads the answer.
    pub(crate) async fn whole(&self, request: Request<Body>) -> Answered {
        let (parts, body) = self.send(request).await.into_parts();
        let bytes = tokio::time::timeout(PATIENCE, body.collect()).await.expect("an end in time").expect("a body");
        Answered { status: parts.status, headers: parts.headers, bytes: bytes.to_bytes().to_vec() }
    }

    pub(crate) async fn get(&self, path: &str) -> Answered {
        self.whole(request(Method::GET, path, &self.admin, None)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answered {
        self.whole(request(Method::DELETE, path, &self.admin, None)).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answered {
        self.whole(request(Method::POST, path, &self.admin, Some(body))).await
    }

    pub(crate) async fn put(&self, path: &str, body: Value) -> Answered {
        self.whole(request(Method::PUT, path, &self.admin, Some(body))).await
    }

    pub(crate) async fn put_bytes(&self, path: &str, media: &str, body: impl Into<Body>) -> Answered {
        let request = bare(Method::PUT, path, &self.admin).header("content-type", media);
        self.whole(request.body(body.into()).expect("a request")).await
    }

    /// A sandbox that is ready; its path.
    pub(crate) async fn sandbox(&self) -> String {
        let made = self.post("/v1/sandboxes", json!({})).await.is(201).json();
        assert_eq!(made["status"], "ready", "{made}");
        format!("/v1/sandboxes/{}", made["id"].as_str().expect("an id"))
    }

    /// Starts a command; its path.
    pub(crate) async fn start(&self, sandbox: &str, argv: &[String], more: Value) -> String {
        let mut body = json!({ "argv": argv });
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        let started = self.post(&format!("{sandbox}/executions"), body).await.is(201).json();
        format!("{sandbox}/executions/{}", started["id"].as_str().expect("an id"))
    }
}

pub(crate) fn bare(method: Method, path: &str, key: &str) -> axum::http::request::Builder {
    Request::builder().method(method).uri(path).header("authorization", format!("Bearer {key}"))
}

pub(crate) fn request(method: Method, path: &str, key: &str, body: Option<Value>) -> Request<Body> {
    let request = bare(method, path, key);
    match body {
        Some(body) => {
            request.header("content-type", "application/json").body(Body::from(body.to_string())).expect("a request")
        }
        None => request.body(Body::empty()).expect("a request"),
    }
}

/// Looks again and again until something is so.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look().await {
            return seen;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what} did not come about");
        tokio::time::sleep(TICK).await;
    }
}
