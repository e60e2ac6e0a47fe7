//! One queue of all alarms.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use viv_core::SandboxId;

use crate::clock::Clock;

/// When which sandbox has to be looked at: one alarm each at most, one sleep for all.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    alarms: Mutex<Alarms>,
    sooner: Notify,
}

#[derive(Debug, Default)]
struct Alarms {
    queue: BTreeSet<(u64, SandboxId)>,
    by_id: HashMap<SandboxId, u64>,
}

impl Timer {
    /// Sets the alarm of a sandbox, in place of the one it had.
    pub(crate) fn set(&self, sandbox: &SandboxId, at_ms: Option<u64>) {
        let mut alarms = self.lock();
        if let Some(before) = alarms.by_id.remove(sandbox) {
            alarms.queue.remove(&(before, sandbox.clone()));
        }
        let Some(at_ms) = at_ms else { return };
        let first = alarms.queue.first().is_none_or(|(first, _)| at_ms < *first);
        alarms.queue.insert((at_ms, sandbox.clone()));
        alarms.by_id.insert(sandbox.clone(), at_ms);
        drop(alarms);
        if first {
            self.sooner.notify_one();
        }
    }

    /// Waits for the next alarm and takes it out.
    pub(crate) async fn next(&self, clock: &Clock) -> SandboxId {
        loop {
            let first = self.lock().queue.first().map(|(at_ms, _)| *at_ms);
            match first {
                Some(at_ms) if at_ms <= clock.now_ms() => {
                    let mut alarms = self.lock();
                    if let Some((at_ms, sandbox)) = alarms.queue.pop_first() {
                        if at_ms <= clock.now_ms() {
                            alarms.by_id.remove(&sandbox);
                            return sandbox;
                        }
                        alarms.queue.insert((at_ms, sandbox));
                    }
                }
                // A permit that was left by `set` only makes this look once more.
                Some(at_ms) => {
                    tokio::select! {
                        biased;
                        () = self.sooner.notified() => {}
                        () = tokio::time::sleep_until(clock.at(at_ms)) => {}
                    }
                }
                None => self.sooner.notified().await,
            }
        }
    }

    /// How many alarms there are.
    pub(crate) fn len(&self) -> usize {
        self.lock().queue.len()
    }

    fn lock(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> SandboxId {
        SandboxId::from_bytes([n; 16])
    }

    #[tokio::test(start_paused = true)]
    async fn alarms_come_in_order_and_only_the_last_one_set() {
        let (timer, clock) = (Timer::default(), Clock::showing(1_000));
        timer.set(&id(1), Some(5_000));
        timer.set(&id(2), Some(2_000));
        timer.set(&id(3), Some(500));
        timer.set(&id(1), Some(1_500));
        timer.set(&id(4), Some(1_600));
        timer.set(&id(4), None);
        let mut heard = Vec::new();
        for _ in 0..3 {
            heard.push((timer.next(&clock).await, clock.now_ms()));
        }
        assert_eq!(heard, [(id(3), 1_000), (id(1), 1_500), (id(2), 2_000)]);
        assert_eq!(timer.len(), 0);
    }
}
