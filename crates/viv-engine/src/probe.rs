//! Probing along the path that users use (T2). Probes change nothing in the sandbox and are not activity.

use std::future::Future;
use std::sync::Arc;

use tokio::task::JoinSet;
use viv_core::exec::{ExecState, OutputEvent};
use viv_core::lifecycle::{
    Actor, Cause, Check, Desired, Event, Evidence, Finding, Observed, Outcome, Phase, PortCheck, Sandbox, Seen,
};
use viv_core::planted::{Planted, is_planted};
use viv_core::{EndCause, ExecutionId, Generation, OperationId};
use viv_provider::{InstanceRef, InstanceState, Mutation, ProviderError};

use crate::effect::{in_words, seen};
use crate::engine::{Applied, Inner};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::journal;
use crate::metrics::family;

/// Ports that are dialled at once: more than most have, and few enough for the agent.
const PORTS_AT_ONCE: usize = 16;

/// What the echo may say before it is wrong anyway.
const ECHO_BYTES_MAX: usize = 256;

/// An arbiter that says that the time of an instance is up ends it within moments. After so long it does not.
const OVERDUE_MS: u64 = 15_000;

/// Why a check was not well.
pub(crate) struct Bad {
    pub(crate) finding: Finding,
    pub(crate) what: String,
}

impl Bad {
    pub(crate) fn unhealthy(what: impl Into<String>) -> Self {
        Self { finding: Finding::Unhealthy, what: what.into() }
    }
}

impl From<ProviderError> for Bad {
    fn from(error: ProviderError) -> Self {
        let finding = match &error {
            ProviderError::TimedOut { .. } | ProviderError::Unavailable { .. } => Finding::Timeout,
            ProviderError::Absent
            | ProviderError::StaleGeneration { .. }
            | ProviderError::Expired
            | ProviderError::NotRunning { state: InstanceState::Ended(_) | InstanceState::Absent } => Finding::Gone,
            ProviderError::Fenced { .. }
            | ProviderError::NotRunning { .. }
            | ProviderError::NotFound { .. }
            | ProviderError::Conflict { .. }
            | ProviderError::Invalid { .. }
            | ProviderError::Exhausted { .. }
            | ProviderError::Unsupported { .. }
            | ProviderError::Outdated { .. }
            | ProviderError::Failed { .. } => Finding::Unhealthy,
        };
        Self { finding, what: in_words(&error) }
    }
}

/// Whether this is lost for not answering or for being unwell, wanted, and seen to live all the same.
pub(crate) fn is_silent(record: &Sandbox, seen: &Seen) -> bool {
    record.phase == Phase::Lost
        && matches!(record.cause.cause, Cause::Unresponsive | Cause::ProbeFailed)
        && record.desired == Desired::Running
        && *seen == Seen::Running
}

impl Inner {
    /// The probe that a verification waits for. `None` when the instance was seen to have ended, which was applied.
    pub(crate) async fn probe_in_verification(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
    ) -> Result<Option<Outcome>, EngineError> {
        if self.look_at_instance(record, generation).await? {
            return Ok(None);
        }
        let evidence = self.probe(record, generation).await?;
        Ok(Some(Outcome::Probed(evidence)))
    }

    /// Asks the provider how an instance is. Whether that changed the record: it has ended, or came back.
    pub(crate) async fn look_at_instance(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
    ) -> Result<bool, EngineError> {
        if !self.is_gated(Gate::ProviderTruth, &record.id) {
            return Ok(false);
        }
        let instance = InstanceRef { sandbox: record.id.clone(), generation };
        let budget = self.config.budgets.probe;
        // What could not be looked at is not seen as anything (T7); the probes will say that they had no answer.
        let Ok(observation) = self.call(&record.id, budget, self.provider.observe(&instance)).await else {
            return Ok(false);
        };
        let (what, observed) = seen(&observation);
        self.knowledge.observed(&record.id, generation, observed.clone());
        let Some(what) = what else { return Ok(false) };
        if is_silent(record, &what) && !self.answers_again(record).await? {
            return Ok(false);
        }
        let event = Event::Seen { generation, seen: what, observed };
        Ok(matches!(self.apply(&record.id, &event).await?, Applied::Changed(_)))
    }

    /// Whether what is lost because it did not answer, or was unwell, is well now, but for its services. That it lives was
    /// never in doubt, so seeing it live is no news: taken for some, it would be verified and lost again for ever, with a
    /// line in the journal each time (T7).
    pub(crate) async fn answers_again(self: &Arc<Self>, record: &Sandbox) -> Result<bool, EngineError> {
        let evidence = self.probe(record, record.generation).await?;
        // A service may have ended while it was lost: a verification starts that again, or gives it up for good.
        let answers = evidence.finding_for(&record.spec) == Some(Finding::Ok) || evidence.is_about_services();
        self.knowledge.set_quiet(&record.id, !answers, self.clock.now_ms());
        Ok(answers)
    }

    /// Its hard deadline has passed by our clock: what says its arbiter (T6)? Whether that changed the record.
    pub(crate) async fn look_at_expiry(self: &Arc<Self>, record: &Sandbox) -> Result<bool, EngineError> {
        if !self.is_gated(Gate::FreshExpiry, &record.id) || is_planted(Planted::StoredExpiry) {
            return self.believe_expiry(record).await;
        }
        if self.look_at_instance(record, record.generation).await? {
            return Ok(true);
        }
        // Moved behind our back, or still ending. The stored copy is corrected, or nobody would stop looking; without
        // an answer, the alarm that was set with this look rings in a moment.
        let instance = InstanceRef { sandbox: record.id.clone(), generation: record.generation };
        let budget = self.config.budgets.call;
        let seen = self.call(&record.id, budget, self.provider.observe(&instance)).await;
        let Some(deadline) = seen.ok().and_then(|seen| seen.deadline) else { return Ok(false) };
        let (generation, now_ms) = (record.generation, self.clock.now_ms());
        if deadline.remaining_ms == 0 {
            // Its time is up, says its arbiter, who has to end it. One that stands still, as its guard does too, never
            // does: what was said is enough to end it from here (L5).
            let overdue = record.expires_at_ms.is_some_and(|at_ms| now_ms.saturating_sub(at_ms) >= OVERDUE_MS);
            let why = "its deadline has passed, and nobody ended it";
            return if overdue { self.expire(record, why, "provider").await } else { Ok(false) };
        }
        let expires_at_ms = now_ms.saturating_add(deadline.remaining_ms);
        let corrected = self.amend(&record.id, |record| {
            if record.generation != generation || record.expires_at_ms.is_none_or(|at_ms| at_ms > now_ms) {
                return None;
            }
            record.expires_at_ms = Some(expires_at_ms);
            let data = serde_json::json!({ "expires_at_ms": expires_at_ms, "revision": deadline.revision });
            Some(journal::noted(record, "sandbox.deadline_seen", Actor::part("expiry"), now_ms, data))
        });
        corrected.await?;
        Ok(false)
    }

    /// Switched off, the stored copy of the deadline is taken for the deadline (O9).
    async fn believe_expiry(self: &Arc<Self>, record: &Sandbox) -> Result<bool, EngineError> {
        self.expire(record, "expired, by what is recorded", "stored").await
    }

    /// Its time is up, for this reason: it is ended for that, and saved where it is persistent.
    async fn expire(self: &Arc<Self>, record: &Sandbox, why: &str, via: &str) -> Result<bool, EngineError> {
        let observed = Observed { state: why.to_owned(), via: via.to_owned(), at_ms: self.clock.now_ms() };
        let seen = Seen::Ended(EndCause::Expired);
        let event = Event::Seen { generation: record.generation, seen, observed };
        Ok(matches!(self.apply(&record.id, &event).await?, Applied::Changed(_)))
    }

    /// Probes everything at once, each with its own deadline, and remembers what was found.
    pub(crate) async fn probe(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
    ) -> Result<Evidence, EngineError> {
        self.looked_at(record);
        let instance = InstanceRef { sandbox: record.id.clone(), generation };
        let token = self.token(&record.id).await?;
        let (exec, filesystem, ports, services) = tokio::join!(
            self.check(self.probe_exec(&instance, token)),
            self.check(self.probe_filesystem(&instance, &record.spec.workdir)),
            self.probe_ports(&instance, &record.spec.ports),
            self.probe_services(record, &instance, token),
        );
        let evidence = Evidence { exec: Some(exec), filesystem: Some(filesystem), ports, services };
        self.knowledge.probed(&record.id, generation, evidence.clone());
        self.count_probes(&evidence);
        Ok(evidence)
    }

    /// For the figures (O4).
    fn count_probes(&self, evidence: &Evidence) {
        let one = |check: &Check, of: &str| {
            self.metrics.count(&family::PROBES, &[of]);
            let finding = match check.finding {
                Finding::Ok => return,
                Finding::Timeout => "timeout",
                Finding::Unhealthy => "unhealthy",
                Finding::Gone => "gone",
            };
            self.metrics.count(&family::PROBE_FAILURES, &[of, finding]);
        };
        evidence.exec.iter().for_each(|check| one(check, "exec"));
        evidence.filesystem.iter().for_each(|check| one(check, "filesystem"));
        evidence.ports.iter().for_each(|port| one(&port.check, "port"));
        evidence.services.iter().for_each(|service| one(&service.check, "service"));
    }

    /// Dials all ports, some at a time: one that does not answer holds up no other. In the order of the spec.
    async fn probe_ports(self: &Arc<Self>, instance: &InstanceRef, ports: &[u16]) -> Vec<PortCheck> {
        let mut found = Vec::with_capacity(ports.len());
        for some in ports.chunks(PORTS_AT_ONCE) {
            let mut dialled = JoinSet::new();
            for &port in some {
                let (inner, instance) = (self.clone(), instance.clone());
                dialled.spawn(async move {
                    let dial = async { Ok(inner.provider.dial(&instance, port).await.map(drop)?) };
                    PortCheck { port, check: inner.check(dial).await }
                });
            }
            // A panic of one is a mistake of ours, and says nothing about its port.
            while let Some(done) = dialled.join_next().await {
                found.extend(done.ok());
            }
        }
        found.sort_by_key(|check: &PortCheck| ports.iter().position(|port| *port == check.port));
        found
    }

    pub(crate) async fn check(&self, probe: impl Future<Output = Result<(), Bad>>) -> Check {
        let (at_ms, budget) = (self.clock.now_ms(), self.config.budgets.probe);
        let found = match tokio::time::timeout(budget, probe).await {
            Ok(found) => found,
            Err(_) => Err(Bad { finding: Finding::Timeout, what: format!("no answer within {budget:?}") }),
        };
        let took_ms = self.clock.now_ms().saturating_sub(at_ms);
        match found {
            Ok(()) => Check { finding: Finding::Ok, at_ms, took_ms, message: None },
            Err(bad) => Check { finding: bad.finding, at_ms, took_ms, message: Some(bad.what) },
        }
    }

    /// A fresh nonce, echoed by a real command, exactly, with exit 0.
    async fn probe_exec(&self, instance: &InstanceRef, token: viv_core::FencingToken) -> Result<(), Bad> {
        let execution = ExecutionId::from_bytes((self.draw)());
        let nonce: String = execution.as_str().trim_start_matches(ExecutionId::PREFIX).to_owned();
        let mutation = Mutation {
            operation: OperationId::from_bytes((self.draw)()),
            generation: instance.generation,
            token,
            budget_ms: self.config.budgets.probe.as_millis() as u64,
        };
        let spec = self.provider.probe_spec(&nonce);
        self.provider.execute(&mutation, &instance.sandbox, &execution, &spec).await?;
        let mut output = self.provider.attach(instance, &execution, 0, true).await?;
        let mut said = Vec::new();
        let state = loop {
            match output.next().await? {
                Some(OutputEvent::Chunk { data, .. }) if said.len() < ECHO_BYTES_MAX => said.extend(data),
                Some(OutputEvent::Chunk { .. } | OutputEvent::Cut { .. }) => {}
                Some(OutputEvent::End(status)) => break status.state,
                None => return Err(Bad::unhealthy("its output ended without an end")),
            }
        };
        if state != (ExecState::Exited { code: 0 }) {
            return Err(Bad::unhealthy(format!("a command ended as {state:?}")));
        }
        if said != format!("{nonce}\n").as_bytes() {
            return Err(Bad::unhealthy("a command said something else than it was asked to"));
        }
        Ok(())
    }

    /// The working directory can be listed, and the identity inside names this generation.
    async fn probe_filesystem(&self, instance: &InstanceRef, workdir: &str) -> Result<(), Bad> {
        self.provider.file_list(instance, workdir, 1).await?;
        let identity = self.provider.identity(instance).await?;
        if identity.sandbox != instance.sandbox || identity.generation != instance.generation {
            let what = format!("it says that it is {}@{}", identity.sandbox, identity.generation);
            return Err(Bad::unhealthy(what));
        }
        Ok(())
    }
}
