//! Waiting for a descriptor, for no longer than said.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Whether a descriptor becomes readable in time. Signals in between do not matter.
pub(crate) fn readable_within(fd: impl AsFd, within: Duration) -> io::Result<bool> {
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result? > 0),
        }
    }
}

/// Microseconds since some moment.
pub(crate) fn elapsed_us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
