//! What is on disk, and how much may be.

use super::keep::{can_turn, look, restore_as, restored, seal, turned, unmade};
use super::lab::{Answer, Lab, SOON_MS, assert_refused, assert_unsupported};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{DiskUsage, InstanceSpec, InstanceState};

const MIB: u64 = 1 << 20;

/// What a case writes to see it counted: far more than what instances differ by otherwise.
const WRITTEN: u64 = 4 * MIB;

/// What may come on top of it, or be missing: blocks, directories, a filesystem's own.
const SLACK: u64 = MIB;

/// Room for what the cases write, and small enough to be filled.
const LIMIT: u64 = 64 * MIB;

async fn usage(subject: &Subject<'_>) -> DiskUsage {
    subject.lab.provider().disk_usage(&subject.instance()).await.must("disk_usage")
}

/// Gives whether use is told; otherwise it has to be refused.
async fn can_tell(lab: &Lab) -> bool {
    if lab.can(Capability::Usage) {
        return true;
    }
    let subject = lab.subject().await;
    assert_unsupported(lab.provider().disk_usage(&subject.instance()).await, Capability::Usage);
    false
}

fn limited(lab: &Lab) -> InstanceSpec {
    let mut spec = lab.spec();
    spec.limits.disk_bytes = Some(LIMIT);
    spec
}

/// Gives whether disks can be limited; otherwise it has to be refused.
async fn can_limit(lab: &Lab) -> bool {
    if lab.can(Capability::LimitDisk) {
        return true;
    }
    let subject = unmade(lab);
    let made = lab.provider().create(&subject.mutation(), &subject.sandbox, &lab.owner(), &limited(lab)).await;
    assert_unsupported(made, Capability::LimitDisk);
    if lab.can(Capability::Restore) {
        let made = restore_as(&subject, &limited(lab), &lab.fresh_snapshot()).await;
        assert_unsupported(made, Capability::LimitDisk);
    }
    assert_eq!(subject.state().await, InstanceState::Absent);
    false
}

pub(super) async fn usage_grows_by_what_is_written(lab: &Lab) {
    if !can_tell(lab).await {
        return;
    }
    let subject = lab.subject().await;
    let before = usage(&subject).await;
    assert_eq!(before.limit_bytes, subject.observe().await.limits.and_then(|limits| limits.disk_bytes));
    subject.fill("/workspace/file", WRITTEN).await.must("file_write");
    let least = before.own_bytes + WRITTEN - SLACK;
    let grown = lab
        .until("the use to grow", SOON_MS, async || {
            Some(usage(&subject).await.own_bytes).filter(|own_bytes| *own_bytes >= least)
        })
        .await;
    let most = before.own_bytes + WRITTEN + SLACK;
    assert!(grown <= most, "{WRITTEN} bytes were written, and {} became {grown}", before.own_bytes);
    subject.remove("/workspace/file").await.must("file_remove");
    lab.until("the use to shrink", SOON_MS, async || {
        (usage(&subject).await.own_bytes <= before.own_bytes + SLACK).then_some(())
    })
    .await;
    subject.destroy().await;
    assert_refused!(lab.provider().disk_usage(&subject.instance()).await, ProviderError::Absent);
}

pub(super) async fn what_was_restored_is_shared(lab: &Lab) {
    if !can_tell(lab).await || !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.fill("/workspace/file", WRITTEN).await.must("file_write");
    let snapshot = seal(&source).await;
    // Told of the ended too.
    let all = usage(&source).await;
    assert!(all.own_bytes + all.shared_bytes >= WRITTEN - SLACK, "after a save it has {all:?}");
    source.destroy().await;
    let alone = look(lab, &snapshot.id).await.must("snapshot").own_bytes;
    assert!(alone >= WRITTEN - SLACK, "nobody else has it, and removing it would free {alone} bytes");
    let one = restored(lab, &snapshot.id).await;
    let fresh = usage(&one).await;
    assert!(fresh.own_bytes <= SLACK, "what came from the snapshot counts as its own: {fresh:?}");
    assert!(fresh.shared_bytes >= WRITTEN - SLACK, "what came from the snapshot is not counted: {fresh:?}");
    one.fill("/workspace/more", WRITTEN).await.must("file_write");
    let grown = lab
        .until("the use to grow", SOON_MS, async || {
            Some(usage(&one).await).filter(|now| now.own_bytes >= fresh.own_bytes + WRITTEN - SLACK)
        })
        .await;
    assert!(grown.own_bytes <= fresh.own_bytes + WRITTEN + SLACK, "{fresh:?} became {grown:?}");
}

pub(super) async fn a_full_disk_takes_no_more(lab: &Lab) {
    if !can_limit(lab).await {
        return;
    }
    let subject = lab.subject_of(&limited(lab)).await;
    if lab.can(Capability::Usage) {
        assert_eq!(usage(&subject).await.limit_bytes, Some(LIMIT));
    }
    subject.fill("/workspace/part", 24 * MIB).await.must("file_write of what fits");
    assert_refused!(subject.fill("/workspace/flood", 100 * MIB).await, ProviderError::Exhausted { .. });
    assert_eq!(subject.state().await, InstanceState::Running);
    assert!(!subject.is_there("/workspace/flood").await, "a part of what did not fit is there");
    assert_eq!(subject.stat("/workspace/part").await.must("file_stat").size_bytes, 24 * MIB);
    // What did not fit takes no room; what is there does, until it is removed.
    subject.fill("/workspace/more", 16 * MIB).await.must("file_write beside what did not fit");
    assert_refused!(subject.fill("/workspace/rest", 40 * MIB).await, ProviderError::Exhausted { .. });
    subject.remove("/workspace/part").await.must("file_remove on a full disk");
    lab.until("room", SOON_MS, async || match subject.fill("/workspace/rest", 32 * MIB).await {
        Ok(_) => Some(()),
        Err(ProviderError::Exhausted { .. }) => None,
        Err(other) => panic!("file_write failed: {other:?}"),
    })
    .await;
    subject.assert_ready().await;
}

pub(super) async fn a_restored_disk_is_as_full_as_it_was(lab: &Lab) {
    if !can_limit(lab).await || !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.fill("/workspace/saved", 40 * MIB).await.must("file_write");
    let snapshot = seal(&source).await;
    source.destroy().await;
    let subject = unmade(lab);
    restore_as(&subject, &limited(lab), &snapshot.id).await.must("restore");
    if lab.can(Capability::Usage) {
        assert_eq!(usage(&subject).await.limit_bytes, Some(LIMIT));
    }
    assert_refused!(subject.fill("/workspace/more", 40 * MIB).await, ProviderError::Exhausted { .. });
    subject.fill("/workspace/more", 8 * MIB).await.must("file_write of what fits");
    // A limit is of an instance: the next one has that of its own spec.
    let (next, _) = turned(&subject).await;
    assert_eq!(next.stat("/workspace/saved").await.must("file_stat").size_bytes, 40 * MIB);
    next.fill("/workspace/even-more", 40 * MIB).await.must("file_write without a limit");
}
