//! What a start costs, and what it takes up: on simulated time (J4, L3, T8).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use place::{LONG, Place, by, paused, persistent, place};
use viv_core::SandboxId;
use viv_core::lifecycle::{Desired, Entry, EntryKind, PhaseName, Status};
use viv_core::spec::Project;
use viv_engine::Which;
use viv_store::{Change, Store};

impl Place {
    async fn hibernated(&self) -> SandboxId {
        let id = self.made(persistent()).await;
        self.engine.hibernate(&id, by()).await.unwrap();
        assert_eq!(self.engine.wait_settled(&id, LONG).await.unwrap().sandbox.phase.name(), PhaseName::Hibernated);
        id
    }

    /// Another daemon takes over: it, and how often the store was asked for what before it was there.
    async fn restart_counted(self) -> (Self, BTreeMap<&'static str, u64>) {
        let (calls, store) = (Arc::<Mutex<BTreeMap<&'static str, u64>>>::default(), self.store.clone());
        let counted = calls.clone();
        store.set_faults(Some(Box::new(move |call| {
            *counted.lock().unwrap().entry(call).or_default() += 1;
            None
        })));
        let place = self.restart().await;
        store.set_faults(None);
        let calls = calls.lock().unwrap().clone();
        (place, calls)
    }

    async fn known(&self) -> usize {
        self.engine.stats(None).await.unwrap().known
    }
}

#[test]
fn j4_a_start_reads_what_lives_and_not_what_rests() {
    let started = |resting: usize| {
        let told = Arc::new(Mutex::new(BTreeMap::new()));
        let tell = told.clone();
        paused(async move {
            let place = place().await;
            for _ in 0..resting {
                place.hibernated().await;
            }
            for _ in 0..3 {
                place.ready(86_400_000).await;
            }
            let (place, calls) = place.restart_counted().await;
            assert_eq!(place.known().await, 3, "only what lives");
            *tell.lock().unwrap() = calls;
        });
        told.lock().unwrap().clone()
    };
    let few = started(5);
    assert!(few.contains_key("list") && few.contains_key("due"), "{few:?}");
    assert_eq!(few.get("get"), None, "{few:?}");
    assert_eq!(few, started(50));
}

#[test]
fn l3_an_entry_that_was_left_waiting_at_what_rests_is_taken_up_by_the_next_daemon() {
    paused(async {
        let place = place().await;
        let (asleep, wanted) = (place.hibernated().await, place.hibernated().await);
        // The daemon died when it had written that it rests, and before it woke it for who waited.
        place.engine.shut_down();
        let mut record = place.record(&wanted).await;
        let at_ms = place.engine.now_ms();
        record.version += 1;
        (record.phase_since_ms, record.desired) = (at_ms, Desired::Running);
        record.entry = Some(Entry { kind: EntryKind::Ensure, by: by(), at_ms });
        let change = Change {
            sandbox: record,
            lines: Vec::new(),
            idempotency: None,
            quota: None,
            unused_since_ms: None,
            snapshots: Vec::new(),
        };
        place.store.commit(place.engine.epoch(), change).await.unwrap();
        let place = place.restart().await;
        // Sooner than those who look for lost alarms would find it.
        let view = place.engine.wait_ready(&wanted, Duration::from_secs(3)).await.unwrap();
        assert_eq!(view.status, Status::Ready);
        assert_eq!(place.record(&asleep).await.phase.name(), PhaseName::Hibernated);
    });
}

#[test]
fn t8_what_was_at_rest_at_the_start_is_known_once_somebody_has_to_do_with_it() {
    paused(async {
        let place = place().await;
        let id = place.hibernated().await;
        let place = place.restart().await;
        assert_eq!(place.known().await, 0);
        let which = Which::Id(id.clone());
        place.engine.get(&Project::default(), &which, "reader").await.unwrap();
        let diagnosis = place.engine.diagnose(&Project::default(), &which).await.unwrap();
        assert!(diagnosis.reads.iter().any(|(reader, _)| reader == "reader"), "{:?}", diagnosis.reads);
        assert_eq!(place.record(&id).await.phase.name(), PhaseName::Hibernated, "reading resumes nothing (T9)");
        place.delete(&id).await;
        assert_eq!(place.known().await, 0, "and nothing is known of what is over");
    });
}
