//! Who fails again and again is left alone for a moment (J7): the provider, and each place to which webhooks go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Failures in a row after which it is left alone.
const FAILURES_MAX: u32 = 5;

/// They have to be about this many: one sandbox that is stuck says nothing about the others.
const SUBJECTS_MIN: usize = 3;

/// For how long; then one call is let through to see.
const OPEN_MS: u64 = 5_000;

/// How long a place outside is left alone: who waits for it has its own time to wait.
const OUTSIDE_OPEN_MS: u64 = 30_000;

/// Most places outside of which failures are remembered; of more, the one that failed longest ago is forgotten.
const OUTSIDE_MAX: usize = 256;

/// What stands between us and the provider.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: Mutex<State>,
}

/// What stands between us and those outside whom webhooks go to, each for itself. Only who fails is remembered.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    failing: Mutex<BTreeMap<String, Failing>>,
}

#[derive(Debug, Default)]
struct Failing {
    failures: u32,
    last_at_ms: u64,
    open_until_ms: u64,
    opened: u64,
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

/// What is behind a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerKind {
    /// Who runs the sandboxes.
    Provider,
    /// Somebody whom webhooks go to.
    Webhook,
}

/// How it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerStatus {
    /// What is behind it.
    pub kind: BreakerKind,
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
        let (failures, opened) = (state.failures, state.opened);
        BreakerStatus { kind: BreakerKind::Provider, destination: destination.to_owned(), open, failures, opened }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Outside {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Failing>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request may be made there. When it was left alone for its time, one is, to see.
    pub(crate) fn admit(&self, destination: &str, now_ms: u64) -> Result<(), Open> {
        let mut failing = self.lock();
        let Some(known) = failing.get_mut(destination).filter(|known| known.failures >= FAILURES_MAX) else {
            return Ok(());
        };
        if now_ms < known.open_until_ms {
            return Err(Open { failures: known.failures, retry_ms: known.open_until_ms - now_ms });
        }
        known.open_until_ms = now_ms.saturating_add(OUTSIDE_OPEN_MS);
        Ok(())
    }

    /// It answered: there is nothing to remember.
    pub(crate) fn answered(&self, destination: &str) {
        self.lock().remove(destination);
    }

    /// It did not, or said that it cannot.
    pub(crate) fn failed(&self, destination: &str, now_ms: u64) {
        let mut failing = self.lock();
        if failing.len() >= OUTSIDE_MAX && !failing.contains_key(destination) {
            let oldest = failing.iter().min_by_key(|(_, known)| known.last_at_ms).map(|(name, _)| name.clone());
            oldest.and_then(|oldest| failing.remove(&oldest));
        }
        let known = failing.entry(destination.to_owned()).or_default();
        known.failures = known.failures.saturating_add(1);
        known.last_at_ms = now_ms;
        if known.failures >= FAILURES_MAX {
            known.opened += u64::from(known.failures == FAILURES_MAX);
            known.open_until_ms = now_ms.saturating_add(OUTSIDE_OPEN_MS);
        }
    }

    /// All that fail.
    pub(crate) fn status(&self, now_ms: u64) -> Vec<BreakerStatus> {
        let shown = |(destination, known): (&String, &Failing)| BreakerStatus {
            kind: BreakerKind::Webhook,
            destination: destination.clone(),
            open: known.failures >= FAILURES_MAX && now_ms < known.open_until_ms,
            failures: known.failures,
            opened: known.opened,
        };
        self.lock().iter().map(shown).collect()
    }
}

/// Where a URL leads to: scheme, host and port. Paths and queries are often secrets, and so is what stands before an `@`
/// (S6).
pub fn destination(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let authority = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    // The colons of an address in brackets are its own.
    let after_host = host.rsplit_once(']').map_or(host, |(_, after)| after);
    let port = match (after_host.contains(':'), scheme.to_ascii_lowercase().as_str()) {
        (true, _) => "",
        (false, "https") => ":443",
        (false, _) => ":80",
    };
    format!("{scheme}://{host}{port}").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j7_a_place_outside_is_left_alone_by_itself_and_one_is_let_through_to_see() {
        let outside = Outside::default();
        for at_ms in 0..u64::from(FAILURES_MAX) {
            assert!(outside.admit("a", at_ms).is_ok());
            outside.failed("a", at_ms);
        }
        let open_until_ms = u64::from(FAILURES_MAX) - 1 + OUTSIDE_OPEN_MS;
        assert!(outside.admit("a", open_until_ms - 1).is_err());
        assert!(outside.admit("b", 0).is_ok(), "others are others");
        let shown = outside.status(10);
        assert_eq!((shown.len(), shown[0].open, shown[0].failures, shown[0].opened), (1, true, FAILURES_MAX, 1));
        assert!(outside.admit("a", open_until_ms).is_ok());
        assert!(outside.admit("a", open_until_ms).is_err(), "one, and the next after the same time");
        outside.failed("a", open_until_ms + 10);
        assert!(outside.admit("a", open_until_ms + OUTSIDE_OPEN_MS).is_err());
        outside.answered("a");
        assert!(outside.admit("a", open_until_ms).is_ok());
        assert_eq!(outside.status(open_until_ms), []);
    }

    #[test]
    fn j7_of_too_many_that_fail_the_one_that_did_longest_ago_is_forgotten() {
        let outside = Outside::default();
        for at in 0..=OUTSIDE_MAX as u64 {
            outside.failed(&format!("d{at}"), at);
        }
        let shown = outside.status(0);
        assert_eq!(shown.len(), OUTSIDE_MAX);
        assert!(!shown.iter().any(|one| one.destination == "d0"));
    }

    #[test]
    fn a_destination_is_scheme_host_and_port_and_holds_no_secret() {
        for (url, expected) in [
            ("https://Example.com/hook?token=hidden", "https://example.com:443"),
            ("http://example.com", "http://example.com:80"),
            ("http://me:hidden@example.com:8080#x", "http://example.com:8080"),
            ("https://[2001:db8::1]/a", "https://[2001:db8::1]:443"),
            ("https://[2001:db8::1]:8443/a", "https://[2001:db8::1]:8443"),
            ("HTTPS://a.b?c=https://d/e@f", "https://a.b:443"),
        ] {
            assert_eq!(destination(url), expected);
        }
    }

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
