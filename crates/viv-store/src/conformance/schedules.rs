use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{Actor, PhaseName, Sandbox};
use viv_core::schedule::{MissedRuns, RunOutcome, Schedule};
use viv_core::{SandboxId, ScheduleId};

use super::Lab;
use super::lab::{MANY, note, phase};
use crate::error::StoreError;
use crate::record::ScheduleQuery;

const MAX: u64 = 3;

/// One that is due at this time; its id tells its place.
pub(super) fn schedule(sandbox: &Sandbox, at: u8, next_at_ms: Option<u64>) -> Schedule {
    Schedule {
        id: ScheduleId::from_bytes([at; 16]),
        project: sandbox.project.clone(),
        sandbox: sandbox.id.clone(),
        version: 1,
        cron: "*/5 * * * *".to_owned(),
        zone: "Europe/Berlin".to_owned(),
        command: ExecSpec { argv: vec!["true".to_owned()], limit_ms: Some(1), ..ExecSpec::default() },
        missed: MissedRuns::Once,
        enabled: next_at_ms.is_some(),
        made_by: Actor::part("suite"),
        made_at_ms: 1,
        next_at_ms,
        waiting: Vec::new(),
        run: None,
        last: None,
        runs: 0,
        skipped: 0,
    }
}

async fn put(lab: &Lab, schedule: &Schedule) -> Result<(), StoreError> {
    lab.store.put_schedule(lab.epoch, schedule.clone(), vec![note(1, "schedule")], MAX).await
}

async fn of(lab: &Lab, sandbox: &SandboxId) -> Vec<Schedule> {
    let query = ScheduleQuery { sandbox: Some(sandbox.clone()), limit: MANY, ..ScheduleQuery::default() };
    lab.store.schedules(&query).await.unwrap().items
}

pub(super) async fn l17_are_kept_changed_and_removed(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let mut kept = schedule(&sandbox, 1, Some(100));
    put(lab, &kept).await.unwrap();
    assert_eq!(lab.store.schedule(&kept.id).await.unwrap().as_ref(), Some(&kept));
    assert!(lab.store.running_schedules().await.unwrap().is_empty());
    kept.version = 2;
    assert!(kept.ask(50));
    put(lab, &kept).await.unwrap();
    assert_eq!(lab.store.schedule(&kept.id).await.unwrap().as_ref(), Some(&kept));
    assert_eq!(lab.store.running_schedules().await.unwrap(), [kept.id.clone()]);
    kept.version = 3;
    kept.finish(RunOutcome::Exited { code: 7 }, 60);
    put(lab, &kept).await.unwrap();
    assert!(lab.store.running_schedules().await.unwrap().is_empty());
    assert_eq!(of(lab, &sandbox.id).await, std::slice::from_ref(&kept));
    assert!(lab.store.remove_schedule(lab.epoch, &kept.id, note(1, "removed")).await.unwrap());
    assert!(!lab.store.remove_schedule(lab.epoch, &kept.id, note(1, "again")).await.unwrap());
    assert_eq!(lab.store.schedule(&kept.id).await.unwrap(), None);
    assert_eq!(lab.lines().await.len(), 1 + 3 + 1);
}

pub(super) async fn l17_a_stale_version_conflicts(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    let first = schedule(&sandbox, 1, Some(100));
    put(lab, &first).await.unwrap();
    for version in [1, 3] {
        let refused = put(lab, &Schedule { version, ..first.clone() }).await;
        assert!(matches!(refused, Err(StoreError::Conflict { found: 1, .. })), "{refused:?}");
    }
    let unknown = Schedule { version: 2, ..schedule(&sandbox, 2, None) };
    assert!(matches!(put(lab, &unknown).await, Err(StoreError::Conflict { found: 0, .. })));
    assert!(put(lab, &Schedule { version: 0, ..unknown }).await.is_err());
    assert_eq!(of(lab, &sandbox.id).await, [first]);
}

pub(super) async fn l17_are_bounded_per_sandbox(lab: &Lab) {
    let (one, two) = (lab.new_sandbox(1), lab.new_sandbox(2));
    lab.put(&one).await;
    lab.put(&two).await;
    for at in 0..MAX as u8 {
        put(lab, &schedule(&one, at, None)).await.unwrap();
    }
    let refused = put(lab, &schedule(&one, 9, None)).await;
    let is_so = matches!(refused, Err(StoreError::Quota { limit: ScheduleQuery::LIMIT, used: MAX, max: MAX }));
    assert!(is_so, "{refused:?}");
    // Another one has its own, and what is there can be changed.
    put(lab, &schedule(&two, 9, None)).await.unwrap();
    put(lab, &Schedule { version: 2, ..schedule(&one, 0, Some(1)) }).await.unwrap();
}

pub(super) async fn l17_are_listed_by_sandbox_and_project(lab: &Lab) {
    let (one, mut two) = (lab.new_sandbox(1), lab.new_sandbox(2));
    two.project = "other".parse().unwrap();
    lab.put(&one).await;
    lab.put(&two).await;
    for (at, sandbox) in [(3, &one), (1, &two), (2, &one), (0, &one)] {
        put(lab, &schedule(sandbox, at, None)).await.unwrap();
    }
    let ids = |all: &[Schedule]| -> Vec<ScheduleId> { all.iter().map(|found| found.id.clone()).collect() };
    let at = |all: &[u8]| -> Vec<ScheduleId> { all.iter().map(|at| ScheduleId::from_bytes([*at; 16])).collect() };
    let listed = async |query: ScheduleQuery| lab.store.schedules(&query).await.unwrap();
    let all = ScheduleQuery { limit: MANY, ..ScheduleQuery::default() };
    assert_eq!(ids(&listed(all.clone()).await.items), at(&[0, 1, 2, 3]));
    let of_one = ScheduleQuery { sandbox: Some(one.id.clone()), ..all.clone() };
    assert_eq!(ids(&listed(of_one.clone()).await.items), at(&[0, 2, 3]));
    let of_project = ScheduleQuery { project: Some(two.project.clone()), ..all.clone() };
    assert_eq!(ids(&listed(of_project).await.items), at(&[1]));
    let crossed = ScheduleQuery { project: Some(two.project.clone()), ..of_one.clone() };
    assert!(listed(crossed).await.items.is_empty());
    let first = listed(ScheduleQuery { limit: 2, ..of_one.clone() }).await;
    assert_eq!((ids(&first.items), first.next.clone()), (at(&[0, 2]), Some(ScheduleId::from_bytes([2; 16]))));
    let second = listed(ScheduleQuery { limit: 2, after: first.next, ..of_one }).await;
    assert_eq!((ids(&second.items), second.next), (at(&[3]), None));
}

pub(super) async fn l17_due_is_soonest_first(lab: &Lab) {
    let sandbox = lab.new_sandbox(1);
    lab.put(&sandbox).await;
    assert_eq!(lab.store.next_schedule_ms().await.unwrap(), None);
    for (at, next_at_ms) in [(1, Some(300)), (2, Some(100)), (3, None)] {
        put(lab, &schedule(&sandbox, at, next_at_ms)).await.unwrap();
    }
    let id = |at: u8| ScheduleId::from_bytes([at; 16]);
    assert_eq!(lab.store.next_schedule_ms().await.unwrap(), Some(100));
    assert_eq!(lab.store.due_schedules(99, MANY).await.unwrap(), []);
    assert_eq!(lab.store.due_schedules(100, MANY).await.unwrap(), [id(2)]);
    assert_eq!(lab.store.due_schedules(500, MANY).await.unwrap(), [id(2), id(1)]);
    assert_eq!(lab.store.due_schedules(500, 1).await.unwrap(), [id(2)]);
    // What waits for its turn is due at once, unless something is under way.
    let mut waits = Schedule { version: 2, waiting: vec![50], ..schedule(&sandbox, 3, None) };
    put(lab, &waits).await.unwrap();
    assert_eq!(lab.store.next_schedule_ms().await.unwrap(), Some(0));
    waits.version = 3;
    waits.ask(1);
    put(lab, &waits).await.unwrap();
    assert_eq!(lab.store.next_schedule_ms().await.unwrap(), Some(100));
}

pub(super) async fn l17_who_is_gone_has_none(lab: &Lab) {
    let (mut deleted, mut stopped, other) = (lab.new_sandbox(1), lab.new_sandbox(2), lab.new_sandbox(3));
    for (at, sandbox) in [(1, &deleted), (2, &stopped), (3, &other)] {
        lab.put(sandbox).await;
        put(lab, &schedule(sandbox, at, Some(1))).await.unwrap();
    }
    lab.put_next(&mut deleted, |sandbox| sandbox.deleted = true).await;
    lab.put_next(&mut stopped, |sandbox| sandbox.phase = phase(PhaseName::Stopped)).await;
    assert_eq!(lab.store.due_schedules(9, MANY).await.unwrap(), [ScheduleId::from_bytes([3; 16])]);
    // And gets none: not one that is there no more, and no new one.
    for (at, sandbox) in [(1, &deleted), (2, &stopped), (4, &deleted)] {
        let refused = put(lab, &schedule(sandbox, at, Some(1))).await;
        assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
    }
    let nobody = lab.new_sandbox(4);
    assert!(matches!(put(lab, &schedule(&nobody, 5, None)).await, Err(StoreError::Conflict { .. })));
}
