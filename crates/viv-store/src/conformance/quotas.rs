use std::sync::Arc;

use viv_core::lifecycle::{PhaseName, Sandbox};

use super::Lab;
use super::lab::{at_once, everything, limited, phase};
use crate::error::StoreError;
use crate::record::Quota;

fn elsewhere(sandbox: Sandbox) -> Sandbox {
    Sandbox { project: "elsewhere".parse().unwrap(), ..sandbox }
}

pub(super) async fn l18_refuse_with_limit_and_use(lab: &Lab) {
    lab.put(&lab.new_sandbox(1)).await;
    lab.put(&elsewhere(lab.new_sandbox(1))).await;
    lab.put(&elsewhere(lab.new_sandbox(1))).await;
    let refused = lab.store.commit(lab.epoch, limited(&lab.new_sandbox(2), 3, 10)).await;
    assert!(matches!(refused, Err(StoreError::Quota { limit: Quota::TOTAL, used: 3, max: 3 })), "{refused:?}");
    let refused = lab.store.commit(lab.epoch, limited(&elsewhere(lab.new_sandbox(2)), 10, 2)).await;
    assert!(matches!(refused, Err(StoreError::Quota { limit: Quota::PROJECT, used: 2, max: 2 })), "{refused:?}");
    lab.store.commit(lab.epoch, limited(&lab.new_sandbox(2), 4, 2)).await.expect("there is room for one");
}

pub(super) async fn l18_count_what_may_live(lab: &Lab) {
    let mut sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    for name in PhaseName::ALL {
        for deleted in [false, true] {
            lab.put_next(&mut sandbox, |sandbox| {
                sandbox.phase = phase(name);
                sandbox.deleted = deleted;
            })
            .await;
            let mut other = lab.new_sandbox(2);
            let answer = lab.store.commit(lab.epoch, limited(&other, 1, 1)).await;
            if PhaseName::MAY_LIVE.contains(&name) {
                assert!(matches!(answer, Err(StoreError::Quota { used: 1, .. })), "{name:?}: {answer:?}");
                continue;
            }
            answer.expect("what cannot live counts for nothing");
            lab.put_next(&mut other, |other| other.phase = phase(PhaseName::Stopped)).await;
        }
    }
}

pub(super) async fn l18_hold_for_many_at_once(lab: &Lab) {
    let sandboxes: Vec<Sandbox> =
        (0..60).map(|at| if at % 2 == 0 { lab.new_sandbox(at) } else { elsewhere(lab.new_sandbox(at)) }).collect();
    let (store, epoch) = (Arc::clone(&lab.store), lab.epoch);
    let answers = at_once(sandboxes.len(), |at| {
        let (store, sandbox) = (Arc::clone(&store), sandboxes[at].clone());
        async move { store.commit(epoch, limited(&sandbox, 12, 9)).await }
    })
    .await;
    for answer in &answers {
        assert!(matches!(answer, Ok(_) | Err(StoreError::Quota { .. })), "{answer:?}");
    }
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 12);
    let there = lab.store.list(&everything()).await.unwrap().items;
    assert_eq!(there.len(), 12);
    let ours = there.iter().filter(|sandbox| sandbox.project.as_str() == "elsewhere").count();
    assert!((3..=9).contains(&ours), "{ours} of 12 are in one project");
}

pub(super) async fn l18_do_not_hold_back_changes(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.store.commit(lab.epoch, limited(&sandbox, 1, 1)).await.unwrap();
    let next = Sandbox { version: 2, ..sandbox };
    lab.store.commit(lab.epoch, limited(&next, 1, 1)).await.expect("it does not count itself");
    let over = Sandbox { phase: phase(PhaseName::Stopped), ..lab.new_sandbox(2) };
    lab.store.commit(lab.epoch, limited(&over, 1, 1)).await.expect("what cannot live takes no room");
}
