//! Stale and unobserved states, one after the other and in twos: every listing of instances and of snapshots is older than
//! it should be, of every end nobody hears, and the same wishes come to the same end (T7, J1).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use place::{LONG, by, paused, persistent, place, request};
use viv_chaos::FaultyProvider;
use viv_core::EndCause;
use viv_core::SandboxId;
use viv_core::lifecycle::EntryKind;
use viv_core::service::{Readiness, Restart, RestartPolicy, ServiceSpec};
use viv_core::spec::SandboxSpec;
use viv_engine::{CreateRequest, NewSnapshot};
use viv_provider::conformance::program::Program;
use viv_provider::{InstanceRef, PageRequest, Provider};
use viv_store::{SnapshotQuery, Store};

/// How much older a listing is.
const AGES: [usize; 2] = [1, 3];

/// So many listings apart are two that are older in one life, at most.
const APART_MAX: u64 = 4;

/// One thing that is not as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Odd {
    Listing(u64, usize),
    End(u64),
}

/// What came of a life in which these were odd: where everybody is, and how many listings and waits there were.
fn live(odd: &[Odd]) -> (Vec<String>, (u64, u64)) {
    let (mut states, mut counted) = (Vec::new(), (0, 0));
    let stale: BTreeMap<u64, usize> =
        odd.iter().filter_map(|odd| if let Odd::Listing(at, age) = odd { Some((*at, *age)) } else { None }).collect();
    let unheard: BTreeSet<u64> =
        odd.iter().filter_map(|odd| if let Odd::End(at) = odd { Some(*at) } else { None }).collect();
    paused(async {
        let place = place().await;
        place.provider.misbehave(stale, unheard);
        let serves = SandboxSpec { services: vec![service()], ..persistent().spec };
        let (saved, passing, stands) = (
            place.made(CreateRequest { spec: serves, ..persistent() }).await,
            place.made(request()).await,
            place.made(persistent()).await,
        );
        let ready = async |id: &SandboxId| {
            place.engine.ensure(id, EntryKind::Ensure, by()).await.unwrap();
            place.engine.wait_ready(id, LONG).await.unwrap();
        };
        let compared = async |seconds: u64| {
            place.engine.reconcile();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        };
        compared(2).await;
        assert!(place.provider.truth().crash(&passing, EndCause::OomKilled));
        compared(3).await;
        ready(&passing).await;
        place.engine.stop(&saved, by()).await.unwrap();
        place.engine.wait_settled(&saved, LONG).await.unwrap();
        compared(2).await;
        ready(&saved).await;
        let new = |name: &str| NewSnapshot { name: name.parse().ok(), labels: BTreeMap::new(), by: by(), key: None };
        let kept = place.engine.make_snapshot(&saved, new("kept")).await.unwrap().row.id;
        let removed = place.engine.make_snapshot(&saved, new("removed")).await.unwrap().row.id;
        compared(2).await;
        place.engine.remove_snapshot(None, &removed, &by()).await.unwrap();
        place.engine.freeze(&stands, by()).await.unwrap();
        compared(2).await;
        assert!(place.provider.truth().crash(&stands, EndCause::SupervisorLost));
        compared(2).await;
        // What nobody heard of is found by comparing, once a minute.
        tokio::time::sleep(Duration::from_secs(150)).await;
        ready(&stands).await;
        place.delete(&passing).await;
        compared(2).await;
        tokio::time::sleep(Duration::from_secs(150)).await;
        ready(&saved).await;
        ready(&stands).await;
        for id in [&saved, &passing, &stands] {
            let record = place.record(id).await;
            let instance = InstanceRef { sandbox: id.clone(), generation: record.generation };
            let seen = place.provider.truth().observe(&instance).await.unwrap().state;
            let (phase, desired, gone) = (record.phase.name(), record.desired, record.deleted);
            states.push(format!("{phase:?} {desired:?} deleted {gone}, really {seen}"));
        }
        let rows = place.store.snapshots(&SnapshotQuery { limit: 9, ..SnapshotQuery::default() }).await.unwrap().items;
        let rows = rows.iter().map(|row| (row.id == kept, row.state)).collect::<Vec<_>>();
        states.push(format!("rows: {rows:?}"));
        let owner = &place.engine.config().owner;
        let snapshots = place.provider.truth().snapshots(owner, PageRequest::default()).await.unwrap().items.len();
        states.push(format!("{snapshots} snapshots are there"));
        states.push(format!("{} are there", there(&place.provider, owner).await));
        let before = place.provider.mutations();
        tokio::time::sleep(Duration::from_secs(200)).await;
        states.push(format!("{} changes at rest", place.provider.mutations() - before));
        counted = place.provider.counted();
    });
    (states, counted)
}

/// One that ends while it is looked on, and is started again.
fn service() -> ServiceSpec {
    ServiceSpec {
        name: "web".parse().unwrap(),
        argv: Program::Sleep { seconds: 100 }.argv(),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        ready: Readiness::Runs { ms: 0 },
        ready_within_ms: 30_000,
        restart: Restart { policy: RestartPolicy::Always, times_max: 9, backoff_ms: 500 },
        nudge: None,
    }
}

async fn there(provider: &FaultyProvider, owner: &viv_core::OwnerMark) -> usize {
    provider.truth().list(owner, PageRequest::default()).await.unwrap().items.len()
}

#[test]
fn t7_older_listings_and_unheard_ends_in_ones_and_twos_change_no_outcome() {
    let (well, (listings, ends)) = live(&[]);
    assert!(well.iter().any(|state| state.starts_with("Ready")), "{well:?}");
    assert!(listings >= 8 && ends >= 5, "{listings} listings, {ends} waits");
    let listings = (0..listings).flat_map(|at| AGES.map(|age| Odd::Listing(at, age)));
    let odd: Vec<Odd> = listings.chain((0..ends).map(Odd::End)).collect();
    let mut lives = 0;
    // By themselves whatever their age, in twos those that are older by one and not far apart; all with VIV_STALE_ALL=1.
    let is_near = |odd: &Odd| !matches!(odd, Odd::Listing(_, age) if *age != AGES[0]);
    let all = std::env::var_os("VIV_STALE_ALL").is_some();
    let far = |one: &Odd, other: &Odd| match (one, other) {
        (Odd::Listing(one, _), Odd::Listing(other, _)) => !all && one.abs_diff(*other) > APART_MAX,
        _ => false,
    };
    for (at, one) in odd.iter().enumerate() {
        let others = odd[at + 1..].iter().filter(|other| is_near(one) && is_near(other) && !far(one, other));
        for other in std::iter::once(one).chain(others) {
            lives += 1;
            let (found, _) = live(&[*one, *other]);
            assert_eq!(found, well, "with {one:?} and {other:?}");
        }
    }
    println!("{lives} lives, {} of them with one thing odd", odd.len());
}
