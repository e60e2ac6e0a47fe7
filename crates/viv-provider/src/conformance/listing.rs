//! Finding what is there (J1, T7).

use std::collections::BTreeSet;

use viv_core::{EndCause, Generation};

use super::lab::{Answer, Lab, SOON_MS, TOKEN};
use super::subject::Subject;
use crate::instance::InstanceState;

/// Long enough to be made and seen, short enough to wait for.
const SHORT_LIFE_MS: u64 = 2_000;

pub(super) async fn shows_what_lives_with_its_labels(lab: &Lab) {
    let mut spec = lab.spec();
    spec.labels.insert("purpose".to_owned(), "conformance".to_owned());
    let subject = lab.subject_of(&spec).await;
    let listed = lab.list_all(&lab.owner(), None).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].instance, subject.instance());
    assert_eq!(listed[0].owner, lab.owner());
    assert_eq!(listed[0].state, InstanceState::Running);
    assert_eq!(listed[0].labels, spec.labels);
}

pub(super) async fn pages_show_each_instance_once(lab: &Lab) {
    let mut made = BTreeSet::new();
    for _ in 0..3 {
        made.insert(lab.subject().await.instance());
    }
    for limit in [1, 2, 3, 100] {
        let listed = lab.list_all(&lab.owner(), Some(limit)).await;
        assert_eq!(listed.len(), made.len(), "by pages of {limit}");
        let seen: BTreeSet<_> = listed.into_iter().map(|one| one.instance).collect();
        assert_eq!(seen, made, "by pages of {limit}");
    }
}

pub(super) async fn hides_other_owners(lab: &Lab) {
    let ours = lab.subject().await;
    let theirs = Subject::new(lab, lab.fresh_sandbox(), Generation::FIRST, TOKEN);
    let other = lab.other_owner();
    lab.provider().create(&theirs.mutation(), &theirs.sandbox, &other, &lab.spec()).await.must("create");
    let seen = |listed: Vec<crate::instance::Listed>| listed.into_iter().map(|one| one.instance).collect::<Vec<_>>();
    assert_eq!(seen(lab.list_all(&lab.owner(), None).await), [ours.instance()]);
    assert_eq!(seen(lab.list_all(&other, None).await), [theirs.instance()]);
}

pub(super) async fn shows_the_ended_with_its_cause(lab: &Lab) {
    if !lab.can_expire().await {
        return;
    }
    let subject = lab.subject_for(SHORT_LIFE_MS).await;
    subject.until_ended(SOON_MS).await;
    let listed = lab.list_all(&lab.owner(), None).await;
    assert_eq!(listed.len(), 1);
    match &listed[0].state {
        InstanceState::Ended(ended) => assert_eq!(ended.cause, EndCause::Expired),
        other => panic!("listed as {other}"),
    }
}

pub(super) async fn forgets_the_destroyed(lab: &Lab) {
    let (gone, kept) = (lab.subject().await, lab.subject().await);
    gone.destroy().await;
    let listed = lab.list_all(&lab.owner(), None).await;
    assert_eq!(listed.into_iter().map(|one| one.instance).collect::<Vec<_>>(), [kept.instance()]);
}
