//! What is still told after an instance ended, until it is destroyed (X2, X6).

use viv_core::ExecutionId;
use viv_core::exec::{ExecState, ExecStatus};

use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use super::program;
use super::subject::Subject;
use crate::error::ProviderError;

/// Long enough to start two commands and hear of them, short enough to wait for.
const SHORT_LIFE_MS: u64 = 4_000;

/// An instance that is about to expire, with one execution that ended before and one that runs.
async fn expiring(lab: &Lab) -> Option<(Subject<'_>, ExecutionId, ExecutionId)> {
    if !lab.can_expire().await {
        return None;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    let done = subject.start(&program::echo("done")).await;
    let busy = subject.start(&program::echo_then_sleep("begun")).await;
    subject.until_final(&done).await;
    subject.until_written(&busy, "begun\n").await;
    Some((subject, done, busy))
}

#[track_caller]
fn assert_lost(status: &ExecStatus) {
    let lost = matches!(&status.state, ExecState::Lost { cause } if cause.contains("expired"));
    assert!(lost, "an execution that was running when the instance expired is {:?}", status.state);
}

pub(super) async fn executions_are_told_after_expiry(lab: &Lab) {
    let Some((subject, done, busy)) = expiring(lab).await else { return };
    subject.until_ended(SOON_MS).await;
    assert_eq!(subject.status(&done).await.state, ExecState::Exited { code: 0 });
    assert_lost(&subject.status(&busy).await);
    let listed = lab.provider().executions(&subject.instance()).await.must("executions");
    assert_eq!(listed.into_iter().map(|status| status.id).collect::<Vec<_>>(), [done, busy]);
}

pub(super) async fn output_is_kept_after_expiry(lab: &Lab) {
    let Some((subject, done, busy)) = expiring(lab).await else { return };
    subject.until_ended(SOON_MS).await;
    assert_eq!(subject.hear(&done, 0, true).await.stdout_text(), "done\n");
    for follow in [false, true] {
        let heard = subject.hear(&busy, 2, follow).await;
        assert_eq!(heard.stdout_text(), "gun\n");
        assert_lost(&heard.status);
    }
}

pub(super) async fn a_follower_hears_of_the_expiry(lab: &Lab) {
    let Some((subject, _, busy)) = expiring(lab).await else { return };
    let heard = subject.hear(&busy, 0, true).await;
    assert_eq!(heard.stdout_text(), "begun\n");
    assert_lost(&heard.status);
}

pub(super) async fn nothing_is_told_after_destroy(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo("gone")).await;
    subject.until_final(&execution).await;
    subject.destroy().await;
    let (provider, instance) = (lab.provider(), subject.instance());
    assert_refused!(provider.execution(&instance, &execution).await, ProviderError::Absent);
    assert_refused!(provider.executions(&instance).await, ProviderError::Absent);
    assert_refused!(provider.attach(&instance, &execution, 0, true).await, ProviderError::Absent);
    assert_refused!(subject.stat("/tmp").await, ProviderError::Absent);
    assert_refused!(subject.read_range("/tmp/x", 0, None).await, ProviderError::Absent);
}
