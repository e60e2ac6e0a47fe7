//! A word on standard error when something takes longer than a second: turning on a terminal, said once elsewhere.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Who waits less than this needs no word.
const AFTER: Duration = Duration::from_secs(1);
/// How fast it turns.
const EVERY: Duration = Duration::from_millis(120);
const TURNS: [char; 4] = ['|', '/', '-', '\\'];

/// Somebody waits. The word is taken back when this is dropped.
pub(super) struct Waiting {
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiting {
    /// For this.
    pub(super) fn on(what: impl Into<String>) -> Self {
        let what = what.into();
        let (done, is_done) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let began = Instant::now();
            if is_done.recv_timeout(AFTER) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let mut err = io::stderr();
            if !err.is_terminal() {
                let _ = writeln!(err, "{what} …");
                return;
            }
            let mut turns = TURNS.iter().cycle();
            loop {
                let turn = turns.next().unwrap_or(&'-');
                let _ = write!(err, "\r\x1b[K{turn} {what} ({}s)", began.elapsed().as_secs());
                if is_done.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            let _ = write!(err, "\r\x1b[K");
        });
        Self { done: Some(done), thread: Some(thread) }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // The other end sees that this one is gone.
        self.done.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
