//! A spare becomes somebody's sandbox (L19).
//!
//! ```text
//!   spare: ready ──claim──► verifying: claim ──► services, hook, probe ──► ready
//!                              │ broken: not there, not well, or silent for a while
//!                              └──► provisioning, the next generation: an ordinary create
//! ```

use super::draft::Draft;
use super::{Stepped, done};
use crate::hook::HookPoint;
use crate::lifecycle::cause::{Actor, Cause};
use crate::lifecycle::phase::{Phase, VerifyStep};
use crate::lifecycle::{Moment, NewSandbox, Sandbox};

/// The spare as the sandbox that was asked for, under its own id; `None` when it is none, or does not fit.
pub fn claim(spare: &Sandbox, new: NewSandbox, at: Moment<'_>) -> Option<Sandbox> {
    if !spare.fits(&new) {
        return None;
    }
    let asked_for = Sandbox::create(NewSandbox { id: spare.id.clone(), ..new }, at);
    let next = Sandbox {
        version: spare.version + 1,
        generation: spare.generation,
        // Names of operations are never given twice.
        operations: spare.operations,
        observed: spare.observed.clone(),
        expires_at_ms: spare.expires_at_ms,
        claimed: Some(spare.generation),
        ..asked_for
    };
    let mut draft = Draft { next, at, from: spare.phase.name() };
    draft.begin_services(HookPoint::AfterStart);
    let work = draft.next.work(at, at.timings.claim_ms);
    draft.next.phase = Phase::Verifying {
        step: VerifyStep::Claim,
        rebuilds: 0,
        findings: 0,
        found_at_ms: at.now_ms,
        was_ready: false,
        work,
    };
    Some(draft.next)
}

/// Whether this is what was a spare, and has not shown yet that it works for whom it was given to.
pub(super) fn is_on_trial(sandbox: &Sandbox) -> bool {
    matches!(sandbox.phase, Phase::Verifying { was_ready: false, .. }) && sandbox.claimed == Some(sandbox.generation)
}

/// It lives for as long as it is wanted; what follows is what follows a create.
pub(super) fn claimed(mut draft: Draft<'_>, remaining_ms: Option<u64>) -> Stepped {
    let now_ms = draft.at.now_ms;
    draft.next.expires_at_ms = remaining_ms.map(|left_ms| now_ms.saturating_add(left_ms));
    draft.services_count_from(now_ms);
    let next = draft.first_check();
    let limit_ms = match next {
        VerifyStep::Services | VerifyStep::Hook => draft.verify_limit_ms(),
        VerifyStep::Claim | VerifyStep::Thaw | VerifyStep::Probe => draft.at.timings.claim_ms,
    };
    if let Phase::Verifying { work, .. } = &mut draft.next.phase {
        work.deadline_at_ms = now_ms.saturating_add(limit_ms);
    }
    draft.go_on(next)
}

/// What was a spare will not do. Nobody has had it, so one finding is enough, and there is nothing to save: another one
/// is made for whoever waits, as if there had been no spare.
pub(super) fn broken(draft: Draft<'_>, message: Option<String>) -> Stepped {
    if draft.next.entry.is_none() {
        return done::given_up(draft, Cause::SpareBroken, message);
    }
    draft.remake(0, Cause::SpareBroken, &Actor::part("engine"), message)
}
