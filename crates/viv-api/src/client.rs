//! A blocking client.
//!
//! ```no_run
//! use viv_api::client::{Client, Location};
//! use viv_api::execution::StartExecution;
//! use viv_api::sandbox::CreateSandbox;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::locate(Location::new("http://127.0.0.1:7711").key("vk_…"))?;
//! let made = client.create(&CreateSandbox::default(), None)?.into_sandbox();
//! let sandbox = client.sandbox(made.id).at(made.generation);
//! let execution = sandbox.start(&StartExecution::of(["echo", "hello"])?, None)?;
//! for line in sandbox.execution(execution.id).follow(0) {
//!     println!("{:?}", line?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! - Where the server is and which key to use is told ([`Location`]); nothing is read from the environment.
//! - A handle may carry a generation ([`SandboxHandle::at`]), and then every call says so: what was made again since
//!   is never touched by accident (T5).
//! - Nothing that changes something is repeated by itself. Streams are: output goes on at the byte and events at the
//!   row after the last one that arrived (X2).

mod admin;
mod error;
mod events;
mod execution;
mod files;
mod http;
mod output;
mod reconcile;
mod sandbox;
mod schedule;
mod snapshots;
mod stream;
mod subscription;
mod task;

use std::time::Duration;

pub use error::ClientError;
pub use events::Events;
pub use execution::ExecutionHandle;
pub use files::{Changes, Download};
pub use output::Output;
pub use sandbox::SandboxHandle;

use crate::bound::SandboxRef;
use crate::sandbox::Sandbox;

type Result<T> = std::result::Result<T, ClientError>;

/// How long to wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to wait for an answer that needs no waiting; the server itself waits 10 s for a provider.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a stream may say nothing. Servers give a sign of life more often than that.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(45);

/// Where a server is, and how to be let in.
#[derive(Clone)]
pub struct Location {
    url: String,
    key: Option<String>,
    name: String,
    authorities_pem: Vec<u8>,
    silence_timeout: Duration,
}

impl Location {
    /// A server, like `http://127.0.0.1:7711`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            key: None,
            name: "viv-api".to_owned(),
            authorities_pem: Vec::new(),
            silence_timeout: SILENCE_TIMEOUT,
        }
    }

    /// With this key.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// What this client calls itself in a diagnosis: `cli`, `dashboard`.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Whom to believe about `https`: certificates in PEM.
    #[must_use]
    pub fn authorities_pem(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authorities_pem = pem.into();
        self
    }

    /// How long a stream may say nothing before it is taken for broken.
    #[must_use]
    pub fn silence_timeout(mut self, timeout: Duration) -> Self {
        self.silence_timeout = timeout;
        self
    }
}

impl std::fmt::Debug for Location {
    /// Without the key: what is printed ends up in logs (S6).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Location").field("url", &self.url).field("name", &self.name).finish_non_exhaustive()
    }
}

/// A client of one server. Cloning it shares its connections.
#[derive(Clone)]
pub struct Client {
    http: http::Http,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("location", &self.http.location).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server there. Nothing is sent yet.
    pub fn locate(location: Location) -> Result<Self> {
        Ok(Self { http: http::Http::new(location)? })
    }

    /// A handle on a sandbox, by id or name. Nothing is asked yet.
    pub fn sandbox(&self, sandbox: impl Into<SandboxRef>) -> SandboxHandle<'_> {
        SandboxHandle::new(self, sandbox.into())
    }
}

/// What came of a change that takes time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It is done.
    Done(Box<Sandbox>),
    /// It goes on by itself; this is how things stand.
    Underway(Box<Sandbox>),
}

impl Change {
    /// The sandbox, done or not.
    pub fn into_sandbox(self) -> Sandbox {
        match self {
            Self::Done(sandbox) | Self::Underway(sandbox) => *sandbox,
        }
    }
}
