//! The same for tasks, executions, and what is said of instances.

use std::collections::BTreeMap;

use viv_core::exec::{ExecSpec, ExecState, ExecStatus};
use viv_core::execution::{Execution, Queued, Stage};
use viv_core::lifecycle::Cause;
use viv_core::spec::Project;
use viv_core::task::{
    EffectOutcome, EffectRule, Ending, Grant, NewTask, Task, TaskCause, TaskExecution, TaskLimits, TaskState,
};
use viv_core::{ExecutionId, Generation, RequestId, SandboxId, SnapshotId, TaskId};
use viv_provider::{InstanceRef, InstanceState};

use crate::store::Recorded;
use crate::world::somebody;

fn instance() -> InstanceRef {
    InstanceRef { sandbox: SandboxId::from_bytes([1; 16]), generation: Generation::FIRST }
}

pub(super) fn execution(stage: Stage) -> Box<Execution> {
    Box::new(Execution {
        id: ExecutionId::from_bytes([1; 16]),
        project: Project::default(),
        sandbox: instance().sandbox,
        version: 1,
        generation: Generation::FIRST,
        argv: Vec::new(),
        cwd: None,
        user: None,
        tty: false,
        detached: false,
        limit_ms: None,
        by: somebody(),
        asked_at_ms: 1,
        learnt_at_ms: 1,
        stage,
    })
}

pub(super) fn started(state: ExecState) -> Stage {
    let status = ExecStatus {
        id: ExecutionId::from_bytes([1; 16]),
        state,
        started_at_ms: 1,
        ended_at_ms: None,
        output_bytes: 0,
        stdin_bytes: 0,
        pid: None,
        argv: Vec::new(),
        detached: false,
    };
    Stage::Started { status, concluded: false }
}

fn queued() -> Stage {
    let spec = Box::new(ExecSpec::default());
    Stage::Queued(Queued { spec, until_ms: 1, running_max: None, starting_in: None })
}

/// One that runs.
pub(super) fn task() -> Task {
    let new = NewTask {
        id: TaskId::from_bytes([1; 16]),
        project: Project::default(),
        sandbox: Some(instance().sandbox),
        make: None,
        files: Vec::new(),
        source: None,
        steps: vec![ExecSpec::default(); 3],
        limits: TaskLimits::default(),
        effects: vec![EffectRule { name: "push".to_owned(), repeatable: false }],
        credentials: BTreeMap::new(),
        keep_alive: true,
        by: somebody(),
        body_hash: None,
    };
    Task { state: TaskState::Running, ..Task::new(new, 1) }
}

fn grant(byte: u8, outcome: EffectOutcome) -> Grant {
    let request = RequestId::from_bytes([byte; 16]);
    Grant { request, effect: "push".to_owned(), run: 1, at_ms: 1, ended_at_ms: None, outcome }
}

fn ending() -> Task {
    let ending = Ending { outcome: TaskState::Stopped, cause: TaskCause::UserStop, message: None, at_ms: 1 };
    Task { ending: Some(ending), ..task() }
}

fn over() -> Task {
    Task { state: TaskState::Stopped, ..ending() }
}

fn change(before: Task, change: impl FnOnce(&mut Task)) -> Vec<Recorded> {
    let mut after = Task { version: before.version + 1, ..before.clone() };
    change(&mut after);
    vec![Recorded::Task { before: Some(Box::new(before)), after: Box::new(after) }]
}

pub(super) fn broken() -> Vec<(&'static str, Vec<Recorded>)> {
    let running = || InstanceState::Running;
    let started_one = TaskExecution {
        id: ExecutionId::from_bytes([2; 16]),
        step: Some(0),
        generation: Generation::FIRST,
        started_at_ms: None,
        ended: None,
    };
    let done = || grant(1, EffectOutcome::Done);
    let ended = Some(execution(started(ExecState::Exited { code: 0 })));
    let runs = || execution(started(ExecState::Running));
    vec![
        ("expiry-is-fetched", vec![Recorded::Over { instance: instance(), state: running(), cause: Cause::Expired }]),
        (
            "absence-is-seen",
            vec![Recorded::Over { instance: instance(), state: running(), cause: Cause::ProviderLost }],
        ),
        (
            "at-work-is-not-idle",
            vec![Recorded::Idle { instance: instance(), running: vec![ExecutionId::from_bytes([1; 16])] }],
        ),
        (
            "saved-while-it-was-there",
            vec![Recorded::Late { snapshot: SnapshotId::from_bytes([1; 16]), sandbox: instance().sandbox }],
        ),
        ("executions-go-one-way", vec![Recorded::Execution { before: Some(runs()), after: execution(queued()) }]),
        ("executions-end-once", vec![Recorded::Execution { before: ended, after: runs() }]),
        ("tasks-count", change(task(), |next| next.version += 1)),
        ("tasks-end-once", change(over(), |next| next.state = TaskState::Running)),
        ("tasks-end-as-told", change(ending(), |next| next.state = TaskState::Succeeded)),
        ("an-end-is-kept", change(ending(), |next| next.ending = None)),
        ("nothing-begins-after-the-end", change(ending(), |next| next.executions.push(started_one))),
        ("no-grant-after-the-end", change(ending(), |next| next.grants.push(grant(1, EffectOutcome::InFlight)))),
        (
            "grants-are-declared",
            change(Task { grants: vec![done()], ..task() }, |next| {
                next.grants.push(grant(2, EffectOutcome::InFlight));
            }),
        ),
        (
            "one-effect-at-a-time",
            change(task(), |next| {
                next.grants = vec![grant(1, EffectOutcome::InFlight), grant(2, EffectOutcome::InFlight)];
            }),
        ),
        ("outcomes-stay", change(Task { grants: vec![done()], ..task() }, |next| next.grants.clear())),
        (
            "over-is-settled",
            change(ending(), |next| {
                (next.state, next.grants) = (TaskState::Stopped, vec![grant(1, EffectOutcome::InFlight)]);
            }),
        ),
    ]
}
