//! One wait per living instance, for its end to be pushed (T3).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use viv_core::lifecycle::{Event, Observed, Sandbox, Seen};
use viv_core::{Generation, SandboxId};
use viv_provider::{InstanceRef, ProviderError};

use crate::engine::Inner;
use crate::error::EngineError;
use crate::gate::Gate;

/// How long to wait before asking again who did not answer; it doubles up to the second one, and begins anew after a
/// wait that lasted longer than that.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// All waits.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    watched: Mutex<BTreeMap<SandboxId, (Generation, AbortHandle)>>,
}

impl Watches {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SandboxId, (Generation, AbortHandle)>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody has to be told any more.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        if let Some((_, task)) = self.lock().remove(sandbox) {
            task.abort();
        }
    }

    pub(crate) fn end(&self) {
        for (_, task) in std::mem::take(&mut *self.lock()).into_values() {
            task.abort();
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }
}

impl Inner {
    /// Waits for the end of the sandbox's current instance, unless somebody does already.
    pub(crate) fn watch(self: &Arc<Self>, sandbox: &Sandbox) {
        if self.is_ending() || !self.config.gates.is_on(Gate::PushedEnds, &sandbox.project, &sandbox.id) {
            return;
        }
        let mut watched = self.watches.lock();
        if let Some((generation, task)) = watched.get(&sandbox.id) {
            if *generation == sandbox.generation && !task.is_finished() {
                return;
            }
            task.abort();
        }
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        let task = tokio::spawn(wait(self.clone(), instance)).abort_handle();
        watched.insert(sandbox.id.clone(), (sandbox.generation, task));
    }
}

async fn wait(inner: Arc<Inner>, instance: InstanceRef) {
    let mut pause = PAUSE.0;
    let seen = loop {
        let asked_at = tokio::time::Instant::now();
        match inner.provider.wait_end(&instance).await {
            Ok(ended) => break Seen::Ended(ended.cause),
            Err(ProviderError::Absent | ProviderError::StaleGeneration { .. }) => break Seen::Absent,
            // Nothing is known, and nothing is concluded (T7).
            Err(error) => {
                tracing::debug!(component = "watch", %instance, %error, "asks again");
                if asked_at.elapsed() > PAUSE.1 {
                    pause = PAUSE.0;
                }
                inner.pause(pause).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        }
        if inner.is_ending() {
            return;
        }
    };
    let state = match &seen {
        Seen::Ended(cause) => format!("ended ({cause})"),
        Seen::Absent | Seen::Running | Seen::Frozen => "absent".to_owned(),
    };
    let observed = Observed { state, via: "pushed".to_owned(), at_ms: inner.clock.now_ms() };
    inner.knowledge.observed(&instance.sandbox, instance.generation, observed.clone());
    let event = Event::Seen { generation: instance.generation, seen, observed };
    while let Err(error) = inner.apply(&instance.sandbox, &event).await {
        if matches!(error, EngineError::NotFound { .. }) {
            return;
        }
        tracing::warn!(component = "watch", %instance, %error, "an end could not be recorded yet");
        inner.pause(PAUSE.0).await;
        if inner.is_ending() {
            return;
        }
    }
}
