//! What those inside ask of whoever keeps the sandbox.

use viv_core::exec::ExecState;
use viv_core::{ExecutionId, RequestId};

use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::provider::{InsideRequest, RequestStream};

/// Listens, where that can be done.
async fn listen(subject: &Subject<'_>) -> Option<Box<dyn RequestStream>> {
    let listening = subject.lab.provider().requests(&subject.instance()).await;
    if subject.lab.can(Capability::Requests) {
        return Some(listening.must("requests"));
    }
    assert_unsupported(listening, Capability::Requests);
    None
}

/// Somebody inside asks for this.
async fn ask(subject: &Subject<'_>, body: &str) -> ExecutionId {
    subject.start(&subject.lab.provider().ask_spec(body)).await
}

async fn heard(lab: &Lab, stream: &mut Box<dyn RequestStream>) -> InsideRequest {
    let next = lab.drive("a request", SOON_MS, stream.next()).await;
    next.must("next").expect("the instance lives")
}

async fn answer(subject: &Subject<'_>, request: &RequestId, text: &str) -> Result<(), ProviderError> {
    subject.lab.provider().answer_request(&subject.mutation(), &subject.sandbox, request, text).await
}

/// What somebody who asked was told, once he ended well.
async fn told(subject: &Subject<'_>, asking: &ExecutionId) -> String {
    let heard = subject.hear(asking, 0, true).await;
    assert_eq!(heard.status.state, ExecState::Exited { code: 0 }, "{heard:?}");
    heard.stdout_text()
}

pub(super) async fn what_is_asked_inside_is_heard_and_answered(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = listen(&subject).await else { return };
    let mut ids = Vec::new();
    for body in ["{\"one\": \"\u{1f331}\"}", "two"] {
        let asking = ask(&subject, body).await;
        let request = heard(lab, &mut stream).await;
        assert_eq!((request.body.as_str(), request.again), (body, false));
        answer(&subject, &request.id, &format!("[{body}]")).await.must("answer_request");
        assert_eq!(told(&subject, &asking).await, format!("[{body}]\n"));
        ids.push(request.id);
    }
    assert_ne!(ids[0], ids[1]);
}

pub(super) async fn what_was_not_answered_is_heard_by_the_next(lab: &Lab) {
    let subject = lab.subject().await;
    // Before anybody listens.
    let asking = if lab.can(Capability::Requests) { Some(ask(&subject, "early").await) } else { None };
    let Some(mut stream) = listen(&subject).await else { return };
    let first = heard(lab, &mut stream).await;
    drop(stream);
    let mut stream = listen(&subject).await.expect("declared a moment ago");
    let again = heard(lab, &mut stream).await;
    assert_eq!(again, InsideRequest { again: true, ..first });
    answer(&subject, &again.id, "late").await.must("answer_request");
    assert_eq!(told(&subject, &asking.expect("it asked")).await, "late\n");
}

pub(super) async fn one_is_heard_at_a_time(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = listen(&subject).await else { return };
    let asking = [ask(&subject, "a").await, ask(&subject, "b").await];
    let first = heard(lab, &mut stream).await;
    // Whoever has not answered yet is not told of another one: it comes right after the answer.
    answer(&subject, &first.id, &first.body).await.must("answer_request");
    let second = heard(lab, &mut stream).await;
    assert_ne!(first.id, second.id);
    answer(&subject, &second.id, &second.body).await.must("answer_request");
    assert_eq!([told(&subject, &asking[0]).await, told(&subject, &asking[1]).await], ["a\n", "b\n"]);
}

pub(super) async fn the_last_to_listen_is_the_one_who_hears(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut before) = listen(&subject).await else { return };
    let mut now = listen(&subject).await.expect("declared a moment ago");
    let over = lab.drive("the end of the first listener", SOON_MS, before.next()).await;
    assert_eq!(over.must("next"), None);
    let asking = ask(&subject, "which").await;
    let request = heard(lab, &mut now).await;
    answer(&subject, &request.id, "the last").await.must("answer_request");
    assert_eq!(told(&subject, &asking).await, "the last\n");
}

pub(super) async fn an_answer_to_nothing_is_not_found(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = listen(&subject).await else { return };
    assert_refused!(answer(&subject, &RequestId::from_bytes([7; 16]), "x").await, ProviderError::NotFound { .. });
    let asking = ask(&subject, "once").await;
    let request = heard(lab, &mut stream).await;
    assert_refused!(answer(&subject, &RequestId::from_bytes([7; 16]), "x").await, ProviderError::NotFound { .. });
    answer(&subject, &request.id, "it").await.must("answer_request");
    assert_refused!(answer(&subject, &request.id, "other").await, ProviderError::NotFound { .. });
    assert_eq!(told(&subject, &asking).await, "it\n");
}

pub(super) async fn an_answer_repeated_is_given_once(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = listen(&subject).await else { return };
    let asking = ask(&subject, "once").await;
    let request = heard(lab, &mut stream).await;
    let mutation = subject.mutation();
    for _ in 0..2 {
        let answered = lab.provider().answer_request(&mutation, &subject.sandbox, &request.id, "it").await;
        answered.must("answer_request");
    }
    assert_eq!(told(&subject, &asking).await, "it\n");
}

pub(super) async fn the_end_is_told(lab: &Lab) {
    let subject = lab.subject().await;
    let Some(mut stream) = listen(&subject).await else { return };
    subject.destroy().await;
    let over = lab.drive("the end of the stream", SOON_MS, stream.next()).await;
    assert_eq!(over.must("next"), None);
    assert_refused!(lab.provider().requests(&subject.instance()).await, ProviderError::Absent);
}
