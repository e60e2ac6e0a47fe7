//! The connections that are open, so that they can be counted, bounded and ended.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::agent::lock;

/// Most connections at once. Each costs a thread; a daemon keeps a few, and one per attached client.
pub(crate) const CONNECTIONS_MAX: usize = 256;

/// While ending all of them: how often to look for one that came in between.
const LATECOMERS_EVERY: Duration = Duration::from_millis(10);

/// All open connections.
#[derive(Default)]
pub(crate) struct Connections {
    open: Mutex<Vec<Weak<UnixStream>>>,
    closed: Condvar,
}

impl Connections {
    /// Notes a new one; false when there are too many.
    pub(crate) fn enter(&self, stream: &Arc<UnixStream>) -> bool {
        let mut open = lock(&self.open);
        if open.len() >= CONNECTIONS_MAX {
            return false;
        }
        open.push(Arc::downgrade(stream));
        true
    }

    /// It is closed, or somebody else's from now on.
    pub(crate) fn leave(&self, stream: &Arc<UnixStream>) {
        lock(&self.open).retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(stream)));
        self.closed.notify_all();
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.open).len()
    }

    /// Ends all but one and waits until their threads let go; returns how many there were,
    /// or `None` when some did not let go in time.
    pub(crate) fn end_others(&self, kept: &Arc<UnixStream>, patience: Duration) -> Option<u64> {
        let deadline = Instant::now() + patience;
        let mut open = lock(&self.open);
        let mut ended = open.len() as u64 - 1;
        while open.len() > 1 {
            deadline.checked_duration_since(Instant::now())?;
            for stream in open.iter().filter_map(Weak::upgrade).filter(|stream| !Arc::ptr_eq(stream, kept)) {
                // It may have gone by itself.
                let _ = stream.shutdown(Shutdown::Both);
            }
            let before = open.len();
            open = self.closed.wait_timeout(open, LATECOMERS_EVERY).unwrap_or_else(PoisonError::into_inner).0;
            // One that was just being accepted is ended in the next round.
            ended += (open.len() as u64).saturating_sub(before as u64);
        }
        Some(ended)
    }
}
