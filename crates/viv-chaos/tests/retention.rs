//! What is kept of what is over, and for how long: by the engine itself, on simulated time (J9, T10).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::time::Duration;

use place::{by, paused, persistent, place_ticking, request};
use viv_core::lifecycle::Status;
use viv_engine::CreateRequest;
use viv_store::{Idempotency, Store};

const DAY: Duration = Duration::from_secs(86_400);

#[test]
fn j9_t10_tombstones_shrink_by_themselves_and_keep_why_and_when() {
    paused(async {
        let place = place_ticking(60_000, |config| config.periods.keep = 3 * DAY).await;
        let key = viv_engine::KeyedBy { key: "once".to_owned(), body_hash: [7; 32] };
        let labels = [("team".to_owned(), "search".to_owned())].into();
        let mut asked = CreateRequest { labels, key: Some(key), ..request() };
        asked.spec.env.insert("TOKEN".to_owned(), "much".to_owned());
        let (over, rests) = (place.made(asked).await, place.made(persistent()).await);
        let remembered = || async {
            let record = place.record(&over).await;
            let key = Idempotency {
                project: record.project,
                route: "sandboxes.create".to_owned(),
                key: "once".to_owned(),
                body_hash: [7; 32],
                at_ms: 0,
                made: None,
            };
            place.store.remembered(&key).await.unwrap().is_some()
        };
        place.delete(&over).await;
        let before = place.record(&over).await;
        tokio::time::sleep(2 * DAY).await;
        assert_eq!(place.record(&over).await.labels, before.labels, "its time is not over");
        assert!(!place.lines(&over).await.is_empty() && remembered().await);
        tokio::time::sleep(2 * DAY).await;
        let left = place.record(&over).await;
        assert!(left.labels.is_empty() && left.spec.env.is_empty(), "{left:?}");
        assert_eq!((&left.id, &left.cause, left.phase_since_ms), (&before.id, &before.cause, before.phase_since_ms));
        assert!(place.lines(&over).await.is_empty() && !remembered().await, "they are forgotten");
        assert_eq!(place.status(&over).await, Status::Stopped, "and what it was is told on");
        place.engine.delete(&over, by()).await.unwrap();
        assert!(!place.record(&rests).await.is_over(), "what rests is left alone");
    });
}
