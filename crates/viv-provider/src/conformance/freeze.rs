//! Taking the processors away and giving them back (L13).

use viv_core::EndCause;
use viv_core::exec::{ExecSpec, ExecState};

use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::program::{self, TICK_MS};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::InstanceState;

/// Many ticks: an execution that wrote nothing for so long does not progress.
const STILL_MS: u64 = 10 * TICK_MS;

/// How early a limit may strike: clocks are read in milliseconds, at two places.
const EARLY_MS_MAX: u64 = 100;

async fn freeze(subject: &Subject<'_>) -> Result<(), ProviderError> {
    subject.lab.provider().freeze(&subject.mutation(), &subject.sandbox).await
}

async fn thaw(subject: &Subject<'_>) -> Result<(), ProviderError> {
    subject.lab.provider().thaw(&subject.mutation(), &subject.sandbox).await
}

/// Gives whether the case can go on; otherwise both verbs have to be refused.
async fn can_freeze(lab: &Lab) -> bool {
    if lab.can(Capability::Freeze) {
        return true;
    }
    let subject = lab.subject().await;
    assert_unsupported(freeze(&subject).await, Capability::Freeze);
    assert_unsupported(thaw(&subject).await, Capability::Freeze);
    assert_eq!(subject.state().await, InstanceState::Running);
    false
}

pub(super) async fn freeze_shows_and_thaw_runs(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    freeze(&subject).await.must("freeze");
    assert_eq!(subject.state().await, InstanceState::Frozen);
    assert_eq!(lab.list_all(&lab.owner(), None).await[0].state, InstanceState::Frozen);
    thaw(&subject).await.must("thaw");
    assert_eq!(subject.state().await, InstanceState::Running);
    let nonce = lab.nonce();
    assert_eq!(subject.run_ok(&program::echo(&nonce)).await, format!("{nonce}\n"));
}

pub(super) async fn both_are_safe_to_repeat(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    thaw(&subject).await.must("thaw of what runs");
    for _ in 0..2 {
        freeze(&subject).await.must("freeze");
        assert_eq!(subject.state().await, InstanceState::Frozen);
    }
    for _ in 0..2 {
        thaw(&subject).await.must("thaw");
        assert_eq!(subject.state().await, InstanceState::Running);
    }
}

pub(super) async fn nothing_progresses_while_frozen(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    subject.until_written(&execution, "3\n").await;
    freeze(&subject).await.must("freeze");
    // What was on its way may still arrive; then there is silence, which a running ticker never keeps.
    let still = lab
        .until("silence", SOON_MS, async || {
            let before = subject.status(&execution).await.output_bytes;
            lab.pass(STILL_MS).await;
            (subject.status(&execution).await.output_bytes == before).then_some(before)
        })
        .await;
    lab.pass(STILL_MS).await;
    let frozen = subject.status(&execution).await;
    assert_eq!((frozen.output_bytes, frozen.state), (still, ExecState::Running));
    thaw(&subject).await.must("thaw");
    lab.until("progress", SOON_MS, async || (subject.status(&execution).await.output_bytes > still).then_some(()))
        .await;
}

pub(super) async fn execution_limits_stand_still(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let limit_ms = 1_500;
    let started_at_ms = lab.now_ms();
    let execution = subject.start(&ExecSpec { limit_ms: Some(limit_ms), ..program::sleep() }).await;
    freeze(&subject).await.must("freeze");
    let frozen_at_ms = lab.now_ms();
    let end_ms = frozen_at_ms + 2 * limit_ms;
    lab.until("the limit to pass", SOON_MS, async || (lab.now_ms() > end_ms).then_some(())).await;
    let thawed_at_ms = lab.now_ms();
    thaw(&subject).await.must("thaw");
    assert_eq!(subject.until_final(&execution).await.state, ExecState::TimedOut);
    // Seen from outside it ran for longer than it did, so this holds however busy the machine is.
    let ran_ms = (frozen_at_ms - started_at_ms) + (lab.now_ms() - thawed_at_ms);
    assert!(ran_ms + EARLY_MS_MAX >= limit_ms, "it ran for {ran_ms} ms of {limit_ms}: frozen time was counted");
}

pub(super) async fn execute_while_frozen_is_refused(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    freeze(&subject).await.must("freeze");
    let execution = lab.fresh_execution();
    let started = subject.execute(&execution, &program::echo("late")).await;
    assert_refused!(started, ProviderError::NotRunning { state: InstanceState::Frozen });
    thaw(&subject).await.must("thaw");
    let unknown = lab.provider().execution(&subject.instance(), &execution).await;
    assert_refused!(unknown, ProviderError::NotFound { .. });
}

pub(super) async fn the_hard_deadline_goes_on(lab: &Lab) {
    if !can_freeze(lab).await || !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(2_000).await;
    freeze(&subject).await.must("freeze");
    assert_eq!(subject.until_ended(SOON_MS).await.cause, EndCause::Expired);
    assert_refused!(thaw(&subject).await, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    assert_refused!(freeze(&subject).await, ProviderError::NotRunning { state: InstanceState::Ended(_) });
}

pub(super) async fn destroy_ends_the_frozen(lab: &Lab) {
    if !can_freeze(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.start(&program::tick()).await;
    freeze(&subject).await.must("freeze");
    subject.destroy().await;
    assert_eq!(subject.state().await, InstanceState::Absent);
}
