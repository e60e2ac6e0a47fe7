//! Snapshots as files: out of a provider, and into it again (L11).

use tokio::io::AsyncReadExt;
use viv_core::{FencingToken, SnapshotId};

use super::keep::{can_turn, look, remove, restored, seal, unmade};
use super::lab::{Answer, Lab, SOON_MS, TOKEN, assert_refused, assert_unsupported};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{Mutation, Snapshot};

type Result<T> = std::result::Result<T, ProviderError>;

/// More than one block of anything.
const LARGE_BYTES: usize = 300_000;

/// How much is changed of a file where it is damaged.
const DAMAGE_BYTES: usize = 8;

async fn export(lab: &Lab, snapshot: &SnapshotId) -> Result<Vec<u8>> {
    let mut stream = lab.drive("export", SOON_MS, lab.provider().export_snapshot(snapshot)).await?;
    let mut file = Vec::new();
    stream.read_to_end(&mut file).await.expect("the file comes whole");
    Ok(file)
}

async fn import_as(subject: &Subject<'_>, mutation: &Mutation, id: &SnapshotId, file: &[u8]) -> Result<Snapshot> {
    let (lab, file) = (subject.lab, Box::new(std::io::Cursor::new(file.to_vec())));
    let owner = lab.owner();
    let importing = lab.provider().import_snapshot(mutation, &subject.sandbox, &owner, id, file);
    lab.drive("import", SOON_MS, importing).await
}

/// Reads a file as a snapshot of this sandbox.
async fn import(subject: &Subject<'_>, id: &SnapshotId, file: &[u8]) -> Result<Snapshot> {
    import_as(subject, &subject.mutation(), id, file).await
}

/// Gives whether snapshots can be moved as files; otherwise that has to be refused.
async fn can_transfer(lab: &Lab) -> bool {
    if lab.can(Capability::Transfer) {
        return can_turn(lab).await;
    }
    let id = lab.fresh_snapshot();
    assert_unsupported(export(lab, &id).await, Capability::Transfer);
    assert_unsupported(import(&unmade(lab), &id, b"a file").await, Capability::Transfer);
    assert!(lab.list_all(&lab.owner(), None).await.is_empty());
    false
}

fn large() -> Vec<u8> {
    (0..LARGE_BYTES).map(|at| (at % 251) as u8).collect()
}

/// A snapshot with some files in it, and whose it is.
async fn filled(lab: &Lab) -> (Subject<'_>, Snapshot) {
    let source = lab.subject().await;
    source.write("/workspace/small", b"saved").await;
    source.write("/workspace/below/large", &large()).await;
    source.write_mode("/workspace/below/script", b"#!/bin/sh\n", Some(0o755)).await.must("file_write");
    let snapshot = seal(&source).await;
    (source, snapshot)
}

/// What begins with it has those files.
async fn assert_filled(lab: &Lab, id: &SnapshotId) {
    let other = restored(lab, id).await;
    other.assert_ready().await;
    assert_eq!(other.read("/workspace/small").await, b"saved");
    assert!(other.read("/workspace/below/large").await == large(), "a large file is another one");
    let script = other.stat("/workspace/below/script").await.must("file_stat");
    assert_eq!((script.mode & 0o777, script.size_bytes), (0o755, 10));
}

pub(super) async fn imported_is_what_was_exported(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (source, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    // The one that it was made of is gone before it comes back.
    source.destroy().await;
    remove(&source, &snapshot.id).await.must("remove");
    let (subject, id) = (unmade(lab), lab.fresh_snapshot());
    let imported = import(&subject, &id, &file).await.must("import");
    assert_eq!((&imported.id, &imported.source.sandbox), (&id, &subject.sandbox));
    assert_eq!((imported.owner, imported.memory), (lab.owner(), false));
    assert_eq!(look(lab, &id).await.must("snapshot").snapshot.size_bytes, imported.size_bytes);
    assert_filled(lab, &id).await;
}

pub(super) async fn one_file_is_imported_under_several_ids(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (_, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    let ids = [lab.fresh_snapshot(), lab.fresh_snapshot()];
    for id in &ids {
        import(&unmade(lab), id, &file).await.must("import");
        assert_filled(lab, id).await;
    }
    assert_filled(lab, &snapshot.id).await;
    assert_eq!(lab.snapshots_all(&lab.owner(), None).await.len(), 3);
}

pub(super) async fn a_used_id_conflicts(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (source, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    assert_refused!(import(&source, &snapshot.id, &file).await, ProviderError::Conflict { .. });
    assert_filled(lab, &snapshot.id).await;
    // What was removed is not there again.
    let (subject, id) = (unmade(lab), lab.fresh_snapshot());
    import(&subject, &id, &file).await.must("import");
    remove(&subject, &id).await.must("remove");
    assert_refused!(import(&subject, &id, &file).await, ProviderError::Conflict { .. });
    assert_refused!(look(lab, &id).await, ProviderError::NotFound { .. });
}

/// Refused, with nothing left of it: the id is free for the right file.
async fn assert_nothing_comes_of(lab: &Lab, whole: &[u8], files: impl IntoIterator<Item = Vec<u8>>) {
    let (subject, id) = (unmade(lab), lab.fresh_snapshot());
    for file in files {
        let refused = import(&subject, &id, &file).await;
        assert_refused!(refused, ProviderError::Invalid { .. } | ProviderError::Failed { .. });
        assert_refused!(look(lab, &id).await, ProviderError::NotFound { .. });
        assert_eq!(lab.snapshots_all(&lab.owner(), None).await.len(), 1, "what was exported, and nothing else");
    }
    import(&subject, &id, whole).await.must("import of the whole");
}

pub(super) async fn what_was_changed_on_its_way_is_refused_and_leaves_nothing(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (_, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    let changed = [0, file.len() / 4, file.len() / 2, file.len() * 3 / 4].map(|at| {
        let mut changed = file.clone();
        // More than one bit: among zeros there are bits of a packed file that change nothing of what it holds.
        changed[at..file.len().min(at + DAMAGE_BYTES)].iter_mut().for_each(|byte| *byte ^= 0x5a);
        changed
    });
    let longer = [&file[..], b"and more"].concat();
    assert_nothing_comes_of(lab, &file, changed.into_iter().chain([longer, b"not a snapshot".to_vec()])).await;
}

pub(super) async fn what_was_cut_short_is_refused_and_leaves_nothing(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (_, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    let cut = [0, 1, file.len() / 2, file.len() - 1].map(|at| file[..at].to_vec());
    assert_nothing_comes_of(lab, &file, cut).await;
}

pub(super) async fn export_of_nothing_is_not_found(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    assert_refused!(export(lab, &lab.fresh_snapshot()).await, ProviderError::NotFound { .. });
}

pub(super) async fn import_by_an_older_token_is_refused(lab: &Lab) {
    if !can_transfer(lab).await {
        return;
    }
    let (source, snapshot) = filled(lab).await;
    let file = export(lab, &snapshot.id).await.must("export");
    let late = lab.fresh_snapshot();
    let older = lab.mutation(source.generation, FencingToken(TOKEN.0 - 1));
    assert_refused!(import_as(&source, &older, &late, &file).await, ProviderError::Fenced { highest: TOKEN, .. });
    assert_refused!(look(lab, &late).await, ProviderError::NotFound { .. });
    // Another generation is no matter: snapshots belong to none.
    let other = lab.mutation(source.generation.next(), TOKEN);
    import_as(&source, &other, &late, &file).await.must("import");
}
