//! One queue of all alarms.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use viv_core::SandboxId;

use crate::agenda::Agenda;
use crate::clock::Clock;

/// When which sandbox has to be looked at: one alarm each at most, one sleep for all.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    alarms: Mutex<Agenda>,
    sooner: Notify,
}

impl Timer {
    /// Sets the alarm of a sandbox, in place of the one it had.
    pub(crate) fn set(&self, sandbox: &SandboxId, at_ms: Option<u64>) {
        let mut alarms = self.lock();
        alarms.set(sandbox, None);
        let Some(at_ms) = at_ms else { return };
        let first = alarms.first_ms().is_none_or(|first_ms| at_ms < first_ms);
        alarms.set(sandbox, Some(at_ms));
        drop(alarms);
        if first {
            self.sooner.notify_one();
        }
    }

    /// Waits for the next alarm and takes it out.
    pub(crate) async fn next(&self, clock: &Clock) -> SandboxId {
        loop {
            let first_ms = {
                let mut alarms = self.lock();
                if let Some(sandbox) = alarms.take_due(clock.now_ms()) {
                    return sandbox;
                }
                alarms.first_ms()
            };
            match first_ms {
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
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Agenda> {
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
