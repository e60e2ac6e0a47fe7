//! One wait per service of a ready sandbox, for its end to be told: a stream that says nothing else, and costs nothing
//! while the service lives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use viv_core::exec::OutputEvent;
use viv_core::lifecycle::{Check, Event, Finding, Phase, Sandbox, ServiceCheck};
use viv_core::spec::ServiceName;
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{InstanceRef, ProviderError};

use crate::engine::Inner;
use crate::error::EngineError;
use crate::serve::how_it_ended;

/// How long to wait before listening again to who hung up; it doubles up to the second one.
const PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

/// Past the end of any output: what is heard then is the end alone.
const PAST_ALL_OUTPUT: u64 = u64::MAX;

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
        if listening.get(&sandbox.id).is_some_and(|(known, tasks)| *known == executions && !tasks.is_empty()) {
            return;
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
        match end_of(&inner, &instance, &execution).await {
            Ok(Some(how)) => break how,
            // The instance ended, which is heard by who waits for that.
            Err(ProviderError::Absent | ProviderError::StaleGeneration { .. } | ProviderError::NotRunning { .. }) => {
                return;
            }
            Err(ProviderError::NotFound { .. }) => break "is not there any more".to_owned(),
            // Nothing is known, and nothing is concluded (T7).
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

/// How it ended; `None` when whoever told hung up before.
async fn end_of(
    inner: &Arc<Inner>,
    instance: &InstanceRef,
    execution: &ExecutionId,
) -> Result<Option<String>, ProviderError> {
    let mut output = inner.provider.attach(instance, execution, PAST_ALL_OUTPUT, true).await?;
    while let Some(event) = output.next().await? {
        match event {
            OutputEvent::End(status) if status.state.is_final() => return Ok(Some(how_it_ended(&status.state).0)),
            OutputEvent::End(_) | OutputEvent::Chunk { .. } | OutputEvent::Cut { .. } => {}
        }
    }
    Ok(None)
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
        let at_ms = self.clock.now_ms();
        let mut evidence = self.knowledge.evidence(&record, at_ms);
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
