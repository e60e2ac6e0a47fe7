//! What commands write, and who can hear it when (X2).

use viv_core::exec::{ExecSpec, ExecState, OutputEvent, Stream};

use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use super::program::{self, Program};
use super::subject::{Heard, Subject};
use crate::error::ProviderError;

/// Much more than [`BOUND_BYTES`].
const LONG_COUNT: u64 = 300_000;

/// How much of a long output is kept here: a bound that no provider finds too small to honour.
const BOUND_BYTES: u64 = 512 << 10;

fn lines(numbers: impl Iterator<Item = u64>) -> Vec<u8> {
    numbers.flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

pub(super) async fn streams_are_told_apart(lab: &Lab) {
    let subject = lab.subject().await;
    let heard = subject.run(&Program::BothStreams.spec()).await;
    assert_eq!(heard.bytes(Stream::Stdout), b"out\n");
    assert_eq!(heard.bytes(Stream::Stderr), b"err\n");
    assert_eq!(heard.status.output_bytes, 8);
}

pub(super) async fn attach_starts_in_the_middle(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Count { to: 100 }.spec()).await;
    subject.until_final(&execution).await;
    let whole = lines(1..=100);
    for offset in [0, 1, 7, whole.len() - 1] {
        let heard = subject.hear(&execution, offset as u64, true).await;
        assert_eq!(heard.bytes(Stream::Stdout), whole[offset..], "from {offset} on");
    }
}

pub(super) async fn attach_past_the_end_only_ends(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo("x")).await;
    subject.until_final(&execution).await;
    for offset in [2, 3, 1_000_000] {
        let heard = subject.hear(&execution, offset, true).await;
        assert!(heard.pieces.is_empty() && heard.cuts.is_empty(), "from {offset} on came {heard:?}");
        assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
    }
}

pub(super) async fn attach_follows_to_the_end(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Tick { count: 12 }.spec()).await;
    assert_eq!(subject.status(&execution).await.state, ExecState::Running);
    // The follower comes while it runs, and hears what was and what will be.
    let heard = subject.hear(&execution, 0, true).await;
    assert_eq!(heard.bytes(Stream::Stdout), lines(0..12));
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 });
}

pub(super) async fn attach_without_follow_ends_at_once(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&program::echo_then_sleep("begun")).await;
    subject.until_written(&execution, "begun\n").await;
    let heard = subject.hear(&execution, 0, false).await;
    assert_eq!(heard.stdout_text(), "begun\n");
    assert_eq!(heard.status.state, ExecState::Running);
}

pub(super) async fn attach_twice_hears_the_same(lab: &Lab) {
    let subject = lab.subject().await;
    let execution = subject.start(&Program::Tick { count: 8 }.spec()).await;
    let (one, other) = tokio::join!(subject.hear(&execution, 0, true), subject.hear(&execution, 0, true));
    assert_eq!(one.stdout_text(), other.stdout_text());
    assert_eq!(one.status, other.status);
    assert_eq!(subject.hear(&execution, 0, true).await.stdout_text(), one.stdout_text());
}

pub(super) async fn attach_to_nothing_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let attached = lab.provider().attach(&subject.instance(), &lab.fresh_execution(), 0, false).await;
    assert_refused!(attached, ProviderError::NotFound { .. });
}

/// Runs to the end what writes more than is kept.
async fn overflow(subject: &Subject<'_>) -> (viv_core::ExecutionId, Heard) {
    let spec = ExecSpec { output_bytes_max: Some(BOUND_BYTES), ..Program::Count { to: LONG_COUNT }.spec() };
    let execution = subject.start(&spec).await;
    subject.until_final(&execution).await;
    let heard = subject.hear(&execution, 0, true).await;
    (execution, heard)
}

pub(super) async fn a_bound_cuts_the_middle(lab: &Lab) {
    let subject = lab.subject().await;
    let (_, heard) = overflow(&subject).await;
    let whole = lines(1..=LONG_COUNT);
    assert_eq!(heard.status.output_bytes, whole.len() as u64, "what was cut still counts");
    assert_eq!(heard.cuts.len(), 1, "one cut, in the middle: {:?}", heard.cuts);
    let (from, to) = heard.cuts[0];
    assert!(from > 0, "the head is kept");
    assert!(to < whole.len() as u64, "the tail is kept");
    let kept: u64 = heard.pieces.iter().map(|(_, _, data)| data.len() as u64).sum();
    assert!((BOUND_BYTES / 4..=BOUND_BYTES).contains(&kept), "{kept} bytes are kept of at most {BOUND_BYTES}");
    for (offset, _, data) in &heard.pieces {
        let start = *offset as usize;
        assert!(whole[start..start + data.len()] == data[..], "the piece at {offset} is not what was written there");
    }
}

pub(super) async fn attach_inside_a_cut_says_so(lab: &Lab) {
    let subject = lab.subject().await;
    let (execution, heard) = overflow(&subject).await;
    let (from, to) = heard.cuts[0];
    let inside = from + (to - from) / 2;
    let mut stream = subject.attach(&execution, inside, true).await;
    let first = lab.drive("the first event", SOON_MS, stream.next()).await.must("next");
    assert_eq!(first, Some(OutputEvent::Cut { from: inside, to }));
}
