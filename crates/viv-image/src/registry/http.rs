//! Requests to a registry: with authorization where it belongs, redirects where we may go, and answers made errors.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, LOCATION, RETRY_AFTER};
use ureq::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::{Agent, Body, SendBody};

use super::url::{Endpoint, Refused};
use super::{Options, Registry, RegistryError};
use crate::digest::shorten;
use crate::files::read_bounded;
use crate::limits::{ERROR_BYTES_MAX, REDIRECTS_MAX};

/// Headers of an answer; real ones are far shorter.
const HEADER_BYTES_MAX: usize = 64 << 10;

pub(super) fn agent(options: &Options, roots: Vec<Certificate<'static>>) -> Agent {
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        // Where redirects lead is decided here, and an answer that is an error is read for its message.
        .max_redirects(0)
        .http_status_as_error(false)
        // Otherwise it is taken from the environment.
        .proxy(None)
        .user_agent(&options.user_agent)
        .accept_encoding("identity")
        .max_response_header_size(HEADER_BYTES_MAX)
        .timeout_resolve(Some(options.connect_timeout))
        .timeout_connect(Some(options.connect_timeout))
        .timeout_per_read(Some(options.silence_timeout))
        .timeout_per_write(Some(options.silence_timeout))
        .timeout_send_request(Some(options.document_timeout))
        .timeout_recv_response(Some(options.document_timeout))
        .build()
        .into()
}

/// What is allowed to be done with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Access {
    Pull,
    Push,
}

/// Requests about one repository at one registry.
pub(super) struct Session<'a> {
    pub(super) registry: &'a Registry,
    pub(super) endpoint: &'a Endpoint,
    pub(super) repository: &'a str,
    pub(super) access: Access,
}

/// How long an answer may take as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// A document: it has a deadline.
    Whole,
    /// A blob: only silence ends it, and the caller.
    Stream,
}

/// A request without a body.
pub(super) struct Ask<'a> {
    pub(super) method: Method,
    pub(super) url: Uri,
    pub(super) headers: &'a [(&'static str, String)],
    pub(super) pace: Pace,
    /// For messages.
    pub(super) what: &'a str,
}

impl Session<'_> {
    pub(super) fn host(&self) -> String {
        self.endpoint.name.clone()
    }

    /// A path below the repository.
    pub(super) fn url(&self, path: &str) -> Uri {
        self.endpoint.url(&format!("/v2/{}/{path}", self.repository))
    }

    /// Asks, with authorization if the registry wants it, along redirects. The answer may be any but a redirect.
    pub(super) fn ask(&self, ask: &Ask<'_>) -> Result<Response<Body>, RegistryError> {
        let response = self.ask_once(ask)?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        self.authorize(response.headers(), ask.what)?;
        self.ask_once(ask)
    }

    fn ask_once(&self, ask: &Ask<'_>) -> Result<Response<Body>, RegistryError> {
        let mut url = ask.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let request = self.request(&ask.method, &url, ask.headers)?.body(());
            let request = request.map_err(|error| self.bad(&error.to_string()))?;
            let response = match ask.pace {
                Pace::Whole => {
                    let deadline = Some(self.registry.options.document_timeout);
                    let request = self.registry.agent.configure_request(request).timeout_global(deadline).build();
                    self.registry.agent.run(request)
                }
                Pace::Stream => self.registry.agent.run(request),
            };
            let response = response.map_err(|error| self.broken(error))?;
            if !is_redirect(response.status()) {
                // Only the registry itself may ask for authorization; a storage that does is just refusing.
                if response.status() == StatusCode::UNAUTHORIZED && !self.endpoint.is_home(&url) {
                    return Err(self.denied(ask.what));
                }
                return Ok(response);
            }
            let location = text(response.headers(), LOCATION.as_str())
                .ok_or_else(|| self.bad("a redirect without a place to go to"))?;
            url = self.follow(&url, location)?;
        }
        Err(RegistryError::Redirects { host: self.host() })
    }

    /// Sends a body of known length. Redirects are not followed, since the body is gone by then.
    pub(super) fn send(
        &self,
        method: &Method,
        url: &Uri,
        headers: &[(&'static str, String)],
        (length, body): (u64, &mut dyn io::Read),
    ) -> Result<Response<Body>, RegistryError> {
        let request = self.request(method, url, headers)?.header(CONTENT_LENGTH, length);
        let request = request.body(SendBody::from_reader(body)).map_err(|error| self.bad(&error.to_string()))?;
        let patience = Some(self.registry.options.commit_timeout);
        let request = self
            .registry
            .agent
            .configure_request(request)
            .timeout_per_read(patience)
            .timeout_recv_response(patience)
            .build();
        self.registry.agent.run(request).map_err(|error| self.broken(error))
    }

    /// A request, with authorization only if it goes to the registry itself.
    fn request(
        &self,
        method: &Method,
        url: &Uri,
        headers: &[(&'static str, String)],
    ) -> Result<ureq::http::request::Builder, RegistryError> {
        if url.scheme_str() == Some("https") && !self.registry.has_certificates {
            return Err(RegistryError::NoCertificates { host: self.host() });
        }
        let mut request = Request::builder().method(method.clone()).uri(url.clone());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        if self.endpoint.is_home(url)
            && let Some(authorization) = self.registry.authorizations.get(self)
        {
            let mut value = HeaderValue::from_str(&authorization).map_err(|_| self.bad("a token that is no text"))?;
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        Ok(request)
    }

    /// A place that the registry names.
    pub(super) fn follow(&self, from: &Uri, location: &str) -> Result<Uri, RegistryError> {
        self.endpoint.follow(from, location).map_err(|refused| match refused {
            Refused::Malformed(location) => self.bad(&format!("the place {location:?}")),
            Refused::Plain(host) => RegistryError::Plain { host },
        })
    }

    /// Reads a document of bounded length.
    pub(super) fn read_body(&self, response: Response<Body>, limit_bytes: u64) -> Result<Vec<u8>, RegistryError> {
        read_bounded(response.into_body().into_reader(), limit_bytes)
            .map_err(|source| self.cut(source))?
            .ok_or_else(|| self.bad(&format!("more than {limit_bytes} bytes")))
    }

    /// An answer that is not the one hoped for.
    pub(super) fn refused(&self, response: Response<Body>, what: &str) -> RegistryError {
        let host = self.host();
        let status = response.status();
        match status {
            StatusCode::NOT_FOUND => RegistryError::NotFound { host, what: what.to_owned() },
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => self.denied(what),
            StatusCode::TOO_MANY_REQUESTS => RegistryError::Throttled {
                host,
                retry_after: text(response.headers(), RETRY_AFTER.as_str())
                    .and_then(|seconds| seconds.parse().ok())
                    .map(Duration::from_secs),
            },
            status => {
                let message = message(response).map(|message| format!(": {message}")).unwrap_or_default();
                RegistryError::Status { host, status: status.as_u16(), what: what.to_owned(), message }
            }
        }
    }

    pub(super) fn denied(&self, what: &str) -> RegistryError {
        let anonymous = self.registry.options.credentials.get(&self.endpoint.name).is_none();
        RegistryError::Denied { host: self.host(), what: what.to_owned(), anonymous }
    }

    pub(super) fn bad(&self, problem: &str) -> RegistryError {
        RegistryError::BadAnswer { host: self.host(), problem: problem.to_owned() }
    }

    /// A connection that broke while an answer was read.
    pub(super) fn cut(&self, source: io::Error) -> RegistryError {
        RegistryError::Unreachable { host: self.host(), source }
    }

    pub(super) fn broken(&self, error: ureq::Error) -> RegistryError {
        let host = self.host();
        match error {
            ureq::Error::Io(source) if is_tls(&source) => RegistryError::Untrusted { host, source },
            ureq::Error::Tls(_) | ureq::Error::Rustls(_) => {
                RegistryError::Untrusted { host, source: io::Error::other(error) }
            }
            ureq::Error::Io(source) => RegistryError::Unreachable { host, source },
            ureq::Error::Http(_) | ureq::Error::BadUri(_) | ureq::Error::LargeResponseHeader(..) => {
                self.bad(&error.to_string())
            }
            error => RegistryError::Unreachable { host, source: io::Error::other(error) },
        }
    }
}

/// Whether a connection failed over certificates or encryption, which no repetition mends.
fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| {
        inner.is::<rustls::Error>() || inner.source().is_some_and(<dyn std::error::Error>::is::<rustls::Error>)
    })
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// A header, if it is text.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// What a registry says about its refusal: `{"errors": [{"code", "message"}]}`.
fn message(response: Response<Body>) -> Option<String> {
    let bytes = read_bounded(response.into_body().into_reader(), ERROR_BYTES_MAX).ok()??;
    let value: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    let error = value.get("errors")?.get(0)?;
    let said = error.get("message").or_else(|| error.get("code"))?.as_str()?;
    // It ends up on somebody's terminal.
    Some(shorten(&said.replace(|char: char| char.is_control(), " ")))
}
