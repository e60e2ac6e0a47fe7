//! Progress on standard error: one line that moves on a terminal, a line for each step elsewhere.

use std::cell::RefCell;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use viv_image::Phase;
use viv_sandbox::ImageProgress;

use crate::text::bytes;

/// More often than this nobody can read.
const EVERY: Duration = Duration::from_millis(100);

/// What was shown last.
#[derive(Default)]
pub(super) struct Shown {
    last: RefCell<Option<Instant>>,
}

impl Shown {
    /// Shows it, if it is time.
    #[expect(clippy::needless_pass_by_value, reason = "this is what the library calls")]
    pub(super) fn tell(&self, told: ImageProgress) -> ControlFlow<()> {
        let (line, is_step) = match told {
            ImageProgress::Fetching(progress) => {
                let digest = progress.digest.hex();
                let (done, total) = (bytes(progress.done_bytes), bytes(progress.total_bytes));
                let what = match progress.phase {
                    Phase::Waiting => "waiting for somebody else who fetches it",
                    Phase::Fetching => "fetching",
                    Phase::Pushing => "sending",
                    Phase::Retrying => "broken off, going on",
                    Phase::Present => "there already",
                    Phase::Done => "done",
                };
                let is_step = matches!(progress.phase, Phase::Present | Phase::Done | Phase::Retrying);
                (format!("{}  {what}  {done} of {total}", &digest[..12]), is_step)
            }
            ImageProgress::Unpacking { layer, of } => (format!("layer {layer} of {of}  unpacking"), true),
            ImageProgress::Shared { layer, of } => (format!("layer {layer} of {of}  there already"), true),
        };
        let mut err = std::io::stderr().lock();
        let is_time = self.last.borrow().is_none_or(|last| last.elapsed() >= EVERY);
        // Whether anybody reads this does not matter to what is done.
        let _ = if err.is_terminal() && (is_time || is_step) {
            *self.last.borrow_mut() = Some(Instant::now());
            write!(err, "\r\x1b[K{line}{}", if is_step { "\n" } else { "" })
        } else if is_step {
            writeln!(err, "{line}")
        } else {
            Ok(())
        };
        ControlFlow::Continue(())
    }

    /// Leaves the line that moves.
    pub(super) fn done(&self) {
        let mut err = std::io::stderr().lock();
        if err.is_terminal() && self.last.borrow().is_some() {
            let _ = write!(err, "\r\x1b[K");
        }
    }
}
