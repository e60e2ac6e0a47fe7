//! What is shown is what was seen: after a clock was set back, when a look cannot be made, and beside many that hang.
#![allow(missing_docs, reason = "tests")]

mod place;

use std::time::Duration;

use place::{LONG, by, paused, place, request};
use tokio::time::Instant;
use viv_chaos::Damage;
use viv_core::ExecutionId;
use viv_core::exec::ExecSpec;
use viv_core::lifecycle::{EntryKind, Phase, Status};
use viv_core::spec::Project;
use viv_engine::{EngineError, Which};
use viv_store::ListQuery;
use viv_store::memory::Fault;

#[test]
fn t3_a_clock_that_was_set_back_between_daemons_makes_nothing_ready() {
    paused(async {
        let place = place().await;
        let (well, hangs) = (place.ready(86_400_000).await, place.ready(86_400_000).await);
        place.provider.damage(&hangs, Some(Damage::Hangs));
        let place = place.restart_earlier(Duration::from_secs(3_600)).await;
        for id in [&well, &hangs] {
            assert_eq!(place.status(id).await, Status::Unverified, "what was seen is from the future");
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(place.status(&well).await, Status::Ready, "what was read was probed, and that is later");
        assert_ne!(place.record(&hangs).await.phase, Phase::Ready, "and was found out");
        place.provider.damage(&well, Some(Damage::Hangs));
        assert_ne!(place.engine.verify(&well).await.unwrap().status, Status::Ready);
    });
}

/// A daemon that has only begun, on a disk that is full: it can take no lease, and so cannot probe.
#[test]
fn t3_a_look_that_could_not_be_made_shows_nothing() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.store.set_faults(Some(Box::new(|call| (call == "lease").then_some(Fault::Before))));
        let place = place.restart().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(place.status(&id).await, Status::Ready, "it was seen moments ago");
        assert_eq!(place.engine.verify(&id).await.unwrap().status, Status::Unverified, "and not since this was asked");
        let joined = place.engine.ensure(&id, EntryKind::Ensure, by()).await;
        assert!(matches!(joined, Err(EngineError::Unfit { .. })), "{joined:?}");
        place.store.set_faults(None);
        assert_eq!(place.engine.verify(&id).await.unwrap().status, Status::Ready);
        assert_eq!(place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap().status, Status::Ready);
    });
}

/// The first use after a restart is probed, also that by an `ensure` (T4).
#[test]
fn t4_an_ensure_after_a_restart_does_not_believe_the_daemon_before() {
    paused(async {
        let place = place().await;
        let id = place.ready(86_400_000).await;
        place.provider.damage(&id, Some(Damage::Hangs));
        let place = place.restart().await;
        let view = place.engine.ensure(&id, EntryKind::Ensure, by()).await.unwrap();
        assert_ne!(view.status, Status::Ready, "its agent hangs: {:?}", view.sandbox.phase);
    });
}

/// How many hang: several times as many as are looked at at a time that nobody waits for.
const HANGING: usize = 40;

/// Others are served as if nothing were: a look that waits in line takes seconds for each that is before it.
const SOON: Duration = Duration::from_secs(1);

#[test]
fn j7_many_that_hang_hold_up_nobody_else() {
    paused(async {
        let place = place().await;
        let mut hanging = Vec::new();
        for _ in 0..HANGING {
            hanging.push(place.ready(86_400_000).await);
        }
        let other = place.ready(86_400_000).await;
        for id in &hanging {
            place.provider.damage(id, Some(Damage::Hangs));
        }
        tokio::time::sleep(Duration::from_secs(40)).await;
        // Everything is stale, and all of it is read: the well one last.
        let query = ListQuery { limit: 500, ..ListQuery::default() };
        for id in hanging.iter().chain([&other]) {
            assert_eq!(place.status(id).await, Status::Unverified);
        }
        let began = Instant::now();
        assert_eq!(place.engine.list(&query).await.unwrap().0.len(), HANGING + 1);
        assert_eq!(place.engine.verify(&other).await.unwrap().status, Status::Ready);
        assert!(began.elapsed() <= SOON, "verified after {:?}", began.elapsed());
        let handle = place.engine.work_in(&Project::default(), &Which::Id(other), None).await.unwrap();
        handle
            .execute(
                &ExecutionId::from_bytes([7; 16]),
                &ExecSpec { argv: vec!["true".to_owned()], ..ExecSpec::default() },
            )
            .await
            .unwrap();
        assert!(began.elapsed() <= SOON, "a command after {:?}", began.elapsed());
        let made = place.engine.create(request()).await.unwrap().view.sandbox.id;
        place.engine.wait_ready(&made, LONG).await.unwrap();
        assert!(began.elapsed() <= SOON + SOON, "another one after {:?}", began.elapsed());
        // Who asks for one that hangs waits for what it takes to find that out, and not for the others.
        let began = Instant::now();
        assert_ne!(place.engine.verify(&hanging[HANGING - 1]).await.unwrap().status, Status::Ready);
        assert!(began.elapsed() <= 10 * SOON, "found out after {:?}", began.elapsed());
    });
}
