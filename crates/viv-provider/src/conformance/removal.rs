//! Removing what was saved, and nothing else (L11).

use viv_core::{FencingToken, Generation};

use super::keep::{
    can_copy, can_keep, can_save, can_turn, copy, look, remove, restore, restored, save, seal, stopped, turned, unmade,
};
use super::lab::{Answer, Lab, TOKEN, assert_refused};
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::InstanceState;

pub(super) async fn what_is_used_stays(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", b"saved").await;
    let snapshot = seal(&source).await.id;
    let user = restored(lab, &snapshot).await;
    assert_refused!(remove(&source, &snapshot).await, ProviderError::Conflict { .. });
    assert_eq!(user.read("/workspace/file").await, b"saved");
    assert_eq!(look(lab, &snapshot).await.must("snapshot").used_by, [user.instance()]);
    assert_eq!(restored(lab, &snapshot).await.read("/workspace/file").await, b"saved");
}

pub(super) async fn what_ended_still_uses_it(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    let snapshot = seal(&source).await.id;
    let user = restored(lab, &snapshot).await;
    seal(&user).await;
    assert_eq!(look(lab, &snapshot).await.must("snapshot").used_by, [user.instance()]);
    assert_refused!(remove(&source, &snapshot).await, ProviderError::Conflict { .. });
    user.destroy().await;
    assert!(look(lab, &snapshot).await.must("snapshot").used_by.is_empty());
    remove(&source, &snapshot).await.must("remove_snapshot");
}

pub(super) async fn is_for_ever_and_safe_to_repeat(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    let (saving, asked) = (source.mutation(), stopped(lab));
    lab.provider().save(&saving, &source.sandbox, &asked).await.must("save");
    let user = restored(lab, &asked.snapshot).await;
    user.destroy().await;
    let mutation = source.mutation();
    for round in ["remove_snapshot", "remove_snapshot, repeated"] {
        lab.provider().remove_snapshot(&mutation, &source.sandbox, &asked.snapshot).await.must(round);
        assert_refused!(look(lab, &asked.snapshot).await, ProviderError::NotFound { .. });
    }
    remove(&source, &asked.snapshot).await.must("remove_snapshot by another operation");
    assert!(lab.snapshots_all(&lab.owner(), None).await.is_empty());
    assert_refused!(restore(&unmade(lab), &asked.snapshot).await, ProviderError::NotFound { .. });
    // Its id is used for ever, for whoever saved it too.
    assert_refused!(save(&source, &asked).await, ProviderError::Conflict { .. });
    let late = lab.provider().save(&saving, &source.sandbox, &asked).await;
    assert_refused!(late, ProviderError::Conflict { .. });
    // The filesystem is still there to be saved.
    seal(&source).await;
}

pub(super) async fn of_what_never_was_keeps_a_late_save_out(lab: &Lab) {
    if !can_keep(lab).await || !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let subject = lab.subject().await;
    let asked = stopped(lab);
    for round in ["remove_snapshot", "remove_snapshot, repeated"] {
        remove(&subject, &asked.snapshot).await.must(round);
    }
    assert_refused!(save(&subject, &asked).await, ProviderError::Conflict { .. });
    assert_eq!(subject.state().await, InstanceState::Running, "a refused save ended it");
    assert_refused!(look(lab, &asked.snapshot).await, ProviderError::NotFound { .. });
}

pub(super) async fn by_an_older_token_is_refused(lab: &Lab) {
    if !can_keep(lab).await || !can_save(lab, Capability::SaveLive).await {
        return;
    }
    let subject = lab.subject().await;
    let (first, second) = (copy(&subject).await.id, copy(&subject).await.id);
    let (older, newer) = (FencingToken(TOKEN.0 - 1), FencingToken(TOKEN.0 + 5));
    let by = async |token, snapshot| {
        lab.provider().remove_snapshot(&lab.mutation(subject.generation, token), &subject.sandbox, snapshot).await
    };
    assert_refused!(by(older, &first).await, ProviderError::Fenced { highest: TOKEN, .. });
    look(lab, &first).await.must("snapshot");
    by(newer, &first).await.must("remove_snapshot by a newer token");
    // From now on, the token that made the instance is an old one.
    assert_refused!(by(TOKEN, &second).await, ProviderError::Fenced { highest, .. } if highest == newer);
    assert_refused!(subject.mkdir("/workspace/late").await, ProviderError::Fenced { .. });
    look(lab, &second).await.must("snapshot");
}

pub(super) async fn asks_for_no_generation(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let first = lab.subject().await;
    let (second, base) = turned(&first).await;
    let above = seal(&second).await;
    second.destroy().await;
    // Both are removed when there is no instance any more, and with generations that are old or never were.
    for (generation, snapshot) in [(Generation::FIRST, &above), (Generation(9), &base)] {
        let mutation = lab.mutation(generation, second.token);
        lab.provider().remove_snapshot(&mutation, &second.sandbox, &snapshot.id).await.must("remove_snapshot");
        assert_refused!(look(lab, &snapshot.id).await, ProviderError::NotFound { .. });
    }
    // And none of them was taken for a new one.
    second.next().create(&lab.spec()).await;
}

pub(super) async fn of_another_sandboxs_conflicts(lab: &Lab) {
    if !can_keep(lab).await || !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let (subject, other) = (lab.subject().await, lab.subject().await);
    let snapshot = seal(&subject).await;
    for stranger in [other, unmade(lab)] {
        assert_refused!(remove(&stranger, &snapshot.id).await, ProviderError::Conflict { .. });
        assert_eq!(look(lab, &snapshot.id).await.must("snapshot").snapshot, snapshot);
    }
    remove(&subject, &snapshot.id).await.must("remove_snapshot");
}

pub(super) async fn leaves_its_source_alone(lab: &Lab) {
    if !can_copy(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/before", b"1").await;
    let first = copy(&source).await;
    source.write("/workspace/between", b"2").await;
    let second = copy(&source).await;
    source.write("/workspace/after", b"3").await;
    for snapshot in [&first.id, &second.id] {
        remove(&source, snapshot).await.must("remove_snapshot");
        for (path, content) in [("before", b"1"), ("between", b"2"), ("after", b"3")] {
            assert_eq!(source.read(&format!("/workspace/{path}")).await, content);
        }
    }
    source.assert_ready().await;
    // And it can be saved anew, with all that the removed ones had.
    let other = restored(lab, &copy(&source).await.id).await;
    assert_eq!(other.read("/workspace/before").await, b"1");
    assert_eq!(other.read("/workspace/between").await, b"2");
}

pub(super) async fn of_a_parent_leaves_its_children_alone(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let mut subject = lab.subject().await;
    let mut chain = Vec::new();
    for path in ["/workspace/0", "/workspace/1", "/workspace/2"] {
        subject.write(path, path.as_bytes()).await;
        let (next, snapshot) = turned(&subject).await;
        subject = next;
        chain.push(snapshot.id);
    }
    subject.destroy().await;
    let assert_holds = async |snapshot, count: usize| {
        let one = restored(lab, snapshot).await;
        for number in 0..3 {
            let path = format!("/workspace/{number}");
            if number < count {
                assert_eq!(one.read(&path).await, path.as_bytes());
            } else {
                assert!(!one.is_there(&path).await, "{path} is younger than {snapshot}");
            }
        }
        one.destroy().await;
    };
    remove(&subject, &chain[1]).await.must("remove_snapshot of the middle one");
    assert_holds(&chain[0], 1).await;
    assert_holds(&chain[2], 3).await;
    remove(&subject, &chain[0]).await.must("remove_snapshot of the oldest one");
    assert_holds(&chain[2], 3).await;
    assert_eq!(
        look(lab, &chain[2]).await.must("snapshot").snapshot.parent,
        Some(chain[1].clone()),
        "what is true of it for ever"
    );
}
