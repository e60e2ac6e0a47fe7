//! Keeping an execution together where there are neither cgroups nor subreapers: under gVisor.
//!
//! Every execution gets a supplementary group of its own. Children inherit it,
//! and nobody can put it down without a capability that no workload has, so
//! whoever is in the group belongs to the execution, wherever it went. Batch systems
//! have told jobs apart like this for decades.
//!
//! The group owns no file and no id file knows it; inside it shows as one more number in `id`.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Gid, Pid};

use crate::exec::cgroup;

/// The first of these groups: beyond what id files and mappings have.
const FIRST: u32 = 0x4000_0000;

/// How many there are: more than commands are started in the life of a sandbox.
const COUNT: u32 = 0x3fff_ffff;

/// Longest description of a process; its groups are the longest part of it.
const STATUS_BYTES_MAX: usize = 1 << 20;

/// A group that only the processes of one execution are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(u32);

impl Tag {
    /// One that nobody has had.
    pub(crate) fn new() -> io::Result<Self> {
        static GIVEN: AtomicU32 = AtomicU32::new(0);
        let next = |given: u32| (given < COUNT).then_some(given + 1);
        let given = GIVEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        given.map(|given| Self(FIRST + given)).map_err(|_| io::Error::other("all groups for executions were given"))
    }

    pub(crate) fn gid(self) -> Gid {
        Gid::from_raw(self.0)
    }

    /// Whether a process is in the group. One that ended is not.
    pub(crate) fn is_on(self, pid: Pid) -> bool {
        let status = std::fs::File::open(format!("/proc/{}/status", pid.as_raw_nonzero()))
            .and_then(|file| cgroup::read_text(file.as_fd(), STATUS_BYTES_MAX));
        status.is_ok_and(|status| self.is_in(&status))
    }

    fn is_in(self, status: &str) -> bool {
        // A name with a line break can make more such lines, and cannot take the real one away.
        let groups = status.lines().filter_map(|line| line.strip_prefix("Groups:"));
        groups.flat_map(str::split_ascii_whitespace).any(|group| group.parse() == Ok(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_executions_share_a_group() {
        let (one, other) = (Tag::new().unwrap(), Tag::new().unwrap());
        assert_ne!(one, other);
        assert!(one.0 >= FIRST && other.0 >= FIRST);
    }

    #[test]
    fn groups_are_found_in_a_status() {
        let tag = Tag(FIRST + 7);
        let status =
            |groups: &str| format!("Name:\tGroups: {}\nGid:\t0 0 0 0\nGroups:\t{groups}\nVmSize: 1 kB\n", FIRST + 7);
        assert!(tag.is_in(&status(&format!("4 {} 9 ", FIRST + 7))));
        for groups in ["", " ", "4 27", &format!("{}7", FIRST + 7), &format!("{}", FIRST + 8)] {
            assert!(!tag.is_in(&status(groups)), "{groups:?}");
        }
        assert!(!tag.is_in("Name:\tx\n"));
        let forged = format!("Name:\tx\nGroups:\t5\nGroups:\t{}\n", FIRST + 7);
        assert!(tag.is_in(&forged), "a line before the real one hides it");
    }
}
