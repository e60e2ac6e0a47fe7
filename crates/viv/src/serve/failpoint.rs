//! Crash tests end the daemon at a named point, as a `kill -9` there would. Only in builds for development.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use viv_engine::Failpoint;

/// From `VIV_FAILPOINT=NAME[:N]`: the process is killed when the point is reached the Nth time.
pub(super) fn from_environment() -> Option<Failpoint> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let wanted = std::env::var("VIV_FAILPOINT").ok()?;
    let (name, nth) = match wanted.split_once(':') {
        Some((name, nth)) => (name.to_owned(), nth.parse().ok()?),
        None => (wanted, 1),
    };
    let reached = AtomicU32::new(0);
    Some(Failpoint(Arc::new(move |point| {
        if point == name && reached.fetch_add(1, Ordering::SeqCst) + 1 == nth {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    })))
}
