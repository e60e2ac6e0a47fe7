//! Webhooks to somebody who does not answer (J7).
#![allow(missing_docs, reason = "tests")]

mod place;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use place::{Place, paused, place_with, request};
use viv_core::SandboxId;
use viv_core::hook::{Hook, HookAction, HookPoint, OnFailure, Secret};
use viv_core::spec::{Policy, Project, SandboxSpec};
use viv_engine::{BreakerKind, CreateRequest, Delivery, Undelivered, Webhooks, Which};

/// Where requests went to, and whether the first of the two places is down.
#[derive(Clone, Default)]
struct Outside {
    asked: Arc<Mutex<BTreeMap<String, u32>>>,
    well: Arc<AtomicBool>,
}

const DOWN: &str = "https://down.example/hook?token=hidden";
const WELL: &str = "https://well.example/hook";
const DENIES: &str = "https://denies.example/hook";
const SLOW: &str = "https://slow.example/hook";

impl Outside {
    fn webhooks(&self) -> Webhooks {
        let outside = self.clone();
        Webhooks(Arc::new(move |delivery: Delivery| {
            *outside.asked.lock().unwrap().entry(delivery.url.clone()).or_default() += 1;
            let is_well = outside.well.load(Ordering::SeqCst);
            Box::pin(async move {
                match delivery.url.as_str() {
                    DOWN if !is_well => Err(Undelivered { why: "cannot be reached".to_owned(), is_down: true }),
                    SLOW => {
                        tokio::time::sleep(Duration::from_secs(6)).await;
                        Ok(())
                    }
                    DENIES => Err(Undelivered { why: "answered 404".to_owned(), is_down: false }),
                    _ => Ok(()),
                }
            })
        }))
    }

    fn asked(&self, url: &str) -> u32 {
        self.asked.lock().unwrap().get(url).copied().unwrap_or(0)
    }
}

/// Makes a sandbox that tells this place when it has started; what came of that.
async fn tells(place: &Place, url: &str) -> (SandboxId, String) {
    let action = HookAction::Webhook { url: url.to_owned(), secret: Secret::new("a secret of the tests") };
    let hook = Hook { action, deadline_ms: 60_000, on_failure: OnFailure::Ignore };
    let spec = SandboxSpec { hooks: [(HookPoint::AfterStart, hook)].into(), ..SandboxSpec::default() };
    let id = place.made(CreateRequest { spec, ..request() }).await;
    let lines = place.lines(&id).await;
    let line = lines.iter().find(|line| line.line.data.get("hook").is_some()).expect("what came of it is told");
    (id, line.line.data.to_string())
}

#[test]
fn j7_a_destination_that_fails_is_left_alone_and_asked_again_later() {
    paused(async {
        let outside = Outside::default();
        let place = place_with(|config| config.webhooks = Some(outside.webhooks())).await;
        let statuses = || {
            let all = place.engine.breakers().into_iter().filter(|breaker| breaker.kind == BreakerKind::Webhook);
            all.map(|breaker| (breaker.destination, breaker.open)).collect::<Vec<_>>()
        };
        // Three tries, then two more until it is left alone.
        tells(&place, DOWN).await;
        assert_eq!((outside.asked(DOWN), statuses()), (3, vec![("https://down.example:443".to_owned(), false)]));
        let (id, told) = tells(&place, DOWN).await;
        assert_eq!((outside.asked(DOWN), statuses()), (5, vec![("https://down.example:443".to_owned(), true)]));
        assert!(told.contains("failed 5 times in a row") && !told.contains("hidden"), "{told}");
        for _ in 0..3 {
            tells(&place, DOWN).await;
        }
        assert_eq!(outside.asked(DOWN), 5, "nobody asks it meanwhile");
        let diagnosis = place.engine.diagnose(&Project::default(), &Which::Id(id)).await.unwrap();
        assert!(diagnosis.remarks.iter().any(|remark| remark.code == "webhook_left_alone"), "{:?}", diagnosis.remarks);
        // Others are others, and who refuses a request is there.
        tells(&place, WELL).await;
        for _ in 0..4 {
            tells(&place, DENIES).await;
        }
        assert_eq!((outside.asked(WELL), outside.asked(DENIES)), (1, 12));
        assert_eq!(statuses().len(), 1);
        // One is let through to see.
        tokio::time::sleep(Duration::from_secs(31)).await;
        tells(&place, DOWN).await;
        assert_eq!(outside.asked(DOWN), 6);
        outside.well.store(true, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(31)).await;
        tells(&place, DOWN).await;
        tells(&place, DOWN).await;
        assert_eq!((outside.asked(DOWN), statuses()), (8, Vec::new()));
    });
}

/// Alarms ring while somebody outside takes its time, and what broke off the delivery made it come again (seed 86290).
#[test]
fn l14_who_is_told_ahead_of_the_deadline_and_answers_slowly_is_told_once() {
    paused(async {
        let outside = Outside::default();
        let place = place_with(|config| config.webhooks = Some(outside.webhooks())).await;
        let action = HookAction::Webhook { url: SLOW.to_owned(), secret: Secret::new("a secret of the tests") };
        let hook = Hook { action, deadline_ms: 20_000, on_failure: OnFailure::Ignore };
        let spec = SandboxSpec { hooks: [(HookPoint::OnTimeout, hook)].into(), ..SandboxSpec::default() };
        let policy = Policy { lifetime_ms: 60_000, ..request().policy };
        let id = place.made(CreateRequest { spec, policy, ..request() }).await;
        tokio::time::sleep(Duration::from_secs(50)).await;
        let record = place.record(&id).await;
        assert!(record.warned_of_ms.is_some() && record.warned_of_ms == record.expires_at_ms, "{record:?}");
        assert_eq!(outside.asked(SLOW), 1);
    });
}
