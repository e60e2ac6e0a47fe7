//! With the feature: the SDK of OpenTelemetry, put together.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use async_trait::async_trait;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer as _,
    TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanExporter as _};
use tracing::{Metadata, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use ureq::Agent;
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use viv_engine::{Told, TraceCounts, TraceParent, TraceReceiver, Traces, Tracing};
use viv_provider::Provider;

use super::BoxedLayer;
use super::provider::TracedProvider;
use super::queue::{Counts, Queue, now};

/// How long a request to the receiver may take. Nobody waits for it but the thread that sends, and who asks whether it
/// answers.
const WITHIN: Duration = Duration::from_secs(5);

/// How long the end of the daemon waits for what was not sent yet.
const ENDED_WITHIN: Duration = Duration::from_secs(3);

/// Most that is read of an answer, which says little.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Spans on their way to a receiver.
pub(in super::super) struct Otlp {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    shared: Arc<Shared>,
}

/// What the engine is handed.
struct Shared {
    tracer: SdkTracer,
    counts: Arc<Counts>,
    endpoint: String,
    /// Another one than who sends has: that may be at work.
    asks: std::sync::Mutex<SpanExporter>,
}

impl Otlp {
    pub(super) fn begin(endpoint: &str) -> anyhow::Result<Self> {
        // What the environment says about us comes after what we say.
        let own = [KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))];
        let mut resource = Resource::builder().with_attributes(own);
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("vivarium");
        }
        let resource = resource.build();
        let counts = Arc::new(Counts::default());
        let sends = exporter(endpoint, &resource)?;
        let queue = Queue::begin(sends, counts.clone()).context("cannot begin to send traces")?;
        let asks = std::sync::Mutex::new(exporter(endpoint, &resource)?);
        let provider = SdkTracerProvider::builder().with_resource(resource).with_span_processor(queue).build();
        let tracer = provider.tracer("viv");
        let shared = Arc::new(Shared { tracer: tracer.clone(), counts, endpoint: endpoint.to_owned(), asks });
        Ok(Self { provider, tracer, shared })
    }

    /// Makes spans of `tracing` ones of OpenTelemetry: those of ours, and nothing of what is said in the log.
    pub(in super::super) fn layer(&self) -> BoxedLayer {
        let ours = |metadata: &Metadata<'_>| metadata.is_span() && metadata.target().starts_with("viv");
        let layer = tracing_opentelemetry::layer().with_tracer(self.tracer.clone());
        let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false).with_target(false);
        layer.with_level(false).with_filter(filter_fn(ours)).boxed()
    }

    pub(in super::super) fn tracing(&self) -> Tracing {
        Tracing(self.shared.clone())
    }

    /// The provider, with a span around each call.
    pub(in super::super) fn around_provider(provider: Arc<dyn Provider>) -> Arc<dyn Provider> {
        Arc::new(TracedProvider(provider))
    }

    /// Sends what was not sent yet, as far as there is time for it.
    pub(in super::super) fn end(self) {
        // Whoever did not take it by now is not waited for any longer.
        let _ = self.provider.shutdown_with_timeout(ENDED_WITHIN);
    }
}

fn exporter(endpoint: &str, resource: &Resource) -> anyhow::Result<SpanExporter> {
    // Tries are ours, so that a receiver which is down holds nobody up at the end.
    let once = RetryPolicy::disabled();
    let built = SpanExporter::builder()
        .with_http()
        .with_http_client(Client(agent()))
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(endpoint)
        .with_timeout(WITHIN)
        .with_retry_policy(once)
        .build();
    let mut built = built.with_context(|| format!("traces cannot go to {endpoint}"))?;
    // Who sends is handed over before the SDK could tell it.
    built.set_resource(resource);
    Ok(built)
}

fn agent() -> Agent {
    let certificate = |item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        Ok(_) | Err(_) => None,
    };
    let roots = parse_pem(&super::super::authorities()).filter_map(certificate).collect::<Vec<_>>();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        // What goes along may be a key, and is for one receiver.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .http_status_as_error(false)
        // Otherwise it is taken from the environment.
        .proxy(None)
        .user_agent(concat!("vivarium/", env!("CARGO_PKG_VERSION")))
        .timeout_global(Some(WITHIN))
        .build()
        .into()
}

/// The client that the rest of Vivarium uses too. It blocks, in the thread of who sends.
#[derive(Debug)]
struct Client(Agent);

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let answer = self.0.run(Request::from_parts(parts, &body[..]))?;
        let (parts, body) = answer.into_parts();
        let bytes = body.into_with_config().limit(ANSWER_BYTES_MAX).read_to_vec()?;
        Ok(Response::from_parts(parts, Bytes::from(bytes)))
    }
}

fn context(parent: &TraceParent) -> Context {
    let flags = if parent.sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace, span) = (TraceId::from(parent.trace), SpanId::from(parent.span));
    let parent = SpanContext::new(trace, span, flags, true, TraceState::default());
    Context::new().with_remote_span_context(parent)
}

fn at(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms)
}

impl Traces for Shared {
    fn place(&self, span: &Span) -> Option<TraceParent> {
        let context = span.context();
        let place = context.span().span_context().clone();
        place.is_valid().then(|| TraceParent {
            trace: u128::from_be_bytes(place.trace_id().to_bytes()),
            span: u64::from_be_bytes(place.span_id().to_bytes()),
            sampled: place.is_sampled(),
        })
    }

    fn follow(&self, span: &Span, parent: &TraceParent) {
        // Where it cannot be put there, it is a trace of its own.
        let _ = span.set_parent(context(parent));
    }

    fn tell(&self, told: Told, parent: Option<&TraceParent>) {
        let attributes = told.what.into_iter().map(|(key, value)| KeyValue::new(key, value));
        let parent = parent.map_or_else(Context::new, context);
        let mut span = self
            .tracer
            .span_builder(told.name)
            .with_kind(SpanKind::Internal)
            .with_start_time(at(told.from_ms))
            .with_attributes(attributes)
            .start_with_context(&self.tracer, &parent);
        span.set_status(if told.is_well { Status::Ok } else { Status::error("") });
        span.end_with_timestamp(at(told.to_ms));
    }

    fn counts(&self) -> TraceCounts {
        self.counts.get()
    }

    fn receiver(&self) -> TraceReceiver {
        // Nothing is sent, and is answered like anything else.
        let asks = self.asks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let silent = now(asks.export(Vec::new())).err().map(|error| error.to_string());
        TraceReceiver { endpoint: self.endpoint.clone(), silent }
    }
}
