//! What is asked of an instance to know that it is ready, without leaving a trace (T2, T8).

use viv_core::exec::{ExecSpec, ExecState};
use viv_core::{ExecutionId, Identity};

use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use super::program::{self, Program};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;

/// More than any list of what ended is long, were they in one that is bounded by a hundred.
const MANY: usize = 120;

/// Long enough to start a command and attach to it, short enough to wait for.
const SHORT_LIFE_MS: u64 = 4_000;

/// Few bytes, so that a log is longer.
const TAIL_BYTES: u64 = 64;

fn transient(spec: ExecSpec) -> ExecSpec {
    ExecSpec { transient: true, ..spec }
}

/// What commands could have left where users look.
async fn seen_by_users(subject: &Subject<'_>) -> Vec<String> {
    let mut seen = Vec::new();
    for path in ["/tmp", "/etc", subject.lab.spec().workdir.as_str()] {
        let listing = subject.list(path, 1).await.must("file_list");
        seen.extend(listing.entries.into_iter().map(|entry| format!("{path}/{}", entry.path)));
    }
    seen
}

async fn assert_none_listed(subject: &Subject<'_>) {
    let listed = subject.lab.provider().executions(&subject.instance()).await.must("executions");
    assert!(listed.is_empty(), "what leaves nothing is listed: {listed:?}");
}

/// It may take a moment from its last word until it is forgotten.
async fn until_forgotten(subject: &Subject<'_>, execution: &ExecutionId) {
    let (provider, instance) = (subject.lab.provider(), subject.instance());
    let forgotten = async || match provider.execution(&instance, execution).await {
        Err(ProviderError::NotFound { .. }) => Some(()),
        Ok(_) => None,
        Err(other) => panic!("a transient execution is not forgotten but {other:?}"),
    };
    subject.lab.until("its being forgotten", SOON_MS, forgotten).await;
    assert_refused!(provider.attach(&instance, execution, 0, true).await, ProviderError::NotFound { .. });
    assert_refused!(subject.signal(execution, 15).await, ProviderError::NotFound { .. });
}

pub(super) async fn transient_leaves_nothing(lab: &Lab) {
    let subject = lab.subject().await;
    let before = seen_by_users(&subject).await;
    let nonce = lab.nonce();
    let execution = subject.start(&transient(Program::Cat.spec())).await;
    assert_none_listed(&subject).await;
    assert_eq!(subject.status(&execution).await.state, ExecState::Running, "whoever knows its id is told");
    subject.input_all(&execution, 0, nonce.as_bytes()).await;
    subject.close_input(&execution).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!((heard.stdout_text(), heard.status.state), (nonce, ExecState::Exited { code: 0 }));
    until_forgotten(&subject, &execution).await;
    assert_none_listed(&subject).await;
    assert_eq!(seen_by_users(&subject).await, before);
}

pub(super) async fn many_transient_in_a_row_leave_nothing(lab: &Lab) {
    let subject = lab.subject().await;
    let kept = subject.start(&program::echo("kept")).await;
    subject.until_final(&kept).await;
    let mut last = None;
    for _ in 0..MANY {
        let nonce = lab.nonce();
        let execution = subject.start(&lab.provider().probe_spec(&nonce)).await;
        let heard = subject.hear(&execution, 0, true).await;
        assert_eq!(heard.stdout_text(), format!("{nonce}\n"));
        last = Some(execution);
    }
    until_forgotten(&subject, &last.expect("there were many")).await;
    // What others want to be remembered is not pushed out by them.
    let listed = lab.provider().executions(&subject.instance()).await.must("executions");
    assert_eq!(listed.into_iter().map(|status| status.id).collect::<Vec<_>>(), std::slice::from_ref(&kept));
    assert_eq!(subject.hear(&kept, 0, true).await.stdout_text(), "kept\n");
}

pub(super) async fn transient_runs_like_any_other(lab: &Lab) {
    let subject = lab.subject().await;
    for program in [Program::PrintDirectory, Program::PrintUser, Program::OpenFiles] {
        let usual = subject.run_ok(&program.spec()).await;
        assert_eq!(subject.run_ok(&transient(program.spec())).await, usual, "{program:?}");
    }
    let heard = subject.run(&transient(Program::Exit { code: 3 }.spec())).await;
    assert_eq!(heard.status.state, ExecState::Exited { code: 3 });
    let limited = ExecSpec { limit_ms: Some(300), ..transient(program::sleep()) };
    assert_eq!(subject.run(&limited).await.status.state, ExecState::TimedOut);
}

pub(super) async fn transient_can_be_cancelled(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&transient(program::sleep())).await;
    assert_eq!(subject.cancel(&execution).await.state, ExecState::Cancelled);
    assert_eq!(subject.hear(&execution, 0, true).await.status.state, ExecState::Cancelled);
    until_forgotten(&subject, &execution).await;
}

pub(super) async fn transient_that_cannot_start_leaves_nothing(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&transient(program::missing())).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert!(matches!(heard.status.state, ExecState::Failed { .. }), "{:?}", heard.status);
    until_forgotten(&subject, &execution).await;
    assert_none_listed(&subject).await;
}

pub(super) async fn transient_goes_with_its_instance(lab: &Lab) {
    if !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    let execution = subject.start(&transient(program::echo_then_sleep("begun"))).await;
    let mut stream = subject.attach(&execution, 0, true).await;
    let told = lab.drive("the output", SOON_MS, stream.next()).await.must("next");
    assert!(told.is_some());
    // Not that it ended: how it ended was kept nowhere.
    let end = lab.drive("the end of the stream", SHORT_LIFE_MS + SOON_MS, stream.next()).await;
    assert_refused!(end, ProviderError::NotRunning { .. });
    subject.until_ended(SOON_MS).await;
    assert_none_listed(&subject).await;
    let told = lab.provider().execution(&subject.instance(), &execution).await;
    assert_refused!(told, ProviderError::NotFound { .. });
}

pub(super) async fn the_probe_writes_its_nonce_and_nothing_else(lab: &Lab) {
    let subject = lab.subject().await;
    let nonce = lab.nonce();
    let spec = lab.provider().probe_spec(&nonce);
    assert!(spec.transient && spec.limit_ms.is_some_and(|limit| limit <= 2_000), "{spec:?}");
    let execution = subject.start(&spec).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 }, "{heard:?}");
    assert_eq!(heard.stdout_text(), format!("{nonce}\n"));
    assert_eq!(heard.status.output_bytes, nonce.len() as u64 + 1);
    until_forgotten(&subject, &execution).await;
}

pub(super) async fn identity_is_this_instance(lab: &Lab) {
    let (one, other) = (lab.subject().await, lab.subject().await);
    for subject in [&one, &other] {
        let expected = Identity { sandbox: subject.sandbox.clone(), generation: subject.generation };
        assert_eq!(lab.provider().identity(&subject.instance()).await.must("identity"), expected);
    }
}

pub(super) async fn identity_is_of_the_latest_generation(lab: &Lab) {
    let subject = lab.subject().await;
    subject.destroy().await;
    let next = subject.next();
    next.create(&lab.spec()).await;
    let identity = lab.provider().identity(&next.instance()).await.must("identity");
    assert_eq!(identity.generation, next.generation);
}

pub(super) async fn identity_needs_a_running_instance(lab: &Lab) {
    let subject = lab.subject().await;
    if lab.can(Capability::Freeze) {
        lab.provider().freeze(&subject.mutation(), &subject.sandbox).await.must("freeze");
        assert_refused!(lab.provider().identity(&subject.instance()).await, ProviderError::NotRunning { .. });
        lab.provider().thaw(&subject.mutation(), &subject.sandbox).await.must("thaw");
        lab.provider().identity(&subject.instance()).await.must("identity of what was thawed");
    }
    subject.destroy().await;
    assert_refused!(lab.provider().identity(&subject.instance()).await, ProviderError::Absent);
}

pub(super) async fn whereabouts_are_told(lab: &Lab) {
    let subject = lab.subject().await;
    let (provider, instance) = (lab.provider(), subject.instance());
    let first = provider.whereabouts(&instance).await.must("whereabouts");
    subject.run_ok(&program::echo("something")).await;
    assert_eq!(provider.whereabouts(&instance).await.must("whereabouts, again"), first);
    subject.destroy().await;
    assert_refused!(provider.whereabouts(&instance).await, ProviderError::Absent);
}

pub(super) async fn logs_are_bounded(lab: &Lab) {
    let subject = lab.subject().await;
    let (provider, instance) = (lab.provider(), subject.instance());
    for bytes_max in [0, TAIL_BYTES, u64::MAX] {
        for part in provider.log_tail(&instance, bytes_max).await.must("log_tail") {
            assert!(!part.name.is_empty() && !part.text.is_empty(), "{part:?}");
            assert!(part.text.len() as u64 <= bytes_max, "{} bytes of {bytes_max}: {part:?}", part.text.len());
        }
    }
    subject.destroy().await;
    assert_refused!(provider.log_tail(&instance, TAIL_BYTES).await, ProviderError::Absent);
}
