//! Stale and unobserved states, one after the other and in twos: every listing is older than it should be, of every end
//! nobody hears, and the same wishes come to the same end (T7, J1).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use place::{LONG, by, paused, persistent, place, request};
use viv_chaos::FaultyProvider;
use viv_core::EndCause;
use viv_core::SandboxId;
use viv_core::lifecycle::EntryKind;
use viv_provider::{InstanceRef, PageRequest, Provider};

/// How much older a listing is.
const AGES: [usize; 2] = [1, 3];

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
        let (saved, passing, stands) =
            (place.made(persistent()).await, place.made(request()).await, place.made(persistent()).await);
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
        states.push(format!("{} are there", there(&place.provider, &place.engine.config().owner).await));
        let before = place.provider.mutations();
        tokio::time::sleep(Duration::from_secs(200)).await;
        states.push(format!("{} changes at rest", place.provider.mutations() - before));
        counted = place.provider.counted();
    });
    (states, counted)
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
    // By themselves whatever their age, in twos those that are older by one.
    let is_near = |odd: &Odd| !matches!(odd, Odd::Listing(_, age) if *age != AGES[0]);
    for (at, one) in odd.iter().enumerate() {
        let others = odd[at + 1..].iter().filter(|other| is_near(one) && is_near(other));
        for other in std::iter::once(one).chain(others) {
            lives += 1;
            let (found, _) = live(&[*one, *other]);
            assert_eq!(found, well, "with {one:?} and {other:?}");
        }
    }
    println!("{lives} lives, {} of them with one thing odd", odd.len());
}
