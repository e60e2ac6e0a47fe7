//! The hard deadline: one arbiter, on the boot clock (L5).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use serde::{Deserialize, Serialize};
use viv_provider::{Deadline, DeadlineChange};

use crate::durable;

/// On disk before anybody is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    at_boot_ms: u64,
    revision: u64,
}

impl Stored {
    fn now(self) -> Deadline {
        Deadline { remaining_ms: self.at_boot_ms.saturating_sub(now_boot_ms()), revision: self.revision }
    }
}

/// What was kept there, for when who keeps it does not answer.
pub(crate) fn stored_deadline(path: &Path) -> io::Result<Option<Deadline>> {
    durable::read_json(path).map(|stored| stored.map(Stored::now))
}

/// Keeps the deadline, and a timer for it.
pub(super) struct DeadlineKeeper {
    stored: Stored,
    path: PathBuf,
    timer: OwnedFd,
}

/// It has passed; there is no way back.
pub(super) struct Passed;

impl DeadlineKeeper {
    pub(super) fn start(path: PathBuf, lifetime_ms: u64) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let stored = Stored { at_boot_ms: now_boot_ms().saturating_add(lifetime_ms), revision: 1 };
        let keeper = Self { stored, path, timer };
        // Not synced: a power cut ends the instance, and with it the use of this file.
        durable::replace_json_unsynced(&keeper.path, &stored)?;
        keeper.arm()?;
        Ok(keeper)
    }

    /// Readable once the deadline has passed.
    pub(super) fn timer(&self) -> &OwnedFd {
        &self.timer
    }

    pub(super) fn has_passed(&self) -> bool {
        now_boot_ms() >= self.stored.at_boot_ms
    }

    pub(super) fn current(&self) -> Deadline {
        self.stored.now()
    }

    /// Moves it, unless it has passed. There is one thread, so the look and the
    /// move are one step; and once `Passed` was said, nothing moves it again,
    /// because the caller ends the instance then.
    pub(super) fn change(&mut self, change: DeadlineChange) -> io::Result<Result<Deadline, Passed>> {
        let now = now_boot_ms();
        if now >= self.stored.at_boot_ms {
            return Ok(Err(Passed));
        }
        let at_boot_ms = match change {
            DeadlineChange::AtLeastMs(ms) => self.stored.at_boot_ms.max(now.saturating_add(ms)),
            DeadlineChange::ExactlyMs(ms) => now.saturating_add(ms),
        };
        if at_boot_ms != self.stored.at_boot_ms {
            let stored = Stored { at_boot_ms, revision: self.stored.revision + 1 };
            durable::replace_json(&self.path, &stored)?;
            self.stored = stored;
            self.arm()?;
        }
        Ok(Ok(self.current()))
    }

    fn arm(&self) -> io::Result<()> {
        let at = self.stored.at_boot_ms;
        let at = Timespec { tv_sec: (at / 1000).cast_signed(), tv_nsec: (at % 1000 * 1_000_000).cast_signed() };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval: never, it_value: at })?;
        Ok(())
    }
}

/// Time since the machine started, sleep included.
pub(super) fn now_boot_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// For display only.
pub(crate) fn now_wall_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
