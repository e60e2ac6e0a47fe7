//! Whether memory is saved here (L13): found out at the start, and again while the daemon runs.
//!
//! ```text
//!   start, its time, whoever asks ──► the provider looks again ──► what is known ──► moments, forks, what goes to disk
//!                                                                        └──► the answer to who asked
//! ```
//!
//! A look may take as long as trying a program does, so it is one of a few, never one per sandbox. What it showed is kept in
//! one place: by that everything is decided, and that is what everybody is told.

use std::sync::{Arc, PoisonError, RwLock};

use viv_core::lifecycle::{Moment, Timings};
use viv_provider::{Capabilities, Capability};

use crate::engine::{Engine, Inner};

/// Why memory is not saved, where the provider does not say.
const NO_MEMORY: &str = "this provider does not offer it";

/// What the last look showed.
#[derive(Debug)]
pub(crate) struct MemoryKnown {
    /// Why the provider cannot save memory; none when it can.
    no_memory: RwLock<Option<Arc<str>>>,
    /// Held from a look until it is known what it showed, so that the latest look is the last word.
    looking: tokio::sync::Mutex<()>,
}

/// What a step is decided by: the time, and what cannot be done here, as they are now.
#[derive(Debug, Clone)]
pub(crate) struct Now<'e> {
    pub(crate) ms: u64,
    timings: &'e Timings,
    no_memory: Option<Arc<str>>,
}

impl Now<'_> {
    /// As the core has it.
    pub(crate) fn moment(&self) -> Moment<'_> {
        Moment { now_ms: self.ms, timings: self.timings, no_memory: self.no_memory.as_deref() }
    }
}

impl MemoryKnown {
    pub(crate) fn of(capabilities: &Capabilities) -> Self {
        Self { no_memory: RwLock::new(why_not(capabilities)), looking: tokio::sync::Mutex::default() }
    }

    fn why_not(&self) -> Option<Arc<str>> {
        self.no_memory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn learn(&self, capabilities: &Capabilities) {
        let found = why_not(capabilities);
        let mut known = self.no_memory.write().unwrap_or_else(PoisonError::into_inner);
        match (known.as_deref(), found.as_deref()) {
            (Some(_), None) => tracing::info!(component = "memory", "memory is saved from now on"),
            (None, Some(why)) => tracing::warn!(component = "memory", why, "memory is not saved any more"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        *known = found;
    }
}

fn why_not(capabilities: &Capabilities) -> Option<Arc<str>> {
    let why = || capabilities.missing.get(&Capability::SaveMemory).map_or(NO_MEMORY, String::as_str).into();
    (!capabilities.can(Capability::SaveMemory)).then(why)
}

/// Looks again from time to time, where what a provider can do may change.
pub(crate) fn spawn(inner: &Arc<Inner>) {
    let inner = inner.clone();
    tokio::spawn(async move {
        while let Some(after) = inner.provider.looks_again_after() {
            inner.pause(after).await;
            if inner.is_ending() {
                return;
            }
            inner.look_again().await;
        }
    });
}

impl Engine {
    /// What the provider can do, as of a look now, by which everything is decided from now on. It may take as long as
    /// trying takes.
    pub async fn capabilities(&self) -> Capabilities {
        self.inner.look_again().await
    }
}

impl Inner {
    async fn look_again(&self) -> Capabilities {
        let _looking = self.memory.looking.lock().await;
        let capabilities = self.provider.look_again().await;
        self.memory.learn(&capabilities);
        capabilities
    }

    /// Why memory is not saved here; none when it is.
    pub(crate) fn no_memory(&self) -> Option<Arc<str>> {
        self.memory.why_not()
    }

    pub(crate) fn now(&self) -> Now<'_> {
        Now { ms: self.clock.now_ms(), timings: &self.config.timings, no_memory: self.no_memory() }
    }
}
