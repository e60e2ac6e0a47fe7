//! What all cases about snapshots share: the verbs, and a gate for each that asserts the refusal where it is missing.

use viv_core::{Generation, SnapshotId};

use super::lab::{Answer, Lab, SOON_MS, TOKEN, assert_unsupported};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{
    InstanceRef, InstanceSpec, InstanceState, Observation, PageRequest, SaveRequest, Snapshot, SnapshotSeen,
};

type Result<T> = std::result::Result<T, ProviderError>;

/// A sandbox that nothing was made of yet.
pub(super) fn unmade(lab: &Lab) -> Subject<'_> {
    Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN)
}

/// A save that the instance survives.
pub(super) fn live(lab: &Lab) -> SaveRequest {
    SaveRequest { snapshot: lab.fresh_snapshot(), live: true, memory: false }
}

/// A save that ends the instance.
pub(super) fn stopped(lab: &Lab) -> SaveRequest {
    SaveRequest { live: false, ..live(lab) }
}

pub(super) async fn save(subject: &Subject<'_>, request: &SaveRequest) -> Result<Snapshot> {
    let mutation = subject.mutation();
    let saving = subject.lab.provider().save(&mutation, &subject.sandbox, request);
    subject.lab.drive("save", SOON_MS, saving).await
}

/// Saves with everything ended.
pub(super) async fn seal(subject: &Subject<'_>) -> Snapshot {
    save(subject, &stopped(subject.lab)).await.must("save, stopped")
}

/// Saves what runs on.
pub(super) async fn copy(subject: &Subject<'_>) -> Snapshot {
    save(subject, &live(subject.lab)).await.must("save, live")
}

pub(super) async fn restore_as(
    subject: &Subject<'_>,
    spec: &InstanceSpec,
    snapshot: &SnapshotId,
) -> Result<Observation> {
    let (mutation, owner) = (subject.mutation(), subject.lab.owner());
    subject.lab.provider().restore(&mutation, &subject.sandbox, &owner, spec, snapshot).await
}

pub(super) async fn restore(subject: &Subject<'_>, snapshot: &SnapshotId) -> Result<Observation> {
    restore_as(subject, &subject.lab.spec(), snapshot).await
}

/// A sandbox of its own, made from a snapshot.
pub(super) async fn restored<'l>(lab: &'l Lab, snapshot: &SnapshotId) -> Subject<'l> {
    let subject = unmade(lab);
    let seen = restore(&subject, snapshot).await.must("restore");
    assert_eq!((seen.instance, seen.state), (subject.instance(), InstanceState::Running));
    subject
}

/// Seals an instance, destroys it, and makes the sandbox's next one from that.
pub(super) async fn turned<'l>(subject: &Subject<'l>) -> (Subject<'l>, Snapshot) {
    let snapshot = seal(subject).await;
    subject.destroy().await;
    let next = subject.next();
    restore(&next, &snapshot.id).await.must("restore of the next generation");
    (next, snapshot)
}

pub(super) async fn fork(subject: &Subject<'_>, source: &InstanceRef) -> Result<Observation> {
    let (owner, spec) = (subject.lab.owner(), subject.lab.spec());
    subject.lab.provider().fork(&subject.mutation(), &subject.sandbox, &owner, &spec, source).await
}

/// A sandbox of its own, forked from an instance.
pub(super) async fn forked<'l>(source: &Subject<'l>) -> Subject<'l> {
    let subject = unmade(source.lab);
    let seen = fork(&subject, &source.instance()).await.must("fork");
    assert_eq!((seen.instance, seen.state), (subject.instance(), InstanceState::Running));
    subject
}

pub(super) async fn look(lab: &Lab, snapshot: &SnapshotId) -> Result<SnapshotSeen> {
    lab.provider().snapshot(snapshot).await
}

/// Removes a snapshot of this sandbox.
pub(super) async fn remove(subject: &Subject<'_>, snapshot: &SnapshotId) -> Result<()> {
    subject.lab.provider().remove_snapshot(&subject.mutation(), &subject.sandbox, snapshot).await
}

/// Gives whether this kind of save is declared; otherwise it has to be refused.
pub(super) async fn can_save(lab: &Lab, capability: Capability) -> bool {
    if lab.can(capability) {
        return true;
    }
    let subject = lab.subject().await;
    let asked = SaveRequest {
        live: capability != Capability::SaveStopped,
        memory: capability == Capability::SaveMemory,
        ..live(lab)
    };
    assert_unsupported(save(&subject, &asked).await, capability);
    assert_eq!(subject.state().await, InstanceState::Running, "a refused save did something");
    false
}

/// The same for making an instance from a snapshot.
pub(super) async fn can_restore(lab: &Lab) -> bool {
    if lab.can(Capability::Restore) {
        return true;
    }
    let subject = unmade(lab);
    assert_unsupported(restore(&subject, &lab.fresh_snapshot()).await, Capability::Restore);
    assert_eq!(subject.state().await, InstanceState::Absent);
    false
}

/// The same for saving with everything ended, and coming back from that.
pub(super) async fn can_turn(lab: &Lab) -> bool {
    can_save(lab, Capability::SaveStopped).await && can_restore(lab).await
}

/// The same for saving what runs on, and making another one of it.
pub(super) async fn can_copy(lab: &Lab) -> bool {
    can_save(lab, Capability::SaveLive).await && can_restore(lab).await
}

/// The same for making an instance from another one.
pub(super) async fn can_fork(lab: &Lab) -> bool {
    if lab.can(Capability::Fork) {
        return true;
    }
    let (source, subject) = (lab.subject().await, unmade(lab));
    assert_unsupported(fork(&subject, &source.instance()).await, Capability::Fork);
    assert_eq!(subject.state().await, InstanceState::Absent);
    false
}

/// The same for looking at snapshots and removing them, which whoever can save can.
pub(super) async fn can_keep(lab: &Lab) -> bool {
    if lab.can_keep() {
        return true;
    }
    let (subject, snapshot) = (lab.subject().await, lab.fresh_snapshot());
    assert_unsupported(look(lab, &snapshot).await, Capability::SaveStopped);
    let listed = lab.provider().snapshots(&lab.owner(), PageRequest::default()).await;
    assert_unsupported(listed, Capability::SaveStopped);
    assert_unsupported(remove(&subject, &snapshot).await, Capability::SaveStopped);
    false
}
