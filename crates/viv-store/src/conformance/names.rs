use std::sync::Arc;

use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::spec::Project;

use super::Lab;
use super::lab::{at_once, change, phase};
use crate::error::StoreError;

fn taken_by(answer: Result<crate::Cursor, StoreError>) -> viv_core::SandboxId {
    match answer {
        Err(StoreError::NameTaken { by }) => by,
        other => panic!("the name is taken, and this was answered: {other:?}"),
    }
}

pub(super) async fn belong_to_the_living(lab: &Lab) {
    let mut first = lab.named(1, "a");
    lab.put(&first).await;
    for name in PhaseName::ALL.into_iter().filter(|name| *name != PhaseName::Stopped) {
        lab.put_next(&mut first, |first| first.phase = phase(name)).await;
        assert_eq!(taken_by(lab.commit(&lab.named(2, "a")).await), first.id);
    }
}

pub(super) async fn are_free_after_a_stop(lab: &Lab) {
    let mut first = lab.named(1, "a");
    lab.put(&first).await;
    lab.put_next(&mut first, |first| first.phase = phase(PhaseName::Stopped)).await;
    let second = lab.named(2, "a");
    lab.put(&second).await;
    assert_eq!(taken_by(lab.commit(&lab.named(3, "a")).await), second.id);
}

pub(super) async fn are_free_after_a_delete(lab: &Lab) {
    let mut first = lab.named(1, "a");
    lab.put(&first).await;
    let deleting = |first: &mut Sandbox| {
        first.deleted = true;
        first.phase = phase(PhaseName::Stopping);
    };
    lab.put_next(&mut first, deleting).await;
    let second = lab.named(2, "a");
    lab.put(&second).await;
    // The end of the first one is no claim on the name.
    lab.put_next(&mut first, |first| first.phase = phase(PhaseName::Stopped)).await;
    assert_eq!(lab.store.find(&second.project, second.name.as_ref().unwrap()).await.unwrap(), Some(second));
}

pub(super) async fn are_per_project(lab: &Lab) {
    let ours = lab.named(1, "a");
    let theirs = Sandbox { project: "theirs".parse().unwrap(), ..lab.named(1, "a") };
    lab.put(&ours).await;
    lab.put(&theirs).await;
    let name = ours.name.clone().unwrap();
    for sandbox in [ours, theirs] {
        assert_eq!(lab.store.find(&sandbox.project.clone(), &name).await.unwrap(), Some(sandbox));
    }
}

pub(super) async fn are_kept_through_changes(lab: &Lab) {
    let mut sandbox = lab.named(1, "a");
    lab.put(&sandbox).await;
    for _ in 0..3 {
        lab.put_next(&mut sandbox, |sandbox| sandbox.operations += 1).await;
    }
    let mut other = lab.named(2, "b");
    lab.put(&other).await;
    // Another one cannot come to it by a change either.
    other.version = 2;
    other.name.clone_from(&sandbox.name);
    assert_eq!(taken_by(lab.commit(&other).await), sandbox.id);
}

pub(super) async fn of_many_at_once_one_gets_it(lab: &Lab) {
    let sandboxes: Vec<Sandbox> = (0..50).map(|at| lab.named(at, "a")).collect();
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let answers = at_once(sandboxes.len(), |at| {
        let (store, sandbox) = (Arc::clone(&store), sandboxes[at].clone());
        async move { store.commit(epoch, change(&sandbox)).await }
    })
    .await;
    let winners: Vec<usize> = (0..answers.len()).filter(|at| answers[*at].is_ok()).collect();
    assert_eq!(winners.len(), 1);
    let winner = &sandboxes[winners[0]];
    for answer in answers.into_iter().filter(Result::is_err) {
        assert_eq!(taken_by(answer), winner.id);
    }
    assert_eq!(lab.lines().await.len(), 1);
}

pub(super) async fn are_found_living_first_then_newest(lab: &Lab) {
    let name = "a".parse().unwrap();
    let project = Project::default();
    assert_eq!(lab.store.find(&project, &name).await.unwrap(), None);
    let mut first = lab.named(10, "a");
    lab.put(&first).await;
    lab.put_next(&mut first, |first| first.phase = phase(PhaseName::Stopped)).await;
    assert_eq!(lab.store.find(&project, &name).await.unwrap().as_ref(), Some(&first));
    let mut second = lab.named(30, "a");
    lab.put(&second).await;
    lab.put_next(&mut second, |second| second.deleted = true).await;
    assert_eq!(lab.store.find(&project, &name).await.unwrap().as_ref(), Some(&second));
    let living = lab.named(20, "a");
    lab.put(&living).await;
    assert_eq!(lab.store.find(&project, &name).await.unwrap().as_ref(), Some(&living));
    assert_eq!(lab.store.find(&"other".parse().unwrap(), &name).await.unwrap(), None);
}
