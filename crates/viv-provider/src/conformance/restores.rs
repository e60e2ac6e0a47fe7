//! Coming back from a snapshot: the same sandbox or others, again and again (L11, T5).

use viv_core::file::{FileKind, FileStat};

use super::keep::{
    can_copy, can_restore, can_turn, copy, look, remove, restore, restore_as, restored, seal, turned, unmade,
};
use super::lab::{Answer, Lab, assert_refused};
use super::program::{self, Program};
use super::subject::Subject;
use crate::Image;
use crate::error::ProviderError;
use crate::instance::InstanceState;

/// Files were lost from the second round on in incident 13.
const ROUNDS: usize = 5;

pub(super) async fn restored_is_independent(lab: &Lab) {
    if !can_copy(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", b"saved").await;
    let snapshot = copy(&source).await;
    let (one, other) = (restored(lab, &snapshot.id).await, restored(lab, &snapshot.id).await);
    source.write("/workspace/file", b"source's").await;
    one.write("/workspace/file", b"one's").await;
    assert_eq!(other.read("/workspace/file").await, b"saved");
    assert_eq!(source.read("/workspace/file").await, b"source's");
    other.assert_ready().await;
}

pub(super) async fn restored_survives_its_source(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", b"saved").await;
    source.start(&program::tick()).await;
    let snapshot = seal(&source).await;
    source.destroy().await;
    let next = source.next();
    let (mutation, owner, spec) = (next.mutation(), lab.owner(), lab.spec());
    for round in ["restore", "restore, repeated"] {
        let seen = lab.provider().restore(&mutation, &next.sandbox, &owner, &spec, &snapshot.id).await.must(round);
        assert_eq!((seen.instance, seen.state), (next.instance(), InstanceState::Running));
        assert_eq!(next.read("/workspace/file").await, b"saved");
    }
    assert!(lab.provider().executions(&next.instance()).await.must("executions").is_empty());
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
    // What was refused made nothing, so the generation is still free.
    subject.create(&lab.spec()).await;
}

pub(super) async fn restored_is_as_its_own_spec_says(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let mut spec = lab.spec();
    spec.env.insert("WHOSE".to_owned(), "the-source".to_owned());
    let source = lab.subject_of(&spec).await;
    let snapshot = seal(&source).await;
    // The snapshot says what it is made of, so an image that nobody knows is not missed.
    spec.image = Image::Named { name: "no-such-image".to_owned() };
    spec.env.insert("WHOSE".to_owned(), "its-own".to_owned());
    "/workspace/else/where".clone_into(&mut spec.workdir);
    spec.labels.insert("purpose".to_owned(), "restored".to_owned());
    let subject = unmade(lab);
    restore_as(&subject, &spec, &snapshot.id).await.must("restore");
    assert_eq!(subject.run_ok(&Program::ReadEnv { name: "WHOSE".to_owned() }.spec()).await, "its-own\n");
    assert_eq!(subject.run_ok(&Program::PrintDirectory.spec()).await, "/workspace/else/where\n");
    let listed = lab.list_all(&lab.owner(), None).await;
    let labels = listed.into_iter().find(|one| one.instance == subject.instance()).map(|one| one.labels);
    assert_eq!(labels, Some(spec.labels));
}

pub(super) async fn several_are_restored_at_once(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/file", b"common").await;
    let snapshot = seal(&source).await;
    source.destroy().await;
    let restore_for = async |name: &str| {
        let one = restored(lab, &snapshot.id).await;
        one.write("/workspace/own", name.as_bytes()).await;
        one
    };
    let (a, b, c, d) = tokio::join!(restore_for("a"), restore_for("b"), restore_for("c"), restore_for("d"));
    for (one, name) in [(&a, "a"), (&b, "b"), (&c, "c"), (&d, "d")] {
        one.assert_ready().await;
        assert_eq!(one.read("/workspace/file").await, b"common");
        assert_eq!(one.read("/workspace/own").await, name.as_bytes());
    }
    let mut users = look(lab, &snapshot.id).await.must("snapshot").used_by;
    users.sort();
    let mut made = [&a, &b, &c, &d].map(Subject::instance);
    made.sort();
    assert_eq!(users, made);
}

/// In incident 38, destroying a box deleted the snapshot that others were made from.
pub(super) async fn a_snapshot_outlives_its_sandbox(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let source = lab.subject().await;
    source.write("/workspace/first", b"of the source").await;
    let base = seal(&source).await;
    let second = restored(lab, &base.id).await;
    source.destroy().await;
    // Incident 38: what others were made from went with the box that it came from.
    assert_eq!(look(lab, &base.id).await.must("snapshot").snapshot, base);
    second.assert_ready().await;
    assert_eq!(second.read("/workspace/first").await, b"of the source");
    assert_refused!(remove(&source, &base.id).await, ProviderError::Conflict { .. });

    second.write("/workspace/second", b"of the second").await;
    let above = seal(&second).await;
    assert_eq!(above.parent, Some(base.id.clone()));
    second.destroy().await;
    let third = restored(lab, &above.id).await;
    let fresh = restored(lab, &base.id).await;
    third.assert_ready().await;
    assert_eq!(third.read("/workspace/first").await, b"of the source");
    assert_eq!(third.read("/workspace/second").await, b"of the second");
    assert_eq!(fresh.read("/workspace/first").await, b"of the source");
    assert!(!fresh.is_there("/workspace/second").await, "what was made later came into the base");
}

/// What every round leaves as it is, with how it has to look.
struct Lasting {
    path: String,
    stat: FileStat,
    content: Vec<u8>,
}

impl Lasting {
    async fn write(subject: &Subject<'_>, path: String, content: &[u8], mode: u32) -> Self {
        subject.write_mode(&path, content, Some(mode)).await.must("file_write");
        let stat = subject.stat(&path).await.must("file_stat");
        Self { path, stat, content: content.to_vec() }
    }

    async fn link(subject: &Subject<'_>, path: String, target: &Self) -> Self {
        subject.link(&target.path, &path).await;
        let stat = subject.stat(&path).await.must("file_stat");
        Self { path, stat, content: target.content.clone() }
    }

    async fn assert_lasts(&self, subject: &Subject<'_>, round: usize) {
        assert_eq!(subject.stat(&self.path).await.must("file_stat"), self.stat, "{} after round {round}", self.path);
        assert!(subject.read(&self.path).await == self.content, "{} changed in round {round}", self.path);
    }
}

pub(super) async fn nothing_is_lost_over_many_rounds(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let mut subject = lab.subject().await;
    subject.mkdir("/workspace/rounds").await.must("file_mkdir");
    let mut lasting = Vec::new();
    for round in 0..ROUNDS {
        let text = format!("round {round}\n").repeat(1_000);
        let modes = [0o644, 0o600, 0o755, 0o640, 0o444];
        let file =
            Lasting::write(&subject, format!("/workspace/rounds/new-{round}"), text.as_bytes(), modes[round]).await;
        lasting.push(Lasting::link(&subject, format!("/workspace/rounds/link-{round}"), &file).await);
        lasting.push(file);
        subject.write("/workspace/rounds/current", text.as_bytes()).await;
        subject.write(&format!("/workspace/rounds/short-lived-{round}"), b"x").await;
        if let Some(before) = round.checked_sub(1) {
            subject.remove(&format!("/workspace/rounds/short-lived-{before}")).await.must("file_remove");
            subject.remove("/workspace/rounds/dir").await.must("file_remove of a directory");
        }
        // The same name as one of before, with nothing of it below.
        subject.write(&format!("/workspace/rounds/dir/only-{round}"), b"x").await;

        let (next, _) = turned(&subject).await;
        subject = next;
        for one in &lasting {
            one.assert_lasts(&subject, round).await;
        }
        assert!(
            subject.read("/workspace/rounds/current").await == text.as_bytes(),
            "an overwritten file is an older one"
        );
        let found = subject.list("/workspace/rounds", 2).await.must("file_list");
        let names: Vec<_> = found.entries.iter().map(|entry| entry.path.clone()).collect();
        assert_eq!(names, expected_after(round), "after round {round}");
    }
    subject.assert_ready().await;
}

/// The names that have to be there after a round, and no others.
fn expected_after(round: usize) -> Vec<String> {
    let mut names = vec!["current".to_owned(), "dir".to_owned(), format!("dir/only-{round}")];
    names.extend((0..=round).map(|past| format!("link-{past}")));
    names.extend((0..=round).map(|past| format!("new-{past}")));
    names.push(format!("short-lived-{round}"));
    names
}

pub(super) async fn rollback_brings_back_what_was_saved(lab: &Lab) {
    if !can_copy(lab).await {
        return;
    }
    let old = lab.subject().await;
    old.write("/workspace/file", b"good").await;
    old.write("/workspace/removed", b"needed").await;
    let snapshot = copy(&old).await;
    old.write("/workspace/file", b"bad").await;
    old.write("/workspace/added", b"bad").await;
    old.remove("/workspace/removed").await.must("file_remove");
    let next = old.next();
    assert_refused!(restore(&next, &snapshot.id).await, ProviderError::Conflict { .. });
    lab.provider().destroy(&lab.mutation(old.generation, next.token), &old.sandbox).await.must("destroy");

    restore(&next, &snapshot.id).await.must("restore");
    assert_eq!(next.read("/workspace/file").await, b"good");
    assert_eq!(next.read("/workspace/removed").await, b"needed");
    assert!(!next.is_there("/workspace/added").await, "what was rolled back is there");
    next.assert_ready().await;

    let looked = old.stat("/workspace").await;
    assert_refused!(looked, ProviderError::StaleGeneration { current, .. } if current == next.generation);
    let stale = lab.mutation(old.generation, next.token);
    let late = lab.provider().file_mkdir(&stale, &old.sandbox, "/workspace/late").await;
    assert_refused!(late, ProviderError::StaleGeneration { .. });
    assert_eq!(old.state().await, InstanceState::Absent);
    assert_eq!(look(lab, &snapshot.id).await.must("snapshot").used_by, [next.instance()]);
}

pub(super) async fn kinds_and_times_survive(lab: &Lab) {
    if !can_turn(lab).await {
        return;
    }
    let subject = lab.subject().await;
    subject.write_mode("/workspace/tool", b"#!/bin/sh\n", Some(0o4755)).await.must("file_write");
    subject.mkdir("/workspace/empty/dir").await.must("file_mkdir");
    subject.write("/workspace/nothing", b"").await;
    subject.link("nowhere/at-all", "/workspace/dangling").await;
    let mut before = Vec::new();
    for path in ["tool", "empty", "empty/dir", "nothing", "dangling"].map(|name| format!("/workspace/{name}")) {
        let stat = seen(&subject, &path).await;
        before.push((path, stat));
    }
    let (next, _) = turned(&subject).await;
    for (path, stat) in before {
        assert_eq!(seen(&next, &path).await, stat, "{path} came back otherwise");
    }
}

/// What a path looks like, without what filesystems say differently about the same directory.
async fn seen(subject: &Subject<'_>, path: &str) -> FileStat {
    let stat = subject.stat(path).await.must("file_stat");
    match stat.kind {
        FileKind::Dir => FileStat { size_bytes: 0, ..stat },
        FileKind::File | FileKind::Symlink | FileKind::Other => stat,
    }
}
