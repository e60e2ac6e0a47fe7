//! The kernel's tables that no cgroup bounds.
//!
//! Watches of files are counted for each user namespace and, above it, for the
//! user who made that: for all sandboxes together. One that takes all that
//! there are would leave none to its neighbours, nor to the machine's root. So
//! each gets a part, set in its own namespace, where only the kernel's limits
//! of the namespace itself can be lowered.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::sys::clone::{Forked, exit_now, fork};

/// Where the kernel keeps the limits of the caller's user namespace.
const LIMITS: &str = "/proc/sys/user";

/// What is bounded.
const TABLES: [&str; 4] = ["max_inotify_instances", "max_inotify_watches", "max_fanotify_groups", "max_fanotify_marks"];

/// The part of the machine's that one sandbox may have.
const SHARE: u64 = 4;

/// Bounds what the sandbox of this process takes. Blocks for as long as a fork takes.
pub(super) fn bound(init: Pid) -> io::Result<()> {
    let namespace = File::open(format!("/proc/{}/ns/user", init.as_raw_nonzero()))?;
    let mut bounds = Vec::new();
    for table in TABLES {
        let path = Path::new(LIMITS).join(table);
        // A kernel that does not count it does not bound it either.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let most: u64 = text.trim().parse().map_err(io::Error::other)?;
        bounds.push((path, (most / SHARE).max(1).to_string()));
    }
    // A namespace is entered for good, so somebody else does it.
    match fork(None)? {
        Forked::Child => {
            let entered = move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::User));
            let written = entered.is_ok() && bounds.iter().all(|(path, bound)| fs::write(path, bound).is_ok());
            exit_now(i32::from(!written));
        }
        Forked::Parent(child) => match waitpid(Some(child), WaitOptions::empty())? {
            Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
            _ => Err(io::Error::other("the limits of its user namespace cannot be set")),
        },
    }
}
