//! The way by which one daemon reaches store and provider. It can be cut, which is what a killed daemon looks like from
//! outside: nothing of it happens any more, wherever it was. It can be held, as when a process is stopped, and it can cut
//! itself at a call that was chosen before.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

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
    state: Arc<watch::Sender<State>>,
    /// How many calls are left before it is cut, and whether that one has its effect.
    left: Arc<Mutex<Option<(u64, bool)>>>,
}

impl Line {
    pub(crate) fn new() -> Self {
        Self { state: Arc::new(watch::Sender::new(State::Open)), left: Arc::default() }
    }

    /// Nothing comes through any more.
    pub(crate) fn cut(&self) {
        self.state.send_replace(State::Cut);
    }

    /// What is on its way waits.
    pub(crate) fn hold(&self) {
        self.state.send_if_modified(|state| std::mem::replace(state, State::Held) == State::Open);
    }

    /// And goes on.
    pub(crate) fn release(&self) {
        self.state.send_if_modified(|state| {
            let held = *state == State::Held;
            if held {
                *state = State::Open;
            }
            held
        });
    }

    /// Cuts itself at the call after so many, before or after that one has its effect.
    pub(crate) fn cut_at(&self, calls: u64, after: bool) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some((calls, after));
    }

    /// It is not cut by itself any more.
    pub(crate) fn stay(&self) {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(crate) fn is_cut(&self) -> bool {
        *self.state.borrow() == State::Cut
    }

    /// Answers when it is cut.
    pub(crate) async fn has_been_cut(&self) {
        // The sender lives as long as this.
        let _ = self.state.subscribe().wait_for(|state| *state == State::Cut).await;
    }

    /// Waits while it is held; for ever, once it is cut.
    async fn pass(&self) {
        if *self.state.borrow() == State::Open {
            return;
        }
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| *state == State::Open).await;
    }

    /// Whether this call is the one, and then whether it has its effect.
    fn is_last(&self) -> Option<bool> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let (calls, after) = (*left)?;
        *left = calls.checked_sub(1).map(|calls| (calls, after));
        left.is_none().then_some(after)
    }

    /// A call along this line.
    pub(crate) async fn call<T>(&self, call: impl Future<Output = T>) -> T {
        self.pass().await;
        let last = self.is_last();
        if last == Some(false) {
            self.cut();
            self.pass().await;
        }
        let answer = call.await;
        if last == Some(true) {
            self.cut();
        }
        self.pass().await;
        answer
    }
}
