//! How the server is set up. Every bound has its reason beside it (S5); defaults are what ships.

use std::path::PathBuf;
use std::time::Duration;

/// How the server is set up.
#[derive(Debug, Clone, Default)]
pub struct ServerConfig {
    /// What runs here.
    pub build: Build,
    /// What is too much.
    pub bounds: Bounds,
    /// Where copies of the store are made that somebody asks for; without, there are none.
    pub copies: Option<PathBuf>,
    /// Folders of the host that only those are told of who run it (S6).
    pub private_places: Vec<String>,
}

/// What runs here, as `/v1/version` tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    /// Version of the daemon.
    pub version: String,
    /// The commit it was built from.
    pub commit: String,
}

impl Default for Build {
    fn default() -> Self {
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), commit: "unknown".to_owned() }
    }
}

/// What is too much, and how long is too long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Connections at once: each has a descriptor and a few buffers.
    pub connections_max: usize,
    /// Requests whose answer has not begun: fewer than connections, so that streams leave room for looking.
    pub requests_max: usize,
    /// Of these, one key of a project: a quarter, so that it takes more than three to be in everybody's way.
    pub key_requests_max: usize,
    /// Of these, what keys of projects never get: so many can an operator ask at once whatever they do.
    pub admin_requests_kept: usize,
    /// Headers of a request: it is kept as a whole.
    pub header_bytes_max: usize,
    /// A JSON body: it is kept as a whole, and parsed into something larger.
    pub json_bytes_max: usize,
    /// One piece of input for a command: it is kept as a whole. There may be many.
    pub input_bytes_max: usize,
    /// A file: streamed, so only the sandbox's disk has to hold it.
    pub file_bytes_max: u64,
    /// An archive, as it arrives: streamed.
    pub archive_bytes_max: u64,
    /// How long headers may take, also those of the next request of a connection.
    pub header_within: Duration,
    /// How long a body may pause.
    pub body_idle: Duration,
    /// How long one may take that is kept as a whole: a byte now and then holds no request for ever. Those that are
    /// streamed are as long as they are, and only may not pause.
    pub body_within: Duration,
    /// How long a reader may refuse to read before it is let go: what it does not read, nobody keeps for it.
    pub write_idle: Duration,
    /// The longest that a request waits for a sandbox: who needs longer asks again.
    pub wait_max: Duration,
    /// How often a stream says that it lives.
    pub heartbeat: Duration,
    /// How long requests in flight may take to end when the server does.
    pub drain: Duration,
    /// Requests of one key: a second's worth, and how many at once.
    pub key_rate: Rate,
    /// Wrong keys from one address.
    pub wrong_key_rate: Rate,
}

/// How often something may happen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// This often in a second, for ever.
    pub per_second: f64,
    /// This often at once.
    pub burst: f64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections_max: 2_000,
            requests_max: 1_000,
            key_requests_max: 250,
            admin_requests_kept: 50,
            header_bytes_max: 64 << 10,
            json_bytes_max: 1 << 20,
            input_bytes_max: 1 << 20,
            file_bytes_max: 16 << 30,
            archive_bytes_max: 16 << 30,
            header_within: Duration::from_secs(10),
            body_idle: Duration::from_secs(30),
            body_within: Duration::from_secs(60),
            write_idle: Duration::from_secs(30),
            wait_max: Duration::from_secs(300),
            heartbeat: Duration::from_secs(15),
            drain: Duration::from_secs(10),
            key_rate: Rate { per_second: 1_000.0, burst: 2_000.0 },
            wrong_key_rate: Rate { per_second: 1.0, burst: 20.0 },
        }
    }
}
