//! Saving, restoring and forking (L10, L11).

use viv_core::exec::ExecState;
use viv_core::{Generation, SnapshotId};

use super::lab::{Answer, Lab, SOON_MS, TOKEN, assert_refused, assert_unsupported};
use super::program;
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{InstanceRef, InstanceState, Observation, SaveRequest, Snapshot};

async fn save(subject: &Subject<'_>, request: &SaveRequest) -> Result<Snapshot, ProviderError> {
    let mutation = subject.mutation();
    let saving = subject.lab.provider().save(&mutation, &subject.sandbox, request);
    subject.lab.drive("save", SOON_MS, saving).await
}

fn request(lab: &Lab, live: bool, memory: bool) -> SaveRequest {
    SaveRequest { snapshot: lab.fresh_snapshot(), live, memory }
}

fn unmade(lab: &Lab) -> Subject<'_> {
    Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN)
}

async fn restore(subject: &Subject<'_>, snapshot: &SnapshotId) -> Result<Observation, ProviderError> {
    let (owner, spec) = (subject.lab.owner(), subject.lab.spec());
    subject.lab.provider().restore(&subject.mutation(), &subject.sandbox, &owner, &spec, snapshot).await
}

async fn fork(subject: &Subject<'_>, source: &InstanceRef) -> Result<Observation, ProviderError> {
    let (owner, spec) = (subject.lab.owner(), subject.lab.spec());
    subject.lab.provider().fork(&subject.mutation(), &subject.sandbox, &owner, &spec, source).await
}

/// Gives whether this kind of save is declared; otherwise it has to be refused.
async fn can_save(lab: &Lab, capability: Capability) -> bool {
    if lab.can(capability) {
        return true;
    }
    let subject = lab.subject().await;
    let live = capability != Capability::SaveStopped;
    let asked = request(lab, live, capability == Capability::SaveMemory);
    assert_unsupported(save(&subject, &asked).await, capability);
    assert_eq!(subject.state().await, InstanceState::Running, "a refused save did something");
    false
}

/// The same for making an instance from a snapshot.
async fn can_restore(lab: &Lab) -> bool {
    if lab.can(Capability::Restore) {
        return true;
    }
    let subject = unmade(lab);
    assert_unsupported(restore(&subject, &lab.fresh_snapshot()).await, Capability::Restore);
    assert_eq!(subject.state().await, InstanceState::Absent);
    false
}

async fn can_fork(lab: &Lab) -> bool {
    if lab.can(Capability::Fork) {
        return true;
    }
    let (source, subject) = (lab.subject().await, unmade(lab));
    assert_unsupported(fork(&subject, &source.instance()).await, Capability::Fork);
    assert_eq!(subject.state().await, InstanceState::Absent);
    false
}

pub(super) async fn live_save_runs_on(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    let asked = request(lab, true, false);
    let snapshot = save(&subject, &asked).await.must("save");
    assert_eq!((snapshot.id, snapshot.source, snapshot.memory), (asked.snapshot, subject.instance(), false));
    assert_eq!(subject.state().await, InstanceState::Running);
    let before = subject.status(&execution).await;
    assert_eq!(before.state, ExecState::Running);
    lab.until("progress", SOON_MS, async || {
        (subject.status(&execution).await.output_bytes > before.output_bytes).then_some(())
    })
    .await;
}

pub(super) async fn stopped_save_ends_the_processes(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/tmp/kept", b"kept").await;
    let (done, busy) = (subject.start(&program::echo("x")).await, subject.start(&program::tick()).await);
    subject.until_final(&done).await;
    let snapshot = save(&subject, &request(lab, false, false)).await.must("save");
    assert_eq!(subject.status(&done).await.state, ExecState::Exited { code: 0 });
    let busy = subject.status(&busy).await.state;
    assert!(matches!(busy, ExecState::Lost { .. }), "an execution outlived a stopped save as {busy:?}");
    subject.destroy().await;
    if can_restore(lab).await {
        let next = subject.next();
        assert_eq!(restore(&next, &snapshot.id).await.must("restore").state, InstanceState::Running);
        assert_eq!(next.read("/tmp/kept").await, b"kept");
        assert!(lab.provider().executions(&next.instance()).await.must("executions").is_empty());
    }
}

pub(super) async fn memory_save_brings_executions_back(lab: &Lab) {
    if !can_save(lab, Capability::SaveMemory).await || !can_restore(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let execution = subject.start(&program::tick()).await;
    subject.until_written(&execution, "3\n").await;
    let snapshot = save(&subject, &request(lab, lab.can(Capability::SaveLive), true)).await.must("save");
    assert!(snapshot.memory);
    subject.destroy().await;
    let next = subject.next();
    restore(&next, &snapshot.id).await.must("restore");
    let before = next.status(&execution).await;
    assert_eq!(before.state, ExecState::Running);
    assert!(next.written(&execution).await.starts_with("0\n1\n2\n3\n"), "the output of before is there");
    lab.until("progress", SOON_MS, async || {
        (next.status(&execution).await.output_bytes > before.output_bytes).then_some(())
    })
    .await;
}

pub(super) async fn save_repeated_saves_once(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await || !can_restore(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write("/tmp/when", b"before").await;
    let (mutation, asked) = (subject.mutation(), request(lab, true, false));
    let first = lab.provider().save(&mutation, &subject.sandbox, &asked).await.must("save");
    subject.write("/tmp/when", b"after").await;
    let again = lab.provider().save(&mutation, &subject.sandbox, &asked).await.must("save, repeated");
    assert_eq!(again, first);
    let restored = unmade(lab);
    restore(&restored, &asked.snapshot).await.must("restore");
    assert_eq!(restored.read("/tmp/when").await, b"before", "it was saved twice");
}

pub(super) async fn save_under_a_used_id_conflicts(lab: &Lab) {
    if !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let asked = request(lab, true, false);
    save(&subject, &asked).await.must("save");
    assert_refused!(save(&subject, &asked).await, ProviderError::Conflict { .. });
}

pub(super) async fn an_ended_instance_can_still_be_saved(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await || !can_restore(lab).await || !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(2_000).await;
    subject.write("/tmp/kept", b"kept").await;
    subject.until_ended(SOON_MS).await;
    let snapshot = save(&subject, &request(lab, false, false)).await.must("save of what expired");
    subject.destroy().await;
    let next = subject.next();
    restore(&next, &snapshot.id).await.must("restore");
    assert_eq!(next.read("/tmp/kept").await, b"kept");
}

/// A saved instance with a file in it.
async fn saved(lab: &Lab) -> Option<(Subject<'_>, SnapshotId)> {
    if !can_save(lab, Capability::SaveLive).await || !can_restore(lab).await {
        return None;
    }
    let subject = lab.subject().await;
    subject.write("/tmp/file", b"saved").await;
    let snapshot = save(&subject, &request(lab, true, false)).await.must("save");
    Some((subject, snapshot.id))
}

pub(super) async fn restored_is_independent(lab: &Lab) {
    let Some((source, snapshot)) = saved(lab).await else { return };
    let (one, other) = (unmade(lab), unmade(lab));
    for restored in [&one, &other] {
        let seen = restore(restored, &snapshot).await.must("restore");
        assert_eq!((seen.instance, seen.state), (restored.instance(), InstanceState::Running));
    }
    source.write("/tmp/file", b"source's").await;
    one.write("/tmp/file", b"one's").await;
    assert_eq!(other.read("/tmp/file").await, b"saved");
    assert_eq!(source.read("/tmp/file").await, b"source's");
    let nonce = lab.nonce();
    assert_eq!(other.run_ok(&program::echo(&nonce)).await, format!("{nonce}\n"));
}

pub(super) async fn restored_survives_its_source(lab: &Lab) {
    let Some((source, snapshot)) = saved(lab).await else { return };
    source.destroy().await;
    let next = source.next();
    let (mutation, owner, spec) = (next.mutation(), lab.owner(), lab.spec());
    for round in ["restore", "restore, repeated"] {
        let seen = lab.provider().restore(&mutation, &next.sandbox, &owner, &spec, &snapshot).await.must(round);
        assert_eq!(seen.instance, next.instance());
        assert_eq!(next.read("/tmp/file").await, b"saved");
    }
    assert_eq!(lab.list_all(&owner, None).await.len(), 1);
}

pub(super) async fn restore_of_nothing_is_not_found(lab: &Lab) {
    if !can_restore(lab).await {
        return;
    }
    let subject = unmade(lab);
    assert_refused!(restore(&subject, &lab.fresh_snapshot()).await, ProviderError::NotFound { .. });
    assert_eq!(subject.state().await, InstanceState::Absent);
    assert!(lab.list_all(&lab.owner(), None).await.is_empty());
}

pub(super) async fn fork_leaves_the_source_alone(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/tmp/file", b"common").await;
    let execution = source.start(&program::tick()).await;
    let forked = unmade(lab);
    let seen = fork(&forked, &source.instance()).await.must("fork");
    assert_eq!((seen.instance, seen.state), (forked.instance(), InstanceState::Running));
    forked.write("/tmp/file", b"fork's").await;
    assert_eq!(source.read("/tmp/file").await, b"common");
    assert_eq!(source.status(&execution).await.state, ExecState::Running);
    source.destroy().await;
    assert_eq!(forked.read("/tmp/file").await, b"fork's");
}

pub(super) async fn fork_of_nothing_is_absent(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let (nothing, subject) = (unmade(lab), unmade(lab));
    assert_refused!(fork(&subject, &nothing.instance()).await, ProviderError::Absent);
    assert_eq!(subject.state().await, InstanceState::Absent);
}
