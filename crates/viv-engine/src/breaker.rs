//! A provider that fails again and again is left alone for a moment (J7).

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Failures in a row after which it is left alone.
const FAILURES_MAX: u32 = 5;

/// They have to be about this many: one sandbox that is stuck says nothing about the others.
const SUBJECTS_MIN: usize = 3;

/// For how long; then one call is let through to see.
const OPEN_MS: u64 = 5_000;

/// What stands between us and one destination.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    /// About whom they were; bounded by [`SUBJECTS_MIN`].
    subjects: BTreeSet<String>,
    open_until_ms: u64,
    opened: u64,
}

impl State {
    fn has_failed(&self) -> bool {
        self.failures >= FAILURES_MAX && self.subjects.len() >= SUBJECTS_MIN
    }
}

/// How it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerStatus {
    /// Between us and whom.
    pub destination: String,
    /// Whether calls are refused.
    pub open: bool,
    /// Failures in a row.
    pub failures: u32,
    /// How often it opened.
    pub opened: u64,
}

/// A call is refused for now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Open {
    pub(crate) failures: u32,
    pub(crate) retry_ms: u64,
}

impl Breaker {
    /// Whether a call may be made. When it was open for its time, one is, to see, and the next after the same time.
    pub(crate) fn admit(&self, now_ms: u64) -> Result<(), Open> {
        let mut state = self.lock();
        if !state.has_failed() {
            return Ok(());
        }
        if now_ms < state.open_until_ms {
            return Err(Open { failures: state.failures, retry_ms: state.open_until_ms - now_ms });
        }
        state.open_until_ms = now_ms + OPEN_MS;
        Ok(())
    }

    /// It answered, well or not.
    pub(crate) fn answered(&self) {
        let mut state = self.lock();
        state.failures = 0;
        state.subjects.clear();
    }

    /// It did not answer, about this one.
    pub(crate) fn silent(&self, subject: &str, now_ms: u64) {
        let mut state = self.lock();
        let was_open = state.has_failed();
        state.failures = state.failures.saturating_add(1);
        if state.subjects.len() < SUBJECTS_MIN {
            state.subjects.insert(subject.to_owned());
        }
        if state.has_failed() {
            state.opened += u64::from(!was_open);
            state.open_until_ms = now_ms + OPEN_MS;
        }
    }

    pub(crate) fn status(&self, destination: &str, now_ms: u64) -> BreakerStatus {
        let state = self.lock();
        let open = state.has_failed() && now_ms < state.open_until_ms;
        BreakerStatus { destination: destination.to_owned(), open, failures: state.failures, opened: state.opened }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j7_one_stuck_sandbox_opens_nothing() {
        let breaker = Breaker::default();
        for _ in 0..100 {
            breaker.silent("sbx_1", 0);
        }
        assert!(breaker.admit(0).is_ok());
    }

    #[test]
    fn j7_many_open_it_and_one_is_let_through_to_see() {
        let breaker = Breaker::default();
        for subject in ["a", "b", "c", "a", "b"] {
            assert!(breaker.admit(0).is_ok());
            breaker.silent(subject, 0);
        }
        assert!(breaker.admit(OPEN_MS - 1).is_err());
        assert!(breaker.admit(OPEN_MS).is_ok());
        assert!(breaker.admit(OPEN_MS).is_err());
        breaker.answered();
        assert!(breaker.admit(OPEN_MS).is_ok());
        assert_eq!(breaker.status("x", 0).opened, 1);
    }
}
