//! For what only a world can show, a world that is made wrong by hand, where it is found.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use viv_core::lifecycle::{Cause, Caused, HibernateStep, Memory, Phase, Sandbox};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_core::task::Task;
use viv_core::{ExecutionId, FencingToken, Generation, OperationId, SandboxId, SnapshotId, TaskId};
use viv_engine::{CreateRequest, EngineError, View, Which};
use viv_provider::{Mutation, Provider, ProviderError};

use super::Found;
use super::task_tests::task;
use super::tests::{NOW_MS, ready, work};
use crate::clients::{Answer, Told};
use crate::plan::{Deed, Plan, Trouble};
use crate::store::Recorded;
use crate::world::{World, somebody};

/// What is broken here, one after the other.
pub(super) const BY_HAND: [&str; 16] = [
    "acknowledged-stays",
    "started-in-one-generation",
    "drained-stays-drained",
    "one-task-at-work",
    "tasks-end-in-time",
    "foreign-is-left-alone",
    "left-alone",
    "room-keeps-memory",
    "refusals-are-known",
    "shown-generations-stay",
    "ephemeral-is-not-saved",
    "nothing-enters-what-is-gone",
    "delete-is-legal",
    "draining-takes-nothing",
    "undrained-takes-work",
    "forks-are-all-there",
];

fn other() -> SandboxId {
    SandboxId::from_bytes([9; 16])
}

fn answer(deed: Deed, told: Result<Told, EngineError>) -> Answer {
    Answer {
        deed,
        id: Some(other()),
        was_ended: false,
        was_draining: None,
        drains: 0,
        damaged: None,
        began: Instant::now(),
        told,
    }
}

fn absent<T>() -> Result<T, EngineError> {
    Err(EngineError::Provider(ProviderError::Absent))
}

/// One that is ready, and not persistent.
async fn made(world: &World<'_>) -> View {
    let request = CreateRequest {
        project: Project::default(),
        name: None,
        spec: SandboxSpec::default(),
        policy: Policy { persistent: false, ..Policy::default_for(None) },
        labels: BTreeMap::new(),
        snapshot: None,
        by: somebody(),
        key: None,
    };
    let id = world.engine().create(request).await.unwrap().view.sandbox.id;
    world.engine().wait_ready(&id, Duration::from_secs(60)).await.unwrap();
    world.engine().get(&Project::default(), &Which::Id(id), "a test").await.unwrap()
}

/// Who refuses is asked on and on.
async fn pester(world: &World<'_>) {
    let provider = world.provider.by(&world.line);
    provider.set_down(true);
    for number in 1..=6 {
        let mutation = Mutation {
            operation: OperationId::from_bytes([number; 16]),
            generation: Generation::FIRST,
            token: FencingToken(1),
            budget_ms: 1_000,
        };
        let _ = provider.destroy(&mutation, &SandboxId::from_bytes([number % 3; 16])).await;
    }
}

/// It was to go to disk for the room that it takes, and lost its memory.
fn without_memory() -> Recorded {
    let saving = Sandbox {
        phase: Phase::Hibernating { step: HibernateStep::Save, save_failed: false, work: work() },
        cause: Caused { cause: Cause::MemoryShort, by: somebody(), at_ms: NOW_MS, message: None },
        rests_for: Some(Cause::MemoryShort),
        memory: Some(Memory::Saving),
        ..ready()
    };
    let lost = Sandbox { memory: Some(Memory::NotSaved { why: "simulated".to_owned() }), ..saving.clone() };
    Recorded::Sandbox { before: Some(Box::new(saving)), after: Box::new(lost), lines: Vec::new() }
}

async fn broken(world: &mut World<'_>, name: &str) -> Found {
    match name {
        "acknowledged-stays" => drop(world.known.insert(other(), crate::world::Known::default())),
        "started-in-one-generation" => {
            for generation in [1, 2] {
                world.provider.started(ExecutionId::from_bytes([1; 16]), Generation(generation));
            }
        }
        "drained-stays-drained" => {
            made(world).await;
            world.told_drained = true;
        }
        "one-task-at-work" => {
            let mut picture = world.picture().await;
            picture.tasks = vec![task(), Task { id: TaskId::from_bytes([9; 16]), ..task() }];
            return world.check_tasks(&picture).await;
        }
        "tasks-end-in-time" => {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let mut picture = world.picture().await;
            picture.tasks = vec![Task { deadline_ms: Some(1), ..task() }];
            return world.check_tasks(&picture).await;
        }
        "foreign-is-left-alone" => drop(world.foreign.insert(other())),
        "left-alone" => pester(world).await,
        "room-keeps-memory" => {
            tokio::time::sleep(Duration::from_secs(1)).await;
            return world.check_room(&without_memory());
        }
        "refusals-are-known" => return world.hear(answer(Deed::Create, absent())).await,
        "shown-generations-stay" => {
            let (asked, current) = (Generation(2), Generation(1));
            let cause = Box::new(ready().cause);
            let stale = EngineError::StaleHandle { sandbox: other(), asked, current, cause };
            return world.hear(answer(Deed::Execute, Err(stale))).await;
        }
        "ephemeral-is-not-saved" => {
            let told = Told::View(Box::new(made(world).await));
            return world.hear(answer(Deed::Hibernate, Ok(told))).await;
        }
        "nothing-enters-what-is-gone" => {
            return world.hear(Answer { was_ended: true, ..answer(Deed::Ensure, Ok(Told::Done)) }).await;
        }
        "delete-is-legal" => return world.hear(answer(Deed::Delete, absent())).await,
        "draining-takes-nothing" => {
            let made = answer(Deed::Create, Ok(Told::All(Vec::new())));
            return world.hear(Answer { was_draining: Some(true), ..made }).await;
        }
        "undrained-takes-work" => {
            let refused = answer(Deed::Create, Err(EngineError::Draining));
            return world.hear(Answer { was_draining: Some(false), ..refused }).await;
        }
        "forks-are-all-there" => return world.hear(answer(Deed::Fork, Ok(Told::All(vec![other()])))).await,
        "damaged-is-refused" => {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let damaged = Some(SnapshotId::from_bytes([1; 16]));
            return world.hear(Answer { damaged, ..answer(Deed::CreateFrom, Ok(Told::All(Vec::new()))) }).await;
        }
        _ => {}
    }
    world.check().await
}

#[test]
fn p2_what_only_a_world_can_show_is_found_broken() {
    // One in which no call goes wrong, and clocks agree.
    let mut plan = Plan::of(0);
    plan.without.troubles.insert(Trouble::ClockJump);
    assert_eq!(plan.faults_percent, 0);
    for name in ["nothing is wrong", "damaged-is-refused"].into_iter().chain(BY_HAND) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let found = runtime.block_on(async {
            let mut world = Box::pin(World::new(&plan)).await;
            Box::pin(broken(&mut world, name)).await
        });
        let expected = if name == "nothing is wrong" { Ok(()) } else { Err(name) };
        assert_eq!(found.map_err(|(name, _)| name), expected);
    }
}
