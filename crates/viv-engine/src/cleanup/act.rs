//! One sandbox of a cleanup: who is in use is left alone, and what is done is what a person could have asked for.

use std::sync::Arc;

use viv_core::lifecycle::{Accepted, Actor, Event, Phase, Sandbox, Stepped, step};
use viv_store::StoreError;

use super::plan::{is_kept_awake, is_past_deadline, is_unwell};
use super::{CleanupConfig, CleanupItem, CleanupKind, CleanupOutcome};
use crate::engine::{Applied, Inner, RACES_MAX, too_fast};
use crate::error::EngineError;
use crate::journal;

/// A command that ended this long ago is over: what runs counts as used now.
const ENDED_MS: u64 = 1_000;

impl Inner {
    /// One of them, unless it is in use.
    pub(super) async fn clean(
        self: &Arc<Self>,
        record: &Sandbox,
        item: &CleanupItem,
        config: &CleanupConfig,
        by: &Actor,
    ) -> CleanupOutcome {
        let done = match item.kind {
            CleanupKind::Unhealthy | CleanupKind::Leftovers | CleanupKind::Age | CleanupKind::Emergency
                if record.is_spare() =>
            {
                // Whoever claimed it meanwhile has it.
                self.give_up(&record.id, &item.why).await
            }
            CleanupKind::Unhealthy => self.give_up_unwell(record, by).await,
            CleanupKind::Leftovers => {
                let stopped = self.apply(&record.id, &Event::Stop { by: by.clone() }).await;
                stopped.map(|_| true)
            }
            CleanupKind::Age if is_past_deadline(record, self.clock.now_ms()) => self.ask_for_its_end(record).await,
            CleanupKind::Age => self.put_to_rest_without_task(record, ENDED_MS).await,
            CleanupKind::Emergency => self.put_to_rest_without_task(record, idle_ms(config)).await,
        };
        match done {
            Ok(true) => CleanupOutcome::Done,
            Ok(false) => CleanupOutcome::InUse,
            Err(error) => CleanupOutcome::Failed(crate::effect::in_words(&error)),
        }
    }

    /// What would come of one, as far as can be told without doing it: who is in use is asked, and nothing else is done.
    pub(super) async fn would_clean(
        self: &Arc<Self>,
        record: &Sandbox,
        item: &CleanupItem,
        config: &CleanupConfig,
    ) -> CleanupOutcome {
        let idle_ms = match item.kind {
            CleanupKind::Unhealthy | CleanupKind::Leftovers => return CleanupOutcome::Planned,
            CleanupKind::Age if is_past_deadline(record, self.clock.now_ms()) => return CleanupOutcome::Planned,
            CleanupKind::Age => ENDED_MS,
            CleanupKind::Emergency => idle_ms(config),
        };
        if record.is_spare() {
            return CleanupOutcome::Planned;
        }
        match self.is_unused(record, idle_ms).await {
            Ok(is_unused) if is_unused && !is_kept_awake(record, self.clock.now_ms()) => CleanupOutcome::Planned,
            Ok(_) => CleanupOutcome::InUse,
            Err(error) => CleanupOutcome::Failed(crate::effect::in_words(&error)),
        }
    }

    /// Ends what is unwell, unless it came back, or somebody came for it, meanwhile.
    async fn give_up_unwell(self: &Arc<Self>, seen: &Sandbox, by: &Actor) -> Result<bool, EngineError> {
        // It may answer by now: then it is verified and kept (T7).
        self.look_for_lost(&seen.id).await?;
        let before = self.load(&seen.id).await?;
        if !is_unwell(&before) || before.phase_since_ms != seen.phase_since_ms {
            return Ok(false);
        }
        let given_up = self.apply(&seen.id, &Event::Unhealthy { by: by.clone() }).await?;
        Ok(matches!(given_up, Applied::Changed(_)))
    }

    /// What has come to its hard deadline has ended, whatever was done in it, or its arbiter knows of a later one (T6, L5).
    /// Whether it had ended; without an answer nothing is known (T7).
    async fn ask_for_its_end(self: &Arc<Self>, seen: &Sandbox) -> Result<bool, EngineError> {
        if self.look_at_expiry(seen).await? {
            return Ok(true);
        }
        let record = self.load(&seen.id).await?;
        if is_past_deadline(&record, self.clock.now_ms()) {
            let what = "its provider does not say when it ends".to_owned();
            return Err(EngineError::Invalid { what, hint: format!("viv doctor {}", seen.id) });
        }
        Ok(false)
    }

    /// The same as [`Self::put_to_rest`], unless a task is at work in it by now: between its steps nothing runs.
    async fn put_to_rest_without_task(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        let at_work = self.store.tasks_at_work(std::slice::from_ref(&seen.id)).await?;
        if at_work.is_empty() { self.put_to_rest(seen, idle_ms).await } else { Ok(false) }
    }

    /// Whether nothing was done in it for so long, by what runs in it.
    async fn is_unused(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        if seen.phase != Phase::Ready {
            return Ok(true);
        }
        let Some(used_at_ms) = self.used_at_ms(seen).await else {
            let what = "it does not say whether something runs in it".to_owned();
            return Err(EngineError::Invalid { what, hint: format!("viv doctor {}", seen.id) });
        };
        // What runs uses it now, what ended used it until then.
        Ok(self.clock.now_ms().saturating_sub(used_at_ms) >= idle_ms)
    }

    /// Puts it to rest as if its window were over, unless it is in use: by its record, by what runs in it, or by who
    /// comes until it is written down (L6). Whether it was; without an answer about what runs, nothing is done (T7).
    pub(crate) async fn put_to_rest(self: &Arc<Self>, seen: &Sandbox, idle_ms: u64) -> Result<bool, EngineError> {
        let Some(_alone) = self.knowledge.looks_for_rest(&seen.id) else { return Ok(false) };
        if !self.is_unused(seen, idle_ms).await? {
            return Ok(false);
        }
        for _ in 0..RACES_MAX {
            let before = self.load(&seen.id).await?;
            if before.active_at_ms > seen.active_at_ms || before.generation != seen.generation {
                return Ok(false);
            }
            let now = self.now();
            let mut hurried = before.clone();
            (hurried.policy.idle_ms, hurried.policy.hibernate_ms) = (0, 0);
            let event = Event::Idle { freezes: false };
            let Stepped::Accepted(accepted) = step(&hurried, &event, now.moment()) else { return Ok(false) };
            let Accepted { mut next, happened } = *accepted;
            next.policy = before.policy.clone();
            let line = journal::line(&event, &before, &next, happened, now.ms);
            match self.commit(next, vec![line], None, Some(before.active_at_ms), Vec::new()).await {
                Ok(_) => return Ok(true),
                Err(EngineError::Store(StoreError::Conflict { .. })) => {}
                Err(other) => return Err(other),
            }
        }
        Err(too_fast(&seen.id))
    }
}

/// For how long nothing may have been done in what an emergency makes go.
fn idle_ms(config: &CleanupConfig) -> u64 {
    ENDED_MS.max(config.emergency_idle.as_millis() as u64)
}
