//! Time as the simulation has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// A clock that moves only when it is told to.
///
/// It is also the one bell of a simulation: whoever waits for anything waits
/// for it to ring, and then looks. It rings when time moves and when a
/// provider changed something, so no wait needs a timer.
#[derive(Debug, Clone, Default)]
pub struct SimClock {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    now_ms: AtomicU64,
    bell: Notify,
}

impl SimClock {
    /// A clock that shows this wall time.
    pub fn starting_at(now_ms: u64) -> Self {
        let clock = Self::default();
        clock.inner.now_ms.store(now_ms, Ordering::SeqCst);
        clock
    }

    /// What it shows, for wall time and all deadlines alike.
    pub fn now_ms(&self) -> u64 {
        self.inner.now_ms.load(Ordering::SeqCst)
    }

    /// Moves it and wakes whoever waits.
    pub fn advance(&self, ms: u64) {
        self.inner.now_ms.fetch_add(ms, Ordering::SeqCst);
        self.ring();
    }

    /// Something changed: whoever waits shall look.
    pub(super) fn ring(&self) {
        self.inner.bell.notify_waiters();
    }

    /// The next ring after this call. Ask for it before looking, so that none is missed between.
    pub(super) fn next_ring(&self) -> Notified<'_> {
        self.inner.bell.notified()
    }
}
