//! Whether who refuses is left alone (J7), as it is seen from the other side of the breaker.
//!
//! Less is counted here than a daemon counts: only refusals of calls that each go through its breaker by themselves. So
//! a daemon may leave the provider alone sooner, or for longer, than is asked for here, and never the other way round.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;
use viv_core::SandboxId;

/// Calls each of which is admitted, answered and counted by itself. Looks (`observe`) are too, but for those before a hook.
const COUNTED: [&str; 9] =
    ["create", "restore", "destroy", "freeze", "thaw", "save", "extend", "set_limits", "disk_usage"];

/// Refusals in a row after which nobody is asked, about how many at least, and for how long.
const REFUSALS_MAX: u32 = 5;
const SUBJECTS_MIN: usize = 3;
const ALONE_FOR: Duration = Duration::from_secs(5);

/// What one daemon heard from its provider.
#[derive(Debug, Default)]
pub(super) struct Alone {
    refusals: u32,
    subjects: BTreeSet<SandboxId>,
    until: Option<Instant>,
}

impl Alone {
    /// Whether a call of this name counts.
    pub(super) fn counts(call: &str, looks_too: bool) -> bool {
        COUNTED.contains(&call) || looks_too && call == "observe"
    }

    /// Somebody asks: what is wrong with that.
    pub(super) fn asked(&self, call: &str, about: &SandboxId, now: Instant) -> Option<String> {
        let left = self.until.filter(|until| *until > now)?.duration_since(now);
        let Self { refusals, subjects, .. } = self;
        let told = format!("{call} of {about}, after {refusals} refusals in a row about {} and more", subjects.len());
        Some(format!("{told}: it was to be left alone for another {left:?}"))
    }

    /// It said that it is not there.
    pub(super) fn refused(&mut self, about: &SandboxId, now: Instant) {
        self.refusals += 1;
        self.subjects.insert(about.clone());
        if self.refusals >= REFUSALS_MAX && self.subjects.len() >= SUBJECTS_MIN {
            self.until = Some(now + ALONE_FOR);
        }
    }

    /// It answered, well or not.
    pub(super) fn answered(&mut self) {
        *self = Self::default();
    }
}
