//! Whoever is late is refused (L15, T5).

use viv_core::{FencingToken, Generation};

use super::lab::{Answer, Lab, TOKEN, assert_refused};
use super::mutations::{Kind, Material, assert_each, try_all};
use super::program::{self, Program};
use super::subject::Subject;
use crate::capability::Capability;
use crate::error::ProviderError;
use crate::instance::{InstanceState, SaveRequest};

/// Something for each kind of mutation to work on.
async fn material(subject: &Subject<'_>) -> Material {
    let execution = subject.start(&Program::Cat.spec()).await;
    let snapshot = subject.lab.fresh_snapshot();
    if subject.lab.can(Capability::SaveLive) {
        let request = SaveRequest { snapshot: snapshot.clone(), live: true, memory: false };
        subject.lab.provider().save(&subject.mutation(), &subject.sandbox, &request).await.must("save");
    }
    let source = subject.lab.subject().await.instance();
    Material { execution, snapshot, source }
}

/// An instance of the second generation, so that there is an older one.
async fn second_generation(lab: &Lab) -> Subject<'_> {
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation(2), TOKEN);
    subject.create(&lab.spec()).await;
    subject
}

/// Nothing that was refused may have left a mark.
async fn assert_unharmed(subject: &Subject<'_>, material: &Material) {
    assert_eq!(subject.state().await, InstanceState::Running);
    assert!(!subject.status(&material.execution).await.state.is_final(), "a refused call ended an execution");
    assert!(subject.is_there("/tmp").await, "a refused call removed a directory");
    assert!(!subject.is_there("/tmp/late").await, "a refused call wrote a file");
    assert!(!subject.is_there("/tmp/late-dir").await, "a refused call made a directory");
    let executions = subject.lab.provider().executions(&subject.instance()).await.must("executions");
    assert_eq!(executions.len(), 1, "a refused call started something");
    assert_eq!(executions[0].stdin_bytes, 0, "a refused call gave input");
}

pub(super) async fn an_older_token_is_refused_for_every_mutation(lab: &Lab) {
    let subject = lab.subject().await;
    let material = material(&subject).await;
    let older = FencingToken(TOKEN.0 - 1);
    let tried = try_all(&subject, &material, || lab.mutation(subject.generation, older)).await;
    assert_each(
        &subject,
        tried,
        |one| matches!(one.result, Err(ProviderError::Fenced { presented, highest }) if presented == older && highest == TOKEN),
    );
    assert_unharmed(&subject, &material).await;
}

pub(super) async fn a_newer_token_is_taken(lab: &Lab) {
    let subject = lab.subject().await;
    let newer = FencingToken(TOKEN.0 + 5);
    let mutation = lab.mutation(subject.generation, newer);
    lab.provider().file_mkdir(&mutation, &subject.sandbox, "/tmp/newer").await.must("mkdir with a newer token");
    // From now on, the token that made the instance is an old one.
    assert_refused!(subject.mkdir("/tmp/older").await, ProviderError::Fenced { highest, .. } if highest == newer);
    assert!(!subject.is_there("/tmp/older").await);
}

pub(super) async fn an_old_generation_is_refused_for_every_mutation(lab: &Lab) {
    let subject = second_generation(lab).await;
    let material = material(&subject).await;
    let old = Generation(1);
    let tried = try_all(&subject, &material, || lab.mutation(old, TOKEN)).await;
    assert_each(&subject, tried, |one| match (one.kind, &one.result) {
        (Kind::Aside, result) => result.is_ok(),
        (Kind::Make | Kind::End | Kind::Change, Err(ProviderError::StaleGeneration { asked, current })) => {
            *asked == old && *current == subject.generation
        }
        (Kind::Make | Kind::End | Kind::Change, _) => false,
    });
    assert_unharmed(&subject, &material).await;
}

pub(super) async fn an_old_generation_is_refused_for_every_read(lab: &Lab) {
    let subject = second_generation(lab).await;
    let execution = subject.start(&program::echo("new")).await;
    let mut old = subject.instance();
    old.generation = Generation(1);
    let provider = lab.provider();
    let mut read = vec![
        provider.wait_end(&old).await.map(drop),
        provider.execution(&old, &execution).await.map(drop),
        provider.executions(&old).await.map(drop),
        provider.attach(&old, &execution, 0, false).await.map(drop),
        provider.file_read(&old, "/etc", 0, None).await.map(drop),
        provider.file_stat(&old, "/tmp").await.map(drop),
        provider.file_list(&old, "/tmp", 1).await.map(drop),
        provider.archive_get(&old, "/tmp").await.map(drop),
        provider.identity(&old).await.map(drop),
        provider.whereabouts(&old).await.map(drop),
        provider.log_tail(&old, 1024).await.map(drop),
    ];
    if lab.can(Capability::Requests) {
        read.push(provider.requests(&old).await.map(drop));
    }
    if lab.can(Capability::Usage) {
        read.push(provider.disk_usage(&old).await.map(drop));
    }
    for (number, result) in read.into_iter().enumerate() {
        match result {
            Err(ProviderError::StaleGeneration { asked, current })
                if asked == old.generation && current == subject.generation => {}
            other => panic!("read {number} of an old generation answered {other:?}"),
        }
    }
}

pub(super) async fn mutations_of_what_never_was_are_absent(lab: &Lab) {
    let source = lab.subject().await;
    let material = material(&source).await;
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
    // Making it would succeed, so only the rest is asked for here.
    let missing = lab.provider().file_mkdir(&subject.mutation(), &subject.sandbox, "/tmp/x").await;
    assert_refused!(missing, ProviderError::Absent);
    assert_refused!(subject.execute(&material.execution, &program::sleep()).await, ProviderError::Absent);
    let cancelled = lab.provider().cancel(&subject.mutation(), &subject.sandbox, &material.execution).await;
    assert_refused!(cancelled, ProviderError::Absent);
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn mutations_after_destroy_are_absent(lab: &Lab) {
    let subject = lab.subject().await;
    let material = material(&subject).await;
    subject.destroy().await;
    let tried = try_all(&subject, &material, || subject.mutation()).await;
    assert_each(&subject, tried, |one| match one.kind {
        Kind::Make => matches!(one.result, Err(ProviderError::StaleGeneration { .. })),
        Kind::End | Kind::Aside => one.result.is_ok(),
        Kind::Change => matches!(one.result, Err(ProviderError::Absent)),
    });
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn a_late_create_is_refused_after_a_newer_one(lab: &Lab) {
    let old = lab.subject().await;
    old.destroy().await;
    let new = old.next();
    new.create(&lab.spec()).await;
    // A replica that was away comes back with what it meant to do: old token, old or new generation.
    let (owner, spec) = (lab.owner(), lab.spec());
    for generation in [old.generation, new.generation, new.generation.next()] {
        let late = lab.provider().create(&lab.mutation(generation, old.token), &old.sandbox, &owner, &spec).await;
        assert_refused!(late, ProviderError::Fenced { .. });
    }
    assert_eq!(new.state().await, InstanceState::Running);
}

pub(super) async fn a_late_destroy_is_refused_after_a_newer_create(lab: &Lab) {
    let old = lab.subject().await;
    old.destroy().await;
    let new = old.next();
    new.create(&lab.spec()).await;
    for generation in [old.generation, new.generation] {
        let late = lab.provider().destroy(&lab.mutation(generation, old.token), &old.sandbox).await;
        assert_refused!(late, ProviderError::Fenced { .. });
    }
    let stale = lab.provider().destroy(&lab.mutation(old.generation, new.token), &old.sandbox).await;
    assert_refused!(stale, ProviderError::StaleGeneration { .. });
    assert_eq!(new.state().await, InstanceState::Running);
}

pub(super) async fn a_destroyed_generation_is_not_made_again(lab: &Lab) {
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
    let (mutation, owner, spec) = (subject.mutation(), lab.owner(), lab.spec());
    lab.provider().create(&mutation, &subject.sandbox, &owner, &spec).await.must("create");
    subject.destroy().await;
    for late in [mutation, subject.mutation()] {
        let made = lab.provider().create(&late, &subject.sandbox, &owner, &spec).await;
        assert_refused!(made, ProviderError::StaleGeneration { .. });
    }
    assert_eq!(subject.state().await, InstanceState::Absent);
}

pub(super) async fn a_destroy_of_what_never_was_fences_its_create(lab: &Lab) {
    let subject = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
    // A create whose answer was lost may still be on its way when its instance is given up.
    let (late, owner, spec) = (subject.mutation(), lab.owner(), lab.spec());
    subject.destroy().await;
    let made = lab.provider().create(&late, &subject.sandbox, &owner, &spec).await;
    assert_refused!(made, ProviderError::StaleGeneration { .. });
    assert_eq!(subject.state().await, InstanceState::Absent);
    subject.next().create(&spec).await;
}
