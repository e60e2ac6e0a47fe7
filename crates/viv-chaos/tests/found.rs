//! What the long runs of worlds found, each as a small world of its own: the seed that showed it is not the same any more
//! after the next change.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place, request};
use viv_chaos::Damage;
use viv_core::SandboxId;
use viv_core::exec::{ExecSpec, ExecState};
use viv_core::lifecycle::{Desired, EntryKind, PhaseName, Status};
use viv_core::service::{Readiness, Restart, RestartPolicy, ServiceSpec};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::task::{NewTask, Task, TaskLimits, TaskState};
use viv_engine::{ContinueTask, CreateRequest, CreateTask, EngineError, Which};
use viv_provider::conformance::program::Program;
use viv_provider::{FileWrite, InstanceRef, Provider, ResourceLimits};
use viv_store::Store;
use viv_store::memory::Fault;

const MINUTE: Duration = Duration::from_secs(60);

impl Place {
    /// One that does not answer until it is lost, and lives.
    async fn lost(&self) -> SandboxId {
        let id = self.made(persistent()).await;
        self.provider.damage(&id, Some(Damage::Hangs));
        self.engine.verify(&id).await.unwrap();
        tokio::time::sleep(2 * MINUTE).await;
        assert_eq!(self.record(&id).await.phase.name(), PhaseName::Lost);
        id
    }

    fn sleeps(&self, sandbox: &SandboxId, seconds: u64, keep_alive: bool) -> CreateTask {
        let argv = Program::Sleep { seconds }.argv();
        let new = NewTask {
            id: self.engine.new_task_id(),
            project: Project::default(),
            sandbox: Some(sandbox.clone()),
            make: None,
            files: Vec::new(),
            source: None,
            steps: vec![ExecSpec { argv, ..ExecSpec::default() }],
            limits: TaskLimits::default(),
            effects: Vec::new(),
            credentials: BTreeMap::new(),
            keep_alive,
            by: by(),
            body_hash: None,
        };
        CreateTask { new, keyed: false }
    }

    /// The next write of a task is done, and answered as if it were not.
    fn fail_after_the_next_write_of_a_task(&self) {
        let mut once = true;
        self.store.set_faults(Some(Box::new(move |call| {
            (call == "put_task" && std::mem::take(&mut once)).then_some(Fault::After)
        })));
    }

    async fn over(&self, task: &viv_core::TaskId) -> Task {
        self.engine.wait_task(task, 20 * MINUTE, |task| task.state.is_final()).await.unwrap()
    }
}

/// Seed 79: what came back under the same generation showed no deadline, and its hook was not told of it.
#[test]
fn t6_what_was_lost_and_came_back_has_its_deadline() {
    paused(async {
        let place = place().await;
        let id = place.lost().await;
        let shown = place.engine.get(&Project::default(), &Which::Id(id.clone()), "test").await.unwrap();
        assert_eq!(shown.sandbox.lives_until_ms(), None, "nobody acts upon the deadline of what is lost");
        place.provider.damage(&id, None);
        place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        let view = place.engine.wait_ready(&id, LONG).await.unwrap();
        assert_eq!(view.sandbox.generation.0, 1, "it was there, and is kept");
        assert!(view.sandbox.lives_until_ms().is_some(), "{:?}", view.sandbox);
    });
}

/// Seed 1566: the write was never answered, so it counted as use for ever.
#[test]
fn l6_a_write_into_an_agent_that_hung_keeps_nothing_awake() {
    paused(async {
        let place = place().await;
        let policy = Policy { idle_ms: 120_000, ..persistent().policy };
        let id = place.made(CreateRequest { policy, ..persistent() }).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        place.provider.damage(&id, Some(Damage::Hangs));
        let file = FileWrite { path: "/workspace/file".to_owned(), ..FileWrite::default() };
        let writing = tokio::spawn(async move { handle.file_write(&file, Box::new(&b"work"[..])).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        place.provider.damage(&id, None);
        tokio::time::sleep(15 * MINUTE).await;
        let written = writing.await.unwrap();
        assert!(matches!(written, Err(EngineError::Provider(_))), "{written:?}");
        assert_ne!(place.status(&id).await, Status::Ready);
    });
}

/// Seed 1829: looking for what is lost took ten seconds, and a stop came meanwhile.
#[test]
fn l8_a_wake_that_was_asked_for_before_a_stop_does_not_undo_it() {
    paused(async {
        let place = place().await;
        let id = place.lost().await;
        place.provider.set_silent(true);
        let (engine, asked) = (place.engine.clone(), id.clone());
        let waking = tokio::spawn(async move { engine.ensure(&asked, EntryKind::Ensure, by()).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        place.engine.stop(&id, by()).await.unwrap();
        let woken = waking.await.unwrap();
        assert!(matches!(woken, Err(EngineError::Held { .. })), "{woken:?}");
        assert_eq!(place.record(&id).await.desired, Desired::Hibernated);
    });
}

/// Seeds 1283 and 1856: the row was there, and nobody knew of it.
#[test]
fn p3_a_task_that_was_written_and_answered_otherwise_is_worked_on() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        place.fail_after_the_next_write_of_a_task();
        let wanted = place.sleeps(&id, 5, true);
        let task = wanted.new.id.clone();
        assert!(place.engine.create_task(wanted).await.is_err(), "its answer was lost");
        assert_eq!(place.over(&task).await.state, TaskState::Succeeded);
        // And so when it goes on.
        place.fail_after_the_next_write_of_a_task();
        let again = ContinueTask::as_it_was(by());
        assert!(place.engine.continue_task(&task, again).await.is_err(), "its answer was lost");
        let over = place.over(&task).await;
        assert_eq!((over.state, over.run), (TaskState::Succeeded, 2));
    });
}

/// The other way: a task is continued in the moment in which whoever worked on it finds that it is over.
#[test]
fn p3_a_task_that_goes_on_while_it_is_being_left_is_worked_on() {
    paused(async {
        let place = place().await;
        let id = place.made(persistent()).await;
        let task = place.engine.create_task(place.sleeps(&id, 1, true)).await.unwrap().task.id;
        for run in 1..=20 {
            let over = place.over(&task).await;
            assert_eq!((over.state, over.run), (TaskState::Succeeded, run));
            let again = ContinueTask::as_it_was(by());
            place.engine.continue_task(&task, again).await.unwrap();
        }
    });
}

/// Seed 3286: its sandbox was lost, which was read as if it were gone; then it came back, and the step still ran.
#[test]
fn k2_a_task_is_not_over_while_its_sandbox_may_be_there() {
    for keep_alive in [false, true] {
        paused(async {
            let place = place().await;
            let id = place.made(persistent()).await;
            let task = place.engine.create_task(place.sleeps(&id, 100_000, keep_alive)).await.unwrap().task.id;
            place.engine.wait_task(&task, MINUTE, |task| task.times.started_at_ms.is_some()).await.unwrap();
            place.provider.set_silent(true);
            place.engine.verify(&id).await.unwrap();
            place.engine.stop_task(&task, by()).await.unwrap();
            tokio::time::sleep(20 * MINUTE).await;
            let stopping = place.store.task(&task).await.unwrap().unwrap();
            assert!(!stopping.state.is_final(), "nobody could look: {:?}", place.record(&id).await.phase);
            place.provider.set_silent(false);
            assert_eq!(place.over(&task).await.state, TaskState::Stopped);
            let instance = InstanceRef { sandbox: id.clone(), generation: place.record(&id).await.generation };
            let all = place.provider.truth().executions(&instance).await.unwrap_or_default();
            assert!(all.iter().all(|one| one.state != ExecState::Running), "{all:?}");
        });
    }
}

/// Seed 19579: the next daemon asked an agent that hung when its services end, waited for that answer for ever, and heard
/// of no end once the agent was mended.
#[test]
fn l14_the_end_of_a_service_is_heard_after_its_agent_hung() {
    paused(async {
        let place = place().await;
        let service = ServiceSpec {
            name: "web".parse().unwrap(),
            argv: Program::Sleep { seconds: 300 }.argv(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            ready: Readiness::Runs { ms: 0 },
            ready_within_ms: 30_000,
            restart: Restart { policy: RestartPolicy::Always, times_max: 5, backoff_ms: 500 },
            nudge: None,
        };
        let spec = SandboxSpec { services: vec![service.clone()], ..persistent().spec };
        let id = place.made(CreateRequest { spec, ..persistent() }).await;
        let first = place.record(&id).await.services[&service.name].execution.clone();
        place.provider.damage(&id, Some(Damage::Hangs));
        let place = place.restart().await;
        tokio::time::sleep(MINUTE).await;
        place.provider.damage(&id, None);
        // Nobody looks at it: whoever reads would have it probed.
        tokio::time::sleep(6 * MINUTE).await;
        let record = place.record(&id).await;
        assert_eq!(record.phase.name(), PhaseName::Ready);
        assert_ne!(record.services[&service.name].execution, first, "it ended minutes ago, and was not started again");
    });
}

/// Seed 7688: limits that a client asked for while somebody deleted the sandbox were taken back in the record of what had
/// ended.
#[test]
fn l9_limits_that_come_too_late_change_nothing_that_has_ended() {
    paused(async {
        let place = place().await;
        let id = place.made(request()).await;
        let handle = place.engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
        place.delete(&id).await;
        tokio::time::sleep(MINUTE).await;
        let before = place.record(&id).await;
        assert_eq!(before.phase.name(), PhaseName::Stopped);
        let change = ResourceLimits { memory_bytes: Some(1 << 30), ..ResourceLimits::default() };
        assert!(place.engine.set_limits(&handle, &change, &by()).await.is_err());
        assert_eq!(place.record(&id).await, before);
    });
}

/// A look at who is idle asks for a probe when nobody answers, and what that found could not be written: the write that
/// failed had it looked at again, at once and for ever (seed 3886).
#[test]
fn j7_nobody_turns_in_circles_while_neither_provider_nor_disk_is_there() {
    const TRIES_MAX: u64 = 500;
    paused(async {
        let place = place().await;
        let policy = Policy { idle_ms: 30_000, ..Policy::default_for(None) };
        let id = place.made(CreateRequest { policy, ..request() }).await;
        place.provider.set_down(true);
        let tried = Arc::new(AtomicU64::new(0));
        let counted = tried.clone();
        place.store.set_faults(Some(Box::new(move |call| {
            // A world that turns in circles goes on, so that it can be told.
            (call == "commit" && counted.fetch_add(1, Ordering::SeqCst) < TRIES_MAX).then_some(Fault::Before)
        })));
        tokio::time::sleep(2 * MINUTE).await;
        let tried = tried.load(Ordering::SeqCst);
        assert!((1..TRIES_MAX).contains(&tried), "{tried} writes in two minutes");
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Ready, "nothing could be written");
        assert_ne!(place.status(&id).await, Status::Ready);
        place.provider.set_down(false);
        place.store.set_faults(None);
        tokio::time::sleep(MINUTE).await;
        let at_rest = place.record(&id).await.phase.name();
        assert!(at_rest != PhaseName::Ready && at_rest != PhaseName::Lost, "it idled: {at_rest:?}");
    });
}
