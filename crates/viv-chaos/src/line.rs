//! The way by which one daemon reaches store and provider. It can be cut, which is what a killed daemon looks like from
//! outside: nothing of it happens any more, wherever it was. It can be held, as when a process is stopped, and it can cut
//! itself at a call that was chosen before.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;
use viv_core::SandboxId;

use crate::script::{Calls, Way};

/// So many calls of one daemon at one moment are somebody turning in circles: time stands still for as long, so that the
/// world would not end. The start of a daemon that has a thousand sandboxes makes a tenth of it.
const CALLS_AT_ONCE_MAX: u64 = 100_000;

/// How it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Held,
    Cut,
}

/// One daemon's way to the world. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    state: Arc<Mutex<State>>,
    /// Rings when it changes. Whoever waited first is woken first, which a channel does not promise, and a world has to
    /// replay exactly.
    bell: Arc<Notify>,
    /// How many calls are left before it is cut, and whether that one has its effect.
    left: Arc<Mutex<Option<(u64, bool)>>>,
    /// It does not cut itself any more, not even after a call that is on its way: one that waits for an end takes hours.
    stays: Arc<AtomicBool>,
    /// It was held at some time, so that answers came later than they were given.
    was_held: Arc<AtomicBool>,
    /// Changes that are counted, and how one of them goes.
    calls: Option<Arc<Calls>>,
    /// The moment of the last call, and how many there were at it.
    at_once: Arc<Mutex<Option<(Instant, u64)>>>,
}

impl Line {
    pub(crate) fn new() -> Self {
        let state = Arc::new(Mutex::new(State::Open));
        Self {
            state,
            bell: Arc::default(),
            left: Arc::default(),
            stays: Arc::default(),
            was_held: Arc::default(),
            calls: None,
            at_once: Arc::default(),
        }
    }

    /// One on which changes are counted.
    pub(crate) fn counting(calls: Arc<Calls>) -> Self {
        Self { calls: Some(calls), ..Self::new() }
    }

    /// How this change goes, if it is the one that was chosen.
    pub(crate) fn way_of(&self, call: &'static str, is_write: bool, about: Option<&SandboxId>) -> Option<Way> {
        self.calls.as_ref()?.next(call, is_write, about)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self, from: &[State], to: State) {
        let mut state = self.state();
        if from.contains(&state) {
            *state = to;
            self.bell.notify_waiters();
        }
    }

    /// Nothing comes through any more.
    pub(crate) fn cut(&self) {
        self.turn(&[State::Open, State::Held], State::Cut);
    }

    /// What is on its way waits.
    pub(crate) fn hold(&self) {
        self.was_held.store(true, Ordering::SeqCst);
        self.turn(&[State::Open], State::Held);
    }

    /// And goes on.
    pub(crate) fn release(&self) {
        self.turn(&[State::Held], State::Open);
    }

    /// Cuts itself at the call after so many, before or after that one has its effect.
    pub(crate) fn cut_at(&self, calls: u64, after: bool) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some((calls, after));
    }

    /// It is not cut by itself any more.
    pub(crate) fn stay(&self) {
        self.stays.store(true, Ordering::SeqCst);
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether answers may have come later than they were given.
    pub(crate) fn was_held(&self) -> bool {
        self.was_held.load(Ordering::SeqCst)
    }

    pub(crate) fn is_cut(&self) -> bool {
        *self.state() == State::Cut
    }

    /// Answers when it is so.
    async fn wait_for(&self, wanted: State) {
        loop {
            // Listening begins before the look, so a change between look and wait is heard.
            let mut rung = pin!(self.bell.notified());
            rung.as_mut().enable();
            if *self.state() == wanted {
                return;
            }
            rung.await;
        }
    }

    /// Answers when it is cut.
    pub(crate) async fn has_been_cut(&self) {
        self.wait_for(State::Cut).await;
    }

    /// Waits while it is held; for ever, once it is cut.
    async fn pass(&self) {
        if *self.state() != State::Open {
            self.wait_for(State::Open).await;
        }
    }

    /// Whether this call is the one, and then whether it has its effect.
    fn is_last(&self) -> Option<bool> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (calls, after) = (*left)?;
        *left = calls.checked_sub(1).map(|calls| (calls, after));
        left.is_none().then_some(after)
    }

    /// Ends whoever turns in circles, which is told as a panic of its world.
    fn count(&self) {
        let now = Instant::now();
        let mut at_once = self.at_once.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = at_once.filter(|(at, _)| *at == now).map_or(0, |(_, calls)| calls) + 1;
        *at_once = Some((now, calls));
        drop(at_once);
        assert!(calls <= CALLS_AT_ONCE_MAX, "somebody turns in circles: {calls} calls at one moment");
    }

    /// A call along this line.
    pub(crate) async fn call<T>(&self, call: impl Future<Output = T>) -> T {
        self.count();
        self.pass().await;
        let last = self.is_last();
        if last == Some(false) {
            self.cut();
            self.pass().await;
        }
        let answer = call.await;
        if last == Some(true) && !self.stays.load(Ordering::SeqCst) {
            self.cut();
        }
        self.pass().await;
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn calls_that_take_no_time_are_bounded() {
        let line = Line::new();
        for _ in 0..2 {
            for _ in 0..CALLS_AT_ONCE_MAX {
                line.call(async {}).await;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let turning = async move {
            loop {
                line.call(async {}).await;
            }
        };
        let ended = tokio::spawn(turning).await.map(|(): ()| ());
        assert!(ended.unwrap_err().is_panic());
    }
}
