//! A verb that names a generation reaches that one or none, however late it is written (T5).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place_ordered, request};
use viv_chaos::{Order, Orders, Trouble, Turn};
use viv_core::lifecycle::{Actor, EntryKind, PhaseName, Sandbox};
use viv_core::spec::Project;
use viv_core::{Generation, SandboxId, SnapshotId};
use viv_engine::{Aim, Engine, EngineError, ForkRequest, ForkedFrom, NewSnapshot, RollbackRequest, Which};
use viv_provider::ResourceLimits;

/// A write of the store is held for so long, in simulated time: longer than it takes to replace an instance.
const HELD: Duration = Duration::from_secs(120);

/// In what a verb finds it.
#[derive(Debug, Clone, Copy)]
enum Found {
    Ready,
    Frozen,
    Saved,
}

type Asked = Pin<Box<dyn Future<Output = Result<(), EngineError>> + Send>>;

/// What a verb is asked with.
struct With {
    engine: Engine,
    aim: Aim,
    snapshot: SnapshotId,
}

struct Verb {
    name: &'static str,
    found: Found,
    ask: fn(With) -> Asked,
}

/// Who names a generation.
fn holder() -> Actor {
    Actor::part("who holds generation 1")
}

fn snapshot_by(by: Actor) -> NewSnapshot {
    NewSnapshot { name: None, labels: BTreeMap::new(), by, key: None }
}

macro_rules! verbs {
    ($($name:literal on $found:ident |$with:ident| $ask:expr;)*) => {
        const VERBS: &[Verb] = &[$(Verb {
            name: $name,
            found: Found::$found,
            ask: |$with| Box::pin(async move { $ask.await.map(drop) }),
        },)*];
    };
}

verbs! {
    "stop" on Ready |with| with.engine.stop(with.aim, holder());
    "delete" on Ready |with| with.engine.delete(with.aim, holder());
    "freeze" on Ready |with| with.engine.freeze(with.aim, holder());
    "hibernate" on Ready |with| with.engine.hibernate(with.aim, holder());
    "reset" on Ready |with| with.engine.reset(with.aim, holder());
    "rollback" on Ready |with| {
        let request = RollbackRequest { snapshot: with.snapshot, discard: true, by: holder() };
        with.engine.rollback(with.aim, request)
    };
    "keep-awake" on Ready |with| with.engine.keep_awake(with.aim, "model", 60_000, "it thinks", holder());
    "snapshot" on Ready |with| with.engine.make_snapshot(with.aim, snapshot_by(holder()));
    "fork" on Ready |with| with.engine.fork(fork(with.aim));
    "limits" on Ready |with| limit(with.engine, with.aim);
    "thaw" on Frozen |with| with.engine.thaw(with.aim, holder());
    "stop" on Frozen |with| with.engine.stop(with.aim, holder());
    "ensure" on Saved |with| with.engine.ensure(with.aim, EntryKind::Ensure, holder());
    "delete" on Saved |with| with.engine.delete(with.aim, holder());
    "snapshot" on Saved |with| with.engine.make_snapshot(with.aim, snapshot_by(holder()));
    "limits" on Saved |with| limit(with.engine, with.aim);
}

fn fork(aim: Aim) -> ForkRequest {
    ForkRequest {
        project: Project::default(),
        from: ForkedFrom::Sandbox(aim),
        count: 1,
        name: None,
        policy: None,
        labels: BTreeMap::new(),
        memory: false,
        by: holder(),
        key: None,
    }
}

async fn limit(engine: Engine, aim: Aim) -> Result<(), EngineError> {
    let (which, change) =
        (Which::Id(aim.sandbox().clone()), ResourceLimits { processes: Some(777), ..Default::default() });
    engine.limit(&Project::default(), &which, Some(Generation::FIRST), &change, &holder()).await.map(drop)
}

async fn settled(place: &Place, id: &SandboxId, phase: PhaseName) {
    let view = place.engine.wait_settled(id, LONG).await.unwrap();
    assert_eq!(view.sandbox.phase.name(), phase);
}

/// Another instance takes the place of the one that is there, or was.
async fn replaced(place: &Place, id: &SandboxId) -> Sandbox {
    if place.record(id).await.phase.name() != PhaseName::Hibernated {
        place.engine.hibernate(id, by()).await.unwrap();
        settled(place, id, PhaseName::Hibernated).await;
    }
    place.engine.ensure(id, EntryKind::Ensure, by()).await.unwrap();
    let view = place.engine.wait_ready(id, LONG).await.unwrap();
    assert_eq!((view.sandbox.phase.name(), view.sandbox.generation), (PhaseName::Ready, Generation(2)));
    view.sandbox
}

/// The generation is right when the verb is begun, and another one when it is written.
#[test]
fn t5_a_verb_is_compared_with_the_generation_that_it_is_written_on() {
    for verb in VERBS {
        paused(async move {
            let name = format!("{} on {:?}", verb.name, verb.found);
            let orders = Arc::new(Orders::new(HELD, || {}));
            let place = place_ordered(250, &orders, |_| {}).await;
            let id = place.made(persistent()).await;
            let snapshot = place.engine.make_snapshot(&id, snapshot_by(by())).await.unwrap().row.id;
            match verb.found {
                Found::Ready => {}
                Found::Frozen => {
                    place.engine.freeze(&id, by()).await.unwrap();
                    settled(&place, &id, PhaseName::Frozen).await;
                }
                Found::Saved => {
                    place.engine.hibernate(&id, by()).await.unwrap();
                    settled(&place, &id, PhaseName::Hibernated).await;
                }
            }
            assert_eq!(place.record(&id).await.generation, Generation::FIRST);

            orders.give(Order { call: "commit".to_owned(), turn: Turn::Trouble(Trouble::SlowStore), times: 1 });
            let aim = Aim::at(id.clone(), Some(Generation::FIRST));
            let asked = tokio::spawn((verb.ask)(With { engine: place.engine.clone(), aim, snapshot }));
            while orders.carried_out() == 0 {
                assert!(!asked.is_finished(), "{name} came to nothing: {:?}", asked.await);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            replaced(&place, &id).await;
            assert!(!asked.is_finished(), "{name} is held");
            let before = place.record(&id).await;
            let refused = asked.await.unwrap();
            let Err(EngineError::StaleHandle { asked, current, cause, .. }) = &refused else {
                panic!("{name} reached another generation: {refused:?}")
            };
            assert_eq!((*asked, *current), (Generation::FIRST, Generation(2)), "{name}");
            assert_eq!(**cause, before.cause, "{name} is told what happened");
            // That it was used meanwhile is no change of it.
            let after = place.record(&id).await;
            assert_eq!(Sandbox { active_at_ms: before.active_at_ms, ..after }, before, "{name} changed nothing");
            let lines = place.lines(&id).await;
            assert!(lines.iter().all(|line| line.line.by != holder()), "{name}: {lines:?}");
            place.delete(&id).await;
        });
    }
}

/// Of an old one, nothing is begun; with the one that is there, everything is.
#[test]
fn t5_a_verb_that_names_an_old_generation_is_refused_and_with_the_new_one_it_is_taken() {
    paused(async {
        let orders = Arc::new(Orders::new(HELD, || {}));
        let place = place_ordered(250, &orders, |_| {}).await;
        let id = place.made(persistent()).await;
        let snapshot = place.engine.make_snapshot(&id, snapshot_by(by())).await.unwrap().row.id;
        let before = replaced(&place, &id).await;
        let old = || Aim::at(id.clone(), Some(Generation::FIRST));
        for verb in VERBS {
            let with = With { engine: place.engine.clone(), aim: old(), snapshot: snapshot.clone() };
            let refused = (verb.ask)(with).await;
            assert!(matches!(refused, Err(EngineError::StaleHandle { .. })), "{}: {refused:?}", verb.name);
        }
        let refused = [
            place.engine.activity(old()).await,
            place.engine.let_sleep(old(), "model", holder()).await,
            place.engine.retry_save(old(), holder()).await,
            place.engine.discard(old(), holder()).await,
        ];
        assert!(refused.iter().all(|refused| matches!(refused, Err(EngineError::StaleHandle { .. }))), "{refused:?}");
        let after = place.record(&id).await;
        assert_eq!((after.version, &after.phase), (before.version, &before.phase));

        let new = || Aim::at(id.clone(), Some(Generation(2)));
        place.engine.activity(new()).await.unwrap();
        place.engine.keep_awake(new(), "model", 60_000, "it thinks", by()).await.unwrap();
        place.engine.let_sleep(new(), "model", by()).await.unwrap();
        place.engine.stop(new(), by()).await.unwrap();
        settled(&place, &id, PhaseName::Hibernated).await;
        // What rests is of the generation that it was, until another one is begun.
        let view = place.engine.ensure(new(), EntryKind::Ensure, by()).await.unwrap();
        assert_eq!(view.sandbox.generation, Generation(3));
        place.delete(&id).await;
        let other = place.made(request()).await;
        place.engine.delete(Aim::at(other.clone(), Some(Generation::FIRST)), by()).await.unwrap();
        settled(&place, &other, PhaseName::Stopped).await;
    });
}
