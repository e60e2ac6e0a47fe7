//! Registries: the distribution protocol, as little of it as pulling and pushing images needs.
//!
//! The requests are our own, on `ureq`, rather than `oci-client`'s. That one reads manifests, tokens and errors into
//! memory however long they are, asks for a token wherever the registry says, follows redirects by its HTTP client's
//! rules, and checks whole blobs but not those in parts; files, locks, pauses and repetitions would be ours anyway.
//! It also needs an async runtime where the callers here are threads. With `ureq` (blocking, rustls on ring) and what
//! else this crate uses, the workspace's lock file grows by 27 crates, built in half a minute on two cores; C is
//! compiled for ring and zstd only, without cmake.
//!
//! A registry is not trusted:
//!
//! - Documents and blobs are checked against their digests, and are never longer than was promised.
//! - Credentials go to the registry that they are for, and to the token service that it names, and nowhere else: not
//!   along redirects, and not from an encrypted registry to anything that is not.
//! - Plain HTTP is spoken with loopback addresses and hosts that the caller lists.
//! - Every wait ends: connecting, silence, whole documents; and the caller can stop a transfer at any piece.

mod auth;
mod credentials;
mod fetch;
mod http;
mod pull;
mod push;
mod retry;
mod tls;
mod url;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

#[doc(hidden)]
pub use auth::challenges;
pub use credentials::{Credential, Credentials, CredentialsError};

use self::auth::Authorizations;
use self::url::{Endpoint, Plain};
use crate::blobs::BlobError;
use crate::digest::Digest;
use crate::document::DocumentError;
use crate::limits::REDIRECTS_MAX;
use crate::write::WriteError;

/// How registries are spoken to.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who we are.
    pub credentials: Credentials,
    /// Hosts, with their ports if they are not standard, that are spoken to without encryption.
    /// Loopback addresses are without being listed.
    pub plain_http: BTreeSet<String>,
    /// Loopback addresses that are spoken to with encryption nevertheless.
    pub encrypted_loopback: BTreeSet<String>,
    /// Hosts that are asked before a registry, by the registry's name; for pulling only.
    pub mirrors: BTreeMap<String, Vec<String>>,
    /// For a connection, encryption included.
    pub connect_timeout: Duration,
    /// For the next bytes, either way.
    pub silence_timeout: Duration,
    /// For a whole document: a manifest, a configuration, a token.
    pub document_timeout: Duration,
    /// For a registry to take in a layer that was sent.
    pub commit_timeout: Duration,
    /// How long to wait for somebody else who fetches the same blob.
    pub lock_timeout: Duration,
    /// How often a request is repeated; a download that gets somewhere begins to count anew.
    pub retries: u32,
    /// Before the first repetition; doubled for each.
    pub backoff: Duration,
    /// No wait is longer, even if the registry asks for it.
    pub backoff_max: Duration,
    /// Longest blob that is fetched.
    pub blob_bytes_max: u64,
    /// What we call ourselves.
    pub user_agent: String,
    /// Certificates to trust besides the machine's.
    pub extra_ca_file: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            credentials: Credentials::default(),
            plain_http: BTreeSet::new(),
            encrypted_loopback: BTreeSet::new(),
            mirrors: BTreeMap::new(),
            connect_timeout: Duration::from_secs(15),
            silence_timeout: Duration::from_secs(30),
            document_timeout: Duration::from_secs(60),
            commit_timeout: Duration::from_secs(300),
            lock_timeout: Duration::from_secs(30 * 60),
            retries: 4,
            backoff: Duration::from_millis(500),
            backoff_max: Duration::from_secs(20),
            blob_bytes_max: 64 << 30,
            user_agent: concat!("vivarium/", env!("CARGO_PKG_VERSION")).to_owned(),
            extra_ca_file: None,
        }
    }
}

/// What a transfer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Somebody else is fetching the same blob.
    Waiting,
    /// Bytes arrive.
    Fetching,
    /// Bytes leave.
    Pushing,
    /// It broke, and is tried again after a pause.
    Retrying,
    /// Nothing had to be moved.
    Present,
    /// All is there, and checked.
    Done,
}

/// How far a transfer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Of what.
    pub digest: Digest,
    /// Doing what.
    pub phase: Phase,
    /// So far.
    pub done_bytes: u64,
    /// In the end.
    pub total_bytes: u64,
}

/// What went wrong between us and a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No connection, or it broke, or nothing came.
    #[error("{host} cannot be reached")]
    Unreachable {
        /// Whom.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its certificate is not one that we trust, or the encryption failed otherwise.
    #[error("{host} cannot be trusted")]
    Untrusted {
        /// Whom.
        host: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The image or the blob is not there.
    #[error("{what} is not in {host}")]
    NotFound {
        /// Who was asked.
        host: String,
        /// For what.
        what: String,
    },
    /// Credentials are missing or wrong. Registries answer this for what does not exist, too.
    #[error("{host} does not let us read or write {what}")]
    Denied {
        /// Who was asked.
        host: String,
        /// For what.
        what: String,
        /// Whether we said who we are.
        anonymous: bool,
    },
    /// Too many requests for its taste.
    #[error("{host} asks us to come back later")]
    Throttled {
        /// Who was asked.
        host: String,
        /// When, as it says.
        retry_after: Option<Duration>,
    },
    /// Any other answer.
    #[error("{host} answered {status} for {what}{message}")]
    Status {
        /// Who was asked.
        host: String,
        /// With which HTTP status.
        status: u16,
        /// For what.
        what: String,
        /// What it says about it, after a colon.
        message: String,
    },
    /// The answer makes no sense, or is an attempt at something.
    #[error("{host} gave an answer that is not accepted: {problem}")]
    BadAnswer {
        /// Who was asked.
        host: String,
        /// What is wrong.
        problem: String,
    },
    /// From one host to the next.
    #[error("{host} redirects more than {REDIRECTS_MAX} times")]
    Redirects {
        /// Who was asked first.
        host: String,
    },
    /// We would have to speak without encryption.
    #[error("{host} is to be reached without encryption, which was not allowed")]
    Plain {
        /// Whom.
        host: String,
    },
    /// A document is wrong.
    #[error("the image in {host} is not valid")]
    Document {
        /// Who was asked.
        host: String,
        /// What is wrong.
        #[source]
        source: DocumentError,
    },
    /// A blob's content is not what it is called.
    #[error("{host} sent something else for {expected}: {found}")]
    WrongBlob {
        /// Who was asked.
        host: String,
        /// For what.
        expected: Digest,
        /// What came.
        found: Digest,
    },
    /// A layer is longer than is fetched.
    #[error("{digest} has {size} bytes, more than the {limit_bytes} that are fetched")]
    TooLarge {
        /// Which.
        digest: Digest,
        /// Its length.
        size: u64,
        /// How long it may be.
        limit_bytes: u64,
    },
    /// The folder of blobs.
    #[error("the blob cannot be kept")]
    Blob(#[source] BlobError),
    /// The image to push.
    #[error("the image cannot be pushed")]
    Write(#[from] WriteError),
    /// Certificates cannot be read.
    #[error("{} cannot be used", path.display())]
    Certificates {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The machine has no certificates to check a registry's against.
    #[error("this machine has no certificate authorities to check {host} with")]
    NoCertificates {
        /// Whom.
        host: String,
    },
    /// The options make no sense.
    #[error("{0:?} is no host name")]
    BadHost(String),
    /// A reference with a digest cannot be pushed to: the digest comes out of it.
    #[error("an image is pushed to a tag, not to a digest")]
    PushToDigest,
    /// The caller's callback said so.
    #[error("cancelled")]
    Cancelled,
}

impl RegistryError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Denied { anonymous: true, .. } => {
                Some("check the name; if it is private, name a docker config.json with credentials for the registry")
            }
            Self::Denied { anonymous: false, .. } => Some("check the name, and the credentials for the registry"),
            Self::Plain { .. } => {
                Some("list the host among those that may be spoken to in plain HTTP, if you trust the network")
            }
            Self::Untrusted { .. } => {
                Some("if its certificate is from an authority of your own, name the authority's file")
            }
            Self::NoCertificates { .. } => Some("install ca-certificates"),
            Self::Throttled { .. } => Some("try later, log in, or use a mirror"),
            _ => None,
        }
    }

    /// Whether the same request may succeed later.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Throttled { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 425 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }
}

impl From<BlobError> for RegistryError {
    fn from(error: BlobError) -> Self {
        match error {
            BlobError::Cancelled => Self::Cancelled,
            error => Self::Blob(error),
        }
    }
}

/// A client for all registries. It can be shared by threads.
pub struct Registry {
    agent: ureq::Agent,
    options: Options,
    authorizations: Authorizations,
    has_certificates: bool,
    plain: Plain,
}

impl Registry {
    /// A client. Nothing is connected yet; the machine's certificates are read.
    pub fn new(options: Options) -> Result<Self, RegistryError> {
        let hosts = options.plain_http.iter().chain(options.mirrors.values().flatten());
        if let Some(wrong) = hosts.into_iter().find(|host| !crate::reference::valid_registry(host)) {
            return Err(RegistryError::BadHost(wrong.clone()));
        }
        let roots = tls::roots(options.extra_ca_file.as_deref())?;
        let has_certificates = !roots.is_empty();
        let agent = http::agent(&options, roots);
        let plain = Plain { listed: options.plain_http.clone(), encrypted: options.encrypted_loopback.clone() };
        Ok(Self { agent, options, authorizations: Authorizations::default(), has_certificates, plain })
    }

    /// Who is asked for an image that is pulled, in order.
    fn pull_endpoints(&self, registry: &str) -> Vec<Endpoint> {
        let mirrors = self.options.mirrors.get(registry).into_iter().flatten();
        mirrors.map(String::as_str).chain([registry]).map(|host| self.endpoint(host)).collect()
    }

    fn endpoint(&self, registry: &str) -> Endpoint {
        Endpoint::new(registry, &self.plain)
    }
}
