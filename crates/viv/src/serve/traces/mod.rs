//! `[traces]`: where spans of what is done go, by OTLP (O4, docs/traces.md).
//!
//! ```text
//!   spans of tracing ──► layer ──┐
//!   executions ──── Traces::tell ┴──► a queue, which drops what does not fit ──► one thread ──HTTP──► receiver
//! ```
//!
//! Built with the feature `otlp` only. Without it, an endpoint is refused: nobody believes that something is traced that
//! is not.

#[cfg(not(feature = "otlp"))]
#[path = "none.rs"]
mod otlp;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
mod provider;
#[cfg(feature = "otlp")]
mod queue;

use anyhow::bail;
use serde::Deserialize;
use tracing_subscriber::{Layer, Registry};

pub(super) use otlp::Otlp;

/// A layer as the log is put together of.
pub(super) type BoxedLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// The environment variable that everything that speaks OTLP takes it from.
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct TracesPart {
    /// To whom spans go: its URL, without `/v1/traces`.
    pub(super) endpoint: Option<String>,
}

#[derive(clap::Args)]
pub(crate) struct TracesArgs {
    /// URL to which spans of what is done go, by OTLP over HTTP
    #[arg(long, env = ENDPOINT)]
    traces_endpoint: Option<String>,
}

impl TracesArgs {
    /// Begins to send spans, if somebody wants them.
    pub(super) fn begin(&self, file: &TracesPart) -> anyhow::Result<Option<Otlp>> {
        // As OTLP has it, one that is empty is none.
        let said = self.traces_endpoint.as_deref().filter(|said| !said.is_empty()).or(file.endpoint.as_deref());
        said.map(|said| Otlp::begin(&endpoint(said)?)).transpose()
    }
}

/// The URL that spans are posted to.
fn endpoint(said: &str) -> anyhow::Result<String> {
    let rest = said.strip_prefix("http://").or_else(|| said.strip_prefix("https://"));
    let host = rest.and_then(|rest| rest.split(['/', '?', '#']).next());
    match host {
        Some(host) if host.contains('@') => {
            // It would be shown to whoever asks where spans go.
            bail!(
                "traces cannot go to a URL with a password in it\nhint: put what the receiver wants into {ENDPOINT_HEADERS}"
            )
        }
        Some(host) if !host.is_empty() && !said.contains(['?', '#', ' ']) => {
            Ok(format!("{}/v1/traces", said.trim_end_matches('/')))
        }
        Some(_) | None => bail!("traces cannot go to {said:?}\nhint: it is a URL like http://127.0.0.1:4318"),
    }
}

/// The environment variable for headers that go with every request, such as a key.
const ENDPOINT_HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn o4_an_endpoint_is_the_base_of_a_url() {
        assert_eq!(endpoint("http://127.0.0.1:4318").unwrap(), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(endpoint("https://otel.example/in/").unwrap(), "https://otel.example/in/v1/traces");
        for bad in ["", "127.0.0.1:4318", "grpc://x:4317", "http://", "http:///v1", "http://x?key=1", "http://a b"] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn s6_a_password_in_an_endpoint_is_refused_and_not_repeated() {
        let error = endpoint("https://me:hunter2@otel.example").unwrap_err().to_string();
        assert!(error.contains(ENDPOINT_HEADERS) && !error.contains("hunter2"), "{error}");
    }

    #[cfg(not(feature = "otlp"))]
    #[test]
    fn o4_without_the_feature_an_endpoint_is_refused() {
        let file = TracesPart { endpoint: Some("http://127.0.0.1:4318".to_owned()) };
        let error = TracesArgs { traces_endpoint: None }.begin(&file).err().unwrap().to_string();
        assert!(error.contains("built without") && error.contains("--features otlp"), "{error}");
        let nothing = TracesArgs { traces_endpoint: Some(String::new()) };
        assert!(nothing.begin(&TracesPart::default()).unwrap().is_none());
    }
}
