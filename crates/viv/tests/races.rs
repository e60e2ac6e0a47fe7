//! Extending against expiring, a thousand times (L5, incidents 11, 17, 22).
#![allow(missing_docs, reason = "tests")]

mod support;

use std::time::Duration;

use support::{Ground, mutation};
use viv_core::EndCause;
use viv_provider::{DeadlineChange, InstanceState, Provider, ProviderError};

/// Real sandboxes raced in all, and at once.
const RACES: u64 = 1000;
const AT_ONCE: u64 = 10;

/// When the deadline is, counted from the moment that a sandbox runs.
const DEADLINE_MS: u64 = 60;

#[derive(Debug, Default)]
struct Tally {
    extended: u64,
    expired: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l5_incident_11_either_extended_and_alive_or_expired_and_gone() {
    let ground = Ground::new();
    let mut tally = Tally::default();
    for round in 0..RACES / AT_ONCE {
        let races = (0..AT_ONCE).map(|lane| {
            // Spread around the deadline, more before it than after since asking takes its time too, so that both
            // outcomes and the moment between them are met.
            let extend_at_ms = DEADLINE_MS - 24 + (round * AT_ONCE + lane) % 30;
            race(&ground, extend_at_ms)
        });
        for extended in futures_all(races).await {
            if extended {
                tally.extended += 1;
            } else {
                tally.expired += 1;
            }
        }
    }
    eprintln!("{tally:?}");
    assert!(tally.extended > RACES / 50 && tally.expired > RACES / 50, "not a race: {tally:?}");
    ground.assert_nothing_left();
}

/// Whether the extension won.
async fn race(ground: &Ground, extend_at_ms: u64) -> bool {
    let sandbox = ground.create(Duration::from_secs(600)).await;
    let instance = sandbox.instance();
    let exactly = DeadlineChange::ExactlyMs(DEADLINE_MS);
    ground.provider.extend(&mutation(1, 1), &sandbox.id, exactly).await.unwrap();
    tokio::time::sleep(Duration::from_millis(extend_at_ms)).await;
    let answer = ground.provider.extend(&mutation(1, 1), &sandbox.id, DeadlineChange::AtLeastMs(600_000)).await;
    let extended = match answer {
        Ok(deadline) => {
            assert!(deadline.remaining_ms > 500_000, "{deadline:?}");
            // Past the old deadline by far, it is alive in every respect.
            tokio::time::sleep(Duration::from_millis(2 * DEADLINE_MS)).await;
            assert_eq!(sandbox.state().await, InstanceState::Running, "extended and not alive");
            assert_eq!(sandbox.run("echo alive").await.0, "alive\n");
            true
        }
        Err(ProviderError::Expired) => {
            let ended = ground.provider.wait_end(&instance).await.unwrap();
            assert_eq!(ended.cause, EndCause::Expired, "refused as expired, ended otherwise");
            assert!(matches!(sandbox.state().await, InstanceState::Ended(_)), "expired and not gone");
            let again = ground.provider.extend(&mutation(1, 1), &sandbox.id, DeadlineChange::AtLeastMs(600_000)).await;
            assert!(matches!(again, Err(ProviderError::Expired)), "an extension resurrected it: {again:?}");
            false
        }
        other => panic!("neither extended nor expired: {other:?}"),
    };
    sandbox.destroy().await;
    extended
}

/// All at once on one task: enough concurrency for races between processes.
async fn futures_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        let mut all = true;
        for (future, slot) in &mut pending {
            if slot.is_none() {
                match future.as_mut().poll(cx) {
                    std::task::Poll::Ready(value) => *slot = Some(value),
                    std::task::Poll::Pending => all = false,
                }
            }
        }
        if all { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    pending.into_iter().filter_map(|(_, slot)| slot).collect()
}
