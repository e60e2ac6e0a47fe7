use std::sync::Arc;

use viv_core::lifecycle::{PhaseName, Sandbox};
use viv_core::limits::{ResourceLimits, UNLIMITED};

use super::Lab;
use super::lab::{at_once, change, everything, limited, phase};
use crate::error::StoreError;
use crate::record::{Change, Quota, Sums, SumsMax, Weights};

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

/// What nothing said counts as.
const UNSAID: Sums = Sums { cpu_millis: 1_000, memory_bytes: 100, disk_bytes: 10, processes: 5 };
/// And what is said to have no limit.
const UNLIMITED_SUMS: Sums = Sums { cpu_millis: 4_000, memory_bytes: 900, disk_bytes: 90, processes: 50 };

fn with(mut sandbox: Sandbox, limits: ResourceLimits) -> Sandbox {
    sandbox.spec.limits = limits;
    sandbox
}

fn memory(bytes: u64) -> ResourceLimits {
    ResourceLimits { memory_bytes: Some(bytes), ..ResourceLimits::default() }
}

fn summed(sandbox: &Sandbox, total_sums_max: SumsMax, project_sums_max: SumsMax) -> Change {
    let weights = Weights { unsaid: UNSAID, unlimited: UNLIMITED_SUMS };
    let quota = Quota { total_sums_max, project_sums_max, weights, ..Quota::of(100, 100) };
    Change { quota: Some(quota), ..change(sandbox) }
}

pub(super) async fn l18_add_up_limits(lab: &Lab) {
    lab.put(&with(lab.new_sandbox(1), memory(300))).await;
    lab.put(&elsewhere(lab.new_sandbox(2))).await;
    let over = Sandbox { phase: phase(PhaseName::Stopped), ..with(lab.new_sandbox(3), memory(UNLIMITED)) };
    lab.put(&over).await;
    let bytes = |max| SumsMax { memory_bytes: Some(max), ..SumsMax::default() };
    let try_one = async |sandbox: &Sandbox, total: SumsMax, project: SumsMax| {
        lab.store.commit(lab.epoch, summed(sandbox, total, project)).await
    };
    let new = with(lab.new_sandbox(4), memory(100));
    let refused = try_one(&new, bytes(499), SumsMax::default()).await;
    assert!(
        matches!(refused, Err(StoreError::Quota { limit: "memory_bytes", used: 400, max: 499 })),
        "what is there is told, not what was asked for: {refused:?}"
    );
    let refused = try_one(&new, bytes(500), bytes(399)).await;
    let limit = "memory_bytes_per_project";
    assert!(
        matches!(refused, Err(StoreError::Quota { limit: told, used: 300, max: 399 }) if told == limit),
        "{refused:?}"
    );
    let all = with(lab.new_sandbox(5), memory(UNLIMITED));
    let refused = try_one(&all, bytes(1_299), SumsMax::default()).await;
    assert!(matches!(refused, Err(StoreError::Quota { used: 400, max: 1_299, .. })), "{refused:?}");
    let parts = [
        ("cpu_millis", SumsMax { cpu_millis: Some(2_999), ..SumsMax::default() }, 2_000),
        ("disk_bytes", SumsMax { disk_bytes: Some(29), ..SumsMax::default() }, 20),
        ("processes", SumsMax { processes: Some(14), ..SumsMax::default() }, 10),
    ];
    for (limit, max, there) in parts {
        let refused = try_one(&new, max, SumsMax::default()).await;
        assert!(
            matches!(refused, Err(StoreError::Quota { limit: told, used, .. }) if told == limit && used == there),
            "{limit}: {refused:?}"
        );
    }
    try_one(&new, bytes(500), bytes(400)).await.expect("it just fits");
    // It does not count itself, and may not grow beyond the rest.
    let next = Sandbox { version: 2, ..with(new.clone(), memory(101)) };
    let refused = try_one(&next, bytes(500), SumsMax::default()).await;
    assert!(matches!(refused, Err(StoreError::Quota { used: 400, max: 500, .. })), "{refused:?}");
    try_one(&Sandbox { version: 2, ..new }, bytes(500), bytes(400)).await.expect("as it was");
}
