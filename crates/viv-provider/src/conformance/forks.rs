//! Making an instance from a living one (L11).

use viv_core::exec::ExecState;

use super::keep::{can_fork, can_save, can_turn, fork, forked, look, remove, restored, seal, unmade};
use super::lab::{Answer, Lab, SOON_MS, assert_refused};
use super::program::{self, Program};
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::InstanceState;

pub(super) async fn fork_leaves_the_source_alone(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", b"common").await;
    let execution = source.start(&program::tick()).await;
    let fork = forked(&source).await;
    assert!(lab.provider().executions(&fork.instance()).await.must("executions").is_empty());
    fork.write("/workspace/file", b"fork's").await;
    assert_eq!(source.read("/workspace/file").await, b"common");
    let before = source.status(&execution).await;
    assert_eq!(before.state, ExecState::Running);
    lab.until("progress of the source", SOON_MS, async || {
        (source.status(&execution).await.output_bytes > before.output_bytes).then_some(())
    })
    .await;
    source.assert_ready().await;
    source.destroy().await;
    assert_eq!(fork.read("/workspace/file").await, b"fork's");
    fork.assert_ready().await;
}

pub(super) async fn fork_of_nothing_is_absent(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let (nothing, subject) = (unmade(lab), unmade(lab));
    assert_refused!(fork(&subject, &nothing.instance()).await, ProviderError::Absent);
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn fork_of_the_ended_is_refused(lab: &Lab) {
    if !can_fork(lab).await || !can_save(lab, Capability::SaveStopped).await {
        return;
    }
    let (source, subject) = (lab.subject().await, unmade(lab));
    seal(&source).await;
    let made = fork(&subject, &source.instance()).await;
    assert_refused!(made, ProviderError::NotRunning { state: InstanceState::Ended(_) });
    source.destroy().await;
    assert_refused!(fork(&subject, &source.instance()).await, ProviderError::Absent);
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn fork_repeated_makes_one(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let (source, subject) = (lab.subject().await, unmade(lab));
    let (mutation, owner, spec, from) = (subject.mutation(), lab.owner(), lab.spec(), source.instance());
    let forking = || lab.provider().fork(&mutation, &subject.sandbox, &owner, &spec, &from);
    forking().await.must("fork");
    subject.write("/workspace/mark", b"first").await;
    assert_eq!(forking().await.must("fork, repeated").instance, subject.instance());
    assert_eq!(subject.read("/workspace/mark").await, b"first", "it was made anew");
    assert_refused!(fork(&subject, &from).await, ProviderError::Conflict { .. });
    assert_eq!(lab.list_all(&owner, None).await.len(), 2);
}

pub(super) async fn fork_shares_nothing_writable(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let source = lab.subject().await;
    for path in ["appended", "removed-there", "removed-here", "dir/a", "dir/b"] {
        source.write(&format!("/workspace/{path}"), b"").await;
    }
    let fork = forked(&source).await;
    let append = Program::Append { path: "/workspace/appended".to_owned() }.spec();
    source.run_ok(&append).await;
    for _ in 0..2 {
        fork.run_ok(&append).await;
    }
    assert_eq!(source.read("/workspace/appended").await, b"x\n");
    assert_eq!(fork.read("/workspace/appended").await, b"x\nx\n");

    fork.remove("/workspace/removed-there").await.must("file_remove");
    source.remove("/workspace/removed-here").await.must("file_remove");
    assert!(source.is_there("/workspace/removed-there").await && fork.is_there("/workspace/removed-here").await);

    fork.remove("/workspace/dir").await.must("file_remove of a directory");
    fork.mkdir("/workspace/dir/new").await.must("file_mkdir");
    source.rename("/workspace/dir/a", "/workspace/dir/c").await.must("file_move");
    source.mkdir("/workspace/late").await.must("file_mkdir");
    let names =
        |listing: viv_core::file::DirListing| listing.entries.into_iter().map(|entry| entry.path).collect::<Vec<_>>();
    assert_eq!(names(source.list("/workspace/dir", 1).await.must("file_list")), ["b", "c"]);
    assert_eq!(names(fork.list("/workspace/dir", 1).await.must("file_list")), ["new"]);
    assert!(!fork.is_there("/workspace/late").await);
}

pub(super) async fn a_fork_of_a_fork_stands_alone(lab: &Lab) {
    if !can_fork(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/source", b"1").await;
    let first = forked(&source).await;
    first.write("/workspace/first", b"2").await;
    let second = forked(&first).await;
    first.write("/workspace/first", b"changed").await;
    source.destroy().await;
    first.destroy().await;
    assert_eq!(second.read("/workspace/source").await, b"1");
    assert_eq!(second.read("/workspace/first").await, b"2");
    second.assert_ready().await;
}

pub(super) async fn a_fork_of_the_restored_is_made_from_its_snapshot(lab: &Lab) {
    if !can_fork(lab).await || !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/saved", b"1").await;
    let base = seal(&source).await;
    let restored_one = restored(lab, &base.id).await;
    restored_one.write("/workspace/later", b"2").await;
    let fork = forked(&restored_one).await;
    restored_one.destroy().await;
    assert_eq!(fork.read("/workspace/saved").await, b"1");
    assert_eq!(fork.read("/workspace/later").await, b"2");
    assert_eq!(look(lab, &base.id).await.must("snapshot").used_by, [fork.instance()]);
    assert_refused!(remove(&source, &base.id).await, ProviderError::Conflict { .. });
    let above = seal(&fork).await;
    assert_eq!((&above.parent, &above.source), (&Some(base.id.clone()), &fork.instance()));
    fork.destroy().await;
    remove(&source, &base.id).await.must("remove_snapshot");
    let last = restored(lab, &above.id).await;
    assert_eq!(last.read("/workspace/saved").await, b"1");
    assert_eq!(last.read("/workspace/later").await, b"2");
}
