use std::collections::BTreeMap;

use viv_core::exec::ExecSpec;
use viv_core::lifecycle::Actor;
use viv_core::task::{Came, NewTask, Task, TaskEvent, TaskLimits, TaskState, TaskStepped, step};
use viv_core::{Generation, SandboxId, TaskId};

use super::Lab;
use super::lab::{MANY, note};
use crate::error::StoreError;
use crate::task::{TaskOutput, TaskQuery};

/// One in a sandbox of its own, made at this time.
pub(super) fn task(number: u8, at_ms: u64) -> Task {
    let new = NewTask {
        id: TaskId::from_bytes([number; 16]),
        project: "default".parse().unwrap(),
        sandbox: None,
        make: None,
        files: Vec::new(),
        source: None,
        steps: vec![ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() }],
        limits: TaskLimits::default(),
        effects: Vec::new(),
        credentials: [("TOKEN".to_owned(), "secret".to_owned())].into(),
        keep_alive: true,
        by: Actor::part("suite"),
        body_hash: None,
    };
    Task::new(new, at_ms)
}

fn next(task: &Task, event: &TaskEvent) -> Task {
    match step(task, event, 50) {
        TaskStepped::Accepted(next) => *next,
        other => panic!("{event:?}: {other:?}"),
    }
}

async fn put(lab: &Lab, task: &Task) -> Result<(), StoreError> {
    lab.store.put_task(lab.epoch, task.clone(), vec![note(1, "task")]).await
}

pub(super) async fn k1_are_kept_and_changed_with_a_line(lab: &Lab) {
    let queued = task(1, 10);
    put(lab, &queued).await.unwrap();
    assert_eq!(lab.store.task(&queued.id).await.unwrap().as_ref(), Some(&queued));
    assert_eq!(lab.store.living_tasks().await.unwrap(), std::slice::from_ref(&queued.id));
    let both = [SandboxId::from_bytes([7; 16]), queued.sandbox.clone()];
    assert_eq!(lab.store.tasks_at_work(&both).await.unwrap(), BTreeMap::new());
    let preparing = next(&queued, &TaskEvent::TakenUp);
    put(lab, &preparing).await.unwrap();
    let at_work = BTreeMap::from([(queued.sandbox.clone(), queued.id.clone())]);
    assert_eq!(lab.store.tasks_at_work(&both).await.unwrap(), at_work);
    let stopped = next(&preparing, &TaskEvent::Stop { by: Actor::part("suite") });
    put(lab, &stopped).await.unwrap();
    let living = lab.store.living_tasks().await.unwrap();
    assert_eq!(living, std::slice::from_ref(&queued.id), "it is to end, and has not yet");
    let over = next(&stopped, &TaskEvent::Confirmed);
    put(lab, &over).await.unwrap();
    assert_eq!(lab.store.task(&queued.id).await.unwrap(), Some(over));
    assert!(lab.store.living_tasks().await.unwrap().is_empty());
    assert_eq!(lab.store.task(&TaskId::from_bytes([9; 16])).await.unwrap(), None);
    assert_eq!(lab.lines().await.len(), 4);
}

pub(super) async fn k5_of_two_changes_at_once_one_wins(lab: &Lab) {
    let entered = TaskEvent::Entered { generation: Generation(1), came: Came::Made };
    let start = [TaskEvent::TakenUp, entered, TaskEvent::Prepared];
    let mut task = task(1, 10);
    put(lab, &task).await.unwrap();
    for event in &start {
        task = next(&task, event);
        put(lab, &task).await.unwrap();
    }
    let stop = next(&task, &TaskEvent::Stop { by: Actor::part("suite") });
    let output = next(&task, &TaskEvent::Output);
    let (one, other) = tokio::join!(put(lab, &stop), put(lab, &output));
    assert!(one.is_ok() != other.is_ok(), "{one:?} {other:?}");
    let lost = one.err().or(other.err());
    assert!(matches!(lost, Some(StoreError::TaskConflict { found: 5, expected: 4, .. })), "{lost:?}");
    for version in [1, 7] {
        let refused = put(lab, &Task { version, ..task.clone() }).await;
        assert!(matches!(refused, Err(StoreError::TaskConflict { .. })), "{refused:?}");
    }
    assert!(put(lab, &Task { version: 0, ..task }).await.is_err());
}

pub(super) async fn k1_one_of_a_sandbox_is_at_work(lab: &Lab) {
    let sandbox = SandboxId::from_bytes([3; 16]);
    let (first, second) = (Task { sandbox: sandbox.clone(), ..task(1, 1) }, Task { sandbox, ..task(2, 2) });
    put(lab, &first).await.unwrap();
    put(lab, &second).await.unwrap();
    let (first, second) = (next(&first, &TaskEvent::TakenUp), next(&second, &TaskEvent::TakenUp));
    put(lab, &first).await.unwrap();
    let refused = put(lab, &second).await;
    assert!(matches!(&refused, Err(StoreError::TaskBusy { by, .. }) if *by == first.id), "{refused:?}");
    let stopped = next(&first, &TaskEvent::Stop { by: Actor::part("suite") });
    put(lab, &stopped).await.unwrap();
    put(lab, &next(&stopped, &TaskEvent::Confirmed)).await.unwrap();
    put(lab, &second).await.unwrap();
}

pub(super) async fn k1_are_listed_newest_first_by_every_filter(lab: &Lab) {
    let other = Task { project: "other".parse().unwrap(), ..task(3, 30) };
    for task in [task(1, 10), task(2, 20), other.clone(), task(4, 20)] {
        put(lab, &task).await.unwrap();
    }
    put(lab, &next(&task(1, 10), &TaskEvent::TakenUp)).await.unwrap();
    let all = TaskQuery { limit: MANY, ..TaskQuery::default() };
    let id = |number: u8| TaskId::from_bytes([number; 16]);
    let listed = async |query: TaskQuery| -> Vec<TaskId> {
        lab.store.tasks(&query).await.unwrap().items.into_iter().map(|task| task.id).collect()
    };
    assert_eq!(listed(all.clone()).await, [id(3), id(4), id(2), id(1)]);
    assert_eq!(listed(TaskQuery { project: Some(other.project.clone()), ..all.clone() }).await, [id(3)]);
    assert_eq!(listed(TaskQuery { states: vec![TaskState::Preparing], ..all.clone() }).await, [id(1)]);
    let of = TaskQuery { sandbox: Some(other.sandbox.clone()), ..all.clone() };
    assert_eq!(listed(of.clone()).await, [id(3)]);
    assert!(listed(TaskQuery { project: Some("default".parse().unwrap()), ..of }).await.is_empty());
    let first = lab.store.tasks(&TaskQuery { limit: 3, ..all.clone() }).await.unwrap();
    assert_eq!(first.next, Some((20, id(2))));
    assert_eq!(listed(TaskQuery { after: first.next, ..all }).await, [id(1)]);
}

pub(super) async fn k7_keep_the_end_of_their_output(lab: &Lab) {
    let row = task(1, 10);
    put(lab, &row).await.unwrap();
    let execution = row.execution_of(Some(0));
    let kept = TaskOutput { task: row.id.clone(), execution: execution.clone(), offset: 7, data: vec![0, 255, 10] };
    lab.store.keep_task_output(lab.epoch, kept.clone()).await.unwrap();
    assert_eq!(lab.store.task_output(&row.id, &execution).await.unwrap(), Some(kept.clone()));
    let more = TaskOutput { data: b"more".to_vec(), ..kept.clone() };
    lab.store.keep_task_output(lab.epoch, more.clone()).await.unwrap();
    assert_eq!(lab.store.task_output(&row.id, &execution).await.unwrap(), Some(more));
    // Of nobody there is nothing.
    let nobody = TaskOutput { task: TaskId::from_bytes([9; 16]), ..kept };
    lab.store.keep_task_output(lab.epoch, nobody.clone()).await.unwrap();
    assert_eq!(lab.store.task_output(&nobody.task, &execution).await.unwrap(), None);
}

pub(super) async fn j9_are_forgotten_when_they_are_long_over(lab: &Lab) {
    let row = task(1, 10);
    put(lab, &row).await.unwrap();
    put(lab, &task(2, 10)).await.unwrap();
    let stopped = next(&row, &TaskEvent::Stop { by: Actor::part("suite") });
    put(lab, &stopped).await.unwrap();
    put(lab, &next(&stopped, &TaskEvent::Confirmed)).await.unwrap();
    let execution = row.execution_of(Some(0));
    let kept = TaskOutput { task: row.id.clone(), execution: execution.clone(), offset: 0, data: vec![1] };
    lab.store.keep_task_output(lab.epoch, kept).await.unwrap();
    lab.store.retain(lab.epoch, 50, MANY).await.unwrap();
    assert!(lab.store.task(&row.id).await.unwrap().is_some());
    while lab.store.retain(lab.epoch, 51, MANY).await.unwrap() > 0 {}
    assert_eq!(lab.store.task(&row.id).await.unwrap(), None);
    assert_eq!(lab.store.task_output(&row.id, &execution).await.unwrap(), None);
    assert!(lab.store.task(&task(2, 10).id).await.unwrap().is_some(), "one that lives stays");
}
