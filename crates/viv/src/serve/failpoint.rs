//! Crash tests end the daemon at a named point, as a `kill -9` there would; others hold it there while they break
//! something. Only in builds for development.
//!
//! ```text
//! VIV_FAILPOINT=NAME[:N]            the process is killed when the point is reached the Nth time
//! VIV_FAILPOINT=NAME@FOLDER         whoever reaches it makes FOLDER/N.reached, for the Nth time, and waits there
//!                                   until FOLDER/N.go or FOLDER/open exists
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use viv_engine::Failpoint;

/// How long somebody is held before the test is taken to have gone away.
const HELD_MAX: Duration = Duration::from_secs(300);

/// How often it is looked whether he may go on.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What happens to who reaches the point.
enum Fate {
    /// The process is killed, this time.
    KilledAt(u32),
    /// It waits for a file in this folder.
    HeldIn(PathBuf),
}

/// The point that the environment names.
pub(super) fn from_environment() -> Option<Failpoint> {
    if !cfg!(debug_assertions) {
        return None;
    }
    let wanted = std::env::var("VIV_FAILPOINT").ok()?;
    let (name, fate) = match (wanted.split_once('@'), wanted.split_once(':')) {
        (Some((name, folder)), _) => (name.to_owned(), Fate::HeldIn(folder.into())),
        (None, Some((name, nth))) => (name.to_owned(), Fate::KilledAt(nth.parse().ok()?)),
        (None, None) => (wanted, Fate::KilledAt(1)),
    };
    let reached = AtomicU32::new(0);
    Some(Failpoint(Arc::new(move |point| {
        if point != name {
            return;
        }
        let count = reached.fetch_add(1, Ordering::SeqCst) + 1;
        match &fate {
            Fate::KilledAt(nth) if count == *nth => {
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
            Fate::KilledAt(_) => {}
            // Everything else goes on meanwhile: this thread's other work is handed to another.
            Fate::HeldIn(folder) => tokio::task::block_in_place(|| hold(folder, count)),
        }
    })))
}

fn hold(folder: &Path, count: u32) {
    if fs::write(folder.join(format!("{count}.reached")), "").is_err() {
        return;
    }
    let (go, open) = (folder.join(format!("{count}.go")), folder.join("open"));
    let until = Instant::now() + HELD_MAX;
    while !go.exists() && !open.exists() && Instant::now() < until {
        thread::sleep(LOOK_AGAIN);
    }
}
