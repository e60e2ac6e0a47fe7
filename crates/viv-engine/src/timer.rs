//! One queue of all alarms.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use viv_core::SandboxId;

use crate::agenda::Agenda;
use crate::clock::Clock;

/// When which sandbox has to be looked at: one alarm each at most, and one for a write that may have been done, with one
/// sleep for all.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    alarms: Mutex<Alarms>,
    sooner: Notify,
}

#[derive(Debug, Default)]
struct Alarms {
    /// As records want it.
    own: Agenda,
    /// As the store left it in doubt. What is known of a record meanwhile may be what it was before.
    doubted: Agenda,
}

impl Alarms {
    fn first_ms(&self) -> Option<u64> {
        [self.own.first_ms(), self.doubted.first_ms()].into_iter().flatten().min()
    }

    fn take_due(&mut self, now_ms: u64) -> Option<SandboxId> {
        self.own.take_due(now_ms).or_else(|| self.doubted.take_due(now_ms))
    }
}

impl Timer {
    /// Sets the alarm of a sandbox, in place of the one it had.
    pub(crate) fn set(&self, sandbox: &SandboxId, at_ms: Option<u64>) {
        self.change(|alarms| alarms.own.set(sandbox, at_ms));
    }

    /// A write about a sandbox may have been done: it is looked at by then, whatever its own alarm.
    pub(crate) fn doubt(&self, sandbox: &SandboxId, at_ms: u64) {
        self.change(|alarms| {
            if !alarms.doubted.has(sandbox) {
                alarms.doubted.set(sandbox, Some(at_ms));
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Alarms)) {
        let mut alarms = self.lock();
        let before_ms = alarms.first_ms();
        change(&mut alarms);
        let first_ms = alarms.first_ms();
        drop(alarms);
        if first_ms.is_some_and(|first_ms| before_ms.is_none_or(|before_ms| first_ms < before_ms)) {
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
                // A permit that was left by a change only makes this look once more.
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
        let alarms = self.lock();
        alarms.own.len() + alarms.doubted.len()
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
        timer.doubt(&id(2), 1_700);
        timer.doubt(&id(2), 1_800);
        timer.set(&id(2), Some(2_000));
        let mut heard = Vec::new();
        for _ in 0..4 {
            heard.push((timer.next(&clock).await, clock.now_ms()));
        }
        assert_eq!(heard, [(id(3), 1_000), (id(1), 1_500), (id(2), 1_700), (id(2), 2_000)]);
        assert_eq!(timer.len(), 0);
    }
}
