//! Doing something in another network namespace: in a child that goes there and ends.
//!
//! The shim itself never leaves the machine's namespace. As an ordinary user
//! it could not come back.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::NetworkError;
use super::at;
use crate::sys::clone::{Forked, close_all_but, die_with, exit_now, fork};
use crate::wait::readable_within;

/// Longest complaint of a child.
const COMPLAINT_BYTES_MAX: u64 = 1024;

/// Runs `work` in a network namespace. `needed` are the descriptors that it uses.
pub(super) fn run_inside(
    step: &'static str,
    namespace: BorrowedFd<'_>,
    needed: &[BorrowedFd<'_>],
    until: Instant,
    work: impl FnOnce() -> io::Result<()>,
) -> Result<(), NetworkError> {
    let (mut said, mut saying) = io::pipe().map_err(at(step))?;
    let parent = rustix::process::getpid();
    let child = match fork(None).map_err(at(step))? {
        Forked::Child => {
            let mut keep = vec![saying.as_fd(), namespace];
            keep.extend(needed);
            close_all_but(&keep);
            if !die_with(parent) {
                exit_now(1);
            }
            match enter(namespace).and_then(|()| work()) {
                Ok(()) => exit_now(0),
                Err(error) => {
                    let _ = saying.write_all(error.to_string().as_bytes());
                    exit_now(1);
                }
            }
        }
        Forked::Parent(child) => child,
    };
    drop(saying);
    let left: Duration = until.saturating_duration_since(Instant::now());
    // Readable with a complaint, or with its end.
    let in_time = readable_within(&said, left).map_err(at(step));
    if !matches!(in_time, Ok(true)) {
        let _ = kill_process(child, Signal::KILL);
    }
    let waited = waitpid(Some(child), WaitOptions::empty()).map_err(io::Error::from).map_err(at(step))?;
    if !in_time? {
        return Err(NetworkError::TimedOut { step });
    }
    match waited {
        Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
        Some(_) | None => {
            let mut what = String::new();
            let _ = said.by_ref().take(COMPLAINT_BYTES_MAX).read_to_string(&mut what);
            Err(NetworkError::Inside { step, what })
        }
    }
}

/// Goes to a network namespace, for good.
pub(super) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}
