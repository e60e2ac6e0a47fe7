//! Hot spares on simulated time (L19): many who claim, daemons that die in the middle, spares that are broken, and room
//! that somebody else needs.
#![allow(missing_docs, reason = "tests")]

mod daemons;
mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use place::{by, paused, place_ticking, place_with, request};
use viv_chaos::{Damage, Rng};
use viv_core::SandboxId;
use viv_core::exec::{ExecSpec, OutputEvent};
use viv_core::lifecycle::{PhaseName, Sandbox, Status};
use viv_core::limits::ResourceLimits;
use viv_core::spec::{Egress, Image, Network, Policy, Project, SandboxSpec};
use viv_engine::{
    CreateRequest, Engine, EngineConfig, EngineError, Failpoint, KeyedBy, SpareClass, SparesConfig, Which,
};
use viv_provider::conformance::program::Program;
use viv_provider::{PageRequest, Provider};
use viv_store::{Cursor, JournalFilter, ListQuery, MemoryStore, Quota, Store};

const LONG: Duration = Duration::from_secs(60);

/// Spares of the default kind, so many.
fn spares(min: u32, max: u32) -> SparesConfig {
    of_classes(vec![("default", SandboxSpec::default())], min, max)
}

/// Spares of several kinds, so many of each.
fn of_classes(classes: Vec<(&str, SandboxSpec)>, min: u32, max: u32) -> SparesConfig {
    let class = |(name, spec): (&str, _)| SpareClass { name: name.to_owned(), spec, min, max };
    SparesConfig { classes: classes.into_iter().map(class).collect(), ..SparesConfig::default() }
}

async fn ready(engine: &Engine) -> usize {
    engine.spares().await.unwrap()[0].ready.len()
}

/// Waits until so many of each class can be claimed.
async fn until_ready(engine: &Engine, count: usize) {
    for _ in 0..2_000 {
        if engine.spares().await.unwrap().iter().all(|class| class.ready.len() >= count) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{:?}", engine.spares().await.unwrap());
}

/// A request with something of its own.
fn with(number: usize) -> CreateRequest {
    let mut request = request();
    request.spec.env.insert("WHOSE".to_owned(), format!("client-{number}"));
    request.labels.insert("number".to_owned(), number.to_string());
    request
}

/// What a command in there says its environment is.
async fn whose(engine: &Engine, id: &SandboxId) -> String {
    said(engine, id, Program::ReadEnv { name: "WHOSE".to_owned() }).await
}

/// What a command in there says.
async fn said(engine: &Engine, id: &SandboxId, program: Program) -> String {
    let handle = engine.work_in(&Project::default(), &Which::Id(id.clone()), None).await.unwrap();
    let execution = handle.new_execution();
    let argv = program.argv();
    handle.execute(&execution, &ExecSpec { argv, ..ExecSpec::default() }).await.unwrap();
    let (mut output, mut said) = (handle.attach(&execution, 0, true).await.unwrap(), Vec::new());
    while let Some(event) = output.next().await.unwrap() {
        if let OutputEvent::Chunk { data, .. } = event {
            said.extend(data);
        }
    }
    String::from_utf8(said).unwrap().trim().to_owned()
}

/// The lines that say that this was created, and whether each came from a spare.
async fn created(store: &MemoryStore, id: &SandboxId) -> Vec<bool> {
    created_from(store, id).await.iter().map(Option::is_some).collect()
}

/// The same, with the class of the spare.
async fn created_from(store: &MemoryStore, id: &SandboxId) -> Vec<Option<String>> {
    let filter = JournalFilter { sandbox: Some(id.clone()), ..JournalFilter::default() };
    let lines = store.journal(Cursor(0), &filter, 1_000).await.unwrap();
    let created = lines.iter().filter(|line| line.line.kind == "sandbox.created");
    created.map(|line| line.line.data["spare"]["class"].as_str().map(str::to_owned)).collect()
}

#[test]
fn l19_incident_19_500_claims_by_50_clients_are_500_different_sandboxes_that_work() {
    paused(async {
        let place = place_with(|config| {
            config.spares = spares(10, 40);
            config.quota = Quota::of(1_000, 1_000);
        })
        .await;
        until_ready(&place.engine, 10).await;
        let mut clients = tokio::task::JoinSet::new();
        for client in 0..50_usize {
            let engine = place.engine.clone();
            clients.spawn(async move {
                let (mut rng, mut got) = (Rng::new(client as u64), Vec::new());
                for round in 0..10_usize {
                    let number = client * 10 + round;
                    let made = engine.create(with(number)).await.unwrap();
                    assert!(made.fresh);
                    let id = made.view.sandbox.id;
                    let view = engine.wait_ready(&id, LONG).await.unwrap();
                    assert_eq!(view.status, Status::Ready);
                    assert_eq!(view.sandbox.labels["number"], number.to_string());
                    assert_eq!(whose(&engine, &id).await, format!("client-{number}"));
                    got.push(id);
                    tokio::time::sleep(Duration::from_millis(rng.below(2_000))).await;
                }
                got
            });
        }
        let mut all = BTreeSet::new();
        while let Some(got) = clients.join_next().await {
            for id in got.unwrap() {
                assert!(all.insert(id.clone()), "{id} was given to two");
            }
        }
        assert_eq!(all.len(), 500);
        let mut from_spares = 0;
        for id in &all {
            let created = created(&place.store, id).await;
            assert_eq!(created.len(), 1, "{id}");
            from_spares += usize::from(created[0]);
        }
        let status = place.engine.spares().await.unwrap().remove(0);
        assert_eq!((status.claimed, status.claimed + status.missed), (from_spares as u64, 500), "{status:?}");
        assert!(from_spares > 100, "the pool was refilled: {status:?}");
        assert_eq!(status.broken, 0);
        // Nobody sees those that nobody asked for, and nothing is left of any of them but their records.
        let (listed, _) = place.engine.list(&ListQuery { limit: 1_000, ..ListQuery::default() }).await.unwrap();
        assert_eq!(listed.len(), 500);
        assert!(listed.iter().all(|view| all.contains(&view.sandbox.id)));
    });
}

/// Kinds that differ in one thing each.
fn kinds() -> Vec<(&'static str, SandboxSpec)> {
    let ships = SandboxSpec::default;
    let limits = ResourceLimits { memory_bytes: Some(64 << 20), ..ResourceLimits::default() };
    vec![
        ("default", ships()),
        ("python", SandboxSpec { image: Image::Named { name: "python".to_owned() }, ..ships() }),
        ("node", SandboxSpec { image: Image::Named { name: "node".to_owned() }, ..ships() }),
        ("small", SandboxSpec { limits, ..ships() }),
        ("online", SandboxSpec { network: Network { egress: Egress::All }, ..ships() }),
        ("elsewhere", SandboxSpec { workdir: "/elsewhere".to_owned(), ..ships() }),
        ("packages", SandboxSpec { packages: true, ..ships() }),
    ]
}

#[test]
fn l19_each_claim_gets_a_spare_of_its_own_class_or_none() {
    paused(async {
        let place = place_with(|config| config.spares = of_classes(kinds(), 2, 2)).await;
        until_ready(&place.engine, 2).await;
        let mut own: BTreeMap<String, BTreeSet<SandboxId>> = BTreeMap::new();
        for class in place.engine.spares().await.unwrap() {
            own.insert(class.class.name, class.ready.into_iter().map(|(id, _)| id).collect());
        }
        let all: BTreeSet<&SandboxId> = own.values().flatten().collect();
        assert_eq!((own.len(), all.len()), (kinds().len(), 2 * kinds().len()), "each is of one class: {own:?}");
        // One after the other in turn, so that the first in one pool is never the first that was made.
        for number in 0..2 {
            for (name, spec) in kinds().into_iter().rev() {
                let mut request = with(number);
                request.spec = SandboxSpec { env: request.spec.env, ..spec.clone() };
                let made = place.engine.create(request.clone()).await.unwrap().view.sandbox;
                assert!(own.get_mut(name).unwrap().remove(&made.id), "{name}: {} is not of {own:?}", made.id);
                assert_eq!(created_from(&place.store, &made.id).await, [Some(name.to_owned())], "{name}");
                let view = place.engine.wait_ready(&made.id, LONG).await.unwrap();
                assert_eq!((view.status, view.sandbox.generation.0), (Status::Ready, 1), "{name}: not made anew");
                assert_eq!((&view.sandbox.spec, view.sandbox.spec.of_instance()), (&request.spec, spec.clone()));
                // What it was made with is what it runs with.
                assert_eq!(whose(&place.engine, &made.id).await, format!("client-{number}"), "{name}");
                assert_eq!(said(&place.engine, &made.id, Program::PrintDirectory).await, spec.workdir, "{name}");
            }
        }
        for class in place.engine.spares().await.unwrap() {
            let counted = (class.claimed, class.missed, class.broken);
            assert_eq!(counted, (2, 0, 0), "{class:?}");
        }
        // Who is of no class takes from none, and is missed by none; who is of one that is used up takes from no other.
        until_ready(&place.engine, 2).await;
        let mut other = request();
        other.spec.image = Image::Named { name: "go".to_owned() };
        let id = place.made(other).await;
        assert_eq!(created_from(&place.store, &id).await, [None]);
        let mut python = with(9);
        python.spec.image = kinds()[1].1.image.clone();
        let mut from = Vec::new();
        for _ in 0..5 {
            let made = place.engine.create(python.clone()).await.unwrap().view.sandbox.id;
            from.extend(created_from(&place.store, &made).await);
        }
        assert_eq!(from.len(), 5, "{from:?}");
        assert!(from.iter().flatten().all(|class| class == "python") && from.contains(&None), "{from:?}");
        for class in place.engine.spares().await.unwrap() {
            let (claimed, missed) = (class.claimed, class.missed);
            let wanted = if class.class.name == "python" { (claimed, 7 - claimed) } else { (2, 0) };
            assert_eq!((claimed, missed), wanted, "{class:?}");
        }
    });
}

/// A daemon that dies whenever it is there for the third time, and spares as above.
fn dies_at(point: &'static str) -> (Arc<AtomicUsize>, impl FnOnce(&mut EngineConfig)) {
    let times = Arc::new(AtomicUsize::new(0));
    let count = times.clone();
    let failpoint = Failpoint(Arc::new(move |now| {
        assert!(now != point || count.fetch_add(1, Ordering::SeqCst) != 2, "the daemon dies at {point}, as planned");
    }));
    (times, move |config| {
        (config.spares, config.failpoint) = (spares(4, 8), Some(failpoint));
    })
}

/// All records that are not over.
async fn living(store: &MemoryStore) -> Vec<Sandbox> {
    let query = ListQuery { phases: PhaseName::MAY_LIVE.to_vec(), limit: 1_000, ..ListQuery::default() };
    store.list(&query).await.unwrap().items
}

#[test]
fn l19_a_daemon_that_dies_in_the_middle_of_claims_loses_none_and_gives_none_to_two() {
    let points = [
        "create.claiming",
        "create.committed",
        "claim.before",
        "claim.after",
        "claim.recorded",
        "probe.before",
        "probe.recorded",
    ];
    for point in points {
        paused(async {
            let mut place = daemons::Place::beginning(250, |config| config.spares = spares(4, 8)).await;
            until_ready(&place.engine, 4).await;
            let (times, set_up) = dies_at(point);
            // What the last one left is there for the next.
            place.followed(Duration::from_secs(1), set_up).await;
            until_ready(&place.engine, 4).await;
            let keyed = |number: usize| {
                let key = KeyedBy { key: format!("key-{number}"), body_hash: [number as u8; 32] };
                CreateRequest { key: Some(key), ..with(number) }
            };
            let mut asked = tokio::task::JoinSet::new();
            for number in 0..12 {
                let engine = place.engine.clone();
                // Whoever asks dies with it.
                asked.spawn(async move { engine.create(keyed(number)).await.map(|made| made.view.sandbox.id) });
            }
            let mut told = BTreeSet::new();
            while times.load(Ordering::SeqCst) < 3 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                assert!(place.engine.now_ms() < daemons::EPOCH_MS + 600_000, "{point} is never reached");
            }
            place.followed(Duration::from_secs(5), |config| config.spares = spares(4, 8)).await;
            while let Some(answer) = asked.join_next().await {
                let Ok(Ok(id)) = answer else { continue };
                told.insert(id);
            }
            let mut all = BTreeSet::new();
            for number in 0..12 {
                let made = place.engine.create(keyed(number)).await.unwrap();
                let id = made.view.sandbox.id;
                let view = place.engine.wait_ready(&id, LONG).await.unwrap();
                assert_eq!(view.status, Status::Ready, "{point}");
                assert_eq!(whose(&place.engine, &id).await, format!("client-{number}"), "{point}");
                assert_eq!(created(&place.store, &id).await.len(), 1, "{point}");
                assert!(all.insert(id.clone()), "{point}: {id} was given to two");
            }
            assert!(told.is_subset(&all), "{point}: who was told is who has it");
            until_ready(&place.engine, 4).await;
            let users = living(&place.store).await.into_iter().filter(|record| !record.is_spare()).count();
            assert_eq!(users, 12, "{point}: nothing was made that nobody has");
            // And the provider has what the records say, no more.
            tokio::time::sleep(Duration::from_secs(300)).await;
            let there = place.provider.list(&"sim".parse().unwrap(), PageRequest::default()).await.unwrap();
            let records: BTreeSet<_> = living(&place.store).await.into_iter().map(|record| record.id).collect();
            let there: BTreeSet<_> = there.items.into_iter().map(|item| item.instance.sandbox).collect();
            assert_eq!(there, records, "{point}");
        });
    }
}

/// One who asks for what is its own, again with the same key until it is answered; by whom is drawn anew when a daemon
/// dies.
async fn asks(engine: &Engine, client: usize, told: &Mutex<BTreeMap<usize, SandboxId>>) {
    let mut rng = Rng::new(client as u64);
    for number in client * 10..(client + 1) * 10 {
        if told.lock().unwrap().contains_key(&number) {
            continue;
        }
        let key = KeyedBy { key: format!("key-{number}"), body_hash: [number as u8; 32] };
        let Ok(made) = engine.create(CreateRequest { key: Some(key), ..with(number) }).await else { return };
        let id = made.view.sandbox.id;
        let before = told.lock().unwrap().insert(number, id.clone());
        assert!(before.is_none_or(|before| before == id), "{number} was told of two");
        tokio::time::sleep(Duration::from_millis(rng.below(2_000))).await;
    }
}

#[test]
fn l19_500_claims_by_50_clients_while_daemons_die_are_500_different_sandboxes_that_work() {
    let points =
        ["claim.before", "create.claiming", "claim.after", "probe.recorded", "claim.recorded", "create.committed"];
    paused(async {
        let enough = |config: &mut EngineConfig| {
            (config.spares, config.quota) = (spares(10, 40), Quota::of(1_000, 1_000));
        };
        let mut place = daemons::Place::beginning(250, enough).await;
        until_ready(&place.engine, 10).await;
        let told = Arc::new(Mutex::new(BTreeMap::new()));
        for (turn, point) in points.into_iter().map(Some).chain([None]).enumerate() {
            let times = Arc::new(AtomicUsize::new(0));
            let count = times.clone();
            place
                .followed(Duration::from_secs(5), |config| {
                    enough(config);
                    config.failpoint = Some(Failpoint(Arc::new(move |now| {
                        let dies = Some(now) == point && count.fetch_add(1, Ordering::SeqCst) == 20;
                        assert!(!dies, "the daemon dies at {point:?}, as planned");
                    })));
                })
                .await;
            let mut clients = tokio::task::JoinSet::new();
            for client in 0..50 {
                let (engine, told) = (place.engine.clone(), told.clone());
                clients.spawn(async move { asks(&engine, client, &told).await });
            }
            let mut left = 50;
            while left > 0 && times.load(Ordering::SeqCst) <= 20 {
                // Whoever asked is gone with it, or has all that it wants.
                if tokio::time::timeout(Duration::from_millis(10), clients.join_next()).await.is_ok() {
                    left -= 1;
                }
            }
            assert!(point.is_none() || times.load(Ordering::SeqCst) > 20, "{point:?} is reached in turn {turn}");
            assert!(point.is_none() || told.lock().unwrap().len() < 500, "it dies in the middle");
            clients.abort_all();
        }
        let told = told.lock().unwrap().clone();
        assert_eq!(told.len(), 500, "nothing that was asked for is missing");
        assert_eq!(told.values().collect::<BTreeSet<_>>().len(), 500, "none was given to two");
        let mut from_spares = 0;
        for (number, id) in &told {
            place.engine.wait_ready(id, LONG).await.unwrap();
            assert_eq!(place.engine.verify(id).await.unwrap().status, Status::Ready);
            assert_eq!(whose(&place.engine, id).await, format!("client-{number}"));
            let created = created(&place.store, id).await;
            assert_eq!(created.len(), 1, "{id}");
            from_spares += usize::from(created[0]);
        }
        assert!(from_spares > 100, "the pool was refilled: {from_spares}");
        let users = living(&place.store).await.into_iter().filter(|record| !record.is_spare()).count();
        assert_eq!(users, 500, "nothing was made that nobody has");
        tokio::time::sleep(Duration::from_secs(300)).await;
        let records: BTreeSet<_> = living(&place.store).await.into_iter().map(|record| record.id).collect();
        let (mut there, mut page) = (BTreeSet::new(), PageRequest::default());
        loop {
            let listed = place.provider.list(&"sim".parse().unwrap(), page.clone()).await.unwrap();
            there.extend(listed.items.into_iter().map(|item| item.instance.sandbox));
            let Some(next) = listed.next else { break };
            page.cursor = Some(next);
        }
        assert_eq!(there, records, "and nothing is left of what died");
    });
}

#[test]
fn l19_a_broken_spare_is_never_handed_out_and_another_takes_its_place() {
    for damage in [Damage::Hangs, Damage::Rootless] {
        paused(async {
            let place = place_with(|config| config.spares = spares(2, 2)).await;
            until_ready(&place.engine, 2).await;
            let broken: Vec<SandboxId> =
                place.engine.spares().await.unwrap()[0].ready.iter().map(|(id, _)| id.clone()).collect();
            for id in &broken {
                place.provider.damage(id, Some(damage));
            }
            // Claimed before anybody knows: it is found out before it is called ready, and made anew.
            let id = place.engine.create(with(1)).await.unwrap().view.sandbox.id;
            assert!(broken.contains(&id));
            let view = place.engine.wait_ready(&id, Duration::from_secs(20));
            let making = place.engine.clone();
            let healed = async {
                // What is made next is whole.
                while making.wait_settled(&id, Duration::from_millis(20)).await.is_ok() {}
                loop {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    if place.record(&id).await.generation.0 > 1 {
                        place.provider.damage(&id, None);
                        return;
                    }
                }
            };
            let view = tokio::select! {
                biased;
                view = view => view,
                () = async { healed.await; std::future::pending().await } => unreachable!(),
            };
            let record = view.unwrap().sandbox;
            assert_eq!(record.generation.0, 2, "{damage:?}: another instance");
            assert_eq!(whose(&place.engine, &id).await, "client-1");
            // The other one is found out by whoever keeps them.
            let other = broken.iter().find(|other| **other != id).unwrap();
            for _ in 0..200 {
                if place.record(other).await.is_over() {
                    break;
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            assert!(place.record(other).await.is_over(), "{damage:?}: {:?}", place.record(other).await.phase);
            until_ready(&place.engine, 2).await;
        });
    }
}

#[test]
fn l19_spares_yield_to_whoever_needs_their_room() {
    paused(async {
        let place = place_with(|config| {
            config.spares = spares(4, 4);
            config.quota = Quota::of(6, 6);
        })
        .await;
        until_ready(&place.engine, 4).await;
        let mut other = request();
        other.spec.workdir = "/elsewhere".to_owned();
        // None of these fits the class; there are six places.
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (engine, request) = (place.engine.clone(), other.clone());
            all.spawn(async move { engine.create(request).await.map(|made| made.view.sandbox.id) });
        }
        while let Some(made) = all.join_next().await {
            let id = made.unwrap().unwrap();
            place.engine.wait_ready(&id, LONG).await.unwrap();
            let living = living(&place.store).await.len();
            assert!(living <= 6, "{living} are more than there may be");
        }
        assert_eq!(ready(&place.engine).await, 0);
        let refused = place.engine.create(other).await.unwrap_err();
        assert!(matches!(refused, EngineError::Quota { .. }), "{refused:?}");
        // There is room again, some time.
        for record in living(&place.store).await {
            place.engine.delete(&record.id, by()).await.unwrap();
        }
        until_ready(&place.engine, 4).await;
    });
}

#[test]
fn l19_the_pool_grows_with_who_asks_and_shrinks_when_nobody_does() {
    paused(async {
        let place = place_ticking(1_000, |config| config.spares = spares(1, 6)).await;
        until_ready(&place.engine, 1).await;
        for number in 0..5 {
            place.engine.create(with(number)).await.unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        until_ready(&place.engine, 5).await;
        tokio::time::sleep(Duration::from_secs(150)).await;
        let status = place.engine.spares().await.unwrap().remove(0);
        assert_eq!((status.target, status.ready.len()), (1, 1), "{status:?}");
        // They do not grow old.
        let before = status.ready[0].0.clone();
        tokio::time::sleep(Duration::from_secs(2 * 3_600)).await;
        until_ready(&place.engine, 1).await;
        let after = place.engine.spares().await.unwrap().remove(0);
        assert_ne!(after.ready[0].0, before, "{after:?}");
    });
}

#[test]
fn l19_a_claim_lives_for_as_long_as_was_asked_and_nobody_gets_a_spare_by_its_project() {
    paused(async {
        let place = place_with(|config| config.spares = spares(1, 1)).await;
        until_ready(&place.engine, 1).await;
        let spare = place.engine.spares().await.unwrap()[0].ready[0].0.clone();
        let hidden = place.engine.get(&Project::spares(), &Which::Id(spare.clone()), "test").await;
        assert!(matches!(hidden, Err(EngineError::NotFound { .. })), "{hidden:?}");
        let refused = place.engine.create(CreateRequest { project: Project::spares(), ..request() }).await;
        assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{refused:?}");
        let policy = Policy { lifetime_ms: 10_000, ..request().policy };
        let id = place.made(CreateRequest { policy, ..request() }).await;
        assert_eq!(id, spare);
        let left_ms = place.record(&id).await.expires_at_ms.unwrap() - place.engine.now_ms();
        assert!(left_ms <= 10_000, "{left_ms}");
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert!(place.record(&id).await.is_over());
    });
}

#[test]
fn l19_who_wants_no_spares_any_more_has_none() {
    paused(async {
        let mut place = daemons::Place::beginning(50, |config| config.spares = spares(3, 3)).await;
        until_ready(&place.engine, 3).await;
        place.followed(Duration::from_secs(1), |_| {}).await;
        for _ in 0..100 {
            if living(&place.store).await.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("{:?}", living(&place.store).await);
    });
}
