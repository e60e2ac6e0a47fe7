//! Finding what was saved (L10, J1, T7).

use std::collections::BTreeSet;

use super::keep::{can_keep, can_save, can_turn, copy, look, restored, seal, unmade};
use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{Integrity, SnapshotSeen};

/// How far two clocks may be apart.
const CLOCKS_MS_MAX: u64 = 1_000;

pub(super) async fn show_what_they_are(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", &vec![7; 100_000]).await;
    let before_ms = lab.now_ms();
    let base = seal(&source).await;
    assert_eq!((&base.source, &base.owner, &base.parent), (&source.instance(), &lab.owner(), &None));
    assert_eq!((base.live, base.memory), (false, false));
    assert!(base.size_bytes >= 100_000, "it holds {} bytes", base.size_bytes);
    let when_ms = before_ms.saturating_sub(CLOCKS_MS_MAX)..=lab.now_ms() + CLOCKS_MS_MAX;
    assert!(when_ms.contains(&base.created_at_ms), "made at {}, not in {when_ms:?}", base.created_at_ms);
    let seen = look(lab, &base.id).await.must("snapshot");
    assert_eq!((&seen.snapshot, &seen.used_by), (&base, &Vec::new()));
    assert_ne!(seen.integrity, Integrity::Damaged);

    let user = restored(lab, &base.id).await;
    assert_eq!(look(lab, &base.id).await.must("snapshot").used_by, [user.instance()]);
    let child = if lab.can(Capability::SaveLive) { copy(&user).await } else { seal(&user).await };
    assert_eq!((&child.parent, child.live), (&Some(base.id.clone()), lab.can(Capability::SaveLive)));
    // The hash follows in the background (L10).
    for id in [&base.id, &child.id] {
        lab.until("the content to be verified", SOON_MS, async || {
            let integrity = look(lab, id).await.must("snapshot").integrity;
            assert_ne!(integrity, Integrity::Damaged);
            (integrity == Integrity::Verified).then_some(())
        })
        .await;
    }
}

pub(super) async fn pages_show_each_once(lab: &Lab) {
    if !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let (subject, theirs) = (lab.subject().await, unmade(lab));
    let other = lab.other_owner();
    lab.provider().create(&theirs.mutation(), &theirs.sandbox, &other, &lab.spec()).await.must("create");
    let mut made = BTreeSet::new();
    for _ in 0..3 {
        made.insert(seal(&subject).await.id);
    }
    let their_own = seal(&theirs).await;
    // They outlive the instances that they are of.
    subject.destroy().await;
    theirs.destroy().await;
    for limit in [1, 2, 3, 100] {
        let listed = lab.snapshots_all(&lab.owner(), Some(limit)).await;
        assert_eq!(listed.len(), made.len(), "by pages of {limit}");
        for SnapshotSeen { snapshot, .. } in &listed {
            assert_eq!((&snapshot.owner, &snapshot.source), (&lab.owner(), &subject.instance()));
        }
        let seen: BTreeSet<_> = listed.into_iter().map(|seen| seen.snapshot.id).collect();
        assert_eq!(seen, made, "by pages of {limit}");
    }
    let listed = lab.snapshots_all(&other, None).await;
    assert_eq!(listed.into_iter().map(|seen| seen.snapshot).collect::<Vec<_>>(), [their_own]);
}

pub(super) async fn unknown_is_not_found(lab: &Lab) {
    if !can_keep(lab).await {
        return;
    }
    assert_refused!(look(lab, &lab.fresh_snapshot()).await, ProviderError::NotFound { .. });
    assert!(lab.snapshots_all(&lab.owner(), None).await.is_empty());
}
