//! A record on its way to its next version, and the moves that several events share.

use super::{Accepted, Happened, Stepped};
use crate::id::{Generation, SnapshotId};
use crate::lifecycle::cause::{Actor, Cause, Caused};
use crate::lifecycle::evidence::Evidence;
use crate::lifecycle::phase::{FreezeStep, HibernateStep, MakeStep, Phase, PhaseName, ResumeStep, VerifyStep, Work};
use crate::lifecycle::{Desired, Memory, Moment, Sandbox};
use crate::planted::{Planted, is_planted};
use crate::spec::{Hibernate, Policy};

/// A record on its way to its next version.
pub(super) struct Draft<'t> {
    pub(super) next: Sandbox,
    pub(super) at: Moment<'t>,
    pub(super) from: PhaseName,
}

impl<'t> Draft<'t> {
    pub(super) fn of(sandbox: &Sandbox, at: Moment<'t>) -> Self {
        let mut next = sandbox.clone();
        next.version += 1;
        Self { next, at, from: sandbox.phase.name() }
    }

    /// The change is not a transition.
    pub(super) fn is(self, happened: Happened) -> Stepped {
        Stepped::Accepted(Box::new(Accepted { next: self.next, happened }))
    }

    /// The one way into another phase.
    pub(super) fn enter(mut self, phase: Phase, cause: Cause, by: &Actor, message: Option<String>) -> Stepped {
        let (from, to) = (self.from, phase.name());
        if from != to {
            self.next.phase_since_ms = self.at.now_ms;
        }
        if to != PhaseName::Hibernating {
            self.memory_is_lost();
        }
        // What came back, or is saved, is not what was to go.
        let goes = [PhaseName::Provisioning, PhaseName::Resuming, PhaseName::Lost, PhaseName::Failed].contains(&to);
        self.next.resetting &= goes;
        if !matches!(to, PhaseName::Frozen | PhaseName::Hibernating) {
            self.next.kept_frozen = None;
        }
        self.next.phase = phase;
        self.next.cause = Caused { cause, by: by.clone(), at_ms: self.at.now_ms, message };
        let happened = if from == to { Happened::Advanced } else { Happened::Moved { from, to } };
        self.is(happened)
    }

    fn work(&mut self, limit_ms: u64) -> Work {
        self.next.work(self.at, limit_ms)
    }

    /// Nothing is to be left.
    pub(super) fn stopping(mut self, cause: Cause, by: &Actor, message: Option<String>) -> Stepped {
        self.next.desired = Desired::Gone;
        self.next.entry = None;
        self.next.lose_suspended(self.at.now_ms);
        let work = self.work(self.at.timings.stop_ms);
        self.enter(Phase::Stopping { work }, cause, by, message)
    }

    /// Absence was observed, and that was the intention.
    pub(super) fn stopped(mut self) -> Stepped {
        // The first cause is the one that people ask for.
        let cause = self.next.cause.clone();
        self.next.entry = None;
        self.next.expires_at_ms = None;
        self.next.evidence = Evidence::default();
        self.next.keep_awake.clear();
        let kept = if cause.cause == Cause::KillFailed { Cause::AbsenceObserved } else { cause.cause };
        self.enter(Phase::Stopped, kept, &cause.by, cause.message)
    }

    /// This user stopped it.
    pub(super) fn held_by(&mut self, by: &Actor) {
        self.next.held = true;
        self.next.held_by = Some(by.clone());
    }

    /// It is to be saved, and that was wanted before: by a user, or because its time was up.
    pub(super) fn hibernating_as_wanted(self) -> Stepped {
        if self.next.held {
            let by = self.next.held_by.clone().unwrap_or_else(|| self.next.cause.by.clone());
            return self.hibernating(Cause::UserStop, &by);
        }
        let cause = self.next.rests_for.clone().unwrap_or(Cause::Expired);
        let part = if cause == Cause::Expired { "expiry" } else { "engine" };
        self.hibernating(cause, &Actor::part(part))
    }

    /// It is saved, and its instance removed.
    pub(super) fn hibernating(mut self, cause: Cause, by: &Actor) -> Stepped {
        self.next.desired = Desired::Hibernated;
        self.next.entry = None;
        self.next.rests_for = Some(cause.clone());
        if cause != Cause::MemoryShort {
            self.next.kept_frozen = None;
        }
        self.next.memory = self.memory_to_save(&cause);
        let work = self.work(self.at.timings.save_ms);
        self.enter(Phase::Hibernating { step: HibernateStep::Save, save_failed: false, work }, cause, by, None)
    }

    /// What becomes of its memory when it is saved now (X5).
    fn memory_to_save(&self, cause: &Cause) -> Option<Memory> {
        if self.next.policy.hibernate == Hibernate::Filesystem {
            return None;
        }
        let not_saved = |why: &str| Some(Memory::NotSaved { why: why.to_owned() });
        match (self.at.no_memory, self.from) {
            (Some(why), _) => not_saved(why),
            // The deadline ended all processes.
            (None, _) if *cause == Cause::Expired => not_saved("nothing ran any more"),
            (None, PhaseName::Ready | PhaseName::Frozen | PhaseName::Verifying) => Some(Memory::Saving),
            (
                None,
                PhaseName::Provisioning
                | PhaseName::Hibernating
                | PhaseName::Hibernated
                | PhaseName::Resuming
                | PhaseName::Lost
                | PhaseName::Failed
                | PhaseName::Stopping
                | PhaseName::Stopped,
            ) => not_saved("nothing ran any more"),
        }
    }

    /// What was being saved of its memory is gone with its instance, or given up.
    fn memory_is_lost(&mut self) {
        if self.next.memory == Some(Memory::Saving) {
            self.next.memory = Some(Memory::NotSaved { why: "its instance was gone before".to_owned() });
        }
    }

    /// Its memory cannot be saved: its files are, and what ran is lost, from now on.
    pub(super) fn memory_not_saved(mut self, why: &str) -> Stepped {
        self.next.memory = Some(Memory::NotSaved { why: why.to_owned() });
        self.next.cause.message = Some(format!("its memory was not saved: {why}"));
        self.is(Happened::Advanced)
    }

    /// Its memory cannot be saved, and nobody asked for it to end: it stays where that is, and is left alone for a while,
    /// longer each time. Who came meanwhile has it back.
    pub(super) fn back_to_frozen(mut self, why: &str) -> Stepped {
        self.next.memory = Some(Memory::NotSaved { why: why.to_owned() });
        self.next.desired = Desired::Running;
        self.next.rests_for = None;
        let engine = Actor::part("engine");
        let said = Some(format!("its memory was not saved: {why}"));
        if let Some(entry) = self.next.entry.clone() {
            let verify = Verify { step: VerifyStep::Thaw, rebuilds: 0, findings: 0, was_ready: true };
            return self.verifying(verify, Cause::Requested, &entry.by, said);
        }
        let (timings, now_ms) = (self.at.timings, self.at.now_ms);
        if let Some(kept) = &mut self.next.kept_frozen {
            let doubled_ms = timings.left_alone_ms.saturating_mul(1 << kept.failures.min(16));
            kept.failures = kept.failures.saturating_add(1);
            kept.until_ms = now_ms.saturating_add(doubled_ms.min(timings.left_alone_ms_max));
        }
        let work = self.work(timings.freeze_ms);
        let phase = Phase::Frozen { step: FreezeStep::Freeze { work } };
        self.enter(phase, Cause::MemoryNotSaved, &engine, said)
    }

    /// What was saved of its memory did not come back, or did not work: its files of the same moment are next, in an
    /// instance of their own. Never a loop: from here on nobody asks for that memory again.
    pub(super) fn without_memory(mut self, rebuilds: u32, snapshot: SnapshotId, why: String) -> Stepped {
        self.next.lose_suspended(self.at.now_ms);
        if self.next.generation == Generation::FIRST {
            // They were to be copies of another one's, and never were.
            self.next.services.clear();
        }
        self.next.memory = Some(Memory::NotRestored { snapshot, why: why.clone() });
        self.remake(rebuilds, Cause::MemoryNotRestored, &Actor::part("engine"), Some(why))
    }

    /// Its instance is ended, and saved unless that is not wanted; then it goes on from where it is to go back to.
    pub(super) fn rolling_back(mut self, discard: bool, by: &Actor) -> Stepped {
        let (step, limit_ms) = if discard {
            (HibernateStep::Clear, self.at.timings.stop_ms)
        } else {
            (HibernateStep::Save, self.at.timings.save_ms)
        };
        self.next.memory = None;
        let work = self.work(limit_ms);
        self.enter(Phase::Hibernating { step, save_failed: false, work }, Cause::Rollback, by, None)
    }

    /// What its next instance is to begin with, once the last one is proven gone. A wish to go back stands until then:
    /// what is not cleared in time is lost, and may be sealed once more before anything is made.
    fn begins_with(&self) -> Option<SnapshotId> {
        self.next.rollback.clone().or_else(|| self.next.made_from())
    }

    /// What its next instance begins with, now. Where it is to go back to is its saved state from here on.
    fn beginning(&mut self) -> Option<SnapshotId> {
        if let Some(target) = self.next.rollback.take() {
            self.next.saved = Some(target);
            self.next.sealed = None;
        }
        self.next.made_from()
    }

    pub(super) fn hibernated(mut self, snapshot: SnapshotId, cause: Cause) -> Stepped {
        self.next.expires_at_ms = None;
        self.next.evidence = Evidence::default();
        let snapshot = if self.next.rollback.is_some() { self.beginning().unwrap_or(snapshot) } else { snapshot };
        if is_planted(Planted::EntryForgotten) {
            self.next.entry = None;
        }
        let by = self.next.held_by.clone().unwrap_or_else(|| self.next.cause.by.clone());
        let said = match &self.next.memory {
            Some(Memory::NotSaved { why }) => Some(format!("its memory was not saved: {why}")),
            Some(Memory::Saving | Memory::Kept { .. } | Memory::Restored { .. } | Memory::NotRestored { .. })
            | None => None,
        };
        self.enter(Phase::Hibernated { snapshot }, cause, &by, said)
    }

    /// It ended because its time was up: that is a stop that nobody has to ask for (L5).
    pub(super) fn expire(self) -> Stepped {
        let by = Actor::part("expiry");
        if !self.next.policy.persistent {
            return self.stopping(Cause::Expired, &by, None);
        }
        // Who waits for it to run still does: that is looked at again once it is saved (L3).
        let (desired, entry) = (self.next.desired, self.next.entry.clone());
        let mut stepped = self.hibernating(Cause::Expired, &by);
        if let (Stepped::Accepted(accepted), Some(entry)) = (&mut stepped, entry) {
            accepted.next.desired = desired;
            accepted.next.entry = Some(entry);
        }
        stepped
    }

    /// It is gone, or cannot be reached, and nobody asked for that.
    pub(super) fn lost(mut self, cause: Cause, message: Option<String>) -> Stepped {
        // An entry that came while it was being saved was never tried, so it is looked at again (L3). Any other one was.
        match self.from {
            PhaseName::Hibernating => {}
            PhaseName::Provisioning
            | PhaseName::Verifying
            | PhaseName::Ready
            | PhaseName::Frozen
            | PhaseName::Hibernated
            | PhaseName::Resuming
            | PhaseName::Lost
            | PhaseName::Failed
            | PhaseName::Stopping
            | PhaseName::Stopped => self.next.entry = None,
        }
        self.enter(Phase::Lost, cause, &Actor::part("engine"), message)
    }

    /// Attempts are exhausted; what may be left is cleared.
    pub(super) fn failed(mut self, cause: Cause, message: Option<String>) -> Stepped {
        self.next.entry = None;
        self.next.expires_at_ms = None;
        let work = self.work(self.at.timings.stop_ms);
        self.enter(Phase::Failed { work: Some(work) }, cause, &Actor::part("engine"), message)
    }

    /// What was to be cleared is.
    pub(super) fn failed_and_cleared(mut self) -> Stepped {
        self.next.phase = Phase::Failed { work: None };
        self.is(Happened::Advanced)
    }

    /// A new instance is to be made, once the last one is proven gone.
    pub(super) fn remake(mut self, rebuilds: u32, cause: Cause, by: &Actor, message: Option<String>) -> Stepped {
        let mut work = self.work(self.at.timings.make_ms);
        if rebuilds > 0 {
            work.retry_at_ms = self.at.now_ms.saturating_add(backoff_ms(&work, rebuilds, self.at));
        }
        let phase = match self.begins_with() {
            Some(snapshot) => Phase::Resuming { step: ResumeStep::Clear, snapshot, rebuilds, work },
            None => Phase::Provisioning { step: MakeStep::Clear, rebuilds, work },
        };
        self.enter(phase, cause, by, message)
    }

    /// A new instance is to take the place of one that may have files that nobody saved: they are sealed first (T7).
    pub(super) fn replace(mut self, rebuilds: u32, cause: Cause, by: &Actor, message: Option<String>) -> Stepped {
        // Nothing is kept of what is to begin anew.
        if !self.next.policy.persistent || self.next.resetting || is_planted(Planted::ReplacedUnsealed) {
            return self.remake(rebuilds, cause, by, message);
        }
        let work = self.work(self.at.timings.save_ms);
        let snapshot = Sandbox::snapshot_of(&work.operation);
        self.enter(Phase::Resuming { step: ResumeStep::Seal, snapshot, rebuilds, work }, cause, by, message)
    }

    /// What there was is sealed: once the instance is gone, the next one is made from that, or from where it is to go
    /// back to.
    pub(super) fn sealed(mut self, rebuilds: u32, snapshot: SnapshotId) -> Stepped {
        self.next.sealed = Some(snapshot.clone());
        let snapshot = self.begins_with().unwrap_or(snapshot);
        let work = self.work(self.at.timings.make_ms);
        self.next.phase = Phase::Resuming { step: ResumeStep::Clear, snapshot, rebuilds, work };
        self.is(Happened::Advanced)
    }

    /// What was saved is to run again, under a new generation.
    pub(super) fn resuming(mut self, snapshot: SnapshotId, cause: Cause, by: &Actor) -> Stepped {
        let snapshot = if self.next.rollback.is_some() { self.beginning().unwrap_or(snapshot) } else { snapshot };
        if is_planted(Planted::PolicyReset) {
            self.next.policy = Policy::default_for(self.next.name.as_ref());
        }
        self.next_generation();
        self.forgo_memory(Some(&snapshot));
        let work = self.work(self.at.timings.make_ms);
        self.enter(Phase::Resuming { step: ResumeStep::Make, snapshot, rebuilds: 0, work }, cause, by, None)
    }

    /// The last generation is gone: the next one can be made, in what is left of the time.
    pub(super) fn make(mut self, rebuilds: u32, snapshot: Option<SnapshotId>, deadline_at_ms: u64) -> Stepped {
        // What was saved went with the last one.
        self.next.resetting = false;
        if self.next.entry.is_none() {
            return self.withdrawn(rebuilds, snapshot);
        }
        // What was to be made from its image is, and goes back when it is there.
        let snapshot =
            snapshot.and_then(|snapshot| if self.next.rollback.is_some() { self.beginning() } else { Some(snapshot) });
        self.next_generation();
        self.forgo_memory(snapshot.as_ref());
        let work = Work { deadline_at_ms, ..self.work(0) };
        self.next.phase = match snapshot {
            Some(snapshot) => Phase::Resuming { step: ResumeStep::Make, snapshot, rebuilds, work },
            None => Phase::Provisioning { step: MakeStep::Make, rebuilds, work },
        };
        self.is(Happened::Advanced)
    }

    /// Nobody wants the next one any more, and nothing is left of the last: what was stopped stays stopped (L9).
    fn withdrawn(self, rebuilds: u32, snapshot: Option<SnapshotId>) -> Stepped {
        let why = Some("stopped before another instance was made".to_owned());
        let by = self.next.held_by.clone();
        let mut stepped = match snapshot {
            Some(snapshot) => self.hibernated(snapshot, Cause::UserStop),
            None if rebuilds == 0 => self.lost(Cause::UserStop, why),
            None => self.failed(Cause::UserStop, why),
        };
        if let (Stepped::Accepted(accepted), Some(by)) = (&mut stepped, by) {
            accepted.next.cause.by = by;
        }
        stepped
    }

    /// What was suspended does not go on in an instance that begins with anything else than its memory.
    fn forgo_memory(&mut self, snapshot: Option<&SnapshotId>) {
        if snapshot.is_none_or(|snapshot| !self.next.has_memory_of(snapshot)) {
            self.next.lose_suspended(self.at.now_ms);
            let is_over =
                |memory: &mut Memory| matches!(memory, Memory::Saving | Memory::Kept { .. } | Memory::Restored { .. });
            self.next.memory.take_if(is_over);
        }
    }

    /// What was found out about the last instance says nothing about the next.
    fn next_generation(&mut self) {
        self.next.generation = self.next.generation.next();
        self.next.claimed = None;
        self.next.expires_at_ms = None;
        self.next.evidence = Evidence::default();
        self.next.observed = None;
    }

    /// It has to show that it works.
    pub(super) fn verifying(mut self, verify: Verify, cause: Cause, by: &Actor, message: Option<String>) -> Stepped {
        let Verify { step, rebuilds, findings, was_ready } = verify;
        let step = if step == VerifyStep::Thaw { step } else { self.first_check() };
        self.services_count_from(self.at.now_ms);
        let mut work = self.work(self.verify_limit_ms());
        if findings > 0 {
            work.retry_at_ms = self.at.now_ms.saturating_add(backoff_ms(&work, 1, self.at));
        }
        let found_at_ms = self.at.now_ms;
        self.enter(Phase::Verifying { step, rebuilds, findings, found_at_ms, was_ready, work }, cause, by, message)
    }

    /// Every probe was well.
    pub(super) fn ready(mut self) -> Stepped {
        // Who waits for it to go back still does.
        if self.next.rollback.is_none()
            && let Some(entry) = self.next.entry.take()
        {
            // Who was waited for does not idle before its window has passed since (L4).
            self.next.active_at_ms = self.next.active_at_ms.max(entry.at_ms);
        }
        // What was made from it works, so it is good.
        if let Some(sealed) = self.next.sealed.take() {
            self.next.sealed = is_planted(Planted::SealKept).then(|| sealed.clone());
            self.next.saved = Some(sealed);
        }
        self.enter(Phase::Ready, Cause::Verified, &Actor::part("engine"), None)
    }

    pub(super) fn freezing(mut self, cause: Cause, by: &Actor) -> Stepped {
        let work = self.work(self.at.timings.freeze_ms);
        self.enter(Phase::Frozen { step: FreezeStep::Freeze { work } }, cause, by, None)
    }

    /// What could not be saved is given up: the state before it is what there is, if there is one.
    pub(super) fn discarding(mut self, by: &Actor) -> Stepped {
        self.next.desired = Desired::Hibernated;
        self.next.entry = None;
        self.memory_is_lost();
        if self.next.saved.is_none() {
            let mut stepped = self.failed(Cause::UserDiscard, None);
            if let Stepped::Accepted(accepted) = &mut stepped {
                accepted.next.cause.by = by.clone();
            }
            return stepped;
        }
        let work = self.work(self.at.timings.stop_ms);
        let phase = Phase::Hibernating { step: HibernateStep::Clear, save_failed: false, work };
        self.enter(phase, Cause::UserDiscard, by, None)
    }

    /// The same effect again, under the same id, a little later.
    pub(super) fn retry(mut self, why: String) -> Stepped {
        let at = self.at;
        if let Some(work) = self.next.phase.work_mut() {
            work.retry_at_ms = at.now_ms.saturating_add(backoff_ms(work, work.attempt, at));
            work.attempt = work.attempt.saturating_add(1);
        }
        self.next.cause.message = Some(why);
        self.is(Happened::Retrying)
    }

    /// A deadline passed in a phase that cannot be left for it: it is said, and tried on.
    pub(super) fn overdue(mut self, limit_ms: u64, cause: Cause) -> Stepped {
        let at = self.at;
        if let Some(work) = self.next.phase.work_mut() {
            work.deadline_at_ms = at.now_ms.saturating_add(limit_ms);
            work.retry_at_ms = 0;
            work.overdue = true;
        }
        self.next.cause = Caused { cause, at_ms: at.now_ms, ..self.next.cause };
        self.is(Happened::Overdue)
    }
}

/// How a verification begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Verify {
    pub(super) step: VerifyStep,
    pub(super) rebuilds: u32,
    pub(super) findings: u32,
    pub(super) was_ready: bool,
}

/// Doubles with every try, up to a bound, and differs from one operation to the next so that many do not come at once.
fn backoff_ms(work: &Work, attempt: u32, at: Moment<'_>) -> u64 {
    let doubled = at.timings.backoff_ms.saturating_mul(1 << (attempt.saturating_sub(1)).min(16));
    let wait_ms = doubled.min(at.timings.backoff_ms_max);
    // FNV-1a: no randomness here, and none needed.
    let hash = work
        .operation
        .as_str()
        .bytes()
        .chain(attempt.to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    wait_ms / 2 + hash % (wait_ms / 2 + 1)
}
