//! What is done at the provider. An acknowledged call proves nothing, a look does.

use std::sync::Arc;
use std::time::Duration;

use viv_core::exec::ExecState;
use viv_core::lifecycle::{
    Actor, Effect, Failure, FailureKind, HIBERNATED, LOST_EXECUTIONS_MAX, LostExecution, Memory, Observed, Outcome,
    Phase, Sandbox, Seen, Work,
};
use viv_core::planted::{Planted, is_planted};
use viv_core::{Generation, SnapshotId};
use viv_provider::{
    InstanceRef, InstanceSpec, InstanceState, Integrity, Mutation, Observation, ObservedVia, ProviderError, Recall,
    SaveRequest,
};
use viv_store::LeaseKind;

use crate::engine::Inner;
use crate::error::EngineError;

/// Who has to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// The provider itself.
    Provider,
    /// The agent of one sandbox, which may be stopped, starved or broken.
    Agent,
}

impl Inner {
    /// Performs an effect. `None` when what was seen was applied already.
    pub(crate) async fn perform(
        self: &Arc<Self>,
        record: &Sandbox,
        effect: &Effect,
        work: &Work,
    ) -> Result<Option<Outcome>, EngineError> {
        let token = self.token(&record.id).await?;
        let mutation = |generation: Generation, budget: Duration| Mutation {
            operation: work.operation.clone(),
            generation,
            token,
            budget_ms: budget.as_millis() as u64,
        };
        let budgets = self.config.budgets;
        self.reached(&format!("{}.before", effect.code()));
        let outcome = match effect {
            Effect::Create { generation } => self.make(record, &mutation(*generation, budgets.make), None).await?,
            Effect::Restore { generation, snapshot, memory } => {
                let from = Some((snapshot, *memory));
                self.make(record, &mutation(*generation, budgets.make), from).await?
            }
            Effect::Claim { generation } => {
                return self.set_up_claimed(record, &mutation(*generation, budgets.call)).await;
            }
            Effect::Probe { generation } => return self.probe_in_verification(record, *generation).await,
            Effect::Serve { generation } => return self.serve(record, *generation, work).await,
            Effect::Hook { generation, point } => {
                return self.hook_in_verification(record, *generation, *point, work).await;
            }
            Effect::Freeze { generation } => {
                let mutation = mutation(*generation, budgets.call);
                let done = self.call(&record.id, budgets.call, self.provider.freeze(&mutation, &record.id)).await;
                done.map_or_else(failed, |()| Outcome::Frozen)
            }
            Effect::Thaw { generation } => {
                let mutation = mutation(*generation, budgets.call);
                let done = self.call(&record.id, budgets.call, self.provider.thaw(&mutation, &record.id)).await;
                done.map_or_else(failed, |()| Outcome::Thawed)
            }
            Effect::Save { generation, snapshot, memory } => {
                self.before_stop(record, *generation, work).await;
                let request = SaveRequest { snapshot: snapshot.clone(), live: false, memory: *memory };
                match self.save(record, &mutation(*generation, budgets.save), &request).await? {
                    Some(outcome) => outcome,
                    None => return Ok(None),
                }
            }
            Effect::Clear { generation } => {
                self.before_stop(record, *generation, work).await;
                self.remember_executions(record, *generation).await?;
                self.clear(record, &mutation(*generation, budgets.clear)).await
            }
        };
        if let Outcome::Failed(Failure { what, .. }) = &outcome {
            tracing::warn!(component = "driver", sandbox = %record.id, effect = effect.code(), %what, "did not succeed");
        }
        Ok(Some(outcome))
    }

    /// Ends an instance and saves it. `None` when it was seen to be gone, which was applied.
    async fn save(
        self: &Arc<Self>,
        record: &Sandbox,
        mutation: &Mutation,
        request: &SaveRequest,
    ) -> Result<Option<Outcome>, EngineError> {
        let saved = self.provider.save(mutation, &record.id, request);
        Ok(Some(match self.call(&record.id, self.config.budgets.save, saved).await {
            Ok(saved) if request.memory && !saved.memory => {
                // It was saved under this id by who had given its memory up.
                Outcome::MemoryNotSaved { why: "it was saved without".to_owned(), frozen: false }
            }
            Ok(saved) => {
                self.savers.noted(&saved);
                Outcome::Saved
            }
            // What is not there cannot be saved, now or later: that is something to see, not to try again.
            Err(ProviderError::Absent | ProviderError::StaleGeneration { .. })
                if self.look_at_instance(record, mutation.generation).await? =>
            {
                return Ok(None);
            }
            // Whatever is in the way of its memory is not in the way of its files. Only who could not be asked is asked
            // again; and who did not answer may have done it all the same.
            Err(error) if request.memory && !is_unheard(&error) => {
                if let Some(saved) = self.saved_unanswered(record, request, &error).await {
                    self.savers.noted(&saved);
                    return Ok(Some(Outcome::Saved));
                }
                let frozen = self.is_still_frozen(record, mutation.generation, &error).await;
                Outcome::MemoryNotSaved { why: in_words(&error), frozen }
            }
            // There may be room later: what is kept until then is not given up (T7).
            Err(error @ ProviderError::Exhausted { .. }) => {
                Outcome::Failed(Failure { kind: FailureKind::Unknown, what: in_words(&error) })
            }
            Err(error) => failed(error),
        }))
    }

    /// What was saved with its memory, and not answered in time (P4). Asked for again without memory, it would be found as
    /// done, and what it holds of what ran would be wasted.
    async fn saved_unanswered(
        &self,
        record: &Sandbox,
        request: &SaveRequest,
        error: &ProviderError,
    ) -> Option<viv_provider::Snapshot> {
        if !matches!(error, ProviderError::TimedOut { .. }) {
            return None;
        }
        let seen = self.call(&record.id, self.config.budgets.call, self.provider.snapshot(&request.snapshot)).await;
        let seen = seen.ok().filter(|seen| seen.snapshot.memory && seen.integrity != Integrity::Damaged)?;
        Some(seen.snapshot)
    }

    /// Whether an instance whose memory could not be saved was seen frozen after that. Who did not answer in time may be
    /// at it still, and end it.
    async fn is_still_frozen(&self, record: &Sandbox, generation: Generation, error: &ProviderError) -> bool {
        if matches!(error, ProviderError::TimedOut { .. }) {
            return false;
        }
        let instance = InstanceRef { sandbox: record.id.clone(), generation };
        let seen = self.call(&record.id, self.config.budgets.call, self.provider.observe(&instance)).await;
        matches!(seen, Ok(Observation { state: InstanceState::Frozen, .. }))
    }

    /// Makes an instance, under the start lock (L15).
    async fn make(
        &self,
        record: &Sandbox,
        mutation: &Mutation,
        from: Option<(&SnapshotId, bool)>,
    ) -> Result<Outcome, EngineError> {
        let recall = match from {
            Some((_, true)) => Recall::Required,
            Some((snapshot, false)) => match &record.memory {
                Some(Memory::NotRestored { snapshot: tried, why }) if tried == snapshot => {
                    Recall::GivenUp { why: why.clone() }
                }
                Some(
                    Memory::Saving
                    | Memory::Kept { .. }
                    | Memory::Restored { .. }
                    | Memory::NotSaved { .. }
                    | Memory::NotRestored { .. },
                )
                | None => Recall::Never,
            },
            None => Recall::Never,
        };
        let spec = InstanceSpec { recall, ..instance_spec(record) };
        let (owner, budget) = (&self.config.owner, self.config.budgets.make);
        let (now_ms, ttl_ms) = (self.clock.now_ms(), budget.as_millis() as u64);
        let lock =
            self.store.lease(self.epoch, &record.id, LeaseKind::Start, &self.config.holder, now_ms, ttl_ms).await?;
        let made = match from {
            None => self.call(&record.id, budget, self.provider.create(mutation, &record.id, owner, &spec)).await,
            Some((snapshot, _)) => {
                let restored = self.provider.restore(mutation, &record.id, owner, &spec, snapshot);
                self.call(&record.id, budget, restored).await
            }
        };
        self.store.release(self.epoch, &record.id, LeaseKind::Start, lock.token).await?;
        Ok(match made {
            Ok(Observation { state: InstanceState::Running | InstanceState::Frozen, deadline, .. }) => {
                Outcome::Made { remaining_ms: deadline.map(|deadline| deadline.remaining_ms) }
            }
            Ok(Observation { state: InstanceState::Creating, .. }) => {
                Outcome::Failed(Failure { kind: FailureKind::Unknown, what: "it is still being made".to_owned() })
            }
            Ok(seen) => Outcome::Failed(Failure { kind: FailureKind::Failed, what: format!("it is {}", seen.state) }),
            Err(error) => failed(error),
        })
    }

    /// Ends an instance and looks whether anything is left.
    async fn clear(self: &Arc<Self>, record: &Sandbox, mutation: &Mutation) -> Outcome {
        let budget = self.config.budgets.clear;
        if let Err(error) = self.call(&record.id, budget, self.provider.destroy(mutation, &record.id)).await {
            return if is_planted(Planted::AbsenceUnseen) { Outcome::Cleared } else { failed(error) };
        }
        let instance = InstanceRef { sandbox: record.id.clone(), generation: mutation.generation };
        match self.call(&record.id, self.config.budgets.call, self.provider.observe(&instance)).await {
            Ok(Observation { state: InstanceState::Absent, .. }) => {}
            Ok(seen) => {
                let what = format!("it was destroyed, and is {}", seen.state);
                return Outcome::Failed(Failure { kind: FailureKind::Failed, what });
            }
            Err(error) => return failed(error),
        }
        // What was saved goes with it, before it is called gone: the record goes last (J5).
        if (record.deleted || record.resetting)
            && let Err(error) = self.remove_all_of(record).await
        {
            let what = in_words(&error);
            return Outcome::Failed(Failure { kind: FailureKind::Failed, what });
        }
        Outcome::Cleared
    }

    /// What ran in an instance that is removed, and another one may follow, is remembered as lost, or as suspended if its
    /// memory was saved: it does not run any more, and is told so (X5). What cannot be asked is not waited for.
    async fn remember_executions(
        self: &Arc<Self>,
        record: &Sandbox,
        generation: Generation,
    ) -> Result<(), EngineError> {
        let saved = match &record.phase {
            Phase::Hibernating { .. } => true,
            Phase::Provisioning { .. } | Phase::Resuming { .. } => false,
            Phase::Verifying { .. }
            | Phase::Ready
            | Phase::Frozen { .. }
            | Phase::Hibernated { .. }
            | Phase::Lost
            | Phase::Failed { .. }
            | Phase::Stopping { .. }
            | Phase::Stopped => return Ok(()),
        };
        let suspended = saved && record.suspends();
        let instance = InstanceRef { sandbox: record.id.clone(), generation };
        let asked = self.call(&record.id, self.config.budgets.probe, self.provider.executions(&instance)).await;
        let now_ms = self.clock.now_ms();
        let mut all = asked.unwrap_or_default();
        for status in &all {
            self.saw(status).await;
        }
        let lost = all.clone().into_iter().filter_map(|mut status| {
            let lost = |cause: String| Some(ExecState::Lost { cause });
            let state = match (&status.state, saved) {
                (ExecState::Running | ExecState::Suspended | ExecState::Lost { .. }, true) if suspended => {
                    Some(ExecState::Suspended)
                }
                (ExecState::Running | ExecState::Suspended | ExecState::Lost { .. }, true) => {
                    lost(HIBERNATED.to_owned())
                }
                (ExecState::Lost { cause }, false) => lost(cause.clone()),
                (ExecState::Running | ExecState::Suspended, false) => lost(record.cause.cause.code().to_owned()),
                (
                    ExecState::Exited { .. }
                    | ExecState::Signalled { .. }
                    | ExecState::OomKilled
                    | ExecState::Failed { .. }
                    | ExecState::Cancelled
                    | ExecState::TimedOut,
                    _,
                ) => None,
            };
            status.state = state?;
            status.ended_at_ms = if status.state.is_final() { status.ended_at_ms.or(Some(now_ms)) } else { None };
            status.pid = None;
            Some(LostExecution { generation, status })
        });
        let lost: Vec<LostExecution> = lost.collect();
        for one in &lost {
            self.saw(&one.status).await;
        }
        for status in &mut all {
            if let Some(known) = lost.iter().find(|one| one.status.id == status.id) {
                *status = known.status.clone();
            }
        }
        self.keep_executions(record, generation, all).await;
        let remembered = self.amend(&record.id, |record| {
            let known = &record.lost_executions;
            let new: Vec<LostExecution> =
                lost.iter().filter(|one| known.iter().all(|known| known.status.id != one.status.id)).cloned().collect();
            if new.is_empty() {
                return None;
            }
            let data = serde_json::json!({ "executions": new.iter().map(|one| &one.status.id).collect::<Vec<_>>() });
            record.lost_executions.extend(new);
            let surplus = record.lost_executions.len().saturating_sub(LOST_EXECUTIONS_MAX);
            record.lost_executions.drain(..surplus);
            let kind = if suspended { "sandbox.executions_suspended" } else { "sandbox.executions_lost" };
            Some(crate::journal::noted(record, kind, Actor::part("engine"), now_ms, data))
        });
        remembered.await.map(drop)
    }

    /// A call to the provider: admitted by the breaker, with a deadline, and counted (J7).
    pub(crate) async fn call<T>(
        &self,
        sandbox: &viv_core::SandboxId,
        budget: Duration,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.call_of(Asked::Provider, sandbox, budget, call).await
    }

    /// The same along the way that ends at a sandbox's agent: its silence says nothing about the provider.
    pub(crate) async fn call_agent<T>(
        &self,
        sandbox: &viv_core::SandboxId,
        budget: Duration,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.call_of(Asked::Agent, sandbox, budget, call).await
    }

    async fn call_of<T>(
        &self,
        asked: Asked,
        sandbox: &viv_core::SandboxId,
        budget: Duration,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        if self.is_gated(crate::gate::Gate::Breaker, sandbox)
            && let Err(open) = self.breaker.admit(self.clock.now_ms())
        {
            let why = format!("{} failures in a row; tried again in {} ms", open.failures, open.retry_ms);
            let source = std::io::Error::new(std::io::ErrorKind::WouldBlock, why);
            return Err(ProviderError::Unavailable { what: self.provider.name().to_owned(), source });
        }
        let answer = match tokio::time::timeout(budget, call).await {
            Ok(answer) => answer,
            Err(_) => Err(ProviderError::TimedOut { what: "the provider", after_ms: budget.as_millis() as u64 }),
        };
        match &answer {
            Err(error) if error.is_transient() && asked == Asked::Agent => {}
            Err(error) if error.is_transient() => self.breaker.silent(sandbox.as_str(), self.clock.now_ms()),
            Ok(_) | Err(_) => self.breaker.answered(),
        }
        if let Err(ProviderError::Fenced { highest, .. }) = &answer
            && let Err(error) = self.outrank(sandbox, *highest).await
        {
            self.heed(&error);
        }
        answer
    }
}

/// Whether nobody heard, so that the same may be asked again. That memory took too long is an answer.
fn is_unheard(error: &ProviderError) -> bool {
    matches!(error, ProviderError::Unavailable { .. } | ProviderError::Fenced { .. })
}

/// What an instance of this sandbox is made of.
fn instance_spec(record: &Sandbox) -> InstanceSpec {
    InstanceSpec {
        image: record.spec.image.clone(),
        limits: record.spec.limits.clone(),
        network: record.spec.network.clone(),
        env: record.spec.env.clone(),
        workdir: record.spec.workdir.clone(),
        packages: record.spec.packages,
        labels: record.labels.clone(),
        lifetime_ms: record.policy.lifetime_ms,
        recall: Recall::Never,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what map_or_else hands over")]
fn failed(error: ProviderError) -> Outcome {
    Outcome::Failed(failure(&error))
}

/// What an error means for the next try.
pub(crate) fn failure(error: &ProviderError) -> Failure {
    let kind = match error {
        ProviderError::Invalid { .. } | ProviderError::Unsupported { .. } | ProviderError::NotFound { .. } => {
            FailureKind::Refused
        }
        ProviderError::TimedOut { .. } | ProviderError::Unavailable { .. } | ProviderError::Fenced { .. } => {
            FailureKind::Unknown
        }
        ProviderError::StaleGeneration { .. }
        | ProviderError::Absent
        | ProviderError::NotRunning { .. }
        | ProviderError::Expired
        | ProviderError::Conflict { .. }
        | ProviderError::Exhausted { .. }
        | ProviderError::Outdated { .. }
        | ProviderError::Failed { .. } => FailureKind::Failed,
    };
    Failure { kind, what: in_words(error) }
}

/// An error with what is behind it.
pub(crate) fn in_words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        words = format!("{words}: {cause}");
        source = cause.source();
    }
    words
}

/// An observation as an event has it; `None` when nothing is settled yet.
pub(crate) fn seen(observation: &Observation) -> (Option<Seen>, Observed) {
    let via = match observation.via {
        ObservedVia::Supervisor => "supervisor",
        ObservedVia::Record => "record",
        ObservedVia::Api => "api",
    };
    let observed =
        Observed { state: observation.state.to_string(), via: via.to_owned(), at_ms: observation.observed_at_ms };
    let seen = match &observation.state {
        InstanceState::Creating | InstanceState::Ending { .. } => None,
        InstanceState::Running => Some(Seen::Running),
        InstanceState::Frozen => Some(Seen::Frozen),
        InstanceState::Ended(ended) => Some(Seen::Ended(ended.cause.clone())),
        InstanceState::Absent => Some(Seen::Absent),
    };
    (seen, observed)
}
