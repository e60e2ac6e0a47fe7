//! One wait per service of a ready sandbox, for its end to be told: a stream that says nothing else, and costs nothing
//! while the service lives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use viv_core::lifecycle::{Check, Event, Finding, Phase, Sandbox, ServiceCheck};
use viv_core::spec::ServiceName;
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{InstanceRef, ProviderError};

use crate::engine::Inner;
use crate::error::EngineError;
use crate::serve::how_it_ended;

/// How long to wait before listening again to who hung up; it doubles up to the second one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Which executions are listened to, and by which tasks.
type Listening = BTreeMap<SandboxId, (Vec<ExecutionId>, JoinSet<()>)>;

/// All that are listened to.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    listening: Mutex<Listening>,
}

impl Listeners {
    fn lock(&self) -> MutexGuard<'_, Listening> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody has to be told any more.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        self.lock().remove(sandbox);
    }

    pub(crate) fn end(&self) {
        self.lock().clear();
    }
}

impl Inner {
    /// Listens to the services of a sandbox that is ready, unless somebody does already.
    pub(crate) fn listen(self: &Arc<Self>, sandbox: &Sandbox) {
        if self.is_ending() || sandbox.services.is_empty() {
            return;
        }
        let executions: Vec<ExecutionId> = sandbox.services.values().map(|run| run.execution.clone()).collect();
        let mut listening = self.listeners.lock();
        if let Some((known, tasks)) = listening.get_mut(&sandbox.id) {
            // Who has heard an end listens no more.
            while tasks.try_join_next().is_some() {}
            if *known == executions && tasks.len() == executions.len() {
                return;
            }
        }
        let mut tasks = JoinSet::new();
        let instance = InstanceRef { sandbox: sandbox.id.clone(), generation: sandbox.generation };
        for (name, run) in &sandbox.services {
            tasks.spawn(hear(self.clone(), instance.clone(), name.clone(), run.execution.clone()));
        }
        listening.insert(sandbox.id.clone(), (executions, tasks));
    }
}

/// Waits for the end of a service, and makes it known.
async fn hear(inner: Arc<Inner>, instance: InstanceRef, service: ServiceName, execution: ExecutionId) {
    let mut pause = PAUSE.0;
    let how = loop {
        match inner.end_of(&instance, &execution).await {
            Ok(Some(status)) => break how_it_ended(&status.state).0,
            // The instance ended, which is heard by who waits for that.
            Err(ProviderError::Absent | ProviderError::StaleGeneration { .. }) => return,
            Err(ProviderError::NotFound { .. }) => break "is not there any more".to_owned(),
            // Nothing is known, and nothing is concluded (T7). What somebody froze from outside may run again.
            Ok(None) | Err(_) => {
                inner.pause(pause).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        }
        if inner.is_ending() {
            return;
        }
    };
    while let Err(error) = inner.service_ended(&instance, &service, &execution, &how).await {
        if matches!(error, EngineError::NotFound { .. }) {
            return;
        }
        tracing::warn!(component = "listen", %instance, %service, %error, "an end could not be recorded yet");
        inner.pause(PAUSE.0).await;
        if inner.is_ending() {
            return;
        }
    }
}

impl Inner {
    /// A service of a ready sandbox ended: then it is not ready, and whether it comes back is seen in verification.
    async fn service_ended(
        self: &Arc<Self>,
        instance: &InstanceRef,
        service: &ServiceName,
        execution: &ExecutionId,
        how: &str,
    ) -> Result<(), EngineError> {
        let record = self.load(&instance.sandbox).await?;
        let is_current = record.services.get(service).is_some_and(|run| run.execution == *execution);
        if record.phase != Phase::Ready || !is_current {
            return Ok(());
        }
        let mut evidence = self.knowledge.evidence(&record);
        let at_ms = self.clock.now_ms();
        let check = Check { finding: Finding::Unhealthy, at_ms, took_ms: 0, message: Some(how.to_owned()) };
        evidence.services.retain(|known| known.service != *service);
        evidence.services.push(ServiceCheck { service: service.clone(), execution: execution.clone(), check });
        // Shown at once, also by a store that cannot write.
        self.knowledge.heard(&record.id, record.generation, evidence.clone());
        tracing::info!(component = "listen", %instance, %service, %execution, how, "a service ended");
        self.apply(&record.id, &Event::Probed { generation: instance.generation, evidence }).await?;
        Ok(())
    }
}
