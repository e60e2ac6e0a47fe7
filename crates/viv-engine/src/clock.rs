//! Time as the engine has it.

use std::time::Duration;

use tokio::time::Instant;

/// Wall time that does not jump: what the wall showed at the start, and what has passed since.
///
/// It counts by tokio's clock, so a paused runtime simulates it.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    wall_at_start_ms: u64,
    start: Instant,
}

impl Clock {
    /// A clock that shows this now.
    pub fn showing(wall_ms: u64) -> Self {
        Self { wall_at_start_ms: wall_ms, start: Instant::now() }
    }

    /// Now.
    pub fn now_ms(&self) -> u64 {
        self.wall_at_start_ms + u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// When this time will have come; at once for what has passed.
    pub(crate) fn at(&self, wall_ms: u64) -> Instant {
        self.start + Duration::from_millis(wall_ms.saturating_sub(self.wall_at_start_ms))
    }
}
