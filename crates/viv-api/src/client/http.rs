//! Requests and answers.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::header::{ACCEPT, CONTENT_TYPE, EXPECT};
use ureq::http::request::Builder;
use ureq::http::{HeaderValue, Method, Request, Response, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, AsSendBody, Body, SendBody};
use viv_core::Generation;

use super::{ANSWER_TIMEOUT, CONNECT_TIMEOUT, ClientError, Location, Result};
use crate::bound::{IdempotencyKey, WaitMs};
use crate::error::ErrorBody;
use crate::header;

/// A page of a thousand sandboxes with everything that they may hold fits; a server gone mad does not.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

/// As much of an answer that makes no sense as helps to see what it is.
const FOUND_CHARS_MAX: usize = 200;

#[derive(Clone)]
pub(super) struct Http {
    agent: Agent,
    base: String,
    authorization: Option<HeaderValue>,
    name: HeaderValue,
    pub(super) location: Location,
}

/// What to send.
pub(super) struct Call<'a> {
    pub(super) method: Method,
    /// Path and query.
    pub(super) path: String,
    pub(super) generation: Option<Generation>,
    pub(super) idempotency_key: Option<&'a IdempotencyKey>,
    pub(super) last_event: Option<u64>,
    pub(super) accept: &'static str,
    /// How long the answer may take to begin.
    pub(super) patience: Duration,
    /// Whether the answer does not end by itself; then it must not be silent for long.
    streams: bool,
    /// A status beside the good ones that comes with the same answer.
    pub(super) also: Option<u16>,
    pub(super) body: Content<'a>,
}

/// What goes with a request.
pub(super) enum Content<'a> {
    None,
    Json(Vec<u8>),
    Bytes(&'a [u8]),
    Reader(&'static str, &'a mut dyn Read),
}

impl Call<'_> {
    pub(super) fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            generation: None,
            idempotency_key: None,
            last_event: None,
            accept: "application/json",
            patience: ANSWER_TIMEOUT,
            streams: false,
            also: None,
            body: Content::None,
        }
    }

    pub(super) fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path)
    }

    pub(super) fn post(path: impl Into<String>) -> Self {
        Self::new(Method::POST, path)
    }

    pub(super) fn json(mut self, body: &impl Serialize) -> Self {
        self.body = Content::Json(serde_json::to_vec(body).expect("requests are JSON"));
        self
    }

    /// The server waits this long before it answers; its own default is no longer than it may wait at all.
    pub(super) fn waits(mut self, wait: Option<WaitMs>) -> Self {
        self.patience = ANSWER_TIMEOUT + Duration::from_millis(wait.map_or(WaitMs::MAX, WaitMs::get));
        self
    }

    pub(super) fn accept(mut self, accept: &'static str) -> Self {
        self.accept = accept;
        self
    }

    /// The answer comes bit by bit, in this form.
    pub(super) fn streams(mut self, accept: &'static str) -> Self {
        self.streams = true;
        self.accept(accept)
    }
}

impl Http {
    pub(super) fn new(location: Location) -> Result<Self> {
        let wrong = |why: &str| ClientError::Address { url: location.url.clone(), why: why.to_owned() };
        let base = location.url.trim_end_matches('/').to_owned();
        let uri: Uri = base.parse().map_err(|_| wrong("it is no URL"))?;
        if uri.host().is_none_or(str::is_empty) || !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(wrong("it must begin with http:// or https:// and name a host"));
        }
        let mut roots = Vec::new();
        for item in parse_pem(&location.authorities_pem) {
            if let PemItem::Certificate(certificate) = item.map_err(|_| wrong("its certificates are no PEM"))? {
                roots.push(certificate);
            }
        }
        if uri.scheme_str() == Some("https") && roots.is_empty() {
            return Err(wrong("https needs certificates of those to believe, and there are none"));
        }
        let secret = |key: &String| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| wrong("its key is no text"))?;
            value.set_sensitive(true);
            Ok(value)
        };
        let authorization = location.key.as_ref().map(secret).transpose()?;
        let name = HeaderValue::from_str(&location.name).map_err(|_| wrong("the client's name is no text"))?;
        Ok(Self { agent: agent(roots), base, authorization, name, location })
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// Sends a request and gives the answer if it is a good one.
    pub(super) fn send(&self, call: Call<'_>) -> Result<Response<Body>> {
        let url = self.url(&call.path);
        let mut request = Request::builder()
            .method(call.method)
            .uri(&url)
            .header(header::CLIENT, &self.name)
            .header(ACCEPT, call.accept);
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        if let Some(generation) = call.generation {
            request = request.header(header::GENERATION, generation.0);
        }
        if let Some(key) = call.idempotency_key {
            request = request.header(header::IDEMPOTENCY_KEY, key.as_str());
        }
        if let Some(last) = call.last_event {
            request = request.header(header::LAST_EVENT_ID, last);
        }
        let silence = if call.streams { self.location.silence_timeout } else { call.patience };
        let times = (call.patience, silence);
        let response = match call.body {
            Content::None => self.run(request, (), times),
            Content::Json(json) => self.run(request.header(CONTENT_TYPE, "application/json"), json, times),
            Content::Bytes(bytes) => self.run(request.header(CONTENT_TYPE, header::BYTES), bytes, times),
            Content::Reader(kind, reader) => {
                // What is refused is refused before much of it was sent.
                let request = request.header(CONTENT_TYPE, kind).header(EXPECT, "100-continue");
                self.run(request, SendBody::from_reader(reader), times)
            }
        };
        let response = response.map_err(|error| transport(&url, error))?;
        let status = response.status();
        if status.is_success() || call.also == Some(status.as_u16()) {
            Ok(response)
        } else {
            Err(refused(url, response))
        }
    }

    /// Sends it: so long until the answer begins, so long between its parts.
    fn run(
        &self,
        request: Builder,
        body: impl AsSendBody,
        (patience, silence): (Duration, Duration),
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let request = self
            .agent
            .configure_request(request.body(body)?)
            .timeout_recv_response(Some(patience))
            .timeout_per_read(Some(silence))
            .build();
        self.agent.run(request)
    }

    /// A request whose answer is JSON; with its status.
    pub(super) fn ask_with_status<T: DeserializeOwned>(&self, call: Call<'_>) -> Result<(u16, T)> {
        let url = self.url(&call.path);
        let response = self.send(call)?;
        let status = response.status().as_u16();
        let bytes = read(&url, response)?;
        let answer = serde_json::from_slice(&bytes).map_err(|error| ClientError::Unexpected {
            url,
            status,
            found: format!("{error} in {}", clip(&bytes)),
        })?;
        Ok((status, answer))
    }

    /// A request whose answer is JSON.
    pub(super) fn ask<T: DeserializeOwned>(&self, call: Call<'_>) -> Result<T> {
        self.ask_with_status(call).map(|(_, answer)| answer)
    }

    /// A request whose answer is text.
    pub(super) fn ask_text(&self, call: Call<'_>) -> Result<String> {
        let url = self.url(&call.path);
        let bytes = self.send(call).and_then(|response| read(&url, response))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A request whose answer is that it was done.
    pub(super) fn tell(&self, call: Call<'_>) -> Result<()> {
        let url = self.url(&call.path);
        // Read to its end, so that the connection can be used again.
        self.send(call).and_then(|response| read(&url, response)).map(drop)
    }
}

fn agent(roots: Vec<ureq::tls::Certificate<'static>>) -> Agent {
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        // A key is for one server. An answer that is an error is read for what it says.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        // Otherwise it is taken from the environment.
        .proxy(None)
        .accept_encoding("identity")
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .build()
        .into()
}

pub(super) fn transport(url: &str, error: ureq::Error) -> ClientError {
    let source = match error {
        ureq::Error::Timeout(_) => io::Error::new(io::ErrorKind::TimedOut, error.to_string()),
        other => other.into_io(),
    };
    ClientError::Transport { url: url.to_owned(), source }
}

fn read(url: &str, response: Response<Body>) -> Result<Vec<u8>> {
    let body = response.into_body().into_with_config().limit(ANSWER_BYTES_MAX);
    body.read_to_vec().map_err(|error| transport(url, error))
}

fn refused(url: String, response: Response<Body>) -> ClientError {
    let status = response.status().as_u16();
    let bytes = match read(&url, response) {
        Ok(bytes) => bytes,
        Err(error) => return error,
    };
    match serde_json::from_slice::<ErrorBody>(&bytes) {
        Ok(body) => ClientError::Api { status, error: Box::new(body.error) },
        Err(_) => ClientError::Unexpected { url, status, found: clip(&bytes) },
    }
}

/// The beginning, fit to be printed.
pub(super) fn clip(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4 * FOUND_CHARS_MAX)]).into_owned();
    format!("{:?}", text.chars().take(FOUND_CHARS_MAX).collect::<String>())
}
