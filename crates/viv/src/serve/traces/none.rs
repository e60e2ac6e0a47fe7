//! Without the feature: there is none of it.

use std::sync::Arc;

use anyhow::bail;
use viv_engine::Tracing;
use viv_provider::Provider;

use super::BoxedLayer;

/// Never made.
pub(in super::super) enum Otlp {}

impl Otlp {
    /// Nobody's spans go anywhere, and who wants them is told so.
    pub(super) fn begin(endpoint: &str) -> anyhow::Result<Self> {
        bail!(
            "traces are to go to {endpoint}, and this viv was built without them\nhint: build it with `cargo build \
             --release --package viv --features otlp`, or take the endpoint away (`endpoint` in [traces], \
             --traces-endpoint, {})",
            super::ENDPOINT
        )
    }

    pub(in super::super) fn layer(&self) -> BoxedLayer {
        match *self {}
    }

    pub(in super::super) fn tracing(&self) -> Tracing {
        match *self {}
    }

    pub(in super::super) fn around_provider(provider: Arc<dyn Provider>) -> Arc<dyn Provider> {
        provider
    }

    pub(in super::super) fn end(self) {
        match self {}
    }
}
