//! Input, signals, cancelling and time limits (X3, X4).

use viv_core::ExecutionId;
use viv_core::exec::{ExecSpec, ExecState, Stream};

use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use super::program::{self, GRACEFUL_CODE, Program};
use super::subject::Subject;
use crate::error::ProviderError;

const TERM: i32 = 15;

/// Much longer than a stubborn command's tick: a file that it writes and that
/// did not grow for so long is not written any more.
const QUIET_MS: u64 = 1_000;

/// More than a pipe holds, so that it takes several rounds.
const MUCH_INPUT_BYTES: usize = 256 << 10;

pub(super) async fn input_reaches_the_command(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Cat.spec()).await;
    subject.input_all(&execution, 0, b"first\n").await;
    subject.until_written(&execution, "first\n").await;
    subject.input_all(&execution, 6, b"second\n").await;
    subject.close_input(&execution).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.stdout_text(), "first\nsecond\n");
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
    assert_eq!(heard.status.stdin_bytes, 13);
}

pub(super) async fn input_repeated_is_taken_once(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Cat.spec()).await;
    for (offset, data, taken) in [(0, "abc", 3), (0, "abc", 3), (1, "bcde", 5), (0, "a", 5), (5, "f\n", 7)] {
        let answered = subject.input(&execution, offset, data.as_bytes()).await.must("write_stdin");
        assert_eq!(answered, taken, "{data:?} at {offset}");
    }
    subject.close_input(&execution).await;
    assert_eq!(subject.hear(&execution, 0, true).await.stdout_text(), "abcdef\n");
}

pub(super) async fn input_with_a_gap_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Cat.spec()).await;
    subject.input_all(&execution, 0, b"abc").await;
    assert_refused!(subject.input(&execution, 4, b"e").await, ProviderError::Conflict { .. });
    subject.input_all(&execution, 3, b"\n").await;
    subject.close_input(&execution).await;
    assert_eq!(subject.hear(&execution, 0, true).await.stdout_text(), "abc\n");
}

pub(super) async fn input_after_close_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Cat.spec()).await;
    subject.close_input(&execution).await;
    assert_refused!(subject.input(&execution, 0, b"late").await, ProviderError::Conflict { .. });
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Exited { code: 0 });
    assert_refused!(subject.input(&execution, 0, b"late").await, ProviderError::Conflict { .. });
}

pub(super) async fn close_is_safe_to_repeat(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Cat.spec()).await;
    subject.close_input(&execution).await;
    subject.close_input(&execution).await;
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Exited { code: 0 });
    subject.close_input(&execution).await;
}

pub(super) async fn much_input_arrives_whole(lab: &Lab) {
    let subject = lab.subject().await;
    let spec = ExecSpec { output_bytes_max: Some(4 << 20), ..Program::Cat.spec() };
    let execution = subject.start(&spec).await;
    let data: Vec<u8> = (0..MUCH_INPUT_BYTES).map(|i| (i / 7 % 251) as u8).collect();
    for (number, part) in data.chunks(64 << 10).enumerate() {
        subject.input_all(&execution, (number * (64 << 10)) as u64, part).await;
    }
    subject.close_input(&execution).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
    assert!(heard.bytes(Stream::Stdout) == data, "what came back differs from what was given");
}

pub(super) async fn signal_ends_a_command(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::sleep()).await;
    subject.signal(&execution, TERM).await.must("signal");
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Signalled { signal: TERM });
}

pub(super) async fn signal_reaches_a_handler(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Graceful.spec()).await;
    subject.until_written(&execution, "ready").await;
    subject.signal(&execution, TERM).await.must("signal");
    assert_eq!(subject.until_final(&execution).await.state, ExecState::Exited { code: GRACEFUL_CODE });
}

pub(super) async fn signal_after_the_end_is_refused(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::sleep()).await;
    assert_refused!(subject.signal(&execution, 1_000).await, ProviderError::Invalid { .. });
    let mutation = subject.mutation();
    let send = || lab.provider().signal(&mutation, &subject.sandbox, &execution, TERM);
    send().await.must("signal");
    subject.until_final(&execution).await;
    send().await.must("the same signal, repeated");
    assert_refused!(subject.signal(&execution, TERM).await, ProviderError::Conflict { .. });
}

pub(super) async fn cancel_ends_a_command(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo_then_sleep("begun")).await;
    subject.until_written(&execution, "begun\n").await;
    let status = subject.cancel(&execution).await;
    assert_eq!(status.state, ExecState::Cancelled);
    assert_eq!(subject.status(&execution).await.state, ExecState::Cancelled);
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.stdout_text(), "begun\n", "what was written before is kept");
    assert_eq!(heard.status.state, ExecState::Cancelled);
}

/// Starts a tree that ignores TERM and writes to a file from another session.
async fn start_stubborn(subject: &Subject<'_>, limit_ms: Option<u64>) -> ExecutionId {
    let spec = ExecSpec { limit_ms, ..Program::Stubborn { path: "/tmp/ticks".to_owned() }.spec() };
    let execution = subject.start(&spec).await;
    subject.lab.until("the child to write", SOON_MS, async || subject.is_there("/tmp/ticks").await.then_some(())).await;
    execution
}

/// Whoever still lived would have written.
async fn assert_quiet(subject: &Subject<'_>) {
    let before = subject.read("/tmp/ticks").await.len();
    subject.lab.pass(QUIET_MS).await;
    assert_eq!(subject.read("/tmp/ticks").await.len(), before, "a child outlived its execution");
}

pub(super) async fn cancel_ends_a_tree_that_ignores_term(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = start_stubborn(&subject, None).await;
    // It does ignore TERM: a plain one leaves parent and child at work.
    subject.signal(&execution, TERM).await.must("signal");
    let before = subject.read("/tmp/ticks").await.len();
    lab.until("more ticks", SOON_MS, async || (subject.read("/tmp/ticks").await.len() > before + 8).then_some(()))
        .await;
    assert_eq!(subject.status(&execution).await.state, ExecState::Running);
    assert_eq!(subject.cancel(&execution).await.state, ExecState::Cancelled);
    assert_quiet(&subject).await;
    assert_eq!(subject.status(&execution).await.state, ExecState::Cancelled);
}

pub(super) async fn cancel_repeated_answers_the_same(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::sleep()).await;
    let mutation = subject.mutation();
    let cancel = || lab.provider().cancel(&mutation, &subject.sandbox, &execution);
    let (one, other) = lab.drive("two cancels", SOON_MS, async { tokio::join!(cancel(), cancel()) }).await;
    let first = one.must("cancel");
    assert_eq!(first.state, ExecState::Cancelled);
    assert_eq!(other.must("cancel at once"), first);
    assert_eq!(subject.cancel(&execution).await, first);
}

pub(super) async fn cancel_after_the_end_keeps_the_outcome(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Exit { code: 3 }.spec()).await;
    let ended = subject.until_final(&execution).await;
    assert_eq!(subject.cancel(&execution).await, ended);
}

pub(super) async fn limit_ends_a_command(lab: &Lab) {
    let subject = lab.subject().await;
    let spec = ExecSpec { limit_ms: Some(500), ..program::echo_then_sleep("begun") };
    let execution = subject.start(&spec).await;
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.status.state, ExecState::TimedOut);
    assert_eq!(heard.stdout_text(), "begun\n");
}

pub(super) async fn limit_ends_a_tree_that_ignores_term(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = start_stubborn(&subject, Some(1_000)).await;
    assert_eq!(subject.until_final(&execution).await.state, ExecState::TimedOut);
    assert_quiet(&subject).await;
}
