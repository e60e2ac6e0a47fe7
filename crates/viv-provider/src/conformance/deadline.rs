//! The hard deadline: kept without being asked, moved only at its arbiter (L5, T6).

use viv_core::EndCause;

use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::program;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{Deadline, DeadlineChange, InstanceState};

/// Long enough to be made and seen, short enough to wait for.
const SHORT_LIFE_MS: u64 = 2_000;

/// A deadline that no case reaches.
const LONG_LIFE_MS: u64 = 300_000;

/// How late an end may be.
const LATE_MS_MAX: u64 = 2_000;

/// How early an end may be: clocks are read in milliseconds, at two places.
const EARLY_MS_MAX: u64 = 100;

/// How much of a time that was set may be gone when it is read back.
const READ_BACK_MS_MAX: u64 = 10_000;

async fn extend(subject: &Subject<'_>, change: DeadlineChange) -> Result<Deadline, ProviderError> {
    subject.lab.provider().extend(&subject.mutation(), &subject.sandbox, change).await
}

#[track_caller]
fn assert_about(deadline: Deadline, ms: u64) {
    let range = ms.saturating_sub(READ_BACK_MS_MAX)..=ms;
    assert!(range.contains(&deadline.remaining_ms), "{deadline:?} is not within {range:?}");
}

/// Whether deadlines can be moved; otherwise trying has to be refused.
async fn can_extend(lab: &Lab) -> bool {
    if !lab.can(Capability::Extend) {
        let subject = lab.subject().await;
        assert_unsupported(extend(&subject, DeadlineChange::AtLeastMs(1_000)).await, Capability::Extend);
        return false;
    }
    lab.can_expire().await
}

pub(super) async fn expiry_comes_on_time_with_its_cause(lab: &Lab) {
    if !lab.can_expire().await {
        return;
    }
    let asked_at_ms = lab.now_ms();
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    let made_at_ms = lab.now_ms();
    let ended = subject.until_ended(SOON_MS).await;
    let seen_at_ms = lab.now_ms();
    assert_eq!(ended.cause, EndCause::Expired);
    assert!(seen_at_ms + EARLY_MS_MAX >= asked_at_ms + SHORT_LIFE_MS, "it ended {seen_at_ms}, made {asked_at_ms}");
    assert!(seen_at_ms <= made_at_ms + SHORT_LIFE_MS + LATE_MS_MAX, "it ended {seen_at_ms}, made {made_at_ms}");
    assert_eq!(subject.observe().await.deadline, None, "what ended has no deadline");
}

pub(super) async fn wait_end_hears_of_an_expiry(lab: &Lab) {
    if !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    let instance = subject.instance();
    for round in ["wait_end", "wait_end after the end"] {
        let ended = lab.drive(round, SOON_MS, lab.provider().wait_end(&instance)).await.must(round);
        assert_eq!(ended.cause, EndCause::Expired);
    }
}

pub(super) async fn extend_after_expiry_is_refused(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    subject.until_ended(SOON_MS).await;
    for change in [DeadlineChange::AtLeastMs(LONG_LIFE_MS), DeadlineChange::ExactlyMs(LONG_LIFE_MS)] {
        assert_refused!(extend(&subject, change).await, ProviderError::Expired);
    }
    assert!(matches!(subject.state().await, InstanceState::Ended(_)), "it came back");
}

pub(super) async fn an_expired_instance_takes_no_work(lab: &Lab) {
    if !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    subject.until_ended(SOON_MS).await;
    let started = subject.execute(&lab.fresh_execution(), &program::echo("late")).await;
    assert_refused!(started, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    let wrote = subject.write_mode("/tmp/late", b"late", None).await;
    assert_refused!(wrote, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    let next = subject.next();
    let early = lab.provider().create(&next.mutation(), &next.sandbox, &lab.owner(), &lab.spec()).await;
    assert_refused!(early, ProviderError::Conflict { .. });
}

pub(super) async fn at_least_never_shortens(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(LONG_LIFE_MS).await;
    let kept = extend(&subject, DeadlineChange::AtLeastMs(20_000)).await.must("extend by less");
    assert_about(kept, LONG_LIFE_MS);
    let moved = extend(&subject, DeadlineChange::AtLeastMs(2 * LONG_LIFE_MS)).await.must("extend by more");
    assert_about(moved, 2 * LONG_LIFE_MS);
    assert_about(subject.observe().await.deadline.expect("a deadline"), 2 * LONG_LIFE_MS);
}

pub(super) async fn exactly_may_shorten(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(LONG_LIFE_MS).await;
    let moved = extend(&subject, DeadlineChange::ExactlyMs(SHORT_LIFE_MS)).await.must("shorten");
    assert_about(moved, SHORT_LIFE_MS);
    assert_eq!(subject.until_ended(SOON_MS).await.cause, EndCause::Expired);
}

pub(super) async fn revision_grows_with_every_change(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(LONG_LIFE_MS).await;
    let mut revision = subject.observe().await.deadline.expect("a deadline").revision;
    for factor in [3, 2, 4] {
        let moved = extend(&subject, DeadlineChange::ExactlyMs(factor * LONG_LIFE_MS)).await.must("extend");
        assert!(moved.revision > revision, "{moved:?} after revision {revision}");
        revision = moved.revision;
        assert_eq!(subject.observe().await.deadline.expect("a deadline").revision, revision);
    }
}

pub(super) async fn extend_repeated_moves_once(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(LONG_LIFE_MS).await;
    let (provider, sandbox) = (lab.provider(), &subject.sandbox);
    let (first, change) = (subject.mutation(), DeadlineChange::ExactlyMs(3 * LONG_LIFE_MS));
    let moved = provider.extend(&first, sandbox, change).await.must("extend");
    let again = provider.extend(&first, sandbox, change).await.must("extend, repeated");
    assert_eq!(again.revision, moved.revision, "it was moved twice");
    // A repetition that arrives after somebody else's change does not undo that.
    let other = extend(&subject, DeadlineChange::ExactlyMs(LONG_LIFE_MS)).await.must("extend by another");
    provider.extend(&first, sandbox, change).await.must("extend, repeated late");
    let seen = subject.observe().await.deadline.expect("a deadline");
    assert_eq!(seen.revision, other.revision);
    assert_about(seen, LONG_LIFE_MS);
}

pub(super) async fn an_extended_instance_outlives_its_first_deadline(lab: &Lab) {
    if !can_extend(lab).await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    extend(&subject, DeadlineChange::AtLeastMs(LONG_LIFE_MS)).await.must("extend");
    let end_ms = lab.now_ms() + SHORT_LIFE_MS + LATE_MS_MAX / 2;
    lab.until("the first deadline to pass", SOON_MS, async || (lab.now_ms() > end_ms).then_some(())).await;
    let nonce = lab.nonce();
    assert_eq!(subject.run_ok(&program::echo(&nonce)).await, format!("{nonce}\n"));
}
