//! A create that gets a spare, and what is done with a spare that nobody gets.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use viv_core::exec::{ExecSpec, ExecStatus};
use viv_core::lifecycle::{Accepted, Actor, Event, NewSandbox, Outcome, Phase, Sandbox, Stepped, claim, step};
use viv_core::{ExecutionId, SandboxId};
use viv_provider::{DeadlineChange, Mutation, ProviderError};
use viv_store::{Change, Idempotency, Quota, StoreError};

use super::is_ready;
use crate::effect::failure;
use crate::engine::{Inner, RACES_MAX, too_fast};
use crate::error::EngineError;
use crate::journal;
use crate::knowledge::ToTell;
use crate::metrics::family;

/// How long somebody who is refused for want of room waits for spares to be given up. Longer than an end takes.
const YIELD_WAIT: Duration = Duration::from_secs(20);

/// After somebody had to wait for room, no spares are made for this long.
const HELD_MS: u64 = 30_000;

/// Who waits for room, until this is dropped.
struct Waiting<'i>(&'i Inner);

impl<'i> Waiting<'i> {
    fn begin(inner: &'i Inner) -> Self {
        inner.spares.lock().waiting += 1;
        inner.reconcilers.look_at_spares();
        Self(inner)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let held_until_ms = self.0.clock.now_ms().saturating_add(HELD_MS);
        let mut state = self.0.spares.lock();
        state.waiting -= 1;
        state.held_until_ms = state.held_until_ms.max(held_until_ms);
    }
}

impl Inner {
    /// A spare as the sandbox that is asked for; `None` when there is none, and it has to be made.
    pub(crate) async fn claim_spare(
        self: &Arc<Self>,
        new: &NewSandbox,
        idempotency: Option<&Idempotency>,
    ) -> Result<Option<Sandbox>, StoreError> {
        let Some(class) = self.config.spares.class_for(new) else { return Ok(None) };
        let name = self.config.spares.classes[class].name.as_str();
        self.spare_asked_for(class);
        // Each is taken out of memory by one; a race is with who gives it up, or sees it end.
        while let Some(id) = self.take_spare(class) {
            let Some(spare) = self.store.get(&id).await? else { continue };
            if self.knowledge.has_ended(&spare) {
                continue;
            }
            let now = self.now();
            let new = NewSandbox { id: id.clone(), ..new.clone() };
            let Some(sandbox) = claim(&spare, new, now.moment()) else { continue };
            let line = journal::claimed(&spare, &sandbox, name, now.ms);
            let change = Change {
                quota: self.quota(&sandbox),
                sandbox: sandbox.clone(),
                lines: vec![line],
                idempotency: idempotency.cloned(),
                unused_since_ms: None,
                snapshots: Vec::new(),
            };
            self.reached("create.claiming");
            match Box::pin(self.write(change)).await {
                Ok(()) => {
                    self.spare_claimed(class, &id);
                    self.metrics.count(&family::SPARE_ASKS, &[name, "claimed"]);
                    return Ok(Some(sandbox));
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(other) => {
                    // It is nobody's still, or was written all the same: the record is looked at again.
                    self.doubt(&other, &id);
                    self.reconcilers.look_at_spares();
                    return Err(other);
                }
            }
        }
        self.spares.lock().pools[class].missed += 1;
        self.metrics.count(&family::SPARE_ASKS, &[name, "missed"]);
        self.reconcilers.look_at_spares();
        Ok(None)
    }

    fn spare_asked_for(&self, class: usize) {
        let (now_ms, most) = (self.clock.now_ms(), self.config.spares.classes[class].max as usize);
        let asked = &mut self.spares.lock().pools[class].asked_at_ms;
        asked.push_back(now_ms);
        while asked.len() > most {
            asked.pop_front();
        }
    }

    fn take_spare(&self, class: usize) -> Option<SandboxId> {
        self.spares.lock().pools[class].ready.pop_front()
    }

    fn spare_claimed(&self, class: usize, id: &SandboxId) {
        let mut state = self.spares.lock();
        state.living.remove(id);
        state.pools[class].claimed += 1;
        drop(state);
        self.reconcilers.look_at_spares();
    }

    /// Gives the instance the lifetime that is wanted. `None` when it was seen to have ended, which was applied.
    pub(crate) async fn set_up_claimed(
        self: &Arc<Self>,
        record: &Sandbox,
        mutation: &Mutation,
    ) -> Result<Option<Outcome>, EngineError> {
        if self.look_at_instance(record, mutation.generation).await? {
            return Ok(None);
        }
        let change = DeadlineChange::ExactlyMs(record.policy.lifetime_ms);
        let set = self.provider.extend(mutation, &record.id, change);
        Ok(Some(match self.call(&record.id, self.config.budgets.call, set).await {
            Ok(deadline) => Outcome::Claimed { remaining_ms: Some(deadline.remaining_ms) },
            // Where there are no hard deadlines, it has none from the start.
            Err(ProviderError::Unsupported { .. }) => Outcome::Claimed { remaining_ms: None },
            Err(error) => Outcome::Failed(failure(&error)),
        }))
    }

    /// Starts a command, told what its instance was not made with.
    pub(crate) async fn execute(
        &self,
        mutation: &Mutation,
        sandbox: &SandboxId,
        execution: &ExecutionId,
        spec: &ExecSpec,
    ) -> Result<ExecStatus, ProviderError> {
        let told = match self.knowledge.env_to_tell(sandbox, mutation.generation) {
            ToTell::Env(env) => Some(env),
            ToTell::Nothing => None,
            // What is kept in memory may be lost; the record is not.
            ToTell::Unknown => {
                let record = self.store.get(sandbox).await.map_err(|error| ProviderError::Unavailable {
                    what: "the store".to_owned(),
                    source: std::io::Error::other(error.to_string()),
                })?;
                record.and_then(|record| record.env_to_tell(mutation.generation).cloned())
            }
        };
        let Some(mut env) = told else {
            return self.provider.execute(mutation, sandbox, execution, spec).await;
        };
        env.extend(spec.env.clone());
        let spec = ExecSpec { env, ..spec.clone() };
        self.provider.execute(mutation, sandbox, execution, &spec).await
    }

    /// Gives a spare up, unless somebody claimed it meanwhile. Whether it was.
    pub(crate) async fn give_up(self: &Arc<Self>, id: &SandboxId, why: &str) -> Result<bool, EngineError> {
        let by = Actor::part("spares");
        for _ in 0..RACES_MAX {
            let Some(before) = self.store.get(id).await? else { return Ok(false) };
            // It is compared with what is written: who claims it after this look wins, and this one looks again.
            if !before.is_spare() {
                return Ok(false);
            }
            let now = self.now();
            let event = Event::Delete { by: by.clone() };
            let Stepped::Accepted(accepted) = step(&before, &event, now.moment()) else { return Ok(false) };
            let Accepted { next, happened } = *accepted;
            let told = journal::noted(&next, "spare.given_up", by.clone(), now.ms, json!({ "why": why }));
            let lines = vec![told, journal::line(&event, &before, &next, happened, now.ms)];
            match self.commit(next, lines, None, None, Vec::new()).await {
                Ok(_) => return Ok(true),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(id))
    }

    /// Writes a change that was refused because there is no room, once spares have made some (L18). Refused for good when
    /// there are none, or they do not end.
    pub(crate) async fn write_when_spares_yield(&self, change: Change, refused: StoreError) -> Result<(), StoreError> {
        if !matches!(&refused, StoreError::Quota { limit, .. } if Quota::is_total(limit)) {
            return Err(refused);
        }
        let _waiting = Waiting::begin(self);
        let until = tokio::time::Instant::now() + YIELD_WAIT;
        loop {
            // Asked for before the next look, so that none is missed between.
            let mut freed = std::pin::pin!(self.spares.freed.notified());
            freed.as_mut().enable();
            let refused = match self.write_once(change.clone()).await {
                Err(again @ StoreError::Quota { .. }) => again,
                other => return other,
            };
            let none_left = self.spares.lock().living.is_empty();
            if none_left || tokio::time::timeout_at(until, freed).await.is_err() {
                return Err(refused);
            }
        }
    }
}

/// Whether a spare did not come up, or does not work any more.
pub(super) fn is_broken(spare: &Sandbox) -> bool {
    match &spare.phase {
        Phase::Lost | Phase::Failed { .. } => true,
        Phase::Provisioning { .. }
        | Phase::Verifying { .. }
        | Phase::Ready
        | Phase::Frozen { .. }
        | Phase::Hibernating { .. }
        | Phase::Hibernated { .. }
        | Phase::Resuming { .. }
        | Phase::Stopping { .. }
        | Phase::Stopped => false,
    }
}

/// Whether nothing stands in the way of giving it to somebody, but that it was not probed lately.
pub(super) fn wants_a_probe(spare: &Sandbox, evidence_at_ms: Option<u64>, every_ms: u64, now_ms: u64) -> bool {
    is_ready(spare) && evidence_at_ms.is_none_or(|at_ms| now_ms.saturating_sub(at_ms) >= every_ms)
}
