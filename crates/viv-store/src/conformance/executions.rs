use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::execution::{Execution, Queued, Stage};
use viv_core::lifecycle::{Actor, HIBERNATED, PhaseName, Sandbox};
use viv_core::{ExecutionId, SandboxId};

use super::Lab;
use super::lab::{MANY, at_once, phase};
use crate::error::StoreError;
use crate::execution::{EXECUTIONS_KEPT_MAX, ExecutionQuery, KeptBytes};

const MAX: u64 = 3;

fn id(at: u64) -> ExecutionId {
    format!("exe_{at:08}").parse().unwrap()
}

/// One that was asked for at this time, and stands so.
pub(super) fn started(sandbox: &Sandbox, at: u64, state: ExecState) -> Execution {
    let spec = ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() };
    let ended_at_ms = state.is_final().then_some(at + 1);
    let status = ExecStatus {
        id: id(at),
        state,
        started_at_ms: at,
        ended_at_ms,
        output_bytes: 0,
        stdin_bytes: 0,
        pid: None,
        argv: spec.argv.clone(),
        detached: false,
    };
    Execution::asked(
        id(at),
        sandbox.into(),
        &spec,
        Actor::part("suite"),
        at,
        Stage::Started { status, concluded: false },
    )
}

fn waiting(sandbox: &Sandbox, at: u64) -> Execution {
    let env = [("SECRET".to_owned(), "x".to_owned())].into();
    let spec = ExecSpec { argv: vec!["true".to_owned()], env, ..ExecSpec::default() };
    let queued = Queued { spec: Box::new(spec.clone()), until_ms: at + 99, running_max: None, starting_in: None };
    Execution::asked(id(at), sandbox.into(), &spec, Actor::part("suite"), at, Stage::Queued(queued))
}

async fn ready(lab: &Lab) -> Sandbox {
    let sandbox = Sandbox { phase: phase(PhaseName::Ready), ..lab.new_sandbox(1) };
    lab.put(&sandbox).await;
    sandbox
}

async fn state(lab: &Lab, sandbox: &SandboxId, at: u64) -> Option<ExecState> {
    let row = lab.store.execution(sandbox, &id(at)).await.unwrap();
    row.and_then(|row| row.status().map(|status| status.state.clone()))
}

async fn listed(lab: &Lab, query: &ExecutionQuery) -> Vec<ExecutionId> {
    lab.store.executions(query).await.unwrap().items.into_iter().map(|row| row.id).collect()
}

pub(super) async fn x1_are_noted_and_an_end_stays(lab: &Lab) {
    let sandbox = ready(lab).await;
    let running = started(&sandbox, 1, ExecState::Running);
    lab.store.note_executions(lab.epoch, vec![running.clone()]).await.unwrap();
    assert_eq!(lab.store.execution(&sandbox.id, &id(1)).await.unwrap().as_ref(), Some(&running));
    let ended = started(&sandbox, 1, ExecState::Exited { code: 7 });
    // What comes late, and out of order, changes nothing.
    lab.store.note_executions(lab.epoch, vec![ended.clone(), running.clone()]).await.unwrap();
    lab.store.note_executions(lab.epoch, vec![started(&sandbox, 1, ExecState::Cancelled)]).await.unwrap();
    let found = lab.store.execution(&sandbox.id, &id(1)).await.unwrap().unwrap();
    assert_eq!((found.version, found.stage), (2, ended.stage));
    let nobody = lab.new_sandbox(9);
    lab.store.note_executions(lab.epoch, vec![started(&nobody, 2, ExecState::Running)]).await.unwrap();
    assert_eq!(lab.store.execution(&nobody.id, &id(2)).await.unwrap(), None);
}

pub(super) async fn x5_end_in_the_transaction_that_ends_their_instance(lab: &Lab) {
    let mut sandbox = ready(lab).await;
    let other = ready(lab).await;
    let rows = vec![
        started(&sandbox, 1, ExecState::Running),
        started(&sandbox, 2, ExecState::Exited { code: 0 }),
        started(&other, 3, ExecState::Running),
    ];
    lab.store.note_executions(lab.epoch, rows).await.unwrap();
    lab.put_next(&mut sandbox, |sandbox| sandbox.phase = phase(PhaseName::Hibernating)).await;
    let lost = ExecState::Lost { cause: HIBERNATED.to_owned() };
    assert_eq!(state(lab, &sandbox.id, 1).await, Some(lost.clone()));
    assert_eq!(state(lab, &sandbox.id, 2).await, Some(ExecState::Exited { code: 0 }));
    assert_eq!(state(lab, &other.id, 3).await, Some(ExecState::Running));
    // One that was started before, and noted after, does not run either; who ran it may know better.
    lab.store.note_executions(lab.epoch, vec![started(&sandbox, 4, ExecState::Running)]).await.unwrap();
    assert_eq!(state(lab, &sandbox.id, 4).await, Some(lost));
    lab.store.note_executions(lab.epoch, vec![started(&sandbox, 4, ExecState::OomKilled)]).await.unwrap();
    assert_eq!(state(lab, &sandbox.id, 4).await, Some(ExecState::OomKilled));
    let open = ExecutionQuery { open: true, limit: MANY, ..ExecutionQuery::default() };
    assert_eq!(listed(lab, &open).await, [id(3)]);
}

pub(super) async fn x1_those_that_wait_are_bounded_and_go_with_their_sandbox(lab: &Lab) {
    let (mut sandbox, other) = (ready(lab).await, ready(lab).await);
    for at in 0..MAX {
        lab.store.put_execution(lab.epoch, waiting(&sandbox, at), MAX).await.unwrap();
    }
    let refused = lab.store.put_execution(lab.epoch, waiting(&sandbox, 9), MAX).await;
    let limit = ExecutionQuery::QUEUED_LIMIT;
    assert!(matches!(refused, Err(StoreError::Quota { limit: found, used: MAX, max: MAX }) if found == limit));
    lab.store.put_execution(lab.epoch, waiting(&other, 9), MAX).await.unwrap();
    // One that was started makes room.
    let first = Execution { version: 2, ..started(&sandbox, 0, ExecState::Running) };
    lab.store.put_execution(lab.epoch, first, MAX).await.unwrap();
    lab.store.put_execution(lab.epoch, waiting(&sandbox, 9), MAX).await.unwrap();
    let queued = ExecutionQuery { queued: true, sandbox: Some(sandbox.id.clone()), limit: MANY, ..Default::default() };
    assert_eq!(listed(lab, &queued).await, [id(9), id(2), id(1)]);
    lab.put_next(&mut sandbox, |sandbox| sandbox.deleted = true).await;
    assert!(listed(lab, &queued).await.is_empty());
    assert!(matches!(state(lab, &sandbox.id, 1).await, Some(ExecState::Failed { .. })));
    let refused = lab.store.put_execution(lab.epoch, waiting(&sandbox, 10), MAX).await;
    assert!(matches!(refused, Err(StoreError::Conflict { .. })), "{refused:?}");
}

pub(super) async fn x1_of_many_changes_at_once_one_wins(lab: &Lab) {
    let sandbox = ready(lab).await;
    lab.store.put_execution(lab.epoch, waiting(&sandbox, 1), MAX).await.unwrap();
    let answers = at_once(8, |_| {
        let (store, epoch) = (lab.store.clone(), lab.epoch);
        let row = Execution { version: 2, ..started(&sandbox, 1, ExecState::Cancelled) };
        async move { store.put_execution(epoch, row, MAX).await.is_ok() }
    });
    assert_eq!(answers.await.into_iter().filter(|won| *won).count(), 1);
}

pub(super) async fn are_listed_newest_first_by_every_filter(lab: &Lab) {
    let one = ready(lab).await;
    let two = Sandbox { phase: phase(PhaseName::Ready), project: "other".parse().unwrap(), ..lab.new_sandbox(2) };
    lab.put(&two).await;
    let mut rows = Vec::new();
    for (at, sandbox) in [(5, &one), (1, &two), (3, &one), (4, &one)] {
        rows.push(started(sandbox, at, if at == 3 { ExecState::Running } else { ExecState::Cancelled }));
    }
    lab.store.note_executions(lab.epoch, rows).await.unwrap();
    let all = ExecutionQuery { limit: MANY, ..ExecutionQuery::default() };
    assert_eq!(listed(lab, &all).await, [id(5), id(4), id(3), id(1)]);
    let of_two = ExecutionQuery { project: Some(two.project.clone()), ..all.clone() };
    assert_eq!(listed(lab, &of_two).await, [id(1)]);
    let of_one = ExecutionQuery { sandbox: Some(one.id.clone()), ..all.clone() };
    assert_eq!(listed(lab, &of_one).await, [id(5), id(4), id(3)]);
    let crossed = ExecutionQuery { project: Some(two.project.clone()), ..of_one.clone() };
    assert!(listed(lab, &crossed).await.is_empty());
    assert_eq!(listed(lab, &ExecutionQuery { open: true, ..all.clone() }).await, [id(3)]);
    let first = lab.store.executions(&ExecutionQuery { limit: 3, ..all.clone() }).await.unwrap();
    assert_eq!(first.items.len(), 3);
    let second = lab.store.executions(&ExecutionQuery { after: first.next, ..all.clone() }).await.unwrap();
    assert_eq!((second.items.len(), second.items[0].id.clone(), second.next), (1, id(1), None));
    let bad = ExecutionQuery { after: Some("nonsense".to_owned()), ..all };
    assert!(matches!(lab.store.executions(&bad).await, Err(StoreError::BadCursor)));
}

pub(super) async fn j9_the_oldest_that_ended_are_forgotten(lab: &Lab) {
    let sandbox = ready(lab).await;
    let mut rows = vec![started(&sandbox, 0, ExecState::Running)];
    rows.extend((1..EXECUTIONS_KEPT_MAX + 10).map(|at| started(&sandbox, at, ExecState::Cancelled)));
    lab.store.note_executions(lab.epoch, rows).await.unwrap();
    let all = ExecutionQuery { sandbox: Some(sandbox.id.clone()), limit: MANY, ..ExecutionQuery::default() };
    let kept = listed(lab, &all).await;
    assert_eq!(kept.len() as u64, EXECUTIONS_KEPT_MAX);
    assert_eq!((kept.last().cloned(), kept.contains(&id(10)), kept.contains(&id(11))), (Some(id(0)), false, true));
    // And by age: all that ended before a time, and none that is open.
    while lab.store.retain(lab.epoch, 1_000, 300).await.unwrap() > 0 {}
    assert_eq!(listed(lab, &all).await.len(), 12);
}

pub(super) async fn x2_outputs_are_kept_bounded_until_their_sandbox_is_over(lab: &Lab) {
    let mut sandbox = ready(lab).await;
    let kept = |at: u64, length: usize| KeptBytes { execution: id(at), kept_at_ms: at, bytes: vec![at as u8; length] };
    let put = |outputs| lab.store.put_outputs(lab.epoch, &sandbox.id, outputs, 100);
    put(vec![kept(1, 40), kept(2, 40)]).await.unwrap();
    assert_eq!(lab.store.output(&sandbox.id, &id(1)).await.unwrap(), Some(vec![1; 40]));
    put(vec![kept(3, 40)]).await.unwrap();
    assert_eq!(lab.store.output(&sandbox.id, &id(1)).await.unwrap(), None, "the oldest goes first");
    assert_eq!(lab.store.output(&sandbox.id, &id(2)).await.unwrap(), Some(vec![2; 40]));
    lab.store.retain(lab.epoch, 3, MANY).await.unwrap();
    assert_eq!(lab.store.output(&sandbox.id, &id(2)).await.unwrap(), None);
    assert_eq!(lab.store.output(&sandbox.id, &id(3)).await.unwrap(), Some(vec![3; 40]));
    lab.put_next(&mut sandbox, |sandbox| sandbox.deleted = true).await;
    assert_eq!(lab.store.output(&sandbox.id, &id(3)).await.unwrap(), None);
    lab.store.put_outputs(lab.epoch, &sandbox.id, vec![kept(4, 1)], 100).await.unwrap();
    assert_eq!(lab.store.output(&sandbox.id, &id(4)).await.unwrap(), None);
}
